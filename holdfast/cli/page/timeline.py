"""How long each rank spent in each phase of a save, as bars and as a table of the same numbers."""

from __future__ import annotations

import time
from collections.abc import Sequence

from holdfast.cli.page.html import Column, Html, bullets, element, esc, paragraph, table
from holdfast.cli.page.run_events import RunEvent, RunLog
from holdfast.format.rank_events import SaveEvent

MAX_SAVES = 30
_MAX_RANKS = 64
_SUMS = ("total", "stall")
"""Sums of other phases: not drawn, but in the table."""
_ORDER = (
    "wait", "flatten", "plan", "lay out", "stage", "compare", "submit", "write", "commit", "retain",
)  # fmt: skip
_WIDTH, _LEFT, _RIGHT, _BAR, _GAP, _AXIS = 900, 64, 96, 18, 6, 22
_MIN_LABEL = 52
"""Width of a bar that has room for the name of its phase."""


def timeline_section(log: RunLog) -> Html:
    """All saves that the run logged, the newest open; how to get a log if there is none."""
    if not log.saves:
        return paragraph(
            "No log of saves is here. holdfast.RankLog writes one next to the checkpoints "
            "(events/, one file per rank), in `holdfast train` and in a loop of your own."
        )
    saves = log.saves[::-1][:MAX_SAVES]
    parts = [
        paragraph(
            "Bars begin when a rank called for the save and show its phases in order, end to end. "
            "Phases may overlap (what is staged is written at the same time), so that bars can be "
            "longer than the save took. The time behind a bar is what the rank waited: all of a "
            "synchronous save, the stall of an asynchronous one, whose writer writes and commits."
        )
    ]
    parts += [_save(save, number=i) for i, save in enumerate(saves)]
    if len(saves) < len(log.saves):
        parts.append(paragraph(f"The newest {len(saves)} of {len(log.saves):,} saves are shown."))
    if log.num_unreadable:
        parts.append(paragraph(f"{log.num_unreadable:,} lines of the log cannot be read."))
    return Html("".join(parts))


def save_seconds(save: RunEvent[SaveEvent]) -> float:
    """Return what the slowest rank waited for a save: all of a synchronous one, else the stall."""
    return max(_waited(rank) for rank in save.ranks)


def _waited(rank: SaveEvent) -> float:
    return rank.phases.get("total", rank.phases.get("stall", sum(rank.phases.values())))


def _save(save: RunEvent[SaveEvent], *, number: int) -> Html:
    """One save: a heading with what it took, the bars, the table."""
    ranks = save.ranks[:_MAX_RANKS]
    kind = "asynchronous, ranks waited" if "stall" in ranks[0].phases else "took"
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(save.began))
    title = f"Step {save.step}, {when} UTC: {kind} {in_seconds(save_seconds(save))}"
    content = [_bars(save, ranks, number=number), _numbers(save, ranks, number=number)]
    if len(ranks) < len(save.ranks):
        content.append(bullets([f"The first {len(ranks)} of {len(save.ranks):,} ranks are shown."]))
    return element(
        "details", element("summary", esc(title)), *content, open="" if number == 0 else None
    )


def in_seconds(seconds: float) -> str:
    """A time for people: "12.3 ms", "1.23 s"."""
    if seconds < 1e-3:
        return f"{1e6 * seconds:.0f} µs"
    return f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def _phases(ranks: Sequence[SaveEvent]) -> list[str]:
    """Phases that any rank has, in their order; sums last."""
    names = {name for rank in ranks for name in rank.phases}
    known = [name for name in _ORDER if name in names]
    return known + sorted(names - set(_ORDER) - set(_SUMS)) + [n for n in _SUMS if n in names]


def _bars(save: RunEvent[SaveEvent], ranks: Sequence[SaveEvent], *, number: int) -> Html:
    """A drawing: one line per rank, a legend below it."""
    phases = [name for name in _phases(ranks) if name not in _SUMS]
    ends = [r.began - save.began + sum(r.phases.get(p, 0.0) for p in phases) for r in ranks]
    longest = max([*ends, 1e-9])
    scale = (_WIDTH - _LEFT - _RIGHT) / longest
    height = len(ranks) * (_BAR + _GAP) + _AXIS
    lines = [_axis(longest, scale, height)]
    for line, rank in enumerate(ranks):
        y = line * (_BAR + _GAP) + _GAP // 2
        lines.append(_text(_LEFT - 8, y + 13, f"rank {rank.rank}", class_="end"))
        x = _LEFT + (rank.began - save.began) * scale
        for name in phases:
            width = rank.phases.get(name, 0.0) * scale
            if width >= 0.3:
                lines.append(_bar(x, y, width, name, rank.phases[name]))
            x += width
        word = "stall " if "stall" in rank.phases else ""
        lines.append(_text(x + 6, y + 13, word + in_seconds(_waited(rank)), class_="start"))
    slowest = max(ranks, key=_waited)
    label = (
        f"Phases of the save of step {save.step} on {len(ranks)} ranks; the slowest is rank "
        f"{slowest.rank} with {in_seconds(_waited(slowest))}. The table below has all numbers."
    )
    drawing = element(
        "svg", *lines, viewBox=f"0 0 {_WIDTH} {height}", role="img", aria_label=label,
        class_="timeline",
    )  # fmt: skip
    keys = [
        element("li", element("span", class_=f"swatch p-{_slug(name)}"), esc(name))
        for name in phases
    ]
    legend = element("ul", *keys, class_="legend", aria_label="Phases")
    return Html(
        element("div", drawing, class_="scroll", role="region", tabindex="0",
                aria_label=f"Bars of save {number + 1}")
        + legend
    )  # fmt: skip


def _axis(longest: float, scale: float, height: int) -> Html:
    """Lines at round times, and their labels."""
    step = 10.0**-9
    while longest / step > 6:
        step *= 2 if f"{step:e}"[0] in "15" else 2.5
    parts = []
    tick = 0.0
    while tick <= longest:
        x = f"{_LEFT + tick * scale:.1f}"
        parts.append(element("line", x1=x, x2=x, y1="0", y2=f"{height - 18}", class_="grid"))
        parts.append(_text(float(x), height - 5, in_seconds(tick) if tick else "0", class_="mid"))
        tick += step
    return Html("".join(parts))


def _bar(x: float, y: float, width: float, name: str, seconds: float) -> Html:
    """A phase of one rank, with its name if there is room."""
    parts = [
        element(
            "rect", element("title", esc(f"{name}: {in_seconds(seconds)}")), x=f"{x:.2f}",
            y=f"{y}", width=f"{width:.2f}", height=f"{_BAR}", class_=f"p-{_slug(name)}",
        )
    ]  # fmt: skip
    if width >= _MIN_LABEL:
        parts.append(_text(x + 5, y + 13, name, class_="start in"))
    return Html("".join(parts))


def _text(x: float, y: float, text: str, *, class_: str) -> Html:
    return element("text", esc(text), x=f"{x:.1f}", y=f"{y:.1f}", class_=class_)


def _slug(name: str) -> str:
    """The class of a phase; all unknown ones share one."""
    return name.replace(" ", "-") if name in _ORDER else "other"


def _numbers(save: RunEvent[SaveEvent], ranks: Sequence[SaveEvent], *, number: int) -> Html:
    """The table of the same numbers."""
    phases = _phases(ranks)
    columns = [Column(heading="Rank"), *(Column(heading=p, is_number=True) for p in phases)]
    rows = [
        [esc(rank.rank), *(esc(in_seconds(rank.phases[p]) if p in rank.phases else "-")
                           for p in phases)]
        for rank in ranks
    ]  # fmt: skip
    caption = f"Time of each rank in each phase of the save of step {save.step}"
    return element(
        "details",
        element("summary", esc("Numbers")),
        table(caption, columns, rows, id_=f"save-{number}"),
        class_="inner",
    )
