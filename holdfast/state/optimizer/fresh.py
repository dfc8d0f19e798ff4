"""What of an optimizer starts fresh in a load, because the checkpoint knows nothing of it."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from holdfast.state.markers import Fresh
from holdfast.state.match.nodes import StoredPart
from holdfast.state.optimizer.param_groups import hyperparameters
from holdfast.state.optimizer.protocol import OptimizerParameter


def is_nothing(stored: StoredPart) -> bool:
    """Whether an empty mapping is stored in the optimizer's place, as for a frozen module."""
    return isinstance(stored.node, Mapping) and not stored.node


def why_fresh(name: str, parameter: torch.Tensor, stored: StoredPart) -> str | None:
    """Why a parameter would start fresh; None where its state is stored, or there was none to lose.

    A parameter that the saved run trained and that had no state (never stepped, unused) is restored
    exactly by having none. That is not so for one that the saved run did not have, or had frozen,
    while others had state.
    """
    if stored.has("state", name) or not parameter.requires_grad:
        return None
    if not stored.keys_under("state"):
        return None
    if not stored.has("membership", name):
        return "the saved optimizer did not have this parameter"
    if stored.at("parameters", name, "frozen") is True:
        return "it was frozen when it was saved and is trained now"
    return None


def absent_groups(
    groups: Sequence[Mapping[str, Any]],
    named: Iterable[tuple[str, OptimizerParameter]],
    stored: StoredPart,
) -> dict[str, object]:
    """Groups and settings of groups of which the checkpoint knows nothing, by path."""
    result: dict[str, object] = {}
    homes = {name: stored.value("membership", name) for name in stored.keys_under("membership")}
    members: list[list[str]] = [[] for _ in groups]
    optimizers: dict[int, Any] = {}
    for name, param in named:
        members[param.group].append(name)
        optimizers[param.group] = param.optimizer
    for i, names in enumerate(members):
        known = [home for name in names if isinstance(home := homes.get(name), int)]
        if names and not known:
            listed = f"{', '.join(names[:3])}{', …' if len(names) > 3 else ''}"
            result[f"groups.{i}"] = Fresh(f"the checkpoint knows none of its parameters: {listed}")
            continue
        keys = stored.keys_under("groups", min(known, default=i))
        if keys and i in optimizers:
            for key, is_required in _absent_settings(optimizers[i], groups[i], keys):
                result[f"groups.{i}.{key}"] = Fresh("a setting it lacks", is_required)
    return result


def _absent_settings(
    optimizer: Any, group: Mapping[str, Any], stored: Sequence[str]
) -> Iterator[tuple[str, bool]]:
    """Each setting of a group that the checkpoint lacks, and whether the optimizer needs it.

    Those that its class fills in for checkpoints of older versions are not among them.
    """
    lacking = [name for name in hyperparameters(group) if name not in stored]
    if not lacking:
        return
    filled = _filled_in(optimizer, {name: group[name] for name in stored if name in group})
    for name in lacking:
        if name not in filled:
            yield name, name in optimizer.defaults


def _filled_in(optimizer: Any, group: dict[str, Any]) -> set[str]:
    """The settings that the class adds to a group with only these, as torch's own load does."""
    bare = {**group, "params": []}
    try:
        probe = object.__new__(type(optimizer))
        probe.__dict__.update(vars(optimizer), defaults=dict(optimizer.defaults))
        probe.__setstate__({"state": defaultdict(dict), "param_groups": [bare]})
    except Exception:  # a class that cannot be probed like this adds nothing
        return set()
    return set(bare) - set(group)


def as_built(param: OptimizerParameter, current: object) -> Any:
    """The state that a parameter has right after its optimizer is built; None for most.

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
    made: Any = type(param.optimizer)
    try:
        taken = inspect.signature(made).parameters
        built = {name: v for name, v in param.optimizer.defaults.items() if name in taken}
        fresh = made([{**hyperparameters(mine), "params": [like]}], **built)
    except Exception:  # a class with arguments of its own: it starts with nothing
        return None
    return dict(fresh.state[like]) if like in fresh.state else None
