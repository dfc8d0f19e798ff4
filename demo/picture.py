"""The picture: loss curves with the kill and the resumes, their differences, and who wrote what."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import MultipleLocator

from demo.modules import (
    MODULE_KILLED,
    MODULE_MOVED,
    MODULE_REFERENCE,
    MODULE_RESUME_STEP,
    MODULE_STEPS,
    ModuleResults,
)
from demo.plan import (
    KILL_RANK,
    KILLED,
    LOSS_BOUND,
    NUM_STEPS,
    REFERENCE,
    RESHARDED,
    RESUME_STEP,
    SAVE_INTERVAL,
)
from demo.results import KINDS, Results, Writer

INK = "#22303c"
FAINT = "#8795a1"
RED = "#d1495b"
COLOURS = {
    REFERENCE.name: "#cdd6dd",
    KILLED.name: "#0b6fb8",
    RESHARDED[0].name: "#e08e0b",
    RESHARDED[1].name: "#0a8f6a",
    RESHARDED[2].name: "#7b4fb5",
}
KIND_COLOURS = dict(zip(KINDS, ("#0b6fb8", "#7fb5dd", "#c3dcef", "#d9d9d9"), strict=True))
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


def draw(results: Results, *, modules: ModuleResults, out: Path) -> Path:
    """Draw into `out/demo.png`; returns its path."""
    with mpl.rc_context(STYLE):
        figure = plt.figure(figsize=(13, 13), dpi=120, layout="constrained")
        grid = figure.add_gridspec(3, 2, height_ratios=(1.25, 1, 0.8), width_ratios=(1, 1.15))
        _draw_losses(figure.add_subplot(grid[0, :]), results)
        _draw_differences(figure.add_subplot(grid[1, 0]), results)
        _draw_writers(figure.add_subplot(grid[1, 1]), results)
        _draw_modules(figure.add_subplot(grid[2, :]), modules)
        figure.suptitle(
            "One worker killed, the run resumed under the same and under three other layouts",
            x=0.012,
            ha="left",
            fontsize=15,
            fontweight="bold",
        )
        path = out / "demo.png"
        figure.savefig(path)
        plt.close(figure)
    return path


def _draw_losses(axes: Axes, results: Results) -> None:
    """The loss of every run by step."""
    reference = results.curves[REFERENCE.name].losses
    axes.plot(
        list(reference),
        list(reference.values()),
        color=COLOURS[REFERENCE.name],
        linewidth=9,
        solid_capstyle="round",
        label=f"{REFERENCE.layout}, {REFERENCE.title}",
    )
    killed = results.curves[KILLED.name]
    axes.plot(
        list(killed.losses),
        list(killed.losses.values()),
        color=COLOURS[KILLED.name],
        linewidth=2.6,
        label=f"{KILLED.layout}, {KILLED.title}",
    )
    for scenario, dashes in zip(
        RESHARDED, ((0, (1, 2.2)), (0, (4, 3)), (0, (2, 1.4))), strict=True
    ):
        losses = results.curves[scenario.name].losses
        axes.plot(
            list(losses),
            list(losses.values()),
            color=COLOURS[scenario.name],
            linewidth=2.6,
            linestyle=dashes,
            label=f"{scenario.layout}, resumed at step {RESUME_STEP}",
        )
    _mark_events(axes, results)
    axes.set(xlabel="step", ylabel="loss (nats per byte)", xlim=(0, NUM_STEPS + 1))
    axes.set_ylim(bottom=min(reference.values()) - 0.75)
    axes.set_title("Loss: the runs lie on each other")
    axes.xaxis.set_major_locator(MultipleLocator(10))
    axes.grid(axis="y", color="#e8ecef", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.legend(loc="upper right", handlelength=3.2)


def _mark_events(axes: Axes, results: Results) -> None:
    """The saves, the kill with the steps it lost, and the resumes."""
    killed = results.curves[KILLED.name]
    for step in range(SAVE_INTERVAL, NUM_STEPS + 1, SAVE_INTERVAL):
        axes.axvline(step, color="#dfe5ea", linewidth=1, zorder=0)
    axes.annotate(
        "checkpoints",
        (SAVE_INTERVAL, 1.0),
        xycoords=("data", "axes fraction"),
        xytext=(4, -12),
        textcoords="offset points",
        color=FAINT,
    )
    if not killed.lost:
        return
    last = max(killed.lost)
    axes.axvspan(RESUME_STEP, last, color=RED, alpha=0.07, zorder=0)
    axes.plot(last, killed.lost[last], "X", color=RED, markersize=13, zorder=6)
    axes.annotate(
        f"rank {KILL_RANK} killed at step {last}:\nsteps {RESUME_STEP + 1} to {last} lost",
        (last, killed.lost[last]),
        xytext=(26, 52),
        textcoords="offset points",
        color=RED,
        fontweight="bold",
        arrowprops={"arrowstyle": "-", "color": RED},
    )
    at = results.curves[REFERENCE.name].losses[RESUME_STEP]
    axes.plot(RESUME_STEP, at, "^", color=COLOURS[KILLED.name], markersize=12, zorder=6)
    axes.annotate(
        f"resumed from step {RESUME_STEP}\nunder four layouts",
        (RESUME_STEP, at),
        xytext=(-24, -50),
        textcoords="offset points",
        ha="right",
        color=COLOURS[KILLED.name],
        fontweight="bold",
        arrowprops={"arrowstyle": "-", "color": COLOURS[KILLED.name]},
    )


def _draw_differences(axes: Axes, results: Results) -> None:
    """Return how far each resumed run is from the one that was not interrupted."""
    reference = results.curves[REFERENCE.name].losses
    steps = [step for step in reference if step > RESUME_STEP]
    floor = 1e-9
    for scenario in (KILLED, *RESHARDED):
        losses = results.curves[scenario.name].losses
        gaps = [abs(losses[step] - reference[step]) for step in steps]
        is_zero = not any(gaps)
        label = f"{scenario.layout}: " + ("exactly 0" if is_zero else f"at most {max(gaps):.0e}")
        axes.plot(
            steps,
            [max(gap, floor) for gap in gaps],
            color=COLOURS[scenario.name],
            linewidth=2,
            marker="o",
            markersize=3,
            label=label,
        )
    axes.axhline(LOSS_BOUND, color=RED, linewidth=1.2, linestyle=(0, (5, 3)))
    axes.annotate(
        f"bound {LOSS_BOUND:g}",
        (steps[0], LOSS_BOUND),
        xytext=(0, 5),
        textcoords="offset points",
        color=RED,
    )
    axes.set_yscale("log")
    axes.set_ylim(floor / 2, 1e-2)
    ticks = [floor, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2]
    axes.set_yticks(ticks, ["0", "1e-8", "1e-7", "1e-6", "1e-5", "1e-4", "1e-3", "1e-2"])
    axes.minorticks_off()
    axes.set(xlabel="step", ylabel="distance from the uninterrupted run")
    axes.set_title("How far losses are after the resume")
    axes.grid(axis="y", color="#e8ecef", linewidth=0.8)
    axes.legend(loc="upper right", fontsize=9.5)


def _draw_writers(axes: Axes, results: Results) -> None:
    """Bytes per rank and kind in the last checkpoint of each layout."""
    labels: list[str] = []
    places: list[float] = []
    place = 0.0
    for scenario in (REFERENCE, *RESHARDED):
        axes.text(0, place, scenario.layout, fontweight="bold", fontsize=10, va="center")
        for writer in results.writers[scenario.name]:
            place += 1
            left = 0.0
            for kind in KINDS:
                width = writer.nbytes[kind] / 1e6
                axes.barh(
                    place, width, left=left, height=0.78, color=KIND_COLOURS[kind], label=kind
                )
                left += width
            where = "  ".join(f"{axis}{writer.coordinate[axis]}" for axis in scenario.axes)
            labels.append(f"rank {writer.rank}  ({where})")
            places.append(place)
        place += 1.35
    axes.set_ylim(place - 0.7, -0.6)
    axes.set_yticks(places, labels, fontsize=9)
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("MB written to the checkpoint of the last step")
    axes.set_title("Which rank wrote what: every byte once, shared evenly")
    handles, names = axes.get_legend_handles_labels()
    unique = dict(zip(names, handles, strict=True))
    shown = [kind for kind in KINDS if any(w.nbytes[kind] >= 5e4 for w in _all_writers(results))]
    axes.legend(
        [unique[kind] for kind in shown],
        shown,
        ncols=len(shown),
        loc="upper center",
        bbox_to_anchor=(0.5, -0.16),
        fontsize=9.5,
    )


def _draw_modules(axes: Axes, modules: ModuleResults) -> None:
    """The losses of a model of several modules, before and after its encoder moved."""
    for scenario, colour, width, style in (
        (MODULE_REFERENCE, COLOURS[REFERENCE.name], 7.0, "solid"),
        (MODULE_KILLED, COLOURS[KILLED.name], 2.2, "solid"),
        (MODULE_MOVED, COLOURS[RESHARDED[0].name], 2.2, "solid"),
    ):
        losses = modules.curves[scenario.name].losses
        share = modules.accuracy.get(scenario.name)
        ending = "" if share is None else f": {share:.1%} of held-out digits named rightly"
        axes.plot(
            list(losses),
            list(losses.values()),
            color=colour,
            linewidth=width,
            linestyle=style,
            label=f"{scenario.title}, {scenario.layout}{ending}",
        )
    last = max(modules.curves[MODULE_KILLED.name].losses)
    at = modules.curves[MODULE_KILLED.name].losses[last]
    axes.plot(last, at, "X", color=RED, markersize=12, zorder=6)
    axes.axvspan(MODULE_RESUME_STEP, last, color=RED, alpha=0.07, zorder=0)
    axes.set_yscale("log")
    axes.set(xlabel="step", ylabel="loss (nats per token)", xlim=(0, MODULE_STEPS + 1))
    axes.set_title("Several modules: the encoder moved to other ranks, under another layout")
    axes.grid(axis="y", color="#e8ecef", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.legend(loc="upper right", fontsize=9.5)


def _all_writers(results: Results) -> list[Writer]:
    return [writer for writers in results.writers.values() for writer in writers]
