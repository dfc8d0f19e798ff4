"""What a checkpoint holds under one part, as adapters may ask for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from holdfast.errors import HoldfastError
from holdfast.format.values import decode_tree
from holdfast.state.torch_dtypes import torch_dtype


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Shape (global) and dtype of a stored tensor."""

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class StoredPart:
    """Read-only view of one part's tree in a checkpoint.

    A path leads through keys of dicts and positions in lists.
    """

    node: object
    """The encoded tree."""
    tensors: Mapping[str, tuple[str, tuple[int, ...]]]
    """Key -> (dtype name, shape) of the whole checkpoint."""
    name: str = ""
    """The part's, for messages."""

    def find(self, path: str) -> object | None:
        """The node at a path of names joined by dots, from this part on; None where nothing is.

        A module's part is one flat dict: below `encoder` are its entries `encoder.…`, by the rest
        of their names.
        """
        return _below(self, self.node, path)

    def part_or_below(self, path: str) -> object | None:
        """Of a checkpoint's parts by name: the part of this very name, or what is below one."""
        parts = self.node if isinstance(self.node, Mapping) else {}
        result: object = parts[path] if path in parts else self.find(path)
        return result

    def has_part_or_below(self, path: str) -> bool:
        """Whether there is one; its node is None as well where the value None is stored."""
        parts = self.node if isinstance(self.node, Mapping) else {}
        if path in parts or self.find(path) is not None:
            return True
        above, _, name = path.rpartition(".")
        node = self.find(above) if above else None
        return isinstance(node, Mapping) and "$" not in node and name in node

    def name_in(self, path: str) -> str:
        """Of a checkpoint's parts by name: the one in which `part_or_below` finds a path."""
        parts = self.node if isinstance(self.node, Mapping) else {}
        fitting = [name for name in parts if path == name or path.startswith(f"{name}.")]
        return max(fitting, key=len, default=path)

    def has(self, *path: str | int) -> bool:
        """Whether the tree has something other than null at this path."""
        return self.at(*path) is not None

    def keys_under(self, *path: str | int) -> list[str]:
        """The dict keys at a path; empty where there is no dict."""
        node = self.at(*path)
        if not isinstance(node, Mapping) or "$" in node:
            return []
        return list(node)

    def tensors_under(self, *path: str | int) -> dict[str, StoredTensor]:
        """The direct children of the dict at `path` that are tensors."""
        result = {}
        node = self.at(*path)
        for name in self.keys_under(*path):
            info = self.tensor(node[name]) if isinstance(node, Mapping) else None
            if info is not None:
                result[name] = info
        return result

    def children(self, node: object) -> list[tuple[Any, object]] | None:
        """The (key, node) pairs of a stored dict, in order; None for what is none."""
        if not isinstance(node, Mapping):
            return None
        tag = node.get("$")
        if tag is None:
            return list(node.items())
        if tag not in ("dict", "odict"):
            return None
        try:
            return [(decode_tree(name), child) for name, child in node["v"]]
        except HoldfastError:
            return None  # keys of the user's own types are for the matcher, which has the codecs

    def tensor(self, node: object) -> StoredTensor | None:
        """The tensor that a node stands for; None for any other node."""
        if not isinstance(node, Mapping) or node.get("$") != "tensor":
            return None
        key = str(node["k"])
        dtype, shape = self.tensors[key]
        return StoredTensor(key=key, shape=tuple(shape), dtype=torch_dtype(dtype))

    def value(self, *path: str | int) -> object:
        """The plain number, text, truth value or null at a path; None for others."""
        node = self.at(*path)
        return node if isinstance(node, int | float | str) else None

    def below(self, *path: str | int) -> StoredPart:
        """The view of what is at a path."""
        name = ".".join(map(str, (self.name, *path)))
        return StoredPart(self.at(*path), self.tensors, name)

    def at(self, *path: str | int) -> object:
        """The node at a path; None where there is none."""
        node = self.node
        for name in path:
            is_item = isinstance(node, list) and isinstance(name, int) and name < len(node)
            if not is_item and not (isinstance(node, Mapping) and "$" not in node and name in node):
                return None
            node = node[name]  # type: ignore[index]
        return node


def _below(part: StoredPart, node: object, path: str) -> object | None:
    children = part.children(node)
    if children is None:
        if not isinstance(node, list):
            return None
        children = [(str(i), child) for i, child in enumerate(node)]
    named = {str(name): child for name, child in children}
    if path in named:
        return named[path]
    flat = {name[len(path) + 1 :]: c for name, c in named.items() if name.startswith(f"{path}.")}
    if flat:
        return flat
    # The longest name first: names may have dots in them.
    for name in sorted(named, key=len, reverse=True):
        if path.startswith(f"{name}."):
            result = _below(part, named[name], path[len(name) + 1 :])
            if result is not None:
                return result
    return None
