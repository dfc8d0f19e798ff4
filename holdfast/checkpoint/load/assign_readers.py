"""Which rank reads which bytes of a load whose ranks share what they read.

Every rank computes the same from the same ranges, without communication. Everything is columns: no
Python call per tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from holdfast.arrays.box_table import enumerate_ranges
from holdfast.arrays.types import BoolArray, IntArray
from holdfast.arrays.water_filling import fill
from holdfast.checkpoint.load.choose_exchange import Choose

_SLACK_SHARE = 32
"""A rank may read more than its share by this fraction of it if the excess is in its own file."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RequestedRanges:
    """Byte ranges of chunks' payloads, each requested by one set of ranks; n ranges, disjoint.

    Ranges start at a block of their payload and end at one or with the payload. Ranks are given by
    their position among the ranks of the load.

    Args:
        row: (n,) row of the index.
        start: (n,) first byte in the payload of that row.
        stop: (n,) byte past the end.
        file: (n,) data file of the row.
        payload: (n,) byte of the file where the payload begins.
        owner_ptr: (n + 1,) copies of range i lie in files that were written by
            `owner[owner_ptr[i]:owner_ptr[i + 1]]`.
        owner: Ranks, ascending for each range, of those that are here.
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
    owner_ptr: IntArray
    owner: IntArray
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
        rank_set: (n,) number of the set of ranks that request it; -1 where its reader keeps it for
            itself, so that nothing is sent.
        ranks: Of each set, ascending.
    """

    slices: Slices
    reader: IntArray
    rank_set: IntArray
    ranks: Sequence[IntArray]


def assign_readers(
    ranges: RequestedRanges, *, hosts: IntArray, grain: int, choose: Choose | None = None
) -> ReaderAssignment:
    """Assign every range to ranks that request it, so that all read about equally much.

    What ranks of one host alone request, each of them reads: they share its page cache. What ranks
    of several hosts request is read once if `choose` says so, and divided set by set, small ones
    first, because large ones have more freedom to even out: the bytes of a set are filled onto its
    least loaded ranks, cut between blocks. A rank is assigned what it wrote itself first (it opens
    that file anyway, and may still have it in its page cache), and all of it where that exceeds
    its share by a little only; then long stretches in order of files. No rank of a set is above
    the level by more than two blocks, or 1/32 of its share.

    Example, three ranks, ranges of 60 bytes:

        requested by    before       filled      after
        0               0, 0, 0      60          60, 0, 0
        1, 2            60, 0, 0     30, 30      60, 30, 30
        0, 1, 2         60, 30, 30   0, 30, 30   60, 60, 60

    Args:
        ranges: What is requested by which ranks.
        hosts: (ranks,) number of the host of each rank; all different where ranks of one host are
            to share what they read, too.
        grain: Bytes of a block; ranges are cut at multiples of it.
        choose: See `Choose`; None: everything that ranks of several hosts request is sent.

    Cost: linear in the ranges, plus the sum of the sizes of all sets; no communication.
    """
    # What is not shared is fixed; its load counts when the rest is divided.
    counts = np.diff(ranges.rank_ptr)
    whole = Slices(number=np.arange(len(ranges.row)), start=ranges.start, stop=ranges.stop)
    host = hosts[ranges.rank]
    is_on_first = host == host[ranges.rank_ptr[:-1]].repeat(counts)
    is_shared = np.bincount(whole.number.repeat(counts), ~is_on_first, len(counts)) > 0
    rank_sets = _rank_sets(ranges, is_shared)
    if choose is not None and rank_sets:
        is_sent = choose([_size(each, whole, ranges) for each in rank_sets])
        for (_, numbers), sent in zip(rank_sets, is_sent, strict=True):
            is_shared[numbers] = sent
        rank_sets = [each for each, sent in zip(rank_sets, is_sent, strict=True) if sent]
    alone, place = enumerate_ranges(np.where(is_shared, 0, counts))
    reader = ranges.rank[ranges.rank_ptr[alone] + place]
    load = np.zeros(len(hosts), dtype=np.int64)
    np.add.at(load, reader, whole.nbytes[alone])
    assigned = [(whole.take(alone), reader, np.full(len(alone), -1, dtype=np.int64))]
    for rank_set, (ranks, numbers) in enumerate(rank_sets):
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
        ranks=[ranks for ranks, _ in rank_sets],
    )


def _rank_sets(ranges: RequestedRanges, is_shared: BoolArray) -> list[tuple[IntArray, IntArray]]:
    """(ranks, ranges) of each set of ranks that share ranges: small sets first, then by range."""
    shared = np.flatnonzero(is_shared)
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


def _size(
    rank_set: tuple[IntArray, IntArray], whole: Slices, ranges: RequestedRanges
) -> tuple[IntArray, int, int]:
    """(ranks, bytes, data files) of what a set of ranks shares."""
    ranks, numbers = rank_set
    return ranks, int(whole.nbytes[numbers].sum()), len(np.unique(ranges.file[numbers]))


def _divide(
    whole: Slices, ranks: IntArray, ranges: RequestedRanges, load: IntArray, grain: int
) -> list[tuple[Slices, int]]:
    """Divide the ranges of one set among its ranks: (slices, rank), none empty."""
    whole = whole.take(ranges.file_order(whole.number, whole.start))
    load = load[ranks]
    quota = fill(load, int(whole.nbytes.sum()))
    slack = max(grain, int(quota.mean()) // _SLACK_SHARE)
    owner = _nearest(whole, ranks, ranges)
    assigned: list[tuple[Slices, int]] = []
    rest = [whole.take(owner < 0)]
    # First pass: every rank about up to its quota from its own files; second pass: the rest.
    for i in np.unique(owner[owner >= 0]).tolist():
        own = whole.take(owner == i)
        nbytes = int(own.nbytes.sum())
        most = nbytes if nbytes <= quota[i] + slack else int(quota[i])
        own, others = _cut(own, [most], grain)
        load[i] += int(own.nbytes.sum())
        assigned.append((own, int(ranks[i])))
        rest.append(others)
    left = _concatenate(rest)
    left = left.take(ranges.file_order(left.number, left.start))
    if len(left.number):
        # A quota may be exceeded by less than a block: that rank is assigned nothing more.
        at = np.cumsum(fill(load, int(left.nbytes.sum())))[:-1].tolist()
        assigned += zip(_cut(left, at, grain), ranks.tolist(), strict=True)
    return [(slices, rank) for slices, rank in assigned if len(slices.number)]


def _nearest(whole: Slices, ranks: IntArray, ranges: RequestedRanges) -> IntArray:
    """(n,) for each range the position in `ranks` of one that has it in its own file; -1 for none.

    Where several have a copy, they take turns by bytes: the first of two gets the first half.
    """
    counts = np.diff(ranges.owner_ptr)[whole.number]
    entry, place = enumerate_ranges(counts)
    owner = ranges.owner[ranges.owner_ptr[whole.number][entry] + place]
    position = np.minimum(np.searchsorted(ranks, owner), len(ranks) - 1)
    is_here = ranks[position] == owner
    entry, position = entry[is_here], position[is_here]
    counts = np.bincount(entry, minlength=len(counts))
    first = np.cumsum(counts) - counts
    nbytes = whole.nbytes
    before = (np.cumsum(nbytes) - nbytes) / max(int(nbytes.sum()), 1)
    nearest = np.full(len(counts), -1, dtype=np.int64)
    has = np.flatnonzero(counts > 0)
    turn = np.minimum((before[has] * counts[has]).astype(np.int64), counts[has] - 1)
    nearest[has] = position[first[has] + turn]
    return nearest


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
    # Parts start where a slice starts and at every cut; those without bytes are left out below.
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
    """All slices, in order."""
    return Slices(
        number=np.concatenate([each.number for each in slices]),
        start=np.concatenate([each.start for each in slices]),
        stop=np.concatenate([each.stop for each in slices]),
    )
