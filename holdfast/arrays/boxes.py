"""One box of a tensor: intersection, flat ranges as boxes, and boxes as runs of memory.

Everything here is arithmetic on integers: no tensors, no files. `box_table` has many boxes at once,
and the proof that boxes cover a tensor exactly.
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
        """Refuse tuples of different lengths and negative numbers."""
        if len(self.offset) != len(self.shape):
            raise PlacementError(
                f"box offset {self.offset} and shape {self.shape} have different numbers of dims"
            )
        if (self.offset and min(self.offset) < 0) or (self.shape and min(self.shape) < 0):
            raise PlacementError(
                f"box offset {self.offset} and shape {self.shape} must not be negative"
            )

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
        """Return the common part of two boxes of equal ndim; None if they share no element."""
        lo = tuple(map(max, self.offset, other.offset))
        hi = tuple(map(min, self.stop, other.stop))
        shape = tuple(h - o for h, o in zip(hi, lo, strict=True))
        if shape and min(shape) <= 0:
            return None
        return Box(lo, shape)

    def contains(self, other: Box) -> bool:
        """Return True if `other` lies in this box; an empty box must fit, too."""
        return len(self.shape) == len(other.shape) and all(
            a <= c and d <= b
            for a, b, c, d in zip(self.offset, self.stop, other.offset, other.stop, strict=True)
        )

    def relative_to(self, origin: tuple[int, ...]) -> tuple[slice, ...]:
        """Return slices of this box in an array whose first element has coordinate `origin`."""
        return tuple(
            slice(o - base, o - base + s)
            for o, base, s in zip(self.offset, origin, self.shape, strict=True)
        )


def flat_range_boxes(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """Split the interval [start, stop) of a row-major tensor into at most 2 * ndim - 1 boxes.

    A 0-d tensor is one box, and an empty interval has no boxes. The boxes are disjoint and in
    row-major order: their elements, box after box, are the elements of the interval. Elements
    [5, 18) of a tensor of shape (6, 4) are the end of row 1, rows 2 and 3, and the start of row 4:

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
    # One entry of this dim has `stride` elements. An interval is a part of a first entry, a run of
    # whole entries, and a part of a last one; each may be absent.
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
    """Return the runs of `inner` in the row-major memory of `outer`: starts, and their length.

    Box [1:3, 1:3, 0:2] in a tensor of shape (4, 4, 2), whose strides are 8, 2, 1 elements:

        dim    count   stride   span so far   gap to its next entry   result
        2      2       1        1             0                       span = 2
        1      2       2        2             0                       span = 4
        0      2       8        4             4                       two runs, 8 apart

    They start at 10 and 18 and have length 4. With `max_gap` of 4 or more it is one run of 12.

    Args:
        inner: The box to locate; an empty box has no runs.
        outer: The box that the memory holds.
        max_gap: Runs at most this many elements apart are joined, including the gap; 0 gives the
            longest contiguous runs.

    Returns:
        Starts, ascending, in elements from the first of `outer`; and the length of each run.

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
            # Strides grow outwards: once a gap is too wide, every outer gap is, too.
            if stride - span <= max_gap:
                span += (count - 1) * stride
            else:
                levels.append((count, stride))
        stride *= outer.shape[dim]
    starts = np.array([start], dtype=np.int64)
    # Inner levels first, so that the starts ascend.
    for count, step in levels:
        starts = (np.arange(count, dtype=np.int64)[:, None] * step + starts).ravel()
    return starts, span


def span_in(inner: Box, outer: Box) -> tuple[int, int]:
    """Return the first element of `inner` in row-major `outer`, and the elements up to its last.

    Neither box may be empty, and `inner` is inside of `outer`.
    """
    first = last = 0
    for offset, size, base, length in zip(
        inner.offset, inner.shape, outer.offset, outer.shape, strict=True
    ):
        first = first * length + offset - base
        last = last * length + offset - base + size - 1
    return first, last - first + 1


def strided_span(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Return the elements from the first to the last one of a strided view that is not empty.

    Strides are never negative: the last index of every dim is the last one in memory.
    """
    return 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))


def contiguous_start(inner: Box, outer: Box) -> int | None:
    """Return the first element of `inner` in row-major `outer` if it is one run, else None.

    Like `cover`, but allocates nothing for any number of runs; neither box may be empty.
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

    Each is one run of the box's row-major elements and starts at the end of the one before. An
    empty box gives no boxes. Box [0:2, 0:5] with at most 3 elements gives [0, 0:3], [0, 3:5],
    [1, 0:3] and [1, 3:5].
    """
    if max_numel < 1:
        raise PlanError(
            f"a box cannot be cut into boxes of {max_numel} elements; at least 1 is needed"
        )
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
