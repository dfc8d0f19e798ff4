"""Units are gathered ahead in the order in which they ran, and no others are whole (F15)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from holdfast import HoldfastError, Layout, ProcessGroups
from holdfast.fsdp import ShardedModel, fully_shard_model
from holdfast.parallel.groups.launches import LaunchRecorder
from tests.fsdp.common import adamw, difference
from tests.harness import RankContext, run_ranks

NUM, WIDTH, ROWS = 6, 5, 8
UP, DOWN = [0, 1, 2, 3, 4, 5], [5, 4, 3, 2, 1, 0]
TWICE, FEW, MIXED = [0, 1, 0, 2, 2, 0, 3], [0, 3], [3, 0, 5, 1, 4, 2]
ORDERS: dict[str, list[list[int]]] = {
    "reversed": [DOWN] * 3,
    "changing": [UP, UP, DOWN, MIXED, MIXED, UP],
    "twice": [TWICE] * 3,
    "twice, later": [UP, UP, TWICE, TWICE, UP],
    "sometimes": [UP, FEW, UP, FEW, MIXED, UP],
    "never": [FEW] * 3,
}
"""By case, the layers of each step."""


class Picky(nn.Module):
    """Runs those of its layers that it is told to, in that order."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(NUM))
        self.order: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        for number in self.order:
            x = torch.tanh(self.layers[number](x))
        return x.square().mean()


def rows(step: int) -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step))


def watch(net: Picky) -> list[int]:
    """Note how many layers are whole, or about to be, whenever one runs forward or backward."""
    counts: list[int] = []
    states = [layer._get_fsdp_state() for layer in net.layers]  # type: ignore[operator]

    def note(*_: Any) -> None:
        groups = [state._fsdp_param_groups for state in states]
        counts.append(
            sum(any(g.is_unsharded or g._all_gather_result is not None for g in e) for e in groups)
        )

    def both(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        note()
        # A hook before FSDP2's own is called before it gathers, one at an input after it.
        if output.requires_grad:
            output = output.clone()
            output.grad_fn.register_hook(note)  # type: ignore[union-attr]
        return output

    for layer in net.layers:
        layer.register_forward_hook(both, prepend=True)
    return counts


def make(groups: ProcessGroups, **options: Any) -> tuple[Picky, ShardedModel, Any]:
    net = Picky()
    sharded = fully_shard_model(net, groups, experts=(), units=list(net.layers), **options)
    return net, sharded, adamw(net.parameters())


def step_of(sharded: ShardedModel, optimizer: Any, step: int) -> None:
    index = sharded.groups.index("dp_cp")
    with sharded.microbatch(is_last=True):
        sharded.model(rows(step)[index::2]).backward()
    sharded.step(optimizer)


def ordered(context: RankContext, nums: list[int]) -> list[str]:
    """By case and step, what is wrong: weights, layers that are whole, launches."""
    wrong = []
    with ProcessGroups.create(Layout(dp=2)) as groups:
        for case, orders in ORDERS.items():
            for num in nums:
                expected = Picky()
                truth = adamw(expected.parameters())
                net, sharded, optimizer = make(groups, num_prefetched=num)
                counts = watch(net)
                for step, order in enumerate(orders):
                    expected.order = net.order = order
                    expected(rows(step)).backward()
                    truth.step()
                    truth.zero_grad()
                    counts.clear()
                    with LaunchRecorder(groups) as recorder:
                        step_of(sharded, optimizer, step)
                    where = f"{case}, step {step}, {num} ahead"
                    far = difference(net, expected)
                    if far > 1e-6:
                        wrong.append(f"{where}: weights are {far} off")
                    # one that runs, and those ahead: with 0 FSDP2 gathers one in backward
                    if max(counts) > 1 + max(num, 1):
                        wrong.append(f"{where}: {counts} whole")
                    if not step and max(counts[: len(order)]) > 1:
                        wrong.append(f"{where}: {counts} whole in the first forward")
                    if num and step and max(counts[: len(order)]) < 2 and order == orders[step - 1]:
                        wrong.append(f"{where}: {counts}, nothing was gathered ahead")
                    same = step and order == orders[step - 1]
                    gathers = len(recorder.of("all_gather"))
                    if same and gathers != 2 * len(order) and case not in ("twice", "twice, later"):
                        wrong.append(f"{where}: {gathers} gathers")
                    scatters = len(recorder.of("reduce_scatter"))
                    # A unit that ran in an earlier step, and not in this one, reduces zeros.
                    before = {number for earlier in orders[:step] for number in earlier}
                    if scatters != len(order) + len(before - set(order)):
                        wrong.append(f"{where}: {scatters} reductions")
    return wrong


@pytest.mark.slow
@pytest.mark.parametrize("nums", [[1], pytest.param([0, 2], marks=pytest.mark.nightly)])
def test_units_are_gathered_in_the_order_in_which_they_run(nums: list[int]) -> None:
    """F15: before, a model that runs its layers backwards kept all but one of them whole."""
    for wrong in run_ranks(2, ordered, nums, timeout_s=280).results:
        assert not wrong, "\n".join(wrong)


def in_vain(context: RankContext) -> None:
    """A unit gathered ahead does not run; its weights are written; then it runs."""
    with ProcessGroups.create(Layout(dp=2)) as groups:
        for without in (torch.no_grad, torch.inference_mode, torch.enable_grad):
            net, sharded, optimizer = make(groups)
            net.order = UP
            for step in range(2):
                step_of(sharded, optimizer, step)
            net.order = UP[:2]
            with without():
                net(rows(2))
            sharded.reshard()
            computes_with_what_is_written(net)
            order = net._get_fsdp_state()._comm_ctx.post_forward_order  # type: ignore[operator]
            if without is not torch.enable_grad:
                assert not order  # evaluations leave nothing behind


@torch.no_grad()
def computes_with_what_is_written(net: Picky) -> None:
    expected = Picky()
    for parameter, other in zip(net.parameters(), expected.parameters(), strict=True):
        parameter.mul_(1.5)
        other.copy_(parameter.full_tensor())  # type: ignore[attr-defined]
    net.order = expected.order = UP
    assert torch.allclose(net(rows(3)), expected(rows(3)), atol=1e-6)


def in_vain_before_an_error(context: RankContext) -> None:
    """An evaluation fails between two units; weights are written."""
    with ProcessGroups.create(Layout(dp=2)) as groups:
        for strategy, is_dropped in (("optim_grads_params", False), ("optim", True)):
            net, sharded, _ = make(groups, strategy=strategy)
            computes_with_what_is_written(net)  # a first forward would notice the wrong weights
            net.order = [*UP[:2], NUM]
            with torch.no_grad(), pytest.raises(IndexError):
                net(rows(2))
            if is_dropped:
                sharded.drop_gradients()
                with torch.no_grad():
                    net.layers[0](rows(2))  # alone: it is no part of the forward that has failed
                assert all(isinstance(parameter, DTensor) for parameter in net.parameters())
                sharded.reshard()
            computes_with_what_is_written(net)


@pytest.mark.parametrize("case", [in_vain, in_vain_before_an_error])
def test_what_was_gathered_ahead_in_vain_is_never_used(case: Callable[[RankContext], None]) -> None:
    """F15: before, the next forward used weights of before a write."""
    run_ranks(2, case)


def ended_in_another_order(context: RankContext) -> None:
    """A microbatch in another order, whose forward has ended on one rank and not on the other."""
    with ProcessGroups.create(Layout(dp=2)) as groups:
        net, sharded, optimizer = make(groups)
        expected = Picky()
        truth = adamw(expected.parameters())
        net.order = expected.order = UP
        for step in range(2):
            if step:
                net.order = DOWN
                hook: Any = net.layers[0].register_forward_hook(
                    lambda *_: [][0] if context.rank else None
                )
                with (
                    pytest.raises((IndexError, HoldfastError)),
                    sharded.microbatch(is_last=True),
                ):
                    net(rows(step)).backward()
                hook.remove()
                sharded.drop_gradients()
                net.order = UP
            step_of(sharded, optimizer, step)
            expected(rows(step)).backward()
            truth.step()
            truth.zero_grad()
        assert difference(net, expected) < 1e-6


def test_ranks_gather_ahead_in_one_order_after_an_error() -> None:
    """I1, F15: a rank whose forward has ended must not gather by an order that others never saw."""
    run_ranks(2, ended_in_another_order)
