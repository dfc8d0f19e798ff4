"""Writing one rank's image: stream, hash, sync, done-record."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable

import msgspec
import numpy as np
import numpy.typing as npt

from holdfast.format.digest import block_digests, digest128
from holdfast.format.dtypes import DTYPES
from holdfast.format.fingerprint import fingerprint_box
from holdfast.geometry import Box
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


def write_share(
    storage: Storage,
    job: WriteJob,
    image: memoryview,
    *,
    on_progress: Callable[[int], object] | None = None,
) -> int:
    """Write a rank's image and its done-record; returns the bytes written.

    Hashing runs beside the writing, on bytes in memory. The done-record is published only after the
    data file is synced. Raises StorageError naming the path; nothing is visible as a checkpoint
    whatever happens here. `on_progress` is told the bytes handed over so far. Cost: one pass of
    writes, one of hashing, two syncs.
    """
    hasher = _Hasher(job, image)
    hasher.start()
    try:
        if job.file is not None:
            _write_image(storage, f"{job.directory}/{job.file}", image, on_progress)
    finally:
        hasher.join()
    if hasher.error is not None:
        raise hasher.error
    record = DoneRecord(
        position=job.position,
        plan_digest=job.plan_digest,
        save_id=job.header.save_id,
        file=job.file,
        nbytes=image.nbytes if job.file is not None else 0,
        header_nbytes=job.header_nbytes,
        header_digest=digest128(image[: job.header_nbytes]),
        starts=job.starts,
        row_nbytes=job.row_nbytes,
        digest_ptr=column(hasher.pointers),
        digests=column(hasher.digests),
        checks=job.checks,
        lanes=column(hasher.lanes),
        values=job.values,
    )
    data = seal(msgspec.msgpack.encode(record))
    storage.write_file(f"{job.directory}/{done_file(job.position)}", data)
    return record.nbytes


def _write_image(
    storage: Storage,
    path: str,
    image: memoryview,
    on_progress: Callable[[int], object] | None,
) -> None:
    with storage.create(path, nbytes=image.nbytes) as sink:
        for start in range(0, image.nbytes, _WRITE_NBYTES):
            sink.write_at(start, image[start : start + _WRITE_NBYTES])
            if on_progress is not None:
                on_progress(min(start + _WRITE_NBYTES, image.nbytes))
        sink.sync()


class _Hasher(threading.Thread):
    """Digests of all rows of an image; XXH3 releases the interpreter's lock while it runs."""

    def __init__(self, job: WriteJob, image: memoryview) -> None:
        super().__init__(name="holdfast-hash", daemon=True)
        self._job = job
        self._image = image
        self.pointers: npt.NDArray[np.int64] = np.zeros(1, dtype=np.int64)
        self.digests: npt.NDArray[np.uint64] = np.zeros(0, dtype=np.uint64)
        self.lanes: npt.NDArray[np.uint64] = np.zeros(0, dtype=np.uint64)
        self.error: BaseException | None = None

    def run(self) -> None:
        """Hash every row; an exception is kept for the caller."""
        try:
            self.lanes = self._fingerprint()
            parts = [
                block_digests(self._image[start : start + nbytes], self._job.block_nbytes)
                for start, nbytes in zip(
                    np.frombuffer(self._job.starts, dtype=np.int64).tolist(),
                    np.frombuffer(self._job.row_nbytes, dtype=np.int64).tolist(),
                    strict=True,
                )
            ]
            counts = [len(part) for part in parts]
            self.pointers = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]).astype(
                np.int64
            )
            if parts:
                self.digests = np.concatenate(parts)
        except BaseException as error:
            self.error = error

    def _fingerprint(self) -> npt.NDArray[np.uint64]:
        """Both lanes of each row's share in its tensor's fingerprint, where they are wanted."""
        starts = np.frombuffer(self._job.starts, dtype=np.int64).tolist()
        lanes = [
            fingerprint_box(
                self._image[start : start + math.prod(place.extent) * DTYPES[place.dtype].itemsize],
                dtype=place.dtype,
                shape=place.shape,
                box=Box(place.offset, place.extent),
            ).lanes
            for place, start in zip(self._job.places, starts, strict=False)
        ]
        return np.array(lanes, dtype=np.uint64).reshape(-1)
