"""Small arithmetic over ranks, how they are written in messages, and what is looked up in them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from holdfast.arguments import check_int
from holdfast.errors import LayoutError, PlanError


def shorten_ranks(ranks: Sequence[int]) -> str:
    """Ranks for a message: a range where they are one, at most 16 of them otherwise."""
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[0] + len(ranks))):
        return f"{ranks[0]}-{ranks[-1]}"
    shown = ", ".join(map(str, ranks[:16]))
    return shown if len(ranks) <= 16 else f"{shown}, ... ({len(ranks)} in all)"


def disagreement(
    operation: str, what: str, values: Sequence[object], *, ranks: Sequence[int]
) -> PlanError:
    """The error for ranks with different values of what must be one; names the ranks of each."""
    ranks_by_value: dict[object, list[int]] = {}
    for rank, value in zip(ranks, values, strict=True):
        ranks_by_value.setdefault(value, []).append(rank)
    text = "; ".join(
        f"{value} on rank{'s' if len(held) > 1 else ''} {shorten_ranks(held)}"
        for value, held in ranks_by_value.items()
    )
    return PlanError(f"{operation}: the ranks disagree on {what}: {text}")


def checked_size(field: str, value: int, name: str) -> int:
    """Return a size of the layout `name`; raise LayoutError if it is not an integer above 0."""
    return check_int(value, name=f"Layout {name!r}: {field}", least=1, error=LayoutError)


def checked_ranks(ranks: Sequence[int] | None, world: int, name: str) -> tuple[int, ...]:
    """The ranks of the layout `name`, by default the first `world`; LayoutError if wrong."""
    if ranks is None:
        return tuple(range(world))
    try:
        numbers = tuple(operator.index(rank) for rank in ranks)
    except TypeError:
        raise LayoutError(f"Layout {name!r}: ranks must be whole numbers, got {ranks!r}.") from None
    negative = [rank for rank in numbers if rank < 0]
    if negative:
        raise LayoutError(f"Layout {name!r}: ranks must not be negative, got {negative}.")
    if len(set(numbers)) != len(numbers):
        twice = sorted({rank for rank in numbers if numbers.count(rank) > 1})
        raise LayoutError(f"Layout {name!r}: ranks {twice} are in the list more than once.")
    return numbers


def sums_of_strides(axes: Iterable[tuple[int, int]]) -> list[int]:
    """Every sum of index * stride, the first axis fastest."""
    steps = [0]
    for size, stride in axes:
        steps = [step + index * stride for index in range(size) for step in steps]
    return steps


class Lookups:
    """What a layout computes once, at its first use; no part of its value, nor of a copy."""

    __slots__ = ("_position_of", "_strides_of")
    _position_of: dict[int, int]
    _strides_of: dict[tuple[str, ...], dict[str, tuple[int, int]]]

    def _once(self, name: str, compute: Callable[[], Any]) -> Any:
        """The value of the lookup `name`, computed the first time."""
        try:
            return getattr(self, name)
        except AttributeError:
            object.__setattr__(self, name, compute())  # a layout is frozen
            return getattr(self, name)
