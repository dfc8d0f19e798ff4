"""A place for checkpoints that costs little."""

from __future__ import annotations

from tests.crash.conftest import fast_dir

__all__ = ["fast_dir"]
