"""A model with experts, dense parts and one shared embedding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from holdfast import ProcessGroups
from holdfast.optim import ChainedOptimizer, ShardedOptimizer
from tests.optim.common import ROWS, Make

NUM_EXPERTS = 4
WIDTH = 5


class Sparse(nn.Module):
    """Row r goes through expert r % 4; the rest is dense."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Parameter(torch.empty(WIDTH, WIDTH))
        self.bias = nn.Parameter(torch.empty(WIDTH))
        self.mixers = nn.Parameter(torch.empty(NUM_EXPERTS, WIDTH, WIDTH))

    def forward(self, rows: Tensor) -> Tensor:
        x = torch.sin(rows[:, None] * torch.arange(1, WIDTH + 1))
        x = x @ self._plain(self.dense) + self._plain(self.bias)
        chosen = self._experts()[rows % NUM_EXPERTS]
        x = torch.bmm(x[:, None], chosen)[:, 0]
        return (x - 1).square().mean(dim=1)

    def _plain(self, parameter: Tensor) -> Tensor:
        return parameter.to_local() if isinstance(parameter, DTensor) else parameter

    def _experts(self) -> Tensor:
        """All experts; a gradient goes back to the rank that holds the expert, added up."""
        if not isinstance(self.mixers, DTensor):
            return self.mixers
        mesh = self.mixers.device_mesh["ep"]
        view = DTensor.from_local(self.mixers.to_local(), mesh, [Shard(0)], run_check=False)
        return view.full_tensor(grad_placements=[Partial()])


def build_sparse(groups: ProcessGroups | None = None) -> Sparse:
    """The model, experts on (expt_dp, ep, expt_tp) and the rest on (dp_cp, tp)."""
    net = Sparse()
    generator = torch.Generator().manual_seed(3)
    for name, parameter in list(net.named_parameters()):
        value: Tensor = torch.randn(parameter.shape, generator=generator)
        if groups is not None:
            mesh = groups.mesh("dp_cp", "tp")
            placed: list[Any] = [Replicate(), Replicate()]
            if name == "mixers":
                mesh = groups.mesh("expt_dp", "ep", "expt_tp")
                placed = [Replicate(), Shard(0), Replicate()]
            value = distribute_tensor(value, mesh, placed, src_data_rank=None)
        setattr(net, name, nn.Parameter(value))
    return net


def chain(net: Sparse, make: Make, groups: ProcessGroups, **options: Any) -> ChainedOptimizer:
    """Dense and expert optimizers, both divided by the number of data ranks."""
    divisor = groups.size("dp_cp")
    defaults = {"bucket_nbytes": 64, "align_nbytes": 4, "overlap": True, "elementwise": True}
    options = {**defaults, **options}
    return ChainedOptimizer(
        {
            "dense": ShardedOptimizer(
                net,
                [{"params": [net.dense]}, {"params": [net.bias], "weight_decay": 0.0}],
                make=make,
                groups=groups,
                over="dp_cp",
                divisor=divisor,
                name="dense",
                **options,
            ),
            "expert": ShardedOptimizer(
                net,
                [net.mixers],
                make=make,
                groups=groups,
                over="expt_dp",
                divisor=divisor,
                name="expert",
                **options,
            ),
        }
    )


def rows_of(step: int, groups: ProcessGroups | None = None) -> Tensor:
    """This data rank's rows of a step."""
    rows = torch.arange(ROWS) + step * ROWS
    if groups is None:
        return rows
    return rows.reshape(groups.size("dp_cp"), -1)[groups.index("dp_cp")]
