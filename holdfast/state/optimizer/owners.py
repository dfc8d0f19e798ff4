"""The modules whose parameters an optimizer updates: one, or several by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from holdfast.errors import ConfigError, PlacementError
from holdfast.state.names import parameter_names, walk_all
from holdfast.state.padding import Declaration, declarations


class Owners:
    """Names and declared padding of the parameters of one module, or of several under prefixes.

    ConfigError for something that is no module, and for two parameters with one name.
    """

    def __init__(self, module: nn.Module | Mapping[str, nn.Module]) -> None:
        if not isinstance(module, nn.Module | Mapping):
            raise ConfigError(
                f"OptimizerState: a {type(module).__name__} is no module; pass the module whose "
                f"parameters the optimizer updates, or a dict of modules by name"
            )
        self._modules = {"": module} if isinstance(module, nn.Module) else dict(module)
        for name, each in self._modules.items():
            if not isinstance(each, nn.Module) or not isinstance(name, str):
                raise ConfigError(
                    f"OptimizerState: {name!r} is a {type(each).__name__}; pass the module whose "
                    f"parameters the optimizer updates, or a dict of modules by name"
                )
        if not self._modules:
            raise ConfigError("OptimizerState: a dict of modules needs at least one")

    def names(self) -> dict[torch.Tensor, str]:
        """Parameter -> its logical name, behind the module's own where there are several."""
        found: dict[torch.Tensor, str] = {}
        homes: dict[str, torch.Tensor] = {}
        for prefix, module in self._modules.items():
            _refuse_flat_shards(module)
            for parameter, name in parameter_names(module).items():
                full = f"{prefix}.{name}" if prefix else name
                if parameter in found:
                    continue  # shared by two of the modules: it has the first one's name
                if full in homes:
                    raise ConfigError(f"OptimizerState: two parameters are named '{full}'")
                found[parameter] = full
                homes[full] = parameter
        return found

    def paddings(self) -> dict[int, Declaration]:
        """The declared padding of parameters, by `id`."""
        return {
            key: declaration
            for module in self._modules.values()
            for key, declaration in declarations(module).by_tensor.items()
        }

    def stranger(self, parameter: torch.Tensor, group: int, names: Mapping[Any, str]) -> str:
        """What to say of a parameter of the optimizer that none of the modules has."""
        kinds = " or ".join(sorted({type(module).__name__ for module in self._modules.values()}))
        said = (
            f"OptimizerState: a parameter of group {group} (shape {list(parameter.shape)}) is not "
            f"a parameter of {kinds}; pass the module that owns it"
        )
        if any(known.shape == parameter.shape for known in names):
            said += (
                ". If it is a copy of one (the module was copied, materialised, sharded or replaced"
                " after the optimizer was built), build the optimizer again"
            )
        return f"{said}. For one optimizer over several modules pass a dict of them by name"


def _refuse_flat_shards(module: nn.Module) -> None:
    """PlacementError where FSDP1 has cut parameters into pieces that say nothing of the whole.

    Each rank then has another part of the elements under one name and without a placement.
    """
    for _, actual, inner, is_wrapper in walk_all(module):
        if not is_wrapper or "_fsdp_wrapped_module" not in inner._modules:
            continue
        strategy = getattr(getattr(inner, "sharding_strategy", None), "name", "")
        if getattr(inner, "world_size", 1) > 1 and strategy != "NO_SHARD":
            raise PlacementError(
                f"OptimizerState: {type(inner).__name__} at '{actual or '(root)'}' shards "
                f"parameters as flat pieces, whose optimizer state has no place in the whole "
                f"parameter; shard with fully_shard (FSDP2), whose parameters are DTensors, or "
                f"use NO_SHARD. The module itself can be saved as it is"
            )
