"""Next to tensor and expert tensor parallelism, with low precision, and with long accumulation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from holdfast import Layout, ProcessGroups
from holdfast.fsdp import fully_shard_model
from tests.fsdp.common import (
    NUM_SPECIALISTS,
    WIDTH,
    difference,
    plain,
    rows_of,
    sgd,
    train,
)
from tests.harness import RankContext, run_ranks

LAYOUTS: dict[str, dict[str, Any]] = {
    "fsdp x tp": {"dp": 2, "tp": 2},
    "fsdp x ep x tp": {"dp": 2, "tp": 2, "ep": 2, "expt_tp": 1},
    "fsdp x ep x expt_tp": {"dp": 2, "tp": 2, "ep": 2, "order": "dp-tp-ep-cp-pp"},
    "tp alone": {"tp": 4},
}


class Bank(nn.Module):
    """Row r goes through the matrices r % 4, whose inner width may be split over expt_tp."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Parameter(torch.empty(NUM_SPECIALISTS, WIDTH, 8))
        self.out = nn.Parameter(torch.empty(NUM_SPECIALISTS, 8, WIDTH))
        self.share = 1.0

    def forward(self, x: Tensor, rows: Tensor) -> Tensor:
        chosen = rows % NUM_SPECIALISTS
        into, out = (whole(each, share=self.share) for each in (self.into, self.out))
        hidden = torch.tanh(torch.bmm(x[:, None], into[chosen]))
        return torch.bmm(hidden, out[chosen])[:, 0]


class Wide(nn.Module):
    """A column- and a row-wise layer, a norm that is whole everywhere, and a bank."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 12)
        self.down = nn.Linear(12, WIDTH)
        self.bank = Bank()

    def forward(self, x: Tensor, rows: Tensor) -> Tensor:
        x = x + self.down(torch.tanh(self.up(self.norm(x))))
        return x + self.bank(x, rows)


class WideNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.empty(7, WIDTH))
        self.layers = nn.ModuleList(Wide() for _ in range(2))
        generator = torch.Generator().manual_seed(11)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)

    def forward(self, rows: Tensor) -> Tensor:
        x = plain(self.table)[rows % 7]
        for layer in self.layers:
            x = layer(x, rows)
        return (x - torch.sin(rows)[:, None].to(x.dtype)).square().mean(dim=1)


def whole(value: Tensor, *, share: float) -> Tensor:
    """All of a parameter; every rank uses all of it, on rows of its own.

    Ranks of one tensor group have the same rows, which count once: each has a share of them.
    """
    if not isinstance(value, DTensor):
        return value
    mesh = value.device_mesh
    joined = value.redistribute(placements=[Replicate()] * mesh.ndim)
    local = joined.to_local(grad_placements=[Partial()] * mesh.ndim)
    return local * share + local.detach() * (1 - share)


def parallelize(net: WideNet, groups: ProcessGroups) -> None:
    layout = groups.layout
    if layout.tp > 1:
        mesh = groups.mesh("dp_cp", "tp")["tp"]
        for layer in net.layers:
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(layer, mesh, plan, src_data_rank=None)  # type: ignore[arg-type]
    if layout.ep * layout.expt_tp > 1:
        mesh = groups.mesh("expt_dp", "ep", "expt_tp")["ep", "expt_tp"]
        for layer in net.layers:
            layer.bank.share = 1 / layout.tp
            for name, dim in (("into", 2), ("out", 1)):
                old = getattr(layer.bank, name).detach()
                placed = [Shard(0), Shard(dim)]
                value = distribute_tensor(old, mesh, placed, src_data_rank=None)
                setattr(layer.bank, name, nn.Parameter(value))


def tensor_parallel(context: RankContext, ways: list[str]) -> dict[str, tuple[float, float]]:
    """By layout, the largest difference of a weight, and of a norm."""
    del context
    expected = WideNet()
    optimizer = sgd(expected.parameters())
    norms = []
    for step in range(3):
        expected(torch.cat(rows_of(step))).mean().backward()
        norms.append(float(nn.utils.clip_grad_norm_(expected.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
    found = {}
    for way in ways:
        with ProcessGroups.create(Layout(**LAYOUTS[way])) as groups:
            net = WideNet()
            parallelize(net, groups)
            sharded = fully_shard_model(
                net,
                groups,
                units=net.layers,
                experts=[layer.bank for layer in net.layers],  # type: ignore[misc]
            )
            seen = train(sharded, sgd(net.parameters()), steps=3, max_norm=0.5)
            off = max(abs(norm - other) for (_, norm), other in zip(seen, norms, strict=True))
            found[way] = (difference(net, expected), off)
    return found


@pytest.mark.parametrize(
    "ways", [["fsdp x ep x tp"], pytest.param([*LAYOUTS], marks=pytest.mark.slow)]
)
def test_sharded_models_train_as_one_process_next_to_tensor_parallelism(ways: list[str]) -> None:
    """F2, M12: FSDP x TP, FSDP x EP x TP; the norm of the clipping is that of one process."""
    for found in run_ranks(4, tensor_parallel, ways).results:
        for way, (weights, norms) in found.items():
            assert weights < 1e-6, (way, weights)
            assert norms < 1e-5, (way, norms)
