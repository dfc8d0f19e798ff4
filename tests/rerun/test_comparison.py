"""Relative differences: defined for every pair, symmetric, right to the last places (D11)."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.rerun.values import describe, relative_difference

INF, NAN = math.inf, math.nan
FLOAT_DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
FLOAT8_DTYPES = [
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
]

TABLE: list[tuple[float, float, float]] = [
    (1, -1, 2.0),
    (500, -500, 2.0),
    (INF, -INF, INF),
    (INF, INF, 0.0),
    (-INF, -INF, 0.0),
    (NAN, NAN, 0.0),
    (NAN, 1, INF),
    (NAN, INF, INF),
    (INF, 1, INF),
    (0, 0, 0.0),
    (0.0, -0.0, 0.0),
    (0, 1e-9, 1.0),
    (0, -1e-9, 1.0),
    (1e308, -1e308, 2.0),
    (1.7e308, -1e-308, 1.0),
    (5e-324, -5e-324, 2.0),
    (5e-324, 1e-323, 0.5),
    (1.0, 1.5, 1 / 3),
]


def exact(a: float, b: float) -> float:
    """The definition, by fractions."""
    if a == b or (a != a and b != b):
        return 0.0
    if not (math.isfinite(a) and math.isfinite(b)):
        return INF
    x, y = Fraction(a), Fraction(b)
    return float(abs(x - y) / max(abs(x), abs(y)))


def as_number(x: float) -> object:
    return x


def as_scalar(x: float) -> object:
    return torch.tensor(x, dtype=torch.float64)


def as_vector(x: float) -> object:
    return torch.tensor([2.0, x, 3.0], dtype=torch.float64)


@pytest.mark.parametrize("form", [as_number, as_scalar, as_vector])
@pytest.mark.parametrize(("a", "b", "expected"), TABLE)
def test_the_table_of_pairs(
    a: float, b: float, expected: float, form: Callable[[float], object]
) -> None:
    assert relative_difference(form(a), form(b)) == pytest.approx(expected, rel=1e-15)
    assert relative_difference(form(b), form(a)) == relative_difference(form(a), form(b))


any_float = st.floats(allow_nan=True, allow_infinity=True, allow_subnormal=True)


@given(any_float, any_float)
def test_numbers_are_right_and_symmetric(a: float, b: float) -> None:
    assert relative_difference(a, b) == pytest.approx(exact(a, b), rel=1e-15)
    assert (relative_difference(a, b) == 0.0) == (exact(a, b) == 0.0)
    assert relative_difference(b, a) == relative_difference(a, b)


@given(st.lists(st.tuples(any_float, any_float), min_size=1, max_size=6))
def test_several_numbers_have_the_difference_of_the_worst(
    pairs: list[tuple[float, float]],
) -> None:
    first = torch.tensor([a for a, _ in pairs], dtype=torch.float64)
    second = torch.tensor([b for _, b in pairs], dtype=torch.float64)
    expected = max(exact(a, b) for a, b in pairs)
    assert relative_difference(first, second) == pytest.approx(expected, rel=1e-15)
    assert relative_difference(second, first) == relative_difference(first, second)
    assert relative_difference(first.view(-1, 1), second.numpy()) == relative_difference(
        first, second
    )


@given(any_float, st.integers(0, 2**60))
def test_a_bit_flip_is_a_difference_unless_it_keeps_a_nan_or_zero(x: float, bit: int) -> None:
    first = torch.tensor(x, dtype=torch.float64)
    second = (first.view(torch.int64) ^ (1 << (bit % 64)) - (2**64 if bit % 64 == 63 else 0)).view(
        torch.float64
    )
    expected = exact(float(first), float(second))
    assert relative_difference(first, second) == pytest.approx(expected, rel=1e-15)
    assert (expected == 0.0) == (x == 0.0 == float(second) or (x != x and bool(second.isnan())))


@pytest.mark.parametrize("dtype", [*FLOAT_DTYPES, *FLOAT8_DTYPES], ids=str)
def test_floats_of_every_width_by_all_their_bits(dtype: torch.dtype) -> None:
    """All pairs of 8-bit patterns; of the wider types, patterns over their whole range."""
    width = torch.empty(0, dtype=dtype).element_size()
    raw = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[width]
    patterns = (torch.arange(-128, 128, dtype=torch.int64) << (8 * width - 8)).to(raw).view(dtype)
    numbers = patterns.to(torch.float64).tolist()
    for shift in (0, 1, 77, 128, 200):
        shifted = torch.roll(patterns.view(raw), shift).view(dtype)
        others = numbers[-shift:] + numbers[:-shift] if shift else numbers
        for i in range(0, 256, 17):
            expected = exact(numbers[i], others[i])
            assert relative_difference(patterns[i], shifted[i]) == pytest.approx(expected)
        expected = max(map(exact, numbers[:64], others[:64]))
        assert relative_difference(patterns[:64], shifted[:64]) == pytest.approx(expected)


def test_what_is_one_value_in_several_forms() -> None:
    assert relative_difference(torch.tensor([[1.5]]), 1.5) == 0.0
    assert relative_difference(3.0, np.float32(1.5)) == 0.5
    assert relative_difference(torch.ones(3, requires_grad=True) * 2, torch.full((3,), 2.0)) == 0.0
    assert relative_difference(torch.tensor([True, False]), np.array([1, 0])) == 0.0
    assert relative_difference(torch.ones(4), torch.ones(4).bfloat16()) == 0.0
    assert relative_difference(torch.ones(4), torch.ones(5)) == INF
    assert relative_difference(torch.ones(4), 1.0) == INF
    assert relative_difference(torch.empty(0), torch.empty(0)) == 0.0


def test_a_description_is_json() -> None:
    assert describe(1.5) == 1.5
    assert describe(True) == 1.0
    assert describe(2**53) == 2.0**53
    assert [describe(x) for x in (NAN, INF, -INF)] == ["nan", "inf", "-inf"]
    assert describe(torch.tensor(NAN)) == "nan"
    assert describe(torch.tensor([[1.0, INF]], dtype=torch.bfloat16)) == [1.0, "inf"]
    json.dumps(describe(torch.full((64,), NAN)), allow_nan=False)
