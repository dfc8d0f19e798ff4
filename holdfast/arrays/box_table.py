"""Many boxes as columns: equal and overlapping ones, their bytes, and the proof of a tiling.

The proof that boxes cover every element of a tensor once: every coordinate gets a random 64-bit
potential, 0 at the start of a dim and 1 at its end. The weight of a box is the product over its
dims of the potential differences between its two ends. So the weights of neighbours add up to the
weight of the box that they form. A tensor of shape (4, 2) in five boxes, with potentials p(1) and
p(2) in dim 0 and q(1) in dim 1:

    box            weight
    [0:1, 0:1]     (p(1) - 0)    * (q(1) - 0)
    [0:1, 1:2]     (p(1) - 0)    * (1 - q(1))     with the first: p(1)
    [1:2, 0:2]     (p(2) - p(1)) * (1 - 0)        so far: p(2)
    [2:4, 0:1]     (1 - p(2))    * (q(1) - 0)
    [2:4, 1:2]     (1 - p(2))    * (1 - q(1))     all five: 1, the weight of the tensor

An element that is covered twice or not at all leaves a product of random words in the sum. Boxes
tile exactly if and only if their weights add up to 1 as polynomials (a multilinear identity test,
modulo 2**64). A wrong table passes with a probability below 2**-90, even if made on purpose,
because the potentials are drawn in every call. Bisection then locates a flaw exactly.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from holdfast.arrays.boxes import Box
from holdfast.arrays.distinct import distinct
from holdfast.arrays.types import BoolArray, IntArray, WordArray
from holdfast.errors import PlacementError

_MAX_CELLS = 1 << 22
# Words modulo 2**64 are not a field: one sum alone errs with up to 2**-45, so two are drawn.
_NUM_DRAWS = 2


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BoxTable:
    """Boxes of tensors as columns: n rows, d dims.

    Tensors of fewer than d dims are padded after their own dims with offset 0 and extent 1.
    """

    tensor: IntArray
    """(n,) number of the tensor, in a numbering that the caller chooses."""
    offset: IntArray
    """(n, d) first coordinate, in elements."""
    extent: IntArray
    """(n, d) shape, in elements."""

    @classmethod
    def from_boxes(cls, tensor: Sequence[int], boxes: Sequence[Box], *, num_dims: int) -> BoxTable:
        """Return the table of `boxes`; `tensor` has the tensor of each."""
        return cls(
            tensor=np.array(tensor, dtype=np.int64),
            offset=pad_shapes([box.offset for box in boxes], num_dims, fill=0),
            extent=pad_shapes([box.shape for box in boxes], num_dims),
        )

    def __len__(self) -> int:
        """Return the number of boxes."""
        return len(self.tensor)

    @property
    def num_dims(self) -> int:
        """Number of columns d of `offset` and `extent`."""
        return int(self.offset.shape[1])

    @property
    def stop(self) -> IntArray:
        """(n, d) first coordinate past each box."""
        return self.offset + self.extent

    def numel(self) -> IntArray:
        """Return (n,) elements of each box."""
        product: IntArray = self.extent.prod(axis=1, dtype=np.int64)
        return product

    def box(self, row: int, *, ndim: int | None = None) -> Box:
        """Return one row as a box of `ndim` dims, by default all of the table's."""
        offset, extent = self.offset[row, :ndim].tolist(), self.extent[row, :ndim].tolist()
        return Box(tuple(offset), tuple(extent))

    def take(self, rows: IntArray | BoolArray) -> BoxTable:
        """Return the chosen rows, in their order."""
        return BoxTable(
            tensor=self.tensor[rows], offset=self.offset[rows], extent=self.extent[rows]
        )

    def padded(self, num_dims: int) -> BoxTable:
        """Return the same boxes with at least `num_dims` dims."""
        missing = num_dims - self.num_dims
        if missing <= 0:
            return self
        offset, extent = (
            np.pad(column, ((0, 0), (0, missing)), constant_values=fill)
            for column, fill in ((self.offset, 0), (self.extent, 1))
        )
        return BoxTable(tensor=self.tensor, offset=offset, extent=extent)

    def find(self, others: BoxTable) -> IntArray:
        """Return (len(others),) the first row that equals each box; -1 if no row does."""
        _, number = unique_boxes(concatenate([self, others]))
        first = np.full(len(number), -1, dtype=np.int64)
        # Backwards: of several assignments to one place, numpy keeps the last.
        first[number[: len(self)][::-1]] = np.arange(len(self))[::-1]
        return first[number[len(self) :]]


def pad_shapes(shapes: Sequence[Sequence[int]], num_dims: int, *, fill: int = 1) -> IntArray:
    """Return shapes (or offsets) as an (n, num_dims) array, padded with `fill` at the end."""
    if set(map(len, shapes)) == {num_dims} and num_dims:  # nothing to pad, as nearly always
        flat = np.fromiter(itertools.chain.from_iterable(shapes), np.int64, len(shapes) * num_dims)
        return flat.reshape(-1, num_dims)
    lengths = np.fromiter(map(len, shapes), dtype=np.int64, count=len(shapes))
    padded = np.full((len(shapes), num_dims), fill, dtype=np.int64)
    values = itertools.chain.from_iterable(shapes)
    padded[np.arange(num_dims) < lengths[:, None]] = np.fromiter(values, dtype=np.int64)
    return padded


def concatenate(tables: Sequence[BoxTable]) -> BoxTable:
    """Join tables in the order given, as wide as the widest."""
    num_dims = max((table.num_dims for table in tables), default=0)
    wide = [table.padded(num_dims) for table in tables]
    tensor, offset, extent = (
        np.concatenate([getattr(table, name) for table in wide])
        for name in ("tensor", "offset", "extent")
    )
    return BoxTable(tensor=tensor, offset=offset, extent=extent)


def enumerate_ranges(lengths: IntArray) -> tuple[IntArray, IntArray]:
    """Number the items of ranges laid end to end: each item's range, and its position there.

    Lengths (2, 0, 3) give ranges (0, 0, 2, 2, 2) and positions (0, 1, 0, 1, 2).
    """
    total = int(lengths.sum())
    owner = np.repeat(np.arange(len(lengths), dtype=np.int64), lengths)
    begins = np.cumsum(lengths) - lengths
    return owner, np.arange(total, dtype=np.int64) - begins[owner]


_MAX_SPREAD = 8
_MIN_SPREAD = 4096


def rows_by_tensor(tensor: IntArray) -> IntArray | None:
    """Return the row of each tensor, -1 where it has none; None if one has two.

    None, too, if the numbers are too far apart for an array of all.
    """
    if not len(tensor):
        return np.empty(0, dtype=np.int64)
    end = int(tensor.max()) + 1
    if tensor.min() < 0 or end > _MAX_SPREAD * len(tensor) + _MIN_SPREAD:
        return None
    rows = np.full(end, -1, dtype=np.int64)
    rows[tensor] = np.arange(len(tensor))
    # Of several rows of one tensor the last one would be there, and the others nowhere.
    return rows if np.array_equal(rows[tensor], np.arange(len(tensor))) else None


def unique_boxes(boxes: BoxTable) -> tuple[BoxTable, IntArray]:
    """Return the distinct boxes in order of appearance, and each row's number among them.

    Cost: one sort of a hash; about 0.3 s for a million boxes of three dims. A twentieth of that if
    no tensor has two boxes.
    """
    if rows_by_tensor(boxes.tensor) is not None:
        return boxes, np.arange(len(boxes))
    columns = np.column_stack([boxes.tensor, boxes.offset, boxes.extent])
    words = mix_columns(columns)
    order = np.argsort(words, kind="stable")
    new_box = (columns[order[1:]] != columns[order[:-1]]).any(axis=1)
    if not np.array_equal(new_box, words[order[1:]] != words[order[:-1]]):
        # Two boxes share a hash. Sorted by all columns, equal boxes are certainly neighbours.
        order = np.lexsort(columns.T[::-1])
        new_box = (columns[order[1:]] != columns[order[:-1]]).any(axis=1)
    # The sorts are stable: a box first appears in the first row of its group.
    group = np.concatenate([[0], np.cumsum(new_box)])
    first = order[np.flatnonzero(np.concatenate([[True], new_box]))]
    by_appearance = np.argsort(first)
    number_of_group = np.empty(len(first), dtype=np.int64)
    number_of_group[by_appearance] = np.arange(len(first))
    number = np.empty(len(boxes), dtype=np.int64)
    number[order] = number_of_group[group]
    return boxes.take(first[by_appearance]), number


# Candidates of `meeting_pairs` for one tensor of shape (8, 4), with one row in `first` and five in
# `second`:
#
#     row of second    dim 0     dim 1     shares with first = box [3:6, 1:3]
#     0                [0:2]     [0:4]     no: ends before 3
#     1                [2:4]     [0:4]     yes
#     2                [4:5]     [0:4]     yes
#     3                [5:6]     [3:4]     no: dim 1 starts at 3
#     4                [6:8]     [0:4]     no: starts at 6
#
# Dim 0 has the finer cuts, and the longest extent in it is 2. Only rows that start in dim 0 after
# 3 - 2 = 1 and before 6 can overlap. A binary search leaves rows 1, 2, 3, and a comparison of all
# their dims leaves the pairs (0, 1) and (0, 2).
def meeting_pairs(first: BoxTable, second: BoxTable) -> tuple[IntArray, IntArray]:
    """Return all (row of `first`, row of `second`) that share an element, in that order.

    Neither table may contain an empty box. Each tensor's boxes of `second` are sorted along the dim
    with the finest cuts, so that only neighbours are compared: about linear for grids.
    """
    none = np.empty(0, dtype=np.int64)
    if not len(first) or not len(second):
        return none, none
    first, second = first.padded(1), second.padded(1)  # scalars alone have no dim to sort along
    rows_of = rows_by_tensor(second.tensor)
    if rows_of is not None:
        # One candidate for each row of `first`, as in most loads.
        a = np.flatnonzero((first.tensor >= 0) & (first.tensor < len(rows_of)))
        b = rows_of[first.tensor[a]]
        meets = b >= 0
        meets &= ((first.offset[a] < second.stop[b]) & (second.offset[b] < first.stop[a])).all(
            axis=1
        )
        return a[meets], b[meets]
    # Rows of `second` by tensor; `heads` has the start of each tensor.
    by_tensor = np.argsort(second.tensor, kind="stable")
    tensor = second.tensor[by_tensor]
    heads = np.flatnonzero(np.concatenate([[True], tensor[1:] != tensor[:-1]]))
    known = tensor[heads]
    offset, extent = second.offset[by_tensor], second.extent[by_tensor]
    counts = np.diff(np.append(heads, len(tensor)))
    # For each tensor the dim in which its boxes overlap least: covered length over sum of lengths.
    span = np.maximum.reduceat(offset + extent, heads, axis=0)
    fineness = span * counts[:, None] / np.add.reduceat(extent, heads, axis=0)
    dims = fineness.argmax(axis=1)
    # Rows of `first` whose tensor has boxes in `second`, and the number of that tensor's group.
    at = np.minimum(np.searchsorted(known, first.tensor), len(known) - 1)
    candidates = np.flatnonzero(known[at] == first.tensor)
    group_of_first = at[candidates]
    group = np.repeat(np.arange(len(known)), counts)
    rows = np.arange(len(tensor))
    lo = offset[rows, dims[group]]
    longest = np.maximum.reduceat(extent[rows, dims[group]], heads)
    # A box of `first` can only meet boxes that start less than the longest extent before it. One
    # sorted key serves all tensors: (group, rank of the start). The start itself may be too large
    # to be multiplied by the number of groups.
    values = distinct(lo)
    key = group * (len(values) + 1) + np.searchsorted(values, lo)
    order = np.argsort(key, kind="stable")
    key = key[order]
    dim = dims[group_of_first]
    begin = first.offset[candidates, dim]
    end = begin + first.extent[candidates, dim]
    base = group_of_first * (len(values) + 1)
    left = base + np.searchsorted(values, begin - longest[group_of_first], side="right")
    right = base + np.searchsorted(values, end, side="left")
    from_, to = np.searchsorted(key, left), np.searchsorted(key, right)
    owner, position = enumerate_ranges(np.maximum(to - from_, 0))
    a, b = candidates[owner], by_tensor[order[from_[owner] + position]]
    meets = (first.offset[a] < second.offset[b] + second.extent[b]) & (
        second.offset[b] < first.offset[a] + first.extent[a]
    )
    keep = meets.all(axis=1)
    a, b = a[keep], b[keep]
    order = np.lexsort((b, a))
    return a[order], b[order]


def union_nbytes(boxes: BoxTable, itemsize: IntArray) -> int:
    """Return the bytes of the elements that are in at least one of the boxes.

    Args:
        boxes: Distinct and not empty; they may overlap.
        itemsize: Bytes of an element, by tensor.
    """
    if not len(boxes):
        return 0
    total = boxes.numel() * itemsize[boxes.tensor]
    if rows_by_tensor(boxes.tensor) is not None:
        return int(total.sum())
    a, b = meeting_pairs(boxes, boxes)
    overlapping = distinct(boxes.tensor[a[a != b]])
    alone = ~np.isin(boxes.tensor, overlapping)
    nbytes = int(total[alone].sum())
    for tensor in overlapping.tolist():
        mine = boxes.take(boxes.tensor == tensor)
        nbytes += _union_numel(mine.offset, mine.stop) * int(itemsize[tensor])
    return nbytes


def _union_numel(lo: IntArray, hi: IntArray) -> int:
    """Count the elements in the union of boxes [lo, hi), which overlap."""
    volumes = (hi - lo).prod(axis=1)
    largest = int(volumes.argmax())
    inside = (lo >= lo[largest]).all(axis=1) & (hi <= hi[largest]).all(axis=1)
    if inside.all():
        return int(volumes[largest])
    ends = [distinct(np.concatenate([lo[:, d], hi[:, d]])) for d in range(lo.shape[1])]
    cells = [max(len(e) - 1, 1) for e in ends]
    if int(np.prod(cells, dtype=np.float64)) > _MAX_CELLS:
        # Split along the dim with the most ends into two smaller problems of the same kind.
        dim = int(np.argmax(cells))
        middle = int(ends[dim][len(ends[dim]) // 2])
        bounds = (int(ends[dim][0]), middle, int(ends[dim][-1]))
        return sum(_clipped_union(lo, hi, dim, *pair) for pair in itertools.pairwise(bounds))
    # Mark the covered cells of the grid of ends, then weigh the cells by their sizes.
    seen = np.zeros(cells, dtype=np.bool_)
    first = [np.searchsorted(e, lo[:, d]) for d, e in enumerate(ends)]
    last = [np.searchsorted(e, hi[:, d]) for d, e in enumerate(ends)]
    for row in range(len(lo)):
        seen[tuple(slice(first[d][row], last[d][row]) for d in range(len(ends)))] = True
    weight = seen.astype(np.int64)
    for d, e in enumerate(ends):
        shape = [1] * len(ends)
        shape[d] = len(e) - 1
        weight = weight * np.diff(e).reshape(shape)
    return int(weight.sum())


def _clipped_union(lo: IntArray, hi: IntArray, dim: int, low: int, high: int) -> int:
    lo, hi = lo.copy(), hi.copy()
    lo[:, dim] = np.maximum(lo[:, dim], low)
    hi[:, dim] = np.minimum(hi[:, dim], high)
    keep = lo[:, dim] < hi[:, dim]
    return _union_numel(lo[keep], hi[keep]) if keep.any() else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Flaw:
    """One proven defect of a tiling."""

    kind: Literal["gap", "overlap", "out_of_bounds"]
    box: Box
    """Elements that no row covers, that two or more rows cover, or the box out of bounds."""
    rows: tuple[int, ...]
    """The rows involved; empty for a gap."""

    def __str__(self) -> str:
        """Return the defect in words, for messages."""
        kind = self.kind.replace("_", " ")
        return f"{kind} at {list(self.box.offset)}, size {list(self.box.shape)}"


def check_tilings(
    boxes: BoxTable, shapes: Sequence[Sequence[int]], *, max_flaws: int = 100
) -> list[tuple[int, Flaw]]:
    """Prove that the boxes of each tensor cover every element of it exactly once.

    Empty boxes cover nothing but must be in bounds; a tensor without elements needs no boxes.

    Args:
        boxes: Boxes of any number of tensors, in any order, with any numbers.
        shapes: Shape of every tensor; `boxes.tensor` has positions in this list.
        max_flaws: Limit of the flaws to locate.

    Returns:
        (tensor, its first flaw) by tensor; empty if every tensor is covered exactly.

    Raises:
        PlacementError: A row names a tensor beyond `shapes`.

    Cost: linear in the boxes, well under a second for a million; some milliseconds for a flaw.
    """
    tensor = boxes.tensor
    if len(tensor) and not 0 <= int(tensor.min()) <= int(tensor.max()) < len(shapes):
        raise PlacementError(f"a row names a tensor beyond the {len(shapes)} tensors given")
    boxes = boxes.padded(max(map(len, shapes), default=0))
    sizes = pad_shapes(shapes, boxes.num_dims)
    flaws: dict[int, Flaw] = {}
    # Out of bounds first: such a box explains more than the gap or overlap that it causes.
    bad_rows = np.flatnonzero(_out_of_bounds(boxes, sizes[tensor]).any(axis=1))
    for owner, at in zip(*np.unique(tensor[bad_rows], return_index=True), strict=True):
        if len(flaws) < max_flaws:
            row, ndim = int(bad_rows[at]), len(shapes[owner])
            # Such rows may have negative numbers, which a Box refuses: show them clipped.
            offset, extent = (np.maximum(c[row, :ndim], 0) for c in (boxes.offset, boxes.extent))
            box = Box(tuple(offset.tolist()), tuple(extent.tolist()))
            flaws[int(owner)] = Flaw(kind="out_of_bounds", box=box, rows=(row,))
    # Sorted by tensor only if there is a flaw to locate, which is rare.
    by_tensor: IntArray | None = None
    for owner in _suspects(boxes, sizes).tolist():
        if owner in flaws or len(flaws) >= max_flaws:
            continue
        if by_tensor is None:
            by_tensor = np.argsort(tensor, kind="stable")
        first, last = np.searchsorted(tensor, [owner, owner + 1], sorter=by_tensor)
        flaw = _locate(sizes[owner], boxes, by_tensor[first:last], len(shapes[owner]))
        if flaw is not None:
            flaws[owner] = flaw
    return sorted(flaws.items())


def _out_of_bounds(boxes: BoxTable, sizes: IntArray) -> BoolArray:
    """Return (n, d) True if a box leaves its tensor; no number given can make this wrap."""
    offset, extent = boxes.offset, boxes.extent
    return np.asarray((offset < 0) | (extent < 0) | (offset > sizes) | (extent > sizes - offset))


def _suspects(boxes: BoxTable, sizes: IntArray) -> IntArray:
    """Return the tensors whose boxes' weights do not add up to the weight of the whole."""
    num_tensors = len(sizes)
    tensor, own = boxes.tensor, sizes[boxes.tensor]
    filled = (boxes.extent > 0).all(axis=1)
    partial = (boxes.extent != own).any(axis=1) & filled
    # A box that is the whole tensor has weight 1; only the others need potentials.
    whole = np.bincount(tensor[filled & ~partial], minlength=num_tensors).astype(np.uint64)
    rows = np.flatnonzero(partial)
    lo, hi, owner = boxes.offset[rows], boxes.stop[rows], tensor[rows]
    expected = (sizes > 0).all(axis=1).astype(np.uint64)
    wrong = np.zeros(num_tensors, dtype=bool)
    for _ in range(_NUM_DRAWS):
        seed = secrets.randbits(64)
        weight = np.ones(len(rows), dtype=np.uint64)
        for dim in range(sizes.shape[1]):
            size = own[rows, dim]
            # If a box spans the dim, its factor there is 1 - 0.
            cut = np.flatnonzero((hi[:, dim] - lo[:, dim]) != size)
            ids, span = owner[cut], size[cut]
            upper = _potential(hi[cut, dim], ids, span, dim, seed)
            weight[cut] *= upper - _potential(lo[cut, dim], ids, span, dim, seed)
        total = whole.copy()
        np.add.at(total, owner, weight)
        wrong |= total != expected
    return np.flatnonzero(wrong)


def _potential(
    coordinate: IntArray, tensor: IntArray, size: IntArray, dim: int, seed: int
) -> WordArray:
    """Return a random word per (tensor, dim, coordinate); 0 at a dim's start, 1 at its end."""
    # With equal potentials in two dims, box (0, 1) would weigh the same as box (1, 0).
    salt = np.uint64((seed + (dim + 1) * 0xD1B54A32D192ED03) & (2**64 - 1))
    word = mix(tensor.astype(np.uint64) + salt)
    word = mix(word ^ coordinate.astype(np.uint64))
    word[coordinate == size] = 1
    word[coordinate == 0] = 0
    return word


def _locate(size: IntArray, boxes: BoxTable, rows: IntArray, ndim: int) -> Flaw | None:
    """Locate one flawed cell by bisection of the tensor along its dims.

    The ends of the boxes are bisected, not the coordinates: between two neighbouring ends all
    elements are covered alike. A half is judged by its weight, like the whole.
    """
    rows = rows[(boxes.extent[rows] > 0).all(axis=1)]
    lo, hi = boxes.offset[rows], boxes.stop[rows]
    start, stop = np.zeros(len(size), dtype=np.int64), size.copy()
    for dim in range(len(size)):
        while True:
            edges = distinct(np.concatenate([lo[:, dim], hi[:, dim]]))
            edges = edges[(edges > start[dim]) & (edges < stop[dim])]
            if not len(edges):
                break
            middle = int(edges[len(edges) // 2])
            trial = stop.copy()
            trial[dim] = middle
            if _is_flawed(start, trial, lo, hi):
                stop = trial
            else:
                start[dim] = middle
            alive = ((lo < stop) & (hi > start)).all(axis=1)
            rows, lo, hi = rows[alive], lo[alive], hi[alive]
    if len(rows) == 1:
        return None  # the cell is covered once: impossible if the weights are sound
    kind: Literal["gap", "overlap"] = "gap"
    if len(rows) > 1:
        kind, start, stop = "overlap", lo[:2].max(axis=0), hi[:2].min(axis=0)
    box = Box(tuple(start[:ndim].tolist()), tuple((stop - start)[:ndim].tolist()))
    return Flaw(kind=kind, box=box, rows=tuple(rows.tolist()))


def _is_flawed(start: IntArray, stop: IntArray, lo: IntArray, hi: IntArray) -> bool:
    """Return True if the boxes, clipped to [start, stop), do not cover this region exactly."""
    lo, hi = np.maximum(lo, start), np.minimum(hi, stop)
    inside = (lo < hi).all(axis=1)
    lo, hi = lo[inside] - start, hi[inside] - start
    clipped = BoxTable(tensor=np.zeros(len(lo), dtype=np.int64), offset=lo, extent=hi - lo)
    return bool(len(_suspects(clipped, (stop - start)[None, :])))


def mix(word: WordArray) -> WordArray:
    """Return one step of splitmix64 (Steele, Lea, Flood 2014), a bijection on words."""
    word = word + np.uint64(0x9E3779B97F4A7C15)
    word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return word ^ (word >> np.uint64(31))


def mix_columns(columns: IntArray) -> WordArray:
    """Hash each row of `columns` (n, c) to one word; equal rows have equal words."""
    word = np.zeros(len(columns), dtype=np.uint64)
    for column in columns.T:
        word = mix(word ^ column.astype(np.uint64))
    return word
