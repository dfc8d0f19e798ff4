"""Index sets of one dim as ordered intervals, and the boxes that a product of them makes.

A shard cut as by `torch.chunk` is one interval of each dim. A strided shard, which is cut along one
axis inside the pieces of another, is several. Spans of memory are intervals, too: `overlapping`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from holdfast.arrays.boxes import Box

T = TypeVar("T")
Intervals = tuple[tuple[int, int], ...]
"""Ordered half-open intervals: the global indices of a local dim, in order."""


def shard_intervals(
    intervals: Intervals, *, num_chunks: int, index: int, split_factor: int = 1
) -> Intervals:
    """Return the `index`-th of `num_chunks` pieces of an index set, cut as by `torch.chunk`.

    With a `split_factor` it is the piece of torch's `_StridedShard`: the set is first cut into that
    many pieces, and then each of them.

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
    """Return the boxes of a product of per-dim index sets, each with its local slices."""
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
    """Return one piece of an ordered index set, cut as by `torch.chunk`."""
    size = -(-num_positions(intervals) // num_chunks)
    return cut_intervals(intervals, size * index, size * (index + 1))


def cut_intervals(intervals: Intervals, start: int, stop: int) -> Intervals:
    """Return the positions [start, stop) of an ordered index set.

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
    """Return the number of positions of an index set."""
    return sum(stop - start for start, stop in intervals)


def overlapping(items: Iterable[T], *, span: Callable[[T], tuple[int, int]]) -> Iterator[list[T]]:
    """Yield items in groups whose spans overlap, directly or through others, by their starts.

    Args:
        items: In any order; those of equal spans keep theirs.
        span: Returns the half-open span of one.
    """
    group: list[T] = []
    end = 0
    # An item that starts behind the end of all before it overlaps none of them, and neither does
    # any item after it. So it opens the next group.
    for item in sorted(items, key=span):
        start, stop = span(item)
        if group and start >= end:
            yield group
            group, end = [], 0
        group.append(item)
        end = max(end, stop)
    if group:
        yield group
