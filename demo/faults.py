"""`python -m demo.faults --out DIR`: a transient and a persistent fault, and their verdicts.

Each scenario starts `holdfast train` on two ranks until it ends with code 0, as a job scheduler
would, on devices that have names only. One activation of one rank in one step is spoiled. What the
runs end with is compared with a run in which nothing was.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from demo.results import compare_checkpoints
from holdfast.rerun import read_report

NUM_STEPS = 8
STEP = 5
RATE, SEED = 16, 114
"""With these an activation of rank 1 in step `STEP` is the only one that is spoiled."""
DATA, PIPELINE = "--zero 1", "--pp 2"
"""What the two ranks are to each other."""
FLAGS = (
    "--nproc 2 --num-layers 2 --model-dim 64 --num-heads 4 --seq-len 64 --global-batch-size 8 "
    f"--dropout 0.1 --steps {NUM_STEPS} --save-interval 2 --seed {SEED} --device cpu "
    f"--deterministic --data {Path(__file__).parent.parent / 'docs'}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultScenario:
    """Starts of one run, and what each is to end with."""

    title: str
    layout: str
    kind: str
    devices: tuple[str, ...]
    """Those of both ranks in each start, as the scheduler chooses them."""
    codes: tuple[int, ...]
    verdict: str
    blamed: str = ""


SCENARIOS = (
    FaultScenario(
        title="transient",
        layout=DATA,
        kind="transient_error",
        devices=("GPU-A,GPU-B", "GPU-A,GPU-B"),
        codes=(17, 0),
        verdict="transient_error",
    ),
    # The other data replica runs the step at once, on a device of its own.
    FaultScenario(
        title="persistent",
        layout=DATA,
        kind="persistent_error",
        devices=("GPU-A,GPU-B", "GPU-A,GPU-C"),
        codes=(18, 0),
        verdict="persistent_error",
        blamed="GPU-B",
    ),
    # Both stages feed the loss. In the other order both are good, which clears neither in its own
    # stage; that GPU-A is sound in the first one shows with another device in the second.
    FaultScenario(
        title="in a pipeline",
        layout=PIPELINE,
        kind="persistent_error",
        devices=("GPU-A,GPU-B", "GPU-B,GPU-A", "GPU-A,GPU-C", "GPU-A,GPU-C"),
        codes=(16, 16, 18, 0),
        verdict="persistent_error",
        blamed="GPU-B",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One start, and how it ended."""

    scenario: FaultScenario
    devices: str
    exit_code: int
    history_code: int
    """With which `holdfast faults` ends after it."""
    verdict: str
    blamed: str
    """The devices that the verdict convicts."""


def main() -> int:
    """Run everything; 0 if every start ended as it should and no bit differs."""
    parser = argparse.ArgumentParser(prog="python -m demo.faults", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("demo/out"), help="where results go")
    runs: Path = parser.parse_args().out / "faults"
    shutil.rmtree(runs, ignore_errors=True)
    runs.mkdir(parents=True)
    console = Console(highlight=False)
    started = time.monotonic()
    console.print(f"runs without a fault, then step {STEP} with a bad activation on rank 1 …")
    with ThreadPoolExecutor() as pool:  # nearly all time is that of starting processes
        good = [
            pool.submit(start, good_run(runs, layout), flags=layout, devices="")
            for layout in (DATA, PIPELINE)
        ]
        chains = [pool.submit(run_scenario, scenario, runs, console) for scenario in SCENARIOS]
        launches = [launch for chain in chains for launch in chain.result()]
    if any(each.result() for each in good):
        console.print(f"[red bold]a run without a fault failed:[/] see good*.log in {runs}")
        return 1
    seconds = time.monotonic() - started
    is_good = report(launches, runs, console=console, seconds=seconds)
    return 0 if is_good else 1


def good_run(runs: Path, layout: str) -> Path:
    """Return the directory of the run of a layout in which nothing is spoiled."""
    return runs / f"good{layout.replace(' ', '')}"


def run_scenario(scenario: FaultScenario, runs: Path, console: Console) -> list[Launch]:
    """Start until a start ends well, at most as often as there are devices."""
    directory = runs / scenario.title.replace(" ", "-")
    flags = (
        f"{scenario.layout} --load {directory} --rerun-mode validate_results "
        f"--error-injection-rate {RATE} --error-injection-type {scenario.kind}"
    )
    launches: list[Launch] = []
    num_seen = 0
    for devices in scenario.devices:
        exit_code = start(directory, flags=flags, devices=devices)
        report_dir = directory / "rerun"
        events = read_report(report_dir) if (report_dir / "report.jsonl").exists() else []
        verdicts = [each for each in events[num_seen:] if each["event"] == "verdict"]
        num_seen = len(events)
        console.print(f"  {scenario.title}, {devices}: exit code {exit_code}")
        convicted = verdicts[-1]["convicted"] if verdicts else []
        launches.append(
            Launch(
                scenario=scenario,
                devices=devices,
                exit_code=exit_code,
                history_code=history_code(directory),
                verdict=verdicts[-1]["verdict"] if verdicts else "",
                blamed=", ".join(each["device"] for each in convicted),
            )
        )
        if exit_code == 0:
            break
    return launches


def start(directory: Path, *, flags: str, devices: str) -> int:
    """Run `holdfast train` on devices of these names; its exit code. Its output goes to a file."""
    with directory.with_suffix(".log").open("a") as log:
        return subprocess.run(
            [
                *(sys.executable, "-m", "holdfast_trainer"),
                *(*FLAGS.split(), "--save", str(directory), *flags.split()),
            ],
            env=os.environ | {"HOLDFAST_DEVICE": devices},
            stdout=log,
            stderr=log,
            check=False,
        ).returncode


def history_code(directory: Path) -> int:
    """Run `holdfast faults` as a scheduler would; its exit code."""
    words = [sys.executable, "-m", "holdfast.cli.main", "faults", str(directory)]
    return subprocess.run(words, capture_output=True, check=False).returncode


def report(launches: list[Launch], runs: Path, *, console: Console, seconds: float) -> bool:
    """Print what each start ended with, and whether all is as it should be."""
    table = Table(title=f"A bad activation in step {STEP} on rank 1", title_justify="left")
    for name in (
        "fault",
        "start",
        "devices",
        "step",
        "exit code",
        "verdict",
        "blamed",
    ):
        table.add_column(
            name, justify="right" if name in ("start", "step", "exit code") else "left"
        )
    is_good = True
    for scenario in SCENARIOS:
        own = [launch for launch in launches if launch.scenario is scenario]
        is_good &= tuple(launch.exit_code for launch in own) == scenario.codes
        is_good &= all(launch.history_code == launch.exit_code for launch in own)
        is_good &= [launch.blamed for launch in own if launch.blamed] == [
            *filter(None, [scenario.blamed])
        ]
        is_good &= [launch.verdict for launch in own if launch.verdict] == [scenario.verdict]
        for number, launch in enumerate(own, start=1):
            words = launch.verdict.replace("_", " ")
            table.add_row(
                scenario.title if number == 1 else "",
                str(number),
                launch.devices.replace(",", ", "),
                str(STEP if launch.exit_code else NUM_STEPS),
                str(launch.exit_code),
                words or ("still open" if launch.exit_code else ""),
                launch.blamed,
                end_section=number == len(own),
            )
    console.print(table)
    if not is_good:
        console.print(f"[red bold]NOT AS EXPECTED[/]: see the logs in {runs}")
        return False
    for scenario in SCENARIOS:
        differing, num_tensors = compare_checkpoints(
            good_run(runs, scenario.layout),
            runs / scenario.title.replace(" ", "-"),
            step=NUM_STEPS,
        )
        # The machine's own entry, which the run without a machine does not have.
        entries = {key for key in differing if key.startswith("rerun")}
        differing, num_tensors = sorted(set(differing) - entries), num_tensors - len(entries)
        is_good &= not differing and num_tensors > 0
        console.print(
            f"{scenario.title}: {num_tensors - len(differing)} of {num_tensors} tensors bitwise "
            f"equal to those without a fault"
        )
    console.print("`holdfast faults` ended with the same exit code after each start")
    verdict = "[green bold]All as it should be[/]" if is_good else "[red bold]BITS DIFFER[/]"
    console.print(f"{verdict}, {seconds:.0f} s; reports and logs in {runs}")
    return is_good


if __name__ == "__main__":
    sys.exit(main())
