"""Gradients that are accumulated when a checkpoint is made: the next step would lack them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from holdfast._torch import write_counter
from holdfast.errors import ConfigError
from holdfast.state import PerRank

Parameters = Mapping[str, nn.Parameter]
"""By names that are the same in every run."""
Gradients = dict[str, torch.Tensor]
"""By the names of their parameters."""
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


def parameters_of(modules: Iterable[tuple[str, nn.Module]]) -> dict[str, nn.Parameter]:
    """Return the parameters of modules by name, by number: wrappers have other names for them."""
    return {
        f"{name}.{index}": parameter
        for name, each in modules
        for index, parameter in enumerate(each.parameters())
    }


def unused_gradients(parameters: Parameters) -> Gradients:
    """Return the gradients that came after the last watched step."""
    return {
        name: each
        for name, each in gradients_of(parameters).items()
        if getattr(each, _USED, None) != _version(each)
    }


def gradients_of(parameters: Parameters) -> Gradients:
    """Return all gradients."""
    return {name: each.grad for name, each in parameters.items() if each.grad is not None}


def gradients_part(gradients: Gradients) -> dict[str, object]:
    """Return gradients as a part, or as its template."""
    sharded = {name: each for name, each in gradients.items() if isinstance(each, DTensor)}
    own = {name: each for name, each in gradients.items() if name not in sharded}
    return {"sharded": sharded, "own": own_gradients(own)}


def empty_gradients(parameters: Parameters, names: Iterable[str]) -> Gradients:
    """Give parameters a gradient of zeros, to be filled, and return these."""
    chosen = {name: parameters[name] for name in names if name in parameters}
    for each in chosen.values():
        each.grad = torch.zeros_like(each)
    return gradients_of(chosen)


def unused_of_replicas(parameters: Parameters, what: str) -> PerRank:
    """Return the gradients of replicas that no step has used.

    Raises:
        ConfigError: there are such of a sharded module, which no rank has whole; `what` names the
            call.
    """
    gradients = unused_gradients(parameters)
    sharded = [name for name, each in gradients.items() if isinstance(each, DTensor)]
    if sharded:
        raise ConfigError(
            f"{what}: gradients of a sharded module ({sharded[0]}) that no step has used, as while "
            f"they are being accumulated, would be lost; save after a step of the optimizer, or "
            f"after a zero_grad() that sets them to None"
        )
    return own_gradients(gradients)


def put_gradients(parameters: Parameters, stored: Mapping[str, torch.Tensor]) -> None:
    """Replace the gradients of parameters by what a load has brought back."""
    for name, parameter in parameters.items():
        known = stored.get(name)
        parameter.grad = None if known is None else known.to(parameter.device)


def own_gradients(gradients: object) -> PerRank:
    """Return gradients of replicas, each rank's own until a step sums them.

    Another number of ranks takes their mean, which is what the step would make of them.
    """
    return PerRank(gradients, axes=("dp",), merge=_mean)


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
    """Return the mean over the ranks, of which one may have no gradient where another has one."""
    summed: Gradients = {}
    for tree in stored.values():
        for name, each in tree.items():
            summed[name] = summed[name] + each if name in summed else each
    return {name: each / len(stored) for name, each in summed.items()}
