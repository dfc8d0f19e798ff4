"""Templates that follow a stored tree: what to load into where no user's tree says it all.

An object with `state_dict` and `load_state_dict` is given everything that the checkpoint holds for
it. A DTensor or a marker in its *current* state says how the stored tensor of that path is cut
here; a plain tensor says nothing, and comes whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from holdfast.format.values import items_of, tag_of
from holdfast.state.coordinates import PerRankIn
from holdfast.state.markers import FlatShard, Marked, Padded, PerRank, Replicated, Sharded, Stored
from holdfast.state.match.nodes import StoredPart, StoredTensor
from holdfast.state.tensors import local_of

MakeTarget = Callable[[StoredTensor, object, str], object]
"""The target for a stored tensor, what is at its place now (or None), and the path."""


def follow_stored(
    stored: StoredPart, current: object, make: MakeTarget, *, path: str = "",
    is_requested: Callable[[str], bool] = lambda path: True,
) -> Any:  # fmt: skip
    """A template of the shape of what is stored, with `make`'s target for each tensor.

    What is no dict, list or tuple is taken as it is stored.

    Args:
        current: What the owner has in the place; looked up along the same keys.
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
        below = f"{path}.{key}" if path else str(key)
        if not is_mapping or is_requested(below):
            made[key] = follow_stored(child, now, make, path=below, is_requested=is_requested)
    if is_mapping:
        return made
    if not made:
        return Stored()
    return list(made.values()) if isinstance(stored.node, list) else tuple(made.values())


def _children(stored: StoredPart, current: object) -> list[tuple[Any, StoredPart, object]] | None:
    """What a stored dict, list or tuple has: key or position, node, and what is there now."""
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
    """New memory for a stored tensor, sharded as `like` is; None where that is no such DTensor."""
    if isinstance(like, DTensor) and tuple(like.shape) == info.shape:
        return torch.zeros_like(like.detach(), dtype=info.dtype)
    return None


def zeros_like_target(target: torch.Tensor | Marked, dtype: torch.dtype) -> torch.Tensor | Marked:
    """New memory placed as a tensor or marker is, of a dtype."""
    if isinstance(target, Padded):
        value = zeros_like_target(target.value, dtype)
        assert not isinstance(value, Padded)
        return Padded(value, target.shape)
    if isinstance(target, Sharded | FlatShard | Replicated):
        return replace(target, local=torch.zeros_like(target.local.detach(), dtype=dtype))
    return torch.zeros_like(target.detach(), dtype=dtype, requires_grad=False)


class PlacedTemplates:
    """Templates for one part's stored tree, placed where its current state says a placement.

    Args:
        in_place: Whether the object's own DTensors and marked tensors are filled, so that no second
            copy is needed; a tensor met again, or one that shares its memory, gets its own.
    """

    def __init__(self, *, in_place: bool) -> None:
        self._in_place = in_place
        self._used: set[tuple[torch.device, int]] = set()

    def template(self, current: object, stored: StoredPart) -> object:
        """What to load a stored node into, where the object holds `current`."""
        template = self._placed(current, stored)
        return Stored() if template is None else template

    def _placed(self, current: object, stored: StoredPart) -> object | None:
        """The template, or None where nothing of the current state says a placement."""
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
        """A target of the stored shape: the current one where it may be filled, or a new one."""
        if _global_shape(current) != info.shape:
            return None
        local = local_of(current if isinstance(current, torch.Tensor) else current.local)
        if self._in_place and local.dtype == info.dtype and self._is_new(local):
            return current  # type: ignore[no-any-return]
        return zeros_like_target(current, info.dtype)

    def _is_new(self, local: torch.Tensor) -> bool:
        """Whether no earlier target has this memory."""
        if local.is_meta or local.numel() == 0:
            return True
        memory = (local.device, local.untyped_storage().data_ptr())
        is_new = memory not in self._used
        self._used.add(memory)
        return is_new


def _global_shape(target: torch.Tensor | Marked) -> tuple[int, ...]:
    """The shape of the whole tensor that a target is part of."""
    if isinstance(target, Padded | Sharded):
        return tuple(target.shape)
    if isinstance(target, FlatShard):
        return tuple(target.like.shape)
    return tuple((target if isinstance(target, torch.Tensor) else target.local).shape)
