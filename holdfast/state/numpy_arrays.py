"""NumPy arrays as tensors and back, without loss of dtype."""

from __future__ import annotations

import re

import numpy as np
import torch

from holdfast.errors import CorruptionError, PlacementError

_DTYPE = re.compile(r"[<>](i[248]|u[248]|f[248]|c8|c16|[mM]8(\[[0-9A-Za-z]{1,12}\])?)", re.ASCII)


def array_tensor(path: str, array: np.ndarray) -> tuple[torch.Tensor, str | None]:
    """The array's elements as a tensor, and its dtype's code where the tensor's does not say it.

    Shares memory where NumPy's layout allows. Dates and time spans are stored as 64-bit integers,
    foreign byte orders as the native one; strides and memory order are not kept.

    Raises:
        PlacementError: Naming `path`, for a subclass, whose mask or names would be lost, and for a
            dtype of no numbers (objects, texts, records, more than 64 bits).
    """
    if type(array) is not np.ndarray:
        kind = type(array)
        raise PlacementError(
            f"{path}: a {kind.__module__}.{kind.__qualname__} is more than its elements (a mask, a "
            f"file, names), which would be lost; save np.asarray(it) and the rest as values of "
            f"their own, or register a codec for its type"
        )
    dtype = array.dtype
    if dtype.kind not in "biufcmM" or dtype.itemsize > (16 if dtype.kind == "c" else 8):
        raise PlacementError(
            f"{path}: a NumPy array of dtype {dtype} cannot be stored without pickle; "
            f"convert it to numbers, or register a codec"
        )
    # Through native bytes first: a view as integers must see them.
    native = array.astype(dtype.newbyteorder("="), copy=False)
    contiguous = np.ascontiguousarray(native).reshape(native.shape)
    if dtype.kind in "mM":
        contiguous = contiguous.view(np.int64)
    if not contiguous.flags.writeable:
        contiguous = contiguous.copy()
    is_plain = dtype.isnative and dtype.kind not in "mM"
    try:
        return torch.from_numpy(contiguous), None if is_plain else dtype.str
    except TypeError as error:
        raise PlacementError(f"{path}: NumPy dtype {dtype} has no torch dtype") from error


def tensor_array(tensor: torch.Tensor, code: object, *, path: str) -> np.ndarray:
    """The array of `array_tensor` again; shares the tensor's memory where it can.

    Raises:
        CorruptionError: For a code that `array_tensor` does not write, or that does not fit.
    """
    array = tensor.numpy()
    if code is None:
        return array
    if not isinstance(code, str) or not _DTYPE.fullmatch(code):
        raise CorruptionError(f"{path}: {str(code)[:40]!r} is no dtype of an array")
    dtype = np.dtype(code)
    native = dtype.newbyteorder("=")
    if dtype.kind in "mM":
        if array.dtype != np.int64:
            raise CorruptionError(f"{path}: {array.dtype} elements are no {code}")
        array = array.view(native)
    elif array.dtype != native:
        raise CorruptionError(f"{path}: {array.dtype} elements are no {code}")
    return array.astype(dtype, copy=False)
