"""Integer columns and tables of boxes in few bytes: for messages, plans and the index."""

from __future__ import annotations

import struct
import zlib

import msgspec
import numpy as np

from holdfast.arrays.box_table import BoxTable
from holdfast.arrays.types import IntArray

MAX_NBYTES = 1 << 32
"""Limit of unpacked bytes; more are refused before memory is allocated for them."""
_HEAD = struct.Struct("<Bq")
_ITEMSIZES = (1, 2, 4, 8)


class PackedBoxes(msgspec.Struct, frozen=True, array_like=True):
    """A `BoxTable` as packed columns, for messages."""

    num_dims: int
    tensor: bytes
    offset: bytes
    extent: bytes


def pack_ints(values: IntArray) -> bytes:
    """Pack a column as distances to its least entry, in the narrowest type that fits all.

    One byte for the item size, eight for the least entry, then the distances:

        values                         least     item size   distances         bytes
        7, 9, 7                            7     1           0, 2, 0           9 + 3
        1000000, 1000255               10**6     1           0, 255            9 + 2
        1000000, 1000256               10**6     2           0, 256            9 + 4
        -1, 2**31                         -1     4           0, 2**31 + 1      9 + 8
        -2**63, 2**63 - 1             -2**63     8           0, 2**64 - 1      9 + 16
    """
    flat = np.ascontiguousarray(values, dtype=np.int64).reshape(-1)
    low = int(flat.min()) if len(flat) else 0
    dtype = np.min_scalar_type(int(flat.max()) - low if len(flat) else 0).newbyteorder("<")
    # The difference of two extremes may wrap in int64; read as unsigned it is right again.
    return _HEAD.pack(dtype.itemsize, low) + (flat - low).astype(dtype).tobytes()


def unpack_ints(data: bytes) -> IntArray:
    """Unpack the column of `pack_ints`, flat; ValueError for any other bytes."""
    if len(data) < _HEAD.size or data[0] not in _ITEMSIZES:
        raise ValueError("not a packed column")
    itemsize, low = _HEAD.unpack_from(data)
    distances = np.frombuffer(data, dtype=f"<u{itemsize}", offset=_HEAD.size)
    values: IntArray = distances.astype(np.int64) + low
    return values


def pack_boxes(boxes: BoxTable) -> PackedBoxes:
    """Pack boxes column by column; equal tables give equal bytes."""
    return PackedBoxes(
        num_dims=boxes.num_dims,
        tensor=pack_ints(boxes.tensor),
        offset=pack_ints(boxes.offset),
        extent=pack_ints(boxes.extent),
    )


def unpack_boxes(packed: PackedBoxes) -> BoxTable:
    """Unpack the boxes of `pack_boxes`; ValueError if the columns do not fit one table."""
    tensor = unpack_ints(packed.tensor)
    shape = (len(tensor), packed.num_dims)
    return BoxTable(
        tensor=tensor,
        offset=unpack_ints(packed.offset).reshape(shape),
        extent=unpack_ints(packed.extent).reshape(shape),
    )


def squeeze(data: bytes) -> bytes:
    """Compress bytes quickly."""
    return zlib.compress(data, 1)


def unsqueeze(data: bytes, *, max_nbytes: int = MAX_NBYTES) -> bytes:
    """Decompress the bytes of `squeeze`; ValueError for others, or beyond `max_nbytes`."""
    engine = zlib.decompressobj()
    try:
        result = engine.decompress(data, max_nbytes)
    except zlib.error as error:
        raise ValueError(f"not compressed bytes: {error}") from error
    if not engine.eof or engine.unused_data:
        raise ValueError("compressed bytes are incomplete or have trailing bytes")
    return result
