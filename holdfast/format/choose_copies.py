"""Which copy of a stored box a rank reads."""

from __future__ import annotations

import numpy as np

from holdfast.arrays.box_table import enumerate_ranges
from holdfast.arrays.types import BoolArray, IntArray
from holdfast.format.copies import Copies
from holdfast.format.index import ChunkIndex


def choose_copies(
    index: ChunkIndex,
    copies: Copies,
    rows: IntArray,
    *,
    is_own: BoolArray,
    is_near: BoolArray,
    position: int,
) -> IntArray:
    """The copy to read of each row: where the rank opens fewest files, and near ones.

    In this order: its own file; one that it opens anyway, for what is stored once; one that was
    written on its host; any. Among equals ranks begin with different copies. Copies that differ are
    not chosen from: it is the first that counts then.

    Example, TP2 and DP2: `norm` has a copy for each tp, written by ranks 2 and 3. Rank 1 (tp=1,
    dp=0) finds its shard of `linear` in the file of rank 3, and reads `norm` from there, too.

    Args:
        index: Of the checkpoint.
        copies: Its boxes that are stored more than once.
        rows: (n,) primary rows that this rank reads.
        is_own: (files,) whether this rank wrote the file.
        is_near: (files,) whether a rank of this host did.
        position: Of this rank.

    Cost: vector work over the rows and their copies; no communication.
    """
    box = copies.box_of[rows]
    # -1 finds the last box, whatever it says.
    chosen = np.flatnonzero((box >= 0) & ~copies.differs[box]) if len(copies.differs) else box[:0]
    if not len(chosen):
        return rows
    is_open = np.zeros(len(is_own), dtype=np.bool_)
    is_open[index.file[np.delete(rows, chosen)]] = True
    cost = np.where(is_own, 0, np.where(is_open, 1, np.where(is_near, 2, 3)))
    first, counts = copies.ptr[box[chosen]], np.diff(copies.ptr)[box[chosen]]
    entry, place = enumerate_ranges(counts)
    candidates = copies.row[first[entry] + place]
    turn = (place - position) % counts[entry]
    order = np.lexsort((turn, cost[index.file[candidates]], entry))
    heads = np.cumsum(counts) - counts
    read = rows.copy()
    read[chosen] = candidates[order[heads]]
    return read
