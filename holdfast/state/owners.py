"""The modules whose parameters an optimizer updates: one, or several by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from holdfast.errors import ConfigError
from holdfast.state.names import parameter_names
from holdfast.state.padding import Declaration, declarations


class Owners:
    """Names and declared padding of the parameters of one module, or of several under prefixes.

    ConfigError for something that is no module, and for two parameters with one name.
    """

    def __init__(self, module: nn.Module | Mapping[str, nn.Module]) -> None:
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
