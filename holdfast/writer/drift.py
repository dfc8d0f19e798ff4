"""How an error about replicas names ranks, and how the odd ones are read from it again.

Errors move between processes as text, which is cut off where it is long. So ranks are written as
ranges, and the odd ones first.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

_ODD = re.compile(r"odd ones by majority: \[([0-9, -]+)\]")


def describe_drift(holders: Sequence[Sequence[int]]) -> str:
    """Which ranks hold which content of one box, in words.

    Args:
        holders: the ranks with equal bytes, for each content.
    """
    most, *others = sorted(holders, key=len, reverse=True)
    odd = ""
    if others and len(most) > len(others[0]):
        odd = f" (odd ones by majority: [{_ranges(rank for ranks in others for rank in ranks)}])"
    held = " | ".join(f"ranks {_ranges(ranks)}" for ranks in (most, *others))
    return f"different bytes{odd} on {held}"


def odd_ranks(message: str) -> tuple[int, ...]:
    """The ranks that an error's text names as the odd ones; empty where there is no majority."""
    named: set[int] = set()
    for each in _ODD.findall(message):
        for part in each.split(","):
            first, _, last = part.partition("-")
            named.update(range(int(first), int(last or first) + 1))
    return tuple(sorted(named))


def _ranges(ranks: Iterable[int]) -> str:
    """Ranks in order, runs of three and more as `first-last`."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(
        f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs
    )
