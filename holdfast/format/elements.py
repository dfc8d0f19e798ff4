"""Elements of every type as numbers that numpy has, and back, without torch.

Decoding is exact. Encoding rounds to the nearest value of the type, and of two equally near ones to
the one whose last bit is 0.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from holdfast.arrays.types import AnyArray
from holdfast.errors import PlacementError
from holdfast.format.dtypes import DTYPES

FLOATS = ("F16", "BF16", "F32", "F64", "F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ")
"""The types that `encode_floats` can make."""
_MANTISSA_AND_BIAS = {
    "F8_E4M3": (3, 7), "F8_E5M2": (2, 15), "F8_E4M3FNUZ": (3, 8), "F8_E5M2FNUZ": (2, 16),
}  # fmt: skip
_PART = 1 << 15
_NATIVE = {"F16": "<f2", "F32": "<f4", "F64": "<f8"}


def decode_elements(data: bytes | bytearray | memoryview, dtype: str) -> AnyArray:
    """The elements in bytes of a dtype, as a flat array of a type that numpy has; exact."""
    native = DTYPES[dtype].numpy
    if native is not None:
        return np.frombuffer(data, dtype=native)
    if dtype == "BF16":
        return (np.frombuffer(data, dtype="<u2").astype(np.uint32) << 16).view(np.float32)
    if dtype == "C32":
        pairs = np.frombuffer(data, dtype="<f2").astype(np.float32)
        return pairs.view(np.complex64)
    return _eight_bit_table(dtype)[np.frombuffer(data, dtype=np.uint8)]


def _eight_bit_table(dtype: str) -> npt.NDArray[np.float32]:
    """The 256 values of an 8-bit float type, by code."""
    codes = np.arange(256)
    if dtype == "F8_E8M0":
        table = np.exp2(np.minimum(codes, 254) - 127.0).astype(np.float32)
        table[255] = np.nan
        return table
    bits, bias = _MANTISSA_AND_BIAS[dtype]
    # One bit of sign, then the exponent, then `bits` bits of mantissa; exponent 0 is subnormal.
    sign = np.where(codes >= 128, -1.0, 1.0)
    exponent, mantissa = (codes & 127) >> bits, codes & ((1 << bits) - 1)
    fraction = mantissa / (1 << bits)
    normal = (1 + fraction) * np.exp2(exponent - float(bias))
    table = (sign * np.where(exponent == 0, fraction * 2.0 ** (1 - bias), normal)).astype(
        np.float32
    )
    if dtype.endswith("FNUZ"):
        table[128] = np.nan  # the code of minus zero is the only NaN
    elif dtype == "F8_E4M3":
        table[[127, 255]] = np.nan
    else:
        top = exponent == 31
        table[top] = np.where(mantissa[top] == 0, sign[top] * np.inf, np.nan)
    return table


def encode_floats(values: AnyArray, dtype: str, *, saturate: bool = False) -> bytes:
    """Return the bytes of floats in another float type, rounded to nearest, ties to even.

    NaN stays NaN; its payload is kept where the type has room (so that BF16 -> F32 -> BF16 gives
    the same bits). Infinity stays infinity.

    Args:
        values: A flat array of float16, float32 or float64.
        dtype: One of `FLOATS`.
        saturate: Write the largest finite value in place of what is too large, and of infinity
            where the type has none.

    Raises:
        PlacementError: A finite value is too large for the type, or is infinite and the type has
            no infinity, and `saturate` is not set; or the type is not one of `FLOATS`.
    """
    if dtype not in FLOATS:
        raise PlacementError(f"no cast makes {dtype}: a cast is to one of {' '.join(FLOATS)}")
    if dtype in _MANTISSA_AND_BIAS:
        # In parts that the cache holds: the numbers in between have eight bytes each.
        parts = (values[i : i + _PART] for i in range(0, len(values), _PART))
        return b"".join(_encode_eight_bit(part, dtype, saturate) for part in parts)
    if dtype == "BF16":
        return _encode_bfloat16(values, saturate)
    with np.errstate(over="ignore", invalid="ignore"):
        result = values.astype(_NATIVE[dtype])
    over = np.isinf(result) & np.isfinite(values)
    if over.any():
        _refuse_unless(saturate, values[over], dtype)
        limit = np.finfo(result.dtype).max
        result[over] = np.where(values[over] < 0, -limit, limit)
    return result.tobytes()


def _refuse_unless(saturate: bool, values: AnyArray, dtype: str) -> None:
    if not saturate:
        raise PlacementError(
            f"{len(values)} values are too large for {dtype}, the first is {float(values[0])!r}: "
            f"cast to a wider type, or set saturate to write the largest finite value"
        )


def _encode_bfloat16(values: AnyArray, saturate: bool) -> bytes:
    bits = _to_odd_float32(values).view(np.uint32)
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    rounded = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
    if is_nan.any():
        kept = (bits >> 16).astype(np.uint16)
        # A NaN whose upper bits alone would be infinity gets the bit that makes it a NaN.
        kept |= np.where((kept & 0x7F) == 0, 0x40, 0).astype(np.uint16)
        rounded = np.where(is_nan, kept, rounded)
    over = ((rounded & 0x7FFF) == 0x7F80) & np.isfinite(values)
    if over.any():
        _refuse_unless(saturate, values[over], "BF16")
        rounded[over] = (rounded[over] & 0x8000) | 0x7F7F
    return rounded.astype("<u2").tobytes()


def _to_odd_float32(values: AnyArray) -> npt.NDArray[np.float32]:
    """Return float32 that a later rounding cannot tell from the values: inexact ones are odd.

    Two roundings to nearest in a row may differ from one. An inexact value is cut towards zero here
    and its last bit set, which stands for all the bits that are missing.
    """
    if values.dtype.itemsize <= 4:
        return values.astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        result = values.astype(np.float32)
        inexact = np.isfinite(values) & (result.astype(np.float64) != values)
        too_far = inexact & (np.abs(result.astype(np.float64)) > np.abs(values))
    bits = result.view(np.uint32)
    bits[too_far] -= 1
    bits[inexact] |= 1
    return result


def _encode_eight_bit(values: AnyArray, dtype: str, saturate: bool) -> bytes:
    bits, bias = _MANTISSA_AND_BIAS[dtype]
    table = _eight_bit_table(dtype)[:128]
    top = int(np.flatnonzero(np.isfinite(table))[-1])
    with np.errstate(invalid="ignore"):
        wide = values.astype(np.float64)
    size = np.abs(wide)
    size[~np.isfinite(size)] = 0
    # The exponent, as a float64 has it; below the least one of the type the step stays the same.
    exponent = np.maximum((size.view(np.int64) >> 52) - 1023, 1 - bias)
    # Scaling by a power of two is exact. If this rounds up to the next exponent, so does the code.
    scale = ((bits - exponent + 1023) << 52).view(np.float64)
    codes = ((exponent - 1 + bias) << bits) + np.rint(size * scale).astype(np.int64)
    is_nan, is_inf = np.isnan(wide), np.isinf(wide)
    has_inf = top < 127 and bool(np.isinf(_eight_bit_table(dtype)[top + 1]))
    over = codes > top if has_inf else (codes > top) | is_inf
    if over.any():
        _refuse_unless(saturate, values[over], dtype)
        codes[over] = top
    if has_inf:
        codes[is_inf] = top + 1
    nan = 0 if dtype.endswith("FNUZ") else 127
    codes[is_nan] = nan
    negative = np.signbit(wide)
    if dtype.endswith("FNUZ"):
        negative &= codes != 0  # there is no minus zero: its code is NaN
        codes = codes + np.where(is_nan, 128, 0)
    signed: npt.NDArray[np.uint8] = (codes + np.where(negative, 128, 0)).astype(np.uint8)
    return signed.tobytes()
