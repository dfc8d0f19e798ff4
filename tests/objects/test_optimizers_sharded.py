"""Optimizers of DTensors, with forms of their own, on several ranks and on others after that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate

from holdfast import Checkpointer, HoldfastError, OptimizerState
from holdfast.parallel import Layout, ProcessGroups
from tests.harness import RankContext, run_ranks
from tests.objects.containers import Container, Sharpness
from tests.objects.optimizers import differences
from tests.objects.test_optimizers import Averaging


def replicated(tensor: Tensor) -> Tensor:
    if not isinstance(tensor, DTensor):
        return tensor
    return tensor.redistribute(placements=[Replicate()] * tensor.device_mesh.ndim)


class Factored(torch.optim.Optimizer):
    """As Adafactor: means over rows and columns, and a norm, which are DTensors of other shapes."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            square, state = p.grad.square() + 1e-6, self.state[p]
            means = [square.mean(-1), replicated(square.mean(0))] if p.ndim > 1 else []
            norm = replicated(square.sum())
            if not state:
                state |= {"norm": norm * 0, "means": {"all": [mean * 0 for mean in means]}}
            state["norm"].add_(norm)
            for held, mean in zip(state["means"]["all"], means, strict=True):
                held.mul_(0.9).add_(mean)
            scale = 1.0
            if means:
                rows, columns = state["means"]["all"]
                scale = (1 + rows[:, None] * columns[None]).rsqrt()
            p.sub_(p.grad * scale * 0.1 / (1 + state["norm"]))


KINDS: dict[str, Any] = {
    "factored": lambda m: Factored(m.parameters()),
    "container": lambda m: Container([m], torch.optim.AdamW, lr=0.01, foreach=False),
    "sharpness": lambda m: Sharpness(m.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9),
    "averaging": lambda m: Averaging(m.parameters()),
    "plain": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01),
}


def made(kind: str, seed: int, groups: ProcessGroups | None) -> tuple[nn.Module, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    if groups is not None:
        fully_shard(model, mesh=groups.mesh("dp"))
    return model, KINDS[kind](model)


def train(model: nn.Module, optimizer: Any, steps: range) -> None:
    """Every rank has the same rows, so that gradients do not depend on how many there are."""
    for step in steps:
        optimizer.zero_grad()
        model(torch.full((2, 4), 1.0 + step)).square().mean().backward()
        optimizer.step()
    optimizer.zero_grad()


def whole(tree: Any) -> Any:
    """A copy of a tree with every DTensor gathered."""
    if isinstance(tree, DTensor):
        return tree.full_tensor().detach().clone()
    if isinstance(tree, Tensor):
        return tree.detach().clone()
    if isinstance(tree, dict):
        return {key: whole(child) for key, child in tree.items()}
    return [whole(child) for child in tree] if isinstance(tree, list) else tree


def held(model: nn.Module, optimizer: Any) -> Any:
    found = [whole(dict(model.state_dict())), whole(optimizer.state_dict())]
    base = getattr(optimizer, "base_optimizer", None)
    return [*found, whole(torch.optim.Optimizer.state_dict(base))] if base else found


def placements(tree: Any) -> int:
    """How many tensors of a tree are sharded."""
    if isinstance(tree, DTensor):
        return int(any(placement.is_shard() for placement in tree.placements))
    if isinstance(tree, dict | list):
        return sum(map(placements, tree.values() if isinstance(tree, dict) else tree))
    return 0


def over_two(context: RankContext, root: str, kind: str) -> Any:
    with ProcessGroups.create(Layout(dp=2)) as groups:
        checkpointer = Checkpointer(root, groups=groups)
        model, optimizer = made(kind, 0, groups)
        train(model, optimizer, range(2))
        state = {"model": model, "optimizer": OptimizerState(optimizer, model)}
        checkpointer.save(1, state)
        at_save, sharded = held(model, optimizer), placements(optimizer.state_dict())
        train(model, optimizer, range(2, 4))
        final = held(model, optimizer)
        for stale in (0, 3):
            twin, other = made(kind, 5 + stale, groups)
            train(twin, other, range(9, 9 + stale))
            checkpointer.load({"model": twin, "optimizer": OptimizerState(other, twin)}, step=1)
            assert not list(differences(at_save, held(twin, other)))
            assert placements(other.state_dict()) == sharded > 0
            train(twin, other, range(2, 4))
            assert not list(differences(final, held(twin, other)))
        return at_save


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=() if kind in ("factored", "container") else pytest.mark.slow)
        for kind in KINDS
    ],
)
def test_it_is_kept_over_shards_and_loads_whole(tmp_path: Path, kind: str) -> None:
    """O1: two ranks, each with half; then one process, with everything."""
    at_save, again = run_ranks(2, over_two, str(tmp_path), kind).results
    assert not list(differences(at_save, again))
    model, optimizer = made(kind, 3, None)
    Checkpointer(tmp_path).load({"model": model, "optimizer": OptimizerState(optimizer, model)})
    assert not list(differences(at_save, held(model, optimizer)))


def stages(context: RankContext, root: str) -> list[str]:
    """A container on each of two pipeline stages; each loads its own part of the form alone."""
    with ProcessGroups.create(Layout(pp=2)) as groups:
        torch.manual_seed(0)
        whole_model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3))
        mine = nn.Module()
        mine.add_module(str(groups.rank), whole_model[groups.rank])

        def made() -> Container:
            return Container([mine], torch.optim.AdamW, lr=0.01, foreach=False)

        def step(optimizer: Container) -> None:
            for p in mine.parameters():
                p.grad = torch.ones_like(p) * (groups.rank + 1)
            optimizer.step()
            optimizer.zero_grad()  # with gradients there, torch's setter takes no state

        optimizer = made()
        step(optimizer)
        checkpointer = Checkpointer(root, groups=groups)
        checkpointer.save(1, {"optimizer": OptimizerState(optimizer, mine)})
        other = made()
        report = checkpointer.load({"optimizer": OptimizerState(other, mine)})
        assert not list(differences(optimizer.state_dict(), other.state_dict()))
        return [path for path in report.loaded if "exp_avg_sq" in path]


def test_stages_load_their_own_part_of_a_form(tmp_path: Path) -> None:
    for rank, loaded in enumerate(run_ranks(2, stages, str(tmp_path)).results):
        assert loaded == [
            f"optimizer.own.state.{rank}.{name}.exp_avg_sq" for name in ("weight", "bias")
        ]


class Deaf(torch.optim.Adam):
    """Takes nothing on rank 1."""

    rank = 0

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self.rank != 1:
            super().load_state_dict(state_dict)


def one_deaf(context: RankContext, root: str) -> str:
    with ProcessGroups.create(Layout(dp=2)) as groups:
        torch.manual_seed(0)
        model = nn.Linear(2, 2)
        optimizer = Deaf(model.parameters())
        optimizer.rank = groups.rank
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        checkpointer = Checkpointer(root, groups=groups)
        state = {"optimizer": OptimizerState(optimizer, model)}
        checkpointer.save(1, state)
        optimizer.step()
        with pytest.raises(HoldfastError) as caught:
            checkpointer.load(state)
        return str(caught.value)


def test_what_one_rank_does_not_take_is_raised_on_all(tmp_path: Path) -> None:
    for said in run_ranks(2, one_deaf, str(tmp_path)).results:
        assert "optimizer.state.weight.exp_avg" in said
        assert "did not take what was stored" in said


def after_evaluations(context: RankContext, root: str) -> list[bool]:
    """An optimizer alone is saved and loaded while whole parameters are in the shards' places."""
    equal = []
    with ProcessGroups.create(Layout(dp=2)) as groups:
        trained, fresh = made("plain", 1, groups), made("plain", 1, groups)
        train(*trained, range(2))
        for step, (model, optimizer) in enumerate((trained, fresh)):
            with torch.no_grad():
                model(torch.ones(1, 4))
            equal.append(all(isinstance(each, DTensor) for each in model.parameters()))
            parts = {"optimizer": OptimizerState(optimizer, model)}
            with Checkpointer(root, groups=groups) as checkpointer:
                checkpointer.load(parts) if step else checkpointer.save(1, parts)
        equal.append(not list(differences(held(*trained)[1], held(*fresh)[1])))
    return equal


def test_an_optimizer_alone_after_an_evaluation(tmp_path: Path) -> None:
    """FSDP2 leaves whole parameters, which no optimizer knows, until the next backward."""
    for equal in run_ranks(2, after_evaluations, str(tmp_path)).results:
        assert equal == [False, False, True]
