"""From gradients to updated parameters: whole optimizer state, sharded, or a sharded model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from holdfast.fsdp import Strategy, fully_shard_model
from holdfast.optim import (
    ChainedOptimizer,
    LossScaler,
    ReducedOptimizer,
    ShardedOptimizer,
    Stepper,
)
from holdfast_trainer.models.parallelize import ParallelGPT
from holdfast_trainer.models.split import SplitModule
from holdfast_trainer.train.config import OptimConfig


def make_update(model: ParallelGPT, *, optim: OptimConfig) -> Stepper:
    """Return what `--zero` or `--fsdp` asks for. Collective with sharding: ranks compare first."""
    if optim.fsdp is not None:
        return _fully_sharded(model, optim=optim, strategy=optim.fsdp)
    if optim.zero:
        return chain_sharded(model, optim=optim, divisor=model.groups.size("dp_cp"))
    return ReducedOptimizer(
        _make_whole(model, optim=optim),
        model.groups,
        reduce=model.reduce_gradients,
        divisor=model.groups.size("dp_cp"),
    )


def _fully_sharded(model: ParallelGPT, *, optim: OptimConfig, strategy: Strategy) -> Stepper:
    """The whole model in shards, each layer gathered while it runs."""
    layers = list(model.module.blocks.values())
    sharded = fully_shard_model(
        model.module,
        model.groups,
        experts=[p for p in model.module.parameters() if _is_expert(p)],
        units=layers,
        strategy=strategy,
    )
    model.view_in_units(layers)
    # Sharding has replaced the parameters.
    return sharded.stepper(_make_whole(model, optim=optim))


def _make_whole(model: ParallelGPT, *, optim: OptimConfig) -> torch.optim.Optimizer:
    """A torch optimizer of this rank's parameters as they are."""
    return _maker(optim)(_groups(list(model.module.parameters()), weight_decay=optim.weight_decay))


def share_norm(steppers: Iterable[Stepper], *, scaler: LossScaler | None) -> float:
    """The norm of what one rank holds of the reduced gradients, loss scale removed. Collective.

    The squares of all ranks add up to that of the whole norm. Not finite if an element is not.
    Gradients are reduced here if they are not yet; a step that follows reduces them no more.

    Cost: the reductions not made yet; reads the gradients once.
    """
    scale = 1.0 if scaler is None else scaler.scale
    return math.hypot(*(stepper.share_norm() for stepper in steppers)) / scale


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
        elementwise=True,  # what `_maker` makes needs no trial
        name=name,
    )


def _is_expert(parameter: nn.Parameter) -> bool:
    """Return True if the parameter is split over experts."""
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
    """Return what makes the inner optimizer from its parameter groups."""
    if optim.optimizer == "sgd":
        return partial(torch.optim.SGD, lr=optim.lr, momentum=optim.momentum)
    return partial(
        torch.optim.AdamW,
        lr=optim.lr,
        betas=(optim.beta1, optim.beta2),
        eps=optim.eps,
        foreach=True,
    )
