"""Copies of replicated boxes: which boxes are stored more than once, and by which ranks.

A box that ranks with several coordinates along the chosen axes hold is stored once for each of
these coordinates, by a rank that has it. So each rank finds what it needs in its own file
coordinate. With TP2 and DP2 (ranks 0 to 3, tp varying fastest) and copies over `tp`:

    box                 held by        stored
    norm.weight         0, 1, 2, 3     twice: by 0 or 2 (tp=0), and by 1 or 3 (tp=1)
    linear.weight, tp=0 0, 2           once: all its holders have tp=0

The axes are those of a tensor's own view of the layout: of experts, `tp` is `expt_tp` and `dp` is
`expt_dp`. With TP2 and expt_tp 1 the ranks of a tensor group hold different rows of tokens, not the
copies of an expert that `tp` asks for.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from holdfast.arrays.box_table import enumerate_ranges
from holdfast.arrays.boxes import Box, flat_range_boxes
from holdfast.arrays.distinct import distinct
from holdfast.arrays.types import BoolArray, IntArray
from holdfast.checkpoint.plan.assign_writers import MIN_PIECE_NBYTES, HeldBoxes, slabs
from holdfast.checkpoint.plan.proof import AllClaims
from holdfast.errors import PlanError
from holdfast.format.manifest import PlacementInfo
from holdfast.format.stored_copies import CopyPolicy
from holdfast.parallel.layout import EXPERT_AXES, Layout

_MIN_CUT_SHARE = 1 / 64
"""A box with copies is cut only if its pieces have this share of what a rank writes on average."""
_MAX_NAMED = 5
_OF_EXPERTS = {"tp": "expt_tp", "dp": "expt_dp", "cp": ""}
"""Axis of the dense view -> what takes its place for experts; `cp` is part of `expt_dp`."""


StoredBoxes = tuple[HeldBoxes, IntArray, IntArray, BoolArray]
"""The boxes to write, m of them, each by one of its holders; copies of a box are separate boxes.

    held          the boxes, or pieces of them, and the ranks that may write each
    offset        (m, d) within the distinct box
    copy          (m,) 0 for the primary
    has_copies    (m,) whether it is stored more than once; then it must be written whole, since
                  copies are equal boxes
"""


def stored_boxes(
    claims: AllClaims, held: HeldBoxes, ranks: Sequence[int], policy: CopyPolicy
) -> StoredBoxes:
    """The boxes to write: every distinct box, and its copies by the policy.

    Args:
        claims: Of all ranks.
        held: The distinct boxes of the claims.
        ranks: Whose claims they are, by position.
        policy: What is stored more than once.

    Raises:
        PlanError: The copies would be more than the policy allows; names the largest.

    Cost: O(rows) vector work; nothing without axes.
    """
    box = np.arange(len(held.nbytes))
    once = held, np.zeros_like(held.extent), np.zeros_like(box), np.zeros(len(box), dtype=np.bool_)
    if not policy.axes or not len(box):
        return once
    owner = np.repeat(box, held.num_holders)
    place = _places(claims, held, ranks, policy.axes)
    # Sorted by one number for (box, coordinate), so that the holders of a copy lie together.
    pair = owner * (int(place.max()) + 1) + place
    counts = np.bincount(distinct(pair) // (int(place.max()) + 1), minlength=len(box))
    has_copies = (counts > 1) & (held.nbytes > 0)
    if policy.max_nbytes is not None:
        tensor = claims.tensor[held.row[held.holder_ptr[:-1]]]
        whole = np.bincount(tensor, held.nbytes, len(claims.names.keys))
        has_copies &= whole[tensor] <= policy.max_nbytes
    if not has_copies.any():
        return once
    _refuse_too_many(claims, held, np.where(has_copies, counts, 1), policy)
    # What is stored once keeps all its holders, whatever their coordinates.
    pair -= np.where(has_copies[owner], 0, place)
    order = np.argsort(pair, kind="stable")
    heads = np.flatnonzero(np.diff(pair[order], prepend=-1))
    of = owner[order[heads]]
    split = HeldBoxes(
        extent=held.extent[of],
        nbytes=held.nbytes[of],
        holder_ptr=np.append(heads, len(order)),
        holders=held.holders[order],
        row=held.row[order],
        num_ranks=held.num_ranks,
    )
    copy = enumerate_ranges(np.bincount(of, minlength=len(box)))[1]
    return _cut_large(split, of, copy, has_copies[of])


def _places(
    claims: AllClaims, held: HeldBoxes, ranks: Sequence[int], axes: Sequence[str]
) -> IntArray:
    """(holders,) a number for the coordinate of each holder along the axes that its layout has.

    Aligned with `held.holders`. Layout and view of it are those of the box's tensor.
    """
    names = claims.names
    tensor = claims.tensor[held.row]
    home = np.array(names.homes, dtype=np.int64)[tensor]
    is_expert = np.array([_is_of_experts(names.placements[form]) for form in names.placed])[tensor]
    places = np.zeros(len(held.holders), dtype=np.int64)
    for number, info in enumerate(names.layouts):
        layout = Layout.from_info(info)
        for of_experts in (False, True):
            chosen = (home == number) & (is_expert == of_experts)
            if chosen.any():
                own = [_OF_EXPERTS.get(axis, axis) for axis in axes] if of_experts else axes
                of_position = _places_on(layout, ranks, own, held.num_ranks)
                places[chosen] = of_position[held.holders[chosen]]
    return places


def _is_of_experts(placement: PlacementInfo) -> bool:
    """Return True if a tensor is placed by axes of the expert view."""
    groups = (placement.over, *(cut.axis for cut in placement.cuts))
    axes = {token for group in groups for token in group.split("-")}
    names = {axis.removesuffix("_inter").removesuffix("_intra") for axis in axes}
    return not names.isdisjoint({*EXPERT_AXES} - {"pp"})


def _places_on(
    layout: Layout, ranks: Sequence[int], axes: Sequence[str], num_ranks: int
) -> IntArray:
    """(ranks,) a number for the coordinate of each along these axes; 0 where it is elsewhere."""
    members = {*layout.ranks}
    seen: dict[tuple[int, ...], int] = {}
    places = np.zeros(num_ranks, dtype=np.int64)
    for position, rank in enumerate(ranks):
        if rank in members:
            coordinates = layout.coordinates(rank)
            along = tuple(coordinates.get(axis, 0) for axis in axes)
            places[position] = seen.setdefault(along, len(seen))
    return places


def _refuse_too_many(
    claims: AllClaims, held: HeldBoxes, counts: IntArray, policy: CopyPolicy
) -> None:
    """Raise PlanError if copies add more bytes than allowed; `counts` (n,) of each box."""
    extra = (counts - 1) * held.nbytes
    total = int(held.nbytes.sum())
    if int(extra.sum()) <= policy.max_fraction * total:
        return
    tensor = claims.tensor[held.row[held.holder_ptr[:-1]]]
    by_tensor = np.zeros(len(claims.names.keys), dtype=np.int64)
    np.add.at(by_tensor, tensor, extra)
    largest = np.argsort(-by_tensor, kind="stable")[:_MAX_NAMED].tolist()
    named = ", ".join(f"{claims.names.keys[t]} {by_tensor[t]}" for t in largest if by_tensor[t])
    raise PlanError(
        f"replicate_over={list(policy.axes)} would store {int(extra.sum())} bytes of copies for "
        f"{total} bytes of tensors, more than max_copy_fraction={policy.max_fraction:g} allows; "
        f"the most are of (bytes): {named}. Choose fewer axes, raise "
        f"max_copy_fraction, or limit what is copied by max_copied_nbytes"
    )


def _cut_large(
    held: HeldBoxes, box: IntArray, copy: IntArray, has_copies: BoolArray
) -> StoredBoxes:
    """Large boxes with copies, all copies cut alike, so that the holders of each can share it.

    Args:
        held: The boxes to write.
        box: (m,) the distinct box that each is.
        copy: (m,) which copy.
        has_copies: (m,) whether it has others.
    """
    offset = np.zeros_like(held.extent)
    mean = int(held.nbytes.sum()) / max(held.num_ranks, 1)
    smallest = max(MIN_PIECE_NBYTES, int(mean * _MIN_CUT_SHARE))
    # As many pieces as every copy has holders.
    num_pieces = np.full(int(box.max()) + 1, held.num_ranks)
    np.minimum.at(num_pieces, box, held.num_holders)
    num_pieces = np.minimum(num_pieces[box], held.nbytes // smallest)
    large = np.flatnonzero(has_copies & (num_pieces > 1)).tolist()
    if not large:
        return held, offset, copy, has_copies
    pieces = {n: _pieces(held, n, int(num_pieces[n]), smallest) for n in large}
    counts = np.ones(len(box), dtype=np.int64)
    counts[large] = [len(each) for each in pieces.values()]
    entry, _ = enumerate_ranges(counts)
    offset, extent = offset[entry], held.extent[entry]
    first = np.cumsum(counts) - counts
    for number, boxes in pieces.items():
        for at, piece in enumerate(boxes, start=int(first[number])):
            offset[at, : len(piece.offset)] = piece.offset
            extent[at, : len(piece.shape)] = piece.shape
    itemsize = held.nbytes // np.maximum(held.extent.prod(axis=1), 1)
    holder_entry, place = enumerate_ranges(held.num_holders[entry])
    holder = held.holder_ptr[entry][holder_entry] + place
    cut = HeldBoxes(
        extent=extent,
        nbytes=extent.prod(axis=1) * itemsize[entry],
        holder_ptr=np.concatenate([[0], np.cumsum(held.num_holders[entry])]),
        holders=held.holders[holder],
        row=held.row[holder],
        num_ranks=held.num_ranks,
    )
    return cut, offset, copy[entry], has_copies[entry]


def _pieces(held: HeldBoxes, number: int, count: int, smallest: int) -> list[Box]:
    """A box in about `count` equal pieces along its leading dims."""
    shape = tuple(held.extent[number].tolist())
    depth, num_slabs = slabs(held.extent[number], int(held.nbytes[number]), smallest)
    inner = (0,) * (len(shape) - depth)
    bounds = [num_slabs * i // count for i in range(count + 1)]
    return [
        Box(piece.offset + inner, piece.shape + shape[depth:])
        for start, stop in pairwise(bounds)
        for piece in flat_range_boxes(shape[:depth], start, stop)
    ]
