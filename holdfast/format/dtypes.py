"""The element types a checkpoint can hold, by their safetensors names, and their names in torch.

Torch-free: `numpy` is None for 8-bit floats and bfloat16, which numpy lacks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from holdfast.errors import PlacementError

OLDEST_SAFETENSORS = "0.5"


@dataclass(frozen=True, slots=True, kw_only=True)
class DType:
    """One element type: its size in bytes, and its form in a safetensors file.

    `envelope` is the safetensors type of its entries in our own data files, which every release
    reads. A type that safetensors lacks is written as `envelope_dim` elements of the envelope type,
    in one more trailing dim (C128 is F64 x 2). `since` is the release of safetensors whose files
    have the type under its own name, as a file for other programs must; None if none has.
    """

    name: str
    itemsize: int
    envelope: str
    envelope_dim: int | None = None
    since: str | None = OLDEST_SAFETENSORS
    numpy: np.dtype[np.generic] | None = None

    def envelope_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape in a safetensors entry for a tensor of `shape`."""
        return shape if self.envelope_dim is None else (*shape, self.envelope_dim)


def _table() -> dict[str, DType]:
    plain = {
        "BOOL": "?", "U8": "<u1", "I8": "<i1", "U16": "<u2", "I16": "<i2", "F16": "<f2",
        "U32": "<u4", "I32": "<i4", "F32": "<f4", "U64": "<u8", "I64": "<i8", "F64": "<f8",
    }  # fmt: skip
    types = [
        DType(name=name, itemsize=np.dtype(code).itemsize, envelope=name, numpy=np.dtype(code))
        for name, code in plain.items()
    ]
    types += [
        DType(name="C64", itemsize=8, envelope="C64", since="0.7", numpy=np.dtype("<c8")),
        DType(name="BF16", itemsize=2, envelope="BF16"),
        DType(name="F8_E4M3", itemsize=1, envelope="F8_E4M3"),
        DType(name="F8_E5M2", itemsize=1, envelope="F8_E5M2"),
        DType(name="F8_E8M0", itemsize=1, envelope="F8_E8M0", since="0.6"),
        DType(name="F8_E4M3FNUZ", itemsize=1, envelope="U8", since="0.8"),
        DType(name="F8_E5M2FNUZ", itemsize=1, envelope="U8", since="0.8"),
        DType(name="C32", itemsize=4, envelope="F16", envelope_dim=2, since=None),
        DType(
            name="C128", itemsize=16, envelope="F64", envelope_dim=2, since=None,
            numpy=np.dtype("<c16"),
        ),
    ]  # fmt: skip
    return {dtype.name: dtype for dtype in types}


DTYPES: Mapping[str, DType] = MappingProxyType(_table())
"""Every element type by name; immutable."""


TORCH_DTYPES: Mapping[str, str] = MappingProxyType(
    {each.numpy.name: each.name for each in DTYPES.values() if each.numpy is not None}
    | {
        "bfloat16": "BF16", "complex32": "C32", "float8_e4m3fn": "F8_E4M3",
        "float8_e5m2": "F8_E5M2", "float8_e4m3fnuz": "F8_E4M3FNUZ",
        "float8_e5m2fnuz": "F8_E5M2FNUZ", "float8_e8m0fnu": "F8_E8M0",
    }
)  # fmt: skip
"""Name in torch -> name in `DTYPES`."""

STORAGE_DTYPES: Mapping[str, str] = MappingProxyType({
    **{f"torch.{name}Storage": dtype for name, dtype in {
        "Double": "F64", "Float": "F32", "Half": "F16", "BFloat16": "BF16", "Long": "I64",
        "Int": "I32", "Short": "I16", "Char": "I8", "Byte": "U8", "Bool": "BOOL",
        "ComplexFloat": "C64", "ComplexDouble": "C128",
    }.items()},
    "torch.storage.UntypedStorage": "U8",
    "torch.UntypedStorage": "U8",
})  # fmt: skip
"""Class of a storage -> name in `DTYPES` of its elements; bytes if it is untyped."""


def is_plain_numpy(dtype: np.dtype[np.generic]) -> bool:
    """Return True for elements that have a stored form: numbers, and dates and times, of 64 bits.

    Of a complex number each part has as many. Texts, objects, records and longer floats have none.
    """
    return dtype.kind in "biufcmM" and dtype.itemsize <= (16 if dtype.kind == "c" else 8)


def dtype_named(name: str) -> DType:
    """Return the element type of that name; PlacementError names the known ones."""
    try:
        return DTYPES[name]
    except KeyError:
        known = " ".join(DTYPES)
        raise PlacementError(f"unknown element type {name!r}; known: {known}") from None
