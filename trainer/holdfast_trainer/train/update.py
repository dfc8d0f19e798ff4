"""From gradients to updated parameters: whole optimizer state, sharded, or a sharded model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from holdfast.fsdp import Strategy, fully_shard_model
from holdfast.optim import (
    ChainedOptimizer,
    GradientNorm,
    LossScaler,
    ShardedOptimizer,
    StepOutcome,
)
from holdfast.optim.norms import (
    GradientPart,
    LayoutSum,
    clip_factor,
    gradient_parts,
    measure,
    scale_gradients,
    share_square,
)
from holdfast.parallel import ProcessGroups
from holdfast_trainer.models.parallelize import ParallelGPT
from holdfast_trainer.models.split import SplitModule
from holdfast_trainer.train.config import OptimConfig


class WholeUpdate:
    """One torch optimizer for all of this rank's parameters, its state on every data rank."""

    def __init__(
        self, model: ParallelGPT, *, optim: OptimConfig, scaler: LossScaler | None
    ) -> None:
        self.optimizer: torch.optim.Optimizer = _maker(optim)(
            _groups(list(model.module.parameters()), weight_decay=optim.weight_decay)
        )
        self._model = model
        self._scaler = scaler
        self._is_reduced = False

    def microbatch(self, *, is_last: bool) -> AbstractContextManager[None]:
        """Nothing runs concurrently with a backward."""
        del is_last
        return nullcontext()

    def gradient_share(self) -> float:
        """The norm of what this rank holds of the reduced gradients; see `share_norm`. Collective.

        Gradients are reduced here if they are not yet; a step that follows reduces them no more.
        """
        parts = self._reduced_parts()
        return share_norm(parts, groups=self._model.groups, scaler=self._scaler)

    def drop_gradients(self) -> None:
        """Forget all gradients, reduced or not: the step can be computed again."""
        self.optimizer.zero_grad(set_to_none=True)
        self._is_reduced = False

    def _reduced_parts(self) -> list[GradientPart]:
        """Reduce gradients once in a step. Collective the first time."""
        if not self._is_reduced:
            self._model.reduce_gradients()
            self._is_reduced = True
        return gradient_parts(self._model.module.parameters(), groups=self._model.groups)

    @torch.no_grad()
    def step(self, *, max_norm: float, is_finite: bool = True) -> StepOutcome:
        """Reduce gradients, measure, clip, update; collective.

        A step whose loss or gradients are not finite forgets the gradients instead.

        Args:
            max_norm: largest global gradient norm; 0 means no limit.
            is_finite: whether the loss is, on all ranks.
        """
        scale = 1.0 if self._scaler is None else self._scaler.scale
        norm = measure(self._reduced_parts(), total=LayoutSum(self._model.groups), scale=scale)
        if not (is_finite and norm.is_finite):
            self.drop_gradients()
            return _skipped_step(norm, scale=scale, scaler=self._scaler)
        factor = clip_factor(norm, limit=max_norm)
        scale_gradients(self._model.module.parameters(), factor / scale)
        self.optimizer.step()
        self.drop_gradients()
        if self._scaler is not None:
            self._scaler.update(overflowed=False)
        return StepOutcome.of(norm, factor=factor, scale=scale)

    def synchronize(self) -> None:
        """Parameters are whole after every step."""

    def close(self) -> None:
        """Nothing is attached to the model."""


class ShardedUpdate:
    """Optimizer state in shards: of dense parameters over `dp_cp`, of experts over `expt_dp`."""

    def __init__(
        self, model: ParallelGPT, *, optim: OptimConfig, scaler: LossScaler | None
    ) -> None:
        self.optimizer = chain_sharded(model, optim=optim, divisor=model.groups.size("dp_cp"))
        self._model = model
        self._scaler = scaler

    def microbatch(self, *, is_last: bool) -> AbstractContextManager[None]:
        """Gradients are reduced concurrently with the backward."""
        return self.optimizer.microbatch(is_last=is_last)

    def gradient_share(self) -> float:
        """The norm of this rank's shards of the gradients; see `share_norm`. Collective.

        Reductions that are left are finished here; a step that follows finds them done.
        """
        parts = self.optimizer.gradient_parts()
        return share_norm(parts, groups=self._model.groups, scaler=self._scaler)

    def drop_gradients(self) -> None:
        """Forget all gradients, reduced or not: the step can be computed again."""
        self.optimizer.drop_gradients()

    def step(self, *, max_norm: float, is_finite: bool = True) -> StepOutcome:
        """Finish the reductions, measure, clip, update, gather parameters; collective.

        A step whose loss or gradients are not finite forgets the gradients instead.

        Args:
            max_norm: largest global gradient norm; 0 means no limit.
            is_finite: whether the loss is, on all ranks.
        """
        if is_finite:
            return self.optimizer.step(max_norm=max_norm, scaler=self._scaler)
        scale = 1.0 if self._scaler is None else self._scaler.scale
        total = LayoutSum(self._model.groups)
        norm = measure(self.optimizer.gradient_parts(), total=total, scale=scale)
        self.optimizer.drop_gradients()
        return _skipped_step(norm, scale=scale, scaler=self._scaler)

    def synchronize(self) -> None:
        """Wait for parameters in flight; needed before they are read outside of forward."""
        self.optimizer.synchronize()

    def close(self) -> None:
        """Take the hooks off the model."""
        self.optimizer.close()


class FullyShardedUpdate:
    """The whole model in shards, each layer gathered while it runs: `fully_shard_model`."""

    def __init__(
        self,
        model: ParallelGPT,
        *,
        optim: OptimConfig,
        scaler: LossScaler | None,
        strategy: Strategy,
    ) -> None:
        layers = list(model.module.blocks.values())
        self._sharded = fully_shard_model(
            model.module,
            model.groups,
            experts=[p for p in model.module.parameters() if _is_expert(p)],
            units=layers,
            strategy=strategy,
        )
        model.view_in_units(layers)
        # Sharding has replaced the parameters.
        self.optimizer: torch.optim.Optimizer = _maker(optim)(
            _groups(list(model.module.parameters()), weight_decay=optim.weight_decay)
        )
        self._scaler = scaler
        self._groups = model.groups

    def microbatch(self, *, is_last: bool) -> AbstractContextManager[None]:
        """Parameters are gathered and gradients reduced concurrently with the computation."""
        return self._sharded.microbatch(is_last=is_last)

    def gradient_share(self) -> float:
        """The norm of this rank's shards of the gradients; see `share_norm`."""
        parts = self._sharded.gradient_parts()
        return share_norm(parts, groups=self._groups, scaler=self._scaler)

    def drop_gradients(self) -> None:
        """Forget all gradients: the step can be computed again."""
        self._sharded.drop_gradients()

    def step(self, *, max_norm: float, is_finite: bool = True) -> StepOutcome:
        """Measure, clip, update each rank's shards; collective.

        A step whose loss or gradients are not finite forgets the gradients instead.

        Args:
            max_norm: largest global gradient norm; 0 means no limit.
            is_finite: whether the loss is, on all ranks.
        """
        if is_finite:
            return self._sharded.step(self.optimizer, max_norm=max_norm, scaler=self._scaler)
        scale = 1.0 if self._scaler is None else self._scaler.scale
        norm = self._sharded.gradient_norm()
        self._sharded.drop_gradients()
        norm = replace(norm, value=norm.value / scale)
        return _skipped_step(norm, scale=scale, scaler=self._scaler)

    def synchronize(self) -> None:
        """Shards are up to date after every step."""

    def close(self) -> None:
        """What is attached to the model goes with it."""


def make_update(
    model: ParallelGPT, *, optim: OptimConfig, scaler: LossScaler | None
) -> WholeUpdate | ShardedUpdate | FullyShardedUpdate:
    """What `--zero` or `--fsdp` asks for. Collective with sharding: ranks compare first."""
    if optim.fsdp is not None:
        return FullyShardedUpdate(model, optim=optim, scaler=scaler, strategy=optim.fsdp)
    kind = ShardedUpdate if optim.zero else WholeUpdate
    return kind(model, optim=optim, scaler=scaler)


def share_norm(
    parts: Iterable[GradientPart], *, groups: ProcessGroups, scaler: LossScaler | None
) -> float:
    """The norm of what one rank holds of the gradients, loss scale removed.

    The squares of all ranks add up to that of the whole norm. Not finite where an element is not.

    Cost: reads the parts once; no collective.
    """
    scale = 1.0 if scaler is None else scaler.scale
    return math.sqrt(share_square(parts, layout=groups.layout)) / scale


def _skipped_step(norm: GradientNorm, *, scale: float, scaler: LossScaler | None) -> StepOutcome:
    """The outcome of a step that updates nothing; lowers the loss scale."""
    if scaler is not None:
        scaler.update(overflowed=True)
    return StepOutcome(
        norm=norm.value,
        clipped=False,
        skipped=True,
        bad_ranks=norm.bad_ranks,
        num_zeros=None,
        loss_scale=scale,
    )


def chain_sharded(model: ParallelGPT, *, optim: OptimConfig, divisor: int) -> ChainedOptimizer:
    """Sharded optimizers of a GPT's dense and expert parameters; collective.

    Args:
        model: the GPT.
        optim: which optimizer, and how it is sharded.
        divisor: the ranks whose losses are averaged.
    """
    experts = [p for p in model.module.parameters() if _is_expert(p)]
    chosen = set(experts)
    dense = [p for p in model.module.parameters() if p not in chosen]
    members = {"dense": (dense, "dp_cp")}
    if "e" in model.config.feeds:  # on every rank, also on one whose stages have none
        members["experts"] = (experts, "expt_dp")
    return ChainedOptimizer(
        {
            name: make_sharded(
                name, parameters, model=model, optim=optim, over=over, divisor=divisor
            )
            for name, (parameters, over) in members.items()
        }
    )


def make_sharded(
    name: str,
    parameters: Sequence[nn.Parameter],
    *,
    model: SplitModule[Any],
    optim: OptimConfig,
    over: str = "dp_cp",
    divisor: int,
) -> ShardedOptimizer:
    """The sharded optimizer of one kind of parameters of a module; collective.

    Args:
        name: of the optimizer.
        parameters: of the module.
        model: the module on its groups.
        optim: which optimizer, and how it is sharded.
        over: the data ranks.
        divisor: the ranks whose losses are averaged, which may be those of another module.
    """
    return ShardedOptimizer(
        model.module,
        _groups(list(parameters), weight_decay=optim.weight_decay),
        make=_maker(optim),
        groups=model.groups,
        over=over,
        divisor=divisor,
        stage=2 if optim.zero == 2 else 1,
        bucket_nbytes=optim.bucket_nbytes,
        overlap=True,
        name=name,
    )


def _is_expert(parameter: nn.Parameter) -> bool:
    """Whether the parameter is split over experts."""
    if not isinstance(parameter, DTensor):
        return False
    return "expt_dp" in (parameter.device_mesh.mesh_dim_names or ())


def _groups(parameters: list[nn.Parameter], *, weight_decay: float) -> list[dict[str, Any]]:
    """Two groups: matrices, with weight decay, and vectors, without."""
    return [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]


def _maker(optim: OptimConfig) -> Callable[[list[dict[str, Any]]], torch.optim.Optimizer]:
    """What makes the inner optimizer from its parameter groups."""
    if optim.optimizer == "sgd":
        return partial(torch.optim.SGD, lr=optim.lr, momentum=optim.momentum)
    return partial(
        torch.optim.AdamW,
        lr=optim.lr,
        betas=(optim.beta1, optim.beta2),
        eps=optim.eps,
        foreach=True,
    )
