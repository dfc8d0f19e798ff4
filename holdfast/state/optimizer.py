"""A `torch.optim` optimizer as a part of the state: everything by parameter name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from holdfast.errors import ConfigError, MismatchError
from holdfast.state.markers import Stored
from holdfast.state.names import parameter_names
from holdfast.state.stored import StoredPart, StoredTensor


class OptimizerState:
    """An optimizer and the module whose parameters it updates, saved by parameter name.

    Stored are `state.<parameter name>.<entry>`, the hyperparameters of each group, and which group
    each parameter belongs to. Parameter positions are never stored, so that ranks that hold
    different parameters (pipeline stages) agree on the rest, and a load under another layout finds
    each group by its members. State is allocated by shape, never by stepping: step counters,
    parameters and hyperparameters do not change before the load.

    Raises ConfigError for a parameter of the optimizer that the module does not have.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, module: nn.Module) -> None:
        self._optimizer = optimizer
        self._module = module

    def tree(self) -> dict[str, object]:
        """The state by name, group hyperparameters, and membership."""
        named = self._named_groups()
        state: dict[str, object] = {}
        for names, group in zip(named, self._optimizer.param_groups, strict=True):
            for name, parameter in zip(names, group["params"], strict=True):
                if parameter in self._optimizer.state:
                    state[name] = dict(self._optimizer.state[parameter])
        return {
            "state": state,
            "groups": [_hyperparameters(group) for group in self._optimizer.param_groups],
            "membership": {name: i for i, names in enumerate(named) for name in names},
        }

    def template(self, stored: StoredPart) -> dict[str, object]:
        """Targets shaped like the parameters for the state the checkpoint has, nothing stepped."""
        state: dict[str, object] = {}
        for names, group in zip(self._named_groups(), self._optimizer.param_groups, strict=True):
            on_device = bool(group.get("capturable") or group.get("fused"))
            for name, parameter in zip(names, group["params"], strict=True):
                have = dict(self._optimizer.state.get(parameter, {}))
                entries: dict[str, object] = {
                    entry: have.get(entry)
                    if isinstance(have.get(entry), torch.Tensor)
                    else Stored()
                    for entry in have
                }
                for entry, info in stored.tensors_under("state", name).items():
                    if not isinstance(entries.get(entry), torch.Tensor):
                        entries[entry] = _allocate(entry, info, parameter, on_device)
                for entry in stored.keys_under("state", name):
                    entries.setdefault(entry, Stored())
                if entries or stored.has("state", name):
                    state[name] = entries
        return {"state": state, "groups": Stored(), "membership": Stored()}

    def restore(self, tree: object) -> None:
        """Set state and hyperparameters; MismatchError where a group cannot be identified."""
        if not isinstance(tree, Mapping):
            raise MismatchError("the stored optimizer part is no mapping; was it saved from one?")
        chosen = self._match_groups(tree["groups"], tree["membership"])
        for names, group in zip(self._named_groups(), self._optimizer.param_groups, strict=True):
            for name, parameter in zip(names, group["params"], strict=True):
                if name in tree["state"]:
                    self._optimizer.state[parameter] = dict(tree["state"][name])
        for group, values in zip(self._optimizer.param_groups, chosen, strict=True):
            group.update(values)

    def _named_groups(self) -> list[list[str]]:
        """Per group, the logical names of its parameters in order."""
        names = parameter_names(self._module)
        result = []
        for position, group in enumerate(self._optimizer.param_groups):
            here = []
            for i, parameter in enumerate(group["params"]):
                if parameter not in names:
                    raise ConfigError(
                        f"OptimizerState: parameter {i} of group {position} (shape "
                        f"{list(parameter.shape)}) is not a parameter of "
                        f"{type(self._module).__name__}; pass the module that owns it"
                    )
                here.append(names[parameter])
            result.append(here)
        return result

    def _match_groups(
        self, groups: list[dict[str, Any]], membership: Mapping[str, int]
    ) -> list[dict[str, Any]]:
        """The stored hyperparameters of each local group, found by its members."""
        chosen = []
        for position, names in enumerate(self._named_groups()):
            homes = {membership[name] for name in names if name in membership}
            if len(homes) > 1:
                raise MismatchError(
                    f"optimizer group {position} holds parameters that the checkpoint has in "
                    f"groups {sorted(homes)}; build the same parameter groups as the saved run"
                )
            if not homes and names:
                raise MismatchError(
                    f"optimizer group {position}: the checkpoint knows none of its parameters "
                    f"({', '.join(names[:3])}{', …' if len(names) > 3 else ''})"
                )
            index = homes.pop() if homes else position
            if index >= len(groups):
                raise MismatchError(
                    f"optimizer group {position}: the checkpoint has {len(groups)} groups"
                )
            chosen.append(groups[index])
        return chosen


def _hyperparameters(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in ("params", "param_names")}


def _allocate(
    entry: str, stored: StoredTensor, parameter: torch.Tensor, on_device: bool
) -> torch.Tensor:
    """A target for one state tensor: placed like the parameter where it has its shape.

    Step counters stay whole on the host (on the parameter's device for fused and capturable
    optimizers), as torch keeps them.
    """
    if entry != "step" and stored.shape == tuple(parameter.shape):
        return torch.zeros_like(
            parameter.detach(), dtype=stored.dtype, memory_format=torch.preserve_format
        )
    device = parameter.device if on_device or entry != "step" else torch.device("cpu")
    return torch.zeros(stored.shape, dtype=stored.dtype, device=device)
