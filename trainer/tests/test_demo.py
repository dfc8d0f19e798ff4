"""The demonstration's supervisor kills on time, leaves nobody behind, and explains failures."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from demo.modules import (
    MODULE_KILL_RANK,
    MODULE_MOVED,
    MODULE_REFERENCE,
    MODULE_RESUME_STEP,
    MODULE_SCENARIOS,
    MODULE_STEPS,
    ModuleScenario,
    module_gaps,
    read_evaluation,
)
from demo.plan import SCENARIOS
from demo.results import Curve, read_curve
from demo.supervisor import Kill, RunFailed, run_ranks
from holdfast_trainer.command import parse

# Rank 0 reports a step every tenth of a second; every rank leaves its process id.
WORKER = """
import json, os, sys, time
here, num_steps = sys.argv[1], int(sys.argv[2])
rank = os.environ["RANK"]
open(f"{here}/pid{rank}", "w").write(str(os.getpid()))
for step in range(1, num_steps + 1):
    time.sleep(0.1)
    if rank == "0":
        with open(f"{here}/events.jsonl", "a") as file:
            file.write(json.dumps({"event": "step", "step": step}) + "\\n")
    if len(sys.argv) > 3 and rank == "1":
        sys.exit("it broke")
"""


def pids(directory: Path) -> list[int]:
    return [int(path.read_text()) for path in directory.glob("pid*")]


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_it_kills_one_rank_at_the_step_and_stops_the_others(tmp_path: Path) -> None:
    seen: list[dict[str, Any]] = []
    ended = run_ranks(
        ["-c", WORKER, str(tmp_path), "500"],
        num_ranks=3,
        directory=tmp_path,
        label="first",
        kill=Kill(rank=2, step=4),
        on_event=seen.append,
    )
    assert ended.exit_codes[2] == -9
    assert ended.killed_at is not None
    assert 4 <= ended.killed_at < 100
    assert len(pids(tmp_path)) == 3
    assert not any(is_alive(pid) for pid in pids(tmp_path))
    # A second start hears its own events only.
    again: list[dict[str, Any]] = []
    ended = run_ranks(
        ["-c", WORKER, str(tmp_path), "2"],
        num_ranks=3,
        directory=tmp_path,
        label="second",
        on_event=again.append,
    )
    assert ended.exit_codes == (0, 0, 0)
    assert [event["step"] for event in again] == [1, 2]


def test_a_rank_that_fails_by_itself_is_a_failure_with_its_last_words(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match=r"rank 1 ended with exit code 1; .*it broke"):
        run_ranks(
            ["-c", WORKER, str(tmp_path), "500", "fail"],
            num_ranks=2,
            directory=tmp_path,
            label="first",
            on_event=lambda event: None,
        )
    assert not any(is_alive(pid) for pid in pids(tmp_path))


def test_a_load_takes_back_the_steps_after_it(tmp_path: Path) -> None:
    (tmp_path / "killed").mkdir()
    events = [(1, 1.0), (2, 2.0), (3, 3.0), (1, None), (2, 2.5)]
    lines = [
        f'{{"event": "load", "step": {step}}}'
        if loss is None
        else f'{{"event": "step", "step": {step}, "loss": {loss}, "grad_norm": 0}}'
        for step, loss in events
    ]
    (tmp_path / "killed" / "events.jsonl").write_text("\n".join(lines) + "\n")
    curve: Curve = read_curve(SCENARIOS[1], runs=tmp_path)
    assert curve.losses == {1: 1.0, 2: 2.5}
    assert curve.lost == {2: 2.0, 3: 3.0}


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_every_scenario_is_a_valid_run(scenario: Any, tmp_path: Path) -> None:
    config = parse(scenario.flags(tmp_path))
    layout = config.check(world_size=4)
    cut = f"PP{layout.pp}" if layout.pp > 1 else f"TP{layout.tp}"
    zero = f" ZeRO-{config.optim.zero}" if config.optim.zero else ""
    assert scenario.layout == f"{cut}\N{MULTIPLICATION SIGN}DP{layout.dp}{zero}"


@pytest.mark.parametrize("scenario", MODULE_SCENARIOS, ids=lambda scenario: scenario.name)
def test_every_scenario_of_modules_is_what_it_is_called(
    scenario: ModuleScenario, tmp_path: Path
) -> None:
    config = parse(scenario.flags(tmp_path))
    config.check(world_size=4)
    vision = config.module_layouts(world_size=4)["vision"]
    axis = f"TP{vision.tp}" if vision.tp > 1 else f"DP{vision.dp}"
    ranks = ", ".join(map(str, vision.ranks))
    assert scenario.layout == f"encoder {axis} on ranks {ranks}"
    assert (config.steps, MODULE_KILL_RANK in vision.ranks) == (
        MODULE_STEPS,
        scenario is not MODULE_MOVED,
    )


def test_an_evaluation_that_is_missing_is_no_success(tmp_path: Path) -> None:
    (tmp_path / MODULE_MOVED.name).mkdir()
    events = tmp_path / MODULE_MOVED.name / "events.jsonl"
    events.write_text('{"event": "step", "step": 1}\n')
    assert read_evaluation(MODULE_MOVED, runs=tmp_path)["word_accuracy"] == 0.0
    with events.open("a") as file:
        file.write('{"event": "eval", "word_accuracy": 0.9, "num_images": 299}\n')
    assert read_evaluation(MODULE_MOVED, runs=tmp_path)["word_accuracy"] == 0.9


def curve_of(scenario: ModuleScenario, losses: dict[int, float]) -> Curve:
    return Curve(scenario=scenario, losses=losses, norms={}, lost={}, saves=[], loads=[])


def test_a_loss_that_is_missing_after_the_move_is_infinitely_far() -> None:
    first = MODULE_RESUME_STEP + 1
    reference = curve_of(MODULE_REFERENCE, {1: 5.0, first: 1.0, first + 1: 0.5})
    moved = curve_of(MODULE_MOVED, {first: 1.25})
    curves = {MODULE_REFERENCE.name: reference, MODULE_MOVED.name: moved}
    assert module_gaps(curves) == [0.25, float("inf")]
