"""One model in every way that a job may hold it, and what each way holds as whole tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from holdfast import Layout, OptimizerState, ProcessGroups
from holdfast.fsdp import ShardedModel
from holdfast.optim import ShardedOptimizer
from tests.fsdp.common import (
    MICROBATCHES,
    ROWS,
    STRATEGIES,
    WIDTH,
    Layer,
    Net,
    Specialists,
    adamw,
    full,
    place,
    plain,
    rows_of,
    shard,
)


class SplitSpecialists(Specialists):
    """Split over the tensor ranks of experts as well, which compute the same and add nothing up."""

    def whole(self) -> Tensor:
        if not isinstance(self.mix, DTensor):
            return self.mix
        names = self.mix.device_mesh.mesh_dim_names or ()
        gathered = self.mix.redistribute(placements=[Replicate()] * len(names))
        return gathered.to_local(
            grad_placements=[Replicate() if name == "expt_tp" else Partial() for name in names]
        )


class OddLayer(Layer):
    """A layer with two dtypes, a frozen weight in the narrow one, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        # torch's own tensor parallelism computes with even splits alone; 7 rows of a rank of two
        # are uneven again over the data ranks.
        self.up, self.down = nn.Linear(WIDTH, 14), nn.Linear(14, WIDTH)
        self.special = SplitSpecialists()
        self.tall = nn.Parameter(torch.empty(13, 2))
        self.narrow = nn.Parameter(torch.empty(5, 3, dtype=torch.bfloat16))
        self.still = nn.Parameter(torch.empty(3, dtype=torch.bfloat16), requires_grad=False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor, rows: Tensor) -> Tensor:
        gain = (plain(self.narrow) * plain(self.still)).float().sum()
        shift = (gain + plain(self.tall).sum()) * 0.1
        return cast("Tensor", super().forward(x, rows)) + shift


class Head(nn.Module):
    """Scores; its weight is the table that the model begins with."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return x @ plain(self.weight).T


class OddNet(Net):
    """13, 7, 5 and 2 rows, two dtypes, frozen ones, buffers, and one weight in two modules."""

    def __init__(self, num_layers: int = 2) -> None:
        super().__init__(0)
        self.layers = nn.ModuleList(OddLayer() for _ in range(num_layers))
        self.head = Head(self.table)

    def forward(self, rows: Tensor) -> Tensor:
        x = plain(self.table)[rows % 7]
        for layer in self.layers:
            x = layer(x, rows)
        goal = torch.sin(rows)[:, None].to(x.dtype)
        return (self.head(x) - goal).square().mean(dim=1)


def fill(model: nn.Module, *, seed: int) -> None:
    """Values that depend on the seed and on nothing else."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
        for buffer in model.buffers():
            buffer.fill_(seed)


@dataclass(frozen=True, kw_only=True)
class Way:
    """How a job holds the model: its layout, and what is around model and optimizer."""

    layout: Mapping[str, Any] = field(default_factory=dict)
    strategy: str | None = None
    """None: not sharded by FSDP2."""
    zero: int = 0
    """Stage of a `ShardedOptimizer`; 0: the optimizer of torch."""
    wrapping: str = ""
    """What each layer is wrapped in, before it is sharded."""


def _fsdp(strategy: str, wrapping: str = "", **layout: Any) -> Way:
    return Way(layout=layout, strategy=strategy, wrapping=wrapping)


WAYS: dict[str, Way] = {
    **{f"dp4 {strategy}": _fsdp(strategy, dp=4) for strategy in STRATEGIES},
    **{f"dp4 ep2 {strategy}": _fsdp(strategy, dp=4, ep=2) for strategy in STRATEGIES},
    "dp4 ep4": _fsdp("optim_grads_params", dp=4, ep=4),
    "hybrid": _fsdp("optim", dp=4, replicas=2),
    "hybrid ep2": _fsdp("optim_grads_params", dp=4, ep=2, replicas=2),
    "tp2": _fsdp("optim_grads_params", dp=2, tp=2),
    "tp2 ep2": _fsdp("optim_grads", dp=2, tp=2, ep=2),
    "tp2 ep4": _fsdp("optim_grads_params", dp=2, tp=2, ep=4, expt_tp=1),
    "permuted": _fsdp("optim_grads_params", dp=4, ep=2, ranks=(2, 0, 3, 1)),
    "permuted tp2": _fsdp("optim", dp=2, tp=2, order="dp-tp-cp-ep-pp", ranks=(3, 1, 0, 2)),
    "cp2": _fsdp("optim", dp=2, cp=2, ep=2, order="dp-cp-ep-tp-pp"),
    "dp2": _fsdp("optim_grads_params", dp=2, ranks=(1, 3)),
    "dp3": _fsdp("optim_grads", dp=3, ranks=(3, 2, 0)),
    "compiled": _fsdp("optim_grads_params", "compiled", dp=4),
    "checkpointed": _fsdp("optim_grads_params", "checkpointed", dp=4, ep=2),
    "only tp2": Way(layout={"tp": 2, "ranks": (3, 1)}),
    "only ep2": Way(layout={"dp": 2, "ep": 2, "ranks": (0, 2)}),
    "zero1": Way(layout={"dp": 4}, zero=1),
    "zero2 tp2": Way(layout={"dp": 2, "tp": 2}, zero=2),
}


def make_groups(way: Way) -> ProcessGroups | None:
    """The communicators of a way; None on a rank without a part in it."""
    # Ranks of some layouts only agree on each by its name.
    layout = Layout(**way.layout, name=f"on {way.layout.get('ranks', 'all')}")
    if layout.world_size == 1:
        return ProcessGroups.single()
    if torch.distributed.get_rank() not in layout.ranks:
        return None
    return ProcessGroups.create(layout)


class Job:
    """One rank's model and optimizer, held in one way."""

    def __init__(self, way: Way, groups: ProcessGroups, *, seed: int = 1, **options: Any) -> None:
        self.way, self.groups = way, groups
        self.sharded: ShardedModel | None = None
        self.model = OddNet()
        fill(self.model, seed=seed)
        _split(self.model, groups)
        wrapped = _wrap(self.model, way.wrapping)
        if way.strategy is not None:
            self.sharded = shard(
                self.model,
                groups,
                # On tensor ranks experts that are not split are like any other weight.
                experts=[layer.special for layer in wrapped if groups.layout.ep > 1],
                units=list(self.model.layers),
                strategy=way.strategy,
                **options,
            )
        self.optimizer: Any
        trained = [p for p in self.model.parameters() if p.requires_grad]
        if way.zero:
            self.optimizer = ShardedOptimizer(
                self.model,
                trained,
                make=adamw,
                groups=groups,
                over="dp_cp",
                divisor=groups.size("dp_cp"),
                stage=way.zero,
                bucket_nbytes=300,
                align_nbytes=4,
                elementwise=True,
            )
        else:
            self.optimizer = adamw(trained)

    def state(self) -> dict[str, object]:
        return {"model": self.model, "optimizer": OptimizerState(self.optimizer, self.model)}

    def train(self, *, steps: int = 1, first: int = 0) -> None:
        """Real steps on rows of this data rank; without FSDP2 on the whole batch."""
        if self.sharded is not None:
            for step in range(first, first + steps):
                index = self.groups.index("dp_cp")
                for part, rows in enumerate(rows_of(step, index=index, shares=4)):
                    with self.sharded.microbatch(is_last=part == MICROBATCHES - 1):
                        self.model(rows).mean().backward()
                self.sharded.step(self.optimizer)
            return
        for step in range(first, first + steps):
            self.model(torch.cat(rows_of(step))).mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def losses(self) -> Tensor:
        """The loss of each row of a batch, by a forward without backward."""
        with torch.no_grad():
            return cast("Tensor", self.model(torch.arange(ROWS)).clone())

    def held(self) -> dict[str, Tensor]:
        """Every parameter and buffer whole, and the optimizer's state where torch holds it."""
        found = {name: full(p) for name, p in self.model.named_parameters()}
        found |= {name: b.clone() for name, b in self.model.named_buffers()}
        found = {_logical(name): value for name, value in found.items()}
        if self.way.zero:
            return found
        for name, parameter in self.model.named_parameters():
            for entry, value in self.optimizer.state.get(parameter, {}).items():
                found[f"{_logical(name)}/{entry}"] = full(value)
        return found


def _logical(name: str) -> str:
    return name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")


def _split(net: OddNet, groups: ProcessGroups) -> None:
    """Specialists over ep and layers over tp, as users' own plans put them."""
    layout = groups.layout
    if layout.ep > 1 and layout.expt_tp > 1:
        mesh = groups.mesh("expt_dp", "ep", "expt_tp")["ep", "expt_tp"]
        for layer in cast("list[OddLayer]", list(net.layers)):
            mix = layer.special.mix.detach()
            value = distribute_tensor(mix, mesh, [Shard(0), Shard(1)], src_data_rank=None)
            layer.special.mix = nn.Parameter(value)
    else:
        place(net, groups)
    if layout.tp > 1:
        names = ("dp_cp_inter", "dp_cp_intra") if groups.layout.replicas > 1 else ("dp_cp",)
        mesh = groups.mesh(*names, "tp")["tp"]
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        for layer in net.layers:
            parallelize_module(layer, mesh, plan, src_data_rank=None)


def _wrap(net: OddNet, wrapping: str) -> list[OddLayer]:
    """Wrap each layer in its place; the layers themselves."""
    layers = cast("list[OddLayer]", list(net.layers))
    for number, layer in enumerate(layers):
        if wrapping == "compiled":
            net.layers[number] = cast("nn.Module", torch.compile(layer, backend="eager"))
        elif wrapping == "checkpointed":
            net.layers[number] = checkpoint_wrapper(layer)
    return layers
