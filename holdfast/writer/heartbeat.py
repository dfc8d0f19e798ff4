"""Signs that the processes of a save live, so that nobody takes it for abandoned.

A save that lasts is announced by a small file for each of its ranks among the marks of readers,
outside of its directory: that may not be there yet, and becomes the checkpoint.
"""

from __future__ import annotations

import re
import threading
import time
from contextlib import suppress
from types import TracebackType

from holdfast.errors import StorageError
from holdfast.format.leases import DEFAULT_LEASE_S, LEASES_DIR, renewed_ago_s
from holdfast.format.names import parse_saving_dir, step_dir, unclaimed
from holdfast.storage import Storage
from holdfast.writer.records import ALIVE_FILE

HEARTBEAT_S = 2.0
_BEAT = re.compile(r"iter_[0-9]{7,18}\.save-([0-9A-Za-z_]{1,64})-[0-9]{5,}", re.ASCII)
_NAMED_NBYTES = 64


class Heartbeat:
    """A context manager: while it is open, a thread renews this rank's sign every two seconds.

    `directory`: of the save; `position`: of the rank in the plan. Nothing is written in the first
    two seconds, in which the directory itself is young enough. A storage that cannot be written to
    is tried again at the next beat.
    """

    def __init__(self, storage: Storage, directory: str, *, position: int) -> None:
        self._storage = storage
        self._directory = directory
        step, save_id = parse_saving_dir(directory) or (0, "")
        self._path = f"{LEASES_DIR}/{step_dir(step)}.save-{unclaimed(save_id)}-{position:05d}"
        self._stop = threading.Event()
        self._resting = False
        self._thread = threading.Thread(target=self._run, name="holdfast-heartbeat", daemon=True)

    def __enter__(self) -> Heartbeat:
        """Begin."""
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop, and take the sign away."""
        self._stop.set()
        self._thread.join()

    def rest(self) -> None:
        """This rank has written its share: from now on it speaks only where the committer cannot.

        So a save whose committer is gone is finished without waiting for ranks that wait for it.
        """
        self._resting = True

    def _run(self) -> None:
        has_beaten = False
        while not self._stop.wait(HEARTBEAT_S):
            with suppress(StorageError):
                if self._resting and self._storage.exists(f"{self._directory}/{ALIVE_FILE}"):
                    break
                self._storage.make_dir(LEASES_DIR, durable=False)
                word = f"{time.time():.3f}".encode()
                has_beaten = True
                self._storage.replace_file(self._path, word, durable=False)
        if has_beaten:
            with suppress(StorageError):
                self._storage.remove_tree(self._path)


def silent_s(storage: Storage, directory: str) -> float:
    """Seconds since any process of a save gave its last sign.

    That is: made or changed the directory, began to commit, or renewed a heartbeat; each by the
    storage's clock, or its giver's, whichever says less.
    """
    parsed = parse_saving_dir(directory)
    save_id = unclaimed(parsed[1]) if parsed is not None else ""
    signs = [f"{directory}/{ALIVE_FILE}"] if storage.exists(f"{directory}/{ALIVE_FILE}") else []
    signs += [path for path, of in _beats(storage) if of == save_id]
    found = storage.age_s(directory)
    for path in signs:
        try:
            data = storage.read(path, nbytes=min(storage.size(path), _NAMED_NBYTES))
            found = min(found, renewed_ago_s(storage, path, stamp=_time_in(data)))
        except StorageError:
            if storage.exists(path):
                raise
    return found


def clear_beats(storage: Storage) -> None:
    """Remove the signs of processes that have long been gone."""
    for path, _ in _beats(storage):
        with suppress(StorageError):
            if storage.age_s(path) > DEFAULT_LEASE_S:
                storage.remove_tree(path)


def _beats(storage: Storage) -> list[tuple[str, str]]:
    """Path and save id of every heartbeat."""
    if not storage.is_dir(LEASES_DIR):
        return []
    found = []
    for name in storage.list(LEASES_DIR):
        match = _BEAT.fullmatch(name)
        if match is not None:
            found.append((f"{LEASES_DIR}/{name}", match[1]))
    return found


def _time_in(data: bytes) -> float | None:
    try:
        return float(data)
    except ValueError:
        return None
