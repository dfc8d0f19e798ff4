"""Water-filling: divisible loads spread over ranks so that the highest total is as low as possible.

The writers of a save and the readers of a load are chosen against the quotas made here. All is
integer arithmetic, so that every machine gets the same quotas.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from holdfast.arrays.types import IntArray

_MAX_SWEEPS = 64
_TOLERANCE = 1e-3
"""Sweeps end when none moves more than this share of the mean total."""


def fill(levels: IntArray, amount: int) -> IntArray:
    """Pour `amount` onto `levels` (n,), lowest first, up to a common level: what each one gets.

    Five ranks with 7, 2, 4, 9 and 2 bytes, and 10 bytes to pour:

        rank     levels   next level up costs                    gets
        1             2   nothing for the first one                 4
        4             2   0 to raise {1} to 2                       4
        2             4   4 to raise {1, 4} to 4                    2
        0             7   13 to raise {1, 4, 2} to 7: too much      0
        3             9                                             0

    Three are filled: (10 + 2 + 2 + 4) // 3 = 6 is their level; a remainder of the division goes
    one byte each to the lowest of them.
    """
    order = np.argsort(levels, kind="stable")
    height = levels[order]
    # Filling the first k to the height of the next one takes k * height[k] - sum(height[:k]).
    costs = np.arange(len(height)) * height - (np.cumsum(height) - height)
    k = int(np.searchsorted(costs, amount, side="right"))
    level, remainder = divmod(amount + int(height[:k].sum()), k)
    filled = np.zeros(len(levels), dtype=np.int64)
    # The remainder never lifts one over the next level: that would have been affordable above.
    filled[order[:k]] = level - height[:k] + (np.arange(k) < remainder)
    return filled


def fill_groups(
    levels: IntArray, groups: Sequence[IntArray], amounts: Sequence[int]
) -> list[IntArray]:
    """Pour each `amounts[i]` onto the members `groups[i]` alone, groups overlapping as they like.

    Args:
        levels: (ranks,) what each rank has already.
        groups: For each amount the ranks that may share it, as positions in `levels`.
        amounts: What each group is to divide.

    Returns:
        For each group what each of its members gets; sums to the group's amount.

    Each sweep pours every group's amount again over what the others left. That lowers the sum of
    squares of the totals, whose least value is at the most level totals there are, highest first
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
        # One byte may move back and forth between equals: that is no progress.
        if moved <= max(tolerance, 1):
            break
    return shares
