"""Loads that are divided come as level as any division makes them, by brute force."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.arrays.water_filling import fill, fill_groups


@given(st.lists(st.integers(0, 50), min_size=1, max_size=6), st.integers(0, 200))
def test_filling_reaches_the_lowest_highest_level(levels: list[int], amount: int) -> None:
    filled = fill(np.array(levels), amount)
    assert filled.sum() == amount
    assert (filled >= 0).all()
    totals = np.array(levels) + filled
    heights = sorted(levels)
    lowest = min(
        max(heights[n - 1], -(-(amount + sum(heights[:n])) // n)) for n in range(1, len(levels) + 1)
    )
    if amount:
        assert totals[filled > 0].max() == lowest


def test_the_example_of_the_docstring() -> None:
    assert fill(np.array([7, 2, 4, 9, 2]), 10).tolist() == [0, 4, 2, 0, 4]


@given(st.lists(st.integers(0, 10_000), min_size=1, max_size=5), st.data())
@settings(max_examples=100, deadline=None)
def test_groups_are_levelled_together(levels: list[int], data: st.DataObject) -> None:
    """Against the bound over sets of ranks; nothing is lost, nothing negative."""
    count = len(levels)
    members = data.draw(
        st.lists(st.sets(st.integers(0, count - 1), min_size=1), min_size=1, max_size=4)
    )
    groups = [np.array(sorted(each), dtype=np.int64) for each in members]
    amounts = [data.draw(st.integers(0, 10_000)) for _ in members]
    shares = fill_groups(np.array(levels), groups, amounts)
    totals = np.array(levels)
    for group, share, amount in zip(groups, shares, amounts, strict=True):
        assert (share >= 0).all()
        assert share.sum() == amount
        totals[group] += share
    # What only the ranks of a set may take is divided among them at best (maximum flow is minimum
    # cut), so that no division has a lower highest total than the mean over the worst set.
    best = 0.0
    for n in range(1, count + 1):
        for chosen in itertools.combinations(range(count), n):
            inside = sum(a for a, m in zip(amounts, members, strict=True) if m <= set(chosen))
            best = max(best, (inside + sum(levels[i] for i in chosen)) / n)
    assert totals.max() <= best + 0.02 * max(totals.mean(), 1.0) + 1
