"""Draws the data flow between two modules as SVG, from the plan of their bridge.

    python -m tools.draw_modules docs/assets/modules.svg

Nothing is drawn that the plan does not have: a box is a rank of a module, an arrow a message (or,
dashed, a piece that stays on its rank), and its number the piece of the batch that travels.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from holdfast.bridge import BridgePlan
from holdfast.parallel import Layout, ModuleLayouts

FONT = "font-family='Helvetica, Arial, sans-serif'"
FORWARD, BACKWARD, INK, QUIET = "#2f6fb3", "#c9701a", "#22272e", "#6b7480"
FILLS = {"vision": "#dbeaf9", "language": "#fdebd3"}
BOX_W, BOX_H, GAP, PANEL_W, TOP, LEFT = 132, 40, 14, 450, 96, 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One placement of the two modules."""

    title: str
    layouts: ModuleLayouts


def panels() -> list[Panel]:
    """The placements that the page talks of."""
    edges = [("vision", "language")]
    return [
        Panel(
            title="On ranks of their own: two data ranks feed one",
            layouts=ModuleLayouts(
                {"vision": Layout(dp=2), "language": Layout(tp=2, ranks=(2, 3))}, edges=edges
            ),
        ),
        Panel(
            title="On the same ranks: four data ranks feed two",
            layouts=ModuleLayouts(
                {"vision": Layout(dp=4), "language": Layout(tp=2, dp=2)}, edges=edges
            ),
        ),
    ]


def draw(chosen: list[Panel]) -> str:
    """The whole picture."""
    tallest = max(len(p.layouts[m].ranks) for p in chosen for m in p.layouts)
    width = LEFT + len(chosen) * PANEL_W
    height = TOP + tallest * (BOX_H + GAP) + 46
    lines = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' role='img' "
        f"aria-label='Messages between a vision and a language module' {FONT} font-size='12'>",
        f"<rect width='{width}' height='{height}' fill='#ffffff'/>",
    ]
    for number, panel in enumerate(chosen):
        lines += _panel(panel, x=LEFT + number * PANEL_W)
    lines += _legend(height - 16)
    return "\n".join([*lines, "</svg>", ""])


def _panel(panel: Panel, *, x: int) -> list[str]:
    vision, language = panel.layouts["vision"], panel.layouts["language"]
    plan = BridgePlan(vision, language)
    right = x + PANEL_W - BOX_W - 36
    lines = [f"<text x='{x}' y='30' font-size='15' font-weight='600'>{panel.title}</text>"]
    places: dict[tuple[str, int], tuple[int, int]] = {}
    for name, layout, at in (("vision", vision, x), ("language", language, right)):
        lines.append(
            f"<text x='{at + BOX_W // 2}' y='{TOP - 20}' text-anchor='middle' fill='{QUIET}'>"
            f"{name} {_sizes(layout)}</text>"
        )
        offset = (max(len(vision.ranks), len(language.ranks)) - len(layout.ranks)) / 2
        for row, rank in enumerate(layout.ranks):
            y = round(TOP + (offset + row) * (BOX_H + GAP))
            places[name, rank] = (at, y)
            lines += _box(f"rank {rank}", _coordinates(layout, rank), FILLS[name], at, y)
    for message in plan.activations:
        lines.append(_arrow(places, "vision", "language", message.giver, message.taker, True))
    for message in plan.gradients:
        lines.append(_arrow(places, "language", "vision", message.giver, message.taker, False))
    return lines


def _box(title: str, below: str, fill: str, x: int, y: int) -> list[str]:
    middle = x + BOX_W // 2
    return [
        f"<rect x='{x}' y='{y}' width='{BOX_W}' height='{BOX_H}' rx='5' fill='{fill}' "
        f"stroke='{QUIET}' stroke-width='0.8'/>",
        f"<text x='{middle}' y='{y + 17}' text-anchor='middle' fill='{INK}'>{title}</text>",
        f"<text x='{middle}' y='{y + 32}' text-anchor='middle' fill='{QUIET}' "
        f"font-size='11'>{below}</text>",
    ]


def _arrow(
    places: dict[tuple[str, int], tuple[int, int]],
    giver_module: str,
    taker_module: str,
    giver: int,
    taker: int,
    is_forward: bool,
) -> str:
    """From the giver's box to the taker's; activations above the middle, gradients below."""
    (x1, y1), (x2, y2) = places[giver_module, giver], places[taker_module, taker]
    shift = 12 if is_forward else 28
    x1, x2 = (x1 + BOX_W, x2) if is_forward else (x1, x2 + BOX_W)
    colour = FORWARD if is_forward else BACKWARD
    dash = " stroke-dasharray='4 3'" if giver == taker else ""
    tip = 7 if is_forward else -7
    return (
        f"<g stroke='{colour}' fill='{colour}'><line x1='{x1}' y1='{y1 + shift}' x2='{x2 - tip}' "
        f"y2='{y2 + shift}' stroke-width='1.4'{dash}/><path d='M{x2} {y2 + shift} "
        f"l{-tip * 1.3:g} -4 v8 z' stroke='none'/></g>"
    )


def _sizes(layout: Layout) -> str:
    named = ((axis, getattr(layout, axis)) for axis in ("tp", "cp", "dp", "pp"))
    return " ".join(f"{axis}{size}" for axis, size in named if size > 1) or "1 rank"


def _coordinates(layout: Layout, rank: int) -> str:
    at = layout.coordinate(rank)
    return " ".join(f"{axis}={at[axis]}" for axis in ("dp", "tp") if getattr(layout, axis) > 1)


def _legend(y: int) -> list[str]:
    lines, x = [], LEFT
    for colour, dash, text in (
        (FORWARD, "", "activations, forward"),
        (BACKWARD, "", "gradients, backward"),
        (QUIET, "4 3", "stays on its rank: no message"),
    ):
        lines.append(
            f"<line x1='{x}' y1='{y - 4}' x2='{x + 30}' y2='{y - 4}' stroke='{colour}' "
            f"stroke-width='1.6' stroke-dasharray='{dash or 'none'}'/>"
            f"<text x='{x + 38}' y='{y}' fill='{INK}'>{text}</text>"
        )
        x += 60 + 7 * len(text)
    return lines


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(draw(panels()))
