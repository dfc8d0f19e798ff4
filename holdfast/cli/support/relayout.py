"""What each rank would request of a checkpoint under its own layout, or under another one.

Under the saved layout ranks request the chunks that they held. Under another one the boxes are cut
again, along the dims and axes that the saved boxes show (`cli/support/holders.py`); what cannot be
cut again from that is stated as a note. Imports no torch.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from holdfast.arrays.box_table import BoxTable, concatenate, pad_shapes
from holdfast.arrays.boxes import flat_range_boxes
from holdfast.arrays.types import BoolArray, IntArray
from holdfast.cli.support.holders import Holders, SavedPlacement, kind_of, parts_of
from holdfast.cli.support.regular_cuts import slices_of
from holdfast.errors import ConfigError, LayoutError
from holdfast.parallel.layout import Layout

AXES = ("tp", "cp", "ep", "dp", "pp", "expt_tp")
MAX_RANKS = 512
"""A rank's plan takes some tenths of a second for 10,000 tensors."""

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
"""A number that is a name of its own: `layers.3.w`, not `conv1`."""


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
        ConfigError: It cannot be read, or is no layout; the message says what is accepted.
    """
    sizes: dict[str, int] = {}
    for pair in text.split(","):
        axis, _, size = pair.partition("=")
        axis = axis.strip()
        if axis not in AXES or not size.strip().isdecimal() or axis in sizes:
            raise ConfigError(
                f"--as {text}: {pair.strip()!r} is not one size of an axis; write tp=4,dp=2, each "
                f"axis once, of {', '.join(AXES)}"
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
    sizes = [(axis, getattr(layout, axis)) for axis in AXES if axis != "expt_tp"]
    if layout.has_experts:
        sizes.append(("expt_tp", layout.expt_tp))
    words = " ".join(f"{axis}={size}" for axis, size in sizes if size > 1)
    num_ranks = layout.world_size
    return f"{words or 'one rank'}{f', {num_ranks} ranks' if words else ''}"


def saved_requests(saved: SavedPlacement) -> Requests:
    """What each rank held when the checkpoint was saved."""
    notes = []
    num_unsure = sum(not holders.is_sure for holders in saved.holders)
    if num_unsure:
        notes.append(f"Of {num_unsure:,} tensors it is not sure which ranks held them.")
    ranks = saved.ranks[:MAX_RANKS]
    if len(ranks) < len(saved.ranks):
        notes.append(f"Planned for the first {MAX_RANKS} of {len(saved.ranks):,} ranks.")
    tables = [saved.boxes.take(saved.is_held(rank)) for rank in ranks]
    title = "; ".join(
        layout_title(each.layout) if each.layout is not None else each.name
        for each in saved.layouts
    )
    return Requests(title=title, ranks=ranks, tables=tables, notes=notes)


def relaid_requests(saved: SavedPlacement, layout: Layout) -> Requests:
    """What each rank of another layout would request."""
    maker = _Maker(saved, layout)
    ranks = list(layout.ranks)
    return Requests(
        title=layout_title(layout),
        ranks=ranks,
        tables=[maker.table(rank) for rank in ranks],
        notes=maker.notes(),
    )


class _Maker:
    """Cuts the tensors of a checkpoint for the ranks of another layout."""

    def __init__(self, saved: SavedPlacement, layout: Layout) -> None:
        tensors = saved.manifest.tensors
        self._saved, self._layout = saved, layout
        self._num_dims = max(1, max((len(info.shape) for info in tensors), default=1))
        self._shapes = pad_shapes([info.shape for info in tensors], self._num_dims)
        self._fates: Counter[str] = Counter()
        self._stages = self._assign_stages()
        self._experts = self._assign_experts()
        # Tensors that are cut alike: a step in Python for each way, not for each tensor.
        self._grids: dict[tuple[tuple[int, str], ...], list[int]] = {}
        self._flat: dict[tuple[str, str, bool], list[int]] = {}
        parts = parts_of(saved.manifest)
        for number, holders in enumerate(saved.holders):
            fate = self._fate(number, holders)
            self._fates[fate] += 1
            if fate == "flat":
                key = (parts.get(tensors[number].key, ""), kind_of(tensors[number].key),
                       _is_expert(holders))  # fmt: skip
                self._flat.setdefault(key, []).append(number)
            if fate in ("cut", "whole", "flat"):
                self._grids.setdefault(holders.cuts, []).append(number)

    def _fate(self, number: int, holders: Holders) -> str:
        """What happens to a tensor: "cut", "whole", "flat", or why it is left out."""
        if self._saved.manifest.tensors[number].layout != 0:
            return "other layout"
        if holders.basis in ("label", "no layout"):
            return holders.basis
        if holders.basis == "written":
            return "irregular" if holders.is_all else "flat"
        return "cut" if holders.cuts else "whole"

    def notes(self) -> list[str]:
        """What was assumed and what was left out, a sentence each."""
        layout, saved = self._layout, self._saved.layouts[0].layout if self._saved.layouts else None
        by_cut = Counter(
            f"{axis} cuts dim {dim}"
            for holders in self._saved.holders
            for dim, axis in holders.cuts
        )
        texts = [
            (len(by_cut), "Cut again as the saved boxes show: "
             + ", ".join(f"{how} of {num:,} tensors" for how, num in sorted(by_cut.items()))
             + ". Slices are those of torch.chunk."),
            (self._fates["whole"], f"{self._fates['whole']:,} tensors were one box: read whole by "
             "every rank of their pipeline stage."),
            (self._fates["flat"], f"{self._fates['flat']:,} tensors were cut as runs of flat "
             "buffers: laid end to end by part and kind, in the order of the manifest, and divided "
             "into equal runs over the data ranks. A sharded optimizer may divide otherwise."),
            (self._fates["label"], f"{self._fates['label']:,} tensors are stored per coordinate: "
             "left out, since other coordinates need not take them."),
            (self._fates["irregular"], f"{self._fates['irregular']:,} tensors are cut irregularly, "
             "also along other axes than those of data: left out."),
            (self._fates["other layout"] + self._fates["no layout"],
             f"{self._fates['other layout'] + self._fates['no layout']:,} tensors are of another "
             "layout of the checkpoint, or of none: left out."),
            (layout.pp > 1 and len(self._stages), f"Pipeline: numbered names are divided into "
             f"{layout.pp} stages of equal length; other tensors stay with the first or the last "
             "stage where one of them wrote them."),
            (layout.pp > 1 and (saved is None or saved.pp == 1), "The saved layout has one stage: "
             "tensors without a number in their names are read by every stage."),
            (saved is not None and saved.has_experts, "Where axes of both views fit, tensors with "
             "expert or moe in their keys are cut in the expert view, others in the dense one."),
            (layout.cp > 1, "Ranks along cp request alike, where no saved box is cut along cp."),
        ]  # fmt: skip
        return [text for count, text in texts if count]

    def table(self, rank: int) -> BoxTable:
        """The boxes that one rank requests; none empty."""
        coordinate = self._layout.coordinates(rank)
        offset, stop = np.zeros_like(self._shapes), self._shapes.copy()
        chosen = np.zeros(len(self._shapes), dtype=np.bool_)
        for cuts, numbers in self._grids.items():
            rows = np.array(numbers, dtype=np.int64)
            chosen[rows] = True
            for dim, axis in cuts:
                at, size = self._slice_of(coordinate, axis)
                first, last = slices_of(offset[rows, dim], stop[rows, dim], at, size)
                offset[rows, dim], stop[rows, dim] = first, last
        chosen &= self._is_here(coordinate)
        runs = list(self._runs(rank, chosen, offset, stop))
        for numbers in self._flat.values():
            chosen[numbers] = False
        chosen &= (stop > offset).all(axis=1)
        rows = np.flatnonzero(chosen)
        grid = BoxTable(tensor=rows, offset=offset[rows], extent=(stop - offset)[rows])
        return concatenate([grid, *runs])

    def _slice_of(self, coordinate: Mapping[str, int], axis: str) -> tuple[int, int]:
        """Index and number of the slices along an axis of the new layout."""
        if axis in coordinate:
            return coordinate[axis], self._layout.size(axis)
        # Without an expert view, experts are cut as dense tensors are.
        dense = {"expt_tp": "tp", "expt_dp": "dp"}.get(axis)
        return (coordinate[dense], self._layout.size(dense)) if dense else (0, 1)

    def _is_here(self, coordinate: Mapping[str, int]) -> BoolArray:
        """(tensors,) whether a rank's stage, and its share of the experts, has each."""
        stage, ep = coordinate["pp"], coordinate.get("ep", 0)
        everyone = -1
        is_of_stage = (self._stages == everyone) | (self._stages == stage)
        is_here: BoolArray = is_of_stage & ((self._experts == everyone) | (self._experts == ep))
        return is_here

    def _runs(
        self, rank: int, chosen: BoolArray, offset: IntArray, stop: IntArray
    ) -> Iterator[BoxTable]:
        """A rank's runs of tensors that were cut as flat buffers are."""
        for (_, _, is_expert), numbers in self._flat.items():
            mine = [number for number in numbers if chosen[number]]
            axes = "expt_dp" if is_expert and self._layout.has_expert_view else "dp_cp"
            ranks = self._layout.group(axes, rank)
            index, size = ranks.index(rank), len(ranks)
            shapes = (stop - offset)[mine]
            ends = np.cumsum(shapes.prod(axis=1))
            total = int(ends[-1]) if len(ends) else 0
            first, last = index * total // size, (index + 1) * total // size
            for number, shape, end in zip(mine, shapes.tolist(), ends.tolist(), strict=True):
                begin = end - int(np.prod(shape))
                a, b = max(first, begin) - begin, min(last, end) - begin
                boxes = flat_range_boxes(shape, a, b) if a < b else []
                if boxes:
                    table = BoxTable.from_boxes(
                        [number] * len(boxes), boxes, num_dims=self._num_dims
                    )
                    yield BoxTable(
                        tensor=table.tensor,
                        offset=table.offset + offset[number],
                        extent=table.extent,
                    )

    def _assign_stages(self) -> IntArray:
        """(tensors,) the stage of the new layout that has each; -1 for all of them."""
        tensors = self._saved.manifest.tensors
        stages = np.full(len(tensors), -1, dtype=np.int64)
        pp = self._layout.pp
        if pp == 1:
            return stages
        counts = _level_sizes([info.key for info in tensors])
        for number, info in enumerate(tensors):
            match = _NUMBER.search(info.key)
            if match is not None and counts[_stem(info.key, match)] >= pp:
                stages[number] = int(match[0]) * pp // counts[_stem(info.key, match)]
            elif "pp" in self._saved.holders[number].axes:
                before = self._stage_of_writer(number)
                size = self._saved.layouts[info.layout].size("pp")
                stages[number] = before * (pp - 1) // max(size - 1, 1)
        return stages

    def _stage_of_writer(self, number: int) -> int:
        """The saved stage that wrote a tensor."""
        saved = self._saved
        first, last = saved.ptr[number : number + 2].tolist()
        layout = saved.layouts[saved.manifest.tensors[number].layout].layout
        if layout is None or first == last:
            return 0
        return layout.coordinate(int(saved.writer[first]))["pp"]

    def _assign_experts(self) -> IntArray:
        """(tensors,) the coordinate on `ep` that has each; experts may be tensors of their own."""
        tensors = self._saved.manifest.tensors
        experts = np.full(len(tensors), -1, dtype=np.int64)
        ep = self._layout.ep
        owned = [
            number
            for number, holders in enumerate(self._saved.holders)
            if "ep" in holders.axes and holders.basis in ("cut", "whole")
            and all(axis != "ep" for _, axis in holders.cuts)
        ]  # fmt: skip
        counts: dict[str, int] = {}
        last = {number: list(_NUMBER.finditer(tensors[number].key)) for number in owned}
        for number, matches in last.items():
            if matches:
                stem = _stem(tensors[number].key, matches[-1])
                counts[stem] = max(counts.get(stem, 0), int(matches[-1][0]) + 1)
        for number, matches in last.items():
            if matches and ep > 1:
                experts[number] = (
                    int(matches[-1][0]) * ep // counts[_stem(tensors[number].key, matches[-1])]
                )
        return experts


def _is_expert(holders: Holders) -> bool:
    """Whether a tensor's cuts are along axes of the expert view."""
    return any(axis in ("ep", "expt_tp", "expt_dp") for axis in holders.view)


def _stem(key: str, match: re.Match[str]) -> str:
    """What of a key is before a number, without the part: moments are numbered as weights are."""
    words = key[: match.start()].rstrip(".").split(".")
    return words[-1] if words else ""


def _level_sizes(keys: Sequence[str]) -> dict[str, int]:
    """Name before the first number of a key -> one more than the largest such number."""
    sizes: dict[str, int] = {}
    for key in keys:
        match = _NUMBER.search(key)
        if match is not None:
            stem = _stem(key, match)
            sizes[stem] = max(sizes.get(stem, 0), int(match[0]) + 1)
    return sizes
