"""Marks of who reads a checkpoint, so that nobody removes it meanwhile.

Reader and remover each put down a small file in `.reading/` first and look for the other's then,
so that of two at the same time at least one sees the other: the reader waits until the remover has
gone on or given up, the remover gives up. Files and listings only, no locks, and each side has
written to the directory before it lists it, which makes a client of a network file system look
again. A mark is renewed while its owner lives and expires after it, by the storage's own clock.
Marks need not survive the machine: neither do those who put them down.

Who replaces a checkpoint puts down no mark: see `versions`.
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

READING_DIR = ".reading"
DEFAULT_LIFE_S = 600.0
"""A mark that was not renewed for so long counts for nothing."""

_MARK = re.compile(r"(iter_[0-9]{7,18})\.(read|remove)-[0-9a-f]{16}", re.ASCII)
_MAX_NBYTES = 4096
_RENEWALS_PER_LIFE = 8
_POLL_S = 0.05

Kind = Literal["read", "remove"]


class _Mark(msgspec.Struct, frozen=True, kw_only=True):
    """`save_id`: of the version that is read, once that is known."""

    host: str
    pid: int
    renewed: float
    life_s: float
    save_id: str | None = None


@dataclass(slots=True, kw_only=True)
class Reading:
    """A mark put down; `problem` says why there is none (a read-only storage, say)."""

    storage: Storage
    directory: str
    path: str = ""
    life_s: float = DEFAULT_LIFE_S
    problem: str | None = None
    save_id: str | None = None

    def of_version(self, save_id: str) -> None:
        """Say which version is read, so that no other one is kept for this reader."""
        self.save_id = save_id
        if self.problem is None:
            with suppress(StorageError):
                self.renew()

    def renew(self) -> None:
        """Write the mark, or write it again; StorageError when that cannot be."""
        mark = _Mark(
            host=socket.gethostname(),
            pid=os.getpid(),
            renewed=time.time(),
            life_s=self.life_s,
            save_id=self.save_id,
        )
        self.storage.make_dir(READING_DIR, durable=False)
        self.storage.replace_file(self.path, msgspec.json.encode(mark), durable=False)


@contextmanager
def mark_reading(
    storage: Storage,
    directory: str,
    *,
    life_s: float = DEFAULT_LIFE_S,
    wait_s: float = 30.0,
) -> Iterator[Reading]:
    """While this is open, retention leaves the checkpoint in `directory` alone, on every machine.

    Put it around opening and reading; one process of a job is enough. A place that cannot be
    written to is read without a mark, as the result says. Waits up to `wait_s` for somebody who is
    about to remove the checkpoint; raises StorageError when it is gone then, or still threatened.
    Cost: one small file, written anew every `life_s / 8` seconds by a thread.
    """
    reading = Reading(storage=storage, directory=directory, life_s=life_s)
    if parse_step_dir(directory) is None:
        reading.problem = f"{directory!r} is not the name of a step"
        yield reading
        return
    reading.path = _new_path(directory, "read")
    try:
        reading.renew()
    except StorageError as error:
        reading.problem = str(error)
    stop = threading.Event()
    renewer = threading.Thread(
        target=_renew, args=(reading, stop), name="holdfast-reading", daemon=True
    )
    try:
        _await_removers(storage, directory, wait_s)
        if reading.problem is None:
            renewer.start()
        yield reading
    finally:
        stop.set()
        if reading.problem is None:
            if renewer.ident is not None:
                renewer.join()
            with suppress(StorageError):
                storage.remove_tree(reading.path)


@contextmanager
def mark_removing(
    storage: Storage, directory: str, *, life_s: float = DEFAULT_LIFE_S
) -> Iterator[list[str]]:
    """Say that a checkpoint is about to be removed; gives those who read it, in words.

    Only when the list is empty may it be removed, before this is closed. Raises StorageError when
    the mark cannot be put down.
    """
    path = _new_path(directory, "remove")
    Reading(storage=storage, directory=directory, path=path, life_s=life_s).renew()
    try:
        yield readers_of(storage, directory)
    finally:
        with suppress(StorageError):
            storage.remove_tree(path)


def readers_of(storage: Storage, directory: str, *, save_id: str | None = None) -> list[str]:
    """Who reads a checkpoint now, each in words; marks that have expired are cleared away.

    With `save_id`, only who reads that version, or has not yet said which.
    """
    return _live(storage, directory, "read", save_id)


def _new_path(directory: str, kind: Kind) -> str:
    return f"{READING_DIR}/{directory}.{kind}-{secrets.token_hex(8)}"


def _renew(reading: Reading, stop: threading.Event) -> None:
    while not stop.wait(reading.life_s / _RENEWALS_PER_LIFE):
        with suppress(StorageError):
            reading.renew()


def _await_removers(storage: Storage, directory: str, wait_s: float) -> None:
    deadline = time.monotonic() + wait_s
    while removers := _live(storage, directory, "remove"):
        place = storage.describe(directory)
        if not storage.exists(directory):
            raise StorageError(f"{place} has just been removed by {removers[0]}: load another step")
        if time.monotonic() > deadline:
            raise StorageError(
                f"{place} is about to be removed by {removers[0]}: load another step, or "
                f"stop that process and try again after {DEFAULT_LIFE_S:.0f} s"
            )
        time.sleep(_POLL_S)


def quiet_s(storage: Storage, path: str, *, renewed: float | None) -> float:
    """Seconds since a file that is renewed while its owner lives was renewed last.

    By the storage's clock, or by the owner's (`renewed`: the time in the file), whichever is less. A
    time that has not come yet says nothing, so that no clock makes the dead look alive for long.
    """
    found = storage.age_s(path)
    by_owner = time.time() - renewed if renewed is not None else found
    return min(found, by_owner) if by_owner >= 0 else found


def _live(storage: Storage, directory: str, kind: Kind, save_id: str | None = None) -> list[str]:
    """Owners of the marks of one kind that have not expired."""
    if not storage.is_dir(READING_DIR):
        return []
    owners = []
    for name in storage.list(READING_DIR):
        match = _MARK.fullmatch(name)
        if match is None or match[1] != directory or match[2] != kind:
            continue
        owner = _owner(storage, f"{READING_DIR}/{name}", save_id)
        if owner is not None:
            owners.append(owner)
    return owners


def _owner(storage: Storage, path: str, save_id: str | None) -> str | None:
    """Whose mark it is, or None when it has gone, has expired, or is of another version."""
    try:
        data = storage.read(path, nbytes=min(storage.size(path), _MAX_NBYTES))
    except StorageError:
        if not storage.exists(path):
            return None
        raise
    try:
        mark = msgspec.json.decode(data, type=_Mark)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return f"somebody unknown ({storage.describe(path)} cannot be understood; remove it)"
    try:
        expired = quiet_s(storage, path, renewed=mark.renewed) >= mark.life_s
    except StorageError:
        expired = not storage.exists(path)
    if expired:
        with suppress(StorageError):
            storage.remove_tree(path)
        return None
    if None not in (save_id, mark.save_id) and mark.save_id != save_id:
        return None
    return f"process {mark.pid} on {mark.host}"
