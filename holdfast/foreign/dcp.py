"""PyTorch DCP directories: `.metadata` and `__<rank>_<n>.distcp` files.

The metadata is a pickle, which is interpreted and not run. It has the boxes of every tensor, and
for each box a range of a file, in which lies what `torch.save` wrote of one tensor: its archive is
opened when the first of its bytes are read, and its elements then by their place in the file.
Values are opened at once. The paths of the saved dict are in the metadata, too; a flat dict of
tensors is the part `model`.
"""

from __future__ import annotations

import threading
from collections import ChainMap
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from holdfast.arrays.boxes import Box
from holdfast.errors import CorruptionError, some_of
from holdfast.foreign.catalog import (
    Catalog,
    CatalogTensor,
    Checksum,
    Chunk,
    FileBytes,
    OpenFiles,
    TensorReader,
    chunks_of_view,
    describing,
    no_checksums,
    read_flat,
)
from holdfast.foreign.draft import Draft
from holdfast.foreign.location import Location
from holdfast.foreign.pickled_values import Constructor, PickledTensor, Record, TorchSize
from holdfast.foreign.pickles import MAX_PICKLE_NBYTES, read_pickle
from holdfast.foreign.torch_files import tensors_of
from holdfast.foreign.torch_save import TorchFile, open_torch_save
from holdfast.format.digest import digest128
from holdfast.format.dtypes import DTYPES, TORCH_DTYPES
from holdfast.format.envelopes.dcp_metadata import EMPTY_DICTS
from holdfast.format.values import Node, is_plain_dict, is_tensor, tensor_node

FORMAT = "PyTorch DCP"
METADATA = ".metadata"
_SUFFIX = ".distcp"

_MODULE = "torch.distributed.checkpoint.metadata"
_TENSOR = f"{_MODULE}.TensorStorageMetadata"
_BYTES = f"{_MODULE}.BytesStorageMetadata"


def detect(location: Location) -> bool:
    """Return True for a directory with the metadata of DCP."""
    return location.has(METADATA) and location.head(METADATA, 1) == b"\x80"


def open_catalog(location: Location) -> Catalog:
    """Describe a directory.

    Raises:
        CorruptionError: The metadata is damaged, or asks for what is never run.
        StorageError: A file cannot be read.

    Cost: reads the metadata and all values.
    """
    items = read_items(location)
    tree: dict[str, Any] = {}
    nodes = {name: tensor_node(each.key) for name, each in items.tensors.items()} | items.values
    for name in items.in_order():
        items.put(tree, name, nodes[name])
    made = Draft(location, FORMAT)
    is_flat = bool(tree) and all(is_tensor(node) for node in tree.values())
    # Under the name of the part, so that keys are paths, as everywhere.
    prefix = "model." if is_flat else ""
    tensors = [*items.tensors.values(), *items.more.values()]
    made.add_tensors(replace(each, key=f"{prefix}{each.key}") for each in tensors)
    if is_flat:
        for node in tree.values():
            node["k"] = f"{prefix}{node['k']}"
    made.parts = {"model": tree} if is_flat else tree
    made.left_out = items.left_out
    return made.catalog(identity=items.identity, files=[METADATA], checksums=items.checksums)


@dataclass(kw_only=True)
class Items:
    """What a directory holds, by the flat names of the metadata.

    Args:
        identity: Of the metadata.
        tensors: The tensors.
        values: Nodes of all else; their own tensors are in `more`.
        more: Tensors inside of values, by key.
        paths: By flat name the path in the saved dict.
        left_out: What no value keeps.
        mcore_data: What Megatron has added to the metadata, by flat name.
        checksums: As of `Catalog`.
    """

    identity: bytes
    tensors: dict[str, CatalogTensor] = field(default_factory=dict)
    values: dict[str, Node] = field(default_factory=dict)
    more: dict[str, CatalogTensor] = field(default_factory=dict)
    paths: Mapping[str, tuple[str | int, ...]] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    mcore_data: Mapping[str, Any] = field(default_factory=dict)
    checksums: Callable[[OpenFiles], Iterable[Checksum]] = no_checksums

    def in_order(self) -> list[str]:
        """Return all names: of a dict in the order in which they were saved, of a list by place.

        Ranks that saved different items of one list are joined in any order.
        """
        known = self.tensors.keys() | self.values.keys()
        names = dict.fromkeys([*self.paths, *self.tensors, *self.values])
        order: dict[tuple[str | int, ...], int] = {}
        keys: dict[str, tuple[int, ...]] = {}
        for name in names:
            if name in known:
                path = self.paths.get(name, (name,))
                keys[name] = tuple(
                    step if isinstance(step, int) else order.setdefault(path[: i + 1], len(order))
                    for i, step in enumerate(path)
                )
        return sorted(keys, key=keys.__getitem__)

    def put(self, tree: dict[str, Any], name: str, node: Any) -> None:
        """Put a node at its path in the tree.

        Raises:
            CorruptionError: Two paths contradict each other.
        """
        path = self.paths.get(name, (name,))
        here: Any = tree
        for step, following in zip(path, (*path[1:], None), strict=True):
            blank: Any = [] if isinstance(following, int) else {}
            new = node if following is None else blank
            if isinstance(step, int) and isinstance(here, list):
                if not 0 <= step <= len(here):
                    raise CorruptionError(f"{name!r}: the list at its path has a gap")
                is_there = step < len(here)
                if not is_there:
                    here.append(new)
            elif isinstance(step, str) and is_plain_dict(here):
                is_there = step in here
                here.setdefault(step, new)
            else:
                raise CorruptionError(f"{name!r}: its path contradicts another one")
            if is_there and following is None:
                raise CorruptionError(f"{name!r}: its path is there twice")
            here = here[step]


def read_items(location: Location) -> Items:
    """Read the metadata and the values. Errors and cost: `open_catalog`."""
    place = location.storage.describe(METADATA)
    nbytes = location.storage.size(METADATA)
    if nbytes > MAX_PICKLE_NBYTES:
        raise CorruptionError(
            f"{place}: {nbytes} bytes are more than what is read of a pickle, {MAX_PICKLE_NBYTES}"
        )
    data = location.storage.read(METADATA)
    metadata = read_pickle(data, place=place)
    with describing(place, "the metadata of DCP"):
        return _read_items(location, metadata, digest128(data).encode())


def _read_items(location: Location, metadata: object, identity: bytes) -> Items:
    entries = _dict(_get(metadata, "state_dict_metadata"))
    names = list(entries)
    ranges = _ranges(location, _dict(_get(metadata, "storage_data")))
    empty = _empty_dicts(metadata, names)
    known = {*names, *empty}
    items = Items(identity=identity, paths=_paths(metadata, known), checksums=ranges.checksums)
    items.left_out += _unused(location, ranges)
    if lost := sorted(ranges.names().difference(names)):
        items.left_out.append(f"{some_of(lost)}: stored, and {METADATA} does not say as what")
    mcore_data = _optional(metadata, "mcore_data")
    if isinstance(mcore_data, dict):
        items.mcore_data = mcore_data
    archives = _Archives()
    values = []
    for name, entry in _consumed(entries):
        kind = entry.name if isinstance(entry, Record) else ""
        if kind == _TENSOR:
            items.tensors[name] = _tensor(name, entry, ranges, archives)
        elif kind == _BYTES:
            values.append((name, ranges.one(name)))
        else:
            raise CorruptionError(f"{location.label}: {name!r} is neither a tensor nor a value")
    # In the order of the files, so that reads go forwards.
    with OpenFiles(location.storage) as files:
        for name, where in sorted(values, key=lambda pair: (pair[1].file, pair[1].start)):
            file = _opened(where, files)
            taken = ChainMap(items.more, items.tensors)
            more, node, left_out = tensors_of(file.value, name, file, where.file, taken=taken)
            items.more |= more
            items.values[name] = node
            items.left_out += left_out
    # In the order in which they were saved.
    items.values = {name: items.values[name] for name in names if name in items.values}
    items.values |= {name: {} for name in empty}
    return items


def _empty_dicts(metadata: object, names: Collection[str]) -> list[str]:
    """Return the flat names of empty dicts, which a conversion of ours has noted."""
    stored = _optional(metadata, EMPTY_DICTS)
    empty = [] if stored is None else [_text(name) for name in _list(stored)]
    if again := sorted(set(names).intersection(empty)):
        raise CorruptionError(f"{again[0]!r} is an empty dict, and something else")
    return empty


@dataclass(frozen=True, slots=True)
class _Range:
    """Where one item lies."""

    file: str
    start: int
    nbytes: int


class _Ranges:
    """Items by name and, for tensors, by offset."""

    def __init__(self, table: dict[tuple[str, tuple[int, ...] | None], _Range]) -> None:
        self._table = table

    def checksums(self, files: OpenFiles) -> Iterator[Checksum]:
        """Yield those of every item; opens its archive."""
        by_place = sorted(self._table.items(), key=lambda item: (item[1].file, item[1].start))
        for (name, _), where in by_place:
            for storage in _opened(where, files).storages.values():
                if storage.crc is not None:
                    yield Checksum(
                        key=name,
                        file=where.file,
                        start=storage.start,
                        nbytes=storage.nbytes,
                        crc=storage.crc,
                    )

    def names(self) -> set[str]:
        """Return the names of all items."""
        return {name for name, _ in self._table}

    def ends(self) -> dict[str, int]:
        """Return by file the byte where the last of its items ends."""
        ends: dict[str, int] = {}
        for where in self._table.values():
            ends[where.file] = max(ends.get(where.file, 0), where.start + where.nbytes)
        return ends

    def one(self, name: str) -> _Range:
        """Return where a value lies."""
        where = self._table.get((name, None))
        if where is None:
            raise CorruptionError(f"{name!r} is stored nowhere")
        return where

    def chunk(self, name: str, offset: tuple[int, ...]) -> _Range:
        """Return where a chunk lies."""
        where = self._table.get((name, offset))
        # A tensor that was not sharded may have no offset.
        other = None if any(offset) else self._table.get((name, None))
        if where is not None and other not in (None, where):
            raise CorruptionError(f"the chunk of {name!r} at {list(offset)} is in two places")
        where = where or other
        if where is None:
            raise CorruptionError(f"the chunk of {name!r} at {list(offset)} is stored nowhere")
        return where


def _ranges(location: Location, storage_data: dict[Any, Any]) -> _Ranges:
    """Return the table of items; every file is a name in the directory."""
    present = set(location.names())
    table: dict[tuple[str, tuple[int, ...] | None], _Range] = {}
    for index, info in _consumed(storage_data):
        offset = index.state.get("offset") if type(index.state) is dict else None
        file = _get(info, "relative_path")
        if file not in present:
            raise CorruptionError(
                f"{location.label}: an item is to be in {file!r}, which is not a file of it"
            )
        if _optional(info, "transform_descriptors"):
            raise CorruptionError(
                f"{location.label}: {_get(index, 'fqn')!r} was transformed "
                f"({_get(info, 'transform_descriptors')}), which is not supported"
            )
        key = (_text(_get(index, "fqn")), None if offset is None else _sizes(offset))
        place = _Range(file, _number(_get(info, "offset")), _number(_get(info, "length")))
        if table.setdefault(key, place) != place:
            raise CorruptionError(f"{location.label}: {key[0]!r} is in two places")
    return _Ranges(table)


def _unused(location: Location, ranges: _Ranges) -> list[str]:
    """Say which data files the metadata has no item of.

    Raises:
        CorruptionError: A file is shorter than the metadata states.
    """
    ends = ranges.ends()
    for name, end in ends.items():
        nbytes = location.storage.size(name)
        if nbytes < end:
            raise CorruptionError(
                f"{location.storage.describe(name)} has {nbytes} bytes, and {METADATA} states "
                f"items up to byte {end}: it was cut, or {METADATA} is of another save"
            )
    return [
        f"{name}: {METADATA} has no item of it; it is left from another save, or {METADATA} is"
        for name in location.names()
        if name.endswith(_SUFFIX) and name not in ends and location.storage.size(name)
    ]


def _tensor(name: str, entry: Record, ranges: _Ranges, archives: _Archives) -> CatalogTensor:
    """Return a tensor whose chunks are opened when they are read."""
    properties = entry.get("properties")
    dtype = _dtype(properties)
    chunks = []
    for each in _list(entry.get("chunks")):
        offset, shape = _sizes(_get(each, "offsets")), _sizes(_get(each, "sizes"))
        box = Box(offset, shape)
        if box.numel:
            payload = ArchiveBytes(ranges.chunk(name, offset), dtype, shape, archives)
            chunks.append(Chunk(box, payload))
    return CatalogTensor(
        key=name, dtype=dtype, shape=_sizes(entry.get("size")), chunks=tuple(chunks)
    )


def _dtype(properties: object) -> str:
    """Return the element type: the first of the state of TensorProperties."""
    state = properties.state if isinstance(properties, Record) else None
    first = state[0] if isinstance(state, tuple) and state else None
    if isinstance(state, dict):
        first = state.get("dtype")
    name = first.name.removeprefix("torch.") if isinstance(first, Constructor) else ""
    if name not in TORCH_DTYPES:
        raise CorruptionError(f"a tensor has the element type {name!r}, which is not supported")
    return TORCH_DTYPES[name]


def _opened(where: _Range, files: OpenFiles) -> TorchFile:
    """Open the archive of an item."""
    place = f"{files.describe(where.file)} byte {where.start}"
    source = files.source(where.file)
    return open_torch_save(source, place=place, start=where.start, nbytes=where.nbytes)


class _Archives:
    """Opens what `torch.save` wrote into ranges of files, each once."""

    def __init__(self) -> None:
        self._tensors: dict[_Range, CatalogTensor] = {}
        self._lock = threading.Lock()

    def reader(self, payload: ArchiveBytes, files: OpenFiles) -> TensorReader:
        """Return a reader of the tensor in an archive, which is opened on first use.

        Raises:
            CorruptionError: The archive has another tensor than the metadata states.
        """
        with self._lock:
            tensor = self._tensors.get(payload.where)
        if tensor is None:
            tensor = self._locate(payload, files)
            with self._lock:
                self._tensors[payload.where] = tensor
        return TensorReader(tensor, files)

    def _locate(self, payload: ArchiveBytes, files: OpenFiles) -> CatalogTensor:
        where = payload.where
        file = _opened(where, files)
        place, value = file.place, file.value
        if not isinstance(value, PickledTensor):
            raise CorruptionError(f"{place}: this is not one tensor")
        if (value.dtype, value.shape) != (payload.dtype, payload.shape):
            raise CorruptionError(
                f"{place}: a tensor {value.dtype} {list(value.shape)}, where the metadata states "
                f"{payload.dtype} {list(payload.shape)}"
            )
        start, _ = file.range_of(value)
        chunks = chunks_of_view(
            where.file, start, value.shape, value.stride, DTYPES[value.dtype].itemsize
        )
        return CatalogTensor(key=place, dtype=value.dtype, shape=value.shape, chunks=chunks)


@dataclass(frozen=True, slots=True)
class ArchiveBytes:
    """The payload of a chunk inside of an archive that is opened when it is read.

    Args:
        where: The archive.
        dtype: What the metadata states; the archive is compared with it.
        shape: Likewise.
        archives: Opens it.
    """

    where: _Range
    dtype: str
    shape: tuple[int, ...]
    archives: _Archives

    @property
    def file(self) -> str:
        """The file."""
        return self.where.file

    @property
    def order(self) -> int:
        """The byte where the archive starts."""
        return self.where.start

    def readinto(self, out: memoryview, *, start: int, files: OpenFiles) -> None:
        """Open the archive if need be, and read the elements."""
        read_flat(self.archives.reader(self, files), out, start=start)

    def locate(self, files: OpenFiles) -> FileBytes | None:
        """Return where the elements lie one after another; None for a view with strides."""
        chunks = self.archives.reader(self, files).tensor.chunks
        payload = chunks[0].payload if len(chunks) == 1 else None
        return payload if isinstance(payload, FileBytes) else None


def _paths(metadata: object, names: Collection[str]) -> dict[str, tuple[str | int, ...]]:
    """Return by flat name the path in the saved dict; a name without one is its own path."""
    stored = _optional(metadata, "planner_data")
    if not isinstance(stored, dict):
        return {}
    paths = {}
    for name, path in stored.items():
        if name in names and isinstance(path, tuple | list):
            if not path or not all(type(step) in (str, int) for step in path):
                raise CorruptionError(f"{name!r} has an impossible path")
            paths[name] = tuple(path)
    return paths


def _consumed(table: dict[Any, Any]) -> Iterator[tuple[Any, Any]]:
    """Yield the items of a table, and remove each: what is made of it takes its memory."""
    for key in list(table):
        yield key, table.pop(key)


def _get(record: object, name: str) -> Any:
    if not isinstance(record, Record):
        raise ValueError(f"something without {name}")
    return record.get(name)


def _optional(record: object, name: str) -> Any:
    state = record.state if isinstance(record, Record) else None
    return state.get(name) if isinstance(state, dict) else None


def _dict(value: object) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise ValueError("a table is not a dict")
    return value


def _list(value: object) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError("chunks are not a list")
    return value


def _text(value: object) -> str:
    if type(value) is not str:
        raise ValueError("a name is not a string")
    return value


def _number(value: object) -> int:
    if type(value) is not int or value < 0:
        raise ValueError("a place in a file is not a number from 0")
    return value


def _sizes(value: object) -> tuple[int, ...]:
    if not isinstance(value, TorchSize | tuple | list):
        raise ValueError("a shape is not a torch.Size")
    return tuple(_number(each) for each in value)
