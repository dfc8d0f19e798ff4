"""The results of a run: one row per quantity, and curves; as JSON and back."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Against = Literal["floor", "dcp", "value"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A bound from above: on the ratio to the floor, on the ratio to DCP, or on the value."""

    against: Against
    bound: float


AHEAD_OF_DCP = Target(against="dcp", bound=1.0)
"""The bar of every row that DCP has a time for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One quantity of one case. Values are medians in `unit`; lower is better throughout.

    `samples`: of every arm, all rounds. `floor_arm`, `dcp_arm`: which of the floor's and of DCP's
    ways was the best one.
    """

    case: str
    name: str
    unit: str
    holdfast: float
    floor: float | None = None
    dcp: float | None = None
    floor_arm: str = ""
    dcp_arm: str = ""
    targets: tuple[Target, ...] = ()
    samples: dict[str, list[float]] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """Name in a baseline."""
        return f"{self.case}: {self.name}"

    @property
    def to_floor(self) -> float | None:
        """Holdfast as a multiple of the floor."""
        return self.holdfast / self.floor if self.floor else None

    @property
    def to_dcp(self) -> float | None:
        """Holdfast as a multiple of DCP at its best."""
        return self.holdfast / self.dcp if self.dcp else None

    @property
    def tracked(self) -> float:
        """Return what is compared with a baseline: the ratio to the floor, else the value."""
        return self.to_floor if self.to_floor is not None else self.holdfast

    def meets(self, target: Target) -> bool:
        """Return True if the row is within a bound."""
        value = {"floor": self.to_floor, "dcp": self.to_dcp, "value": self.holdfast}[target.against]
        return value is not None and value <= target.bound

    @property
    def met(self) -> bool | None:
        """Return True if all targets are met; None without any."""
        return all(map(self.meets, self.targets)) if self.targets else None

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "case": self.case,
            "name": self.name,
            "unit": self.unit,
            "holdfast": self.holdfast,
            "floor": self.floor,
            "floor_arm": self.floor_arm,
            "dcp": self.dcp,
            "dcp_arm": self.dcp_arm,
            "to_floor": self.to_floor,
            "to_dcp": self.to_dcp,
            "targets": [
                {"against": x.against, "bound": x.bound, "met": self.meets(x)} for x in self.targets
            ],
            "met": self.met,
            "samples": self.samples,
        }


@dataclass(slots=True)
class BenchResults:
    """All results of a run. `phases`: case -> phase -> median seconds. `curves`: for the plot."""

    rows: list[Row] = field(default_factory=list)
    phases: dict[str, dict[str, float]] = field(default_factory=dict)
    curves: dict[str, list[dict[str, float]]] = field(default_factory=dict)

    def compare(
        self,
        case: str,
        name: str,
        *,
        unit: str,
        holdfast: Sequence[float],
        floors: Mapping[str, Sequence[float]] | None = None,
        dcp: Mapping[str, Sequence[float]] | None = None,
        targets: tuple[Target, ...] = (),
        scale: float = 1.0,
    ) -> None:
        """Add a row from samples: the floor and DCP are the best of the arms given."""
        floor_arm, floor = _best(floors)
        dcp_arm, best = _best(dcp)
        arms = {"holdfast": holdfast, **(floors or {}), **(dcp or {})}
        self.rows.append(
            Row(
                case=case,
                name=name,
                unit=unit,
                holdfast=statistics.median(holdfast) * scale,
                floor=floor * scale if floor is not None else None,
                dcp=best * scale if best is not None else None,
                floor_arm=floor_arm,
                dcp_arm=dcp_arm,
                targets=targets,
                samples={arm: [v * scale for v in values] for arm, values in arms.items()},
            )
        )

    def state(
        self,
        case: str,
        name: str,
        value: float,
        *,
        unit: str,
        floor: float | None = None,
        dcp: float | None = None,
        targets: tuple[Target, ...] = (),
    ) -> None:
        """Add a row of counted values."""
        self.rows.append(
            Row(case=case, name=name, unit=unit, holdfast=value, floor=floor, dcp=dcp,
                targets=targets)
        )  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        return {
            "rows": [row.to_dict() for row in self.rows],
            "phases": self.phases,
            "curves": self.curves,
        }


def _best(arms: Mapping[str, Sequence[float]] | None) -> tuple[str, float | None]:
    if not arms:
        return "", None
    return min(((n, statistics.median(v)) for n, v in arms.items()), key=lambda pair: pair[1])
