"""What a save that failed leaves on storage: records for the other ranks, and what to remove."""

from __future__ import annotations

from contextlib import suppress

import msgspec

from holdfast.errors import ErrorRecord, HoldfastError
from holdfast.format.names import parse_saving_dir, step_dir, unclaimed
from holdfast.format.versions import save_id_of
from holdfast.storage import Storage
from holdfast.writer.records import DONE_DIR, FAILED_FILE, WriteJob, seal, unseal


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
