"""Versions of one step: a step may be saved again while another process reads the version before.

A version is identified by the bytes of its manifest. A reader pins the directory that it opened,
and every rank of it proves that it has opened the same version. A save that replaces a version
gives the final name to the new one first, looks for leases of readers then, and keeps what is
still read under a name of its own (`.replaced-…`). A reader takes its lease before it opens
anything. So either its lease is seen, and what it reads is kept, or it came later, and opened the
new version.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from holdfast.errors import StorageError
from holdfast.format.leases import readers_of
from holdfast.format.names import (
    MANIFEST,
    parse_replaced_dir,
    parse_saving_dir,
    parse_step_dir,
    replaced_dir,
    step_dir,
)
from holdfast.storage import Storage

_PEEK_NBYTES = 512
_TAIL_NBYTES = 48
_NUM_LOOKS = 5


@dataclass(frozen=True, slots=True)
class Identity:
    """Identifies a version: length and end of its manifest, that is, its digest."""

    nbytes: int
    tail: bytes

    @classmethod
    def of(cls, manifest: bytes) -> Identity:
        """The identity of the version with this manifest."""
        return cls(len(manifest), manifest[-_TAIL_NBYTES:])

    def is_of(self, storage: Storage, directory: str) -> bool:
        """Whether this version is in that directory; one small read."""
        path = f"{directory}/{MANIFEST}" if directory else MANIFEST
        try:
            if storage.size(path) != self.nbytes:
                return False
            start = self.nbytes - len(self.tail)
            return storage.read(path, start=start, nbytes=len(self.tail)) == self.tail
        except StorageError:
            return False


@contextmanager
def pin_version(
    storage: Storage, directory: str, identity: Identity
) -> Iterator[tuple[Storage, str]]:
    """Pin one version of a checkpoint, be it replaced or not: a storage, and where in it.

    Looked for at its final name and among versions that are kept for their readers.

    Raises:
        StorageError: It is nowhere: it has been replaced or removed.
    """
    for _ in range(_NUM_LOOKS):
        for place in (directory, *_asides(storage, directory)):
            with ExitStack() as stack:
                try:
                    view = stack.enter_context(storage.pin(place))
                except StorageError:
                    continue
                if identity.is_of(view, place):
                    yield view, place
                    return
    raise StorageError(
        f"{storage.describe(directory)} has been replaced or removed since its manifest was read: "
        f"read it again"
    )


def _asides(storage: Storage, directory: str) -> Iterator[str]:
    """Where versions of a step may be that no longer have their final name."""
    step = parse_step_dir(directory)
    if step is None:
        return
    for name in storage.list(""):
        parsed = parse_saving_dir(name)  # for an instant, what was replaced has this name
        if parse_replaced_dir(name) == step or (parsed is not None and parsed[0] == step):
            yield name


def save_id_of(storage: Storage, directory: str) -> str | None:
    """The save id at the beginning of a committed manifest, or None; reads half a kilobyte."""
    path = f"{directory}/{MANIFEST}" if directory else MANIFEST
    try:
        if not storage.exists(path):
            return None
        head = storage.read(path, nbytes=min(storage.size(path), _PEEK_NBYTES))
    except StorageError:
        return None
    _, found, after = head.partition(b'"save_id":"')
    return after.partition(b'"')[0].decode(errors="replace") if found else None


def retire(storage: Storage, directory: str, step: int) -> str:
    """Remove a version that no longer has its final name, or keep it for its readers.

    What has its name now must be durable. Safe to repeat at any time.

    Returns:
        Who reads it, in words; empty when it was removed.

    Raises:
        StorageError: It can be neither removed nor kept.
    """
    readers = readers_of(storage, step_dir(step), save_id=save_id_of(storage, directory))
    if not readers:
        # Not durable: what a crash brings back is removed again by the next repair.
        storage.remove_tree(directory, durable=False)
        return ""
    if parse_replaced_dir(directory) is None:
        storage.rename_dir(directory, replaced_dir(step, secrets.token_hex(6)), durable=False)
    return ", ".join(readers)


def retire_replaced(storage: Storage) -> None:
    """Remove the versions whose readers are done; leaves those that cannot be removed."""
    for name in storage.list(""):
        step = parse_replaced_dir(name)
        if step is not None:
            try:
                retire(storage, name, step)
            except StorageError:
                continue
