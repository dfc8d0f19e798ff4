"""The two safetensors files of a checkpoint: the image of a data file, and the index of all chunks.

An image is a padded header, followed by the payload of every chunk; `holdfast.format.envelopes` has
another form of it. The index is an image too, with one row per stored copy of a chunk, as columns.
On disk the columns have the narrowest unsigned types that hold them. In memory they are int64
(digests uint64), so that a difference of two cannot wrap.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import msgspec
import numpy as np

from holdfast.arrays.box_table import BoxTable, check_tilings, unique_boxes
from holdfast.arrays.types import AnyArray, BoolArray, IntArray, WordArray
from holdfast.decoding import convert_as
from holdfast.errors import CorruptionError, PlanError
from holdfast.format.dtypes import DTYPES, DType, dtype_named
from holdfast.format.manifest import (
    MAX_HEADER_NBYTES,
    MAX_INDEX_NBYTES,
    MAX_NDIM,
    Manifest,
    has_digests,
)

PAYLOAD_ALIGN = 4096
"""Alignment of a data file's payload, so that it can be mapped and read directly."""

_METADATA = "__metadata__"

_ROW_COLUMNS = ("tensor", "file", "offset", "extent", "start", "nbytes", "copy", "holders")
_COLUMNS = (*_ROW_COLUMNS, "holder_ptr", "holder", "digest_ptr", "digest")
_MATRICES = ("offset", "extent")
_INDEX_HEADER_NBYTES = 1 << 16
_ENTRY_NBYTES = 30
"""Least length of a chunk's entry in the header of its file."""
_UNSIGNED = ("U8", "U16", "U32", "U64")


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageEntry:
    """One chunk to store: entry name, element type (`DTYPES`) and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """The layout of a data file: `header` first, then entry i at its absolute byte `starts[i]`.

    What an envelope has between and after the payloads is in `literals`, by place.
    """

    header: bytes
    starts: IntArray
    nbytes: int
    literals: Sequence[tuple[int, bytes]] = ()

    @property
    def envelope_nbytes(self) -> int:
        """Bytes that are not payload."""
        return len(self.header) + sum(len(data) for _, data in self.literals)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeaderEntry:
    """One entry of a header: `dtype` is the envelope's; `start` is absolute in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


def chunk_name(
    key: str,
    *,
    offset: Sequence[int],
    shape: Sequence[int],
    global_shape: Sequence[int],
) -> str:
    """Return the entry name of a chunk: the key of a whole tensor, else `key@o0,o1,…`."""
    if tuple(shape) == tuple(global_shape):
        return key
    return f"{key}@{','.join(map(str, offset))}"


def layout_image(entries: Sequence[ImageEntry], *, align: int = PAYLOAD_ALIGN) -> Image:
    """Lay out a data file: a valid safetensors file whose payload starts at a multiple of `align`.

    Chunks are in descending order of item size (stable). So each is aligned to its elements without
    padding, and equal entries give equal bytes. Raises PlanError for a repeated or reserved name.
    """
    dtypes = [dtype_named(entry.dtype) for entry in entries]
    return _layout(entries, dtypes, align=align, metadata={})


def layout_file(
    entries: Sequence[ImageEntry], *, metadata: Mapping[str, str] = MappingProxyType({})
) -> Image:
    """Lay out a safetensors file for other programs, as `layout_image` does.

    A data file of our own may state another type of the same size for an element type, since the
    index has the right one; such a file has nothing but its header, so each type is there under
    its own name.

    Args:
        entries: One for each tensor.
        metadata: Texts for the header.

    Raises:
        PlanError: A name is repeated or reserved, or a type is not one of safetensors.
    """
    dtypes = []
    for entry in entries:
        dtype = dtype_named(entry.dtype)
        if dtype.since is None:
            raise PlanError(
                f"tensor {entry.name!r} is {entry.dtype}, which safetensors files cannot hold"
            )
        dtypes.append(replace(dtype, envelope=dtype.name))
    return _layout(entries, dtypes, align=PAYLOAD_ALIGN, metadata=metadata)


def _layout(
    entries: Sequence[ImageEntry],
    dtypes: Sequence[DType],
    *,
    align: int,
    metadata: Mapping[str, str],
) -> Image:
    """Lay out a file whose entries have types of `dtypes`."""
    sizes = [
        math.prod(entry.shape) * dtype.itemsize
        for entry, dtype in zip(entries, dtypes, strict=True)
    ]
    order = sorted(range(len(entries)), key=lambda i: -dtypes[i].itemsize)
    starts = np.zeros(len(entries), dtype=np.int64)
    table: dict[str, object] = {_METADATA: {"format": "pt", **metadata}}
    end = 0
    for i in order:
        entry = entries[i]
        if entry.name == _METADATA:
            raise PlanError(f"a tensor cannot be named {_METADATA!r} in a safetensors file")
        if entry.name in table:
            raise PlanError(f"two chunks of one data file are named {entry.name!r}")
        starts[i] = end
        table[entry.name] = {
            "dtype": dtypes[i].envelope,
            "shape": dtypes[i].envelope_shape(entry.shape),
            "data_offsets": (end, end + sizes[i]),
        }
        end += sizes[i]
    text = msgspec.json.encode(table)
    padded = -(-(8 + len(text)) // align) * align - 8
    if padded > MAX_HEADER_NBYTES:
        raise PlanError(
            f"the header of a data file with {len(entries)} chunks needs {padded} bytes, the "
            f"limit of safetensors is {MAX_HEADER_NBYTES}: spread the state over more writers"
        )
    header = padded.to_bytes(8, "little") + text.ljust(padded)
    return Image(header=header, starts=starts + len(header), nbytes=len(header) + end)


def gaps(starts: IntArray, nbytes: IntArray, *, file_nbytes: int) -> list[tuple[int, int]]:
    """Return begin and end of every range of a data file that is not payload, in order.

    Args:
        starts: (n,) byte at which each payload starts; they do not overlap.
        nbytes: (n,) length of each.
        file_nbytes: Size of the file.
    """
    order = np.lexsort((nbytes, starts))
    begin = np.append(0, (starts + nbytes)[order])
    end = np.append(starts[order], file_nbytes)
    is_gap = end > begin
    return list(zip(begin[is_gap].tolist(), end[is_gap].tolist(), strict=True))


def header_nbytes(prefix: bytes, *, file_nbytes: int, place: str) -> int:
    """Return the header size of a file that starts with `prefix` (8 bytes), within limits."""
    length = int.from_bytes(prefix[:8], "little")
    if len(prefix) < 8 or length < 2 or length > min(MAX_HEADER_NBYTES, file_nbytes - 8):
        raise CorruptionError(
            f"{place}: its first 8 bytes state a header of {length} bytes, which a file of "
            f"{file_nbytes} bytes cannot have: it is damaged, or not a data file"
        )
    return 8 + length


class _RawEntry(msgspec.Struct, forbid_unknown_fields=True):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def parse_header(header: bytes | memoryview, *, file_nbytes: int, place: str) -> list[HeaderEntry]:
    """Parse a whole header, including its 8-byte length; return its entries in file order.

    Raises CorruptionError unless it is as safetensors requires: known members, distinct names, and
    entries that fill the rest of a file of `file_nbytes` exactly, without gap or overlap.
    """
    header = bytes(header)
    if header_nbytes(header[:8], file_nbytes=file_nbytes, place=place) != len(header):
        raise CorruptionError(f"{place}: the header is not as long as its first 8 bytes state")
    entries = [
        HeaderEntry(
            name=name,
            dtype=raw.dtype,
            shape=tuple(raw.shape),
            start=len(header) + raw.data_offsets[0],
            nbytes=raw.data_offsets[1] - raw.data_offsets[0],
        )
        for name, raw in _raw_entries(header[8:], place)[0].items()
    ]
    entries.sort(key=lambda entry: (entry.start, entry.nbytes))
    end = len(header)
    for entry in entries:
        _check_entry(entry, end, place)
        end += entry.nbytes
    if end != file_nbytes:
        raise CorruptionError(
            f"{place}: the header's entries end at byte {end}, but the file has {file_nbytes} bytes"
        )
    return entries


def header_metadata(header: bytes | memoryview, *, place: str) -> dict[str, str]:
    """Return the `__metadata__` of a whole header; empty without one. Errors: `parse_header`."""
    return _raw_entries(bytes(header)[8:], place)[1]


def _raw_entries(text: bytes, place: str) -> tuple[dict[str, _RawEntry], dict[str, str]]:
    """Return the entries of a header by name, and its metadata."""
    # json, because msgspec keeps the last of two equal names, and that must be an error here.
    try:
        pairs: list[tuple[str, object]] = json.loads(text.decode(), object_pairs_hook=_Pairs)
        if not isinstance(pairs, _Pairs):
            raise CorruptionError(f"{place}: the header is not a JSON object")
        table = dict(pairs)
        if len(table) != len(pairs):
            raise CorruptionError(f"{place}: the header repeats a name")
        metadata = table.pop(_METADATA, None)
        words = {} if metadata is None else convert_as(_as_dict(metadata), dict[str, str])
        plain = {name: _as_dict(raw) for name, raw in table.items()}
        return convert_as(plain, dict[str, _RawEntry]), words
    except (ValueError, RecursionError) as error:
        raise CorruptionError(f"{place}: this is not a safetensors header: {error}") from None


class _Pairs(list[tuple[str, object]]):
    """The pairs of a JSON object; a class that tells it from a JSON array."""


def _as_dict(value: object) -> dict[str, object]:
    if not isinstance(value, _Pairs):
        raise ValueError("an entry is not a JSON object")
    table = dict(value)
    if len(table) != len(value) or any(type(inner) is _Pairs for _, inner in value):
        raise ValueError("an entry repeats a name, or contains an object")
    return table


def _check_entry(entry: HeaderEntry, end: int, place: str) -> None:
    if entry.start != end or entry.nbytes < 0:
        raise CorruptionError(
            f"{place}: entry {entry.name!r} starts at byte {entry.start}, "
            f"but the one before it ends at byte {end}"
        )
    if len(entry.shape) > MAX_NDIM + 1 or any(size < 0 for size in entry.shape):
        raise CorruptionError(
            f"{place}: entry {entry.name!r} has the impossible shape {entry.shape}"
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChunkIndex(BoxTable):
    """Columns of the index: n rows, d dims as the tensor with the most dims.

    The rows are boxes: `tensor` (n,) is the position in the manifest's `tensors`, `offset` and
    `extent` are (n, d). The primaries of a tensor cover it exactly, other copies repeat the box of
    a primary. The digests of row i are `digest[digest_ptr[i]:digest_ptr[i + 1]]`, one per block.

    The index has all ranks that held a box when it was saved; the writer of the file is only one of
    them. Many rows have the same holders, so each distinct set is stored once: set s has the ranks
    `holder[holder_ptr[s]:holder_ptr[s + 1]]`.
    """

    file: IntArray
    """(n,) position in the manifest's `files`."""
    start: IntArray
    """(n,) absolute byte in the file at which the payload starts."""
    nbytes: IntArray
    """(n,) payload bytes."""
    copy: IntArray
    """(n,) 0 for the primary; 1, 2, … for further copies of the same box."""
    holders: IntArray
    """(n,) number of the set of ranks that held the box; its copies have the same."""
    holder_ptr: IntArray
    """(sets + 1,) start of each set's ranks in `holder`."""
    holder: IntArray
    """The ranks of each set, ascending."""
    digest_ptr: IntArray
    """(n + 1,) start of each row's digests in `digest`."""
    digest: WordArray
    """XXH3-64 of each block of each row."""

    @property
    def num_rows(self) -> int:
        """Number of rows n."""
        return len(self.tensor)

    def digests(self, row: int) -> WordArray:
        """Return the block digests of one row."""
        return self.digest[self.digest_ptr[row] : self.digest_ptr[row + 1]]

    def is_held_by(self, rank: int) -> BoolArray:
        """Return (n,) True if the rank held the row's box; vector work over rows and sets."""
        # Position p of `holder` belongs to the last set that starts at or before p.
        is_member = np.zeros(len(self.holder_ptr) - 1, dtype=np.bool_)
        members = np.flatnonzero(self.holder == rank)
        is_member[np.searchsorted(self.holder_ptr, members, side="right") - 1] = True
        return is_member[self.holders]


def encode_index(index: ChunkIndex) -> bytes:
    """Encode `index.safetensors`; equal tables give equal bytes. PlanError if misshapen."""
    entries, arrays = [], []
    for name in _COLUMNS:
        column = np.asarray(getattr(index, name))
        if column.size and column.dtype.kind != "u" and int(column.min()) < 0:
            raise PlanError(f"index column {name!r} holds the negative value {int(column.min())}")
        dtype = np.min_scalar_type(int(column.max()) if column.size else 0).newbyteorder("<")
        # Digests are 64 bits by definition, however small they happen to be.
        array = column.astype("<u8" if name == "digest" else dtype, order="C")
        arrays.append(array)
        entries.append(ImageEntry(name=name, dtype=f"U{8 * array.itemsize}", shape=column.shape))
    _check_shapes({e.name: e.shape for e in entries}, PlanError, "index")
    image = layout_image(entries)
    data = bytearray(image.nbytes)
    data[: len(image.header)] = image.header
    for array, start in zip(arrays, image.starts.tolist(), strict=True):
        data[start : start + array.nbytes] = array.tobytes()
    return bytes(data)


def require_index_size(manifest: Manifest, *, place: str) -> None:
    """Raise CorruptionError if the index is larger than one of this manifest can be.

    Each row is an entry of some data file's header, which the manifest states the length of, so
    an index that cannot be one is found without being read.
    """
    if not has_digests(manifest):
        return  # made in memory, and its files have no headers
    rows = manifest.index.num_rows
    num_headers = sum(file.header_nbytes for file in manifest.files)
    num_dims = manifest.forms.num_dims
    num_ranks = sum(len(layout.ranks) for layout in manifest.layouts)
    num_digests = manifest.totals.stored_nbytes // manifest.block_nbytes + rows
    words = rows * (len(_COLUMNS) + 2 * num_dims + num_ranks) + num_digests + 2
    largest = _INDEX_HEADER_NBYTES + 8 * words
    if rows * _ENTRY_NBYTES > num_headers or manifest.index.nbytes > largest:
        raise CorruptionError(
            f"{place}: {manifest.index.nbytes} bytes for {rows} rows, as the manifest states them, "
            f"cannot be the index of its tensors and files"
        )


def decode_index(data: bytes | memoryview, *, place: str = "index.safetensors") -> ChunkIndex:
    """Decode the bytes of `index.safetensors`; CorruptionError if they are not an index.

    Memory is bounded by ten times the bytes given. The content of the rows is not checked: see
    `validate_index`.
    """
    view = memoryview(data)
    if len(view) > MAX_INDEX_NBYTES:
        raise CorruptionError(f"{place}: {len(view)} bytes exceed the limit {MAX_INDEX_NBYTES}")
    end = header_nbytes(bytes(view[:8]), file_nbytes=len(view), place=place)
    entries = {e.name: e for e in parse_header(view[:end], file_nbytes=len(view), place=place)}
    if sorted(entries) != sorted(_COLUMNS):
        raise CorruptionError(f"{place}: its columns are {sorted(entries)}, not {sorted(_COLUMNS)}")
    _check_shapes({name: entries[name].shape for name in _COLUMNS}, CorruptionError, place)
    raw = {name: _raw_column(view, entry, place) for name, entry in entries.items()}
    words = raw.pop("digest").astype(np.uint64, copy=False)
    columns = {name: column.astype(np.int64) for name, column in raw.items()}
    for name, column in columns.items():
        if raw[name].itemsize == 8 and column.size and int(column.min()) < 0:
            raise CorruptionError(f"{place}: column {name!r} has a value of 2**63 or more")
    return ChunkIndex(**columns, digest=words)


def _raw_column(view: memoryview, entry: HeaderEntry, place: str) -> AnyArray:
    dtype = DTYPES[entry.dtype].numpy if entry.dtype in _UNSIGNED else None
    if dtype is None:
        raise CorruptionError(f"{place}: column {entry.name!r} has the type {entry.dtype}")
    payload = view[entry.start : entry.start + entry.nbytes]
    try:
        return np.frombuffer(payload, dtype=dtype).reshape(entry.shape)
    except ValueError:
        raise CorruptionError(
            f"{place}: column {entry.name!r} has {entry.nbytes} bytes, not those of shape "
            f"{entry.shape}"
        ) from None


def _check_shapes(
    shapes: dict[str, tuple[int, ...]], error: type[CorruptionError | PlanError], place: str
) -> None:
    num_rows = shapes["tensor"][0] if len(shapes["tensor"]) == 1 else -1
    num_dims = shapes["offset"][-1] if len(shapes["offset"]) == 2 else -1
    expected = {
        name: (num_rows, num_dims) if name in _MATRICES else (num_rows,) for name in _ROW_COLUMNS
    }
    expected["digest_ptr"] = (num_rows + 1,)
    for name, shape in expected.items():
        if shapes[name] != shape or min(num_rows, num_dims) < 0 or num_dims > MAX_NDIM:
            raise error(
                f"{place}: column {name!r} has shape {shapes[name]}, not {shape}: "
                "the columns do not belong to one table"
            )
    for name, least in (("holder_ptr", 1), ("holder", 0), ("digest", 0)):
        if len(shapes[name]) != 1 or shapes[name][0] < least:
            raise error(f"{place}: column {name!r} has shape {shapes[name]}, not one dim")


def validate_index(index: ChunkIndex, manifest: Manifest) -> None:
    """Prove that index and manifest describe one whole checkpoint.

    Every id exists. Sets of holders fill their column. Every row lies in its tensor and its file,
    with as many bytes and digests as its box needs. Primaries cover each tensor exactly, and copies
    repeat a primary. The rows of a file do not overlap. They and its header fill it: without gap
    after the header of `safetensors`, and with gaps that add up to it in `torch_dist`.

    Raises:
        CorruptionError: They do not; the message names tensor, box and file.

    Cost: vector work only, about a second for a million rows.
    """
    if index.num_rows != manifest.index.num_rows:
        raise CorruptionError(
            f"the index has {index.num_rows} rows, the manifest states {manifest.index.num_rows}"
        )
    # Summed as Python integers: no damaged column can make the sum wrap.
    stored = sum(index.nbytes.tolist())
    if stored != manifest.totals.stored_nbytes:
        raise CorruptionError(
            f"the index has chunks of {stored} bytes in total, the manifest states "
            f"{manifest.totals.stored_nbytes}"
        )
    for name, column, limit in (
        ("tensor", index.tensor, len(manifest.tensors)),
        ("file", index.file, len(manifest.files)),
        ("holders", index.holders, len(index.holder_ptr) - 1),
    ):
        wrong = np.flatnonzero((column < 0) | (column >= limit))
        if len(wrong):
            row = int(wrong[0])
            raise CorruptionError(f"index row {row}: {name} is {column[row]}, not below {limit}")
    ends = index.holder_ptr
    if int(ends[0]) != 0 or int(ends[-1]) != len(index.holder) or (np.diff(ends) < 1).any():
        raise CorruptionError(
            f"the index has {len(index.holder)} holders, but its sets of holders do not fill them"
        )
    _check_boxes(index, manifest)
    _check_bytes(index, manifest)
    _check_copies(index, manifest)
    _check_files(index, manifest)


def describe_row(index: ChunkIndex, manifest: Manifest, row: int) -> str:
    """Describe a row: tensor, box, file and byte."""
    tensor = manifest.tensors[index.tensor[row]]
    offset, extent = (c[row, : len(tensor.shape)].tolist() for c in (index.offset, index.extent))
    file = manifest.files[index.file[row]].name
    return f"tensor {tensor.key!r}, chunk {extent} at {offset}, {file} byte {index.start[row]}"


def _require(
    index: ChunkIndex,
    manifest: Manifest,
    is_good: BoolArray,
    problem: Callable[[int], str],
    *,
    rows: IntArray | None = None,
) -> None:
    """Raise CorruptionError for the first of `rows` (by default all) that is not good."""
    wrong = np.flatnonzero(~is_good)
    if len(wrong):
        row = int(wrong[0] if rows is None else rows[wrong[0]])
        where = describe_row(index, manifest, row)
        raise CorruptionError(f"index row {row} ({where}): {problem(row)}")


def _check_boxes(index: ChunkIndex, manifest: Manifest) -> None:
    ndim = manifest.forms.ndim
    num_dims = index.offset.shape[1]
    if len(ndim) and int(ndim.max()) > num_dims:
        raise CorruptionError(f"the index has {num_dims} dims, but a tensor has {int(ndim.max())}")
    # Zeros and ones there let every check below work on all columns, whatever a tensor's dims.
    behind = np.arange(num_dims) >= ndim[index.tensor][:, None]
    is_padding = (index.offset == 0) & (index.extent == 1)
    _require(
        index, manifest, (is_padding | ~behind).all(axis=1),
        lambda row: "offset and extent after its own dims are not 0 and 1",
    )  # fmt: skip
    primary = np.flatnonzero(index.copy == 0)
    shapes = [t.shape for t in manifest.tensors]
    for owner, flaw in check_tilings(index.take(primary), shapes, max_flaws=1):
        rows = primary[list(flaw.rows)].tolist()
        at = "; ".join(describe_row(index, manifest, row) for row in rows[:4])
        raise CorruptionError(
            f"the chunks of tensor {manifest.tensors[owner].key!r} do not tile its shape "
            f"{shapes[owner]}: {flaw}" + (f" ({at})" if at else "")
        )


def _check_bytes(index: ChunkIndex, manifest: Manifest) -> None:
    sizes = manifest.forms.shapes(index.num_dims)[index.tensor]
    # For primaries this is proven by now; copies may still leave the tensor.
    inside: BoolArray = (index.extent >= 0) & (index.extent <= sizes)
    inside &= (index.offset >= 0) & (index.offset <= sizes - index.extent)
    _require(index, manifest, np.all(inside, axis=1), lambda row: "it leaves its tensor")
    expected = index.extent.prod(axis=1) * manifest.forms.itemsize[index.tensor]
    _require(
        index, manifest, np.asarray(index.nbytes == expected),
        lambda row: f"{index.nbytes[row]} bytes are stated, but its box has {expected[row]}",
    )  # fmt: skip
    num_blocks = np.zeros_like(index.nbytes)
    if has_digests(manifest):
        num_blocks = -(-index.nbytes // manifest.block_nbytes)
    _require(
        index, manifest, np.equal(np.diff(index.digest_ptr), num_blocks),
        lambda row: "it does not have one digest per block",
    )  # fmt: skip
    if int(index.digest_ptr[0]) != 0 or int(index.digest_ptr[-1]) != len(index.digest):
        raise CorruptionError(f"the index has {len(index.digest)} digests, its rows need others")


def _check_copies(index: ChunkIndex, manifest: Manifest) -> None:
    # Empty rows are skipped: an empty tensor has no primaries that a copy could repeat.
    rows = np.flatnonzero(index.nbytes > 0)
    copy = index.copy[rows]
    if not copy.any():
        return
    boxes, number = unique_boxes(index.take(rows))
    has_primary = np.zeros(len(boxes), dtype=np.bool_)
    has_primary[number[copy == 0]] = True
    _require(
        index, manifest, has_primary[number],
        lambda row: "it is a copy of a box without a primary", rows=rows,
    )  # fmt: skip
    # Sorted by box and copy, a copy that is listed twice has an equal neighbour.
    order = np.lexsort((copy, number))
    is_new = (np.diff(number[order]) != 0) | (np.diff(copy[order]) != 0)
    _require(index, manifest, is_new, lambda row: "this copy is listed twice", rows=rows[order[1:]])


def _check_files(index: ChunkIndex, manifest: Manifest) -> None:
    envelope = np.array([f.header_nbytes for f in manifest.files], dtype=np.int64)
    is_tight = np.array([f.envelope == "safetensors" for f in manifest.files], dtype=np.bool_)
    header = np.where(is_tight, envelope, 0)
    size = np.array([f.nbytes for f in manifest.files], dtype=np.int64)
    begin, end = header[index.file], size[index.file]
    inside = (index.start >= begin) & (index.start <= end) & (index.nbytes <= end - index.start)
    _require(index, manifest, inside, lambda row: "its bytes leave the payload of its file")
    # In the order of files and bytes, each row starts at the end of the one before (in an envelope
    # that surrounds each chunk: not before it):
    #
    #     file    start   nbytes   must start at
    #     0       4096    512      4096, the end of file 0's header
    #     0       4608    100      4608
    #     1       4096    64       4096, the end of file 1's header
    #     1       4160    8        4160
    #     2       8192    16       8192, the end of file 2's header
    rows = np.flatnonzero(index.nbytes > 0)
    rows = rows[np.lexsort((index.start[rows], index.file[rows]))]
    file, start = index.file[rows], index.start[rows]
    stop = start + index.nbytes[rows]
    is_first = np.append(True, file[1:] != file[:-1])[: len(rows)]
    before = np.where(is_first, header[file], np.append(0, stop[:-1])[: len(rows)])
    expected = np.zeros(index.num_rows, dtype=np.int64)
    expected[rows] = before
    _require(
        index, manifest, np.where(is_tight[file], start == before, start >= before),
        lambda row: f"the bytes before it end at {expected[row]}: "
        + ("overlap" if index.start[row] < expected[row] else "gap"),
        rows=rows,
    )  # fmt: skip
    # The rows follow each other without overlap, so what they and the envelope have in all must be
    # the file; without gaps, that is where the last row ends.
    filled = envelope.copy()
    np.add.at(filled, file, stop - start)
    for number in np.flatnonzero(filled != size).tolist():
        info = manifest.files[number]
        if is_tight[number]:
            raise CorruptionError(
                f"{info.name}: its chunks end at byte {filled[number]}, but the file has "
                f"{info.nbytes} bytes"
            )
        raise CorruptionError(
            f"{info.name}: its chunks and what surrounds them have {filled[number]} bytes, but the "
            f"file has {info.nbytes}"
        )
