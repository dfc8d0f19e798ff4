"""Relative differences: defined for every pair, symmetric, right to the last places (D11)."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.errors import ConfigError
from holdfast.rerun.values import Value, describe, relative_difference

INF, NAN = math.inf, math.nan
FLOAT_DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
FLOAT8_DTYPES = [
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
]
INTEGER_DTYPES = [torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int32, torch.int64]

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


def as_number(x: float) -> Value:
    return x


def as_scalar(x: float) -> Value:
    return torch.tensor(x, dtype=torch.float64)


def as_vector(x: float) -> Value:
    return torch.tensor([2.0, x, 3.0], dtype=torch.float64)


def as_complex(x: float) -> Value:
    return torch.tensor([complex(x, 0.0)], dtype=torch.complex128)


@pytest.mark.parametrize("form", [as_number, as_scalar, as_vector, as_complex])
@pytest.mark.parametrize(("a", "b", "expected"), TABLE)
def test_the_table_of_pairs(
    a: float, b: float, expected: float, form: Callable[[float], Value]
) -> None:
    assert relative_difference(form(a), form(b)) == pytest.approx(expected, rel=1e-15)
    assert relative_difference(form(b), form(a)) == relative_difference(form(a), form(b))


any_float = st.floats(allow_nan=True, allow_infinity=True, allow_subnormal=True)


@given(any_float, any_float)
def test_numbers_are_right_and_symmetric(a: float, b: float) -> None:
    assert relative_difference(a, b) == exact(a, b)
    assert relative_difference(b, a) == exact(a, b)


@given(st.lists(st.tuples(any_float, any_float), min_size=1, max_size=6))
def test_tensors_have_the_difference_of_their_worst_element(
    pairs: list[tuple[float, float]],
) -> None:
    first = torch.tensor([a for a, _ in pairs], dtype=torch.float64)
    second = torch.tensor([b for _, b in pairs], dtype=torch.float64)
    expected = max(exact(a, b) for a, b in pairs)
    assert relative_difference(first, second) == pytest.approx(expected, rel=1e-15)
    assert relative_difference(second, first) == relative_difference(first, second)
    assert relative_difference(first.view(-1, 1), second.view(-1, 1)) == relative_difference(
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


integers = st.integers(-(2**63), 2**63 - 1) | st.integers(-4, 4) | st.just(-(2**63))


@given(integers, integers)
def test_integers_beyond_the_precision_of_floats(a: int, b: int) -> None:
    expected = float(Fraction(abs(a - b), max(abs(a), abs(b), 1)))
    assert relative_difference(a, b) == expected
    tensors = torch.tensor([a, 0], dtype=torch.int64), torch.tensor([b, 0], dtype=torch.int64)
    assert relative_difference(*tensors) == pytest.approx(expected, rel=1e-15)
    assert (relative_difference(*tensors) == 0.0) == (a == b)


@given(st.integers(0, 2**64 - 1), st.integers(-(2**63), 2**63 - 1))
def test_unsigned_against_signed_integers(a: int, b: int) -> None:
    expected = float(Fraction(abs(a - b), max(abs(a), abs(b), 1)))
    first = torch.from_numpy(np.array([a], dtype=np.uint64))
    second = torch.tensor([b], dtype=torch.int64)
    assert relative_difference(first, second) == pytest.approx(expected, rel=1e-15)
    assert relative_difference(second, first) == relative_difference(first, second)


def test_integers_of_any_size_and_next_to_floats() -> None:
    assert relative_difference(2**60, 2**60 + 1) == pytest.approx(2.0**-60)
    assert relative_difference(10**400, -(10**400)) == 2.0
    assert relative_difference(10**400, 1.0) == 1.0
    assert relative_difference(10**400, INF) == INF
    assert relative_difference(10**400, 1j) == INF
    assert relative_difference(True, False) == 1.0
    assert relative_difference(True, 1) == 0.0
    assert relative_difference(np.float32(1.5), 1.5) == 0.0


finite_complex = st.complex_numbers(allow_nan=False, allow_infinity=False)


@given(finite_complex, finite_complex)
def test_complex_numbers_at_any_scale(a: complex, b: complex) -> None:
    def size(re: Fraction, im: Fraction) -> Fraction:
        return re * re + im * im

    x, y = (Fraction(a.real), Fraction(a.imag)), (Fraction(b.real), Fraction(b.imag))
    scale = max(size(*x), size(*y))
    apart = size(x[0] - y[0], x[1] - y[1]) / scale if scale else Fraction(0)
    expected = math.sqrt(apart)
    assert relative_difference(a, b) == pytest.approx(expected, rel=1e-9, abs=1e-15)
    assert relative_difference(b, a) == relative_difference(a, b)


def test_complex_faults() -> None:
    assert relative_difference(complex(NAN, 1), complex(NAN, 1)) == 0.0
    assert relative_difference(complex(NAN, 1), complex(NAN, 2)) == INF
    assert relative_difference(complex(INF, 1), complex(-INF, 1)) == INF
    assert relative_difference(torch.tensor([1j]).conj(), torch.tensor([-1j])) == 0.0


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
        expected = max(map(exact, numbers, others))
        assert relative_difference(patterns, shifted) == pytest.approx(expected)


@pytest.mark.parametrize("dtype", INTEGER_DTYPES, ids=str)
def test_integers_of_every_width_at_their_ends(dtype: torch.dtype) -> None:
    low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    first, second = torch.tensor([low], dtype=dtype), torch.tensor([high], dtype=dtype)
    expected = float(Fraction(high - low, max(abs(low), high)))
    assert relative_difference(first, second) == pytest.approx(expected)
    assert relative_difference(first, first.clone()) == 0.0


def test_shapes_and_kinds_that_differ_are_beyond_any_tolerance() -> None:
    ones = torch.ones(4)
    assert relative_difference(ones, torch.ones(2, 2)) == INF
    assert relative_difference(ones, torch.ones(1)) == INF
    assert relative_difference(ones, torch.ones(4, dtype=torch.int64)) == INF
    assert relative_difference(ones.bool(), ones.long()) == INF
    assert relative_difference(ones, ones.to(torch.complex64)) == INF
    assert relative_difference(torch.empty(0), torch.empty(0, 3)) == INF
    assert relative_difference(ones, 1.0) == INF
    assert relative_difference(ones, ones.bfloat16()) == 0.0  # one kind: by value


@pytest.mark.filterwarnings("ignore:torch.quantize")
def test_forms_of_one_value_are_equal() -> None:
    assert relative_difference(torch.empty(0, 3), torch.empty(0, 3)) == 0.0
    assert relative_difference(torch.tensor(1.5), 1.5) == 0.0
    assert relative_difference(3.0, torch.tensor(1.5)) == 0.5
    tracked = torch.ones(3, requires_grad=True) * 2
    assert relative_difference(tracked, torch.full((3,), 2.0)) == 0.0
    assert relative_difference(torch.arange(6.0).view(2, 3).T, torch.arange(6.0).view(2, 3).T) == 0
    assert relative_difference(torch.eye(3).to_sparse(), torch.eye(3)) == 0.0
    assert relative_difference(torch.eye(3).to_sparse(), 2 * torch.eye(3)) == 0.5
    assert relative_difference(torch.tensor([True, False]), torch.tensor([True, True])) == 1.0
    quantized = torch.quantize_per_tensor(torch.ones(3), 0.5, 0, torch.qint8)
    assert relative_difference(quantized, torch.ones(3)) == 0.0
    meta = torch.empty(3, device="meta")
    with pytest.raises(ConfigError, match="without data"):
        relative_difference(meta, meta)
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    assert relative_difference(nested, nested.clone()) == 0.0
    assert relative_difference(nested, nested * 2) == pytest.approx(0.5)


@pytest.mark.filterwarnings("ignore:Sparse")
def test_sparse_values_are_compared_by_what_they_stand_for() -> None:
    places = torch.tensor([[0, 2], [1, 1]])
    one = torch.sparse_coo_tensor(places, torch.tensor([1.0, 2.0]), (3, 3))
    twice = torch.sparse_coo_tensor(
        torch.tensor([[2, 0, 2], [1, 1, 1]]), torch.tensor([1.5, 1.0, 0.5]), (3, 3)
    )
    assert relative_difference(one, twice) == 0.0  # another order, one element in two parts
    assert relative_difference(one, 2 * one) == 0.5
    with_zero = torch.sparse_coo_tensor(
        torch.tensor([[0, 2, 2], [1, 1, 2]]), torch.tensor([1.0, 2.0, 0.0]), (3, 3)
    )
    assert relative_difference(one, with_zero) == 0.0
    assert relative_difference(one, with_zero.to_sparse_csr()) == 0.0
    assert describe(one) == {**describe(one.to_dense())}  # type: ignore[dict-item]
    huge = torch.sparse_coo_tensor(places, torch.tensor([-1.0, NAN]), (10**9, 10**9))
    assert relative_difference(huge, huge.clone()) == 0.0
    assert describe(huge) == {
        "dtype": "float32", "shape": [10**9, 10**9],
        "min": -1.0, "max": 0.0, "num_nan": 1, "num_inf": 0,
    }  # fmt: skip


def test_a_difference_in_a_later_chunk_counts() -> None:
    first = torch.ones(3 << 20)
    second = first.clone()
    second[-1] = 2.0
    assert relative_difference(first, second) == 0.5


@pytest.mark.parametrize("value", ["1.0", None, [1.0], np.array(["x"])])
def test_what_is_no_value_is_refused_by_type(value: object) -> None:
    with pytest.raises(ConfigError, match=type(value).__name__):
        relative_difference(value, 1.0)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"a number or a tensor|of numbers"):
        describe(value)  # type: ignore[arg-type]


def test_a_description_says_what_a_value_is() -> None:
    assert describe(1.5) == 1.5
    assert describe(True) is True
    assert describe(7) == 7
    assert describe(2**70) == hex(2**70)
    assert [describe(x) for x in (NAN, INF, -INF)] == ["nan", "inf", "-inf"]
    assert describe(complex(1, NAN)) == {"real": 1.0, "imag": "nan"}
    assert describe(torch.tensor(NAN)) == "nan"
    small = torch.tensor([[1.0, INF]], dtype=torch.bfloat16)
    assert describe(small) == {"dtype": "bfloat16", "shape": [1, 2], "values": [1.0, "inf"]}
    large = torch.arange(10.0)
    large[3], large[4] = NAN, -INF
    assert describe(large) == {
        "dtype": "float32", "shape": [10], "min": 0.0, "max": 9.0, "num_nan": 1, "num_inf": 1,
    }  # fmt: skip
    faulty = describe(torch.full((9,), NAN))
    assert isinstance(faulty, dict)
    assert (faulty["min"], faulty["max"], faulty["num_nan"]) == (None, None, 9)
    wide = describe(torch.full((9,), 2**62 + 1))
    assert isinstance(wide, dict)
    assert wide["max"] == 2**62 + 1


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@settings(max_examples=60)
@given(st.sampled_from([*FLOAT_DTYPES, *FLOAT8_DTYPES, *INTEGER_DTYPES, torch.bool, torch.uint64,
                        torch.complex32, torch.complex64]),
       st.sampled_from([(), (0,), (2,), (3, 4), (0, 5)]), st.integers(0, 255))  # fmt: skip
def test_every_tensor_is_compared_and_described_as_json(
    dtype: torch.dtype, shape: tuple[int, ...], byte: int
) -> None:
    size = torch.empty(0, dtype=dtype).element_size()
    byte = byte % 2 if dtype == torch.bool else byte
    raw = torch.full((math.prod(shape) * size,), byte, dtype=torch.uint8)
    tensor = raw.view(dtype).view(shape)
    assert relative_difference(tensor, tensor.clone()) == 0.0
    json.dumps(describe(tensor), allow_nan=False)
