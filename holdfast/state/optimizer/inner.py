"""Optimizers inside optimizers: containers, wrappers, and those that step a base optimizer."""

from __future__ import annotations

import itertools
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from holdfast.state.tensors import equal_trees

_WRAPPERS = ("accelerate", "lightning", "lightning_fabric", "pytorch_lightning")
"""Packages whose optimizer wrappers hold nothing themselves and forward everything."""
_INNER = ("optimizer", "_optimizer")
_DEPTH = 3
_MAX_MEMBERS = 1000


def unwrapped_optimizer(optimizer: Any) -> Any:
    """The optimizer inside a wrapper that adds nothing to it; any other optimizer itself.

    Seen through are the wrappers of Accelerate and Lightning Fabric, as long as their state and
    groups are the very objects of the one inside.
    """
    while any(
        (base.__module__ or "").split(".")[0] in _WRAPPERS for base in type(optimizer).__mro__
    ):
        for name in _INNER:
            inner = vars(optimizer).get(name)
            if isinstance(inner, torch.optim.Optimizer) and _states_the_same(optimizer, inner):
                optimizer = inner
                break
        else:
            break
    return optimizer


def _states_the_same(outer: Any, inner: Any) -> bool:
    """Whether a wrapper states just what the optimizer inside states."""
    if outer.state is not inner.state or outer.param_groups is not inner.param_groups:
        return False
    return equal_trees(outer.state_dict(), inner.state_dict())


def inner_optimizers(optimizer: Any) -> dict[str, torch.optim.Optimizer]:
    """The optimizers in attributes of an optimizer whose class is not torch's own, by path.

    Found in attributes, in lists, tuples and dicts there, and inside optimizers found so, each
    once; also in attributes of other objects, and behind bound methods, where they update
    parameters of the outer one. Members of a dict whose key is no text or number go by position.
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
    """The `id` of each parameter in the groups of an optimizer."""
    return {id(p) for group in optimizer.param_groups for p in group["params"]}


def _attributes(optimizer: Any) -> list[tuple[str, Any]]:
    """Where an optimizer may keep others; nothing for torch's own classes."""
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
    """Optimizers inside of a value, with paths, down to a few levels of containers.

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
    """What is in a dict, a list or a tuple, by name or position."""
    if isinstance(value, Mapping):
        for i, (name, child) in enumerate(value.items()):
            yield (name if isinstance(name, str | int) else i), child
    elif isinstance(value, list | tuple):
        yield from enumerate(value)
