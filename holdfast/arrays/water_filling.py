"""Water-filling: divisible loads spread over ranks so that the highest total is as low as possible.

The quotas made here decide the writers of a save and the readers of a load. All arithmetic is on
integers, so that every machine computes the same quotas.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from holdfast.arrays.types import IntArray

_MAX_SWEEPS = 64
_TOLERANCE = 1e-3
"""Sweeps end once a sweep moves at most this share of the mean total."""


def fill(levels: IntArray, amount: int) -> IntArray:
    """Pour `amount` onto `levels` (n,), lowest first, up to a common level; return the shares.

    Five ranks with 7, 2, 4, 9 and 2 bytes, and 10 bytes to pour:

        rank     levels   next level up costs                    gets
        1             2   nothing for the first one                 4
        4             2   0 to raise {1} to 2                       4
        2             4   4 to raise {1, 4} to 4                    2
        0             7   13 to raise {1, 4, 2} to 7: too much      0
        3             9                                             0

    Three are filled, to the level (10 + 2 + 2 + 4) // 3 = 6. The remainder of the division goes to
    the lowest of them, one byte each.
    """
    order = np.argsort(levels, kind="stable")
    height = levels[order]
    # Filling the first k to the height of the next one takes k * height[k] - sum(height[:k]).
    costs = np.arange(len(height)) * height - (np.cumsum(height) - height)
    k = int(np.searchsorted(costs, amount, side="right"))
    level, remainder = divmod(amount + int(height[:k].sum()), k)
    filled = np.zeros(len(levels), dtype=np.int64)
    # The remainder lifts none over the next level: then the next one would have been filled, too.
    filled[order[:k]] = level - height[:k] + (np.arange(k) < remainder)
    return filled


def fill_groups(
    levels: IntArray, groups: Sequence[IntArray], amounts: Sequence[int]
) -> list[IntArray]:
    """Pour each `amounts[i]` onto the members `groups[i]` alone; groups may overlap.

    Args:
        levels: (ranks,) load that each rank has already.
        groups: For each amount the ranks that may share it, as positions in `levels`.
        amounts: Load that each group divides.

    Returns:
        For each group the shares of its members, which sum to the group's amount.

    Each sweep pours every group's amount again onto the totals without it. This lowers the sum of
    squares of the totals, whose minimum has the most level totals possible, highest first
    (Fujishige 1980, lexicographically optimal bases).

    Cost: at most 64 sweeps, each O(members of all groups).
    """
    totals = levels.copy()
    shares = []
    for members, amount in zip(groups, amounts, strict=True):
        share = fill(np.zeros(len(members), dtype=np.int64), amount)
        totals[members] += share
        shares.append(share)
    tolerance = _TOLERANCE * max(float(totals.mean()), 1.0)
    for _ in range(_MAX_SWEEPS):
        moved = 0
        for i, members in enumerate(groups):
            others = totals[members] - shares[i]
            share = fill(others, amounts[i])
            moved = max(moved, int(np.abs(share - shares[i]).max()))
            totals[members] = others + share
            shares[i] = share
        # One byte may move back and forth between equals, which is not progress.
        if moved <= max(tolerance, 1):
            break
    return shares
