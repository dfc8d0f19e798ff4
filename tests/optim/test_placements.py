"""Gradients as DTensor arithmetic hands them over, and what the norm makes of plain `.grad`s."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)

from holdfast import Checkpointer, ConfigError, Layout, ProcessGroups
from holdfast.optim import ShardedOptimizer, gradient_norm
from holdfast.optim.engine import clip_factor
from holdfast.optim.norms import scale_gradients
from tests.harness import RankContext, run_ranks
from tests.optim.common import sgd

SHAPE = (7, 6)


class Holder(nn.Module):
    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(value)


def arrive(context: RankContext) -> None:
    """Whatever placement a gradient comes with, the parameter's elements get their own share."""
    with ProcessGroups.create(Layout(tp=2, dp=2)) as groups:
        mesh = groups.mesh("dp_cp", "tp")
        truth = torch.arange(42, dtype=torch.float32).reshape(SHAPE)
        data = groups.index("dp_cp")
        kinds: list[tuple[Placement, Placement]] = [
            (Shard(0), Replicate()),
            (Shard(0), Partial()),
            (Shard(1), Shard(0)),
            (Replicate(), Partial()),
            (Replicate(), Shard(1)),
        ]
        for placed, given in kinds:
            value = distribute_tensor(
                torch.zeros(SHAPE), mesh, [Replicate(), placed], src_data_rank=None
            )
            net = Holder(value)
            optimizer = ShardedOptimizer(
                net,
                net.parameters(),
                make=sgd,
                groups=groups,
                over="dp_cp",
                divisor=2,
                elementwise=True,
            )
            mine = truth * (data + 1)  # each data rank has a gradient of its own
            local = mine
            if isinstance(given, Partial):
                local = mine / 2
            elif given.is_shard():
                whole = distribute_tensor(mine, mesh["tp"], [given], src_data_rank=None)
                local = whole.to_local()
            net.weight.grad = DTensor.from_local(
                local, mesh, [Replicate(), given], run_check=False,
                shape=torch.Size(SHAPE), stride=(6, 1),
            )  # fmt: skip
            optimizer.step()
            got = cast("DTensor", net.weight).full_tensor().detach()
            assert torch.allclose(got, truth * -0.1 * 1.5), (placed, given)


def test_gradients_may_come_in_another_placement() -> None:
    run_ranks(4, arrive)


def plain_gradients(context: RankContext) -> list[float]:
    """The norm without a sharded optimizer: declared, plain and expert gradients together."""
    found: list[float] = []
    with ProcessGroups.create(Layout(tp=2, dp=2, ep=2, expt_tp=1)) as groups:
        dense, experts = groups.mesh("dp_cp", "tp"), groups.mesh("expt_dp", "ep", "expt_tp")
        places: list[tuple[Any, list[Placement]]] = [
            (dense, [Replicate(), Shard(0)]),
            (dense, [Replicate(), Replicate()]),
            (experts, [Replicate(), Shard(0), Replicate()]),
            (dense, [Shard(0), Shard(1)]),
            (groups.mesh("tp"), [Shard(1)]),
        ]
        parameters = []
        for i, (mesh, placed) in enumerate(places):
            parameter = nn.Parameter(
                distribute_tensor(torch.zeros(SHAPE), mesh, placed, src_data_rank=None)
            )
            parameter.grad = distribute_tensor(gradient(i), mesh, placed, src_data_rank=None)
            parameters.append(parameter)
        last = nn.Parameter(torch.zeros(SHAPE))
        last.grad = gradient(len(places))
        norm = gradient_norm([*parameters, last, nn.Parameter(torch.zeros(2))], groups=groups)
        assert norm.is_finite
        assert norm.bad_ranks == ()
        found.append(norm.value)
        scale_gradients([*parameters, last], clip_factor(norm, limit=1.0))
        found.append(gradient_norm([*parameters, last], groups=groups).value)
        scale_gradients([last], clip_factor(norm, limit=0.0))
        if groups.rank == 3:
            last.grad[0, 0] = float("nan")
        found.append(len(gradient_norm([last], groups=groups).bad_ranks))
        assert gradient_norm([last], groups=groups).bad_ranks == (3,)
        partial = nn.Parameter(distribute_tensor(torch.zeros(2), dense, [Replicate()] * 2))
        partial.grad = DTensor.from_local(torch.ones(2), dense, [Partial(), Replicate()])
        with pytest.raises(ConfigError, match="a sum not yet reduced"):
            gradient_norm([partial], groups=groups)
    return found


def gradient(number: int) -> Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(number))


def test_the_norm_counts_each_element_once() -> None:
    expected = torch.stack([gradient(i).double().square().sum() for i in range(6)]).sum().sqrt()
    results = run_ranks(4, plain_gradients).results
    for value, clipped, num_bad in results:
        assert value == results[0][0]
        assert value == pytest.approx(float(expected), rel=1e-6)
        assert clipped == pytest.approx(1.0, rel=1e-6)
        assert num_bad == 1


def save_one_row_each(context: RankContext, root: str) -> bool:
    with ProcessGroups.create(Layout(tp=4)) as groups:
        net = nn.ParameterList(torch.full((1, 6), float(number)) for number in range(3))
        for number in range(3):
            value = distribute_tensor(
                net[number].detach(),
                groups.mesh("dp_cp", "tp"),
                [Replicate(), Shard(0)],
                src_data_rank=None,
            )
            net[number] = nn.Parameter(value)
        ShardedOptimizer(
            net,
            net.parameters(),
            make=sgd,
            groups=groups,
            over="dp_cp",
            divisor=1,
            elementwise=True,
        ).close()
        checkpointer = Checkpointer(root, groups=groups)
        checkpointer.save(1, {"model": net})
        with torch.no_grad():
            for parameter in net:
                parameter.fill_(-1.0)
        checkpointer.load({"model": net})
        wholes = [cast("DTensor", p.detach()).full_tensor() for p in net]
        return all(bool((whole == number).all()) for number, whole in enumerate(wholes))


def test_empty_shards_that_start_at_one_place_of_a_bucket_are_several_tensors(
    tmp_path: Path,
) -> None:
    """Before, a rank without rows of two parameters took them for one, and the save failed."""
    assert all(run_ranks(4, save_one_row_each, str(tmp_path)).results)
