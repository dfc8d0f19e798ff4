"""When each rank and its writer were in which phase of a save: lanes, and tables of the numbers."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.cli.page.html import Html, bullets, element, esc, paragraph
from holdfast.cli.page.rank_table import NUM_OUTLIERS, Outliers, RankColumn, rank_table
from holdfast.cli.page.run_events import RunEvent, RunLog
from holdfast.cli.support.messages import moment
from holdfast.errors import in_bytes
from holdfast.format.rank_events import SaveEvent

MAX_SAVES = 30
_MAX_DRAWN = 32
"""Ranks that are drawn of the newest save; of older ones and of more ranks the slowest are."""
_SUMS = ("total", "stall")
"""Sums of other phases: not drawn, but in the table."""
_OF_WRITER = ("write", "commit")
_WAITING = ("wait", "plan", "commit")
"""Phases that last until other ranks, or an earlier save, are ready."""
_ORDER = (
    "wait", "flatten", "plan", "lay out", "stage", "compare", "submit", "write", "commit", "retain",
)  # fmt: skip
_WIDTH, _LEFT, _RIGHT, _BAR, _GAP, _AXIS = 900, 72, 210, 16, 8, 22
_LONGEST_S = 1e9
"""What a log has beyond this is not a time of a save, and is drawn out of the picture."""
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
            "Each rank has two lanes, in real time from the first rank's call on: its own, what "
            "training waited for, and that of its writer, which writes while a synchronous save "
            "still stages, and writes and commits behind the training of an asynchronous one. "
            "Commits of ranks that do not commit are waits for the one that does. Ranks of other "
            "hosts start by their own clocks."
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
    return max(waited(rank) for rank in save.ranks)


def waited(rank: SaveEvent) -> float:
    """Return what one rank waited for a save."""
    return rank.phases.get("total", rank.phases.get("stall", sum(rank.phases.values())))


def work(rank: SaveEvent) -> dict[str, float]:
    """Return the phases in which a rank does not wait for others, each second once."""
    # A synchronous save stages and compares within its write.
    inner = ("stage", "compare") if "total" in rank.phases and "write" in rank.phases else ()
    skipped = {*_SUMS, *_WAITING, *inner}
    return {name: seconds for name, seconds in rank.phases.items() if name not in skipped}


def write_rate(rank: SaveEvent) -> str:
    """Return how fast the writer wrote: "1.2 GB in 0.5 s, 2.4 GB/s"; empty if it is not known."""
    seconds = rank.phases.get("write", 0.0)
    if not (rank.nbytes > 0 and seconds > 0):
        return ""
    rate = int(min(rank.nbytes / seconds, 1e18))
    return f"{in_bytes(rank.nbytes)} in {in_seconds(seconds)}, {in_bytes(rate)}/s"


def _save(save: RunEvent[SaveEvent], *, number: int) -> Html:
    """One save: a heading with what it took, the lanes, the tables."""
    kind = "asynchronous, ranks waited" if "stall" in save.ranks[0].phases else "took"
    began = moment(save.began) or "unknown"
    title = f"Step {save.step}, {began} UTC: {kind} {in_seconds(save_seconds(save))}"
    limit = _MAX_DRAWN if number == 0 else NUM_OUTLIERS
    slowest = _slowest(save.ranks)
    drawn, notes = save.ranks, []
    if len(drawn) > limit:
        drawn = [save.ranks[place] for place in slowest.places]
        notes.append(f"Drawn are the {len(drawn)} of {len(save.ranks):,} ranks {slowest.words}.")
    num_old = sum(not _has_starts(rank) for rank in save.ranks)
    if num_old:
        notes.append(
            f"The lines of {num_old:,} of {len(save.ranks):,} ranks do not say when their phases "
            "started, as those of an older Holdfast: their bars are end to end in one lane, "
            "although phases overlap, and can be longer than the save took."
        )
    content = [_lanes(save, drawn, number=number), bullets(notes), _numbers(save, number=number)]
    return element(
        "details", element("summary", esc(title)), *content, open="" if number == 0 else None
    )


def _slowest(ranks: Sequence[SaveEvent]) -> Outliers:
    return Outliers(
        words="that worked longest", weights=[sum(work(rank).values()) for rank in ranks]
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


def _has_starts(rank: SaveEvent) -> bool:
    """Return whether the log says when each phase of a rank started."""
    return all(name in rank.starts for name in rank.phases if name not in _SUMS)


def _spans(rank: SaveEvent) -> list[tuple[str, float, float, bool]]:
    """(phase, start after the call, seconds, whether it is the writer's) of what is drawn."""
    phases = [name for name in _phases([rank]) if name not in _SUMS]
    if _has_starts(rank):
        return [(p, rank.starts[p], rank.phases[p], p in _OF_WRITER) for p in phases]
    spans, start = [], 0.0
    for name in phases:
        spans.append((name, start, rank.phases[name], False))
        start += rank.phases[name]
    return spans


def _lanes(save: RunEvent[SaveEvent], ranks: Sequence[SaveEvent], *, number: int) -> Html:
    """A drawing: two lanes per rank, a legend below it."""
    ends = [
        rank.began - save.began + max([waited(rank), *(at + length for _, at, length, _ in spans)])
        for rank in ranks
        for spans in [_spans(rank)]
    ]
    longest = min(max([*ends, 1e-9]), _LONGEST_S)
    scale = (_WIDTH - _LEFT - _RIGHT) / longest
    tops = [0]
    for rank in ranks:
        tops.append(tops[-1] + _BAR * (2 if _has_starts(rank) else 1) + _GAP)
    height = tops[-1] + _AXIS
    lines = [_axis(longest, scale, height)]
    for rank, top in zip(ranks, tops, strict=False):
        lines += _lanes_of(rank, _LEFT + (rank.began - save.began) * scale, top + 4, scale)
    worst = max(ranks, key=lambda rank: sum(work(rank).values()))
    label = (
        f"Phases of the save of step {save.step} on {len(ranks)} ranks in real time; rank "
        f"{worst.rank} worked longest, {in_seconds(sum(work(worst).values()))}. The table below "
        "has all numbers."
    )
    drawing = element(
        "svg", *lines, viewBox=f"0 0 {_WIDTH} {height}", role="img", aria_label=label,
        class_="timeline",
    )  # fmt: skip
    keys = [
        element("li", element("span", class_=f"swatch p-{_slug(name)}"), esc(name))
        for name in _phases(ranks)
        if name not in _SUMS
    ]
    legend = element("ul", *keys, class_="legend", aria_label="Phases")
    return Html(
        element("div", drawing, class_="scroll", role="region", tabindex="0",
                aria_label=f"Lanes of save {number + 1}")
        + legend
    )  # fmt: skip


def _lanes_of(rank: SaveEvent, left: float, top: int, scale: float) -> list[Html]:
    """The lanes of one rank, and behind them what it waited and how fast its writer wrote."""
    spans = _spans(rank)
    parts = [_text(_LEFT - 8, top + 12, f"rank {rank.rank}", class_="end")]
    for name, start, seconds, is_writer in spans:
        if seconds * scale >= 0.3:
            y = top + _BAR * is_writer
            parts.append(_bar(left + start * scale, y, seconds * scale, name, seconds))
    word = "waited " if _has_starts(rank) or "stall" in rank.phases else ""
    own = [start + seconds for _, start, seconds, is_writer in spans if not is_writer]
    end = waited(rank) if _has_starts(rank) else max([*own, 0.0])
    parts.append(
        _text(left + end * scale + 6, top + 12, word + in_seconds(waited(rank)), class_="start")
    )
    written = [start + seconds for _, start, seconds, is_writer in spans if is_writer]
    if written:
        parts.append(_text(_LEFT - 8, top + _BAR + 12, "writer", class_="end muted"))
        parts.append(
            _text(left + max(written) * scale + 6, top + _BAR + 12, write_rate(rank),
                  class_="start")
        )  # fmt: skip
    return parts


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
        parts.append(_text(x + 5, y + 12, name, class_="start in"))
    return Html("".join(parts))


def _text(x: float, y: float, text: str, *, class_: str) -> Html:
    return element("text", esc(text), x=f"{x:.1f}", y=f"{y:.1f}", class_=class_)


def _slug(name: str) -> str:
    """The class of a phase; all unknown ones share one."""
    return name.replace(" ", "-") if name in _ORDER else "other"


def _numbers(save: RunEvent[SaveEvent], *, number: int) -> Html:
    """The tables of the same numbers; of many ranks all are in those of the newest save alone."""
    columns = [
        RankColumn(heading=name, values=[rank.phases.get(name) for rank in save.ranks],
                   in_words=in_seconds)
        for name in _phases(save.ranks)
    ]  # fmt: skip
    rates = [rank.nbytes / rank.phases["write"] if write_rate(rank) else None
             for rank in save.ranks]  # fmt: skip
    if any(rates):
        columns.append(
            RankColumn(heading="written per second", values=rates,
                       in_words=lambda rate: f"{in_bytes(int(min(rate, 1e18)))}/s")
        )  # fmt: skip
    return element(
        "details",
        element("summary", esc("Numbers")),
        rank_table(
            f"Time of each rank in each phase of the save of step {save.step}",
            [rank.rank for rank in save.ranks], columns, id_=f"save-{number}",
            outliers=_slowest(save.ranks), has_all=number == 0,
        ),
        class_="inner",
    )  # fmt: skip
