"""The chunk table of a checkpoint: one row per stored copy of a chunk, kept as columns.

On disk the columns have the narrowest unsigned types that hold them; in memory they are int64
(digests uint64), so that arithmetic on them cannot wrap.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from holdfast.arrays.box_table import BoxTable, pad_shapes
from holdfast.arrays.boxes import Box
from holdfast.arrays.tiling import check_tilings
from holdfast.errors import CorruptionError, PlanError
from holdfast.format.dtypes import DTYPES
from holdfast.format.image import (
    MAX_NDIM,
    HeaderEntry,
    ImageEntry,
    header_nbytes,
    layout_image,
    parse_header,
)
from holdfast.format.manifest import MAX_INDEX_NBYTES, Manifest

Ints = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]

_ROW_COLUMNS = ("tensor", "file", "offset", "extent", "start", "nbytes", "copy")
_COLUMNS = (*_ROW_COLUMNS, "digest_ptr", "digest")
_MATRICES = ("offset", "extent")
_NARROW = (("U8", np.uint8), ("U16", np.uint16), ("U32", np.uint32), ("U64", np.uint64))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChunkIndex:
    """Columns of the chunk table; n rows, d the largest ndim of any tensor.

    `offset` and `extent` are padded with 0 and 1 behind the tensor's own dims. `start` is the
    absolute byte of the payload in its file. `copy` 0 is the primary; the primaries of a tensor
    tile it, other copies repeat the box of a primary. The digests of row i are
    `digest[digest_ptr[i]:digest_ptr[i + 1]]`, one per block.
    """

    tensor: Ints
    """(n,) position in the manifest's tensor table."""
    file: Ints
    """(n,) position in the manifest's file table."""
    offset: Ints
    """(n, d) first coordinate of the chunk, in elements."""
    extent: Ints
    """(n, d) shape of the chunk, in elements."""
    start: Ints
    """(n,) absolute byte in the file."""
    nbytes: Ints
    """(n,) bytes of payload."""
    copy: Ints
    """(n,) 0 for the primary, 1, 2, … for further copies of the same box."""
    digest_ptr: Ints
    """(n + 1,) where each row's digests begin."""
    digest: Words
    """XXH3-64 of each block of each row."""

    @property
    def num_rows(self) -> int:
        """Number of rows n."""
        return len(self.tensor)

    @property
    def num_dims(self) -> int:
        """Number of columns d of `offset` and `extent`."""
        return int(self.offset.shape[1])

    @property
    def boxes(self) -> BoxTable:
        """The box of every row; shares the columns' memory."""
        return BoxTable(tensor=self.tensor, offset=self.offset, extent=self.extent)

    def box(self, row: int, *, ndim: int) -> Box:
        """The box of one row of a tensor with `ndim` dims."""
        return self.boxes.box(row, ndim=ndim)

    def digests(self, row: int) -> Words:
        """The block digests of one row."""
        return self.digest[self.digest_ptr[row] : self.digest_ptr[row + 1]]


def encode_index(index: ChunkIndex) -> bytes:
    """The bytes of `index.safetensors`; equal tables give equal bytes. PlanError if misshapen."""
    entries, arrays = [], []
    for name in _COLUMNS:
        column = np.asarray(getattr(index, name))
        if column.size and column.dtype.kind != "u" and int(column.min()) < 0:
            raise PlanError(f"index column {name!r} holds the negative value {int(column.min())}")
        top = int(column.max()) if column.size else 0
        dtype, kind = _NARROW[-1] if name == "digest" else _narrowest(top)
        arrays.append(np.ascontiguousarray(column, dtype=np.dtype(kind).newbyteorder("<")))
        entries.append(ImageEntry(name=name, dtype=dtype, shape=column.shape))
    _check_shapes(
        {name: a.shape for name, a in zip(_COLUMNS, arrays, strict=True)}, PlanError, "index"
    )
    image = layout_image(entries)
    data = bytearray(image.nbytes)
    data[: len(image.header)] = image.header
    for array, start in zip(arrays, image.starts.tolist(), strict=True):
        data[start : start + array.nbytes] = array.tobytes()
    return bytes(data)


def _narrowest(top: int) -> tuple[str, type[np.unsignedinteger]]:
    for dtype, kind in _NARROW:
        if top <= np.iinfo(kind).max:
            return dtype, kind
    raise PlanError(f"index value {top} does not fit 64 bits")


def decode_index(data: bytes | memoryview, *, place: str = "index.safetensors") -> ChunkIndex:
    """The table in the bytes of `index.safetensors`; CorruptionError if they are not one.

    Memory is bounded by ten times the bytes given. Says nothing about what the rows state: see
    `validate_index`.
    """
    view = memoryview(data)
    if len(view) > MAX_INDEX_NBYTES:
        raise CorruptionError(f"{place}: {len(view)} bytes are beyond the limit {MAX_INDEX_NBYTES}")
    end = header_nbytes(bytes(view[:8]), file_nbytes=len(view), place=place)
    found = {e.name: e for e in parse_header(view[:end], file_nbytes=len(view), place=place)}
    if sorted(found) != sorted(_COLUMNS):
        raise CorruptionError(f"{place}: its columns are {sorted(found)}, not {sorted(_COLUMNS)}")
    _check_shapes({name: found[name].shape for name in _COLUMNS}, CorruptionError, place)
    columns = {name: _column(view, found[name], place) for name in _COLUMNS[:-1]}
    words = _raw_column(view, found["digest"], place)
    return ChunkIndex(**columns, digest=words.astype(np.uint64, copy=False))


def _raw_column(view: memoryview, entry: HeaderEntry, place: str) -> npt.NDArray[np.generic]:
    dtype = DTYPES.get(entry.dtype)
    if entry.dtype not in ("U8", "U16", "U32", "U64") or dtype is None or dtype.numpy is None:
        raise CorruptionError(f"{place}: column {entry.name!r} has the type {entry.dtype}")
    count = math.prod(entry.shape)
    if count * dtype.itemsize != entry.nbytes:
        raise CorruptionError(f"{place}: column {entry.name!r} has {entry.nbytes} bytes, "
                              f"not those of shape {entry.shape}")  # fmt: skip
    payload = view[entry.start : entry.start + entry.nbytes]
    return np.frombuffer(payload, dtype=dtype.numpy).reshape(entry.shape)


def _column(view: memoryview, entry: HeaderEntry, place: str) -> Ints:
    raw = _raw_column(view, entry, place)
    wide = raw.astype(np.int64)
    if raw.dtype.itemsize == 8 and wide.size and int(wide.min()) < 0:
        raise CorruptionError(f"{place}: column {entry.name!r} holds a value beyond 2**63")
    return wide


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
    if len(shapes["digest"]) != 1:
        raise error(f"{place}: column 'digest' has shape {shapes['digest']}, not one dim")


def concatenate(tables: list[ChunkIndex]) -> ChunkIndex:
    """One table of all rows, in the order given; PlanError when the numbers of dims differ."""
    if len({table.num_dims for table in tables}) != 1:
        raise PlanError(f"tables of {sorted({t.num_dims for t in tables})} dims cannot be joined")
    columns = {
        name: np.concatenate([getattr(table, name) for table in tables])
        for name in (*_ROW_COLUMNS, "digest")
    }
    counts = np.concatenate([np.diff(table.digest_ptr) for table in tables])
    return ChunkIndex(digest_ptr=np.concatenate([[0], np.cumsum(counts)]), **columns)


def take_rows(index: ChunkIndex, rows: Ints) -> ChunkIndex:
    """The table of the given rows, in the order given."""
    counts = np.diff(index.digest_ptr)[rows]
    pointers = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    inside = np.arange(int(pointers[-1])) - np.repeat(pointers[:-1], counts)
    digest = index.digest[np.repeat(index.digest_ptr[rows], counts) + inside]
    columns = {name: getattr(index, name)[rows] for name in _ROW_COLUMNS}
    return ChunkIndex(digest_ptr=pointers, digest=digest, **columns)


def validate_index(index: ChunkIndex, manifest: Manifest) -> None:
    """Prove that the table and the manifest describe one whole checkpoint.

    Every id exists; every row lies in its tensor and its file; bytes and digests are as many as
    its box needs; primaries tile each tensor exactly and copies repeat a primary; the rows of a
    file fill it behind its header without gap or overlap. Raises CorruptionError naming tensor,
    box and file. Vectorised: about a second for a million rows.
    """
    if index.num_rows != manifest.index.num_rows:
        raise CorruptionError(
            f"the index has {index.num_rows} rows, the manifest states {manifest.index.num_rows}"
        )
    stored = sum(index.nbytes.tolist()) if index.num_rows else 0
    if stored != manifest.totals.stored_nbytes:
        raise CorruptionError(
            f"the index has chunks of {stored} bytes, the manifest's totals state "
            f"{manifest.totals.stored_nbytes}"
        )
    for name, column, limit in (
        ("tensor", index.tensor, len(manifest.tensors)),
        ("file", index.file, len(manifest.files)),
    ):
        wrong = np.flatnonzero((column < 0) | (column >= limit))
        if len(wrong):
            row = int(wrong[0])
            raise CorruptionError(f"index row {row}: {name} {column[row]}, there are {limit}")
    _check_boxes(index, manifest)
    _check_bytes(index, manifest)
    _check_digest_counts(index, manifest)
    _check_copies(index, manifest)
    _check_files(index, manifest)


def describe_row(index: ChunkIndex, manifest: Manifest, row: int) -> str:
    """A row in words: tensor, box, file and byte."""
    tensor = manifest.tensors[index.tensor[row]]
    offset, extent = (c[row, : len(tensor.shape)].tolist() for c in (index.offset, index.extent))
    file = manifest.files[index.file[row]].name
    return f"tensor {tensor.key!r}, chunk {extent} at {offset}, {file} byte {index.start[row]}"


def _refuse(index: ChunkIndex, manifest: Manifest, row: int, what: str) -> CorruptionError:
    return CorruptionError(f"index row {row} ({describe_row(index, manifest, row)}): {what}")


def _check_boxes(index: ChunkIndex, manifest: Manifest) -> None:
    ndim = np.array([len(t.shape) for t in manifest.tensors], dtype=np.int64)
    if len(ndim) and int(ndim.max()) > index.num_dims:
        raise CorruptionError(
            f"the index has {index.num_dims} dims, a tensor has {int(ndim.max())}"
        )
    behind = np.arange(index.num_dims) >= ndim[index.tensor][:, None]
    padding = (index.offset != 0) | (index.extent != 1)
    wrong = np.flatnonzero((behind & padding).any(axis=1))
    if len(wrong):
        raise _refuse(index, manifest, int(wrong[0]), "the columns behind its dims are not 0 and 1")
    shapes = [t.shape for t in manifest.tensors]
    primary = np.flatnonzero(index.copy == 0)
    for owner, flaw in check_tilings(index.boxes.take(primary), shapes, max_flaws=1):
        rows = primary[list(flaw.rows)].tolist()
        at = "; ".join(describe_row(index, manifest, row) for row in rows[:4])
        raise CorruptionError(
            f"the chunks of tensor {manifest.tensors[owner].key!r} do not tile its shape "
            f"{shapes[owner]}: {flaw.kind.replace('_', ' ')} at {list(flaw.box.offset)}, "
            f"size {list(flaw.box.shape)}" + (f" ({at})" if at else "")
        )


def _check_bytes(index: ChunkIndex, manifest: Manifest) -> None:
    sizes = pad_shapes([t.shape for t in manifest.tensors], index.num_dims)
    inside = (index.extent >= 0) & (index.extent <= sizes[index.tensor])
    inside &= (index.offset >= 0) & (index.offset <= sizes[index.tensor] - index.extent)
    wrong = np.flatnonzero(~inside.all(axis=1))
    if len(wrong):
        raise _refuse(index, manifest, int(wrong[0]), "leaves its tensor")
    itemsize = np.array([DTYPES[t.dtype].itemsize for t in manifest.tensors], dtype=np.int64)
    expected = index.extent.prod(axis=1) * itemsize[index.tensor]
    wrong = np.flatnonzero(index.nbytes != expected)
    if len(wrong):
        row = int(wrong[0])
        what = f"{index.nbytes[row]} bytes are stated, its box has {expected[row]}"
        raise _refuse(index, manifest, row, what)


def _check_digest_counts(index: ChunkIndex, manifest: Manifest) -> None:
    pointers = index.digest_ptr
    counts = -(-index.nbytes // manifest.block_nbytes)
    wrong = np.flatnonzero(np.diff(pointers) != counts)
    if len(wrong):
        raise _refuse(index, manifest, int(wrong[0]), "it has not one digest per block")
    if int(pointers[0]) != 0 or int(pointers[-1]) != len(index.digest):
        raise CorruptionError(f"the index has {len(index.digest)} digests, its rows use others")


def _check_copies(index: ChunkIndex, manifest: Manifest) -> None:
    extra = np.flatnonzero(index.copy != 0)
    if not len(extra):
        return
    boxes = np.column_stack([index.tensor, index.offset, index.extent])
    rows = np.lexsort((index.copy, *boxes.T[::-1]))
    boxes, copies = boxes[rows], index.copy[rows]
    same = (boxes[1:] == boxes[:-1]).all(axis=1)
    first = np.concatenate([[True], ~same])
    # An empty tensor has no primaries to repeat, and nothing in its copies either.
    orphan = first & (copies != 0) & (index.nbytes[rows] > 0)
    twice = np.concatenate([[False], same & (copies[1:] == copies[:-1])])
    for problem, what in (
        (orphan, "a copy of a box that no primary has"),
        (twice & (index.nbytes[rows] > 0), "the same copy is listed twice"),
    ):
        wrong = np.flatnonzero(problem)
        if len(wrong):
            raise _refuse(index, manifest, int(rows[wrong[0]]), what)


def _check_files(index: ChunkIndex, manifest: Manifest) -> None:
    header = np.array([f.header_nbytes for f in manifest.files], dtype=np.int64)
    size = np.array([f.nbytes for f in manifest.files], dtype=np.int64)
    begin, end = header[index.file], size[index.file]
    outside = (index.start < begin) | (index.start > end) | (index.nbytes > end - index.start)
    wrong = np.flatnonzero(outside)
    if len(wrong):
        raise _refuse(index, manifest, int(wrong[0]), "its bytes leave the payload of its file")
    rows = np.flatnonzero(index.nbytes > 0)
    rows = rows[np.lexsort((index.start[rows], index.file[rows]))]
    file, start = index.file[rows], index.start[rows]
    stop = start + index.nbytes[rows]
    leading = np.concatenate([[True], file[1:] != file[:-1]])[: len(rows)]
    before = np.where(leading, header[file], np.concatenate([[0], stop[:-1]])[: len(rows)])
    wrong = np.flatnonzero(start != before)
    if len(wrong):
        row, at = int(rows[wrong[0]]), int(before[wrong[0]])
        what = f"the bytes before it end at {at}: " + (
            "overlap" if index.start[row] < at else "gap"
        )
        raise _refuse(index, manifest, row, what)
    filled = header.copy()
    np.maximum.at(filled, file, stop)
    wrong = np.flatnonzero(filled != size)
    if len(wrong):
        f = manifest.files[wrong[0]]
        raise CorruptionError(
            f"{f.name}: its chunks end at byte {filled[wrong[0]]}, the file has {f.nbytes} bytes"
        )
