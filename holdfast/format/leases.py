"""Leases of checkpoints: who reads one or is about to remove it, so that no reader loses its files.

Reader and remover each write a small file in `.reading/` first and look for the other's then, so
that of two at the same time at least one sees the other: the reader waits until the remover is
done or gives up, the remover gives up. Files and listings only, no locks, and each side has
written to the directory before it lists it, which makes a client of a network file system look
again. A lease is renewed while its owner lives and expires after it, by the storage's own clock.
Leases need not survive the machine: neither do their owners.

A save that replaces a checkpoint takes no lease: see `versions`.
"""

from __future__ import annotations

import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Literal

import msgspec

from holdfast.errors import StorageError
from holdfast.format.names import parse_step_dir
from holdfast.storage import Storage

LEASES_DIR = ".reading"
DEFAULT_LEASE_S = 600.0
"""A lease that was not renewed for so long has expired."""

_NAME = re.compile(r"(iter_[0-9]{7,18})\.(read|remove)-[0-9a-f]{16}", re.ASCII)
_MAX_NBYTES = 4096
_RENEWALS_PER_LEASE = 8
_POLL_S = 0.05

Kind = Literal["read", "remove"]


class _LeaseFile(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a lease's file; `save_id`: of the version that is read, once it is known."""

    host: str
    pid: int
    renewed: float
    life_s: float
    save_id: str | None = None


@dataclass(slots=True, kw_only=True)
class Lease:
    """A lease of one checkpoint, held by this process."""

    storage: Storage
    directory: str
    path: str = ""
    life_s: float = DEFAULT_LEASE_S
    problem: str | None = None
    """Why there is none after all, on a read-only storage, say; None where it is held."""
    save_id: str | None = None

    def set_version(self, save_id: str) -> None:
        """State which version is read, so that no other one is kept for this reader."""
        self.save_id = save_id
        if self.problem is None:
            with suppress(StorageError):
                self.renew()

    def renew(self) -> None:
        """Write the lease's file, or write it again; StorageError when that cannot be."""
        content = _LeaseFile(
            host=socket.gethostname(),
            pid=os.getpid(),
            renewed=time.time(),
            life_s=self.life_s,
            save_id=self.save_id,
        )
        self.storage.make_dir(LEASES_DIR, durable=False)
        self.storage.replace_file(self.path, msgspec.json.encode(content), durable=False)


@contextmanager
def read_lease(
    storage: Storage,
    directory: str,
    *,
    life_s: float = DEFAULT_LEASE_S,
    wait_s: float = 30.0,
) -> Iterator[Lease]:
    """While this is open, retention leaves the checkpoint in `directory` alone, on every machine.

    Put it around opening and reading; one process of a job is enough. A place that cannot be
    written to is read without a lease, as the result's `problem` says.

    Args:
        storage: Where the checkpoint is.
        directory: Its name there; anything but the name of a step is read without a lease.
        life_s: Seconds after which the lease expires when its owner no longer renews it.
        wait_s: How long to wait for a process that is about to remove the checkpoint.

    Raises:
        StorageError: The checkpoint has been removed, or still may be after `wait_s`.

    Cost: one small file, written again every `life_s / 8` seconds by a thread.
    """
    lease = Lease(storage=storage, directory=directory, life_s=life_s)
    if parse_step_dir(directory) is None:
        lease.problem = f"{directory!r} is not the name of a step"
        yield lease
        return
    lease.path = _new_path(directory, "read")
    try:
        lease.renew()
    except StorageError as error:
        lease.problem = str(error)
    stop = threading.Event()
    renewer = threading.Thread(
        target=_keep_renewed, args=(lease, stop), name="holdfast-lease", daemon=True
    )
    try:
        _await_removers(storage, directory, wait_s)
        if lease.problem is None:
            renewer.start()
        yield lease
    finally:
        stop.set()
        if lease.problem is None:
            if renewer.ident is not None:
                renewer.join()
            with suppress(StorageError):
                storage.remove_tree(lease.path)


@contextmanager
def announce_removal(
    storage: Storage, directory: str, *, life_s: float = DEFAULT_LEASE_S
) -> Iterator[list[str]]:
    """Announce that a checkpoint is about to be removed; gives its readers, in words.

    Only when the list is empty may it be removed, before this is closed. Raises StorageError when
    the announcement cannot be written.
    """
    path = _new_path(directory, "remove")
    Lease(storage=storage, directory=directory, path=path, life_s=life_s).renew()
    try:
        yield readers_of(storage, directory)
    finally:
        with suppress(StorageError):
            storage.remove_tree(path)


def readers_of(storage: Storage, directory: str, *, save_id: str | None = None) -> list[str]:
    """Who reads a checkpoint now, each in words; expired leases are removed.

    With `save_id`, only readers of that version, and those that have not yet stated theirs.
    """
    return _owners(storage, directory, "read", save_id)


def renewed_ago_s(storage: Storage, path: str, *, stamp: float | None) -> float:
    """Seconds since a file that its living owner renews was last renewed.

    By the storage's clock, or by the owner's (`stamp`: the time in the file), whichever says less.
    A time in the future says nothing, so that no clock makes the dead look alive for long.
    """
    age_s = storage.age_s(path)
    by_owner_s = time.time() - stamp if stamp is not None else age_s
    return min(age_s, by_owner_s) if by_owner_s >= 0 else age_s


def _new_path(directory: str, kind: Kind) -> str:
    return f"{LEASES_DIR}/{directory}.{kind}-{secrets.token_hex(8)}"


def _keep_renewed(lease: Lease, stop: threading.Event) -> None:
    while not stop.wait(lease.life_s / _RENEWALS_PER_LEASE):
        with suppress(StorageError):
            lease.renew()


def _await_removers(storage: Storage, directory: str, wait_s: float) -> None:
    deadline = time.monotonic() + wait_s
    while removers := _owners(storage, directory, "remove"):
        place = storage.describe(directory)
        if not storage.exists(directory):
            raise StorageError(f"{place} has just been removed by {removers[0]}: load another step")
        if time.monotonic() > deadline:
            raise StorageError(
                f"{place} is about to be removed by {removers[0]}: load another step, or "
                f"stop that process and try again after {DEFAULT_LEASE_S:.0f} s"
            )
        time.sleep(_POLL_S)


def _owners(storage: Storage, directory: str, kind: Kind, save_id: str | None = None) -> list[str]:
    """Owners of the leases of one kind that have not expired."""
    if not storage.is_dir(LEASES_DIR):
        return []
    owners = []
    for name in storage.list(LEASES_DIR):
        match = _NAME.fullmatch(name)
        if match is None or match[1] != directory or match[2] != kind:
            continue
        owner = _owner(storage, f"{LEASES_DIR}/{name}", save_id)
        if owner is not None:
            owners.append(owner)
    return owners


def _owner(storage: Storage, path: str, save_id: str | None) -> str | None:
    """Whose lease it is, or None when it is gone, has expired, or is of another version."""
    try:
        data = storage.read(path, nbytes=min(storage.size(path), _MAX_NBYTES))
    except StorageError:
        if not storage.exists(path):
            return None
        raise
    try:
        content = msgspec.json.decode(data, type=_LeaseFile)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return f"an unknown process ({storage.describe(path)} cannot be read; remove it)"
    try:
        is_expired = renewed_ago_s(storage, path, stamp=content.renewed) >= content.life_s
    except StorageError:
        is_expired = not storage.exists(path)
    if is_expired:
        with suppress(StorageError):
            storage.remove_tree(path)
        return None
    if None not in (save_id, content.save_id) and content.save_id != save_id:
        return None
    return f"process {content.pid} on {content.host}"
