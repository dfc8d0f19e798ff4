"""From stored nodes to the Python values that a pickle can hold, with a note of all that cannot.

Nothing is lost silently. A value that another program could not read (an enum, a dataclass, what a
codec made) is written in its plain form, and one that has no single value (one per rank, one that
is not stored) is left out of the mapping that it is in; each has a note.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from holdfast.errors import CorruptionError, MismatchError
from holdfast.format.values import (
    MAPPINGS,
    METADATA,
    METADATA_MEMBER,
    SEQUENCES,
    SETS,
    attributes_of,
    decode_tree,
    is_per_rank,
    is_plain_dict,
    is_tensor,
    items_of,
    join_path,
    key_name,
    mapping_of,
    members,
    pairs_of,
    sequence_of,
    tag_of,
    wrapped,
)

_MAX_SAFE_INT_BITS = 8 * 254


@dataclass(slots=True)
class TensorRef:
    """A tensor of the catalog, by its key."""

    key: str


@dataclass(slots=True)
class PlainValues:
    """Converts nodes, and keeps what is to be stated of them.

    `notes` says what is left out or written in another form, one sentence each; `unsafe` names what
    PyTorch's restricted loader (`weights_only=True`) refuses.
    """

    notes: list[str] = field(default_factory=list)
    unsafe: list[str] = field(default_factory=list)

    def parts(self, parts: dict[str, Any]) -> dict[str, Any]:
        """Return the value of each part, but for those that are left out."""
        return dict(self._kept(list(parts.items()), ""))

    def value(self, node: Any, path: str) -> Any:
        """Return the value of a node, with `TensorRef` in the place of tensors.

        Raises:
            CorruptionError: A node is malformed.
        """
        tag = tag_of(node)
        if is_plain_dict(node):
            return dict(self._kept(list(node.items()), path))
        if isinstance(node, list):
            return self._items(node, path)
        if is_tensor(node):
            return self._tensor(node, path)
        if is_per_rank(node) or tag == "transient":
            raise _LeftOutError(path, "a value per rank" if is_per_rank(node) else "not stored")
        if tag in MAPPINGS:
            return self._mapping(node, path)
        if tag in SEQUENCES:
            return self._sequence(node, path)
        if tag == "dataclass":
            name = attributes_of(node).get("n")
            self.notes.append(f"{path} is a dataclass {name!r}: it is written as a dict")
            return dict(self._kept(members(node), path))
        if wrapped(node) is not node:
            name = attributes_of(node).get("n")
            self.notes.append(f"{path} is written in the plain form that the codec {name!r} made")
            return self.value(wrapped(node), path)
        return self._scalar(node, path)

    def _kept(self, pairs: Sequence[tuple[Any, Any]], path: str) -> list[tuple[Any, Any]]:
        """Return the members of a mapping that can be written."""
        kept = []
        for key, node in pairs:
            if tag_of(node) == "tensor":  # nearly all, at every save: nothing is to be noted
                kept.append((key, TensorRef(node["k"])))
                continue
            below = join_path(path, key_name(key))
            try:
                kept.append((key, self.value(node, below)))
            except _LeftOutError as reason:
                inside = "it" if reason.path == below else reason.path
                self.notes.append(f"{below} is left out: {inside} is {reason.why}")
        return kept

    def _items(self, nodes: Sequence[Any], path: str) -> list[Any]:
        return [self.value(node, join_path(path, i)) for i, node in enumerate(nodes)]

    def _tensor(self, node: Any, path: str) -> TensorRef:
        if tag_of(node) == "array":
            code = attributes_of(node).get("d")
            shown = f" of {code}" if code else ""
            self.notes.append(f"{path} is a NumPy array{shown}: it is written as a tensor")
        return TensorRef(attributes_of(node)["k"])

    def _mapping(self, node: Any, path: str) -> Any:
        pairs = [
            (self._key(key, path), member) for key, member in _well_formed(pairs_of(node), path)
        ]
        made = mapping_of(node, dict(self._kept(pairs, path)))
        noted = node.get(METADATA_MEMBER)
        if noted is not None:
            setattr(made, METADATA, self.value(noted, join_path(path, METADATA)))
        if type(made) is defaultdict:
            self.unsafe.append(f"{path} is a defaultdict")
        return made

    def _key(self, node: Any, path: str) -> Any:
        key = self._scalar(node, path)
        if isinstance(key, np.generic):
            self.unsafe.append(f"{path} has a key of NumPy")
        return key

    def _sequence(self, node: Any, path: str) -> Any:
        made = sequence_of(node, self._items(_well_formed(items_of(node), path), path))
        if type(made) is deque:
            self.unsafe.append(f"{path} is a deque")
        return made

    def _scalar(self, node: Any, path: str) -> Any:
        """Return a value that contains no tensors."""
        if tag_of(node) == "enum":
            return self._enum(node, path)
        try:
            value = decode_tree(node, path=path)
        except MismatchError:
            # A member of a set, or a key: an enum or a value of a codec.
            raise _LeftOutError(path, "a value of a registered type in a set or a key") from None
        if isinstance(value, frozenset | range | slice | np.generic):
            self.unsafe.append(f"{path} is a {type(value).__name__}")
        elif tag_of(node) in SETS and any(type(each) not in _SAFE_MEMBERS for each in value):  # type: ignore[attr-defined]
            self.unsafe.append(f"{path} is a set of other values than plain ones")
        elif type(value) is int and value.bit_length() > _MAX_SAFE_INT_BITS:
            self.unsafe.append(f"{path} is a number of {value.bit_length()} bits")
        return value

    def _enum(self, node: Any, path: str) -> Any:
        attributes = attributes_of(node)
        self.notes.append(f"{path} is a member of the enum {attributes.get('n')!r}, by its name")
        return self.value(attributes["i"], path) if "i" in attributes else str(node.get("v"))


_SAFE_MEMBERS = (bool, int, float, str, bytes, complex, type(None), tuple)


class _LeftOutError(Exception):
    """A value that cannot be written; the member of a mapping that has it is left out."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(path, why)
        self.path = path
        self.why = why


def _well_formed(items: list[Any] | None, path: str) -> list[Any]:
    if items is None:
        raise CorruptionError(f"{path}: the checkpoint has a malformed value")
    return items
