"""Both sides of a match: the nodes that a checkpoint stores, and what a rank's templates are.

Keys are the same only if type and value are: Python holds 1, True, 1.0 and np.int64(1) to be equal,
and 0.0 and -0.0; a checkpoint distinguishes them. So the matcher compares keys by a *token*: a text
key is its own, any other one has the bytes of its node.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from holdfast._torch import local_tensor, spec_of
from holdfast.arrays.boxes import Box
from holdfast.errors import HoldfastError, PlacementError
from holdfast.format.values import (
    Codecs,
    decode_tree,
    encode_tree,
    is_per_rank,
    is_plain_dict,
    is_tensor,
    items_of,
    key_name,
    kind_in_words,
    node_bytes,
    pairs_of,
    shorten,
    tag_of,
)
from holdfast.parallel.layout import Layout
from holdfast.state.markers import Marked, Padded, PerRank, Stored, Transient, Union
from holdfast.state.match.result import TensorRequest
from holdfast.state.placement import ReplicaSets, clip_leaf, padding_views, tensor_leaf
from holdfast.state.torch_dtypes import TORCH_TO_NAME, torch_dtype

Token = str | bytes
Members = dict[Token, tuple[Any, Any]]
"""Token -> (key, node) of each member of a stored mapping, in order."""

PLAIN_VALUES = frozenset({type(None), bool, int, float, str, bytes})
"""Types of values that have a form of their own, so that no codec is asked for them."""

PLAIN = (torch.Tensor, torch.nn.Parameter)
LocalTarget = tuple[str, tuple[int, ...], tuple[Box, ...] | None, tuple[torch.Tensor, ...]]
"""Dtype name, global shape, boxes (None: the whole), and what is filled."""


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
        children = self.children(self.node)
        if children is None:
            children = list(enumerate(self.node)) if isinstance(self.node, list) else []
        named = {str(name): child for name, child in children}
        if path in named:
            return named[path]
        cut = len(path) + 1
        flat = {name[cut:]: child for name, child in named.items() if name.startswith(f"{path}.")}
        if flat:
            return flat
        # The longest name first: names may have dots in them.
        for name in sorted(named, key=len, reverse=True):
            if path.startswith(f"{name}."):
                below = StoredPart(named[name], self.tensors).find(path[len(name) + 1 :])
                if below is not None:
                    return below
        return None

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
        return is_plain_dict(node) and name in node

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
        return list(node) if is_plain_dict(node) else []

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
        pairs = pairs_of(node)
        if pairs is None or is_plain_dict(node):
            return pairs
        if tag_of(node) not in ("dict", "odict"):
            return None
        try:
            return [(decode_tree(name), child) for name, child in pairs]
        except HoldfastError:
            return None  # keys of the user's own types are for the matcher, which has the codecs

    def tensor(self, node: object) -> StoredTensor | None:
        """The tensor that a node stands for; None for any other node."""
        if not isinstance(node, dict) or tag_of(node) != "tensor":
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
            if not is_item and not (is_plain_dict(node) and name in node):
                return None
            node = node[name]  # type: ignore[index]
        return node


def key_token(key: object, codecs: Codecs) -> Token | None:
    """What distinguishes a key from all others; None for one that no checkpoint can hold."""
    if type(key) is str:
        return key
    try:
        return node_bytes(encode_tree(key, codecs=codecs))
    except PlacementError:
        return None


def members_of(node: Any, codecs: Codecs) -> Members | None:
    """The members of a stored dict, OrderedDict, Counter or defaultdict; None for no mapping.

    Raises:
        MismatchError: For a key of a type that is not registered.
        CorruptionError: For a malformed node.
    """
    return _members(node, lambda raw: decode_tree(raw, codecs=codecs))


def _members(node: Any, key_of: Callable[[Any], Any]) -> Members | None:
    """Name -> (key, child) of a stored mapping; None for anything else."""
    if is_plain_dict(node):
        return {key: (key, child) for key, child in node.items()}
    pairs = pairs_of(node)
    if pairs is None:
        return None
    result: Members = {}
    for raw, child in pairs:
        key = raw if type(raw) is str else key_of(raw)
        result[key if type(key) is str else node_bytes(raw)] = (key, child)
    return result


def leaf_paths(node: Any, path: str, codecs: Codecs | None = None) -> list[str]:
    """The paths of everything under a node, dict keys and list positions joined by dots."""
    known = codecs if codecs is not None else Codecs()

    def key_of(raw: Any) -> Any:
        try:
            return decode_tree(raw, codecs=known)
        except HoldfastError:
            return shorten(node_bytes(raw).decode())

    result: list[str] = []
    _add_leaf_paths(node, path, result, key_of)
    return result


def _add_leaf_paths(node: Any, path: str, result: list[str], key_of: Callable[[Any], Any]) -> None:
    """Append the paths of all leaves below a node."""
    if not isinstance(node, dict | list):
        result.append(path)
        return
    if is_per_rank(node):
        for label, child in node["v"].items():
            _add_leaf_paths(child, f"{path}[{label}]", result, key_of)
        return
    named = _members(node, key_of)
    if named is None:
        inner = [(str(i), child) for i, child in enumerate(items_of(node) or ())]
    else:
        inner = [(key_name(key), child) for key, child in named.values()]
    if not inner:
        result.append(path)
    for name, child in inner:
        if is_tensor(child):
            result.append(f"{path}.{name}")
        else:
            _add_leaf_paths(child, f"{path}.{name}", result, key_of)


def stored_kind(node: Any) -> str:
    """What is stored, and how to ask for it where it is a value per coordinate."""
    hint = "; ask for it with PerRank(..., axes=...)" if is_per_rank(node) else ""
    return f"{kind_in_words(node)}{hint}"


def only_names(tree: Any, names: frozenset[str] | None) -> Any:
    """The entries of a stored dict that have one of these names; the whole where None."""
    if names is None or not isinstance(tree, dict):
        return tree
    return {name: child for name, child in tree.items() if name in names}


def used_paths(node: Any, path: str, names: frozenset[str] | None, codecs: Codecs) -> list[str]:
    """The leaf paths of a value per coordinate: of all its entries, or of those with a name."""
    trees = {label: only_names(tree, names) for label, tree in node["v"].items()}
    return leaf_paths({**node, "v": trees}, path, codecs)


class LocalTargets:
    """The targets of one load on this rank."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._replica_sets: ReplicaSets = {}
        self._boxes: dict[tuple[object, ...], tuple[Box, ...]] = {}
        self._paddings: dict[int, tuple[torch.Tensor, ...]] = {}
        self.cleared: list[TensorRequest] = []
        """The padding that is set to zero in the end."""

    def clear_padding(self, template: Marked) -> None:
        """Set the padding of a target to zero, if it has any."""
        for view in self._paddings.get(id(template), ()):
            view.zero_()

    def local_target(
        self, template: torch.Tensor | Marked, path: str, layout: Layout
    ) -> LocalTarget:
        """What this rank holds of a tensor; equal to its leaf, which costs several times as much.

        Plain tensors are whole. A DTensor with the mesh, placements and shape of one met before
        has the boxes of that one.
        """
        if isinstance(template, torch.Tensor) and _is_readable(template):
            dtype = TORCH_TO_NAME.get(template.dtype)
            if dtype is not None:
                return dtype, template.shape, None, (template,)
        like: tuple[object, ...] | None = None
        if type(template) is DTensor:
            # The attributes themselves: the properties of a DTensor cost several times as much.
            local, spec = local_tensor(template), spec_of(template)
            shape = template.shape if spec.tensor_meta is None else spec.tensor_meta.shape
            like = (id(spec.mesh), spec.placements, shape, local.shape)
            boxes = self._boxes.get(like)
            dtype = TORCH_TO_NAME.get(local.dtype)
            if boxes is not None and dtype is not None and _is_readable(local):
                return dtype, shape, boxes, (local,)
        leaf = tensor_leaf(
            template.value if isinstance(template, Padded) else template,
            key=path,
            layout=layout,
            rank=self._rank,
            replica_sets=self._replica_sets,
        )
        if isinstance(template, Padded):
            if id(template) not in self._paddings:
                views = self._paddings[id(template)] = padding_views(leaf, template.shape)
                self.cleared.append(TensorRequest(f"the padding of {path}", -1, None, views))
            leaf = clip_leaf(leaf, template.shape)
        if like is not None and len(leaf.boxes) == 1 and leaf.boxes[0].shape == like[3]:
            self._boxes[like] = leaf.boxes
        return leaf.dtype, leaf.shape, leaf.boxes, leaf.locals


def _is_readable(tensor: torch.Tensor) -> bool:
    """Whether `tensor_leaf` takes a plain tensor."""
    # Of a plain type it is neither lazy nor a subclass: what is left of `unreadable`.
    if type(tensor) not in PLAIN:
        return False
    is_dense = tensor.layout is torch.strided and not tensor.is_nested
    return is_dense and not (tensor.is_quantized or tensor.is_meta)


def shape_mismatch(
    template: torch.Tensor | Marked, path: str, held: tuple[int, ...], stored: tuple[int, ...]
) -> str:
    """In words: the state and the checkpoint differ in shape, and whether padding may be why."""
    message = f"{path}: the state's shape is {list(held)}, the checkpoint's {list(stored)}"
    if isinstance(template, Padded):
        return (
            f"{message}; the state's is declared as the real one of {list(template.padded_shape)}"
        )
    if len(held) == len(stored):
        message += (
            "; if they differ by padding alone, declare the real shape where it is saved and where "
            "it is loaded: declare_padding(module, name, shape), Padded(value, shape)"
        )
    return message


class RegisteredTypes:
    """The dataclasses and codecs that a load knows, for as long as it takes."""

    def __init__(self, codecs: Codecs) -> None:
        self._codecs = codecs
        self._encoded: dict[int, tuple[object, object]] = {}

    def fields_of(self, template: object) -> object:
        """What a registered dataclass or a codec's type is made of; None for any other object.

        A codec is asked once for each object: what it gives then is what is filled.
        """
        cls = type(template)
        if cls in PLAIN_VALUES or cls in (list, dict, tuple):
            return None
        codec = self._codecs.codec_for(cls)
        if codec is not None:
            held = self._encoded.get(id(template))
            if held is None:  # the object is kept, so that its id stays its own
                held = self._encoded[id(template)] = (template, codec.encode(template))
            return held[1]
        if is_dataclass(cls) and self._codecs.dataclass_named(cls.__qualname__) is cls:
            names = [each.name for each in fields(cls) if hasattr(template, each.name)]
            return {name: getattr(template, name) for name in names}
        return None

    def tag_and_name(self, template: object) -> tuple[str, str]:
        """How an object that has fields is stored: tag and registered name."""
        codec = self._codecs.codec_for(type(template))
        return (
            ("dataclass", type(template).__qualname__) if codec is None else ("codec", codec.name)
        )

    def holds_tensors(self, tree: object) -> bool:
        """Whether a load fills something in a tree in place, or leaves it as it is."""
        if isinstance(tree, torch.Tensor | Marked | PerRank | Stored | Transient | np.ndarray):
            return True
        if isinstance(tree, Union):
            return self.holds_tensors(tree.mapping)
        inner = self.fields_of(tree)
        if inner is not None:
            return self.holds_tensors(inner)
        if isinstance(tree, Mapping):
            return any(self.holds_tensors(child) for child in tree.values())
        if isinstance(tree, list | tuple | deque):
            return any(self.holds_tensors(child) for child in tree)
        return False


def unmarked(template: object) -> object:
    """What stays of a template for which nothing is stored: the tensors as they are."""
    if isinstance(template, Marked):
        return template.local
    if isinstance(template, Union):
        return unmarked(template.mapping)
    if type(template) is dict:
        return {name: unmarked(child) for name, child in template.items()}
    return template
