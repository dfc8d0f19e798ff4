"""What a commit puts together out of all ranks' done-records: index, values, manifest."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import msgspec
import numpy as np

from holdfast.arrays.types import IntArray, WordArray
from holdfast.errors import CorruptionError, PlanError
from holdfast.format.digest import digest128
from holdfast.format.fingerprint import Partial, combine
from holdfast.format.index import ChunkIndex
from holdfast.format.manifest import (
    FileInfo,
    IndexInfo,
    Manifest,
    TensorInfo,
    Totals,
    decode_metadata,
)
from holdfast.format.names import data_file
from holdfast.format.values import Node, merge_nodes
from holdfast.writer.records import CommitPlan, DoneRecord, SaveHeader


def _ints(data: bytes) -> IntArray:
    return np.frombuffer(data, dtype=np.int64)


def _words(data: bytes) -> WordArray:
    return np.frombuffer(data, dtype=np.uint64)


def build_index(plan: CommitPlan, records: list[DoneRecord]) -> ChunkIndex:
    """Where every planned chunk is; PlanError where what was written is not what was planned."""
    planned = plan.row_nbytes
    starts = np.zeros(plan.num_rows, dtype=np.int64)
    counts = np.zeros(plan.num_rows, dtype=np.int64)
    digests: list[WordArray] = []
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
    rows: IntArray,
    planned: IntArray,
    written: IntArray,
    where: str,
) -> str:
    if len(planned) != len(written):
        return f"{where}: {len(planned)} chunks were planned, {len(written)} were written"
    first = int(np.flatnonzero(planned != written)[0])
    key = plan.keys[int(plan.row_tensor[rows[first]])]
    return (
        f"{where}: {key} was planned with {planned[first]} bytes and written with {written[first]}"
    )


def compare_checks(plan: CommitPlan, records: list[DoneRecord]) -> None:
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


def _describe_drift(plan: CommitPlan, reported: WordArray, rows: IntArray) -> str:
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


def merge_values(plan: CommitPlan, records: list[DoneRecord]) -> dict[str, Node]:
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


def build_manifest(
    plan: CommitPlan,
    header: SaveHeader,
    records: list[DoneRecord],
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
        metadata=decode_metadata(msgspec.json.decode(header.metadata)) if header.metadata else {},
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
