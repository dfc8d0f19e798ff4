"""Templates that follow a stored tree where no object of the user says what the tree looks like."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from holdfast.state.markers import Stored
from holdfast.state.match.stored import StoredPart, StoredTensor

MakeTarget = Callable[[StoredTensor, object, str], object]
"""The target for a stored tensor, what stands there now (or None), and the path."""


def mirror(
    stored: StoredPart, current: object, make: MakeTarget, *, path: str = "",
    is_wanted: Callable[[str], bool] = lambda path: True,
) -> Any:  # fmt: skip
    """A template of the shape of what is stored, with `make`'s target for each tensor.

    `current`: what the owner has in the place; looked up along the same keys. Entries of dicts that
    are not wanted are left out. What is no dict, list or tuple is taken as it is stored.
    """
    node = stored.node
    info = stored.tensor(node)
    if info is not None:
        return make(info, current, path)
    if isinstance(node, Mapping) and "$" not in node:
        found = {}
        for name in node:
            below = f"{path}.{name}" if path else name
            if is_wanted(below):
                inside = current.get(name) if isinstance(current, Mapping) else None
                found[name] = mirror(
                    stored.below(name), inside, make, path=below, is_wanted=is_wanted
                )
        return found
    pairs = stored.children(node) if isinstance(node, Mapping) and node.get("$") == "dict" else None
    if pairs is not None:  # keys that are no texts: numbers of parameters
        numbered: dict[Any, Any] = {}
        for key, child in pairs:
            below = f"{path}.{key}" if path else str(key)
            if is_wanted(below):
                numbered[key] = mirror(
                    StoredPart(child, stored.tensors, f"{stored.name}.{key}"),
                    current.get(key) if isinstance(current, Mapping) else None,
                    make,
                    path=below,
                    is_wanted=is_wanted,
                )
        return numbered
    children = node if isinstance(node, list) else None
    if isinstance(node, Mapping) and node.get("$") == "tuple" and isinstance(node.get("v"), list):
        children = node["v"]
    if not children:
        return Stored()
    likes = current if isinstance(current, list | tuple) else ()
    made = [
        mirror(
            StoredPart(child, stored.tensors, f"{stored.name}.{i}"),
            likes[i] if i < len(likes) else None,
            make,
            path=f"{path}.{i}",
            is_wanted=is_wanted,
        )
        for i, child in enumerate(children)
    ]
    return made if isinstance(node, list) else tuple(made)


def placed_like(like: object, info: StoredTensor) -> torch.Tensor | None:
    """New memory for a stored tensor, sharded as `like` is; None where that is no such DTensor."""
    if isinstance(like, DTensor) and tuple(like.shape) == info.shape:
        return torch.zeros_like(like.detach(), dtype=info.dtype)
    return None


def owner_of(path: str, names: Mapping[str, object]) -> str | None:
    """The longest of the names that a dotted path contains as a whole run of its parts."""
    parts = path.split(".")
    for length in range(len(parts), 0, -1):
        for start in range(len(parts) - length + 1):
            name = ".".join(parts[start : start + length])
            if name in names:
                return name
    return None
