"""A small model's step in two messages does what one of several buckets does."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from holdfast import ConfigError, HoldfastError, Layout, ProcessGroups
from holdfast.optim import LossScaler, ShardedOptimizer, StepOutcome
from holdfast.optim.joint import JointSums
from tests.harness import RankContext, run_ranks
from tests.optim.common import adamw

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "complex": torch.complex128}
OTHER_DEVICE = torch.device("meta")
"""As that of `torch.set_default_device`: a step of parameters on the host makes nothing there."""


@contextlib.contextmanager
def made_apart(is_apart: bool) -> Iterator[None]:
    """Reduce gradients, sum and gather apart, as for large models."""
    if is_apart:
        with mock.patch.object(JointSums, "fits", return_value=False):
            yield
    else:
        yield


class Training:
    """A model of three layers, the last one seldom used."""

    def __init__(self, groups: ProcessGroups, dtype: torch.dtype, **options: Any) -> None:
        torch.manual_seed(0)
        self.net = nn.ModuleList(nn.Linear(5, 5, dtype=dtype) for _ in range(3))
        self.rank = groups.rank
        with OTHER_DEVICE:
            self.optimizer = ShardedOptimizer(
                self.net, self.net.parameters(), make=adamw, groups=groups, over="dp_cp",
                divisor=groups.size("dp_cp"), elementwise=True, **options,
            )  # fmt: skip

    def step(
        self, number: int, *, scale: float = 1.0, num_layers: int = 2, ask: bool = False, **how: Any
    ) -> StepOutcome:
        generator = torch.Generator().manual_seed(10 * number + self.rank)
        for is_last in (False, True):
            with self.optimizer.microbatch(is_last=is_last):
                x = torch.randn(4, 5, generator=generator).to(self.net[0].weight.dtype)
                for layer in self.net[:num_layers]:
                    x = layer(x)
                (x.abs().square().mean() * scale).backward()
        if ask:
            self.optimizer.share_norm()
        with OTHER_DEVICE:
            return self.optimizer.step(**how)

    def values(self) -> list[Tensor]:
        self.optimizer.synchronize()
        return [p.detach().clone() for p in self.net.parameters()]


def train(
    context: RankContext, dtype: str, is_apart: bool
) -> tuple[list[StepOutcome], list[list[Tensor]]]:
    outcomes, values = [], []
    with made_apart(is_apart), ProcessGroups.create(Layout(dp=3)) as groups:
        training = Training(groups, DTYPES[dtype])
        assert (training.optimizer._engine._joint is None) is is_apart

        def step(number: int, **how: Any) -> None:
            outcomes.append(training.step(number, **how))
            values.append(training.values())

        step(0)
        step(1, max_norm=0.01, count_zeros=True)
        step(2, scale=math.inf if context.rank == 1 else 1.0, count_zeros=True)
        step(3, num_layers=3 if context.rank == 2 else 2)
        step(4, is_finite=context.rank != 0)
        step(5, scale=4.0, scaler=LossScaler(initial=4.0))
        step(6, ask=True, max_norm=0.1)
        step(7)
    return outcomes, values


@pytest.mark.parametrize("dtype", DTYPES)
def test_steps_in_two_messages_are_those_of_several(dtype: str) -> None:
    """With clipping, overflow, unused parameters, a scaler, and a norm that is asked for before."""
    ours, theirs = (run_ranks(3, train, dtype, is_apart).results for is_apart in (False, True))
    for (outcomes, values), (others, other_values) in zip(ours, theirs, strict=True):
        assert repr(outcomes) == repr(ours[0][0])  # to the last bit on every rank
        for mine, other in zip(outcomes, others, strict=True):
            assert mine.norm == pytest.approx(other.norm, rel=1e-12, nan_ok=True)
            for key in ("clipped", "skipped", "bad_ranks", "num_zeros", "loss_scale"):
                assert getattr(mine, key) == getattr(other, key)
        assert [o.skipped for o in outcomes] == [False, False, True, False, True, *[False] * 3]
        assert outcomes[2].bad_ranks
        # before anything was clipped: to the last bit
        assert all(torch.equal(a, b) for a, b in zip(values[0], other_values[0], strict=True))
        for mine_now, other_now in zip(values, other_values, strict=True):
            torch.testing.assert_close(mine_now, other_now)


def trouble(context: RankContext, is_apart: bool, overlap: bool) -> list[str]:
    errors = []
    with made_apart(is_apart), ProcessGroups.create(Layout(dp=2)) as groups:
        training = Training(groups, torch.float32, overlap=overlap)
        twin = Training(groups, torch.float32, overlap=overlap)
        inner: Any = training.optimizer.inner

        def refused(number: int, kind: type[HoldfastError], **how: Any) -> None:
            before = training.values()
            with pytest.raises(kind) as caught:
                training.step(number, **how)
            errors.append(str(caught.value))
            if not inner.state_dict()["state"] or "failed" not in errors[-1]:
                after = training.values()
                assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))

        for each in (training, twin):
            each.step(0)
        refused(1, ConfigError, max_norm=1.0 + context.rank)
        refused(2, ConfigError, max_norm=-1.0 if context.rank else 1.0)
        refused(3, ConfigError, scaler=LossScaler(initial=2.0 + context.rank))
        if context.rank:
            training.net[0].weight.grad = torch.ones(5, 5)
        with contextlib.ExitStack() as stack:
            if context.rank:
                stack.enter_context(
                    mock.patch.object(
                        training.optimizer._watch, "check", side_effect=OSError("no disk")
                    )
                )
            refused(4, HoldfastError)
        for each in (training, twin):
            each.step(5)
        pairs = zip(training.values(), twin.values(), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)
        with contextlib.ExitStack() as stack:
            if context.rank:
                stack.enter_context(
                    mock.patch.object(inner, "step", side_effect=OSError("failed update"))
                )
            with pytest.raises(HoldfastError, match="failed update"):
                training.step(6)
        training.step(7)
        everywhere = [each.double().sum().item() for each in training.values()]
        sums = groups.control.all_gather(repr(everywhere).encode(), phase="compare")
        assert sums[0] == sums[1]
    return errors


@pytest.mark.parametrize("overlap", [False, True])
def test_trouble_of_one_rank_is_raised_on_all_by_the_same_words(overlap: bool) -> None:
    joint, apart = (run_ranks(2, trouble, is_apart, overlap).results for is_apart in (False, True))
    assert joint == apart
    assert joint[0] == joint[1]
    assert "max_norm" in joint[0][0]
    assert "no disk" in joint[0][3]
