"""Names of element types and of storages in torch."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

TORCH_DTYPES: Mapping[str, str] = MappingProxyType({
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64",
    "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8", "uint16": "U16", "uint32": "U32",
    "uint64": "U64", "bool": "BOOL", "complex32": "C32", "complex64": "C64", "complex128": "C128",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ", "float8_e8m0fnu": "F8_E8M0",
})  # fmt: skip
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
