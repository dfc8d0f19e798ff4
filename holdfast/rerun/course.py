"""The course of a machine: from state to state, and each step from its first run to a decision.

    Phase 1: a step starts         `begin`, and with a pending fault `_consider_fault`
    Phase 2: it runs               in the caller's loop; `attempt` takes the calls of each run
    Phase 3: all ranks report      `conclude`: nothing was rejected, or the step runs again
    Phase 4: a rerun is judged     `_follow`: a verdict, another rerun, or another restart
    Phase 5: the fault is kept     `_keep_fault`: for a process on another device

There are no threads and no locks: everything happens in calls of the loop. A collective method is
collective on every path: each rank acts on what `Team` has brought to all ranks, never on what it
alone knows. Otherwise one rank would wait in a collective that the others never enter.
"""

from __future__ import annotations

from typing import Any

import msgspec

from holdfast.errors import ConfigError, FaultError, HoldfastError
from holdfast.format.values import Codecs
from holdfast.rerun.attempt import Attempt, Call, Suspect
from holdfast.rerun.entry import PendingFault, SuspectRecord, kind_of
from holdfast.rerun.evidence import Evidence
from holdfast.rerun.replay import ReplayableBatches
from holdfast.rerun.replayed import Replayed
from holdfast.rerun.rules import Learned
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
    next_state,
)
from holdfast.rerun.statistics import DeterminismStatistics
from holdfast.rerun.team import Team
from holdfast.rerun.values import Value

_RUNNING = (State.INITIAL_RUN, State.RERUNNING_IN_PLACE, State.RERUNNING_FROM_CHECKPOINT)
_WORDS = {
    None: "no verdict",
    Verdict.TRANSIENT_ERROR: "a transient error",
    Verdict.CORRECT_RESULT: "the correct result: look at the data, the code and the settings",
    Verdict.UNDECIDED: "undecided",
    Verdict.PERSISTENT_ERROR: "a persistent error",
}


class Course:
    """The state of a machine, the step that runs, and the fault that waits for a verdict.

    Args:
        team: the ranks.
        mode: of the machine.
        replayed: restores buffers and random streams before a rerun.
        limits: numbers of reruns and restarts after which the machine gives up.
        codecs: for batches of a user's own types.
        report_every: steps between two reports on determinism.
        checkpoints: directory of fault checkpoints, for messages.
    """

    def __init__(
        self,
        team: Team,
        *,
        mode: Mode,
        replayed: Replayed,
        limits: Limits,
        codecs: Codecs,
        report_every: int,
        checkpoints: object,
    ) -> None:
        """Start between two steps."""
        self.team = team
        self.codecs = codecs
        self.state = State.NOT_RUNNING_YET
        self.decision = Decision()
        self.fault: PendingFault | None = None
        """The fault that waits for a verdict, with this rank's part of it."""
        self.judged: set[str] = set()
        """Faults with a verdict, by id."""
        self.learned = Learned()
        self.statistics = DeterminismStatistics()
        self._mode = mode
        self._replayed = replayed
        self._limits = limits
        self._report_every = report_every
        self._checkpoints = checkpoints
        self._num_compared = 0
        self._is_checked = False
        """True once a first step has shown that buffers can be kept."""

        # Of the step that runs.
        self.step = -1
        self.batches: object = None
        self.attempt = Attempt()
        self._fault_id = ""
        self._num_reruns = 0
        self._num_restarts = 0
        self._confirmed: set[Call] = set()
        self._first_values: dict[Call, Value] = {}

    @property
    def is_running(self) -> bool:
        """Return True while a step runs."""
        return self.state in _RUNNING

    # Phase 1: a step starts

    def begin(self, step: int, batches: object) -> bool:
        """Start a step; return False if a pending fault is judged without a run. Collective."""
        if self.decision.exit_code is not None:
            raise ConfigError(
                f"step {step}: the machine has decided to end the run with exit code "
                f"{int(self.decision.exit_code)} ({self.decision.message}); save the state if "
                f"`decision.save` is True, and leave the loop"
            )
        self.decision = Decision()
        self.step, self.batches = step, batches
        self.attempt = Attempt()
        if self._mode is Mode.DISABLED:
            return True
        if self.is_running:
            self.enter(Event.LEFT)
            self.learned.discard()
        self._num_reruns, self._fault_id = 0, ""
        self._confirmed, self._first_values = set(), {}
        loaded = self.fault
        if loaded is not None:
            self._consider_fault(step)
            if self.decision.exit_code is not None:
                return False
        suspects: dict[Call, Suspect] = {}
        if loaded is not None and loaded.step == step:
            # Even if the verdict is known: a source that saved its position continues behind the
            # batches of the step, so only the checkpoint still has them.
            loaded.replay_batches(batches)
            self._replayed.replay_kept(loaded.replayed, codecs=self.codecs)
            if self.fault is not None:
                suspects = loaded.suspects_by_call(codecs=self.codecs)
        elif isinstance(batches, ReplayableBatches):
            batches.begin()
        self._replayed.take()
        self.enter(Event.BEGIN)
        self._start_run(suspects)
        return True

    def _consider_fault(self, step: int) -> None:
        """Decide with all ranks whether the pending fault is rerun now. Collective."""
        at = -1 if self.fault is None else self.fault.step
        self._fault_id, history, is_one = self.team.consider(self.fault)
        if not is_one:
            return self._drop_fault("the ranks have loaded different faults")
        if history.verdict:
            return self._drop_fault(f"its verdict is known: {_WORDS[Verdict(history.verdict)]}")
        if at != step:
            return self._drop_fault(f"the run continues at step {step}")
        num_restarts = history.num_restarts
        if num_restarts >= self._limits.max_restarts:
            self._record_verdict(Verdict.UNDECIDED, exit_code=ExitCode.UNDECIDED)
            self.enter(Event.JUDGED)
            self.fault = None
            return self._decide(
                ExitCode.UNDECIDED,
                f"step {at}: {num_restarts} starts from its checkpoint ended without a verdict: "
                f"{_WORDS[Verdict.UNDECIDED]}",
                verdict=Verdict.UNDECIDED,
            )
        self._num_restarts = num_restarts + 1
        places = [msgspec.structs.asdict(place) for place in self.team.places]
        self.record("restart", number=self._num_restarts, places=places)
        return None

    def _drop_fault(self, why: str) -> None:
        """Drop the pending fault; the step runs like any other."""
        step = -1 if self.fault is None else self.fault.step
        self.record("dropped", why=why)
        self.enter(Event.DROPPED)
        self.fault, self._fault_id = None, ""
        self.team.say(f"the fault of step {step} that the checkpoint holds is dropped: {why}")

    # Phase 2: it runs

    def _start_run(self, suspects: dict[Call, Suspect]) -> None:
        self.attempt = Attempt(
            suspects=suspects,
            confirmed=self._confirmed,
            keeps_values=self._mode is Mode.REPORT_DETERMINISM_STATS,
        )

    def _run_again(self, suspects: dict[Call, Suspect]) -> bool:
        """Restore everything to the start of the step, for another run in place."""
        self.enter(Event.REJECTED)
        self.learned.discard()
        self._num_reruns += 1
        self._replayed.restore()
        if isinstance(self.batches, ReplayableBatches):
            self.batches.rewind()
        self._start_run(suspects)
        return True

    # Phase 3: all ranks report

    def conclude(self) -> bool:
        """End a run of the step; return whether it is run again. Collective."""
        if self._mode is Mode.DISABLED:
            self.learned.commit()
            return False
        if self._mode is Mode.REPORT_DETERMINISM_STATS:
            return self._conclude_comparison()
        evidence = self.team.gather(self.attempt, step=self.step, fault=self.fault)
        if self.state is State.INITIAL_RUN:
            if not evidence.new_is_fatal:
                self._accept()
                return False
            self._fault_id = self.team.name_fault()
            self.record("rejected", values=evidence.rejected())
            self._refuse_other_iterators(evidence)
            self.team.say(f"step {self.step}: {evidence.describe_rejected()}: it runs again")
            return self._run_again(self.attempt.rejected)
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

    def _accept(self) -> None:
        """Accept the step: no rank has rejected a value."""
        self.learned.commit()
        self.enter(Event.ACCEPTED)
        if not self._is_checked:
            # Batches are kept as they are taken. Buffers are kept only at a fault, which would be
            # too late to find out that one of them cannot be.
            self._replayed.kept(codecs=self.codecs)
            self._is_checked = True

    def _conclude_comparison(self) -> bool:
        """End one of the two runs of a step whose values are compared. Collective."""
        if self.state is State.INITIAL_RUN:
            self._first_values = self.attempt.values
            return self._run_again({})
        self.statistics.compare(self._first_values, self.attempt.values)
        self._first_values = {}
        evidence = self.team.gather(self.attempt, step=self.step, fault=None)
        self.enter(Event.JUDGED)
        self.learned.commit()
        if any(evidence.new_is_fatal):
            raise FaultError(f"step {self.step}: {evidence.describe_rejected()}")
        self._num_compared += 1
        if self._num_compared % self._report_every == 0:
            self.report_statistics()
        return False

    def _refuse_other_iterators(self, evidence: Evidence) -> None:
        """Raise ConfigError on all ranks if a rerun could not get the same batches. Collective."""
        error: HoldfastError | None = None
        batches = self.batches
        if batches is not None and not isinstance(batches, ReplayableBatches):
            error = ConfigError(
                f"step {self.step}: {evidence.describe_rejected()}; the step cannot run again, "
                f"because `attempts` was given {kind_of(batches)}, which cannot be rewound; pass "
                f"machine.replayable(iterator)"
            )
        self.team.agree(error, phase="batches")

    def report_statistics(self) -> None:
        """Report the differences of all ranks so far. Collective."""
        payload = msgspec.json.encode(self.statistics.report())
        rows = self.team.exchange(payload, phase="determinism")
        merged = DeterminismStatistics.merged([msgspec.json.decode(row) for row in rows])
        self.record("determinism", num_steps=self._num_compared, calls=merged.report())
        self.team.say(f"step {self.step}: two runs of each step, compared\n{merged.table()}")

    # Phase 4: a rerun is judged

    def _follow(self, judgement: Judgement, evidence: Evidence) -> bool:
        """Act on a judgement; return whether the step is run again. Collective."""
        values = evidence.rechecked(judgement.verdicts)
        is_in_place = self.state is State.RERUNNING_IN_PLACE
        self.record("rerun_in_place" if is_in_place else "rerun_from_checkpoint", values=values)
        if judgement.event is Event.BAD_AGAIN:
            self._keep_fault(judgement, evidence)
            return False
        message = f"step {self.step}: {evidence.describe_rechecked()}"
        if judgement.event is Event.NOTHING_LEARNED:
            self._replayed.restore()
            self.enter(judgement.event)
            self._decide(
                judgement.exit_code,
                f"{message}: this start ({self._num_restarts} of {self._limits.max_restarts}) "
                f"decided nothing; start once more on other devices",
            )
            return False
        # The verdict is recorded before the loop hears of it: if the process dies in between, the
        # next start finds it in the report, and does not run the step again.
        verdict = heaviest([each for each in judgement.verdicts if each is not None])
        devices = evidence.suspect_devices(judgement.verdicts)
        if verdict is not None:
            self._record_verdict(
                verdict, exit_code=judgement.exit_code, devices=devices, values=values
            )
        blamed = "; ".join(devices)
        message += f": {_WORDS[verdict]}{blamed and f' of {blamed}'}"
        self.fault = None
        has_new = bool(evidence.new_is_fatal)
        if has_new:  # another fault, with its own id
            self._fault_id = self.team.name_fault()
            self.record("rejected", values=evidence.rejected())
            message += f"; {evidence.describe_rejected()}"
        if judgement.event is Event.REJECTED:
            # Calls with a verdict: rejecting their values once more would be a fault without end.
            self._confirmed |= {
                call
                for call, (outcome, _, _) in self.attempt.rechecked.items()
                if outcome is not Outcome.GOOD
            }
            self._refuse_other_iterators(evidence)
            self.team.say(f"{message}: it runs again")
            return self._run_again(self.attempt.rejected)
        if has_new and judgement.exit_code in (None, ExitCode.UNDECIDED):
            verdict = Verdict.UNDECIDED
            self._record_verdict(verdict, exit_code=judgement.exit_code)
        self.enter(judgement.event)
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
        """Set the decision, and tell the person."""
        self.decision = Decision(exit_code=exit_code, save=save, verdict=verdict, message=message)
        ending = "the run continues" if exit_code is None else f"exit code {int(exit_code)}"
        self.team.say(f"{message}: {ending}")

    def enter(self, event: Event) -> None:
        """Go to the state that follows after an event."""
        self.state = next_state(self.state, event)

    def record(self, event: str, **fields: Any) -> None:
        """Add an event of this step to the report. Collective."""
        self.team.record(event, step=self.step, fault=self._fault_id, **fields)

    def _record_verdict(self, verdict: Verdict, **fields: Any) -> None:
        """Add the verdict on the fault of this step to the report. Collective."""
        self.team.record_verdict(verdict, step=self.step, fault=self._fault_id, **fields)
        self.judged.add(self._fault_id)

    # Phase 5: the fault is kept for another process

    def load_fault(self, fault: PendingFault) -> None:
        """Take the pending fault of a checkpoint: its step is to run again."""
        self.fault = fault
        self.enter(Event.LOADED)

    def forget_fault(self) -> None:
        """Drop any pending fault, because another state is loaded; no step runs then."""
        self.state, self.fault = State.NOT_RUNNING_YET, None

    def _keep_fault(self, judgement: Judgement, evidence: Evidence) -> None:
        """Keep what a new process needs to run the step again on another device."""
        rechecked, batches = self.attempt.rechecked, self.batches
        # The caller saves now: the state has to be that of the start of the step.
        self._replayed.restore()
        self.learned.discard()
        here = self.team.here
        self.fault = PendingFault(
            fault=self._fault_id,
            step=self.step,
            rank=here.rank,
            coordinate=here.coordinate,
            host=here.host,
            device=here.device,
            suspects=[
                SuspectRecord.of(call, suspect, codecs=self.codecs)
                for call, suspect in self.attempt.suspects.items()
                if call in rechecked and rechecked[call][0].is_bad
            ],
            batches=batches.kept() if isinstance(batches, ReplayableBatches) else None,
            replayed=self._replayed.kept(codecs=self.codecs),
        )
        self.enter(judgement.event)
        self._decide(
            judgement.exit_code,
            f"step {self.step}: {evidence.describe_rechecked()}: save the state to "
            f"{self._checkpoints} and start again on other devices",
            save=True,
        )
