"""One rank's share of a save: write the image, then commit or learn the outcome.

The same code runs in a writer process, in a thread for storages that no other process can open, and
in a thread of a synchronous save, concurrently with its staging.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from typing import NamedTuple

import msgspec
import numpy as np
import xxhash

from holdfast.arrays.boxes import Box
from holdfast.arrays.types import IntArray, WordArray
from holdfast.errors import DeadlineError, ErrorRecord, StorageError
from holdfast.format.digest import digest128
from holdfast.format.fingerprint import fingerprint_box
from holdfast.format.names import parse_saving_dir, step_dir
from holdfast.format.versions import LEASES_DIR
from holdfast.storage import PosixStorage, Storage
from holdfast.writer.commit import commit_save
from holdfast.writer.outcomes import (
    committers_failure,
    pause_s,
    publish_failure,
    read_failure,
    wait_for_commit,
)
from holdfast.writer.records import (
    ALIVE_FILE,
    DONE_DIR,
    HEADER_FILE,
    PLAN_FILE,
    DoneRecord,
    EncodedPlan,
    SaveOutcome,
    WriteJob,
    column,
    done_file,
    heartbeat_file,
    seal,
)

HEARTBEAT_S = 2.0
_WRITE_NBYTES = 16 << 20


class JobGate:
    """Holds a job back while its image is still being staged, and until all ranks have written.

    The thread that stages opens it step by step, or closes it for good; the job's threads wait.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._nbytes = 0
        self._nbytes_needed = 0
        self._staged: tuple[bytes, RowDigests] | None = None
        self._may_commit = False
        self._is_closed = False

    def open_to(self, nbytes: int) -> None:
        """The first `nbytes` bytes of the image are in place and do not change any more."""
        with self._changed:
            self._nbytes = max(self._nbytes, nbytes)
            # Not each time: it is called for each MiB, and a job waits for more of them.
            if self._nbytes >= self._nbytes_needed:
                self._changed.notify_all()

    def finish_staging(self, checks: bytes, digests: RowDigests) -> None:
        """The whole image is in place; `checks` are those of `WriteJob`."""
        with self._changed:
            self._staged = checks, digests
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
        """Return when the first `nbytes` bytes are in place; for one thread."""
        with self._changed:
            self._nbytes_needed = nbytes
        self._wait_for(
            lambda: self._nbytes >= nbytes,
            lambda: f"only {self._nbytes} bytes of the image were staged, {nbytes} are needed",
        )

    def wait_for_digests(self) -> tuple[bytes, RowDigests]:
        """Those of the boxes to vouch for and of all rows, known once the image is staged."""
        self._wait_for(lambda: self._staged is not None, lambda: "the staging was not finished")
        assert self._staged is not None
        return self._staged

    def wait_for_commit(self) -> None:
        """Return when all ranks have written their shares."""
        self._wait_for(lambda: self._may_commit, lambda: "the save failed before its commit")

    def _wait_for(self, is_open: Callable[[], bool], why: Callable[[], str]) -> None:
        """Return when it is open; StorageError with the reason when it never will be."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or is_open())
            if not is_open():
                raise StorageError(why())


class RowDigests(NamedTuple):
    """Columns of a `DoneRecord`: where each row's digests begin, digests, and fingerprints."""

    digest_ptr: IntArray
    digests: WordArray
    lanes: WordArray


class ImageHasher:
    """Digests of the rows of an image, made block by block as their bytes come into place.

    Args:
        job: where the rows are, and bytes per digest.
        image: as far as it is in place.

    Cost: one pass over the bytes; XXH3 releases the interpreter's lock while it runs.
    """

    def __init__(self, job: WriteJob, image: memoryview) -> None:
        starts = np.frombuffer(job.file.starts, dtype=np.int64)
        ends = starts + np.frombuffer(job.file.row_nbytes, dtype=np.int64)
        num_blocks = -(-(ends - starts) // job.block_nbytes)
        self._digest_ptr = np.concatenate([[0], np.cumsum(num_blocks)]).astype(np.int64)
        # Blocks in the order of the image, of which a file may have its rows in another than the
        # plan: their rows, and how many blocks of its row are before each.
        order = np.lexsort((ends, starts))
        row = np.repeat(order, num_blocks[order])
        first = np.cumsum(num_blocks[order]) - num_blocks[order]
        before = np.arange(len(row)) - np.repeat(first, num_blocks[order])
        begin = starts[row] + before * job.block_nbytes
        stop = np.minimum(begin + job.block_nbytes, ends[row])
        self._place = self._digest_ptr[row] + before
        self._blocks = list(zip(begin.tolist(), stop.tolist(), strict=True))
        self._stops = stop
        self._job = job
        self._image = image
        self._digests: list[int] = []

    def advance(self, end: int) -> None:
        """The first `end` bytes of the image are in place: hash what is new and whole of them."""
        done = len(self._digests)
        ready = done + int(np.searchsorted(self._stops[done:], end, side="right"))
        image, digest = self._image, xxhash.xxh3_64_intdigest
        self._digests += [digest(image[begin:stop]) for begin, stop in self._blocks[done:ready]]

    def finish(self) -> RowDigests:
        """The whole image is in place: what its rows have, in the order of the plan."""
        self.advance(self._image.nbytes)
        digests = np.zeros(len(self._place), dtype=np.uint64)
        digests[self._place] = np.array(self._digests, dtype=np.uint64)
        starts = np.frombuffer(self._job.file.starts, dtype=np.int64).tolist()
        nbytes = np.frombuffer(self._job.file.row_nbytes, dtype=np.int64).tolist()
        lanes = [
            fingerprint_box(
                self._image[start : start + size],
                dtype=of.dtype, shape=of.shape, box=Box(of.offset, of.extent),
            ).lanes
            for start, size, of in zip(starts, nbytes, self._job.row_boxes, strict=False)
        ]  # fmt: skip
        return RowDigests(self._digest_ptr, digests, np.array(lanes, dtype=np.uint64).reshape(-1))


class JobThread:
    """The job of a synchronous save, in a thread of its own, held back by its gate."""

    def __init__(
        self, storage: Storage, job: WriteJob, image: memoryview, *, plan: EncodedPlan | None
    ) -> None:
        self.gate = JobGate()
        self._written = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(
            target=self._run, args=(storage, job, image, plan), name="holdfast-job", daemon=True
        )

    def start(self) -> None:
        """Let it begin."""
        self._thread.start()

    def wait_written(self) -> None:
        """Return when the rank's share is durable; raise what the job has failed with."""
        self._written.wait()
        self._raise_error()

    def wait_finished(self) -> None:
        """Return when the job is done; raise what it has failed with."""
        self._thread.join()
        self._raise_error()

    def stop(self) -> None:
        """End the job, which fails where it waits for the gate; nothing where it has ended."""
        self.gate.close()
        if self._thread.is_alive():
            self._thread.join()

    def _run(
        self, storage: Storage, job: WriteJob, image: memoryview, plan: EncodedPlan | None
    ) -> None:
        """Perform the job, and keep what it raises."""
        try:
            perform_job(
                storage, job, image, plan=plan, gate=self.gate, on_written=self._written.set
            )
        except BaseException as error:
            self._error = error
        finally:
            self._written.set()

    def _raise_error(self) -> None:
        """Raise what the job has failed with."""
        if self._error is not None:
            raise self._error


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
        error = committers_failure(storage, job) or caught
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
    with (
        storage.holding_dirs() if isinstance(storage, PosixStorage) else nullcontext(),
        heartbeat(storage, job.directory, position=job.position) as is_written,
    ):
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
            is_written.set()
            wait_for_commit(storage, job, deadline)
    return SaveOutcome(
        save_id=job.header.save_id,
        directory=step_dir(job.header.step),
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

    Nothing is visible as a checkpoint whatever happens here.

    Args:
        gate: of an image that is still being staged, and hashed as it is; without it the whole
            image is in place.

    Raises:
        StorageError: names the path.

    Cost: one pass of writes, one sync; without a gate, one pass of hashing concurrently with it.
    """
    if gate is not None:
        _write_image(storage, job, image, gate=gate, on_progress=on_progress)
        checks, digests = gate.wait_for_digests()
    else:
        with ThreadPoolExecutor(1, thread_name_prefix="holdfast-hash") as pool:
            hashing = pool.submit(ImageHasher(job, image).finish)
            _write_image(storage, job, image, gate=None, on_progress=on_progress)
        checks, digests = job.checks, hashing.result()
    record = DoneRecord(
        position=job.position,
        plan_digest=job.plan_digest,
        save_id=job.header.save_id,
        file=job.file.name,
        nbytes=image.nbytes if job.file.name is not None else 0,
        header_nbytes=job.file.header_nbytes,
        header_digest=digest128(image[: job.file.header_nbytes]),
        starts=job.file.starts,
        row_nbytes=job.file.row_nbytes,
        digest_ptr=column(digests.digest_ptr),
        digests=column(digests.digests),
        checks=checks,
        lanes=column(digests.lanes),
        values=job.values,
    )
    # The record need not be durable: without it, after the machine stopped, the save is abandoned.
    data = seal(msgspec.msgpack.encode(record))
    storage.write_file(f"{job.directory}/{done_file(job.position)}", data, durable=False)


def _write_image(
    storage: Storage,
    job: WriteJob,
    image: memoryview,
    *,
    gate: JobGate | None,
    on_progress: Callable[[int], object] | None,
) -> None:
    """Write and sync the data file, if the rank has one."""
    if job.file.name is None:
        return
    with storage.create(f"{job.directory}/{job.file.name}", nbytes=image.nbytes) as sink:
        for start in range(0, image.nbytes, _WRITE_NBYTES):
            end = min(start + _WRITE_NBYTES, image.nbytes)
            if gate is not None:
                gate.wait(end)
            sink.write_at(start, image[start:end])
            if on_progress is not None:
                on_progress(end)
        sink.sync()


def _commit_when_complete(
    storage: Storage, job: WriteJob, plan: EncodedPlan, deadline: float
) -> None:
    """Wait for every rank's done-record, then commit."""
    ranks = plan.plan.ranks
    expected = {done_file(p).rpartition("/")[2] for p in range(len(ranks))}
    began = time.monotonic()
    while True:
        present = set(storage.list(f"{job.directory}/{DONE_DIR}"))
        failed = sorted(name for name in present if name.endswith(".failed"))
        if failed:
            raise read_failure(storage, f"{job.directory}/{DONE_DIR}/{failed[0]}")
        missing = expected - present
        if not missing:
            return commit_save(storage, job.directory, plan=plan, header=job.header)
        now = time.monotonic()
        if now > deadline:
            late = [ranks[int(name.partition(".")[0])] for name in sorted(missing)]
            raise DeadlineError(
                f"save of step {job.header.step}: ranks {late} did not finish writing within "
                f"{job.deadline_s:.0f} s (phase: write); their processes or writers may be gone",
                details={"missing_ranks": late, "steps": [job.header.step]},
            )
        time.sleep(min(pause_s(now - began), max(deadline - now, 0.0)))


@contextmanager
def heartbeat(storage: Storage, directory: str, *, position: int) -> Iterator[threading.Event]:
    """While the body runs, a thread renews this rank's heartbeat on storage.

    Every two seconds; nothing is written in the first two, in which the directory itself is young
    enough. A storage that cannot be written to is tried again at the next beat.

    Args:
        directory: of the save.
        position: of the rank in the plan.

    Returns:
        An event for the body to set when this rank has written its share: from then on it beats
        only where the committer cannot. So a save whose committer is gone is finished without
        waiting for ranks that wait for it.
    """
    stop, is_written = threading.Event(), threading.Event()
    thread = threading.Thread(
        target=_beat, args=(storage, directory, position, stop, is_written),
        name="holdfast-heartbeat", daemon=True,
    )  # fmt: skip
    thread.start()
    try:
        yield is_written
    finally:
        stop.set()
        thread.join()


def _beat(
    storage: Storage, directory: str, position: int, stop: threading.Event, written: threading.Event
) -> None:
    """Renew the heartbeat until it is to stop, and remove it."""
    path = ""
    while not stop.wait(HEARTBEAT_S):
        with suppress(StorageError):
            if written.is_set() and storage.exists(f"{directory}/{ALIVE_FILE}"):
                break
            storage.make_dir(LEASES_DIR, durable=False)
            step, save_id = parse_saving_dir(directory) or (0, "")
            path = heartbeat_file(step, save_id, position)
            storage.replace_file(path, f"{time.time():.3f}".encode(), durable=False)
    if path:
        with suppress(StorageError):
            storage.remove_tree(path)
