"""What each rank would request of a checkpoint under its own layout, or under another one.

Under the saved layout ranks request the boxes that they held, which the index states. Under another
one tensors are cut again by their stored placements, on the stages and other coordinates that held
them. What does not follow from what is stored is left out, and a note says so. Imports no torch.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from holdfast.arrays.box_table import BoxTable
from holdfast.arrays.boxes import Box
from holdfast.arrays.distinct import distinct
from holdfast.arrays.intervals import Intervals, boxes_of, shard_intervals
from holdfast.arrays.types import IntArray
from holdfast.cli.support.holders import SavedPlacement
from holdfast.errors import ConfigError, LayoutError
from holdfast.format.manifest import CutInfo
from holdfast.parallel.layout import DENSE_AXES, EXPERT_AXES, SIZED_AXES, Layout

_SIZE = re.compile(r"\d{1,9}", re.ASCII)
MAX_RANKS = 512
"""A rank's plan takes some tenths of a second for 10,000 tensors."""

_LEFT_OUT = {
    "layout": "are of another layout of the checkpoint than its first",
    "per_coordinate": "are stored per coordinate, and other coordinates need not take them",
    "irregular": "have boxes that follow from no axes that are stored",
    "runs": "are runs of flat buffers, whose lengths under other data ranks are not stored",
    "axes": "are cut along axes that this layout does not have",
    "holders": "were held by some coordinates of an axis that has another size here: which ranks "
    "would take them is not stored",
    "stages": "are of pipeline stages: which of other stages would take them is not stored",
}
"""Why a tensor is not planned -> the note, after a number of tensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Requests:
    """The boxes that each rank of a layout would request.

    Args:
        title: The layout in words.
        ranks: Global ranks.
        tables: Their boxes, in the same order.
        notes: What was assumed, and what was left out.
    """

    title: str
    ranks: list[int]
    tables: list[BoxTable]
    notes: list[str] = field(default_factory=list)


def parse_layout(text: str, *, saved: Layout | None) -> Layout:
    """The layout that `tp=4,dp=2` describes; its order is that of the saved one.

    Raises:
        ConfigError: It cannot be read, or is not a layout; the message says what is accepted.
    """
    sizes: dict[str, int] = {}
    for pair in text.split(","):
        axis, _, size = pair.partition("=")
        axis = axis.strip()
        if axis not in SIZED_AXES or not _SIZE.fullmatch(size.strip()) or axis in sizes:
            raise ConfigError(
                f"--as {text}: {pair.strip()!r} is not one size of an axis; write tp=4,dp=2, each "
                f"axis once, of {', '.join(SIZED_AXES)}"
            )
        sizes[axis] = int(size)
    order = {} if saved is None else {"order": saved.order}
    try:
        layout = Layout(**sizes, **order)  # type: ignore[arg-type]
    except LayoutError:
        # An order may leave out axes of size 1 that have more ranks now.
        try:
            layout = Layout(**sizes)  # type: ignore[arg-type]
        except LayoutError as error:
            raise ConfigError(f"--as {text}: {error}") from error
    if layout.world_size > MAX_RANKS:
        raise ConfigError(
            f"--as {text}: {layout.world_size} ranks; reads are planned for at most {MAX_RANKS}"
        )
    return layout


def layout_title(layout: Layout) -> str:
    """A layout in short: "tp=4 dp=2, 8 ranks"."""
    sizes = [(axis, getattr(layout, axis)) for axis in SIZED_AXES if axis != "expt_tp"]
    if layout.has_experts:
        sizes.append(("expt_tp", layout.expt_tp))
    words = " ".join(f"{axis}={size}" for axis, size in sizes if size > 1)
    num_ranks = layout.world_size
    return f"{words or 'one rank'}{f', {num_ranks} ranks' if words else ''}"


def saved_requests(saved: SavedPlacement) -> Requests:
    """Return what each rank held when the checkpoint was saved."""
    ranks = saved.ranks[:MAX_RANKS]
    notes = []
    if len(ranks) < len(saved.ranks):
        notes.append(f"Planned for the first {MAX_RANKS} of {len(saved.ranks):,} ranks.")
    tables = [saved.boxes.take(saved.is_held(rank)) for rank in ranks]
    infos = zip(saved.layouts, saved.manifest.layouts, strict=True)
    title = "; ".join(info.name if each is None else layout_title(each) for each, info in infos)
    return Requests(title=title, ranks=ranks, tables=tables, notes=notes)


def relaid_requests(saved: SavedPlacement, layout: Layout) -> Requests:
    """Return what ranks of another layout would request of the tensors of the first saved one."""
    maker = _Maker(saved, layout)
    ranks = list(layout.ranks)
    return Requests(
        title=layout_title(layout),
        ranks=ranks,
        tables=[maker.table(rank) for rank in ranks],
        notes=maker.notes(),
    )


_Where = tuple[tuple[str, frozenset[int]], ...]
"""Axes of the new layout, and the coordinates along each whose ranks take a tensor."""


@dataclass(slots=True, kw_only=True)
class _Alike:
    """Tensors that every rank of the new layout requests in the same way."""

    shape: tuple[int, ...]
    cuts: tuple[CutInfo, ...]
    where: _Where
    tensors: list[int] = field(default_factory=list)


class _Maker:
    """Cuts the tensors of a checkpoint for the ranks of another layout."""

    def __init__(self, saved: SavedPlacement, layout: Layout) -> None:
        self._saved, self._layout = saved, layout
        self._old = saved.layouts[0] if saved.layouts else None
        self._num_dims = saved.boxes.num_dims
        self._left_out: Counter[str] = Counter()
        self._where: dict[tuple[bytes, tuple[str, ...]], _Where | str] = {}
        # A step in Python for each kind, not for each tensor and rank.
        kinds: dict[tuple[object, ...], _Alike] = {}
        for number, info in enumerate(saved.manifest.tensors):
            where = self._where_of(number)
            if isinstance(where, str):
                self._left_out[where] += 1
                continue
            cuts, shape = saved.placement(number).cuts, tuple(info.shape)
            alike = kinds.setdefault(
                (shape, cuts, where), _Alike(shape=shape, cuts=cuts, where=where)
            )
            alike.tensors.append(number)
        self._kinds = list(kinds.values())

    def notes(self) -> list[str]:
        """Return how tensors were cut, and what was left out, a sentence each."""
        notes = [
            "Cut again by the stored placements; tensors that all ranks of a stage held whole are "
            "read whole by all ranks of a stage."
        ]
        if self._layout.ep > 1 and (self._old is None or self._old.ep != self._layout.ep):
            notes.append(
                "Experts that were held whole by all ranks cannot be distinguished from other "
                "tensors: they are read by all ranks."
            )
        for why, count in self._left_out.items():
            notes.append(f"Left out: {count:,} tensors {_LEFT_OUT[why]}.")
        return notes

    def table(self, rank: int) -> BoxTable:
        """The boxes that one rank requests; none empty."""
        coordinates = self._layout.coordinates(rank)
        tensors: list[int] = []
        boxes: list[Box] = []
        for alike in self._kinds:
            if all(coordinates[axis] in members for axis, members in alike.where):
                own = [box for box in self._boxes(alike, rank) if 0 not in box.shape]
                for number in alike.tensors:
                    tensors += [number] * len(own)
                    boxes += own
        return BoxTable.from_boxes(tensors, boxes, num_dims=self._num_dims)

    def _boxes(self, alike: _Alike, rank: int) -> list[Box]:
        """Return what the rank has of each of these tensors."""
        dims: list[Intervals] = [((0, size),) for size in alike.shape]
        for i, cut in enumerate(alike.cuts):
            group = self._layout.group(cut.axis, rank)
            inner = [each.axis for each in alike.cuts[i + 1 :] if each.dim == cut.dim]
            dims[cut.dim] = shard_intervals(
                dims[cut.dim],
                num_chunks=len(group),
                index=group.index(rank),
                split_factor=math.prod(map(self._layout.size, inner)) if cut.is_strided else 1,
            )
        return [box for box, _ in boxes_of(tuple(dims))]

    def _where_of(self, number: int) -> _Where | str:
        """Return which coordinates of the new layout take a tensor; or why that is not known."""
        info, placement = self._saved.manifest.tensors[number], self._saved.placement(number)
        if info.layout != 0 or self._old is None:
            return "layout"
        if placement.kind in ("per_coordinate", "irregular"):
            return placement.kind
        axes = tuple(cut.axis for cut in placement.cuts)
        try:
            if placement.kind == "runs":
                axes = (*axes, placement.over)
                if self._layout.size(placement.over) > 1:
                    return "runs"
            tokens = {token for axis in axes for token in self._tokens(axis)}
        except LayoutError:
            return "axes"
        rows = self._saved.rows[self._saved.ptr[number] : self._saved.ptr[number + 1]]
        sets = distinct(self._saved.index.holders[rows])
        # Most tensors share their sets of holders.
        key = sets.tobytes(), tuple(sorted(tokens))
        if key not in self._where:
            self._where[key] = self._place(sets, tokens)
        return self._where[key]

    def _tokens(self, axis: str) -> tuple[str, ...]:
        """The axes of a group; LayoutError unless both layouts have it."""
        assert self._old is not None
        self._layout.size(axis)
        name = axis.removesuffix("_inter").removesuffix("_intra")
        return self._old.tokens(name)

    def _place(self, sets: IntArray, tokens: set[str]) -> _Where | str:
        """Return which coordinates take a tensor that these ranks held and that `tokens` cut."""
        old = self._old
        assert old is not None
        view = DENSE_AXES if tokens <= {*DENSE_AXES} else EXPERT_AXES
        index = self._saved.index
        holders = [index.holder[index.holder_ptr[s] : index.holder_ptr[s + 1]] for s in sets]
        if not holders:
            return ()
        if view == EXPERT_AXES and not self._layout.has_expert_view:
            return "axes"
        at = [
            old.coordinate(rank) if view == DENSE_AXES else old.expert_coordinate(rank)
            for rank in distinct(np.concatenate(holders)).tolist()
        ]
        free = [axis for axis in view if axis not in tokens]
        members = {axis: frozenset(each[axis] for each in at) for axis in free}
        num_places = len({tuple(each[axis] for axis in free) for each in at})
        if num_places != math.prod(map(len, members.values())):
            return "holders"
        # Expert weights that are cut or run along expert axes say so; a whole one does not, and
        # which ranks of a stage have it depends on all of their axes.
        is_partial = any(len(members[axis]) < old.size(axis) for axis in free if axis != "pp")
        if is_partial and not tokens and self._layout.world_size > self._layout.pp:
            return "holders"
        where = []
        for axis, coordinates in members.items():
            size = self._layout.size(axis)
            is_full = len(coordinates) == old.size(axis)
            if size == 1 or (is_full and axis != "pp"):
                continue
            if size != old.size(axis):
                return "stages" if axis == "pp" else "holders"
            where.append((axis, coordinates))
        return tuple(where)
