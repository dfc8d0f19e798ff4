"""The tensors and values of a part of a state, by name, and back as nodes."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from holdfast.errors import CorruptionError, MismatchError
from holdfast.foreign.catalog import Catalog, Chunk
from holdfast.foreign.tensor_expressions import Expression, SourceTensor
from holdfast.format.values import (
    is_plain_dict,
    is_tensor,
    tensor_keys,
    tensor_node,
)


@dataclass(frozen=True, slots=True)
class Held:
    """A node that is moved as it is: a value, or a container with tensors of its own."""

    node: Any


Item = Expression | Held
"""What a name stands for."""


class TreeTensors:
    """The tensors of a catalog as expressions: one for each key, however many nodes name it."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._sources: dict[str, SourceTensor] = {}
        self._nodes: dict[int, Any] = {}

    def item(self, node: Any) -> Item:
        """Return the expression of a tensor's node, or the node itself, held.

        Raises:
            CorruptionError: The catalog does not have the tensor.
        """
        if not is_tensor(node):
            return Held(node)
        key = node["k"]
        if key not in self._sources:
            tensor = self._catalog.tensors.get(key)
            if tensor is None:
                raise CorruptionError(f"{self._catalog.label}: there is no tensor {key!r}")
            self._sources[key] = source = SourceTensor(tensor)
            self._nodes[id(source)] = node
        return self._sources[key]

    def is_taken(self, key: str) -> bool:
        """Return True if an expression was made of the tensor."""
        return key in self._sources

    def keys_of(self, keys: Collection[str]) -> dict[int, str]:
        """Return the keys of those of these tensors of which expressions were made, by their id."""
        return {id(source): key for key, source in self._sources.items() if key in keys}

    def node(self, expression: Expression, key: str) -> Any:
        """Return a node for the tensor; an array that was only renamed keeps its NumPy type."""
        return {**self._nodes.get(id(expression), tensor_node(key)), "k": key}

    def chunks(self, expression: Expression) -> tuple[Chunk, ...] | None:
        """Return the chunks of a tensor that was only renamed, with all copies."""
        return expression.tensor.chunks if isinstance(expression, SourceTensor) else None


def leaves_of(part: dict[str, Any], tensors: TreeTensors) -> dict[str, Item]:
    """Return what a part has by name: its tensors, and values next to them.

    Dicts and lists that contain tensors are descended into; their names are joined with dots.

    Raises:
        MismatchError: Two have one name.
    """
    items: dict[str, Item] = {}
    paths: dict[str, tuple[str | int, ...]] = {}
    for path, node in _leaves(part, ()):
        name = ".".join(map(str, path))
        if name in items:
            raise MismatchError(
                f"two values of the part have the name {name!r}: {paths[name]} and {path}"
            )
        items[name], paths[name] = tensors.item(node), path
    return items


def _leaves(node: Any, path: tuple[str | int, ...]) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    inner = node.items() if is_plain_dict(node) else enumerate(node) if type(node) is list else None
    if inner is None or (path and next(tensor_keys(node), None) is None):
        yield path, node
        return
    for name, member in inner:
        yield from _leaves(member, (*path, name))
