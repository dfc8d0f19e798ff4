"""Reference models, written once for one process and split over given groups.

Public names are resolved on first use, so that reading a configuration never imports torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from holdfast.reference.models.config import GPTConfig, check_layout
    from holdfast.reference.models.gpt import GPT
    from holdfast.reference.models.parallelize import ParallelGPT

__all__ = ["GPT", "GPTConfig", "ParallelGPT", "check_layout"]


def __getattr__(name: str) -> object:
    if name in ("GPTConfig", "check_layout"):
        return getattr(import_module("holdfast.reference.models.config"), name)
    if name == "GPT":
        return import_module("holdfast.reference.models.gpt").GPT
    if name == "ParallelGPT":
        return import_module("holdfast.reference.models.parallelize").ParallelGPT
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
