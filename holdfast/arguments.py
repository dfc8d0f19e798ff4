"""Checks of what callers pass: one function for each kind of argument, the same everywhere.

Each returns the value in Python's own type, which the caller keeps: numbers of numpy are accepted
and would not survive encoding. A bool is never a number, and only a bool is a flag.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral, Real
from typing import TypeVar

from holdfast.errors import ConfigError, HoldfastError

T = TypeVar("T")


def check_int(
    value: object,
    *,
    name: str,
    least: int | None = None,
    below: int | None = None,
    hint: str = "",
    error: type[HoldfastError] = ConfigError,
) -> int:
    """Return `value` as an int.

    Args:
        value: an int, or an integer of numpy.
        name: what messages call it, such as "ReducedOptimizer: divisor".
        least: the smallest one allowed.
        below: every one allowed is smaller.
        hint: ends the message, such as "; 0 for never".
        error: the class to raise.

    Raises:
        HoldfastError: of class `error`, if it is not an integer in this range.
    """
    if not isinstance(value, bool) and isinstance(value, Integral):
        number = int(value)
        if (least is None or number >= least) and (below is None or number < below):
            return number
    if least is not None and below is not None:
        digits = len(str(below)) - 1
        shown = f"10**{digits}" if digits > 5 and below == 10**digits else str(below)
        span = f" in [{least}, {shown})"
    elif least is not None:
        span = f" of at least {least}"
    else:
        span = "" if below is None else f" below {below}"
    raise error(f"{name} must be an integer{span}, got {_shown(value)}{hint}")


def check_number(
    value: object,
    *,
    name: str,
    least: float | None = None,
    above: float | None = None,
    is_finite: bool = False,
    hint: str = "",
) -> float:
    """Return `value` as a float.

    Args:
        value: an int, a float, or a number of numpy.
        name: what messages call it.
        least: the smallest one allowed.
        above: every one allowed is larger.
        is_finite: refuse infinity; NaN is refused always.
        hint: ends the message.

    Raises:
        ConfigError: if it is not a number in this range.
    """
    if not isinstance(value, bool) and isinstance(value, Real):
        try:
            number = float(value)
        except OverflowError:  # an int of more than 1024 bits
            number = math.nan
        in_range = (least is None or number >= least) and (above is None or number > above)
        if in_range and not math.isnan(number) and not (is_finite and math.isinf(number)):
            return number
    kind = "a finite number" if is_finite else "a number"
    if least is not None:
        kind += f" of at least {least:g}"
    if above is not None:
        kind += f" above {above:g}"
    raise ConfigError(f"{name} must be {kind}, got {_shown(value)}{hint}")


def check_choice(
    value: object,
    *,
    name: str,
    choices: Sequence[T],
    error: type[HoldfastError] = ConfigError,
) -> T:
    """Return the one of `choices` that `value` equals; True is not 1.

    Raises:
        HoldfastError: of class `error`, if it equals none.
    """
    for choice in choices:
        # By type first: `==` of an array is an array, and True == 1.
        if isinstance(choice, int) and not isinstance(choice, bool):
            is_same = isinstance(value, Integral) and not isinstance(value, bool)
        else:
            is_same = isinstance(value, type(choice))
        if is_same and value == choice:
            return choice
    *most, last = (repr(choice) for choice in choices)
    listed = f"{', '.join(most)} or {last}" if most else last
    raise error(f"{name} must be {listed}, got {_shown(value)}")


def check_flag(value: object, *, name: str) -> bool:
    """Return `value` if it is True or False.

    Raises:
        ConfigError: if it is anything else, such as 1 or "no".
    """
    return check_choice(value, name=name, choices=(True, False))


def _shown(value: object) -> str:
    """Return the repr of a value, shortened: it ends up in a message of one line."""
    try:
        text = repr(value)
    except ValueError:  # an int of more digits than Python prints
        return f"a {type(value).__name__}"
    text = " ".join(text.split())
    return text if len(text) <= 80 else f"{text[:77]}..."
