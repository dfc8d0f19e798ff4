"""Which rank reads which bytes of a load whose ranks share what they read.

Every rank computes the same from the same ranges, without communication. Everything is columns: no
Python call per tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from holdfast.arrays.box_table import enumerate_ranges
from holdfast.arrays.distinct import distinct
from holdfast.arrays.types import BoolArray, IntArray
from holdfast.arrays.water_filling import fill
from holdfast.checkpoint.load.choose_exchange import Choose

_MAX_SHARES = 2
"""A rank sends at most so many times its share of a set; the others read the rest of what it owns
once more."""


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
    """Which rank reads each slice; in order of the ranges and their bytes.

    The slices of a range that are sent cover it once; what ranks read for themselves comes on top.

    Args:
        slices: (n) what is read.
        reader: (n,) by which rank.
        rank_set: (n,) number of the set of ranks that request it: those that do not own it receive
            it; -1 where its reader keeps it for itself, so that nothing is sent.
        ranks: Of each set, ascending.
    """

    slices: Slices
    reader: IntArray
    rank_set: IntArray
    ranks: Sequence[IntArray]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Owners:
    """The ranks that request a range and have it in their own file.

    Range i has `rank[ptr[i]:ptr[i + 1]]`, ascending.
    """

    ptr: IntArray
    rank: IntArray

    def of(self, number: IntArray) -> tuple[IntArray, IntArray]:
        """(place in `number`, rank) of each owner of these ranges."""
        entry, place = enumerate_ranges(np.diff(self.ptr)[number])
        return entry, self.rank[self.ptr[number][entry] + place]


def assign_readers(
    ranges: RequestedRanges, *, hosts: IntArray, grain: int, choose: Choose | None = None
) -> ReaderAssignment:
    """Assign every range to ranks that request it, so that all read about equally much.

    What ranks of one host alone request, each of them reads: they share its page cache. So does
    each rank what its own file has (it opens that file anyway, and may still have it in its page
    cache): it receives none of that. What ranks of several hosts request is read once for all
    others if `choose` says so, and divided set by set, small ones first, because large ones have
    more freedom to even out. A rank sends what it owns, up to twice its share of the set; the rest
    is filled onto the least loaded ranks, cut between blocks, in long stretches in order of files.
    No rank that reads more than it owns is above the level by more than two blocks.

    Example, three ranks, ranges of 60 bytes:

        requested by    before       filled      after
        0               0, 0, 0      60          60, 0, 0
        1, 2            60, 0, 0     30, 30      60, 30, 30
        0, 1, 2         60, 30, 30   0, 30, 30   60, 60, 60

    If rank 0 owns the last range, it reads all 60 bytes and sends 40 of them to ranks 1 and 2,
    each of which reads 10 of the others and sends them to the other one.

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
    owners = _requesting_owners(ranges)
    is_shared &= np.diff(owners.ptr) < counts
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
    # An owner reads all that it owns, however much of it is sent.
    shared = np.flatnonzero(is_shared)
    entry, owner = owners.of(shared)
    np.add.at(load, owner, whole.nbytes[shared[entry]])
    assigned = [(whole.take(alone), reader, np.full(len(alone), -1, dtype=np.int64))]
    for rank_set, (ranks, numbers) in enumerate(rank_sets):
        for slices, rank in _divide(whole.take(numbers), ranks, owners, ranges, load, grain):
            n = len(slices.number)
            assigned.append((slices, np.full(n, rank), np.full(n, rank_set)))
    return _read_own(assigned, owners, counts, [ranks for ranks, _ in rank_sets])


def _requesting_owners(ranges: RequestedRanges) -> _Owners:
    """The owners of each range that request it."""
    num_ranks = int(max(ranges.rank.max(initial=0), ranges.owner.max(initial=0))) + 1
    numbers = np.arange(len(ranges.row))
    requested = numbers.repeat(np.diff(ranges.rank_ptr)) * num_ranks + ranges.rank
    owned = numbers.repeat(np.diff(ranges.owner_ptr)) * num_ranks + ranges.owner
    both = np.intersect1d(requested, owned, assume_unique=True)
    ptr = np.searchsorted(both // num_ranks, np.arange(len(ranges.row) + 1))
    return _Owners(ptr=ptr, rank=both % num_ranks)


def _read_own(
    assigned: Sequence[tuple[Slices, IntArray, IntArray]],
    owners: _Owners,
    num_requesting: IntArray,
    ranks: Sequence[IntArray],
) -> ReaderAssignment:
    """Add the reads of owners, for themselves, of what another rank reads for the others.

    Args:
        assigned: Slices, their readers, and the set of each.
        owners: That request each range.
        num_requesting: Ranks that request each range.
        ranks: Of each set.
    """
    slices = _concatenate([slices for slices, _, _ in assigned])
    reader = np.concatenate([reader for _, reader, _ in assigned])
    rank_set = np.concatenate([rank_set for _, _, rank_set in assigned])
    shared = np.flatnonzero(rank_set >= 0)
    entry, owner = owners.of(slices.number[shared])
    entry = shared[entry]
    is_other = owner != reader[entry]
    entry, owner = entry[is_other], owner[is_other]
    # A reader that all other ranks do without keeps the slice for itself.
    num_others = num_requesting[slices.number] - 1 - np.bincount(entry, minlength=len(reader))
    rank_set[num_others == 0] = -1
    slices = _concatenate([slices, slices.take(entry)])
    reader = np.concatenate([reader, owner])
    rank_set = np.concatenate([rank_set, np.full(len(entry), -1, dtype=np.int64)])
    # In order of the bytes, so that the pieces of a range come one after the other.
    order = np.lexsort((slices.start, slices.number))
    return ReaderAssignment(
        slices=slices.take(order), reader=reader[order], rank_set=rank_set[order], ranks=ranks
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
    return ranks, int(whole.nbytes[numbers].sum()), len(distinct(ranges.file[numbers]))


def _divide(
    whole: Slices,
    ranks: IntArray,
    owners: _Owners,
    ranges: RequestedRanges,
    load: IntArray,
    grain: int,
) -> list[tuple[Slices, int]]:
    """Divide the ranges of one set among its ranks: (slices, rank), none empty; adds to `load`."""
    whole = whole.take(ranges.file_order(whole.number, whole.start))
    # To send what it reads anyway costs an owner no read, but its connection is not wider.
    most = max(_MAX_SHARES * int(whole.nbytes.sum()) // len(ranks), grain)
    giver = _senders(whole, ranks, owners)
    assigned: list[tuple[Slices, int]] = []
    rest = [whole.take(giver < 0)]
    # First pass: every rank sends what it owns; second pass: the rest.
    for i in distinct(giver[giver >= 0]).tolist():
        own, others = _cut(whole.take(giver == i), [most], grain)
        assigned.append((own, int(ranks[i])))
        rest.append(others)
    left = _concatenate(rest)
    left = left.take(ranges.file_order(left.number, left.start))
    if len(left.number):
        # A quota may be exceeded by less than a block: that rank is assigned nothing more.
        at = np.cumsum(fill(load[ranks], int(left.nbytes.sum())))[:-1].tolist()
        parts = _cut(left, at, grain)
        load[ranks] += [int(part.nbytes.sum()) for part in parts]
        assigned += zip(parts, ranks.tolist(), strict=True)
    return [(slices, rank) for slices, rank in assigned if len(slices.number)]


def _senders(whole: Slices, ranks: IntArray, owners: _Owners) -> IntArray:
    """(n,) for each range the position in `ranks` of an owner that is to send it; -1 for none.

    Where several have a copy, they take turns by bytes: the first of two gets the first half.
    """
    counts = np.diff(owners.ptr)[whole.number]
    nbytes = whole.nbytes
    before = (np.cumsum(nbytes) - nbytes) / max(int(nbytes.sum()), 1)
    giver = np.full(len(counts), -1, dtype=np.int64)
    has = np.flatnonzero(counts > 0)
    turn = np.minimum((before[has] * counts[has]).astype(np.int64), counts[has] - 1)
    giver[has] = np.searchsorted(ranks, owners.rank[owners.ptr[whole.number[has]] + turn])
    return giver


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
