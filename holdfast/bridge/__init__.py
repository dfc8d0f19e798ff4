"""The data flow between modules: activations forward, gradients backward.

In come the tokens of a source module's samples, on the ranks of its last stage; out comes a
`Bridged` on the ranks of the destination's first stage, with the samples of that data rank. In the
backward gradients take the same way back. Sizes are agreed before a byte is sent, so a mistake on
one rank is an error on every rank of the edge.

Read first: `bridge_plan.py`, which rank gives which samples to which; `bridge.py`, what callers
use; `crossing.py`, one forward and the backward that belongs to it.

Names are resolved on first use: `BridgePlan` does not import torch, the others do.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.bridge.bridge import Bridge
    from holdfast.bridge.bridge_plan import BridgePlan
    from holdfast.bridge.bridged import Bridged

__all__ = ["Bridge", "BridgePlan", "Bridged"]

_MODULES = {
    "Bridge": "holdfast.bridge.bridge",
    "BridgePlan": "holdfast.bridge.bridge_plan",
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
