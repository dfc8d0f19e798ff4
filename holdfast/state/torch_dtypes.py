"""Names of torch dtypes in the file format, both ways, and which dtype may be cast to which."""

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


_FLOAT_DIGITS = MappingProxyType(
    {
        "F64": 53, "F32": 24, "F16": 11, "BF16": 8, "F8_E4M3": 4, "F8_E4M3FNUZ": 4,
        "F8_E5M2": 3, "F8_E5M2FNUZ": 3, "F8_E8M0": 1,
    }
)  # fmt: skip
"""Binary digits of the significand: integers of so many bits are exact."""
_COMPONENT = MappingProxyType({"C32": "F16", "C64": "F32", "C128": "F64"})


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


def refused_cast(stored: str, target: str) -> str:
    """Why elements of one dtype are not converted into another, in words; empty where they are.

    | stored | goes into |
    |---|---|
    | a float | any float, but `F8_E8M0`, which holds powers of two alone; any complex type |
    | a complex number | any complex type |
    | an integer | any integer, float or complex type that has every value of it exactly |
    | a truth value | any type, but `F8_E8M0`, which has no zero |

    Everything else loses what the stored type is for: imaginary parts, fractions, digits, signs.
    """
    if stored == target:
        return ""
    if stored == "BOOL":
        return "F8_E8M0 has no zero" if target == "F8_E8M0" else ""
    if stored in _COMPONENT:
        return "" if target in _COMPONENT else f"{target} has no imaginary part"
    into = _COMPONENT.get(target, target)
    if stored in _FLOAT_DIGITS:
        if into not in _FLOAT_DIGITS:
            return f"{target} has no fractions"
        return f"{target} holds powers of two alone" if into == "F8_E8M0" else ""
    if into == "BOOL":
        return "BOOL tells zero from the rest alone"
    signed, bits = stored[0] == "I", int(stored[1:])
    digits = bits - signed
    if into in _FLOAT_DIGITS:
        fits = digits <= _FLOAT_DIGITS[into] and into != "F8_E8M0"
        return "" if fits else f"{target} has not every {stored} exactly"
    if signed and into[0] == "U":
        return f"{target} has no negative numbers"
    room = int(into[1:]) - (into[0] == "I")
    return "" if digits <= room else f"{target} is too small for some {stored}"
