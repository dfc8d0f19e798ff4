"""Templates for what an object hands out as its state: placed where it is placed, else as stored.

An object with `state_dict` and `load_state_dict` is given everything that the checkpoint holds for
it. A DTensor or a marker in its *current* state says how the stored tensor of that path is to be
cut here; a plain tensor says nothing, and comes whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace

import torch
from torch.distributed.tensor import DTensor

from holdfast.state.coordinates import PerRankIn
from holdfast.state.markers import FlatShard, Marked, Padded, PerRank, Replicated, Sharded, Stored
from holdfast.state.match.stored import StoredPart
from holdfast.state.module.exported import local
from holdfast.state.torch_dtypes import torch_dtype


class Placer:
    """Makes templates for one part's stored tree.

    `in_place`: whether the object's own DTensors and marked tensors are filled, so that no second
    copy is needed; a tensor met again, or one that shares its memory, gets memory of its own.
    """

    def __init__(self, stored: StoredPart, *, in_place: bool) -> None:
        self._stored = stored
        self._in_place = in_place
        self._used: set[tuple[torch.device, int]] = set()

    def template(self, current: object, node: object) -> object:
        """What to load a stored node into, where the object holds `current`."""
        found = self._placed(current, node)
        return Stored() if found is None else found

    def _placed(self, current: object, node: object) -> object | None:
        """The template, or None where nothing of the current state says a placement."""
        if isinstance(node, Mapping) and node.get("$") == "tensor":
            return self._tensor(current, str(node["k"]))
        if isinstance(current, PerRank):
            policies = {f.name: getattr(current, f.name) for f in fields(PerRank)}
            return PerRankIn(**policies | {"tree": Stored()}, local=current.tree)
        if isinstance(current, Mapping):
            children = self._stored.children(node)
            if children is None:
                return None
            made = {name: self._placed(current.get(name), child) for name, child in children}
            if all(child is None for child in made.values()):
                return None
            return {name: Stored() if child is None else child for name, child in made.items()}
        if isinstance(current, list | tuple):
            items = (
                node.get("v") if isinstance(node, Mapping) and node.get("$") == "tuple" else node
            )
            if not isinstance(items, list) or len(items) != len(current):
                return None
            listed = [self._placed(*pair) for pair in zip(current, items, strict=True)]
            if all(child is None for child in listed):
                return None
            whole = [Stored() if child is None else child for child in listed]
            return tuple(whole) if isinstance(current, tuple) else whole
        return None

    def _tensor(self, current: object, key: str) -> torch.Tensor | Marked | None:
        if not isinstance(current, DTensor | Marked):
            return None
        name, shape = self._stored.tensors[key]
        if _global_shape(current) != shape:
            return None
        held = _local(current)
        if not self._in_place or held.dtype != torch_dtype(name) or not self._is_new(held):
            return fresh_like(current, torch_dtype(name))
        return current

    def _is_new(self, held: torch.Tensor) -> bool:
        if held.is_meta or held.numel() == 0:
            return True
        place = (held.device, held.untyped_storage().data_ptr())
        is_new = place not in self._used
        self._used.add(place)
        return is_new


def fresh_like(current: torch.Tensor | Marked, dtype: torch.dtype) -> torch.Tensor | Marked:
    """New memory placed as a tensor or marker is, of a dtype."""
    if isinstance(current, Padded):
        value = fresh_like(current.value, dtype)
        assert not isinstance(value, Padded)
        return Padded(value, current.shape)
    if isinstance(current, Sharded | FlatShard | Replicated):
        return replace(current, local=torch.zeros_like(current.local.detach(), dtype=dtype))
    return torch.zeros_like(current.detach(), dtype=dtype, requires_grad=False)


def _local(current: torch.Tensor | Marked) -> torch.Tensor:
    return local(current if isinstance(current, torch.Tensor) else current.local)


def _global_shape(current: torch.Tensor | Marked) -> tuple[int, ...]:
    if isinstance(current, Padded | Sharded):
        return tuple(current.shape)
    if isinstance(current, FlatShard):
        return tuple(current.like.shape)
    return tuple((current if isinstance(current, torch.Tensor) else current.local).shape)
