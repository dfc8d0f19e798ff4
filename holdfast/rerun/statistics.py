"""Mode `report_determinism_stats`: every step runs twice, and the values of both are compared."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from holdfast.rerun.attempt import Attempt, Call
from holdfast.rerun.team import Team
from holdfast.rerun.values import Value, relative_difference

_SMALLEST_DECADE = -17
_LARGEST_DECADE = 0
_BEYOND = "inf"


@dataclass(slots=True)
class _Differences:
    """The relative differences of one call."""

    num_compared: int = 0
    num_identical: int = 0
    num_incomparable: int = 0
    total: float = 0.0
    largest: float = 0.0
    decades: dict[int, int] = field(default_factory=dict)
    """k -> how many were in (10**(k-1), 10**k]; the first and the last take what lies beyond."""

    def add(self, difference: float) -> None:
        """Count one comparison."""
        self.num_compared += 1
        if difference == 0.0:
            self.num_identical += 1
        elif not math.isfinite(difference):
            self.num_incomparable += 1
        else:
            self.total += difference
            self.largest = max(self.largest, difference)
            decade = math.ceil(math.log10(difference))
            decade = min(max(decade, _SMALLEST_DECADE), _LARGEST_DECADE)
            self.decades[decade] = self.decades.get(decade, 0) + 1

    def report(self) -> dict[str, Any]:
        """Return them as JSON; the largest is "inf" if two values had nothing in common."""
        num_finite = self.num_compared - self.num_incomparable
        return {
            "num_compared": self.num_compared,
            "num_identical": self.num_identical,
            "num_incomparable": self.num_incomparable,
            "largest": _BEYOND if self.num_incomparable else self.largest,
            "largest_finite": self.largest,
            "mean": self.total / num_finite if num_finite else 0.0,
            "total": self.total,
            "decades": {f"1e{k}": n for k, n in sorted(self.decades.items())},
        }

    def merge(self, report: Mapping[str, Any]) -> None:
        """Add what another one has counted."""
        self.num_compared += report["num_compared"]
        self.num_identical += report["num_identical"]
        self.num_incomparable += report["num_incomparable"]
        self.total += report["total"]
        self.largest = max(self.largest, report["largest_finite"])
        for name, count in report["decades"].items():
            decade = int(name.removeprefix("1e"))
            self.decades[decade] = self.decades.get(decade, 0) + count


class DeterminismStatistics:
    """Relative differences of the values of two runs of each step, by the name of the call."""

    def __init__(self) -> None:
        """Nothing is compared yet."""
        self._calls: dict[str, _Differences] = {}

    @classmethod
    def merged(cls, reports: Iterable[Mapping[str, Any]]) -> DeterminismStatistics:
        """The statistics of several ranks as one, from their reports."""
        result = cls()
        for report in reports:
            for name, each in report.items():
                result._calls.setdefault(name, _Differences()).merge(each)
        return result

    def add(self, name: str, difference: float) -> None:
        """Count one comparison of a call; infinite if it was made in one of the runs only."""
        self._calls.setdefault(name, _Differences()).add(difference)

    def compare(self, first: Mapping[Call, Value], second: Mapping[Call, Value]) -> None:
        """Count the values of two runs of a step, by validation call."""
        for call in {**first, **second}:
            difference = math.inf
            if call in first and call in second:
                difference = relative_difference(first[call], second[call])
            self.add(call.name, difference)

    @property
    def is_identical(self) -> bool:
        """True if no two values have differed."""
        return all(each.num_identical == each.num_compared for each in self._calls.values())

    def report(self) -> dict[str, Any]:
        """By call: how many were compared, were identical, had nothing in common; differences."""
        return {name: each.report() for name, each in self._calls.items()}

    def table(self) -> str:
        """The report for a terminal."""
        head = ("call", "compared", "identical", "largest", "mean")
        rows = [head]
        for name, each in self._calls.items():
            numbers = each.report()
            largest = numbers["largest"]
            rows.append(
                (
                    name,
                    str(each.num_compared),
                    str(each.num_identical),
                    largest if isinstance(largest, str) else f"{largest:.1e}",
                    f"{numbers['mean']:.1e}",
                )
            )
        widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
        lines = [
            "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) for row in rows
        ]
        ending = "every value was identical" if self.is_identical else "values differ: see docs"
        return "\n".join([*(line.rstrip() for line in lines), ending])

    def state_dict(self) -> dict[str, Any]:
        """Plain values."""
        return self.report()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take a state."""
        self._calls = DeterminismStatistics.merged([state])._calls


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
