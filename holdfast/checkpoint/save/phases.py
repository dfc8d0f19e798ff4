"""When each phase of a save starts on one rank, and how long it takes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Phases:
    """The phases of one save, from the call on.

    Attributes:
        began: when the call came, by `time.monotonic`, which a writer on this machine shares.
        seconds: by phase, the time that it took.
        starts: by phase, the seconds from `began` to its first start.
    """

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.seconds: dict[str, float] = {}
        self.starts: dict[str, float] = {}

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the time that the body takes to the phase."""
        start = time.monotonic()
        self.starts.setdefault(name, start - self.began)
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - start
