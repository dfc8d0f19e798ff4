"""How an error about replicas names the odd ranks, and how they are read from it again.

Errors move between processes as text, so the text is what all ranks have.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_ODD = re.compile(r"\(the odd ones by majority: \[([0-9, ]+)\]\)")


def describe_odd_ranks(ranks: Iterable[int]) -> str:
    """The ranks that hold other bytes than most replicas, in words."""
    return f"(the odd ones by majority: {sorted(ranks)})"


def odd_ranks(message: str) -> tuple[int, ...]:
    """The ranks that an error's text names as the odd ones; empty where there is no majority."""
    named = {int(rank) for each in _ODD.findall(message) for rank in each.split(",")}
    return tuple(sorted(named))
