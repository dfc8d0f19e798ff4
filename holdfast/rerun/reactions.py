"""What else happens around faults: an injector, diagnostics, a function of the caller."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import msgspec
from torch import nn

from holdfast._torch import buffer_table, watch_forwards
from holdfast.rerun.devices import DeviceIdentity
from holdfast.rerun.evidence import Evidence
from holdfast.rerun.injection import ErrorInjector
from holdfast.rerun.team import Team

OnVerdict = Callable[[Mapping[str, Any]], object]
"""Takes the fields of a verdict as they are in the report; called on every rank."""
Diagnose = Callable[[], object]
"""Tests the device of this process, and returns what it has shown, as text."""


class Reactions:
    """The callers' functions and the injector of a machine.

    Args:
        injector: makes values bad.
        on_verdict: is called with each verdict.
        diagnose: is called on ranks that feed a value that was bad twice.
        watches_buffers: True if the machine does not know the model's modules: the first step shows
            whether they have buffers, which a rerun would need.
    """

    def __init__(
        self,
        *,
        injector: ErrorInjector | None,
        on_verdict: OnVerdict | None,
        diagnose: Diagnose | None,
        watches_buffers: bool,
    ) -> None:
        self._injector = injector
        self._on_verdict = on_verdict
        self._diagnose = diagnose
        self.forgotten: list[str] = []
        """Types of modules with buffers that ran in the first step, and are not known."""
        self._watches_buffers = watches_buffers
        self._watching = ExitStack()

    def run_begins(
        self,
        *,
        step: int,
        coordinate: str,
        is_rerun: bool,
        device: DeviceIdentity,
        at_forward: Callable[[nn.Module], object] | None,
    ) -> None:
        """A run of a step begins on this rank; `at_forward` is called before each forward in it."""
        if at_forward is not None:
            self._watching.callback(watch_forwards(at_forward))
        if self._watches_buffers:
            self._watches_buffers = False
            self._watching.callback(watch_forwards(self._look_for_buffers))
        if self._injector is not None:
            self._injector.begin_run(
                step=step, coordinate=coordinate, is_rerun=is_rerun, device=device
            )

    def run_ends(self) -> None:
        """A run of a step ends on this rank."""
        self._watching.close()
        if self._injector is not None:
            self._injector.end_run()

    def diagnose(self, team: Team, evidence: Evidence) -> list[dict[str, Any]]:
        """Test the devices that feed values which were bad twice, with a vendor's tool. Collective.

        Returns:
            Places, and what the tool has returned there.
        """
        if self._diagnose is None:  # on all ranks alike
            return []
        here = team.here
        feeders = {each.rank for value in evidence.bad_again() for each in value.fed_by}
        text = ""
        if here.rank in feeders:
            try:
                text = str(self._diagnose())
            except Exception as error:
                text = f"the diagnostics failed: {type(error).__name__}: {error}"
        rows = team.exchange(text.encode(errors="replace"), phase="diagnostics")
        return [
            msgspec.structs.asdict(place) | {"text": row.decode(errors="replace")}
            for place, row in zip(team.places, rows, strict=True)
            if row
        ]

    def verdict_is_known(self, team: Team, event: Mapping[str, Any]) -> None:
        """Call the caller's function; its error is raised on all ranks. Collective."""
        if self._on_verdict is None:  # on all ranks alike
            return
        error: Exception | None = None
        try:
            self._on_verdict(event)
        except Exception as reason:
            error = reason
        team.agree(error, phase="on_verdict")

    def _look_for_buffers(self, module: nn.Module) -> None:
        name = type(module).__qualname__
        if buffer_table(module) and name not in self.forgotten:
            self.forgotten.append(name)
