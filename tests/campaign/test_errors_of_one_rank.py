"""An error in a microbatch on some ranks ends the step on all, and training continues."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from holdfast import Layout, ProcessGroups
from holdfast.errors import HoldfastError
from holdfast.parallel.ranks import shorten_ranks
from tests.campaign.programs import STRATEGIES, Program, Traits, Way
from tests.campaign.twin import run_twin
from tests.campaign.ways import Trained, rows_of
from tests.harness import RankContext, run_ranks


class Trouble(Exception):
    """An error that a user's model raises."""


@contextmanager
def failing(trained: Trained, place: str) -> Iterator[None]:
    """Let the second block of the model raise in its forward or in its backward."""
    block = trained.model.blocks[1]

    def in_forward(*_: Any) -> None:
        raise Trouble(f"in {place} of a block")

    def in_backward(module: Any, args: Any, output: Tensor) -> None:
        output.register_hook(in_forward)

    hook: Callable[..., None] = in_forward if place == "forward" else in_backward
    handle = block.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def microbatches(trained: Trained, step: int, *, at: int, place: str) -> None:
    """A step up to its update; with a place, microbatch `at` fails there."""
    groups = trained.groups
    parts = rows_of(
        step,
        index=groups.index("dp_cp"),
        shares=groups.size("dp_cp"),
        parts=trained.way.num_microbatches,
    )
    for number, rows in enumerate(parts):
        fails = place if number == at else ""
        with trained._microbatch(is_last=number == len(parts) - 1):
            if fails == "before":
                raise Trouble("in before of a block")
            if fails in ("forward", "backward"):
                with failing(trained, fails):
                    (trained.model(rows).mean() / len(parts)).backward()
            else:
                (trained.model(rows).mean() / len(parts)).backward()
            if fails == "after":
                raise Trouble("in after of a block")
    trained._update()


def outcome_of(trained: Trained, step: int, *, at: int, place: str) -> str:
    """The error of a step, in words."""
    try:
        microbatches(trained, step, at=at, place=place)
    except (Trouble, HoldfastError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def run_way(
    context: RankContext, program: Program, way: Way, *, fails: list[int], first: int
) -> list[str]:
    """What is wrong on this rank, by place of the error; `first` is the step that fails first."""
    wrong = []
    places = [(place, at) for place in PLACES for at in range(way.num_microbatches)]
    num_steps = first + len(places)
    truth = run_twin(replace(program, ways=(replace(way, num_steps=num_steps),)))
    with ProcessGroups.create(Layout(**way.layout), timeout_s=8) as groups:
        trained = Trained(program, way, groups)
        for number in range(first):
            trained.step(number)
        for number, (place, at) in enumerate(places, start=first):
            own = place if context.rank in fails else ""
            found = outcome_of(trained, number, at=at, place=own)
            ranks = shorten_ranks(fails)
            named = f"rank{'s' if len(fails) > 1 else ''} {ranks}: Trouble: in {place} of a block"
            expected = f"Trouble: in {place} of a block" if own else named
            if expected not in found:
                wrong.append(f"{way.kind} {place} in {at}: {found}")
            (trained.sharded or trained.optimizer).drop_gradients()
            step = trained.step(number)
            if abs(step.outcome.norm - truth[number].norm) > 1e-5:
                wrong.append(f"{place} in {at}: norm {step.outcome.norm}, not {truth[number].norm}")
        last = truth[-1].parameters
        far = max(float((v - last[n]).abs().max()) for n, v in trained.whole().items() if v.numel())
        if not far < 1e-6:
            wrong.append(f"{way.kind} {way.options}: weights are {far} off")
        trained.close()
    return wrong


PLACES = ("before", "forward", "backward", "after")
PROGRAM = Program(
    seed=24, traits=Traits(dtype=torch.float64), optimizer="adamw", max_norm=0.1, ways=()
)
PLAIN = [
    Way(kind="plain", layout={"dp": 2}, num_microbatches=2),
    *[
        Way(kind=kind, layout={"dp": 2}, num_microbatches=2, options=options)
        for kind, options in (
            ("zero", {"stage": 1, "overlap": True}),
            ("chained", {"stage": 2}),
        )
    ],
]
SHARDED = [
    Way(kind="fsdp", layout=layout, num_microbatches=2, options={"strategy": strategy})
    for layout in ({"dp": 2}, {"dp": 4, "replicas": 2})
    for strategy in STRATEGIES
]


def run_ways(context: RankContext, ways: list[Way], first: int) -> list[str]:
    wrong = []
    for way in ways:
        for fails in ([1], [0, 1]):
            if len(fails) < Layout(**way.layout).world_size:
                wrong += run_way(context, PROGRAM, way, fails=fails, first=first)
    return wrong


def test_an_error_on_one_rank_is_raised_on_all_and_training_continues() -> None:
    """I1: before, the other ranks waited in a reduction to its deadline."""
    for wrong in run_ranks(2, run_ways, PLAIN, 0).results:
        assert wrong == []


@pytest.mark.parametrize(
    "way",
    [SHARDED[1], SHARDED[3], *(pytest.param(way, marks=pytest.mark.slow) for way in SHARDED)],
    ids=lambda way: f"{way.layout} {way.options}",
)
def test_fully_sharded_ranks_make_the_collectives_of_a_failed_microbatch(way: Way) -> None:
    """I1: before, the other ranks waited in a gather to its deadline."""
    num_ranks = Layout(**way.layout).world_size
    for wrong in run_ranks(num_ranks, run_ways, [way], 1, timeout_s=60).results:
        assert wrong == []


def in_a_collective_of_the_model(context: RankContext) -> str:
    with ProcessGroups.create(Layout(tp=2), timeout_s=1, data_timeout_s=1) as groups:
        trained = Trained(PROGRAM, Way(kind="plain", layout={"tp": 2}), groups)

        def run() -> None:
            with trained.optimizer.microbatch(is_last=True):
                if context.rank == 1:
                    raise Trouble("before a sum over tp")
                dist.all_reduce(torch.ones(3), group=groups.group("tp"))

        with pytest.raises((Trouble, HoldfastError)) as caught:
            run()
    return f"{caught.typename}: {caught.value}"


def test_ranks_that_wait_in_the_models_own_collectives_name_the_one_that_failed() -> None:
    """I1: before, they raised the backend's text after its limit, and named no rank."""
    first, second = run_ranks(2, in_a_collective_of_the_model, fresh=True, timeout_s=60).results
    assert "rank 1: Trouble: before a sum over tp" in first
    assert second.startswith("Trouble: before a sum over tp")
