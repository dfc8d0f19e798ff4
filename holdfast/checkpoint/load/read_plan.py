"""The plan of a load: requested boxes, the pieces of chunks that hold them, and who reads each.

Where ranks send each other what they read, every rank makes the plan from the same index and the
same requests, so that it is equal on all of them without communication; otherwise each rank plans
for itself. Everything is columns: no Python call per tensor.

An *overlap* is what a requested box and a chunk have in common, a *piece* a range of a chunk's
payload, whole digest blocks, that one rank reads. A *transfer* is what a piece holds of an overlap:
bytes that go to every rank that requests the box.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from holdfast.arrays.box_table import (
    BoxTable,
    concatenate,
    enumerate_ranges,
    meeting_pairs,
    unique_boxes,
)
from holdfast.arrays.distinct import distinct
from holdfast.arrays.types import BoolArray, IntArray
from holdfast.checkpoint.load.assign_readers import RequestedRanges, assign_readers
from holdfast.checkpoint.load.choose_exchange import Choose
from holdfast.format.byte_ranges import (
    PIECE_NBYTES,
    Overlaps,
    find_overlaps,
    requested_ranges,
    split_ranges,
    sums_before,
)
from holdfast.format.index import ChunkIndex
from holdfast.format.stored_copies import Copies

_ROUND_NBYTES = 64 << 20
"""Bytes of a round for one rank: bounds what it reads for others, sends and receives at a time."""
_NUM_AT_ONCE = 8
"""Reads of a rank, and of a round of it, that ought to be in progress where each is a request."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReadRequests:
    """The boxes that all ranks request, each once.

    Args:
        boxes: (n) distinct boxes, none empty, of at least one dim.
        rank_ptr: (n + 1,) box i is requested by `rank[rank_ptr[i]:rank_ptr[i + 1]]`.
        rank: Positions of ranks, ascending for each box.
    """

    boxes: BoxTable
    rank_ptr: IntArray
    rank: IntArray


def gather_requests(tables: Sequence[BoxTable]) -> tuple[ReadRequests, list[IntArray]]:
    """The boxes of all ranks, each once; and for each rank the number of each of its boxes.

    Empty boxes have number -1 and are requested by no rank. Example, box numbers in brackets:

        rank    its boxes                   numbers
        0       a [0], b [1]                0, 1
        1       b [1], empty                1, -1
        2       b [1], a [0], a [0]         1, 0, 0

    So `rank_ptr` is 0, 2, 5 and `rank` is 0, 2, 0, 1, 2.
    """
    sizes = np.array([len(table) for table in tables], dtype=np.int64)
    rank, _ = enumerate_ranges(sizes)
    everything = concatenate(tables)
    is_filled = everything.numel() > 0
    boxes, number = unique_boxes(everything.take(is_filled))
    numbers = np.full(len(everything), -1, dtype=np.int64)
    numbers[is_filled] = number
    # (box, rank) as one number, so that one sort removes repetitions and groups by box.
    num_ranks = max(len(tables), 1)
    pairs = distinct(number * num_ranks + rank[is_filled])
    pointers = np.searchsorted(pairs // num_ranks, np.arange(len(boxes) + 1))
    requests = ReadRequests(boxes=boxes, rank_ptr=pointers, rank=pairs % num_ranks)
    return requests, np.split(numbers, np.cumsum(sizes)[:-1])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReadPlan:
    """Who reads which piece in which round, and what of it goes to which requested box.

    Args:
        requests: What all ranks request.
        numbers: Of each rank's boxes in `requests`, in order; -1 for empty ones.
        overlaps: The requested boxes' overlaps with chunks.
        row: (pieces,) row of the index.
        start: (pieces,) first byte in the payload of the row.
        stop: (pieces,) byte past the end.
        reader: (pieces,) position of the rank that reads it.
        round: (pieces,) in which round it is sent; -1 for what its reader keeps for itself, which
            is read before the first round.
        own: `piece * len(numbers) + position` for each piece that is sent and each rank that has
            it in its own file: it reads the same bytes for itself, and is sent none. Ascending.
        piece: (transfers,) piece of each transfer, ascending.
        overlap: (transfers,) overlap of each transfer, ascending for each piece.
        num_rounds: How often the ranks exchange what they read.
        request_nbytes: Up to how many bytes are read at once where each read is a request; None
            elsewhere.
    """

    requests: ReadRequests
    numbers: list[IntArray]
    overlaps: Overlaps
    row: IntArray
    start: IntArray
    stop: IntArray
    reader: IntArray
    round: IntArray
    own: IntArray
    piece: IntArray
    overlap: IntArray
    num_rounds: int
    request_nbytes: int | None

    def is_needed(self, position: int) -> BoolArray:
        """(transfers,) whether a rank requests the box of each."""
        requests = self.requests
        box, _ = enumerate_ranges(np.diff(requests.rank_ptr))
        # By box, because a table of (rank, box) would grow with the number of ranks.
        is_requested = np.zeros(len(requests.boxes), dtype=np.bool_)
        is_requested[box[requests.rank == position]] = True
        is_needed: BoolArray = is_requested[self.overlaps.request[self.overlap]]
        return is_needed

    def is_received(self, piece: IntArray, position: int | IntArray) -> BoolArray:
        """(n,) whether the rank at a position receives a piece that it needs: if another reads it,
        and the rank does not have it in its own file."""
        is_own = np.isin(piece * len(self.numbers) + position, self.own)
        is_received: BoolArray = (self.reader[piece] != position) & ~is_own
        return is_received

    def kept(self, position: int) -> IntArray:
        """Which transfers a rank keeps of what it reads itself."""
        is_read = self.reader[self.piece] == position
        return np.flatnonzero(is_read & self.is_needed(position))


def plan_reads(
    index: ChunkIndex,
    tables: Sequence[BoxTable],
    *,
    itemsize: IntArray,
    writer: IntArray,
    hosts: IntArray,
    grain: int,
    max_gap: int | None = None,
    range_nbytes: int | None = None,
    copies: Copies | None = None,
    choose: Choose | None = None,
) -> ReadPlan:
    """Plan all reads of a load.

    Args:
        index: The chunk table.
        tables: What each rank requests, by position.
        itemsize: (tensors,) bytes of an element.
        writer: (files,) position of the rank that wrote each file, -1 where it is none of these.
        hosts: (ranks,) see `assign_readers`; of one rank, which reads for itself.
        grain: Reads start at multiples of so many bytes of a payload.
        max_gap: What is needed and less far apart is in one piece; None for `grain`.
        range_nbytes: Where each read is a request, bytes of a large one; None elsewhere.
        copies: The boxes that are stored more than once; None for none.
        choose: See `assign_readers`.

    Raises:
        CorruptionError: Where the chunks do not cover a requested box.

    Cost: see `assign_readers`; memory about 200 bytes for each requested box, overlap and piece.
    """
    requests, numbers = gather_requests(tables)
    # Copies of a chunk have the same bytes: which one to read is up to the reader.
    primary = np.flatnonzero((index.copy == 0) & (index.nbytes > 0))
    request, chunk = meeting_pairs(requests.boxes, index.take(primary))
    overlaps = find_overlaps(index, requests.boxes, itemsize, request=request, row=primary[chunk])
    nbytes = index.nbytes[overlaps.row]
    needed = requested_ranges(overlaps, nbytes, grain=grain, max_gap=max_gap or grain)
    ranges = _shared_ranges(overlaps, needed, requests, index)
    if len(hosts) == 1:
        nbytes_each = int((ranges.stop - ranges.start).sum())
        piece_nbytes = _request_nbytes(nbytes_each, range_nbytes)
        start, stop, owner = split_ranges(
            ranges.start, ranges.stop, grain=grain, piece_nbytes=piece_nbytes
        )
        reader, rounds = np.zeros_like(owner), np.full(len(owner), -1, dtype=np.int64)
    else:
        ranges = replace(ranges, **_owners(index, ranges.row, writer, copies))
        assignment = assign_readers(ranges, hosts=hosts, grain=grain, choose=choose)
        slices = assignment.slices
        nbytes_each = int((slices.stop - slices.start).sum()) // len(hosts)
        if range_nbytes is not None:  # of a round, too, several are read at once
            range_nbytes = min(range_nbytes, _ROUND_NBYTES // _NUM_AT_ONCE)
        piece_nbytes = _request_nbytes(nbytes_each, range_nbytes)
        start, stop, part = split_ranges(
            slices.start, slices.stop, grain=grain, piece_nbytes=piece_nbytes
        )
        owner, reader = slices.number[part], assignment.reader[part]
        rounds = _assign_rounds(assignment.rank_set[part], reader, stop - start, assignment.ranks)
    own, place = enumerate_ranges(np.where(rounds < 0, 0, np.diff(ranges.owner_ptr)[owner]))
    piece, position = enumerate_ranges(np.diff(ranges.overlap_ptr)[owner])
    return ReadPlan(
        requests=requests,
        numbers=numbers,
        overlaps=overlaps,
        row=ranges.row[owner],
        start=start,
        stop=stop,
        reader=reader,
        round=rounds,
        own=own * len(tables) + ranges.owner[ranges.owner_ptr[owner[own]] + place],
        piece=piece,
        overlap=ranges.overlap[ranges.overlap_ptr[owner[piece]] + position],
        num_rounds=int(rounds.max(initial=-1)) + 1,
        request_nbytes=piece_nbytes,
    )


def _request_nbytes(nbytes: int, range_nbytes: int | None) -> int | None:
    """Return the bytes of a request of a rank that reads so many: as large as leaves work for all
    threads. None where reads are not requests."""
    if range_nbytes is None:
        return None
    return max(min(nbytes // _NUM_AT_ONCE, range_nbytes), PIECE_NBYTES)


def _shared_ranges(
    overlaps: Overlaps,
    needed: tuple[IntArray, IntArray, IntArray],
    requests: ReadRequests,
    index: ChunkIndex,
) -> RequestedRanges:
    """The needed ranges of all overlaps, cut where the set of overlaps that need them changes.

    Example, one payload in blocks of 10 bytes; overlap 0 (bytes 0 to 40) is requested by rank 0,
    overlap 1 (bytes 20 to 50) by ranks 0 and 1, overlap 2 (bytes 20 to 40) by rank 2:

        range       overlaps    requested by
        [0, 20)     0           0
        [20, 40)    0, 1, 2     0, 1, 2
        [40, 50)    1           0, 1
    """
    # One number for each byte of all payloads: row r has bytes base[r] to base[r + 1].
    base = np.concatenate([[0], np.cumsum(index.nbytes)])
    start, stop, owner = needed
    at = base[overlaps.row[owner]]
    start, stop = at + start, at + stop
    order = np.argsort(start, kind="stable")
    if (start[order[1:]] >= stop[order[:-1]]).all():
        # No two need a byte in common: so are nearly all requests of one rank.
        start, stop, overlap = start[order], stop[order], owner[order]
        overlap_ptr = np.arange(len(order) + 1)
    else:
        points = distinct(np.concatenate([start, stop]))
        # Each needed range covers intervals between neighbouring points: (interval, overlap)
        # pairs, as one number each, so that sorting groups them by interval.
        first, last = np.searchsorted(points, start), np.searchsorted(points, stop)
        which, position = enumerate_ranges(last - first)
        num_overlaps = max(len(overlaps.row), 1)
        pairs = distinct((first[which] + position) * num_overlaps + owner[which])
        interval, overlap = pairs // num_overlaps, pairs % num_overlaps
        chosen = distinct(interval)
        overlap_ptr = np.searchsorted(interval, np.append(chosen, len(points)))
        start, stop = points[chosen], points[chosen + 1]
    # The same once more for (range, rank).
    request = overlaps.request[overlap]
    entry, position = enumerate_ranges(requests.rank_ptr[request + 1] - requests.rank_ptr[request])
    rank = requests.rank[requests.rank_ptr[request[entry]] + position]
    num_ranks = int(requests.rank.max(initial=0)) + 1
    number, _ = enumerate_ranges(np.diff(overlap_ptr))
    pairs = distinct(number[entry] * num_ranks + rank)
    row = overlaps.row[overlap[overlap_ptr[:-1]]]
    return RequestedRanges(
        row=row,
        start=start - base[row],
        stop=stop - base[row],
        file=index.file[row],
        payload=index.start[row],
        owner_ptr=np.zeros(len(start) + 1, dtype=np.int64),
        owner=np.empty(0, dtype=np.int64),
        overlap_ptr=overlap_ptr,
        overlap=overlap,
        rank_ptr=np.searchsorted(pairs // num_ranks, np.arange(len(start) + 1)),
        rank=pairs % num_ranks,
    )


def _owners(
    index: ChunkIndex, row: IntArray, writer: IntArray, copies: Copies | None
) -> dict[str, IntArray]:
    """Who wrote a file that has each row, or a copy of it; as `RequestedRanges` has it."""
    num_ranks = int(writer.max(initial=0)) + 1
    number, stored = np.arange(len(row)), row
    if copies is not None:
        box = copies.box_of[row]
        # Of copies that differ only the first is read.
        has_copies = (box >= 0) & ~copies.differs[box]
        counts = np.where(has_copies, np.diff(copies.ptr)[box], 1)
        number, place = enumerate_ranges(counts)
        is_copy = has_copies[number]
        stored = row[number]
        stored[is_copy] = copies.row[copies.ptr[box[number[is_copy]]] + place[is_copy]]
    owner = writer[index.file[stored]]
    pairs = distinct((number * num_ranks + owner)[owner >= 0])
    return {
        "owner_ptr": np.searchsorted(pairs // num_ranks, np.arange(len(row) + 1)),
        "owner": pairs % num_ranks,
    }


def _assign_rounds(
    rank_set: IntArray, reader: IntArray, nbytes: IntArray, ranks: Sequence[IntArray]
) -> IntArray:
    """The round of each piece: `_ROUND_NBYTES` for each rank, the readers of a set taking turns.

    A set starts when all of its ranks have finished the sets before it; so sets without a rank in
    common are sent in the same rounds, and a rank is in one set at a time. Example, one set with
    readers 0 and 1, pieces of 40 bytes and rounds of 100:

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
    begin = np.zeros(len(ranks), dtype=np.int64)
    finished: dict[int, int] = {}
    of_set = np.bincount(rank_set[shared], nbytes[shared], len(ranks)).astype(np.int64)
    for number, members in enumerate(ranks):
        listed = members.tolist()
        begin[number] = max(finished.get(rank, 0) for rank in listed)
        finished.update(dict.fromkeys(listed, int(begin[number] + of_set[number])))
    before = begin[rank_set[pieces]] + sums_before(nbytes[pieces], rank_set[pieces])
    rounds[pieces] = before // _ROUND_NBYTES
    return rounds
