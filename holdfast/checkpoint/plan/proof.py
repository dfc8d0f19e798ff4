"""The plan: proof that the ranks' boxes make whole tensors, and who writes which box.

Runs on the coordinator, on the tables of all ranks, as vector arithmetic: no Python loop over rows
but the election among replicas (`elect`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from holdfast.arrays.box_table import BoxTable, concatenate, enumerate_ranges, unique_boxes
from holdfast.arrays.boxes import Box
from holdfast.arrays.mixing import mix_columns
from holdfast.arrays.tiling import check_tilings
from holdfast.arrays.types import BoolArray
from holdfast.arrays.types import IntArray as Ints
from holdfast.checkpoint.plan.assign_writers import Awards, Holdings, elect
from holdfast.checkpoint.plan.claims import UNDECLARED, ChunkTable, decode_names
from holdfast.errors import PlanError
from holdfast.format.dtypes import DTYPES
from holdfast.format.manifest import LayoutInfo
from holdfast.state.leaves import ReplicaSet
from holdfast.writer.records import CommitPlan

_MAX_SENTENCES = 5


@dataclass(frozen=True, slots=True)
class Cut:
    """A row of a plan that is a part of a row of the writer's table.

    `place`: position in `Assignment.rows`. `offset`, `extent`: the part, as of the whole tensor.
    """

    place: int
    offset: tuple[int, ...]
    extent: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """One rank's share of a plan.

    `file`: number of its data file, -1 for none. `rows`: rows of its own table that it writes, in
    plan order; those in `cuts` only in part. `checks`: rows of its own table whose content it
    vouches for, in plan order.
    """

    file: int
    rows: Ints
    cuts: tuple[Cut, ...]
    checks: Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class _Claims:
    """All ranks' rows side by side; tensors and replica sets numbered globally."""

    keys: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    layouts: tuple[LayoutInfo, ...]
    homes: tuple[int, ...]
    replica_sets: tuple[ReplicaSet, ...]
    position: Ints
    local: Ints
    boxes: BoxTable
    replica_set: Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class _Boxes:
    """The distinct boxes: rows sorted so that those of one box are adjacent.

    `order`: row numbers, box by box, ranks ascending within. `first`: where each box begins in
    `order` (one more at the end). `nbytes`: of each box.
    """

    order: Ints
    first: Ints
    nbytes: Ints

    @property
    def num_boxes(self) -> int:
        return len(self.first) - 1

    def rows(self, box: int) -> Ints:
        return self.order[self.first[box] : self.first[box + 1]]


def make_plan(
    tables: Sequence[ChunkTable],
    *,
    ranks: Sequence[int],
    coordinates: Sequence[dict[str, int]],
    signature: str,
    block_nbytes: int,
    compare_all: bool = False,
) -> tuple[CommitPlan, list[Assignment]]:
    """Prove ownership and elect the writers of every box, balanced by true bytes.

    `tables[i]` is the claim of `ranks[i]`. Proven: one dtype and shape per key; the boxes of a key
    tile its shape exactly; no box is held by ranks that declare each other to hold different ones.
    Boxes held by several ranks without a declaration (with `compare_all`, all that several hold)
    are marked for comparison by content, whole, even where their parts have different writers.
    Raises PlanError naming key, box and ranks. Cost: O(rows) vector work, and the election.
    """
    claims = _join(tables, ranks)
    boxes = _distinct_boxes(claims)
    _prove_tiling(claims, boxes, ranks)
    compare = _judge_replicas(claims, boxes, ranks)
    if compare_all:
        compare = np.diff(boxes.first) > 1
    return _assemble(
        claims,
        boxes,
        elect(_holdings(claims, boxes, num_ranks=len(ranks))),
        compare,
        ranks=tuple(ranks),
        coordinates=tuple(coordinates),
        signature=signature,
        block_nbytes=block_nbytes,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tensors:
    """All ranks' tensors under one numbering; `maps`: a table's names -> its tensors' numbers."""

    keys: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    layouts: tuple[LayoutInfo, ...]
    homes: tuple[int, ...]
    maps: dict[bytes, Ints]


def _number_tensors(tables: Sequence[ChunkTable], ranks: Sequence[int]) -> _Tensors:
    """One number, dtype, shape and layout per key; PlanError naming the ranks that disagree."""
    numbers: dict[str, int] = {}
    said: list[tuple[str, tuple[int, ...], int, int]] = []
    layouts: list[LayoutInfo] = []
    maps: dict[bytes, Ints] = {}
    problems: list[str] = []
    for rank, table in zip(ranks, tables, strict=True):
        if table.names in maps:
            continue
        names = decode_names(table.names)
        numbering = np.zeros(len(names.keys), dtype=np.int64)
        layouts.extend(info for info in names.layouts if info not in layouts)
        homes = [layouts.index(info) for info in names.layouts]
        for i, (key, dtype, shape, home) in enumerate(
            zip(names.keys, names.dtypes, names.shapes, names.homes, strict=True)
        ):
            number = numbers.setdefault(key, len(numbers))
            numbering[i] = number
            if number == len(said):
                said.append((dtype, shape, homes[home], rank))
            elif said[number][:2] != (dtype, shape):
                first = said[number]
                problems.append(
                    f"{key}: rank {first[3]} has {first[0]} {list(first[1])}, rank {rank} has "
                    f"{dtype} {list(shape)}"
                )
            elif said[number][2] != homes[home]:
                first = said[number]
                problems.append(
                    f"{key}: on rank {first[3]} it lives on layout '{layouts[first[2]].name}', on "
                    f"rank {rank} on layout '{layouts[homes[home]].name}': two modules need two "
                    f"names"
                )
        maps[table.names] = numbering
    if problems:
        raise PlanError(
            "one key must have one dtype, shape and layout on all ranks: " + _some(problems)
        )
    return _Tensors(
        keys=tuple(numbers),
        dtypes=tuple(entry[0] for entry in said),
        shapes=tuple(entry[1] for entry in said),
        layouts=tuple(layouts),
        homes=tuple(entry[2] for entry in said),
        maps=maps,
    )


def _join(tables: Sequence[ChunkTable], ranks: Sequence[int]) -> _Claims:
    tensors = _number_tensors(tables, ranks)
    replica_sets: dict[ReplicaSet, int] = {}
    own = [
        np.array(
            [replica_sets.setdefault(d, len(replica_sets)) for d in table.replica_sets]
            + [UNDECLARED]
        )
        for table in tables
    ]
    position, local = enumerate_ranges(np.array([len(table.tensor) for table in tables]))
    return _Claims(
        keys=tensors.keys,
        dtypes=tensors.dtypes,
        shapes=tensors.shapes,
        layouts=tensors.layouts,
        homes=tensors.homes,
        replica_sets=tuple(replica_sets),
        position=position,
        local=local,
        boxes=concatenate(
            [
                BoxTable(
                    tensor=tensors.maps[table.names][table.tensor],
                    offset=table.offset,
                    extent=table.extent,
                )
                for table in tables
            ]
        ),
        replica_set=np.concatenate(
            [numbers[table.replica_set] for numbers, table in zip(own, tables, strict=True)]
        ),
    )


def _distinct_boxes(claims: _Claims) -> _Boxes:
    """Group rows by box; within a box they are in the order of ranks, as they came."""
    distinct, number = unique_boxes(claims.boxes)
    itemsize = np.array([DTYPES[name].itemsize for name in claims.dtypes], dtype=np.int64)
    return _Boxes(
        order=np.argsort(number, kind="stable"),
        first=np.concatenate([[0], np.cumsum(np.bincount(number, minlength=len(distinct)))]),
        nbytes=distinct.numel() * itemsize[distinct.tensor],
    )


def _prove_tiling(claims: _Claims, boxes: _Boxes, ranks: Sequence[int]) -> None:
    head = boxes.order[boxes.first[:-1]]
    flaws = check_tilings(claims.boxes.take(head), claims.shapes)
    if not flaws:
        return
    sentences = []
    for tensor, flaw in flaws:
        holders = sorted(
            {
                int(claims.position[row])
                for box in (
                    flaw.rows or np.flatnonzero(claims.boxes.tensor[head] == tensor).tolist()
                )
                for row in boxes.rows(int(box))
            }
        )
        sentences.append(
            f"{claims.keys[tensor]} (shape {list(claims.shapes[tensor])}): "
            f"{_FLAW_WORDS[flaw.kind]} {_box_text(flaw.box)}, held by ranks "
            f"{[ranks[p] for p in holders]}"
        )
    raise PlanError(
        "the ranks' boxes do not make whole tensors: "
        + _some(sentences)
        + ". Check the placements (offsets, axes, mesh) of these tensors on the ranks named"
    )


_FLAW_WORDS = {
    "gap": "nobody holds",
    "overlap": "more than one declared shard covers",
    "out_of_bounds": "out of the tensor lies",
}


def _box_text(box: Box) -> str:
    return "[" + ", ".join(f"{a}:{b}" for a, b in zip(box.offset, box.stop, strict=True)) + "]"


def _judge_replicas(claims: _Claims, boxes: _Boxes, ranks: Sequence[int]) -> BoolArray:
    """For each box whether its holders must be compared by content.

    Boxes with the same holders and the same declarations are judged once: they share a word, the
    wrapping sum over holders of a hash of (holder, declaration).
    """
    compare = np.zeros(boxes.num_boxes, dtype=np.bool_)
    if boxes.num_boxes == 0:
        return compare
    pairs = np.column_stack([claims.position, claims.replica_set])[boxes.order]
    words = np.add.reduceat(mix_columns(pairs), boxes.first[:-1])
    _, head, inverse = np.unique(words, return_index=True, return_inverse=True)
    verdicts = np.zeros(len(head), dtype=np.bool_)
    problems = []
    for number, box in enumerate(head.tolist()):
        rows = boxes.rows(box)
        problem, verdicts[number] = _judge(claims, rows, ranks)
        if problem is not None and boxes.nbytes[box] > 0:
            example = int(rows[0])
            tensor = int(claims.boxes.tensor[example])
            num_dims = len(claims.shapes[tensor])
            where = claims.boxes.box(example, ndim=num_dims)
            count = int((inverse == number).sum())
            also = f" and {count - 1} other boxes" if count > 1 else ""
            problems.append(f"{claims.keys[tensor]} {_box_text(where)}{also}: {problem}")
    if problems:
        raise PlanError("two ranks claim to own one box: " + _some(problems))
    compare[:] = verdicts[inverse]
    return compare


def _judge(claims: _Claims, rows: Ints, ranks: Sequence[int]) -> tuple[str | None, bool]:
    """A contradiction in words or None; and whether the holders need a comparison."""
    holders = [ranks[int(p)] for p in claims.position[rows]]
    if len(holders) == 1:
        return None, False
    compare = False
    for holder, number in zip(holders, claims.replica_set[rows].tolist(), strict=True):
        if number == UNDECLARED:
            compare = True
            continue
        replica_set = claims.replica_sets[number]
        replicas, span = set(replica_set.replicas), set(replica_set.span)
        rivals = [other for other in holders if other in span and other not in replicas]
        if rivals:
            return (
                f"rank {holder} declares its replicas to be ranks {sorted(replicas)}, but ranks "
                f"{rivals} hold the same box",
                True,
            )
        compare = compare or any(other not in replicas for other in holders)
    return None, compare


def _holdings(claims: _Claims, boxes: _Boxes, *, num_ranks: int) -> Holdings:
    holders = claims.position[boxes.order]
    words = np.zeros(0, dtype=np.uint64)
    if boxes.num_boxes:
        words = np.add.reduceat(mix_columns(holders[:, None]), boxes.first[:-1])
    return Holdings(
        holders=holders,
        first=boxes.first,
        nbytes=boxes.nbytes,
        extent=claims.boxes.extent[boxes.order[boxes.first[:-1]]],
        words=words,
        num_ranks=num_ranks,
    )


def _assemble(
    claims: _Claims,
    boxes: _Boxes,
    awards: Awards,
    compare: BoolArray,
    *,
    ranks: tuple[int, ...],
    coordinates: tuple[dict[str, int], ...],
    signature: str,
    block_nbytes: int,
) -> tuple[CommitPlan, list[Assignment]]:
    row = boxes.order[boxes.first[awards.box] + awards.place]
    offset = claims.boxes.offset[row] + awards.offset
    order = np.lexsort((*offset.T[::-1], claims.boxes.tensor[row], claims.position[row]))
    row, offset, extent = row[order], offset[order], awards.extent[order]
    position, tensor = claims.position[row], claims.boxes.tensor[row]
    writers = np.unique(position)
    file_of = np.full(len(ranks), -1, dtype=np.int64)
    file_of[writers] = np.arange(len(writers))
    groups = np.flatnonzero(compare)
    counts = np.diff(boxes.first)[groups]
    check_rows = (
        np.concatenate([boxes.rows(int(g)) for g in groups])
        if len(groups)
        else np.zeros(0, dtype=np.int64)
    )
    plan = CommitPlan(
        signature=signature,
        block_nbytes=block_nbytes,
        layouts=claims.layouts,
        ranks=ranks,
        coordinates=coordinates,
        keys=claims.keys,
        dtypes=claims.dtypes,
        shapes=claims.shapes,
        tensor_layouts=claims.homes,
        writers=tuple(writers.tolist()),
        row_tensor=tensor,
        row_file=file_of[position],
        row_offset=offset,
        row_extent=extent,
        row_copy=np.zeros(len(row), dtype=np.int64),
        check_group=np.repeat(groups, counts),
        check_position=claims.position[check_rows],
        check_tensor=claims.boxes.tensor[check_rows],
    )
    rows = _split(claims.local[row], position, len(ranks))
    checks = _split(claims.local[check_rows], claims.position[check_rows], len(ranks))
    cuts: list[list[Cut]] = [[] for _ in ranks]
    first = np.searchsorted(position, np.arange(len(ranks)))
    for i in np.flatnonzero((extent != claims.boxes.extent[row]).any(axis=1)).tolist():
        p, ndim = int(position[i]), len(claims.shapes[tensor[i]])
        cut = Cut(i - int(first[p]), tuple(offset[i, :ndim].tolist()),
                  tuple(extent[i, :ndim].tolist()))  # fmt: skip
        cuts[p].append(cut)
    return plan, [
        Assignment(file=int(file_of[p]), rows=rows[p], cuts=tuple(cuts[p]), checks=checks[p])
        for p in range(len(ranks))
    ]


def _split(values: Ints, position: Ints, num_ranks: int) -> list[Ints]:
    """The values of each rank, in their order."""
    order = np.argsort(position, kind="stable")
    ends = np.searchsorted(position[order], np.arange(1, num_ranks))
    return np.split(values[order], ends)


def _some(sentences: Sequence[str]) -> str:
    shown = "; ".join(sentences[:_MAX_SENTENCES])
    rest = len(sentences) - _MAX_SENTENCES
    return shown if rest <= 0 else f"{shown}; and {rest} more"
