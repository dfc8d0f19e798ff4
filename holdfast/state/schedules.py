"""Schedules of learning rates: what a load of their state cannot bring by itself.

A schedule has values for parameter groups by position, and an optimizer's groups are found by their
parameters. If a program makes the groups in another order, the values follow them.

torch stores the constants of most schedules. Of `LambdaLR` and of the `scale_fn` of `CyclicLR` it
stores the attributes of a callable object, and nothing of a function, a method or a partial: their
constants are in the program. A run that resumes with others (another number of warm-up steps,
another total) continues by another schedule. That may be intended, so it is not refused. It is
noticed, because the rates of the last step are stored, too.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import FunctionType, MethodType, NoneType
from typing import Any

from torch.optim.lr_scheduler import CyclicLR, LambdaLR, LRScheduler

from holdfast.errors import MismatchError
from holdfast.state.optimizer_protocol import GroupLoaded
from holdfast.state.tensor_elements import equal_trees

_TOLERANCE = 1e-6
"""Relative: a rate that is a tensor is rounded to float32."""
_BY_GROUP = ("base_lrs", "_last_lr", "max_lrs", "min_lrs", "base_momentums", "max_momentums")
"""Attributes of torch's schedules that have a value for each parameter group, by position."""
_OF_ALL = ("_schedule_phases",)
"""Lists of torch's schedules that are the same for all groups."""
_FUNCTIONS = (FunctionType, MethodType, partial)
"""What torch stores nothing of."""
_PARTS = "_schedulers"
"""Attribute with the schedules that one is made of."""
_FIX = (
    "build the parameter groups as the saved run did, in its order; or leave the schedule out of "
    "the state, and make it for the groups that are there now"
)


def other_rates(schedule: object, path: str) -> dict[str, str]:
    """Return the schedules whose functions compute other rates than those of their last step.

    Args:
        schedule: One, several in one (`SequentialLR`, `ChainedScheduler`), or a wrapper of one, as
            it is after a load.
        path: Its name.

    Returns:
        By path, both rates of the first parameter group that differs, in words.

    Cost: one call of each function.
    """
    named: dict[str, str] = {}
    for where, each in schedules_in(schedule, path):
        for stored, computed in _rates(each):
            if not math.isclose(stored, computed, rel_tol=_TOLERANCE):
                text = (
                    f"{where}: {computed:.6g} for epoch {each.last_epoch}, stored is {stored:.6g}"
                )
                named.setdefault(where, text)
    return named


def values_by_group(schedule: object, path: str) -> dict[str, list[object]]:
    """Return a copy of the values that a schedule has for each parameter group, by path.

    Args:
        schedule: As of `other_rates`.
        path: Its name.
    """
    return {
        f"{where}.{name}": copy.deepcopy(values)
        for where, each in schedules_in(schedule, path)
        for name, values in vars(each).items()
        if name in _BY_GROUP and isinstance(values, list)
    }


def follow_groups(
    schedule: object,
    path: str,
    groups: Mapping[int, GroupLoaded],
    built: Mapping[str, Sequence[object]],
) -> None:
    """Give a schedule that was loaded the values of the groups that its optimizer has now.

    Args:
        schedule: As of `other_rates`.
        path: Its name.
        groups: Of an optimizer that the same load has filled; `OptimizerState.groups_loaded`.
        built: `values_by_group` of before the load, for groups that are new.

    Raises:
        MismatchError: It has other values by position of which nothing tells to what they belong.
    """
    for where, each in schedules_in(schedule, path):
        optimizer = getattr(each, "optimizer", None)
        held = list(map(groups.get, map(id, getattr(optimizer, "param_groups", ()))))
        loaded = [group for group in held if group is not None]
        if not loaded or len(loaded) < len(held):
            continue  # the schedule of another optimizer
        # One schedule for all optimizers that a chained one has, or for one of them.
        is_whole = len(loaded) == len(groups)
        homes = [[h - (0 if is_whole else first) for h in homes] for homes, first in loaded]
        lists = {name: values for name, values in vars(each).items() if isinstance(values, list)}
        num_stored = max((len(lists[name]) for name in _BY_GROUP if name in lists), default=0)
        if homes == [[position] for position in range(num_stored)]:
            continue
        for name, values in lists.items():
            if name in _BY_GROUP:
                own = built.get(f"{where}.{name}", ())
                setattr(each, name, _moved(values, homes, own, path=f"{where}.{name}"))
            elif len(values) == num_stored and name not in _OF_ALL and not hasattr(each, _PARTS):
                _refuse_other_order(values, homes, path=f"{where}.{name}")


def _moved(
    values: Sequence[object], homes: Sequence[Sequence[int]], built: Sequence[object], *, path: str
) -> list[object]:
    """Return the value of each group.

    Args:
        values: As stored.
        homes: For each group now, which it was when it was saved; none for a new one.
        built: The values of before the load.
        path: Of the values.
    """
    moved: list[object] = []
    for position, each in enumerate(homes):
        known, source = (values, each) if each else (built, [position])
        if source[-1] >= len(known) or not all(
            equal_trees(known[other], known[source[0]]) for other in source
        ):
            raise MismatchError(f"{path}: no value for group {position} of the optimizer; {_FIX}")
        moved.append(copy.deepcopy(known[source[0]]))  # two groups may have come from one
    return moved


def _refuse_other_order(
    values: Sequence[object], homes: Sequence[Sequence[int]], *, path: str
) -> None:
    """Raise MismatchError if a group had another value than the one at its position.

    Rules of a `LambdaLR` are the program's and in its order, but for what callable objects keep.
    """
    held = [getattr(each, "__dict__", each) for each in values]
    for position, each in enumerate(homes):
        for other in each:
            if position < len(held) > other and not equal_trees(held[position], held[other]):
                raise MismatchError(
                    f"{path}: these are values of parameter groups by position, and group "
                    f"{position} of the optimizer was group {other} of the saved run; {_FIX}"
                )


def schedules_in(schedule: object, path: str) -> Iterator[tuple[str, Any]]:
    """Yield each schedule, and those in it, with its path."""
    if isinstance(schedule, LRScheduler):
        yield path, schedule
        if not hasattr(schedule, _PARTS):
            return
    for name, value in getattr(schedule, "__dict__", {}).items():
        several = isinstance(value, list | tuple)
        for number, each in enumerate(value if several else [value]):
            if isinstance(each, LRScheduler):
                below = f"{path}.{name}.{number}" if several else f"{path}.{name}"
                yield from schedules_in(each, below)


def _rates(schedule: Any) -> Iterator[tuple[float, float]]:
    """Yield each stored rate that follows from a function, and what the function gives now.

    A schedule that has not begun has no rate. A callable object is left alone, since what it keeps
    is stored.
    """
    if type(schedule) not in (LambdaLR, CyclicLR) or schedule.last_epoch < 0:
        return
    if type(schedule) is LambdaLR:
        rules = zip(schedule.lr_lambdas, schedule.base_lrs, schedule._last_lr, strict=False)
        for rule, base, last in rules:
            if isinstance(rule, _FUNCTIONS):
                yield float(last), float(base * _factor(rule, schedule.last_epoch))
    elif isinstance(schedule._scale_fn_custom, (*_FUNCTIONS, NoneType)):
        probe = copy.copy(schedule)
        probe.cycle_momentum = False  # with it a question sets the optimizer's momentum
        probe._get_lr_called_within_step = True
        if probe._scale_fn_custom is not None:
            probe._scale_fn_custom = partial(_factor, probe._scale_fn_custom)
        yield from zip(map(float, schedule._last_lr), map(float, probe.get_lr()), strict=False)


def _factor(rule: Callable[[float], float], epoch: float) -> float:
    """Return what a function computes; an object that it is a method of stays as it is."""
    owner: object = rule
    while isinstance(owner, partial):
        owner = owner.func
    owner = owner.__self__ if isinstance(owner, MethodType) else owner
    attributes = getattr(owner, "__dict__", {})
    kept = dict(attributes)
    try:
        return rule(epoch)
    finally:
        if not isinstance(owner, type):  # whose attributes are not in a dict of their own
            attributes.clear()
            attributes.update(kept)
