"""One rank's share of a save: write the image, then commit or learn the outcome.

The same code runs in a writer process, in a thread for storages that no other process can open, and
in a thread of a synchronous save, concurrently with its staging.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress

import msgspec
import numpy as np

from holdfast.arrays.boxes import Box
from holdfast.arrays.types import IntArray, WordArray
from holdfast.errors import DeadlineError, ErrorRecord, HoldfastError, StorageError
from holdfast.format.digest import block_digests, digest128
from holdfast.format.fingerprint import fingerprint_box
from holdfast.format.names import step_dir
from holdfast.format.versions import save_id_of
from holdfast.storage import Storage
from holdfast.writer.commit import commit_save
from holdfast.writer.heartbeat import Heartbeat
from holdfast.writer.records import (
    ALIVE_FILE,
    DONE_DIR,
    FAILED_FILE,
    HEADER_FILE,
    PLAN_FILE,
    DoneRecord,
    EncodedPlan,
    SaveHeader,
    column,
    done_file,
    failed_file,
    seal,
    unseal,
)

_WRITE_NBYTES = 16 << 20
_FIRST_PAUSE_S = 0.002
_LONGEST_PAUSE_S = 0.1
_LONGER = 1.25


class RowBox(msgspec.Struct, frozen=True, array_like=True):
    """What a row is of its tensor: element type, global shape, and the chunk's box."""

    dtype: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    extent: tuple[int, ...]


class WriteJob(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's share of a save.

    Args:
        directory: of the save in progress.
        position: of the rank in the plan.
        file: path of the data file inside the directory; None for a rank that writes no tensor.
        starts: int64 column, byte at which each row's payload starts in the image, in plan order.
        row_nbytes: int64 column, length of each row's payload.
        checks: uint64 column, digests of the boxes that this rank must vouch for.
        values: the rank's encoded tree as JSON.
        row_boxes: one per row where fingerprints are stored, else empty.
        deadline_s: for the whole save, from the start of the writing.
    """

    directory: str
    position: int
    rank: int
    header: SaveHeader
    plan_digest: str
    block_nbytes: int
    deadline_s: float
    file: str | None = None
    header_nbytes: int = 0
    starts: bytes = b""
    row_nbytes: bytes = b""
    checks: bytes = b""
    values: bytes = b""
    row_boxes: tuple[RowBox, ...] = ()


class SaveOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a save, as one rank's writer saw it; `error` is None for success."""

    save_id: str
    directory: str
    error: ErrorRecord | None = None
    nbytes: int = 0
    write_s: float = 0.0
    commit_s: float = 0.0


class JobGate:
    """Holds a job back while its image is still being staged, and until all ranks have written.

    The thread that stages opens it step by step, or closes it for good; the job's threads wait.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._nbytes = 0
        self._checks: bytes | None = None
        self._may_commit = False
        self._is_closed = False

    def open_to(self, nbytes: int) -> None:
        """The first `nbytes` bytes of the image are in place and do not change any more."""
        with self._changed:
            self._nbytes = max(self._nbytes, nbytes)
            self._changed.notify_all()

    def finish_staging(self, checks: bytes) -> None:
        """The whole image is in place; `checks` are those of `WriteJob`."""
        with self._changed:
            self._checks = checks
            self._changed.notify_all()

    def allow_commit(self) -> None:
        """All ranks have agreed that each has written its share."""
        with self._changed:
            self._may_commit = True
            self._changed.notify_all()

    def close(self) -> None:
        """Nothing more will come: what waits for it gets a StorageError."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def wait(self, nbytes: int) -> None:
        """Return when the first `nbytes` bytes are in place."""
        self._wait_for(
            lambda: self._nbytes >= nbytes,
            lambda: f"only {self._nbytes} bytes of the image were staged, {nbytes} are needed",
        )

    def wait_for_checks(self) -> bytes:
        """The digests of the boxes to vouch for, which are known once the image is staged."""
        self._wait_for(lambda: self._checks is not None, lambda: "the staging was not finished")
        return self._checks or b""

    def wait_for_commit(self) -> None:
        """Return when all ranks have written their shares."""
        self._wait_for(lambda: self._may_commit, lambda: "the save failed before its commit")

    def _wait_for(self, is_open: Callable[[], bool], why: Callable[[], str]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or is_open())
            if not is_open():
                raise StorageError(why())


def run_job(
    storage: Storage,
    job: WriteJob,
    image: memoryview,
    *,
    plan: EncodedPlan | None,
    on_progress: Callable[[int], object] | None = None,
    on_written: Callable[[], object] | None = None,
) -> SaveOutcome:
    """`perform_job`, whose failure is published on storage for the other ranks, and returned.

    Never raises. Bounded by `job.deadline_s`.
    """
    try:
        return perform_job(
            storage, job, image, plan=plan, on_progress=on_progress, on_written=on_written
        )
    except Exception as caught:
        # The committer's failure record is the cause, where the error here only follows from it.
        error = _committers_failure(storage, job) or caught
        record = ErrorRecord.of(error, foreign=StorageError)
        publish_failure(storage, job, record, committer=plan is not None)
        return SaveOutcome(save_id=job.header.save_id, directory=job.directory, error=record)


def perform_job(
    storage: Storage,
    job: WriteJob,
    image: memoryview,
    *,
    plan: EncodedPlan | None,
    gate: JobGate | None = None,
    on_progress: Callable[[int], object] | None = None,
    on_written: Callable[[], object] | None = None,
) -> SaveOutcome:
    """Write this rank's share; then commit, or wait for the committer's outcome on storage.

    Args:
        image: the rank's data file as it lies in staging memory.
        plan: of the whole save, on the rank that commits it.
        gate: of a synchronous save, whose ranks wait for each other by collectives: the commit
            waits for it, and the other ranks' jobs end with the writing.
        on_progress: called with the bytes passed to storage so far.
        on_written: called when the image is no longer needed.

    Raises:
        HoldfastError: what failed here, or is recorded on storage as the failure of another rank.
    """
    began = time.monotonic()
    deadline = began + job.deadline_s
    with Heartbeat(storage, job.directory, position=job.position) as heartbeat:
        _prepare_directory(storage, job, plan)
        write_share(storage, job, image, gate=gate, on_progress=on_progress)
        written = time.monotonic()
        if on_written is not None:
            on_written()
        if plan is not None:
            if gate is not None:
                gate.wait_for_commit()
            _commit_when_complete(storage, job, plan, deadline)
        elif gate is None:
            heartbeat.rest()
            _wait_for_commit(storage, job, deadline)
    return SaveOutcome(
        save_id=job.header.save_id,
        directory=step_dir(job.header.step),
        nbytes=image.nbytes,
        write_s=written - began,
        commit_s=time.monotonic() - written,
    )


def _prepare_directory(storage: Storage, job: WriteJob, plan: EncodedPlan | None) -> None:
    """Make the save's directories; the committer leaves plan and header for a repair.

    Nothing here is synced: what a checkpoint keeps of it is made durable by the commit, and without
    the rest, after the machine stopped, the save is abandoned.
    """
    for name in ("plan", DONE_DIR, "data"):
        storage.make_dir(f"{job.directory}/{name}", durable=False)
    if plan is not None:
        # The committer's first heartbeat: the file holds its clock's time and has the storage's.
        now = f"{time.time():.3f}".encode()
        storage.replace_file(f"{job.directory}/{ALIVE_FILE}", now, durable=False)
        storage.write_file(f"{job.directory}/{PLAN_FILE}", plan.data, durable=False)
        header = seal(msgspec.msgpack.encode(job.header))
        storage.write_file(f"{job.directory}/{HEADER_FILE}", header, durable=False)


def write_share(
    storage: Storage,
    job: WriteJob,
    image: memoryview,
    *,
    gate: JobGate | None = None,
    on_progress: Callable[[int], object] | None = None,
) -> None:
    """Write and sync a rank's data file, then publish its done-record.

    Raises StorageError naming the path; nothing is visible as a checkpoint whatever happens here.
    Without a gate the whole image is in place.
    Cost: one pass of writes, one of hashing concurrently with it, one sync.
    """
    if gate is None:
        gate = JobGate()
        gate.open_to(image.nbytes)
        gate.finish_staging(job.checks)
    hasher = _Hasher(job, image, gate)
    hasher.start()
    try:
        if job.file is not None:
            path = f"{job.directory}/{job.file}"
            with storage.create(path, nbytes=image.nbytes) as sink:
                for start in range(0, image.nbytes, _WRITE_NBYTES):
                    end = min(start + _WRITE_NBYTES, image.nbytes)
                    gate.wait(end)
                    sink.write_at(start, image[start:end])
                    if on_progress is not None:
                        on_progress(end)
                sink.sync()
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
        checks=gate.wait_for_checks(),
        lanes=column(hasher.lanes),
        values=job.values,
    )
    # The record need not be durable: without it, after the machine stopped, the save is abandoned.
    data = seal(msgspec.msgpack.encode(record))
    storage.write_file(f"{job.directory}/{done_file(job.position)}", data, durable=False)


class _Hasher(threading.Thread):
    """Digests of all rows of an image; XXH3 releases the interpreter's lock while it runs."""

    def __init__(self, job: WriteJob, image: memoryview, gate: JobGate) -> None:
        super().__init__(name="holdfast-hash", daemon=True)
        self._job = job
        self._image = image
        self._gate = gate
        self.pointers: IntArray = np.zeros(1, dtype=np.int64)
        self.digests: WordArray = np.zeros(0, dtype=np.uint64)
        self.lanes: WordArray = np.zeros(0, dtype=np.uint64)
        self.error: BaseException | None = None

    def run(self) -> None:
        """Hash every row, in the order of the image; an exception is kept for the caller."""
        try:
            starts = np.frombuffer(self._job.starts, dtype=np.int64)
            ends = starts + np.frombuffer(self._job.row_nbytes, dtype=np.int64)
            digests: list[WordArray] = [self.digests] * len(starts)
            lanes = [(0, 0)] * len(self._job.row_boxes)
            for row in np.lexsort((ends, starts)).tolist():
                start, end = int(starts[row]), int(ends[row])
                self._gate.wait(end)
                payload = self._image[start:end]
                digests[row] = block_digests(payload, self._job.block_nbytes)
                if lanes:
                    of = self._job.row_boxes[row]
                    box = Box(of.offset, of.extent)
                    lanes[row] = fingerprint_box(
                        payload, dtype=of.dtype, shape=of.shape, box=box
                    ).lanes
            self.lanes = np.array(lanes, dtype=np.uint64).reshape(-1)
            self.pointers = np.cumsum([0, *map(len, digests)], dtype=np.int64)
            if digests:
                self.digests = np.concatenate(digests)
        except BaseException as error:
            self.error = error


def publish_failure(
    storage: Storage, job: WriteJob, record: ErrorRecord, *, committer: bool
) -> None:
    """Publish a failure record for the other ranks; a storage that refuses even that is let be.

    It need not outlive the machine: neither do those who wait for it.
    """
    if not committer:
        record = msgspec.structs.replace(record, message=f"rank {job.rank}: {record.message}")
    path = f"{job.directory}/{FAILED_FILE if committer else failed_file(job.position)}"
    data = seal(msgspec.msgpack.encode(record))
    try:
        storage.make_dir(f"{job.directory}/{DONE_DIR}", durable=False)
        storage.write_file(path, data, durable=False)
    except HoldfastError:
        # The data of a failed save is of no use, and may be what filled the disk. But where its
        # replacement of a step could not be taken back, this is what was replaced.
        with suppress(HoldfastError):
            in_place = save_id_of(storage, step_dir(job.header.step)) == job.header.save_id
            if job.file is not None and not in_place:
                storage.remove_tree(f"{job.directory}/{job.file}")
            storage.write_file(path, data, durable=False)


def _commit_when_complete(
    storage: Storage, job: WriteJob, plan: EncodedPlan, deadline: float
) -> None:
    """Wait for every rank's done-record, then commit."""
    ranks = plan.plan.ranks
    expected = {done_file(p).rpartition("/")[2] for p in range(len(ranks))}
    pause = _FIRST_PAUSE_S
    while True:
        present = set(storage.list(f"{job.directory}/{DONE_DIR}"))
        failed = sorted(name for name in present if name.endswith(".failed"))
        if failed:
            raise _read_failure(storage, f"{job.directory}/{DONE_DIR}/{failed[0]}")
        missing = expected - present
        if not missing:
            commit_save(
                storage,
                job.directory,
                plan=plan.plan,
                plan_digest=job.plan_digest,
                header=job.header,
            )
            return
        now = time.monotonic()
        if now > deadline:
            late = [ranks[int(name.partition(".")[0])] for name in sorted(missing)]
            raise DeadlineError(
                f"save of step {job.header.step}: ranks {late} did not finish writing within "
                f"{job.deadline_s:.0f} s (phase: write); their processes or writers may be gone"
            )
        time.sleep(min(pause, max(deadline - now, 0.0)))
        pause = min(pause * _LONGER, _LONGEST_PAUSE_S)


def _wait_for_commit(storage: Storage, job: WriteJob, deadline: float) -> None:
    """Wait until the committer has committed this save, or recorded its failure, and raise that."""
    final = step_dir(job.header.step)
    pause = _FIRST_PAUSE_S
    while True:
        if save_id_of(storage, final) == job.header.save_id:
            return
        if storage.exists(f"{job.directory}/{FAILED_FILE}"):
            raise _read_failure(storage, f"{job.directory}/{FAILED_FILE}")
        if not storage.exists(job.directory):
            # Renamed between the two looks, or discarded; a committed one has its name by now.
            if save_id_of(storage, final) == job.header.save_id:
                return
            raise StorageError(
                f"{storage.describe(job.directory)} is gone and step {job.header.step} was not "
                f"committed: the save was discarded"
            )
        now = time.monotonic()
        if now > deadline:
            raise DeadlineError(
                f"save of step {job.header.step}: no commit within {job.deadline_s:.0f} s (phase: "
                f"commit); the committing rank's writer may be gone"
            )
        time.sleep(min(pause, max(deadline - now, 0.0)))
        pause = min(pause * _LONGER, _LONGEST_PAUSE_S)


def _committers_failure(storage: Storage, job: WriteJob) -> HoldfastError | None:
    """What the committer has recorded as the failure of this save, if anything."""
    path = f"{job.directory}/{FAILED_FILE}"
    try:
        return _read_failure(storage, path) if storage.exists(path) else None
    except HoldfastError:
        return None


def _read_failure(storage: Storage, path: str) -> HoldfastError:
    return unseal(storage.read(path), ErrorRecord, where=storage.describe(path)).to_error()
