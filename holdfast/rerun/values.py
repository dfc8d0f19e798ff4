"""Values that can be validated: a number, or a few of them.

Whatever is passed to `validate` becomes Python floats first, in float64, which holds every float of
a model exactly. Rules, comparison, report and checkpoint know floats alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

from holdfast._torch import AsyncCollectiveTensor
from holdfast.errors import ConfigError
from holdfast.state.tensor_elements import local_of

Value: TypeAlias = float | tuple[float, ...]
"""A validated value on the host: a number, or the elements of a small tensor in row-major order."""

MAX_ELEMENTS = 64
"""A larger tensor is not a value: its elements would be read, kept and reported at each fault."""
_INSTEAD = (
    f"pass a number or up to {MAX_ELEMENTS} of them; the norm of a tensor "
    f"(torch.linalg.vector_norm) is not finite if one of its elements is not"
)


def host_value(value: object) -> Value:
    """Return a value as floats: what rules and comparisons get.

    One number is a float, however it was packed. Of a DTensor it is what this rank has.

    Args:
        value: a real number, or a list, an array or a tensor of at most 64 of them.

    Raises:
        ConfigError: it is something else, or an integer that no float64 is equal to.

    Cost: for a tensor of a device a wait for it.
    """
    if isinstance(value, torch.Tensor):
        numbers: Sequence[Any] = local_value(value).reshape(-1).tolist()
    elif isinstance(value, np.ndarray | list | tuple):
        numbers = value.reshape(-1).tolist() if isinstance(value, np.ndarray) else value
        if len(numbers) > MAX_ELEMENTS:
            raise ConfigError(f"{len(numbers)} numbers cannot be validated: {_INSTEAD}")
    else:
        return _float_of(value)
    elements = tuple(map(_float_of, numbers))
    return elements[0] if len(elements) == 1 else elements


def local_value(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor with values, detached; see `host_value`.

    Raises:
        ConfigError: it has too many elements, none at all to look at, or no real numbers.

    Cost: does not wait for a device.
    """
    tensor = local_of(tensor)
    if isinstance(tensor, AsyncCollectiveTensor):
        tensor = tensor.wait()
    problem = ""
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        problem = f"of type {type(tensor).__qualname__}"
    elif tensor.is_nested or tensor.layout is not torch.strided:
        problem = "that is nested" if tensor.is_nested else f"of layout {tensor.layout}"
    elif tensor.is_meta:
        problem = "without data (meta)"
    elif tensor.is_quantized or tensor.is_complex():
        problem = f"of dtype {tensor.dtype}"
    elif tensor.numel() > MAX_ELEMENTS:
        problem = f"of shape {tuple(tensor.shape)}"
    if problem:
        raise ConfigError(f"a tensor {problem} cannot be validated: {_INSTEAD}")
    return tensor.detach().as_subclass(torch.Tensor)


def relative_difference(first: object, second: object) -> float:
    """|a - b| / max(|a|, |b|), from 0.0 for equal to 2.0; `math.inf`: beyond any tolerance.

    Symmetric, and correct to a few units in the last place. Two NaN are equal, whatever their bits:
    the same fault. A NaN and a number, two different infinities, an infinity and a number: inf.
    Zero and anything else: 1.0. Of several numbers the largest difference counts; another number of
    them is inf.

    Raises:
        ConfigError: see `host_value`.
    """
    one, other = _elements(host_value(first)), _elements(host_value(second))
    if len(one) != len(other):
        return math.inf
    return max((_difference(a, b) for a, b in zip(one, other, strict=True)), default=0.0)


def describe(value: object) -> object:
    """Return a value as JSON can hold it: NaN and infinities are "nan", "inf", "-inf".

    Raises:
        ConfigError: see `host_value`.
    """
    value = host_value(value)
    if isinstance(value, tuple):
        return [describe(each) for each in value]
    return value if math.isfinite(value) else repr(value)


def magnitude(value: Value, *, only_finite: bool = False) -> float | None:
    """Return the largest finite |element|; None if no element is finite.

    Args:
        value: floats.
        only_finite: True to return None if any element is NaN or infinite.
    """
    elements = _elements(value)
    finite = [abs(each) for each in elements if math.isfinite(each)]
    if only_finite and len(finite) < len(elements):
        return None
    return max(finite, default=None)


def _elements(value: Value) -> tuple[float, ...]:
    return value if isinstance(value, tuple) else (value,)


def _float_of(value: object) -> float:
    """Return a real number as the float that is equal to it."""
    if type(value) is float:
        return value
    if isinstance(value, np.generic):
        value = value.item()
    if not isinstance(value, float | int | np.floating):  # a bool is an int
        raise ConfigError(f"a {type(value).__name__} cannot be validated: {_INSTEAD}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if number != value and value == value:
        raise ConfigError(f"{value!s:.40} cannot be validated: no float64 is equal to it")
    return number


def _difference(a: float, b: float) -> float:
    if a == b or (a != a and b != b):
        return 0.0
    if not (math.isfinite(a) and math.isfinite(b)):
        return math.inf
    largest = max(abs(a), abs(b))
    apart = abs(a - b)
    return apart / largest if math.isfinite(apart) else abs(a / 2 - b / 2) / (largest / 2)
