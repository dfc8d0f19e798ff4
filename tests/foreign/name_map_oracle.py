"""Small catalogs from arrays, and catalogs back as arrays: what the tests of name maps compare."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from holdfast.arrays.boxes import Box
from holdfast.foreign.catalog import (
    Catalog,
    CatalogTensor,
    Chunk,
    FileBytes,
    HeldBytes,
    OpenFiles,
    TensorReader,
)
from holdfast.format.dtypes import DTYPES
from holdfast.format.values import Node, tensor_node
from holdfast.storage import PosixStorage

Array = npt.NDArray[Any]
_NAMES = {dtype.numpy: name for name, dtype in DTYPES.items() if dtype.numpy is not None}


def boxes_of(shape: Sequence[int], cuts: Sequence[int]) -> list[Box]:
    """A grid of boxes: each dim in about so many parts."""
    ranges = []
    for size, cut in zip(shape, cuts, strict=True):
        step = max(-(-size // cut), 1)
        ranges.append([(start, min(step, size - start)) for start in range(0, size, step)])
    return [
        Box(tuple(start for start, _ in each), tuple(size for _, size in each))
        for each in itertools.product(*ranges)
    ]


def catalog_of(
    root: Path,
    model: Mapping[str, Array],
    *,
    optimizer: Mapping[str, Any] | None = None,
    cuts: int = 1,
    dtype: str | None = None,
    held: bool = False,
    extra: Mapping[str, Node] | None = None,
) -> Catalog:
    """A catalog of arrays, in one file or in memory, each tensor in a grid of chunks."""
    data = bytearray()
    tensors: dict[str, CatalogTensor] = {}

    def add(key: str, array: Array) -> Node:
        chunks = []
        for box in boxes_of(array.shape, [cuts] * array.ndim):
            content = np.ascontiguousarray(array[box.relative_to((0,) * array.ndim)]).tobytes()
            payload = HeldBytes(content, "data.bin") if held else FileBytes("data.bin", len(data))
            chunks.append(Chunk(box, payload))
            data.extend(content)
        kind = dtype or _NAMES[array.dtype]
        tensors[key] = CatalogTensor(key=key, dtype=kind, shape=array.shape, chunks=tuple(chunks))
        return tensor_node(key)

    def tree(value: Any, path: str) -> Node:
        if isinstance(value, Mapping):
            return {name: tree(member, f"{path}.{name}") for name, member in value.items()}
        return add(path, value) if isinstance(value, np.ndarray) else value

    parts: dict[str, Node] = {"model": tree(dict(model), "model")}
    if extra:
        parts["model"] |= extra  # type: ignore[operator]
    if optimizer is not None:
        parts["optimizer"] = tree(optimizer, "optimizer")
    root.mkdir(exist_ok=True)
    (root / "data.bin").write_bytes(data)
    return Catalog(
        format="test", storage=PosixStorage(root), label="test", identity=b"test",
        tensors=tensors, parts=parts,
    )  # fmt: skip


def read(catalog: Catalog, key: str, box: Box | None = None) -> Array:
    """A tensor of a catalog, or a box of it, as an array; types that numpy lacks as their codes."""
    tensor = catalog.tensors[key]
    box = box or tensor.whole
    native = DTYPES[tensor.dtype].numpy or np.dtype(f"<u{tensor.itemsize}")
    out = np.empty(box.shape, dtype=native)
    with OpenFiles(catalog.storage) as files:
        TensorReader(tensor, files).read_box(box, memoryview(out.reshape(-1).view(np.uint8)))
    return out


def model_of(catalog: Catalog) -> dict[str, Array]:
    """The tensors of the part `model`, by name."""
    part = catalog.parts["model"]
    assert isinstance(part, dict)
    return {
        name: read(catalog, node["k"])  # type: ignore[arg-type]
        for name, node in part.items()
        if isinstance(node, dict) and "k" in node
    }


def assert_equal(result: Mapping[str, Array], expected: Mapping[str, Array]) -> None:
    """The same names, shapes, types and bits."""
    assert sorted(result) == sorted(expected)
    for name, array in expected.items():
        assert result[name].shape == array.shape, name
        assert result[name].dtype == array.dtype, name
        assert result[name].tobytes() == np.ascontiguousarray(array).tobytes(), name
