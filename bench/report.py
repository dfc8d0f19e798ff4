"""The run for people: a table, a picture, and the change since a baseline."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from bench.results import BenchResults, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK = "#22303c"
FAINT = "#8795a1"
HOLDFAST = "#0b6fb8"
DCP = "#e08e0b"
MISSED = "#d1495b"
_NOTICED = 1.10
STYLE: Any = {
    "font.size": 10.5,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    "axes.titlecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "text.color": INK,
    "legend.frameon": False,
}


def read_baseline(path: Path) -> dict[str, float]:
    """The results of an earlier run: key -> ratio to the floor, or the value without one."""
    rows = json.loads(path.read_text())["rows"]
    return {
        f"{row['case']}: {row['name']}": float(
            row["holdfast"] if row["to_floor"] is None else row["to_floor"]
        )
        for row in rows
    }


def print_table(results: BenchResults, console: Console, *, baseline: dict[str, float]) -> None:
    """One line for each quantity: values, ratios, target, and the change since the baseline."""
    table = Table(title="Medians; lower is better", title_justify="left", header_style="bold")
    table.add_column("case", no_wrap=True)
    table.add_column("quantity")
    for name in ("unit", "floor", "Holdfast", "DCP", "x floor", "x DCP"):
        table.add_column(name, justify="right")
    table.add_column("bars")
    if baseline:
        table.add_column("change", justify="right")
    case = ""
    for row in results.rows:
        cells = [
            row.case if row.case != case else "",
            row.name,
            row.unit,
            number(row.floor),
            number(row.holdfast),
            number(row.dcp),
            number(row.to_floor),
            number(row.to_dcp),
            targets_text(row),
        ]
        if baseline:
            cells.append(change_text(row, baseline))
        if row.case != case and case:
            table.add_section()
        table.add_row(*cells)
        case = row.case
    console.print(table)


def number(value: float | None) -> str:
    """Three figures, without exponents."""
    if value is None:
        return ""
    if value == round(value) and abs(value) < 1e6:
        return f"{value:.0f}"
    for bound, digits in ((100, 0), (10, 1), (1, 2), (0.1, 3)):
        if abs(value) >= bound:
            return f"{value:.{digits}f}"
    return f"{value:.4f}"


def targets_text(row: Row) -> str:
    """The bars, each with whether it is met, in the markup of rich."""
    texts = []
    for target in row.targets:
        behind = {"floor": "x floor", "dcp": "x DCP", "value": row.unit}[target.against]
        colour, verdict = ("green", "met") if row.meets(target) else ("red", "missed")
        texts.append(f"[{colour}]≤ {number(target.bound)} {behind}".rstrip() + f", {verdict}[/]")
    return "; ".join(texts)


def change_text(row: Row, baseline: dict[str, float]) -> str:
    """Return how the tracked value moved."""
    before = baseline.get(row.key)
    if before is None:
        return "new"
    if before == 0:
        return "=" if row.tracked == 0 else f"0 → {number(row.tracked)}"
    ratio = row.tracked / before
    colour = "red" if ratio > _NOTICED else "green" if ratio < 1 / _NOTICED else "dim"
    return f"[{colour}]{ratio - 1:+.0%}[/]"


def print_phases(results: BenchResults, console: Console) -> None:
    """Return where Holdfast's time goes, on the slowest rank of each phase."""
    table = Table(title="Holdfast by phase, ms", title_justify="left", header_style="bold")
    table.add_column("case")
    table.add_column("phases")
    for case, phases in results.phases.items():
        text = ", ".join(f"{name} {number(s * 1e3)}" for name, s in phases.items() if s > 5e-5)
        table.add_row(case, text)
    console.print(table)


def draw(results: BenchResults, path: Path) -> None:
    """Three panels: ratios to the floor, cost of a tiny tensor, planning at scale."""
    import matplotlib as mpl  # takes a second, which nothing else here needs

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    height = max(8, 0.5 * len(_with_ratios(results)))
    with mpl.rc_context(STYLE):
        figure, axes = plt.subplot_mosaic(
            [["ratios", "scale"], ["ratios", "tiny"]], figsize=(13, height), dpi=120,
            layout="constrained", width_ratios=(1.35, 1),
        )  # fmt: skip
        _draw_ratios(axes["ratios"], results)
        _draw_scale(axes["scale"], results)
        _draw_tiny(axes["tiny"], results)
        figure.suptitle(
            "Holdfast and PyTorch DCP against the physical floor", x=0.012, ha="left",
            fontsize=15, fontweight="bold",
        )  # fmt: skip
        figure.savefig(path)
        plt.close(figure)


def _with_ratios(results: BenchResults) -> list[Row]:
    """The times that have a floor and a DCP arm."""
    return [row for row in results.rows if row.floor and row.dcp and row.unit == "ms"]


def _draw_ratios(axes: Axes, results: BenchResults) -> None:
    """Bars of times as multiples of the floor."""
    shown = _with_ratios(results)[::-1]
    axes.set_title("Time as a multiple of the floor")
    if not shown:
        axes.text(0.5, 0.5, "not measured", ha="center", transform=axes.transAxes, color=FAINT)
        return
    for place, row in enumerate(shown):
        floor = row.floor or 1.0
        for shift, value, colour in (
            (0.19, row.holdfast, HOLDFAST),
            (-0.19, row.dcp or 0.0, DCP),
        ):
            axes.barh(place + shift, value / floor, height=0.36, color=colour)
            text = f"{number(value / floor)}x   {number(value)} ms"
            axes.text(value / floor * 1.04, place + shift, text, va="center", fontsize=9)
        for target in row.targets:
            if target.against == "floor":
                axes.plot([target.bound] * 2, [place + 0.02, place + 0.40], color=MISSED, lw=2)
    axes.axvline(1, color=INK, lw=1)
    axes.set_xscale("log")
    top = max(max(row.holdfast, row.dcp or 0) / (row.floor or 1) for row in shown)
    low = min(0.8, *(row.holdfast / (row.floor or 1) * 0.9 for row in shown))
    axes.set_xlim(low, top * 4)
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}x")
    axes.set_yticks(range(len(shown)), [f"{row.case}\n{row.name}" for row in shown])
    axes.set_xlabel("times the floor (log); black: the floor, red: Holdfast's bar")
    for label, colour in (("Holdfast", HOLDFAST), ("PyTorch DCP, its best way", DCP)):
        axes.bar(1, 0, color=colour, label=label)
    axes.set_ylim(-0.6, len(shown) - 0.1)
    axes.legend(loc="upper right", ncols=2, fontsize=9)


def _draw_scale(axes: Axes, results: BenchResults) -> None:
    """Curves over the number of simulated ranks."""
    points = results.curves.get("scale", [])
    axes.set_title("First plan and index by simulated ranks")
    for name, label, colour, style in (
        ("plan", "Holdfast: plan", HOLDFAST, "o-"),
        ("prove", "Holdfast: prove the index", HOLDFAST, "s:"),
        ("open", "Holdfast: open the index", HOLDFAST, "^--"),
        ("dcp plan", "DCP: global plan", DCP, "o-"),
        ("dcp open", "DCP: unpickle metadata", DCP, "^--"),
    ):
        having = [point for point in points if name in point]
        if having:
            ranks = [point["ranks"] for point in having]
            axes.plot(ranks, [p[name] for p in having], style, color=colour, label=label, ms=5)
    if not points:
        axes.text(0.5, 0.5, "not measured", ha="center", transform=axes.transAxes, color=FAINT)
        return
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
    axes.yaxis.set_major_formatter(lambda x, _: f"{x:g}")
    axes.set_xlabel("ranks")
    axes.set_ylabel("seconds")
    axes.grid(True, color="#e6ebef", lw=0.7)
    low, high = axes.get_ylim()
    axes.set_ylim(low, high * 20)
    axes.legend(fontsize=9, loc="upper left", ncols=2)


def _draw_tiny(axes: Axes, results: BenchResults) -> None:
    """Bars of the cost of one tiny tensor."""
    rows = [row for row in results.rows if row.case == "tiny tensors" and row.unit == "µs"]
    axes.set_title("A tiny tensor, µs")
    if not rows:
        axes.text(0.5, 0.5, "not measured", ha="center", transform=axes.transAxes, color=FAINT)
        return
    for place, row in enumerate(rows):
        for shift, value, colour in ((-0.2, row.holdfast, HOLDFAST), (0.2, row.dcp, DCP)):
            if value is not None:
                axes.bar(place + shift, value, width=0.38, color=colour)
                axes.text(place + shift, value * 1.08, number(value), ha="center", fontsize=9)
    axes.axhline(20, color=MISSED, lw=1.5)
    axes.set_yscale("log")
    axes.set_ylim(1, max(row.dcp or row.holdfast for row in rows) * 4)
    axes.yaxis.set_major_formatter(lambda x, _: f"{x:g}")
    axes.set_xticks(range(len(rows)), [row.name.removesuffix(", a tensor") for row in rows])
    axes.set_ylabel("µs a tensor (log); red: target")
