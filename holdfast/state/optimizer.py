"""An optimizer as a part of the state: everything by parameter name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from holdfast.errors import ConfigError, MismatchError
from holdfast.state.holding import HeldParameter, PartitionedOptimizer, WholeOptimizer
from holdfast.state.markers import FlatShard, Stored, Transient
from holdfast.state.names import parameter_names
from holdfast.state.padding import Declaration, declarations
from holdfast.state.stored import StoredPart

_RECORD = "param_state_sharding_type"
_COUNTS = "num_groups"


class OptimizerState:
    """An optimizer and the module whose parameters it updates, saved by parameter name.

    Stored are `state.<parameter name>.<entry>`, the hyperparameters of each group, and which group
    each parameter belongs to. Parameter positions are never stored, so that ranks that hold
    different parameters (pipeline stages) agree on the rest, and a load under another layout finds
    each group by its members. State is allocated by shape, never by stepping: step counters,
    parameters and hyperparameters do not change before the load.

    `optimizer`: a `torch.optim.Optimizer`, or one that holds runs of elements (`ShardedOptimizer`,
    `ChainedOptimizer`: a `PartitionedOptimizer`). Their state is stored in the parameters'
    coordinates under the same keys, so each loads what the other saved. Main parameters, wider
    copies of low-precision ones, are stored as `main.<parameter name>`; where the optimizer that
    loads them keeps none, they go into parameters of their dtype, and are left out for narrower
    ones, which the module's own part restores. Of a parameter whose padding is declared
    (`declare_padding`), moments and main parameter are stored without it, too.

    Raises ConfigError for a parameter of the optimizer that the module does not have.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer | PartitionedOptimizer, module: nn.Module
    ) -> None:
        self._holder: PartitionedOptimizer = (
            optimizer  # first: a sharded optimizer is a torch optimizer by type, too
            if isinstance(optimizer, PartitionedOptimizer)
            else WholeOptimizer(optimizer)
        )
        self._module = module

    def tree(self) -> dict[str, object]:
        """The state by name, group hyperparameters, membership, and main parameters if any."""
        self._holder.synchronize()
        state: dict[str, object] = {}
        main: dict[str, object] = {}
        membership: dict[str, int] = {}
        padded = declarations(self._module).by_tensor
        for name, held in self._named():
            padding = padded.get(id(held.parameter))
            membership[name] = held.group
            if held.updated is None:
                continue
            if held.updated in held.optimizer.state:
                entries = held.optimizer.state[held.updated]
                state[name] = {
                    entry: _marked(held.stored_form(entry, value), held, padding)
                    for entry, value in entries.items()
                }
            if held.is_main:
                main[name] = _marked(held.stored_form("main", held.updated), held, padding)
        tree: dict[str, object] = {
            "state": state,
            "groups": [_hyperparameters(group) for group in self._holder.param_groups],
            "membership": membership,
        }
        if main:
            tree["main"] = main
        records = self._holder.sharding_records()
        if records:
            tree[_COUNTS] = self._holder.num_groups()
            tree[_RECORD] = records
        return tree

    def template(self, stored: StoredPart) -> dict[str, object]:
        """Targets placed like what is held for the state the checkpoint has, nothing stepped."""
        self._check_counts(stored)
        self._holder.synchronize()
        self._holder.begin_load(with_main=stored.has("main"))
        state: dict[str, object] = {}
        main: dict[str, object] = {}
        padded = declarations(self._module).by_tensor
        for name, held in self._named():
            if held.updated is None:
                continue
            padding = padded.get(id(held.parameter))
            entries = self._targets(name, held, stored, padding)
            if entries or stored.has("state", name):
                state[name] = entries
            if stored.has("main", name):
                target = _main_target(held, stored.tensors_under("main")[name].dtype)
                main[name] = _marked(target, held, padding)
        template: dict[str, object] = {
            "state": state,
            "groups": Stored(),
            "membership": Stored(),
        }
        if stored.has("main"):
            template["main"] = main
        return template | {name: Transient() for name in (_COUNTS, _RECORD) if stored.has(name)}

    def restore(self, tree: object) -> None:
        """Set state and hyperparameters; MismatchError where a group cannot be identified."""
        if not isinstance(tree, Mapping):
            raise MismatchError("the stored optimizer part is no mapping; was it saved from one?")
        chosen = self._match_groups(tree["groups"], tree["membership"])
        main = tree.get("main")
        for name, held in self._named():
            if held.updated is None:
                continue
            if name in tree["state"]:
                held.optimizer.state[held.updated] = dict(tree["state"][name])
            value = None if main is None else main.get(name)
            if isinstance(value, torch.Tensor) and value is not held.updated:
                with torch.no_grad():
                    held.updated.copy_(value)
                held.markers.pop("main", None)
        for group, values in zip(self._holder.param_groups, chosen, strict=True):
            group.update(values)
        self._holder.finish_load(with_main=main is not None)

    def _targets(
        self, name: str, held: HeldParameter, stored: StoredPart, padding: Declaration | None
    ) -> dict[str, object]:
        """By entry, what to load one parameter's state into."""
        group = self._holder.param_groups[held.group]
        on_device = bool(group.get("capturable") or group.get("fused"))
        state = held.optimizer.state
        have = {} if held.updated is None else dict(state.get(held.updated, {}))
        entries: dict[str, object] = {
            entry: _marked(held.stored_form(entry, value), held, padding)
            if isinstance(value, torch.Tensor)
            else Stored()
            for entry, value in have.items()
        }
        real_shape = None if padding is None else padding.shape
        for entry, info in stored.tensors_under("state", name).items():
            if not isinstance(have.get(entry), torch.Tensor):
                target = held.target(entry, info, on_device=on_device, real_shape=real_shape)
                entries[entry] = _marked(target, held, padding)
        for entry in stored.keys_under("state", name):
            entries.setdefault(entry, Stored())
        return entries

    def _named(self) -> Iterator[tuple[str, HeldParameter]]:
        """Each held parameter with its logical name."""
        names = parameter_names(self._module)
        for held in self._holder.held_parameters():
            if held.parameter not in names:
                raise ConfigError(
                    f"OptimizerState: a parameter of group {held.group} (shape "
                    f"{list(held.parameter.shape)}) is not a parameter of "
                    f"{type(self._module).__name__}; pass the module that owns it"
                )
            yield names[held.parameter], held

    def _check_counts(self, stored: StoredPart) -> None:
        """MismatchError where an optimizer of the same name had another number of groups."""
        for name, count in self._holder.num_groups().items():
            saved = stored.value(_COUNTS, name)
            if isinstance(saved, int) and saved != count:
                raise MismatchError(
                    f"optimizer '{name}' has {count} parameter groups, the checkpoint's has "
                    f"{saved}; build the same parameter groups as the saved run"
                )

    def _match_groups(
        self, groups: list[dict[str, Any]], membership: Mapping[str, int]
    ) -> list[dict[str, Any]]:
        """The stored hyperparameters of each local group, found by its members."""
        members: list[list[str]] = [[] for _ in self._holder.param_groups]
        for name, held in self._named():
            members[held.group].append(name)
        chosen: list[dict[str, Any]] = []
        for position, names in enumerate(members):
            homes = sorted({membership[name] for name in names if name in membership})
            if len(homes) > 1 and any(groups[home] != groups[homes[0]] for home in homes):
                raise MismatchError(
                    f"optimizer group {position} holds parameters that the checkpoint has in "
                    f"groups {homes}, whose settings differ; build the same parameter groups as "
                    f"the saved run"
                )
            if not homes and names:
                raise MismatchError(
                    f"optimizer group {position}: the checkpoint knows none of its parameters "
                    f"({', '.join(names[:3])}{', …' if len(names) > 3 else ''})"
                )
            if not homes and position >= len(groups):
                chosen.append({})  # nobody here, nothing stored for it: it stays as it was built
                continue
            chosen.append(groups[homes[0] if homes else position])
        return chosen


def _hyperparameters(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in ("params", "param_names")}


def _marked(value: object, held: HeldParameter, padding: Declaration | None) -> object:
    """What is elementwise of a parameter whose padding is declared, as declared; the rest as is."""
    if padding is None:
        return value
    if isinstance(value, FlatShard):
        return padding.mark(value)
    if isinstance(value, torch.Tensor) and value.shape == held.parameter.shape:
        return padding.mark(value)
    return value


def _main_target(held: HeldParameter, dtype: torch.dtype) -> object:
    """What to load a stored main parameter into: the main parameter, or memory to copy from.

    A parameter that is its own main one takes the value only if it can hold it.
    """
    updated = held.updated
    if updated is None or (not held.is_main and held.parameter.dtype != dtype):
        return Transient()
    if held.is_main and updated.dtype == dtype:
        return held.marker("main", updated) if held.over is not None else updated
    return (
        torch.zeros_like(updated.detach(), dtype=dtype)
        if held.over is None
        else held.marker("main", torch.zeros_like(updated.detach(), dtype=dtype))
    )
