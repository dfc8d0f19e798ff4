"""Parts and members of them, for frameworks that name each entry of a state by one path."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

TOP = "top"
"""The part of entries whose path has a single name."""


def part_of(path: Sequence[Any]) -> str:
    """Return the part that an entry belongs to: the first name on its path."""
    return str(path[0]) if len(path) > 1 else TOP


def member_of(path: Sequence[Any]) -> str:
    """Return the name of an entry within its part."""
    return ".".join(map(str, path[1:] if len(path) > 1 else path))
