"""The proof that boxes cover every element of their tensors exactly once.

Every coordinate gets a random 64-bit potential, 0 at the start of a dim and 1 at its end. A box
weighs the product over its dims of the potential differences between its two ends, so that boxes
side by side add up to the weight of the box that they make. A tensor of shape (4, 2) in five
boxes, with potentials p(1), p(2) in dim 0 and q(1) in dim 1:

    box            weight
    [0:1, 0:1]     (p(1) - 0)    * (q(1) - 0)
    [0:1, 1:2]     (p(1) - 0)    * (1 - q(1))     with the first: p(1)
    [1:2, 0:2]     (p(2) - p(1)) * (1 - 0)        so far: p(2)
    [2:4, 0:1]     (1 - p(2))    * (q(1) - 0)
    [2:4, 1:2]     (1 - p(2))    * (1 - q(1))     all five: 1, the weight of the tensor

An element that is covered twice or not at all leaves a product of random words in the sum. Boxes
cover a tensor exactly if and only if their weights add up to 1 as polynomials (a multilinear
identity test, modulo 2**64): a wrong table passes with a probability below 2**-90, even one made
on purpose, because the potentials are drawn afresh in every call. The cost is linear in the rows,
for any number of dims and any irregularity; a flaw is then located exactly by bisection.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from holdfast.arrays.box_table import BoxTable, pad_shapes
from holdfast.arrays.boxes import Box
from holdfast.arrays.mixing import mix
from holdfast.arrays.types import BoolArray, IntArray, WordArray
from holdfast.errors import PlacementError

# Words modulo 2**64 are no field, so one sum alone errs with up to 2**-45: two are drawn.
_NUM_DRAWS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Flaw:
    """One proven defect of a tiling."""

    kind: Literal["gap", "overlap", "out_of_bounds"]
    box: Box
    """Elements that no row covers, that two or more cover, or the box that is out of bounds."""
    rows: tuple[int, ...]
    """The rows involved; none for a gap."""


def check_tilings(
    boxes: BoxTable, shapes: Sequence[Sequence[int]], *, max_flaws: int = 100
) -> list[tuple[int, Flaw]]:
    """Prove that the boxes of each tensor cover every element of it exactly once.

    Empty boxes count for nothing but must be in bounds; a tensor without elements needs no boxes.

    Args:
        boxes: Of any number of tensors, in any order; whatever numbers they hold.
        shapes: Of every tensor; `boxes.tensor` are positions in it.
        max_flaws: No more flaws than these are looked for.

    Returns:
        (tensor, its first flaw), by tensor; empty when every tensor is covered exactly.

    Raises:
        PlacementError: A row names a tensor that is not there.

    Cost: linear in the boxes, well under a second for a million; a flaw some milliseconds.
    """
    tensor = boxes.tensor
    if len(tensor) and not 0 <= int(tensor.min()) <= int(tensor.max()) < len(shapes):
        raise PlacementError(f"a row names a tensor outside the {len(shapes)} tensors given")
    boxes = boxes.padded(max(map(len, shapes), default=0))
    sizes = pad_shapes(shapes, boxes.num_dims)
    flaws: dict[int, Flaw] = {}
    # Out of bounds first: such a box says more than the gap or overlap that it causes.
    bad_rows = np.flatnonzero(_out_of_bounds(boxes, sizes[tensor]).any(axis=1))
    for owner, at in zip(*np.unique(tensor[bad_rows], return_index=True), strict=True):
        if len(flaws) < max_flaws:
            row = int(bad_rows[at])
            box = _clipped_box(boxes, row, ndim=len(shapes[owner]))
            flaws[int(owner)] = Flaw(kind="out_of_bounds", box=box, rows=(row,))
    # Rows are sorted by tensor only when a flaw is to be located, which is rare.
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
    """(n, d) whether a box leaves its tensor; written so that no number given can wrap."""
    offset, extent = boxes.offset, boxes.extent
    outside: BoolArray = (offset < 0) | (extent < 0) | (offset > sizes) | (extent > sizes - offset)
    return outside


def _clipped_box(boxes: BoxTable, row: int, *, ndim: int) -> Box:
    # Out-of-bounds rows may hold negative numbers, which a Box refuses: show them clipped.
    offset, extent = (np.maximum(c[row, :ndim], 0) for c in (boxes.offset, boxes.extent))
    return Box(tuple(offset.tolist()), tuple(extent.tolist()))


def _suspects(boxes: BoxTable, sizes: IntArray) -> IntArray:
    """Tensors whose boxes' weights do not add up to the weight of the whole."""
    num_tensors = len(sizes)
    tensor, own = boxes.tensor, sizes[boxes.tensor]
    filled = (boxes.extent > 0).all(axis=1)
    partial = (boxes.extent != own).any(axis=1) & filled
    # Boxes that are their whole tensor weigh one; only the others need potentials.
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
            # A box that spans the dim has the factor 1 - 0 there.
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
    """A random word per (tensor, dim, coordinate); 0 at the start of a dim and 1 at its end."""
    # The dim is part of the salt: equal potentials in two dims would not tell (0, 1) from (1, 0).
    salt = np.uint64((seed + (dim + 1) * 0xD1B54A32D192ED03) & (2**64 - 1))
    word = mix(tensor.astype(np.uint64) + salt)
    word = mix(word ^ coordinate.astype(np.uint64))
    word[coordinate == size] = 1
    word[coordinate == 0] = 0
    return word


def _locate(size: IntArray, boxes: BoxTable, rows: IntArray, ndim: int) -> Flaw | None:
    """One flawed cell, by bisection of the tensor along its dims, and the box that it is.

    Bisected are the ends of the boxes, not the coordinates: between two neighbouring ends all
    elements are covered alike. Halves are judged by their weights, like the whole.
    """
    rows = rows[(boxes.extent[rows] > 0).all(axis=1)]
    lo, hi = boxes.offset[rows], boxes.stop[rows]
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
            if _is_flawed(start, trial, lo, hi):
                stop = trial
            else:
                start[dim] = middle
            alive = ((lo < stop) & (hi > start)).all(axis=1)
            rows, lo, hi = rows[alive], lo[alive], hi[alive]
    if len(rows) == 1:
        return None  # cannot happen while the weights are sound: the cell is covered once
    kind: Literal["gap", "overlap"] = "gap"
    if len(rows) > 1:
        kind, start, stop = "overlap", lo[:2].max(axis=0), hi[:2].min(axis=0)
    box = Box(tuple(start[:ndim].tolist()), tuple((stop - start)[:ndim].tolist()))
    return Flaw(kind=kind, box=box, rows=tuple(rows.tolist()))


def _is_flawed(start: IntArray, stop: IntArray, lo: IntArray, hi: IntArray) -> bool:
    """Whether the boxes, clipped to the region [start, stop), fail to cover the region exactly."""
    lo, hi = np.maximum(lo, start), np.minimum(hi, stop)
    inside = (lo < hi).all(axis=1)
    lo, hi = lo[inside] - start, hi[inside] - start
    clipped = BoxTable(tensor=np.zeros(len(lo), dtype=np.int64), offset=lo, extent=hi - lo)
    return bool(len(_suspects(clipped, (stop - start)[None, :])))
