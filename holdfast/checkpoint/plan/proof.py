"""Proof that the ranks' shards cover every tensor exactly, and that no two ranks contradict.

Runs on the coordinator, on the claims of all ranks, as vector arithmetic: no Python loop over rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from holdfast.arrays.box_table import (
    BoxTable,
    check_tilings,
    concatenate,
    enumerate_ranges,
    mix_columns,
    unique_boxes,
)
from holdfast.arrays.boxes import Box
from holdfast.arrays.types import BoolArray, IntArray
from holdfast.checkpoint.plan.assign_writers import HeldBoxes
from holdfast.checkpoint.plan.claims import UNDECLARED, RankClaims, TensorNames, decode_names
from holdfast.errors import PlanError, some_sentences
from holdfast.format.dtypes import DTYPES
from holdfast.format.manifest import IRREGULAR, WHOLE, LayoutInfo, PlacementInfo
from holdfast.state.leaves import ReplicaSet

_MAX_PROBLEMS = 5
_FLAWS = {
    "gap": "no rank holds",
    "overlap": "more than one declared shard covers",
    "out_of_bounds": "out of the tensor lies",
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AllClaims(BoxTable):
    """The claims of all ranks, one rank after the other, under one numbering of everything."""

    names: TensorNames
    """Of all tensors; `tensor` are positions in it."""
    position: IntArray
    """(n,) position of the rank that claims the row."""
    local: IntArray
    """(n,) number of the row among the rank's own claims."""
    replica_set: IntArray
    """(n,) position in `replica_sets`, or UNDECLARED."""
    replica_sets: tuple[ReplicaSet, ...]

    def tensor_box(self, row: int) -> Box:
        """The box of a row, with as many dims as its tensor."""
        return self.box(row, ndim=len(self.names.shapes[self.tensor[row]]))


def join_claims(claims: Sequence[RankClaims], ranks: Sequence[int]) -> AllClaims:
    """All ranks' claims as one table.

    Args:
        claims: Of each rank.
        ranks: Who they are, for messages.

    Raises:
        PlanError: Two ranks give one key different dtypes, shapes or layouts.
    """
    # Every rank numbers its tensors and replica sets by itself; from here on the numbers are joint.
    names, numbers = _number_tensors(claims, ranks)
    replica_sets: dict[ReplicaSet, int] = {}
    boxes, declared = [], []
    for own, own_numbers in zip(claims, numbers, strict=True):
        boxes.append(BoxTable(tensor=own_numbers[own.tensor], offset=own.offset, extent=own.extent))
        known = [replica_sets.setdefault(each, len(replica_sets)) for each in own.replica_sets]
        # UNDECLARED is -1: it picks the last entry, which is itself.
        declared.append(np.array([*known, UNDECLARED], dtype=np.int64)[own.replica_set])
    position, local = enumerate_ranges(np.array([len(own) for own in claims], dtype=np.int64))
    joined = concatenate(boxes)
    return AllClaims(
        tensor=joined.tensor,
        offset=joined.offset,
        extent=joined.extent,
        names=names,
        position=position,
        local=local,
        replica_set=np.concatenate(declared),
        replica_sets=tuple(replica_sets),
    )


def _number_tensors(
    claims: Sequence[RankClaims], ranks: Sequence[int]
) -> tuple[TensorNames, list[IntArray]]:
    """One number per key; and for each rank the numbers of its tensors."""
    numbers: dict[str, int] = {}
    known: list[tuple[str, tuple[int, ...], int, int]] = []
    layouts: list[LayoutInfo] = []
    # Irregular are tensors whose placement ranks declare differently, or no rank declares.
    placements: dict[PlacementInfo, int] = {WHOLE: 0, IRREGULAR: 1}
    placed: list[int] = []
    read: dict[bytes, tuple[TensorNames, list[int], list[int], IntArray]] = {}
    numbers_of: list[IntArray] = []
    problems: list[str] = []
    for rank, own in zip(ranks, claims, strict=True):
        # Ranks of one pipeline stage have equal names: they are looked at once, but for the keys of
        # values per coordinate, which each rank has its own of.
        is_new = own.names not in read
        if is_new:
            names = decode_names(own.names)
            layouts.extend(info for info in names.layouts if info not in layouts)
            homes = [layouts.index(info) for info in names.layouts]
            # UNDECLARED is -1: it picks the last entry, which is itself.
            forms = [placements.setdefault(each, len(placements)) for each in names.placements]
            forms.append(UNDECLARED)
            read[own.names] = names, homes, forms, np.zeros(len(names.keys), dtype=np.int64)
        names, homes, forms, own_numbers = read[own.names]
        if names.places:
            own_numbers = own_numbers.copy()
        for i in range(len(names.keys)) if is_new else names.places:
            key = names.key(i, own.labels)
            number = own_numbers[i] = numbers.setdefault(key, len(numbers))
            tensor = (names.dtypes[i], names.shapes[i], homes[names.homes[i]], rank)
            # `setdefault` has just given out a new number: this rank is the first that has the key,
            # and others are compared with it.
            form = forms[names.placed[i]]
            if number == len(known):
                known.append(tensor)
                placed.append(form)
                continue
            if known[number][:3] != tensor[:3]:
                problems.append(_disagreement(key, known[number], tensor, layouts))
            if form not in (placed[number], UNDECLARED):
                is_first = placed[number] == UNDECLARED
                placed[number] = form if is_first else placements[IRREGULAR]
        read[own.names] = names, homes, forms, own_numbers
        numbers_of.append(own_numbers)
    if problems:
        raise PlanError(
            "one key must have one dtype, shape and layout on all ranks: "
            + some_sentences(problems, most=_MAX_PROBLEMS)
        )
    joint = TensorNames(
        keys=tuple(numbers),
        dtypes=tuple(dtype for dtype, *_ in known),
        shapes=tuple(shape for _, shape, *_ in known),
        layouts=tuple(layouts),
        homes=tuple(home for *_, home, _ in known),
        placements=tuple(placements),
        placed=tuple(placements[IRREGULAR] if form == UNDECLARED else form for form in placed),
    )
    return joint, numbers_of


def _disagreement(
    key: str,
    one: tuple[str, tuple[int, ...], int, int],
    other: tuple[str, tuple[int, ...], int, int],
    layouts: Sequence[LayoutInfo],
) -> str:
    """Say how two ranks differ over one key."""
    if one[:2] != other[:2]:
        return (
            f"{key}: rank {one[3]} has {one[0]} {list(one[1])}, rank {other[3]} has {other[0]} "
            f"{list(other[1])}"
        )
    return (
        f"{key}: on rank {one[3]} it lives on layout '{layouts[one[2]].name}', on rank {other[3]} "
        f"on layout '{layouts[other[2]].name}': two modules need two names"
    )


def distinct_boxes(claims: AllClaims, *, num_ranks: int) -> HeldBoxes:
    """Each box once, with its holders in the order of ranks."""
    distinct, number = unique_boxes(claims)
    itemsize = np.array([DTYPES[name].itemsize for name in claims.names.dtypes], dtype=np.int64)
    # Rows come rank by rank, and a stable sort leaves them so within each box.
    row = np.argsort(number, kind="stable")
    counts = np.bincount(number, minlength=len(distinct))
    return HeldBoxes(
        extent=distinct.extent,
        nbytes=distinct.numel() * itemsize[distinct.tensor],
        holder_ptr=np.concatenate([[0], np.cumsum(counts)]),
        holders=claims.position[row],
        row=row,
        num_ranks=num_ranks,
    )


def prove_exact_cover(claims: AllClaims, held: HeldBoxes, ranks: Sequence[int]) -> None:
    """Prove that the distinct boxes of each tensor cover every element of it exactly once.

    Raises:
        PlanError: They do not; names key, region and the ranks concerned.
    """
    # Replicas count once: a box that several ranks hold covers its elements a single time.
    first = held.row[held.holder_ptr[:-1]]
    flaws = check_tilings(claims.take(first), claims.names.shapes)
    if not flaws:
        return
    problems = []
    for tensor, flaw in flaws:
        # Nobody holds a gap: everybody who holds anything of the tensor is concerned.
        boxes = flaw.rows or np.flatnonzero(claims.tensor[first] == tensor).tolist()
        holders = sorted({int(p) for box in boxes for p in held.holders_of(box)})
        problems.append(
            f"{claims.names.keys[tensor]} (shape {list(claims.names.shapes[tensor])}): "
            f"{_FLAWS[flaw.kind]} {_box_text(flaw.box)}, held by ranks "
            f"{[ranks[p] for p in holders]}"
        )
    raise PlanError(
        "the ranks' shards do not cover every tensor exactly: "
        + some_sentences(problems, most=_MAX_PROBLEMS)
        + ". Check the placements (offsets, axes, mesh) of these tensors on the ranks named"
    )


def prove_replicas(claims: AllClaims, held: HeldBoxes, ranks: Sequence[int]) -> BoolArray:
    """(n,) for each distinct box whether its holders must be compared by content.

    They must if one of them declares nothing, or is not declared by another one.

    Raises:
        PlanError: A holder declares that another holder of its box holds a different one.
    """
    if not len(held.nbytes):
        return np.zeros(0, dtype=np.bool_)
    # Boxes with the same holders and the same declarations are judged once: they share a word, the
    # wrapping sum over holders of a hash of (holder, declaration).
    pairs = np.column_stack([claims.position, claims.replica_set])[held.row]
    words = np.add.reduceat(mix_columns(pairs), held.holder_ptr[:-1])
    _, examples, group = np.unique(words, return_index=True, return_inverse=True)
    verdicts = np.zeros(len(examples), dtype=np.bool_)
    problems = []
    for number, box in enumerate(examples.tolist()):
        problem, verdicts[number] = _judge(claims, held.rows_of(box), ranks)
        if problem is not None and held.nbytes[box] > 0:
            row = int(held.rows_of(box)[0])
            others = int((group == number).sum()) - 1
            also = f" and {others} other boxes" if others else ""
            where = f"{claims.names.keys[claims.tensor[row]]} {_box_text(claims.tensor_box(row))}"
            problems.append(f"{where}{also}: {problem}")
    if problems:
        raise PlanError(
            "two ranks claim to own one box: " + some_sentences(problems, most=_MAX_PROBLEMS)
        )
    judged: BoolArray = verdicts[group]
    return judged


# Verdicts of `_judge`. Five boxes, each held by ranks 0 and 1:
#
#     rank 0 declares            rank 1 declares            verdict
#     replicas 0, 1 of 0-3       replicas 0, 1 of 0-3       trusted
#     replicas 0, 1 of 0-3       nothing                    compared
#     replicas 0 of 0, 2         replicas 1 of 1, 3         compared: neither speaks of the other
#     replicas 0, 1 of 0-3       replicas 1 of 0-3          refused: 1 says that 0 has another box
#     nothing                    nothing                    compared
def _judge(claims: AllClaims, rows: IntArray, ranks: Sequence[int]) -> tuple[str | None, bool]:
    """A contradiction in words or None; and whether the holders need a comparison."""
    holders = [ranks[int(p)] for p in claims.position[rows]]
    if len(holders) == 1:
        return None, False
    # Holders mostly share one declaration: each is looked at once, in the name of its first holder.
    declared_by: dict[int, int] = {}
    for holder, number in zip(holders, claims.replica_set[rows].tolist(), strict=True):
        declared_by.setdefault(number, holder)
    compare = UNDECLARED in declared_by
    for number, holder in declared_by.items():
        if number == UNDECLARED:
            continue
        replica_set = claims.replica_sets[number]
        others = [each for each in holders if each not in replica_set.replicas]
        rivals = sorted(each for each in others if each in replica_set.span)
        if rivals:
            return (
                f"rank {holder} declares its replicas to be ranks {list(replica_set.replicas)}, "
                f"but ranks {rivals} hold the same box",
                True,
            )
        compare = compare or bool(others)
    return None, compare


def _box_text(box: Box) -> str:
    """A box as slices: `[0:4, 2:6]`."""
    return "[" + ", ".join(f"{a}:{b}" for a, b in zip(box.offset, box.stop, strict=True)) + "]"
