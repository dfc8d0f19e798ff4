"""One rank's model and optimizer, held in one way."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from holdfast import OptimizerState, ProcessGroups
from holdfast.fsdp import ShardedModel, fully_shard_model
from holdfast.optim import ChainedOptimizer, ReducedOptimizer, ShardedOptimizer, StepOutcome
from tests.campaign.models import ROWS, WIDTH, Case, Leaf, Specialists, Wide, generate
from tests.campaign.programs import OPTIMIZERS, Program, Way


def rows_of(step: int, *, index: int, shares: int, parts: int) -> list[Tensor]:
    """Return the microbatches of one share of a step's rows."""
    mine = (torch.arange(ROWS) + step * ROWS).reshape(-1, shares)[:, index]
    return list(torch.split(mine, len(mine) // parts))


def param_groups(parameters: list[nn.Parameter], *, decays: bool) -> list[dict[str, Any]]:
    """Return matrices and the rest as two groups, of which only the first decays."""
    matrices = [p for p in parameters if p.ndim >= 2]
    rest = [p for p in parameters if p.ndim < 2]
    groups: list[dict[str, Any]] = [{"params": matrices}]
    if rest:
        groups.append({"params": rest, **({"weight_decay": 0.0} if decays else {})})
    return groups


@dataclass(frozen=True, kw_only=True)
class Step:
    """A step as this rank sees it."""

    loss: float
    """Of this rank's rows, their mean."""
    outcome: StepOutcome


class Trained:
    """One rank's model and optimizer, held in one way."""

    def __init__(
        self, program: Program, way: Way, groups: ProcessGroups, *, values: int | None = None
    ) -> None:
        self.program, self.way, self.groups = program, way, groups
        case = generate(program.seed, program.traits, values=values)
        self.model = case.model
        self._experts = _placed(case, way, groups)
        self.sharded: ShardedModel | None = None
        self.optimizer: Any = self._optimizer(case)

    def step(self, step: int) -> Step:
        """Run forward, backward and update on this data rank's rows."""
        way, groups = self.way, self.groups
        parts = rows_of(
            step,
            index=groups.index("dp_cp"),
            shares=groups.size("dp_cp"),
            parts=way.num_microbatches,
        )
        total = 0.0
        for number, rows in enumerate(parts):
            with self._microbatch(is_last=number == len(parts) - 1):
                loss = self.model(rows).mean() / len(parts)
                loss.backward()
            total += float(loss.detach())
        return Step(loss=total, outcome=self._update())

    def state(self) -> dict[str, object]:
        """Return what is saved and loaded."""
        inner = self.optimizer
        if isinstance(inner, ReducedOptimizer):
            inner = inner.optimizer
        return {"model": self.model, "optimizer": OptimizerState(inner, self.model)}

    @torch.no_grad()
    def whole(self) -> dict[str, Tensor]:
        """Return each parameter as one plain tensor; collective."""
        if isinstance(self.optimizer, ShardedOptimizer | ChainedOptimizer):
            self.optimizer.synchronize()
        return {name: full(p) for name, p in self.model.named_parameters()}

    def close(self) -> None:
        """Take the hooks of the optimizer off the model."""
        if isinstance(self.optimizer, ShardedOptimizer | ChainedOptimizer):
            self.optimizer.close()

    # ---- inside ----

    def _microbatch(self, *, is_last: bool) -> AbstractContextManager[None]:
        if not self.way.has_contexts:
            return nullcontext()
        entered: AbstractContextManager[None] = (self.sharded or self.optimizer).microbatch(
            is_last=is_last
        )
        return entered

    def _update(self) -> StepOutcome:
        options: dict[str, Any] = {"max_norm": self.program.max_norm, "count_zeros": True}
        if self.sharded is not None:
            return self.sharded.step(self.optimizer, **options)
        outcome: StepOutcome = self.optimizer.step(**options)
        return outcome

    def _optimizer(self, case: Case) -> Any:
        way, groups, model = self.way, self.groups, self.model
        make = OPTIMIZERS[self.program.optimizer]
        decays = "weight_decay" in make.keywords
        if way.kind == "fsdp":
            self.sharded = fully_shard_model(
                model,
                groups,
                units=case.units,
                experts=case.experts if self._experts is not None else (),
                **way.options,
            )
            return make(param_groups(list(model.parameters()), decays=decays))
        experts = self._experts or set()
        dense = [p for p in model.parameters() if p not in experts]
        special = [p for p in model.parameters() if p in experts]
        if way.kind == "plain":
            inner = make(param_groups([*dense, *special], decays=decays))
            return ReducedOptimizer(inner, groups, reduce=self._reduce)

        def sharded(name: str, over: str, parameters: list[nn.Parameter]) -> ShardedOptimizer:
            if groups.layout.replicas > 1:
                over += "_intra"
            if groups.size(over) > 1 and not groups.has(f"{over}_ag"):
                groups.clone(over, purpose=f"{over}_ag")
            return ShardedOptimizer(
                model,
                param_groups(parameters, decays=decays),
                make=make,
                groups=groups,
                over=over,
                divisor=groups.size("dp_cp"),
                # The trial of an optimizer is the matter of test_elementwise.
                elementwise=True,
                name=name,
                **way.options,
            )

        if way.kind == "zero":
            return sharded("optimizer", "dp_cp", dense)
        parts = {"dense": sharded("dense", "dp_cp", dense)}
        if special:
            parts["expert"] = sharded("expert", "expt_dp", special)
        return ChainedOptimizer(parts)

    @torch.no_grad()
    def _reduce(self) -> None:
        """Average gradients over data ranks, as a user's own loop does."""
        for p in self.model.parameters():
            if not p.requires_grad:
                continue
            name = "expt_dp" if self._experts and p in self._experts else "dp_cp"
            if self.groups.size(name) > 1:
                has = torch.tensor(float(p.grad is not None))
                dist.all_reduce(has, group=self.groups.group(name))
                if not has:
                    continue
                if p.grad is None:
                    p.grad = torch.zeros_like(p)
                local = p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad
                summed = torch.view_as_real(local) if local.is_complex() else local
                summed = summed.contiguous().clone()
                dist.all_reduce(summed, group=self.groups.group(name))
                local.copy_(torch.view_as_complex(summed) if local.is_complex() else summed)
            if p.grad is not None:
                p.grad.div_(self.groups.size("dp_cp"))


def full(value: Tensor) -> Tensor:
    """Return a copy of the whole tensor; collective for a DTensor."""
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()


def _placed(case: Case, way: Way, groups: ProcessGroups) -> set[nn.Parameter] | None:
    """Split layers over tp and specialists over ep, as users' plans do; the experts, if any are."""
    layout = groups.layout
    is_hybrid = layout.replicas > 1
    data = ("dp_cp_inter", "dp_cp_intra") if is_hybrid else ("dp_cp",)
    expert_data = ("expt_dp_inter", "expt_dp_intra") if is_hybrid else ("expt_dp",)
    if layout.tp > 1:
        mesh = groups.mesh(*data, "tp")["tp"]
        for module in case.model.modules():
            if isinstance(module, Wide):
                plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
                parallelize_module(module, mesh, plan, src_data_rank=None)
    mixes = {m.mix for m in case.model.modules() if isinstance(m, Specialists)}
    replaced: dict[nn.Parameter, nn.Parameter] = {}
    if way.is_declared and layout.world_size > 1:
        split = {m.up for m in case.model.modules() if isinstance(m, Leaf)}
        uncut = {p for m in case.model.modules() if isinstance(m, Wide) for p in m.parameters()}
        mesh = groups.mesh(*data, "tp")
        for p in case.model.parameters():
            if p not in mixes and p not in uncut:
                cut = Shard(0) if case.model.traits.is_odd and p in split else Replicate()
                replaced[p] = _distributed(p, mesh, [*[Replicate()] * len(data), cut])
    are_experts = {
        "fsdp": layout.ep > 1 or layout.tp == 1,
        "plain": layout.ep > 1,
        "chained": True,
        "zero": False,
    }[way.kind]
    is_split = are_experts and layout.ep * layout.expt_tp > 1
    if layout.world_size > 1 and (is_split or way.kind == "chained"):
        mesh = groups.mesh(*expert_data, "ep", "expt_tp")
        placed: list[Placement] = [Shard(0), Replicate()]
        if layout.expt_tp > 1 and WIDTH % layout.expt_tp == 0:
            placed[1] = Shard(1)
        if way.kind == "chained":
            placed = [*[Replicate()] * len(expert_data), *placed]
        elif layout.expt_tp > 1:
            mesh = mesh["ep", "expt_tp"]
        else:
            mesh, placed = mesh["ep"], placed[:1]
        replaced |= {p: _distributed(p, mesh, placed) for p in mixes}
    _replace(case, replaced)
    if not are_experts:
        return None
    found = set()
    for module in case.model.modules():
        if isinstance(module, Specialists):
            module.share = 1 / layout.tp
            found.add(module.mix)
    return found


def _distributed(p: nn.Parameter, mesh: Any, placed: list[Placement]) -> nn.Parameter:
    value = distribute_tensor(p.detach(), mesh, placed, src_data_rank=None)
    return nn.Parameter(value, requires_grad=p.requires_grad)


def _replace(case: Case, replaced: dict[nn.Parameter, nn.Parameter]) -> None:
    """Put parameters in the places of others; ties and declarations follow."""
    for module, name, p in list(_places(case.model)):
        if p in replaced:
            setattr(module, name, replaced[p])
    case.experts[:] = [
        replaced.get(each, each) if isinstance(each, nn.Parameter) else each
        for each in case.experts
    ]


def _places(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    for module in model.modules():
        for name, p in module.named_parameters(recurse=False, remove_duplicate=False):
            yield module, name, p
