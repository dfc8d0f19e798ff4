"""Optimizers of every kind, how to train with them, and how to see that nothing of one is lost."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from holdfast import Checkpointer, OptimizerState, Stored

Make = Callable[[nn.Module], Any]
"""From a module to an optimizer of it."""


class Net(nn.Module):
    """Matrices and vectors, of any dtype."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.first = nn.Linear(6, 5, dtype=dtype)
        self.second = nn.Linear(5, 3, dtype=dtype)
        self.scale = nn.Parameter(torch.ones(3, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x))) * self.scale


class Words(nn.Module):
    """Sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 4, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.embed((x[:, :3].abs() * 4).long() % 9)


def net(seed: int, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(seed)
    return Net(dtype)


def words(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return Words()


def batch(step: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randn(4, 6, generator=generator).to(dtype)


def train(model: nn.Module, optimizer: Any, steps: range, *, then: Any = None) -> None:
    """Some steps; the same step has the same data, whoever takes it. `then`: after each step."""
    dtype = next(model.parameters()).dtype

    for step in steps:

        def closure(step: int = step) -> Any:
            optimizer.zero_grad()
            loss = model(batch(step, dtype)).abs().square().mean()
            loss.backward()
            return loss

        loss = closure()
        optimizer.step(closure) if needs_closure(optimizer) else optimizer.step()
        if then is not None:
            then(float(loss.detach()))
    optimizer.zero_grad()


def needs_closure(optimizer: Any) -> bool:
    inner = getattr(optimizer, "optimizer", optimizer)
    return isinstance(inner, torch.optim.LBFGS)


def tree_of(optimizer: Any) -> Any:
    """A deep copy of what an optimizer states."""
    return copy.deepcopy(optimizer.state_dict())


def differences(one: Any, other: Any, path: str = "") -> Iterator[str]:
    """Every place where two trees differ: kind, dtype, shape, bits."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if one.dtype != other.dtype or one.shape != other.shape:
            yield f"{path}: {one.dtype}{list(one.shape)} {other.dtype}{list(other.shape)}"
        elif not torch.equal(bits(one), bits(other)):
            yield f"{path}: {one} {other}"
    elif isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        if one.dtype != other.dtype or not np.array_equal(one, other):
            yield f"{path}: {one} {other}"
    elif isinstance(one, Mapping) and isinstance(other, Mapping):
        for key in one.keys() | other.keys():
            if key in one and key in other:
                yield from differences(one[key], other[key], f"{path}.{key}")
            else:
                yield f"{path}.{key}: only in {'the first' if key in one else 'the second'}"
    elif isinstance(one, list | tuple) and type(one) is type(other):
        if len(one) != len(other):
            yield f"{path}: {len(one)} and {len(other)} items"
        for i, (a, b) in enumerate(zip(one, other, strict=False)):
            yield from differences(a, b, f"{path}.{i}")
    elif type(one) is not type(other) or (one != other and not (is_nan(one) and is_nan(other))):
        yield f"{path}: {one!r} {other!r}"


def is_nan(value: object) -> bool:
    return isinstance(value, float) and math.isnan(value)


def bits(tensor: Tensor) -> Tensor:
    return tensor.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8)


def stored(root: Path, step: int) -> Any:
    """Everything that a checkpoint has of model and optimizer."""
    found = Checkpointer(root).load({"model": Stored(), "optimizer": Stored()}, step=step)
    return dict(found.values)


def parts(model: nn.Module, optimizer: Any) -> dict[str, object]:
    return {"model": model, "optimizer": OptimizerState(optimizer, model)}


def assert_kept(
    root: Path,
    make_model: Callable[[int], nn.Module],
    make: Make,
    *,
    steps: int = 3,
    state: Callable[[Any], Any] = tree_of,
) -> None:
    """Save, load into a fresh and into a stale twin, save again, go on: all bitwise the same."""
    model = make_model(0)
    optimizer = make(model)
    train(model, optimizer, range(steps))
    checkpointer = Checkpointer(root)
    checkpointer.save(1, parts(model, optimizer))
    at_save, first = state(optimizer), stored(root, 1)
    train(model, optimizer, range(steps, steps + 3))
    final, weights = state(optimizer), copy.deepcopy(model.state_dict())
    for number, stale_steps in enumerate((0, 2, 5)):
        twin = make_model(number + 1)
        other = make(twin)
        train(twin, other, range(50, 50 + stale_steps))
        groups = list(other.param_groups)
        checkpointer.load(parts(twin, other), step=1)
        assert not list(differences(at_save, state(other))), (stale_steps, "after the load")
        assert all(a is b for a, b in zip(groups, other.param_groups, strict=True))
        checkpointer.save(2 + number, parts(twin, other))
        assert not list(differences(first, stored(root, 2 + number))), (stale_steps, "again")
        train(twin, other, range(steps, steps + 3))
        assert not list(differences(final, state(other))), (stale_steps, "three steps on")
        assert not list(differences(weights, twin.state_dict())), (stale_steps, "weights")
