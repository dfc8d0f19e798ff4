"""Copies of chunks: the rows of an index that are copies, drift, and which copy to read."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from holdfast.arrays.box_table import enumerate_ranges
from holdfast.arrays.distinct import distinct
from holdfast.arrays.types import BoolArray, IntArray
from holdfast.format.index import ChunkIndex, describe_row
from holdfast.format.manifest import Manifest

_MAX_NAMED = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyPolicy:
    """The choice of what is stored more than once."""

    axes: tuple[str, ...] = ()
    """Axes of the layout: one copy for each coordinate of the holders along them; empty for no
    copies."""
    max_fraction: float = 1.0
    """Limit of the bytes that copies add, as a fraction of the bytes without them."""
    max_nbytes: int | None = None
    """The largest tensor that is copied, in bytes of the whole; None for no limit."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Copies:
    """The boxes that are stored more than once.

    Args:
        ptr: (n + 1,) box i is stored in rows `row[ptr[i]:ptr[i + 1]]`.
        row: Rows of the index, by number of the copy: the primary first.
        box_of: (rows of the index,) the box of each row; -1 if the box is stored once.
        differs: (n,) True if any copy has other digests than the primary.
    """

    ptr: IntArray
    row: IntArray
    box_of: IntArray
    differs: BoolArray

    def of_row(self, row: int) -> list[int]:
        """Return all rows with the box of a row and the same bytes, the row itself first."""
        box = int(self.box_of[row])
        if box < 0 or self.differs[box]:
            return [row]
        rows: list[int] = self.row[self.ptr[box] : self.ptr[box + 1]].tolist()
        return [row, *(each for each in rows if each != row)]

    def drift(self, index: ChunkIndex, manifest: Manifest, rows: IntArray | None = None) -> str:
        """Describe the copies that differ from their primaries; empty if none does.

        Args:
            index: Index of the checkpoint.
            manifest: Manifest of the checkpoint.
            rows: Rows to whose boxes the description is limited; None for all.
        """
        chosen = np.flatnonzero(self.differs)
        if rows is not None:
            chosen = np.intersect1d(chosen, distinct(self.box_of[rows]), assume_unique=True)
        sentences = []
        for box in chosen[:_MAX_NAMED].tolist():
            primary, *others = self.row[self.ptr[box] : self.ptr[box + 1]].tolist()
            words = index.digests(primary)
            odd = [row for row in others if not np.array_equal(index.digests(row), words)]
            where = "; ".join(_place(index, manifest, row) for row in (primary, *odd))
            sentences.append(f"{describe_row(index, manifest, primary)}: copies differ: {where}")
        more = len(chosen) - _MAX_NAMED
        return ". ".join(sentences) + (f"; and {more} more" if more > 0 else "")


def find_copies(index: ChunkIndex) -> Copies:
    """Find the copies in an index.

    Cost: vector work over the rows of tensors that have copies, and over their digests.
    """
    has_copies = np.zeros(int(index.tensor.max(initial=-1)) + 1, dtype=np.bool_)
    has_copies[index.tensor[index.copy > 0]] = True
    rows = np.flatnonzero(has_copies[index.tensor])
    boxes = np.column_stack([index.tensor, index.offset, index.extent])[rows]
    order = np.lexsort((index.copy[rows], *boxes.T[::-1]))
    # Sorted by box, then by number of the copy: equal boxes are neighbours, their primary is first.
    rows, boxes = rows[order], boxes[order]
    heads = np.flatnonzero(
        np.concatenate(
            [np.ones(min(len(rows), 1), np.bool_), (boxes[1:] != boxes[:-1]).any(axis=1)]
        )
    )
    counts = np.diff(np.append(heads, len(rows)))
    several = counts > 1
    rows, counts = rows[np.repeat(several, counts)], counts[several]
    box_of = np.full(index.num_rows, -1, dtype=np.int64)
    box, _ = enumerate_ranges(counts)
    box_of[rows] = box
    ptr = np.concatenate([[0], np.cumsum(counts)])
    return Copies(ptr=ptr, row=rows, box_of=box_of, differs=_differing(index, rows, ptr, box))


def _differing(index: ChunkIndex, rows: IntArray, ptr: IntArray, box: IntArray) -> BoolArray:
    """Return (boxes,) True if a copy has other digests than the primary."""
    begin, counts = index.digest_ptr[rows], np.diff(index.digest_ptr)[rows]
    primary = ptr[:-1][box]
    # In a proven index they have equally many; this index may not be proven yet.
    is_odd = counts != counts[primary]
    # Every digest of every copy, next to the digest of the same block of the primary.
    entry, block = enumerate_ranges(np.where(is_odd, 0, counts))
    words = index.digest[begin[entry] + block]
    is_odd[entry[words != index.digest[begin[primary[entry]] + block]]] = True
    differs = np.zeros(len(ptr) - 1, dtype=np.bool_)
    differs[box[is_odd]] = True
    return differs


def _place(index: ChunkIndex, manifest: Manifest, row: int) -> str:
    """Describe the file of a row, and the rank that wrote it."""
    file = manifest.files[int(index.file[row])]
    return f"{file.name} of rank {file.writer}"


def choose_copies(
    index: ChunkIndex,
    copies: Copies,
    rows: IntArray,
    *,
    is_own: BoolArray,
    is_near: BoolArray,
    position: int,
) -> IntArray:
    """Choose the copy of each row that this rank reads, so that it opens few and near files.

    The order of preference: its own file; a file that it opens anyway, for boxes that are stored
    once; a file written on its host; any other. Among equals, different ranks take different
    copies. If copies differ, the primary is read.

    Example with TP2 and DP2: `norm` has a copy for each tp, written by ranks 2 and 3. Rank 1 (tp=1,
    dp=0) has its shard of `linear` in the file of rank 3, and reads `norm` from there, too.

    Args:
        index: Index of the checkpoint.
        copies: Its boxes that are stored more than once.
        rows: (n,) primary rows that this rank reads.
        is_own: (files,) True if this rank wrote the file.
        is_near: (files,) True if a rank of this host wrote the file.
        position: Position of this rank.

    Cost: vector work over the rows and their copies; no communication.
    """
    box = copies.box_of[rows]
    # A row without copies has box -1, which indexes the last box: the first test excludes it.
    chosen = np.flatnonzero((box >= 0) & ~copies.differs[box]) if len(copies.differs) else box[:0]
    if not len(chosen):
        return rows
    is_open = np.zeros(len(is_own), dtype=np.bool_)
    is_open[index.file[np.delete(rows, chosen)]] = True
    cost = np.where(is_own, 0, np.where(is_open, 1, np.where(is_near, 2, 3)))
    # All copies of the chosen boxes end to end: `entry` is the position in `chosen`, `place` the
    # number of the copy. Sorted by entry, cost and turn, the head of each entry is its best copy.
    first, counts = copies.ptr[box[chosen]], np.diff(copies.ptr)[box[chosen]]
    entry, place = enumerate_ranges(counts)
    candidates = copies.row[first[entry] + place]
    # Ranks start at different copies, so that equal costs spread over the files.
    turn = (place - position) % counts[entry]
    order = np.lexsort((turn, cost[index.file[candidates]], entry))
    heads = np.cumsum(counts) - counts
    read = rows.copy()
    read[chosen] = candidates[order[heads]]
    return read
