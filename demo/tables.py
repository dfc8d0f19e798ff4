"""The results as tables on the terminal."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.table import Table

from demo.modules import (
    MODULE_RESUME_STEP,
    MODULE_SCENARIOS,
    MODULE_STEPS,
    ModuleResults,
)
from demo.plan import KILLED, NUM_STEPS, REFERENCE, RESUME_STEP, SCENARIOS
from demo.results import Curve, Results, largest_difference
from holdfast_trainer.train.metrics import readable_nbytes

SHOWN_STEPS = (1, 10, 20, 30, 31, 32, 35, 40, 50, 60)
SHOWN_MODULE_STEPS = (1, 30, 60, 61, 62, 70, 90, 120)


def print_report(results: Results, *, modules: ModuleResults, console: Console) -> None:
    """Losses, saves and loads, checks."""
    console.print()
    console.print(loss_table(results))
    console.print(module_table(modules))
    console.print(traffic_table(results))
    console.print(check_table(results))
    verdict = (
        "[green bold]All checks held.[/]" if results.is_good else "[red bold]CHECKS FAILED.[/]"
    )
    console.print(
        f"{verdict} {results.num_parameters:,} parameters, "
        f"{len(SCENARIOS) + len(MODULE_SCENARIOS)} runs in "
        f"{results.seconds:.0f} s.\n"
    )


def loss_table(results: Results) -> Table:
    """Losses at selected steps, one column per run."""
    table = Table(title="Loss per step (nats per byte)", title_justify="left")
    table.add_column("step", justify="right")
    for scenario in SCENARIOS:
        table.add_column(f"{scenario.title}\n{scenario.layout}", justify="right")
    for row in loss_rows(results):
        table.add_row(*row, end_section=row[0] in (str(RESUME_STEP), str(NUM_STEPS)))
    return table


def loss_rows(results: Results) -> Iterator[list[str]]:
    """The rows of the loss table; the last holds the largest differences after the resume."""
    curves = [results.curves[item.name] for item in SCENARIOS]
    for step in SHOWN_STEPS:
        yield [str(step), *(_loss(curve, step) for curve in curves)]
    reference = results.curves[REFERENCE.name]
    yield [
        "largest Δ",
        "",
        *(_difference(largest_difference(curve, reference)) for curve in curves[1:]),
    ]


def module_table(modules: ModuleResults) -> Table:
    """Losses at selected steps and the accuracy at the end, of the runs of several modules."""
    table = Table(title="Several modules: loss per step (nats per token)", title_justify="left")
    table.add_column("step", justify="right")
    for scenario in MODULE_SCENARIOS:
        table.add_column(f"{scenario.title}\n{scenario.layout}", justify="right")
    for row in module_rows(modules):
        table.add_row(*row, end_section=row[0] in (str(MODULE_RESUME_STEP), str(MODULE_STEPS)))
    return table


def module_rows(modules: ModuleResults) -> Iterator[list[str]]:
    """The rows of the table of modules; the last holds the accuracy on held-out images."""
    for step in SHOWN_MODULE_STEPS:
        losses = (modules.curves[item.name].losses.get(step) for item in MODULE_SCENARIOS)
        yield [str(step), *("" if loss is None else f"{loss:.6f}" for loss in losses)]
    shares = (modules.accuracy.get(item.name) for item in MODULE_SCENARIOS)
    yield [
        f"{modules.num_images} held-out digits",
        *("" if share is None else f"{share:.1%} named rightly" for share in shares),
    ]


def traffic_table(results: Results) -> Table:
    """Bytes and times of each save and load."""
    table = Table(title="Saves and loads", title_justify="left")
    for name in ("run", "layout", "what", "step", "bytes", "seconds"):
        table.add_column(name, justify="left" if name in ("run", "layout", "what") else "right")
    rows = list(traffic_rows(results))
    for row, after in zip(rows, [*rows[1:], None], strict=True):
        table.add_row(*row, end_section=after is not None and after[:2] != row[:2])
    return table


def traffic_rows(results: Results) -> Iterator[list[str]]:
    """Each load and save of each run, in order of time."""
    for scenario in SCENARIOS:
        curve = results.curves[scenario.name]
        for event in sorted([*curve.saves, *curve.loads], key=lambda event: event["time"]):
            nbytes = event["nbytes"] if event["event"] == "save" else event["nbytes_read"]
            yield [
                scenario.title,
                scenario.layout,
                event["event"],
                str(event["step"]),
                readable_nbytes(nbytes),
                f"{event['seconds']:.2f}",
            ]


def check_table(results: Results) -> Table:
    """Each promise, and whether it held."""
    table = Table(title="Checks", title_justify="left")
    table.add_column("")
    table.add_column("promise")
    table.add_column("found")
    for check in results.checks:
        mark = "[green]✓[/]" if check.is_kept else "[red bold]✗[/]"
        table.add_row(mark, check.what, check.found)
    return table


def _loss(curve: Curve, step: int) -> str:
    if step in curve.losses:
        return f"{curve.losses[step]:.6f}"
    # A run that was resumed from another one's checkpoint has no first half of its own.
    return "" if curve.scenario is not KILLED else "lost"


def _difference(value: float) -> str:
    return "0 exactly" if value == 0 else f"{value:.1e}"
