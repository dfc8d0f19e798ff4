"""Gradients that are accumulated when a checkpoint is made: the next step would lack them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from holdfast._torch import write_counter
from holdfast.state import PerRank

Gradients = dict[str, torch.Tensor]
_USED = "_holdfast_used"
"""On a gradient: its version when a step used it."""


class GradientWatch:
    """Distinguishes gradients that no step has used yet from those that a step has left behind.

    Args:
        optimizers: Whose steps are watched.

    Cost: a look at each parameter after each step.
    """

    def __init__(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        self._handles = [each.register_step_post_hook(_note_used) for each in optimizers]

    def close(self) -> None:
        """Watch no longer."""
        for each in self._handles:
            each.remove()


def unused_gradients(module: nn.Module) -> Gradients:
    """Return the gradients that came after the last watched step, by parameter."""
    return {
        name: each
        for name, each in gradients_of(module).items()
        if getattr(each, _USED, None) != _version(each)
    }


def gradients_of(module: nn.Module) -> Gradients:
    """Return all gradients, by parameter."""
    named = module.named_parameters()
    return {name: each.grad for name, each in named if each.grad is not None}


def gradients_part(gradients: Gradients) -> dict[str, object]:
    """Return gradients as a part, or as its template.

    Those of replicas are each rank's own until a step sums them. Another number of ranks takes
    their mean, which is what the step would make of them.
    """
    return {
        "sharded": {n: each for n, each in gradients.items() if isinstance(each, DTensor)},
        "own": PerRank(
            {n: each for n, each in gradients.items() if not isinstance(each, DTensor)},
            axes=("dp",),
            merge=_mean,
        ),
    }


def empty_gradients(module: nn.Module, names: Iterable[str]) -> Gradients:
    """Give parameters a gradient of zeros, to be filled, and return these by parameter."""
    known = dict(module.named_parameters())
    chosen = {name: known[name] for name in names if name in known}
    for each in chosen.values():
        each.grad = torch.zeros_like(each)
    return {name: each.grad for name, each in chosen.items() if each.grad is not None}


def _note_used(optimizer: torch.optim.Optimizer, *args: Any) -> None:
    """Mark the gradients that a step has used, until they change."""
    for group in optimizer.param_groups:
        for each in group["params"]:
            if each.grad is not None:
                setattr(each.grad, _USED, _version(each.grad))


def _version(gradient: torch.Tensor) -> int:
    """Return how often the memory of a gradient was written in place."""
    return write_counter(gradient.to_local() if isinstance(gradient, DTensor) else gradient)


def _mean(stored: dict[str, Any]) -> Gradients:
    """Return the mean over the ranks."""
    trees = list(stored.values())
    return {name: sum(tree[name] for tree in trees) / len(trees) for name in trees[0]}
