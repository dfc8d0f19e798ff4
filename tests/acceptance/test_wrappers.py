"""Wrappers do not change keys: what one kind saved, the bare model and every other load (K8)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from holdfast import Checkpointer, Layout, OptimizerState, ProcessGroups
from holdfast.format.names import step_dir
from holdfast.format.reader import Snapshot
from holdfast.storage import PosixStorage
from tests.checkpoint.common import full
from tests.harness import RankContext, run_ranks

NUM_RANKS = 2
KINDS = (
    "bare",
    "ddp",
    "fsdp2",
    "fsdp2 mixed",
    "compiled",
    "compiled in place",
    "checkpointed",
    "ddp over checkpointed, compiled",
    "fsdp2 over checkpointed, compiled",
    "bf16 autocast",
)


class Block(nn.Module):
    """Two layers, a norm, buffers, and an attribute that wrappers use as well."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(6, 10)
        self.norm = nn.LayerNorm(10)
        self.register_buffer("scale", torch.empty(10))
        self.register_buffer("seen", torch.empty((), dtype=torch.int64))
        self.down = nn.Linear(10, 6, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.module(x))
        return x + self.down(torch.relu(hidden * self.scale.to(hidden.dtype)))


def blocks(*, true: bool) -> nn.Sequential:
    model = nn.Sequential(Block(), Block(), nn.Linear(6, 5))
    for name, value in model.state_dict().items():
        if true and value.is_floating_point():
            value.copy_(full(name, tuple(value.shape)).abs())
        elif true:
            value.fill_(3)
        else:
            value.zero_()
    return model


def wrap(kind: str, model: nn.Sequential, groups: ProcessGroups) -> nn.Module:
    """One way to wrap; compiling is lazy and nothing here runs the model compiled."""
    if "checkpointed" in kind:
        for number in range(2):
            model[number] = checkpoint_wrapper(model[number])
    wrapped: nn.Module = model
    if "fsdp2" in kind:
        mesh = groups.mesh("dp")
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        options: dict[str, Any] = {"mp_policy": policy} if "mixed" in kind else {}
        for block in model:
            fully_shard(block, mesh=mesh, **options)
        fully_shard(model, mesh=mesh, **options)
    if "ddp" in kind:
        wrapped = DistributedDataParallel(model, process_group=groups.group("dp"))
    if kind == "compiled in place":
        model.compile()
    elif "compiled" in kind:
        wrapped = torch.compile(wrapped)
    return wrapped


def step(kind: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Give every parameter momentum; elementwise, so that all kinds make the same bits."""
    if kind in ("ddp", "fsdp2 mixed", "bf16 autocast"):  # the wrapper has been at work
        enabled = kind == "bf16 autocast"
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            model(torch.ones(2, 6)).float().sum().backward()
    for parameter in model.parameters():
        parameter.grad = parameter.detach() * 0.5
    optimizer.step()
    optimizer.zero_grad()


def whole(value: torch.Tensor) -> torch.Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()


@dataclass(frozen=True)
class Run:
    """A model and its optimizer."""

    model: nn.Module
    optimizer: torch.optim.Optimizer

    def state(self) -> dict[str, object]:
        return {"model": self.model, "optimizer": OptimizerState(self.optimizer, self.model)}

    def held(self) -> dict[str, torch.Tensor]:
        """Every tensor, whole, in the order of the model: names are the wrapper's own affair."""
        found = {f"{i}": whole(value) for i, value in enumerate(self.model.state_dict().values())}
        for number, parameter in enumerate(self.model.parameters()):
            momentum = self.optimizer.state[parameter]["momentum_buffer"]
            found[f"momentum {number}"] = whole(momentum)
        found["lr"] = torch.tensor(self.optimizer.param_groups[0]["lr"])
        return found


def make(kind: str, groups: ProcessGroups, *, true: bool) -> Run:
    model = wrap(kind, blocks(true=true), groups)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25, momentum=0.9, foreach=False)
    if true:
        step(kind, model, optimizer)
    else:
        optimizer.param_groups[0]["lr"] = 7.0
    return Run(model, optimizer)


def every_kind(context: RankContext, root: str) -> dict[str, dict[str, torch.Tensor]]:
    """Save as each kind; load each into the bare model, and the bare one's into each kind."""
    saved = {}
    with ProcessGroups.create(Layout(dp=NUM_RANKS)) as groups:
        checkpointer = Checkpointer(root, groups=groups)
        for number, kind in enumerate(KINDS):
            run = make(kind, groups, true=True)
            checkpointer.save(number, run.state())
            saved[kind] = run.held()
        for number, kind in enumerate(KINDS):
            for into, source in (("bare", number), (kind, 0)):
                run = make(into, groups, true=False)
                report = checkpointer.load(run.state(), step=source)
                assert (report.missing, report.unexpected, report.cast) == ((), (), ()), kind
                for name, value in run.held().items():
                    assert torch.equal(value, saved["bare"][name]), (into, source, name)
    return saved


@pytest.mark.slow
def test_what_any_wrapper_saved_every_other_loads(tmp_path: Path) -> None:
    for saved in run_ranks(NUM_RANKS, every_kind, str(tmp_path)).results:
        for kind, tensors in saved.items():
            for name, value in tensors.items():
                assert value.dtype == saved["bare"][name].dtype
                assert torch.equal(value, saved["bare"][name]), (kind, name)
    model = blocks(true=False)
    expected = {f"model.{name}" for name in model.state_dict()}
    expected |= {f"optimizer.state.{name}.momentum_buffer" for name, _ in model.named_parameters()}
    for number, kind in enumerate(KINDS):
        with Snapshot.open(PosixStorage(tmp_path), step_dir(number)) as snapshot:
            assert {info.key for info in snapshot.manifest.tensors} == expected, kind
    # And in one process, by a model that never heard of any wrapper.
    optimizer = torch.optim.SGD(model.parameters(), lr=7.0, momentum=0.9)
    for number in range(len(KINDS)):
        optimizer.param_groups[0]["lr"] = 7.0
        Checkpointer(tmp_path).load(Run(model, optimizer).state(), step=number)
        for name, value in Run(model, optimizer).held().items():
            assert torch.equal(value, saved["bare"][name]), (number, name)
