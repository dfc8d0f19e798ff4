"""Modules whose state is known: trained by gradients that depend on names and steps alone.

So the state after some steps is bitwise the same under every layout, and that of one process is
the truth for all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from holdfast import (
    ChainedOptimizer,
    Layout,
    LossScaler,
    ModuleGroups,
    ModuleLayouts,
    ModuleRNG,
    OptimizerState,
    ProcessGroups,
    ShardedOptimizer,
)
from holdfast.cli.main import main
from tests.checkpoint.common import full

NUM_LAYERS = 2
_SHAPES = {"column": (8, 6), "row": (6, 8), "norm": (6,), "experts": (4, 6)}
_SPLITS = {"column": 0, "row": 1}
"""Parameter -> the dim that the tensor axis cuts."""


class Net(nn.Module):
    """The layers of one module that a rank has, under names that all modules have in common."""

    def __init__(self, module: str, groups: ProcessGroups) -> None:
        super().__init__()
        per_stage = NUM_LAYERS // groups.layout.pp
        first = groups.index("pp") * per_stage
        # An expert's gradient is the sum over all ranks whose tokens it would have received.
        self.num_senders = groups.size("dp_cp") / groups.size("expt_dp")
        self.layers = nn.ModuleDict(
            {
                str(layer): _layer(f"{module}.{layer}", groups)
                for layer in range(first, first + per_stage)
            }
        )

    def loss(self, module: str, step: int) -> torch.Tensor:
        """Its gradient is a function of names and step."""
        total = torch.zeros(())
        for name, parameter in self.named_parameters():
            if not parameter.requires_grad:
                continue
            whole = full(f"{module} {name} at {step}", tuple(parameter.shape))
            if name.endswith("experts"):
                whole *= self.num_senders
            if isinstance(parameter, DTensor):
                mesh = parameter.device_mesh
                own = distribute_tensor(whole, mesh, parameter.placements, src_data_rank=None)
                total = total + (parameter.to_local() * own.to_local()).sum()
            else:
                total = total + (parameter * whole).sum()
        return total


def _layer(prefix: str, groups: ProcessGroups) -> nn.ParameterDict:
    return nn.ParameterDict(
        {
            name: nn.Parameter(_placed(full(f"{prefix}.{name}", shape), name, groups))
            for name, shape in _SHAPES.items()
        }
    )


def _placed(whole: torch.Tensor, name: str, groups: ProcessGroups) -> torch.Tensor:
    """This rank's share of a tensor, declared on its layout's meshes."""
    if groups.layout.world_size == 1:
        return whole
    placements: tuple[Placement, ...]
    if name == "experts":
        mesh = groups.mesh("expt_dp", "ep", "expt_tp")
        placements = (Replicate(), Shard(0), Replicate())
    else:
        mesh = groups.mesh("dp_cp", "tp")
        placements = (Replicate(), Shard(_SPLITS[name]) if name in _SPLITS else Replicate())
    return distribute_tensor(whole, mesh, placements, src_data_rank=None)


@dataclass
class Trained:
    """One module on one rank, with everything that belongs to it."""

    module: str
    groups: ProcessGroups
    lr: float
    is_frozen: bool = False
    net: Net = field(init=False)
    optimizer: ChainedOptimizer | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.net = Net(self.module, self.groups)
        self.net.requires_grad_(not self.is_frozen)
        if not self.is_frozen:
            self.optimizer = _chained(self.net, self.groups, lr=self.lr)
            self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.5)
        self.scaler = LossScaler(initial=2.0 ** (4 + len(self.module)))
        self.rng = ModuleRNG(seed=len(self.module), shared=("tp", "cp", "dp", "pp"))

    def step(self, step: int) -> None:
        """Train one step, and draw from the module's streams."""
        if self.optimizer is not None:
            with self.optimizer.microbatch(is_last=True):
                self.net.loss(self.module, step).backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
            self.schedule.step()
        self.scaler.update(overflowed=step % 2 == 0)
        with self.rng:
            torch.rand(3)

    def parts(self) -> dict[str, object]:
        """Its state."""
        state: dict[str, object] = {
            "model": self.net,
            "optimizer": {},
            "scaler": self.scaler,
            "rng": self.rng,
            "notes": {"module": self.module, "empty": {}, "pair": (1, self.lr)},
        }
        if self.optimizer is not None:
            state["optimizer"] = OptimizerState(self.optimizer, self.net)
            state["schedule"] = self.schedule
        return state

    def blank(self) -> None:
        """Make every value wrong, so that what no load sets is noticed."""
        with torch.no_grad():
            for parameter in self.net.parameters():
                parameter.fill_(float("nan"))
        if self.optimizer is not None:
            for group in self.optimizer.param_groups:
                group["lr"] = 77.0
        self.scaler.load_state_dict({"scale": 3.0, "num_good_steps": 9})
        with self.rng:
            torch.rand(7)


def _chained(net: Net, groups: ProcessGroups, *, lr: float) -> ChainedOptimizer:
    named = dict(net.named_parameters())
    experts = [p for name, p in named.items() if name.endswith("experts")]
    dense = [p for name, p in named.items() if not name.endswith("experts")]
    vectors = [p for p in dense if p.ndim < 2]
    matrices = [p for p in dense if p.ndim >= 2]
    dense_groups = [{"params": matrices, "lr": lr / 2}, {"params": vectors, "weight_decay": 0.0}]
    kinds: dict[str, tuple[Any, str]] = {
        "dense": (dense_groups, "dp_cp"),
        "experts": (experts, "expt_dp"),
    }
    return ChainedOptimizer(
        {
            kind: ShardedOptimizer(
                net,
                members,
                make=partial(torch.optim.AdamW, lr=lr),
                groups=groups,
                over=over,
                divisor=groups.size("dp_cp"),
                name=kind,
                elementwise=True,
            )
            for kind, (members, over) in kinds.items()
        }
    )


LRS = {"vision": 0.1, "projector": 0.2, "language": 0.3}
PLACEMENTS: Mapping[str, Mapping[str, Layout]] = {
    "encoder first": {
        "vision": Layout(dp=2),
        "projector": Layout(dp=2),
        "language": Layout(tp=2, ranks=(2, 3)),
    },
    "language first": {
        "language": Layout(pp=2),
        "vision": Layout(tp=2, ranks=(2, 3)),
        "projector": Layout(dp=2, ranks=(1, 0)),
    },
    "colocated": {
        "vision": Layout(dp=4),
        "projector": Layout(tp=4),
        "language": Layout(tp=2, dp=2, ep=2, expt_tp=1),
    },
    "experts": {
        "vision": Layout(cp=2, ranks=(3, 2)),
        "language": Layout(dp=2, ep=2, expt_tp=1),
        "projector": Layout(dp=2, ep=2, ranks=(2, 3)),
    },
}
"""The same three modules wherever they could be on four ranks."""


def trained(groups: ModuleGroups, *, frozen: tuple[str, ...] = ()) -> dict[str, Trained]:
    """The modules of this rank, at step 0."""
    return {
        module: Trained(module, groups[module], LRS[module], is_frozen=module in frozen)
        for module in groups.modules
    }


def placement(name: str) -> ModuleLayouts:
    return ModuleLayouts(PLACEMENTS[name])


def assert_same_checkpoints(one: Path | str, other: Path | str) -> None:
    """`holdfast diff` says that nothing differs: keys, values, bytes."""
    assert main(["diff", str(one), str(other)]) == 0, f"{one} and {other} differ"
