"""An error in a microbatch on one rank (I1)."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from holdfast import HoldfastError, Layout, ProcessGroups
from holdfast.fsdp import fully_shard_model
from holdfast.optim import ReducedOptimizer, ShardedOptimizer
from tests.harness import RankContext, run_ranks


class Trouble(Exception):
    """An error that a user's model raises."""


def waiting_in_the_model(context: RankContext) -> str:
    with ProcessGroups.create(Layout(tp=2), timeout_s=3, data_timeout_s=3) as groups:
        torch.manual_seed(0)
        inner = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1)
        optimizer = ReducedOptimizer(inner, groups)

        def run() -> None:
            with optimizer.microbatch(is_last=True):
                if context.rank == 1:
                    raise Trouble("before a sum over tp")
                dist.all_reduce(torch.ones(3), group=groups.group("tp"))

        with pytest.raises((Trouble, HoldfastError)) as caught:
            run()
    return f"{caught.typename}: {caught.value}"


def test_ranks_that_wait_in_the_models_own_collectives_name_the_one_that_failed() -> None:
    """I1: before, they raised the backend's text after its limit, and named no rank."""
    first, second = run_ranks(2, waiting_in_the_model, fresh=True, timeout_s=60).results
    assert "rank 1" in first
    assert second.startswith("Trouble: before a sum over tp")


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
        *("fsdp optim_grads", "fsdp optim_grads_params", "sharded 2", "sharded 2 overlap"),
        "fsdp optim_grads by layers",  # each unit is a root of its own
        *(
            pytest.param(way, marks=pytest.mark.slow)
            for way in (
                *("fsdp no_shard", "fsdp optim", "fsdp optim_grads_params predicted"),
                *("sharded 1", "sharded 1 overlap"),
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
