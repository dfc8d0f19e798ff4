"""Something new that gets its name when it is complete, and what is left where it never did.

It is made in a directory of a temporary name, which its process keeps locked. So the next process
that makes the same thing knows which of those directories no process works on, and removes them.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress

from holdfast.errors import StorageError
from holdfast.storage.reading import is_locked, locking
from holdfast.storage.storage_protocol import Storage

_TEMPORARY = re.compile(r"\.tmp-[0-9a-f]{8}-(.*)", re.DOTALL)
_TAIL_NBYTES = 180
STARTING_S = 0.5
"""Seconds that a process may take from a directory that it makes to its lock on it."""


@contextmanager
def unnamed(storage: Storage, name: str, *, is_dir: bool) -> Iterator[str]:
    """Yield the path where a file or directory is to be made; after the body it gets its name.

    A directory is there; a file is for the body to create, and to make durable. If the body
    fails, or is interrupted, nothing is left.

    Raises:
        StorageError: The name is taken, or the storage refuses.
    """
    temporary = f".tmp-{secrets.token_hex(4)}-{_tail(name)}"
    try:
        storage.make_dir(temporary, durable=False)
        with locking(storage, temporary):
            # A file keeps its name inside: a reader may go by the suffix.
            path = temporary if is_dir else f"{temporary}/{name}"
            yield path
            try:
                storage.rename_dir(path, name)
            except StorageError as error:
                _take_back(storage, path, name, error)
                raise
    except BaseException:
        _discard(storage, temporary)
        raise
    if not is_dir:
        _discard(storage, temporary)


def remove_unnamed(storage: Storage, names: Collection[str]) -> list[str]:
    """Remove what killed processes have left of things with these names; return what it was.

    Only where the kernel knows that no process has it locked: not on a file system of several
    hosts, and not in a bucket. `holdfast repair` removes those under a root of checkpoints.

    Cost: one listing of the root.
    """
    if is_locked(storage, "") is None:
        return []
    tails = {_tail(name) for name in names}
    removed = []
    for each in storage.list(""):
        match = _TEMPORARY.fullmatch(each)
        if match is None or match.group(1) not in tails or not storage.is_dir(each):
            continue
        with suppress(StorageError):  # another process may remove it, too
            if is_locked(storage, each) is False and storage.age_s(each) > STARTING_S:
                storage.remove_tree(each, durable=False)
                removed.append(storage.describe(each))
    return removed


def _take_back(storage: Storage, path: str, name: str, cause: StorageError) -> None:
    """Undo a rename that was made and not made durable; StorageError if it cannot be undone.

    Otherwise what has failed would be there, and after a crash of the machine gone again.
    """
    if storage.exists(path) or not storage.exists(name):
        return
    with suppress(StorageError):
        storage.rename_dir(name, path, durable=False)
    if not storage.exists(path):
        raise StorageError(
            f"{storage.describe(name)} is in place and complete, but it may be lost if the machine "
            f"stops: {cause}. Check the storage, and make it again"
        ) from cause


def _discard(storage: Storage, temporary: str) -> None:
    with suppress(StorageError):
        storage.remove_tree(temporary, durable=False)


def _tail(name: str) -> str:
    """Return the end of a name that leaves room for what is put in front of it."""
    return name.encode("utf-8", "surrogateescape")[-_TAIL_NBYTES:].decode("utf-8", "ignore")
