"""Columns of integers as few bytes, for the messages and notes of planning."""

from __future__ import annotations

import struct
import zlib

import numpy as np

from holdfast.arrays.types import IntArray as Ints

MAX_NBYTES = 1 << 32
"""No packed record is larger than this when unpacked; more is refused before it is held."""
_HEAD = struct.Struct("<Bq")


def pack_ints(values: Ints) -> bytes:
    """The column, each entry as its distance to the least, as narrow as they all fit.

    Cost: nine bytes, and 1, 2, 4 or 8 an entry.
    """
    flat = np.ascontiguousarray(values, dtype=np.int64).reshape(-1)
    low = int(flat.min()) if len(flat) else 0
    span = int(flat.max()) - low if len(flat) else 0
    size = next(size for size in (1, 2, 4, 8) if span < 1 << (8 * size))
    return _HEAD.pack(size, low) + (flat - low).astype(f"<u{size}").tobytes()


def unpack_ints(data: bytes) -> Ints:
    """The column of `pack_ints`; ValueError for anything else."""
    if len(data) < _HEAD.size or data[0] not in (1, 2, 4, 8):
        raise ValueError("not a packed column")
    size, low = _HEAD.unpack_from(data)
    found: Ints = np.frombuffer(data, dtype=f"<u{size}", offset=_HEAD.size).astype(np.int64) + low
    return found


def squeeze(data: bytes) -> bytes:
    """The bytes, compressed quickly."""
    return zlib.compress(data, 1)


def unsqueeze(data: bytes) -> bytes:
    """The bytes of `squeeze`; ValueError for anything else, or for more than `MAX_NBYTES`."""
    engine = zlib.decompressobj()
    try:
        found = engine.decompress(data, MAX_NBYTES)
    except zlib.error as error:
        raise ValueError(f"not compressed bytes: {error}") from error
    if not engine.eof or engine.unused_data:
        raise ValueError("compressed bytes that do not end where they should")
    return found
