"""A job whose processes are killed at a random moment after a bad value, and started again.

The moment is between the first rejection and the end of the step that runs again: in the rerun in
place, in the save of the fault checkpoint, at the exit; after a start from a fault checkpoint, in
its load and in the rerun.
"""

from __future__ import annotations

import json
import math
import os
import random
import signal
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from holdfast import Checkpointer, ProcessGroups
from holdfast.format.names import FAULT_CHECKPOINTS
from holdfast.rerun import read_report
from tests.harness import RankContext, run_ranks
from tests.rerun.spread.job import Job, Run, Start, convicted_by
from tests.rerun.spread.scenario import (
    NUM_MICROBATCHES,
    NUM_STEPS,
    Scenario,
    Scheduler,
    draw,
)

SHORTEST_S, LONGEST_S = 0.001, 0.3
_TRUE = {
    "transient": "transient_error",
    "persistent": "persistent_error",
    "persistent in its role": "persistent_error",
    "data": "correct_result",
}


class _DoomedJob(Job):
    """A job that dies some time after its first bad value, if `delay_s` is not None."""

    number = 0
    """Of this launch."""
    delay_s: float | None = None
    _timer: threading.Timer | None = None

    def _arm(self) -> None:
        if self.delay_s is None or self._timer is not None:
            return
        self._timer = threading.Timer(self.delay_s, os.kill, (os.getpid(), signal.SIGKILL))
        self._timer.daemon = True
        self._timer.start()

    def _resume(self, faults: Checkpointer, good: Checkpointer) -> None:
        newest_fault = max(faults.steps(), default=-1)
        if newest_fault >= max(good.steps(), default=0):
            self._arm()
        super()._resume(faults, good)

    def _validate(self, run: Run, name: str, value: float, **options: Any) -> None:
        if not abs(value) < 1e6:
            self._arm()
        super()._validate(run, name, value, **options)

    def _step(self, step: int, batches: Any, start: Start) -> None:
        super()._step(step, batches, start)
        self._note()
        assert self.machine is not None
        if self.machine.decision.exit_code is None and self._timer is not None:
            self._timer.cancel()  # the step is over: whatever comes is training as usual

    def _state(self) -> dict[str, object]:
        self._note()  # before a save: the next launch continues from it, and skips nothing again
        return super()._state()

    def _note(self) -> None:
        """Write down which steps were made of which batches: it outlives this process."""
        start = self.current
        assert start is not None
        runs = [asdict(run) for run in start.runs if run.step in start.applied]
        text = json.dumps({"applied": start.applied, "skipped": start.skipped, "runs": runs})
        path = self.root / f"launch {self.number} of {self.groups.rank}"
        part = self.root / f"part of {path.name}"
        part.write_text(text)
        part.rename(path)  # a kill may come in the middle


def _groups(context: RankContext, scenario: Scenario) -> ProcessGroups:
    """Return the groups of a job, with limits that a killed rank is noticed by."""
    if context.num_ranks == 1:
        return ProcessGroups.single(scenario.layout_name)
    return ProcessGroups.create(scenario.layout, timeout_s=10, data_timeout_s=10)


def launch(
    context: RankContext, root: str, seed: int, options: dict[str, Any], number: int,
    devices: list[str], delay_s: float | None,
) -> tuple[Start, dict[str, bytes]]:  # fmt: skip
    """Start a job once; return how it ended, and the bits of its parameters."""
    scenario = draw(seed, **options)
    with _groups(context, scenario) as groups:
        job = _DoomedJob(scenario, groups, Path(root), {})
        job.number, job.delay_s = number, delay_s
        struck = job.root / "struck"
        job.strikes.is_spent = scenario.kind == "transient" and struck.exists()
        job.strikes.on_strike = struck.touch
        start = job.start(devices)
        return start, job.trainer.bits()


def undisturbed(
    context: RankContext, root: str, seed: int, options: dict[str, Any], skipped: Sequence[int]
) -> dict[str, bytes]:
    """Return the bits of the parameters of a job without the fault."""
    scenario = draw(seed, **options)
    with _groups(context, scenario) as groups:
        return Job(scenario, groups, Path(root), {}).run_undisturbed(tuple(skipped))


@dataclass(kw_only=True)
class Killed:
    """What has become of a job."""

    num_kills: int = 0
    num_after_restart: int = 0
    """Kills of a process that had started with a fault checkpoint."""
    num_launches: int = 0
    verdicts: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


def play_killed(root: Path, seed: int, options: dict[str, Any], *, num_kills: int) -> Killed:
    """Launch a job until it is through; the first launches are doomed."""
    scenario = draw(seed, **options)
    size = scenario.layout.world_size
    scheduler = Scheduler(scenario)
    random_ = random.Random(f"kills of {seed}")
    result = Killed()
    devices = list(scheduler.now)
    root.mkdir()
    for number in range(20):
        has_fault = any((root / "rerun" / FAULT_CHECKPOINTS).glob("iter_*"))
        delay_s = _delay_s(random_) if result.num_kills < num_kills else None
        outcome = run_ranks(
            size, launch, str(root), seed, options, number, devices, delay_s,
            expect_failure=delay_s is not None, init=size > 1, timeout_s=60,
        )  # fmt: skip
        result.num_launches += 1
        if outcome.failed:
            if not any(each and each.signal == signal.SIGKILL for each in outcome.errors):
                result.wrong.append(f"launch {number}: {outcome.errors}")
            result.num_kills += 1
            result.num_after_restart += has_fault
            devices = scheduler.move(16, ()) if random_.random() < 0.5 else devices
            continue
        starts = [each[0] for each in outcome.results]
        if starts[0].exit_code is None:
            _check(scenario, root, [each[1] for each in outcome.results], result, options)
            return result
        devices = scheduler.move(starts[0].exit_code, convicted_by(read_report(root / "rerun")))
    result.wrong.append(f"not through after {result.num_launches} launches")
    return result


def _delay_s(random_: random.Random) -> float:
    """Return a delay, each order of magnitude as likely: so some fit, however fast machines are."""
    return SHORTEST_S * math.pow(LONGEST_S / SHORTEST_S, random_.random())


def _check(
    scenario: Scenario,
    root: Path,
    bits: list[dict[str, bytes]],
    result: Killed,
    options: dict[str, Any],
) -> None:
    """Compare with a job without the fault; look at batches and at every verdict."""
    skipped: set[int] = set()
    for path in sorted(root.glob("launch *")):
        noted = json.loads(path.read_text())
        skipped |= {*noted["skipped"]}
        for run in noted["runs"]:
            first = run["step"] * NUM_MICROBATCHES
            if run["indices"] != [*range(first, first + NUM_MICROBATCHES)]:
                result.wrong.append(f"{path.name}: step {run['step']} has {run['indices']}")
    last = max(int(path.name.split()[1]) for path in root.glob("launch *"))
    noted = json.loads((root / f"launch {last} of 0").read_text())
    made = noted["applied"] + noted["skipped"]
    if not made or max(made) != NUM_STEPS - 1:
        result.wrong.append(f"the last launch made {made}")
    if skipped - ({scenario.step} if scenario.kind == "data" else set()):
        result.wrong.append(f"skipped {skipped}")
    size = scenario.layout.world_size
    whole = run_ranks(
        size, undisturbed, str(root), scenario.seed, options, sorted(skipped), init=size > 1
    ).results
    if bits != whole:
        result.wrong.append("other parameters than without the fault")
    broken = f"d{scenario.rank}" if scenario.kind.startswith("persistent") else None
    # A transient error of a process that dies at once leaves nothing, not even a report.
    has_report = (root / "rerun" / "report.jsonl").exists()
    for event in read_report(root / "rerun") if has_report else ():
        if event["event"] == "verdict":
            result.verdicts.append(event["verdict"])
            if event["verdict"] not in ("undecided", _TRUE[scenario.kind]):
                result.wrong.append(f"says {event['verdict']}")
            if any(each["device"] != broken for each in event["convicted"]):
                result.wrong.append(f"blames {event['convicted']}")
