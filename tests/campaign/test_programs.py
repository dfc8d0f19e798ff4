"""Generated programs equal one process, and each way goes on where another one stopped."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from tests.campaign.actions import Microbatch, Step
from tests.campaign.programs import OPTIMIZERS, STRATEGIES, draw
from tests.campaign.runs import run_programs
from tests.harness import run_ranks


def check(tmp_path: Path, seeds: Iterable[int], *, num_ranks: int) -> None:
    """Run programs; `python -m tests.campaign --ranks N SEED` runs one of them again."""
    outcome = run_ranks(num_ranks, run_programs, str(tmp_path), list(seeds), timeout_s=500)
    assert sorted({wrong for found in outcome.results for wrong in found.wrong}) == []


def test_any_way_trains_as_one_process_and_loads_any_other(tmp_path: Path) -> None:
    """F1, F2, F9, F10, M12, S3: weights to 1e-6, losses, norms and zeros; loads bitwise."""
    check(tmp_path, range(1), num_ranks=4)


@pytest.mark.slow
def test_many_ways_train_as_one_process(tmp_path: Path) -> None:
    check(tmp_path, [1, *range(100, 103)], num_ranks=4)


@pytest.mark.parametrize(
    "seeds",
    [
        pytest.param(range(1), marks=pytest.mark.slow),
        pytest.param(range(1, 12), marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_ways_on_eight_ranks_train_as_one_process(tmp_path: Path, seeds: range) -> None:
    check(tmp_path, seeds, num_ranks=8)


@pytest.mark.nightly
@pytest.mark.parametrize("first", range(1000, 3000, 100))
def test_two_thousand_programs(tmp_path: Path, first: int) -> None:
    check(tmp_path, range(first, first + 100), num_ranks=4)


def test_the_programs_have_everything_that_they_are_about() -> None:
    programs = [draw(seed, num_ranks=4) for seed in range(24)]
    ways = [way for program in programs for way in program.ways]
    pairs = {
        (before.kind, after.kind)
        for program in programs
        for before, after in zip(program.ways, program.ways[1:], strict=False)
    }
    assert {way.kind for way in ways} == {"plain", "zero", "chained", "fsdp"}
    assert len(pairs) >= 8
    for kind in ("plain", "zero", "chained", "fsdp"):
        actions = [action for way in ways if way.kind == kind for action in way.actions]
        assert 0.1 in {each.max_norm for each in actions if isinstance(each, Step)}, kind
    assert {program.optimizer for program in programs} == {*OPTIMIZERS}
    assert {program.traits.dtype for program in programs} == {
        torch.float32,
        torch.float64,
        torch.bfloat16,
    }
    assert {way.options["strategy"] for way in ways if way.kind == "fsdp"} == {*STRATEGIES}
    assert {way.options["stage"] for way in ways if "stage" in way.options} == {1, 2}
    for axis in ("dp", "cp", "tp", "ep", "replicas"):
        assert any(way.layout.get(axis, 1) > 1 for way in ways), axis
    assert any(program.traits.is_odd for program in programs)
    assert any(isinstance(a, Microbatch) and a.part > 1 for way in ways for a in way.actions)
    assert {way.is_declared for way in ways} == {True, False}
    assert {way.has_contexts for way in ways} == {True, False}
