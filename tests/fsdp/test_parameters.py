"""What users have put on parameters, attributes and hooks, is kept or refused (I4, F19)."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from holdfast import Checkpointer, ConfigError, Layout, ProcessGroups
from holdfast.fsdp import fully_shard_model
from tests.fsdp.common import STRATEGIES, build, difference, place, sgd, shard
from tests.harness import RankContext, run_ranks

WIDTH, ROWS, STEPS = 6, 8, 3


class Tied(nn.Module):
    """A matrix at both ends, and two units, one of which computes its weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(WIDTH, WIDTH)
        normed = parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
        self.layers = nn.ModuleList([normed, nn.Linear(WIDTH, WIDTH)])
        self.last = nn.Linear(WIDTH, WIDTH)
        self.last.weight = self.first.weight
        self.last.bias.requires_grad_(False)
        self.seen: list[object] = []
        for name, parameter in self.named_parameters():
            parameter.label = name  # type: ignore[attr-defined]
            parameter.no_weight_decay = "bias" in name  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(getattr(self.layers[1].weight, "label", None))
        x = torch.tanh(self.first(x))
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.last(x).square().mean()


def labels(net: nn.Module) -> dict[str, tuple[object, object]]:
    return {
        name: (getattr(p, "label", None), getattr(p, "no_weight_decay", None))
        for name, p in net.named_parameters()
    }


def optimizer_of(net: nn.Module) -> torch.optim.Optimizer:
    """Groups by what the parameters say, as the page tells users."""
    parameters = list(net.parameters())
    skip = [p for p in parameters if p.no_weight_decay]
    decayed = [p for p in parameters if not p.no_weight_decay]
    return torch.optim.SGD(
        [{"params": decayed, "weight_decay": 0.3}, {"params": skip, "weight_decay": 0.0}], lr=0.1
    )


def hook(net: Any, calls: list[str]) -> list[Any]:
    """Hooks that scale gradients: of a tied parameter, of a computed weight, of a frozen one."""

    def scale(name: str, factor: float) -> Callable[[Tensor], Tensor]:
        def hooked(gradient: Tensor) -> Tensor:
            calls.append(name)
            return gradient * factor

        return hooked

    net.last.bias.requires_grad_(True)
    handles = [
        net.first.weight.register_hook(scale("tied", 0.5)),
        net.first.weight.register_hook(scale("again", 3.0)),
        net.layers[0].parametrizations.weight.original0.register_hook(scale("normed", -2.0)),
        net.layers[1].bias.register_hook(scale("unit", 4.0)),
        net.last.bias.register_hook(scale("thawed", 0.25)),
    ]
    net.last.bias.requires_grad_(False)
    return handles


def rows(step: int) -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step))


def between(net: Any, handles: list[Any], step: int) -> None:
    """What users change later: a hook is removed, a parameter thawed."""
    if step == 1:
        handles[0].remove()
        net.last.bias.requires_grad_(True)


def kept(context: RankContext, strategies: list[str]) -> None:
    expected, calls = Tied(), list[str]()
    handles, optimizer = hook(expected, calls), optimizer_of(expected)
    for step in range(STEPS):
        between(expected, handles, step)
        expected(rows(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    with ProcessGroups.create(Layout(dp=2)) as groups:
        for strategy in strategies:
            net, mine = Tied(), list[str]()
            handles = hook(net, mine)
            sharded = fully_shard_model(
                net, groups, experts=(), units=list(net.layers), strategy=strategy
            )
            assert labels(net) == labels(Tied()), strategy
            optimizer = optimizer_of(net)
            for step in range(STEPS):
                between(net, handles, step)
                parts = rows(step).reshape(-1, 2, WIDTH)[:, context.rank].split(ROWS // 4)
                for i, part in enumerate(parts):
                    with sharded.microbatch(is_last=i == 1):
                        (net(part) / 2).backward()
                sharded.step(optimizer)
            assert difference(net, expected) < 1e-6, strategy
            assert sorted(mine) == sorted(calls * 2), strategy  # two microbatches
            assert set(net.seen) == {"layers.1.weight"}, strategy
            net.to(torch.float64)
            assert labels(net) == labels(Tied()), strategy
        with torch.device("meta"):
            empty = Tied()
        sharded = fully_shard_model(empty, groups, experts=(), units=list(empty.layers))
        sharded.materialize()
        assert labels(empty) == labels(Tied())
    with ProcessGroups.create(Layout(dp=2, ep=2)) as groups:
        other: Any = place(build(), groups)
        seen: list[torch.Size] = []
        for layer in other.layers:
            layer.special.mix.label = "expert"
            layer.special.mix.register_hook(lambda g: seen.append(g.shape))
        sharded = shard(other, groups)
        assert {layer.special.mix.label for layer in other.layers} == {"expert"}
        with sharded.microbatch(is_last=True):
            other(torch.arange(4)).mean().backward()
        assert len(seen) == len(other.layers)


@pytest.mark.parametrize(
    "strategies",
    [STRATEGIES[1::2], pytest.param(STRATEGIES[::2], marks=pytest.mark.slow)],
)
def test_attributes_and_hooks_of_parameters_are_kept(strategies: list[str]) -> None:
    """I4: before, both were lost when parameters became DTensors."""
    run_ranks(2, kept, strategies)


def refused(context: RankContext) -> None:
    with ProcessGroups.create(Layout(dp=2)) as groups:
        net: Any = Tied()
        net.layers[1].bias.register_post_accumulate_grad_hook(print)
        with pytest.raises(ConfigError, match=r"'layers\.1\.bias' has a hook of register_post"):
            fully_shard_model(net, groups, experts=(), units=list(net.layers))
        for register in ("register_hook", "register_post_accumulate_grad_hook"):
            net = Tied()
            sharded = fully_shard_model(net, groups, experts=(), units=list(net.layers))
            handle = getattr(net.layers[1].weight, register)(print)
            with pytest.raises(ConfigError, match=r"unit 'layers\.1': a hook .* \[6, 6\] after"):
                sharded.microbatch(is_last=True).__enter__()
            with pytest.raises(ConfigError, match=r"unit 'layers\.1': a hook .* \[6, 6\] after"):
                net(rows(0))  # torch's own step looks at no hooks
            handle.remove()
            optimizer = sgd(net.parameters())
            loss = net(rows(0))
            handle = getattr(net.layers[1].weight, register)(print)
            loss.backward()
            with pytest.raises(ConfigError, match=r"unit 'layers\.1': a hook .* \[6, 6\] after"):
                sharded.step(optimizer)
            handle.remove()
            with sharded.microbatch(is_last=True):
                net(rows(0)).backward()
            assert sharded.step(optimizer).norm > 0
        refuse_conversion(groups)


def refuse_conversion(groups: ProcessGroups) -> None:
    """Before, what came before the first gradient that waits was converted."""
    net = Tied()
    sharded = fully_shard_model(net, groups, experts=(), units=list(net.layers), strategy="optim")
    with sharded.microbatch(is_last=False):
        net(rows(0)).backward()
    with pytest.raises(ConfigError, match="nothing was changed"):
        net.double()
    assert {p.dtype for p in net.parameters()} == {torch.float32}


def test_hooks_that_would_never_be_called_are_refused() -> None:
    """I4"""
    run_ranks(2, refused)


def assign(net: Any) -> None:
    net.layers[1].bias = nn.Parameter(torch.ones(WIDTH))


def remove(net: Any) -> None:
    net.layers[1].bias = None


def tie(net: Any) -> None:
    net.layers[1].bias = net.layers[0].bias


def give_memory(net: Any) -> None:
    net.layers[1].bias.data = net.layers[1].bias.data * 2


def convert(net: Any) -> None:
    net.layers[1].to(torch.float64)


def swap(net: Any) -> None:
    torch.utils.swap_tensors(net.layers[1].bias, nn.Parameter(net.layers[1].bias.detach() * 2))


REPLACED = {
    assign: "is another one since",
    remove: "is not there any more since",
    tie: "is another one since",
    give_memory: "was assigned to through .data",
    convert: "was converted from torch.float32 to torch.float64",
    swap: "was swapped with another tensor",
}


def replaced(context: RankContext, directory: str) -> None:
    with (
        ProcessGroups.create(Layout(dp=2)) as groups,
        Checkpointer(directory, groups=groups) as saver,
    ):
        for change, what in REPLACED.items():
            net: Any = Tied()
            sharded = fully_shard_model(net, groups, experts=(), units=list(net.layers))
            optimizer = sgd(net.parameters())

            def backward(net: Any = net, sharded: Any = sharded) -> None:
                with sharded.microbatch(is_last=True):
                    net(rows(0)).backward()

            if change in (assign, remove, tie):  # in the first forward FSDP2 takes what is there
                before = net.layers[1].bias
                change(net)
                with pytest.raises(ConfigError, match=re.escape(what)):
                    backward()
                net.layers[1].bias = before
                sharded.drop_gradients()
            backward()
            sharded.step(optimizer)  # what was as it should be then is not asked unit by unit again
            backward()
            before = net.layers[1].bias
            change(net)
            match = rf"unit 'layers\.1': parameter '\w+' {re.escape(what)}"
            with pytest.raises(ConfigError, match=match):
                saver.save(1, {"model": net})
            with pytest.raises(ConfigError, match=match):
                sharded.step(optimizer)
            if change is give_memory:  # it has changed nothing, and one refusal tells that
                backward()
                assert sharded.step(optimizer).norm > 0
                change(net)
            with torch.no_grad(), pytest.raises(ConfigError, match=match):
                net(rows(0))
            if change not in (convert, swap):
                net.layers[1].bias = before
                sharded.drop_gradients()
                backward()
                assert sharded.step(optimizer).norm > 0
        # What FSDP2 follows: a conversion that ends as it began, and one before the first forward.
        net = Tied()
        sharded = fully_shard_model(net, groups, experts=(), units=list(net.layers))
        net.to(torch.float64)
        for _ in range(3):
            net(rows(0).double())
            net.to(torch.float32).to(torch.float64)


def test_a_parameter_that_is_replaced_after_sharding_is_refused(tmp_path: Path) -> None:
    """F19: the next forward would put back what was there, and a step train that."""
    run_ranks(2, replaced, str(tmp_path))
