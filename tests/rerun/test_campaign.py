"""The invariant over many jobs: the verdict is the true one, and training is as if nothing was."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from holdfast.rerun import Limits, read_report
from tests.rerun.job import NUM_MICROBATCHES, NUM_STEPS, Fault, Job

KINDS = ("transient_error", "persistent_error", "correct_result")
CODES = {"transient_error": 17, "persistent_error": 18, "correct_result": 19}


def other_devices(size: int) -> itertools.chain[list[str]]:
    """Every launch on devices of its own."""
    return itertools.chain([[f"{k}-{rank}" for rank in range(size)] for k in range(20)])


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], list[torch.Tensor]]:
    """The parameters of a job of so many ranks without hardware faults."""

    @cache
    def params(size: int) -> list[torch.Tensor]:
        directory = tmp_path_factory.mktemp("undisturbed")
        return Job(directory, size=size).launch(["x"] * size).params

    return params


def check_whole(job: Job, expected: list[torch.Tensor]) -> None:
    """The last launch ended with the right parameters, and no batch was skipped or repeated."""
    last = job.launches[-1]
    assert last.exit_code is None
    for mine, other in zip(last.params, expected, strict=True):
        assert torch.equal(mine, other)


def finish(job: Job, size: int) -> None:
    """After a final verdict: start until the job is through, on devices that were never used."""
    fresh = iter([[f"f{k}-{rank}" for rank in range(size)] for k in range(20)])
    if job.launches[-1].exit_code in (17, 18, 20):
        job.run(fresh)


@pytest.mark.parametrize("fatal", [True, False], ids=["fatal", "not_fatal"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_every_fault_has_its_true_verdict(
    tmp_path: Path,
    undisturbed: Callable[[int], list[torch.Tensor]],
    kind: str,
    size: int,
    fatal: bool,
) -> None:
    """D7, D8, D9: over every rank, step and microbatch, with saves at every interval."""
    places = itertools.product(range(size), range(NUM_STEPS), range(NUM_MICROBATCHES))
    for number, (rank, step, microbatch) in enumerate(places):
        fault = Fault(kind=kind, rank=rank, step=step, microbatch=microbatch, fatal=fatal)
        directory = tmp_path / str(number)
        job = Job(directory, size=size, faults=[fault], save_interval=1 + number % 3)
        last = job.run(iter(other_devices(size)))
        assert job.verdicts() == [kind]
        if kind == "transient_error":
            assert len(job.launches) == 1
            assert job.fault_save is None
        else:
            assert job.launches[0].exit_code == 16
            assert len(job.launches) == 2
            assert job.fault_save is not None
        assert last.exit_code == (CODES[kind] if fatal else None)
        finish(job, size)
        if not (fatal and kind == "correct_result"):
            check_whole(job, undisturbed(size))


@pytest.mark.parametrize("size", [1, 2])
def test_the_same_device_is_not_asked_for_ever(tmp_path: Path, size: int) -> None:
    """D10: bounded starts on the same device, then an outcome of its own; and the run goes on."""
    for kind, restarts in itertools.product(("persistent_error", "correct_result"), (1, 2, 3)):
        directory = tmp_path / f"{kind}{restarts}"
        job = Job(
            directory,
            size=size,
            faults=[Fault(kind=kind)],
            limits=Limits(max_restarts=restarts),
        )
        same = itertools.repeat([f"d{rank}" for rank in range(size)])
        last = job.run(same)
        assert len(job.launches) == 1 + restarts
        assert [each.exit_code for each in job.launches] == [16] * restarts + [20]
        assert last.verdict == "undecided"
        assert job.verdicts() == ["undecided"]


def test_the_same_device_first_and_another_one_then(tmp_path: Path) -> None:
    """A scheduler that gives the old device once more only costs one start."""
    for kind in ("persistent_error", "correct_result"):
        job = Job(tmp_path / kind, faults=[Fault(kind=kind)])
        job.run(iter([["a"], ["a"], ["b"]]))
        assert [each.exit_code for each in job.launches] == [16, 16, CODES[kind]]
        assert job.verdicts() == [kind]


@pytest.mark.parametrize("kinds", list(itertools.product(KINDS, repeat=2)), ids="-".join)
@pytest.mark.parametrize("fatal", list(itertools.product([True, False], repeat=2)), ids=str)
def test_two_ranks_fail_in_one_step(
    tmp_path: Path, kinds: tuple[str, str], fatal: tuple[bool, bool]
) -> None:
    """D12: both are recorded, each with its verdict; a fatal one is never hidden."""
    faults = [
        Fault(kind=kind, rank=rank, microbatch=rank, fatal=is_fatal)
        for rank, (kind, is_fatal) in enumerate(zip(kinds, fatal, strict=True))
    ]
    job = Job(tmp_path, size=2, faults=faults)
    last = job.run(iter(other_devices(2)))
    needs_restart = set(kinds) != {"transient_error"}
    assert len(job.launches) == (2 if needs_restart else 1)
    seen = {
        (each["rank"], each["verdict"])
        for event in read_report(tmp_path)
        if event["event"].startswith("rerun")
        for each in event["values"]
        if each["verdict"] is not None
    }
    assert seen == {(rank, kind) for rank, kind in enumerate(kinds)}
    order = ["transient_error", "correct_result", "persistent_error"]
    # A transient error next to one that needs a restart has its verdict before the restart.
    asked = [
        (kind, is_fatal)
        for kind, is_fatal in zip(kinds, fatal, strict=True)
        if kind != "transient_error" or not needs_restart
    ]
    codes = [CODES[kind] for kind in order if (kind, True) in asked]
    assert last.exit_code == (codes[-1] if codes else None)
