"""Checks of arguments: what is accepted comes back in Python's own type, anything else is named."""

from __future__ import annotations

import math
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.arguments import check_choice, check_flag, check_int, check_number
from holdfast.errors import ConfigError, LayoutError

CHOICES: tuple[Any, ...] = ("wait", "skip", 1, 2)

ODD = st.one_of(
    st.booleans(),
    st.none(),
    st.text(max_size=5),
    st.sampled_from(["wait", "1", b"1", [], [1], {}, (), np.str_("skip"), object(), int]),
    st.integers(),
    st.integers(-3, 3),
    st.sampled_from([10**400, -(10**5000), 2**63, 2**64, 1 << 1024]),
    st.floats(),
    st.sampled_from([math.nan, math.inf, -math.inf, -0.0, 1.0, 2.0]),
    st.sampled_from([Fraction(3, 2), Decimal(1), Decimal("NaN"), 1j]),
    st.sampled_from(
        [np.bool_(True), np.int8(-1), np.int64(2), np.uint64(2**64 - 1), np.float32(1.5),
         np.float64("nan"), np.float16("inf"), np.array(1), np.array([1, 2]), np.array([])]
    ),
    st.sampled_from([torch.tensor(1), torch.tensor([1.0, 2.0]), torch.tensor(True)]),
)  # fmt: skip


def outcome(check: Callable[[], object]) -> object:
    """What a check returns; the message where it refuses."""
    error: ConfigError | None = None
    try:
        return check()
    except ConfigError as caught:
        error = caught
    assert str(error).startswith("f: x must be ")
    assert len(str(error)) < 200
    assert "\n" not in str(error)
    return error


@given(value=ODD, least=st.none() | st.integers(-2, 3), below=st.none() | st.integers(4, 2**70))
def test_an_integer_is_an_int_or_of_numpy_and_in_range(
    value: Any, least: int | None, below: int | None
) -> None:
    is_valid = type(value) is int or isinstance(value, np.integer)
    if is_valid:
        is_valid = (least is None or value >= least) and (below is None or int(value) < below)
    result = outcome(lambda: check_int(value, name="f: x", least=least, below=below))
    assert (type(result) is int) == is_valid
    if is_valid:
        assert result == int(value)


@given(
    value=ODD,
    least=st.none() | st.floats(-2, 3),
    above=st.none() | st.floats(-2, 3),
    is_finite=st.booleans(),
)
def test_a_number_is_never_nan_and_in_range(
    value: Any, least: float | None, above: float | None, is_finite: bool
) -> None:
    kinds = (int, float, Fraction, np.integer, np.floating)
    is_valid = isinstance(value, kinds) and type(value) is not bool
    is_valid = is_valid and not (isinstance(value, int) and abs(value) >= 1 << 1024)
    if is_valid:
        number = float(value)
        is_valid = not math.isnan(number) and not (is_finite and math.isinf(number))
        is_valid = is_valid and (least is None or number >= least)
        is_valid = is_valid and (above is None or number > above)
    result = outcome(
        lambda: check_number(value, name="f: x", least=least, above=above, is_finite=is_finite)
    )
    assert (type(result) is float) == is_valid
    if is_valid:
        assert result == float(value)


@given(value=ODD)
def test_a_choice_is_one_of_them_and_true_is_not_one(value: Any) -> None:
    result = outcome(lambda: check_choice(value, name="f: x", choices=CHOICES))
    is_text = isinstance(value, str) and value in ("wait", "skip")
    is_number = type(value) is int or isinstance(value, np.integer)
    is_valid = is_text or (is_number and int(value) in (1, 2))
    assert isinstance(result, ConfigError) != is_valid
    if is_valid:
        assert result == value
        assert type(result) in (str, int)


@given(value=ODD)
def test_a_flag_is_a_bool(value: Any) -> None:
    result = outcome(lambda: check_flag(value, name="f: x"))
    assert (result is value) == (type(value) is bool)


@pytest.mark.parametrize(
    ("check", "message"),
    [
        (
            lambda: check_int("two", name="ReducedOptimizer: divisor", least=1),
            "ReducedOptimizer: divisor must be an integer of at least 1, got 'two'",
        ),
        (lambda: check_int(4, name="n", least=0, below=4, hint="; so"),
         "n must be an integer in [0, 4), got 4; so"),
        (lambda: check_int(4, name="n", below=4), "n must be an integer below 4, got 4"),
        (lambda: check_number(0, name="s", above=0, is_finite=True),
         "s must be a finite number above 0, got 0"),
        (lambda: check_choice("x", name="c", choices=("a", "b", "c")),
         "c must be 'a', 'b' or 'c', got 'x'"),
        (lambda: check_flag(1, name="f"), "f must be True or False, got 1"),
    ],
)  # fmt: skip
def test_messages_name_the_argument_the_range_and_the_value(
    check: Callable[[], object], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        check()
    assert str(caught.value) == message


def test_the_class_of_the_error_is_the_callers() -> None:
    with pytest.raises(LayoutError):
        check_int(0, name="tp", least=1, error=LayoutError)
    with pytest.raises(LayoutError):
        check_choice(0, name="tp", choices=(1,), error=LayoutError)


def test_a_number_that_no_float_holds_is_named_as_that() -> None:
    """Before, 10**400 was said not to be "a number of at least 0", which it is."""
    for value in (10**400, -(10**400), 10**5000, Fraction(10**400), np.longdouble("1e4000")):
        with pytest.raises(ConfigError, match="beyond the range of a float"):
            check_number(value, name="max_norm", least=0)
    assert check_number(math.inf, name="max_norm", least=0) == math.inf
