"""Which boxes of a table meet which of another, and how they lie in each other; arrays only."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

_MAX_CELLS = 1 << 22


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BoxTable:
    """Boxes of tensors as columns: n rows, d dims, padded with offset 0 and extent 1."""

    tensor: Ints
    """(n,) position in the manifest's tensor table."""
    offset: Ints
    """(n, d) first coordinate, in elements."""
    extent: Ints
    """(n, d) shape, in elements."""

    def __len__(self) -> int:
        """Number of boxes."""
        return len(self.tensor)

    def numel(self) -> Ints:
        """(n,) elements of each box."""
        product: Ints = self.extent.prod(axis=1, dtype=np.int64)
        return product

    def take(self, rows: Ints | Bools) -> BoxTable:
        """The chosen rows, in their order."""
        return BoxTable(
            tensor=self.tensor[rows], offset=self.offset[rows], extent=self.extent[rows]
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Runs:
    """How inner boxes lie in the row-major memory of outer ones; all in elements.

    `start`: of the first element. `is_run`: no gaps. `hull`: from the first element past the last.
    `max_gap`: the widest gap between two neighbours, 0 for a run.
    """

    start: Ints
    hull: Ints
    max_gap: Ints

    @property
    def is_run(self) -> Bools:
        """(n,) whether the inner box is one run of the outer one's memory."""
        flags: Bools = self.max_gap == 0
        return flags


def stretches(lengths: Ints) -> tuple[Ints, Ints]:
    """For stretches of these lengths laid end to end: (stretch, position in it) of each item."""
    total = int(lengths.sum())
    owner = np.repeat(np.arange(len(lengths), dtype=np.int64), lengths)
    begins = np.cumsum(lengths) - lengths
    return owner, np.arange(total, dtype=np.int64) - begins[owner]


def unique_boxes(boxes: BoxTable) -> tuple[BoxTable, Ints]:
    """The distinct boxes, by tensor, offset, extent; and for each row the number of its box."""
    if not len(boxes):
        return boxes, np.empty(0, dtype=np.int64)
    columns = np.column_stack([boxes.tensor, boxes.offset, boxes.extent])
    order = np.lexsort(columns.T[::-1])
    columns = columns[order]
    new = np.concatenate([[True], (columns[1:] != columns[:-1]).any(axis=1)])
    number = np.empty(len(boxes), dtype=np.int64)
    number[order] = np.cumsum(new) - 1
    return boxes.take(order[new]), number


def meeting_pairs(first: BoxTable, second: BoxTable) -> tuple[Ints, Ints]:
    """All (row of `first`, row of `second`) that share an element, by first, then second.

    Neither table may hold an empty box. Each tensor's boxes of `second` are sorted along the dim
    that cuts them finest, so that only neighbours are compared: about linear for grids.
    """
    none = np.empty(0, dtype=np.int64)
    if not len(first) or not len(second):
        return none, none
    by_tensor = np.argsort(second.tensor, kind="stable")
    tensor = second.tensor[by_tensor]
    heads = np.flatnonzero(np.concatenate([[True], tensor[1:] != tensor[:-1]]))
    known = tensor[heads]
    offset, extent = second.offset[by_tensor], second.extent[by_tensor]
    counts = np.diff(np.append(heads, len(tensor)))
    span = np.maximum.reduceat(offset + extent, heads, axis=0)
    fineness = span * counts[:, None] / np.add.reduceat(extent, heads, axis=0)
    dims = fineness.argmax(axis=1)
    place = np.searchsorted(known, first.tensor)
    place_or_0 = np.where(place < len(known), place, 0)
    asked = np.flatnonzero(known[place_or_0] == first.tensor)
    group_of_first = place_or_0[asked]
    group = np.repeat(np.arange(len(known)), counts)
    rows = np.arange(len(tensor))
    lo = offset[rows, dims[group]]
    longest = np.maximum.reduceat(extent[rows, dims[group]], heads)
    values = np.unique(lo)
    key = group * (len(values) + 1) + np.searchsorted(values, lo)
    order = np.argsort(key, kind="stable")
    key = key[order]
    dim = dims[group_of_first]
    begin = first.offset[asked, dim]
    end = begin + first.extent[asked, dim]
    base = group_of_first * (len(values) + 1)
    left = base + np.searchsorted(values, begin - longest[group_of_first], side="right")
    right = base + np.searchsorted(values, end, side="left")
    from_, to = np.searchsorted(key, left), np.searchsorted(key, right)
    owner, position = stretches(np.maximum(to - from_, 0))
    a, b = asked[owner], by_tensor[order[from_[owner] + position]]
    meets = (first.offset[a] < second.offset[b] + second.extent[b]) & (
        second.offset[b] < first.offset[a] + first.extent[a]
    )
    keep = meets.all(axis=1)
    a, b = a[keep], b[keep]
    order = np.lexsort((b, a))
    return a[order], b[order]


def runs_in(offset: Ints, extent: Ints, outer_offset: Ints, outer_extent: Ints) -> Runs:
    """How each box lies in the row-major memory of the outer one that contains it."""
    num, ndim = offset.shape
    start = np.zeros(num, dtype=np.int64)
    hull = np.ones(num, dtype=np.int64)
    stride = np.ones(num, dtype=np.int64)
    max_gap = np.zeros(num, dtype=np.int64)
    for dim in range(ndim - 1, -1, -1):
        start += (offset[:, dim] - outer_offset[:, dim]) * stride
        many = extent[:, dim] > 1
        np.maximum(max_gap, np.where(many, stride - hull, 0), out=max_gap)
        hull += (extent[:, dim] - 1) * stride
        stride *= outer_extent[:, dim]
    return Runs(start=start, hull=hull, max_gap=max_gap)


def union_nbytes(boxes: BoxTable, itemsize: Ints) -> int:
    """Bytes of the elements that lie in at least one of the boxes; `itemsize` by tensor.

    `boxes` are distinct and not empty. Where boxes overlap, exact by the grid of their ends.
    """
    if not len(boxes):
        return 0
    total = boxes.numel() * itemsize[boxes.tensor]
    a, b = meeting_pairs(boxes, boxes)
    overlapping = np.unique(boxes.tensor[a[a != b]])
    alone = ~np.isin(boxes.tensor, overlapping)
    nbytes = int(total[alone].sum())
    for tensor in overlapping.tolist():
        mine = boxes.take(boxes.tensor == tensor)
        nbytes += _union_numel(mine.offset, mine.offset + mine.extent) * int(itemsize[tensor])
    return nbytes


def _union_numel(lo: Ints, hi: Ints) -> int:
    """Elements in the union of boxes [lo, hi), which overlap."""
    volumes = (hi - lo).prod(axis=1)
    largest = int(volumes.argmax())
    inside = (lo >= lo[largest]).all(axis=1) & (hi <= hi[largest]).all(axis=1)
    if inside.all():
        return int(volumes[largest])
    ends = [np.unique(np.concatenate([lo[:, d], hi[:, d]])) for d in range(lo.shape[1])]
    cells = [max(len(e) - 1, 1) for e in ends]
    if int(np.prod(cells, dtype=np.float64)) > _MAX_CELLS:
        # Halves along the dim with the most ends: each is a smaller problem of the same kind.
        dim = int(np.argmax(cells))
        middle = int(ends[dim][len(ends[dim]) // 2])
        return sum(
            _clipped_union(lo, hi, dim, low, high)
            for low, high in ((int(ends[dim][0]), middle), (middle, int(ends[dim][-1])))
        )
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


def _clipped_union(lo: Ints, hi: Ints, dim: int, low: int, high: int) -> int:
    lo, hi = lo.copy(), hi.copy()
    lo[:, dim] = np.maximum(lo[:, dim], low)
    hi[:, dim] = np.minimum(hi[:, dim], high)
    keep = lo[:, dim] < hi[:, dim]
    return _union_numel(lo[keep], hi[keep]) if keep.any() else 0
