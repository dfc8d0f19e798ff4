"""A checkpoint of any format, described: its tensors with the place of their bytes, and its values.

A format's reader makes a catalog, a name map turns one catalog into another, a writer writes one.
None of them holds the data: a catalog of a terabyte is some megabytes.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from holdfast.arrays.box_table import BoxTable, check_tilings
from holdfast.arrays.boxes import (
    Box,
    contiguous_start,
    cover,
    flat_range_boxes,
    span_in,
    strided_span,
)
from holdfast.arrays.types import AnyArray
from holdfast.errors import (
    CorruptionError,
    HoldfastError,
    MismatchError,
    PlacementError,
    some_of,
)
from holdfast.format.dtypes import DTYPES
from holdfast.format.values import Node, is_unicode, join_path
from holdfast.storage import Source, Storage


@contextmanager
def describing(place: str, what: str) -> Iterator[None]:
    """Raise CorruptionError for what a reader of a file stumbles over that is not what it says.

    Args:
        place: Of the file or folder, for messages.
        what: It claims to be.
    """
    try:
        yield
    except HoldfastError as error:
        if not isinstance(error, PlacementError):
            raise
        raise CorruptionError(f"{place}: {error}") from error  # a box outside of its tensor
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise CorruptionError(f"{place}: this is not {what}: {error}") from error


class OpenFiles:
    """The files of a foreign checkpoint, opened on first use; any number of threads may read.

    A context manager: leaving it closes them. A file that is asked for later is opened again.
    """

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self._sources: dict[str, Source] = {}
        self._lock = threading.Lock()
        self._stack = ExitStack()

    def __enter__(self) -> OpenFiles:
        """Return the object itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the files."""
        self.close()

    def source(self, name: str) -> Source:
        """Return the open file of that name below the root; StorageError if it cannot be opened."""
        source = self._sources.get(name)  # without the lock: nearly always it is open
        if source is not None:
            return source
        with self._lock:
            if name not in self._sources:
                source = self.storage.open(name)
                self._stack.callback(source.close)
                self._sources[name] = source
            return self._sources[name]

    def describe(self, name: str) -> str:
        """Return the path of a file for messages."""
        return self.storage.describe(name)

    def close(self) -> None:
        """Close what is open."""
        with self._lock:
            self._sources.clear()
            self._stack.close()


def fill_flat(
    out: memoryview,
    *,
    start: int,
    shape: Sequence[int],
    itemsize: int,
    read: Callable[[Box, memoryview], object],
) -> None:
    """Fill `out` from byte `start` of the row-major bytes of a tensor, box by box.

    Args:
        out: May start and end within an element, as a range of a file may.
        start: Byte of the tensor.
        shape: Of the tensor.
        itemsize: Bytes of an element.
        read: Fills memory with the elements of a box.

    Cost: the length of `out` in memory, if it starts or ends within an element.
    """
    first, last = start // itemsize, -(-(start + len(out)) // itemsize)
    skip = start - first * itemsize
    is_cut = skip or len(out) % itemsize
    whole = memoryview(bytearray((last - first) * itemsize)) if is_cut else out
    left = whole
    for box in flat_range_boxes(shape, first, last):
        nbytes = box.numel * itemsize
        read(box, left[:nbytes])
        left = left[nbytes:]
    if is_cut:
        out[:] = whole[skip : skip + len(out)]


class Payload(Protocol):
    """The bytes of one chunk: its elements in row-major order, little-endian."""

    @property
    def file(self) -> str:
        """Name of the file that has most of the bytes, for messages and for the order of reads."""

    @property
    def order(self) -> int:
        """By what the chunks of one file are to be read: the byte where they start, if known."""

    def readinto(self, out: memoryview, *, start: int, files: OpenFiles) -> None:
        """Fill `out` (bytes) from byte `start` of the chunk; any number of threads may call this.

        Raises:
            StorageError: The file cannot be read.
            CorruptionError: It is not what the checkpoint states.
        """


@dataclass(frozen=True, slots=True)
class FileBytes:
    """The payload that lies in a file as it is, from byte `start`."""

    file: str
    start: int

    @property
    def order(self) -> int:
        """The byte where it starts."""
        return self.start

    def readinto(self, out: memoryview, *, start: int, files: OpenFiles) -> None:
        """Read the bytes."""
        files.source(self.file).readinto(out, start=self.start + start)


@dataclass(frozen=True, slots=True)
class StridedBytes:
    """The payload of a view whose elements lie in a file with strides.

    Args:
        file: The file.
        start: Byte of the first element.
        shape: Of the chunk.
        stride: Elements from one to the next, per dim; not negative.
        itemsize: Bytes of an element.
    """

    file: str
    start: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    itemsize: int

    @property
    def order(self) -> int:
        """The byte where it starts."""
        return self.start

    def readinto(self, out: memoryview, *, start: int, files: OpenFiles) -> None:
        """Read the span of the elements that are asked for, and copy them in their order."""
        kind = np.dtype(f"V{self.itemsize}")
        strides = [step * self.itemsize for step in self.stride]

        def read(box: Box, piece: memoryview) -> None:
            begin = sum(o * s for o, s in zip(box.offset, strides, strict=True))
            data = memoryview(bytearray(strided_span(box.shape, self.stride) * self.itemsize))
            files.source(self.file).readinto(data, start=self.start + begin)
            values = np.ndarray(box.shape, dtype=kind, buffer=data, strides=strides)
            np.frombuffer(piece, dtype=kind).reshape(box.shape)[...] = values

        fill_flat(out, start=start, shape=self.shape, itemsize=self.itemsize, read=read)


@dataclass(frozen=True, slots=True)
class HeldBytes:
    """A small payload that is in memory: a value that the format keeps among its metadata."""

    data: bytes
    file: str

    @property
    def order(self) -> int:
        """Before everything that is read."""
        return -1

    def readinto(self, out: memoryview, *, start: int, files: OpenFiles) -> None:
        """Copy the bytes."""
        out[:] = self.data[start : start + len(out)]


@dataclass(frozen=True, slots=True)
class PartOfPayload:
    """The bytes of another payload from byte `skip`."""

    inner: Payload
    skip: int

    @property
    def file(self) -> str:
        """The file of the other payload."""
        return self.inner.file

    @property
    def order(self) -> int:
        """By the other payload, and then by place in it."""
        return self.inner.order + self.skip

    def readinto(self, out: memoryview, *, start: int, files: OpenFiles) -> None:
        """Read the bytes from the other payload."""
        self.inner.readinto(out, start=self.skip + start, files=files)


def in_a_file(payload: Payload, files: OpenFiles) -> FileBytes | None:
    """Return where the bytes of a payload lie as they are, one after another; None if nowhere.

    Cost: of an archive that has not been opened, the reads that open it.
    """
    if isinstance(payload, FileBytes):
        return payload
    if isinstance(payload, PartOfPayload):
        inner = in_a_file(payload.inner, files)
        return None if inner is None else FileBytes(inner.file, inner.start + payload.skip)
    locate = getattr(payload, "locate", None)
    return None if locate is None else locate(files)


def part_of(payload: Payload, *, start: int, nbytes: int) -> Payload:
    """Return a range of the bytes of a payload, as plain as it can be."""
    if isinstance(payload, FileBytes):
        return FileBytes(payload.file, payload.start + start)
    if isinstance(payload, HeldBytes):
        return HeldBytes(payload.data[start : start + nbytes], payload.file)
    if isinstance(payload, PartOfPayload):
        return PartOfPayload(payload.inner, payload.skip + start)
    return PartOfPayload(payload, start) if start else payload


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a tensor, and where its bytes are."""

    box: Box
    payload: Payload


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogTensor:
    """One logical tensor. Its chunks tile it; a box that is there more than once is a copy.

    Args:
        key: Its name, unique in the catalog.
        dtype: Element type, a name of `DTYPES`.
        shape: Global shape.
        chunks: In any order; of an empty tensor there may be none.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return DTYPES[self.dtype].itemsize

    @property
    def whole(self) -> Box:
        """The box of all elements."""
        return Box((0,) * len(self.shape), self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return self.whole.numel * self.itemsize

    def primaries(self) -> list[Chunk]:
        """Return the chunks without copies, of which the first counts, in the order of offsets."""
        first: dict[Box, Chunk] = {}
        for chunk in self.chunks:
            first.setdefault(chunk.box, chunk)
        return sorted(first.values(), key=lambda chunk: chunk.box.offset)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checksum:
    """The CRC-32 that a file states of a range of its bytes, and a tensor that lies in it."""

    key: str | None
    file: str
    start: int
    nbytes: int
    crc: int


def no_checksums(files: OpenFiles) -> Iterable[Checksum]:
    """Return the checksums of a format that has none."""
    return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Catalog:
    """A checkpoint of any format, described.

    Args:
        format: Name of the format, for people ("PyTorch DCP").
        storage: The root of its files.
        label: Its path, for messages.
        identity: What the description was made from (headers, metadata), so that two processes can
            compare what they opened.
        step: Of training; 0 where the format does not have one.
        created: ISO 8601 UTC; of the newest file, where the format does not say.
        tensors: By key.
        parts: The tree of the state, as in a manifest; tensors are nodes that name their key.
        left_out: What the checkpoint has and the catalog has not, one sentence each.
        metadata: The user's own JSON object, where the format has one.
        versions: Of modules by part, as in a manifest; None if they are not known.
        kinds: Classes of objects by part, as in a manifest; None if they are not known.
        drift: Which stored copies of a tensor differ, and in which files; empty if none does, or if
            nothing but digests could tell. The first copy is the one that is read.
        checksums: Returns those that the files state of their bytes.
    """

    format: str
    storage: Storage
    label: str
    identity: bytes
    step: int = 0
    created: str = "1970-01-01T00:00:00+00:00"
    tensors: Mapping[str, CatalogTensor]
    parts: Mapping[str, Node]
    left_out: Sequence[str] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, Mapping[str, int]] | None = None
    kinds: Mapping[str, Mapping[str, Sequence[str]]] | None = None
    drift: str = ""
    checksums: Callable[[OpenFiles], Iterable[Checksum]] = no_checksums

    def lost_versions(self, parts: Iterable[str]) -> list[str]:
        """Say, for a format without a place for them, that versions of modules are lost."""
        noted = {
            join_path(part, name) if name else part: version
            for part in parts
            for name, version in (self.versions or {}).get(part, {}).items()
        }
        if not noted:
            return []
        texts = [f"{name} ({version})" for name, version in noted.items()]
        return [
            f"the versions of modules are left out: {some_of(texts)}; what converts entries of an "
            f"earlier version cannot know"
        ]

    def lost_kinds(self, parts: Iterable[str]) -> list[str]:
        """Say, for a format without a place for them, that classes of objects are lost."""
        texts = [
            f"{join_path(part, path) if path else part} ({', '.join(classes)})"
            for part in parts
            for path, classes in (self.kinds or {}).get(part, {}).items()
        ]
        if not texts:
            return []
        return [
            f"the classes of objects are left out: {some_of(texts)}; a load cannot name one of "
            f"another class that takes their state"
        ]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, each once."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


def require_tilings(catalog: Catalog) -> None:
    """Raise CorruptionError if an element of a tensor is in no chunk, or in several that differ.

    A load proves this of the index. What reads a catalog directly must call it first: a gap and an
    overlap of one size would cancel out when elements are counted.

    Cost: linear in the chunks of tensors that are cut.
    """
    cut = []
    for tensor in catalog.tensors.values():
        chunks = tensor.primaries()
        if tensor.nbytes and [chunk.box for chunk in chunks] != [tensor.whole]:
            cut.append((tensor, chunks))
    shapes = [tensor.shape for tensor, _ in cut]
    try:
        boxes = BoxTable.from_boxes(
            [number for number, (_, chunks) in enumerate(cut) for _ in chunks],
            [chunk.box for _, chunks in cut for chunk in chunks],
            num_dims=max(map(len, shapes), default=0),
        )
        flaws = check_tilings(boxes, shapes, max_flaws=1)
    except (PlacementError, ValueError, OverflowError) as error:
        raise CorruptionError(f"{catalog.label}: a chunk has an impossible box: {error}") from None
    for number, flaw in flaws:
        tensor, chunks = cut[number]
        files = some_of(sorted({chunks[row].payload.file for row in flaw.rows}))
        raise CorruptionError(
            f"{catalog.label}: the chunks of tensor {tensor.key!r} do not tile its shape "
            f"{list(tensor.shape)}: {flaw}" + (f" ({files})" if files else "")
        )


def require_text(catalog: Catalog) -> None:
    """Raise CorruptionError if the name of a part or a tensor is not text that UTF-8 can hold.

    Pickles hold any string. Index and headers, of our own format and of others, hold text.
    """
    for what, names in (("part", catalog.parts), ("tensor", catalog.tensors)):
        for name in names:
            if not name.isascii() and not is_unicode(name):
                raise CorruptionError(
                    f"{catalog.label}: {what} {name!r} is not read: its name has a lone surrogate, "
                    f"which is not text; rename it in the program that wrote it"
                )


def free_key(path: str, *taken: Container[str]) -> str:
    """Return the key of a tensor at a path: another one if it is taken.

    Two paths may be one when they are joined with dots; two parts may have had one tensor.
    """
    key, number = path, 1
    while any(key in each for each in taken):
        number += 1
        key = f"{path}#{number}"
    return key


def each_once(chunks: Iterable[Chunk], *, place: str) -> tuple[Chunk, ...]:
    """Return chunks without those that are stated again.

    Args:
        chunks: Of a tensor, by a format that has no copies.
        place: The tensor, for messages.

    Raises:
        CorruptionError: A box is in two places. Which of them is right is not known, and ranks
            would read one or the other.
    """
    seen: dict[Box, Payload] = {}
    for chunk in (once := dict.fromkeys(chunks)):
        other = seen.setdefault(chunk.box, chunk.payload)
        if other != chunk.payload and chunk.box.numel:
            raise CorruptionError(
                f"{place}: the elements at {list(chunk.box.offset)} are in two places "
                f"({some_of(sorted({other.file, chunk.payload.file}))}): one is of another save"
            )
    return tuple(once)


_STRIDED_NBYTES = 8 << 20
"""Span in a file of a chunk with strides: reading a piece of it reads at most the whole."""


def chunks_of_view(
    file: str,
    start: int,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    itemsize: int,
    *,
    offset: tuple[int, ...] | None = None,
) -> tuple[Chunk, ...]:
    """Return the chunks of a view of a file's bytes, by which it can be read in small pieces.

    Args:
        file: The file.
        start: Byte of the first element.
        shape: Of the view.
        stride: Of the view, in elements.
        itemsize: Bytes of an element.
        offset: Where the view lies in its tensor; None for a whole tensor.
    """
    whole = Box(offset or (0,) * len(shape), shape)
    if _is_row_major(shape, stride):
        return (Chunk(whole, FileBytes(file, start)),)
    if not whole.numel:
        return ()
    # Cut where the memory is cut: along the dim with the widest steps.
    dim = max(range(len(shape)), key=lambda d: stride[d] if shape[d] > 1 else -1)
    nbytes = strided_span(shape, stride) * itemsize
    parts = min(max(-(-nbytes // _STRIDED_NBYTES), 1), shape[dim])
    step = -(-shape[dim] // parts)
    chunks = []
    for at in range(0, shape[dim], step):
        size = min(step, shape[dim] - at)
        inner = tuple(size if d == dim else n for d, n in enumerate(shape))
        place = tuple(o + at if d == dim else o for d, o in enumerate(whole.offset))
        begin = start + at * stride[dim] * itemsize
        payload = StridedBytes(file, begin, inner, stride, itemsize)
        chunks.append(Chunk(Box(place, inner), payload))
    return tuple(chunks)


def _is_row_major(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Return True if elements lie one after another in row-major order."""
    expected = 1
    for size, step in zip(reversed(shape), reversed(stride), strict=True):
        if size > 1 and step != expected:
            return False
        expected *= size
    return True


_SMALL_NBYTES = 64 << 10
"""A span up to this is read as a whole, however little of it is needed."""


class TensorReader:
    """Reads any box of one tensor of a catalog, from the chunks that have it.

    Args:
        tensor: The tensor.
        files: What its payloads read from.
        chunks: Its primaries, if the caller has them.
    """

    def __init__(
        self, tensor: CatalogTensor, files: OpenFiles, chunks: Sequence[Chunk] | None = None
    ) -> None:
        self.tensor = tensor
        self._files = files
        self._chunks = tensor.primaries() if chunks is None else chunks

    def read_box(self, box: Box, out: memoryview) -> None:
        """Fill `out` (bytes, contiguous) with a box, row-major.

        Raises:
            MismatchError: The box is not inside the tensor, or the buffer does not fit.
            CorruptionError: Some elements are in no chunk.
            StorageError: A file cannot be read.

        Cost: one read for each chunk that the box overlaps, of at most twice the bytes that it has
        of the box; one for each run of those that are farther apart. As much memory for a chunk of
        which a part is copied with strides.
        """
        tensor, itemsize = self.tensor, self.tensor.itemsize
        if not tensor.whole.contains(box) or len(out) != box.numel * itemsize:
            raise MismatchError(
                f"tensor {tensor.key!r} of shape {list(tensor.shape)}: {box} does not fit"
            )
        if not box.numel:
            return
        left = box.numel
        for chunk in self._chunks:
            common = chunk.box.intersect(box)
            if common is None:
                continue
            self._copy(chunk, common, box, out)
            left -= common.numel
        if left:
            raise CorruptionError(
                f"tensor {tensor.key!r}: {left} of {box.numel} elements are in no chunk"
            )

    def _copy(self, chunk: Chunk, common: Box, box: Box, out: memoryview) -> None:
        """Copy the elements `common` of a chunk into the memory of `box`."""
        itemsize, files = self.tensor.itemsize, self._files
        start = contiguous_start(common, chunk.box)
        at = contiguous_start(common, box)
        if start is not None and at is not None:
            piece = out[at * itemsize : (at + common.numel) * itemsize]
            chunk.payload.readinto(piece, start=start * itemsize, files=files)
            return
        # Raw elements: a copy moves bytes, whatever they mean.
        kind = np.dtype(f"V{itemsize}")
        # With the ellipsis it is a view, of a 0-d array, too.
        index: tuple[Any, ...] = (*common.relative_to(box.offset), ...)
        target = np.frombuffer(out, dtype=kind).reshape(box.shape)[index]
        first, span = span_in(common, chunk.box)
        if span > 2 * common.numel and span * itemsize > _SMALL_NBYTES:
            target[...] = self._read_runs(chunk, common).view(kind).reshape(common.shape)
            return
        data = memoryview(bytearray(span * itemsize))
        chunk.payload.readinto(data, start=first * itemsize, files=files)
        strides = [itemsize * math.prod(chunk.box.shape[dim + 1 :]) for dim in range(box.ndim)]
        target[...] = np.ndarray(common.shape, dtype=kind, buffer=data, strides=strides)

    def _read_runs(self, chunk: Chunk, box: Box) -> AnyArray:
        """Read the bytes of a box whose elements are far apart in the chunk, run by run."""
        starts, length = cover(box, chunk.box, max_gap=0)
        data: AnyArray = np.empty(box.numel * self.tensor.itemsize, dtype=np.uint8)
        view, nbytes = data.data, length * self.tensor.itemsize
        for number, start in enumerate((starts * self.tensor.itemsize).tolist()):
            piece = view[number * nbytes : (number + 1) * nbytes]
            chunk.payload.readinto(piece, start=start, files=self._files)
        return data


def read_flat(reader: TensorReader, out: memoryview, *, start: int) -> None:
    """Fill `out` from byte `start` of the row-major bytes of the whole tensor.

    Errors as `TensorReader.read_box`, cost also as `fill_flat`.
    """
    tensor = reader.tensor
    fill_flat(out, start=start, shape=tensor.shape, itemsize=tensor.itemsize, read=reader.read_box)


def pieces_of(tensor: CatalogTensor, *, max_nbytes: int) -> Iterator[tuple[int, int]]:
    """Yield (start, nbytes) of consecutive pieces of a tensor's row-major bytes."""
    step = max(max_nbytes // tensor.itemsize, 1) * tensor.itemsize
    for start in range(0, tensor.nbytes, step):
        yield start, min(step, tensor.nbytes - start)
