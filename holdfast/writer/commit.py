"""The commit: from done-records on storage to a checkpoint with its final name.

Needs no process of the save but the one that runs it: the plan, the data files and the
done-records are on storage.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from holdfast.errors import CorruptionError, HoldfastError, PlanError, StorageError
from holdfast.format.digest import digest128
from holdfast.format.fingerprint import Partial, combine
from holdfast.format.index import ChunkIndex, encode_index, validate_index
from holdfast.format.manifest import (
    FileInfo,
    IndexInfo,
    Manifest,
    TensorInfo,
    Totals,
    encode_manifest,
)
from holdfast.format.names import (
    INDEX,
    LATEST,
    MANIFEST,
    data_file,
    latest_step,
    parse_saving_dir,
    step_dir,
    unclaimed,
)
from holdfast.format.reader import Snapshot
from holdfast.format.values import Node, merge_nodes
from holdfast.format.versions import retire, retire_replaced, save_id_of
from holdfast.storage import Storage
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
    _compare_checks(plan, records)
    parts = _merge_values(plan, records)
    index = _build_index(plan, records)
    index_bytes = encode_index(index)
    manifest = _build_manifest(plan, header, records, index, index_bytes, parts)
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
            f"{storage.describe(path)}: this is the record of save {record.save_id}, place "
            f"{record.position}; save {header.save_id}, place {position} (rank {rank}) is wanted"
        )
    if record.plan_digest != plan_digest:
        raise PlanError(
            f"{storage.describe(path)}: rank {rank} wrote under plan {record.plan_digest}, the "
            f"commit is of plan {plan_digest}"
        )
    return record


def _ints(data: bytes) -> npt.NDArray[np.int64]:
    return np.frombuffer(data, dtype=np.int64)


def _words(data: bytes) -> npt.NDArray[np.uint64]:
    return np.frombuffer(data, dtype=np.uint64)


def _build_index(plan: CommitPlan, records: list[DoneRecord]) -> ChunkIndex:
    """Join the plan's rows with the writers' records; every row must be accounted for."""
    planned = plan.row_nbytes
    starts = np.zeros(plan.num_rows, dtype=np.int64)
    counts = np.zeros(plan.num_rows, dtype=np.int64)
    digests: list[npt.NDArray[np.uint64]] = []
    for number, position in enumerate(plan.writers):
        record = records[position]
        rows = np.flatnonzero(plan.row_file == number)
        written = _ints(record.row_nbytes)
        where = f"rank {plan.ranks[position]}, {data_file(number)}"
        if record.file != data_file(number):
            raise PlanError(f"{where}: the rank reports file {record.file} instead")
        if not np.array_equal(written, planned[rows]):
            raise PlanError(_first_difference(plan, rows, planned[rows], written, where))
        pointers = _ints(record.digest_ptr)
        expected = -(-planned[rows] // plan.block_nbytes)
        if not np.array_equal(np.diff(pointers), expected):
            raise PlanError(f"{where}: block digests are missing from its record")
        starts[rows] = _ints(record.starts)
        counts[rows] = np.diff(pointers)
        digests.append(_words(record.digests))
    for position, record in enumerate(records):
        if position not in plan.writers and record.file is not None:
            raise PlanError(f"rank {plan.ranks[position]} wrote {record.file}, which no plan has")
    return ChunkIndex(
        tensor=plan.row_tensor,
        file=plan.row_file,
        offset=plan.row_offset,
        extent=plan.row_extent,
        start=starts,
        nbytes=planned,
        copy=plan.row_copy,
        digest_ptr=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        digest=np.concatenate(digests) if digests else np.zeros(0, dtype=np.uint64),
    )


def _first_difference(
    plan: CommitPlan,
    rows: npt.NDArray[np.int64],
    planned: npt.NDArray[np.int64],
    written: npt.NDArray[np.int64],
    where: str,
) -> str:
    if len(planned) != len(written):
        return f"{where}: {len(planned)} chunks were planned, {len(written)} were written"
    first = int(np.flatnonzero(planned != written)[0])
    key = plan.keys[int(plan.row_tensor[rows[first]])]
    return (
        f"{where}: {key} was planned with {planned[first]} bytes and written with {written[first]}"
    )


def _compare_checks(plan: CommitPlan, records: list[DoneRecord]) -> None:
    """Boxes held by several ranks without a declaration must have equal bytes on all of them."""
    if len(plan.check_group) == 0:
        return
    reported = np.zeros(len(plan.check_group), dtype=np.uint64)
    for position, record in enumerate(records):
        mine = np.flatnonzero(plan.check_position == position)
        checks = _words(record.checks)
        if len(checks) != len(mine):
            raise PlanError(
                f"rank {plan.ranks[position]} vouches for {len(checks)} replicated boxes, "
                f"{len(mine)} were planned"
            )
        reported[mine] = checks
    order = np.argsort(plan.check_group, kind="stable")
    group = plan.check_group[order]
    first = np.flatnonzero(np.concatenate([[True], group[1:] != group[:-1]]))
    low = np.minimum.reduceat(reported[order], first)
    high = np.maximum.reduceat(reported[order], first)
    bad = np.flatnonzero(low != high)
    if len(bad) == 0:
        return
    sentences = [
        _describe_drift(plan, reported, np.flatnonzero(plan.check_group == group[first[b]]))
        for b in bad[:5].tolist()
    ]
    more = f"; and {len(bad) - 5} more" if len(bad) > 5 else ""
    raise PlanError(
        f"{'; '.join(sentences)}{more}. Several ranks hold these tensors under one key and nothing "
        f"declares them different: give each its own key, or declare the shards with a DTensor or "
        f"Sharded(...)"
    )


def _describe_drift(
    plan: CommitPlan, reported: npt.NDArray[np.uint64], rows: npt.NDArray[np.int64]
) -> str:
    by_content: dict[int, list[int]] = defaultdict(list)
    for row in rows.tolist():
        by_content[int(reported[row])].append(plan.ranks[int(plan.check_position[row])])
    ordered = sorted(by_content.values(), key=len, reverse=True)
    key = plan.keys[int(plan.check_tensor[rows[0]])]
    groups = " | ".join("ranks " + ", ".join(map(str, sorted(ranks))) for ranks in ordered)
    odd = ""
    if len(ordered) > 1 and len(ordered[0]) > len(ordered[1]):
        odd = f" (the odd ones by majority: {sorted(r for ranks in ordered[1:] for r in ranks)})"
    return f"{key}: different bytes on {groups}{odd}"


def _merge_values(plan: CommitPlan, records: list[DoneRecord]) -> dict[str, Node]:
    """One tree of all ranks' trees; ranks with identical bytes are looked at once."""
    trees: dict[bytes, dict[str, Node]] = {}
    labelled: list[tuple[str, dict[str, Node]]] = []
    for position, record in enumerate(records):
        label = f"rank {plan.ranks[position]}"
        if record.values not in trees:
            try:
                trees[record.values] = msgspec.json.decode(record.values, type=dict[str, Any])
            except msgspec.DecodeError as error:
                raise CorruptionError(f"{label}: its values cannot be read: {error}") from error
        labelled.append((label, trees[record.values]))
    names: dict[str, None] = {}
    for _, tree in labelled:
        names.update(dict.fromkeys(tree))
    parts: dict[str, Node] = {}
    for name in names:
        having = [(label, tree[name]) for label, tree in labelled if name in tree]
        parts[name] = merge_nodes(having, path=name)
    return parts


def _build_manifest(
    plan: CommitPlan,
    header: SaveHeader,
    records: list[DoneRecord],
    index: ChunkIndex,
    index_bytes: bytes,
    parts: dict[str, Node],
) -> Manifest:
    nbytes = np.asarray(index.nbytes, dtype=np.int64)
    primary = np.asarray(index.copy) == 0
    return Manifest(
        step=header.step,
        save_id=header.save_id,
        created=header.created,
        holdfast=header.holdfast,
        torch=header.torch,
        layouts=list(plan.layouts),
        signature=plan.signature,
        block_nbytes=plan.block_nbytes,
        tensors=[
            TensorInfo(key=key, dtype=dtype, shape=list(shape), layout=layout, fingerprint=print_)
            for key, dtype, shape, layout, print_ in zip(
                plan.keys,
                plan.dtypes,
                plan.shapes,
                plan.tensor_layouts,
                _fingerprints(plan, records),
                strict=True,
            )
        ],
        parts=parts,
        files=[
            FileInfo(
                name=data_file(number),
                nbytes=records[position].nbytes,
                header_nbytes=records[position].header_nbytes,
                header_digest=records[position].header_digest,
                writer=plan.ranks[position],
                coordinate=plan.coordinates[position],
            )
            for number, position in enumerate(plan.writers)
        ],
        index=IndexInfo(
            nbytes=len(index_bytes), digest=digest128(index_bytes), num_rows=plan.num_rows
        ),
        totals=Totals(
            num_tensors=len(plan.keys),
            nbytes=int(nbytes[primary].sum()),
            stored_nbytes=int(nbytes.sum()),
        ),
    )


def _fingerprints(plan: CommitPlan, records: list[DoneRecord]) -> list[str | None]:
    """The fingerprint of each tensor from the writers' shares; None where they gave none."""
    if not any(record.lanes for record in records):
        return [None] * len(plan.keys)
    shares: list[list[Partial]] = [[] for _ in plan.keys]
    numel = plan.row_extent.prod(axis=1, dtype=np.int64)
    for number, position in enumerate(plan.writers):
        rows = np.flatnonzero(plan.row_file == number)
        lanes = _words(records[position].lanes)
        if len(lanes) != 2 * len(rows):
            raise PlanError(
                f"rank {plan.ranks[position]}: {len(rows)} chunks, {len(lanes) // 2} fingerprints"
            )
        for i, row in enumerate(rows.tolist()):
            if plan.row_copy[row] == 0:
                pair = (int(lanes[2 * i]), int(lanes[2 * i + 1]))
                shares[plan.row_tensor[row]].append(Partial(lanes=pair, numel=int(numel[row])))
    return [
        combine(partials, dtype=dtype, shape=shape)
        for partials, dtype, shape in zip(shares, plan.dtypes, plan.shapes, strict=True)
    ]


def _check_sizes(storage: Storage, directory: str, manifest: Manifest) -> None:
    for info in manifest.files:
        path = f"{directory}/{info.name}"
        found = storage.size(path)
        if found != info.nbytes:
            raise StorageError(
                f"{storage.describe(path)} has {found} bytes, its writer (rank {info.writer}) "
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
