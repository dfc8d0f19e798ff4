"""Which ranks held which chunk when a checkpoint was saved, as the index states it.

Imports no torch.
"""

from __future__ import annotations

import re

import numpy as np

from holdfast.arrays.box_table import BoxTable
from holdfast.arrays.distinct import distinct
from holdfast.arrays.types import BoolArray, IntArray
from holdfast.errors import LayoutError
from holdfast.format.index import ChunkIndex
from holdfast.format.manifest import CutInfo, LayoutInfo, Manifest, PlacementInfo
from holdfast.format.stored_copies import choose_copies, find_copies
from holdfast.format.values import tensor_keys
from holdfast.parallel.layout import Layout

_NUMBER = re.compile(r"\d+")


class SavedPlacement:
    """Which rank held which primary chunk of a checkpoint.

    Args:
        manifest: Of the checkpoint.
        index: Its chunk table.

    Attributes:
        rows: Rows of the primaries, by tensor.
        boxes: Their boxes, in that order.
        writer: (primaries,) rank that wrote each.
        ptr: (tensors + 1,) where the primaries of each tensor begin.
        layouts: Of the manifest; None for one whose sizes make no layout.
        ranks: That held anything, or are of a layout; ascending.

    Cost: linear in the chunks.
    """

    def __init__(self, manifest: Manifest, index: ChunkIndex) -> None:
        self.manifest, self.index = manifest, index
        primary = np.flatnonzero((index.copy == 0) & (index.nbytes > 0))
        self.rows = primary[np.argsort(index.tensor[primary], kind="stable")]
        self.boxes: BoxTable = index.take(self.rows).padded(1)
        self.ptr = np.searchsorted(self.boxes.tensor, np.arange(len(manifest.tensors) + 1))
        self._writers = np.array([file.writer for file in manifest.files], dtype=np.int64)
        self.writer = self._writers[index.file[self.rows]]
        self.layouts = [_rebuild(info) for info in manifest.layouts]
        of_layouts = (np.array(info.ranks, dtype=np.int64) for info in manifest.layouts)
        self.ranks: list[int] = distinct(np.concatenate([index.holder, *of_layouts])).tolist()
        self._copies = find_copies(index)

    def is_held(self, rank: int) -> BoolArray:
        """(primaries,) whether a rank held each."""
        return self.index.is_held_by(rank)[self.rows]

    def rows_read(self, rank: int) -> IntArray:
        """The row that a load of the saved layout reads of each box that the rank held.

        Between copies it chooses as a load on one host does.
        """
        return choose_copies(
            self.index,
            self._copies,
            self.rows[self.is_held(rank)],
            is_own=self._writers == rank,
            is_near=np.ones(len(self._writers), dtype=np.bool_),
            position=self.ranks.index(rank),
        )

    def placement(self, tensor: int) -> PlacementInfo:
        """Return how the boxes of a tensor follow from coordinates."""
        return self.manifest.placements[self.manifest.tensors[tensor].placement]


def _rebuild(info: LayoutInfo) -> Layout | None:
    """The layout that a manifest describes; None if it is not one."""
    try:
        return Layout.from_info(info)
    except (LayoutError, TypeError):
        return None


def parts_of(manifest: Manifest) -> dict[str, str]:
    """Key -> the first part of the state that refers to it."""
    parts = reversed(manifest.parts.items())
    return {key: part for part, node in parts for key in tensor_keys(node)}


def kind_of(key: str) -> str:
    """The last name of a key, numbers as `#`: `weight`, `exp_avg`, `layers.#`."""
    return _NUMBER.sub("#", key.rsplit(".", 1)[-1])


def placement_in_words(placement: PlacementInfo) -> tuple[str, str]:
    """Return how a tensor is placed, in short ("tp cuts dim 0"), and what that means."""
    words = ", ".join(map(_cut_in_words, placement.cuts))
    if placement.kind == "cut":
        return words, "a holder has the slice of its coordinates along these axes"
    if placement.kind == "runs":
        runs = f"runs over {placement.over}"
        meaning = f"ranks along {placement.over} hold runs of elements, of lengths not stored"
        return (f"{words}, {runs}" if words else runs), meaning
    return {
        "whole": ("whole", "every holder has all of it"),
        "per_coordinate": ("per coordinate", "the key names the coordinates that hold it"),
        "irregular": ("irregular", "its boxes follow from no axes of the layout that are stored"),
    }[placement.kind]


def _cut_in_words(cut: CutInfo) -> str:
    return f"{cut.axis} cuts {'pieces of ' if cut.is_strided else ''}dim {cut.dim}"
