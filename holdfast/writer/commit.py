"""The commit: from done-records on storage to a checkpoint with its final name.

Needs no process of the save but the one that runs it: the plan, the data files and the
done-records are on storage.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

import msgspec
import numpy as np

from holdfast.arrays.types import IntArray, WordArray
from holdfast.errors import (
    CorruptionError,
    DriftError,
    HoldfastError,
    PlanError,
    StorageError,
)
from holdfast.format.digest import digest128
from holdfast.format.fingerprint import Partial, combine
from holdfast.format.index import ChunkIndex, encode_index, validate_index
from holdfast.format.manifest import (
    FileInfo,
    IndexInfo,
    Manifest,
    TensorInfo,
    Totals,
    decode_metadata,
    encode_manifest,
)
from holdfast.format.names import INDEX, LATEST, MANIFEST, data_file, latest_step, step_dir
from holdfast.format.stored_copies import find_copies
from holdfast.format.values import Node, merge_nodes
from holdfast.format.versions import retire, retire_replaced, save_id_of
from holdfast.storage import Storage
from holdfast.writer.records import (
    CommitPlan,
    DoneRecord,
    EncodedPlan,
    SaveHeader,
    done_file,
    unseal,
)

_LOG = logging.getLogger("holdfast")
_NUM_LOOKS = 3


def commit_save(storage: Storage, directory: str, *, plan: EncodedPlan, header: SaveHeader) -> None:
    """Check that every planned byte is accounted for, then give the checkpoint its name.

    Order: records checked, index and manifest written and synced, directories synced, one rename,
    parent synced, pointer replaced. What fails after the commit (the pointer, removing what was
    replaced) is logged as a warning, and set right by the next save or repair. What was replaced
    goes once nobody reads it; until then it is kept under another name.

    Args:
        directory: of the save in progress, with the done-records of all ranks.
        plan: of all ranks, whose digest every record states.
        header: of the save.

    Raises:
        PlanError: values or replicas differ between ranks; names key and ranks.
        CorruptionError: a record is not this save's.
        StorageError: as its message says. In all these cases the previous checkpoint is untouched,
            but in one, which the error names: the rename was made, could not be made durable and
            could not be taken back.

    Cost: O(rows) vector work, two small files, five syncs and two for the pointer.
    """
    final = step_dir(header.step)
    try:
        _complete(storage, directory, plan, header)
    except StorageError:
        if storage.exists(directory) or save_id_of(storage, final) != header.save_id:
            raise
        # Else a repair took this save for abandoned, and has finished it.
    else:
        _publish(storage, directory, final, header)
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


def _complete(storage: Storage, directory: str, plan: EncodedPlan, header: SaveHeader) -> None:
    """Make a durable checkpoint of what the ranks wrote, which lacks only its name."""
    try:
        records = [
            _read_done(storage, directory, position, plan, header)
            for position in range(len(plan.plan.ranks))
        ]
        index_bytes, manifest = assemble(plan.plan, records, header)
    except HoldfastError:
        raise
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise CorruptionError(
            f"{storage.describe(directory)}: the plan and the records do not fit each other: "
            f"{error!r}; save again"
        ) from error
    for info in manifest.files:
        path = f"{directory}/{info.name}"
        nbytes = storage.size(path)
        if nbytes != info.nbytes:
            raise StorageError(
                f"{storage.describe(path)} has {nbytes} bytes, its writer (rank {info.writer}) "
                f"reported {info.nbytes}"
            )
    for name, data in ((INDEX, index_bytes), (MANIFEST, encode_manifest(manifest))):
        path = f"{directory}/{name}"
        if storage.exists(path):  # of an earlier, killed commit
            storage.remove_tree(path, durable=False)
        # No process looks for the name yet: its bytes are durable now, its name is below.
        with storage.create(path, nbytes=len(data)) as sink:
            sink.write_at(0, memoryview(data))
            sink.sync()
    unnamed = [name for name in storage.list(directory) if name.startswith((".tmp-", ".trash-"))]
    for name in ("plan", "done", *unnamed):  # the latter are of an earlier, killed commit
        storage.remove_tree(f"{directory}/{name}", durable=False)
    if plan.plan.writers:
        storage.sync_dir(f"{directory}/data")
    storage.sync_dir(directory)


def assemble(
    plan: CommitPlan, records: list[DoneRecord], header: SaveHeader
) -> tuple[bytes, Manifest]:
    """Index and manifest of what the records say, proven against the plan.

    Args:
        plan: of all ranks.
        records: of all ranks, in the order of the plan.
        header: of the save.

    Raises:
        PlanError, CorruptionError: as `commit_save`.

    Cost: linear in rows and ranks.
    """
    planned = plan.row_nbytes
    files = [data_file(number) for number in range(len(plan.writers))]
    index = build_index(plan, records, files, planned=planned)
    compare_checks(plan, records)
    parts = _merge_values(plan, records)
    index_bytes = encode_index(index)
    manifest = _build_manifest(plan, header, records, files, index, index_bytes, parts)
    validate_index(index, manifest)
    _compare_copies(index, manifest, header)
    return index_bytes, manifest


def point_to_newest(storage: Storage, *, dry_run: bool = False) -> int | None:
    """Let the pointer file name the newest committed step; that step if it named another.

    Looks again after writing, since a save may commit meanwhile. Nothing where nothing is
    committed.

    Args:
        dry_run: only look.
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
    storage: Storage, directory: str, position: int, plan: EncodedPlan, header: SaveHeader
) -> DoneRecord:
    """The record of one rank, which is of this save and plan."""
    path = f"{directory}/{done_file(position)}"
    record = unseal(storage.read(path), DoneRecord, where=storage.describe(path))
    rank = plan.plan.ranks[position]
    if record.position != position or record.save_id != header.save_id:
        raise CorruptionError(
            f"{storage.describe(path)}: this is the record of save {record.save_id}, position "
            f"{record.position}; save {header.save_id}, position {position} (rank {rank}) is needed"
        )
    if record.plan_digest != plan.digest:
        raise PlanError(
            f"{storage.describe(path)}: rank {rank} wrote under plan {record.plan_digest}, the "
            f"commit is of plan {plan.digest}"
        )
    return record


def build_index(
    plan: CommitPlan, records: list[DoneRecord], files: list[str], *, planned: IntArray
) -> ChunkIndex:
    """Where every planned chunk is; PlanError where what was written is not what was planned."""
    bounds = np.searchsorted(plan.row_file, np.arange(len(files) + 1))
    if (np.diff(plan.row_file) < 0).any() or bounds[0] != 0 or bounds[-1] != len(planned):
        raise PlanError("the rows of the plan do not lie in the order of its files")
    num_blocks = -(-planned // plan.block_nbytes)
    digest_ptr = np.concatenate([[0], np.cumsum(num_blocks)]).astype(np.int64)
    written = [records[position] for position in plan.writers]
    for number, record in enumerate(written):
        first, stop = int(bounds[number]), int(bounds[number + 1])
        where = f"rank {plan.ranks[record.position]}, {files[number]}"
        if record.file != files[number]:
            raise PlanError(f"{where}: the rank reports file {record.file} instead")
        if record.row_nbytes != planned[first:stop].tobytes():
            raise PlanError(_first_difference(plan, first, planned[first:stop], record, where))
        if len(record.starts) != len(record.row_nbytes):
            raise PlanError(f"{where}: the places of chunks are missing from its record")
        pointers = digest_ptr[first : stop + 1] - digest_ptr[first]
        if record.digest_ptr != pointers.tobytes() or len(record.digests) != 8 * int(pointers[-1]):
            raise PlanError(f"{where}: block digests are missing from its record")
    writers = set(plan.writers)
    for position, record in enumerate(records):
        if position not in writers and record.file is not None:
            raise PlanError(f"rank {plan.ranks[position]} wrote {record.file}, which no plan has")
    return ChunkIndex(
        tensor=plan.row_tensor,
        file=plan.row_file,
        offset=plan.row_offset,
        extent=plan.row_extent,
        start=np.frombuffer(b"".join(record.starts for record in written), dtype=np.int64),
        nbytes=planned,
        copy=plan.row_copy,
        holders=plan.row_holders,
        holder_ptr=plan.holder_ptr,
        holder=plan.holder,
        digest_ptr=digest_ptr,
        digest=np.frombuffer(b"".join(record.digests for record in written), dtype=np.uint64),
    )


def _first_difference(
    plan: CommitPlan, first: int, planned: IntArray, record: DoneRecord, where: str
) -> str:
    """The first chunk of a file whose length is not the planned one, in words."""
    written = np.frombuffer(record.row_nbytes, dtype=np.int64)
    if len(planned) != len(written):
        return f"{where}: {len(planned)} chunks were planned, {len(written)} were written"
    row = int(np.flatnonzero(planned != written)[0])
    key = plan.keys[int(plan.row_tensor[first + row])]
    return f"{where}: {key} was planned with {planned[row]} bytes and written with {written[row]}"


def compare_checks(plan: CommitPlan, records: list[DoneRecord]) -> None:
    """Boxes held by several ranks without a declaration must have equal bytes on all of them."""
    if len(plan.check_group) == 0:
        return
    num_planned = np.bincount(plan.check_position, minlength=len(records)).tolist()
    for rank, record, num in zip(plan.ranks, records, num_planned, strict=True):
        if len(record.checks) != 8 * num:
            raise PlanError(
                f"rank {rank} vouches for {len(record.checks) // 8} replicated boxes, {num} were "
                f"planned"
            )
    reported = np.zeros(len(plan.check_group), dtype=np.uint64)
    # Each rank's are in plan order.
    by_rank = np.argsort(plan.check_position, kind="stable")
    reported[by_rank] = np.frombuffer(b"".join(r.checks for r in records), dtype=np.uint64)
    order = np.argsort(plan.check_group, kind="stable")
    group = plan.check_group[order]
    first = np.flatnonzero(np.concatenate([[True], group[1:] != group[:-1]]))
    low = np.minimum.reduceat(reported[order], first)
    high = np.maximum.reduceat(reported[order], first)
    bad = np.flatnonzero(low != high)
    if len(bad) == 0:
        return
    groups = np.split(order, first[1:])
    drifts = [_holders(plan, reported, groups[b]) for b in bad.tolist()]
    sentences = [f"{key}: {describe_drift(holders)}" for key, holders in drifts[:5]]
    more = f"; and {len(bad) - 5} more" if len(bad) > 5 else ""
    raise DriftError(
        f"{'; '.join(sentences)}{more}. Several ranks hold these tensors under one key and nothing "
        f"declares them different. Either a rank has computed or kept wrong values, or they are "
        f"not meant to be equal: give each its own key, or declare the shards with a DTensor or "
        f"Sharded(...)",
        details={
            "odd_ranks": {rank for _, holders in drifts for rank in odd_ranks(holders)},
            "keys": list(dict.fromkeys(key for key, _ in drifts)),
        },
    )


def _compare_copies(index: ChunkIndex, manifest: Manifest, header: SaveHeader) -> None:
    """Copies of a box must have equal bytes: PlanError naming files and ranks, or a warning."""
    if manifest.totals.stored_nbytes == manifest.totals.nbytes:
        return
    copies = find_copies(index)
    drift = copies.drift(index, manifest)
    if not drift:
        return
    if header.on_drift == "warn":
        _LOG.warning("step %d is stored with copies that differ: %s", header.step, drift)
        return
    tensors = index.tensor[copies.row[copies.ptr[:-1][copies.differs]]]
    raise DriftError(
        f"{drift}. Ranks that hold one tensor have to hold the same bytes: find out which rank's "
        f"memory is wrong (save(check_replicas=True) names the odd one), or give each its own key; "
        f'on_drift="warn" stores them as they are',
        details={"keys": list(dict.fromkeys(manifest.tensors[t].key for t in tensors.tolist()))},
    )


def _holders(plan: CommitPlan, reported: WordArray, rows: IntArray) -> tuple[str, list[list[int]]]:
    """The key of one box, and the ranks that hold each content of it."""
    by_content: dict[int, list[int]] = defaultdict(list)
    for row in rows.tolist():
        by_content[int(reported[row])].append(plan.ranks[int(plan.check_position[row])])
    return plan.keys[int(plan.check_tensor[rows[0]])], list(by_content.values())


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
    files: list[str],
    index: ChunkIndex,
    index_bytes: bytes,
    parts: dict[str, Node],
) -> Manifest:
    """The manifest of a complete save."""
    nbytes = np.asarray(index.nbytes, dtype=np.int64)
    primary = np.asarray(index.copy) == 0
    return Manifest(
        step=header.step,
        save_id=header.save_id,
        created=header.created,
        holdfast=header.holdfast,
        torch=header.torch,
        layouts=list(plan.layouts),
        placements=list(plan.placements),
        signature=plan.signature,
        block_nbytes=plan.block_nbytes,
        tensors=_tensors(plan, records),
        parts=parts,
        metadata=decode_metadata(msgspec.json.decode(header.metadata)) if header.metadata else {},
        files=[
            FileInfo(
                name=files[number],
                nbytes=records[position].nbytes,
                header_nbytes=records[position].header_nbytes,
                header_digest=records[position].header_digest,
                writer=plan.ranks[position],
                coordinate=plan.coordinates[position],
            )
            for number, position in enumerate(plan.writers)
        ],
        index=IndexInfo(
            nbytes=len(index_bytes), digest=digest128(index_bytes), num_rows=len(plan.row_tensor)
        ),
        totals=Totals(
            num_tensors=len(plan.keys),
            nbytes=int(nbytes[primary].sum()),
            stored_nbytes=int(nbytes.sum()),
        ),
    )


def _tensors(plan: CommitPlan, records: list[DoneRecord]) -> list[TensorInfo]:
    """The tensors of the plan, with fingerprints if the writers gave them."""
    columns = (plan.keys, plan.dtypes, plan.shapes, plan.tensor_layouts, plan.tensor_placements)
    return [
        TensorInfo(key=key, dtype=dtype, shape=[*shape], layout=layout, placement=placement,
                   fingerprint=fingerprint)
        for key, dtype, shape, layout, placement, fingerprint in zip(
            *columns, _fingerprints(plan, records), strict=True
        )
    ]  # fmt: skip


def _fingerprints(plan: CommitPlan, records: list[DoneRecord]) -> list[str | None]:
    """The fingerprint of each tensor from the writers' shares; None where they gave none."""
    if not any(record.lanes for record in records):
        return [None] * len(plan.keys)
    written = [records[position] for position in plan.writers]
    num_rows = np.bincount(plan.row_file, minlength=len(written)).tolist()
    for record, num in zip(written, num_rows, strict=True):
        if len(record.lanes) != 16 * num:
            rank = plan.ranks[record.position]
            raise PlanError(f"rank {rank}: {num} chunks, {len(record.lanes) // 16} fingerprints")
    lanes = np.frombuffer(b"".join(record.lanes for record in written), dtype=np.uint64)
    shares: list[list[Partial]] = [[] for _ in plan.keys]
    numel = plan.row_extent.prod(axis=1, dtype=np.int64)
    for row in np.flatnonzero(plan.row_copy == 0).tolist():
        pair = (int(lanes[2 * row]), int(lanes[2 * row + 1]))
        shares[plan.row_tensor[row]].append(Partial(lanes=pair, numel=int(numel[row])))
    return [
        combine(partials, dtype=dtype, shape=shape)
        for partials, dtype, shape in zip(shares, plan.dtypes, plan.shapes, strict=True)
    ]


def odd_ranks(holders: Sequence[Sequence[int]]) -> list[int]:
    """The ranks that do not hold what most ranks hold; empty if there is no majority.

    Args:
        holders: the ranks with equal bytes, for each content.
    """
    most, *others = sorted(holders, key=len, reverse=True)
    if not others or len(most) == len(others[0]):
        return []
    return sorted(rank for ranks in others for rank in ranks)


def describe_drift(holders: Sequence[Sequence[int]]) -> str:
    """Which ranks hold which content of one box, in words; `holders` as for `odd_ranks`.

    A message is cut off when it is long, so the odd ranks come first.
    """
    named = odd_ranks(holders)
    odd = f" (odd ones by majority: [{_ranges(named)}])" if named else ""
    ordered = sorted(holders, key=len, reverse=True)
    return f"different bytes{odd} on {' | '.join(f'ranks {_ranges(ranks)}' for ranks in ordered)}"


def _ranges(ranks: Iterable[int]) -> str:
    """Ranks in order, runs of three and more as `first-last`."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(
        f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs
    )
