"""Writes a PyTorch DCP directory, as `FileSystemWriter` does: `.metadata` and `.distcp` files.

Of each tensor every chunk is an archive of `torch.save`, and so is every value. The chunks are
those of the source, cut where they are large. Dicts are flattened as `flatten_state_dict` does it,
and the paths are in the metadata, so that PyTorch loads parts, shards and the whole dict alike.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from holdfast.arrays.boxes import Box, split_box
from holdfast.errors import PlanError
from holdfast.foreign.catalog import Catalog, CatalogTensor
from holdfast.foreign.optimizer_trees import to_flat, to_torch
from holdfast.foreign.output import Extent, Output, OutputFile
from holdfast.foreign.pickle_output import Global, Made, Pairs, pickled
from holdfast.foreign.plain_values import PlainValues, TensorRef
from holdfast.foreign.torch_archive import (
    ALIGNMENT,
    Archive,
    layout_archive,
    tensor_value,
    torch_dtype,
)
from holdfast.format.dtypes import DTYPES
from holdfast.format.values import is_tensor

DEFAULT_MAX_FILE_NBYTES = 5_000_000_000
DEFAULT_MAX_CHUNK_NBYTES = 512 << 20
"""PyTorch loads a chunk as a whole, for any part of it."""

_METADATA = ".metadata"
_VERSION = "1.0.0"
_MODULE = "torch.distributed.checkpoint.metadata"

Path = tuple[str | int, ...]


def layout(
    catalog: Catalog,
    *,
    max_file_nbytes: int = DEFAULT_MAX_FILE_NBYTES,
    max_chunk_nbytes: int = DEFAULT_MAX_CHUNK_NBYTES,
    flat_optimizer: bool = False,
) -> Output:
    """Lay out all parts of a checkpoint as a DCP directory.

    Args:
        catalog: What to write.
        max_file_nbytes: A file is full beyond it.
        max_chunk_nbytes: Larger chunks are cut, so that a load needs no more memory at once.
        flat_optimizer: Write optimizers as `flatten_optimizer_state_dict=True` has them, for
            programs that load them so (TorchTitan).

    Raises:
        PlanError: Two names are one when they are joined with dots, or a value cannot be written.
        CorruptionError: A node is malformed.

    Cost: linear in the number of chunks and the size of values.
    """
    if max_file_nbytes < 1 or max_chunk_nbytes < 1:
        raise PlanError("a file and a chunk need at least one byte")
    plain = PlainValues()
    trees = {name: to_torch(node) for name, node in catalog.parts.items()}
    if flat_optimizer:
        trees = {name: to_flat(node) for name, node in trees.items()}
    flat = _Flat(plain.notes)
    for name, value in plain.parts(trees).items():
        flat.add((name,), value)
    # The reader takes a dict of nothing but tensors for a model.
    prefix = "model." if all(map(is_tensor, trees.values())) else ""
    files = _Files(catalog, max_file_nbytes, prefix)
    for key, item in flat.items.items():
        if not isinstance(item, TensorRef):
            files.add_value(key, item)
    for key, item in flat.items.items():
        if isinstance(item, TensorRef):
            files.add_tensor(key, catalog.tensors[item.key], max_chunk_nbytes)
    output = files.finish()
    metadata = _metadata(flat.paths, files)
    notes = [*catalog.left_out, *plain.notes]
    if catalog.metadata:
        notes.append(f"the user's metadata is left out: {', '.join(catalog.metadata)}")
    return Output(files=[*output, OutputFile.of(_METADATA, pickled(metadata))], notes=notes)


class _Flat:
    """Flattens values as PyTorch does.

    Attributes:
        items: Tensors and values by flat name.
        paths: By flat name the path in the dict.
    """

    def __init__(self, notes: list[str]) -> None:
        self._notes = notes
        self.items: dict[str, Any] = {}
        self.paths: dict[str, Path] = {}

    def add(self, path: Path, value: Any) -> None:
        """Add a value and what is below it."""
        shown = ".".join(map(str, path))
        if isinstance(value, tuple | deque) and _has_tensors(value):
            kind = type(value).__name__
            self._notes.append(f"{shown} is a {kind} with tensors: it is written as a list")
            value = list(value)
        if isinstance(value, dict):
            self._add_dict(path, value, shown)
        elif isinstance(value, list) and not _is_leaf(value):
            for i, item in enumerate(value):
                self.add((*path, i), item)
        elif shown in self.items:
            raise PlanError(
                f"{shown!r} would be there twice: as {self.paths[shown]} and as {path}; rename one"
            )
        else:
            self.items[shown] = value
            self.paths[shown] = path

    def _add_dict(self, path: Path, value: dict[Any, Any], shown: str) -> None:
        if not value:
            self._notes.append(f"{shown} is empty, which the format cannot hold")
        if type(value) is not dict:
            self._notes.append(
                f"{shown} is of type {type(value).__name__}: it is written as a dict"
            )
        if not all(type(key) is str for key in value):
            self._notes.append(f"{shown} has keys that are not strings: they become strings")
        for key, member in value.items():
            self.add((*path, key if type(key) is str else str(key)), member)


def _is_leaf(value: list[Any]) -> bool:
    """Return True for a list that is one value: it has neither tensors nor dicts."""
    return not any(
        isinstance(item, dict | TensorRef)
        or (isinstance(item, list) and not _is_leaf(item))
        or _has_tensors(item)
        for item in value
    )


def _has_tensors(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_has_tensors, value.values()))
    if isinstance(value, list | tuple | deque):
        return any(map(_has_tensors, value))
    return isinstance(value, TensorRef)


@dataclass(frozen=True, slots=True)
class _Stored:
    """One item and where it lies; a value has no box."""

    key: str
    box: Box | None
    number: int
    file: str
    start: int
    nbytes: int


@dataclass(slots=True)
class _File:
    """A file that grows."""

    name: str
    nbytes: int = 0
    literals: list[tuple[int, bytes]] = field(default_factory=list)
    extents: list[Extent] = field(default_factory=list)


class _Files:
    """Puts archives into files, one after the other.

    Attributes:
        tensors: By flat name the tensor; None for a value.
        chunks: By flat name the boxes of a tensor.
        stored: Where everything lies.
    """

    def __init__(self, catalog: Catalog, max_nbytes: int, prefix: str) -> None:
        self._catalog = catalog
        self._max_nbytes = max_nbytes
        self._prefix = prefix
        self._files: list[_File] = []
        self._archives: dict[tuple[str, tuple[int, ...]], Archive] = {}
        self.tensors: dict[str, CatalogTensor | None] = {}
        self.chunks: dict[str, list[Box]] = {}
        self.stored: list[_Stored] = []

    def add_value(self, key: str, value: Any) -> None:
        """Add a value."""
        self.tensors[key] = None
        self._add(key, None, 0, layout_archive(pickled(value), []))

    def add_tensor(self, key: str, tensor: CatalogTensor, max_chunk_nbytes: int) -> None:
        """Add a tensor, chunk by chunk."""
        self.tensors[key] = tensor
        boxes = self.chunks[key] = list(_boxes(tensor, max_chunk_nbytes))
        for number, box in enumerate(boxes):
            file, archive = self._add(key, box, number, self._of_chunk(tensor.dtype, box.shape))
            if box.numel:
                file.extents.append(
                    Extent(
                        start=archive.starts[0],
                        key=tensor.key,
                        box=box,
                        crc_at=archive.crc_at[0],
                        to_key=self._prefix + key,
                    )
                )

    def finish(self) -> list[OutputFile]:
        """Return the files."""
        return [
            OutputFile(
                name=file.name, nbytes=file.nbytes, literals=file.literals, extents=file.extents
            )
            for file in self._files
        ]

    def _of_chunk(self, dtype: str, shape: tuple[int, ...]) -> Archive:
        """Return the archive of a chunk: all of one type and shape are alike."""
        archive = self._archives.get((dtype, shape))
        if archive is None:
            nbytes = math.prod(shape) * DTYPES[dtype].itemsize
            archive = layout_archive(pickled(tensor_value(dtype, shape, 0)), [nbytes])
            self._archives[dtype, shape] = archive
        return archive

    def _add(
        self, key: str, box: Box | None, number: int, archive: Archive
    ) -> tuple[_File, Archive]:
        """Put an archive at the end of the last file, or of a new one."""
        if not self._files or self._files[-1].nbytes + archive.nbytes > self._max_nbytes:
            # As so many ranks would have written it.
            self._files.append(_File(f"__{len(self._files)}_0.distcp"))
        file = self._files[-1]
        archive = archive.moved(file.nbytes + -file.nbytes % ALIGNMENT)
        file.literals += archive.literals
        file.nbytes = archive.start + archive.nbytes
        self.stored.append(_Stored(key, box, number, file.name, archive.start, archive.nbytes))
        return file, archive


def _boxes(tensor: CatalogTensor, max_nbytes: int) -> Iterator[Box]:
    """Yield the boxes of a tensor's chunks, each once, the large ones cut; one if it is empty."""
    if not tensor.nbytes:
        yield tensor.whole
        return
    boxes = dict.fromkeys(chunk.box for chunk in tensor.chunks if chunk.box.numel)
    for box in sorted(boxes, key=lambda each: each.offset):
        yield from split_box(box, max_numel=max(max_nbytes // tensor.itemsize, 1))


# ---- the metadata ----


def _made(name: str, state: Any, *, module: str = _MODULE, is_shared: bool = False) -> Made:
    return Made(by=Global(module, name), is_new=True, state=state, is_shared=is_shared)


class _Shared:
    """Descriptions that come again and again, each made once: the metadata stays small."""

    def __init__(self) -> None:
        self._sizes: dict[tuple[int, ...], Made] = {}
        self._properties: dict[str, Made] = {}

    def size(self, numbers: tuple[int, ...]) -> Made:
        """Describe a `torch.Size`."""
        made = self._sizes.get(numbers)
        if made is None:
            made = Made(by=Global("torch", "Size"), args=(numbers,), is_shared=True)
            self._sizes[numbers] = made
        return made

    def properties(self, dtype: str) -> Made:
        """Describe the properties of tensors of a type."""
        made = self._properties.get(dtype)
        if made is None:
            strided = Made(by=Global("torch.serialization", "_get_layout"), args=("torch.strided",))
            contiguous = Made(by=Global(_MODULE, "_MEM_FORMAT_ENCODING"), args=(0,))
            state = (torch_dtype(dtype), strided, False, contiguous, False)
            made = _made("TensorProperties", state, is_shared=True)
            self._properties[dtype] = made
        return made


def _metadata(paths: Mapping[str, Path], files: _Files) -> Made:
    """Describe the object in `.metadata`."""
    shared = _Shared()
    items = {
        key: _made("BytesStorageMetadata", None)
        if tensor is None
        else _tensor(tensor, files.chunks[key], shared)
        for key, tensor in ((key, files.tensors[key]) for key in paths)
    }
    state = {
        "state_dict_metadata": items,
        "planner_data": dict(paths),
        "storage_data": Pairs([(_index(each, shared), _place(each)) for each in files.stored]),
        "storage_meta": _made(
            "StorageMeta", {"checkpoint_id": None, "save_id": None, "load_id": None, "modules": []}
        ),
        "version": _VERSION,
    }
    return _made("Metadata", state)


def _tensor(tensor: CatalogTensor, boxes: Sequence[Box], shared: _Shared) -> Made:
    chunks = [
        _made(
            "ChunkStorageMetadata",
            {"offsets": shared.size(box.offset), "sizes": shared.size(box.shape)},
        )
        for box in boxes
    ]
    state = {
        "properties": shared.properties(tensor.dtype),
        "size": shared.size(tensor.shape),
        "chunks": chunks,
    }
    return _made("TensorStorageMetadata", state)


def _index(item: _Stored, shared: _Shared) -> Made:
    state: dict[str, Any] = {"fqn": item.key, "index": None}
    if item.box is not None:
        offset = shared.size(item.box.offset)
        state = {"fqn": item.key, "index": item.number, "offset": offset}
    return _made("MetadataIndex", state)


def _place(item: _Stored) -> Made:
    state = {
        "relative_path": item.file,
        "offset": item.start,
        "length": item.nbytes,
    }
    return _made("_StorageInfo", state, module="torch.distributed.checkpoint.filesystem")
