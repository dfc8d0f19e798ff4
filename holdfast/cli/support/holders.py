"""Which ranks held which chunk when a checkpoint was saved, inferred from manifest and index.

The index states who wrote a box, not who held it. A rank holds a chunk where its coordinates are
those of the chunk's writer along the axes that *distinguish* ranks for that tensor. Which axes do
is inferred from how the boxes vary with their writers' coordinates, over all tensors whose keys
differ in numbers alone (`layers.0.w`, `layers.1.w`) together, because one tensor may fit an axis by
chance. What stays open is marked as unsure. Imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from holdfast.arrays.box_table import BoxTable
from holdfast.arrays.types import BoolArray, IntArray
from holdfast.cli.support.value_tree import leaf_keys
from holdfast.errors import LayoutError
from holdfast.format.index import ChunkIndex
from holdfast.format.manifest import LayoutInfo, Manifest
from holdfast.format.values import TAG, Node
from holdfast.parallel.layout import DEFAULT_ORDER, Layout

BASES: Mapping[str, str] = {
    "label": "stored per coordinate: the manifest names the ranks",
    "cut": "cut regularly: boxes are equal slices along axes of the layout, in order of their "
    "writers' coordinates; ranks that differ along other axes are taken to hold equal slices",
    "whole": "one box: taken to be held by all ranks that no rule here distinguishes",
    "written": "cut irregularly, as the runs of a sharded optimizer are: each box is taken to be "
    "held by its writer alone",
    "one stage": "one pipeline stage wrote it, and no name differs from its own in a number alone: "
    "taken to be of that stage only; a tied embedding would be of several",
    "unsure": "several readings fit the boxes: counted as the first that fits",
    "no layout": "no layout of the manifest has these ranks: counted as held by the writer alone",
}
"""How a tensor's holders are known -> what that means."""

_DENSE, _EXPERT = ("tp", "cp", "dp"), ("expt_tp", "ep", "expt_dp")
_AXES = (*_DENSE, "pp", *_EXPERT)
_NUMBER = re.compile(r"\d+")
_MIN_PIECE_NBYTES = int(0.8 * (1 << 16))
"""The planner cuts no box that several ranks hold into pieces of less than about 64 KiB
(`checkpoint/plan/assign_writers.py`): smaller ones were different boxes of different ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holders:
    """How the ranks of a layout hold one tensor."""

    basis: str
    """One of `BASES`."""
    axes: frozenset[str] = frozenset()
    """Ranks with equal coordinates along these hold the same boxes."""
    cuts: tuple[tuple[int, str], ...] = ()
    """(dim, axis) of each regular cut, an outer one before its inner."""
    view: tuple[str, ...] = _DENSE
    """Axes of the view that the cuts are of."""
    is_sure: bool = True

    @property
    def is_all(self) -> bool:
        """Whether all axes distinguish ranks: the writer of a box is its only holder."""
        return len(self.axes) == len(_AXES)


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
        self.coordinate = np.full((len(self.ranks) + 1, len(_AXES)), -1, dtype=np.int64)
        if self.layout is not None:
            for i, rank in enumerate(self.ranks):
                known = self.layout.coordinates(rank)
                self.coordinate[i] = [known.get(axis, 0) for axis in _AXES]

    def size(self, axis: str) -> int:
        """Ranks along an axis; 1 without a layout, or where there is no expert view."""
        if self.layout is None or (axis in _EXPERT and not self.layout.has_experts):
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
        return Layout(
            **info.axes, order=info.order or DEFAULT_ORDER, ranks=info.ranks, name=info.name
        )
    except (LayoutError, TypeError):
        return None


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
        holders: Of each tensor.
        labels: Key -> coordinates, of tensors that are stored per coordinate.

    Cost: linear in the chunks; some tenths of a second for 10,000 tensors on 64 ranks.
    """

    def __init__(self, manifest: Manifest, index: ChunkIndex) -> None:
        self.manifest, self.index = manifest, index
        primary = np.flatnonzero((index.copy == 0) & (index.nbytes > 0))
        self.rows = primary[np.argsort(index.tensor[primary], kind="stable")]
        self.boxes: BoxTable = index.take(self.rows).padded(1)
        num_tensors = len(manifest.tensors)
        self.ptr = np.searchsorted(self.boxes.tensor, np.arange(num_tensors + 1))
        of_file = np.array([file.writer for file in manifest.files], dtype=np.int64)
        self.writer = of_file[index.file[self.rows]]
        self.layouts = [LayoutRanks(info) for info in manifest.layouts]
        self.labels = dict(_labels(manifest.parts))
        self.holders = _Inference(self).run()

    @property
    def ranks(self) -> list[int]:
        """Ranks of all layouts, ascending."""
        return sorted({rank for layout in self.layouts for rank in layout.ranks})

    @cached_property
    def _classes(self) -> list[tuple[LayoutRanks, list[int], IntArray, IntArray]]:
        """Primaries whose holders are distinguished alike: layout, axes, primaries, coordinates."""
        groups: dict[tuple[int, frozenset[str]], list[int]] = {}
        for tensor, holders in enumerate(self.holders):
            layout = self.manifest.tensors[tensor].layout
            groups.setdefault((layout, holders.axes), []).append(tensor)
        classes = []
        for (layout, axes), tensors in groups.items():
            chosen = np.zeros(len(self.holders), dtype=np.bool_)
            chosen[tensors] = True
            at = np.flatnonzero(chosen[self.boxes.tensor])
            columns = [_AXES.index(axis) for axis in sorted(axes)]
            of_writer = self.layouts[layout].of_ranks(self.writer[at])
            classes.append((self.layouts[layout], columns, at, of_writer[:, columns]))
        return classes

    def is_held(self, rank: int) -> BoolArray:
        """(primaries,) whether a rank held each."""
        # Whatever else is inferred: the writer of a box held it.
        is_held: BoolArray = self.writer == rank
        for layout, columns, at, of_writer in self._classes:
            position = layout.position.get(rank)
            if position is not None:
                mine = layout.coordinate[position, columns]
                is_held[at] |= (of_writer == mine).all(axis=1)
        return is_held


def _labels(parts: Mapping[str, Node]) -> Iterator[tuple[str, dict[str, int]]]:
    """Tensors that are stored once per coordinate, and the coordinates that hold each."""
    waiting: list[Node] = list(parts.values())
    while waiting:
        node = waiting.pop()
        if isinstance(node, list):
            waiting += node
        elif isinstance(node, dict) and node.get(TAG) == "per_rank":
            values = node.get("v")
            for label, value in values.items() if isinstance(values, dict) else ():
                pairs = [pair.partition("=") for pair in label.split(",") if pair]
                where = {axis: int(at) for axis, _, at in pairs if at.isdecimal()}
                yield from ((key, where) for key in leaf_keys(value))
        elif isinstance(node, dict):
            waiting += node.values()


@dataclass(slots=True, kw_only=True)
class _Group:
    """Tensors of one layout, shape and type whose keys differ in numbers alone."""

    layout: LayoutRanks
    part: str
    kind: str
    tensors: list[int]
    holders: Holders
    smallest: int = 0
    """Bytes of the smallest share that one of several writers of a slice wrote; 0: one writer."""
    smallest_cut: int = 0
    """Bytes of its smallest chunk."""


class _Inference:
    """Finds the holders of every tensor."""

    def __init__(self, saved: SavedPlacement) -> None:
        self._saved = saved
        self._manifest = saved.manifest
        self._nbytes = saved.index.nbytes[saved.rows]

    def run(self) -> list[Holders]:
        """The holders of each tensor, in the order of the manifest."""
        holders = [Holders(basis="whole")] * len(self._manifest.tensors)
        groups = [self._examine(group) for group in self._groups(holders)]
        irregular = {(id(g.layout), g.part, g.kind) for g in groups if g.holders.basis == "written"}
        num_cut: dict[tuple[int, str, str], int] = {}
        for group in groups:
            for _, axis in group.holders.cuts:
                key = (id(group.layout), group.part, axis)
                num_cut[key] = num_cut.get(key, 0) + len(group.tensors)
        for group in groups:
            is_irregular = (id(group.layout), group.part, group.kind) in irregular
            known = self._decide(group, is_irregular=is_irregular, num_cut=num_cut)
            for tensor in group.tensors:
                holders[tensor] = self._with_stage(tensor, group, known)
        return holders

    def _groups(self, holders: list[Holders]) -> list[_Group]:
        """Tensors to examine together; those whose holders the manifest states are done."""
        groups: dict[tuple[object, ...], _Group] = {}
        parts = parts_of(self._manifest)
        for number, info in enumerate(self._manifest.tensors):
            layout = self._saved.layouts[info.layout]
            label = self._saved.labels.get(info.key)
            if layout.layout is None:
                holders[number] = Holders(basis="no layout", axes=frozenset(_AXES))
            elif label is not None and set(label) <= set(_AXES):
                holders[number] = Holders(basis="label", axes=frozenset(label))
            else:
                pattern = _NUMBER.sub("#", info.key)
                key = (info.layout, pattern, tuple(info.shape), info.dtype)
                part = parts.get(info.key, "")
                group = groups.setdefault(
                    key,
                    _Group(
                        layout=layout, part=part, kind=kind_of(info.key), tensors=[],
                        holders=Holders(basis="whole"),
                    ),
                )  # fmt: skip
                group.tensors.append(number)
        return list(groups.values())

    def _rows(self, tensors: Sequence[int]) -> IntArray:
        """Primaries of these tensors."""
        ptr = self._saved.ptr
        return np.concatenate([np.arange(ptr[t], ptr[t + 1]) for t in tensors])

    def _examine(self, group: _Group) -> _Group:
        """Look for regular cuts of the boxes, and at what they leave unexplained."""
        at = self._rows(group.tensors)
        if not len(at):
            return group
        boxes = self._saved.boxes.take(at)
        info = self._manifest.tensors[group.tensors[0]]
        coordinate = group.layout.of_ranks(self._saved.writer[at])
        views = [_DENSE, _EXPERT] if group.layout.size("ep") > 1 else [_DENSE]
        if "expert" in info.key.lower():
            views.reverse()
        searches = [_search_cuts(boxes, info.shape, coordinate, group.layout, v) for v in views]
        # The first view that explains every box, else the one that explains most of their dims.
        best = max(searches, key=lambda each: (each.is_complete, len(each.cuts)))
        view = views[searches.index(best)]
        axes = frozenset(axis for _, axis in best.cuts)
        group.holders = Holders(
            basis="cut" if best.cuts else "whole", axes=axes, cuts=tuple(best.cuts), view=view,
            is_sure=not best.is_ambiguous,
        )  # fmt: skip
        group.smallest_cut = int(self._nbytes[at].min())
        if not best.is_complete:
            group.smallest = self._smallest_share(boxes, best.window, at)
            if 0 < group.smallest < _MIN_PIECE_NBYTES:
                group.holders = replace(group.holders, basis="written", axes=frozenset(_AXES))
        if view == _EXPERT and self._owns_experts(group, coordinate[:, _AXES.index("ep")], at):
            group.holders = replace(group.holders, axes=group.holders.axes | {"ep"})
        return group

    def _smallest_share(self, boxes: BoxTable, window: IntArray, at: IntArray) -> int:
        """Bytes of the smallest share of a slice that several ranks wrote; 0 where none is."""
        slices = np.column_stack([boxes.tensor, window])
        _, number = np.unique(slices, axis=0, return_inverse=True)
        pairs = np.column_stack([number.ravel(), self._saved.writer[at]])
        known, share = np.unique(pairs, axis=0, return_inverse=True)
        nbytes = np.bincount(share.ravel(), self._nbytes[at])
        is_shared = np.bincount(known[:, 0])[known[:, 0]] > 1
        return int(nbytes[is_shared].min()) if is_shared.any() else 0

    def _owns_experts(self, group: _Group, ep: IntArray, at: IntArray) -> bool:
        """Whether each of the tensors belongs to one coordinate of `ep`, in order of the keys."""
        size = group.layout.size("ep")
        tensor = self._saved.boxes.tensor[at]
        pairs = np.unique(np.column_stack([tensor, ep]), axis=0)
        return (
            len(group.tensors) >= size
            and len(pairs) == len(group.tensors)
            and len(np.unique(pairs[:, 1])) == size
            and "ep" not in group.holders.axes
        )

    def _decide(
        self, group: _Group, *, is_irregular: bool, num_cut: Mapping[tuple[int, str, str], int]
    ) -> Holders:
        """The holders of a group, with what is known of tensors of the same kind."""
        known = group.holders
        if known.basis == "written":
            return known
        if is_irregular:
            # Other tensors of this kind are runs of flat buffers: a whole one lies in one run.
            return replace(known, basis="written", axes=frozenset(_AXES))
        if group.smallest:
            # Large pieces: of a box that the planner has cut, or of a buffer.
            return replace(known, basis="unsure", is_sure=False)
        if known.cuts and group.smallest_cut >= _MIN_PIECE_NBYTES:
            keys = [(id(group.layout), group.part, axis) for _, axis in known.cuts]
            if any(num_cut[key] == 1 for key in keys):
                return replace(known, basis="unsure", is_sure=False)
        return known if known.is_sure else replace(known, basis="unsure")

    def _with_stage(self, tensor: int, group: _Group, known: Holders) -> Holders:
        """The same with the pipeline stage, where one stage wrote all of the tensor."""
        if group.layout.size("pp") == 1 or "pp" in known.axes:
            return known
        at = slice(*self._saved.ptr[tensor : tensor + 2])
        stages = group.layout.of_ranks(self._saved.writer[at])[:, _AXES.index("pp")]
        if len(np.unique(stages)) != 1:
            return known
        known = replace(known, axes=known.axes | {"pp"})
        # A name without a sibling on another stage may be of several stages: a tied embedding.
        is_sure = known.is_sure and len(group.tensors) > 1
        if is_sure:
            return known
        basis = "one stage" if known.is_sure else known.basis
        return replace(known, basis=basis, is_sure=False)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Search:
    """Regular cuts that every box fits; `window` is the slice that each box lies in (n, 2 d)."""

    cuts: list[tuple[int, str]]
    window: IntArray
    is_complete: bool
    is_ambiguous: bool


def _search_cuts(
    boxes: BoxTable,
    shape: Sequence[int],
    coordinate: IntArray,
    layout: LayoutRanks,
    view: Sequence[str],
) -> _Search:
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
                at = coordinate[:, _AXES.index(axis)]
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
    return _Search(cuts=cuts, window=window, is_complete=is_complete, is_ambiguous=is_ambiguous)


def slices_of(
    lo: IntArray, hi: IntArray, at: IntArray | int, size: int
) -> tuple[IntArray, IntArray]:
    """First and last element past slice `at` of `size` of the ranges [lo, hi), by `torch.chunk`."""
    length = -(-(hi - lo) // size)
    first = np.minimum(lo + length * at, hi)
    return first, np.minimum(first + length, hi)


def parts_of(manifest: Manifest) -> dict[str, str]:
    """Key -> the part of the state that refers to it."""
    return {key: part for part, node in manifest.parts.items() for key in leaf_keys(node)}


def kind_of(key: str) -> str:
    """The last name of a key, numbers as `#`: `weight`, `exp_avg`, `layers.#`."""
    return _NUMBER.sub("#", key.rsplit(".", 1)[-1])
