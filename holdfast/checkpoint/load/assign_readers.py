"""Who reads what: wanted blocks of a checkpoint dealt out to the ranks that ask for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from holdfast.arrays.box_table import enumerate_ranges as stretches
from holdfast.arrays.types import BoolArray as Bools
from holdfast.arrays.types import IntArray as Ints
from holdfast.arrays.water_filling import fill


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Segments:
    """Stretches of blocks, each of one row and wanted by one set of ranks; in order of blocks.

    Blocks are numbered through all rows of the index: row r has blocks `base[r]` to `base[r + 1]`.
    `asker_ptr`, `asker`: the ranks (by position) that want segment s are
    `asker[asker_ptr[s]:asker_ptr[s + 1]]`, ascending.
    """

    begin: Ints
    end: Ints
    row: Ints
    asker_ptr: Ints
    asker: Ints

    def __len__(self) -> int:
        """Number of segments."""
        return len(self.begin)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rows:
    """What assignment needs to know of the index's rows.

    `base`: (n + 1,) first block of each row. `grain`: bytes of a block, the last of a row may be
    shorter. `nbytes`, `start`, `file`: as in the index. `writer`: position of the rank that wrote
    each file, -1 where there is none.
    """

    base: Ints
    grain: int
    nbytes: Ints
    start: Ints
    file: Ints
    writer: Ints

    def byte_of(self, row: Ints, block: Ints) -> Ints:
        """Where blocks begin in the payload of their rows; a row's end for the one past it."""
        at: Ints = np.minimum((block - self.base[row]) * self.grain, self.nbytes[row])
        return at


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Shares:
    """Stretches of blocks with their readers; several may lie in one segment.

    `group`: number of the set of ranks that want it, -1 where it is wanted by its reader alone.
    """

    begin: Ints
    end: Ints
    segment: Ints
    reader: Ints
    group: Ints


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Parts:
    """Stretches of blocks inside of segments."""

    segment: Ints
    begin: Ints
    end: Ints

    def take(self, rows: Ints | Bools) -> Parts:
        """The chosen ones, in their order."""
        return Parts(segment=self.segment[rows], begin=self.begin[rows], end=self.end[rows])

    def nbytes(self, segments: Segments, rows: Rows) -> Ints:
        """(n,) bytes of each."""
        row = segments.row[self.segment]
        return rows.byte_of(row, self.end) - rows.byte_of(row, self.begin)


def assign(segments: Segments, rows: Rows, *, num_ranks: int) -> Shares:
    """Deal every segment to ranks that want it, so that all read about equally much.

    What one rank alone wants, it reads. What several want is dealt by set of ranks, small sets
    first, each poured onto the least loaded of its ranks (water-filling), cut at blocks; a rank
    takes of it first what it wrote itself, the rest goes in order of files, in long stretches.
    Within a set no rank is above the level by more than two blocks.
    Cost: linear in segments plus (number of sets) * (their sizes); no communication.
    """
    counts = np.diff(segments.asker_ptr)
    nbytes = _sizes(segments, rows)
    alone = np.flatnonzero(counts == 1)
    only = segments.asker[segments.asker_ptr[alone]]
    load = np.zeros(num_ranks, dtype=np.int64)
    np.add.at(load, only, nbytes[alone])
    found = [(segments.begin[alone], segments.end[alone], alone, only, np.full(len(alone), -1))]
    for number, (members, chosen) in enumerate(_groups(segments, counts)):
        order = np.lexsort((rows.start[segments.row[chosen]], rows.file[segments.row[chosen]]))
        dealt = _deal(chosen[order], members, segments, rows, load)
        for part, member in dealt:
            load[member] += int(part.nbytes(segments, rows).sum())
            num = len(part.segment)
            columns = (part.begin, part.end, part.segment)
            found.append((*columns, np.full(num, member), np.full(num, number)))
    begin, end, segment, reader, group = (
        np.concatenate(column).astype(np.int64) for column in zip(*found, strict=True)
    )
    order = np.lexsort((begin, segment))
    return Shares(
        begin=begin[order],
        end=end[order],
        segment=segment[order],
        reader=reader[order],
        group=group[order],
    )


def _sizes(segments: Segments, rows: Rows) -> Ints:
    end, begin = (rows.byte_of(segments.row, at) for at in (segments.end, segments.begin))
    return end - begin


def _groups(segments: Segments, counts: Ints) -> list[tuple[Ints, Ints]]:
    """(ranks, segments) of each set of several ranks: small sets first, then by first segment."""
    shared = np.flatnonzero(counts > 1)
    by_members: dict[bytes, list[int]] = {}
    begins, ends = segments.asker_ptr[shared].tolist(), segments.asker_ptr[shared + 1].tolist()
    for segment, begin, end in zip(shared.tolist(), begins, ends, strict=True):
        by_members.setdefault(segments.asker[begin:end].tobytes(), []).append(segment)
    groups = [
        (np.frombuffer(members, dtype=np.int64), np.array(chosen, dtype=np.int64))
        for members, chosen in by_members.items()
    ]
    return sorted(groups, key=lambda group: (len(group[0]), int(group[1][0])))


def _deal(
    chosen: Ints, members: Ints, segments: Segments, rows: Rows, load: Ints
) -> list[tuple[Parts, int]]:
    """One set's segments in order of files, handed out: what, to whom."""
    whole = Parts(segment=chosen, begin=segments.begin[chosen], end=segments.end[chosen])
    quota = fill(load[members], int(whole.nbytes(segments, rows).sum()))
    writer = rows.writer[rows.file[segments.row[chosen]]]
    dealt: list[tuple[Parts, int]] = []
    rest = [whole.take(~np.isin(writer, members))]
    for place, member in enumerate(members.tolist()):
        own = whole.take(writer == member)
        mine, others = _cut(own, [int(quota[place])], segments, rows)
        quota[place] -= int(mine.nbytes(segments, rows).sum())
        dealt.append((mine, member))
        rest.append(others)
    left = Parts(
        segment=np.concatenate([part.segment for part in rest]),
        begin=np.concatenate([part.begin for part in rest]),
        end=np.concatenate([part.end for part in rest]),
    )
    row = segments.row[left.segment]
    left = left.take(np.lexsort((left.begin, rows.start[row], rows.file[row])))
    bounds = np.cumsum(np.maximum(quota, 0))[:-1].tolist()
    dealt += zip(_cut(left, bounds, segments, rows), members.tolist(), strict=True)
    return [(part, member) for part, member in dealt if len(part.segment)]


def _cut(parts: Parts, at: Sequence[int], segments: Segments, rows: Rows) -> list[Parts]:
    """Parts laid end to end, cut at these bytes, each moved to the nearest end of a block."""
    if not len(parts.segment):
        return [parts] * (len(at) + 1)
    size = parts.nbytes(segments, rows)
    stop = np.cumsum(size)
    places, blocks = [], []
    for byte in at:
        place = min(int(np.searchsorted(stop, byte, side="right")), len(stop) - 1)
        inside = min(max(byte - int(stop[place] - size[place]), 0), int(size[place]))
        block, over = divmod(inside, rows.grain)
        length = min(rows.grain, int(size[place]) - block * rows.grain)
        block += int(parts.begin[place]) + (2 * over > length)
        places.append(place)
        blocks.append(min(block, int(parts.end[place])))
    # A piece begins at every part's begin and at every cut; those of no blocks fall away.
    owner = np.concatenate([np.arange(len(size)), np.array(places, dtype=np.int64)])
    begin = np.concatenate([parts.begin, np.array(blocks, dtype=np.int64)])
    order = np.lexsort((begin, owner))
    owner, begin = owner[order], begin[order]
    last = np.append(owner[1:] != owner[:-1], True)
    end = np.where(last, parts.end[owner], np.append(begin[1:], 0))
    cuts_before = np.zeros(len(owner), dtype=np.int64)
    for place, block in zip(places, blocks, strict=True):
        cuts_before += (owner > place) | ((owner == place) & (begin >= block))
    pieces = Parts(segment=parts.segment[owner], begin=begin, end=end)
    return [pieces.take((cuts_before == n) & (begin < end)) for n in range(len(at) + 1)]


def split(shares: Shares, *, most: int) -> tuple[Ints, Ints, Ints]:
    """Shares cut into pieces of at most `most` blocks: (begin, end, share) of each piece."""
    counts = -(-(shares.end - shares.begin) // most)
    share, position = stretches(counts)
    begin = shares.begin[share] + position * most
    return begin, np.minimum(begin + most, shares.end[share]), share
