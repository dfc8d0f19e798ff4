"""What a rank asks for, as columns that all ranks get to know."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Sequence

import msgspec
import numpy as np

from holdfast.arrays.box_table import BoxTable, pad_shapes
from holdfast.arrays.types import IntArray as Ints
from holdfast.errors import CorruptionError
from holdfast.format.manifest import Manifest
from holdfast.state.match.result import Wanted

_COLUMN_TYPES = ("<u1", "<u2", "<u4", "<u8")


class _Packed(msgspec.Struct, frozen=True, array_like=True):
    num_boxes: int
    num_dims: int
    columns: tuple[tuple[str, bytes], ...]


def tensor_shapes(manifest: Manifest) -> Ints:
    """(tensors, d) shapes of all stored tensors, padded with ones; d is at least one."""
    shapes = [info.shape for info in manifest.tensors]
    return pad_shapes(shapes, max(1, max(map(len, shapes), default=1)))


def asked_boxes(wanted: Sequence[Wanted], shapes: Ints) -> BoxTable:
    """The boxes of a request, one row for each (entry, box), in order."""
    ndim = shapes.shape[1]
    tensor = np.array(
        list(itertools.chain.from_iterable([w.tensor] * len(w.locals) for w in wanted)),
        dtype=np.int64,
    )
    offset = np.zeros((len(tensor), ndim), dtype=np.int64)
    extent = shapes[tensor]
    row = 0
    rows, offsets, extents = [], [], []
    for entry in wanted:
        if entry.boxes is not None:
            for number, box in enumerate(entry.boxes):
                behind = ndim - len(box.shape)
                rows.append(row + number)
                offsets.append(box.offset + (0,) * behind)
                extents.append(box.shape + (1,) * behind)
        row += len(entry.locals)
    if rows:
        offset[rows] = np.array(offsets, dtype=np.int64).reshape(len(rows), ndim)
        extent[rows] = np.array(extents, dtype=np.int64).reshape(len(rows), ndim)
    return BoxTable(tensor=tensor, offset=offset, extent=extent)


def encode_boxes(boxes: BoxTable) -> bytes:
    """Boxes in few bytes: narrow columns, compressed; some bytes a box."""
    matrix = np.column_stack([boxes.tensor, boxes.offset, boxes.extent])
    columns = []
    for column in matrix.T:
        top = int(column.max(initial=0))
        kind = next(k for k in _COLUMN_TYPES if top <= np.iinfo(k).max)
        columns.append((kind, zlib.compress(column.astype(kind).tobytes(), 1)))
    packed = _Packed(len(boxes), boxes.offset.shape[1], tuple(columns))
    return msgspec.msgpack.encode(packed)


def decode_boxes(data: bytes) -> BoxTable:
    """Inverse of `encode_boxes`."""
    packed = msgspec.msgpack.decode(data, type=_Packed)
    columns = [
        np.frombuffer(zlib.decompress(content), dtype=kind).astype(np.int64)
        for kind, content in packed.columns
    ]
    ndim = packed.num_dims
    if len(columns) != 1 + 2 * ndim or any(len(c) != packed.num_boxes for c in columns):
        raise CorruptionError("another rank's request was garbled on its way")
    return BoxTable(
        tensor=columns[0],
        offset=np.column_stack(columns[1 : 1 + ndim]),
        extent=np.column_stack(columns[1 + ndim :]),
    )
