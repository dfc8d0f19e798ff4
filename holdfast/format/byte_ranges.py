"""From requested boxes to stored bytes, and back into the boxes: arrays only.

The same functions plan a tool's read and a load of all ranks: a tool requests one box on one rank.
An *overlap* is the common part of a requested box and a chunk, which is the box that a row of the
index stores. A *piece* is a range of a chunk's payload that one rank reads. It consists of whole
digest blocks, so that every byte read can be verified.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from holdfast.arrays.box_table import BoxTable, enumerate_ranges
from holdfast.arrays.boxes import Box, cover, flat_range_boxes
from holdfast.arrays.types import AnyArray, BoolArray, IntArray
from holdfast.errors import CorruptionError
from holdfast.format.index import ChunkIndex

PIECE_NBYTES = 4 << 20
"""The usual size of a piece: it is hashed while in cache, and bounds the buffers."""
DIRECT_NBYTES = 64 << 10
"""Smaller pieces are read together with their neighbours, through a buffer."""
_JOINED_NBYTES = 1 << 20
"""Bytes of small pieces that are read together: they stay in cache until they are copied."""

_ELEMENTS = MappingProxyType({n: np.dtype(f"u{n}") for n in (1, 2, 4, 8)})


class StridedCopy(NamedTuple):
    """One strided copy from a piece to a requested box.

    Args:
        start: Byte of the piece at which the array starts.
        shape: Shape of the array, row-major.
        source: The requested elements of that array.
        target: Their place in the requested box.
        extent: Their shape.
    """

    start: int
    shape: tuple[int, ...]
    source: tuple[slice, ...]
    target: tuple[slice, ...]
    extent: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Runs:
    """The layout of inner boxes in the row-major memory of outer ones, in elements."""

    start: IntArray
    """(n,) position of the inner box's first element."""
    hull: IntArray
    """(n,) distance from the first element to the end of the last."""
    max_gap: IntArray
    """(n,) widest gap between two neighbouring elements; 0 for a run."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Overlaps:
    """Requested boxes and the chunks that they overlap, as columns of n rows and d dims.

    Args:
        request: (n,) row of the requested box in its table.
        row: (n,) row of the index, the primary copy of the chunk.
        boxes: (n) the overlaps.
        chunks: (n) the chunks that hold them.
        origin: (n, d) first coordinate of the requested box.
        in_chunk: Layout of the overlap in the chunk's payload, in elements.
        in_box: Layout of the overlap in the requested box, in elements.
        itemsize: (n,) bytes of an element.
    """

    request: IntArray
    row: IntArray
    boxes: BoxTable
    chunks: BoxTable
    origin: IntArray
    in_chunk: Runs
    in_box: Runs
    itemsize: IntArray

    def __len__(self) -> int:
        """Number of overlaps."""
        return len(self.request)

    @property
    def is_run(self) -> BoolArray:
        """(n,) True if the overlap is one run of bytes in the payload and in the box."""
        flags: BoolArray = (self.in_chunk.max_gap == 0) & (self.in_box.max_gap == 0)
        return flags

    def run_copies(
        self, number: IntArray, start: IntArray, stop: IntArray
    ) -> tuple[IntArray, IntArray, IntArray]:
        """Return the parts of overlaps that are runs in bytes [start, stop) of payloads.

        Args:
            number: (n,) number of the overlap.
            start: (n,) first byte of the piece in the payload.
            stop: (n,) byte past its end.

        Returns:
            (n,) start of the common bytes in the piece, start in the box, and their number.
        """
        size = self.itemsize[number]
        in_chunk, in_box = self.in_chunk.start[number] * size, self.in_box.start[number] * size
        begin = np.maximum(start, in_chunk)
        end = np.minimum(stop, in_chunk + self.in_chunk.hull[number] * size)
        return begin - start, in_box + begin - in_chunk, np.maximum(end - begin, 0)

    def strided_copies(self, number: int, start: int, stop: int) -> list[StridedCopy]:
        """Return the copies from bytes [start, stop) of the payload for any other overlap.

        A range of a row-major chunk consists of at most 2 * ndim - 1 boxes, each contiguous in the
        range: one strided copy per box, for any number of rows. No element is cut, because pieces
        start and end between elements. Example: in a chunk of shape (4, 5) with elements of 1 byte,
        columns 1 to 3 are requested; the piece is bytes [3, 17):

            box of the range         elements of it    copied to
            row 0, columns 3 to 4    column 3          row 0, last column
            rows 1 and 2             columns 1 to 3    rows 1 and 2
            row 3, columns 0 to 1    column 1          row 3, first column
        """
        size = int(self.itemsize[number])
        chunk, overlap = self.chunks.box(number), self.boxes.box(number)
        origin = tuple(self.origin[number].tolist())
        copies, at = [], 0
        for box in flat_range_boxes(chunk.shape, start // size, stop // size):
            offset = tuple(a + b for a, b in zip(box.offset, chunk.offset, strict=True))
            common = Box(offset, box.shape).intersect(overlap)
            if common is not None:
                source, target = common.relative_to(offset), common.relative_to(origin)
                copies.append(StridedCopy(at, box.shape, source, target, common.shape))
            at += box.numel * size
        return copies

    def strips(
        self, numbers: Iterable[int], start: int, stop: int, *, max_gap: int
    ) -> list[tuple[int, int]]:
        """Return what overlaps need of bytes [start, stop) of their payload: (byte of the piece,
        number of bytes) of each strip, ascending.

        Strips less than `max_gap` bytes apart are one, with what is between them. In the example of
        `strided_copies`, without gaps: (0, 1), (3, 3), (8, 3) and (13, 1).
        """
        begins, ends = [], []
        for number in numbers:
            size = int(self.itemsize[number])
            for copy in self.strided_copies(number, start, stop):
                inner = Box(tuple(each.start for each in copy.source), copy.extent)
                outer = Box((0,) * len(copy.shape), copy.shape)
                begin, span = cover(inner, outer, max_gap=max(max_gap - 1, 0) // size)
                begins.append(copy.start + begin * size)
                ends.append(begins[-1] + span * size)
        if not begins:
            return []
        begin, end = np.concatenate(begins), np.concatenate(ends)
        order = np.argsort(begin, kind="stable")
        begin, end = begin[order], np.maximum.accumulate(end[order])
        heads = np.flatnonzero(np.append(True, begin[1:] - end[:-1] >= max(max_gap, 1)))
        nbytes = end[np.append(heads[1:], len(end)) - 1] - begin[heads]
        return list(zip(begin[heads].tolist(), nbytes.tolist(), strict=True))


def find_overlaps(
    index: ChunkIndex, boxes: BoxTable, itemsize: IntArray, *, request: IntArray, row: IntArray
) -> Overlaps:
    """Describe the overlaps of requested boxes with chunks.

    Args:
        index: The chunk table.
        boxes: The requested boxes, none empty, with as many dims as the index has, at least one.
        itemsize: (tensors,) bytes of an element.
        request: (n,) row of the requested box in `boxes`.
        row: (n,) row of the chunk in `index`, primary copies only, each pair once.

    Raises:
        CorruptionError: The chunks do not cover a requested box.
    """
    chunks, requested = index.take(row).padded(1), boxes.take(request)
    offset = np.maximum(requested.offset, chunks.offset)
    extent = np.minimum(requested.stop, chunks.stop) - offset
    covered = np.zeros(len(boxes), dtype=np.int64)
    np.add.at(covered, request, extent.prod(axis=1))
    incomplete = np.flatnonzero(covered != boxes.numel())
    if len(incomplete):
        q = int(incomplete[0])
        raise CorruptionError(
            f"tensor {int(boxes.tensor[q])} of the manifest: no chunk covers "
            f"{int(boxes.numel()[q] - covered[q])} elements of the box at "
            f"{boxes.offset[q].tolist()}, size {boxes.extent[q].tolist()}"
        )
    return Overlaps(
        request=request,
        row=row,
        boxes=BoxTable(tensor=chunks.tensor, offset=offset, extent=extent),
        chunks=chunks,
        origin=requested.offset,
        in_chunk=runs_in(offset, extent, chunks.offset, chunks.extent),
        in_box=runs_in(offset, extent, requested.offset, requested.extent),
        itemsize=itemsize[chunks.tensor],
    )


def runs_in(
    offset: IntArray, extent: IntArray, outer_offset: IntArray, outer_extent: IntArray
) -> Runs:
    """Return the layout of each box in the row-major memory of the outer box around it.

    Args:
        offset: (n, d) offsets of the inner boxes, in the tensor's coordinates.
        extent: (n, d) extents of the inner boxes; each is at least 1.
        outer_offset: (n, d) offsets of the outer boxes.
        outer_extent: (n, d) extents of the outer boxes.
    """
    num, ndim = offset.shape
    start = np.zeros(num, dtype=np.int64)
    hull = np.ones(num, dtype=np.int64)
    stride = np.ones(num, dtype=np.int64)
    max_gap = np.zeros(num, dtype=np.int64)
    # From the innermost dim outwards: `hull` is what the inner dims span, `stride` the distance
    # of two entries of this dim. The gap between two entries has stride - hull elements.
    for dim in range(ndim - 1, -1, -1):
        start += (offset[:, dim] - outer_offset[:, dim]) * stride
        many = extent[:, dim] > 1
        np.maximum(max_gap, np.where(many, stride - hull, 0), out=max_gap)
        hull += (extent[:, dim] - 1) * stride
        stride *= outer_extent[:, dim]
    return Runs(start=start, hull=hull, max_gap=max_gap)


def requested_ranges(
    overlaps: Overlaps, nbytes: IntArray, *, grain: int, max_gap: int
) -> tuple[IntArray, IntArray, IntArray]:
    """Return byte ranges of payloads that hold all requested bytes: (start, stop, overlap).

    They start at multiples of `grain` and end at one or with the payload. The ranges of one overlap
    are disjoint. Example: payloads of 100 bytes, `grain` 10, `max_gap` 10:

        overlap                             requested        ranges
        a run from the start                [0, 20)          [0, 20)
        a run inside the payload            [3, 57)          [0, 60)
        runs of 4 bytes every 12 bytes      from 2 to 42     [0, 50)
        runs of 2 bytes every 25 bytes      from 0 to 52     [0, 10) [20, 30) [50, 60)
        runs of 8 bytes every 18 bytes      from 5 to 31     [0, 20) [20, 40)

    Args:
        overlaps: The requested parts of chunks.
        nbytes: (n,) payload bytes of each overlap's chunk.
        grain: Bytes per digest; without verification, the alignment.
        max_gap: Gaps of at least this many bytes between two runs are not read.
    """
    size = overlaps.itemsize
    first = overlaps.in_chunk.start * size
    last = first + overlaps.in_chunk.hull * size
    is_sparse = overlaps.in_chunk.max_gap * size >= max_gap
    dense = np.flatnonzero(~is_sparse)
    starts, stops, owners = [first[dense] // grain], [-(-last[dense] // grain)], [dense]
    # Only sparse overlaps take one step each: there are few of them, with many ranges.
    for number in np.flatnonzero(is_sparse).tolist():
        item = int(size[number])
        begin, span = cover(
            overlaps.boxes.box(number), overlaps.chunks.box(number), max_gap=(max_gap - 1) // item
        )
        start, stop = begin * item // grain, -(-(begin + span) * item // grain)
        # Two runs may share a block: it belongs to the first.
        start[1:] = np.maximum(start[1:], stop[:-1])
        starts.append(start)
        stops.append(stop)
        owners.append(np.full(len(start), number))
    owner = np.concatenate(owners)
    start, stop = np.concatenate(starts) * grain, np.concatenate(stops) * grain
    return start, np.minimum(stop, nbytes[owner]), owner


def split_ranges(
    start: IntArray, stop: IntArray, *, grain: int, piece_nbytes: int | None = None
) -> tuple[IntArray, IntArray, IntArray]:
    """Cut ranges into pieces of about `PIECE_NBYTES`, or so many: (start, stop, range) of each."""
    step = max(1, (piece_nbytes or PIECE_NBYTES) // grain) * grain
    number, position = enumerate_ranges(-(-(stop - start) // step))
    begin = start[number] + position * step
    return begin, np.minimum(begin + step, stop[number]), number


def join_neighbours(
    file: IntArray, start: IntArray, nbytes: IntArray, *, range_nbytes: int | None = None
) -> IntArray:
    """Join pieces, in order of file and byte, into reads; return the reads' bounds in 0…n.

    A large piece is one read. Small pieces are joined with their neighbours, up to 1 MiB. With
    `range_nbytes`, where each read is a request, they are joined up to that and the piece that
    crosses it, and a quarter of it is large: the copy of a joined piece costs less than a request.
    Example with sizes in KiB (64 is large):

        file    start    size    read
           0        0       8       0
           0        8      16       0
           0       24      64       1    large
           0       88       8       2
           1       96       8       3    another file
    """
    is_large = nbytes >= (range_nbytes // 4 if range_nbytes else DIRECT_NBYTES)
    return join_runs(file, start, nbytes, most=range_nbytes or _JOINED_NBYTES, is_apart=is_large)


def join_runs(
    file: IntArray,
    start: IntArray,
    nbytes: IntArray,
    *,
    most: int,
    is_apart: BoolArray | None = None,
) -> IntArray:
    """Join pieces, in order of file and byte, that follow one another; return the bounds in 0…n.

    Args:
        file: (n,) of each piece.
        start: (n,) its first byte.
        nbytes: (n,) its length.
        most: A run ends before the first piece that begins so many bytes after its own begin.
        is_apart: (n,) those that are not joined with others; None for none.
    """
    if not len(file):
        return np.zeros(1, dtype=np.int64)
    has_gap = (file[1:] != file[:-1]) | (start[1:] != start[:-1] + nbytes[:-1])
    if is_apart is not None:
        has_gap |= is_apart[1:] | is_apart[:-1]
    is_new = np.concatenate([[True], has_gap])
    # Cut each run of neighbours again whenever a read is full.
    number = sums_before(nbytes, np.cumsum(is_new)) // most
    is_new[1:] |= number[1:] != number[:-1]
    return np.append(np.flatnonzero(is_new), len(file))


def sums_before(values: IntArray, *keys: IntArray) -> IntArray:
    """Return, for each value, the sum of the values before it in its run of equal keys.

    Values 5, 2, 4, 1 with keys 0, 0, 1, 1 give 0, 5, 0, 4.
    """
    is_new = np.zeros(len(values), dtype=np.bool_)
    is_new[:1] = True
    for key in keys:
        is_new[1:] |= key[1:] != key[:-1]
    before = np.cumsum(values) - values
    sums: IntArray = before - before[np.flatnonzero(is_new)][np.cumsum(is_new) - 1]
    return sums


def elements(data: memoryview, start: int, shape: tuple[int, ...], itemsize: int) -> AnyArray:
    """Return the elements at byte `start` as an array of this shape; shares the memory.

    The elements have an unsigned type of the same size, whose copies are plain moves. An element of
    16 bytes becomes two of 8 in one more last dim.
    """
    element, tail = (_ELEMENTS[8], (2,)) if itemsize == 16 else (_ELEMENTS[itemsize], ())
    nbytes = itemsize
    for size in shape:
        nbytes *= size
    return np.frombuffer(data[start : start + nbytes], dtype=element).reshape(shape + tail)
