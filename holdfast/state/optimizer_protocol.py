"""What a checkpoint asks of an optimizer: its parameters, whole or sharded by elements.

torch's optimizers are adapted to the protocol; wrappers are seen through, and optimizers inside
other optimizers (containers, those that step a base optimizer) are found.
"""

from __future__ import annotations

import itertools
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import nn

from holdfast.errors import PlacementError
from holdfast.state.markers import FlatShard, Padded
from holdfast.state.tensor_elements import equal_trees, tensors_of

NOT_STORED = ("params", "param_names")
"""Entries of a parameter group that are not hyperparameters: parameters, and torch's names."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OptimizerParameter:
    """One parameter as an optimizer updates it on this rank."""

    parameter: nn.Parameter
    """The model's parameter, which gives the name."""
    group: int
    """Position in the optimizer's `param_groups`."""
    optimizer: torch.optim.Optimizer
    """The torch optimizer that keeps the state, under the tensor `updated`."""
    updated: torch.Tensor | None
    """The parameter itself, or this rank's run of its elements; None if it has none."""
    start: int = 0
    """First element of the run in the row-major local tensor of the parameter."""
    over: str | None = None
    """The group along which ranks hold other runs; None: the parameter is held whole."""
    is_main: bool = False
    """True if `updated` is a copy in a wider dtype than the parameter's, which is stored too."""
    markers: dict[str, FlatShard] = field(default_factory=dict)
    """Markers of earlier saves by entry: the same objects as long as the tensors are the same."""

    def marker(self, entry: str, run: torch.Tensor) -> FlatShard:
        """Return the marker of a run of this parameter; the same object for the same tensor."""
        marker = self.markers.get(entry)
        if marker is None or marker.local is not run:
            marker = FlatShard(run, self.start, self.parameter.detach(), self.over or "")
            self.markers[entry] = marker
        return marker


@runtime_checkable
class PartitionedOptimizer(Protocol):
    """The protocol of an optimizer that is not a `torch.optim.Optimizer`."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Hyperparameters of all groups, in a fixed order; setting an entry changes the group."""

    def optimizer_parameters(self) -> Sequence[OptimizerParameter]:
        """Every parameter, also those of which this rank holds nothing; the same objects always."""

    def num_groups(self) -> dict[str, int]:
        """Return the number of groups of each optimizer, by name; empty: it is not checked."""
        return {}

    def sharding_records(self) -> dict[str, dict[str, object]]:
        """Return how each optimizer is sharded, for people: stored, never needed to load."""
        return {}

    def synchronize(self) -> None:
        """Wait for every operation in flight that writes to parameters."""

    def begin_load(self, *, with_main: bool) -> None:
        """Prepare for a load of the state.

        Args:
            with_main: Whether the checkpoint has main parameters.
        """

    def finish_load(self, *, with_main: bool) -> None:
        """Follow up a load: state, and main parameters if any, are in place.

        Args:
            with_main: Whether main parameters were loaded; the same on every rank.
        """


@runtime_checkable
class OptimizersByModule(Protocol):
    """Optimizers of several modules that step as one; each is stored under its module's name."""

    def optimizers_by_module(self) -> Mapping[str, torch.optim.Optimizer]:
        """Return the optimizer of each module on this rank."""


class GroupLoaded(NamedTuple):
    """Where a parameter group has its settings from."""

    homes: list[int]
    """The numbers of the stored groups; empty if it stayed as it was built."""
    first: int
    """The number of the first stored group of its optimizer, of several inside of one."""


def stored_form(param: OptimizerParameter, entry: str, value: object) -> object:
    """Return what is saved for an entry of a parameter's state.

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
    """Return a value, marked as padded if it is elementwise of a parameter with padding."""
    if padding is None:
        return value
    if isinstance(value, FlatShard) or (
        isinstance(value, torch.Tensor) and value.shape == param.parameter.shape
    ):
        return Padded(value, padding)
    return value


_WRAPPERS = ("accelerate", "lightning", "lightning_fabric", "pytorch_lightning")
"""Packages whose optimizer wrappers hold nothing themselves and forward everything."""
_INNER = ("optimizer", "_optimizer")
_DEPTH = 3
_MAX_MEMBERS = 1000


def is_wrapper(value: object) -> bool:
    """Return True if a class of these packages is among those that an object is of."""
    bases = (base.__module__ or "" for base in type(value).__mro__)
    return any(base.partition(".")[0] in _WRAPPERS for base in bases)


def unwrapped_optimizer(optimizer: Any) -> Any:
    """Return the optimizer inside a wrapper that adds nothing to it; any other optimizer itself.

    Seen through are the wrappers of Accelerate and Lightning Fabric, as long as their state and
    groups are the very objects of the one inside.
    """
    while is_wrapper(optimizer):
        for name in _INNER:
            inner = vars(optimizer).get(name)
            if isinstance(inner, torch.optim.Optimizer) and _states_the_same(optimizer, inner):
                optimizer = inner
                break
        else:
            break
    return optimizer


def _states_the_same(outer: Any, inner: Any) -> bool:
    """Return True if a wrapper states just what the optimizer inside states."""
    if outer.state is not inner.state or outer.param_groups is not inner.param_groups:
        return False
    return equal_trees(outer.state_dict(), inner.state_dict())


def inner_optimizers(optimizer: Any) -> dict[str, torch.optim.Optimizer]:
    """Return the optimizers in attributes of an optimizer whose class is not torch's own, by path.

    Found in attributes, in lists, tuples and dicts there, and inside optimizers found so, each
    once; also in attributes of other objects, and behind bound methods, where they update
    parameters of the outer one. Members of a dict whose key is not text or a number go by position.
    Those that share the outer one's state are the same optimizer under another name.
    """
    if not _attributes(optimizer):
        return {}
    seen = {id(optimizer)}
    result: dict[str, torch.optim.Optimizer] = {}
    _collect(optimizer, "", result, seen)
    updated = _updated_by(optimizer)
    for owner, prefix in [(optimizer, ""), *((o, f"{path}.") for path, o in result.items())]:
        for name, value in _attributes(owner):
            for path, inner in _optimizers_in(value, f"{prefix}{name}", 0, set()):
                if id(inner) not in seen and not updated.isdisjoint(_updated_by(inner)):
                    seen.add(id(inner))
                    result[path] = inner
    return result


def _updated_by(optimizer: Any) -> set[int]:
    """Return the `id` of each parameter in the groups of an optimizer."""
    return {id(p) for group in optimizer.param_groups for p in group["params"]}


def _attributes(optimizer: Any) -> list[tuple[str, Any]]:
    """Return the attributes that may hold other optimizers; none for torch's own classes."""
    skipped = ("state", "param_groups", "defaults")
    attributes = {} if type(optimizer).__module__.startswith("torch.optim.") else vars(optimizer)
    return [(name, value) for name, value in attributes.items() if name not in skipped]


def _collect(
    optimizer: Any, prefix: str, result: dict[str, torch.optim.Optimizer], seen: set[int]
) -> None:
    """Add the optimizers in attributes of an optimizer, and in theirs, by path."""
    for name, value in _attributes(optimizer):
        for path, inner in _optimizers_in(value, f"{prefix}{name}"):
            if id(inner) not in seen:
                seen.add(id(inner))
                result[path] = inner
                _collect(inner, f"{path}.", result, seen)


def _optimizers_in(
    value: object, path: str, depth: int = 0, visited: set[int] | None = None
) -> Iterator[tuple[str, Any]]:
    """Yield optimizers inside of a value, with paths, down to a few levels of containers.

    Given `visited`, in attributes of plain objects, too; large collections, which may be a data
    set, are then not searched.
    """
    if isinstance(value, torch.optim.Optimizer):
        yield path, value
        return
    if depth >= _DEPTH or (visited is not None and id(value) in visited):
        return
    children: Iterable[tuple[object, object]] = _members(value)
    if visited is not None:
        visited.add(id(value))
        children = [*itertools.islice(children, _MAX_MEMBERS)]
        if isinstance(value, types.MethodType):
            children = [("__self__", value.__self__)]
        elif not isinstance(value, type | types.ModuleType | torch.Tensor | torch.nn.Module):
            children += [*getattr(value, "__dict__", {}).items()]
    for name, child in children:
        yield from _optimizers_in(child, f"{path}.{name}", depth + 1, visited)


def _members(value: object) -> Iterator[tuple[object, object]]:
    """Yield the members of a dict, a list or a tuple, by name or position."""
    if isinstance(value, Mapping):
        for i, (name, child) in enumerate(value.items()):
            yield (name if isinstance(name, str | int) else i), child
    elif isinstance(value, list | tuple):
        yield from enumerate(value)
