"""What is stored of an optimizer's parameters, and what of optimizers and modules can be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from holdfast._torch import module_table
from holdfast.errors import ConfigError, PlacementError
from holdfast.state.markers import FlatShard, Padded
from holdfast.state.module.tree import (
    overrides,
    walk_all,
)
from holdfast.state.optimizer.protocol import (
    OptimizerParameter,
    PartitionedOptimizer,
)
from holdfast.state.tensors import tensors_of

SHARDING = "param_state_sharding_type"
"""Key of the sharding records, which are stored for people."""
NUM_GROUPS = "num_groups"
"""Key of the number of groups of each optimizer inside a sharded one."""
_HOOKS = (
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)


class UnshardedOptimizer(PartitionedOptimizer):
    """A `torch.optim.Optimizer` seen as a `PartitionedOptimizer` that partitions nothing.

    Also for whatever has its `param_groups`, `state_dict` and `load_state_dict`.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's own groups."""
        return self._optimizer.param_groups

    def optimizer_parameters(self) -> Sequence[OptimizerParameter]:
        """Each parameter, held whole."""
        return [
            OptimizerParameter(parameter=p, group=i, optimizer=self._optimizer, updated=p)
            for i, group in enumerate(self._optimizer.param_groups)
            for p in group["params"]
        ]

    def synchronize(self) -> None:
        """Nothing is in flight."""

    def begin_load(self, *, with_main: bool) -> None:
        """Nothing to prepare."""

    def finish_load(self, *, with_main: bool) -> None:
        """Nothing to follow up."""


def has_own_form(optimizer: Any) -> bool:
    """Whether state goes through the optimizer's own methods rather than its attributes."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        return True
    methods = ("state_dict", "load_state_dict")
    has_hooks = any(getattr(optimizer, hooks, None) for hooks in _HOOKS)
    return has_hooks or overrides(optimizer, torch.optim.Optimizer, methods)


def parameter_facts(
    param: OptimizerParameter, padding: tuple[int, ...] | None
) -> dict[str, object]:
    """What a load has to know of a parameter: its real shape, and whether it was frozen."""
    shape = [int(n) for n in (param.parameter.shape if padding is None else padding)]
    return {"shape": shape} if param.parameter.requires_grad else {"shape": shape, "frozen": True}


def stored_form(param: OptimizerParameter, entry: str, value: object) -> object:
    """What is saved for an entry of a parameter's state.

    Of a sharded parameter, tensors of the run's shape are stored in the parameter's coordinates,
    0-d ones as they are.

    Raises:
        PlacementError: An entry is not elementwise.
    """
    if param.over is None or param.updated is None:
        return value
    if not isinstance(value, torch.Tensor):
        if any(tensors_of(value)):
            raise PlacementError(
                f"optimizer entry '{entry}' is a {type(value).__name__} that holds tensors; "
                f"only elementwise optimizers can be sharded by elements"
            )
        return value
    if value.ndim == 0:
        return value
    if value.shape != param.updated.shape:
        raise PlacementError(
            f"optimizer entry '{entry}' has shape {list(value.shape)}, not that of the run it "
            f"belongs to ({list(param.updated.shape)}); only elementwise optimizers can be "
            f"sharded by elements"
        )
    return param.marker(entry, value)


def with_padding(
    value: object, param: OptimizerParameter, padding: tuple[int, ...] | None
) -> object:
    """A value marked as padded where it is elementwise of a parameter whose padding is declared."""
    if padding is None:
        return value
    if isinstance(value, FlatShard) or (
        isinstance(value, torch.Tensor) and value.shape == param.parameter.shape
    ):
        return Padded(value, padding)
    return value


def checked(optimizer: Any) -> Any:
    """An optimizer, torch's or not, that has what a load and a save need of one."""
    needed = ("param_groups", "state_dict", "load_state_dict")
    lacking = [name for name in needed if not hasattr(optimizer, name)]
    if lacking:
        raise ConfigError(
            f"OptimizerState: a {type(optimizer).__name__} is no optimizer: it has no "
            f"{', '.join(lacking)}"
        )
    return optimizer


def modules_by_prefix(module: nn.Module | Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """The modules by what their parameters' names begin with; ConfigError for anything else."""
    hint = "pass the module whose parameters the optimizer updates, or a dict of modules by name"
    if isinstance(module, nn.Module):
        return {"": module}
    if not isinstance(module, Mapping):
        raise ConfigError(f"OptimizerState: a {type(module).__name__} is no module; {hint}")
    for name, each in module.items():
        if not isinstance(each, nn.Module) or not isinstance(name, str):
            raise ConfigError(f"OptimizerState: {name!r} is a {type(each).__name__}; {hint}")
    if not module:
        raise ConfigError("OptimizerState: a dict of modules needs at least one")
    return dict(module)


def refuse_flat_shards(module: nn.Module) -> None:
    """PlacementError where FSDP1 has cut parameters into pieces that say nothing of the whole.

    Each rank then has another part of the elements under one name and without a placement.
    """
    for _, actual, inner, is_wrapper in walk_all(module):
        if not is_wrapper or "_fsdp_wrapped_module" not in module_table(inner):
            continue
        strategy = getattr(getattr(inner, "sharding_strategy", None), "name", "")
        if getattr(inner, "world_size", 1) > 1 and strategy != "NO_SHARD":
            raise PlacementError(
                f"OptimizerState: {type(inner).__name__} at '{actual or '(root)'}' shards "
                f"parameters as flat pieces, whose optimizer state has no place in the whole "
                f"parameter; shard with fully_shard (FSDP2), whose parameters are DTensors, or "
                f"use NO_SHARD. The module itself can be saved as it is"
            )
