"""Layouts, the communicators of a layout, and agreement between its ranks.

In comes a `Layout`: axis sizes, their order and the ranks they span. Out come its communicators,
each verified member by member and looked up by name (`groups/`), and a `Control` by which its ranks
agree within a deadline (`control/`). Nothing here knows what a checkpoint is.

Read first: `layout.py`, the arithmetic; `groups/process_groups.py`, what callers use;
`control/control.py`, on which every collective of a save or load is built.

Names are resolved on first use: `Layout` does not import torch, the others do.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.errors import shorten_ranks
    from holdfast.parallel.control.control import Control
    from holdfast.parallel.groups.module_groups import ModuleGroups
    from holdfast.parallel.groups.process_groups import ProcessGroups, current_groups
    from holdfast.parallel.layout import Layout
    from holdfast.parallel.module_layouts import ModuleLayouts, ModuleRole

__all__ = [
    "Control",
    "Layout",
    "ModuleGroups",
    "ModuleLayouts",
    "ModuleRole",
    "ProcessGroups",
    "current_groups",
    "shorten_ranks",
]


_MODULES = {
    "Control": "holdfast.parallel.control.control",
    "Layout": "holdfast.parallel.layout",
    "ModuleGroups": "holdfast.parallel.groups.module_groups",
    "ModuleLayouts": "holdfast.parallel.module_layouts",
    "ModuleRole": "holdfast.parallel.module_layouts",
    "ProcessGroups": "holdfast.parallel.groups.process_groups",
    "current_groups": "holdfast.parallel.groups.process_groups",
    "shorten_ranks": "holdfast.errors",
}


def __getattr__(name: str) -> Any:
    """Import the module of a public name on its first use."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    """Return the public names."""
    return __all__
