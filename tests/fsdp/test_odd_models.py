"""Models that do something unusual train as in one process, or are refused by name."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from holdfast import ConfigError, HoldfastError, Layout, ProcessGroups
from holdfast.fsdp import ShardedModel, fully_shard_model
from tests.fsdp.common import full, sgd
from tests.harness import RankContext, run_ranks

WIDTH = 8
STRATEGIES = ("optim", "optim_grads_params")


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class Stack(nn.Module):
    """Layers in a row, which are units."""

    def __init__(self, make: Callable[[], nn.Module] = Layer) -> None:
        super().__init__()
        self.layers = nn.ModuleList(make() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Auxiliary(Layer):
    """Keeps a loss of its own, which is added in the end; `is_late` after its output is made."""

    def __init__(self, *, is_late: bool) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, WIDTH)
        self.is_late = is_late
        self.loss = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        if self.is_late:
            out = super().forward(x)
        self.loss = torch.tanh(self.gate(x * 2)).square().mean()
        if self.is_late:
            return out
        self.loss = self.loss + self.linear.weight.pow(3).sum()
        return super().forward(x)


class WithAuxiliary(Stack):
    def __init__(self, *, is_late: bool = False) -> None:
        super().__init__(lambda: Auxiliary(is_late=is_late))

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        losses: list[Any] = [layer.loss for layer in self.layers]
        return out + torch.stack(losses).sum()


@dataclass
class Output:
    value: Tensor


class InDataclass(Layer):
    def forward(self, x: Any) -> Any:
        return Output(super().forward(x.value if isinstance(x, Output) else x))


class DataclassStack(Stack):
    def __init__(self) -> None:
        super().__init__(InDataclass)

    def forward(self, x: Any) -> Any:
        return super().forward(x).value


class Experts(nn.Module):
    """Rows go to one of two layers; some ranks have no row for one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.pair = nn.ModuleList([Layer(), Layer()])

    def forward(self, x: Tensor) -> Tensor:
        is_second = x[:, 0] > 0
        return x + torch.where(
            is_second[:, None], self._of(1, x, is_second), self._of(0, x, ~is_second)
        )

    def _of(self, number: int, x: Tensor, chosen: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        if bool(chosen.any()):
            out[chosen] = self.pair[number](x[chosen])
        return out


def normed() -> Layer:
    layer = Layer()
    weight_norm(layer.linear)
    return layer


def compiled(model: Stack) -> Stack:
    for layer in model.layers:
        layer.compile(backend="eager")
    return model


MODELS: Mapping[str, Callable[[], Stack]] = {
    "a loss of its own": WithAuxiliary,
    "output in a dataclass": DataclassStack,
    "experts without rows": lambda: Stack(Experts),
    "weight norm": lambda: Stack(normed),
    "compiled": lambda: compiled(Stack()),
}


def made(make: Callable[[], Stack]) -> Stack:
    torch.manual_seed(3)
    return make()


def rows(step: int, part: int) -> Tensor:
    """All ranks' rows, sorted so that ranks differ in which experts they need."""
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(10 * step + part))
    return x[x[:, 0].sort().indices]


def shard(model: Stack, groups: ProcessGroups, strategy: Any) -> ShardedModel:
    return fully_shard_model(model, groups, experts=(), units=model.layers, strategy=strategy)


def train_both(context: RankContext, names: list[str]) -> None:
    """Each model next to one process that has all ranks' rows."""
    with ProcessGroups.create(Layout(dp=2)) as groups:
        for name in names:
            for strategy in STRATEGIES:
                model, twin = made(MODELS[name]), made(MODELS[name])
                sharded = shard(model, groups, strategy)
                optimizers = sgd(model.parameters()), sgd(twin.parameters())
                for step in range(2):
                    for part in range(2):
                        shares = rows(step, part).chunk(2)
                        with sharded.microbatch(is_last=part == 1):
                            model(shares[context.rank]).square().mean().backward()
                        for share in shares:
                            (twin(share).square().mean() / 2).backward()
                    norm = sharded.step(optimizers[0], max_norm=1.0).norm
                    limit = nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
                    optimizers[1].step()
                    optimizers[1].zero_grad()
                    assert norm == pytest.approx(float(limit), rel=1e-5), (name, strategy)
                for own, other in zip(model.parameters(), twin.parameters(), strict=True):
                    assert torch.allclose(full(own), other, atol=1e-6), (name, strategy)


@pytest.mark.slow
def test_odd_models_train_as_one_process() -> None:
    """F10: with auxiliary losses, dataclasses, experts without rows and parametrizations."""
    run_ranks(2, train_both, [each for each in MODELS if each != "compiled"])


@pytest.mark.slow
def test_compiled_units_train_as_one_process() -> None:
    """F10: the compiler traces none of the hooks."""
    run_ranks(2, train_both, ["compiled"])


class Holder(Layer):
    """Reads its weight from a list that it made in its constructor."""

    def __init__(self) -> None:
        super().__init__()
        self.held = [self.linear.weight]

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.held[0].T + self.linear.bias)


class Giver(Layer):
    """Returns a view of a parameter."""

    def forward(self, x: Tensor) -> Any:
        return x + 1, self.linear.weight[0]


class Taker(Stack):
    def __init__(self) -> None:
        super().__init__(Giver)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x, weight = layer(x)
            x = x * weight
        return x


class Clamped(Layer):
    """Writes to its weight in each forward in training."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.linear.weight.data.clamp_(-0.1, 0.1)
        return super().forward(x)


def refused(sharded: ShardedModel, expected: str) -> str:
    """Run a microbatch that is refused, and return all that is said."""
    with (
        pytest.raises((HoldfastError, RuntimeError), match=expected) as caught,
        sharded.microbatch(is_last=True),
    ):
        sharded.model(rows(0, 0)).square().mean().backward()
    sharded.drop_gradients()
    return "".join(traceback.format_exception_only(caught.value))


def refuse_all(context: RankContext) -> None:
    with ProcessGroups.create(Layout(dp=2)) as groups:
        for strategy in STRATEGIES:
            holder = shard(made(lambda: Stack(Holder)), groups, strategy)
            refused(holder, r"'layers\.2\.linear\.weight' got a gradient as it was before")

            clamped = made(lambda: Stack(Clamped))
            sharded = shard(clamped, groups, strategy)
            clamped.eval()
            with torch.no_grad():
                clamped(rows(0, 0))
            clamped.train()
            refused(sharded, r"written by code of the model in a forward, maybe through \.data")

            model = made(Stack)
            early = dict(model.named_parameters())
            sharded = shard(model, groups, strategy)
            with torch.no_grad():
                early["layers.1.linear.weight"].zero_()
            with pytest.raises(ConfigError, match=r"first 'layers\.1\.linear\.weight', so what"):
                sharded.microbatch(is_last=True).__enter__()
            with sharded.microbatch(is_last=True):
                model(rows(0, 0)).square().mean().backward()
            sharded.step(sgd(model.parameters()))

        taker = shard(made(Taker), groups, "optim_grads_params")
        refused(taker, r"unit 'layers\.0' returns a parameter, or a view of one")
        late = shard(made(lambda: WithAuxiliary(is_late=True)), groups, "optim_grads_params")
        assert "return what is kept in attributes" in refused(late, "storage of size 0")
        outside = made(Stack)
        sharded = shard(outside, groups, "optim_grads_params")
        outside.register_forward_hook(
            lambda module, args, out: out @ module.layers[1].linear.weight
        )  # type: ignore[operator, union-attr]
        assert "belongs in the forward of that unit" in refused(sharded, "mixed torch.Tensor")


def test_what_would_train_wrong_is_refused_by_name() -> None:
    """I1: parameters from before sharding, writes in a forward, freed outputs."""
    run_ranks(2, refuse_all)
