"""Boxes in index space: intersection, flat ranges, contiguous runs, and the proof of a tiling.

Everything here is arithmetic on integers (numpy only): no tensors, no files. A *box* is an
axis-aligned block of a tensor in global coordinates. A *row* is one box of a table of boxes.

The tiling proof assigns to every coordinate a random 64-bit potential; a box weighs the product
over its dims of the potential differences between its two ends, and boxes tile a tensor exactly
once if and only if their weights add up to the weight of the whole (a multilinear identity test:
a wrong table passes with a probability below 2**-90, whoever wrote it, because the potentials are
drawn afresh in every call). The cost is linear in the rows, for any number of dims and any
irregularity; a flaw is then located exactly by bisection.
"""

from __future__ import annotations

import itertools
import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from holdfast.errors import PlacementError

Ints = npt.NDArray[np.int64]
_Words = npt.NDArray[np.uint64]

_NUM_DRAWS = 2


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Flaw:
    """One proven defect of a tiling.

    `box` is the region concerned: elements no row covers (gap), elements two or more rows cover
    (overlap), or the offending row's own box (out_of_bounds). `rows` are the rows involved.
    """

    kind: Literal["gap", "overlap", "out_of_bounds"]
    box: Box
    rows: tuple[int, ...]


def flat_range_boxes(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """The interval [start, stop) of the row-major tensor as at most max(1, 2 * ndim - 1) boxes.

    The boxes are disjoint and in row-major order: their elements, each box row-major, one box
    after the other, are the elements of the interval. An empty interval has no boxes. Raises
    PlacementError when the interval leaves the tensor.
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


def runs(inner: Box, outer: Box) -> tuple[Ints, int]:
    """Where `inner` lies in the row-major memory of `outer`: run starts and the run length.

    Both in elements, relative to the first element of `outer`; starts ascend; runs are as long as
    possible. Raises PlacementError when `inner` is not inside `outer`. Allocates 8 bytes a run.
    """
    return cover(inner, outer, max_gap=0)


def cover(inner: Box, outer: Box, *, max_gap: int) -> tuple[Ints, int]:
    """Like `runs`, but runs no more than `max_gap` elements apart are joined, gaps included."""
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
            # Once a gap is too wide, so is every outer one.
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

    Like `runs`, but costs nothing however many runs there would be; both boxes must not be empty.
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


def pad_shapes(shapes: Sequence[Sequence[int]], ndim: int) -> Ints:
    """Shapes as an (n, ndim) array, padded with trailing ones; each shape has at most `ndim`."""
    lengths = np.fromiter(map(len, shapes), dtype=np.int64, count=len(shapes))
    padded = np.ones((len(shapes), ndim), dtype=np.int64)
    values = itertools.chain.from_iterable(shapes)
    padded[np.arange(ndim) < lengths[:, None]] = np.fromiter(values, dtype=np.int64)
    return padded


def check_tiling(shape: Sequence[int], offsets: Ints, extents: Ints) -> Flaw | None:
    """Prove that rows (n, ndim) cover each element of a tensor of `shape` exactly once.

    Empty rows count for nothing but must be in bounds; a tensor without elements needs no rows.
    Returns the first flaw found, or None. Time and memory are linear in n.
    """
    num_rows = len(offsets)
    ndim = len(shape)
    flaws = check_tilings(
        np.zeros(num_rows, dtype=np.int64),
        np.asarray(offsets, dtype=np.int64).reshape(num_rows, ndim),
        np.asarray(extents, dtype=np.int64).reshape(num_rows, ndim),
        [tuple(shape)],
    )
    return flaws[0][1] if flaws else None


def check_tilings(
    tensor: Ints,
    offsets: Ints,
    extents: Ints,
    shapes: Sequence[Sequence[int]],
    *,
    max_flaws: int = 100,
) -> list[tuple[int, Flaw]]:
    """Prove many tilings at once: row i is a box of tensor `tensor[i]`, an index into `shapes`.

    `offsets` and `extents` are (n, d) with d at least the largest ndim, padded with offset 0 and
    extent 1. Returns one flaw per flawed tensor, by tensor, and stops looking for more after
    `max_flaws`; empty when every tensor is tiled. `Flaw.rows` are indices into the arrays given.
    A million rows take well under a second, a flaw some milliseconds. Raises PlacementError when
    a row names a tensor that is not there.
    """
    tensor = np.asarray(tensor, dtype=np.int64)
    if len(tensor) and not 0 <= int(tensor.min()) <= int(tensor.max()) < len(shapes):
        raise PlacementError(f"a row names a tensor outside the {len(shapes)} tensors given")
    num_dims = max(offsets.shape[1], max(map(len, shapes), default=0))
    offsets, extents = _pad(offsets, num_dims, 0), _pad(extents, num_dims, 1)
    sizes = pad_shapes(shapes, num_dims)
    own = sizes[tensor]
    outside = (offsets < 0) | (extents < 0) | (offsets > own) | (extents > own - offsets)
    bad_rows = np.flatnonzero(outside.any(axis=1))
    flaws: dict[int, Flaw] = {}
    for owner, at in zip(*np.unique(tensor[bad_rows], return_index=True), strict=True):
        if len(flaws) < max_flaws:
            row = bad_rows[at]
            box = _row_box(offsets[row], extents[row], len(shapes[owner]))
            flaws[int(owner)] = Flaw(kind="out_of_bounds", box=box, rows=(int(row),))
    suspects = _suspects(tensor, offsets, extents, sizes, own)
    order: Ints | None = None
    for suspect in suspects:
        owner = int(suspect)
        if owner in flaws or len(flaws) >= max_flaws:
            continue
        if order is None:
            order = np.argsort(tensor, kind="stable")
            ranked = tensor[order]
        lo, hi = np.searchsorted(ranked, [owner, owner + 1])
        flaw = _locate(sizes[owner], offsets, extents, order[lo:hi], len(shapes[owner]))
        if flaw is not None:
            flaws[owner] = flaw
    return sorted(flaws.items())


def _pad(columns: Ints, num_dims: int, value: int) -> Ints:
    wide = np.asarray(columns, dtype=np.int64)
    if wide.shape[1] == num_dims:
        return wide
    padded = np.full((len(columns), num_dims), value, dtype=np.int64)
    padded[:, : wide.shape[1]] = wide
    return padded


def _row_box(offset: Ints, extent: Ints, ndim: int) -> Box:
    # Out-of-bounds rows may hold negative numbers, which a Box refuses: show them clipped.
    lo = tuple(max(int(v), 0) for v in offset[:ndim])
    return Box(lo, tuple(max(int(v), 0) for v in extent[:ndim]))


def _suspects(tensor: Ints, offsets: Ints, extents: Ints, sizes: Ints, own: Ints) -> Ints:
    """Tensors whose rows' weights do not add up to the weight of the whole."""
    num_tensors = len(sizes)
    filled = (extents > 0).all(axis=1)
    partial = (extents != own).any(axis=1) & filled
    # Rows that are their whole tensor weigh one; only the others need potentials.
    whole = np.bincount(tensor[filled & ~partial], minlength=num_tensors).astype(np.uint64)
    rows = np.flatnonzero(partial)
    lo, hi, owner = offsets[rows], offsets[rows] + extents[rows], tensor[rows]
    target = (sizes > 0).all(axis=1).astype(np.uint64)
    wrong = np.zeros(num_tensors, dtype=bool)
    for _ in range(_NUM_DRAWS):
        seed = secrets.randbits(64)
        weight = np.ones(len(rows), dtype=np.uint64)
        for dim in range(sizes.shape[1]):
            size = own[rows, dim]
            cut = np.flatnonzero((hi[:, dim] - lo[:, dim]) != size)
            ids, span = owner[cut], size[cut]
            upper = _potential(hi[cut, dim], ids, span, dim, seed)
            weight[cut] *= upper - _potential(lo[cut, dim], ids, span, dim, seed)
        total = whole.copy()
        np.add.at(total, owner, weight)
        wrong |= total != target
    return np.flatnonzero(wrong)


def _potential(coordinate: Ints, tensor: Ints, size: Ints, dim: int, seed: int) -> _Words:
    """A random word per (tensor, dim, coordinate); 0 at the start of a dim and 1 at its end."""
    salt = np.uint64((seed + (dim + 1) * 0xD1B54A32D192ED03) & (2**64 - 1))
    word = _mix(tensor.astype(np.uint64) + salt)
    word = _mix(word ^ coordinate.astype(np.uint64))
    word[coordinate == size] = 1
    word[coordinate == 0] = 0
    return word


def _mix(word: _Words) -> _Words:
    """The splitmix64 finaliser (Steele, Lea, Flood 2014)."""
    word = word * np.uint64(0x9E3779B97F4A7C15)
    word ^= word >> np.uint64(30)
    word *= np.uint64(0xBF58476D1CE4E5B9)
    word ^= word >> np.uint64(27)
    word *= np.uint64(0x94D049BB133111EB)
    word ^= word >> np.uint64(31)
    return word


def _locate(size: Ints, offsets: Ints, extents: Ints, rows: Ints, ndim: int) -> Flaw | None:
    """Find one flawed cell by bisecting the tensor along its dims, then grow it to a box."""
    rows = rows[(extents[rows] > 0).all(axis=1)]
    lo, hi = offsets[rows], offsets[rows] + extents[rows]
    start, stop = np.zeros(len(size), dtype=np.int64), size.copy()
    for dim in range(len(size)):
        while True:
            edges = np.unique(np.concatenate([lo[:, dim], hi[:, dim]]))
            edges = edges[(edges > start[dim]) & (edges < stop[dim])]
            if not len(edges):
                break
            middle = int(edges[len(edges) // 2])
            trial = stop.copy()
            trial[dim] = middle
            if _is_wrong(start, trial, lo, hi):
                stop = trial
            else:
                start[dim] = middle
            alive = ((lo < stop) & (hi > start)).all(axis=1)
            rows, lo, hi = rows[alive], lo[alive], hi[alive]
    if len(rows) == 1:
        return None  # cannot happen while the weights are sound: the cell is covered once
    if len(rows) > 1:
        first, last = lo[:2].max(axis=0), hi[:2].min(axis=0)
        box = Box(_ints(first, ndim), _ints(last - first, ndim))
        return Flaw(kind="overlap", box=box, rows=tuple(int(r) for r in rows))
    return Flaw(kind="gap", box=Box(_ints(start, ndim), _ints(stop - start, ndim)), rows=())


def _ints(values: Ints, ndim: int) -> tuple[int, ...]:
    return tuple(int(v) for v in values[:ndim])


def _is_wrong(start: Ints, stop: Ints, lo: Ints, hi: Ints) -> bool:
    """Whether the rows, clipped to the region [start, stop), fail to tile the region."""
    lo, hi = np.maximum(lo, start), np.minimum(hi, stop)
    inside = (lo < hi).all(axis=1)
    lo, hi = lo[inside] - start, hi[inside] - start
    region = np.repeat((stop - start)[None, :], len(lo), axis=0)
    zeros = np.zeros(len(lo), dtype=np.int64)
    return bool(len(_suspects(zeros, lo, hi - lo, (stop - start)[None, :], region)))
