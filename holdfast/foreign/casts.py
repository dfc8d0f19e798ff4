"""Another float type for all weights of a part."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from holdfast.errors import ConfigError
from holdfast.foreign.catalog import Catalog, CatalogTensor
from holdfast.foreign.computed_chunks import chunks_of
from holdfast.foreign.tensor_expressions import Cast, SourceTensor
from holdfast.foreign.weights import choose_part, weights_of
from holdfast.format.elements import FLOATS
from holdfast.format.values import tag_of, tensor_keys, tensor_node, walk

_ALIASES: Mapping[str, str] = MappingProxyType(
    {
        "bfloat16": "BF16", "float16": "F16", "half": "F16", "fp16": "F16", "fp32": "F32",
        "float32": "F32", "float": "F32", "float64": "F64", "double": "F64",
        "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
    }
)  # fmt: skip


def float_type(name: str) -> str:
    """Return the name in `DTYPES` of a float type; ConfigError for any other type."""
    known = _ALIASES.get(name.lower(), name.upper())
    if known not in FLOATS:
        raise ConfigError(f"{name!r} is not a float type: choose one of {' '.join(FLOATS)}")
    return known


def cast_weights(catalog: Catalog, dtype: str, *, part: str | None) -> Catalog:
    """Return the catalog in which the floats of one part have another type.

    Integers, booleans and complex numbers stay. Values are rounded to nearest, to even. An array of
    NumPy, which lacks most of these types, becomes a tensor. One that another part has, too, is the
    same tensor there, which `left_out` says.

    Args:
        catalog: Any.
        dtype: A float type, a name of `DTYPES`.
        part: See `weights_of`.

    Raises:
        ConfigError: There is no such part.

    Cost: nothing is read; a value that does not fit the type is a PlacementError when it is.
    """
    tensors, made = dict(catalog.tensors), set()
    for key in set(weights_of(catalog, part).keys.values()):
        tensor = tensors[key]
        if tensor.dtype in FLOATS and tensor.dtype != dtype:
            cast = Cast(SourceTensor(tensor), dtype=dtype, saturate=False, name=key)
            tensors[key] = CatalogTensor(
                key=key, dtype=dtype, shape=tensor.shape, chunks=chunks_of(cast)
            )
            made.add(key)
    parts = copy.deepcopy(dict(catalog.parts))
    for node in walk(parts):
        if tag_of(node) == "array" and node["k"] in made:
            key = node["k"]
            node.clear()
            node |= tensor_node(key)
    here = choose_part(catalog, part)
    shared = {
        name: sum(key in made for key in set(tensor_keys(node)))
        for name, node in parts.items()
        if name != here
    }
    notes = [
        f"{name}: {count} of its tensors are those of {here!r}, and are cast to {dtype} with them"
        for name, count in shared.items()
        if count
    ]
    identity = catalog.identity + f"{part} as {dtype}".encode()
    left_out = [*catalog.left_out, *notes]
    return replace(catalog, tensors=tensors, parts=parts, identity=identity, left_out=left_out)
