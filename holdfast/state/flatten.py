"""Taking a state apart: parts -> tensors by key, and a tree of values that refers to them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from holdfast.errors import ConfigError, HoldfastError, PlacementError
from holdfast.format.values import Codecs, Node, encode_tree
from holdfast.parallel.layout import Layout
from holdfast.state.leaves import FlatState, TensorLeaf
from holdfast.state.markers import PerRank, Replicated, Sharded, Stored, Transient
from holdfast.state.parts import part_of
from holdfast.state.placement import is_tensor_like, tensor_leaf


def flatten_state(
    state: Mapping[str, object], *, layout: Layout, rank: int, codecs: Codecs
) -> FlatState:
    """Take a state apart on one rank.

    Keys are full paths, part name first, joined by dots. The same tensor object met again is stored
    once, under the key it was met by first. Raises PlacementError naming the path for a value that
    cannot be stored, two entries with one key, or a bad placement; ConfigError for a bad part name.
    Cost: no collectives, no tensor bytes copied.
    """
    flattener = _Flattener(layout=layout, rank=rank, codecs=codecs)
    nodes: dict[str, object] = {}
    for name, value in state.items():
        check_part_name(name)
        try:
            tree = part_of(name, value).tree()
        except HoldfastError as error:
            raise type(error)(f"state part '{name}': {error}") from error
        nodes[name] = flattener.encode(tree, path=name)
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

    def __init__(self, *, layout: Layout, rank: int, codecs: Codecs) -> None:
        self._layout = layout
        self._rank = rank
        self._codecs = codecs
        self.leaves: dict[str, TensorLeaf] = {}
        self._first_key: dict[int, str] = {}
        self._alive: list[object] = []

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
        self.leaves[path] = tensor_leaf(obj, key=path, layout=self._layout, rank=self._rank)
        self._first_key[id(obj)] = path
        self._alive.append(obj)
        return path


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


__all__ = ["check_part_name", "coordinate_label", "flatten_state", "is_tensor_like"]
