"""How the ranks of a save learn from storage how it ended: failure records, and waiting."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Literal

import msgspec

from holdfast.errors import DeadlineError, ErrorRecord, HoldfastError, StorageError
from holdfast.format.names import MANIFEST, parse_saving_dir, step_dir, unclaimed
from holdfast.format.root_identity import is_other_root
from holdfast.format.versions import known_save_id
from holdfast.storage import Storage
from holdfast.storage.reading import pause_of
from holdfast.writer.records import (
    DONE_DIR,
    FAILED_FILE,
    PLAN_FILE,
    WriteJob,
    done_file,
    read_sealed,
    seal,
)

DISCARDED = "discarded"
"""Among the details of an error that says that a save is gone, and not why."""
_PLAN_DIR = PLAN_FILE.partition("/")[0]
_FIRST_PAUSE_S = 0.002
_SHORT_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 2.0


def publish_failure(
    storage: Storage, job: WriteJob, record: ErrorRecord, *, committer: bool
) -> None:
    """Publish a failure record for the other ranks; a storage that refuses even that is ignored.

    A rank that cannot write its record removes the directory of the save instead, which ends the
    others' wait, too.

    The record is not synced: the ranks that wait for it do not survive the machine either.

    Nothing is written to another root, where no rank looks for it.
    """
    if is_other_root(storage, job.root):
        return
    if not committer:
        record = of_rank(job.rank, record)
    path, data = _failure_file(job, record, position=job.position, committer=committer)
    try:
        storage.make_dir(f"{job.directory}/{DONE_DIR}", durable=False)
        storage.write_file(path, data, durable=False)
    except HoldfastError:
        # The data of a failed save is useless, and may be what filled the disk. But if the exchange
        # with an older version could not be undone, this directory holds that older version.
        with suppress(HoldfastError):
            in_place = known_save_id(storage, step_dir(job.header.step)) == job.header.save_id
            if job.file.name is not None and not in_place:
                storage.remove_tree(f"{job.directory}/{job.file.name}")
        try:
            storage.write_file(path, data, durable=False)
        except HoldfastError:
            # The others wait for this rank: of a directory that is gone they learn at once, of a
            # save without a record at its deadline. By a rank's done-record the committer may be
            # giving the save its name already.
            with suppress(HoldfastError):
                if committer or not storage.exists(f"{job.directory}/{done_file(job.position)}"):
                    discard_save(storage, job.directory)


def of_rank(rank: int, record: ErrorRecord) -> ErrorRecord:
    """Return a record that says which rank has failed, in words too, if it does not yet."""
    named = f"rank {rank}: "
    message = record.message if record.message.startswith(named) else named + record.message
    return msgspec.structs.replace(
        record, message=message, details={"failed_ranks": [rank], **record.details}
    )


def pass_on_failure(
    storage: Storage, job: WriteJob, record: ErrorRecord, *, position: int, committer: bool
) -> None:
    """Publish for a rank that could not do so itself; a storage that refuses it is ignored.

    Args:
        storage: Root of the checkpoints, as this rank has it.
        job: This rank's share of the save.
        record: What that rank has failed with.
        position: That rank's position in the plan.
        committer: True if it is the one that commits.
    """
    with suppress(HoldfastError):
        if is_other_root(storage, job.root) or not storage.exists(job.directory):
            return
        # By its done-record the committer may be giving the save its name already.
        if committer or not storage.exists(f"{job.directory}/{done_file(position)}"):
            path, data = _failure_file(job, record, position=position, committer=committer)
            storage.write_file(path, data, durable=False)


def _failure_file(
    job: WriteJob, record: ErrorRecord, *, position: int, committer: bool
) -> tuple[str, bytes]:
    """Return the path of a rank's failure record, and its content."""
    name = FAILED_FILE if committer else f"{DONE_DIR}/{position:05d}.failed"
    return f"{job.directory}/{name}", seal(msgspec.msgpack.encode(record))


def committers_failure(storage: Storage, job: WriteJob) -> HoldfastError | None:
    """Return the failure that the committer has recorded for this save, or None."""
    path = f"{job.directory}/{FAILED_FILE}"
    try:
        return read_failure(storage, path) if storage.exists(path) else None
    except HoldfastError:
        return None


def read_failure(storage: Storage, path: str) -> HoldfastError:
    """Return the error in a failure record; CorruptionError if it cannot be read."""
    return read_sealed(storage, path, ErrorRecord).to_error()


def discard_save(storage: Storage, directory: str) -> None:
    """Remove the directory of an abandoned save; a failure to do so is ignored.

    If the save is at its final name, or that cannot be known now, the directory is kept. It may
    then hold the replaced version, which is needed if the replacement turns out not to be durable.
    """
    try:
        parsed = parse_saving_dir(directory)
        if parsed is not None:
            step, save_id = parsed
            if known_save_id(storage, step_dir(step)) == unclaimed(save_id):
                return
        if storage.exists(directory):
            storage.remove_tree(directory)
    except HoldfastError:
        return


def is_committed(storage: Storage, *, step: int, save_id: str) -> bool:
    """Return True if another process has committed a save; after that, no power loss takes it.

    That process may not have synced the new name yet, or have ended before it did.

    Raises:
        StorageError: It cannot be known now, or cannot be made durable.
    """
    if known_save_id(storage, step_dir(step)) != save_id:
        return False
    storage.sync_dir("")
    return True


def require_committed(storage: Storage, job: WriteJob) -> None:
    """Return if a save is committed whose directory is gone, as a repair may have done.

    Raises:
        StorageError: It is not, or that cannot be known now.
    """
    try:
        is_there = is_committed(storage, step=job.header.step, save_id=job.header.save_id)
    except StorageError as error:
        raise StorageError(
            f"{storage.describe(job.directory)} is gone, and whether step {job.header.step} is "
            f"committed cannot be known now: {error}; look before you save again",
            details=error.details,
        ) from error
    if not is_there:
        raise _discarded(storage, job)


def _discarded(storage: Storage, job: WriteJob) -> StorageError:
    """Return the error of a save whose directory is gone, and which is not committed."""
    return StorageError(
        f"{storage.describe(job.directory)} is gone and step {job.header.step} is not "
        f"committed: the save was discarded; save again",
        details={DISCARDED: True},
    )


def is_discarded(storage: Storage, directory: str) -> bool:
    """Return whether the directory of a save is gone; False where that cannot be seen."""
    try:
        return not storage.exists(directory)
    except HoldfastError:
        return False


def wait_for_commit(storage: Storage, job: WriteJob, deadline: float) -> None:
    """Return when the committer has committed this save; raise its failure record.

    A look that fails says nothing, and is made again until the deadline: the save may be committed,
    and a network file system that refuses a call for a moment does not undo it.

    Raises:
        HoldfastError: The failure that the committer has recorded.
        DeadlineError: The save is not committed by the deadline.
        StorageError: The save was discarded; or its end could not be seen by the deadline.

    Cost: one listing of a small directory for each look, and more only towards the end.
    """
    began = time.monotonic()
    while True:
        refused: StorageError | None = None
        try:
            if (end := _look(storage, job)) is not None:
                break
        except StorageError as error:
            refused = error
        now = time.monotonic()
        if now > deadline:
            raise _not_seen(job, refused) from refused
        pause = max(pause_s(now - began), pause_of(storage))
        time.sleep(min(pause, max(deadline - now, 0.0)))
    if isinstance(end, HoldfastError):
        raise end


def _look(storage: Storage, job: WriteJob) -> HoldfastError | Literal["committed"] | None:
    """Return how a save has ended, or None if it has not; StorageError if that cannot be seen."""
    names = _names_in(storage, job.directory)
    # While it has the plan and no manifest, nothing is committed: skip the read. Without a plan, a
    # rank may have made it again after the commit, to publish a failure.
    is_before = names is not None and MANIFEST not in names and {_PLAN_DIR, DONE_DIR} <= {*names}
    if not is_before and is_committed(storage, step=job.header.step, save_id=job.header.save_id):
        return "committed"
    if names is None:
        return _discarded(storage, job)
    if FAILED_FILE in names:
        return read_failure(storage, f"{job.directory}/{FAILED_FILE}")
    return None


def _not_seen(job: WriteJob, refused: StorageError | None) -> HoldfastError:
    """Return the error of a wait that has reached its deadline, whose last look was refused."""
    within = f"within {job.deadline_s:.0f} s (phase: commit)"
    if refused is None:
        return DeadlineError(
            f"save of step {job.header.step}: no commit {within}; the committing rank's writer may "
            f"be gone"
        )
    return StorageError(
        f"save of step {job.header.step}: whether it is committed could not be seen {within}: "
        f"{refused}; look before you save again",
        details=refused.details,
    )


def _names_in(storage: Storage, directory: str) -> list[str] | None:
    """Return the names in a directory; None if it is gone."""
    try:
        return storage.list(directory)
    except StorageError:
        if storage.exists(directory):
            raise
        return None


def pause_s(waited_s: float) -> float:
    """Return the seconds to wait before the next look at storage.

    It is a fifth of the time waited so far, at most a tenth of a second, so that a usual commit is
    seen with little delay. After a long wait it grows to two seconds, since all ranks may be
    looking at once.
    """
    short = min(_FIRST_PAUSE_S + waited_s / 5, _SHORT_PAUSE_S)
    return min(max(short, waited_s / 50), _LONGEST_PAUSE_S)
