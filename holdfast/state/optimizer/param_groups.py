"""Parameter groups: what of them is stored, and how new settings come in without new objects."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from holdfast.errors import MismatchError
from holdfast.state.markers import Fresh
from holdfast.state.optimizer.inner import inner_optimizers
from holdfast.state.optimizer.protocol import NOT_STORED
from holdfast.state.tensors import equal_trees


def hyperparameters(group: Mapping[str, Any]) -> dict[str, Any]:
    """What of a group is stored: everything but its parameters and torch's names of them."""
    return {name: value for name, value in group.items() if name not in NOT_STORED}


def set_group(group: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Give a group exactly these settings; it stays the same object, and so do tensors in it.

    Schedulers, captured graphs and views refer to the tensors of a group (a learning rate, a shared
    buffer); those that fit take the new value in place.
    """
    held = hyperparameters(group)
    for name in held:
        del group[name]
    for name, value in values.items():
        group[name] = _filled_in_place(held.get(name), value)
    for name, value in values.items():
        # Two names may share memory; then what came first was overwritten by what came next.
        if not equal_trees(group[name], value):
            group[name] = value


def _filled_in_place(held: object, value: object) -> object:
    """The held tensors with new values where they fit, else the new values."""
    if isinstance(value, torch.Tensor):
        if not isinstance(held, torch.Tensor):
            return value
        if held is value:
            return held
        if held.shape != value.shape or held.dtype != value.dtype:
            return value if isinstance(held, DTensor) else value.to(held.device)
        with torch.no_grad():
            if isinstance(held, DTensor) and not isinstance(value, DTensor):
                value = distribute_tensor(
                    value.to(held.device), held.device_mesh, held.placements, src_data_rank=None
                )
            held.copy_(value)
        return held
    if isinstance(held, list | tuple) and type(value) is type(held) and len(value) == len(held):
        if type(value) is list or type(value) is tuple:
            return type(value)(_filled_in_place(a, b) for a, b in zip(held, value, strict=True))
        return value
    if type(value) is dict and type(held) is dict:
        return {name: _filled_in_place(held.get(name), child) for name, child in value.items()}
    return value


def stored_settings(
    tree: Mapping[str, Any],
    members: Sequence[Sequence[str]],
    groups: Sequence[Mapping[str, Any]],
    *,
    where: str,
) -> list[dict[str, Any] | None]:
    """The settings of each local group, found by its members; None: it stays as it was built.

    Args:
        tree: An optimizer's part as loaded.
        members: Of each group, the names of its parameters.
        groups: The groups' settings now.
        where: The part's name, for messages.

    Raises:
        MismatchError: Where a group's members were in groups that differ.
    """
    stored, membership = tree["groups"], tree["membership"]
    settings: list[dict[str, Any] | None] = []
    used: set[int] = set()
    for position, names in enumerate(members):
        homes = sorted({membership[name] for name in names if name in membership})
        if any(not equal_trees(stored[home], stored[homes[0]]) for home in homes):
            raise MismatchError(
                f"{where}: optimizer group {position} of {len(members)} holds parameters that the "
                f"checkpoint, which has {len(stored)} groups, has in groups {homes}, whose "
                f"settings differ; build the same parameter groups as the saved run"
            )
        if not homes and (names or position >= len(stored)):
            settings.append(None)  # none is known: it stays as built
            continue
        home = homes[0] if homes else position
        # Groups that take the same stored one must not share its tensors.
        values = copy.deepcopy(dict(stored[home])) if home in used else dict(stored[home])
        used.add(home)
        settings.append(
            values
            | {
                key: value
                for key, value in groups[position].items()
                if isinstance(tree.get(f"groups.{position}.{key}"), Fresh)
            }
        )
    return settings


@contextmanager
def same_groups(optimizer: Any) -> Iterator[None]:
    """Keep the groups of an optimizer, and of those it holds, as objects through a load.

    Torch's `load_state_dict` puts new dicts in their place, and any reference to the old ones (of a
    container that shares them, a user's variable) would be left with stale settings. So the same
    objects are put back, with the settings that the load brought.
    """
    owners = [optimizer, *inner_optimizers(optimizer).values()]
    was = [
        (owner, owner.param_groups, list(owner.param_groups))
        for owner in owners
        if "param_groups" in vars(owner)
    ]
    try:
        yield
    finally:
        for owner, listed, groups in was:
            now = owner.param_groups
            if len(now) != len(groups) or any(type(group) is not dict for group in groups):
                continue  # the load made other groups, which only the optimizer understands
            values = [dict(group) for group in now]
            for group, new, loaded in zip(groups, now, values, strict=True):
                if group is not new:
                    set_group(group, hyperparameters(loaded))
                    for name in NOT_STORED:
                        if name in loaded:
                            group[name] = loaded[name]
            if now is not listed:
                listed[:] = groups
                owner.param_groups = listed
