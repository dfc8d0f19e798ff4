"""CRC-32 of the chunks of an image, for an envelope that has them.

Threads make them while the image is staged and written, in pieces, so that one large chunk is no
slower than many small ones: those of pieces are combined to that of the chunk.
"""

from __future__ import annotations

import os
import zlib
from bisect import bisect_right
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import numpy as np

from holdfast.writer.records import PlannedFile

PIECE_NBYTES = 4 << 20
CRC_NBYTES = 4
_MAX_THREADS = 4
_MAX_AHEAD_NBYTES = 32 << 20
_POLYNOMIAL = 0xEDB88320
_ONE = 1 << 31
"""The polynomial 1: the bits of a CRC-32 are those of a polynomial, the lowest power first."""

Put = Callable[[int, bytes], object]
"""Writes bytes into the image at a place."""


class _Piece(NamedTuple):
    """A part of a row's payload; `row` is in the order in which rows end."""

    row: int
    begin: int
    stop: int


class Checksums:
    """Puts the CRC-32 of each row into the image. A context manager, which ends its threads.

    Args:
        file: States where the rows and the places of their checksums are.
        image: The image; it may still be filled.
        put: Writes into the image.

    Cost: one pass over the payload, on up to four cores.
    """

    def __init__(self, file: PlannedFile, image: memoryview, put: Put) -> None:
        starts = np.frombuffer(file.starts, dtype=np.int64)
        stops = starts + np.frombuffer(file.row_nbytes, dtype=np.int64)
        order = np.lexsort((stops, starts))
        self._stops: list[int] = stops[order].tolist()
        self._places: list[list[int]] = (
            np.frombuffer(file.crc_at, dtype=np.int64).reshape(-1, 2)[order].tolist()
        )
        self._tasks = _tasks(starts[order].tolist(), self._stops)
        self._image = image
        self._put = put
        self._pool = ThreadPoolExecutor(
            min(_MAX_THREADS, os.cpu_count() or 1), thread_name_prefix="holdfast-crc"
        )
        self._running: list[Future[list[int]]] = []
        self._num_taken = 0
        self._shifts: dict[int, int] = {}
        """Of the tasks whose results were taken."""
        self._crcs: list[int] = [0] * len(self._stops)
        """By row, of the pieces taken so far."""
        self._num_put = 0
        """Of the rows, in the order in which they end."""

    def __enter__(self) -> Checksums:
        """Return the object itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the threads; what they have not begun is dropped."""
        self._pool.shutdown(cancel_futures=True)

    def reach(self, end: int) -> int:
        """Return the end of the row that byte `end` cuts off from its first checksum; else `end`.

        With that row's checksum known, nothing of what is written up to `end` has to be written
        again. Of a very large row it is not waited for.
        """
        row = bisect_right(self._stops, end)
        if row == len(self._stops) or self._places[row][0] >= end:
            return end
        stop = self._stops[row]
        return stop if stop - end <= _MAX_AHEAD_NBYTES else end

    def put_until(self, end: int, *, staged: int) -> list[int]:
        """Put the checksums of rows that end within the first `end` bytes.

        All of them if the whole image is in place; before that, some may be left for a later call.

        Args:
            end: Up to which checksums are needed; waits for them.
            staged: Up to which the image is in place: threads begin with what is there.

        Returns:
            The places that were put, 4 bytes each.
        """
        while len(self._running) < len(self._tasks):
            task = self._tasks[len(self._running)]
            if task[-1].stop > staged:
                break
            self._running.append(self._pool.submit(self._run, task))
        put: list[int] = []
        while self._num_put < len(self._stops) and self._stops[self._num_put] <= end:
            row = self._num_put
            if not self._take_until(row):
                break
            data = self._crcs[row].to_bytes(CRC_NBYTES, "little")
            for place in self._places[row]:
                self._put(place, data)
                put.append(place)
            self._num_put += 1
        return put

    def _run(self, task: list[_Piece]) -> list[int]:
        return [zlib.crc32(self._image[piece.begin : piece.stop]) for piece in task]

    def _shift_of(self, piece: _Piece) -> int:
        """Return the shift by a piece; nearly all pieces have one length."""
        nbytes = piece.stop - piece.begin
        if nbytes not in self._shifts:
            self._shifts[nbytes] = shift_of(nbytes)
        return self._shifts[nbytes]

    def _take_until(self, row: int) -> bool:
        """Wait for all pieces of rows up to `row` and add them; False if one has not begun."""
        while self._num_taken < len(self._tasks) and self._tasks[self._num_taken][0].row <= row:
            if self._num_taken == len(self._running):
                return False
            task = self._tasks[self._num_taken]
            for piece, crc in zip(task, self._running[self._num_taken].result(), strict=True):
                before = self._crcs[piece.row]
                self._crcs[piece.row] = combined(before, crc, self._shift_of(piece))
            self._num_taken += 1
        return True


def checksums(
    file: PlannedFile, image: memoryview, put: Put | None
) -> AbstractContextManager[Checksums | None]:
    """Return what makes the checksums of a file, None for an envelope without them.

    Args:
        file: The file.
        image: Its image.
        put: Writes into the image; by default through `image` itself.
    """
    if not file.crc_at:
        return nullcontext()

    def assign(at: int, data: bytes) -> None:
        image[at : at + len(data)] = data

    return Checksums(file, image, assign if put is None else put)


def _tasks(starts: list[int], stops: list[int]) -> list[list[_Piece]]:
    """Cut rows into tasks of about a piece: several small rows, or a part of a large one."""
    tasks: list[list[_Piece]] = []
    room = 0
    for row, (start, stop) in enumerate(zip(starts, stops, strict=True)):
        for begin in range(start, stop, PIECE_NBYTES):
            piece = _Piece(row, begin, min(begin + PIECE_NBYTES, stop))
            nbytes = piece.stop - piece.begin
            if nbytes > room:
                tasks.append([])
                room = PIECE_NBYTES
            tasks[-1].append(piece)
            room -= nbytes
    return tasks


def combined(first: int, second: int, shift: int) -> int:
    """Return the CRC-32 of two ranges in a row from those of each, and `shift_of` the second."""
    return second if not first else _times(shift, first) ^ second


def _times(a: int, b: int) -> int:
    """Multiply two polynomials modulo that of CRC-32."""
    product, bit = 0, _ONE
    while bit:
        if a & bit:
            product ^= b
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
        bit >>= 1
    return product


def shift_of(nbytes: int) -> int:
    """Return x to the power of the bits of so many bytes: what a CRC is shifted by."""
    power, factor, bits = _ONE, 1 << 30, 8 * nbytes
    while bits:
        if bits & 1:
            power = _times(factor, power)
        factor = _times(factor, factor)
        bits >>= 1
    return power
