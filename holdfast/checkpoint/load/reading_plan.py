"""The plan of a load: which bytes of which rows each rank reads, and to whom it hands them on.

Made on every rank from the same records and the same requests, hence equal on all of them without
another word. Everything is columns: no Python call per tensor.

A *pair* is a box asked for and a chunk that it meets. A *piece* is a range of a chunk's payload,
whole digest blocks, that one rank reads. A *delivery* is what a piece has for a pair.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from holdfast.arrays.box_table import (
    BoxTable,
    Runs,
    meeting_pairs,
    runs_in,
    unique_boxes,
)
from holdfast.arrays.box_table import enumerate_ranges as stretches
from holdfast.arrays.boxes import Box, cover
from holdfast.arrays.types import BoolArray as Bools
from holdfast.arrays.types import IntArray as Ints
from holdfast.checkpoint.load.assign_readers import Rows, Segments, assign, split
from holdfast.errors import CorruptionError
from holdfast.format.index import ChunkIndex

_PIECE_NBYTES = 4 << 20
_ROUND_NBYTES = 64 << 20
"""Bytes read in a round for one set of ranks: bounds what each of them holds and receives."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Requests:
    """What all ranks ask for.

    `boxes`: distinct, not empty, with at least one dim. Box q is asked for by the ranks (positions)
    `asker[asker_ptr[q]:asker_ptr[q + 1]]`, ascending.
    """

    boxes: BoxTable
    asker_ptr: Ints
    asker: Ints


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pairs:
    """Boxes asked for and the primary chunks that they meet; sorted by box, then row.

    `stored`: how the common part lies in the chunk, `wanted`: in the box asked for, both in
    elements. `lo`, `extent`: the common box; `chunk_lo`, `chunk_extent`: the chunk. `itemsize`:
    bytes of an element.
    """

    request: Ints
    row: Ints
    lo: Ints
    extent: Ints
    chunk_lo: Ints
    chunk_extent: Ints
    stored: Runs
    wanted: Runs
    itemsize: Ints

    def __len__(self) -> int:
        """Number of pairs."""
        return len(self.request)

    def common(self, pair: int) -> Box:
        """What box and chunk have in common."""
        return Box(tuple(self.lo[pair].tolist()), tuple(self.extent[pair].tolist()))

    def chunk(self, pair: int) -> Box:
        """The chunk of a pair."""
        return Box(tuple(self.chunk_lo[pair].tolist()), tuple(self.chunk_extent[pair].tolist()))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReadingPlan:
    """Who reads which piece in which round, and what of it goes to which box.

    Piece p is bytes [`start[p]`, `stop[p]`) of the payload of row `row[p]`, read by the rank at
    position `reader[p]` in round `round[p]`; -1 is before all rounds, for what nobody else wants.
    Delivery i: pair `pair[i]` wants something of piece `piece[i]`; sorted by piece, then pair.
    """

    requests: Requests
    pairs: Pairs
    row: Ints
    start: Ints
    stop: Ints
    reader: Ints
    round: Ints
    piece: Ints
    pair: Ints
    num_rounds: int


def gather_requests(asked: Sequence[BoxTable]) -> tuple[Requests, list[Ints]]:
    """The ranks' boxes, each once; and for each rank the number of each of its boxes.

    Empty boxes have number -1 and are asked for by nobody.
    """
    sizes = np.array([len(boxes) for boxes in asked], dtype=np.int64)
    everything = BoxTable(
        tensor=np.concatenate([boxes.tensor for boxes in asked]),
        offset=np.concatenate([boxes.offset for boxes in asked]),
        extent=np.concatenate([boxes.extent for boxes in asked]),
    )
    rank, _ = stretches(sizes)
    filled: Bools = np.all(everything.extent > 0, axis=1)
    boxes, number = unique_boxes(everything.take(filled))
    numbers = np.full(len(everything), -1, dtype=np.int64)
    numbers[filled] = number
    num_ranks = max(len(asked), 1)
    claims = np.unique(number * num_ranks + rank[filled])
    pointers = np.searchsorted(claims // num_ranks, np.arange(len(boxes) + 1))
    requests = Requests(boxes=boxes, asker_ptr=pointers, asker=claims % num_ranks)
    return requests, np.split(numbers, np.cumsum(sizes)[:-1])


def plan_reading(
    index: ChunkIndex, requests: Requests, *, itemsize: Ints, writer: Ints, num_ranks: int,
    grain: int,
) -> ReadingPlan:  # fmt: skip
    """Plan the reading of all requests.

    `itemsize`: by tensor. `writer`: position of the rank that wrote each file, -1 for none here.
    `grain`: bytes in whose multiples is read; the digests' blocks, where they are checked.
    Raises CorruptionError where the chunks do not cover a box. Cost: see `assign`; memory about
    200 bytes for each box, chunk met and piece.
    """
    pairs = _pair(index, requests.boxes, itemsize)
    rows = Rows(
        base=np.concatenate([[0], np.cumsum(-(-index.nbytes // grain))]),
        grain=grain,
        nbytes=index.nbytes,
        start=index.start,
        file=index.file,
        writer=writer,
    )
    segments, pair_ptr, pair_of = _segments(pairs, requests, rows)
    shares = assign(segments, rows, num_ranks=num_ranks)
    begin, end, share = split(shares, most=max(1, _PIECE_NBYTES // grain))
    segment = shares.segment[share]
    row = segments.row[segment]
    start, stop = rows.byte_of(row, begin), rows.byte_of(row, end)
    rounds = _rounds(shares.group[share], shares.reader[share], stop - start)
    piece, position = stretches(pair_ptr[segment + 1] - pair_ptr[segment])
    return ReadingPlan(
        requests=requests,
        pairs=pairs,
        row=row,
        start=start,
        stop=stop,
        reader=shares.reader[share],
        round=rounds,
        piece=piece,
        pair=pair_of[pair_ptr[segment[piece]] + position],
        num_rounds=int(rounds.max(initial=-1)) + 1,
    )


def _pair(index: ChunkIndex, boxes: BoxTable, itemsize: Ints) -> Pairs:
    primary = np.flatnonzero((index.copy == 0) & (index.nbytes > 0))
    offset, extent = widen(index.offset, 0), widen(index.extent, 1)
    chunks = BoxTable(tensor=index.tensor[primary], offset=offset[primary], extent=extent[primary])
    request, chunk = meeting_pairs(boxes, chunks)
    row = primary[chunk]
    lo = np.maximum(boxes.offset[request], offset[row])
    hi = np.minimum(boxes.offset[request] + boxes.extent[request], offset[row] + extent[row])
    covered = np.zeros(len(boxes), dtype=np.int64)
    np.add.at(covered, request, (hi - lo).prod(axis=1))
    short = np.flatnonzero(covered != boxes.numel())
    if len(short):
        q = int(short[0])
        raise CorruptionError(
            f"tensor {int(boxes.tensor[q])} of the manifest: {int(boxes.numel()[q] - covered[q])} "
            f"elements of the box at {boxes.offset[q].tolist()}, size {boxes.extent[q].tolist()}, "
            f"are covered by no chunk"
        )
    return Pairs(
        request=request,
        row=row,
        lo=lo,
        extent=hi - lo,
        chunk_lo=offset[row],
        chunk_extent=extent[row],
        stored=runs_in(lo, hi - lo, offset[row], extent[row]),
        wanted=runs_in(lo, hi - lo, boxes.offset[request], boxes.extent[request]),
        itemsize=itemsize[index.tensor[row]],
    )


def widen(columns: Ints, value: int) -> Ints:
    """Columns of boxes with at least one dim."""
    if columns.shape[1]:
        return columns
    return np.full((len(columns), 1), value, dtype=np.int64)


def _segments(pairs: Pairs, requests: Requests, rows: Rows) -> tuple[Segments, Ints, Ints]:
    """Blocks wanted, cut where the set of pairs changes; and the pairs of each segment."""
    first, last, owner = _wanted_blocks(pairs, rows)
    points = np.unique(np.concatenate([first, last]))
    lo, hi = np.searchsorted(points, first), np.searchsorted(points, last)
    interval, position = stretches(hi - lo)
    num_pairs = max(len(pairs), 1)
    incidence = np.unique((lo[interval] + position) * num_pairs + owner[interval])
    place, pair_of = incidence // num_pairs, incidence % num_pairs
    chosen = np.unique(place)
    segment_of = np.searchsorted(chosen, place)
    pair_ptr = np.searchsorted(segment_of, np.arange(len(chosen) + 1))
    request = pairs.request[pair_of]
    entry, position = stretches(requests.asker_ptr[request + 1] - requests.asker_ptr[request])
    asker = requests.asker[requests.asker_ptr[request[entry]] + position]
    num_ranks = int(requests.asker.max(initial=0)) + 1
    claims = np.unique(segment_of[entry] * num_ranks + asker)
    segments = Segments(
        begin=points[chosen],
        end=points[np.minimum(chosen + 1, len(points) - 1)],
        row=pairs.row[pair_of[pair_ptr[:-1]]],
        asker_ptr=np.searchsorted(claims // num_ranks, np.arange(len(chosen) + 1)),
        asker=claims % num_ranks,
    )
    return segments, pair_ptr, pair_of


def _wanted_blocks(pairs: Pairs, rows: Rows) -> tuple[Ints, Ints, Ints]:
    """(first block, block past the last, pair) of every stretch that holds wanted bytes."""
    size, grain = pairs.itemsize, rows.grain
    start = pairs.stored.start * size
    stop = start + pairs.stored.hull * size
    sparse = np.flatnonzero(pairs.stored.max_gap * size >= grain)
    dense = pairs.stored.max_gap * size < grain
    base = rows.base[pairs.row]
    firsts = [(base + start // grain)[dense]]
    lasts = [(base - (-stop // grain))[dense]]
    owners = [np.flatnonzero(dense)]
    for pair in sparse.tolist():
        # Gaps of a block and more are left out: as many stretches as there are runs between them.
        item = int(size[pair])
        runs, span = cover(pairs.common(pair), pairs.chunk(pair), max_gap=(grain - 1) // item)
        firsts.append(base[pair] + runs * item // grain)
        lasts.append(base[pair] - (-(runs + span) * item // grain))
        owners.append(np.full(len(runs), pair))
    return np.concatenate(firsts), np.concatenate(lasts), np.concatenate(owners)


def _rounds(group: Ints, reader: Ints, nbytes: Ints) -> Ints:
    """The round of each piece: per set of ranks so many bytes, its readers taking turns."""
    rounds = np.full(len(group), -1, dtype=np.int64)
    shared = np.flatnonzero(group >= 0)
    if not len(shared):
        return rounds
    by_reader = shared[np.lexsort((shared, reader[shared], group[shared]))]
    turn = _running(np.ones(len(by_reader), dtype=np.int64), group[by_reader], reader[by_reader])
    order = np.lexsort((reader[by_reader], turn, group[by_reader]))
    pieces = by_reader[order]
    before = _running(nbytes[pieces], group[pieces])
    rounds[pieces] = before // _ROUND_NBYTES
    return rounds


def _running(values: Ints, *keys: Ints) -> Ints:
    """The sum of the values before each within its stretch of equal keys."""
    new = np.zeros(len(values), dtype=np.bool_)
    new[:1] = True
    for key in keys:
        new[1:] |= key[1:] != key[:-1]
    before = np.cumsum(values) - values
    result: Ints = before - before[np.flatnonzero(new)][np.cumsum(new) - 1]
    return result
