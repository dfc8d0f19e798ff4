"""Versions of one step: opening one, reading its records, and keeping it while it is read.

A version is identified by the bytes of its manifest. A reader pins the directory that it opened,
and every rank of it proves that it has opened the same version. A save that replaces a version
gives the final name to the new one first, looks for leases of readers then, and keeps what is
still read under a name of its own (`.replaced-…`). A reader takes its lease before it opens
anything. So either its lease is seen, and what it reads is kept, or it came later, and opened the
new version.

A lease says who reads a checkpoint or is about to remove it, so that no reader loses its files.
Reader and remover each write a small file in `.reading/` first and look for the other's then, so
that of two at the same time at least one sees the other: the reader waits until the remover is
done or gives up, the remover gives up. Files and listings only, no locks, and each side has
written to the directory before it lists it, which makes a client of a network file system look
again. A lease is renewed while its owner lives and expires after it, by the storage's own clock.
Leases need not survive the machine: neither do their owners.
A save that replaces a checkpoint takes no lease.
"""

from __future__ import annotations

import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Literal

import msgspec

from holdfast.errors import CorruptionError, StorageError
from holdfast.format.manifest import MAX_MANIFEST_NBYTES, Manifest, decode_manifest
from holdfast.format.names import (
    INDEX,
    MANIFEST,
    parse_replaced_dir,
    parse_saving_dir,
    parse_step_dir,
    replaced_dir,
    step_dir,
)
from holdfast.storage import Storage

LEASES_DIR = ".reading"
DEFAULT_LEASE_S = 600.0
"""A lease that was not renewed for so long has expired."""

_LEASE_NAME = re.compile(r"(iter_[0-9]{7,18})\.(read|remove)-[0-9a-f]{16}", re.ASCII)
_MAX_LEASE_NBYTES = 4096
_RENEWALS_PER_LEASE = 8
_POLL_S = 0.05

Kind = Literal["read", "remove"]
_PEEK_NBYTES = 512
_TAIL_NBYTES = 48
_NUM_LOOKS = 5


@dataclass(frozen=True, slots=True)
class Records:
    """The two records of a checkpoint as stored; enough to open it elsewhere without reading."""

    manifest: bytes
    index: bytes


def read_manifest(storage: Storage, directory: str) -> tuple[bytes, Manifest]:
    """The manifest of a checkpoint, as bytes and decoded; its digest is checked. One read.

    Raises:
        StorageError: It is not a committed checkpoint, or cannot be read.
        CorruptionError: The manifest is damaged.
    """
    path = join_path(directory, MANIFEST)
    if not storage.exists(path):
        raise StorageError(
            f"{storage.describe(directory)} is not a committed checkpoint: it has no {MANIFEST}"
        )
    place = storage.describe(path)
    if storage.size(path) > MAX_MANIFEST_NBYTES:
        raise CorruptionError(f"{place}: larger than the limit of {MAX_MANIFEST_NBYTES} bytes")
    data = storage.read(path)
    return data, decode_manifest(data, place=place)


def read_records(storage: Storage, directory: str) -> tuple[Records, Manifest]:
    """Read manifest and index of a checkpoint; the manifest is proven, the index is not.

    Args:
        storage: One in which the directory is pinned, so that both are of one version.
        directory: Its name there, "" for the root.

    Raises:
        StorageError: It is not a committed checkpoint, or cannot be read.
        CorruptionError: The manifest is damaged, or the index is missing or of another size.
    """
    data, manifest = read_manifest(storage, directory)
    return Records(data, read_index(storage, directory, manifest)), manifest


def read_index(storage: Storage, directory: str, manifest: Manifest) -> bytes:
    """The index, as many bytes as the manifest states; their digest is not checked. One read.

    Raises:
        StorageError: It cannot be read.
        CorruptionError: It is missing or of another size.
    """
    path = join_path(directory, INDEX)
    place, nbytes = storage.describe(path), manifest.index.nbytes
    if not storage.exists(path):
        raise CorruptionError(f"{place}: missing, though the manifest lists it")
    if storage.size(path) != nbytes:
        raise CorruptionError(
            f"{place}: has {storage.size(path)} bytes, the manifest states {nbytes}"
        )
    return storage.read(path)


def join_path(directory: str, name: str) -> str:
    """The path of a file of a checkpoint, whose directory may be the storage's root."""
    return f"{directory}/{name}" if directory else name


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
        path = join_path(directory, MANIFEST)
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
    path = join_path(directory, MANIFEST)
    try:
        if not storage.exists(path):
            return None
        head = storage.read(path, nbytes=min(storage.size(path), _PEEK_NBYTES))
    except StorageError:
        return None
    _, marker, after = head.partition(b'"save_id":"')
    return after.partition(b'"')[0].decode(errors="replace") if marker else None


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
    if not storage.exists(LEASES_DIR):
        return []
    owners = []
    for name in storage.list(LEASES_DIR):
        match = _LEASE_NAME.fullmatch(name)
        if match is None or match[1] != directory or match[2] != kind:
            continue
        owner = _owner(storage, f"{LEASES_DIR}/{name}", save_id)
        if owner is not None:
            owners.append(owner)
    return owners


def _owner(storage: Storage, path: str, save_id: str | None) -> str | None:
    """Whose lease it is, or None when it is gone, has expired, or is of another version."""
    try:
        data = storage.read(path, nbytes=min(storage.size(path), _MAX_LEASE_NBYTES))
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
