"""How far two validated values are apart, defined for every pair of numbers and tensors."""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction

import numpy as np
import torch

from holdfast.rerun.values import Value, checked_number
from holdfast.state.tensors import element_bytes, local_of

MAX_DESCRIBED_ELEMENTS = 8
"""A tensor of more elements is described by its range, not by its elements."""

_CHUNK = 1 << 20
"""Elements that are converted at once, so that a large tensor costs no large copy."""
_MAX_JSON_INT = 2**63


def relative_difference(first: Value, second: Value) -> float:
    """|a - b| / max(|a|, |b|), from 0.0 for equal to 2.0; `math.inf`: beyond any tolerance.

    Symmetric, and correct to a few units in the last place: nothing overflows or underflows on the
    way. Two NaN are equal, whatever their bits: the same fault. A NaN and a number, two different
    infinities, an infinity and a number: inf. Zero and anything else: 1.0.

    Of tensors the largest difference of any element counts; two without elements are equal. Other
    shapes, or other kinds of dtype (bool, integer, float, complex), are inf, also where they have
    no elements. A number is compared with a tensor of no dims by value. Of a DTensor the elements
    of this rank are compared. Elements of a dtype that torch cannot convert (below eight bits) are
    equal bit by bit, or inf. Meta tensors have nothing to compare: inf.

    Raises:
        ConfigError: For a value that is neither a number nor a tensor.

    Cost: for tensors one pass in float64, by chunks of 8 MiB, on the device that both are on (else
    on the CPU), and one wait for it. No collectives.
    """
    first, second = _checked(first), _checked(second)
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        with torch.no_grad():
            return _tensor_difference(first, second)
    numbers = []
    for value in (first, second):
        if isinstance(value, torch.Tensor):
            if value.shape != () or value.is_meta:
                return math.inf
            value = _local_strided(value).item()
        numbers.append(value)
    return _number_difference(numbers[0], numbers[1])


def describe(value: Value) -> object:
    """A value as JSON can hold it, for reports and messages; not made to be read back.

    Numbers are as they are; NaN and infinities are "nan", "inf", "-inf", a complex number has
    "real" and "imag", an integer beyond 64 bits is hexadecimal text. A tensor of no dims is its
    number. One of up to 8 elements has "dtype", "shape" and "values" in row-major order; a larger
    one "min" and "max" of its finite elements (of complex ones, of their components;
    None where no element is finite), "num_nan" and "num_inf" instead of its elements.

    Raises:
        ConfigError: For a value that is neither a number nor a tensor.

    Cost: one pass over a tensor, and one wait for its device.
    """
    value = _checked(value)
    if not isinstance(value, torch.Tensor):
        return _describe_number(value)
    with torch.no_grad():
        return _describe_tensor(value)


def _checked(value: object) -> Value:
    """A tensor as it is, or a number; ConfigError for what is no value."""
    return value if isinstance(value, torch.Tensor) else checked_number(value)


def _number_difference(first: float | complex, second: float | complex) -> float:
    if isinstance(first, complex) or isinstance(second, complex):
        try:
            one, other = (
                torch.tensor(complex(n), dtype=torch.complex128, device="cpu")
                for n in (first, second)
            )
        except OverflowError:  # an integer beyond every float, next to a complex number
            return math.inf
        return _tensor_difference(one, other)
    if first == second or (first != first and second != second):
        return 0.0
    if not (_is_finite(first) and _is_finite(second)):
        return math.inf
    # Exact, so that neither huge integers nor subnormal floats are a case of their own.
    a, b = Fraction(first), Fraction(second)
    return float(abs(a - b) / max(abs(a), abs(b)))


def _is_finite(number: float) -> bool:
    return isinstance(number, int) or math.isfinite(number)


def _tensor_difference(first: torch.Tensor, second: torch.Tensor) -> float:
    if first.shape != second.shape or _kind(first) != _kind(second):
        return math.inf
    if first.is_meta or second.is_meta:
        return math.inf
    if first.is_nested or second.is_nested:
        return _nested_difference(first, second)
    if torch.sparse_coo in (first.layout, second.layout):
        one, other = _sparse_pair(first, second)
    else:
        one, other = _local_strided(first), _local_strided(second)
    if one.shape != other.shape:  # shards of a DTensor
        return math.inf
    if one.device != other.device or one.device.type not in ("cpu", "cuda"):
        one, other = one.cpu(), other.cpu()
    largest = 0.0
    try:
        for a, b in zip(_chunks(one), _chunks(other), strict=True):
            largest = max(largest, _chunk_difference(a, b))
            if largest == math.inf:
                break
    except (RuntimeError, TypeError):  # a dtype of which torch has the name alone
        is_equal = one.dtype == other.dtype and torch.equal(
            element_bytes(one), element_bytes(other)
        )
        return 0.0 if is_equal else math.inf
    return largest


def _sparse_pair(first: torch.Tensor, second: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The stored elements of two tensors where they are of the same places, else all elements."""
    if first.layout is second.layout:
        one, other = first.coalesce(), second.coalesce()
        if torch.equal(one.indices().cpu(), other.indices().cpu()):
            return one.values(), other.values()
    return _local_strided(first), _local_strided(second)


def _nested_difference(first: torch.Tensor, second: torch.Tensor) -> float:
    if not (first.is_nested and second.is_nested):
        return math.inf
    ones, others = first.unbind(), second.unbind()
    if len(ones) != len(others):
        return math.inf
    return max(map(_tensor_difference, ones, others), default=0.0)


def _kind(tensor: torch.Tensor) -> str:
    dtype = tensor.dtype
    if dtype == torch.bool:
        return "bool"
    if dtype.is_complex:
        return "complex"
    # Quantized tensors are compared by the numbers that they stand for.
    return "float" if dtype.is_floating_point or tensor.is_quantized else "integer"


def _local_strided(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of this rank as a plain tensor with strides."""
    local = local_of(tensor)
    if local.is_quantized:
        local = local.dequantize()
    return local if local.layout is torch.strided else local.to_dense()


def _chunks(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The elements in row-major order, some at a time."""
    flat = tensor.reshape(-1)
    for start in range(0, flat.numel(), _CHUNK):
        yield flat[start : start + _CHUNK]


def _chunk_difference(first: torch.Tensor, second: torch.Tensor) -> float:
    kind = _kind(first)
    if kind == "complex":
        return _complex_difference(first, second)
    if kind == "float":
        return _float_difference(first.to(torch.float64), second.to(torch.float64))
    return _integer_difference(first.cpu().numpy(), second.cpu().numpy())


def _float_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    larger = torch.maximum(a.abs(), b.abs())
    # Of opposite signs, a - b may overflow; each quotient is at most 1.
    apart = torch.where(
        a.sign() * b.sign() < 0, (a / larger).abs() + (b / larger).abs(), (a - b).abs() / larger
    )
    return _largest(apart, is_equal=_same(a, b), is_finite=a.isfinite() & b.isfinite())


def _complex_difference(first: torch.Tensor, second: torch.Tensor) -> float:
    a, b = (torch.view_as_real(t.to(torch.complex128).resolve_conj()) for t in (first, second))
    is_equal = _same(a, b).all(dim=-1)
    is_finite = (a.isfinite() & b.isfinite()).all(dim=-1)
    # Scaled by the largest component, so that squares neither overflow nor vanish.
    scale = torch.maximum(a.abs().amax(dim=-1), b.abs().amax(dim=-1)).unsqueeze(-1)
    a, b = a / scale, b / scale
    larger = torch.maximum(torch.hypot(*a.unbind(-1)), torch.hypot(*b.unbind(-1)))
    apart = torch.hypot(*(a - b).unbind(-1)) / larger
    return _largest(apart, is_equal=is_equal, is_finite=is_finite)


def _same(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a == b) | (a.isnan() & b.isnan())


def _largest(apart: torch.Tensor, *, is_equal: torch.Tensor, is_finite: torch.Tensor) -> float:
    apart = apart.masked_fill(~is_finite, math.inf).masked_fill(is_equal, 0.0)
    return float(apart.max())


def _integer_difference(a: np.ndarray, b: np.ndarray) -> float:
    """Of integers and truth values, exact before the one division."""
    (size_a, below_a), (size_b, below_b) = _magnitude(a), _magnitude(b)
    larger = np.maximum(size_a, size_b)
    # Subtracting as unsigned integers is exact; sums of opposite signs may need a 65th bit.
    apart = np.where(
        below_a == below_b,
        (larger - np.minimum(size_a, size_b)).astype(np.float64),
        size_a.astype(np.float64) + size_b.astype(np.float64),
    )
    return float((apart / np.maximum(larger, np.uint64(1)).astype(np.float64)).max())


def _magnitude(array: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """|integers| as uint64, also of the smallest int64, and which are below zero."""
    below = array < 0
    bits = (
        array.astype(np.int64).view(np.uint64)
        if array.dtype.kind == "i"
        else array.astype(np.uint64)
    )
    return np.where(below, ~bits + np.uint64(1), bits), below


def _describe_number(number: float | complex) -> object:
    if isinstance(number, complex):
        return {"real": _describe_number(number.real), "imag": _describe_number(number.imag)}
    if isinstance(number, bool):
        return number
    if isinstance(number, int):
        return int(number) if -_MAX_JSON_INT <= number < _MAX_JSON_INT else hex(number)
    return float(number) if math.isfinite(number) else repr(float(number))


def _describe_tensor(tensor: torch.Tensor) -> object:
    shown: dict[str, object] = {
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": None if tensor.is_nested else list(tensor.shape),
    }
    if tensor.is_meta:
        return shown
    if tensor.is_nested:
        return {
            **shown,
            "values": [_describe_tensor(each) for each in tensor.unbind()[:MAX_DESCRIBED_ELEMENTS]],
        }
    try:
        if tensor.numel() > MAX_DESCRIBED_ELEMENTS and tensor.layout is torch.sparse_coo:
            return {**shown, **_range_of(_stored_and_zero(tensor).cpu())}
        local = _local_strided(tensor).cpu()
        if local.numel() > MAX_DESCRIBED_ELEMENTS:
            return {**shown, **_range_of(local)}
        values = [_describe_number(number) for number in local.reshape(-1).tolist()]
    except (RuntimeError, TypeError):  # a dtype of which torch has the name alone
        return shown
    return values[0] if tensor.shape == () else {**shown, "values": values}


def _stored_and_zero(tensor: torch.Tensor) -> torch.Tensor:
    """The elements that a sparse tensor stores, and a zero for all others."""
    stored = tensor.coalesce().values().reshape(-1)
    return stored if stored.numel() == tensor.numel() else torch.cat([stored, stored.new_zeros(1)])


def _range_of(tensor: torch.Tensor) -> dict[str, object]:
    lows: list[float] = []
    highs: list[float] = []
    num_nan = num_inf = 0
    for chunk in _chunks(tensor):
        kind = _kind(chunk)
        if kind == "complex":
            chunk = torch.view_as_real(chunk.to(torch.complex128).resolve_conj()).reshape(-1)
        elif kind == "float":
            chunk = chunk.to(torch.float64)
        else:
            numbers = chunk.numpy()
            lows.append(numbers.min().item())
            highs.append(numbers.max().item())
            continue
        num_nan += int(chunk.isnan().sum())
        num_inf += int(chunk.isinf().sum())
        finite = chunk[chunk.isfinite()]
        if finite.numel():
            lows.append(float(finite.min()))
            highs.append(float(finite.max()))
    return {
        "min": _describe_number(min(lows)) if lows else None,
        "max": _describe_number(max(highs)) if highs else None,
        "num_nan": num_nan,
        "num_inf": num_inf,
    }
