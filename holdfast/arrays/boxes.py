"""One box of a tensor: intersection, flat ranges as boxes, and boxes as runs of memory.

Everything here is arithmetic on integers: no tensors, no files. Many boxes at once are in
`box_table`, the proof that boxes cover a tensor exactly is in `tiling`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from holdfast.arrays.types import IntArray
from holdfast.errors import PlacementError, PlanError


@dataclass(frozen=True, slots=True)
class Box:
    """A block of a tensor: `offset` and `shape` per dim, in elements; a 0-d box is one element."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        """Refuse boxes whose two tuples disagree in length or hold a negative number."""
        if len(self.offset) != len(self.shape):
            raise PlacementError(
                f"box offset {self.offset} and shape {self.shape} have different numbers of dims"
            )
        if (self.offset and min(self.offset) < 0) or (self.shape and min(self.shape) < 0):
            raise PlacementError(f"box offset {self.offset}, shape {self.shape}: negative number")

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return len(self.shape)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def stop(self) -> tuple[int, ...]:
        """First coordinate past the box, per dim."""
        return tuple(o + s for o, s in zip(self.offset, self.shape, strict=True))

    def intersect(self, other: Box) -> Box | None:
        """The common part of two boxes of equal ndim, or None when they share no element."""
        lo = tuple(map(max, self.offset, other.offset))
        hi = tuple(map(min, self.stop, other.stop))
        shape = tuple(h - o for h, o in zip(hi, lo, strict=True))
        if shape and min(shape) <= 0:
            return None
        return Box(lo, shape)

    def contains(self, other: Box) -> bool:
        """Whether every coordinate of `other` lies in this box (an empty box must still fit)."""
        return len(self.shape) == len(other.shape) and all(
            a <= c and d <= b
            for a, b, c, d in zip(self.offset, self.stop, other.offset, other.stop, strict=True)
        )

    def relative_to(self, origin: tuple[int, ...]) -> tuple[slice, ...]:
        """Slices that select this box in an array whose first element has coordinate `origin`."""
        return tuple(
            slice(o - base, o - base + s)
            for o, base, s in zip(self.offset, origin, self.shape, strict=True)
        )


def flat_range_boxes(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """The interval [start, stop) of the row-major tensor as at most max(1, 2 * ndim - 1) boxes.

    The boxes are disjoint and in row-major order: their elements, each box row-major, one box
    after the other, are the elements of the interval. An empty interval has no boxes. Elements
    [5, 18) of a tensor of shape (6, 4) are the end of row 1, rows 2 and 3, the begin of row 4:

        boxes [1:2, 1:4], [2:4, 0:4], [4:5, 0:2]

    Raises:
        PlacementError: The interval leaves the tensor.
    """
    dims = tuple(shape)
    if not 0 <= start <= stop <= math.prod(dims):
        raise PlacementError(f"flat range [{start}, {stop}) is not inside a tensor of shape {dims}")
    if start == stop:
        return []
    boxes: list[Box] = []
    _flat_range(dims, (), start, stop, boxes)
    return boxes


def _flat_range(
    shape: tuple[int, ...], prefix: tuple[int, ...], start: int, stop: int, boxes: list[Box]
) -> None:
    depth = len(prefix)
    ones = (1,) * depth
    if depth == len(shape):
        boxes.append(Box(prefix, ones))
        return
    inner = shape[depth + 1 :]
    stride = math.prod(inner)
    first, head = divmod(start, stride)
    last, tail = divmod(stop, stride)
    if first == last:
        _flat_range(shape, (*prefix, first), head, tail, boxes)
        return
    if head:
        _flat_range(shape, (*prefix, first), head, stride, boxes)
        first += 1
    if first < last:
        boxes.append(Box((*prefix, first) + (0,) * len(inner), (*ones, last - first, *inner)))
    if tail:
        _flat_range(shape, (*prefix, last), 0, tail, boxes)


def cover(inner: Box, outer: Box, *, max_gap: int) -> tuple[IntArray, int]:
    """Where `inner` lies in the row-major memory of `outer`: starts of its runs and their length.

    Box [1:3, 1:3, 0:2] in a tensor of shape (4, 4, 2), whose strides are 8, 2, 1 elements:

        dim    count   stride   span so far   gap to its next entry   what is done
        2      2       1        1             0                       span = 2
        1      2       2        2             0                       span = 4
        0      2       8        4             4                       two runs, 8 apart

    They start at 10 and 18 and are 4 long; with `max_gap` of 4 or more, it is one run of 12.

    Args:
        inner: The box to find; it may be empty, and then has no runs.
        outer: The box whose memory is meant.
        max_gap: Runs no more than so many elements apart are joined, gaps included; 0 gives the
            longest contiguous runs.

    Returns:
        Starts, ascending, and the length of every run: in elements from the first of `outer`.

    Raises:
        PlacementError: `inner` is not inside `outer`.

    Cost: allocates 8 bytes a run.
    """
    if not outer.contains(inner):
        raise PlacementError(f"box {inner} is not inside box {outer}")
    if inner.numel == 0:
        return np.empty(0, dtype=np.int64), 0
    start = 0
    span = stride = 1
    levels: list[tuple[int, int]] = []
    for dim in range(inner.ndim - 1, -1, -1):
        start += (inner.offset[dim] - outer.offset[dim]) * stride
        count = inner.shape[dim]
        if count > 1:
            # Strides grow outwards: once a gap is too wide, so is every outer one.
            if stride - span <= max_gap:
                span += (count - 1) * stride
            else:
                levels.append((count, stride))
        stride *= outer.shape[dim]
    starts = np.array([start], dtype=np.int64)
    for count, step in levels:
        starts = (np.arange(count, dtype=np.int64)[:, None] * step + starts).ravel()
    return starts, span


def contiguous_start(inner: Box, outer: Box) -> int | None:
    """The first element of `inner` in row-major `outer` if it is one run there, else None.

    Like `cover`, but allocates nothing, however many runs there are; neither box may be empty.
    """
    start, span, stride = 0, 1, 1
    for dim in range(inner.ndim - 1, -1, -1):
        start += (inner.offset[dim] - outer.offset[dim]) * stride
        if inner.shape[dim] > 1:
            if span != stride:
                return None
            span = inner.shape[dim] * stride
        stride *= outer.shape[dim]
    return start


def split_box(box: Box, *, max_numel: int) -> Iterator[Box]:
    """Cut a box into boxes of at most `max_numel` elements, in row-major order.

    Each is one run of the box's row-major elements and begins where the one before ends. An empty
    box gives none. Box [0:2, 0:5] with at most 3 elements gives [0, 0:3], [0, 3:5], [1, 0:3] and
    [1, 3:5].
    """
    if max_numel < 1:
        raise PlanError(f"a box cannot be cut into boxes of at most {max_numel} elements")
    if box.numel == 0:
        return
    dim, inner = box.ndim, 1
    while dim and inner * box.shape[dim - 1] <= max_numel:
        dim -= 1
        inner *= box.shape[dim]
    if dim == 0:
        yield box
        return
    step = max_numel // inner
    first, count = box.offset[dim - 1], box.shape[dim - 1]
    tail_offset, tail_shape = box.offset[dim:], box.shape[dim:]
    outer = (
        range(o, o + s) for o, s in zip(box.offset[: dim - 1], box.shape[: dim - 1], strict=True)
    )
    ones = (1,) * (dim - 1)
    for head in itertools.product(*outer):
        for start in range(0, count, step):
            yield Box(
                (*head, first + start, *tail_offset),
                (*ones, min(step, count - start), *tail_shape),
            )
