"""The fault of a scenario, as it strikes the tensors of one rank."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tests.rerun.spread.scenario import SPIKE, Scenario, generic, role_of


class Strikes:
    """The probe of one rank: it spoils what the broken device computes.

    Args:
        scenario: of the job.
        rank: this one.
    """

    def __init__(self, scenario: Scenario, rank: int) -> None:
        self.scenario = scenario
        self.rank = rank
        self.devices: list[str] = []
        self.step = self.microbatch = self.replica = -1
        self.num = 0
        self.is_spent = False
        """Of a transient error: it has been, and does not come back."""
        self.on_strike: Callable[[], object] = lambda: None
        first = scenario.rank
        at = scenario.layout.coordinate(first)
        self._first_role = role_of(scenario.layout, first, replica=at["dp"])

    def __call__(self, site: str, value: Tensor) -> Tensor:
        """Return the value, or a spoilt copy."""
        if not self._strikes(site):
            return value
        self.num += 1
        self.on_strike()
        spoilt = value.detach().clone()
        flat = spoilt.view(-1)
        index = int(self.scenario.element * flat.numel())
        flat[index] = {"nan": torch.nan, "inf": torch.inf, "spike": SPIKE}[self.scenario.spoil]
        return spoilt

    def _strikes(self, site: str) -> bool:
        scenario = self.scenario
        if scenario.kind == "data" or self.step != scenario.step or self.is_spent:
            return False
        if self.devices[self.rank] != f"d{scenario.rank}":
            return False
        is_summed = site.startswith(("summed", "reduced", "momentum", "updated"))
        if not is_summed and self.microbatch != scenario.microbatch:
            return False
        if scenario.kind == "persistent in its role":
            role = role_of(scenario.layout, self.rank, replica=self.replica)
            return role == self._first_role and site == scenario.site
        return generic(site) == generic(scenario.site)

    def end_run(self) -> None:
        """A run of the step of the fault is over, its update included if it was made."""
        scenario = self.scenario
        is_once = scenario.kind == "transient" or (
            scenario.kind == "state" and not scenario.is_lasting
        )
        if is_once and self.step == scenario.step and self.num:
            self.is_spent = True
