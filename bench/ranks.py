"""Ranks to measure in: always new processes.

A live rank that served other jobs has their memory, caches and threads, which a measurement would
count; the tests' pool of live ranks is for tests.
"""

from __future__ import annotations

from functools import partial

from tests.harness import RankContext
from tests.harness import run_ranks as run_any_ranks

__all__ = ["RankContext", "run_ranks"]

run_ranks = partial(run_any_ranks, fresh=True)
