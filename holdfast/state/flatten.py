"""Flattening a state: parts -> tensors by key, and a tree of values that refers to them."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, get_args

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from holdfast.errors import HoldfastError, PlacementError
from holdfast.format.values import UNION, Codecs, Node, encode_tree, is_unicode
from holdfast.parallel.layout import Layout
from holdfast.state.leaves import FlatState, TensorLeaf
from holdfast.state.markers import (
    FlatShard,
    Marked,
    OnLayout,
    Padded,
    PerRank,
    Replicated,
    Sharded,
    Stored,
    Transient,
    Union,
    coordinate_label,
)
from holdfast.state.module.part import ModulePart
from holdfast.state.numpy_arrays import array_tensor
from holdfast.state.optimizer.part import OptimizerState
from holdfast.state.parts import Part, check_part_name, is_last, part_of
from holdfast.state.placement import ReplicaSets, tensor_leaf

_TENSORS = (torch.Tensor, *get_args(Marked))
_CACHED_KEYS = (str, int)
"""Types of which two equal keys are the same one; not so 0.0 and -0.0, (1,) and (True,)."""
_MAX_MARKERS = 50
"""How deep PerRank and Union may be nested, to see a cycle through them."""


class _CachedLeaf(NamedTuple):
    """A tensor or marker, everything of it that may change (`_made_from`), and the leaf of that."""

    obj: object
    made_from: object
    leaf: TensorLeaf


@dataclass(frozen=True, slots=True, kw_only=True)
class _CachedDict:
    """A dict of nothing but tensors as it was met: what is in it, and what it was made into."""

    keys: list[object]
    key_types: list[type]
    values: list[object]
    made_from: list[object]
    """Of each of `values`."""
    layout: Layout
    leaves: dict[str, _CachedLeaf]
    """What it added to a pass, by key."""
    keys_of: dict[object, str]
    """What it added to the pass's `_keys_of`."""
    node: Node


class LeafCache:
    """Leaves of the last state that was flattened, so that unchanged tensors cost almost nothing.

    A leaf is used again only for the same tensor object with the same memory, shape, strides,
    dtype, and for a DTensor the same mesh and placements: all that a leaf is made from. Dicts of
    tensors alone are compared and used again as a whole.
    """

    def __init__(self) -> None:
        self.leaves: dict[str, _CachedLeaf] = {}
        self.dicts: dict[str, _CachedDict] = {}


def flatten_state(
    state: Mapping[str, object],
    *,
    layout: Layout,
    rank: int,
    codecs: Codecs,
    cache: LeafCache | None = None,
) -> FlatState:
    """Flatten a state on one rank.

    Keys are full paths, part name first, joined by dots. A tensor met again is stored once, under
    the key it was met by first: the same object, or another one of the same memory, shape, strides
    and dtype (`.data` ties, fresh views). Modules and the named parts of optimizers are unions:
    ranks may hold different members of them. Random streams come last, so that they hold what other
    parts draw meanwhile.

    Args:
        cache: Of an earlier call with the same layout and rank; brought up to date.

    Raises:
        PlacementError: Naming the path, for a value that cannot be stored, two entries with one
            key, or a bad placement.
        ConfigError: For a bad part name.

    Cost: no collectives, no tensor bytes copied.
    """
    flattener = _Flattener(layout=layout, rank=rank, codecs=codecs, before=cache or LeafCache())
    nodes: dict[str, object] = {}
    # The sort is stable: parts keep the user's order, but for random streams at the end.
    for name, value in sorted(state.items(), key=lambda item: is_last(item[1])):
        check_part_name(name)
        home = value.own_layout if isinstance(value, OnLayout) else layout
        if rank not in home.ranks:
            raise PlacementError(
                f"state part '{name}': rank {rank} is not in {home}; ranks outside of a part's "
                f"layout leave it out of their state"
            )
        try:
            part = part_of(name, value.value if isinstance(value, OnLayout) else value)
            tree = _declared(part, part.tree())
        except HoldfastError as error:
            raise type(error)(f"state part '{name}': {error}") from error
        except Exception as error:
            error.add_note(f"state part '{name}'")
            raise
        flattener.layout = home
        nodes[name] = flattener.encode(tree, path=name)
    if cache is not None:
        cache.leaves, cache.dicts = flattener.made.leaves, flattener.made.dicts
    leaves = {key: cached.leaf for key, cached in flattener.made.leaves.items()}
    return FlatState(leaves=leaves, nodes={name: nodes[name] for name in state})


def _declared(part: Part, tree: object) -> object:
    """The tree of a module or an optimizer, its parts by parameter name declared as unions.

    Ranks of other pipeline stages hold other parameters; what several hold must still be equal.
    """
    if isinstance(part, ModulePart) and isinstance(tree, Mapping):
        return Union(tree)
    if isinstance(part, OptimizerState) and isinstance(tree, Mapping):
        return _optimizer_union(tree)
    return tree


def _optimizer_union(tree: Mapping[str, object]) -> Union:
    """The tree of an optimizer, and of those inside of it, whose stages hold other parameters."""
    declared: dict[str, object] = {}
    for key, value in tree.items():
        if key == "inner" and isinstance(value, Mapping):
            value = {path: _optimizer_union(inner) for path, inner in value.items()}
        declared[key] = Union(value) if type(value) is dict else value
    return Union(declared)


class _Flattener:
    """One pass over a state; lives as long as the pass."""

    def __init__(self, *, layout: Layout, rank: int, codecs: Codecs, before: LeafCache) -> None:
        self.layout = layout
        """Of the part that is being flattened."""
        self.made = LeafCache()
        """The leaves of this pass, for the next one."""
        self._before = before
        self._replica_sets: ReplicaSets = {}
        self._rank = rank
        self._codecs = codecs
        # Keys of the tensors met so far, by `id` of the object and by `_identity`. The ids stay
        # valid during the pass: each object is kept by its cached leaf.
        self._keys_of: dict[object, str] = {}
        self._num_markers = 0

    def encode(self, tree: object, *, path: str) -> Node:
        return encode_tree(tree, path=path, codecs=self._codecs, on_leaf=self._on_leaf)

    def _on_leaf(self, path: str, obj: object) -> Node | None:
        if isinstance(obj, _TENSORS):
            return {"$": "tensor", "k": self._add_tensor(path, obj)}
        if type(obj) is dict:
            return self._dict_node(path, obj)
        if isinstance(obj, np.ndarray) and self._codecs.codec_for(type(obj)) is None:
            return self._array_node(path, obj)
        if isinstance(obj, PerRank):
            axes = tuple(obj.axes)
            label = coordinate_label(self.layout, self._rank, axes, path=path)
            inner = self._encode_marked(obj.tree, path=f"{path}[{label}]")
            named: list[Node] = [*sorted(axes)]
            return {"$": "per_rank", "axes": named, "v": {label: inner}}
        if isinstance(obj, Union):
            inner = self._encode_marked(obj.mapping, path=path)
            if not isinstance(inner, dict) or inner.get("$") in ("codec", "dataclass"):
                raise PlacementError(
                    f"{path}: Union takes a dict, OrderedDict, Counter or defaultdict, not a "
                    f"{type(obj.mapping).__name__}"
                )
            return {"$": UNION, "v": inner}
        if isinstance(obj, Transient):
            return {"$": "transient"}
        if isinstance(obj, Stored):
            raise PlacementError(f"{path}: Stored() asks a load for what is there; nothing to save")
        if isinstance(obj, nn.Module | OptimizerState | torch.optim.Optimizer):
            raise PlacementError(
                f"{path}: a {type(obj).__name__} inside of a tree is not flattened; make it a "
                f"part of its own, as in {{'{path.rpartition('.')[2]}': ...}}, or several modules "
                f"one part by nn.ModuleDict or nn.ModuleList"
            )
        return None

    def _encode_marked(self, tree: object, *, path: str) -> Node:
        """What is inside of a marker, for which the walk starts again."""
        if self._num_markers >= _MAX_MARKERS:
            raise PlacementError(
                f"{path[:80]}…: more than {_MAX_MARKERS} PerRank and Union inside each other; a "
                f"tree that contains itself cannot be stored"
            )
        self._num_markers += 1
        node = self.encode(tree, path=path)
        self._num_markers -= 1
        return node

    def _array_node(self, path: str, array: np.ndarray) -> Node:
        """A NumPy array: its elements as a tensor; its dtype where the tensor's does not say it."""
        tensor, dtype = array_tensor(path, array)
        node: dict[str, Node] = {"$": "array", "k": self._add_tensor(path, tensor)}
        return node if dtype is None else {**node, "d": dtype}

    def _dict_node(self, path: str, obj: dict[object, object]) -> Node | None:
        """The node of a dict of nothing but tensors; None for any other."""
        cached = self._before.dicts.get(path)
        if cached is None or not self._is_same(cached, obj):
            return self._new_dict_node(path, obj)
        self.made.leaves.update(cached.leaves)
        self.made.dicts[path] = cached
        self._keys_of.update(cached.keys_of)
        return cached.node

    def _is_same(self, cached: _CachedDict, obj: dict[object, object]) -> bool:
        """Whether nothing that a node was made from has changed, and no tensor was met before."""
        return (
            len(obj) == len(cached.keys)
            and all(map(operator.is_, obj.values(), cached.values))
            and list(obj) == cached.keys
            and list(map(type, obj)) == cached.key_types
            and cached.layout is self.layout
            # A tensor that another part has shown before is stored under that part's key.
            and self._keys_of.keys().isdisjoint(cached.keys_of)
            and self.made.leaves.keys().isdisjoint(cached.leaves)
            and [_made_from(value) for value in obj.values()] == cached.made_from
        )

    def _new_dict_node(self, path: str, obj: dict[object, object]) -> Node | None:
        values = list(obj.values())
        if not values or not all(isinstance(value, _TENSORS) for value in values):
            return None
        if any(type(key) not in _CACHED_KEYS for key in obj):
            return None
        num_leaves, num_keys = len(self.made.leaves), len(self._keys_of)
        node = encode_tree(
            obj, path=path, codecs=self._codecs,
            on_leaf=lambda where, each: None if type(each) is dict else self._on_leaf(where, each),
        )  # fmt: skip
        leaves = _latest(self.made.leaves, since=num_leaves)
        # Fewer: one was met before. Its key is another's, which may not be there next time.
        if len(leaves) == len(values):
            self.made.dicts[path] = _CachedDict(
                keys=list(obj),
                key_types=list(map(type, obj)),
                values=values,
                made_from=[cached.made_from for cached in leaves.values()],
                layout=self.layout,
                leaves=leaves,
                keys_of=_latest(self._keys_of, since=num_keys),
                node=node,
            )
        return node

    def _add_tensor(self, path: str, obj: torch.Tensor | Marked) -> str:
        known = self._keys_of.get(id(obj))
        if known is not None:
            return known
        made_from = _made_from(obj)
        identity = _identity(obj, made_from)
        known = self._keys_of.get(identity) if identity is not None else None
        if known is not None:
            return known
        if path == "__metadata__":
            raise PlacementError("the key '__metadata__' is reserved by safetensors; rename it")
        if not path.isascii() and not is_unicode(path):
            raise PlacementError(
                f"{path!r}: a tensor's key must be text that UTF-8 can hold; it has a lone "
                f"surrogate; rename it"
            )
        if path in self.made.leaves:
            raise PlacementError(
                f"{path}: two tensors of the state have this key (a name with a dot in it, or a "
                f"number and the same number as text?); rename one"
            )
        # The objects are compared first: for an unchanged state that is all that is looked at.
        cached = self._before.leaves.get(path)
        if (
            cached is None
            or cached.obj is not obj
            or cached.made_from != made_from
            or cached.leaf.layout is not self.layout
        ):
            leaf = _renewed(cached, obj, self.layout) or tensor_leaf(
                obj, key=path, layout=self.layout, rank=self._rank, replica_sets=self._replica_sets
            )
            cached = _CachedLeaf(obj, made_from, leaf)
        self.made.leaves[path] = cached
        self._keys_of[id(obj)] = path
        if identity is not None:
            self._keys_of[identity] = path
        return path


def _renewed(cached: _CachedLeaf | None, obj: object, layout: Layout) -> TensorLeaf | None:
    """The leaf of a plain tensor that took the place of one of equal shape and dtype.

    It claims the same, so that a state made again for each save (a random stream, clones in a
    `state_dict`) is known by its numbers; None where it may claim anything else.
    """
    if cached is None or type(obj) is not torch.Tensor or type(cached.obj) is not torch.Tensor:
        return None
    leaf = cached.leaf
    was = leaf.locals[0]
    if (
        leaf.layout is not layout
        or obj.shape != was.shape
        or obj.dtype is not was.dtype
        or obj.layout is not torch.strided
        or obj.is_meta
    ):
        return None
    return replace(leaf, locals=(obj.detach(),))


def _made_from(obj: object) -> object:
    """Everything of a tensor that its leaf depends on and that may change on the same object.

    The objects named are kept, so that none is mistaken for another one at its address; the leaf
    keeps the memory, so that no other tensor can be where it was.
    """
    if isinstance(obj, DTensor):
        local, spec = obj._local_tensor, obj._spec
        return (*_memory(local), spec.placements, spec.mesh, spec.tensor_meta, obj.shape, obj.dtype)
    if isinstance(obj, torch.Tensor):
        return _memory(obj)
    if isinstance(obj, Sharded):
        dims = None if obj.dims is None else tuple(obj.dims.items())
        return _memory(obj.local), obj.local, obj.shape, dims, obj.offset, obj.over
    if isinstance(obj, FlatShard):
        return _memory(obj.local), _made_from(obj.like), obj.start, obj.over
    if isinstance(obj, Padded):
        return _made_from(obj.value), obj.shape
    return _memory(obj.local) if isinstance(obj, Replicated) else None


def _memory(tensor: torch.Tensor) -> tuple[object, ...]:
    """Where a tensor's elements are, and how they are read."""
    if is_lazy(tensor) or tensor.is_nested:
        return (type(tensor),)
    if tensor.layout is not torch.strided:
        return (tensor.layout,)
    return (
        tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device,
        tensor.is_conj(), tensor.is_neg(),
    )  # fmt: skip


def _latest(table: dict[Any, Any], *, since: int) -> dict[Any, Any]:
    """What came to a dict since it had so many entries; costs no look at the ones before."""
    keys = [*itertools.islice(reversed(table), len(table) - since)][::-1]
    return {key: table[key] for key in keys}


def _identity(obj: torch.Tensor | Marked, made_from: Any) -> object:
    """What two tensors have in common that are one: all of memory, form and placement.

    None for what is the same only as the same object: runs of a flat bucket, which are empty on
    some ranks, and then alike. Tensors without elements have no memory; two of them are one where
    their storages are, on all ranks alike.
    """
    if isinstance(obj, DTensor):
        where = _memory_if_known(obj._local_tensor, made_from[:7])
        return where and ("DTensor", where, id(obj.device_mesh), obj.placements, obj.shape)
    if isinstance(obj, torch.Tensor):
        return _memory_if_known(obj, made_from)
    if isinstance(obj, Replicated):
        return _memory_if_known(obj.local, made_from)
    if isinstance(obj, Padded):
        where = _identity(obj.value, made_from[0])
        return where and ("Padded", where, obj.shape)
    if isinstance(obj, Sharded):
        empty = obj.local.numel() == 0
        where = id(obj.local) if empty else _memory_if_known(obj.local, made_from[0])
        dims = None if obj.dims is None else tuple(obj.dims.items())
        return where and ("Sharded", where, obj.shape, dims, obj.offset, obj.over)
    return None


def _memory_if_known(tensor: torch.Tensor, memory: tuple[object, ...]) -> object:
    """Where a tensor's elements are; None where that cannot be known."""
    if len(memory) == 1:  # not strided; refused where its leaf is made
        return None
    if tensor.numel() == 0:
        return ("empty", tensor.untyped_storage()._cdata, tensor.storage_offset(), *memory[1:])
    return memory if memory[0] else None
