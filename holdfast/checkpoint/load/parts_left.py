"""Parts that a load left out although they were stored, and that the run saves all the same.

An optimizer that is made later in training (of a discriminator, after a warm-up) is in the state
when it is saved, and not yet in that of a restart, which would silently continue with a new one. A
rank can tell by itself: it saves a part that the checkpoint had when the rank loaded it, and that
it did not ask for.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from holdfast.checkpoint.reports import LoadReport
from holdfast.errors import some_of


class PartsLeft:
    """What the loads of this rank have left out of the checkpoint that the run continues from."""

    def __init__(self) -> None:
        self._step = -1
        self._names: set[str] = set()

    def note(self, report: LoadReport) -> None:
        """Take in a load. Several of one step count together, those of another one start again."""
        names = set(report.not_requested)
        self._names = self._names & names if report.step == self._step else names
        self._step = report.step

    def warn_of(self, saved: Iterable[str], *, rank: int) -> None:
        """Name what is among the parts that were saved, once."""
        started_anew = sorted(self._names & set(saved))
        if started_anew:
            self._names -= set(started_anew)
            logging.getLogger("holdfast").warning(
                "rank %s: the checkpoint of step %s, which this run loaded, had %s; the load did "
                "not ask for it, so what is saved under this name now does not continue it. If it "
                "is to, have it in the state when loading",
                rank,
                self._step,
                some_of(started_anew),
            )
