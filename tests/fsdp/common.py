"""A small model with experts, its layouts, and what one process makes of the whole batch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from holdfast import ProcessGroups
from holdfast.fsdp import ShardedModel, fully_shard_model

ROWS = 16
WIDTH = 6
NUM_SPECIALISTS = 4
STEPS = 4
MICROBATCHES = 2
STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")

Make = Callable[[Any], torch.optim.Optimizer]
sgd: Make = functools.partial(torch.optim.SGD, lr=0.1)
adamw: Make = functools.partial(torch.optim.AdamW, lr=0.02, foreach=False)


class Specialists(nn.Module):
    """Row r goes through specialist r % 4: experts in all but name."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.empty(NUM_SPECIALISTS, WIDTH, WIDTH))

    def forward(self, x: Tensor, rows: Tensor) -> Tensor:
        chosen = self.whole()[rows % NUM_SPECIALISTS]
        return torch.tanh(torch.bmm(x[:, None], chosen)[:, 0])

    def whole(self) -> Tensor:
        """All of them; a gradient goes back to the rank that holds the specialist, added up."""
        if not isinstance(self.mix, DTensor):
            return self.mix
        return self.mix.redistribute(placements=[Replicate()] * self.mix.device_mesh.ndim).to_local(
            grad_placements=[Partial()] * self.mix.device_mesh.ndim
        )


class Layer(nn.Module):
    """13 and 5 and 2 rows: none divides over four ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 13)
        self.down = nn.Linear(13, WIDTH)
        self.gain = nn.Parameter(torch.empty(2, 3))
        self.shift = nn.Parameter(torch.empty(5), requires_grad=False)
        self.special = Specialists()

    def forward(self, x: Tensor, rows: Tensor) -> Tensor:
        x = x + self.down(torch.tanh(self.up(x))) * plain(self.gain).sum()
        return x + self.special(x, rows) + plain(self.shift).sum()


class Net(nn.Module):
    """Layers around a table that is used at both ends."""

    def __init__(self, num_layers: int = 2) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.empty(7, WIDTH))
        self.layers = nn.ModuleList(Layer() for _ in range(num_layers))

    def forward(self, rows: Tensor) -> Tensor:
        """The loss of each row, (rows,)."""
        x = plain(self.table)[rows % 7]
        for layer in self.layers:
            x = layer(x, rows)
        scores = x @ plain(self.table).T
        return (scores - torch.sin(rows)[:, None].to(x.dtype)).square().mean(dim=1)


def plain(value: Tensor) -> Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def build(*, seed: int = 1, dtype: torch.dtype = torch.float32, num_layers: int = 2) -> Net:
    """The model with values that depend on the seed alone."""
    net = Net(num_layers)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return cast("Net", net.to(dtype))


def place(net: Net, groups: ProcessGroups, *, hybrid: bool = True) -> Net:
    """Specialists over ep, as expert parallelism of a user's own puts them."""
    if groups.layout.ep > 1:
        names: tuple[str, ...] = ("expt_dp",)
        if groups.layout.replicas > 1 and hybrid:
            names = ("expt_dp_inter", "expt_dp_intra")
        mesh = groups.mesh(*names, "ep")["ep"]
        for layer in net.layers:
            special = cast("Layer", layer).special
            value = distribute_tensor(special.mix.detach(), mesh, [Shard(0)], src_data_rank=None)
            special.mix = nn.Parameter(value)
    return net


def specialists(net: Net) -> list[nn.Module | nn.Parameter]:
    """One declared as a module, the others as parameters."""
    found = [cast("Layer", layer).special for layer in net.layers]
    return [*found[:1], *(each.mix for each in found[1:])]


def shard(net: Net, groups: ProcessGroups, **options: Any) -> ShardedModel:
    options = {"experts": specialists(net), "units": list(net.layers), **options}
    return fully_shard_model(net, groups, **options)


def rows_of(step: int, *, index: int = 0, shares: int = 1) -> list[Tensor]:
    """The microbatches of one share of a step's rows."""
    rows = torch.arange(ROWS) + step * ROWS
    mine = rows.reshape(-1, shares)[:, index]
    return list(mine.split(len(mine) // MICROBATCHES))


def train(
    sharded: ShardedModel,
    optimizer: torch.optim.Optimizer,
    *,
    steps: int = STEPS,
    first: int = 0,
    **options: Any,
) -> list[tuple[float, float]]:
    """(loss of this data rank, norm of the gradient) of each step."""
    groups = sharded.groups
    shares, index = groups.size("dp_cp"), groups.index("dp_cp")
    found = []
    for step in range(first, first + steps):
        parts = rows_of(step, index=index, shares=shares)
        total = 0.0
        for i, rows in enumerate(parts):
            with sharded.microbatch(is_last=i == len(parts) - 1):
                loss = sharded.model(rows).mean() / len(parts)
                loss.backward()
            total += float(loss.detach())
        outcome = sharded.step(optimizer, **options)
        found.append((total, outcome.norm))
    return found


def truth(
    make: Make, *, steps: int = STEPS, max_norm: float = 0.0, num_layers: int = 2
) -> tuple[Net, list[tuple[float, float]]]:
    """One process, the whole batch at once: the model, and (loss, norm) of each step."""
    net = build(num_layers=num_layers)
    optimizer = make(net.parameters())
    found = []
    for step in range(steps):
        loss = net(torch.cat(rows_of(step))).mean()
        loss.backward()
        limit = max_norm or float("inf")
        norm = torch.nn.utils.clip_grad_norm_(net.parameters(), limit)
        found.append((float(loss.detach()), float(norm)))
        optimizer.step()
        optimizer.zero_grad()
    return net, found


def full(value: Tensor) -> Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()


def difference(net: nn.Module, other: nn.Module) -> float:
    """The largest difference of any element."""
    expected = dict(other.named_parameters())
    gaps = [
        (full(p).double() - full(expected[name]).double()).abs().reshape(-1)
        for name, p in net.named_parameters()
    ]
    return float(torch.cat(gaps).max())
