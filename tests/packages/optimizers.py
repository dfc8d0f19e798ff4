"""Optimizers of packages: a small model for all of them, how to train it, and what comes back."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from holdfast import Checkpointer, Codecs, OptimizerState
from tests.packages.snapshots import module_facts, snapshot, unlike

Make = Callable[[Any], Any]
STEPS, MORE = 6, 5


class Net(nn.Module):
    """A kernel, matrices, vectors, a scalar, and a frozen layer."""

    def __init__(self, scale: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.conv = nn.Conv1d(2, 4, 3)
        self.first = nn.Linear(16, 8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.second = nn.Linear(8, 4)
        self.norm = nn.LayerNorm(8)
        self.scale = nn.Parameter(torch.ones(scale))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(torch.relu(self.conv(x)).flatten(1)))
        return self.second(self.norm(self.frozen(x))) * self.scale


class Words(nn.Module):
    """Sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 4, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.embed((x[:, 0].abs() * 4).long() % 9)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One optimizer and how it wants to be used."""

    make: Make
    style: str = "plain"
    """How it steps: `plain`, `closure`, `graph` (second derivatives), `loss`, `sam`, `lomo`."""
    model: Callable[[], nn.Module] = Net
    refused: str | None = None
    """What the library says of it; None: it is kept."""
    codecs: Codecs | None = None
    """With these, which the refusal asks for, it is kept, too."""


def only_matrices() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 4))


def without_scalar() -> Net:
    return Net((4,))


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def plain(kind: Any, **options: Any) -> Make:
    return lambda model: kind(trained(model), **options)


def matrices(kind: Any, **options: Any) -> Make:
    return lambda model: kind([p for p in trained(model) if p.ndim == 2], **options)


def groups(kind: Any, wide: dict[str, Any], rest: dict[str, Any], **options: Any) -> Make:
    """Two groups: the parameters of two and more dims, and the rest."""

    def make(model: nn.Module) -> Any:
        return kind(
            [
                {"params": [p for p in trained(model) if p.ndim >= 2], **wide},
                {"params": [p for p in trained(model) if p.ndim < 2], **rest},
            ],
            **options,
        )

    return make


def around(kind: Any, **options: Any) -> Make:
    """A wrapper of another optimizer."""
    return lambda model: kind(torch.optim.AdamW(trained(model), lr=0.01), **options)


def batch(step: int) -> Tensor:
    return torch.randn(4, 2, 6, generator=torch.Generator().manual_seed(100 + step))


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def built(case: Case, seed: int) -> tuple[nn.Module, Any]:
    seed_all(seed)
    model = case.model()
    return model, case.make(model)


def train(case: Case, model: nn.Module, optimizer: Any, steps: range) -> None:
    """Take some steps; the same step has the same data and the same random numbers."""
    for step in steps:
        seed_all(step)
        if hasattr(optimizer, "train"):
            optimizer.train()  # schedule-free ones ask for it

        def loss(step: int = step) -> Tensor:
            return (model(batch(step)) - 0.3).square().mean()

        def closure(loss: Callable[[], Tensor] = loss) -> Tensor:
            optimizer.zero_grad()
            value = loss()
            value.backward(create_graph=case.style == "graph")
            return value.detach()

        if case.style == "closure":
            optimizer.step(closure)
        elif case.style == "loss":
            value = float(closure())
            optimizer.step(lambda value=value: value)
        elif case.style == "lomo":
            optimizer.fused_backward(loss(), lr=0.01)
        elif case.style == "sam":
            closure()
            optimizer.first_step(zero_grad=True)
            closure()
            optimizer.second_step(zero_grad=True)
        else:
            closure()
            optimizer.step()
    for p in model.parameters():
        p.grad = None


def parts(model: nn.Module, optimizer: Any) -> dict[str, object]:
    return {"model": model, "optimizer": OptimizerState(optimizer, model)}


def held(model: nn.Module, optimizer: Any, caches: Sequence[str]) -> dict[str, Any]:
    """Return everything that hangs on an optimizer, except for its caches."""
    known = {id(p): f"<{name}>" for name, p in model.named_parameters()}
    known |= {id(model): "<model>", id(getattr(optimizer, "defaults", None)): "<defaults>"}
    facts = snapshot(optimizer, known)
    return {path: v for path, v in facts.items() if not path.startswith(tuple(caches))}


def differences(
    case: Case, root: Path, *, caches: Sequence[str], codecs: Codecs | None
) -> Iterator[str]:
    """Yield what differs without an error, after a load and some steps later.

    Args:
        caches: Paths of attributes that no step depends on: the steps after the load prove it.
    """
    model, optimizer = built(case, 0)
    train(case, model, optimizer, range(STEPS))
    checkpointer = Checkpointer(root, codecs=codecs)
    saved, weights = held(model, optimizer, caches), module_facts(model)
    checkpointer.save(1, parts(model, optimizer))
    yield from (f"the save: {p}" for p in unlike(saved, held(model, optimizer, caches)))
    train(case, model, optimizer, range(STEPS, STEPS + MORE))
    ahead, final = held(model, optimizer, caches), module_facts(model)
    for number, stale in enumerate((0, 2)):
        twin, other = built(case, 1 + number)
        train(case, twin, other, range(50, 50 + stale))
        report = checkpointer.load(parts(twin, other), step=1)
        if report.handed_over or report.fresh or report.missing:
            yield f"{stale}: not loaded: {report.handed_over + report.fresh + report.missing}"
        yield from (f"{stale}: {p}" for p in unlike(saved, held(twin, other, caches)))
        yield from (f"{stale}: weight {p}" for p in unlike(weights, module_facts(twin)))
        train(case, twin, other, range(STEPS, STEPS + MORE))
        yield from (f"{stale}, steps on: {p}" for p in unlike(ahead, held(twin, other, caches)))
        yield from (f"{stale}, steps on: weight {p}" for p in unlike(final, module_facts(twin)))
