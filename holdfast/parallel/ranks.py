"""Ranks in messages: written short, and side by side if they disagree."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.errors import PlanError


def shorten_ranks(ranks: Sequence[int]) -> str:
    """Return ranks for a message: as a range if they are one, else at most 16 of them."""
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[0] + len(ranks))):
        return f"{ranks[0]}-{ranks[-1]}"
    shown = ", ".join(map(str, ranks[:16]))
    return shown if len(ranks) <= 16 else f"{shown}, ... ({len(ranks)} in all)"


def disagreement(
    operation: str, what: str, values: Sequence[object], *, ranks: Sequence[int]
) -> PlanError:
    """Return the error for ranks whose values must be equal and differ; it names each one's."""
    ranks_by_value: dict[object, list[int]] = {}
    for rank, value in zip(ranks, values, strict=True):
        ranks_by_value.setdefault(value, []).append(rank)
    text = "; ".join(
        f"{value} on rank{'s' if len(held) > 1 else ''} {shorten_ranks(held)}"
        for value, held in ranks_by_value.items()
    )
    return PlanError(f"{operation}: the ranks disagree on {what}: {text}")
