"""Another float type for all weights of a part."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from holdfast.errors import ConfigError
from holdfast.foreign.catalog import Catalog, CatalogTensor, free_key
from holdfast.foreign.computed_chunks import chunks_of
from holdfast.foreign.tensor_expressions import Cast, SourceTensor
from holdfast.foreign.weights import choose_part, weights_of
from holdfast.format.elements import FLOATS
from holdfast.format.values import is_tensor, join_path, tensor_keys, tensor_node, walk

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
    NumPy, which lacks most of these types, becomes a tensor. What another part has, too, keeps its
    type there, as after a name map.

    Args:
        catalog: Any.
        dtype: A float type, a name of `DTYPES`.
        part: See `weights_of`.

    Raises:
        ConfigError: There is no such part.

    Cost: nothing is read; a value that does not fit the type is a PlacementError when it is.
    """
    here = choose_part(catalog, part)
    parts = copy.deepcopy(dict(catalog.parts))
    elsewhere = {key for name in parts if name != here for key in tensor_keys(parts[name])}
    tensors, made = dict(catalog.tensors), {}
    for name, key in weights_of(catalog, part).keys.items():
        tensor = catalog.tensors[key]
        if tensor.dtype in FLOATS and tensor.dtype != dtype and key not in made:
            cast = Cast(SourceTensor(tensor), dtype=dtype, saturate=False, name=key)
            new = free_key(join_path(here, name), tensors) if key in elsewhere else key
            tensors[new] = CatalogTensor(
                key=new, dtype=dtype, shape=tensor.shape, chunks=chunks_of(cast)
            )
            made[key] = new
    for node in walk(parts[here]):
        if is_tensor(node) and node["k"] in made:
            key = node["k"]
            node.clear()
            node |= tensor_node(made[key])
    identity = catalog.identity + f"{part} as {dtype}".encode()
    return replace(catalog, tensors=tensors, parts=parts, identity=identity)
