"""Values that can be validated: their plain form, their difference, and their form in a report.

Whatever is passed to `validate` becomes a number or a plain tensor first (`plain_value`): strided,
or a coalesced COO tensor, which is never made dense. Rules, comparison and report know these forms
alone.

Differences are computed in NumPy's long double. It has at least 64 bits of precision and a range
far beyond that of float64, so every integer of 64 bits and every float is exact in it, and nothing
overflows or vanishes on the way to the quotient. That is slow next to float64, and it does not
matter: what is compared is a loss or a norm, and tensors that are equal never come so far.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction
from typing import Any, TypeAlias

import numpy as np
import torch

from holdfast._torch import AsyncCollectiveTensor, is_mkldnn
from holdfast.errors import ConfigError, PlacementError
from holdfast.state.tensor_elements import TORCH_TO_NAME, array_tensor, local_of

Value: TypeAlias = float | int | bool | complex | torch.Tensor
"""A value that can be validated: a number, or a tensor of any shape and dtype."""

MAX_DESCRIBED_ELEMENTS = 8
"""A tensor of more elements is described by its range, not by its elements."""
_USUAL = frozenset((torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64))
"""Dtypes that torch compares on every device."""
_CHUNK = 1 << 18
"""Elements that are converted at once, so that a large tensor costs no large copy."""
_MAX_JSON_INT = 2**63


def plain_value(value: object) -> Value:
    """A value in the form in which it is judged, compared and kept: a number or a plain tensor.

    NumPy's scalars become Python's, its arrays tensors. Of a DTensor it is what this rank has; a
    quantised tensor becomes the numbers that it stands for, a sparse one of any layout a coalesced
    COO tensor, and a nested one the elements of its members, one after the other.

    Raises:
        ConfigError: it is neither a number nor a tensor, or a tensor without elements to look at:
            without data, of a class that keeps them elsewhere, of a dtype that cannot be stored.

    Cost: nothing for a number and a plain tensor, whose memory the result shares.
    """
    if isinstance(value, np.ndarray):
        try:
            return array_tensor("a validated value", value)[0]
        except PlacementError as error:
            raise ConfigError(
                f"a {type(value).__qualname__} of dtype {value.dtype} cannot be validated: pass "
                f"np.asarray(…) of numbers"
            ) from error
    if isinstance(value, torch.Tensor):
        with torch.no_grad():
            return plain_tensor(value)
    return checked_number(value)


def checked_number(value: object) -> float | int | complex:
    """The number, NumPy's scalars as Python's; ConfigError for anything else."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float | int | complex):  # a bool is an int
        return value
    raise ConfigError(
        f"a {type(value).__name__} cannot be validated: pass a number or a tensor, one call for "
        f"each of several"
    )


def plain_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """`plain_value` of a tensor; detached."""
    tensor = local_of(tensor)
    if isinstance(tensor, AsyncCollectiveTensor):
        tensor = tensor.wait()
    kind = type(tensor)
    if tensor.is_meta:
        raise ConfigError("a tensor without data (meta) cannot be validated: it has no elements")
    if tensor.is_nested:
        members = [each.reshape(-1) for each in tensor.unbind()]
        return torch.cat(members) if members else torch.empty(0, dtype=tensor.dtype)
    if kind is not torch.Tensor:
        if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            raise ConfigError(
                f"a tensor of type {kind.__module__}.{kind.__qualname__} cannot be validated, "
                f"because its class keeps its elements elsewhere: pass a plain tensor of them"
            )
        tensor = tensor.as_subclass(torch.Tensor)
    if tensor.is_quantized:
        return tensor.dequantize()
    if tensor.dtype not in TORCH_TO_NAME:
        raise ConfigError(
            f"a tensor of dtype {tensor.dtype} cannot be validated: torch cannot compute with it; "
            f"convert it"
        )
    if tensor.layout is torch.strided:
        return tensor
    if is_mkldnn(tensor):
        return tensor.to_dense()
    is_coo = tensor.layout is torch.sparse_coo
    return (tensor if is_coo else tensor.to_sparse()).coalesce()


def relative_difference(first: Value, second: Value) -> float:
    """|a - b| / max(|a|, |b|), from 0.0 for equal to 2.0; `math.inf`: beyond any tolerance.

    Symmetric, and correct to a few units in the last place. Two NaN are equal, whatever their bits:
    the same fault. A NaN and a number, two different infinities, an infinity and a number: inf.
    Zero and anything else: 1.0.

    Of tensors the largest difference of any element counts, of those that `plain_value` makes of
    them; two without elements are equal. Other shapes, or other kinds of dtype (bool, integer,
    float, complex), are inf. A number is compared with a tensor of no dims by value.

    Raises:
        ConfigError: as of `plain_value`.

    Cost: nothing for numbers. For tensors a comparison on their device, and a wait for it; if they
    differ, one pass over both on the host. No collectives.
    """
    first, second = plain_value(first), plain_value(second)
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        with torch.no_grad():
            return _tensor_difference(first, second)
    numbers = [
        each.item() if isinstance(each, torch.Tensor) and each.shape == () else each
        for each in (first, second)
    ]
    if any(isinstance(each, torch.Tensor) for each in numbers):
        return math.inf
    return _number_difference(*numbers)


def describe(value: Value) -> object:
    """A value as JSON can hold it, for reports and messages; not made to be read back.

    Numbers are as they are; NaN and infinities are "nan", "inf", "-inf", a complex number has
    "real" and "imag", an integer beyond 64 bits is hexadecimal text. A tensor of no dims is its
    number. One of up to 8 elements has "dtype", "shape" and "values" in row-major order; a larger
    one "min" and "max" of its finite elements (of complex ones, of their components; None if no
    element is finite), "num_nan" and "num_inf" instead of its elements.

    Raises:
        ConfigError: as of `plain_value`.

    Cost: one pass over a tensor on the host.
    """
    value = plain_value(value)
    if not isinstance(value, torch.Tensor):
        return _describe_number(value)
    if value.dim() == 0:
        return _describe_number(value.item())
    shown: dict[str, object] = {
        "dtype": str(value.dtype).removeprefix("torch."),
        "shape": list(value.shape),
    }
    with torch.no_grad():
        if value.numel() > MAX_DESCRIBED_ELEMENTS:
            return {**shown, **_range_of(_stored_and_zero(value))}
        dense = value.to_dense() if value.layout is torch.sparse_coo else value
        return {**shown, "values": [_describe_number(n) for n in dense.reshape(-1).tolist()]}


def _number_difference(first: Any, second: Any) -> float:
    if isinstance(first, complex) or isinstance(second, complex):
        try:
            pair = (np.array([n], dtype=np.clongdouble) for n in (complex(first), complex(second)))
        except OverflowError:
            return math.inf
        return _largest_difference(*pair)
    if first == second or (first != first and second != second):
        return 0.0
    if not all(isinstance(n, int) or math.isfinite(n) for n in (first, second)):
        return math.inf
    # Exact: Python's integers have no end.
    a, b = Fraction(first), Fraction(second)
    return float(abs(a - b) / max(abs(a), abs(b)))


def _tensor_difference(first: torch.Tensor, second: torch.Tensor) -> float:
    if first.shape != second.shape or _kind(first) != _kind(second):
        return math.inf
    if torch.sparse_coo in (first.layout, second.layout):
        first, second = _at_the_same_places(first, second)
    is_alike = first.dtype == second.dtype and first.device == second.device
    if is_alike and first.dtype in _USUAL and torch.equal(first, second):
        return 0.0  # what most comparisons come to
    pairs = zip(_chunks(first), _chunks(second), strict=True)
    return max((_largest_difference(a, b) for a, b in pairs), default=0.0)


def _at_the_same_places(
    first: torch.Tensor, second: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the elements of two tensors at all places that one of them stores."""
    one, other = (
        each.cpu() if each.layout is torch.sparse_coo else each.cpu().to_sparse().coalesce()
        for each in (first, second)
    )
    # A zero is stored at each place of the other one; adding it changes nothing, NaN included.
    indices = torch.cat([one.indices(), other.indices()], dim=1)
    wide = torch.promote_types(one.dtype, torch.float32) if one.is_floating_point() else one.dtype
    a, b = one.values().to(wide), other.values().to(wide)
    full = (
        torch.sparse_coo_tensor(indices, values, one.shape, check_invariants=False)
        .coalesce()
        .values()
        for values in (torch.cat([a, torch.zeros_like(b)]), torch.cat([torch.zeros_like(a), b]))
    )
    return next(full), next(full)


def _kind(tensor: torch.Tensor) -> str:
    if tensor.dtype == torch.bool:
        return "bool"
    if tensor.dtype.is_complex:
        return "complex"
    return "float" if tensor.dtype.is_floating_point else "integer"


def _chunks(tensor: torch.Tensor) -> Iterator[np.ndarray]:
    """The elements in row-major order as long doubles on the host, some at a time."""
    flat = tensor.reshape(-1)
    for start in range(0, flat.numel(), _CHUNK):
        chunk = flat[start : start + _CHUNK].cpu().resolve_conj().resolve_neg()
        if chunk.is_complex():
            yield chunk.to(torch.complex128).numpy().astype(np.clongdouble)
        elif chunk.is_floating_point():
            yield chunk.to(torch.float64).numpy().astype(np.longdouble)
        else:
            yield chunk.numpy().astype(np.longdouble)


def _largest_difference(a: np.ndarray, b: np.ndarray) -> float:
    """The largest relative difference of two arrays of long doubles that have elements."""
    # Components: of complex numbers two NaN are equal only if the other halves are, too.
    parts = [(a.real, b.real), (a.imag, b.imag)] if np.iscomplexobj(a) else [(a, b)]
    is_equal = np.logical_and.reduce([(x == y) | (np.isnan(x) & np.isnan(y)) for x, y in parts])
    is_finite = np.isfinite(a) & np.isfinite(b)
    with np.errstate(all="ignore"):
        apart = np.abs(a - b) / np.maximum(np.abs(a), np.abs(b))
    return float(np.where(is_equal, 0.0, np.where(is_finite, apart, np.inf)).max())


def _describe_number(number: float | complex) -> object:
    if isinstance(number, complex):
        return {"real": _describe_number(number.real), "imag": _describe_number(number.imag)}
    if isinstance(number, bool):
        return number
    if isinstance(number, int):
        return int(number) if -_MAX_JSON_INT <= number < _MAX_JSON_INT else hex(number)
    return float(number) if math.isfinite(number) else repr(float(number))


def _stored_and_zero(tensor: torch.Tensor) -> torch.Tensor:
    """The elements that a tensor stores, and a zero for all others."""
    if tensor.layout is not torch.sparse_coo:
        return tensor
    stored = tensor.values().reshape(-1)
    return stored if stored.numel() == tensor.numel() else torch.cat([stored, stored.new_zeros(1)])


def _range_of(tensor: torch.Tensor) -> dict[str, object]:
    """The ends of the finite elements, and how many are not finite."""
    is_exact = not (tensor.is_complex() or tensor.is_floating_point())
    ends: list[Any] = []
    num_nan = num_inf = 0
    for chunk in _chunks(tensor):
        numbers = np.concatenate([chunk.real, chunk.imag]) if np.iscomplexobj(chunk) else chunk
        num_nan += int(np.isnan(numbers).sum())
        num_inf += int(np.isinf(numbers).sum())
        finite = numbers[np.isfinite(numbers)]
        ends += [finite.min(), finite.max()] if finite.size else []
    as_number = int if is_exact else float
    return {
        "min": _describe_number(as_number(min(ends))) if ends else None,
        "max": _describe_number(as_number(max(ends))) if ends else None,
        "num_nan": num_nan,
        "num_inf": num_inf,
    }
