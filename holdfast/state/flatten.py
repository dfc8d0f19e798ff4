"""Taking a state apart: parts -> tensors by key, and a tree of values that refers to them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from holdfast.errors import ConfigError, HoldfastError, PlacementError
from holdfast.format.values import Codecs, Node, encode_tree
from holdfast.parallel.layout import Layout
from holdfast.state.leaves import FlatState, TensorLeaf
from holdfast.state.markers import On, PerRank, Replicated, Sharded, Stored, Transient
from holdfast.state.parts import part_of
from holdfast.state.placement import Domains, tensor_leaf


class LeafCache:
    """Leaves of the last state taken apart, so that unchanged tensors cost almost nothing.

    A leaf is used again only for the same tensor object with the same memory, shape, strides,
    dtype, and for a DTensor the same mesh and placements: all that a leaf is made from.
    """

    def __init__(self) -> None:
        self.entries: dict[str, tuple[object, object, TensorLeaf]] = {}


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
    before = cache.entries if cache is not None else {}
    flattener = _Flattener(layout=layout, rank=rank, codecs=codecs, before=before)
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
        cache.entries = flattener.entries
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
        before: Mapping[str, tuple[object, object, TensorLeaf]],
    ) -> None:
        self._before = before
        self._domains: Domains = {}
        self.entries: dict[str, tuple[object, object, TensorLeaf]] = {}
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
        if isinstance(obj, torch.Tensor | Sharded | Replicated):
            return {"$": "tensor", "k": self._add_tensor(path, obj)}
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

    def _add_tensor(self, path: str, obj: torch.Tensor | Sharded | Replicated) -> str:
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
        held = self._before.get(path)
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


def _made_from(obj: torch.Tensor | Sharded | Replicated) -> object:
    """Everything of a tensor that its leaf depends on and that may change on the same object."""
    if isinstance(obj, DTensor):
        local = obj._local_tensor
        return (local.data_ptr(), local.shape, local.stride(), local.dtype, local.device,
                obj.shape, obj.placements, id(obj.device_mesh), local.is_meta)  # fmt: skip
    tensor = obj if isinstance(obj, torch.Tensor) else obj.local
    if tensor.layout is not torch.strided:
        return None
    return (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device)


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
