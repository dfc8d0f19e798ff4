"""The collector of cyclic garbage, and when it is a waste."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """Without a collection of cyclic garbage in the body, which makes many objects and no cycles.

    A full collection of a training process takes a tenth of a second and more.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
