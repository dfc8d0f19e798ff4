"""Optimizers inside optimizers: containers, wrappers, and those that step a base optimizer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

_WRAPPERS = ("accelerate", "lightning", "lightning_fabric", "pytorch_lightning")
"""Packages whose optimizer wrappers hold nothing themselves and hand everything on."""
_INNER = ("optimizer", "_optimizer")
_DEPTH = 3


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
    once. Those that share the outer one's state are the same optimizer under another name.
    """
    if _is_torchs(optimizer):
        return {}
    seen = {id(optimizer)}
    found: dict[str, torch.optim.Optimizer] = {}
    _collect(optimizer, "", found, seen)
    return found


def _collect(
    optimizer: Any, prefix: str, found: dict[str, torch.optim.Optimizer], seen: set[int]
) -> None:
    for name, value in vars(optimizer).items():
        if name in ("state", "param_groups", "defaults"):
            continue
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
    elif depth < _DEPTH and isinstance(value, Mapping):
        for name, child in value.items():
            if isinstance(name, str | int):
                yield from _inside(child, f"{path}.{name}", depth + 1)
    elif depth < _DEPTH and isinstance(value, list | tuple):
        for i, child in enumerate(value):
            yield from _inside(child, f"{path}.{i}", depth + 1)


def _is_torchs(optimizer: Any) -> bool:
    return type(optimizer).__module__.startswith("torch.optim.")
