"""The ranks of one machine: the place of each, and all messages between them.

Every method that is collective goes through the control of the groups, which raises an error of one
rank on all of them. So no rank can conclude something else than the others: whatever a machine
decides on was returned here.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from holdfast.errors import ConfigError, HoldfastError
from holdfast.parallel import ProcessGroups
from holdfast.parallel.layout import DENSE_AXES
from holdfast.parallel.ranks import disagreement
from holdfast.rerun.attempt import Attempt, AttemptReport
from holdfast.rerun.devices import DeviceIdentity
from holdfast.rerun.entry import PendingFault
from holdfast.rerun.evidence import Evidence, Place
from holdfast.rerun.journal import FaultHistory, Journal
from holdfast.rerun.states import ExitCode, Verdict
from holdfast.state.coordinates import coordinate_label


class Past(msgspec.Struct, frozen=True, array_like=True):
    """Faults in the report of earlier jobs, the same on all ranks."""

    skipped: list[int] = []
    """Steps that are bad wherever they run."""
    points: list[str] = []
    """Validation calls whose values have a verdict."""
    faults: list[str] = []
    """Faults with a verdict, by id."""


class _Meeting(msgspec.Struct, frozen=True, array_like=True):
    """The message of a rank to the others when machines are made."""

    settings: dict[str, str]
    job: str
    place: Place
    past: Past


class _Settlement(msgspec.Struct, frozen=True, array_like=True):
    """The message of a rank to the others about the pending fault that it has loaded."""

    fault: str
    step: int
    verdict: str
    num_restarts: int


class Team:
    """All ranks of a machine, as one of them sees them.

    Args:
        groups: of the model.
        name: of the machine.
        device: of this process.
        journal: the report; only the coordinator writes and reads it.
        note: takes a line for the person, on the coordinator.
    """

    def __init__(
        self,
        groups: ProcessGroups,
        *,
        name: str,
        device: DeviceIdentity,
        journal: Journal | None,
        note: Callable[[str], None],
    ) -> None:
        """Nobody has met yet."""
        self._control = groups.control
        self._name = name
        self._journal = journal
        self.note = note
        """Takes a line for the person, on any rank."""
        self.here = Place(
            rank=groups.rank,
            coordinate=coordinate_label(groups.layout, groups.rank, DENSE_AXES, path=name),
            host=device.host,
            device=device.uuid,
        )
        self.places = [self.here]
        self._job = ""

    def meet(
        self, error: HoldfastError | None, *, settings: dict[str, str], reads_past: bool
    ) -> Past:
        """Compare settings, and learn the places of all ranks and the report. Collective.

        Args:
            error: what is wrong with this rank's arguments.
            settings: that have to be the same on all ranks.
            reads_past: whether the report of earlier jobs matters.

        Raises:
            ConfigError: ranks have different settings; on all ranks.
            StorageError, CorruptionError: the report cannot be read; on all ranks.
        """
        past = Past()
        try:
            if self._control.is_coordinator and error is None and reads_past and self._journal:
                past = Past(sorted(self._journal.steps_to_skip()), *self._journal.verdicts())
        except HoldfastError as reason:
            error = reason
        mine = _Meeting(settings, uuid.uuid4().hex[:16], self.here, past)
        rows = self._control.agree(
            error, phase="RerunMachine", payload=msgspec.msgpack.encode(mine)
        )
        met = [msgspec.msgpack.decode(row, type=_Meeting) for row in rows]
        for name, value in met[0].settings.items():
            if any(each.settings[name] != value for each in met):
                values = [each.settings[name] for each in met]
                raise ConfigError(
                    str(disagreement("RerunMachine", name, values, ranks=self._control.ranks))
                )
        self._job = met[0].job
        self.places = [each.place for each in met]
        return met[0].past

    def gather(self, attempt: Attempt, *, step: int, fault: PendingFault | None) -> Evidence:
        """Gather what all ranks report of a run. Collective; a mere frame while nothing is wrong.

        Args:
            attempt: the run on this rank.
            step: its number.
            fault: the pending one that the run is to explain.
        """
        first = self.here if fault is None else fault
        device = DeviceIdentity(host=self.here.host, uuid=self.here.device)
        report = AttemptReport(
            rejected=attempt.report_rejected(),
            rechecked=attempt.report_rechecked(
                is_same_device=device.is_same(DeviceIdentity(host=first.host, uuid=first.device)),
                first_rank=first.rank,
                first_host=first.host,
                first_device=first.device,
            ),
        )
        is_empty = not (report.rejected or report.rechecked)
        payload = b"" if is_empty else msgspec.msgpack.encode(report)
        return Evidence(self.places, self.exchange(payload, phase=f"step {step}"))

    def exchange(self, payload: bytes, *, phase: str) -> list[bytes]:
        """Return the payloads of all ranks. Collective."""
        with self._control.in_step():  # ranks come straight from their forward and backward
            return self._control.all_gather(payload, phase=f"{self._name}: {phase}")

    def agree(self, error: HoldfastError | None, *, phase: str) -> None:
        """Raise the error of any rank on all of them. Collective."""
        with self._control.in_step():
            self._control.agree(error, phase=f"{self._name}: {phase}")

    def name_fault(self) -> str:
        """Return an id for what was rejected, the same on all ranks. Collective."""
        name = uuid.uuid4().hex[:16].encode() if self._control.is_coordinator else None
        return self._control.broadcast(name, phase=f"{self._name}: name the fault").decode()

    def consider(self, fault: PendingFault | None) -> tuple[str, FaultHistory, bool]:
        """Return the id of the pending fault, what is known of it, and whether all have it.

        Collective.
        """
        error: HoldfastError | None = None
        history = FaultHistory()
        try:
            if self._control.is_coordinator and fault is not None and self._journal is not None:
                history = self._journal.history_of(fault.fault)
        except HoldfastError as reason:
            error = reason
        name, step = ("", -1) if fault is None else (fault.fault, fault.step)
        mine = _Settlement(name, step, history.verdict, history.num_restarts)
        rows = self._control.agree(
            error, phase=f"{self._name}: pending fault", payload=msgspec.msgpack.encode(mine)
        )
        known = [msgspec.msgpack.decode(row, type=_Settlement) for row in rows]
        first = known[0]
        is_one = all((each.fault, each.step) == (first.fault, first.step) for each in known)
        history = FaultHistory(verdict=first.verdict, num_restarts=first.num_restarts)
        return first.fault, history, is_one

    def record(self, event: str, *, step: int, fault: str, **fields: Any) -> None:
        """Add an event to the report; all ranks raise if it cannot be written. Collective."""
        error: HoldfastError | None = None
        try:
            if self._control.is_coordinator and self._journal is not None:
                common = {"machine": self._name, "job": self._job, "step": step}
                self._journal.append(event, common | ({"fault": fault} if fault else {}) | fields)
        except HoldfastError as reason:
            error = reason
        self.agree(error, phase="report")

    def record_verdict(
        self,
        verdict: Verdict,
        *,
        step: int,
        fault: str,
        exit_code: ExitCode | None,
        devices: Sequence[str] = (),
        values: Sequence[dict[str, Any]] = (),
    ) -> None:
        """Add to the report what a fault was. Collective."""
        self.record(
            "verdict",
            step=step,
            fault=fault,
            verdict=verdict.value,
            exit_code=None if exit_code is None else int(exit_code),
            devices=list(devices),
            values=list(values),
        )

    def say(self, text: str) -> None:
        """Pass one line to the person, on one rank."""
        if self._control.is_coordinator:
            self.note(text)
