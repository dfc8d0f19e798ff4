"""One step of a machine: its runs, what follows from them, and what is kept for a restart."""

from __future__ import annotations

import math
import uuid
from abc import abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from holdfast.errors import ConfigError, FaultError, HoldfastError
from holdfast.format.names import FAULT_CHECKPOINTS
from holdfast.rerun.attempt import Attempt, AttemptReport, Call, Suspect
from holdfast.rerun.comparison import relative_difference
from holdfast.rerun.context import FaultRecord, SuspectRecord
from holdfast.rerun.devices import DeviceIdentity
from holdfast.rerun.entry import KeptData, MachineEntry, kind_of
from holdfast.rerun.evidence import Evidence, Place
from holdfast.rerun.injection import point_of
from holdfast.rerun.journal import FaultHistory, Journal
from holdfast.rerun.kept_batches import Drawn, decode_batches, encode_batches
from holdfast.rerun.replay import ReplayableBatches
from holdfast.rerun.replayed import Replayed
from holdfast.rerun.states import (
    Decision,
    Event,
    ExitCode,
    Judgement,
    Limits,
    Mode,
    Outcome,
    State,
    Verdict,
    heaviest,
    judge_rerun_from_checkpoint,
    judge_rerun_in_place,
)
from holdfast.rerun.tracker import Tracker
from holdfast.rerun.values import Value

RUNNING = (State.INITIAL_RUN, State.RERUNNING_IN_PLACE, State.RERUNNING_FROM_CHECKPOINT)
"""The states in which a step runs."""
_Settlement = tuple[tuple[str, int], str, int]
_WORDS = {
    Verdict.TRANSIENT_ERROR: "a transient error",
    Verdict.CORRECT_RESULT: "the correct result: look at the data, the code and the settings",
    Verdict.UNDECIDED: "undecided",
    Verdict.PERSISTENT_ERROR: "a persistent error",
}


class MachineSteps(MachineEntry):
    """The course of a step; `RerunMachine` is what a loop sees of it."""

    name: str
    directory: Path | None
    device: DeviceIdentity
    decision: Decision
    _replayed: Replayed
    _limits: Limits
    _report_every: int
    _journal: Journal | None
    _tracker: Tracker | None
    _coordinate: str
    _places: list[Place]
    _job: str

    def _reset(self) -> None:
        """Between steps, nothing known of any."""
        self.decision = Decision()
        self._step = -1
        self._attempt = Attempt()
        self._fault_id = ""
        self._num_reruns = 0
        self._num_restarts = 0
        self._num_compared = 0
        self._is_encodable = False
        self._confirmed: set[Call] = set()
        self._first_values: dict[Call, Value] = {}

    def _begin(self, step: int, batches: object) -> bool:
        """Begin a step; False where a pending fault is judged without a run."""
        if self.decision.exit_code is not None:
            raise ConfigError(
                f"step {step}: the machine has asked for an end with exit code "
                f"{int(self.decision.exit_code)} ({self.decision.message}); save if "
                f"`decision.save`, and leave the loop"
            )
        self.decision = Decision()
        self._step, self._batches = step, batches
        self._attempt = Attempt()
        if self.mode is Mode.DISABLED:
            return True
        if self.state in RUNNING:
            self._enter(Event.LEFT)
            self.learned.discard()
        self._num_reruns, self._fault_id = 0, ""
        self._confirmed, self._first_values = set(), {}
        suspects: dict[Call, Suspect] = {}
        loaded, kept = self.fault, self._kept
        if loaded is not None:
            self._settle(step)
            if self.decision.exit_code is not None:
                return False
        if loaded is not None and loaded.step == step:
            # Also where the verdict is known: a source may go on behind the batches of the step.
            values = self._take_kept(loaded, kept, batches)
            suspects = values if self.fault is not None else {}
        elif isinstance(batches, ReplayableBatches):
            batches.begin()
        self._replayed.take()
        self._enter(Event.BEGIN)
        self._start(suspects)
        return True

    def _start(self, suspects: dict[Call, Suspect]) -> None:
        """Begin a run of the step."""
        self._attempt = Attempt(
            suspects=suspects,
            confirmed=self._confirmed,
            keeps_values=self.mode is Mode.REPORT_DETERMINISM_STATS,
        )

    def _run_again(self, suspects: dict[Call, Suspect]) -> bool:
        """Bring everything back to the beginning of the step, for another run in place."""
        self._enter(Event.REJECTED)
        self.learned.discard()
        self._num_reruns += 1
        self._replayed.restore()
        if isinstance(self._batches, ReplayableBatches):
            self._batches.rewind()
        self._start(suspects)
        return True

    def _conclude(self) -> bool:
        """End a run of the step; whether it is run again. Collective."""
        if self.mode is Mode.DISABLED:
            self.learned.commit()
            return False
        if self.mode is Mode.REPORT_DETERMINISM_STATS:
            return self._conclude_comparison()
        evidence = self._gather()
        if self.state is State.INITIAL_RUN:
            if not evidence.new_is_fatal:
                self._accept()
                return False
            return self._suspect(evidence)
        if self.state is State.RERUNNING_IN_PLACE:
            judgement = judge_rerun_in_place(
                evidence.rechecks,
                new_is_fatal=evidence.new_is_fatal,
                num_reruns=self._num_reruns,
                limits=self._limits,
            )
        else:
            judgement = judge_rerun_from_checkpoint(
                evidence.rechecks,
                new_is_fatal=evidence.new_is_fatal,
                num_restarts=self._num_restarts,
                limits=self._limits,
            )
        return self._follow(judgement, evidence)

    def _gather(self) -> Evidence:
        """What all ranks have to say of the run. One collective, of a frame where it is nothing."""
        attempt, fault = self._attempt, self.fault
        report = AttemptReport(
            rejected=attempt.report_rejected(),
            rechecked=attempt.report_rechecked(
                is_same_device=fault is None or self._is_device_of(fault),
                first_rank=self.groups.rank if fault is None else fault.rank,
                first_host=self.device.host if fault is None else fault.host,
                first_device=self.device.uuid if fault is None else fault.device,
            ),
        )
        is_empty = not (report.rejected or report.rechecked)
        payload = b"" if is_empty else msgspec.msgpack.encode(report)
        phase = f"{self.name}: step {self._step}"
        return Evidence(self._places, self.groups.control.all_gather(payload, phase=phase))

    def _accept(self) -> None:
        """No value was rejected."""
        self.learned.commit()
        self._enter(Event.ACCEPTED)
        if not self._is_encodable:
            if isinstance(self._batches, ReplayableBatches):
                self._batches.check_encodable()
            self._replayed.check_encodable(codecs=self._codecs)
            self._is_encodable = True

    def _suspect(self, evidence: Evidence) -> bool:
        """Values were rejected: record them, and run the step again."""
        self._name_fault()
        self._record_rejected(evidence)
        self._refuse_other_iterators(evidence)
        self._say(f"step {self._step}: {evidence.describe_rejected()}: it runs again")
        return self._run_again(self._attempt.rejected)

    def _follow(self, judgement: Judgement, evidence: Evidence) -> bool:
        """Do what a judgement says; whether the step is run again."""
        values = evidence.rechecked(judgement.verdicts)
        kind = (
            "rerun_in_place" if self.state is State.RERUNNING_IN_PLACE else "rerun_from_checkpoint"
        )
        self._record(kind, {"values": values})
        what = evidence.describe_rechecked()
        self._track(evidence.ranks_bad_elsewhere())
        if judgement.event is Event.BAD_AGAIN:
            self._keep_fault(judgement, evidence)
            return False
        if judgement.event is Event.NOTHING_LEARNED:
            self._replayed.restore()
            self._enter(judgement.event)
            self._decide(
                judgement.exit_code,
                f"step {self._step}: {what}: nothing was decided by this start "
                f"({self._num_restarts} of {self._limits.max_restarts}); start once more on other "
                f"devices",
            )
            return False
        verdict = heaviest([each for each in judgement.verdicts if each is not None])
        has_new = bool(evidence.new_is_fatal)
        if verdict is not None:
            self._record_verdict(
                verdict,
                exit_code=judgement.exit_code,
                devices=evidence.suspect_devices(judgement.verdicts),
                values=values,
            )
        devices = "; ".join(evidence.suspect_devices(judgement.verdicts))
        message = f"step {self._step}: {what}: {_in_words(verdict)}{devices and f' of {devices}'}"
        self.fault, self._kept = None, b""
        if has_new:
            self._name_fault()
            self._record_rejected(evidence)
            message += f"; {evidence.describe_rejected()}"
        if judgement.event is Event.REJECTED:
            self._confirmed |= {
                call
                for call, (outcome, _, _) in self._attempt.rechecked.items()
                if outcome is not Outcome.GOOD
            }
            self._refuse_other_iterators(evidence)
            self._say(f"{message}: it runs again")
            return self._run_again(self._attempt.rejected)
        if has_new and judgement.exit_code in (None, ExitCode.UNDECIDED):
            verdict = Verdict.UNDECIDED
            self._record_verdict(verdict, exit_code=judgement.exit_code)
        self._enter(judgement.event)
        if judgement.exit_code is None:
            self.learned.commit()
        else:
            self.learned.discard()
        self._decide(judgement.exit_code, message, verdict=verdict)
        return False

    def _decide(
        self,
        exit_code: ExitCode | None,
        message: str,
        *,
        save: bool = False,
        verdict: Verdict | None = None,
    ) -> None:
        """Set the decision, and say it."""
        self.decision = Decision(exit_code=exit_code, save=save, verdict=verdict, message=message)
        ending = "the run goes on" if exit_code is None else f"exit code {int(exit_code)}"
        self._say(f"{message}: {ending}")

    def _name_fault(self) -> None:
        """Give what was rejected an id that all ranks know."""
        control = self.groups.control
        name = uuid.uuid4().hex[:16].encode() if control.is_coordinator else None
        self._fault_id = control.broadcast(name, phase=f"{self.name}: name the fault").decode()

    def _keep_fault(self, judgement: Judgement, evidence: Evidence) -> None:
        """Keep what a new process needs to run the step again on another device."""
        rechecked = self._attempt.rechecked
        suspects = {
            call: suspect
            for call, suspect in self._attempt.suspects.items()
            if call in rechecked and rechecked[call][0].is_bad
        }
        batches = self._batches
        self._replayed.restore()
        self.learned.discard()
        self.fault = FaultRecord(
            fault=self._fault_id,
            step=self._step,
            rank=self.groups.rank,
            coordinate=self._coordinate,
            host=self.device.host,
            device=self.device.uuid,
            suspects=[SuspectRecord.of(call, each) for call, each in suspects.items()],
            has_batches=isinstance(batches, ReplayableBatches),
        )
        values = [each.value for each in suspects.values()]
        self._kept = msgspec.msgpack.encode(
            KeptData(
                values=encode_batches([Drawn(each) for each in values], codecs=self._codecs),
                batches=batches.encode() if isinstance(batches, ReplayableBatches) else b"",
                replayed=self._replayed.encode(codecs=self._codecs),
            )
        )
        self._enter(judgement.event)
        self._decide(
            judgement.exit_code,
            f"step {self._step}: {evidence.describe_rechecked()}: save the state to "
            f"{self.directory}/{FAULT_CHECKPOINTS} and start again on other devices",
            save=True,
        )

    def _take_kept(self, fault: FaultRecord, data: bytes, batches: object) -> dict[Call, Suspect]:
        """The suspects of a loaded fault; the batches of its step are replayed."""
        kept = self._replay_kept(fault, data, batches)
        values = [each.batch for each in decode_batches(kept.values, codecs=self._codecs)]
        self._replayed.decode(kept.replayed, codecs=self._codecs)
        return fault.with_values(values)

    def _settle(self, step: int) -> None:
        """Decide with all ranks whether the pending fault is rerun now. Collective."""
        control, fault = self.groups.control, self.fault
        error: HoldfastError | None = None
        history = FaultHistory()
        try:
            if control.is_coordinator and fault is not None and self._journal is not None:
                history = self._journal.history_of(fault.fault)
        except HoldfastError as reason:
            error = reason
        mine = (fault.fault, fault.step) if fault is not None else ("", -1)
        rows = control.agree(
            error,
            phase=f"{self.name}: pending fault",
            payload=msgspec.msgpack.encode((mine, history.verdict, history.num_restarts)),
        )
        known = [msgspec.msgpack.decode(row, type=_Settlement) for row in rows]
        (_, at), verdict, num_restarts = known[0]
        self._fault_id = known[0][0][0]
        if any(each[0] != known[0][0] for each in known):
            return self._drop("ranks have loaded contexts of different faults")
        if verdict:
            return self._drop(f"its verdict is known: {_in_words(Verdict(verdict))}")
        if at != step:
            return self._drop(f"the run goes on at step {step}")
        if num_restarts >= self._limits.max_restarts:
            self._record_verdict(Verdict.UNDECIDED, exit_code=ExitCode.UNDECIDED)
            self._enter(Event.JUDGED)
            self.fault, self._kept = None, b""
            self._decide(
                ExitCode.UNDECIDED,
                f"step {at}: {num_restarts} starts from its checkpoint have ended without a "
                f"verdict: {_in_words(Verdict.UNDECIDED)}",
                verdict=Verdict.UNDECIDED,
            )
            return None
        self._num_restarts = num_restarts + 1
        places = [msgspec.structs.asdict(place) for place in self._places]
        self._record("restart", {"number": self._num_restarts, "places": places})
        return None

    def _drop(self, why: str) -> None:
        """Leave the pending fault: the step runs as any other."""
        step = -1 if self.fault is None else self.fault.step
        self._record("dropped", {"why": why})
        self._enter(Event.DROPPED)
        self.fault, self._kept, self._fault_id = None, b"", ""
        self._say(f"the fault of step {step} that the checkpoint holds is dropped: {why}")

    def _refuse_other_iterators(self, evidence: Evidence) -> None:
        """ConfigError, on all ranks, where a rerun could not have the same batches."""
        error: HoldfastError | None = None
        batches = self._batches
        if batches is not None and not isinstance(batches, ReplayableBatches):
            error = ConfigError(
                f"step {self._step}: {evidence.describe_rejected()}; the step cannot run again, "
                f"because `attempts` was given {kind_of(batches)}, which cannot be rewound: give "
                f"it machine.replayable(iterator)"
            )
        self.groups.control.agree(error, phase=f"{self.name}: batches")

    def _record(self, event: str, fields: dict[str, Any]) -> None:
        """Add an event to the report; all ranks raise if it cannot be written. Collective."""
        common = {"machine": self.name, "job": self._job, "step": self._step}
        fault = {"fault": self._fault_id} if self._fault_id else {}

        def append() -> None:
            if self._journal is not None:
                self._journal.append(event, common | fault | fields)

        self._on_coordinator(append, "report")

    def _on_coordinator(self, action: Callable[[], None], phase: str) -> None:
        """Do something on the coordinator; all ranks raise if it fails. Collective."""
        error: HoldfastError | None = None
        try:
            if self.groups.control.is_coordinator:
                action()
        except HoldfastError as reason:
            error = reason
        self.groups.control.agree(error, phase=f"{self.name}: {phase}")

    def _record_verdict(
        self,
        verdict: Verdict,
        *,
        exit_code: ExitCode | None,
        devices: Sequence[str] = (),
        values: Sequence[dict[str, Any]] = (),
    ) -> None:
        """Record what a fault was. Collective."""
        self._record(
            "verdict",
            {
                "verdict": verdict.value,
                "exit_code": None if exit_code is None else int(exit_code),
                "devices": list(devices),
                "values": list(values),
            },
        )
        self._judged.add(self._fault_id)

    def _record_rejected(self, evidence: Evidence) -> None:
        """Record values that were rejected for the first time, also for the tracker. Collective."""
        values = evidence.rejected()
        self._track({each["rank"] for each in values})
        self._record("rejected", {"values": values})

    def _track(self, ranks: set[int]) -> None:
        """Record for the tracker that ranks have rejected the step. Collective."""

        def record() -> None:
            if self._tracker is not None:
                for rank in sorted(ranks):
                    self._tracker.record(rank, self._step, self._job)

        self._on_coordinator(record, "tracker")

    def _conclude_comparison(self) -> bool:
        """End one of the two runs of a step whose values are compared. Collective."""
        attempt = self._attempt
        if self.state is State.INITIAL_RUN:
            self._first_values = attempt.values
            return self._run_again({})
        for call in {**self._first_values, **attempt.values}:
            first, second = self._first_values.get(call), attempt.values.get(call)
            difference = math.inf
            if first is not None and second is not None:
                difference = relative_difference(first, second)
            self.statistics.add(call.name, difference)
        self._first_values = {}
        evidence = self._gather()
        self._enter(Event.JUDGED)
        self.learned.commit()
        if any(evidence.new_is_fatal):
            raise FaultError(f"step {self._step}: {evidence.describe_rejected()}")
        self._num_compared += 1
        if self._num_compared % self._report_every == 0:
            self.report_statistics()
        return False

    def _is_device_of(self, fault: FaultRecord) -> bool:
        """Whether this process runs on the device of the fault."""
        return self.device.is_same(DeviceIdentity(host=fault.host, uuid=fault.device))

    def _injected(self, call: Call, value: Value) -> Value:
        """The value that the injector makes of one."""
        if self._injector is None:
            return value
        point = point_of(self._step, self._coordinate, call.name, call.occurrence)
        is_rerun = self.state is not State.INITIAL_RUN
        return self._injector.injected(point, is_rerun=is_rerun, device=self.device, value=value)

    @abstractmethod
    def report_statistics(self) -> None:
        """Report on determinism. Collective."""


def _in_words(verdict: Verdict | None) -> str:
    """A verdict for a person."""
    return "no verdict" if verdict is None else _WORDS[verdict]
