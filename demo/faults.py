"""`python -m demo.faults --out DIR`: a transient and a persistent fault, and their verdicts.

Each scenario starts `holdfast train` on two ranks until it ends with code 0, as a job scheduler
would. One value of one rank in one step is made bad. What the runs end with is compared with a run
in which nothing was.
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
RATE, SEED = 32, 167
"""With these the loss of rank 1 in step `STEP` is the only value that is made bad."""
FLAGS = (
    "--nproc 2 --num-layers 2 --model-dim 64 --num-heads 4 --seq-len 64 --global-batch-size 8 "
    f"--dropout 0.1 --steps {NUM_STEPS} --save-interval 2 --seed {SEED} --device cpu --zero 1 "
    f"--deterministic --data {Path(__file__).parent.parent / 'docs'}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultScenario:
    """Starts of one run, and what each is to end with."""

    title: str
    kind: str
    devices: tuple[str, ...]
    """Which each start runs on, as the scheduler chooses them."""
    codes: tuple[int, ...]
    verdict: str


SCENARIOS = (
    FaultScenario(
        title="transient",
        kind="transient_error",
        devices=("GPU-A", "GPU-A"),
        codes=(17, 0),
        verdict="transient_error",
    ),
    FaultScenario(
        title="persistent",
        kind="persistent_error",
        devices=("GPU-A", "GPU-B", "GPU-B"),
        codes=(16, 18, 0),
        verdict="persistent_error",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One start, and how it ended."""

    scenario: FaultScenario
    device: str
    exit_code: int
    verdict: str
    devices: str
    """That the verdict blames."""


def main() -> int:
    """Run everything; 0 if every start ended as it should and no bit differs."""
    parser = argparse.ArgumentParser(prog="python -m demo.faults", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("demo/out"), help="where results go")
    runs: Path = parser.parse_args().out / "faults"
    shutil.rmtree(runs, ignore_errors=True)
    runs.mkdir(parents=True)
    console = Console(highlight=False)
    started = time.monotonic()
    console.print(f"a run without a fault, then step {STEP} with a bad value on rank 1 …")
    with ThreadPoolExecutor() as pool:  # nearly all time is that of starting processes
        good = pool.submit(start, runs / "good", flags="", device="GPU-A")
        chains = [pool.submit(run_scenario, scenario, runs, console) for scenario in SCENARIOS]
        launches = [launch for chain in chains for launch in chain.result()]
    if good.result() != 0:
        console.print(f"[red bold]the run without a fault failed:[/] see {runs / 'good.log'}")
        return 1
    seconds = time.monotonic() - started
    is_good = report(launches, runs, console=console, seconds=seconds)
    return 0 if is_good else 1


def run_scenario(scenario: FaultScenario, runs: Path, console: Console) -> list[Launch]:
    """Start until a start ends well, at most as often as there are devices."""
    directory = runs / scenario.title
    flags = (
        f"--load {directory} --rerun-mode validate_results --error-injection-rate {RATE} "
        f"--error-injection-type {scenario.kind}"
    )
    launches: list[Launch] = []
    num_seen = 0
    for device in scenario.devices:
        exit_code = start(directory, flags=flags, device=device)
        report_dir = directory / "rerun"
        events = read_report(report_dir) if (report_dir / "report.jsonl").exists() else []
        verdicts = [each for each in events[num_seen:] if each["event"] == "verdict"]
        num_seen = len(events)
        console.print(f"  {scenario.title}, {device}: exit code {exit_code}")
        launches.append(
            Launch(
                scenario=scenario,
                device=device,
                exit_code=exit_code,
                verdict=verdicts[-1]["verdict"] if verdicts else "",
                devices=", ".join(verdicts[-1]["devices"]) if verdicts else "",
            )
        )
        if exit_code == 0:
            break
    return launches


def start(directory: Path, *, flags: str, device: str) -> int:
    """Run `holdfast train` on a device of this name; its exit code. Its output goes to a file."""
    with directory.with_suffix(".log").open("a") as log:
        return subprocess.run(
            [
                *(sys.executable, "-m", "holdfast_trainer"),
                *(*FLAGS.split(), "--save", str(directory), *flags.split()),
            ],
            env=os.environ | {"HOLDFAST_DEVICE": device},
            stdout=log,
            stderr=log,
            check=False,
        ).returncode


def report(launches: list[Launch], runs: Path, *, console: Console, seconds: float) -> bool:
    """Print what each start ended with, and whether all is as it should be."""
    table = Table(title=f"A bad loss in step {STEP} on rank 1", title_justify="left")
    for name in ("fault", "start", "device", "step", "exit code", "verdict", "blamed"):
        table.add_column(
            name, justify="right" if name in ("start", "step", "exit code") else "left"
        )
    is_good = True
    for scenario in SCENARIOS:
        own = [launch for launch in launches if launch.scenario is scenario]
        is_good &= tuple(launch.exit_code for launch in own) == scenario.codes
        is_good &= [launch.verdict for launch in own if launch.verdict] == [scenario.verdict]
        for number, launch in enumerate(own, start=1):
            words = launch.verdict.replace("_", " ")
            table.add_row(
                scenario.title if number == 1 else "",
                str(number),
                launch.device,
                str(STEP if launch.exit_code else NUM_STEPS),
                str(launch.exit_code),
                words or ("still open" if launch.exit_code else ""),
                launch.devices,
                end_section=number == len(own),
            )
    console.print(table)
    if not is_good:
        console.print(f"[red bold]NOT AS EXPECTED[/]: see the logs in {runs}")
        return False
    for scenario in SCENARIOS:
        differing, num_tensors = compare_checkpoints(
            runs / "good", runs / scenario.title, step=NUM_STEPS
        )
        # The machine's own entry, which the run without a machine does not have.
        entries = {key for key in differing if key.startswith("rerun")}
        differing, num_tensors = sorted(set(differing) - entries), num_tensors - len(entries)
        is_good &= not differing and num_tensors > 0
        console.print(
            f"{scenario.title}: {num_tensors - len(differing)} of {num_tensors} tensors bitwise "
            f"equal to those without a fault"
        )
    verdict = "[green bold]All as it should be[/]" if is_good else "[red bold]BITS DIFFER[/]"
    console.print(f"{verdict}, {seconds:.0f} s; reports and logs in {runs}")
    return is_good


if __name__ == "__main__":
    sys.exit(main())
