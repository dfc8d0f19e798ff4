"""Mode `report_determinism_stats`: every step runs twice, and the values of both are compared."""

from __future__ import annotations

from typing import Any

import msgspec

from holdfast.rerun.attempt import Attempt, Call
from holdfast.rerun.statistics import DeterminismStatistics
from holdfast.rerun.team import Team
from holdfast.rerun.values import Value


class Comparison:
    """Compares two runs of each step on this rank, and reports for all ranks.

    Args:
        team: the ranks.
        report_every: steps between two reports.
    """

    def __init__(self, team: Team, *, report_every: int) -> None:
        """Compare nothing yet."""
        self.statistics = DeterminismStatistics()
        self._team = team
        self._report_every = report_every
        self._num_compared = 0
        self._first: dict[Call, Value] = {}

    def take_first(self, attempt: Attempt) -> None:
        """Take the values of the first run."""
        self._first = attempt.values

    def take_second(self, attempt: Attempt) -> bool:
        """Compare the values of the second run; return True if a report is due."""
        self.statistics.compare(self._first, attempt.values)
        self._first = {}
        self._num_compared += 1
        return self._num_compared % self._report_every == 0

    def report(self) -> tuple[dict[str, Any], str]:
        """Return the differences of all ranks so far, for the report and as a table. Collective."""
        payload = msgspec.json.encode(self.statistics.report())
        rows = self._team.exchange(payload, phase="determinism")
        merged = DeterminismStatistics.merged([msgspec.json.decode(row) for row in rows])
        return {"num_steps": self._num_compared, "calls": merged.report()}, merged.table()
