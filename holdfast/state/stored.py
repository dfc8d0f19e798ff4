"""What a checkpoint stores of a part, and templates that follow it.

Keys are the same only if type and value are: Python holds 1, True, 1.0 and np.int64(1) to be equal,
and 0.0 and -0.0; a checkpoint distinguishes them. So keys are compared by a *token*: a text key is
its own token, any other key has the bytes of its node.

An object with `state_dict` and `load_state_dict` is given everything that the checkpoint holds for
it. A DTensor or a marker in its *current* state says how the stored tensor of that path is cut
here; a plain tensor says nothing, and is loaded whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from holdfast.errors import HoldfastError, PlacementError
from holdfast.format.values import (
    Codecs,
    are_plain,
    decode_tree,
    encode_tree,
    is_per_rank,
    is_plain_dict,
    is_tensor,
    items_of,
    join_path,
    key_name,
    keys_of_tensors,
    kind_in_words,
    node_bytes,
    pairs_of,
    shorten,
    tag_of,
)
from holdfast.state.coordinates import PerRankIn
from holdfast.state.markers import (
    FlatShard,
    Marked,
    Padded,
    PerRank,
    Pieces,
    Replicated,
    Sharded,
    Stored,
    global_shape,
)
from holdfast.state.tensor_elements import local_of, torch_dtype

_NO_CODECS = Codecs()
_NESTED = (dict, list)
Token = str | bytes
Members = dict[Token, tuple[Any, Any]]
"""Token -> (key, node) of each member of a stored mapping, in order."""


class StoredTensor(NamedTuple):
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
    codecs: Codecs = _NO_CODECS
    """Of the load; known to a whole part only, as is the next one."""
    may_miss: Callable[[str], bool] = lambda _: False
    """Whether the caller allows that a path is not stored."""
    versions: Mapping[str, int] | None = None
    """Of the modules in a module's part, those other than 1; None if the save noted none."""
    kinds: Mapping[str, Sequence[str]] | None = None
    """Classes of the objects in a part, by path; None if the save noted none."""

    def find(self, path: str) -> object | None:
        """Return the node at a path of names joined by dots, from this part on; None if nothing is.

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
        """Return True if there is one; its node is None, too, if the value None is stored."""
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
        """Return True if the tree has something other than null at this path."""
        return self.at(*path) is not None

    def keys_under(self, *path: str | int) -> list[str]:
        """Return the dict keys at a path; empty if there is no dict."""
        return list(self.table(*path))

    def table(self, *path: str | int) -> Mapping[str, Any]:
        """Return the nodes by text key of the dict at a path; empty if there is no dict."""
        node = self.at(*path)
        if is_plain_dict(node):
            return node
        return {key: child for key, child in pairs_of(node) or () if isinstance(key, str)}

    def tensors_under(self, *path: str | int) -> dict[str, StoredTensor]:
        """Return the direct children of the dict at `path` that are tensors."""
        result = {}
        for name in self.keys_under(*path):
            info = self.tensor(self.at(*path, name))
            if info is not None:
                result[name] = info
        return result

    def children(self, node: object) -> list[tuple[Any, object]] | None:
        """Return the (key, node) pairs of a stored dict, in order; None for any other node."""
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
        """Return the tensor that a node stands for; None for any other node."""
        if not isinstance(node, dict) or tag_of(node) != "tensor":
            return None
        key = str(node["k"])
        dtype, shape = self.tensors[key]
        return StoredTensor(key, shape, torch_dtype(dtype))

    def value(self, *path: str | int) -> object:
        """Return the plain number, text, truth value or null at a path; None for others."""
        node = self.at(*path)
        return node if isinstance(node, int | float | str) else None

    def below(self, *path: str | int) -> StoredPart:
        """Return the view of what is at a path."""
        name = ".".join(map(str, (self.name, *path)))
        return StoredPart(self.at(*path), self.tensors, name)

    def at(self, *path: str | int) -> object:
        """Return the node at a path; None if there is none."""
        node = self.node
        for name in path:
            if is_plain_dict(node):
                node = node.get(name) if isinstance(name, str) else None
            elif isinstance(node, list):
                node = node[name] if isinstance(name, int) and name < len(node) else None
            else:  # with keys that a plain dict cannot have, such as one that starts with '$'
                pairs = pairs_of(node) or ()
                node = next((child for key, child in pairs if key == name), None)
        return node


def key_token(key: object, codecs: Codecs) -> Token | None:
    """Return what distinguishes a key from all others; None if no checkpoint can hold it."""
    if type(key) is str:
        return key
    try:
        return node_bytes(encode_tree(key, codecs=codecs))
    except PlacementError:
        return None


def members_of(node: Any, codecs: Codecs) -> Members | None:
    """Return the members of a stored mapping by token; None if it is not a mapping.

    Raises:
        MismatchError: For a key of a type that is not registered.
        CorruptionError: For a malformed node.
    """
    return _members(node, lambda raw: decode_tree(raw, codecs=codecs))


def _members(node: Any, key_of: Callable[[Any], Any]) -> Members | None:
    """Return the members of a stored mapping by token, with keys made by `key_of`."""
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
    """Return the paths of everything under a node, dict keys and list positions joined by dots."""
    known = codecs if codecs is not None else _NO_CODECS

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
    if not isinstance(node, _NESTED):
        result.append(path)
        return
    if isinstance(node, list) and node and are_plain(node):
        result += [f"{path}.{i}" for i in range(len(node))]
        return
    if is_plain_dict(node) and node:
        children = node.values()
        if are_plain(children) or (
            set(map(type, children)) == {dict} and keys_of_tensors([*children]) is not None
        ):
            result += [f"{path}.{name}" for name in node]
            return
        for name, child in node.items():  # text, which is a part of a path as it is
            if isinstance(child, _NESTED) and not is_tensor(child):
                _add_leaf_paths(child, f"{path}.{name}", result, key_of)
            else:
                result.append(f"{path}.{name}")
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
    """Return what is stored, in words, and how to request a value per coordinate."""
    hint = "; ask for it with PerRank(..., axes=...)" if is_per_rank(node) else ""
    return f"{kind_in_words(node)}{hint}"


def only_names(tree: Any, names: frozenset[str] | None) -> Any:
    """Return the entries of a stored dict with one of these names; all if `names` is None."""
    if names is None or not isinstance(tree, dict):
        return tree
    return {name: child for name, child in tree.items() if name in names}


def used_paths(node: Any, path: str, names: frozenset[str] | None, codecs: Codecs) -> list[str]:
    """Return the leaf paths of a value per coordinate, of all its entries or of some."""
    trees = {label: only_names(tree, names) for label, tree in node["v"].items()}
    return leaf_paths({**node, "v": trees}, path, codecs)


MakeTarget = Callable[[StoredTensor, object, str], object]
"""The target for a stored tensor, what is at its place now (or None), and the path."""


def follow_stored(
    stored: StoredPart, current: object, make: MakeTarget, *, path: str = "",
    is_requested: Callable[[str], bool] = lambda path: True,
) -> Any:  # fmt: skip
    """Return a template of the shape of what is stored, with `make`'s target for each tensor.

    A node that is not a dict, list or tuple is taken as it is stored.

    Args:
        current: What the owner has there; looked up along the same keys.
        is_requested: Whether the template names an entry of a dict, by path.
    """
    info = stored.tensor(stored.node)
    if info is not None:
        return make(info, current, path)
    children = _children(stored, current)
    if children is None:
        return Stored()
    is_mapping = items_of(stored.node) is None
    made: dict[Any, object] = {}
    for key, child, now in children:
        below = join_path(path, key)
        if not is_mapping or is_requested(below):
            made[key] = follow_stored(child, now, make, path=below, is_requested=is_requested)
    if is_mapping:
        return made
    if not made:
        return Stored()
    return list(made.values()) if isinstance(stored.node, list) else tuple(made.values())


def _children(stored: StoredPart, current: object) -> list[tuple[Any, StoredPart, object]] | None:
    """Return key or position, node and current value of each member of a stored container."""
    pairs = stored.children(stored.node)
    if pairs is None:
        items = None if tag_of(stored.node) == "deque" else items_of(stored.node)
        if items is None:
            return None
        pairs = list(enumerate(items))
        listed = current if isinstance(current, list | tuple) else ()
        current = dict(enumerate(listed))
    own = current if isinstance(current, Mapping) else {}
    return [
        (key, StoredPart(child, stored.tensors, f"{stored.name}.{key}"), own.get(key))
        for key, child in pairs
    ]


def zeros_placed_like(like: object, info: StoredTensor) -> torch.Tensor | None:
    """Return new memory sharded as `like` is; None if that is not a DTensor of this shape."""
    if isinstance(like, DTensor) and tuple(like.shape) == info.shape:
        return torch.zeros_like(like.detach(), dtype=info.dtype)
    return None


def zeros_like_target(target: torch.Tensor | Marked, dtype: torch.dtype) -> torch.Tensor | Marked:
    """Return new memory placed as a tensor or marker is, of a dtype."""
    if isinstance(target, Padded):
        value = zeros_like_target(target.value, dtype)
        assert not isinstance(value, Padded | Pieces)
        return Padded(value, target.shape)
    if isinstance(target, Pieces):
        zeros = [torch.zeros_like(each.detach(), dtype=dtype) for each in target.locals]
        return replace(target, locals=tuple(zeros))
    if isinstance(target, Sharded | FlatShard | Replicated):
        return replace(target, local=torch.zeros_like(target.local.detach(), dtype=dtype))
    return torch.zeros_like(target.detach(), dtype=dtype, requires_grad=False)


class PlacedTemplates:
    """Templates for one part's stored tree, placed as its current state declares.

    Args:
        in_place: Whether the object's own DTensors and marked tensors are filled, so that no second
            copy is needed; a tensor met again, or one that shares its memory, gets its own.
    """

    def __init__(self, *, in_place: bool) -> None:
        self._in_place = in_place
        self._used: set[tuple[torch.device, int]] = set()

    def template(self, current: object, stored: StoredPart) -> object:
        """Return the template of a stored node for which the object holds `current`."""
        template = self._placed(current, stored)
        return Stored() if template is None else template

    def _placed(self, current: object, stored: StoredPart) -> object | None:
        """Return the template, or None if the current state declares no placement."""
        info = stored.tensor(stored.node)
        if info is not None:
            return self._target(current, info) if isinstance(current, DTensor | Marked) else None
        if isinstance(current, PerRank):
            policies = {f.name: getattr(current, f.name) for f in fields(PerRank)}
            return PerRankIn(**policies | {"tree": Stored()}, local=current.tree)
        if not isinstance(current, Mapping | list | tuple):
            return None
        children = _children(stored, current)
        # A sequence of another length says nothing of what lies where.
        if children is None or (not isinstance(current, Mapping) and len(children) != len(current)):
            return None
        placed = {key: self._placed(now, child) for key, child, now in children}
        if all(child is None for child in placed.values()):
            return None
        whole = {key: Stored() if child is None else child for key, child in placed.items()}
        return whole if isinstance(current, Mapping) else list(whole.values())

    def _target(self, current: Any, info: StoredTensor) -> torch.Tensor | Marked | None:
        """Return a target of the stored shape: the current one if it may be filled, or new."""
        if global_shape(current) != info.shape:
            return None
        local = local_of(current if isinstance(current, torch.Tensor) else current.local)
        if self._in_place and local.dtype == info.dtype and self._is_new(local):
            return current  # type: ignore[no-any-return]
        return zeros_like_target(current, info.dtype)

    def _is_new(self, local: torch.Tensor) -> bool:
        """Return True if no earlier target has this memory."""
        if local.is_meta or local.numel() == 0:
            return True
        memory = (local.device, local.untyped_storage().data_ptr())
        is_new = memory not in self._used
        self._used.add(memory)
        return is_new
