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
from holdfast.cli.support.regular_cuts import AXES, DATA, DENSE, EXPERT, LayoutRanks, search_cuts
from holdfast.format.index import ChunkIndex
from holdfast.format.manifest import Manifest
from holdfast.format.values import Node, is_per_rank, members, tensor_keys, walk

BASES: Mapping[str, str] = {
    "label": "stored per coordinate: the manifest names the ranks",
    "cut": "cut regularly: boxes are equal slices along axes of the layout, in order of their "
    "writers' coordinates; ranks that differ along other axes are taken to hold equal slices",
    "whole": "one box: taken to be held by all ranks that no rule here distinguishes",
    "written": "shares of a sharded optimizer, by their irregular boxes or because all moments of "
    "a parameter have one writer: taken to be held at its place along the data axes alone",
    "one stage": "one pipeline stage wrote it, and no name differs from its own in a number alone: "
    "taken to be of that stage only; a tied embedding would be of several",
    "unsure": "several readings fit the boxes: counted as the first that fits",
    "no layout": "no layout of the manifest has these ranks: counted as held by the writer alone",
}
"""How a tensor's holders are known -> what that means."""

_NUMBER = re.compile(r"\d+")
_EXPERT_NAME = re.compile(r"expert|moe", re.IGNORECASE)
"""Where both views fit the boxes: names of what is cut in the expert view."""
_MIN_PIECE_NBYTES = int(0.8 * (1 << 16))
"""The planner cuts no box that several ranks hold into pieces of less than about 64 KiB
(`checkpoint/plan/assign_writers.py`): smaller ones were different boxes of different ranks."""
_MIN_SIBLINGS, _SURE_SIBLINGS = 3, 8
"""Parameters whose moments have the same writers, to be taken for the shares of an optimizer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holders:
    """How the ranks of a layout hold one tensor."""

    basis: str
    """One of `BASES`."""
    axes: frozenset[str] = frozenset()
    """Ranks with equal coordinates along these hold the same boxes."""
    cuts: tuple[tuple[int, str], ...] = ()
    """(dim, axis) of each regular cut, an outer one before its inner."""
    view: tuple[str, ...] = DENSE
    """Axes of the view that the cuts are of."""
    is_sure: bool = True

    @property
    def is_all(self) -> bool:
        """Whether all axes distinguish ranks: the writer of a box is its only holder."""
        return len(self.axes) == len(AXES)


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
            columns = [AXES.index(axis) for axis in sorted(axes)]
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
    for node in walk(dict(parts)):
        for label, value in members(node) if is_per_rank(node) else ():
            pairs = [pair.partition("=") for pair in str(label).split(",") if pair]
            where = {axis: int(at) for axis, _, at in pairs if at.isdecimal()}
            yield from ((key, where) for key in tensor_keys(value))


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


_Section = tuple[int, str, str]
"""Id of a layout, part and kind of tensor."""


def _data_axes(holders: Holders) -> frozenset[str]:
    """The axes over which a sharded optimizer divides tensors that are cut in one view."""
    return frozenset({"expt_dp"} if holders.view == EXPERT else {"cp", "dp"})


def _as_share(known: Holders, *, axes: frozenset[str]) -> Holders:
    """The holders of a share of an optimizer; what looks like a cut along data is where it ends."""
    cuts = tuple((dim, axis) for dim, axis in known.cuts if axis not in DATA)
    return replace(known, basis="written", axes=axes, cuts=cuts)


def _is_family(manifest: Manifest, members: Sequence[tuple[_Group, int]]) -> bool:
    """Whether tensors are several of one shape: the moments of a parameter."""
    shapes = {tuple(manifest.tensors[tensor].shape) for _, tensor in members}
    return len(members) > 1 and len(shapes) == 1


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
        irregular = {
            (id(g.layout), g.part, g.kind): True for g in groups if g.holders.basis == "written"
        }
        for key, is_sure in self._shares(groups).items():
            irregular.setdefault(key, is_sure)
        num_cut: dict[tuple[int, str, str], int] = {}
        for group in groups:
            for _, axis in group.holders.cuts:
                key = (id(group.layout), group.part, axis)
                num_cut[key] = num_cut.get(key, 0) + len(group.tensors)
        for group in groups:
            known = self._decide(group, irregular=irregular, num_cut=num_cut)
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
                holders[number] = Holders(basis="no layout", axes=frozenset(AXES))
            elif label is not None and set(label) <= set(AXES):
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
        views = [DENSE, EXPERT] if group.layout.size("ep") > 1 else [DENSE]
        if _EXPERT_NAME.search(info.key):
            views.reverse()
        searches = [search_cuts(boxes, info.shape, coordinate, group.layout, v) for v in views]
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
                axes = self._run_axes(group, boxes, best.window, at)
                group.holders = _as_share(group.holders, axes=axes)
        if view == EXPERT and self._owns_experts(group, coordinate[:, AXES.index("ep")], at):
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

    def _run_axes(
        self, group: _Group, boxes: BoxTable, window: IntArray, at: IntArray
    ) -> frozenset[str]:
        """What distinguishes the holders of irregular boxes: the data axes, or all axes."""
        axes = group.holders.axes | _data_axes(group.holders)
        columns = [AXES.index(axis) for axis in sorted(axes)]
        writer = self._saved.writer[at]
        place = group.layout.of_ranks(writer)[:, columns]
        slices = np.column_stack([boxes.tensor, window])
        num_places = len(np.unique(np.column_stack([slices, place]), axis=0))
        num_writers = len(np.unique(np.column_stack([slices, writer]), axis=0))
        # A run of a share has one writer. Several of one share cut along another axis, too.
        return axes if num_places == num_writers else frozenset(AXES)

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

    def _shares(self, groups: Sequence[_Group]) -> dict[_Section, bool]:
        """Kinds of tensors that belong to shares of an optimizer, and whether that is sure.

        Where shares end between two parameters, no tensor is cut. But the moments of a parameter
        then have one writer, and which one differs between parameters. Of a replicated optimizer
        the planner gives two equal boxes in turn to the holders that have the least.
        """
        siblings: dict[tuple[int, str], dict[str, list[tuple[_Group, int]]]] = {}
        for group in groups:
            for tensor in group.tensors:
                info = self._manifest.tensors[tensor]
                if info.shape and "." in info.key:
                    stems = siblings.setdefault((id(group.layout), group.part), {})
                    stems.setdefault(info.key.rpartition(".")[0], []).append((group, tensor))
        shares: dict[_Section, bool] = {}
        for (layout, part), stems in siblings.items():
            alike = [each for each in stems.values() if _is_family(self._manifest, each)]
            writers = [[self._data_of(group, t) for group, t in each] for each in alike]
            agree = all(each.count(each[0]) == len(each) for each in writers)
            if len(alike) >= _MIN_SIBLINGS and agree and len({each[0] for each in writers}) > 1:
                kinds = {group.kind for each in alike for group, _ in each}
                is_sure = len(alike) >= _SURE_SIBLINGS
                shares |= {(layout, part, kind): is_sure for kind in kinds}
        return shares

    def _data_of(self, group: _Group, tensor: int) -> bytes:
        """Coordinates of a tensor's writers along the data axes that do not cut it."""
        at = slice(*self._saved.ptr[tensor : tensor + 2])
        free = [axis for axis in DATA if axis not in group.holders.axes]
        columns = [AXES.index(axis) for axis in free if group.layout.size(axis) > 1]
        coordinate = group.layout.of_ranks(self._saved.writer[at])[:, columns]
        return np.unique(coordinate, axis=0).tobytes()

    def _decide(
        self,
        group: _Group,
        *,
        irregular: Mapping[_Section, bool],
        num_cut: Mapping[tuple[int, str, str], int],
    ) -> Holders:
        """The holders of a group, with what is known of tensors of the same kind."""
        known = group.holders
        if known.basis == "written":
            return known
        section = (id(group.layout), group.part, group.kind)
        if section in irregular:
            # Other tensors of this kind are runs of flat buffers: a whole one lies in one run.
            known = _as_share(known, axes=known.axes | _data_axes(known))
            return replace(known, is_sure=irregular[section])
        if any(key[:2] == section[:2] for key in irregular):
            # A step count next to such runs is held by those that hold a run of its parameter.
            known = replace(known, is_sure=False)
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
        stages = group.layout.of_ranks(self._saved.writer[at])[:, AXES.index("pp")]
        if len(np.unique(stages)) != 1:
            return known
        known = replace(known, axes=known.axes | {"pp"})
        # A name without a sibling on another stage may be of several stages: a tied embedding.
        is_sure = known.is_sure and len(group.tensors) > 1
        if is_sure:
            return known
        basis = "one stage" if known.is_sure else known.basis
        return replace(known, basis=basis, is_sure=False)


def parts_of(manifest: Manifest) -> dict[str, str]:
    """Key -> the part of the state that refers to it."""
    return {key: part for part, node in manifest.parts.items() for key in tensor_keys(node)}


def kind_of(key: str) -> str:
    """The last name of a key, numbers as `#`: `weight`, `exp_avg`, `layers.#`."""
    return _NUMBER.sub("#", key.rsplit(".", 1)[-1])
