"""The image of a data file: a safetensors header, padded, and the place of every chunk after it."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from holdfast.arrays.types import IntArray
from holdfast.errors import CorruptionError, PlanError
from holdfast.format.dtypes import dtype_named

PAYLOAD_ALIGN = 4096
"""The payload of a data file begins at a multiple of this: it can be mapped and read direct."""

MAX_HEADER_NBYTES = 100_000_000
"""The limit of the safetensors library itself; longer headers are refused."""

MAX_NDIM = 64

_METADATA = "__metadata__"


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageEntry:
    """One chunk to store: its entry name, element type (`DTYPES`), and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """Where everything goes: `header` first, then each entry at its absolute byte `starts[i]`."""

    header: bytes
    starts: IntArray
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HeaderEntry:
    """One entry found in a header: `dtype` is the envelope's; `start` is absolute in the file."""

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
    """Entry name of a chunk: the key itself for a whole tensor, else `key@o0,o1,…`."""
    if tuple(shape) == tuple(global_shape):
        return key
    return f"{key}@{','.join(map(str, offset))}"


def layout_image(entries: Sequence[ImageEntry], *, align: int = PAYLOAD_ALIGN) -> Image:
    """Lay out a data file: a valid safetensors file whose payload starts at a multiple of `align`.

    Chunks lie in descending item size (stable), so each is aligned to its elements without
    padding, and equal entries give equal bytes. Raises PlanError for a name twice or reserved.
    """
    dtypes = [dtype_named(entry.dtype) for entry in entries]
    sizes = [
        math.prod(entry.shape) * dtype.itemsize
        for entry, dtype in zip(entries, dtypes, strict=True)
    ]
    order = sorted(range(len(entries)), key=lambda i: -dtypes[i].itemsize)
    starts = np.zeros(len(entries), dtype=np.int64)
    table: dict[str, object] = {_METADATA: {"format": "pt"}}
    end = 0
    for i in order:
        entry = entries[i]
        if entry.name in table:
            raise PlanError(f"two chunks of one data file have the name {entry.name!r}")
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
            f"the header of a data file would have {padded} bytes for {len(entries)} chunks; "
            f"safetensors allows {MAX_HEADER_NBYTES}: spread the state over more writers"
        )
    header = padded.to_bytes(8, "little") + text.ljust(padded)
    return Image(header=header, starts=starts + len(header), nbytes=len(header) + end)


def header_nbytes(prefix: bytes, *, file_nbytes: int, place: str) -> int:
    """Bytes of the header of a file that begins with `prefix` (8 bytes), checked against limits."""
    length = int.from_bytes(prefix[:8], "little")
    if len(prefix) < 8 or length < 2 or length > min(MAX_HEADER_NBYTES, file_nbytes - 8):
        raise CorruptionError(
            f"{place}: its first 8 bytes state a header of {length} bytes, which a file of "
            f"{file_nbytes} bytes cannot have: not a data file, or damaged"
        )
    return 8 + length


class _RawEntry(msgspec.Struct, forbid_unknown_fields=True):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def parse_header(header: bytes | memoryview, *, file_nbytes: int, place: str) -> list[HeaderEntry]:
    """The entries of a whole header (8-byte length included), in file order, strictly checked.

    Raises CorruptionError unless it is what safetensors requires: known form, no name twice, and
    entries that fill the rest of a file of `file_nbytes` exactly, without gap or overlap.
    """
    header = bytes(header)
    if header_nbytes(header[:8], file_nbytes=file_nbytes, place=place) != len(header):
        raise CorruptionError(f"{place}: the header is not as long as its first 8 bytes say")
    entries = [
        HeaderEntry(
            name=name,
            dtype=raw.dtype,
            shape=tuple(raw.shape),
            start=len(header) + raw.data_offsets[0],
            nbytes=raw.data_offsets[1] - raw.data_offsets[0],
        )
        for name, raw in _raw_entries(header[8:], place)
    ]
    entries.sort(key=lambda entry: (entry.start, entry.nbytes))
    end = len(header)
    for entry in entries:
        _check_entry(entry, end, place)
        end += entry.nbytes
    if end != file_nbytes:
        raise CorruptionError(
            f"{place}: the header's entries end at byte {end}, the file has {file_nbytes} bytes"
        )
    return entries


def _raw_entries(text: bytes, place: str) -> list[tuple[str, _RawEntry]]:
    # json, because msgspec keeps the last of two equal names, and that must be an error here.
    try:
        pairs: list[tuple[str, object]] = json.loads(text.decode(), object_pairs_hook=_Pairs)
        if not isinstance(pairs, _Pairs):
            raise CorruptionError(f"{place}: the header is not a JSON object")
        table = dict(pairs)
        if len(table) != len(pairs):
            raise CorruptionError(f"{place}: the header has one name twice")
        metadata = table.pop(_METADATA, None)
        if metadata is not None:
            msgspec.convert(_as_dict(metadata), dict[str, str])
        plain = {name: _as_dict(raw) for name, raw in table.items()}
        return list(msgspec.convert(plain, dict[str, _RawEntry]).items())
    except (ValueError, RecursionError) as error:
        raise CorruptionError(f"{place}: the header is not a safetensors header: {error}") from None


class _Pairs(list[tuple[str, object]]):
    """A JSON object as its pairs, distinguished from a JSON array."""


def _as_dict(value: object) -> dict[str, object]:
    if not isinstance(value, _Pairs):
        raise ValueError("an entry is not a JSON object")
    table = dict(value)
    if len(table) != len(value) or any(type(inner) is _Pairs for _, inner in value):
        raise ValueError("an entry has one name twice, or an object inside")
    return table


def _check_entry(entry: HeaderEntry, end: int, place: str) -> None:
    if entry.start != end or entry.nbytes < 0:
        raise CorruptionError(
            f"{place}: entry {entry.name!r} begins at byte {entry.start}, "
            f"but the one before it ends at byte {end}"
        )
    if len(entry.shape) > MAX_NDIM + 1 or any(size < 0 for size in entry.shape):
        raise CorruptionError(
            f"{place}: entry {entry.name!r} has the impossible shape {entry.shape}"
        )
