"""Optimizers that are hard to see from outside: odd places, pipeline stages, late ones."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.tensor import DTensor

from holdfast import (
    Checkpointer,
    ConfigError,
    Layout,
    OptimizerState,
    PlacementError,
    ProcessGroups,
)
from tests.harness import RankContext, run_ranks
from tests.objects.containers import Lookahead, Sharpness, Silent
from tests.objects.test_whole_states import contents


class Hiding(torch.optim.Optimizer):
    """Steps optimizers that it keeps somewhere; torch's `state_dict` shows none of their state."""

    def __init__(self, module: nn.Module, place: Callable[[Hiding, nn.Module], None]) -> None:
        super().__init__(list(module.parameters()), {})
        self.steps: list[Callable[[], Any]] = []
        place(self, module)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for each in self.steps:
            each()

    def add(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        made = torch.optim.AdamW(parameters, lr=0.01)
        self.steps.append(made.step)
        return made


def by_parameter(owner: Hiding, module: nn.Module) -> None:
    owner.each = {p: owner.add([p]) for p in module.parameters()}  # type: ignore[attr-defined]
    owner.steps = [optimizer.step for optimizer in owner.each.values()]  # type: ignore[attr-defined]


def in_an_object(owner: Hiding, module: nn.Module) -> None:
    owner.engine = SimpleNamespace(inner=owner.add(list(module.parameters())))  # type: ignore[attr-defined]


def in_a_list_of_objects(owner: Hiding, module: nn.Module) -> None:
    owner.parts = [SimpleNamespace(of=owner.add([p])) for p in module.parameters()]  # type: ignore[attr-defined]


def behind_a_method(owner: Hiding, module: nn.Module) -> None:
    owner.add(list(module.parameters()))  # in `steps` alone


PLACES = [by_parameter, in_an_object, in_a_list_of_objects, behind_a_method]


def step(module: nn.Module, optimizer: Any, scale: float = 1.0) -> None:
    for i, p in enumerate(module.parameters()):
        p.grad = torch.full_like(p, scale * (i + 1))
    optimizer.step()


def values(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


@pytest.mark.parametrize("place", PLACES)
def test_what_steps_inside_is_kept(place: Any, tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    optimizer = Hiding(model, place)
    step(model, optimizer)
    Checkpointer(tmp_path / "a").save(1, {"m": model, "o": OptimizerState(optimizer, model)})
    twin = nn.Linear(3, 2)
    other = Hiding(twin, place)
    step(twin, other, -3.0)
    state = {"m": twin, "o": OptimizerState(other, twin)}
    Checkpointer(tmp_path / "a").load(state)
    Checkpointer(tmp_path / "b").save(1, state)
    assert contents(tmp_path / "a", 1) == contents(tmp_path / "b", 1)
    step(model, optimizer)
    step(twin, other)
    assert all(torch.equal(v, twin.state_dict()[k]) for k, v in model.state_dict().items())


def test_optimizers_of_other_modules_are_their_owners_affair(tmp_path: Path) -> None:
    """A trainer that an optimizer refers to has a discriminator's optimizer, too."""
    model, other = nn.Linear(3, 2), nn.Linear(2, 1)
    trainer = SimpleNamespace(rival=torch.optim.Adam(other.parameters()))
    optimizer = Hiding(model, in_an_object)
    optimizer.trainer = trainer  # type: ignore[attr-defined]
    trainer.mine = optimizer
    step(model, optimizer)
    step(other, trainer.rival)
    tree = OptimizerState(optimizer, model).tree()
    assert list(tree["inner"]) == ["steps.0.__self__"]  # type: ignore[call-overload]


def stage(kind: str, rank: int) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    layers = [nn.Linear(2, 2) for _ in range(4)]
    mine = nn.Module()
    for i in (2 * rank, 2 * rank + 1):
        mine.add_module(str(i), layers[i])
    parameters = list(mine.parameters())
    if kind == "sharpness":
        return mine, Sharpness(parameters, torch.optim.SGD, lr=0.1, momentum=0.9)
    if kind == "by parameter":
        return mine, Hiding(mine, by_parameter)
    return mine, Silent([mine], torch.optim.AdamW, lr=0.01)


def stages(context: RankContext, root: str) -> None:
    with ProcessGroups.create(Layout(pp=2)) as groups:
        for kind in ("silent", "sharpness", "by parameter"):
            checkpointer = Checkpointer(f"{root}/{kind}", groups=groups)
            module, optimizer = stage(kind, context.rank)
            step(module, optimizer, context.rank + 1.0)
            state = {"m": module, "o": OptimizerState(optimizer, module)}
            checkpointer.save(1, state)
            saved = copy.deepcopy(state["o"].tree())  # type: ignore[union-attr]
            twin, other = stage(kind, context.rank)
            step(twin, other, -2.0)
            again = {"m": twin, "o": OptimizerState(other, twin)}
            checkpointer.load(again)
            for one in (again["o"], OptimizerState(other, twin)):
                assert str(one.tree()) == str(saved), kind
            step(module, optimizer, context.rank + 1.0)
            step(twin, other, context.rank + 1.0)
            ours = values(twin)
            assert all(torch.equal(v, ours[k]) for k, v in values(module).items()), kind


def test_stages_hold_other_parameters_of_an_optimizer_inside(tmp_path: Path) -> None:
    run_ranks(2, stages, str(tmp_path))


def flat(context: RankContext, root: str, strategy: ShardingStrategy) -> str:
    with ProcessGroups.create(Layout(dp=2)) as groups:
        torch.manual_seed(0)
        model = FullyShardedDataParallel(
            nn.Linear(4, 4), device_id=torch.device("cpu"), use_orig_params=True,
            process_group=groups.group("dp_cp"), sharding_strategy=strategy,
        )  # fmt: skip
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        checkpointer = Checkpointer(root, groups=groups)
        try:
            checkpointer.save(1, {"m": model, "o": OptimizerState(optimizer, model)})
        except PlacementError as error:
            checkpointer.save(1, {"m": model})  # the module's state dict is whole
            bare = nn.Linear(4, 4)
            report = checkpointer.load({"m": bare})
            assert report.loaded == ("m.weight", "m.bias")
            return str(error)
        return "saved"


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
def test_flat_shards_say_what_to_use_instead(strategy: str, tmp_path: Path) -> None:
    said = run_ranks(2, flat, str(tmp_path), ShardingStrategy[strategy]).results
    for each in said:
        assert ("fully_shard" in each) if strategy == "FULL_SHARD" else (each == "saved")


@pytest.mark.parametrize("wrong", [[nn.Linear(1, 1)], None, "model", 3])
def test_an_owner_that_is_no_module_is_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="pass the module whose parameters"):
        OptimizerState(torch.optim.SGD(nn.Linear(1, 1).parameters()), wrong)


def test_parameters_of_no_module_are_put_into_one(tmp_path: Path) -> None:
    alone = nn.Parameter(torch.zeros(()))
    for wrong in (alone, {"alpha": alone}, {"model": nn.Linear(1, 1), "alpha": alone}):
        with pytest.raises(ConfigError, match=r"into one, a torch\.nn\.ParameterDict"):
            OptimizerState(torch.optim.Adam([alone]), wrong)  # type: ignore[arg-type]

    def made() -> tuple[torch.optim.Optimizer, nn.ParameterDict, dict[str, Any]]:
        owner = nn.ParameterDict({"alpha": torch.zeros(())})
        optimizer = torch.optim.Adam([owner["alpha"]])
        return optimizer, owner, {"a": owner, "optimizer": OptimizerState(optimizer, owner)}

    optimizer, owner, state = made()
    owner["alpha"].sum().backward()
    optimizer.step()
    Checkpointer(tmp_path).save(1, state)
    twin, other, target = made()
    Checkpointer(tmp_path).load(target)
    assert other["alpha"].item() == owner["alpha"].item() != 0
    assert twin.state_dict() == optimizer.state_dict()


def numbered(context: RankContext, root: str) -> None:
    """A form that numbers parameters, and keys what is theirs by numbers and tuples."""
    with ProcessGroups.create(Layout(dp=2)) as groups:

        def made() -> tuple[nn.Module, Lookahead]:
            torch.manual_seed(0)
            model = fully_shard(nn.Linear(4, 4), mesh=groups.mesh("dp_cp"))
            return model, Lookahead(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))

        model, optimizer = made()
        step(model, optimizer)
        checkpointer = Checkpointer(root, groups=groups)
        checkpointer.save(1, {"m": model, "o": OptimizerState(optimizer, model)})
        for is_stale in (False, True):
            twin, other = made()
            if is_stale:
                step(twin, other, -2.0)
            checkpointer.load({"m": twin, "o": OptimizerState(other, twin)}, step=1)
            for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
                pairs = [(optimizer.state[mine]["slow"], other.state[theirs]["slow"])]
                one, two = optimizer.optimizer.state[mine], other.optimizer.state[theirs]
                pairs.append((one["momentum_buffer"], two["momentum_buffer"]))
                for kept, given in pairs:
                    assert isinstance(given, DTensor)
                    assert given.placements == kept.placements
                    assert torch.equal(given.to_local(), kept.to_local())


def test_a_numbered_form_is_sharded_again(tmp_path: Path) -> None:
    run_ranks(2, numbered, str(tmp_path))
