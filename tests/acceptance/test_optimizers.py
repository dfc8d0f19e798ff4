"""Trouble on any single rank is everybody's: not finite (M13), an update that fails (M15)."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from holdfast import Layout, ProcessGroups
from holdfast.errors import HoldfastError
from holdfast.optim import LossScaler, StepOutcome, gradient_norm
from tests.harness import RankContext, run_ranks
from tests.optim.common import momentum
from tests.optim.experts import Sparse, build_sparse, chain, rows_of

LAYOUTS: tuple[dict[str, Any], ...] = ({"dp": 4, "ep": 2}, {"dp": 2, "cp": 2, "ep": 4})
VALUES = (math.nan, math.inf, -math.inf)
NAMES = ("dense", "bias", "mixers")


def step(
    net: Sparse, optimizer: Any, groups: ProcessGroups, number: int, **options: Any
) -> StepOutcome:
    with optimizer.microbatch(is_last=True):
        loss = net(rows_of(number, groups)).mean()
        scaler = options.get("scaler")
        (loss if scaler is None else scaler.scale_loss(loss)).backward()
    outcome = optimizer.step(max_norm=0.5, **options)
    assert isinstance(outcome, StepOutcome)
    return outcome


def weights(net: Sparse, optimizer: Any) -> list[torch.Tensor]:
    optimizer.synchronize()
    found = []
    for parameter in net.parameters():
        assert isinstance(parameter, DTensor)
        found.append(parameter.full_tensor().detach().clone())
    return found


def poisoned(context: RankContext) -> list[tuple[Any, ...]]:
    """Every rank in turn, every kind of value, every parameter: what each rank was told."""
    report: list[tuple[Any, ...]] = []
    for sizes in LAYOUTS:
        for stage in (1, 2):
            with ProcessGroups.create(Layout(**sizes)) as groups:
                net = build_sparse(groups)
                optimizer = chain(net, momentum, groups, stage=stage)
                scaler = LossScaler(initial=2.0**60, growth_interval=1000)
                assert not step(net, optimizer, groups, 0, scaler=scaler).skipped
                before = weights(net, optimizer)
                cases = itertools.product(range(4), zip(NAMES, VALUES, strict=True))
                for number, (culprit, (name, value)) in enumerate(cases):
                    handle = None
                    if groups.rank == culprit:
                        # One element alone, so that a sum or a maximum could lose it.
                        handle = net.get_parameter(name).register_hook(Poison(value))
                    outcome = step(net, optimizer, groups, number, scaler=scaler)
                    if handle is not None:
                        handle.remove()
                    report.append((outcome.skipped, math.isnan(outcome.norm), outcome.bad_ranks))
                    report[-1] = (*report[-1], outcome.clipped, outcome.loss_scale, scaler.scale)
                after = weights(net, optimizer)
                assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
                good = step(net, optimizer, groups, 1, scaler=scaler)
                assert not good.skipped
                assert math.isfinite(good.norm)
                report.append((good.norm, [w.tolist() for w in weights(net, optimizer)]))
    return report


class Poison:
    """Puts one value into the first element of a gradient."""

    def __init__(self, value: float) -> None:
        self.value = value

    def __call__(self, gradient: torch.Tensor) -> torch.Tensor:
        made = gradient.clone()
        local = made.to_local() if isinstance(made, DTensor) else made
        local.view(-1)[0] = self.value
        return made


@pytest.mark.slow
def test_a_value_that_is_not_finite_is_seen_by_all_wherever_it_is() -> None:
    """M13: every rank skips, says the same ranks and scale, and the norm is NaN, never a number."""
    results = run_ranks(4, poisoned, timeout_s=200).results
    for report in results:
        assert report == results[0]
    steps = [entry for entry in results[0] if len(entry) > 2]
    assert len(steps) == 2 * 2 * 12
    for skipped, is_nan, bad_ranks, clipped, used, after in steps:
        assert skipped
        assert is_nan
        assert bad_ranks
        assert not clipped
        assert after == used / 2
    assert len({bad_ranks for _, _, bad_ranks, *_ in steps}) > 1


def plain_gradients(context: RankContext) -> list[tuple[int, ...]]:
    """Without a sharded optimizer: one bad element on one rank, of a tensor that no other has."""
    named = []
    for sizes in ({"tp": 2, "pp": 2}, {"dp": 4}, {"tp": 4}, {"tp": 2, "dp": 2}):
        with ProcessGroups.create(Layout(**sizes)) as groups:
            for culprit, value in itertools.product(range(4), VALUES):
                parameter = nn.Parameter(torch.zeros(5))
                parameter.grad = torch.ones(5)
                if groups.rank == culprit:
                    parameter.grad[3] = value
                norm = gradient_norm([parameter], groups=groups)
                assert math.isnan(norm.value)
                assert not norm.is_finite
                assert norm.bad_ranks == (culprit,)
                named.append(norm.bad_ranks)
    return named


def test_the_norm_of_plain_gradients_names_the_rank() -> None:
    """A maximum on gloo can lose a NaN, depending on the rank that has it."""
    assert run_ranks(4, plain_gradients).results == [[(i // 3 % 4,) for i in range(48)]] * 4


def failing(context: RankContext) -> list[tuple[str, list[list[float]]]]:
    """The update of each rank in turn fails; then two ranks at once."""
    reports = []
    with ProcessGroups.create(Layout(dp=4, ep=2), timeout_s=20) as groups:
        net = build_sparse(groups)
        optimizer = chain(net, momentum, groups)
        for number, culprits in enumerate(((0,), (1,), (2,), (3,), (0, 3))):
            inner = optimizer["dense" if number % 2 else "expert"].inner

            def broken(*_: object, rank: int = groups.rank) -> None:
                raise OSError(f"boom on {rank}")

            handle = inner.register_step_pre_hook(broken) if groups.rank in culprits else None
            with pytest.raises(HoldfastError) as caught:
                step(net, optimizer, groups, number)
            if handle is not None:
                handle.remove()
            for rank in culprits:
                assert f"rank {rank}" in str(caught.value)
                assert f"boom on {rank}" in str(caught.value)
            outcome = step(net, optimizer, groups, number)
            assert not outcome.skipped
            assert math.isfinite(outcome.norm)
            reports.append(
                (str(caught.value), [w.flatten().tolist() for w in weights(net, optimizer)])
            )
    return reports


def test_an_update_that_fails_on_any_rank_fails_on_all() -> None:
    """M15: all ranks say so, the next step works, and parameters are equal everywhere."""
    results = run_ranks(4, failing).results
    for reports in results:
        assert reports == results[0]
