"""The ranks of one machine: the place of each, and all messages between them.

Every method that is collective goes through the control of the groups, which raises an error of one
rank on all of them. So no rank can conclude something else than the others: whatever a machine
decides on was returned here.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol, TypeVar

import msgspec
from torch import nn

from holdfast.decoding import decode_msgpack_as
from holdfast.errors import ConfigError, DeadlineError, HoldfastError, disagreement
from holdfast.optim.norms import LayoutSum
from holdfast.parallel import ProcessGroups
from holdfast.parallel.layout import DENSE_AXES, Layout
from holdfast.rerun.attempt import Attempt, AttemptReport
from holdfast.rerun.devices import DeviceIdentity
from holdfast.rerun.entry import PendingFault
from holdfast.rerun.evidence import Evidence
from holdfast.rerun.journal import FaultHistory, Journal, Past
from holdfast.rerun.places import (
    FedBy,
    Feeders,
    Place,
    modules_digest,
    odd_ones,
    partner_ranks,
    replicas_of,
)
from holdfast.rerun.states import ExitCode, Verdict
from holdfast.rerun.training_state import MAX_NAMED
from holdfast.state.coordinates import coordinate_label


class HasSteps(Protocol):
    """A root of checkpoints: a `Checkpointer`."""

    def steps(self) -> list[int]:
        """Return the committed steps, ascending."""

    def latest(self) -> int | None:
        """Wait for writers that have outlived an earlier run; return the newest step."""


Root = TypeVar("Root", bound=HasSteps)
T = TypeVar("T")
M = TypeVar("M", bound=msgspec.Struct)


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
    history: FaultHistory
    unreadable: str
    """Why its entry cannot be read; empty if it can."""


class _StateReport(msgspec.Struct, frozen=True, array_like=True):
    """The message of a rank to the others about the state that a step starts with."""

    num_tensors: int
    """That are not finite."""
    tensors: list[str]
    """Some of their names."""
    digest: str
    """Of its parameters; empty if they are not compared."""


class Team:
    """All ranks of a machine, as one of them sees them.

    Args:
        groups: of the model.
        name: of the machine.
        device: of this process.
        journal: the report; only the coordinator writes and reads it.
        note: takes a line for the person, on the coordinator.
        modules: of the model, which tell who feeds its values.
    """

    def __init__(
        self,
        groups: ProcessGroups,
        *,
        name: str,
        device: DeviceIdentity,
        journal: Journal | None,
        note: Callable[[str], None],
        modules: Sequence[nn.Module] = (),
    ) -> None:
        """No rank has met another one yet."""
        self._control = groups.control
        is_real = isinstance(groups, ProcessGroups)
        self._model = (groups.module_layouts if is_real else None) or groups.layout
        # A rank that is not a member of real groups has `control` alone.
        self._sum = LayoutSum(groups) if is_real else None
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
        self.job = ""
        self.feeders = Feeders(self._model, groups.rank, modules)
        """The ranks that feed values on this rank."""

    @cached_property
    def partners(self) -> dict[int, int]:
        """For each rank the one with its part of the model in the next data replica, if any."""
        return partner_ranks(self._model)

    @cached_property
    def modules(self) -> str:
        """A digest of where several modules are, see `modules_digest`."""
        return modules_digest(self._model)

    @property
    def experts(self) -> str:
        """How experts are laid out; empty without them, or if modules have layouts of their own."""
        layout = self._model
        if not isinstance(layout, Layout) or not layout.has_experts:
            return ""
        return f"expt_tp={layout.expt_tp},ep={layout.ep}"

    @property
    def served_rank(self) -> int:
        """The rank whose step this one runs for a second opinion."""
        return next(rank for rank, other in self.partners.items() if other == self.here.rank)

    @cached_property
    def replicas(self) -> list[tuple[int, ...]]:
        """The ranks of each data replica, in the order of their parts of the model."""
        return replicas_of(self._model)

    @property
    def by_rank(self) -> dict[int, Place]:
        """The place of each rank."""
        return {each.rank: each for each in self.places}

    def fed_by(self, fed_by: FedBy) -> tuple[Place, ...]:
        """Return the places of the ranks that feed a value on this rank."""
        by_rank = self.by_rank
        return tuple(by_rank[rank] for rank in self.feeders.of(fed_by))

    def now(self, first: Sequence[Place]) -> list[Place]:
        """Return where the coordinates of some places are now."""
        by_coordinate = {each.coordinate: each for each in self.places}
        return [by_coordinate[each.coordinate] for each in first]

    def with_partners(self, first: Sequence[Place]) -> list[Place]:
        """Return the places of the same parts of the model in the next data replica."""
        by_rank = self.by_rank
        return [by_rank[self.partners[each.rank]] for each in self.now(first)]

    @property
    def arrangement(self) -> dict[str, str]:
        """The device of each coordinate."""
        return {each.coordinate: each.identity.key for each in self.places}

    def any_rank(self, flag: bool, *, phase: str) -> bool:
        """Return True if the flag is set on any rank. Collective.

        Cost: one all-reduce of 8 bytes over each of `tp`, `dp_cp` and `pp` that has several ranks.
        """
        if self._sum is None or not self._sum.is_on_host:
            # Control moves no data of a device, so it is faster than a sum that waits for one.
            return any(each == b"1" for each in self.exchange(b"1" if flag else b"", phase=phase))
        try:
            (total,) = self._sum([float(flag)], what="whether a rank has rejected a value")
        except DeadlineError as error:
            self.agree(error, phase=phase)  # only control knows which ranks are missing
            raise
        return total > 0

    def meet(self, error: HoldfastError | None, *, settings: dict[str, str]) -> Past:
        """Compare settings, and learn the places of all ranks and the report. Collective.

        Args:
            error: what is wrong with this rank's arguments.
            settings: that have to be the same on all ranks.

        Raises:
            ConfigError: ranks have different settings; on all ranks.
            StorageError, CorruptionError: the report cannot be read; on all ranks.
        """
        past = Past()
        job = uuid.uuid4().hex[:16]
        if error is None:
            past, error = self._on_coordinator(lambda journal: journal.open(job), past)
        met = self._agree_all(_Meeting(settings, job, self.here, past), error, "RerunMachine")
        for name, value in met[0].settings.items():
            if any(each.settings[name] != value for each in met):
                values = [each.settings[name] for each in met]
                raise ConfigError(
                    str(disagreement("RerunMachine", name, values, ranks=self._control.ranks))
                )
        self.job = met[0].job
        self.places = [each.place for each in met]
        return met[0].past

    def gather_spoiled(
        self, names: Sequence[str], *, digest: str, step: int, is_first: bool
    ) -> tuple[list[dict[str, Any]], list[Place]]:
        """Return places with tensors that are not finite, and those that differ. Collective.

        A place differs if it holds other parameters than most data replicas; if there is no
        majority all do.

        Args:
            names: of the tensors of this rank that are not finite.
            digest: of its parameters; empty if they are not to be compared.
            step: its number.
            is_first: True before the first step: another machine may have the directory.

        Raises:
            ConfigError: on all ranks: it has.
        """
        error = self._on_coordinator(Journal.check_owner, None)[1] if is_first else None
        mine = _StateReport(len(names), [*names[:MAX_NAMED]], digest)
        reports = self._agree_all(mine, error, f"{self._name}: step {step}: state")
        spoiled = [
            {
                **msgspec.structs.asdict(place),
                "num_tensors": each.num_tensors,
                "tensors": each.tensors,
            }
            for place, each in zip(self.places, reports, strict=True)
            if each.num_tensors
        ]
        digests = {p.rank: each.digest for p, each in zip(self.places, reports, strict=True)}
        return spoiled, self._differing(digests)

    def _differing(self, digests: Mapping[int, str]) -> list[Place]:
        """Return the places whose parameters are not those of the other data replicas."""
        odd: set[int] = set()
        if all(digests.values()):
            for ranks in zip(*self.replicas, strict=True):  # with the same part of the model
                held = [digests[rank] for rank in ranks]
                if len(set(held)) > 1:
                    odd.update(ranks[i] for i in odd_ones(held) or range(len(ranks)))
        return [each for each in self.places if each.rank in odd]

    def gather(
        self,
        attempt: Attempt,
        *,
        step: int,
        now: Callable[[Sequence[Place]], Sequence[Place]] | None = None,
    ) -> Evidence:
        """Gather what all ranks report of a run in which a value was rejected. Collective.

        Args:
            attempt: the run on this rank.
            step: its number.
            now: returns where the roles of some places are computed in this run.
        """
        report = AttemptReport(
            rejected=attempt.report_rejected(),
            rechecked=attempt.report_rechecked(now or self.now),
        )
        is_empty = not (report.rejected or report.rechecked)
        payload = b"" if is_empty else msgspec.msgpack.encode(report)
        return Evidence(self.places, self.exchange(payload, phase=f"step {step}"))

    def send_to_partners(self, payload: bytes, *, why: str, step: int) -> tuple[bytes, str]:
        """Send this rank's step to its partner; return that of the rank before. Collective.

        Args:
            payload: of this rank.
            why: it cannot take part; empty if it can.
            step: its number.

        Returns:
            What this rank is to run, and why there is no second opinion; one of the two is empty.
        """
        rows = self.exchange(why.encode(), phase=f"step {step}: second opinion")
        for place, row in zip(self.places, rows, strict=True):
            if row:
                return b"", f"rank {place.rank} cannot send its step: {row.decode()}"
        received = self.transfer(
            {self.partners[self.here.rank]: payload},
            self.served_rank,
            error=None,
            phase=f"step {step}: batches of another replica",
        )
        return received or b"", ""

    def transfer(
        self,
        outgoing: Mapping[int, bytes],
        source: int | None,
        *,
        error: BaseException | None,
        phase: str,
    ) -> bytes | None:
        """Send bytes to some ranks, and return those of a source. Collective.

        Args:
            outgoing: by rank; of one length.
            source: the rank that sends to this one; None for none.
            error: why this rank cannot; all ranks raise it.
            phase: for messages.
        """
        nbytes = len(next(iter(outgoing.values()), b""))
        phase = f"{self._name}: {phase}"
        with self._control.in_step():
            rows = self._control.agree(error, phase=phase, payload=b"%d" % nbytes)
            position = {place.rank: i for i, place in enumerate(self.places)}
            incoming = None if source is None else bytearray(int(rows[position[source]]))
            self._control.exchange(
                [(position[rank], memoryview(data)) for rank, data in outgoing.items()],
                []
                if incoming is None or source is None
                else [(position[source], memoryview(incoming))],
                phase=phase,
            )
        return None if incoming is None else bytes(incoming)

    def exchange(
        self, payload: bytes, *, phase: str, error: BaseException | None = None
    ) -> list[bytes]:
        """Return the payloads of all ranks, or raise the error of any on all. Collective."""
        with self._control.in_step():  # ranks come straight from their forward and backward
            return self._control.agree(error, phase=f"{self._name}: {phase}", payload=payload)

    def agree(self, error: BaseException | None, *, phase: str) -> None:
        """Raise the error of any rank on all of them. Collective."""
        self.exchange(b"", phase=phase, error=error)

    def _on_coordinator(
        self, action: Callable[[Journal], T], otherwise: T
    ) -> tuple[T, HoldfastError | None]:
        """Return what the report gives the coordinator, and its error for the next agreement.

        Args:
            action: reads or writes the report.
            otherwise: what other ranks get, and all ranks without a report, or after an error.
        """
        try:
            if self._control.is_coordinator and self._journal is not None:
                return action(self._journal), None
        except HoldfastError as error:
            return otherwise, error
        return otherwise, None

    def _agree_all(self, mine: M, error: HoldfastError | None, phase: str) -> list[M]:
        """Return the messages of all ranks, or raise the error of any on all. Collective."""
        rows = self._control.agree(error, phase=phase, payload=msgspec.msgpack.encode(mine))
        return [decode_msgpack_as(row, type(mine)) for row in rows]

    def together(self, action: Callable[[], T], *, step: int) -> T:
        """Take or set up what a run starts with, on each rank by itself; all raise what one does.

        Functions of the user's run then, and a rank that left alone would leave the others in the
        collectives of the run. Collective.
        """
        error: HoldfastError | None = None
        results: list[T] = []
        try:
            results.append(action())
        except HoldfastError as reason:
            error = reason
        except Exception as reason:
            error = ConfigError(
                f"step {step}: what a run starts with cannot be brought back: "
                f"{type(reason).__name__}: {reason}"
            )
            error.__cause__ = reason
        self.agree(error, phase=f"step {step}: restore")
        (result,) = results
        return result

    def name_fault(self) -> str:
        """Return an id for what was rejected, the same on all ranks. Collective."""
        name = uuid.uuid4().hex[:16].encode() if self._control.is_coordinator else None
        return self._control.broadcast(name, phase=f"{self._name}: name the fault").decode()

    def consider(
        self, fault: PendingFault | None, *, unreadable: str
    ) -> tuple[str, FaultHistory, bool]:
        """Return the id of the pending fault, what is known of it, and whether all have it.

        Collective.

        Args:
            fault: that this rank has loaded.
            unreadable: why this rank's entry cannot be read; empty if it can.
        """
        error: HoldfastError | None = None
        history, name, step = FaultHistory(), "", -1
        if fault is not None:
            name, step = fault.fault, fault.step
            history, error = self._on_coordinator(lambda each: each.history_of(name), history)
        mine = _Settlement(name, step, history, unreadable)
        known = self._agree_all(mine, error, f"{self._name}: pending fault")
        first = known[0]
        others = {
            place.rank: each.unreadable
            for place, each in zip(self.places, known, strict=True)
            if each.unreadable
        }
        if others and not first.unreadable:  # else the coordinator has passed a line at the load
            self.say(
                f"the machine's entry of {len(others)} ranks (first: rank {min(others)}) in the "
                f"checkpoint cannot be read, and is ignored: {others[min(others)]}"
            )
        is_one = all((each.fault, each.step) == (first.fault, first.step) for each in known)
        return first.fault, first.history, is_one

    def resume_point(self, *, good: Root, faults: Root, past: Past) -> tuple[Root, int] | None:
        """Return what `RerunMachine.resume_point` does. Collective."""
        answer, error = b"", None
        try:
            if self._control.is_coordinator:
                good.latest()  # a writer may still commit what a killed process has saved
                faults.latest()
                answer = _best(good.steps(), faults.steps(), past)
        except HoldfastError as reason:
            error = reason
        rows = self._control.agree(error, phase=f"{self._name}: resume", payload=answer)
        if not rows[0]:
            return None
        step, is_fault = map(int, rows[0].split())
        return (faults if is_fault else good), step

    def record(self, event: str, *, step: int, fault: str, **fields: Any) -> None:
        """Add an event to the report; all ranks raise if it cannot be written. Collective."""
        common = {"machine": self._name, "job": self.job, "step": step}
        fields = common | ({"fault": fault} if fault else {}) | fields
        _, error = self._on_coordinator(lambda journal: journal.append(event, fields), None)
        self.agree(error, phase="report")

    def record_verdict(
        self,
        verdict: Verdict,
        *,
        step: int,
        fault: str,
        exit_code: ExitCode | None,
        devices: Sequence[str] = (),
        convicted: Sequence[dict[str, str]] = (),
        suspects: Sequence[dict[str, str]] = (),
        values: Sequence[dict[str, Any]] = (),
    ) -> dict[str, Any]:
        """Add to the report what a fault was; return the event's fields. Collective."""
        fields: dict[str, Any] = {
            "verdict": verdict.value,
            "exit_code": None if exit_code is None else int(exit_code),
            "devices": list(devices),
            "convicted": list(convicted),
            "suspects": list(suspects),
            "values": list(values),
        }
        self.record("verdict", step=step, fault=fault, **fields)
        return {"step": step, "fault": fault, **fields}

    def say(self, text: str) -> None:
        """Pass one line to the person, on one rank."""
        if self._control.is_coordinator:
            self.note(text)


def _best(good: Sequence[int], faults: Sequence[int], past: Past) -> bytes:
    """Return the step to continue from, and whether a fault has left it; empty without any."""
    known = [(step, 0) for step in good if step not in past.spoiled]
    known += [(step, 1) for step in faults if step not in (*past.spoiled, *past.retired)]
    return b"%d %d" % max(known) if known else b""
