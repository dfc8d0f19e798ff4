"""The demonstration, from top to bottom."""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from demo.modules import (
    MODULE_KILL_RANK,
    MODULE_KILL_STEP,
    MODULE_KILLED,
    MODULE_MOVED,
    MODULE_REFERENCE,
    MODULE_RESUME_STEP,
    MODULE_STEPS,
    ModuleScenario,
    collect_modules,
    describe,
)
from demo.page import write_page
from demo.picture import draw
from demo.plan import (
    KILL_RANK,
    KILL_STEP,
    KILLED,
    NUM_RANKS,
    NUM_STEPS,
    REFERENCE,
    RESHARDED,
    RESUME_STEP,
    SAVE_INTERVAL,
    Scenario,
)
from demo.results import collect
from demo.supervisor import Kill, RunFailed, RunOutcome, run_ranks
from demo.tables import print_report
from holdfast.errors import HoldfastError


def main() -> int:
    """Run everything; 0 if every check held."""
    parser = argparse.ArgumentParser(prog="python -m demo", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("demo/out"), help="where results go")
    out: Path = parser.parse_args().out
    console = Console(highlight=False)
    runs = out / "runs"
    if runs.exists():
        shutil.rmtree(runs)
    runs.mkdir(parents=True)
    started = time.monotonic()
    try:
        killed = run_all(runs, console=console)
        modules_killed = run_modules(runs, console=console)
        console.print("\n[bold]6/6  Compare[/]  everything is read back from the files")
        results = collect(runs, killed=killed, seconds=time.monotonic() - started)
        modules = collect_modules(runs, killed=modules_killed)
        results = replace(results, checks=[*results.checks, *modules.checks])
    except (RunFailed, HoldfastError) as error:
        console.print(f"[red bold]failed:[/] {escape(str(error))}")
        return 1
    except KeyboardInterrupt:
        console.print("interrupted; no process is left")
        return 130
    picture = draw(results, modules=modules, out=out)
    page = write_page(results, modules=modules, picture=picture, out=out)
    print_report(results, modules=modules, console=console)
    console.print(f"picture  {picture}\npage     {page}\nruns     {runs}")
    return 0 if results.is_good else 1


def run_all(runs: Path, *, console: Console) -> RunOutcome:
    """The five runs of one model; returns how the killed one ended."""
    announce(
        console,
        "1/6  Reference",
        f"{NUM_RANKS} processes, {REFERENCE.layout}, {NUM_STEPS} steps on the source of Python's "
        f"standard library, a checkpoint every {SAVE_INTERVAL} steps; never disturbed",
    )
    train(REFERENCE, runs=runs, console=console, label="first")
    announce(
        console,
        "2/6  Kill",
        f"the same run again, but rank {KILL_RANK} gets SIGKILL once step {KILL_STEP} is done",
    )
    killed = train(
        KILLED, runs=runs, console=console, label="first", kill=Kill(rank=KILL_RANK, step=KILL_STEP)
    )
    console.print(
        f"     rank {KILL_RANK} is dead after step {killed.killed_at}; the steps after "
        f"{RESUME_STEP} are lost, the checkpoint of step {RESUME_STEP} is not"
    )
    announce(
        console,
        "3/6  Resume",
        f"all {NUM_RANKS} processes start again and load the newest committed step",
    )
    train(KILLED, runs=runs, console=console, label="second", load=KILLED)
    for number, scenario in enumerate(RESHARDED):
        announce(
            console,
            f"4/6  Reshard {'abc'[number]}",
            f"step {RESUME_STEP} of the killed run, loaded as {scenario.layout}: every rank reads "
            f"the byte ranges of its new shards",
        )
        train(scenario, runs=runs, console=console, label="first", load=KILLED)
    return killed


def run_modules(runs: Path, *, console: Console) -> RunOutcome:
    """The runs of a model of several modules; returns how the killed one ended."""
    announce(
        console,
        "5/6  Modules",
        f"{describe()}: {MODULE_REFERENCE.layout}, {MODULE_STEPS} steps; then the same run again, "
        f"in which rank {MODULE_KILL_RANK} gets SIGKILL; then resumed: {MODULE_MOVED.layout}",
    )
    train(MODULE_REFERENCE, runs=runs, console=console, label="first")
    killed = train(
        MODULE_KILLED,
        runs=runs,
        console=console,
        label="first",
        kill=Kill(rank=MODULE_KILL_RANK, step=MODULE_KILL_STEP),
    )
    train(MODULE_MOVED, runs=runs, console=console, label="first", load=MODULE_KILLED)
    return killed


def train(
    scenario: Scenario,
    *,
    runs: Path,
    console: Console,
    label: str,
    load: Scenario | None = None,
    kill: Kill | None = None,
) -> RunOutcome:
    """One start of a scenario's processes, with a progress bar."""
    directory = runs / scenario.name
    words = ["-m", "demo.worker"]
    if scenario.is_resumed:
        words += ["--save-loaded", str(directory / "as-loaded")]
    words += ["--", *scenario.flags(runs)]
    if load is not None:
        words += ["--load", str(runs / load.name / "checkpoints")]
    if scenario.is_resumed:
        is_of_modules = isinstance(scenario, ModuleScenario)
        words += ["--load-step", str(MODULE_RESUME_STEP if is_of_modules else RESUME_STEP)]
    with Progress(
        TextColumn("     {task.description}"),
        BarColumn(bar_width=36),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}"),
        TimeElapsedColumn(),
        console=console,
    ) as progress:
        task = progress.add_task("starting", total=scenario.num_steps, loss="")

        def show(event: dict[str, Any]) -> None:
            if event["event"] == "load":
                progress.update(task, completed=event["step"], description="training")
            elif event["event"] == "step":
                loss = f"loss {event['loss']:.3f}"
                progress.update(task, completed=event["step"], loss=loss, description="training")

        return run_ranks(
            words,
            num_ranks=NUM_RANKS,
            directory=directory,
            label=label,
            kill=kill,
            on_event=show,
        )


def announce(console: Console, title: str, text: str) -> None:
    """Return what happens now, and why."""
    console.print(f"\n[bold]{title}[/]  {text}")


if __name__ == "__main__":
    sys.exit(main())
