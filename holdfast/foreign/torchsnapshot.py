"""Snapshots of torchsnapshot 0.1: `.snapshot_metadata`, and tensors as plain bytes in files.

The metadata is JSON: an entry for each rank and path, `0/model/layers.0.weight`. A tensor is a
range of a file (several share a *slab*), or several boxes of one; what is not a tensor or a plain
value is a small file of `torch.save`, which is interpreted by the closed list of types. What each
key of the app state held is a part.

Of what is not sharded each rank may have its own. The values of the lowest rank are read, and where
another rank's are not the same entry they are left out by name.
"""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

import msgspec

from holdfast.arrays.boxes import Box
from holdfast.decoding import convert_as
from holdfast.errors import CorruptionError, PlacementError, some_of
from holdfast.foreign.catalog import (
    Catalog,
    CatalogTensor,
    Chunk,
    FileBytes,
    chunks_of_view,
    describing,
    each_once,
)
from holdfast.foreign.draft import Draft
from holdfast.foreign.location import Location
from holdfast.foreign.pickle_nodes import to_node
from holdfast.foreign.pickled_values import PickledStorage, PickledTensor
from holdfast.foreign.shard_index import decode_json
from holdfast.foreign.torch_files import tensor_of
from holdfast.foreign.torch_save import TorchFile, open_torch_save
from holdfast.format.digest import digest128
from holdfast.format.dtypes import DTYPES, TORCH_DTYPES
from holdfast.format.manifest import MAX_MANIFEST_NBYTES
from holdfast.storage.storage_protocol import split_path

FORMAT = "torchsnapshot"
METADATA = ".snapshot_metadata"
_SHARDED = ("ShardedTensor", "DTensor")
_DICTS = ("dict", "OrderedDict")
_BYTES, _PICKLED = "buffer_protocol", "torch_save"

_Entry = dict[str, Any]


def detect(location: Location) -> bool:
    """Return True for a directory with the metadata of a snapshot."""
    return location.has(METADATA)


def open_catalog(location: Location) -> Catalog:
    """Describe a snapshot.

    Raises:
        CorruptionError: It is damaged, or of a release before 0.1.
        StorageError: A file cannot be read.

    Cost: reads the metadata, and a small file for each value that is not plain.
    """
    place = location.storage.describe(METADATA)
    if location.storage.size(METADATA) > MAX_MANIFEST_NBYTES:
        raise CorruptionError(f"{place}: it is too large for the metadata of a snapshot")
    data = location.storage.read(METADATA)
    if not data.lstrip().startswith(b"{"):
        raise CorruptionError(
            f"{place}: this is not JSON. Releases of torchsnapshot before 0.1 wrote YAML: read the "
            f"snapshot with 0.1, and take it again"
        )
    with describing(place, "the metadata of a snapshot"):
        snapshot = _Snapshot(location, _by_path(data))
        made = Draft(location, FORMAT)
        for path in snapshot.roots():
            part, value = unquote(path), snapshot.value(path)
            if value is not _NOTHING:
                tree = to_node(value, path=part, taken=made.tensors)
                made.parts[part] = tree.node
                snapshot.left_out += tree.left_out
                made.add_tensors(map(snapshot.tensor, tree.leaves))
    made.left_out = snapshot.left_out
    if lost := [unquote(path) for path in snapshot.entries if path not in snapshot.seen]:
        made.left_out.append(f"{some_of(lost)}: in no dict or list of the snapshot")
    return made.catalog(identity=digest128(data).encode(), files=[METADATA])


def _by_path(data: bytes) -> dict[str, list[tuple[int, _Entry]]]:
    """Return the entries of all ranks by their path without the rank, in the order of ranks."""
    try:
        entries = convert_as(decode_json(data), _Metadata).manifest
    except (msgspec.ValidationError, RecursionError) as error:
        raise ValueError(str(error)) from None
    table: dict[str, list[tuple[int, _Entry]]] = {}
    for path, entry in entries.items():
        rank, _, rest = path.partition("/")
        if not (rank.isascii() and rank.isdigit()) or not rest:
            raise ValueError(f"an entry at {path!r}")
        table.setdefault(rest, []).append((int(rank), entry))
    for each in table.values():
        each.sort(key=lambda pair: pair[0])
    return table


class _Metadata(msgspec.Struct):
    """The metadata, as far as it is read."""

    manifest: dict[str, dict[str, Any]]


@dataclass(slots=True)
class _Snapshot:
    """The entries of a snapshot, as values with tensors that stand for ranges of files.

    Args:
        location: The directory.
        entries: By path, of each rank that has one.
        left_out: What is not read, one sentence each.
        seen: The paths that were read, or noted.
    """

    location: Location
    entries: dict[str, list[tuple[int, _Entry]]]
    left_out: list[str] = field(default_factory=list)
    seen: set[str] = field(default_factory=set)
    _chunks: dict[int, tuple[PickledTensor, tuple[Chunk, ...]]] = field(default_factory=dict)
    _files: dict[int, tuple[object, TorchFile, str]] = field(default_factory=dict)

    def roots(self) -> list[str]:
        """Return the paths of the keys of the app state."""
        return [path for path in self.entries if "/" not in path]

    def value(self, path: str) -> Any:
        """Return the value at a path."""
        self.seen.add(path)
        entry = self._first(path)
        kind = entry["type"]
        if kind == "list":
            return list(self._items(path))
        if kind in _DICTS:
            return self._dict(path)
        if kind in _SHARDED:
            shards = [each for one in self._of_ranks(path, _SHARDED) for each in one["shards"]]
            return self._boxes(path, shards)
        if kind == "ChunkedTensor":
            return self._boxes(path, entry["chunks"], _sizes(entry["shape"]))
        if kind == "Tensor":
            box = Box((0,) * len(entry["shape"]), _sizes(entry["shape"]))
            return self._stand_in(
                path, entry["dtype"], box.shape, self._chunks_of(path, box, entry)
            )
        if kind == "object":
            return self._unpickled(path, entry)
        return _plain(kind, entry.get("serialized_value"))

    def tensor(self, leaf: Any) -> CatalogTensor:
        """Return the tensor that a leaf of the tree stands for."""
        known = self._chunks.get(id(leaf.value))
        if known is None:
            _, file, name = self._files[id(leaf.value)]
            return tensor_of(leaf, file, name)
        value, chunks = known
        return CatalogTensor(key=leaf.key, dtype=value.dtype, shape=value.shape, chunks=chunks)

    def _first(self, path: str) -> _Entry:
        """Return the entry of the lowest rank; note others that are not one with it."""
        (_, first), *others = self.entries[path]
        # What ranks have of a dict, a list or a sharded tensor is joined.
        joined = next((each for each in (_DICTS, _SHARDED, ("list",)) if first["type"] in each), ())
        ranks = [rank for rank, entry in others if entry != first and entry["type"] not in joined]
        if ranks:
            self.left_out.append(
                f"{unquote(path)}: rank {ranks[0]} has its own"
                + (f", and {len(ranks) - 1} more" if len(ranks) > 1 else "")
            )
        return first

    def _of_ranks(self, path: str, kinds: tuple[str, ...]) -> list[_Entry]:
        """Return the entries of all ranks that are of some kinds."""
        return [entry for _, entry in self.entries[path] if entry["type"] in kinds]

    def _items(self, path: str) -> Iterable[Any]:
        number = 0
        while f"{path}/{number}" in self.entries:
            yield _or_none(self.value(f"{path}/{number}"))
            number += 1

    def _dict(self, path: str) -> dict[Any, Any]:
        values: dict[Any, Any] = {}
        seen: set[Any] = set()
        for entry in self._of_ranks(path, _DICTS):
            for key in entry["keys"]:
                if type(key) not in (str, int):
                    raise ValueError(f"a key {key!r} at {path!r}")
                inner = f"{path}/{str(key).replace('%', '%25').replace('/', '%2F')}"
                if key in seen:
                    continue
                seen.add(key)
                value = self.value(inner)
                if value is not _NOTHING:
                    values[key] = value
        return values

    def _boxes(
        self, path: str, shards: list[_Entry], shape: tuple[int, ...] | None = None
    ) -> PickledTensor | object:
        boxes = [Box(_sizes(each["offsets"]), _sizes(each["sizes"])) for each in shards]
        if not boxes:
            raise ValueError(f"no box at {path!r}")
        if shape is None:
            shape = tuple(max(ends) for ends in zip(*(each.stop for each in boxes), strict=True))
        dtypes = {each["tensor"]["dtype"] for each in shards}
        if len(dtypes) > 1:
            raise ValueError(f"boxes of several element types at {path!r}")
        chunks: list[Chunk] = []
        for box, each in zip(boxes, shards, strict=True):
            if _sizes(each["tensor"]["shape"]) != box.shape:
                raise ValueError(f"a box at {path!r} with a tensor of another shape")
            chunks += self._chunks_of(path, box, each["tensor"])
        # Ranks state the same place of what several of them held.
        whole = each_once(chunks, place=f"{self.location.label}: {unquote(path)!r}")
        return self._stand_in(path, dtypes.pop(), shape, whole)

    def _chunks_of(self, path: str, box: Box, entry: _Entry) -> tuple[Chunk, ...]:
        """Return where the elements of a box lie; none for a type that has no stored form."""
        dtype = _dtype(entry["dtype"])
        if dtype is None:
            return ()
        name = _file_name(entry)
        start, stop = _range(entry)
        itemsize = DTYPES[dtype].itemsize
        if entry["serializer"] == _BYTES:
            if stop is not None and stop - start != box.numel * itemsize:
                raise ValueError(f"a range of {stop - start} bytes for the tensor at {path!r}")
            return (Chunk(box, FileBytes(name, start)),) if box.numel else ()
        if entry["serializer"] != _PICKLED:
            raise ValueError(f"an unknown serializer {entry['serializer']!r} at {path!r}")
        file = self._open(name, start, stop)
        value = file.value
        if not isinstance(value, PickledTensor) or (value.dtype, value.shape) != (dtype, box.shape):
            raise CorruptionError(f"{file.place}: not the tensor that the metadata states")
        place, _ = file.range_of(value)
        return chunks_of_view(name, place, box.shape, value.stride, itemsize, offset=box.offset)

    def _stand_in(
        self, path: str, dtype: str, shape: tuple[int, ...], chunks: tuple[Chunk, ...]
    ) -> PickledTensor | object:
        """Return a tensor for the tree, whose chunks `tensor` knows."""
        name = _dtype(dtype)
        if name is None:
            self.left_out.append(f"{unquote(path)}: its element type {dtype} has no stored form")
            return _NOTHING
        numel = math.prod(shape)
        storage = PickledStorage(key=path, dtype=name, numel=numel, location="cpu")
        stride = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
        value = PickledTensor(storage=storage, dtype=name, offset=0, shape=shape, stride=stride)
        self._chunks[id(value)] = value, chunks
        return value

    def _unpickled(self, path: str, entry: _Entry) -> Any:
        """Return a value that `torch.save` wrote; one that is never read is left out."""
        name = _file_name(entry)
        if entry["serializer"] != _PICKLED:
            raise ValueError(f"an unknown serializer {entry['serializer']!r} at {path!r}")
        try:
            file = self._open(name, 0, None)
            tree = to_node(file.value, path=unquote(path))
        except (CorruptionError, PlacementError) as error:
            if isinstance(error, CorruptionError) and not error.details.get("not_read"):
                raise
            # One odd value does not make all others unreadable.
            self.left_out.append(f"{unquote(path)}: {error}")
            return _NOTHING
        for leaf in tree.leaves:
            self._files[id(leaf.value)] = leaf.value, file, name
        return file.value

    def _open(self, name: str, start: int, stop: int | None) -> TorchFile:
        nbytes = None if stop is None else stop - start
        with closing(self.location.storage.open(name)) as source:
            place = self.location.storage.describe(name)
            return open_torch_save(source, place=place, start=start, nbytes=nbytes)


_NOTHING = object()
"""Stands for what is left out."""


def _dtype(text: str) -> str | None:
    """Return the name in `DTYPES` of an element type of torch; None if there is none."""
    return TORCH_DTYPES.get(text.removeprefix("torch."))


def _or_none(value: Any) -> Any:
    """Return None for what is left out of a list, so that the others keep their places."""
    return None if value is _NOTHING else value


def _plain(kind: object, text: object) -> Any:
    """Return a value that is in the metadata itself."""
    if kind not in ("int", "str", "bool", "bytes", "float"):
        raise ValueError(f"an entry of the unknown type {kind!r}")
    if type(text) is not str:
        raise ValueError("a value that is not text")
    if kind == "int":
        return int(text)
    if kind == "str":
        return text
    if kind == "bool" and text in ("True", "False"):
        return text == "True"
    if kind == "bytes":
        return base64.b64decode(text, validate=True)
    if kind == "float":
        return struct.unpack("<d", base64.b64decode(text, validate=True))[0]
    raise ValueError(f"{text!r} is not of type {kind}")


def _sizes(value: object) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(n) is int and n >= 0 for n in value):
        raise ValueError(f"{value!r} where sizes should be")
    return tuple(value)


def _range(entry: _Entry) -> tuple[int, int | None]:
    """Return the bytes of the file that a tensor has; None for its end."""
    stated = entry.get("byte_range")
    if stated is None:
        return 0, None
    start, stop = _sizes(stated)
    if start > stop:
        raise ValueError("a range that ends before it starts")
    return start, stop


def _file_name(entry: _Entry) -> str:
    """Return the file that an entry is in; StorageError for a path that leaves the directory."""
    name = entry["location"]
    if type(name) is not str or not name:
        raise ValueError(f"a file {name!r}")
    split_path(name)
    return name
