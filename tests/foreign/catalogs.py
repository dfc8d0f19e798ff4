"""Catalogs of trees of torch tensors in memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from holdfast.arrays.boxes import Box
from holdfast.foreign.catalog import Catalog, CatalogTensor, Chunk, HeldBytes
from holdfast.format.values import Node, encode_tree, tensor_node
from holdfast.storage import PosixStorage
from tests.foreign.making import DTYPES

NAMES = {dtype: name for name, dtype in DTYPES.items()}
TRAINED_DTYPES = tuple(NAMES)

Boxes = Callable[[str, tuple[int, ...]], Sequence[Box]]


def whole(key: str, shape: tuple[int, ...]) -> list[Box]:
    return [Box((0,) * len(shape), shape)]


def bytes_of(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().contiguous().reshape(-1)
    return bytes(flat.view(torch.uint8).numpy()) if flat.numel() else b""


def sample(dtype: torch.dtype, shape: Sequence[int] = (3, 5)) -> torch.Tensor:
    """Every bit pattern counts but for bools."""
    size = torch.empty(0, dtype=dtype).element_size()
    numel = int(torch.Size(shape).numel())
    raw = torch.arange(numel * size, dtype=torch.int64) * 37 + 11
    raw = (raw % 2 if dtype == torch.bool else raw % 251).to(torch.uint8)
    return (
        raw.view(dtype).reshape(tuple(shape)) if numel else torch.empty(tuple(shape), dtype=dtype)
    )


def catalog_of(
    tree: Mapping[str, Any],
    *,
    boxes: Boxes = whole,
    label: str = "source",
    storage: Path = Path(),
    **fields: Any,
) -> Catalog:
    """Describe a tree by the paths of its tensors; tensors of one memory are one."""
    tensors: dict[str, CatalogTensor] = {}
    keys: dict[tuple[object, ...], str] = {}

    def leaf(path: str, value: object) -> Node:
        if not isinstance(value, torch.Tensor):
            return None
        same = (value.data_ptr() or path, value.shape, value.dtype)
        key = keys.setdefault(same, path)
        if key == path:
            shape = tuple(value.shape)
            tensors[path] = CatalogTensor(
                key=path,
                dtype=NAMES[value.dtype],
                shape=shape,
                chunks=tuple(
                    Chunk(
                        box,
                        HeldBytes(bytes_of(value.detach()[box.relative_to((0,) * box.ndim)]), path),
                    )
                    for box in boxes(path, shape)
                ),
            )
        return tensor_node(key)

    parts: Any = encode_tree(dict(tree), on_leaf=leaf)
    return Catalog(
        format="memory",
        storage=PosixStorage(storage),
        label=label,
        identity=b"memory",
        tensors=tensors,
        parts=parts,
        **fields,
    )


def equal_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (
        one.dtype == other.dtype and one.shape == other.shape and bytes_of(one) == bytes_of(other)
    )
