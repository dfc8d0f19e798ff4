"""The identity of a root: a small file in it, by which a run knows its root again.

A path is not an identity. If a volume is unmounted, the directory underneath appears under the same
path, and each rank of a job may see another volume there. So the first save of a run writes a
random id into the root, once, and each later save and load of any rank looks for the same id. A
copy of a root has its id, too; `PosixStorage` distinguishes the two by device and inode for as long
as the process runs.
"""

from __future__ import annotations

import re
import secrets
import time

from holdfast.errors import StorageError
from holdfast.format.names import ROOT_ID, require_root_of_checkpoints
from holdfast.storage import Storage
from holdfast.storage.reading import is_absence, read_at_most

_ID = re.compile(rb"([0-9a-f]{32})\n", re.ASCII)
_NBYTES = 33
_SETTLE_S = 5.0
"""Seconds that another rank's root may need to show the id that the coordinator has written."""
_PAUSE_S = 0.05
NOT_MOUNTED = (
    "The volume is not mounted on some hosts, or another one is. Nothing is saved; give all ranks "
    "one root"
)


class RootIdentity:
    """The root as one rank of a run knows it.

    Attributes:
        id: The id that it has, or was given; empty for a root that has none yet.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self.id = ""

    def check(self, *, learns: bool = True) -> None:
        """Raise StorageError if this is another root than the one that the run has used so far.

        Or if it is one checkpoint and not a root: a run would find nothing there, start afresh,
        and save into the checkpoint.

        Writes nothing. Cost: one small read; once only, where a place cannot become another one.
        There an id is only for those who save: with `learns=False`, nothing is read.
        """
        if (self.id or not learns) and getattr(self._storage, "is_one_place", False):
            return
        present = read_root_id(self._storage)
        if self.id and present != self.id:
            raise _other_root(self._storage, self.id, present)
        if not present:
            require_root_of_checkpoints(self._storage)
        self.id = present

    def expect(self, root_id: str) -> None:
        """Raise StorageError unless the root has the id of the other ranks' root; see `check`."""
        require_root(self._storage, root_id)
        self.id = root_id

    def write(self, root_id: str) -> None:
        """Give a root its id; StorageError if it has got another one meanwhile.

        Nothing is synced: if a power loss takes the file, the next run gives the root another id.
        """
        storage = self._storage
        try:
            with storage.create(ROOT_ID, nbytes=_NBYTES) as sink:
                sink.write_at(0, memoryview(f"{root_id}\n".encode()))
        except StorageError:
            if not storage.exists(ROOT_ID):
                raise
            # Shorter than the other ranks wait for what is written here.
            present = _settled(storage, "", limit_s=_SETTLE_S / 2)
            if present not in ("", root_id):
                raise _other_root(storage, root_id, present) from None
            # The process that created it died before its content: no run has ever known it.
            if not present:
                storage.replace_file(ROOT_ID, f"{root_id}\n".encode())
        self.id = root_id


def new_root_id() -> str:
    """Return an id for a root that has none."""
    return secrets.token_hex(16)


def read_root_id(storage: Storage) -> str:
    """Return the id of a root; empty if it has none, or does not exist."""
    try:
        data = _read(storage)
    except StorageError as error:
        if is_absence(error) or not storage.exists(ROOT_ID):
            return ""
        data = _read(storage)  # another rank may have created it between the two
    match = _ID.fullmatch(data)
    return match[1].decode() if match else ""


def _read(storage: Storage) -> bytes:
    return read_at_most(storage, ROOT_ID, _NBYTES + 1)


def require_root(storage: Storage, root_id: str) -> None:
    """Raise StorageError unless the root has this id; empty for any.

    Another host may see it some seconds after the coordinator has written it.
    """
    present = read_root_id(storage) if root_id else ""
    if present != root_id and _settled(storage, root_id, limit_s=_SETTLE_S) != root_id:
        raise _other_root(storage, root_id, read_root_id(storage))


def is_other_root(storage: Storage, root_id: str) -> bool:
    """Return True if the root is seen to have another id than this one, or none; empty for any."""
    if not root_id or getattr(storage, "is_one_place", False):
        return False
    try:
        return read_root_id(storage) != root_id
    except StorageError:
        return False


def _settled(storage: Storage, root_id: str, *, limit_s: float) -> str:
    """Wait for this id, or for any; return the one that is there then."""
    deadline = time.monotonic() + limit_s
    while True:
        try:
            storage.list("")  # a network file system's client asks its server
        except StorageError as error:
            if not is_absence(error):  # a root that was just made may be seen late, too
                raise
        present = read_root_id(storage)
        if (present and root_id in ("", present)) or time.monotonic() > deadline:
            return present
        time.sleep(_PAUSE_S)


def _other_root(storage: Storage, expected: str, present: str) -> StorageError:
    """Return the error for a root that is not the one expected."""
    has = f"it has the id {present}" if present else f"it has no {ROOT_ID}"
    return StorageError(
        f"{storage.describe('')} is not the root of this run: {has}, and not the id {expected}. "
        f"Its volume was unmounted, or is not mounted on this host, or the directory was replaced. "
        f"Nothing is saved there; bring the former one back, or start the run again"
    )
