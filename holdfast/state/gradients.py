"""The gradients of a module as a part of the state, for a save between two microbatches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from holdfast._torch import has_unreduced_gradients
from holdfast.errors import ConfigError, MismatchError
from holdfast.format.values import is_per_rank
from holdfast.state.coordinates import SomePerRank
from holdfast.state.markers import Padded, PerRank, Stored, Union, axis_names
from holdfast.state.module_tree import declared_padding, parameter_names, walk_all
from holdfast.state.stored import StoredPart, zeros_like_target
from holdfast.state.unfinished import unfinished_on


class Gradients:
    """The `.grad` of a module's parameters as a part of the state.

        state = {"model": model, "gradients": Gradients(model, unreduced=("dp", "cp")), ...}

    Gradients are not part of a model's state: a save after a step does not need them. With this
    part a save may stand between two microbatches of a loop that adds gradients up in `.grad`. They
    are stored by parameter name, in the parameters' global coordinates, with their own dtype, and
    loaded bitwise under any layout. A load replaces: a parameter without a stored gradient has none
    afterwards. Of a parameter whose padding is declared they are stored without it.

    Optimizers that keep gradients elsewhere (in buckets, in shards of a `ShardedModel`) cannot be
    saved between microbatches, with or without this part.

    Args:
        module: owns the parameters.
        unreduced: the axes along which gradients are not summed up yet, as between microbatches of
            data parallelism that reduces once a step. Each coordinate along them has gradients of
            its own then, and a load needs the same coordinates; all other axes may differ. Without
            it gradients that several ranks hold have to be equal, which every save checks.

    Raises:
        ConfigError: If it is not a module.
        MismatchError: At a load, on all ranks: gradients were saved with other `unreduced`, or the
            data coordinates are others.

    Cost:
        A save copies nothing. A load allocates the gradients. With `unreduced` it holds those of
        the module's parameters whole, in host memory, for a moment.
    """

    def __init__(self, module: nn.Module, *, unreduced: str | Sequence[str] = ()) -> None:
        if not isinstance(module, nn.Module):
            raise ConfigError(f"Gradients takes a module, got a {type(module).__name__}")
        self._module = module
        self._axes = axis_names(unreduced)

    def unfinished_work(self) -> str | None:
        """Return what the objects that train the module have not finished, FSDP2 included."""
        reason = unfinished_on(*(inner for *_, inner, _ in walk_all(self._module)))
        if reason is None and has_unreduced_gradients(self._module):
            return (
                f"{type(self._module).__name__}, which fully_shard has sharded, has gradients that "
                f"are not reduced yet (set_requires_gradient_sync(False)) and in no `.grad`; save "
                f"after the backward of the last microbatch, which reduces them"
            )
        return reason

    def tree(self) -> object:
        """Return the gradients that there are, by parameter name."""
        padded = declared_padding(self._module)
        result: dict[str, object] = {}
        for parameter, name in parameter_names(self._module).items():
            if parameter.grad is not None:
                shape = padded.find(parameter, name)
                gradient = parameter.grad.detach()
                result[name] = gradient if shape is None else Padded(gradient, shape)
        return PerRank(Union(result), axes=self._axes) if self._axes else Union(result)

    def template(self, stored: StoredPart) -> object:
        """Return new memory for what is stored, placed as the parameters are."""
        if is_per_rank(stored.node) != bool(self._axes):
            raise MismatchError(
                f"{stored.name}: the gradients were saved "
                f"{'without' if self._axes else 'with'} unreduced=, and are loaded the other way; "
                f"give what the saved run gave"
            )
        names = parameter_names(self._module)
        if self._axes:
            return SomePerRank(Stored(), axes=self._axes, names=frozenset(names.values()))
        padded = declared_padding(self._module)
        tensors = stored.tensors_under()
        targets: dict[str, object] = {}
        for parameter, name in names.items():
            info = tensors.get(name)
            if info is not None:
                shape = padded.find(parameter, name)
                like = parameter.detach() if shape is None else Padded(parameter.detach(), shape)
                targets[name] = zeros_like_target(like, info.dtype)
        return targets

    def restore(self, tree: object) -> None:
        """Give each parameter its gradient, or none."""
        loaded: Mapping[str, Any] = tree if isinstance(tree, Mapping) else {}
        if self._axes:
            loaded = next(iter(loaded.values()), {})  # of the one coordinate that is this rank's
        padded = declared_padding(self._module)
        for parameter, name in parameter_names(self._module).items():
            value = loaded.get(name)
            if self._axes and value is not None:
                value = _placed(value, parameter, padded.find(parameter, name), name=name)
            parameter.grad = value


def _placed(
    whole: torch.Tensor, parameter: nn.Parameter, real: tuple[int, ...] | None, *, name: str
) -> torch.Tensor:
    """Return this rank's piece of a whole gradient; MismatchError for another shape."""
    shape = tuple(parameter.shape)
    if tuple(whole.shape) != (real or shape):
        raise MismatchError(
            f"the stored gradient of {name} has shape {list(whole.shape)}, the parameter "
            f"{list(real or shape)}"
        )
    if real is not None:
        padding = whole.new_zeros(shape)
        padding[tuple(slice(n) for n in real)] = whole
        whole = padding
    whole = whole.to(parameter.device)
    if not isinstance(parameter, DTensor):
        return whole
    mesh, placements = parameter.device_mesh, parameter.placements
    return distribute_tensor(whole, mesh, placements, src_data_rank=None)
