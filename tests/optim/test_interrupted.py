"""An error in a microbatch on one rank (I1)."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from holdfast import (
    DeadlineError,
    HoldfastError,
    Layout,
    ModuleGroups,
    ModuleLayouts,
    ProcessGroups,
)
from holdfast.fsdp import fully_shard_model
from holdfast.optim import MultiModuleOptimizer, ReducedOptimizer, ShardedOptimizer
from holdfast.optim.microbatches import Description, Launched, MicrobatchTaker, compare_launched
from tests.harness import RankContext, run_ranks


class Trouble(Exception):
    """An error that a user's model raises."""


def waiting_in_the_model(context: RankContext, has_modules: bool) -> str:
    """Rank 1 fails, and leaves like a crashed trainer; rank 0 waits in a sum of the model."""
    limits: dict[str, Any] = {"data_timeout_s": 600}
    torch.manual_seed(0)

    def optimizer_on(groups: ProcessGroups) -> ReducedOptimizer:
        return ReducedOptimizer(torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1), groups)

    with ExitStack() as stack:
        optimizer: Any
        if has_modules:
            layouts = ModuleLayouts({"vision": Layout(tp=2), "language": Layout(dp=2)})
            modules = stack.enter_context(ModuleGroups.create(layouts, **limits))
            control, groups = modules.control, modules["vision"]
            entries = {name: optimizer_on(modules[name]) for name in layouts}
            optimizer = MultiModuleOptimizer(modules, entries)
        else:
            groups = stack.enter_context(ProcessGroups.create(Layout(tp=2), **limits))
            control, optimizer = groups.control, optimizer_on(groups)
        control.timeout_s = 1.0  # not before: ranks may start late
        try:
            with optimizer.microbatch(is_last=True):
                if context.rank == 1:
                    raise Trouble("before a sum over tp")
                dist.all_reduce(torch.ones(3), group=groups.group("tp"))
        except HoldfastError as error:
            return str(error)
    raise AssertionError("rank 1 has failed")


@pytest.mark.parametrize("has_modules", [False, True])
def test_ranks_that_wait_in_the_models_own_collectives_name_the_one_that_failed(
    has_modules: bool,
) -> None:
    """I1: before, they raised the backend's text after its limit, and named no rank.

    The one that failed waits for them by the limit of agreements; with several modules it waited by
    that of tensors, as if no module had collectives of its own.
    """
    outcome = run_ranks(2, waiting_in_the_model, has_modules, expect_failure=True)
    assert outcome.failed == [1], outcome.errors
    assert "rank 1" in outcome.results[0]
    failed = outcome.errors[1]
    assert failed is not None
    assert failed.message == "before a sum over tp"
    assert "ranks [0] did not arrive" in failed.traceback  # in a note


NUM_MICROBATCHES = 3
WIDTH = 6


class Failing(torch.autograd.Function):
    """The same values; the backward raises."""

    @staticmethod
    def forward(context: Any, values: torch.Tensor) -> torch.Tensor:
        del context
        return values.clone()

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> torch.Tensor:
        raise Trouble("in a backward")


class Gate(nn.Module):
    """Passes values on; its backward raises if it is to fail."""

    fails = False

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        passed: torch.Tensor = Failing.apply(values) if self.fails else values
        return passed


class Trained:
    """A model of three layers, and its steps, on this rank."""

    def __init__(self, way: str, groups: ProcessGroups) -> None:
        torch.manual_seed(0)
        layers = [nn.Linear(WIDTH, WIDTH) for _ in range(3)]
        self.gate = Gate()
        self.model = nn.Sequential(*layers[:2], self.gate, *layers[2:])
        self.groups = groups
        kind, _, detail = way.removesuffix(" by layers").partition(" ")
        self.by_layers = way.endswith(" by layers")
        is_predicted = detail.endswith(" predicted")
        if kind == "fsdp":
            self.taker: Any = fully_shard_model(
                self.model, groups, experts=(), units=layers, strategy=detail.partition(" ")[0]
            )
            # As on a device, where a wait for another rank cannot be left.
            self.taker._predicts = is_predicted
            self.optimizer: Any = torch.optim.SGD(self.model.parameters(), lr=0.1)
        else:
            self.taker = self.optimizer = ShardedOptimizer(
                self.model,
                [{"params": [*self.model.parameters()]}],
                make=partial(torch.optim.SGD, lr=0.1),
                groups=groups,
                over="dp_cp",
                divisor=2,
                stage=int(detail[0]),
                overlap=detail.endswith("overlap"),
                bucket_nbytes=200,
                align_nbytes=16,
                elementwise=True,
            )

    def microbatch(self, step: int, number: int, *, fail: bool) -> None:
        around: AbstractContextManager[None] = self.taker.microbatch(
            is_last=number == NUM_MICROBATCHES - 1
        )
        torch.manual_seed(100 * step + 10 * number + self.groups.rank)
        rows = torch.randn(4, WIDTH)
        self.gate.fails = fail
        with around:
            hidden = rows
            for part in self.model if self.by_layers else (self.model,):
                hidden = part(hidden)
            hidden.square().mean().backward()

    def fail(self, step: int, *, at: int, on: int) -> str:
        """Run microbatches up to one that fails on a rank; return what this one raises."""
        with pytest.raises((Trouble, HoldfastError)) as caught:
            self._run_to(step, at, fail=self.groups.rank == on)
        self.taker.drop_gradients()
        return f"{caught.typename}: {caught.value}"

    def _run_to(self, step: int, last: int, *, fail: bool) -> None:
        for number in range(last + 1):
            self.microbatch(step, number, fail=fail and number == last)

    def step(self, number: int) -> float:
        for each in range(NUM_MICROBATCHES):
            self.microbatch(number, each, fail=False)
        outcome = (
            self.taker.step() if self.taker is self.optimizer else self.taker.step(self.optimizer)
        )
        norm: float = outcome.norm
        return norm


def failing_on_one_rank(context: RankContext, way: str) -> list[str]:
    """What this rank raised; steps repeated after it equal those of a run without an error."""
    raised = []
    with ProcessGroups.create(Layout(dp=2)) as groups:
        groups.clone("dp_cp", purpose="dp_cp_ag")
        undisturbed, trained = Trained(way, groups), Trained(way, groups)
        for step in range(1 + NUM_MICROBATCHES):
            expected = undisturbed.step(step)
            if step:  # a sharded model completes what it has seen
                raised.append(trained.fail(step, at=step - 1, on=1))
            assert trained.step(step) == expected, step
    return raised


@pytest.mark.parametrize(
    "way",
    [
        "fsdp optim_grads_params",
        "sharded 2 overlap",
        "fsdp optim_grads by layers",  # each unit is a root of its own
        *(
            pytest.param(way, marks=pytest.mark.slow)
            for way in (
                *("fsdp no_shard", "fsdp optim", "fsdp optim_grads"),
                "fsdp optim_grads_params predicted",
                *("sharded 1", "sharded 1 overlap", "sharded 2"),
            )
        ),
    ],
)
def test_an_error_on_one_rank_is_raised_on_all_and_training_goes_on(way: str) -> None:
    """In any of the microbatches of a step, in the middle of a backward."""
    first, second = run_ranks(2, failing_on_one_rank, way).results
    assert len(first) == len(second) == NUM_MICROBATCHES
    for others, own in zip(first, second, strict=True):
        assert own == "Trouble: in a backward"
        assert "rank 1" in others
        assert "Trouble: in a backward" in others


class Told(MicrobatchTaker):
    """Has launched what a test says, and notes what it is to launch."""

    def __init__(self, launched: Mapping[str, Launched], *, is_late: bool) -> None:
        self._launched, self._is_late = launched, is_late
        self.missing: Mapping[str, Sequence[Description]] = {}
        self.num_waits = 0

    def take_microbatch(self, *, is_last: bool) -> AbstractContextManager[None]:
        raise NotImplementedError

    def launched(self) -> Mapping[str, Launched]:
        return self._launched

    def launch_missing(self, missing: Mapping[str, Sequence[Description]]) -> list[Any]:
        self.missing = missing
        return [self]

    def wait(self) -> None:
        self.num_waits += 1
        if self._is_late:
            raise DeadlineError("late")


def program(chance: random.Random, count: int) -> list[Description]:
    return [(chance.choice(("all-gather", "all-reduce")), 2, "float32") for _ in range(count)]


def histories(chance: random.Random, ranks: Sequence[int]) -> dict[int, Launched]:
    """What each rank has launched on one communicator: as far as it came, most often."""
    whole, before = program(chance, 5), chance.randrange(3)
    found = {}
    for rank in ranks:
        recent = whole[: chance.choice((0, 2, 4, 5, 5))]
        odd = chance.random()
        if odd < 0.1 and recent:
            recent = program(chance, len(recent))
        count = before + len(recent) + (odd > 0.9)
        if 0.1 < odd < 0.15:
            continue  # it has never launched anything there
        found[rank] = Launched(ranks=ranks, count=count, recent=recent)
    return found


def completed(context: RankContext) -> list[tuple[bool, bool]]:
    """Compare drawn histories; by case, whether one is closed, and whether some were missing."""
    found = []
    with ProcessGroups.create(Layout(dp=3)) as groups:
        for seed in range(120):
            chance = random.Random(seed)
            completes, is_late = chance.random() < 0.7, chance.random() < 0.1
            parts = {"a": histories(chance, (0, 1, 2)), "b": histories(chance, (1, 2))}
            own = {n: each[context.rank] for n, each in parts.items() if context.rank in each}
            taker = Told(own, is_late=is_late)
            takers = {"module": taker, "other": Told({}, is_late=False)}
            compare_launched(takers, groups.control, completes=completes)
            is_closed, missing = False, {}
            for name, mine in own.items():
                theirs = [parts[name].get(rank) for rank in mine.ranks]
                counts = {-1 if each is None else each.count for each in theirs}
                if not completes:
                    is_closed |= len(counts) > 1
                    continue
                longest = max((each.recent for each in theirs if each), key=len)
                if all(
                    each is not None
                    and each.count - len(each.recent) == mine.count - len(mine.recent)
                    and each.recent == longest[: len(each.recent)]
                    for each in theirs
                ):
                    missing[name] = [*longest[len(mine.recent) :]]
                else:
                    is_closed = True
            assert taker.missing == missing, seed
            assert taker.num_waits == (completes and not is_closed), seed
            assert taker.has_lost_communicators == (is_closed or (completes and is_late)), seed
            found.append((is_closed, any(missing.values())))
    return found


def test_ranks_complete_what_others_have_launched_or_launch_nothing_any_more() -> None:
    """I1, against whole histories: what ranks launched unlike is never taken for the same."""
    for found in run_ranks(3, completed).results:
        for each in zip(*found, strict=True):
            assert 0.1 < sum(each) / len(found) < 0.9
