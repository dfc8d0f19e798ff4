"""From the stored bytes of one chunk to a box in memory: which bytes, verified how, put where."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
import xxhash

from holdfast.arrays.boxes import Box, contiguous_start, cover, flat_range_boxes
from holdfast.errors import CorruptionError
from holdfast.format.index import ChunkIndex
from holdfast.storage import Source

_SCRATCH_NBYTES = 4 << 20
_UNVERIFIED_GAP_NBYTES = 64 << 10
"""Without verification, wanted runs no farther apart than this are read in one piece."""

_ELEMENTS = MappingProxyType({n: np.dtype(f"u{n}") for n in (1, 2, 4, 8)})
_Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkRead:
    """One chunk and what is wanted of it: the part of `chunk` that lies in `box`.

    The chunk's payload is `nbytes` at byte `start` of `source`; `digests` are its block digests,
    None to read without verifying.
    """

    source: Source
    start: int
    nbytes: int
    digests: npt.NDArray[np.uint64] | None
    chunk: Box
    box: Box
    itemsize: int


class BlockReader:
    """Reads parts of chunks; keeps one scratch buffer per thread, some MiB or one digest block."""

    def __init__(self, *, block_nbytes: int) -> None:
        self._block_nbytes = block_nbytes
        self._local = threading.local()

    def read(self, request: ChunkRead, out: memoryview) -> int:
        """Copy `chunk ∩ box` to its place in `out` (the row-major bytes of `box`).

        Returns the bytes read. Raises CorruptionError for a wrong block, by its byte in the file,
        and what the source raises.
        """
        if request.chunk == request.box:
            return self.read_run(request, 0, request.nbytes, out)
        common = request.chunk.intersect(request.box)
        if common is None:
            return 0
        stored = contiguous_start(common, request.chunk)
        wanted = contiguous_start(common, request.box)
        if stored is not None and wanted is not None:
            start, at = stored * request.itemsize, wanted * request.itemsize
            nbytes = common.numel * request.itemsize
            return self.read_run(request, start, start + nbytes, out[at : at + nbytes])
        return self._read_scattered(request, common, out)

    def read_run(self, request: ChunkRead, start: int, stop: int, out: memoryview) -> int:
        """Bytes [start, stop) of the chunk straight into `out`; cut blocks through scratch.

        Returns the bytes read; raises as `read`.
        """
        if request.digests is None:
            request.source.readinto(out, start=request.start + start)
            return stop - start
        block = self._block_nbytes
        whole_start = -(-start // block) * block
        whole_stop = stop if stop == request.nbytes else stop // block * block
        total = 0
        if whole_start < whole_stop:
            whole = out[whole_start - start : whole_stop - start]
            request.source.readinto(whole, start=request.start + whole_start)
            self._verify(request, whole_start, whole)
            total += len(whole)
        else:
            whole_start = whole_stop = stop
        for lo, hi in ((start, whole_start), (whole_stop, stop)):
            position = lo
            while position < hi:
                begin = position // block * block
                data = self._read_block(request, begin)
                end = min(hi, begin + len(data))
                out[position - start : end - start] = data[position - begin : end - begin]
                total += len(data)
                position = end
        return total

    def find_damaged(
        self,
        index: ChunkIndex,
        rows: Sequence[int],
        bounds: Sequence[tuple[int, int]],
        data: memoryview,
    ) -> list[int]:
        """Which pieces, laid end to end in `data`, have a block that is not what was saved.

        Piece i is bytes `bounds[i]` of the payload of `rows[i]`, from the beginning of a block to
        the end of one or of the payload.
        """
        block = self._block_nbytes
        digest, damaged, at = index.digest, [], 0
        pointers = index.digest_ptr[np.asarray(rows, dtype=np.int64)].tolist()
        for number, ((start, stop), pointer) in enumerate(zip(bounds, pointers, strict=True)):
            first = pointer + start // block
            end = at + stop - start
            for expected in digest[first : first + -(-(end - at) // block)].tolist():
                upto = min(at + block, end)
                if xxhash.xxh3_64_intdigest(data[at:upto]) != expected:
                    damaged.append(number)
                    at = end
                    break
                at = upto
        return damaged

    def _read_block(self, request: ChunkRead, begin: int) -> memoryview:
        end = min(begin + self._block_nbytes, request.nbytes)
        data = self._scratch(end - begin).data
        request.source.readinto(data, start=request.start + begin)
        self._verify(request, begin, data)
        return data

    def _read_scattered(self, request: ChunkRead, common: Box, out: memoryview) -> int:
        """Pieces of the chunk that hold wanted bytes, through scratch and from there to `out`."""
        element, tail = element_of(request.itemsize)
        target = np.frombuffer(out, dtype=element).reshape(request.box.shape + tail)
        total = 0
        for lo, hi in self._pieces(request, common):
            piece = self._scratch(hi - lo)
            data = piece.data
            request.source.readinto(data, start=request.start + lo)
            self._verify(request, lo, data)
            total += hi - lo
            _scatter(piece, lo, request, common, target)
        return total

    def _pieces(self, request: ChunkRead, common: Box) -> Iterator[tuple[int, int]]:
        """Byte ranges of the chunk to read: whole blocks, at most a scratch buffer each."""
        size, block = request.itemsize, self._block_nbytes
        gap = _UNVERIFIED_GAP_NBYTES if request.digests is None else block
        starts, span = cover(common, request.chunk, max_gap=gap // size)
        first, last = starts * size, (starts + span) * size
        if request.digests is not None:
            first = first // block * block
            last = np.minimum(-(-last // block) * block, request.nbytes)
        # Ranges that touch or overlap become one; starts ascend, so do the ends.
        new = np.concatenate([[True], first[1:] > last[:-1]])
        firsts = first[new].tolist()
        lasts = last[np.append(new[1:], True)].tolist()
        step = max(_SCRATCH_NBYTES // block * block, block)
        if request.digests is None:
            step = max(_SCRATCH_NBYTES // size * size, size)
        for lo, hi in zip(firsts, lasts, strict=True):
            for start in range(lo, hi, step):
                yield start, min(start + step, hi)

    def _verify(self, request: ChunkRead, start: int, data: memoryview) -> None:
        """Check whole blocks beginning at byte `start` of the chunk, in place."""
        if request.digests is None:
            return
        block = self._block_nbytes
        number = start // block
        for at in range(0, len(data), block):
            if xxhash.xxh3_64_intdigest(data[at : at + block]) != int(request.digests[number]):
                raise CorruptionError(
                    f"damaged: the {min(block, len(data) - at)} bytes from byte "
                    f"{request.start + start + at} of the file have not the digest of the index"
                )
            number += 1

    def _scratch(self, nbytes: int) -> _Bytes:
        buffer: _Bytes | None = getattr(self._local, "buffer", None)
        if buffer is None or len(buffer) < nbytes:
            buffer = np.empty(max(nbytes, min(_SCRATCH_NBYTES, 4 * nbytes)), dtype=np.uint8)
            self._local.buffer = buffer
        return buffer[:nbytes]


def element_of(itemsize: int) -> tuple[np.dtype[np.generic], tuple[int, ...]]:
    """By bytes of an element: an unsigned type whose copies are plain moves, and a dim behind.

    Elements of 16 bytes are two of 8.
    """
    return (_ELEMENTS[8], (2,)) if itemsize == 16 else (_ELEMENTS[itemsize], ())


def _scatter(
    piece: _Bytes, start: int, request: ChunkRead, common: Box, target: npt.NDArray[np.generic]
) -> None:
    """Copy the wanted elements of bytes [start, …) of a chunk to their places in the target.

    A range of a row-major chunk is a few boxes, each contiguous in the piece: one strided copy
    per box, however many rows that is. Pieces never cut an element: blocks are powers of two.
    """
    size, chunk = request.itemsize, request.chunk
    element, tail = element_of(size)
    at = 0
    for part in flat_range_boxes(chunk.shape, start // size, (start + len(piece)) // size):
        nbytes = part.numel * size
        offset = tuple(a + b for a, b in zip(part.offset, chunk.offset, strict=True))
        moved = Box(offset, part.shape)
        wanted = moved.intersect(common)
        if wanted is not None:
            values = piece[at : at + nbytes].view(element).reshape(part.shape + tail)
            target[wanted.relative_to(request.box.offset)] = values[wanted.relative_to(offset)]
        at += nbytes
