"""Order of launches in forward and backward of a sharded model, recorded and drawn as SVG.

    python -m bench.fsdp --picture docs/assets/fsdp-launches.svg

Nothing is drawn that was not recorded: a box's place is its number in the order of events, its row
the communicator that `LaunchRecorder` saw, its text the unit whose bytes travelled. Times are not
shown: they are the machine's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor, nn

from bench.ranks import RankContext, run_ranks
from holdfast import Layout, ProcessGroups
from holdfast.fsdp import fully_shard_model
from holdfast.parallel.groups.launches import LaunchRecorder

NUM_RANKS = 2
NUM_LAYERS = 4
WIDTH = 16
COMMUNICATORS: Mapping[str, tuple[str, ...] | None] = MappingProxyType(
    {"one communicator": ("dp", "dp_cp", "expt_dp"), "two communicators": None}
)
COMPUTE = "computation"
GATHER, REDUCE = "all_gather", "reduce_scatter"

_COLOURS = {"forward": "#c9ced6", "backward": "#8f98a6", GATHER: "#9cc7f0", REDUCE: "#f3b562"}
_LEGEND = {
    "forward": "forward of a layer",
    "backward": "backward of a layer",
    GATHER: "all-gather of parameters",
    REDUCE: "reduce-scatter of gradients",
}
_SLOT, _BOX, _ROW, _LEFT, _TOP = 38, 34, 34, 150, 100
_FONT = "font-family='Helvetica, Arial, sans-serif'"


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One thing that happened on rank 0, in the order in which it did."""

    what: str
    """`forward`, `backward`, `all_gather` or `reduce_scatter`."""
    unit: str
    """`1` to `4` for the layers, `R` for what is left to the model itself."""
    row: str
    """`computation`, or the name of the communicator."""


class _Mark(torch.autograd.Function):
    """The identity, which notes when backward comes through it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: _Layer) -> Tensor:
        ctx.layer = layer
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        ctx.layer.note("backward")
        return gradients[0], None


class _Layer(nn.Module):
    """A unit of its own size, so that the bytes of a launch tell which unit they are of."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.up = nn.Linear(WIDTH, 4 * number, bias=False)
        self.down = nn.Linear(4 * number, WIDTH, bias=False)
        self.recorder: LaunchRecorder | None = None
        self.noted: list[tuple[int, Event]] = []

    def forward(self, x: Tensor) -> Tensor:
        """(rows, WIDTH) -> the same shape."""
        self.note("forward")
        mixed: Tensor = _Mark.apply(x + self.down(torch.tanh(self.up(x))), self)  # type: ignore[no-untyped-call]
        return mixed

    def note(self, what: str) -> None:
        """Remember that this happened after the launches recorded so far."""
        if self.recorder is not None:
            event = Event(what=what, unit=str(self.number), row=COMPUTE)
            self.noted.append((len(self.recorder.launches), event))


class _Net(nn.Module):
    """Layers, and a matrix that belongs to no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Layer(number) for number in range(1, NUM_LAYERS + 1))
        self.head = nn.Linear(WIDTH, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(rows, WIDTH) -> (rows, 2)."""
        for layer in self.layers:
            x = layer(x)
        scores: Tensor = self.head(x)
        return scores


def record() -> dict[str, list[Event]]:
    """Arm -> the events of its second forward and backward, on rank 0 of two."""
    return run_ranks(NUM_RANKS, _record).results[0]


def _record(context: RankContext) -> dict[str, list[Event]]:
    """One rank: both arms after each other."""
    found = {}
    for arm, names in COMMUNICATORS.items():
        layout = Layout(dp=context.num_ranks, name=arm)
        with ProcessGroups.create(layout, names=names) as groups:
            found[arm] = _record_step(groups)
    return found


def _record_step(groups: ProcessGroups) -> list[Event]:
    """The events of a second forward and backward; FSDP2 sets itself up in the first."""
    torch.manual_seed(0)
    net = _Net()
    layers = [cast("_Layer", layer) for layer in net.layers]
    names = {_nbytes(layer): str(layer.number) for layer in layers} | {_nbytes(net.head): "R"}
    sharded = fully_shard_model(net, groups, experts=(), units=layers)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    noted: list[tuple[int, Event]] = []
    for _ in range(2):
        with LaunchRecorder(groups) as recorder:
            for layer in layers:
                layer.recorder, layer.noted = recorder, noted
            noted.clear()
            with sharded.microbatch(is_last=True):
                net(torch.ones(4, WIDTH)).square().mean().backward()
        sharded.step(optimizer)
    events = []
    for number, launch in enumerate(recorder.launches):
        events += [event for place, event in noted if place == number]
        # A gather passes a shard and the whole; a reduction on the host is in place, and tells
        # in some bytes more which parameters were used.
        whole = launch.nbytes
        if launch.op == GATHER:
            whole = whole * NUM_RANKS // (NUM_RANKS + 1)
        unit = names[max(nbytes for nbytes in names if nbytes <= whole)]
        events.append(Event(what=launch.op, unit=unit, row=launch.purpose))
    return events + [event for place, event in noted if place == len(recorder.launches)]


def _nbytes(module: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())


def waits(events: Sequence[Event]) -> list[bool]:
    """Return the all-gathers launched on a communicator whose latest launch is a reduction."""
    latest: dict[str, str] = {}
    found = []
    for event in events:
        found.append(event.what == GATHER and latest.get(event.row) == REDUCE)
        latest[event.row] = event.what
    return found


def draw(traces: Mapping[str, Sequence[Event]]) -> str:
    """The picture of both arms, one above the other."""
    panels, top = [], _TOP
    for arm, events in traces.items():
        rows = list(dict.fromkeys([COMPUTE, *sorted({event.row for event in events} - {COMPUTE})]))
        panels.append(_draw_panel(arm, events, rows, top=top))
        top += _ROW * len(rows) + 58
    width = _LEFT + _SLOT * max(len(events) for events in traces.values()) + 16
    return "\n".join(
        [
            f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {top}' {_FONT} "
            "role='img' aria-label='Order of launches of a fully sharded model'>",
            f"<rect width='{width}' height='{top}' fill='#ffffff'/>",
            *_draw_legend(),
            *panels,
            _text(
                16,
                top - 14,
                "Order as recorded on rank 0, left to right; not time. 1 to 4: layers. "
                "R: the model's other parameters.",
                size=13,
                colour="#555555",
            ),
            "</svg>\n",
        ]
    )


def _draw_legend() -> list[str]:
    parts, x = [], 16
    for what, text in _LEGEND.items():
        parts.append(f"<rect x='{x}' y='16' width='18' height='18' fill='{_COLOURS[what]}'/>")
        parts.append(_text(x + 25, 30, text))
        x += 50 + 7 * len(text)
    parts.append(
        f"<rect x='17' y='45' width='16' height='16' fill='{_COLOURS[GATHER]}' stroke='#c0261c' "
        f"stroke-width='2.5'/>"
    )
    parts.append(
        _text(41, 58, "behind a reduction on the same communicator: runs only when that has ended")
    )
    return parts


def _draw_panel(arm: str, events: Sequence[Event], rows: Sequence[str], *, top: int) -> str:
    """One arm: a row for the computation and one for each communicator."""
    width = _SLOT * len(events)
    parts = [_text(16, top, arm.capitalize(), size=16, weight="bold")]
    for number, row in enumerate(rows):
        y = top + 14 + number * _ROW
        parts.append(
            f"<rect x='{_LEFT}' y='{y}' width='{width}' height='{_ROW - 4}' fill='#f4f5f7'/>"
        )
        parts.append(_text(16, y + 20, row))
    for slot, (event, has_to_wait) in enumerate(zip(events, waits(events), strict=True)):
        x, y = _LEFT + slot * _SLOT + 2, top + 16 + rows.index(event.row) * _ROW
        outline = "stroke='#c0261c' stroke-width='2.5'" if has_to_wait else "stroke='none'"
        parts.append(
            f"<rect x='{x}' y='{y}' width='{_BOX}' height='{_ROW - 8}' rx='3' "
            f"fill='{_COLOURS[event.what]}' {outline}/>"
        )
        parts.append(_text(x + _BOX // 2, y + 18, event.unit, anchor="middle"))
    return "\n".join(parts)


def _text(
    x: int,
    y: int,
    text: str,
    *,
    size: int = 14,
    weight: str = "normal",
    anchor: str = "start",
    colour: str = "#1b1f24",
) -> str:
    return (
        f"<text x='{x}' y='{y}' font-size='{size}' font-weight='{weight}' text-anchor='{anchor}' "
        f"fill='{colour}'>{text}</text>"
    )
