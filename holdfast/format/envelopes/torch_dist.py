"""The envelope `torch_dist`: what PyTorch DCP and Megatron-core open as their own.

In a data file each chunk is the item that DCP's `FileSystemWriter` writes, a ZIP archive as from
`torch.save`. Archives follow each other at multiples of 64 bytes:

    prefix    pickle of the tensor and what belongs to it, the local header of its storage
    payload   at a multiple of 64 bytes
    suffix    the archive's last members and its directory

Prefix and suffix depend on element type and shape alone. There are no CRC-32s, which would cost a
pass over every byte and are compared by no loader of torch's: ours compare digests.

Next to the data files lie `values.distcp` with an archive for each value, `.metadata`, which says
where DCP finds tensors and values, and for Megatron `metadata.json` and `common.pt`, all values in
one tree.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from holdfast.arrays.boxes import Box
from holdfast.errors import CorruptionError, PlanError
from holdfast.format.digest import digest128
from holdfast.format.envelopes.dcp_metadata import (
    METADATA_FILE,
    DescribedTensor,
    FlatTree,
    StoredItem,
    has_tensors,
    metadata_of,
)
from holdfast.format.envelopes.optimizer_trees import to_torch
from holdfast.format.envelopes.pickle_output import Made, pickled
from holdfast.format.envelopes.plain_values import PlainValues, TensorRef
from holdfast.format.envelopes.torch_archive import ALIGNMENT, tensor_archive, value_archive
from holdfast.format.index import ChunkIndex, Image, ImageEntry
from holdfast.format.manifest import TensorInfo
from holdfast.format.values import Node

_VALUES_FILE = "values.distcp"
_COMMON_FILE = "common.pt"
_CONFIG_FILE = "metadata.json"
_MAX_KEPT_NBYTES = 16 << 20
"""Of a `.metadata` in memory between saves: some hundred thousand chunks."""
_CONFIG = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


class _Form(NamedTuple):
    """The archive of every chunk of one element type and shape."""

    prefix: bytes
    suffix: bytes
    nbytes: int
    """Of the whole archive."""


class _Placed(NamedTuple):
    """The archive of one entry, and where it begins in the file."""

    begin: int
    form: _Form


def layout_torch_dist(entries: Sequence[ImageEntry]) -> Image:
    """Lay out a data file of archives, in the order of the entries; equal entries, equal bytes.

    Cost: linear in entries; some hundred bytes of literals for each.
    """
    starts = np.zeros(len(entries), dtype=np.int64)
    literals: list[tuple[int, bytes]] = []
    # The bytes since the last payload: the suffix of its archive, padding, and the next prefix.
    at, pending = 0, b""
    for i, (begin, form) in enumerate(_placed(entries)):
        padding = bytes(begin - at - len(pending))
        literals.append((at, pending + padding + form.prefix))
        starts[i] = begin + len(form.prefix)
        at, pending = begin + form.nbytes - len(form.suffix), form.suffix
    if entries:
        literals.append((at, pending))
    header = literals[0][1] if literals else b""
    return Image(
        header=header,
        starts=starts,
        nbytes=at + len(pending),
        literals=tuple(literals[1:]),
    )


def _placed(entries: Sequence[ImageEntry]) -> Iterator[_Placed]:
    """Yield the archive of each entry, each at the next multiple of 64 bytes."""
    forms: dict[tuple[str, tuple[int, ...]], _Form] = {}
    at = 0
    for entry in entries:
        key = (entry.dtype, tuple(entry.shape))
        form = forms.get(key)
        if form is None:
            form = forms[key] = _form(*key)
        begin = at + -at % ALIGNMENT
        yield _Placed(begin, form)
        at = begin + form.nbytes


def _form(dtype: str, shape: tuple[int, ...]) -> _Form:
    archive = tensor_archive(dtype, shape, has_checksums=False)
    (start,) = archive.starts
    # Without payload all of it is one literal.
    before = b"".join(data for at, data in archive.literals if at < start)
    after = b"".join(data for at, data in archive.literals if at >= start)
    return _Form(before[:start], before[start:] + after, archive.nbytes)


class MetadataMemo:
    """The last `.metadata` and what it was made from: saves by one plan differ in values alone.

    Held by the plan. A large one is not kept.
    """

    def __init__(self) -> None:
        self._last: tuple[str, bytes] = ("", b"")

    def get(self, key: str) -> bytes | None:
        """Return the bytes that were made from the same."""
        last, data = self._last
        return data if last == key else None

    def put(self, key: str, data: bytes) -> None:
        """Keep the bytes in place of others."""
        if len(data) <= _MAX_KEPT_NBYTES:
            self._last = (key, data)


class ExtraFiles(NamedTuple):
    """What a checkpoint has for PyTorch and Megatron, and what these cannot read, in sentences."""

    files: dict[str, bytes]
    """By name, `.metadata` first."""
    notes: list[str]


def extra_files(
    index: ChunkIndex,
    tensors: Sequence[TensorInfo],
    parts: Mapping[str, Node],
    files: Sequence[str],
    memo: MetadataMemo | None = None,
) -> ExtraFiles:
    """Make the files by which PyTorch DCP and Megatron open the data files.

    Args:
        index: The chunks; all files are in this envelope.
        tensors: Of the checkpoint.
        parts: The tree of each part.
        files: Names of the data files.
        memo: Of earlier saves.

    Raises:
        PlanError: A value cannot be written, or the chunks do not lie where this envelope has them.
        CorruptionError: A node is malformed.

    Cost: linear in chunks and the size of values; some 30 µs a chunk, and 4 if only values differ
    from the last time.
    """
    plain = PlainValues()
    trees = plain.parts({name: _as_torch(node) for name, node in parts.items()})
    flat = FlatTree(plain.notes, is_strict=False)
    for name, value in trees.items():
        flat.add((name,), value)
    values, places = _archived(flat)
    key = _key(index, tensors, files, flat, places)
    metadata = memo.get(key) if memo is not None else None
    if metadata is None:
        metadata = pickled(_metadata(index, tensors, files, flat, places))
        if memo is not None:
            memo.put(key, metadata)
    made = {METADATA_FILE: metadata}
    if values:
        made[_VALUES_FILE] = values
    made[_COMMON_FILE] = value_archive(_without_tensors(trees))
    made[_CONFIG_FILE] = msgspec.json.encode(_CONFIG)
    return ExtraFiles(made, plain.notes)


class _Place(NamedTuple):
    """Where the archive of a value lies in the file of values."""

    begin: int
    nbytes: int


def _archived(flat: FlatTree) -> tuple[bytes, dict[str, _Place]]:
    """Return the archives of all values end to end, and by flat name where each lies."""
    values = bytearray()
    places: dict[str, _Place] = {}
    for key, item in flat.items.items():
        if not isinstance(item, TensorRef):
            archive = value_archive(item)
            values += bytes(-len(values) % ALIGNMENT)
            places[key] = _Place(len(values), len(archive))
            values += archive
    return bytes(values), places


def _key(
    index: ChunkIndex,
    tensors: Sequence[TensorInfo],
    files: Sequence[str],
    flat: FlatTree,
    places: Mapping[str, _Place],
) -> str:
    """Return a digest of everything that is in `.metadata`."""
    refs = [each.key if isinstance(each, TensorRef) else None for each in flat.items.values()]
    infos = [(each.key, each.dtype, each.shape) for each in tensors]
    texts = (list(flat.paths.items()), refs, list(places.values()), infos, list(files))
    columns = (index.tensor, index.file, index.start, index.offset, index.extent, index.copy)
    parts = [msgspec.msgpack.encode(texts), *(column.tobytes() for column in columns)]
    # With the length of each: no two different sequences are the same bytes.
    return digest128(b"".join(len(part).to_bytes(8, "little") + part for part in parts))


def _metadata(
    index: ChunkIndex,
    tensors: Sequence[TensorInfo],
    files: Sequence[str],
    flat: FlatTree,
    places: Mapping[str, _Place],
) -> Made:
    """Describe the object in `.metadata`."""
    chunks = _chunks(index, tensors, files)
    infos = {tensor.key: tensor for tensor in tensors}
    described: dict[str, DescribedTensor] = {}
    stored: list[StoredItem] = []
    for key, item in flat.items.items():
        if isinstance(item, TensorRef):
            info, own = infos[item.key], chunks.get(item.key, [])
            described[key] = DescribedTensor(
                info.dtype, tuple(info.shape), [chunk.box for chunk in own]
            )
            stored += [
                StoredItem(key, chunk.box, number, chunk.file, chunk.begin, chunk.nbytes)
                for number, chunk in enumerate(own)
            ]
        else:
            place = places[key]
            stored.append(StoredItem(key, None, 0, _VALUES_FILE, place.begin, place.nbytes))
    return metadata_of(flat.paths, described, stored, flat.empty)


def _as_torch(node: Node) -> Node:
    """Return an optimizer in PyTorch's form; what only looks like one stays as it is."""
    try:
        made: Node = to_torch(node)
    except (CorruptionError, AttributeError, LookupError, TypeError):
        # Any dict of the caller's may have these keys: it must not fail a save.
        return node
    return made


class _Chunk(NamedTuple):
    """A chunk, and its archive in a data file."""

    box: Box
    file: str
    begin: int
    nbytes: int


def _chunks(
    index: ChunkIndex, tensors: Sequence[TensorInfo], files: Sequence[str]
) -> dict[str, list[_Chunk]]:
    """Return the chunks of each tensor by its key, but for further copies.

    They are laid out as at their planning, and compared with where they were written.
    """
    chunks: dict[str, list[_Chunk]] = {}
    bounds = np.searchsorted(index.file, np.arange(len(files) + 1)).tolist()
    owner, copy = index.tensor.tolist(), index.copy.tolist()
    for number, name in enumerate(files):
        rows = range(bounds[number], bounds[number + 1])
        infos = [tensors[owner[row]] for row in rows]
        boxes = [index.box(row, ndim=len(i.shape)) for row, i in zip(rows, infos, strict=True)]
        entries = [
            ImageEntry(name=info.key, dtype=info.dtype, shape=box.shape)
            for info, box in zip(infos, boxes, strict=True)
        ]
        placed = list(_placed(entries))
        starts = [begin + len(form.prefix) for begin, form in placed]
        if starts != index.start[rows.start : rows.stop].tolist():
            raise PlanError(f"{name}: its chunks do not lie where this version would have them")
        for row, info, box, (begin, form) in zip(rows, infos, boxes, placed, strict=True):
            if not copy[row]:
                chunk = _Chunk(box, name, begin, form.nbytes)
                chunks.setdefault(info.key, []).append(chunk)
    return chunks


def _without_tensors(value: Any) -> Any:
    """Return a value with its tensors left out of mappings, and None in their place elsewhere.

    What had nothing but tensors is left out with them.
    """
    if isinstance(value, TensorRef):
        return None
    if not has_tensors(value):
        return value
    if isinstance(value, dict):
        rest = {
            key: _without_tensors(member)
            for key, member in value.items()
            if not isinstance(member, TensorRef)
        }
        return {key: kept for key, kept in rest.items() if kept or not has_tensors(value[key])}
    return [_without_tensors(member) for member in value]
