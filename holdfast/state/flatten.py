"""Taking a state apart: parts -> tensors by key, and a tree of values that refers to them."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import get_args

import numpy as np
import torch
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from holdfast.errors import ConfigError, HoldfastError, PlacementError
from holdfast.format.values import Codecs, Node, encode_tree
from holdfast.parallel.layout import Layout
from holdfast.state.leaves import FlatState, TensorLeaf
from holdfast.state.markers import (
    FlatShard,
    Marked,
    On,
    Padded,
    PerRank,
    Replicated,
    Sharded,
    Stored,
    Transient,
)
from holdfast.state.parts import part_of
from holdfast.state.placement import Domains, tensor_leaf

Entry = tuple[object, object, TensorLeaf]
"""A tensor or marker, everything of it that may change (`_made_from`), and the leaf of that."""

_TENSORS = (torch.Tensor, *get_args(Marked))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shelf:
    """A dict of nothing but tensors as it was met: what is in it, and what it was made into.

    `made_from[i]`: of `values[i]`. `entries`, `leaves`, `first_keys`: what it added to a pass.
    """

    keys: list[object]
    values: list[object]
    made_from: list[object]
    layout: Layout
    entries: dict[str, Entry]
    leaves: dict[str, TensorLeaf]
    first_keys: dict[int, str]
    node: Node


class LeafCache:
    """Leaves of the last state taken apart, so that unchanged tensors cost almost nothing.

    A leaf is used again only for the same tensor object with the same memory, shape, strides,
    dtype, and for a DTensor the same mesh and placements: all that a leaf is made from. Dicts of
    tensors alone are compared and used again as a whole.
    """

    def __init__(self) -> None:
        self.entries: dict[str, Entry] = {}
        self.shelves: dict[str, _Shelf] = {}


def flatten_state(
    state: Mapping[str, object],
    *,
    layout: Layout,
    rank: int,
    codecs: Codecs,
    cache: LeafCache | None = None,
) -> FlatState:
    """Take a state apart on one rank.

    Keys are full paths, part name first, joined by dots. The same tensor object met again is stored
    once, under the key it was met by first. Raises PlacementError naming the path for a value that
    cannot be stored, two entries with one key, or a bad placement; ConfigError for a bad part name.
    `cache`: of an earlier call with the same layout and rank; brought up to date.
    Cost: no collectives, no tensor bytes copied.
    """
    flattener = _Flattener(layout=layout, rank=rank, codecs=codecs, before=cache or LeafCache())
    nodes: dict[str, object] = {}
    for name, value in state.items():
        check_part_name(name)
        home = value.own_layout if isinstance(value, On) else layout
        if rank not in home.ranks:
            raise PlacementError(
                f"state part '{name}': rank {rank} is not in {home}; ranks outside of a part's "
                f"layout leave it out of their state"
            )
        flattener.move_to(home)
        try:
            tree = part_of(name, value.value if isinstance(value, On) else value).tree()
        except HoldfastError as error:
            raise type(error)(f"state part '{name}': {error}") from error
        nodes[name] = flattener.encode(tree, path=name)
    if cache is not None:
        cache.entries, cache.shelves = flattener.entries, flattener.shelves
    return FlatState(leaves=flattener.leaves, nodes=nodes)


def check_part_name(name: object) -> None:
    """ConfigError unless the name of a part can be the beginning of keys."""
    if not isinstance(name, str) or not name or name.startswith("$") or name != name.strip():
        raise ConfigError(
            f"state part name {name!r}: a part needs a non-empty string not beginning with '$'"
        )


def coordinate_label(layout: Layout, rank: int, axes: tuple[str, ...], *, path: str) -> str:
    """This rank's coordinates along `axes` as text: `cp=0,dp=1,pp=0,tp=1`."""
    known = {**layout.expert_coordinate(rank), **layout.coordinate(rank)}
    unknown = [axis for axis in axes if axis not in known]
    if unknown:
        raise PlacementError(
            f"{path}: PerRank axes {unknown} are not axes of layout '{layout.name}', which has "
            f"{', '.join(sorted(known))}"
        )
    return ",".join(f"{axis}={known[axis]}" for axis in sorted(axes))


class _Flattener:
    """One pass over a state; lives as long as the pass."""

    def __init__(
        self,
        *,
        layout: Layout,
        rank: int,
        codecs: Codecs,
        before: LeafCache,
    ) -> None:
        self._before = before
        self._domains: Domains = {}
        self.entries: dict[str, Entry] = {}
        self.shelves: dict[str, _Shelf] = {}
        self._layout = layout
        self._rank = rank
        self._codecs = codecs
        self.leaves: dict[str, TensorLeaf] = {}
        self._first_key: dict[int, str] = {}

    def move_to(self, layout: Layout) -> None:
        """What follows lives on this layout."""
        self._layout = layout

    def encode(self, tree: object, *, path: str) -> Node:
        return encode_tree(tree, path=path, codecs=self._codecs, on_leaf=self._on_leaf)

    def _on_leaf(self, path: str, obj: object) -> Node | None:
        if isinstance(obj, _TENSORS):
            return {"$": "tensor", "k": self._add_tensor(path, obj)}
        if type(obj) is dict:
            return self._add_shelf(path, obj)
        if isinstance(obj, np.ndarray):
            return {"$": "array", "k": self._add_tensor(path, _array_tensor(path, obj))}
        if isinstance(obj, PerRank):
            axes = tuple(obj.axes)
            label = coordinate_label(self._layout, self._rank, axes, path=path)
            inner = self.encode(obj.tree, path=f"{path}[{label}]")
            named: list[Node] = [*sorted(axes)]
            return {"$": "per_rank", "axes": named, "v": {label: inner}}
        if isinstance(obj, Transient):
            return {"$": "transient"}
        if isinstance(obj, Stored):
            raise PlacementError(f"{path}: Stored() asks a load for what is there; nothing to save")
        return None

    def _add_shelf(self, path: str, obj: dict[object, object]) -> Node | None:
        """The node of a dict of nothing but tensors; None for any other."""
        held = self._before.shelves.get(path)
        if held is None or not self._is_same(held, obj):
            return self._fill_shelf(path, obj)
        self.entries.update(held.entries)
        self.leaves.update(held.leaves)
        self._first_key.update(held.first_keys)
        self.shelves[path] = held
        return held.node

    def _is_same(self, held: _Shelf, obj: dict[object, object]) -> bool:
        """Whether nothing that a shelf was made from has changed, and no tensor was met before."""
        return (
            len(obj) == len(held.keys)
            and all(map(operator.is_, obj.values(), held.values))
            and list(obj) == held.keys
            and held.layout is self._layout
            and self._first_key.keys().isdisjoint(held.first_keys)
            and self.leaves.keys().isdisjoint(held.leaves)
            and [_made_from(value) for value in obj.values()] == held.made_from
        )

    def _fill_shelf(self, path: str, obj: dict[object, object]) -> Node | None:
        values = list(obj.values())
        if not values or not all(isinstance(value, _TENSORS) for value in values):
            return None
        before = len(self.leaves)
        node = encode_tree(obj, path=path, codecs=self._codecs, on_leaf=self._on_shelf)
        added = [*self.leaves][before:]
        if len(added) == len(values):
            # Else one was met before: its key is another's, which may not be there next time.
            entries = {key: self.entries[key] for key in added}
            self.shelves[path] = _Shelf(
                keys=list(obj),
                values=values,
                made_from=[entry[1] for entry in entries.values()],
                layout=self._layout,
                entries=entries,
                leaves={key: self.leaves[key] for key in added},
                first_keys={id(value): key for value, key in zip(values, added, strict=True)},
                node=node,
            )
        return node

    def _on_shelf(self, path: str, obj: object) -> Node | None:
        return None if type(obj) is dict else self._on_leaf(path, obj)

    def _add_tensor(self, path: str, obj: torch.Tensor | Marked) -> str:
        known = self._first_key.get(id(obj))
        if known is not None:
            return known
        if path == "__metadata__":
            raise PlacementError("the key '__metadata__' is reserved by safetensors; rename it")
        if path in self.leaves:
            raise PlacementError(
                f"{path}: two tensors of the state have this key (a name with a dot in it, or a "
                f"number and the same number as text?); rename one"
            )
        made_from = _made_from(obj)
        held = self._before.entries.get(path)
        if (
            held is None
            or held[0] is not obj
            or held[1] != made_from
            or held[2].layout is not self._layout
        ):
            leaf = tensor_leaf(
                obj, key=path, layout=self._layout, rank=self._rank, domains=self._domains
            )
            held = (obj, made_from, leaf)
        self.leaves[path] = held[2]
        self.entries[path] = held
        self._first_key[id(obj)] = path
        return path


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


def _array_tensor(path: str, array: np.ndarray) -> torch.Tensor:
    """The array's values as a tensor; shares memory where NumPy's layout allows."""
    if array.dtype.hasobject or array.dtype.names is not None or array.dtype.kind not in "biufc":
        raise PlacementError(
            f"{path}: a NumPy array of dtype {array.dtype} cannot be stored without pickle; "
            f"convert it to numbers, or register a codec"
        )
    native = array.astype(array.dtype.newbyteorder("="), copy=False)
    shape = native.shape
    contiguous = np.ascontiguousarray(native).reshape(shape)
    if not contiguous.flags.writeable:
        contiguous = contiguous.copy()
    try:
        return torch.from_numpy(contiguous)
    except TypeError as error:
        raise PlacementError(f"{path}: NumPy dtype {array.dtype} has no torch dtype") from error
