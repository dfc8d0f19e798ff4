"""The plan of a load: which rank reads which bytes, and to which ranks it sends them.

Every rank makes the plan from the same index and the same requests; so it is equal on all of them
without communication. Everything is columns: no Python call per tensor.

An *overlap* is what a requested box and a chunk have in common, a *piece* a range of a chunk's
payload, whole digest blocks, that one rank reads. A *transfer* is what a piece holds of an overlap:
bytes that go to every rank that requests the box.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from holdfast.arrays.box_table import enumerate_ranges, meeting_pairs
from holdfast.arrays.types import BoolArray, IntArray
from holdfast.arrays.water_filling import fill
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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RequestedRanges:
    """Byte ranges of chunks' payloads, each requested by one set of ranks; n ranges, disjoint.

    Ranges begin at a block of their payload and end at one or with the payload. Ranks are given by
    their position among the ranks of the load.

    Args:
        row: (n,) row of the index.
        start: (n,) first byte in the payload of that row.
        stop: (n,) byte past the end.
        file: (n,) data file of the row.
        payload: (n,) byte of the file where the payload begins.
        writer: (n,) rank that wrote the file, -1 where it is not among the ranks.
        overlap_ptr: (n + 1,) range i holds bytes of `overlap[overlap_ptr[i]:overlap_ptr[i + 1]]`.
        overlap: Overlaps of requested boxes and chunks, ascending for each range.
        rank_ptr: (n + 1,) range i is requested by `rank[rank_ptr[i]:rank_ptr[i + 1]]`.
        rank: Ranks, ascending for each range.
    """

    row: IntArray
    start: IntArray
    stop: IntArray
    file: IntArray
    payload: IntArray
    writer: IntArray
    overlap_ptr: IntArray
    overlap: IntArray
    rank_ptr: IntArray
    rank: IntArray

    def file_order(self, number: IntArray, start: IntArray) -> IntArray:
        """The order to read in: that of the files and of the bytes in them."""
        return np.lexsort((start, self.payload[number], self.file[number]))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Slices:
    """Slices of requested ranges: bytes [`start`, `stop`) of range `number`, all (n,)."""

    number: IntArray
    start: IntArray
    stop: IntArray

    @property
    def nbytes(self) -> IntArray:
        """(n,) bytes of each."""
        return self.stop - self.start

    def take(self, chosen: IntArray | BoolArray) -> Slices:
        """The chosen ones, in their order."""
        return Slices(number=self.number[chosen], start=self.start[chosen], stop=self.stop[chosen])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReaderAssignment:
    """Which rank reads each slice; the slices of a range cover it, in order of the bytes.

    Args:
        slices: (n) what is read.
        reader: (n,) by which rank.
        rank_set: (n,) number of the set of ranks that request it; -1 where its reader is the only
            one, so that nothing is sent.
    """

    slices: Slices
    reader: IntArray
    rank_set: IntArray


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
    # Copies of a chunk have the same bytes: which one to read is up to the reader.
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
    # The n-th pieces of all readers come next to each other: all of them read in every round.
    turn = sums_before(ones, rank_set[by_reader], reader[by_reader])
    pieces = by_reader[np.lexsort((reader[by_reader], turn, rank_set[by_reader]))]
    rounds[pieces] = sums_before(nbytes[pieces], rank_set[pieces]) // _ROUND_NBYTES
    return rounds


def assign_readers(ranges: RequestedRanges, *, num_ranks: int, grain: int) -> ReaderAssignment:
    """Assign every range to ranks that request it, so that all read about equally much.

    What one rank alone requests, it reads. What several request is divided set of ranks by set,
    small sets first, because large ones have more freedom to even out: the bytes of a set are
    filled onto its least loaded ranks, cut between blocks. A rank is assigned what it wrote itself
    first (it may still be in its page cache), then long stretches in order of files. No rank of a
    set is above the level by more than two blocks.

    Example, three ranks, ranges of 60 bytes:

        requested by    before       filled      after
        0               0, 0, 0      60          60, 0, 0
        1, 2            60, 0, 0     30, 30      60, 30, 30
        0, 1, 2         60, 30, 30   0, 30, 30   60, 60, 60

    Cost: linear in the ranges, plus the sum of the sizes of all sets; no communication.
    """
    # What is requested by one rank is fixed; its load counts when the rest is divided.
    counts = np.diff(ranges.rank_ptr)
    whole = Slices(number=np.arange(len(ranges.row)), start=ranges.start, stop=ranges.stop)
    alone = np.flatnonzero(counts == 1)
    only = ranges.rank[ranges.rank_ptr[alone]]
    load = np.zeros(num_ranks, dtype=np.int64)
    np.add.at(load, only, whole.nbytes[alone])
    assigned = [(whole.take(alone), only, np.full(len(alone), -1, dtype=np.int64))]
    for rank_set, (ranks, numbers) in enumerate(_rank_sets(ranges, counts)):
        for slices, rank in _divide(whole.take(numbers), ranks, ranges, load, grain):
            load[rank] += int(slices.nbytes.sum())
            n = len(slices.number)
            assigned.append((slices, np.full(n, rank), np.full(n, rank_set)))
    slices = _concatenate([slices for slices, _, _ in assigned])
    # In order of the bytes, so that the pieces of a range come one after the other.
    order = np.lexsort((slices.start, slices.number))
    return ReaderAssignment(
        slices=slices.take(order),
        reader=np.concatenate([reader for _, reader, _ in assigned])[order],
        rank_set=np.concatenate([rank_set for _, _, rank_set in assigned])[order],
    )


def _rank_sets(ranges: RequestedRanges, counts: IntArray) -> list[tuple[IntArray, IntArray]]:
    """(ranks, ranges) of each set of several ranks: small sets first, then by first range."""
    shared = np.flatnonzero(counts > 1)
    # Ranks as bytes: a hash of some bytes is faster than one of a tuple of numbers.
    by_ranks: dict[bytes, list[int]] = {}
    begins, ends = ranges.rank_ptr[shared].tolist(), ranges.rank_ptr[shared + 1].tolist()
    for number, begin, end in zip(shared.tolist(), begins, ends, strict=True):
        by_ranks.setdefault(ranges.rank[begin:end].tobytes(), []).append(number)
    sets = [
        (np.frombuffer(ranks, dtype=np.int64), np.array(numbers, dtype=np.int64))
        for ranks, numbers in by_ranks.items()
    ]
    # Every rank must divide the sets in the same order: ties are decided by the first range.
    return sorted(sets, key=lambda each: (len(each[0]), int(each[1][0])))


def _divide(
    whole: Slices, ranks: IntArray, ranges: RequestedRanges, load: IntArray, grain: int
) -> list[tuple[Slices, int]]:
    """Divide the ranges of one set among its ranks: (slices, rank), none empty."""
    whole = whole.take(ranges.file_order(whole.number, whole.start))
    quota = fill(load[ranks], int(whole.nbytes.sum()))
    writer = ranges.writer[whole.number]
    assigned: list[tuple[Slices, int]] = []
    rest = [whole.take(~np.isin(writer, ranks))]
    # First pass: every rank up to its quota from its own files; second pass: the rest in order.
    for i, rank in enumerate(ranks.tolist()):
        own, others = _cut(whole.take(writer == rank), [int(quota[i])], grain)
        quota[i] -= int(own.nbytes.sum())
        assigned.append((own, rank))
        rest.append(others)
    left = _concatenate(rest)
    left = left.take(ranges.file_order(left.number, left.start))
    # A quota may be exceeded by less than a block: that rank is assigned nothing more.
    at = np.cumsum(np.maximum(quota, 0))[:-1].tolist()
    assigned += zip(_cut(left, at, grain), ranks.tolist(), strict=True)
    return [(slices, rank) for slices, rank in assigned if len(slices.number)]


def _cut(slices: Slices, at: Sequence[int], grain: int) -> list[Slices]:
    """Cut slices, laid end to end, at these bytes, each moved to the nearest boundary of a block.

    Example: slices of 40 and 30 bytes in blocks of 10, cut at 18, 44 and 64:

        cut at    lies in                moved to     gives
        18        slice 0, byte 18       20           slice 0 [0, 20)
        44        slice 1, byte 4        0            slice 0 [20, 40)
        64        slice 1, byte 24       20           slice 1 [0, 20)
        (end)                                         slice 1 [20, 30)

    Returns:
        One more than there are cuts; some may be empty.
    """
    if not len(slices.number):
        return [slices] * (len(at) + 1)
    size = slices.nbytes
    end = np.cumsum(size)
    cuts: list[tuple[int, int]] = []
    for byte in at:
        which = min(int(np.searchsorted(end, byte, side="right")), len(end) - 1)
        inside = min(max(byte - int(end[which] - size[which]), 0), int(size[which]))
        below = inside // grain * grain
        above = min(below + grain, int(size[which]))
        nearest = above if 2 * (inside - below) > above - below else below
        cuts.append((which, int(slices.start[which]) + nearest))
    # Parts begin where a slice begins and at every cut; those without bytes are left out below.
    cut_columns = np.array(cuts, dtype=np.int64).reshape(-1, 2)
    owner = np.concatenate([np.arange(len(size)), cut_columns[:, 0]])
    start = np.concatenate([slices.start, cut_columns[:, 1]])
    order = np.lexsort((start, owner))
    owner, start = owner[order], start[order]
    is_last = np.append(owner[1:] != owner[:-1], True)
    stop = np.where(is_last, slices.stop[owner], np.append(start[1:], 0))
    # A part belongs to the result numbered by the cuts before it.
    cuts_before = np.zeros(len(owner), dtype=np.int64)
    for which, byte in cuts:
        cuts_before += (owner > which) | ((owner == which) & (start >= byte))
    parts = Slices(number=slices.number[owner], start=start, stop=stop)
    return [parts.take((cuts_before == n) & (start < stop)) for n in range(len(at) + 1)]


def _concatenate(slices: Sequence[Slices]) -> Slices:
    return Slices(
        number=np.concatenate([each.number for each in slices]),
        start=np.concatenate([each.start for each in slices]),
        stop=np.concatenate([each.stop for each in slices]),
    )
