"""What can be validated, and the form in which a value is judged, compared and kept."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from holdfast.errors import ConfigError, PlacementError
from holdfast.state.numpy_arrays import array_tensor
from holdfast.state.tensors import local_of

Value: TypeAlias = float | int | bool | complex | torch.Tensor
"""What can be validated: a number, or a tensor of any shape and dtype."""


def plain_value(value: object) -> Value:
    """A value in the form in which it is judged, compared and kept: a number or a plain tensor.

    NumPy's scalars become Python's, its arrays tensors. Of a DTensor it is what this rank has; a
    quantised tensor becomes the numbers that it stands for, a sparse one of any layout a coalesced
    COO tensor, and a nested one the elements of its members, one after the other.

    Raises:
        ConfigError: For what is neither a number nor a tensor, and for a tensor without elements to
            look at: without data, or of a class that keeps them elsewhere.

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
    if tensor.layout is torch.strided:
        return tensor
    if tensor.layout is torch._mkldnn:  # type: ignore[attr-defined]
        return tensor.to_dense()
    is_coo = tensor.layout is torch.sparse_coo
    return (tensor if is_coo else tensor.to_sparse()).coalesce()
