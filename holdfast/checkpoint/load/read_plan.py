"""The plan of a load: which rank reads which bytes, and to which ranks it sends them.

Every rank makes the plan from the same index and the same requests; so it is equal on all of them
without communication. Everything is columns: no Python call per tensor.

An *overlap* is what a requested box and a chunk have in common, a *piece* a range of a chunk's
payload, whole digest blocks, that one rank reads. A *transfer* is what a piece holds of an overlap:
bytes that go to every rank that requests the box.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from holdfast.arrays.box_table import enumerate_ranges, meeting_pairs
from holdfast.arrays.types import IntArray
from holdfast.checkpoint.load.assign_readers import RequestedRanges, assign_readers
from holdfast.checkpoint.load.requests import ReadRequests
from holdfast.format.byte_ranges import (
    Overlaps,
    find_overlaps,
    requested_ranges,
    split_ranges,
    sums_before,
)
from holdfast.format.index import ChunkIndex

_ROUND_NBYTES = 64 << 20
"""Bytes read in a round for one set of ranks: bounds what each of them holds and receives."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReadPlan:
    """Who reads which piece in which round, and what of it goes to which requested box.

    Args:
        requests: What all ranks request.
        overlaps: The requested boxes' overlaps with chunks.
        row: (pieces,) row of the index.
        start: (pieces,) first byte in the payload of the row.
        stop: (pieces,) byte past the end.
        reader: (pieces,) position of the rank that reads it.
        round: (pieces,) in which round it is sent; -1 for what its reader alone requests, which is
            read before the first round.
        piece: (transfers,) piece of each transfer, ascending.
        overlap: (transfers,) overlap of each transfer, ascending for each piece.
        num_rounds: How often the ranks exchange what they read.
    """

    requests: ReadRequests
    overlaps: Overlaps
    row: IntArray
    start: IntArray
    stop: IntArray
    reader: IntArray
    round: IntArray
    piece: IntArray
    overlap: IntArray
    num_rounds: int


def plan_reads(
    index: ChunkIndex,
    requests: ReadRequests,
    *,
    itemsize: IntArray,
    writer: IntArray,
    num_ranks: int,
    grain: int,
) -> ReadPlan:
    """Plan all reads of a load.

    Args:
        index: The chunk table.
        requests: What all ranks request.
        itemsize: (tensors,) bytes of an element.
        writer: (files,) position of the rank that wrote each file, -1 where it is none of these.
        num_ranks: How many ranks load.
        grain: Reads begin at multiples of so many bytes of a payload: the digests' blocks, where
            these are checked.

    Raises:
        CorruptionError: Where the chunks do not cover a requested box.

    Cost: see `assign_readers`; memory about 200 bytes for each requested box, overlap and piece.
    """
    primary = np.flatnonzero((index.copy == 0) & (index.nbytes > 0))
    request, chunk = meeting_pairs(requests.boxes, index.take(primary).padded(1))
    overlaps = find_overlaps(index, requests.boxes, itemsize, request=request, row=primary[chunk])
    ranges = _shared_ranges(overlaps, requests, index, writer, grain)
    assignment = assign_readers(ranges, num_ranks=num_ranks, grain=grain)
    slices = assignment.slices
    start, stop, part = split_ranges(slices.start, slices.stop, grain=grain)
    owner, reader = slices.number[part], assignment.reader[part]
    rounds = _assign_rounds(assignment.rank_set[part], reader, stop - start)
    piece, position = enumerate_ranges(np.diff(ranges.overlap_ptr)[owner])
    return ReadPlan(
        requests=requests,
        overlaps=overlaps,
        row=ranges.row[owner],
        start=start,
        stop=stop,
        reader=reader,
        round=rounds,
        piece=piece,
        overlap=ranges.overlap[ranges.overlap_ptr[owner[piece]] + position],
        num_rounds=int(rounds.max(initial=-1)) + 1,
    )


def _shared_ranges(
    overlaps: Overlaps,
    requests: ReadRequests,
    index: ChunkIndex,
    writer: IntArray,
    grain: int,
) -> RequestedRanges:
    """The byte ranges of all overlaps, cut where the set of overlaps that need them changes.

    Example, one payload in blocks of 10 bytes; overlap 0 (bytes 0 to 40) is requested by rank 0,
    overlap 1 (bytes 20 to 50) by ranks 0 and 1, overlap 2 (bytes 20 to 40) by rank 2:

        range       overlaps    requested by
        [0, 20)     0           0
        [20, 40)    0, 1, 2     0, 1, 2
        [40, 50)    1           0, 1
    """
    # One number for each byte of all payloads: row r has bytes base[r] to base[r + 1].
    base = np.concatenate([[0], np.cumsum(index.nbytes)])
    nbytes = index.nbytes[overlaps.row]
    start, stop, owner = requested_ranges(overlaps, nbytes, grain=grain, max_gap=grain)
    at = base[overlaps.row[owner]]
    start, stop = at + start, at + stop
    points = np.unique(np.concatenate([start, stop]))
    # Each needed range covers intervals between neighbouring points: (interval, overlap) pairs,
    # as one number each, so that sorting groups them by interval.
    first, last = np.searchsorted(points, start), np.searchsorted(points, stop)
    needed, position = enumerate_ranges(last - first)
    num_overlaps = max(len(overlaps), 1)
    pairs = np.unique((first[needed] + position) * num_overlaps + owner[needed])
    interval, overlap = pairs // num_overlaps, pairs % num_overlaps
    chosen = np.unique(interval)
    number = np.searchsorted(chosen, interval)
    overlap_ptr = np.searchsorted(number, np.arange(len(chosen) + 1))
    # The same once more for (range, rank).
    request = overlaps.request[overlap]
    entry, position = enumerate_ranges(requests.rank_ptr[request + 1] - requests.rank_ptr[request])
    rank = requests.rank[requests.rank_ptr[request[entry]] + position]
    num_ranks = int(requests.rank.max(initial=0)) + 1
    pairs = np.unique(number[entry] * num_ranks + rank)
    row = overlaps.row[overlap[overlap_ptr[:-1]]]
    file = index.file[row]
    return RequestedRanges(
        row=row,
        start=points[chosen] - base[row],
        stop=points[np.minimum(chosen + 1, len(points) - 1)] - base[row],
        file=file,
        payload=index.start[row],
        writer=writer[file],
        overlap_ptr=overlap_ptr,
        overlap=overlap,
        rank_ptr=np.searchsorted(pairs // num_ranks, np.arange(len(chosen) + 1)),
        rank=pairs % num_ranks,
    )


def _assign_rounds(rank_set: IntArray, reader: IntArray, nbytes: IntArray) -> IntArray:
    """The round of each piece: `_ROUND_NBYTES` per set of ranks, its readers taking turns.

    Example, one set with readers 0 and 1, pieces of 40 bytes and rounds of 100:

        piece    reader    turn    bytes before    round
        0        0         0         0             0
        2        1         0        40             0
        1        0         1        80             0
        3        1         1       120             1
        4        1         2       160             1
    """
    rounds = np.full(len(rank_set), -1, dtype=np.int64)
    shared = np.flatnonzero(rank_set >= 0)
    if not len(shared):
        return rounds
    by_reader = shared[np.lexsort((shared, reader[shared], rank_set[shared]))]
    ones = np.ones(len(by_reader), dtype=np.int64)
    turn = sums_before(ones, rank_set[by_reader], reader[by_reader])
    pieces = by_reader[np.lexsort((reader[by_reader], turn, rank_set[by_reader]))]
    rounds[pieces] = sums_before(nbytes[pieces], rank_set[pieces]) // _ROUND_NBYTES
    return rounds
