"""Optimizers that hold optimizers: what any of them holds is stored, or the save says it is not."""

from __future__ import annotations

import copy
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW

from holdfast import Checkpointer, MismatchError, OptimizerState, PlacementError
from tests.objects.containers import (
    Container,
    Delegating,
    InBackward,
    Listing,
    Lookahead,
    Scaled,
    Sharpness,
    Silent,
)
from tests.objects.optimizers import Make, assert_kept, net, parts, stored, train, tree_of

CONTAINERS: dict[str, Make] = {
    "container": lambda m: Container([m], AdamW, lr=0.01, foreach=False),
    "container of sgd": lambda m: Container([m], SGD, lr=0.1, momentum=0.9),
    "in backward": lambda m: InBackward([m], AdamW, lr=0.01),
    "silent": lambda m: Silent([m], Adam, lr=0.01),
    "listing": Listing,
    "sharpness": lambda m: Sharpness(m.parameters(), SGD, lr=0.1, momentum=0.9),
    "lookahead": lambda m: Lookahead(AdamW(m.parameters(), lr=0.01)),
    "delegating": lambda m: Delegating(Adam(m.parameters(), lr=0.01)),
    "delegating twice": lambda m: Delegating(Delegating(Listing(m))),
    "scaled": lambda m: Scaled(m.parameters()),
}


def deep_state(optimizer: Any) -> Any:
    """All that is inside, by position, also where the optimizer does not state it."""
    found: dict[str, Any] = {}
    if isinstance(optimizer, torch.optim.Optimizer) and "state" in vars(optimizer):
        found["torch"] = torch.optim.Optimizer.state_dict(optimizer)
    for name, value in sorted(vars(optimizer).items()):
        held = value.values() if isinstance(value, dict) else value
        for i, inner in enumerate(held if isinstance(held, list | tuple) else [held]):
            if isinstance(inner, torch.optim.Optimizer):
                found[f"{name}.{i}"] = deep_state(inner)
        if isinstance(value, int | float):
            found[name] = value
    return copy.deepcopy(found)


@pytest.mark.parametrize("name", CONTAINERS)
def test_a_container_is_kept(tmp_path: Path, name: str) -> None:
    assert_kept(tmp_path, net, CONTAINERS[name], state=deep_state)


@pytest.mark.parametrize("name", ["silent", "sharpness", "listing", "lookahead", "scaled"])
def test_a_container_is_kept_before_its_first_step(tmp_path: Path, name: str) -> None:
    assert_kept(tmp_path, net, CONTAINERS[name], state=deep_state, steps=0)


@pytest.mark.parametrize("name", ["container of sgd", "scaled", "delegating"])
def test_a_container_is_kept_in_bf16(tmp_path: Path, name: str) -> None:
    make_model = partial(net, dtype=torch.bfloat16)
    assert_kept(tmp_path, make_model, CONTAINERS[name], state=deep_state)


def test_the_moments_of_a_container_are_in_the_checkpoint(tmp_path: Path) -> None:
    model = net(0)
    optimizer = CONTAINERS["container"](model)
    train(model, optimizer, range(2))
    Checkpointer(tmp_path).save(1, parts(model, optimizer))
    own = stored(tmp_path, 1)["optimizer"]["own"]
    assert torch.equal(
        own["state.first.weight.exp_avg"],
        optimizer.optimizers[0].state[model.first.weight]["exp_avg"],  # type: ignore[index,union-attr]
    )
    assert own["param_groups.scale.lr"] == 0.01


def test_a_container_takes_a_new_parameter_only_when_asked(tmp_path: Path) -> None:
    model = net(0)
    model.scale.requires_grad_(False)
    optimizer = CONTAINERS["container"](model)
    train(model, optimizer, range(2))
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, parts(model, optimizer))
    twin = net(1)
    other = CONTAINERS["container"](twin)
    with pytest.raises(MismatchError, match=r"optimizer\.own\.state\.scale\.exp_avg"):
        checkpointer.load(parts(twin, other))
    report = checkpointer.load(parts(twin, other), allow_missing=["optimizer.own.*.scale.*"])
    assert "optimizer.own.state.scale.exp_avg" in report.fresh
    assert other.optimizers[0].state[twin.first.weight]["step"] == 2


class Forgetful(Adam):
    """Says nothing of what it holds."""

    def state_dict(self) -> dict[str, Any]:
        return {"lr": self.param_groups[0]["lr"]}


class Deaf(Adam):
    """States everything, and takes nothing."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing."""


class Halving(Adam):
    """Changes what it takes."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for entries in self.state.values():
            entries["exp_avg"].mul_(0.5)


class Sticky(Adam):
    """Keeps what it had where the checkpoint has nothing."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        before = dict(self.state)
        super().load_state_dict(state_dict)
        for parameter, entries in before.items():
            self.state.setdefault(parameter, entries)


class Refusing(Adam):
    """Does not take a form of the past."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise KeyError("version")


def test_what_states_nothing_is_refused_at_the_save(tmp_path: Path) -> None:
    model = net(0)
    optimizer = Forgetful(model.parameters())
    train(model, optimizer, range(1))
    with pytest.raises(PlacementError, match=r"optimizer.*Forgetful.*shows no tensor"):
        Checkpointer(tmp_path).save(1, {"optimizer": OptimizerState(optimizer, model)})
    assert Checkpointer(tmp_path).latest() is None


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Deaf, r"optimizer\.state\.first\.weight"),
        (Halving, r"optimizer\.state\.first\.weight\.exp_avg: the optimizer has other values"),
        (Refusing, r"Refusing\.load_state_dict\(\) does not take.*KeyError: 'version'"),
    ],
)
def test_what_does_not_take_its_state_is_found_at_the_load(
    tmp_path: Path, kind: Any, said: str
) -> None:
    model = net(0)
    optimizer = kind(model.parameters())
    train(model, optimizer, range(2))
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, parts(model, optimizer))
    twin = net(1)
    with pytest.raises(MismatchError, match=said):
        checkpointer.load(parts(twin, kind(twin.parameters())))


def test_what_keeps_earlier_state_is_found_at_the_load(tmp_path: Path) -> None:
    model = net(0)
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, parts(model, Sticky(model.parameters())))
    optimizer = Sticky(model.parameters())
    train(model, optimizer, range(2))
    with pytest.raises(MismatchError, match=r"optimizer\.state\.first\.weight.*still has it"):
        checkpointer.load(parts(model, optimizer))


class Wrapping(torch.optim.Optimizer):
    """Holds an optimizer over copies of the parameters, and does not say so."""

    def __init__(self, module: nn.Module) -> None:
        held = list(module.parameters())
        self.copies = [p.detach().clone().requires_grad_() for p in held]
        self.hidden = Adam(self.copies)
        super().__init__(held, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for copied in self.copies:
            copied.grad = torch.ones_like(copied)
        self.hidden.step()


def test_a_hidden_optimizer_over_copies_is_refused_at_the_save(tmp_path: Path) -> None:
    model = net(0)
    optimizer = Wrapping(model)
    train(model, optimizer, range(1))
    with pytest.raises(PlacementError, match=r"attribute 'hidden' of Wrapping"):
        Checkpointer(tmp_path).save(1, parts(model, optimizer))


def test_a_form_of_its_own_is_not_taken_for_one_by_name(tmp_path: Path) -> None:
    model = net(0)
    plain, container = AdamW(model.parameters()), CONTAINERS["container"](model)
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, parts(model, plain))
    checkpointer.save(2, parts(model, container))
    before = tree_of(plain)
    for step, optimizer in ((1, container), (2, plain)):
        with pytest.raises(MismatchError, match="build the optimizer as the saved run did"):
            checkpointer.load(parts(model, optimizer), step=step)
    assert tree_of(plain) == before


def test_a_hidden_entry_is_unexpected_to_a_plain_optimizer(tmp_path: Path) -> None:
    from tests.objects.test_optimizers import Averaging

    model = net(0)
    optimizer = Averaging(model.parameters())
    train(model, optimizer, range(1))
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, parts(model, optimizer))
    twin = net(1)
    plain = AdamW(twin.parameters())
    with pytest.raises(MismatchError, match=re.escape("optimizer.extra.count")):
        checkpointer.load(parts(twin, plain))
    checkpointer.load(parts(twin, plain), ignore_unexpected=True)
    assert len(plain.state) == 5
