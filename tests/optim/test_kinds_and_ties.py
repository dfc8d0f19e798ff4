"""Buckets hold parameters of one pattern of replication; tied stages agree on what was used."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

from holdfast import Layout, ProcessGroups
from holdfast.optim import ShardedOptimizer
from tests.harness import RankContext, run_ranks
from tests.optim.common import momentum
from tests.optim.test_pipeline import STAGES, Stage, plain

PLACED: dict[str, Placement] = {"a": Shard(0), "b": Replicate(), "c": Shard(0), "d": Replicate()}


def value_of(name: str) -> Tensor:
    return torch.arange(24.0).view(6, 4) * 0.1 - ord(name) % 7


def mixed(context: RankContext) -> tuple[list[set[str]], float, int, dict[str, Tensor]]:
    """Sharded and replicated parameters of one dtype by turns, room for all in one bucket."""
    with ProcessGroups.create(Layout(tp=2)) as groups:
        mesh = groups.mesh("dp_cp", "tp")
        net = nn.Module()
        for name, placement in PLACED.items():
            value = distribute_tensor(
                value_of(name), mesh, [Replicate(), placement], src_data_rank=None
            )
            net.register_parameter(name, nn.Parameter(value))
        optimizer = ShardedOptimizer(
            net, net.parameters(), make=momentum, groups=groups, over="dp_cp", divisor=1,
            bucket_nbytes=1 << 20, elementwise=True,
        )  # fmt: skip
        names = {p: name for name, p in net.named_parameters()}
        kinds = [
            {str(PLACED[names[p]]) for p in bucket.parameters} for bucket in optimizer._buckets
        ]
        with optimizer.microbatch(is_last=True):
            total = sum(
                (p.full_tensor(grad_placements=[Replicate(), Replicate()]).relu().square().sum()  # type: ignore[attr-defined]
                 for p in net.parameters()), torch.zeros(())
            )  # fmt: skip
            total.backward()
        outcome = optimizer.step(count_zeros=True)
        weights = {n: p.full_tensor().detach() for n, p in net.named_parameters()}  # type: ignore[attr-defined]
        assert outcome.num_zeros is not None
        return kinds, outcome.norm, outcome.num_zeros, weights


def test_sharded_and_replicated_parameters_share_no_bucket() -> None:
    """Else all of a bucket would count as often as its first one, in the norm and in zeros."""
    truth = {name: nn.Parameter(value_of(name)) for name in PLACED}
    optimizer = momentum([{"params": list(truth.values())}])
    sum((p.relu().square().sum() for p in truth.values()), torch.zeros(())).backward()
    gradients = [p.grad for p in truth.values() if p.grad is not None]
    norm = torch.stack([g.double().square().sum() for g in gradients]).sum().sqrt()
    zeros = sum(int((g == 0).sum()) for g in gradients)
    optimizer.step()
    for kinds, found, found_zeros, weights in run_ranks(2, mixed).results:
        assert [len(kind) for kind in kinds] == [1, 1]
        assert found == pytest.approx(float(norm), rel=1e-6)
        assert found_zeros == zeros
        for name, p in truth.items():
            assert torch.allclose(weights[name], p, atol=1e-6)


def one_sided(context: RankContext, side: int) -> tuple[Tensor, float]:
    """Only one stage uses the embedding in the second step; both update it, momentum and all."""
    with ProcessGroups.create(Layout(pp=2)) as groups:
        place = groups.index("pp")
        names = STAGES[place]
        net = Stage(names, groups)
        optimizer = ShardedOptimizer(
            net, net.parameters(), make=momentum, groups=groups, over="dp_cp", divisor=1,
            bucket_nbytes=100, align_nbytes=4, elementwise=True, name=f"of stage {place}",
        )  # fmt: skip
        norm = 0.0
        for step in range(2):
            with optimizer.microbatch(is_last=True):
                loss_of(net, names, step, uses=step == 0 or place == side).backward()
            norm = optimizer.step().norm
        return plain(net.get_parameter("embed")).detach().clone(), norm


def loss_of(net: Stage, names: tuple[str, ...], step: int, *, uses: bool) -> Tensor:
    rows = torch.arange(8) + step
    if uses:
        return net.loss(rows, names)
    others = [plain(net.get_parameter(name)).square().mean() for name in names if name != "embed"]
    return sum(others, torch.zeros(()))


@pytest.mark.parametrize("side", [0, 1])
def test_an_embedding_that_one_stage_used_is_updated_on_both(side: int) -> None:
    names = tuple(dict.fromkeys(STAGES[0] + STAGES[1]))
    net = Stage(names, None)
    optimizer = momentum([{"params": list(net.parameters())}])
    for step in range(2):
        optimizer.zero_grad()
        for place in range(2):
            loss_of(net, STAGES[place], step, uses=step == 0 or place == side).backward()
        optimizer.step()
    results: list[Any] = run_ranks(2, one_sided, side).results
    assert torch.equal(results[0][0], results[1][0])
    assert results[0][1] == results[1][1]
    assert torch.allclose(results[0][0], net.get_parameter("embed"), atol=1e-6)
