"""Checks of arguments: one function for each kind, the same everywhere.

Each returns the value as a Python type, which the caller keeps: numpy's numbers are accepted but
cannot be encoded. A bool is never a number, and only a bool is a flag.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
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
        value: An int, or an integer of numpy.
        name: Its name in messages, such as "ReducedOptimizer: divisor".
        least: Inclusive lower limit.
        below: Exclusive upper limit.
        hint: End of the message, such as "; 0 for never".
        error: The class to raise.

    Raises:
        HoldfastError: `value` is not an integer in this range; the class is `error`.
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
        value: An int, a float, or a number of numpy.
        name: Its name in messages.
        least: Inclusive lower limit.
        above: Exclusive lower limit.
        is_finite: Refuse infinity; NaN is always refused.
        hint: End of the message.

    Raises:
        ConfigError: `value` is not a number in this range.
    """
    excess = ""
    if not isinstance(value, bool) and isinstance(value, Real):
        try:
            number = float(value)
        except OverflowError:  # an int of more than 1024 bits
            number = math.inf
        if math.isinf(number) and value not in (math.inf, -math.inf):
            excess = ", which is beyond the range of a float (about 1.8e308)"
            number = math.nan
        in_range = (least is None or number >= least) and (above is None or number > above)
        if in_range and not math.isnan(number) and not (is_finite and math.isinf(number)):
            return number
    kind = "a finite number" if is_finite else "a number"
    if least is not None:
        kind += f" of at least {least:g}"
    if above is not None:
        kind += f" above {above:g}"
    raise ConfigError(f"{name} must be {kind}, got {_shown(value)}{excess}{hint}")


def check_choice(
    value: object,
    *,
    name: str,
    choices: Sequence[T],
    error: type[HoldfastError] = ConfigError,
) -> T:
    """Return the choice that equals `value`; True does not equal 1.

    Raises:
        HoldfastError: `value` is not among `choices`; the class is `error`.
    """
    for choice in choices:
        # The type first: `==` of an array is an array, and True == 1.
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
        ConfigError: `value` is anything else, such as 1 or "no".
    """
    return check_choice(value, name=name, choices=(True, False))


def check_instance(value: object, *, name: str, kind: type[T], hint: str = "") -> T:
    """Return `value` if it is an object of a class, and not the class itself.

    Args:
        value: Any object.
        name: The argument, for the message.
        kind: The class that it must be of.
        hint: What the message ends with.

    Raises:
        ConfigError: `value` is anything else.
    """
    if not isinstance(value, kind):
        raise ConfigError(f"{name} must be a {kind.__name__}, got {_shown(value)}{hint}")
    return value


def check_callable(value: object, *, name: str) -> None:
    """Raise ConfigError unless `value` is None or can be called.

    Args:
        value: Any object.
        name: The argument, for the message.
    """
    if value is not None and not callable(value):
        raise ConfigError(f"{name} must be a function, got {_shown(value)}")


def check_patterns(value: object, *, name: str) -> tuple[str, ...]:
    """Return patterns of names as a tuple; one alone is taken for a list of one.

    Raises:
        ConfigError: `value` is anything else.
    """
    if isinstance(value, str):
        return (value,)
    if isinstance(value, Iterable) and not isinstance(value, bytes | bytearray):
        patterns = tuple(value)
        if all(isinstance(pattern, str) for pattern in patterns):
            return patterns
        value = patterns
    raise ConfigError(f"{name} must be a pattern or several, got {_shown(value)}")


def _shown(value: object) -> str:
    """Return the repr of a value on one line, shortened for a message."""
    try:
        text = repr(value)
    except ValueError:  # an int of more digits than Python prints
        return f"an {type(value).__name__} of thousands of digits"
    text = " ".join(text.split())
    return text if len(text) <= 80 else f"{text[:77]}..."
