"""Optimizers of whole matrices next to sharded ones, and on fully sharded models."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from holdfast import Checkpointer, ConfigError, HoldfastError, Layout, OptimizerState, ProcessGroups
from holdfast.fsdp import fully_shard_model
from holdfast.optim import ChainedOptimizer, ReducedOptimizer, ShardedOptimizer
from tests.harness import RankContext, run_ranks
from tests.optim.test_elementwise import Lion, Trust

muon = partial(torch.optim.Muon, lr=0.05)
adamw = partial(torch.optim.AdamW, lr=0.02)
MAX_NORM = 0.3


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(4)
        self.up = nn.Parameter(torch.randn(8, 6, generator=generator))
        self.down = nn.Parameter(torch.randn(6, 8, generator=generator))
        self.scale = nn.Parameter(torch.ones(8))
        self.rare = nn.Parameter(torch.ones(4, 4))

    def forward(self, rows: Tensor) -> Tensor:
        x = torch.sin(rows[:, None] * torch.arange(1, 7))
        x = (torch.tanh(x @ self.up.T) * self.scale) @ self.down.T
        if 1 in rows:
            x = x + self.rare.sum() * (rows == 1)[:, None]
        return (x - 1).square().mean(dim=1)


def matrices(net: Net) -> list[nn.Parameter]:
    return [net.up, net.down, net.rare]


def rows_of(step: int, index: int | None = None) -> Tensor:
    rows = torch.arange(8) + 8 * step  # row 1 in the first step alone, on one rank
    return rows if index is None else rows[4 * index :][:4]


def alone(steps: int) -> tuple[Net, list[float]]:
    """What one process makes of the whole batch."""
    net = Net()
    optimizers = [muon(matrices(net)), adamw([net.scale])]
    norms = []
    for step in range(steps):
        net(rows_of(step)).mean().backward()
        norms.append(float(nn.utils.clip_grad_norm_(net.parameters(), MAX_NORM)))
        for each in optimizers:
            each.step()
            each.zero_grad()
    return net, norms


def chain(net: Net, groups: ProcessGroups) -> ChainedOptimizer:
    whole = ReducedOptimizer(
        muon(matrices(net)), groups, reduce="dp_cp", divisor=2, name="matrices"
    )
    rest = ShardedOptimizer(
        net, [net.scale], make=adamw, groups=groups, over="dp_cp", divisor=2, name="rest",
        overlap=True, elementwise=True, align_nbytes=4,
    )  # fmt: skip
    return ChainedOptimizer({"matrices": whole, "rest": rest})


def step_chain(net: Net, optimizer: Any, step: int, index: int) -> float:
    for last, rows in ((False, rows_of(step, index)[:2]), (True, rows_of(step, index)[2:])):
        with optimizer.microbatch(is_last=last):
            (net(rows).mean() / 2).backward()
    return float(optimizer.step(max_norm=MAX_NORM).norm)


def chained(context: RankContext, directory: str) -> None:
    truth, norms = alone(4)
    with (
        ProcessGroups.create(Layout(dp=2)) as groups,
        Checkpointer(directory, groups=groups) as saver,
    ):
        net = Net()
        optimizer = chain(net, groups)
        found = [step_chain(net, optimizer, step, context.rank) for step in range(3)]
        saver.save(3, {"model": net, "optimizer": OptimizerState(optimizer, net)})
        found.append(step_chain(net, optimizer, 3, context.rank))
        optimizer.synchronize()
        assert found == pytest.approx(norms, rel=1e-4)
        for one, other in zip(net.parameters(), truth.parameters(), strict=True):
            torch.testing.assert_close(one.detach(), other.detach(), rtol=0, atol=5e-3)
        again = Net()
        optimizer.close()
        other = chain(again, groups)
        saver.load({"model": again, "optimizer": OptimizerState(other, again)})
        step_chain(again, other, 3, context.rank)
        other.synchronize()
        for one, two in zip(again.parameters(), net.parameters(), strict=True):
            assert torch.equal(one, two)
        with pytest.raises(ConfigError, match=r"Muon only supports 2D.*ReducedOptimizer.*Chained"):
            ShardedOptimizer(net, matrices(net), make=muon, groups=groups, over="dp_cp", divisor=2)
        with pytest.raises(ConfigError, match="a AdamW cannot be chained: give a ShardedOpt"):
            ChainedOptimizer({"rest": adamw([net.scale])})  # type: ignore[dict-item]
        plain = ReducedOptimizer(adamw([net.up]), groups, name="a")
        with pytest.raises(ConfigError, match="'a' and 'b'"):
            ChainedOptimizer({"a": plain, "b": ReducedOptimizer(adamw([net.up]), groups, name="b")})


def test_matrices_are_whole_and_the_rest_is_sharded_in_one_step(tmp_path: Path) -> None:
    """S3, M12: one norm, one state; a parameter that one rank used is updated on both."""
    run_ranks(2, chained, str(tmp_path))


def extended(context: RankContext, directory: str) -> None:
    with (
        ProcessGroups.create(Layout(dp=2)) as groups,
        Checkpointer(directory, groups=groups) as saver,
    ):

        def build(*, is_extended: bool) -> tuple[Net, Any]:
            net = Net()
            plain = {
                "matrices": muon(matrices(net)[:2]),
                "rest": adamw([net.scale]),
            }
            optimizer = ChainedOptimizer(
                {
                    name: ReducedOptimizer(each, groups, reduce="dp_cp", divisor=2, name=name)
                    for name, each in plain.items()
                }
            )
            if is_extended:
                plain["matrices"].add_param_group({"params": [net.rare], "lr": 0.01})
            return net, optimizer

        net, optimizer = build(is_extended=True)
        step_chain(net, optimizer, 0, context.rank)
        assert not torch.equal(net.rare, Net().rare)
        saver.save(1, {"model": net, "optimizer": OptimizerState(optimizer, net)})
        again, other = build(is_extended=True)
        saver.load({"model": again, "optimizer": OptimizerState(other, again)})
        assert [group["lr"] for group in other.param_groups] == [0.05, 0.01, 0.02]
        for step in (1, 2):
            step_chain(net, optimizer, step, context.rank)
            step_chain(again, other, step, context.rank)
        for one, two in zip(again.parameters(), net.parameters(), strict=True):
            assert torch.equal(one, two)
        less, fewer = build(is_extended=False)
        with pytest.raises(HoldfastError, match="'matrices' has 1 parameter groups"):
            saver.load({"model": less, "optimizer": OptimizerState(fewer, less)})

        net = Net()
        sharded = fully_shard_model(net, groups, experts=())
        by_name = {"matrices": muon(matrices(net)), "rest": adamw([net.scale])}
        joined = sharded.stepper(by_name).optimizer
        with sharded.microbatch(is_last=True):
            net(rows_of(0, context.rank)).mean().backward()
        joined.zero_grad(set_to_none=False)
        assert sharded.step(by_name).norm == 0


def test_groups_that_are_added_to_one_of_several_optimizers_are_kept(tmp_path: Path) -> None:
    """I1, M3: before, a save was refused, as if the state were of no parameter."""
    run_ranks(2, extended, str(tmp_path))


class ByItem(Lion):
    """Takes a number out of a DTensor: the norm of one rank's shard."""

    def update(self, p: Tensor, g: Tensor, state: Any, group: Any) -> None:
        p.sub_(g, alpha=group["lr"] * p.norm().item() / (g.norm().item() + 1e-6))


class Local(Lion):
    def update(self, p: Tensor, g: Tensor, state: Any, group: Any) -> None:
        if isinstance(p, DTensor) and isinstance(g, DTensor):
            p, g = p.to_local(), g.to_local()
        p.sub_(g / (g.norm() + 1e-6), alpha=group["lr"])


def fully_sharded(context: RankContext) -> list[str]:
    truth, norms = alone(3)
    messages = []
    with ProcessGroups.create(Layout(dp=2)) as groups:
        net = Net()
        sharded = fully_shard_model(net, groups, experts=())
        optimizers = {"matrices": muon(matrices(net)), "rest": adamw([net.scale])}
        found = []
        for step in range(3):
            with sharded.microbatch(is_last=True):
                net(rows_of(step, context.rank)).mean().backward()
            found.append(sharded.step(optimizers, max_norm=MAX_NORM).norm)
        assert found[0] == pytest.approx(norms[0], rel=1e-5)
        assert found == pytest.approx(norms, rel=0.02)  # Muon computes in bf16
        for p, other in zip(net.parameters(), truth.parameters(), strict=True):
            assert isinstance(p, DTensor)
            torch.testing.assert_close(p.full_tensor(), other.detach(), rtol=0, atol=2e-2)
        for make in (ByItem, Local, torch.optim.Adafactor, Trust, "twice"):
            with sharded.microbatch(is_last=True):
                net(rows_of(3, context.rank)).mean().backward()
            given: Any = {"a": adamw([net.up]), "b": adamw([net.up])}
            if not isinstance(make, str):
                given = make(net.parameters())
            try:
                sharded.step(given, max_norm=1e-9)
                messages.append("")
            except HoldfastError as error:
                messages.append(str(error))
                sharded.drop_gradients()
    return messages


def test_a_fully_sharded_model_takes_several_optimizers_that_see_whole_matrices() -> None:
    """S3, M12: before, one that joins local elements trained each shard by its own norm."""
    first, second = run_ranks(2, fully_sharded).results
    assert first == second
    by_item, local, adafactor, trust, twice = first
    assert "a ByItem joins elements of this rank's shards alone" in by_item
    assert "a Local joins elements of this rank's shards alone" in local
    assert "a Adafactor cannot update shards, which are DTensors" in adafactor
    assert trust == ""
    assert "is in optimizers 'a' and 'b'; it belongs to one of them" in twice
