"""Ranks to measure in: always new processes.

A live rank that served other jobs has their memory, caches and threads, which a measurement would
count; the tests' pool of live ranks is for tests.
"""

from __future__ import annotations

import ctypes
from functools import partial

from tests.harness import RankContext
from tests.harness import run_ranks as run_any_ranks

__all__ = ["RankContext", "give_back_large_blocks", "run_ranks"]

run_ranks = partial(run_any_ranks, fresh=True)

_M_MMAP_THRESHOLD = -3
"""Of `malloc.h`."""


def give_back_large_blocks(nbytes: int = 4 << 20) -> None:
    """Have glibc map each block of so many bytes by itself in this process, and unmap a freed one.

    By default the limit rises with the blocks that are freed, up to 32 MiB. Then buffers of several
    MiB that are allocated in a forward and freed in a backward, as gathers have them, break up the
    heap, which grows with each step. Another C library has no such limit, and nothing is done.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, nbytes)
