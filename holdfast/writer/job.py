"""One rank's part in a save after staging: write, then commit or learn what came of it.

The same function runs in the writer process and, for synchronous saves, in the caller.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

import msgspec

from holdfast import errors
from holdfast.errors import DeadlineError, HoldfastError, StorageError
from holdfast.format.names import step_dir
from holdfast.format.versions import save_id_of
from holdfast.storage import Storage
from holdfast.writer.commit import Committed, commit_save
from holdfast.writer.heartbeat import Heartbeat
from holdfast.writer.records import (
    ALIVE_FILE,
    DONE_DIR,
    FAILED_FILE,
    HEADER_FILE,
    PLAN_FILE,
    CommitPlan,
    Failure,
    done_file,
    failed_file,
    seal,
    unseal,
)
from holdfast.writer.write import WriteJob, write_share

_FIRST_PAUSE_S = 0.002
_LONGEST_PAUSE_S = 0.1
_LONGER = 1.25


class SaveOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a save, as one rank's writer saw it. `error_type` is empty for success."""

    save_id: str
    directory: str
    error_type: str = ""
    message: str = ""
    nbytes: int = 0
    write_s: float = 0.0
    commit_s: float = 0.0

    def error(self) -> HoldfastError | None:
        """The failure as an exception of its class, or None."""
        if not self.error_type:
            return None
        kind = getattr(errors, self.error_type, HoldfastError)
        return kind(self.message)


def run_job(
    storage: Storage,
    job: WriteJob,
    image: memoryview,
    *,
    plan: CommitPlan | None,
    encoded_plan: bytes,
    on_progress: Callable[[int], object] | None = None,
    on_written: Callable[[], object] | None = None,
) -> SaveOutcome:
    """Write this rank's share; then commit (with `plan`) or wait for the committer's word.

    `on_written` is called when the image is no longer needed. Never raises: a failure is published
    on storage, so that the other ranks learn of it, and returned. Bounded by `job.deadline_s`.
    """
    began = time.monotonic()
    written = began
    try:
        with Heartbeat(storage, job.directory, position=job.position) as beat:
            prepare_directory(storage, job, plan, encoded_plan)
            write_share(storage, job, image, on_progress=on_progress)
            written = time.monotonic()
            if on_written is not None:
                on_written()
            if plan is not None:
                made = _commit_when_complete(storage, job, plan, began + job.deadline_s)
            else:
                beat.rest()
                made = _learn_outcome(storage, job, began + job.deadline_s)
    except Exception as caught:
        error = _told_failure(storage, job) or caught
        publish_failure(storage, job, error, committer=plan is not None)
        return SaveOutcome(
            save_id=job.header.save_id,
            directory=job.directory,
            error_type=type(error).__name__ if isinstance(error, HoldfastError) else "StorageError",
            message=str(error) if isinstance(error, HoldfastError) else repr(error),
        )
    return SaveOutcome(
        save_id=job.header.save_id,
        directory=made.directory,
        nbytes=image.nbytes,
        write_s=written - began,
        commit_s=time.monotonic() - written,
    )


def give_sign(storage: Storage, job: WriteJob) -> None:
    """The committer's first sign: a file that holds its clock's time and has the storage's."""
    word = f"{time.time():.3f}".encode()
    storage.replace_file(f"{job.directory}/{ALIVE_FILE}", word, durable=False)


def prepare_directory(
    storage: Storage, job: WriteJob, plan: CommitPlan | None, encoded_plan: bytes
) -> None:
    """Make the save's directories; the committer leaves plan and header for a repair.

    Nothing here is synced: what a checkpoint keeps of it is made durable by the commit, and without
    the rest, after the machine stopped, the save is abandoned.
    """
    for name in ("plan", DONE_DIR, "data"):
        storage.make_dir(f"{job.directory}/{name}", durable=False)
    if plan is not None:
        give_sign(storage, job)
        storage.write_file(f"{job.directory}/{PLAN_FILE}", encoded_plan, durable=False)
        header = seal(msgspec.msgpack.encode(job.header))
        storage.write_file(f"{job.directory}/{HEADER_FILE}", header, durable=False)


def publish_failure(storage: Storage, job: WriteJob, error: Exception, *, committer: bool) -> None:
    """Leave word of a failure for the other ranks; a storage that refuses even that is let be.

    It need not outlive the machine: neither do those who wait for it.
    """
    where = f"rank {job.rank}: " if not committer else ""
    text = str(error) if isinstance(error, HoldfastError) else repr(error)
    failure = Failure(
        error_type=type(error).__name__ if isinstance(error, HoldfastError) else "StorageError",
        message=f"{where}{text}",
    )
    path = f"{job.directory}/{FAILED_FILE if committer else failed_file(job.position)}"
    word = seal(msgspec.msgpack.encode(failure))
    try:
        storage.make_dir(f"{job.directory}/{DONE_DIR}", durable=False)
        storage.write_file(path, word, durable=False)
    except HoldfastError:
        # The data of a failed save is of no use, and may be what filled the disk. But where its
        # replacement of a step could not be taken back, this is what was replaced.
        with suppress(HoldfastError):
            in_place = save_id_of(storage, step_dir(job.header.step)) == job.header.save_id
            if job.file is not None and not in_place:
                storage.remove_tree(f"{job.directory}/{job.file}")
            storage.write_file(path, word, durable=False)


def _commit_when_complete(
    storage: Storage, job: WriteJob, plan: CommitPlan, deadline: float
) -> Committed:
    """Wait for every rank's done-record, then commit."""
    expected = {done_file(p).rpartition("/")[2] for p in range(len(plan.ranks))}
    pause = _FIRST_PAUSE_S
    while True:
        present = set(storage.list(f"{job.directory}/{DONE_DIR}"))
        failed = sorted(name for name in present if name.endswith(".failed"))
        if failed:
            raise _read_failure(storage, f"{job.directory}/{DONE_DIR}/{failed[0]}")
        missing = expected - present
        if not missing:
            return commit_save(
                storage, job.directory, plan=plan, plan_digest=job.plan_digest, header=job.header
            )
        now = time.monotonic()
        if now > deadline:
            late = [plan.ranks[int(name.partition(".")[0])] for name in sorted(missing)]
            raise DeadlineError(
                f"save of step {job.header.step}: ranks {late} did not finish writing within "
                f"{job.deadline_s:.0f} s (phase: write); their processes or writers may be gone"
            )
        time.sleep(min(pause, max(deadline - now, 0.0)))
        pause = min(pause * _LONGER, _LONGEST_PAUSE_S)


def _learn_outcome(storage: Storage, job: WriteJob, deadline: float) -> Committed:
    """Wait until the committer has committed this save, or said that it failed."""
    final = step_dir(job.header.step)
    pause = _FIRST_PAUSE_S
    while True:
        if save_id_of(storage, final) == job.header.save_id:
            return Committed(directory=final, num_tensors=0, nbytes=0, stored_nbytes=0)
        if storage.exists(f"{job.directory}/{FAILED_FILE}"):
            raise _read_failure(storage, f"{job.directory}/{FAILED_FILE}")
        if not storage.exists(job.directory):
            # Renamed between the two looks, or discarded; a committed one has its name by now.
            if save_id_of(storage, final) == job.header.save_id:
                continue
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


def _told_failure(storage: Storage, job: WriteJob) -> HoldfastError | None:
    """What the committer said of this save: the cause, where an error here only follows from it."""
    path = f"{job.directory}/{FAILED_FILE}"
    try:
        return _read_failure(storage, path) if storage.exists(path) else None
    except HoldfastError:
        return None


def _read_failure(storage: Storage, path: str) -> HoldfastError:
    failure = unseal(storage.read(path), Failure, where=storage.describe(path))
    kind = getattr(errors, failure.error_type, HoldfastError)
    return kind(failure.message)
