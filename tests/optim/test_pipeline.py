"""Pipelines: a shared embedding, schedules that call backward themselves, and the norm over pp."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import Schedule1F1B, ScheduleInterleavedZeroBubble
from torch.distributed.tensor import Replicate, distribute_tensor

from holdfast import Checkpointer, Layout, OptimizerState, ProcessGroups
from holdfast.optim import ShardedOptimizer
from tests.harness import RankContext, run_ranks
from tests.optim.common import momentum

SHAPES = {"embed": (7, 5), "first": (3, 5), "second": (11, 5), "norm": (5,)}
STAGES = (("embed", "first"), ("norm", "second", "embed"))
"""Both stages hold `embed`, beside other parameters of other sizes."""


def full(name: str) -> Tensor:
    generator = torch.Generator().manual_seed(len(name))
    return torch.randn(SHAPES[name], generator=generator)


class Stage(nn.Module):
    """Some of the parameters; the loss is a sum over stages of what each makes of its rows."""

    def __init__(self, names: tuple[str, ...], groups: ProcessGroups | None) -> None:
        super().__init__()
        for name in names:
            value = full(name)
            if groups is not None:
                axes = ("embd", "dp_cp", "tp") if name == "embed" else ("dp_cp", "tp")
                mesh = groups.mesh(*axes)
                value = distribute_tensor(
                    value, mesh, [Replicate()] * len(axes), src_data_rank=None
                )
            self.register_parameter(name, nn.Parameter(value))

    def loss(self, rows: Tensor, names: tuple[str, ...]) -> Tensor:
        total = torch.zeros(())
        table = plain(self.get_parameter("embed"))[rows % 7]
        for name in names:
            if name != "embed":
                other = plain(self.get_parameter(name))
                total = total + (torch.tanh(table @ other.reshape(-1, 5).T) - 0.3).square().mean()
        return total


def plain(tensor: Tensor) -> Tensor:
    return cast("Tensor", tensor.to_local()) if hasattr(tensor, "to_local") else tensor


def tied(context: RankContext, root: str) -> dict[str, Any]:
    with ProcessGroups.create(Layout(pp=2, dp=2)) as groups:
        names = STAGES[groups.index("pp")]
        net = Stage(names, groups)
        optimizer = ShardedOptimizer(
            net,
            net.parameters(),
            make=momentum,
            groups=groups,
            over="dp_cp",
            divisor=2,
            bucket_nbytes=100,
            align_nbytes=4,
            stage=2,
            elementwise=True,
        )
        norms = []
        for step in range(3):
            rows = (torch.arange(8) + step).reshape(2, -1)[groups.index("dp_cp")]
            with optimizer.microbatch(is_last=True):
                net.loss(rows, names).backward()
            outcome = optimizer.step(count_zeros=True)
            norms.append((outcome.norm, outcome.num_zeros))
        Checkpointer(root, groups=groups).save(
            1, {"model": net, "optimizer": OptimizerState(optimizer, net)}
        )
        return {"norms": norms, "embed": plain(net.get_parameter("embed")).detach().clone()}


def test_a_shared_embedding_is_one_parameter(tmp_path: Path) -> None:
    results = run_ranks(4, tied, str(tmp_path)).results
    names = tuple(dict.fromkeys(STAGES[0] + STAGES[1]))
    net = Stage(names, None)
    optimizer = momentum([{"params": list(net.parameters())}])
    norms = []
    for step in range(3):
        optimizer.zero_grad()
        shares = (torch.arange(8) + step).reshape(2, -1)
        losses = [net.loss(rows, names) for rows in shares]
        (sum(losses, torch.zeros(())) / 2).backward()
        gradients = [cast("Tensor", p.grad).double() for p in net.parameters()]
        zeros = sum(int((g == 0).sum()) for g in gradients)
        norms.append(
            (float(sum((g.square().sum() for g in gradients), torch.zeros(())).sqrt()), zeros)
        )
        optimizer.step()
    for reports in results:
        assert reports["norms"] == results[0]["norms"]
        assert torch.equal(reports["embed"], results[0]["embed"])
        for (norm, zeros), (expected, wanted_zeros) in zip(reports["norms"], norms, strict=True):
            assert norm == pytest.approx(expected, rel=1e-6)
            assert zeros == wanted_zeros
    assert torch.allclose(results[0]["embed"], net.get_parameter("embed"), atol=1e-6)
    other = Stage(names, None)
    into = momentum([{"params": list(other.parameters())}])
    Checkpointer(tmp_path).load({"model": other, "optimizer": OptimizerState(into, other)})
    for name, parameter in net.named_parameters():
        assert torch.allclose(other.get_parameter(name), parameter, atol=1e-6)
        expected = optimizer.state[parameter]["momentum_buffer"]
        got = into.state[other.get_parameter(name)]["momentum_buffer"]
        assert torch.allclose(got, expected, atol=1e-6)


def layers(count: int) -> list[nn.Linear]:
    torch.manual_seed(5)
    return [nn.Linear(6, 6) for _ in range(count)]


def scheduled(context: RankContext, kind: str, stage: int) -> dict[str, Tensor]:
    """Two steps of a torch schedule on two pipelines of two ranks."""
    per_rank = 2 if kind == "zero-bubble" else 1
    with ProcessGroups.create(Layout(pp=2, dp=2)) as groups:
        place = groups.index("pp")
        every = layers(2 * per_rank)
        mine = nn.ModuleDict({str(i): every[i] for i in range(place, 2 * per_rank, 2)})
        optimizer = ShardedOptimizer(
            mine,
            mine.parameters(),
            make=momentum,
            groups=groups,
            over="dp_cp",
            divisor=2,
            stage=stage,  # type: ignore[arg-type]
            bucket_nbytes=64,
            align_nbytes=4,
            elementwise=True,
        )
        group = groups.group("pp")
        stages = [
            PipelineStage(module, int(i), 2 * per_rank, torch.device("cpu"), group=group)
            for i, module in mine.items()
        ]
        options: dict[str, Any] = {"loss_fn": square, "scale_grads": False}
        schedule: Any = (
            ScheduleInterleavedZeroBubble(cast("Any", stages), 4, **options)
            if per_rank == 2
            else Schedule1F1B(stages[0], 4, **options)
        )
        for step in range(2):
            batch = data(step)[groups.index("dp_cp") * 8 :][:8]
            if place == 0:
                schedule.step(batch)
            else:
                schedule.step(target=torch.zeros(8, 6))
            optimizer.step()
        return {name: p.detach().clone() for name, p in mine.named_parameters()}


def square(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean() / 4


def data(step: int) -> Tensor:
    return torch.sin(torch.arange(96, dtype=torch.float32) * (step + 1)).reshape(16, 6)


@pytest.mark.parametrize(("kind", "stage"), [("1f1b", 2), ("zero-bubble", 1)])
def test_schedules_call_backward_themselves(kind: str, stage: int) -> None:
    """Also those that put weight gradients into `.grad` without autograd's hooks."""
    count = 4 if kind == "zero-bubble" else 2
    net = nn.Sequential(*layers(count))
    optimizer = momentum([{"params": list(net.parameters())}])
    for step in range(2):
        optimizer.zero_grad()
        net(data(step)).square().mean().backward()
        optimizer.step()
    for found in run_ranks(4, scheduled, kind, stage).results:
        assert found
        for name, value in found.items():
            assert torch.allclose(value, net.get_parameter(name), atol=1e-6), name
