"""FSDP2 over expert parallelism: any layout to any other (K1), one name for two tensors (K2)."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from holdfast import (
    Checkpointer,
    Layout,
    OptimizerState,
    PendingSave,
    PlanError,
    ProcessGroups,
    SaveReport,
)
from holdfast.format.names import step_dir
from holdfast.format.reader import Snapshot
from holdfast.optim import gradient_norm
from holdfast.optim.engine import clip_factor
from holdfast.optim.norms import scale_gradients
from holdfast.storage import PosixStorage
from tests.checkpoint.common import full
from tests.harness import RankContext, run_ranks

NUM_LAYERS = 2
NUM_EXPERTS = 4
WAYS: dict[str, dict[str, Any]] = {
    "one process": {},
    "dp2 x ep2": {"dp": 2, "ep": 2},
    "dp4 x ep2": {"dp": 4, "ep": 2},
    "dp4 x ep4": {"dp": 4, "ep": 4},
    "dp4, no experts apart": {"dp": 4},
    "tp2 x ep2": {"tp": 2, "dp": 2, "ep": 2, "expt_tp": 1},
    "tp2 x ep2, experts whole on both": {"tp": 2, "dp": 2, "ep": 2},
    "tp2 x ep4": {"tp": 2, "dp": 2, "ep": 4, "expt_tp": 1},
    "pp2 x ep2": {"pp": 2, "dp": 2, "ep": 2},
}
"""Parameters are sharded by FSDP2 over dp_cp and expt_dp, under tensor and expert sharding.

Where experts are whole on both tensor ranks, their mesh leaves the other one out.
"""


class Experts(nn.Module):
    def __init__(self, prefix: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(full(f"{prefix}.weight", (NUM_EXPERTS, 6, 5)))


class Layer(nn.Module):
    """A dense and an expert part with values that depend on their names alone."""

    def __init__(self, prefix: str) -> None:
        super().__init__()
        self.up = nn.Linear(6, 10)
        self.experts = Experts(f"{prefix}.experts")
        with torch.no_grad():
            for name, parameter in self.up.named_parameters():
                parameter.copy_(full(f"{prefix}.up.{name}", tuple(parameter.shape)))


def shard(layer: Layer, groups: ProcessGroups) -> None:
    """Experts over ep, columns over tp, and all that over the data ranks by FSDP2."""
    layout = groups.layout
    dense, experts = groups.mesh("dp_cp", "tp"), groups.mesh("expt_dp", "ep")
    if layout.tp > 1:
        parallelize_module(layer.up, dense["tp"], ColwiseParallel(), src_data_rank=None)
    weight = layer.experts.weight.detach()
    if layout.ep > 1:
        weight = distribute_tensor(weight, experts["ep"], [Shard(0)], src_data_rank=None)
        layer.experts.weight = nn.Parameter(weight)
    fully_shard(layer.experts, mesh=experts["expt_dp"])
    fully_shard(layer.up, mesh=dense["dp_cp"])


@dataclass(frozen=True)
class Run:
    """One rank's layers and their optimizer after a step, or blank."""

    model: nn.ModuleDict
    optimizer: torch.optim.Optimizer

    @classmethod
    def make(cls, groups: ProcessGroups, *, true: bool) -> Run:
        layout, rank = groups.layout, groups.rank
        stage, per_stage = layout.coordinate(rank)["pp"], NUM_LAYERS // layout.pp
        model = nn.ModuleDict()
        for number in range(stage * per_stage, (stage + 1) * per_stage):
            layer = Layer(f"layers.{number}")
            if layout.world_size > 1:
                shard(layer, groups)
            model[f"{number}"] = layer
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.125 if true else 3.0, foreach=False)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.grad = parameter.detach() * 0.5
                if not true:
                    parameter.fill_(float("nan"))
        if true:
            optimizer.step()
        return cls(model, optimizer)

    def state(self) -> dict[str, object]:
        return {"model": self.model, "optimizer": OptimizerState(self.optimizer, self.model)}

    def whole(self) -> dict[str, torch.Tensor]:
        """Every parameter and moment of this stage as a full tensor."""
        found = {}
        for name, parameter in self.model.named_parameters():
            found[name] = full_of(parameter)
            for entry, value in self.optimizer.state[parameter].items():
                found[f"{name}/{entry}"] = full_of(value)
        return found


def full_of(value: torch.Tensor) -> torch.Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()


def groups_of(way: str) -> ProcessGroups:
    layout = Layout(**WAYS[way])
    return ProcessGroups.create(layout) if layout.world_size > 1 else ProcessGroups.single()


def chosen_of(num_ranks: int, chosen: tuple[str, ...]) -> list[str]:
    ways = [way for way, sizes in WAYS.items() if Layout(**sizes).world_size == num_ranks]
    return [way for way in ways if way in chosen]


def save(context: RankContext, root: str, chosen: tuple[str, ...]) -> None:
    for way in chosen_of(context.num_ranks, chosen):
        with groups_of(way) as groups:
            state = Run.make(groups, true=True).state()
            Checkpointer(f"{root}/{way}", groups=groups).save(1, state)


def load(
    context: RankContext, root: str, chosen: tuple[str, ...], strides: tuple[int, ...]
) -> dict[tuple[str, str], dict[str, torch.Tensor]]:
    found = {}
    for way in chosen_of(context.num_ranks, chosen):
        with groups_of(way) as groups:
            number = chosen.index(way)
            for saver in [chosen[(number - stride) % len(chosen)] for stride in strides]:
                run = Run.make(groups, true=False)
                Checkpointer(f"{root}/{saver}", groups=groups).load(run.state())
                assert run.optimizer.param_groups[0]["lr"] == 0.125
                found[saver, way] = run.whole()
    return found


FEW = ("one process", "dp4 x ep2", "tp2 x ep2", "pp2 x ep2")


@pytest.mark.parametrize(
    ("chosen", "strides"),
    [
        pytest.param(tuple(WAYS), (3,), marks=pytest.mark.slow),
        pytest.param(tuple(WAYS), (1, 2, 4, 5), marks=pytest.mark.nightly),
    ],
    ids=("all", "all, more"),
)
def test_every_layout_loads_what_every_other_saved(
    tmp_path: Path, chosen: tuple[str, ...], strides: tuple[int, ...]
) -> None:
    """K1: FSDP2 x EP into EP1, other data sizes, TP2, PP2, one process; and all of these back.

    In rings, in which those who save and who load are so far apart in the list: what is loaded is
    compared with the truth, whoever saved it.
    """
    sizes = sorted({Layout(**WAYS[way]).world_size for way in chosen})
    for num_ranks in sizes:
        run_ranks(num_ranks, save, str(tmp_path), chosen, init=num_ranks > 1)
    truth = Run.make(ProcessGroups.single(), true=True).whole()
    keys = {f"model.{name}" for name in truth if "/" not in name} | {
        f"optimizer.state.{name.replace('/', '.')}" for name in truth if "/" in name
    }
    for way in chosen:
        with Snapshot.open(PosixStorage(tmp_path / way), step_dir(1)) as snapshot:
            assert {info.key for info in snapshot.manifest.tensors} == keys, way
    seen = 0
    for num_ranks in sizes:
        arguments = str(tmp_path), chosen, strides
        results = run_ranks(num_ranks, load, *arguments, init=num_ranks > 1).results
        for pair in results[0]:
            together: dict[str, torch.Tensor] = {}
            for found in results:
                together |= found[pair]
                for name, value in found[pair].items():
                    assert torch.equal(value, truth[name]), (pair, name)
            assert together.keys() == truth.keys(), pair
            seen += 1
    assert seen == len(chosen) * len(strides)


def norms(
    context: RankContext, chosen: tuple[str, ...]
) -> dict[str, tuple[float, float, dict[str, torch.Tensor]]]:
    found = {}
    for way in chosen_of(context.num_ranks, chosen):
        with groups_of(way) as groups:
            model = Run.make(groups, true=True).model
            before = gradient_norm(model.parameters(), groups=groups)
            scale_gradients(model.parameters(), clip_factor(before, limit=1.0))
            after = gradient_norm(model.parameters(), groups=groups)
            gradients = {n: full_of(p.grad) for n, p in model.named_parameters()}  # type: ignore[arg-type]
            found[way] = (before.value, after.value, gradients)
    return found


@pytest.mark.parametrize(
    "chosen", [FEW, pytest.param(tuple(WAYS), marks=pytest.mark.slow)], ids=("few", "all")
)
def test_the_norm_of_fsdp_tensor_and_expert_gradients_is_that_of_one_process(
    chosen: tuple[str, ...],
) -> None:
    """M12, on real FSDP2 gradients: norm and what is clipped, to 1e-6."""
    truth = Run.make(ProcessGroups.single(), true=True).model
    gradients = {name: p.grad for name, p in truth.named_parameters() if p.grad is not None}
    squares = [g.double().square().sum() for g in gradients.values()]
    expected = float(torch.stack(squares).sum().sqrt())
    assert expected > 2.0
    for num_ranks in sorted({Layout(**WAYS[way]).world_size for way in chosen}):
        for found in run_ranks(num_ranks, norms, chosen, init=num_ranks > 1).results:
            for way, (before, after, clipped) in found.items():
                assert before == pytest.approx(expected, rel=1e-6), way
                assert after == pytest.approx(1.0, rel=1e-5), way
                for name, value in clipped.items():
                    torch.testing.assert_close(
                        value, gradients[name] / expected, rtol=1e-5, atol=1e-8
                    )


def finished(saved: SaveReport | PendingSave) -> SaveReport:
    return saved.result(60) if isinstance(saved, PendingSave) else saved


def one_name(context: RankContext, root: str) -> dict[str, str]:
    """What is refused where one name stands for different tensors on different ranks."""
    said: dict[str, str] = {}
    rank = context.rank
    with ProcessGroups.create(Layout(dp=4, ep=2), timeout_s=20) as groups:
        checkpointer = Checkpointer(root, groups=groups)

        def refused(case: str, state: dict[str, object]) -> None:
            for number, call in enumerate((checkpointer.save, checkpointer.save_async)):
                began = time.monotonic()
                with pytest.raises(PlanError) as caught:
                    finished(call(1, state))
                assert time.monotonic() - began < 30
                assert checkpointer.latest() is None
                said[f"{case} {number}"] = str(caught.value)
                if number == 1:
                    with pytest.raises(PlanError):  # the next save says it again, on every rank
                        checkpointer.save(1, state)

        # Experts of an ep rank, sharded over their data ranks, that do not say that ep splits them.
        experts = Experts("experts")
        mine = groups.index("ep")
        experts.weight = nn.Parameter(experts.weight.detach()[2 * mine : 2 * mine + 2].clone())
        fully_shard(experts, mesh=groups.mesh("expt_dp"))
        refused("experts", {"model": {"experts": experts.weight.detach()}})
        # Two modules on disjoint ranks with equal inner names.
        pairs = [DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])]
        value = full("encoder" if rank < 2 else "language", (6, 4))
        module = distribute_tensor(value, pairs[rank // 2], [Shard(0)])
        refused("modules", {"model": {"weight": module}})
        # The same, equal but for one bit of one element on one rank.
        value = full("encoder", (6, 4)).clone()
        if rank == 3:
            value.view(torch.int32)[5, 3] ^= 1
        module = distribute_tensor(value, pairs[rank // 2], [Shard(0)], src_data_rank=None)
        refused("a bit", {"model": {"weight": module}})
        # Equal bytes are copies of one tensor, and no trouble.
        same = distribute_tensor(full("encoder", (6, 4)), pairs[rank // 2], [Shard(0)])
        checkpointer.save(1, {"model": {"weight": same}})
        found = torch.zeros(6, 4)
        checkpointer.load({"model": {"weight": found}})
        assert torch.equal(found, full("encoder", (6, 4)))
    return said


def test_one_name_for_different_tensors_is_refused_on_all_ranks(tmp_path: Path) -> None:
    """K2: PyTorch DCP keeps one rank's bytes and loses the others'."""
    results = run_ranks(4, one_name, str(tmp_path)).results
    for said in results:
        for number in range(2):
            assert "model.experts" in said[f"experts {number}"]
            assert "model.weight" in said[f"modules {number}"]
            assert "model.weight" in said[f"a bit {number}"]
            assert "1" in said[f"a bit {number}"]
            assert "3" in said[f"a bit {number}"]
            for case in ("experts", "modules", "a bit"):
                assert "rank" in said[f"{case} {number}"], said[f"{case} {number}"]
