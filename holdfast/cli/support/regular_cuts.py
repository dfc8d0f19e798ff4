"""Regular cuts: dims of a tensor that are cut into equal slices along axes of a layout.

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from holdfast.arrays.box_table import BoxTable
from holdfast.arrays.types import IntArray
from holdfast.errors import LayoutError
from holdfast.format.manifest import LayoutInfo
from holdfast.parallel.layout import Layout
from holdfast.parallel.stored_layout import layout_of

DENSE, EXPERT = ("tp", "cp", "dp"), ("expt_tp", "ep", "expt_dp")
"""Axes of each view along which tensors are cut."""
AXES = (*DENSE, "pp", *EXPERT)
"""Columns of `LayoutRanks.coordinate`."""
DATA = ("cp", "dp", "expt_dp")
"""Axes over which a sharded optimizer divides its state."""


class LayoutRanks:
    """The ranks of one layout of a manifest, and their coordinates as columns.

    Attributes:
        layout: None where the manifest's sizes make no layout.
    """

    def __init__(self, info: LayoutInfo) -> None:
        self.name = info.name
        self.ranks: list[int] = list(info.ranks)
        self.layout = _rebuild(info)
        self.position = {rank: i for i, rank in enumerate(self.ranks)}
        self.coordinate = np.full((len(self.ranks) + 1, len(AXES)), -1, dtype=np.int64)
        if self.layout is not None:
            for i, rank in enumerate(self.ranks):
                known = self.layout.coordinates(rank)
                self.coordinate[i] = [known.get(axis, 0) for axis in AXES]

    def size(self, axis: str) -> int:
        """Ranks along an axis; 1 without a layout, or where there is no expert view."""
        if self.layout is None or (axis in EXPERT and not self.layout.has_experts):
            return 1
        return self.layout.size(axis)

    def of_ranks(self, ranks: IntArray) -> IntArray:
        """(n, axes) coordinates of these ranks; -1 for one that is not here."""
        known, inverse = np.unique(ranks, return_inverse=True)
        at = [self.position.get(rank, len(self.ranks)) for rank in known.tolist()]
        rows: IntArray = self.coordinate[np.array(at, dtype=np.int64)[inverse]]
        return rows


def _rebuild(info: LayoutInfo) -> Layout | None:
    """The layout that a manifest describes; None where it is none."""
    try:
        return layout_of(info)
    except (LayoutError, TypeError):
        return None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RegularCuts:
    """Regular cuts that every box fits; `window` is the slice that each box lies in (n, 2 d)."""

    cuts: list[tuple[int, str]]
    window: IntArray
    is_complete: bool
    is_ambiguous: bool


def search_cuts(
    boxes: BoxTable,
    shape: Sequence[int],
    coordinate: IntArray,
    layout: LayoutRanks,
    view: Sequence[str],
) -> RegularCuts:
    """Find axes whose coordinate gives the slice of a dim that each box lies in.

    Slices are those of `torch.chunk`: ceil(n / size) elements, the last ones shorter or empty. A
    slice may be cut again by another axis. Example, boxes of a dim of 8 and their writers:

        box      tp    dp
        [0:4)    0     1      inside slice tp of [0:4), [4:8); not inside slice dp
        [4:8)    1     1
    """
    lo, hi = np.zeros_like(boxes.offset), np.broadcast_to(
        np.array([*shape, *[1] * (boxes.num_dims - len(shape))], dtype=np.int64), boxes.extent.shape
    ).copy()  # fmt: skip
    unused = [axis for axis in view if layout.size(axis) > 1]
    cuts: list[tuple[int, str]] = []
    is_ambiguous = False
    for dim in range(len(shape)):
        while (boxes.extent[:, dim] < hi[:, dim] - lo[:, dim]).any():
            fits = []
            for axis in unused:
                at = coordinate[:, AXES.index(axis)]
                first, last = slices_of(lo[:, dim], hi[:, dim], at, layout.size(axis))
                inside = (boxes.offset[:, dim] >= first) & (boxes.stop[:, dim] <= last)
                if inside.all() and (at >= 0).all():
                    fits.append((axis, first, last))
            if not fits:
                break
            is_ambiguous = is_ambiguous or len(fits) > 1
            axis, lo[:, dim], hi[:, dim] = fits[0]
            cuts.append((dim, axis))
            unused.remove(axis)
    is_complete = bool((boxes.offset == lo).all() and (boxes.stop == hi).all())
    window = np.column_stack([lo, hi])
    return RegularCuts(cuts=cuts, window=window, is_complete=is_complete, is_ambiguous=is_ambiguous)


def slices_of(
    lo: IntArray, hi: IntArray, at: IntArray | int, size: int
) -> tuple[IntArray, IntArray]:
    """First and last element past slice `at` of `size` of the ranges [lo, hi), by `torch.chunk`."""
    length = -(-(hi - lo) // size)
    first = np.minimum(lo + length * at, hi)
    return first, np.minimum(first + length, hi)
