"""Optimizers inside optimizers: containers, wrappers, and those that step a base optimizer."""

from __future__ import annotations

import itertools
import types
from collections.abc import Iterator, Mapping
from typing import Any

import torch

_WRAPPERS = ("accelerate", "lightning", "lightning_fabric", "pytorch_lightning")
"""Packages whose optimizer wrappers hold nothing themselves and hand everything on."""
_INNER = ("optimizer", "_optimizer")
_DEPTH = 3
_MAX_MEMBERS = 1000
"""Of a collection that is reached through other objects, which may hold a data set."""


def unwrapped(optimizer: Any) -> Any:
    """The optimizer inside a wrapper that adds nothing to it; any other optimizer itself.

    Seen through are the wrappers of Accelerate and Lightning Fabric, as long as their state and
    groups are the very objects of the one inside.
    """
    while any(
        (base.__module__ or "").split(".")[0] in _WRAPPERS for base in type(optimizer).__mro__
    ):
        for name in _INNER:
            inner = vars(optimizer).get(name)
            if isinstance(inner, torch.optim.Optimizer) and _hands_on(optimizer, inner):
                optimizer = inner
                break
        else:
            break
    return optimizer


def _hands_on(outer: Any, inner: Any) -> bool:
    """Whether a wrapper states just what the optimizer inside states."""
    if outer.state is not inner.state or outer.param_groups is not inner.param_groups:
        return False
    stated, own = outer.state_dict(), inner.state_dict()
    return _is_same_tree(stated, own)


def _is_same_tree(one: object, other: object) -> bool:
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_is_same_tree(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_is_same_tree, one, other))
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return one is other
    return one is other or bool(one == other)


def inner_optimizers(optimizer: Any) -> dict[str, torch.optim.Optimizer]:
    """The optimizers in attributes of an optimizer whose class is not torch's own, by path.

    Found in attributes, in lists, tuples and dicts there, and inside optimizers found so, each
    once; also in attributes of other objects, and behind bound methods, where they update
    parameters of the outer one. Members of a dict whose key is no text or number go by position.
    Those that share the outer one's state are the same optimizer under another name.
    """
    if _is_torchs(optimizer):
        return {}
    seen = {id(optimizer)}
    found: dict[str, torch.optim.Optimizer] = {}
    _collect(optimizer, "", found, seen)
    updated = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for owner, prefix in [(optimizer, ""), *((o, f"{path}.") for path, o in found.items())]:
        for name, value in [] if _is_torchs(owner) else _attributes(owner):
            for path, inner in _behind(value, f"{prefix}{name}", 0, set()):
                mine = (id(p) for group in inner.param_groups for p in group["params"])
                if id(inner) not in seen and not updated.isdisjoint(mine):
                    seen.add(id(inner))
                    found[path] = inner
    return found


def _attributes(optimizer: Any) -> list[tuple[str, Any]]:
    skipped = ("state", "param_groups", "defaults")
    return [(name, value) for name, value in vars(optimizer).items() if name not in skipped]


def _collect(
    optimizer: Any, prefix: str, found: dict[str, torch.optim.Optimizer], seen: set[int]
) -> None:
    for name, value in _attributes(optimizer):
        for path, inner in _inside(value, f"{prefix}{name}", 0):
            if id(inner) in seen:
                continue
            seen.add(id(inner))
            found[path] = inner
            if not _is_torchs(inner):
                _collect(inner, f"{path}.", found, seen)


def _inside(value: object, path: str, depth: int) -> Iterator[tuple[str, Any]]:
    if isinstance(value, torch.optim.Optimizer):
        yield path, value
    elif depth < _DEPTH:
        for name, child in _members(value):
            yield from _inside(child, f"{path}.{name}", depth + 1)


def _behind(value: object, path: str, depth: int, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """Optimizers in attributes of plain objects, too; large collections are not searched."""
    if isinstance(value, torch.optim.Optimizer):
        yield path, value
    elif depth < _DEPTH and id(value) not in seen:
        seen.add(id(value))
        children = list(itertools.islice(_members(value), _MAX_MEMBERS))
        if isinstance(value, types.MethodType):
            children = [("__self__", value.__self__)]
        elif not isinstance(value, type | types.ModuleType | torch.Tensor | torch.nn.Module):
            children += [*getattr(value, "__dict__", {}).items()]
        for name, child in children:
            yield from _behind(child, f"{path}.{name}", depth + 1, seen)


def _members(value: object) -> Iterator[tuple[object, object]]:
    """What is in a dict, a list or a tuple, by name or position."""
    if isinstance(value, Mapping):
        for i, (name, child) in enumerate(value.items()):
            yield (name if isinstance(name, str | int) else i), child
    elif isinstance(value, list | tuple):
        yield from enumerate(value)


def _is_torchs(optimizer: Any) -> bool:
    return type(optimizer).__module__.startswith("torch.optim.")
