"""Index sets of one dim as ordered intervals, and the boxes that a product of them makes.

Shards that `torch.chunk` cuts are one interval of each dim; strided shards, which are cut along one
axis inside of the pieces of another, are several.
"""

from __future__ import annotations

import itertools

from holdfast.arrays.boxes import Box

Intervals = tuple[tuple[int, int], ...]
"""Ordered half-open intervals of one dim: the global indices that a local dim holds, in order."""


def shard_intervals(
    intervals: Intervals, *, num_chunks: int, index: int, split_factor: int = 1
) -> Intervals:
    """The `index`-th of `num_chunks` pieces of an index set, cut as `torch.chunk` cuts.

    With a `split_factor` the piece that torch's `_StridedShard` gives: the set is cut into so many
    pieces, and each of them again.

    Source: torch.distributed.tensor `_StridedShard._split_tensor` (first split, second split,
    concatenation of the `index`-th pieces). Eight rows over two ranks:

        split_factor  rank 0       rank 1
        1             0 1 2 3      4 5 6 7
        2             0 1 | 4 5    2 3 | 6 7
        4             0|2|4|6      1|3|5|7
    """
    pieces: list[tuple[int, int]] = []
    for part in range(split_factor):
        outer = _chunk(intervals, split_factor, part)
        for start, stop in _chunk(outer, num_chunks, index):
            if pieces and pieces[-1][1] == start:
                start = pieces.pop()[0]
            pieces.append((start, stop))
    return tuple(pieces)


def boxes_of(intervals: tuple[Intervals, ...]) -> list[tuple[Box, tuple[slice, ...]]]:
    """The boxes that a product of per-dim index sets makes, each with its place in the local."""
    per_dim: list[list[tuple[int, int, slice]]] = []
    for pieces in intervals:
        stops = itertools.accumulate(stop - start for start, stop in pieces)
        per_dim.append(
            [
                (start, stop - start, slice(end - (stop - start), end))
                for (start, stop), end in zip(pieces, stops, strict=True)
            ]
        )
    return [
        (Box(tuple(c[0] for c in chosen), tuple(c[1] for c in chosen)), tuple(c[2] for c in chosen))
        for chosen in itertools.product(*per_dim)
    ]


def _chunk(intervals: Intervals, num_chunks: int, index: int) -> Intervals:
    """The positions of an ordered index set that `torch.chunk` puts into one of its pieces."""
    size = -(-num_positions(intervals) // num_chunks)
    return cut_intervals(intervals, size * index, size * (index + 1))


def cut_intervals(intervals: Intervals, start: int, stop: int) -> Intervals:
    """The positions [start, stop) of an ordered index set.

    Of ((0, 4), (8, 12)), whose positions 0…7 are the indices 0 1 2 3 8 9 10 11:

        start  stop   cut
        0      4      (0, 4)
        2      6      (2, 4), (8, 10)
        4      8      (8, 12)
        7      8      (11, 12)
        3      3      nothing
    """
    cut: list[tuple[int, int]] = []
    position = 0
    for first, last in intervals:
        low, high = max(start - position, 0), min(stop - position, last - first)
        if low < high:
            cut.append((first + low, first + high))
        position += last - first
    return tuple(cut)


def num_positions(intervals: Intervals) -> int:
    """How many positions an index set has."""
    return sum(stop - start for start, stop in intervals)
