"""One rank's share of a save: write the image, then commit or learn the outcome.

The same code runs in a writer process, in a thread if no other process can open the storage, and in
a thread of a synchronous save, concurrently with its staging.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import msgspec
import numpy as np
import xxhash

from holdfast.arrays.boxes import Box
from holdfast.arrays.types import IntArray, WordArray
from holdfast.errors import DeadlineError, ErrorRecord, StorageError
from holdfast.format.digest import digest128_of
from holdfast.format.fingerprint import fingerprint_box
from holdfast.format.index import gaps
from holdfast.format.names import parse_saving_dir, step_dir
from holdfast.format.root_identity import require_root
from holdfast.format.versions import LEASES_DIR, known_save_id, repeated
from holdfast.storage import PosixStorage, Storage
from holdfast.storage.reading import (
    file_stamp,
    for_each,
    held_with_name,
    is_joined,
    locking,
    make_dir_with,
    pause_of,
    requests_of,
    sizes_below,
)
from holdfast.writer.commit import commit_save, read_done
from holdfast.writer.outcomes import (
    committers_failure,
    is_discarded,
    pause_s,
    publish_failure,
    read_failure,
    require_committed,
    wait_for_commit,
)
from holdfast.writer.records import (
    ALIVE_FILE,
    DONE_DIR,
    HEADER_FILE,
    PLAN_FILE,
    DoneRecord,
    EncodedPlan,
    SaveHeader,
    SaveOutcome,
    WriteJob,
    column,
    done_file,
    heartbeat_file,
    missing_ranks,
    seal,
    unseal,
)

HEARTBEAT_S = 2.0
_WRITE_NBYTES = 16 << 20
_LATE_S = 0.1
"""Where a write is a request: how long a rank gives the one that makes the save's directory."""


class JobGate:
    """Holds a job back while its image is being staged, and until all ranks have written.

    The staging thread opens it step by step, or closes it permanently. The job's threads wait.

    Attributes:
        record: This rank's sealed done-record when it has written its share, if the record goes to
            the committing rank by message; empty if it is on storage.
    """

    def __init__(self) -> None:
        self.record = b""
        # One condition for all fields: two threads of the job wait, each for another field.
        self._changed = threading.Condition()
        self._nbytes = 0
        self._nbytes_needed = 0
        self._staged: tuple[bytes, RowDigests] | None = None
        self._records: Sequence[bytes] | None = None
        self._is_closed = False

    def open_to(self, nbytes: int) -> None:
        """Declare that the first `nbytes` bytes of the image are in place and final."""
        with self._changed:
            self._nbytes = max(self._nbytes, nbytes)
            # Not every time: this is called for each MiB, and a job waits for several.
            if self._nbytes >= self._nbytes_needed:
                self._changed.notify_all()

    def finish_staging(self, checks: bytes, digests: RowDigests) -> None:
        """Declare that the whole image is in place; `checks` are those of `WriteJob`."""
        with self._changed:
            self._staged = checks, digests
            self._changed.notify_all()

    def allow_commit(self, records: Sequence[bytes]) -> None:
        """Declare that every rank has written its share.

        Args:
            records: `record` of each rank by position; empty on ranks that do not commit.
        """
        with self._changed:
            self._records = records
            self._changed.notify_all()

    def close(self) -> None:
        """End all waiting, now and later, with a StorageError."""
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
        """Return the digests of the checked boxes and of all rows, once the image is staged."""
        self._wait_for(lambda: self._staged is not None, lambda: "the staging was not finished")
        assert self._staged is not None
        return self._staged

    def wait_for_commit(self) -> Sequence[bytes]:
        """Return what `allow_commit` was given, when all ranks have written their shares."""
        self._wait_for(
            lambda: self._records is not None, lambda: "the save failed before its commit"
        )
        assert self._records is not None
        return self._records

    def _wait_for(self, is_open: Callable[[], bool], why: Callable[[], str]) -> None:
        """Return when it is open; StorageError with the reason if it is closed before."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or is_open())
            # What came before the closing still counts.
            if not is_open():
                raise StorageError(why())


class RowDigests(NamedTuple):
    """Columns of a `DoneRecord`: starts of each row's digests, digests, and fingerprints."""

    digest_ptr: IntArray
    digests: WordArray
    lanes: WordArray


class ImageHasher:
    """Digests of the rows of an image, made block by block as their bytes come into place.

    Args:
        job: States where the rows are, and the bytes per digest.
        image: The image; it may still be filled.

    Cost: one pass over the bytes; XXH3 releases the interpreter's lock while it runs.
    """

    def __init__(self, job: WriteJob, image: memoryview) -> None:
        starts = np.frombuffer(job.file.starts, dtype=np.int64)
        ends = starts + np.frombuffer(job.file.row_nbytes, dtype=np.int64)
        num_blocks = -(-(ends - starts) // job.block_nbytes)
        self._digest_ptr = np.concatenate([[0], np.cumsum(num_blocks)]).astype(np.int64)
        # The image has its rows in another order than the plan: by element size. Blocks are hashed
        # in the order of the image, as it fills, and their digests go to `_place`, the order of the
        # plan. `row` is the row of each block, `before` the number of that row's earlier blocks.
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
        """Hash the new whole blocks; the first `end` bytes of the image are in place."""
        done = len(self._digests)
        ready = done + int(np.searchsorted(self._stops[done:], end, side="right"))
        image, digest = self._image, xxhash.xxh3_64_intdigest
        self._digests += [digest(image[begin:stop]) for begin, stop in self._blocks[done:ready]]

    def finish(self) -> RowDigests:
        """Return the columns in the order of the plan; the whole image is in place."""
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
    """The job of a synchronous save in its own thread, held back by its gate."""

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
        """Start the thread."""
        self._thread.start()

    def wait_written(self) -> bytes:
        """Return `JobGate.record` when the rank's share is durable; raise the job's error."""
        self._written.wait()
        self._raise_error()
        return self.gate.record

    def wait_finished(self) -> None:
        """Return when the job is done; raise its error."""
        self._thread.join()
        self._raise_error()

    def stop(self) -> None:
        """End the job; it fails if it waits for the gate, and may have ended before."""
        self.gate.close()
        if self._thread.is_alive():
            self._thread.join()

    def _run(
        self, storage: Storage, job: WriteJob, image: memoryview, plan: EncodedPlan | None
    ) -> None:
        """Perform the job and keep its error for the thread that waits."""
        try:
            perform_job(
                storage, job, image, plan=plan, gate=self.gate, on_written=self._written.set
            )
        except BaseException as error:
            self._error = error
        finally:
            self._written.set()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error


def _ignore(*_: object) -> None:
    """Stand for a call that no one has asked for."""


def run_job(
    storage: Storage,
    job: WriteJob,
    image: memoryview,
    *,
    plan: EncodedPlan | None,
    on_begun: Callable[[], object] = _ignore,
    on_progress: Callable[[int], object] = _ignore,
    on_written: Callable[[], object] = _ignore,
) -> SaveOutcome:
    """Call `perform_job`; publish a failure on storage for the other ranks, and return it.

    Never raises. Bounded by `job.deadline_s`.
    """
    has_directory = False

    def begin() -> None:
        nonlocal has_directory
        has_directory = True
        on_begun()

    try:
        return perform_job(
            storage,
            job,
            image,
            plan=plan,
            on_begun=begin,
            on_progress=on_progress,
            on_written=on_written,
        )
    except Exception as caught:
        # The committer's failure record is the cause, if the error here only follows from it.
        error = committers_failure(storage, job) or caught
        record = ErrorRecord.of(error, foreign=StorageError)
        # A directory that was removed has ended every wait; made again, it would begin others.
        if not (has_directory and is_discarded(storage, job.directory)):
            publish_failure(storage, job, record, committer=plan is not None)
        return SaveOutcome(save_id=job.header.save_id, directory=job.directory, error=record)


def perform_job(
    storage: Storage,
    job: WriteJob,
    image: memoryview,
    *,
    plan: EncodedPlan | None,
    gate: JobGate | None = None,
    on_begun: Callable[[], object] = _ignore,
    on_progress: Callable[[int], object] = _ignore,
    on_written: Callable[[], object] = _ignore,
) -> SaveOutcome:
    """Write this rank's share; then commit, or wait for the committer's outcome on storage.

    Args:
        storage: Root of the checkpoints.
        job: The rank's share.
        image: The rank's data file in staging memory.
        plan: Plan of the whole save, on the rank that commits it.
        gate: Given for a synchronous save, whose ranks wait for each other by collectives. The
            commit waits for it, and the jobs of other ranks end with the writing.
        on_begun: Called when the save has its directory, locked by this process.
        on_progress: Called with the bytes passed to storage so far.
        on_written: Called when the image is no longer needed.

    Raises:
        HoldfastError: The failure of this rank, or that of another rank as recorded on storage.
    """
    began = time.monotonic()
    deadline = began + job.deadline_s
    before = requests_of(storage)
    # Before anything is written, a heartbeat included.
    if not getattr(storage, "is_one_place", False):
        require_root(storage, job.root)
    with ExitStack() as stack:
        if isinstance(storage, PosixStorage):
            stack.enter_context(storage.holding_dirs())
        _make_directory(storage, job, plan)  # the heartbeat locks it
        is_written = stack.enter_context(heartbeat(storage, job.directory, position=job.position))
        on_begun()
        # Phase 1: write this rank's bytes and its done-record.
        if plan is not None and not pause_of(storage):
            _write_plan(storage, job, plan)
        # Where a write is a request, a record takes none if it can reach the committing rank
        # without: the commit is then the next step, and a save that dies before it was promised to
        # no caller. The committing rank's own is at hand; the ranks of a synchronous save have a
        # connection to it, on which they tell that they have written.
        is_published = not pause_of(storage) or (plan is None and gate is None)
        own = write_share(
            storage, job, image, gate=gate, on_progress=on_progress, before=before,
            is_published=is_published,
        )  # fmt: skip
        if is_published:
            own.publish()
        elif gate is not None:
            gate.record = own.sealed()
        written = time.monotonic()
        on_written()
        # Phase 2: commit when every rank has written, or wait for the rank that does.
        if plan is not None:
            records = gate.wait_for_commit() if gate is not None else ()
            _commit_when_complete(storage, job, plan, deadline, own, before, records)
        elif gate is None:
            is_written.set()
            wait_for_commit(storage, job, deadline)
    return SaveOutcome(
        save_id=job.header.save_id,
        directory=step_dir(job.header.step),
        began=began,
        write_s=written - began,
        commit_s=time.monotonic() - written,
        requests=dict(requests_of(storage) - before),
    )


def _make_directory(storage: Storage, job: WriteJob, plan: EncodedPlan | None) -> None:
    """Make the directory of the save; where a write is a request, with plan and header in it.

    There the age of the directory is the first heartbeat, and one rank makes it: the others look
    for it, and make it only if that rank is late.
    """
    if not pause_of(storage):
        for name in ("plan", DONE_DIR, "data"):
            storage.make_dir(f"{job.directory}/{name}", durable=False)
    elif plan is not None:
        make_dir_with(storage, job.directory, _plan_files(job.header, plan))
    elif not is_joined(storage, job.directory):
        time.sleep(_LATE_S)
        if not is_joined(storage, job.directory):
            storage.make_dir(job.directory, durable=False)


def _plan_files(header: SaveHeader, plan: EncodedPlan) -> dict[str, bytes]:
    """Return plan and header by their paths: with them a repair can finish the save."""
    return {PLAN_FILE: plan.data, HEADER_FILE: seal(msgspec.msgpack.encode(header))}


def _write_plan(storage: Storage, job: WriteJob, plan: EncodedPlan) -> None:
    """Write plan and header on the rank that commits, for a repair.

    Nothing here is synced: the commit makes durable what the checkpoint keeps of it. If the machine
    stops and the rest is lost, the save is abandoned.
    """
    # The first heartbeat: its content is this clock's time, its own time is the storage's.
    now = f"{time.time():.3f}".encode()
    storage.replace_file(f"{job.directory}/{ALIVE_FILE}", now, durable=False)
    # By what it replaces, and not by times, a repair knows later which of two versions is newer:
    # the clock may have been set back in between. Where that cannot be read now, times have to do.
    try:
        replaces = known_save_id(storage, step_dir(job.header.step)) or ""
    except StorageError:
        replaces = None
    header = msgspec.structs.replace(job.header, replaces=replaces)
    for path, data in _plan_files(header, plan).items():
        storage.write_file(f"{job.directory}/{path}", data, durable=False)


def write_share(
    storage: Storage,
    job: WriteJob,
    image: memoryview,
    *,
    gate: JobGate | None = None,
    on_progress: Callable[[int], object] = _ignore,
    before: Counter[str] | None = None,
    is_published: bool = True,
) -> OwnRecord:
    """Write and sync a rank's data file; return its done-record, which the caller publishes.

    Nothing here is visible as a checkpoint, whatever happens.

    Args:
        storage: Root of the checkpoints.
        job: The rank's share.
        image: The rank's data file in staging memory.
        gate: Given if the image is still being staged, and hashed meanwhile; without it the whole
            image is in place.
        on_progress: Called with the bytes passed to storage so far.
        before: The storage's requests before the job; None for none.
        is_published: The record will be written to storage by a rank that does not commit.

    Raises:
        StorageError: A write failed; the message names the path.

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
    sent = requests_of(storage) - (before or Counter())
    record = DoneRecord(
        position=job.position,
        plan_digest=job.plan_digest,
        save_id=job.header.save_id,
        file=job.file.name,
        nbytes=image.nbytes if job.file.name is not None else 0,
        header_nbytes=job.file.header_nbytes,
        header_digest=_envelope_digest(job, image),
        starts=job.file.starts,
        row_nbytes=job.file.row_nbytes,
        digest_ptr=column(digests.digest_ptr),
        digests=column(digests.digests),
        checks=checks,
        lanes=column(digests.lanes),
        values=job.values,
        # And the record itself, which is one more.
        requests=dict(sent + Counter(put=int(is_published))) if sent else {},
        stamp=file_stamp(storage, f"{job.directory}/{job.file.name}") if job.file.name else None,
    )
    path = f"{job.directory}/{done_file(job.position)}"
    return OwnRecord(storage, path, record)


@dataclass(slots=True)
class OwnRecord:
    """This rank's done-record, and its place on storage."""

    storage: Storage
    path: str
    record: DoneRecord
    is_there: bool = False

    def publish(self) -> None:
        """Write it, once; after the sync of the data that it vouches for.

        Not synced itself: if the machine stops and the record is lost, the save is abandoned; if it
        is there, so are the bytes.
        """
        if not self.is_there:
            self.storage.write_file(self.path, self.sealed(), durable=False)
            self.is_there = True

    def sealed(self) -> bytes:
        """Return it as bytes, with their digest."""
        return seal(msgspec.msgpack.encode(self.record))


def _write_image(
    storage: Storage,
    job: WriteJob,
    image: memoryview,
    *,
    gate: JobGate | None,
    on_progress: Callable[[int], object],
) -> None:
    """Write and sync the data file, if the rank has one."""
    if job.file.name is None:
        return
    path = f"{job.directory}/{job.file.name}"
    with storage.create(path, nbytes=image.nbytes) as sink:
        # The image stays as it is until the sync.
        write = getattr(sink, "write_kept", sink.write_at)
        for start in range(0, image.nbytes, _WRITE_NBYTES):
            end = min(start + _WRITE_NBYTES, image.nbytes)
            if gate is not None:
                gate.wait(end)  # the image fills from the front, at the same time
            write(start, image[start:end])
            on_progress(end)
        sink.sync()


def _envelope_digest(job: WriteJob, image: memoryview) -> str:
    """Return the digest of all bytes of the image that are not payload."""
    starts = np.frombuffer(job.file.starts, dtype=np.int64)
    nbytes = np.frombuffer(job.file.row_nbytes, dtype=np.int64)
    between = gaps(starts, nbytes, file_nbytes=image.nbytes if job.file.name is not None else 0)
    return digest128_of(image[begin:end] for begin, end in between)


def _commit_when_complete(
    storage: Storage,
    job: WriteJob,
    plan: EncodedPlan,
    deadline: float,
    own: OwnRecord,
    before: Counter[str],
    records: Sequence[bytes],
) -> None:
    """Wait for every rank's done-record, then commit.

    Args:
        storage, job, plan: Of the save.
        deadline: When to give up, by the monotonic clock.
        own: The done-record of this rank.
        before: The storage's requests before the job.
        records: The sealed done-records of all ranks that came by message; empty if they are on
            storage.
    """
    ranks = plan.plan.ranks
    commit = partial(
        commit_save, storage, job.directory, plan=plan, header=job.header, own=own.record,
        before=before,
    )  # fmt: skip
    others = _others_at_hand(storage, job, plan, own, records)
    if others is not None:
        # What they state is there: each upload was answered before its rank made its record.
        sizes = {each.file: each.nbytes for each in (own.record, *others) if each.file is not None}
        plan_files = _plan_files(job.header, plan)
        if not held_with_name(storage, plan_files):  # objects, which are to go after the commit
            sizes |= {path: len(data) for path, data in plan_files.items()}
        sizes |= {done_file(each.position): 0 for each in others if not any(records)}
        return commit(sizes=sizes, others=others)
    began = time.monotonic()
    if not own.is_there:
        # A look at one record has shown that the save has to wait. From here on others can finish
        # it if this process dies.
        own.publish()
        time.sleep(pause_of(storage))
    while True:
        sizes_there = sizes_below(storage, job.directory)
        if sizes_there is None:
            try:
                names = storage.list(f"{job.directory}/{DONE_DIR}")
            except StorageError:
                if not is_discarded(storage, job.directory):
                    raise
                return require_committed(storage, job)
        else:
            names = [
                path[len(DONE_DIR) + 1 :] for path in sizes_there if path.startswith(f"{DONE_DIR}/")
            ]
        failed = [name for name in names if name.endswith(".failed")]
        if failed:
            raise read_failure(storage, f"{job.directory}/{DONE_DIR}/{failed[0]}")
        missing = missing_ranks(names, ranks)
        if not missing:
            return commit(sizes=sizes_there)
        now = time.monotonic()
        if now > deadline:
            raise DeadlineError(
                f"save of step {job.header.step}: ranks {missing} did not finish writing within "
                f"{job.deadline_s:.0f} s (phase: write); their processes or writers may be gone",
                details={"missing_ranks": missing, "steps": [job.header.step]},
            )
        pause = max(pause_s(now - began), pause_of(storage))
        time.sleep(min(pause, max(deadline - now, 0.0)))


def _others_at_hand(
    storage: Storage,
    job: WriteJob,
    plan: EncodedPlan,
    own: OwnRecord,
    records: Sequence[bytes],
) -> list[DoneRecord] | None:
    """Return the done-records of all other ranks, if no listing is needed to know them.

    None if some may be missing. On a disk a listing costs nothing, and what counts is what is
    there.

    Cost: none for those that came by message. Otherwise a request for one, and if that is there,
    one for each.
    """
    ranks = plan.plan.ranks
    others = [position for position in range(len(ranks)) if position != job.position]
    if any(records):
        return [
            unseal(records[at], DoneRecord, where=f"the done-record of rank {ranks[at]}")
            for at in others
        ]
    if own.is_there:
        return None

    def look(position: int) -> DoneRecord | None:
        try:
            return read_done(storage, job.directory, position, plan, job.header)
        except StorageError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                return None
            raise

    # One first, so that a save that has to wait pays for one look and not for many.
    there = [look(position) for position in others[-1:]]
    if None not in there:
        there = [*for_each(storage, look, others[:-1]), *there]
    return [each for each in there if each is not None] if None not in there else None


@contextmanager
def heartbeat(storage: Storage, directory: str, *, position: int) -> Iterator[threading.Event]:
    """In the body, a thread renews this rank's heartbeat on storage every two seconds.

    On a POSIX file system the directory of the save, which must be there, is locked as long.

    Nothing is written in the first two seconds, while the directory itself is young enough. A
    storage that refuses a heartbeat is asked again at the next one.

    Args:
        storage: Root of the checkpoints.
        directory: Directory of the save.
        position: Position of the rank in the plan.

    Yields:
        An event for the body to set when this rank has written its share. From then on the rank
        has a heartbeat only until the committer has begun, which then has its own: if the committer
        dies, a repair need not wait for the heartbeats of ranks that only wait for it.
    """
    step, save_id = parse_saving_dir(directory) or (0, "")
    path = heartbeat_file(step, save_id, position)
    is_written = threading.Event()
    is_made = is_over = False

    def clear() -> None:
        nonlocal is_made
        if is_made:
            with suppress(StorageError):
                storage.remove_tree(path)
            is_made = False

    def beat() -> None:
        nonlocal is_made, is_over
        if is_over:
            return
        if is_written.is_set() and storage.exists(f"{directory}/{PLAN_FILE}"):
            is_over = True
            release()
            clear()
            return
        storage.make_dir(LEASES_DIR, durable=False)
        is_made = True
        storage.replace_file(path, f"{time.time():.3f}".encode(), durable=False)

    # The lock tells this host at once whether the save has a writer; heartbeats tell the others.
    with locking(storage, directory) as release:
        name = "holdfast-heartbeat"
        with repeated(beat, every_s=HEARTBEAT_S, name=name, at_end=clear):
            yield is_written
