"""Odd modules and stateful objects that hold DTensors: saved on two ranks, loaded on one."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from holdfast import (
    Checkpointer,
    FromPart,
    Layout,
    MismatchError,
    ModuleState,
    OptimizerState,
    ProcessGroups,
    Sharded,
)
from tests.harness import RankContext, run_ranks
from tests.objects.modules import WIDTH, Clones, ExtraTensor, Fused, Scaled, Splits

NUM_RANKS = 2


class Odd(nn.Module):
    """Layers whose state dict is not simply their tensors; three rows a piece: uneven on two."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(Fused(), Splits(), Clones(), Scaled(), ExtraTensor("dict"))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(x))


def odd(seed: int) -> Odd:
    """The same values on every rank."""
    torch.manual_seed(seed)
    module = Odd()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn_like(parameter))
    module.layers[-1].scale = torch.rand(3, dtype=torch.float64)
    return module


def sharded(seed: int, groups: ProcessGroups) -> Odd:
    module = odd(seed)
    for layer in module.layers:
        fully_shard(layer, mesh=groups.mesh("dp"))
    return fully_shard(module, mesh=groups.mesh("dp"))


def whole(value: Any) -> torch.Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()


def stepped(module: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01, foreach=False)
    for parameter in module.parameters():
        parameter.grad = parameter.detach() * 0.5
    optimizer.step()
    return optimizer


def state_of(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, object]:
    return {"model": module, "optimizer": OptimizerState(optimizer, module)}


def odd_on_ranks(context: RankContext, root: str) -> list[torch.Tensor]:
    with ProcessGroups.create(Layout(dp=NUM_RANKS)) as groups:
        checkpointer = Checkpointer(root, groups=groups)
        true, twin = sharded(1, groups), sharded(2, groups)
        optimizer = stepped(true)
        checkpointer.save(1, state_of(true, optimizer))
        fresh = stepped(twin)
        report = checkpointer.load(state_of(twin, fresh))
        assert report.missing == report.unexpected == ()
        checkpointer.load(state_of(twin, fresh))  # writes what is there already
        checkpointer.save(2, state_of(twin, fresh))
        for module, each in ((true, optimizer), (twin, fresh)):
            for parameter in module.parameters():
                parameter.grad = parameter.detach() * 0.25
            each.step()
        for mine, theirs in zip(twin.parameters(), true.parameters(), strict=True):
            assert type(mine) is type(theirs)
            assert torch.equal(mine.to_local(), theirs.to_local())
        # One layer of the sharded model, and only what is trained of it.
        layer = sharded(3, groups).layers[0]
        checkpointer.load({"x": FromPart("model.layers.0", layer)}, step=1)
        layer.norm.requires_grad_(False)
        checkpointer.save(3, {"layer": ModuleState(layer, only="trainable")})
        return [
            whole(p) for p in (*layer.parameters(), *optimizer.state[true.head.weight].values())
        ]


def test_odd_modules_under_fsdp(tmp_path: Path) -> None:
    results = run_ranks(NUM_RANKS, odd_on_ranks, str(tmp_path)).results
    checkpointer = Checkpointer(tmp_path)
    true, twin = odd(1), odd(5)
    optimizer, fresh = stepped(true), stepped(twin)
    for step in (1, 2):
        checkpointer.load(state_of(twin, fresh), step=step)
        for mine, theirs in zip(twin.parameters(), true.parameters(), strict=True):
            assert torch.equal(mine, theirs)
        assert torch.equal(twin.layers[-1].scale, true.layers[-1].scale)
    for found in results:
        for mine, theirs in zip(found[:2], true.layers[0].parameters(), strict=True):
            assert torch.equal(mine, theirs)
    # And the other way: saved by one process, loaded by two; a part of a part on one.
    layer = odd(7).layers[0]
    report = checkpointer.load(
        {"layer": ModuleState(layer.requires_grad_(True), only=lambda name, _: name != "norm")}
    )
    assert set(report.loaded) == {f"layer.w{name}" for name in "qkv"}
    assert torch.equal(layer.wqkv, true.layers[0].wqkv)
    checkpointer.save(9, state_of(true, optimizer))
    run_ranks(NUM_RANKS, load_on_ranks, str(tmp_path))


def load_on_ranks(context: RankContext, root: str) -> None:
    with ProcessGroups.create(Layout(dp=NUM_RANKS)) as groups:
        twin = sharded(6, groups)
        checkpointer = Checkpointer(root, groups=groups)
        checkpointer.load(state_of(twin, stepped(twin)), step=9)
        true = odd(1)
        stepped(true)
        for mine, theirs in zip(twin.parameters(), true.parameters(), strict=True):
            assert torch.equal(whole(mine), theirs)


class NoWayBack(Fused):
    def fuse(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        for name in "qkv":
            state.pop(f"{prefix}w{name}")


class Halves(nn.Module):
    """Overrides both methods; its state is nested, ordered, and sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(5, 3), nn.Linear(3, 3)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        inner = {n: v.clone() for n, v in self.a.state_dict().items()}
        return {"a": OrderedDict(inner), "b": [self.b.state_dict()], "n": 3}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert type(state["a"]) is OrderedDict
        assert isinstance(state["a"]["weight"], DTensor)
        self.a.load_state_dict(state["a"])
        self.b.load_state_dict(state["b"][0])


def halves_on_ranks(context: RankContext, root: str) -> list[torch.Tensor]:
    with ProcessGroups.create(Layout(dp=NUM_RANKS)) as groups:
        checkpointer = Checkpointer(root, groups=groups)
        pair = []
        for seed in (1, 2):
            torch.manual_seed(seed)
            pair.append(fully_shard(Halves(), mesh=groups.mesh("dp")))
        checkpointer.save(1, {"model": pair[0]})
        checkpointer.load({"model": pair[1]})
        for mine, theirs in zip(pair[1].parameters(), pair[0].parameters(), strict=True):
            assert torch.equal(mine.to_local(), theirs.to_local())
        return [whole(p) for p in pair[0].parameters()]


def test_nested_state_of_a_sharded_module(tmp_path: Path) -> None:
    first, second = run_ranks(NUM_RANKS, halves_on_ranks, str(tmp_path)).results
    assert all(map(torch.equal, first, second))


def lost_on_ranks(context: RankContext, root: str) -> str:
    with ProcessGroups.create(Layout(dp=NUM_RANKS)) as groups:
        checkpointer = Checkpointer(root, groups=groups)
        module = nn.Sequential(NoWayBack())
        fully_shard(module, mesh=groups.mesh("dp"))
        nn.init.constant_(module[0].wqkv, 1.0)
        nn.init.constant_(module[0].norm, 1.0)
        checkpointer.save(1, {"model": module})
        nn.init.constant_(module[0].wqkv, 2.0)
        try:
            checkpointer.load({"model": module})
        except MismatchError as error:
            return str(error)
        return ""


def test_what_has_not_arrived_is_named_on_all_ranks(tmp_path: Path) -> None:
    for message in run_ranks(NUM_RANKS, lost_on_ranks, str(tmp_path)).results:
        assert "0.wq" in message


class AppState:
    """PyTorch's own recipe for a stateful application."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer
        self.placed: list[bool] = []

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optimizer, "round": 3, "table": self.table()}

    def table(self) -> object:
        return self.model.head.weight.detach()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.placed = [isinstance(v, DTensor) for v in state["model"].values()]
        assert state["round"] == 3
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optim"],
        )


def plain(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    module = nn.Sequential()
    module.add_module("head", nn.Linear(5, 3))
    module.add_module("norm", nn.LayerNorm(3))
    return module


class Marked:
    """Hands out a marker of the piece that it holds."""

    def __init__(self, rank: int, value: float) -> None:
        self.rows = torch.full((2, 3), value + rank)
        self.rank = rank

    def state_dict(self) -> dict[str, Any]:
        return {"deep": [Sharded(self.rows, (4, 3), dims={0: "dp"})], "other": torch.ones(2)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rows = state["deep"][0]


def recipe_on_ranks(context: RankContext, root: str) -> list[torch.Tensor]:
    with ProcessGroups.create(Layout(dp=NUM_RANKS)) as groups:
        checkpointer = Checkpointer(root, groups=groups)
        apps = []
        for seed in (1, 2):
            module = fully_shard(plain(seed), mesh=groups.mesh("dp"))
            apps.append(AppState(module, stepped(module)))
        true, twin = apps
        rows = Marked(context.rank, 5.0), Marked(context.rank, 0.0)
        checkpointer.save(1, {"app": true, "rows": rows[0]})
        report = checkpointer.load({"app": twin, "rows": rows[1]})
        assert all(twin.placed)
        assert torch.equal(rows[1].rows, rows[0].rows)
        shard = sum(p.to_local().nbytes for p in twin.model.parameters())
        whole_nbytes = sum(whole(p).nbytes for p in twin.model.parameters())
        assert shard < whole_nbytes
        for mine, theirs in zip(twin.model.parameters(), true.model.parameters(), strict=True):
            assert torch.equal(mine.to_local(), theirs.to_local())
            for name, value in true.optimizer.state[theirs].items():
                kept = twin.optimizer.state[mine][name]
                assert type(kept) is type(value)
                assert torch.equal(whole(kept), whole(value))
        # A rank asks for its own rows of each tensor, not for all of them.
        assert report.nbytes_needed < 4 * whole_nbytes
        checkpointer.save(2, {"app": twin, "rows": rows[1]})
        return [whole(p) for p in true.model.parameters()]


def test_the_recipe_of_a_stateful_application(tmp_path: Path) -> None:
    found = run_ranks(NUM_RANKS, recipe_on_ranks, str(tmp_path)).results
    module = plain(4)
    app = AppState(module, stepped(module))
    for step in (1, 2):
        Checkpointer(tmp_path).load({"app": app}, step=step)
        for mine, theirs in zip(module.parameters(), found[0], strict=True):
            assert torch.equal(mine, theirs)
