"""Which ranks hold other bytes than their replicas, and how an error names them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def odd_ranks(holders: Sequence[Sequence[int]]) -> list[int]:
    """The ranks that do not hold what most ranks hold; empty if there is no majority.

    Args:
        holders: the ranks with equal bytes, for each content.
    """
    most, *others = sorted(holders, key=len, reverse=True)
    if not others or len(most) == len(others[0]):
        return []
    return sorted(rank for ranks in others for rank in ranks)


def describe_drift(holders: Sequence[Sequence[int]]) -> str:
    """Which ranks hold which content of one box, in words; `holders` as for `odd_ranks`.

    A message is cut off when it is long, so the odd ranks come first.
    """
    named = odd_ranks(holders)
    odd = f" (odd ones by majority: [{_ranges(named)}])" if named else ""
    ordered = sorted(holders, key=len, reverse=True)
    return f"different bytes{odd} on {' | '.join(f'ranks {_ranges(ranks)}' for ranks in ordered)}"


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
