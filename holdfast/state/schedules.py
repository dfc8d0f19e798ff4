"""Schedules of learning rates whose rule is a function of the program, which no checkpoint has.

torch stores the constants of most schedules. Of `LambdaLR` it stores the attributes of a callable
object, and nothing of a function: its constants are in the program. A run that resumes with others
(another number of warm-up steps, another total) continues by another schedule. That may be
intended, so it is not refused. It is noticed, because the rates of the last step are stored, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from types import FunctionType
from typing import Any

from torch.optim.lr_scheduler import LambdaLR, LRScheduler

_TOLERANCE = 1e-6
"""Relative: a rate that is a tensor is rounded to float32."""


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
    return {
        where: f"{where}: {computed:.6g} for epoch {each.last_epoch}, stored is {stored:.6g}"
        for where, each in _lambda_schedules(schedule, path)
        for stored, computed in [_first_difference(each)]
        if not math.isclose(stored, computed, rel_tol=_TOLERANCE)
    }


def _lambda_schedules(schedule: object, path: str) -> Iterator[tuple[str, Any]]:
    if type(schedule) is LambdaLR:
        yield path, schedule
        return
    for name, value in getattr(schedule, "__dict__", {}).items():
        several = isinstance(value, list | tuple)
        for number, each in enumerate(value if several else [value]):
            if isinstance(each, LRScheduler):
                below = f"{path}.{name}.{number}" if several else f"{path}.{name}"
                yield from _lambda_schedules(each, below)


def _first_difference(schedule: Any) -> tuple[float, float]:
    """Return the stored and the computed rate of the first group that differs; zeros if none does.

    A schedule that has not begun has no rate. A callable object is left alone: what it keeps is
    stored, and a call may change it.
    """
    if schedule.last_epoch >= 0:
        rules = zip(schedule.lr_lambdas, schedule.base_lrs, schedule._last_lr, strict=False)
        for rule, base, last in rules:
            if isinstance(rule.func if isinstance(rule, partial) else rule, FunctionType):
                stored, computed = float(last), float(base * rule(schedule.last_epoch))
                if not math.isclose(stored, computed, rel_tol=_TOLERANCE):
                    return stored, computed
    return 0.0, 0.0
