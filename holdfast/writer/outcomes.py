"""How the ranks of a save learn from storage how it ended: failure records, and waiting."""

from __future__ import annotations

import time
from contextlib import suppress

import msgspec

from holdfast.errors import DeadlineError, ErrorRecord, HoldfastError, StorageError
from holdfast.format.names import MANIFEST, parse_saving_dir, step_dir, unclaimed
from holdfast.format.versions import save_id_of
from holdfast.storage import Storage
from holdfast.writer.records import DONE_DIR, FAILED_FILE, WriteJob, seal, unseal

_FIRST_PAUSE_S = 0.002
_SHORT_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 2.0


def publish_failure(
    storage: Storage, job: WriteJob, record: ErrorRecord, *, committer: bool
) -> None:
    """Publish a failure record for the other ranks; a storage that refuses even that is ignored.

    It need not outlive the machine: neither do those who wait for it.
    """
    if not committer:
        record = msgspec.structs.replace(
            record,
            message=f"rank {job.rank}: {record.message}",
            details={"failed_ranks": [job.rank], **record.details},
        )
    name = FAILED_FILE if committer else f"{DONE_DIR}/{job.position:05d}.failed"
    path = f"{job.directory}/{name}"
    data = seal(msgspec.msgpack.encode(record))
    try:
        storage.make_dir(f"{job.directory}/{DONE_DIR}", durable=False)
        storage.write_file(path, data, durable=False)
    except HoldfastError:
        # The data of a failed save is of no use, and may be what filled the disk. But where its
        # replacement of a step could not be taken back, this is what was replaced.
        with suppress(HoldfastError):
            in_place = save_id_of(storage, step_dir(job.header.step)) == job.header.save_id
            if job.file.name is not None and not in_place:
                storage.remove_tree(f"{job.directory}/{job.file.name}")
            storage.write_file(path, data, durable=False)


def committers_failure(storage: Storage, job: WriteJob) -> HoldfastError | None:
    """What the committer has recorded as the failure of this save, if anything."""
    path = f"{job.directory}/{FAILED_FILE}"
    try:
        return read_failure(storage, path) if storage.exists(path) else None
    except HoldfastError:
        return None


def read_failure(storage: Storage, path: str) -> HoldfastError:
    """The error in a failure record; CorruptionError where it is none."""
    return unseal(storage.read(path), ErrorRecord, where=storage.describe(path)).to_error()


def discard_save(storage: Storage, directory: str) -> None:
    """Remove what an abandoned save left; a failure to do so is not an error of the save.

    What such a directory holds is kept where the save is at its final name: then it is the version
    that was replaced, and may be needed if the replacement turns out not to be durable.
    """
    try:
        parsed = parse_saving_dir(directory)
        if parsed is not None and save_id_of(storage, step_dir(parsed[0])) == unclaimed(parsed[1]):
            return
        if storage.exists(directory):
            storage.remove_tree(directory)
    except HoldfastError:
        return


def wait_for_commit(storage: Storage, job: WriteJob, deadline: float) -> None:
    """Wait until the committer has committed this save, or recorded its failure, and raise that.

    Cost: one listing of a small directory a look, and more only towards the end.
    """
    final = step_dir(job.header.step)
    began = time.monotonic()
    while True:
        names = _names_in(storage, job.directory)
        # While the records are there and the manifest is not, nothing is committed.
        if names is None or MANIFEST in names or DONE_DIR not in names:
            if save_id_of(storage, final) == job.header.save_id:
                return
            if names is None:
                raise StorageError(
                    f"{storage.describe(job.directory)} is gone and step {job.header.step} was not "
                    f"committed: the save was discarded"
                )
        if FAILED_FILE in (names or ()):
            raise read_failure(storage, f"{job.directory}/{FAILED_FILE}")
        now = time.monotonic()
        if now > deadline:
            raise DeadlineError(
                f"save of step {job.header.step}: no commit within {job.deadline_s:.0f} s (phase: "
                f"commit); the committing rank's writer may be gone"
            )
        time.sleep(min(pause_s(now - began), max(deadline - now, 0.0)))


def _names_in(storage: Storage, directory: str) -> list[str] | None:
    """The names in a directory; None where it is gone."""
    try:
        return storage.list(directory)
    except StorageError:
        if storage.exists(directory):
            raise
        return None


def pause_s(waited_s: float) -> float:
    """How long to wait for the next look at storage.

    A fifth of what was waited so far, up to a tenth of a second: what comes as usual is seen with
    little delay. What has not come for long is looked at every two seconds in the end, since all
    ranks may be looking.
    """
    short = min(_FIRST_PAUSE_S + waited_s / 5, _SHORT_PAUSE_S)
    return min(max(short, waited_s / 50), _LONGEST_PAUSE_S)
