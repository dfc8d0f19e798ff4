"""Assign writers to boxes: whole boxes if that balances, pieces of large ones if it does not.

Deterministic: equal claims give equal assignments, on any machine.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from holdfast.arrays.box_table import enumerate_ranges, mix_columns
from holdfast.arrays.boxes import Box, flat_range_boxes
from holdfast.arrays.types import BoolArray, FloatArray, IntArray, WordArray
from holdfast.arrays.water_filling import fill_groups

MIN_PIECE_NBYTES = 1 << 16
"""No box is cut into pieces smaller than this; one that is not twice as large stays whole."""
_MIN_PIECE_SHARE = 1 / 512
"""Nor into pieces smaller than this share of a rank's mean load, which balance nothing."""
_GOOD_ENOUGH = 1.01


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldBoxes:
    """The n distinct boxes of a state and who holds them."""

    extent: IntArray
    """(n, d) of each box, padded with 1."""
    nbytes: IntArray
    """(n,) of each box."""
    holder_ptr: IntArray
    """(n + 1,) start of the holders of each box."""
    holders: IntArray
    """Positions of the ranks that hold box i: `holders[holder_ptr[i]:holder_ptr[i + 1]]`."""
    row: IntArray
    """Aligned with `holders`: the row of the claims of all ranks in which each holder has it."""
    num_ranks: int

    @property
    def num_holders(self) -> IntArray:
        """(n,) of each box."""
        counts: IntArray = np.diff(self.holder_ptr)
        return counts

    def holders_of(self, box: int) -> IntArray:
        """Positions of the ranks that hold a box, ascending."""
        return self.holders[self.holder_ptr[box] : self.holder_ptr[box + 1]]

    def rows_of(self, box: int) -> IntArray:
        """Rows of the claims of all ranks that are this box, in the order of ranks."""
        return self.row[self.holder_ptr[box] : self.holder_ptr[box + 1]]

    def loads_alone(self) -> IntArray:
        """(num_ranks,) bytes of the boxes that only one rank holds."""
        alone = self.num_holders == 1
        loads = np.zeros(self.num_ranks, dtype=np.int64)
        # Not `loads[...] += ...`, which would count a rank that is named twice only once.
        np.add.at(loads, self.holders[self.holder_ptr[:-1][alone]], self.nbytes[alone])
        return loads

    def set_words(self) -> WordArray:
        """(n,) a word for each box, equal for boxes with the same holders."""
        # The wrapping sum of a hash of the members: no Python per box.
        if not len(self.nbytes):
            return np.zeros(0, dtype=np.uint64)
        words: WordArray = np.add.reduceat(mix_columns(self.holders[:, None]), self.holder_ptr[:-1])
        return words

    def holder_sets(self) -> tuple[IntArray, IntArray, IntArray]:
        """The distinct sets of holders.

        Returns:
            (n,) number of the set of each box, (members,) the set of each member, ascending, and
            its position.
        """
        _, examples, number = np.unique(self.set_words(), return_index=True, return_inverse=True)
        counts = self.num_holders[examples]
        entry, place = enumerate_ranges(counts)
        members = self.holders[self.holder_ptr[:-1][examples][entry] + place]
        return number, entry, members

    def shared_boxes(self) -> Iterator[IntArray]:
        """Boxes with several holders, by set of holders (small sets first), largest boxes first."""
        shared = np.flatnonzero(self.num_holders > 1)
        if len(shared) == 0:
            return
        _, sets = np.unique(self.set_words()[shared], return_inverse=True)
        # Small sets first: they have the least choice. Large boxes first: small ones then even out
        # what the large ones have left. The box number last, so that the order of equal boxes never
        # depends on how NumPy sorts.
        order = np.lexsort((shared, -self.nbytes[shared], sets, self.num_holders[shared]))
        ends = np.flatnonzero(np.diff(sets[order])) + 1
        yield from np.split(shared[order], ends)


@dataclass(frozen=True, slots=True, kw_only=True)
class WriterAssignment:
    """Who writes what: piece i of box `box[i]` is written by its holder number `holder[i]`.

    The pieces of a box cover it exactly; most boxes have one, the whole.
    """

    box: IntArray
    """(m,) number of the box."""
    holder: IntArray
    """(m,) position among the box's holders."""
    offset: IntArray
    """(m, d) of the piece, within the box."""
    extent: IntArray
    """(m, d) of the piece."""

    def loads(self, held: HeldBoxes) -> FloatArray:
        """(num_ranks,) bytes that each rank writes."""
        itemsize = held.nbytes // np.maximum(held.extent.prod(axis=1), 1)
        nbytes = self.extent.prod(axis=1) * itemsize[self.box]
        position = held.holders[held.holder_ptr[self.box] + self.holder]
        loads = np.zeros(held.num_ranks)
        np.add.at(loads, position, nbytes)
        return loads


_Piece = tuple[int, int, Box]
"""A box that is cut, the number of a holder, and what of the box that holder writes."""


def assign_writers(held: HeldBoxes, *, is_whole: BoolArray | None = None) -> WriterAssignment:
    """Return one writer per box, balanced by bytes; cut large boxes if whole ones do not balance.

    First whole boxes, largest first to the least loaded holder. Where the most loaded rank then has
    more than 1.01 times the least that any assignment could give it, boxes with several holders are
    assigned again, by quotas, and cut at a quota's end.

    Args:
        held: The boxes and their holders.
        is_whole: (n,) boxes that are never cut; None for none.

    Cost: a heap over the boxes with several holders; quotas cost O(sets of holders x holders) a
    sweep. No communication.
    """
    groups = list(held.shared_boxes())
    writer, loads = _assign_whole(held, groups)
    assignment = None
    # The mean is a bound that costs nothing; mostly it is met, and no quotas are needed.
    if len(loads) and loads.max() * held.num_ranks > _GOOD_ENOUGH * float(held.nbytes.sum()):
        assignment = _assign_by_quotas(held, groups, writer, loads, is_whole)
    return assignment or _assignment(held, writer, [])


def _assign_whole(held: HeldBoxes, groups: Sequence[IntArray]) -> tuple[IntArray, IntArray]:
    """Each box to one holder: its number among them; and the bytes of every rank."""
    writer = np.zeros(len(held.nbytes), dtype=np.int64)
    loads = held.loads_alone()
    for group in groups:
        positions = held.holders_of(int(group[0]))
        # All boxes of a group have the same holders, so that one heap serves them.
        # The position is part of the entry: of equally loaded holders the first one writes, on
        # every machine.
        heap = [(int(loads[p]), at) for at, p in enumerate(positions.tolist())]
        heapq.heapify(heap)
        chosen = np.zeros(len(group), dtype=np.int64)
        for i, nbytes in enumerate(held.nbytes[group].tolist()):
            load, at = heap[0]
            chosen[i] = at
            heapq.heapreplace(heap, (load + nbytes, at))
        writer[group] = chosen
        np.add.at(loads, positions[chosen], held.nbytes[group])
    return writer, loads


def _assign_by_quotas(
    held: HeldBoxes,
    groups: Sequence[IntArray],
    writer: IntArray,
    loads: IntArray,
    is_whole: BoolArray | None,
) -> WriterAssignment | None:
    """Assign whole boxes and pieces by quotas; None if that does not lower the highest load."""
    members = [held.holders_of(int(group[0])) for group in groups]
    alone = held.loads_alone()
    quotas = fill_groups(alone, members, [int(held.nbytes[group].sum()) for group in groups])
    ideal = alone.copy()
    for positions, quota in zip(members, quotas, strict=True):
        ideal[positions] += quota
    # The exact bound: if one rank's own bytes are the highest load, cutting helps nobody.
    if loads.max() <= _GOOD_ENOUGH * ideal.max():
        return None
    smallest = max(MIN_PIECE_NBYTES, int(ideal.mean() * _MIN_PIECE_SHARE))
    again = writer.copy()
    pieces: list[_Piece] = []
    # What is smaller than two pieces is never cut.
    nbytes = held.nbytes if is_whole is None else np.where(is_whole, 0, held.nbytes)
    may_cut = nbytes >= 2 * smallest
    for group, quota in zip(groups, quotas, strict=True):
        pieces += _cut(held, group, quota, smallest, again, may_cut)
    # Quotas are real numbers and boxes are not: what was rounded may be worse than whole boxes.
    by_quotas = _assignment(held, again, pieces)
    return by_quotas if by_quotas.loads(held).max() < loads.max() else None


# How `_cut` works: holders a and b with quotas of 70 and 50, boxes of 60, 40 and 20, none to be cut
# below 5:
#
#     box    quota left: a, b    assigned
#     60     70, 50              whole to a: it fits its quota
#     40     10, 50              whole to b
#     20     10, 10              10 to a, whose quota ends there; 10 to b
#
# With the boxes 100 and 20, the first would be cut into 70 for a and 30 for b at once.
def _cut(
    held: HeldBoxes,
    group: IntArray,
    quota: IntArray,
    smallest: int,
    writer: IntArray,
    may_cut: BoolArray,
) -> list[_Piece]:
    """Boxes of one set of holders, largest first, each to whom most of the quota is left.

    A box that is larger than what is left is cut there. `writer` gets the holders of whole boxes.
    """
    pieces: list[_Piece] = []
    heap = [(-float(left), at) for at, left in enumerate(quota)]
    heapq.heapify(heap)
    for box in group.tolist():
        nbytes = int(held.nbytes[box])
        left, at = -heap[0][0], heap[0][1]
        # Over the quota by less than the smallest piece: cutting would leave a piece smaller than
        # that.
        if nbytes <= left + smallest or not may_cut[box]:
            writer[box] = at
            heapq.heapreplace(heap, (float(nbytes) - left, at))
            continue
        depth, num_slabs = slabs(held.extent[box], nbytes, smallest)
        shape, slab_nbytes = tuple(held.extent[box].tolist()), nbytes / num_slabs
        start = 0
        while start < num_slabs:
            left, at = -heap[0][0], heap[0][1]
            rest = num_slabs - start
            count = min(max(round(max(left, smallest) / slab_nbytes), 1), rest)
            # A rest too small for a separate piece goes to this one.
            if (rest - count) * slab_nbytes < smallest:
                count = rest
            # A range of slabs is not a box if it starts or ends inside a row of them.
            for piece in flat_range_boxes(shape[:depth], start, start + count):
                inner = (0,) * (len(shape) - depth)
                pieces.append((box, at, Box(piece.offset + inner, piece.shape + shape[depth:])))
            heapq.heapreplace(heap, (count * slab_nbytes - left, at))
            start += count
    return pieces


def slabs(extent: IntArray, nbytes: int, smallest: int) -> tuple[int, int]:
    """Return the number of leading dims to cut along, and of slabs into which they divide the box.

    As few dims as give slabs of a quarter of the smallest piece: pieces then end close enough to
    their quotas, and stay few boxes each.
    """
    num_slabs = 1
    for depth, size in enumerate(extent.tolist(), start=1):
        num_slabs *= size
        if nbytes / num_slabs <= smallest / 4:
            return depth, num_slabs
    return len(extent), num_slabs


def _assignment(held: HeldBoxes, writer: IntArray, pieces: Sequence[_Piece]) -> WriterAssignment:
    """The assignment of writers to whole boxes, but for those that are cut into pieces."""
    cut = np.array([(box, holder) for box, holder, _ in pieces], dtype=np.int64).reshape(-1, 2)
    whole = np.delete(np.arange(len(writer)), cut[:, 0])
    extent = held.extent[whole]
    shape = (len(pieces), held.extent.shape[1])
    # With the shape given, since without pieces the arrays would have no second axis.
    offsets = np.array([piece.offset for _, _, piece in pieces], dtype=np.int64).reshape(shape)
    extents = np.array([piece.shape for _, _, piece in pieces], dtype=np.int64).reshape(shape)
    return WriterAssignment(
        box=np.concatenate([whole, cut[:, 0]]),
        holder=np.concatenate([writer[whole], cut[:, 1]]),
        offset=np.concatenate([np.zeros_like(extent), offsets]),
        extent=np.concatenate([extent, extents]),
    )
