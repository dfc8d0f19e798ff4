"""What a load fills of an optimizer's state, and what starts fresh.

Targets are the tensors that the optimizer has, or new memory that is placed like them. Parameters,
groups and settings that the checkpoint does not know start fresh, if the caller agrees.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from holdfast.errors import MismatchError, some_of
from holdfast.format.values import is_plain_dict, items_of, tensor_keys
from holdfast.state.followed_dims import placed_by
from holdfast.state.markers import Fresh, Stored, Transient, global_shape
from holdfast.state.memory_order import map_tensors
from holdfast.state.optimizer_forms import hyperparameters, joined_groups
from holdfast.state.optimizer_protocol import OptimizerParameter, stored_form, with_padding
from holdfast.state.shared_memory import is_expanded
from holdfast.state.stored import (
    MakeTarget,
    StoredPart,
    StoredTensor,
    follow_stored,
    zeros_placed_like,
)
from holdfast.state.tensor_elements import equal_trees, local_of, local_part

_ON_DEVICE = frozenset(("capturable", "foreach", "fused"))
"""Settings with which a step wants its parameters on a device."""


class StoredParameters:
    """What a checkpoint has of each of an optimizer's parameters, by name.

    Args:
        part: The optimizer's.
    """

    def __init__(self, part: StoredPart) -> None:
        self.part = part
        self.state = part.table("state")
        self.main = part.table("main")
        self.homes = part.table("membership")
        """The number of the group of each."""
        self._facts = part.table("parameters")

    def fact(self, name: str, what: str) -> object:
        """Return what the save noted of a parameter; None if it did not."""
        facts = self._facts.get(name)
        return facts.get(what) if is_plain_dict(facts) else None

    def is_described(self, name: str) -> bool:
        """Return True if the save noted anything of a parameter."""
        return self._facts.get(name) is not None

    def home(self, name: str) -> int | None:
        """Return the number of a parameter's group; None if there is none."""
        home = self.homes.get(name)
        return home if isinstance(home, int) else None


def entry_targets(
    name: str,
    param: OptimizerParameter,
    stored: StoredParameters,
    padding: tuple[int, ...] | None,
    *,
    have: object,
    made: dict[str, object],
    filled: set[int],
) -> object:
    """Return the targets of one parameter's state: just the entries that are stored.

    Args:
        have: Entries that the optimizer has; tensors of it that fit are filled in place.
        made: Targets by the key of what is stored, so that entries that were one tensor are one
            again.
        filled: `id` of the tensors that are a target already, and so cannot be another one's.
    """
    part = stored.part
    below = StoredPart(stored.state.get(name), part.tensors, f"{part.name}.state.{name}")
    known = stored.fact(name, "follows")
    followed = known if isinstance(known, Mapping) else {}

    def nested(info: StoredTensor, current: object, path: str, *, inside: str = "") -> object:
        if param.over is None and info.key in made:
            return made[info.key]
        by_dims = placed_by(param.parameter, info, followed.get(f"{inside}.{path}"))
        place = placed_like(lambda *_: (current, by_dims, param.parameter))
        return made.setdefault(info.key, place(info, current, path))

    if not is_plain_dict(below.node):
        return follow_stored(below, None, nested)
    have = have if isinstance(have, Mapping) else {}
    entries: dict[str, object] = {}
    for entry, node in below.node.items():
        info = below.tensor(node)
        current = have.get(entry)
        if info is None:
            inside = partial(nested, inside=f".{entry}")
            entries[entry] = follow_stored(below.below(entry), current, inside)
            continue
        if param.over is None and info.key in made:
            entries[entry] = made[info.key]
            continue
        target: object = None
        if (
            isinstance(current, torch.Tensor)
            and id(current) not in filled
            and not is_expanded(local_part(current))
        ):
            live: Any = current
            if param.over is not None or padding is not None:
                live = with_padding(stored_form(param, entry, current), param, padding)
            if global_shape(live) == info.shape or not stored.is_described(name):
                target = live
                filled.add(id(current))
        if target is None:
            target = placed_by(param.parameter, info, followed.get(f".{entry}"))
        if target is None:
            on_device = entry != "step" or _steps_on_device(name, stored)
            target = _target(param, entry, info, on_device=on_device, real_shape=padding)
            target = with_padding(target, param, padding)
        entries[entry] = made[info.key] = target
    return entries


def _steps_on_device(name: str, stored: StoredParameters) -> bool:
    """Return True if a parameter's group keeps its step counters on the device."""
    home = stored.home(name)
    return home is not None and any(
        stored.part.value("groups", home, flag) for flag in ("capturable", "fused")
    )


def refuse_other_shapes(
    named: Iterable[tuple[str, OptimizerParameter]],
    stored: StoredParameters,
    paddings: Mapping[int, tuple[int, ...]],
) -> None:
    """Raise MismatchError if stored state belongs to parameters of other shapes; it names each."""
    wrong = []
    for name, param in named:
        padding = paddings.get(id(param.parameter))
        saved = stored.fact(name, "shape")
        shape = list(param.parameter.shape if padding is None else padding)
        if not isinstance(saved, list) or saved == shape or param.updated is None:
            continue
        if stored.state.get(name) is not None:
            padded = list(param.parameter.shape)
            declared = "" if padding is None else f", declared as the real one of {padded}"
            wrong.append(
                f"{stored.part.name}.state.{name} is the state of a parameter of shape {saved}, "
                f"the optimizer's has {shape}{declared}"
            )
    if wrong:
        raise MismatchError(
            f"{some_of(wrong)}; if they differ by padding alone, declare the real shape where it "
            f"is saved and where it is loaded: declare_padding(module, name, shape)"
        )


Likes = Callable[[StoredTensor, object, str], Iterable[object]]
"""What a target may be placed like, best first, by stored tensor, current value and path."""


def placed_like(likes: Likes) -> MakeTarget:
    """Makes targets placed like the first DTensor of the stored shape; else as it is stored."""

    def make(info: StoredTensor, current: object, path: str) -> object:
        targets = (zeros_placed_like(like, info) for like in likes(info, current, path))
        return next((target for target in targets if target is not None), Stored())

    return make


def likes_of_others(parameters: Iterable[torch.Tensor]) -> Likes:
    """For state that belongs to no one parameter: what is there now.

    Where nothing is there, the parameters of its shape, if these are placed alike.
    """
    by_shape: dict[tuple[int, ...], list[DTensor]] = {}
    for parameter in parameters:
        if isinstance(parameter, DTensor):
            by_shape.setdefault(tuple(parameter.shape), []).append(parameter)

    def likes(info: StoredTensor, current: object, path: str) -> Iterable[object]:
        del path
        same = by_shape.get(info.shape, [])
        is_alike = all(each.placements == same[0].placements for each in same)
        return same[:1] if current is None and is_alike else [current]

    return likes


def on_device_of(value: Any, param: OptimizerParameter) -> Any:
    """Return loaded state of one parameter; tensors in lists and dicts follow it to its device."""

    def move(_: str, tensor: torch.Tensor) -> torch.Tensor:
        is_placed = isinstance(tensor, DTensor)
        return tensor if is_placed else tensor.to(local_of(param.parameter).device)

    if type(value) is not dict:
        return map_tensors(value, move)
    return {n: v if isinstance(v, torch.Tensor) else map_tensors(v, move) for n, v in value.items()}


def main_target(
    param: OptimizerParameter, dtype: torch.dtype, padding: tuple[int, ...] | None
) -> object:
    """Return the target of a stored main parameter: itself, or memory to copy from.

    A parameter that is its own main one takes the value only if it can hold it.
    """
    updated = param.updated
    if updated is None or (not param.is_main and param.parameter.dtype != dtype):
        return Transient()
    if not param.is_main or updated.dtype != dtype:
        updated = torch.zeros_like(updated.detach(), dtype=dtype)
    target = updated if param.over is None else param.marker("main", updated)
    return with_padding(target, param, padding)


def _target(
    param: OptimizerParameter,
    entry: str,
    stored: StoredTensor,
    *,
    on_device: bool,
    real_shape: tuple[int, ...] | None,
) -> object:
    """Return memory for a stored entry, placed like the parameter if it has its shape.

    Step counters stay whole on the host (on the parameter's device for fused and capturable
    optimizers), as torch keeps them.
    """
    parameter = param.parameter
    device = local_of(parameter).device
    if entry != "step" and _is_elementwise(tuple(parameter.shape), stored.shape, real_shape):
        if param.over is None:
            # Not zeros: a load fills every element, or nothing gets this memory.
            return torch.empty_like(
                parameter.detach(), dtype=stored.dtype, memory_format=torch.preserve_format
            )
        numel = 0 if param.updated is None else param.updated.numel()
        return param.marker(entry, torch.zeros(numel, dtype=stored.dtype, device=device))
    if param.over is not None and stored.shape != ():
        raise MismatchError(
            f"{stored.key} has shape {list(stored.shape)}, the parameter "
            f"{list(parameter.shape)}: a sharded optimizer takes elementwise state only; if "
            f"they differ by padding alone, declare it: declare_padding(module, name, shape)"
        )
    where = device if on_device else torch.device("cpu")
    return torch.zeros(stored.shape, dtype=stored.dtype, device=where)


def _is_elementwise(
    whole: tuple[int, ...], shape: tuple[int, ...], real_shape: tuple[int, ...] | None
) -> bool:
    """Return True if a stored entry has one element for each of the parameter's.

    If padding is declared, an entry of another size counts, so that it is refused as one of
    another real shape; one of a factored state has a dim of 1 if the parameter has more.

    Args:
        whole: The parameter's shape, padding included.
        shape: The entry's.
        real_shape: The parameter's without padding, if that is declared.
    """
    if real_shape is None:
        return shape == whole
    return shape == real_shape or (
        len(shape) == len(whole)
        and all(n > 1 or most <= 1 for n, most in zip(shape, whole, strict=True))
    )


def is_nothing(stored: StoredPart) -> bool:
    """Return True if an empty mapping is stored for the optimizer, as for a frozen module."""
    return isinstance(stored.node, Mapping) and not stored.node


def why_fresh(name: str, parameter: torch.Tensor, stored: StoredParameters) -> str | None:
    """Return why a parameter would start fresh; None if it loses nothing.

    A parameter that the saved run trained and that had no state (never stepped, unused) is restored
    exactly by having none. That is not so for one that the saved run did not have, or had frozen,
    while others had state.
    """
    if stored.state.get(name) is not None or not parameter.requires_grad:
        return None
    if not stored.state:
        return None
    if stored.homes.get(name) is None:
        return "the saved optimizer did not have this parameter"
    if stored.fact(name, "frozen") is True:
        return "it was frozen when it was saved and is trained now"
    return None


def absent_groups(
    groups: Sequence[Mapping[str, Any]],
    named: Iterable[tuple[str, OptimizerParameter]],
    known_parameters: StoredParameters,
) -> dict[str, object]:
    """Return groups and settings of groups of which the checkpoint knows nothing, by path."""
    result: dict[str, object] = {}
    stored = known_parameters.part
    by_group: list[dict[str, OptimizerParameter]] = [{} for _ in groups]
    for name, param in named:
        by_group[param.group][name] = param
    for i, (group, members) in enumerate(zip(groups, by_group, strict=True)):
        known = [home for name in members if (home := known_parameters.home(name)) is not None]
        _refuse_joined(i, len(groups), sorted(set(known)), stored)
        if members and not known:
            listed = f"{', '.join([*members][:3])}{', …' if len(members) > 3 else ''}"
            result[f"groups.{i}"] = Fresh(f"the checkpoint knows none of its parameters: {listed}")
            continue
        keys = stored.keys_under("groups", min(known, default=i))
        if keys and members:
            optimizer = next(iter(members.values())).optimizer
            for key, is_required in _absent_settings(optimizer, group, keys):
                result[f"groups.{i}.{key}"] = Fresh("a setting it lacks", is_required)
            for key, why in _settings_not_taken(optimizer, group, stored, known[0]):
                result[f"groups.{i}.{key}"] = Fresh(why)
            if set(keys) != hyperparameters(group).keys():
                saved = _plain_settings(group, stored, known[0])
                _refuse_other_kind(group, saved, members, known_parameters)
    return result


def _plain_settings(group: Mapping[str, Any], stored: StoredPart, home: int) -> dict[str, Any]:
    """Return the settings of a group, those that are numbers or text, as they are stored."""
    saved = {key: stored.value("groups", home, key) for key in hyperparameters(group)}
    return {key: value for key, value in saved.items() if value is not None}


def _refuse_other_kind(
    group: Mapping[str, Any],
    saved: Mapping[str, Any],
    members: Mapping[str, OptimizerParameter],
    stored: StoredParameters,
) -> None:
    """Raise MismatchError if a class of torch's needs state that is not stored of any parameter.

    Factored state depends on how many dims a parameter has, so those of as many are taken together.

    Args:
        group: The settings now.
        saved: Those that are stored; one of another type than now is of another kind of optimizer.
        members: The parameters of the group, by name.
        stored: What the checkpoint has of them.
    """
    known: dict[int, dict[str, None]] = {}
    for name, param in members.items():
        entries = stored.state.get(name)
        if param.updated is not None and is_plain_dict(entries):
            known.setdefault(param.updated.ndim, {}).update(dict.fromkeys(entries))
    tried = {**group, **{k: v for k, v in saved.items() if _is_of_one_type(v, group[k])}}
    for num_dims, entries in known.items():
        optimizer = next(iter(members.values())).optimizer
        lacking = entries and _left_by_a_step(optimizer, tried, num_dims) - entries.keys()
        if lacking:
            raise MismatchError(
                f"{stored.part.name}: stored is the state of another kind of optimizer "
                f"({', '.join(entries)}), and {type(optimizer).__name__} needs "
                f"{', '.join(sorted(lacking))}; build the kind that was saved, or leave the "
                f"optimizer out of the load, so that it starts fresh"
            )


def _is_of_one_type(one: object, other: object) -> bool:
    """Return True for values of one type, or two numbers."""
    return type(one) is type(other) or (
        isinstance(one, int | float) and isinstance(other, int | float)
    )


def _left_by_a_step(optimizer: Any, group: Mapping[str, Any], num_dims: int) -> set[str]:
    """Return the entries that a step leaves with a parameter of one element.

    Only torch's code is tried, on the host; none are known of a class that wants a closure, or
    other gradients.
    """
    if not f"{type(optimizer).__module__}.".startswith("torch.optim."):
        return set()
    like = torch.zeros([1] * num_dims, requires_grad=True)
    like.grad = torch.ones_like(like)
    on_host = {**group, **dict.fromkeys(group.keys() & _ON_DEVICE, False)}
    try:
        made = _built_again(optimizer, on_host, like)
        with torch.no_grad():
            inspect.unwrap(type(optimizer).step)(made)  # without the hooks of all optimizers
    except Exception:
        return set()
    return set(made.state[like])


def _refuse_joined(
    position: int, num_groups: int, homes: Sequence[int], stored: StoredPart
) -> None:
    """Raise MismatchError if the members of a group had other settings than one another.

    Settings that are tensors are compared when they are loaded (`stored_settings`).
    """
    nodes = [stored.at("groups", home) for home in homes]
    are_plain = not any(any(tensor_keys(node)) for node in nodes)
    if are_plain and any(node != nodes[0] for node in nodes):
        num_stored = len(items_of(stored.at("groups")) or ())
        raise joined_groups(position, num_groups, homes, num_stored, where=stored.name)


def _absent_settings(
    optimizer: Any, group: Mapping[str, Any], stored: Sequence[str]
) -> Iterator[tuple[str, bool]]:
    """Yield each setting of a group that the checkpoint lacks, and whether the optimizer needs it.

    Those that its class fills in for checkpoints of older versions are not among them.
    """
    lacking = [name for name in hyperparameters(group) if name not in stored]
    if not lacking:
        return
    filled = _filled_in(optimizer, {name: group[name] for name in stored if name in group})
    for name in lacking:
        if name not in filled:
            yield name, name in optimizer.defaults


def _settings_not_taken(
    optimizer: Any, group: Mapping[str, Any], stored: StoredPart, home: int
) -> Iterator[tuple[str, str]]:
    """Yield each stored setting that the class replaces by its own at a load, and how.

    `AdamW` is an `Adam` with a flag, which it sets itself: of a checkpoint of `Adam` it has
    everything, and would continue with another update. Only torch's code is tried: that of others
    may do more than set entries.
    """
    if not type(optimizer).__setstate__.__module__.startswith("torch."):
        return
    plain = _plain_settings(group, stored, home)
    taken = _after_load(optimizer, plain)
    for key, value in plain.items():
        if type(taken.get(key)) is type(value) and not equal_trees(taken[key], value):
            kind = type(optimizer).__name__
            yield key, f"stored is {value!r}, {kind} has {taken[key]!r}, whatever is loaded"


def _filled_in(optimizer: Any, group: dict[str, Any]) -> set[str]:
    """Return the settings that the class adds to a group, as torch's own load does."""
    return set(_after_load(optimizer, group)) - set(group)


def _after_load(optimizer: Any, group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a group as the class has them when it is given these."""
    bare = {**group, "params": []}
    try:
        probe = object.__new__(type(optimizer))
        probe.__dict__.update(vars(optimizer), defaults=dict(optimizer.defaults))
        probe.__setstate__({"state": defaultdict(dict), "param_groups": [bare]})
    except Exception:  # a class that cannot be probed like this adds nothing
        return dict(group)
    return hyperparameters(bare)


def as_built(param: OptimizerParameter, current: object) -> Any:
    """Return the state that a parameter has right after its optimizer is built; None for most.

    Some classes allocate state when they are built and rely on it (Adagrad), so that no state at
    all would not be a fresh start.

    Args:
        current: What the parameter has now; used only to see whether there is any.
    """
    if not current or param.updated is None:
        return None
    group = param.optimizer.param_groups
    mine = next((g for g in group if any(p is param.updated for p in g["params"])), None)
    if mine is None:
        return None
    like = param.updated.detach().clone().requires_grad_(param.updated.is_floating_point())
    try:
        fresh = _built_again(param.optimizer, mine, like)
    except Exception:  # a class with other arguments: it starts with nothing
        return None
    return dict(fresh.state[like]) if like in fresh.state else None


def _built_again(optimizer: Any, group: Mapping[str, Any], parameter: torch.Tensor) -> Any:
    """Return a new optimizer of the same class, of one parameter with the settings of a group."""
    kind: Any = type(optimizer)
    taken = inspect.signature(kind).parameters
    built = {name: value for name, value in optimizer.defaults.items() if name in taken}
    return kind([{**hyperparameters(group), "params": [parameter]}], **built)
