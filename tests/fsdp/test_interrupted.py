"""Errors, and microbatches without a backward, between the steps of a sharded model (I1)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from holdfast import Checkpointer, ConfigError, Layout, ProcessGroups
from holdfast.fsdp import ShardedModel
from tests.fsdp.common import STRATEGIES, build, difference, full, place, rows_of, sgd, shard, truth
from tests.harness import RankContext, run_ranks

LAYOUTS: list[dict[str, Any]] = [{"dp": 2}, {"dp": 4, "ep": 2}, {"dp": 4, "replicas": 2}]


class Trouble(Exception):
    """Raised by a test's model."""


def fails(*_: Any) -> Any:
    raise Trouble


def in_forward(sharded: ShardedModel, rows: Tensor) -> None:
    layer: Any = sharded.model.layers[1]  # type: ignore[index]
    handle = layer.down.register_forward_hook(fails)
    try:
        sharded.model(rows).mean().backward()
    finally:
        handle.remove()


def in_backward(sharded: ShardedModel, rows: Tensor) -> None:
    layer: Any = sharded.model.layers[1]  # type: ignore[index]
    handle = layer.down.register_full_backward_hook(fails)
    try:
        sharded.model(rows).mean().backward()
    finally:
        handle.remove()


def before_backward(sharded: ShardedModel, rows: Tensor) -> None:
    sharded.model(rows)
    raise Trouble


def after_backward(sharded: ShardedModel, rows: Tensor) -> None:
    sharded.model(rows).mean().backward()
    raise Trouble


PLACES = (in_forward, in_backward, before_backward, after_backward)


def attempt(
    sharded: ShardedModel, optimizer: Any, step: int, fail: Callable[..., None], *, at: int
) -> None:
    """A step that fails in one microbatch, that is refused, and whose gradients are dropped."""
    groups = sharded.groups
    parts = rows_of(step, index=groups.index("dp_cp"), shares=groups.size("dp_cp"))

    def run() -> None:
        for number, rows in enumerate(parts):
            with sharded.microbatch(is_last=number == len(parts) - 1):
                if number == at:
                    fail(sharded, rows)
                (sharded.model(rows).mean() / len(parts)).backward()

    with pytest.raises(Trouble):
        run()
    with pytest.raises(ConfigError, match=r"drop_gradients\(\)"):
        sharded.step(optimizer)
    sharded.drop_gradients()


def errors(context: RankContext, sizes: dict[str, Any], strategies: list[str]) -> list[str]:
    """By case, what is wrong after a step that failed anywhere, and was repeated."""
    wrong = []
    expected, reference = truth(sgd, steps=3)
    for turn, strategy in enumerate(strategies):
        for number, fail in enumerate(PLACES):
            # The first and the last microbatch in turn: each place and each strategy has both.
            for at in ((turn + number) % 2,):
                with ProcessGroups.create(Layout(**sizes)) as groups:
                    net = place(build(), groups)
                    sharded = shard(net, groups, strategy=strategy)
                    optimizer = sgd(net.parameters())
                    norms = []
                    for step in range(3):
                        attempt(sharded, optimizer, step, fail, at=at)
                        norms.append(good(sharded, optimizer, step))
                    far = difference(net, expected)
                    off = max(abs(a - b[1]) for a, b in zip(norms, reference, strict=True))
                    if not (far < 1e-6 and off < 1e-5):
                        wrong.append(f"{strategy} {fail.__name__} {at}: {far} {off}")
    return wrong


def good(sharded: ShardedModel, optimizer: Any, step: int) -> float:
    groups = sharded.groups
    parts = rows_of(step, index=groups.index("dp_cp"), shares=groups.size("dp_cp"))
    for number, rows in enumerate(parts):
        with sharded.microbatch(is_last=number == len(parts) - 1):
            (sharded.model(rows).mean() / len(parts)).backward()
    norm: float = sharded.step(optimizer).norm
    return norm


@pytest.mark.parametrize(
    ("sizes", "strategies"),
    [
        (LAYOUTS[0], STRATEGIES),
        *[
            pytest.param(each, STRATEGIES, marks=mark)
            for each, mark in zip(LAYOUTS[1:], (pytest.mark.slow, pytest.mark.nightly), strict=True)
        ],
    ],
)
def test_after_an_error_in_a_microbatch_training_goes_on(
    sizes: dict[str, Any], strategies: list[str]
) -> None:
    """I1: before, the next steps updated some tensors, and then the norm was 0 for ever."""
    # Processes of their own: twice in many runs of the suite the heap of a rank was damaged after
    # this job, and the next job of the same process ended by a signal. Where it is damaged is not
    # known; here it is this test that ends so, and no innocent one.
    outcome = run_ranks(sizes["dp"], errors, sizes, strategies, timeout_s=300, fresh=True)
    for wrong in outcome.results:
        assert wrong == []


def skipped(context: RankContext) -> None:
    expected, _ = truth(sgd, steps=1)
    with ProcessGroups.create(Layout(dp=2)) as groups:
        for strategy in STRATEGIES:
            net = build()
            sharded = shard(net, groups, strategy=strategy)
            optimizer = sgd(net.parameters())
            first, _ = rows_of(0, index=groups.index("dp_cp"), shares=2)
            with sharded.microbatch(is_last=False):
                sharded.model(first).mean().backward()
            with sharded.microbatch(is_last=True):
                pass
            if strategy in ("no_shard", "optim"):
                with pytest.raises(ConfigError, match="are not reduced"):
                    sharded.step(optimizer)
            sharded.drop_gradients()
            good(sharded, optimizer, 0)
            assert difference(net, expected) < 1e-6, strategy


def test_a_last_microbatch_without_a_backward_loses_no_gradient() -> None:
    """I1: before, gradients of the microbatches before it vanished, and the norm was 0."""
    run_ranks(2, skipped)


def halve(model: nn.Module, how: str) -> None:
    """Write to every parameter, as users do."""
    with torch.no_grad():
        if how == "state dict":
            model.load_state_dict({n: v * 0.5 for n, v in model.state_dict().items()})
        for parameter in model.parameters():
            if how == "in place":
                parameter.mul_(0.5)
            elif how == "data":
                parameter.data.mul_(0.5)
            elif how == "local":
                value = parameter.to_local() if isinstance(parameter, DTensor) else parameter
                value.mul_(0.5)


WRITES = ("in place", "data", "local", "state dict")


def written_after_evaluation(context: RankContext) -> None:
    for how in WRITES:
        expected = build()
        halve(expected, how)
        with ProcessGroups.create(Layout(dp=2)) as groups:
            for strategy in STRATEGIES:
                net = build()
                sharded = shard(net, groups, strategy=strategy)
                with torch.no_grad():
                    sharded.model(rows_of(0)[0])
                halve(sharded.model, how)
                assert difference(net, expected) == 0, (how, strategy, "state")
                with torch.no_grad():
                    found = sharded.model(rows_of(0)[0])
                assert torch.allclose(found, expected(rows_of(0)[0]), atol=1e-6), (how, strategy)
                optimizer = sgd(net.parameters())
                good(sharded, optimizer, 0)
                twin = copy.deepcopy(expected)
                twin_optimizer = sgd(twin.parameters())
                twin(torch.cat(rows_of(0))).mean().backward()
                twin_optimizer.step()
                assert difference(net, twin) < 1e-6, (how, strategy, "step")


def test_a_write_after_an_evaluation_is_kept() -> None:
    """I1: before, it went to whole copies, and was lost in the next step and in a save."""
    run_ranks(2, written_after_evaluation)


NEXT: dict[str, Callable[[ShardedModel, Any, Checkpointer], object]] = {
    "forward": lambda sharded, optimizer, checkpointer: sharded.model(rows_of(0)[0]),
    "step": lambda sharded, optimizer, checkpointer: sharded.step(optimizer),
    "drop_gradients": lambda sharded, optimizer, checkpointer: sharded.drop_gradients(),
    "reshard": lambda sharded, optimizer, checkpointer: sharded.reshard(),
    "save": lambda sharded, optimizer, checkpointer: checkpointer.save(1, {"net": sharded.model}),
}


def written_to_whole_copies(context: RankContext, root: str) -> None:
    with ProcessGroups.create(Layout(dp=2)) as groups:
        for number, strategy in enumerate(STRATEGIES):
            net = build()
            sharded = shard(net, groups, strategy=strategy)
            optimizer = sgd(net.parameters())
            checkpointer = Checkpointer(f"{root}/{number}", groups=groups)
            for name, call in NEXT.items():
                before = full(net.table)
                with sharded.microbatch(is_last=True):
                    sharded.model(rows_of(0)[0])
                with torch.no_grad():
                    net.table.mul_(0.5)
                with pytest.raises(ConfigError, match=r"\[7, 6\] was written between a forward"):
                    call(sharded, optimizer, checkpointer)
                if name == "save":
                    with pytest.raises(ConfigError, match=r"\[7, 6\] was written"):
                        sharded.drop_gradients()
                sharded.drop_gradients()
                assert torch.equal(full(net.table), before), (strategy, name)
            good(sharded, optimizer, 0)


def test_a_write_between_forward_and_backward_is_refused(tmp_path: Path) -> None:
    """I1: by whatever comes next; before, a step that was refused for another cause forgot it."""
    run_ranks(2, written_to_whole_copies, str(tmp_path))


def skipped_between_slices(context: RankContext) -> None:
    """A microbatch whose sum in a slice waits for the other slice; then one without backward."""
    with ProcessGroups.create(Layout(dp=4, replicas=2)) as groups:
        for strategy in STRATEGIES:
            net, expected = build(), build()
            sharded = shard(net, groups, strategy=strategy)
            optimizer = sgd(net.parameters())
            first, _ = rows_of(0, index=groups.index("dp_cp"), shares=4)
            with sharded.microbatch(is_last=False):
                sharded.model(first).mean().backward()
            with sharded.microbatch(is_last=True):
                pass
            with pytest.raises(ConfigError, match="are not reduced"):
                sharded.step(optimizer)
            for model in (net, expected):
                halve(model, "in place")  # to shards: `step` has forgotten the gradients
            good(sharded, optimizer, 0)
            expected(torch.cat(rows_of(0))).mean().backward()
            sgd(expected.parameters()).step()
            assert difference(net, expected) < 1e-6, strategy


def test_a_sum_that_waits_for_another_slice_is_not_lost() -> None:
    """I1: before, a step after a last microbatch without a backward updated by zeros.

    The step is refused, and what is written after it counts; before, the next forward refused it.
    """
    run_ranks(4, skipped_between_slices)


def frozen_and_left_out(context: RankContext) -> None:
    with ProcessGroups.create(Layout(dp=2)) as groups:
        for strategy in STRATEGIES:
            net = build()
            sharded = shard(net, groups, strategy=strategy)
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.5, weight_decay=0.1)
            good(sharded, optimizer, 0)
            left_out = net.layers.pop(1).requires_grad_(False)
            before = [full(p) for p in left_out.parameters()]
            good(sharded, optimizer, 1)
            for old, parameter in zip(before, left_out.parameters(), strict=True):
                assert torch.equal(old, full(parameter)), strategy


def test_what_is_frozen_and_does_not_run_keeps_its_values() -> None:
    """I1: before, momentum and decay moved a layer that was frozen before it was left out."""
    run_ranks(2, frozen_and_left_out)
