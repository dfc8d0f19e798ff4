"""What flows from one module to the next: activations forward, gradients backward.

Names are resolved on first use: `BridgePlan` does not import torch, the others do.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.bridge.bridge import Bridge
    from holdfast.bridge.bridged import Bridged
    from holdfast.bridge.plan import BridgePlan

__all__ = ["Bridge", "BridgePlan", "Bridged"]

_MODULES = {
    "Bridge": "holdfast.bridge.bridge",
    "BridgePlan": "holdfast.bridge.plan",
    "Bridged": "holdfast.bridge.bridged",
}


def __getattr__(name: str) -> Any:
    """Import the module of a public name on its first use."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    """The public names."""
    return __all__
