"""Ascending ranks as nested ranges, so that claims do not grow with the number of ranks.

The ranks with equal coordinates along some axes of a layout are a product of ranges. With TP2, DP4
and PP2, tp varying fastest, the ranks that differ along dp alone are

    0 2 4 6           bases 0   steps (2, 4)
    8 10 12 14        bases 8   steps (2, 4)

and those along tp and pp together

    0 1 8 9           bases 0   steps (1, 2), (8, 2)

Ranks that are not a product have several bases: 0 1 4 5 7 8 is (0, 4, 7) with steps (1, 2).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator

import msgspec
import numpy as np


class RankRanges(msgspec.Struct, frozen=True, array_like=True):
    """Ranks in ascending order; equal ranks give equal ranges."""

    bases: tuple[int, ...]
    """First rank of each block, ascending."""
    steps: tuple[tuple[int, int], ...]
    """Stride and count of each level of a block, from the innermost; counts are above 1."""

    @classmethod
    def of(cls, ranks: Iterable[int]) -> RankRanges:
        """Return the ranges of ascending ranks.

        Cost: O(number of ranks) vector work.
        """
        heads = np.array(list(ranks), dtype=np.int64)
        steps = []
        # Each round folds the innermost level: runs of equal length and stride become their heads.
        while len(heads) > 1:
            gaps = np.diff(heads)
            other = np.flatnonzero(gaps != gaps[0])
            count = int(other[0]) + 1 if len(other) else len(heads)
            if len(heads) % count:
                break
            blocks = heads.reshape(-1, count)
            if (blocks - blocks[:, :1] != blocks[0] - blocks[0, 0]).any():
                break
            steps.append((int(gaps[0]), count))
            heads = blocks[:, 0]
        return cls(bases=tuple(heads.tolist()), steps=tuple(steps))

    def __contains__(self, rank: int) -> bool:
        """Return True if `rank` is among these. Cost: O(levels), and a bisection of the bases."""
        number = bisect_right(self.bases, rank) - 1
        if number < 0:
            return False
        left = rank - self.bases[number]
        # Inner levels do not reach the next step of an outer one, since the ranks ascend.
        for stride, count in reversed(self.steps):
            left -= min(left // stride, count - 1) * stride
        return left == 0

    def __iter__(self) -> Iterator[int]:
        """Iterate over the ranks."""
        ranks = np.array(self.bases, dtype=np.int64)
        for stride, count in reversed(self.steps):
            ranks = (ranks[:, None] + np.arange(count) * stride).reshape(-1)
        return iter(ranks.tolist())

    def __len__(self) -> int:
        """Return the number of ranks."""
        number = len(self.bases)
        for _, count in self.steps:
            number *= count
        return number
