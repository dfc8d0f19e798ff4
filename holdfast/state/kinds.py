"""Classes of a state's objects: what a load cannot tell by their entries.

RAdam has the entries of Adam, and a schedule of torch takes the state of every other one. A state
that another class has made fits, and training continues by another rule. That may be intended, so
it is not refused. It is noticed, because a checkpoint notes the class of each optimizer, of each
schedule, of whatever else has a state, and of the samplers and data sets of loaders.

A class is known by its package and its name in its module. Modules inside of a package move from
release to release, and a script's own classes are in `__main__` in one run and in the script's
module in the next.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.amp.grad_scaler import GradScaler
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from holdfast.state.optimizer_protocol import is_wrapper
from holdfast.state.schedules import schedules_in

_MAIN = "__main__"
_OF_LOADERS = ("dataset", "sampler")
"""Attributes of loaders with what a position in the data is a position of."""

Noted = Mapping[str, Sequence[str]]
"""By path in a part, the classes that ranks have had there when it was saved."""


def names_of(objects: Mapping[str, object]) -> dict[str, str]:
    """Return the name of each object's class, `module:name`, by the same path.

    Wrappers have none, since what they hold may be wrapped or not; nor do torch's scalers, which
    differ in whom they ask for infinities, and whose entries all mean the same.
    """
    return {
        path: f"{type(each).__module__}:{type(each).__qualname__}"
        for path, each in objects.items()
        if not isinstance(each, GradScaler) and not is_wrapper(each)
    }


def objects_in(owner: object) -> dict[str, object]:
    """Return an object with a state, and what is known inside of it, by path.

    Those are schedules, and the data set and the sampler of a loader.
    """
    # A user's own object is asked for no attribute: a property may raise before it is set up.
    if is_wrapper(owner) and isinstance(inner := getattr(owner, "scheduler", None), LRScheduler):
        owner = inner
    objects: dict[str, object] = {"": owner}
    objects |= {path.removeprefix("."): each for path, each in schedules_in(owner, "")}
    if isinstance(owner, DataLoader):
        members: Any = ((name, getattr(owner, name, None)) for name in _OF_LOADERS)
        objects |= {name: each for name, each in members if each is not None}
    return objects


def other_kinds(names: Mapping[str, str], noted: Noted | None, where: str) -> dict[str, str]:
    """Return the objects of another class than the one that was saved.

    Args:
        names: Of their classes now.
        noted: None if the save has noted none.
        where: Name of their part.

    Returns:
        By path, both classes in words.
    """
    return {
        f"{where}.{path}" if path else where: f"{name} takes the state of {', '.join(stored)}"
        for path, name in names.items()
        if (stored := (noted or {}).get(path)) and not any(_is_same(name, each) for each in stored)
    }


def _is_same(one: str, other: str) -> bool:
    """Return True for names of one class."""
    modules, names = zip(*(each.split(":", 1) for each in (one, other)), strict=True)
    packages = {module.partition(".")[0] for module in modules}
    return names[0] == names[1] and (len(packages) == 1 or _MAIN in packages)
