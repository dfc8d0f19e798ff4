"""Writing one rank's image: stream, hash, sync, done-record."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from holdfast.arrays.boxes import Box
from holdfast.errors import StorageError
from holdfast.format.digest import block_digests, digest128
from holdfast.format.fingerprint import fingerprint_box
from holdfast.storage import Storage
from holdfast.writer.records import DoneRecord, SaveHeader, column, done_file, seal

_WRITE_NBYTES = 16 << 20


class RowPlace(msgspec.Struct, frozen=True, array_like=True):
    """What a row is a part of: element type, global shape, and the chunk's box."""

    dtype: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    extent: tuple[int, ...]


class WriteJob(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's share of a save.

    `directory`: the directory of the save under way. `position`: place of the rank in the plan.
    `file`: path of the data file inside the directory, or None for a rank that writes no tensor.
    `starts`, `row_nbytes`: columns of int64, place and length of each row's payload in the image,
    in plan order. `checks`: column of uint64, digests of the boxes this rank must vouch for.
    `values`: the rank's encoded tree as JSON. `places`: one per row where fingerprints are wanted,
    else empty. `deadline_s`: for the whole save, from the start of
    the writing.
    """

    directory: str
    position: int
    rank: int
    header: SaveHeader
    plan_digest: str
    block_nbytes: int
    file: str | None
    header_nbytes: int
    starts: bytes
    row_nbytes: bytes
    checks: bytes
    values: bytes
    places: tuple[RowPlace, ...]
    deadline_s: float


class Gate:
    """How much of an image is in place, where it is still being staged while it is written.

    One thread opens it further and further, or breaks it; any number wait.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._nbytes = 0
        self._broken = False

    def open_to(self, nbytes: int) -> None:
        """The first `nbytes` bytes are in place and stay as they are."""
        with self._changed:
            self._nbytes = max(self._nbytes, nbytes)
            self._changed.notify_all()

    def break_off(self) -> None:
        """The rest will never come: whoever waits for it gets a StorageError."""
        with self._changed:
            self._broken = True
            self._changed.notify_all()

    def wait(self, nbytes: int) -> None:
        """Return when the first `nbytes` bytes are in place."""
        with self._changed:
            self._changed.wait_for(lambda: self._broken or self._nbytes >= nbytes)
            if self._nbytes < nbytes:
                raise StorageError(
                    f"only {self._nbytes} bytes of the image were staged, {nbytes} are needed"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class Payload:
    """What is known of an image once it is written: its size and the digests of all of it."""

    nbytes: int
    header_digest: str
    digest_ptr: bytes
    digests: bytes
    lanes: bytes


def write_share(
    storage: Storage,
    job: WriteJob,
    image: memoryview,
    *,
    on_progress: Callable[[int], object] | None = None,
) -> int:
    """Write a rank's image and its done-record; returns the bytes written.

    Raises StorageError naming the path; nothing is visible as a checkpoint whatever happens here.
    `on_progress` is told the bytes handed over so far. Cost: one pass of writes, one of hashing
    beside it, one sync.
    """
    payload = write_payload(storage, job, image, on_progress=on_progress)
    publish_done(storage, job, payload)
    return payload.nbytes


def write_payload(
    storage: Storage,
    job: WriteJob,
    image: memoryview,
    *,
    gate: Gate | None = None,
    on_progress: Callable[[int], object] | None = None,
) -> Payload:
    """Write and sync a rank's data file; its bytes are hashed beside, as they lie in memory.

    `gate`: how much of the image is in place; without one, all is.
    """
    if gate is None:
        gate = Gate()
        gate.open_to(image.nbytes)
    hasher = _Hasher(job, image, gate)
    hasher.start()
    try:
        if job.file is not None:
            _write_image(storage, f"{job.directory}/{job.file}", image, gate, on_progress)
    finally:
        hasher.join()
    if hasher.error is not None:
        raise hasher.error
    return Payload(
        nbytes=image.nbytes if job.file is not None else 0,
        header_digest=digest128(image[: job.header_nbytes]),
        digest_ptr=column(hasher.pointers),
        digests=column(hasher.digests),
        lanes=column(hasher.lanes),
    )


def publish_done(storage: Storage, job: WriteJob, payload: Payload) -> None:
    """Publish the done-record of an image that is durable.

    The record itself need not be: without it, after the machine stopped, the save is abandoned.
    """
    record = DoneRecord(
        position=job.position,
        plan_digest=job.plan_digest,
        save_id=job.header.save_id,
        file=job.file,
        nbytes=payload.nbytes,
        header_nbytes=job.header_nbytes,
        header_digest=payload.header_digest,
        starts=job.starts,
        row_nbytes=job.row_nbytes,
        digest_ptr=payload.digest_ptr,
        digests=payload.digests,
        checks=job.checks,
        lanes=payload.lanes,
        values=job.values,
    )
    data = seal(msgspec.msgpack.encode(record))
    storage.write_file(f"{job.directory}/{done_file(job.position)}", data, durable=False)


def _write_image(
    storage: Storage,
    path: str,
    image: memoryview,
    gate: Gate,
    on_progress: Callable[[int], object] | None,
) -> None:
    with storage.create(path, nbytes=image.nbytes) as sink:
        for start in range(0, image.nbytes, _WRITE_NBYTES):
            end = min(start + _WRITE_NBYTES, image.nbytes)
            gate.wait(end)
            sink.write_at(start, image[start:end])
            if on_progress is not None:
                on_progress(end)
        sink.sync()


class _Hasher(threading.Thread):
    """Digests of all rows of an image; XXH3 releases the interpreter's lock while it runs."""

    def __init__(self, job: WriteJob, image: memoryview, gate: Gate) -> None:
        super().__init__(name="holdfast-hash", daemon=True)
        self._job = job
        self._image = image
        self._gate = gate
        self.pointers: npt.NDArray[np.int64] = np.zeros(1, dtype=np.int64)
        self.digests: npt.NDArray[np.uint64] = np.zeros(0, dtype=np.uint64)
        self.lanes: npt.NDArray[np.uint64] = np.zeros(0, dtype=np.uint64)
        self.error: BaseException | None = None

    def run(self) -> None:
        """Hash every row, in the order of the image; an exception is kept for the caller."""
        try:
            starts = np.frombuffer(self._job.starts, dtype=np.int64)
            ends = starts + np.frombuffer(self._job.row_nbytes, dtype=np.int64)
            parts: list[npt.NDArray[np.uint64]] = [self.digests] * len(starts)
            lanes = [(0, 0)] * len(self._job.places)
            for row in np.lexsort((ends, starts)).tolist():
                start, end = int(starts[row]), int(ends[row])
                self._gate.wait(end)
                payload = self._image[start:end]
                parts[row] = block_digests(payload, self._job.block_nbytes)
                if lanes:
                    lanes[row] = _lanes(payload, self._job.places[row])
            self.lanes = np.array(lanes, dtype=np.uint64).reshape(-1)
            counts = [len(part) for part in parts]
            self.pointers = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]).astype(
                np.int64
            )
            if parts:
                self.digests = np.concatenate(parts)
        except BaseException as error:
            self.error = error


def _lanes(payload: memoryview, place: RowPlace) -> tuple[int, int]:
    """Both lanes of a row's share in its tensor's fingerprint."""
    return fingerprint_box(
        payload, dtype=place.dtype, shape=place.shape, box=Box(place.offset, place.extent)
    ).lanes
