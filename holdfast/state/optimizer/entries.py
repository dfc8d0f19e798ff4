"""One parameter's optimizer state: what of it is stored, and what to load it into."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from holdfast.errors import MismatchError
from holdfast.state.markers import FlatShard, Padded, Stored, Transient
from holdfast.state.match.mirror import MakeTarget, mirror, placed_like
from holdfast.state.match.stored import StoredPart, StoredTensor
from holdfast.state.optimizer.own_form import TorchForm
from holdfast.state.optimizer.protocol import HeldParameter, local_of
from holdfast.state.padding import Declaration


def entry_targets(
    name: str,
    held: HeldParameter,
    stored: StoredPart,
    padding: Declaration | None,
    *,
    is_live: bool,
    made: dict[str, object],
    taken: set[int],
) -> object:
    """What to load one parameter's state into: just the entries that are stored.

    `is_live`: tensors that the optimizer has and that fit are filled in place. `made`: targets by
    the key of what is stored, so that entries that were one tensor are one again. `taken`: `id` of
    tensors that are a target already, so that others are not.
    """
    below = stored.below("state", name)
    if not isinstance(below.node, Mapping) or "$" in below.node:
        return mirror(below, None, _nested(held))
    home = stored.value("membership", name)
    on_device = isinstance(home, int) and any(
        stored.value("groups", home, flag) for flag in ("capturable", "fused")
    )
    have = (
        held.optimizer.state.get(held.updated, {}) if is_live and held.updated is not None else {}
    )
    have = have if isinstance(have, Mapping) else {}
    real_shape = None if padding is None else padding.shape
    entries: dict[str, object] = {}
    for entry in below.keys_under():
        info = below.tensor(below.at(entry))
        current = have.get(entry)
        if info is None:
            entries[entry] = mirror(below.below(entry), current, _nested(held))
            continue
        if held.over is None and info.key in made:
            entries[entry] = made[info.key]
            continue
        target: object = None
        if isinstance(current, torch.Tensor) and id(current) not in taken:
            live = marked(held.stored_form(entry, current), held, padding)
            if _shape(live) == info.shape or not stored.has("parameters", name):
                target = live
                taken.add(id(current))
        if target is None:
            target = held.target(entry, info, on_device=on_device, real_shape=real_shape)
            target = marked(target, held, padding)
        entries[entry] = made[info.key] = target
    return entries


def refuse_other_shape(
    name: str, held: HeldParameter, stored: StoredPart, padding: Declaration | None
) -> None:
    """MismatchError where the stored state belongs to a parameter of another shape."""
    saved = stored.at("parameters", name, "shape")
    shape = list(held.parameter.shape if padding is None else padding.shape)
    if isinstance(saved, list) and saved != shape:
        padded = list(held.parameter.shape)
        declared = "" if padding is None else f", declared as the real one of {padded}"
        raise MismatchError(
            f"{stored.name}.state.{name} is the state of a parameter of shape {saved}, the "
            f"optimizer's has {shape}{declared}; if they differ by padding alone, declare the real "
            f"shape where it is saved and where it is loaded: declare_padding(module, name, shape)"
        )


def entries_of(held: HeldParameter, view: TorchForm | None) -> tuple[bool, Any]:
    """Whether a parameter has state, and what: from the form where there is one."""
    if view is not None:
        return id(held.parameter) in view.entries, view.entries.get(id(held.parameter))
    if held.updated is None or held.updated not in held.optimizer.state:
        return False, None
    return True, held.optimizer.state[held.updated]


def facts_of(held: HeldParameter, padding: Declaration | None) -> dict[str, object]:
    """What a load has to know of a parameter: its real shape, and whether it was frozen."""
    shape = [int(n) for n in (held.parameter.shape if padding is None else padding.shape)]
    return {"shape": shape} if held.parameter.requires_grad else {"shape": shape, "frozen": True}


def placed_target(parameters: Iterable[torch.Tensor]) -> MakeTarget:
    """Targets for state that belongs to no one parameter: placed like what stands there now.

    Where nothing stands there, like the parameters of its shape, if these are placed alike.
    """
    by_shape: dict[tuple[int, ...], list[DTensor]] = {}
    for parameter in parameters:
        if isinstance(parameter, DTensor):
            by_shape.setdefault(tuple(parameter.shape), []).append(parameter)

    def make(info: StoredTensor, current: object, path: str) -> object:
        del path
        likes = by_shape.get(info.shape, []) if current is None else []
        alike = all(p.placements == likes[0].placements for p in likes) and likes
        target = placed_like(likes[0] if alike else current, info)
        return Stored() if target is None else target

    return make


def _nested(held: HeldParameter) -> Any:
    """Targets inside lists and dicts of a parameter's state."""

    def make(info: StoredTensor, current: object, path: str) -> object:
        del path
        for like in (current, held.parameter):
            target = placed_like(like, info)
            if target is not None:
                return target
        return Stored()

    return make


def on_device_of(value: Any, held: HeldParameter) -> Any:
    """Loaded state of one parameter; tensors in lists and dicts follow it to its device."""
    device = local_of(held.parameter).device

    def move(tree: Any) -> Any:
        if isinstance(tree, torch.Tensor):
            return tree if isinstance(tree, DTensor) else tree.to(device)
        if type(tree) is dict:
            return {name: move(child) for name, child in tree.items()}
        if type(tree) in (list, tuple):
            return type(tree)(move(child) for child in tree)
        return tree

    if not isinstance(value, Mapping):
        return move(value)
    if type(value) is not dict:
        return value
    return {n: v if isinstance(v, torch.Tensor) else move(v) for n, v in value.items()}


def _shape(target: object) -> tuple[int, ...]:
    """The global shape of a tensor or marker, without declared padding."""
    if isinstance(target, Padded):
        return target.shape
    shape = target.like.shape if isinstance(target, FlatShard) else getattr(target, "shape", ())
    return tuple(shape)


def marked(value: object, held: HeldParameter, padding: Declaration | None) -> object:
    """What is elementwise of a parameter whose padding is declared, as declared; the rest as is."""
    if padding is None:
        return value
    if isinstance(value, FlatShard):
        return padding.mark(value)
    if isinstance(value, torch.Tensor) and value.shape == held.parameter.shape:
        return padding.mark(value)
    return value


def main_target(held: HeldParameter, dtype: torch.dtype) -> object:
    """What to load a stored main parameter into: the main parameter, or memory to copy from.

    A parameter that is its own main one takes the value only if it can hold it.
    """
    updated = held.updated
    if updated is None or (not held.is_main and held.parameter.dtype != dtype):
        return Transient()
    if held.is_main and updated.dtype == dtype:
        return held.marker("main", updated) if held.over is not None else updated
    return (
        torch.zeros_like(updated.detach(), dtype=dtype)
        if held.over is None
        else held.marker("main", torch.zeros_like(updated.detach(), dtype=dtype))
    )
