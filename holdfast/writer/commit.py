"""The commit: from done-records on storage to a checkpoint with its final name.

Needs no process of the save but the one that runs it: the plan, the data files and the
done-records are on storage.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import dataclass

from holdfast.errors import CorruptionError, HoldfastError, PlanError, StorageError
from holdfast.format.index import encode_index, validate_index
from holdfast.format.manifest import (
    Manifest,
    encode_manifest,
)
from holdfast.format.names import (
    INDEX,
    LATEST,
    MANIFEST,
    latest_step,
    parse_saving_dir,
    step_dir,
    unclaimed,
)
from holdfast.format.reader import Snapshot
from holdfast.format.versions import retire, retire_replaced, save_id_of
from holdfast.storage import Storage
from holdfast.writer.assembly import build_index, build_manifest, compare_checks, merge_values
from holdfast.writer.records import CommitPlan, DoneRecord, SaveHeader, done_file, unseal

_LOG = logging.getLogger("holdfast")
_NUM_LOOKS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """What a commit made: its directory, and sizes in bytes."""

    directory: str
    num_tensors: int
    nbytes: int
    stored_nbytes: int


def commit_save(
    storage: Storage,
    directory: str,
    *,
    plan: CommitPlan,
    plan_digest: str,
    header: SaveHeader,
) -> Committed:
    """Check that every planned byte is accounted for, then give the checkpoint its name.

    Order: records checked, index and manifest written and synced, directories synced, one rename,
    parent synced, pointer replaced. Raises PlanError (values or replicas that differ between
    ranks, naming key and ranks), CorruptionError (a record that is not this save's), StorageError;
    the previous checkpoint is untouched in each case but one, which the error names: the rename was
    made, could not be made durable and could not be taken back. What fails after the commit (the
    pointer, removing what was replaced) is logged as a warning, and set right by the next save or
    repair. What was replaced goes once nobody reads it; until then it is kept under another name.
    Cost: O(rows) vector work, two small files, five syncs and two for the pointer.
    """
    try:
        manifest = _complete(storage, directory, plan, plan_digest, header)
    except StorageError:
        final = step_dir(header.step)
        if storage.exists(directory) or save_id_of(storage, final) != header.save_id:
            raise
        # A repair took this save for abandoned, and has finished it.
        manifest = Snapshot.open(storage, final).manifest
    else:
        _publish(storage, directory, step_dir(header.step), header)
    try:
        point_to_newest(storage)
    except HoldfastError as error:
        _LOG.warning(
            "step %d is committed, but %s could not be replaced; the next save or `holdfast "
            "repair` does that: %s",
            header.step,
            storage.describe(LATEST),
            error,
        )
    return Committed(
        directory=step_dir(header.step),
        num_tensors=len(plan.keys),
        nbytes=manifest.totals.nbytes,
        stored_nbytes=manifest.totals.stored_nbytes,
    )


def _complete(
    storage: Storage, directory: str, plan: CommitPlan, plan_digest: str, header: SaveHeader
) -> Manifest:
    """Make a durable checkpoint of what the ranks wrote, which lacks only its name."""
    try:
        index_bytes, manifest = _assemble(storage, directory, plan, plan_digest, header)
    except HoldfastError:
        raise
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise CorruptionError(
            f"{storage.describe(directory)}: the plan and the records do not fit each other: "
            f"{error!r}; save again"
        ) from error
    _check_sizes(storage, directory, manifest)
    _write_synced(storage, f"{directory}/{INDEX}", index_bytes)
    _write_synced(storage, f"{directory}/{MANIFEST}", encode_manifest(manifest))
    unnamed = [name for name in storage.list(directory) if name.startswith((".tmp-", ".trash-"))]
    for name in ("plan", "done", *unnamed):  # the latter are of an earlier, killed commit
        storage.remove_tree(f"{directory}/{name}", durable=False)
    if plan.writers:
        storage.sync_dir(f"{directory}/data")
    storage.sync_dir(directory)
    return manifest


def _assemble(
    storage: Storage, directory: str, plan: CommitPlan, plan_digest: str, header: SaveHeader
) -> tuple[bytes, Manifest]:
    """Index and manifest of what the records say, proven against the plan."""
    records = [
        _read_done(storage, directory, position, plan, plan_digest, header)
        for position in range(len(plan.ranks))
    ]
    compare_checks(plan, records)
    parts = merge_values(plan, records)
    index = build_index(plan, records)
    index_bytes = encode_index(index)
    manifest = build_manifest(plan, header, records, index, index_bytes, parts)
    validate_index(index, manifest)
    return index_bytes, manifest


def point_to_newest(storage: Storage, *, dry_run: bool = False) -> int | None:
    """Let the pointer file name the newest committed step; that step if it named another.

    Looks again after writing, since a save may commit meanwhile. Nothing where nothing is
    committed. `dry_run`: only look.
    """
    changed: int | None = None
    for _ in range(_NUM_LOOKS):
        newest = latest_step(storage)
        if newest is None:
            return changed
        word = f"{newest}\n".encode()
        if storage.exists(LATEST) and storage.read(LATEST) == word:
            return changed
        changed = newest
        if dry_run:
            return changed
        storage.replace_file(LATEST, word)
    return changed


def _write_synced(storage: Storage, path: str, data: bytes) -> None:
    """Write a file whose name nobody looks for yet: its bytes are durable, its name is not."""
    if storage.exists(path):  # of an earlier, killed commit
        storage.remove_tree(path, durable=False)
    with storage.create(path, nbytes=len(data)) as sink:
        sink.write_at(0, memoryview(data))
        sink.sync()


def _publish(storage: Storage, directory: str, final: str, header: SaveHeader) -> None:
    """The rename that commits. An old checkpoint of the step lives until then."""
    if header.overwrite and storage.exists(final) and _replace(storage, directory, final, header):
        return
    try:
        storage.rename_dir(directory, final)
    except StorageError as error:
        if save_id_of(storage, final) == header.save_id and _was_not_made(error):
            return  # a repair that took this save for abandoned has finished it
        _take_back(storage, directory, final, header, error)
        if storage.exists(final):
            raise StorageError(
                f"{storage.describe(final)} exists already; to replace it save with overwrite=True"
            ) from error
        raise


def _replace(storage: Storage, directory: str, final: str, header: SaveHeader) -> bool:
    """Give the final name to the new version, and do away with the old one once nobody reads it.

    False when there is nothing to replace any more.
    """
    try:
        storage.exchange_dir(directory, final)
    except StorageError as error:
        if _was_not_made(error):
            if storage.exists(directory) and not storage.exists(final):
                return False
            raise
        _take_back(storage, directory, final, header, error)
        raise
    try:
        retire(storage, directory, header.step)
        retire_replaced(storage)
    except StorageError as error:
        if storage.exists(directory):  # nobody else, a repair for example, has done it meanwhile
            _LOG.warning(
                "step %d is committed, but what it replaced could not be removed; `holdfast "
                "repair` does that: %s",
                header.step,
                error,
            )
    return True


def _was_not_made(error: StorageError) -> bool:
    """Whether a failed rename left everything as it was: there was nothing to rename, or no room.

    A sync that fails after the rename has other causes.
    """
    return isinstance(error.__cause__, FileNotFoundError | FileExistsError)


def _take_back(
    storage: Storage, directory: str, final: str, header: SaveHeader, cause: StorageError
) -> None:
    """Undo a rename that was made but not made durable; StorageError if it cannot be undone.

    Returns where the new version is not at its final name, be it that it never was.
    """
    if save_id_of(storage, final) != header.save_id:
        return
    with suppress(StorageError):
        if storage.exists(directory):
            storage.exchange_dir(directory, final)
        else:
            storage.rename_dir(final, directory)
    if save_id_of(storage, final) == header.save_id:
        raise StorageError(
            f"{storage.describe(final)}: the new version is in place and complete, but whether it "
            f"stays there if the machine stops is unproven: {cause}. It can be loaded; look at the "
            f"storage, then save again"
        ) from cause


def _read_done(
    storage: Storage,
    directory: str,
    position: int,
    plan: CommitPlan,
    plan_digest: str,
    header: SaveHeader,
) -> DoneRecord:
    path = f"{directory}/{done_file(position)}"
    record = unseal(storage.read(path), DoneRecord, where=storage.describe(path))
    rank = plan.ranks[position]
    if record.position != position or record.save_id != header.save_id:
        raise CorruptionError(
            f"{storage.describe(path)}: this is the record of save {record.save_id}, position "
            f"{record.position}; save {header.save_id}, position {position} (rank {rank}) is needed"
        )
    if record.plan_digest != plan_digest:
        raise PlanError(
            f"{storage.describe(path)}: rank {rank} wrote under plan {record.plan_digest}, the "
            f"commit is of plan {plan_digest}"
        )
    return record


def _check_sizes(storage: Storage, directory: str, manifest: Manifest) -> None:
    for info in manifest.files:
        path = f"{directory}/{info.name}"
        nbytes = storage.size(path)
        if nbytes != info.nbytes:
            raise StorageError(
                f"{storage.describe(path)} has {nbytes} bytes, its writer (rank {info.writer}) "
                f"reported {info.nbytes}"
            )


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
