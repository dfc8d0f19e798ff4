"""Names of torch dtypes in the file format, both ways."""

from __future__ import annotations

from types import MappingProxyType

import torch

from holdfast.errors import PlacementError

_NAMES: dict[torch.dtype, str] = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.int64: "I64",
    torch.uint64: "U64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.complex64: "C64",
    torch.complex128: "C128",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.complex32: "C32",
}
if hasattr(torch, "float8_e8m0fnu"):
    _NAMES[torch.float8_e8m0fnu] = "F8_E8M0"

TORCH_TO_NAME = MappingProxyType(_NAMES)
NAME_TO_TORCH = MappingProxyType({name: dtype for dtype, name in _NAMES.items()})


def dtype_name(dtype: torch.dtype, *, key: str) -> str:
    """The format's name of a torch dtype; PlacementError naming `key` where there is none."""
    name = TORCH_TO_NAME.get(dtype)
    if name is None:
        raise PlacementError(
            f"{key}: dtype {dtype} cannot be stored; convert the tensor to one of "
            f"{', '.join(sorted(NAME_TO_TORCH))} or mark it Transient"
        )
    return name


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a format name; PlacementError where this torch has none."""
    dtype = NAME_TO_TORCH.get(name)
    if dtype is None:
        raise PlacementError(
            f"dtype {name} of the checkpoint is not known to torch {torch.__version__}"
        )
    return dtype
