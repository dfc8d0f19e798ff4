"""Forms of an optimizer's state, and the settings of its parameter groups.

A plain torch optimizer is saved and restored entry by entry. One whose class overrides `state_dict`
or `load_state_dict`, or that has hooks on them, declares its state through them. Its form is saved,
is loaded through its own `load_state_dict`, and is compared with what it states after that. Torch's
`load_state_dict` casts floating-point state to the parameter's dtype: a tensor that differs by that
alone is put back as it was stored.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from holdfast.errors import HoldfastError, MismatchError, PlacementError, counted
from holdfast.state.arrival import ask_back, listed, recorded
from holdfast.state.markers import Fresh
from holdfast.state.module_tree import overrides
from holdfast.state.optimizer_protocol import (
    NOT_STORED,
    inner_optimizers,
)
from holdfast.state.tensor_elements import equal_trees, local_of, tensor_digest, tensors_of

_HOOKS = (
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)


def has_own_form(optimizer: Any) -> bool:
    """Return True if state goes through the optimizer's own methods rather than its attributes."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        return True
    methods = ("state_dict", "load_state_dict")
    has_hooks = any(getattr(optimizer, hooks, None) for hooks in _HOOKS)
    return has_hooks or overrides(optimizer, torch.optim.Optimizer, methods)


def shown_form(optimizer: Any) -> Mapping[Any, Any]:
    """Return what a save reads: the optimizer's own form, or its attributes."""
    if has_own_form(optimizer):
        return read_form(optimizer)
    return {"state": optimizer.state, "param_groups": optimizer.param_groups}


def read_form(optimizer: Any) -> Mapping[Any, Any]:
    """Return what the optimizer states; raise PlacementError if that fails."""
    kind = type(optimizer).__name__
    try:
        form = optimizer.state_dict()
    except HoldfastError:
        raise
    except Exception as error:
        raise PlacementError(
            f"{kind}.state_dict() failed: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(form, Mapping):
        raise PlacementError(
            f"{kind}.state_dict() returned a {type(form).__name__}, not a mapping; nothing of the "
            f"optimizer can be kept"
        )
    return form


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TorchForm:
    """A form like torch's: state by number, groups that list the numbers, and whatever else."""

    entries: Mapping[int, Any]
    """State by `id` of the tensor that is updated."""
    others: dict[Any, Any]
    """State under other keys than parameters."""
    groups: list[dict[str, Any]]
    """Hyperparameters of each group."""
    extra: dict[Any, Any]
    """Further entries of the form."""
    numbers: Sequence[Sequence[Hashable]] = ()
    """Per group, the key of each parameter."""
    is_live: bool = False
    """True if the entries are the optimizer's own objects, not what a form shows of them."""

    @classmethod
    def of_attributes(
        cls, optimizers: Sequence[Any], groups: Sequence[Mapping[str, Any]]
    ) -> TorchForm:
        """Return the state of plain torch optimizers as it is."""
        state = [pair for optimizer in optimizers for pair in optimizer.state.items()]
        return cls(
            entries={id(key): value for key, value in state if isinstance(key, torch.Tensor)},
            others={key: value for key, value in state if not isinstance(key, torch.Tensor)},
            groups=[hyperparameters(group) for group in groups],
            extra={},
            is_live=True,
        )

    @classmethod
    def of(cls, form: Mapping[Any, Any], optimizer: Any) -> TorchForm | None:
        """Return a form by parameter; None if it is not like torch's or not like the groups."""
        state, groups = form.get("state"), form.get("param_groups")
        own = optimizer.param_groups
        if not isinstance(state, Mapping) or not isinstance(groups, list):
            return None
        if len(groups) != len(own):
            return None
        numbered: dict[Hashable, int] = {}
        for group, own_group in zip(groups, own, strict=True):
            listed = group.get("params") if isinstance(group, Mapping) else None
            if not isinstance(listed, list) or len(listed) != len(own_group["params"]):
                return None
            if not all(isinstance(number, int | str) for number in listed):
                return None
            numbered |= zip(listed, map(id, own_group["params"]), strict=True)
        return cls(
            entries={numbered[key]: value for key, value in state.items() if key in numbered},
            others={key: value for key, value in state.items() if key not in numbered},
            groups=[hyperparameters(group) for group in groups],
            extra={k: value for k, value in form.items() if k not in ("state", "param_groups")},
            numbers=[list(group["params"]) for group in groups],
        )


def shows(form: object, tensors: Sequence[torch.Tensor]) -> bool:
    """Return True if the form has every tensor, a view of its memory, or an equal copy."""
    shown = [value for _, value in tensors_of(form)]
    storages = {_storage_key(value) for value in shown}
    left = [tensor for tensor in tensors if _storage_key(tensor) not in storages]
    return all(any(_is_equal(tensor, value) for value in shown) for tensor in left)


def load_form(
    optimizer: Any, form: dict[Any, Any], *, where: str, names: Mapping[str, str] | None = None
) -> None:
    """Load a form with the optimizer's own `load_state_dict` and prove that it arrived.

    The optimizer's groups stay the objects they are.

    Args:
        where: Path of the form, for messages.
        names: How to call paths of the form in messages; what is below them follows.

    Raises:
        MismatchError: By path, what the optimizer does not take, or still has though the form
            lacks it.

    Cost: a digest of every tensor before and after the load.
    """
    kind = type(optimizer).__name__
    expected = recorded(form)
    try:
        with same_groups(optimizer):
            optimizer.load_state_dict(form)
    except HoldfastError:
        raise
    except Exception as error:
        raise MismatchError(
            f"{where}: {kind}.load_state_dict() does not take what is stored: "
            f"{type(error).__name__}: {error}; build the optimizer as the saved run did"
        ) from error
    # torch's load casts moments to the parameter's dtype, which would show as a difference.
    _undo_casts(optimizer, form, read_form(optimizer))
    wrong = ask_back(
        expected, lambda: read_form(optimizer), where=where, owner="the optimizer"
    ).wrong
    if wrong:
        named = [each._replace(path=_named(each.path, where, names or {})) for each in wrong]
        raise MismatchError(
            f"{kind}.load_state_dict() did not take what was stored "
            f"({counted(len(wrong), 'entry')}): {listed(named)}; mend its "
            f"load_state_dict or its hooks, so that state_dict() after a load states what "
            f"was loaded"
        )


def _named(path: str, where: str, names: Mapping[str, str]) -> str:
    """Return a path of the form with the parameter's name in place of its number."""
    inside = path[len(where) + 1 :]
    head = ".".join(inside.split(".")[:2])
    if head in names:
        return f"{where}.{names[head]}{inside[len(head) :]}"
    return path


def _undo_casts(optimizer: Any, form: Mapping[Any, Any], now: Mapping[Any, Any]) -> None:
    """Put stored tensors back if the load changed only their dtype."""
    stored, shown = TorchForm.of(form, optimizer), TorchForm.of(now, optimizer)
    state = getattr(optimizer, "state", None)
    if stored is None or shown is None or not isinstance(state, Mapping):
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            one, other = stored.entries.get(id(parameter)), shown.entries.get(id(parameter))
            own = state.get(parameter)
            if isinstance(one, Mapping) and isinstance(other, Mapping) and own is not None:
                _undo_entry_casts(one, other, own, local_of(parameter).device)


def _undo_entry_casts(stored: Any, shown: Any, own: Any, device: torch.device) -> None:
    """Put stored tensors of one parameter back, down to any depth."""
    keys = stored.keys() if isinstance(stored, Mapping) else range(len(stored))
    for key in keys:
        try:
            value, seen, held = stored[key], shown[key], own[key]
        except (KeyError, IndexError, TypeError):
            continue
        if isinstance(value, torch.Tensor) and isinstance(held, torch.Tensor):
            if held is seen and held.dtype != value.dtype and held.shape == value.shape:
                own[key] = value.to(device)
        elif isinstance(value, dict | list) and type(held) is type(value):
            _undo_entry_casts(value, seen, held, device)


def _storage_key(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return a key that tensors of one storage share."""
    local = local_of(tensor)
    if local.layout is not torch.strided or local.numel() == 0:
        return (id(tensor),)
    return (local.untyped_storage().data_ptr(),)


def _is_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return True if two tensors have the same type, dtype, shape and bytes, or are both empty."""
    if type(one) is not type(other) or one.shape != other.shape or one.dtype != other.dtype:
        return isinstance(one, DTensor) is False and one.numel() == other.numel() == 0
    return tensor_digest(one) == tensor_digest(other)


def hyperparameters(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a group: all but its parameters and torch's names of them."""
    return {name: value for name, value in group.items() if name not in NOT_STORED}


def set_groups(settings: Iterable[tuple[dict[str, Any], Mapping[str, Any]]]) -> None:
    """Give groups exactly these settings; they stay the same objects, and so do tensors in them.

    Schedulers, captured graphs and views refer to the tensors of a group (a learning rate, a shared
    buffer); those that fit take the new value in place.

    Args:
        settings: Of each group of an optimizer, together: two groups may share a tensor, as
            torch's do if the learning rate that they are built with is one.
    """
    filled = []
    for group, values in settings:
        held = hyperparameters(group)
        for name in held:
            del group[name]
        for name, value in values.items():
            group[name] = _filled_in_place(held.get(name), value)
            filled.append((group, name, held.get(name), value))
    for group, name, before, value in filled:
        # Two names may share memory; then what came first was overwritten by what came next.
        if not equal_trees(group[name], value):
            group[name] = _on_device_of(before, value)


def _filled_in_place(held: object, value: object) -> object:
    """Return the held tensors with new values if they fit, else the new values."""
    if isinstance(value, torch.Tensor):
        if not isinstance(held, torch.Tensor):
            return value
        if held is value:
            return held
        if held.shape != value.shape or held.dtype != value.dtype:
            return _on_device_of(held, value)
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


def _on_device_of(held: object, value: object) -> object:
    """Return a tensor on the device of the one in whose place it comes; anything else as it is."""
    if not isinstance(held, torch.Tensor) or not isinstance(value, torch.Tensor):
        return value
    is_placed = isinstance(held, DTensor) or isinstance(value, DTensor)
    return value if is_placed else value.to(held.device)


def homes_of(names: Iterable[str], membership: Mapping[str, int]) -> list[int]:
    """Return the numbers of the stored groups that some parameters belong to, ascending."""
    return sorted({membership[name] for name in names if name in membership})


def joined_groups(
    position: int, num_groups: int, homes: Sequence[int], num_stored: int, *, where: str
) -> MismatchError:
    """Return the error for a group with members of stored groups whose settings differ."""
    return MismatchError(
        f"{where}: optimizer group {position} of {num_groups} holds parameters that the "
        f"checkpoint, which has {num_stored} groups, has in groups {list(homes)}, whose settings "
        f"differ; build the same parameter groups as the saved run"
    )


def stored_settings(
    tree: Mapping[str, Any],
    members: Sequence[Sequence[str]],
    groups: Sequence[Mapping[str, Any]],
    *,
    where: str,
) -> list[dict[str, Any] | None]:
    """Return the settings of each local group, by its members; None: it stays as it was built.

    Args:
        tree: An optimizer's part as loaded.
        members: Of each group, the names of its parameters.
        groups: The groups' settings now.
        where: The part's name, for messages.

    Raises:
        MismatchError: Where a group's members were in groups that differ.
    """
    stored = tree["groups"]
    settings: list[dict[str, Any] | None] = []
    used: set[int] = set()
    for position, names in enumerate(members):
        homes = homes_of(names, tree["membership"])
        if any(not equal_trees(stored[home], stored[homes[0]]) for home in homes):
            raise joined_groups(position, len(members), homes, len(stored), where=where)
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
            other = [(g, dict(new)) for g, new in zip(groups, now, strict=True) if g is not new]
            set_groups((group, hyperparameters(loaded)) for group, loaded in other)
            for group, loaded in other:
                group |= {name: loaded[name] for name in NOT_STORED if name in loaded}
            if now is not listed:
                listed[:] = groups
                owner.param_groups = listed
