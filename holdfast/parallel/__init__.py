"""Layouts, the communicators of a layout, and agreement between its ranks.

Names are resolved on first use: `Layout` does not import torch, the others do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.parallel.control.control import Control
    from holdfast.parallel.groups.process_groups import ProcessGroups, current_groups
    from holdfast.parallel.layout import Layout

__all__ = ["Control", "Layout", "ProcessGroups", "current_groups"]


def __getattr__(name: str) -> Any:
    """Import the room of a public name when it is first asked for."""
    if name == "Layout":
        from holdfast.parallel.layout import Layout

        return Layout
    if name == "Control":
        from holdfast.parallel.control.control import Control

        return Control
    if name in ("ProcessGroups", "current_groups"):
        from holdfast.parallel.groups import process_groups as groups

        return getattr(groups, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
