"""What an object holds, by a walk of its own: nothing here knows how Holdfast saves it."""

from __future__ import annotations

import enum
import math
import random
import types
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_ATOMS = (type(None), bool, int, float, complex, str, bytes, enum.Enum)
_NAMED = (type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType, torch.device)
_GENERATED = ("_patched", "_zero_grad_profile_name", "_warned_capturable_if_run_uncaptured")


def snapshot(root: object, known: Mapping[int, str] | None = None) -> dict[str, Any]:
    """Return everything that hangs on an object, by path: values, and tensors as they are now.

    Args:
        known: By `id`, what is not looked into and goes by a name: the model and its parameters.
    """
    names = dict(known or {})
    result: dict[str, Any] = {}

    def walk(value: Any, path: str, depth: int = 0) -> None:
        if id(value) in names:
            result[path] = names[id(value)]
            return
        if isinstance(value, _ATOMS):
            result[path] = value
            return
        if isinstance(value, _NAMED) or value in (torch.dtype, torch.layout):
            result[path] = getattr(value, "__qualname__", repr(value))
            return
        if not isinstance(value, tuple | frozenset | np.generic):  # nobody can change a shared one
            names[id(value)] = f"<the same as {path}>"
        keep.append(value)
        result[path] = type(value).__name__
        if isinstance(value, Tensor):
            result[path] = tensor_facts(value)
            walk(dict(vars(value)), f"{path}<attributes>", depth + 1)
        elif isinstance(value, np.ndarray | np.generic):
            result[path] = (str(value.dtype), value.shape, value.tobytes())
        elif isinstance(value, torch.Generator):
            result[path] = bytes(value.get_state().tolist())
        elif isinstance(value, random.Random):
            result[path] = value.getstate()
        elif isinstance(value, Mapping):
            for i, (key, child) in enumerate(value.items()):
                walk(child, f"{path}[{names.get(id(key)) or shown(key, i)}]", depth + 1)
        elif isinstance(value, list | tuple | deque):
            result[path] = (type(value).__name__, len(value))
            for i, child in enumerate(value):
                walk(child, f"{path}[{i}]", depth + 1)
        elif isinstance(value, set | frozenset):
            result[path] = (type(value).__name__, sorted(map(repr, value)))
        elif isinstance(value, types.MethodType):
            walk(value.__self__, f"{path}<self>", depth + 1)
        else:
            for name, child in members(value):
                walk(child, f"{path}.{name}", depth + 1)

    keep: list[object] = []  # an id stands for its object only while that lives
    walk(root, "")
    return result


def shown(key: object, number: int) -> object:
    """Return a key for a path; the `id` of an object is the number of its entry."""
    if type(key) is int and key > 1 << 32:
        return number
    return repr(key) if isinstance(key, str | int | float | tuple) else number


def members(value: object) -> Iterator[tuple[str, object]]:
    """Yield the attributes of an object, those of slots included, as far as they are its own."""
    for name, child in getattr(value, "__dict__", {}).items():
        if name not in _GENERATED:
            yield name, child
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(value, name) and name not in ("__dict__", "__weakref__"):
                yield name, getattr(value, name)


def tensor_facts(tensor: Tensor) -> tuple[Any, ...]:
    """Return dtype, shape and bytes of a tensor; of a subclass, those of the tensors inside."""
    held = tensor.detach()
    if hasattr(held, "__tensor_flatten__"):
        inner, context = held.__tensor_flatten__()
        parts = tuple((name, tensor_facts(getattr(held, name))) for name in inner)
        return (type(held).__name__, str(held.dtype), tuple(held.shape), repr(context), parts)
    if held.layout is not torch.strided:
        held = held.coalesce()
        return ("sparse", *map(tensor_facts, (held.indices(), held.values())))
    if held.is_meta:
        return ("meta", str(held.dtype), tuple(held.shape))
    plain = torch.empty(held.numel(), dtype=held.dtype)  # one element may have any stride
    plain.copy_(held.reshape(-1))
    return (str(held.dtype), tuple(held.shape), plain.view(torch.uint8).numpy().tobytes())


def unlike(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return the paths at which two snapshots differ."""
    missing = object()
    paths = one.keys() | other.keys()
    return sorted(p for p in paths if not same(one.get(p, missing), other.get(p, missing)))


def same(one: object, other: object) -> bool:
    """Return True if two facts are equal, in type too; NaN is itself."""
    if isinstance(one, float) and isinstance(other, float) and math.isnan(one):
        return math.isnan(other)
    return type(one) is type(other) and one == other


def module_facts(module: nn.Module) -> dict[str, Any]:
    """Return every tensor of a module, all buffers included, and what is tied to what."""
    facts: dict[str, Any] = {}
    first: dict[int, str] = {}
    for prefix, inner in module.named_modules(remove_duplicate=False):
        for table in (inner._parameters, inner._buffers):
            for name, tensor in table.items():
                path = f"{prefix}.{name}"
                if tensor is not None:
                    owner = first.setdefault(id(tensor), path)
                    facts[path] = tensor_facts(tensor) if owner == path else owner
    return facts
