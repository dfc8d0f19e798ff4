"""Casts between float types, bit by bit against torch, or against exact arithmetic.

Prevents that a converted tensor is rounded the wrong way, or silently becomes infinite.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from holdfast.errors import PlacementError
from holdfast.format.dtypes import DTYPES
from holdfast.format.elements import FLOATS, decode_elements, encode_floats

TORCH = {
    "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
}  # fmt: skip
NARROW = [name for name in FLOATS if DTYPES[name].itemsize <= 2]


def all_codes(dtype: str) -> bytes:
    size = DTYPES[dtype].itemsize
    return np.arange(1 << (8 * size), dtype=f"<u{size}").tobytes()


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("wide", [np.float32, np.float64])
def test_every_value_of_a_type_comes_back_with_its_bits(dtype: str, wide: type) -> None:
    codes = all_codes(dtype)
    values = decode_elements(codes, dtype)
    result = encode_floats(values.astype(wide), dtype)
    kind = f"<u{DTYPES[dtype].itemsize}"
    one, two = np.frombuffer(codes, dtype=kind), np.frombuffer(result, dtype=kind)
    if wide is np.float32 and dtype == "BF16":
        assert (one == two).all()  # NaNs with their payloads, too
    is_nan = np.isnan(values)
    assert (one == two)[~is_nan].all()
    assert np.isnan(decode_elements(result, dtype)[is_nan]).all()


@pytest.mark.parametrize("dtype", [name for name in NARROW if name != "F16"])
def test_values_are_rounded_as_torch_rounds_them(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(3)
    finite = decode_elements(all_codes(dtype), dtype)
    finite = np.unique(finite[np.isfinite(finite)]).astype(np.float32)
    middles = ((finite[:-1].astype(np.float64) + finite[1:]) / 2).astype(np.float32)
    values = np.concatenate([
        finite, middles, np.nextafter(middles, np.float32(np.inf)),
        np.nextafter(middles, np.float32(-np.inf)),
        (rng.normal(size=5000) * 10.0 ** rng.integers(-10, 2, size=5000)).astype(np.float32),
    ])  # fmt: skip
    values = values[np.abs(values) <= finite.max()]
    expected = torch.from_numpy(values).to(getattr(torch, TORCH[dtype]))
    code = expected.view(torch.int16 if dtype == "BF16" else torch.uint8).numpy()
    assert encode_floats(values, dtype) == code.tobytes()


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_double_is_rounded_once(dtype: str) -> None:
    """Just above the middle of two values, where a float32 would be in the middle."""
    if dtype == "F64":
        return
    step = {"F32": 2.0**-23, "F16": 2.0**-10, "BF16": 2.0**-7}.get(dtype)
    if step is None:
        step = 2.0**-3 if "E4M3" in dtype else 2.0**-2
    low, high = 1.0, 1.0 + step
    tiny = 2.0**-45
    values = np.array([1 + step / 2 + tiny, 1 + step / 2, 1 + step / 2 - tiny, 1 + 3 * step / 2])
    assert Fraction(values[0]) > Fraction(1) + Fraction(step) / 2
    result = decode_elements(encode_floats(values, dtype), dtype).astype(np.float64)
    assert result.tolist() == [high, low, low, 1 + 2 * step]


@pytest.mark.parametrize("dtype", [name for name in FLOATS if name != "F64"])
def test_what_is_too_large_is_an_error_or_saturates(dtype: str) -> None:
    finite = decode_elements(all_codes(dtype), dtype) if dtype in NARROW else np.finfo("f4").max
    limit = float(np.max(np.asarray(finite)[np.isfinite(finite)]))
    values = np.array([limit, limit * 2, -limit * 4, np.inf, -np.inf, np.nan], dtype=np.float64)
    with pytest.raises(PlacementError, match="too large"):
        encode_floats(values[:2], dtype)
    result = decode_elements(encode_floats(values, dtype, saturate=True), dtype)
    assert result[:3].tolist() == [limit, limit, -limit]
    assert np.isnan(result[5])
    has_inf = dtype not in ("F8_E4M3", "F8_E4M3FNUZ", "F8_E5M2FNUZ")
    end = np.inf if has_inf else limit
    assert result[3:5].tolist() == [end, -end]
    if has_inf:
        assert np.isposinf(decode_elements(encode_floats(values[3:4], dtype), dtype)[0])
    else:
        with pytest.raises(PlacementError, match="too large"):
            encode_floats(values[3:4], dtype)


def test_the_edge_of_overflow_is_the_middle_to_the_next_value() -> None:
    """IEEE: a value rounds to infinity from the middle between the largest and the next one."""
    for dtype, edge, is_over in (
        ("F16", 65520.0, True), ("F8_E5M2", 61440.0, True), ("F8_E4M3", 464.0, False),
        ("BF16", 2.0**128 - 2.0**119, True),
    ):  # fmt: skip
        below = np.nextafter(np.array([edge]), 0)
        encode_floats(below, dtype)
        above = np.nextafter(np.array([edge]), np.inf)
        with pytest.raises(PlacementError):
            encode_floats(above, dtype)
        if is_over:
            with pytest.raises(PlacementError):
                encode_floats(np.array([edge]), dtype)
        else:
            encode_floats(np.array([edge]), dtype)


def test_other_types_are_not_made() -> None:
    with pytest.raises(PlacementError, match="no cast makes I64"):
        encode_floats(np.ones(2), "I64")
