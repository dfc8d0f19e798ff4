"""Modules on layouts of their own, trained together, and what one process makes of all of them.

The loss of a row is half the squared distance of every element from a target that depends on the
row. So each element has a gradient of its own, a slice of a parameter has the slice of the whole
one's gradient, and one process computes the truth without any of the layouts.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from holdfast import Layout, ProcessGroups
from holdfast.fsdp import fully_shard_model
from holdfast.optim import (
    ChainedOptimizer,
    ReducedOptimizer,
    ShardedOptimizer,
    Stepper,
    collectives,
)
from holdfast.parallel import ModuleGroups, ModuleLayouts

SHAPES = {"dense": (5, 3), "gain": (1,), "split": (7, 2), "experts": (4, 3, 2)}
"""Parameters of one pipeline stage; `split` is cut over tp (unevenly), `experts` over ep."""
ROWS = 12

sgd = functools.partial(torch.optim.SGD, lr=0.1)
momentum = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)


@dataclass(frozen=True, kw_only=True)
class Spec:
    """One module: its layout, what steps it, and what is peculiar about it."""

    sizes: Mapping[str, Any]
    """Of the layout, with its ranks."""
    kind: str = "sharded"
    """sharded, chained, reduced, fsdp or frozen."""
    options: Mapping[str, Any] = field(default_factory=dict)
    empty_stages: Sequence[int] = ()
    """Pipeline stages without parameters."""

    @property
    def layout(self) -> Layout:
        return Layout(**self.sizes)

    @property
    def has_experts(self) -> bool:
        return self.kind in ("chained", "fsdp", "reduced")


class Bag(nn.Module):
    """The parameters of some pipeline stages of a module, whole or placed on a mesh."""

    def __init__(self, spec: Spec, groups: ProcessGroups | None = None, *, seed: str) -> None:
        super().__init__()
        self.groups = groups
        self.poison: float | None = None
        """A number that comes into the gradient of one element, on this rank alone."""
        layout = spec.layout
        stages = list(range(layout.pp))
        if groups is not None:
            stages = [layout.coordinates(groups.rank)["pp"]]
        for stage in stages:
            for name, shape in SHAPES.items():
                if stage in spec.empty_stages or (name == "experts" and not spec.has_experts):
                    continue
                full = f"{seed}_{stage}_{name}"
                value = 0.3 * pattern(full, 0.5, shape)
                parameter = nn.Parameter(self._placed(name, value, spec))
                parameter.requires_grad_(spec.kind != "frozen")
                self.register_parameter(full, parameter)

    def _placed(self, name: str, value: Tensor, spec: Spec) -> Tensor:
        groups = self.groups
        if groups is None or groups.layout.world_size == 1:
            return value
        is_sliced = spec.kind == "fsdp"
        if name == "split":
            mesh = groups.mesh("dp_cp", "tp")
            placed: list[Any] = [Replicate(), Shard(0)]
            mesh, placed = (mesh["tp"], placed[1:]) if is_sliced else (mesh, placed)
            if is_sliced and groups.size("tp") == 1:
                return value
            return distribute_tensor(value, mesh, placed, src_data_rank=None)
        if name == "experts":
            if is_sliced:
                if groups.size("ep") * groups.size("expt_tp") == 1:
                    return value
                mesh = groups.mesh("expt_dp", "ep", "expt_tp")["ep", "expt_tp"]
                return distribute_tensor(value, mesh, [Shard(0), Replicate()], src_data_rank=None)
            mesh = groups.mesh("expt_dp", "ep", "expt_tp")
            placed = [Replicate(), Shard(0), Replicate()]
            return distribute_tensor(value, mesh, placed, src_data_rank=None)
        return value

    def forward(self, rows: Tensor, expert_rows: Tensor) -> Tensor:
        """The sum of the losses of all rows."""
        total = torch.zeros(())
        for name, parameter in self.named_parameters():
            mine = expert_rows if name.endswith("experts") else rows
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            kind = name.rsplit("_", 1)[1]
            if len(mine):
                targets = torch.stack(
                    [self._slice(kind, pattern(name, row, SHAPES[kind])) for row in mine.tolist()]
                )
                counts = self._slice(kind, mask(SHAPES[kind]))
                total = total + ((local - targets) * counts).square().sum() / 2
            if self.poison is not None and kind in ("dense", "experts"):
                total = total + local.reshape(-1)[:1].sum() * self.poison
        return total

    def _slice(self, kind: str, whole: Tensor) -> Tensor:
        """What this rank has of a whole tensor of a kind."""
        axis = {"split": "tp", "experts": "ep"}.get(kind)
        if axis is None or self.groups is None or self.groups.layout.world_size == 1:
            return whole
        size, index = self.groups.size(axis), self.groups.index(axis)
        pieces = whole.chunk(size, 0)
        return pieces[index] if index < len(pieces) else whole[:0]


def pattern(name: str, row: float, shape: Sequence[int]) -> Tensor:
    """Numbers that depend on a name, a row and the position alone."""
    start = zlib.crc32(name.encode()) % 97
    flat = torch.arange(torch.Size(shape).numel())
    return torch.sin(flat * 1.7 + start + 0.9 * row).reshape(tuple(shape))


def mask(shape: Sequence[int]) -> Tensor:
    """Zero for each third element, whose gradient is then exactly zero."""
    flat = torch.arange(1, torch.Size(shape).numel() + 1)
    return (flat % 3 != 0).float().reshape(tuple(shape))


class Trained:
    """A module on this rank with what steps it."""

    def __init__(self, name: str, spec: Spec, groups: ProcessGroups, make: Any) -> None:
        self.name, self.spec, self.groups = name, spec, groups
        self.model = Bag(spec, groups, seed=name)
        self.stepper: Stepper | None = None
        self.sharded: Any = None
        self.is_active = True
        """Whether the module is part of this step, on any rank."""
        if spec.kind == "frozen":
            return
        divisor = groups.size("dp_cp")
        options: dict[str, Any] = {
            "make": make,
            "groups": groups,
            "divisor": divisor,
            "bucket_nbytes": 40,
            "align_nbytes": 4,
            "elementwise": True,
            "overlap": True,
            **spec.options,
        }
        dense = [p for n, p in self.model.named_parameters() if not n.endswith("experts")]
        experts = [p for n, p in self.model.named_parameters() if n.endswith("experts")]
        if spec.kind == "sharded":
            self.stepper = ShardedOptimizer(self.model, dense, over="dp_cp", **options)
        elif spec.kind == "chained":
            self.stepper = ChainedOptimizer(
                {
                    "dense": ShardedOptimizer(
                        self.model, dense, over="dp_cp", name="dense", **options
                    ),
                    "expert": ShardedOptimizer(
                        self.model, experts, over="expt_dp", name="expert", **options
                    ),
                }
            )
        elif spec.kind == "fsdp":
            self.sharded = fully_shard_model(self.model, groups, experts=experts, units=())
            self.stepper = self.sharded.stepper(make([{"params": list(self.model.parameters())}]))
        else:
            optimizer = make([{"params": list(self.model.parameters())}])
            self.stepper = ReducedOptimizer(optimizer, groups, reduce=self.reduce, divisor=divisor)

    def reduce(self) -> None:
        """Average gradients over data parallelism by hand."""
        for name, parameter in self.model.named_parameters():
            over = "expt_dp" if name.endswith("experts") else "dp_cp"
            if not self.is_active:
                continue
            if parameter.grad is None:  # no row here; other ranks have some
                parameter.grad = torch.zeros_like(parameter)
            local = parameter.grad
            local = local.to_local() if isinstance(local, DTensor) else local
            if self.groups.size(over) > 1:
                collectives.all_reduce(local, self.groups.group(over)).wait()
            local.div_(self.groups.size("dp_cp"))

    def loss(self, rows: Tensor, *, counts: Sequence[int] | None = None) -> Tensor:
        """This rank's loss: a mean over its rows, or with `counts` by data rank a sum."""
        index, shares = self.groups.index("dp_cp"), self.groups.size("dp_cp")
        sizes = [len(rows) // shares] * shares if counts is None else list(counts)
        assert sum(sizes) == len(rows)
        own = torch.split(rows, sizes)[index]
        # Experts see rows of other ranks; over expt_dp all rows, each once.
        expert = rows[self.groups.index("expt_dp") :: self.groups.size("expt_dp")]
        loss: Tensor = self.model(own, expert)
        return loss / sizes[index] if counts is None else loss


def train_module(each: Trained, rows: Tensor, **options: Any) -> None:
    """Backward of one module, where it has something to train."""
    loss = each.loss(rows, **options)
    if loss.requires_grad:
        torch.autograd.backward(loss)


def rows_of(step: int, module: str) -> Tensor:
    """The rows of one step, other ones for each module."""
    return torch.arange(ROWS) + step * ROWS + len(module)


def layouts_of(specs: Mapping[str, Spec], *, tag: str = "", **options: Any) -> ModuleLayouts:
    """The layouts, named with a tag: ranks count the layouts of one name that they create."""
    named = {name: Layout(**spec.sizes, name=f"{tag}{name}") for name, spec in specs.items()}
    return ModuleLayouts(named, **options)


def build(
    groups: ModuleGroups, specs: Mapping[str, Spec], *, make: Any = sgd
) -> dict[str, Trained]:
    """The modules of this rank."""
    return {name: Trained(name, specs[name], groups[name], make) for name in groups.modules}


class Twin:
    """One process: all modules whole, one torch optimizer, one norm."""

    def __init__(self, specs: Mapping[str, Spec], *, make: Any = sgd) -> None:
        self.models = {name: Bag(spec, seed=name) for name, spec in specs.items()}
        self.trained = [p for m in self.models.values() for p in m.parameters() if p.requires_grad]
        self.optimizer = make([{"params": self.trained}])
        self.num_zeros = 0
        """Elements of the last step's gradient that were exactly zero."""

    def step(
        self,
        rows: Mapping[str, Tensor],
        *,
        max_norm: float = 0.0,
        num_tokens: int | None = None,
        active: Iterable[str] | None = None,
    ) -> dict[str, float]:
        """The norm of each module and, as "", of all; gradients are clipped and applied."""
        for name in self.models if active is None else active:
            loss = self.models[name](rows[name], rows[name])
            if loss.requires_grad:
                (loss / (num_tokens or len(rows[name]))).backward()
        norms = {
            name: norm_of(p.grad for p in model.parameters() if p.grad is not None)
            for name, model in self.models.items()
        }
        norms[""] = norm_of(p.grad for p in self.trained if p.grad is not None)
        self.num_zeros = sum(
            p.numel() if p.grad is None else int((p.grad == 0).sum()) for p in self.trained
        )
        for parameter in self.trained:
            if max_norm and norms[""] > max_norm and parameter.grad is not None:
                parameter.grad.mul_(max_norm / norms[""])
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norms

    def difference(self, modules: Mapping[str, Trained]) -> float:
        """The largest difference of any element here from the twin's."""
        worst = 0.0
        for name, each in modules.items():
            truth = dict(self.models[name].named_parameters())
            for key, value in whole_values(each.model).items():
                if value.numel():
                    worst = max(worst, float((value - truth[key].detach()).abs().max()))
        return worst


def norm_of(gradients: Iterable[Tensor | None]) -> float:
    squares = [g.double().square().sum() for g in gradients if g is not None]
    return float(torch.stack(squares).sum().sqrt()) if squares else 0.0


def whole_values(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter of this rank as a whole plain tensor."""
    return {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
        for name, p in model.named_parameters()
    }
