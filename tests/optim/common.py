"""A small model, whole or declared on a mesh, and what one process makes of the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from holdfast import ProcessGroups
from holdfast.optim import ShardedOptimizer

ROWS = 24
STEPS = 4
MICROBATCHES = 2
SPLITS: dict[str, int] = {"embed": 0, "up": 1}
"""Which dim of a parameter is split over the tensor axis; 13 rows over 2 ranks are uneven."""

Make = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]


def sgd(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=0.1)


def momentum(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


def adamw(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=0.02, foreach=True)


OPTIMIZERS: dict[str, Make] = {"sgd": sgd, "momentum": momentum, "adamw": adamw}


class Inner(nn.Module):
    """A layer whose parameters have shapes that fit no bucket evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(6, 10))
        self.bias = nn.Parameter(torch.empty(10))
        self.down = nn.Parameter(torch.empty(10, 3, 2))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(x @ whole(self.up) + whole(self.bias))
        return hidden @ whole(self.down).reshape(10, 6)


class Net(nn.Module):
    """Uneven, tiny, large, scalar, empty, frozen, unused and rarely used parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Parameter(torch.empty(13, 6))
        self.gain = nn.Parameter(torch.empty(()))
        self.inner = Inner()
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.frozen = nn.Parameter(torch.empty(5, 2), requires_grad=False)
        self.unused = nn.Parameter(torch.empty(7, 5))
        self.rare = nn.Parameter(torch.empty(6))

    def forward(self, rows: Tensor) -> Tensor:
        """Loss of each row; `rare` has a part in row 0 only."""
        x = whole(self.embed)[rows % 13] * whole(self.gain)
        x = x + self.inner(x)
        if 0 in rows:
            x = x + (rows == 0)[:, None] * whole(self.rare)
        x = x + whole(self.empty).sum() + whole(self.frozen).sum() * 0.01
        return (x - torch.sin(rows)[:, None].to(x.dtype)).square().mean(dim=1)


def whole(parameter: Tensor) -> Tensor:
    """A parameter as a plain tensor: declared ones are joined over the tensor axis."""
    if not isinstance(parameter, DTensor):
        return parameter
    mesh = parameter.device_mesh
    local = parameter.to_local()
    placement = parameter.placements[-1]
    if not placement.is_shard():
        return local
    view = DTensor.from_local(
        local,
        mesh["tp"],
        [placement],
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    return view.full_tensor()


def build(
    groups: ProcessGroups | None = None, *, seed: int = 1, dtype: torch.dtype = torch.float32
) -> Net:
    """The model with values that depend on the seed alone, on the mesh of `groups` if given."""
    net = Net()
    generator = torch.Generator().manual_seed(seed)
    mesh = None if groups is None or groups.layout.world_size == 1 else groups.mesh("dp_cp", "tp")
    for name, parameter in list(net.named_parameters()):
        value = torch.randn(parameter.shape, generator=generator).mul_(0.5).to(dtype)
        module: nn.Module = net
        *path, last = name.split(".")
        for step in path:
            module = cast("nn.Module", getattr(module, step))
        if mesh is not None:
            placed: list[Placement] = [Replicate(), Replicate()]
            if last in SPLITS:
                placed[1] = Shard(SPLITS[last])
            value = distribute_tensor(value, mesh, placed, src_data_rank=None)
        setattr(module, last, nn.Parameter(value, requires_grad=parameter.requires_grad))
    return net


def batches(step: int, *, index: int = 0, shares: int = 1) -> Iterator[Tensor]:
    """The microbatches of one share of a step's rows; row 0 is in the first share."""
    rows = torch.arange(ROWS) + (step * ROWS if step else 0)
    rows[0] = 0
    mine = rows.reshape(shares, -1)[index]
    yield from mine.split(-(-len(mine) // MICROBATCHES))


def train(
    net: Net,
    optimizer: Any,
    groups: ProcessGroups,
    *,
    steps: range,
    contexts: bool = True,
    **options: Any,
) -> list[Any]:
    """Train on this rank's share, microbatch by microbatch; the outcome of each step."""
    shares, index = groups.size("dp_cp"), groups.index("dp_cp")
    outcomes = []
    for step in steps:
        parts = list(batches(step, index=index, shares=shares))
        for i, rows in enumerate(parts):
            loss = net(rows).mean() / len(parts)
            if contexts:
                with optimizer.microbatch(is_last=i == len(parts) - 1):
                    loss.backward()
            else:
                loss.backward()
        outcomes.append(optimizer.step(**options))
    return outcomes


def groups_of(net: Net) -> list[dict[str, Any]]:
    """Two groups, as the trainer makes them: matrices with decay, the rest without."""
    parameters = list(net.parameters())
    return [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]


def sharded(net: Net, make: Make, groups: ProcessGroups, **options: Any) -> ShardedOptimizer:
    """The sharded optimizer over all parameters, in tiny buckets by default."""
    options = {
        "over": "dp_cp",
        "divisor": groups.size("dp_cp"),
        "bucket_nbytes": 300,
        "align_nbytes": 4,
        "overlap": True,
        # The trial of an optimizer, in each of many constructions, is the matter of
        # test_elementwise.
        "elementwise": True,
        **options,
    }
    return ShardedOptimizer(net, groups_of(net), make=make, groups=groups, **options)
