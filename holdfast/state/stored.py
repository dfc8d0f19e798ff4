"""What a checkpoint holds under one part, as adapters may ask for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

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

    `node`: the encoded tree. `tensors`: key -> (dtype name, shape) of the whole checkpoint.
    """

    node: object
    tensors: Mapping[str, tuple[str, tuple[int, ...]]]

    def has(self, *path: str) -> bool:
        """Whether the tree has something at this path of dict keys."""
        return self._at(path) is not None

    def keys_under(self, *path: str) -> list[str]:
        """The dict keys at a path; empty where there is no dict."""
        node = self._at(path)
        if not isinstance(node, Mapping) or "$" in node:
            return []
        return list(node)

    def tensors_under(self, *path: str) -> dict[str, StoredTensor]:
        """The direct children of the dict at `path` that are tensors."""
        found = {}
        node = self._at(path)
        for name in self.keys_under(*path):
            child = node[name] if isinstance(node, Mapping) else None
            if isinstance(child, Mapping) and child.get("$") == "tensor":
                key = str(child["k"])
                dtype, shape = self.tensors[key]
                found[name] = StoredTensor(key=key, shape=shape, dtype=torch_dtype(dtype))
        return found

    def value(self, *path: str) -> object:
        """The plain number, text, truth value or null at a path of dict keys; None for others."""
        node = self._at(path)
        return node if isinstance(node, int | float | str) else None

    def _at(self, path: tuple[str, ...]) -> object:
        node = self.node
        for name in path:
            if not isinstance(node, Mapping) or "$" in node or name not in node:
                return None
            node = node[name]
        return node
