"""The course of a machine: from state to state, and each step from its first run to a decision.

    Phase 1: a step starts         `begin`, and with a pending fault `_consider_fault`
    Phase 2: it runs               in the caller's loop; `attempt` takes the calls of each run
    Phase 3: all ranks report      `conclude`: nothing was rejected, or the step runs again
    Phase 4: a rerun is judged     `_follow`: a verdict, another rerun, another replica's opinion,
                                   or another restart
    Phase 5: the fault is kept     `_keep_fault`: for a process on another device

There are no threads and no locks: everything happens in calls of the loop. A collective method is
collective on every path: each rank acts on what `Team` has brought to all ranks, never on what it
alone knows. Otherwise one rank would wait in a collective that the others never enter.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from holdfast.errors import ConfigError, FaultError, HoldfastError, shorten_ranks, some_of
from holdfast.format.values import Codecs
from holdfast.rerun.attempt import Attempt, Call, Suspect, trial_of
from holdfast.rerun.attribution import ValueRun
from holdfast.rerun.entry import PendingFault, kind_of
from holdfast.rerun.evidence import Evidence
from holdfast.rerun.journal import FaultHistory
from holdfast.rerun.judging import (
    Judgement,
    heaviest,
    judge_rerun_from_checkpoint,
    judge_rerun_in_place,
    judge_second_opinion,
)
from holdfast.rerun.observations import Observations
from holdfast.rerun.places import Place
from holdfast.rerun.reactions import Reactions
from holdfast.rerun.replay import ReplayableBatches
from holdfast.rerun.replayed import Replayed
from holdfast.rerun.rules import Learned
from holdfast.rerun.second_opinion import SecondOpinion
from holdfast.rerun.states import (
    Decision,
    Event,
    ExitCode,
    Limits,
    Mode,
    Outcome,
    Policy,
    State,
    Verdict,
    next_state,
)
from holdfast.rerun.statistics import Comparison, DeterminismStatistics
from holdfast.rerun.team import Team
from holdfast.rerun.training_state import MAX_NAMED, TrainingState

_RUNNING = (
    State.INITIAL_RUN,
    State.RERUNNING_IN_PLACE,
    State.RUNNING_FOR_ANOTHER_REPLICA,
    State.RERUNNING_FROM_CHECKPOINT,
)
_OTHER_BATCHES = (
    "it has taken batches of an iterator of machine.replayable that `attempts` was not given, and "
    "that a rerun would continue behind them; pass that one, or make one iterator of several "
    "sources: machine.replayable(zip(first, second))"
)
_WORDS = {
    None: "no verdict",
    Verdict.TRANSIENT_ERROR: "a transient error",
    Verdict.CORRECT_RESULT: "the correct result: look at the data, the code and the settings",
    Verdict.UNDECIDED: "undecided",
    Verdict.PERSISTENT_ERROR: "a persistent error",
    Verdict.SPOILED_STATE: "the state was bad before the step",
}


def _ranks_of(places: Sequence[Place]) -> str:
    return f"ranks {shorten_ranks([each.rank for each in places])}"


class Course:
    """The state of a machine, the step that runs, and the fault that waits for a verdict.

    Args:
        team: the ranks.
        mode: of the machine.
        replayed: restores buffers and random streams before a rerun.
        limits: numbers of reruns and restarts after which the machine gives up.
        policy: which verdicts end the run.
        state: parameters and optimizer states.
        codecs: for batches of a user's own types.
        report_every: steps between two reports on determinism.
        checkpoints: directory of fault checkpoints, for messages.
        asks_replicas: True for second opinions within the step.
        reactions: what else happens around faults.
    """

    def __init__(
        self,
        team: Team,
        *,
        mode: Mode,
        replayed: Replayed,
        limits: Limits,
        policy: Policy,
        state: TrainingState,
        codecs: Codecs,
        report_every: int,
        checkpoints: object,
        asks_replicas: bool,
        reactions: Reactions,
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
        self.spoiled: set[int] = set()
        """Steps whose state was not finite when they ran before."""
        self.learned = Learned()
        self.iterators: weakref.WeakKeyDictionary[ReplayableBatches, int] = (
            weakref.WeakKeyDictionary()
        )
        """All that the machine has made and the program still has. How often batches had been taken
        from each when the step started."""
        self._mode = mode
        self._replayed = replayed
        self._limits = limits
        self._policy = policy
        self._training_state = state
        self._comparison = Comparison(team, report_every=report_every)
        self._checkpoints = checkpoints
        self._asks_replicas = asks_replicas
        self._reactions = reactions
        self._opinion = SecondOpinion(
            team, replayed=replayed, state=state, learned=self.learned, codecs=codecs
        )
        self._is_checked = False
        """True once a first step has shown that buffers can be kept."""
        self._was_watched = False
        """True once a step has shown which attributes a run changes."""
        self._were_alike = False
        """True if data replicas held equal parameters before the first step."""
        self._differing: list[Place] = []
        """Those that held other parameters than their replicas at the last look."""

        # Of the step that runs.
        self.step = -1
        self.batches: object = None
        self.attempt = Attempt()
        self._fault_id = ""
        self._num_reruns = 0
        self._num_restarts = 0
        self._restarted = ""
        """The fault that the report has this start from its checkpoint of."""
        self._was_given_up = False
        """True if the fault that is rerun was undecided once."""
        self._confirmed: set[Call] = set()
        self._own_suspects: dict[Call, Suspect] = {}
        """This rank's values that were bad twice, while it runs the step of another replica."""
        self._is_confirming = False
        """True in a run whose results are used, after all values have their verdicts."""
        self.observations = Observations(team)
        self._has_looked = self._has_added = False
        """Whether a rerun has come to its first forward, with gradients of the run before."""
        self._vetoed: bool | None = None
        """Whether a rank has rejected a value, if the sum of an optimizer has carried that."""
        self._passes = ""
        """The fault with a verdict, from a checkpoint, whose step runs as any other."""
        self._has_loaded = False
        """True if an entry was loaded since the last step: of any rank, it may hold a fault."""
        self._unreadable = ""
        """Why the entry that was loaded cannot be read; empty if it can."""

    @property
    def coordinate_of_batches(self) -> str:
        """The coordinate whose batches this rank runs on: its own, but for a second opinion."""
        if self.state is not State.RUNNING_FOR_ANOTHER_REPLICA:
            return self.team.here.coordinate
        return self.team.by_rank[self.team.served_rank].coordinate

    @property
    def statistics(self) -> DeterminismStatistics:
        """Differences between two runs of each step, on this rank."""
        return self._comparison.statistics

    @property
    def is_running(self) -> bool:
        """Return True while a step runs."""
        return self.state in _RUNNING

    # Phase 1: a step starts

    def begin(self, step: int, batches: object) -> bool:
        """Start a step; return False if it is judged without a run. Collective."""
        if self.decision.exit_code is not None:
            raise ConfigError(
                f"step {step}: the machine has decided to end the run with exit code "
                f"{int(self.decision.exit_code)} ({self.decision.message}); save the state if "
                f"`decision.save` is True, and leave the loop"
            )
        self.decision = Decision()
        was_left = self.is_running and step == self.step
        has_taken = was_left and batches is self.batches
        if self.is_running:
            self._leave(is_repeated=was_left)
        self.step, self.batches = step, batches
        self.attempt = Attempt()
        for each in self.iterators:
            self.iterators[each] = each.num_requests
        has_verdicts = self._mode is Mode.VALIDATE_RESULTS
        has_kept = not has_verdicts and self.fault is not None and self.fault.step == step
        if self._mode is Mode.DISABLED:
            self._use_kept_batches()
            self.learned.discard()  # of a step that was left
            self._vetoed = None
            return True
        self._num_reruns, self._fault_id, self._passes = 0, "", ""
        self._confirmed, self._own_suspects = set(), {}
        self._is_confirming = False
        if not has_verdicts and self._has_loaded:
            self.team.together(self._use_kept_batches, step=step)
        is_first = not self._is_checked and has_verdicts
        if is_first and self._is_spoiled(is_first=True):
            return False
        loaded = self.fault
        later: dict[Call, list[ValueRun]] = {}
        if loaded is not None or self._has_loaded:
            later = self._consider_fault(step)
            self._has_loaded, self._unreadable = False, ""
            if self.decision.exit_code is not None:
                return False
            self.team.together(lambda: self._replay(loaded, batches), step=step)
        suspects: dict[Call, Suspect] = {}
        if loaded is not None and loaded.step == step:
            if self.fault is not None:
                suspects = loaded.suspects_by_call(later)
        elif isinstance(batches, ReplayableBatches) and not has_kept:
            if has_taken:  # before an exception that the loop has caught: the step is not over
                batches.give_back()
            else:
                batches.begin()
        self._replayed.take()
        if self._is_checked and not self._was_watched:  # the first step fills caches, too
            self._replayed.watch()
            self._was_watched = True
        self._training_state.note()
        if was_left:  # with what its runs have added
            self._training_state.watch_gradients()
        self.enter(Event.BEGIN)
        self._start_run(suspects)
        return True

    def _replay(self, loaded: PendingFault | None, batches: object) -> None:
        """Start with the batches, streams and buffers of the fault that was loaded, if any.

        Even if its verdict is known: a source that saved its position continues behind the batches
        of the step, so only the checkpoint still has them.
        """
        if loaded is not None and loaded.step == self.step:
            loaded.replay_batches(batches)
            self._replayed.replay_kept(loaded.replayed, codecs=self.codecs)

    def _leave(self, *, is_repeated: bool) -> None:
        """Give up a step that an exception or a `break` has left.

        Args:
            is_repeated: True if the same step starts again: everything is what it was before.
        """
        self._reactions.run_ends()
        self._training_state.added()
        if self.state is State.RUNNING_FOR_ANOTHER_REPLICA:
            self._opinion.end(self.batches)
        elif is_repeated:
            self._replayed.restore()
        if is_repeated:
            self._training_state.drop_gradients()
        for call, each in self.attempt.rejected.items():
            # Ranks may have left in different runs, so there is no meeting that could judge it.
            self.team.note(
                f"step {self.step}: '{call.name}' on rank {self.team.here.rank} was rejected "
                f"({each.why}), and the loop has left the step: there is no verdict"
            )
        self.enter(Event.LEFT)
        self.learned.discard()

    def _use_kept_batches(self) -> None:
        """Use the batches that only a fault's checkpoint has, without a rerun."""
        if self.fault is not None and self.fault.step != self.step:
            self.team.say(
                f"the checkpoint holds the batches of step {self.fault.step}, but the run "
                f"continues at step {self.step}: they are dropped"
            )
        self._replay(self.fault, self.batches)
        self.fault = None  # not before: if they were refused, the step may start again with them

    def _consider_fault(self, step: int) -> dict[Call, list[ValueRun]]:
        """Decide with all ranks whether the pending fault is rerun now. Collective.

        Returns:
            What earlier starts from its checkpoint have shown of this rank's values.
        """
        at = -1 if self.fault is None else self.fault.step
        self._fault_id, history, is_one = self.team.consider(
            self.fault, unreadable=self._unreadable
        )
        if not is_one:
            return self._drop_fault("the ranks have loaded different faults")
        if self.fault is None:
            return {}
        is_known = self.team.arrangement in history.arrangements
        if history.is_final or (history.verdict and is_known):
            self._passes = self._fault_id
            words = _WORDS[Verdict(history.verdict)]
            return self._drop_fault(f"its verdict is known: {words}")
        if at != step:
            return self._drop_fault(f"the run continues at step {step}")
        if self.fault.experts not in (None, self.team.experts):  # the same on all ranks
            return self._drop_fault("experts are laid out otherwise here, so no rank does its work")
        if self._restarted != self._fault_id:  # else the loop has left the step, in this start
            # Starts on devices that were never tried are not counted against the fault.
            if history.num_restarts >= self._limits.max_restarts and is_known:
                self._give_up(at, history)
                return {}
            self._num_restarts = history.num_restarts + 1
            self._was_given_up = bool(history.verdict)
            self.record("restart", number=self._num_restarts, places=self._places())
            self._restarted = self._fault_id
        return {
            Call(each.call, each.occurrence): each.trials
            for each in history.trials
            if each.coordinate == self.team.here.coordinate
        }

    def _give_up(self, step: int, history: FaultHistory) -> None:
        """End with an undecided fault: starts from its checkpoint end before they tell."""
        self._record_verdict(Verdict.UNDECIDED, exit_code=ExitCode.UNDECIDED)
        self.enter(Event.JUDGED)
        self.fault = None
        self._decide(
            ExitCode.UNDECIDED,
            f"step {step}: {history.num_restarts} starts from its checkpoint ended without a "
            f"verdict: {_WORDS[Verdict.UNDECIDED]}",
            verdict=Verdict.UNDECIDED,
        )

    def _drop_fault(self, why: str) -> dict[Call, list[ValueRun]]:
        """Drop the pending fault; the step runs like any other."""
        step = -1 if self.fault is None else self.fault.step
        self.record("dropped", why=why)
        if self.fault is not None:  # a rank may have none, if its entry could not be read
            self.enter(Event.DROPPED)
        self.fault, self._fault_id = None, ""
        of_step = "" if step == -1 else f" of step {step}"
        self.team.say(f"the fault{of_step} that the checkpoint holds is dropped: {why}")
        return {}

    def _places(self) -> list[dict[str, Any]]:
        return [msgspec.structs.asdict(place) for place in self.team.places]

    # Phase 2: it runs

    def _start_run(self, suspects: dict[Call, Suspect]) -> None:
        self._vetoed = None
        self._has_added = self._has_looked = False
        is_rerun = self.state is not State.INITIAL_RUN
        if is_rerun:
            self._training_state.drop_gradients()
            self._training_state.watch_gradients()
        is_hidden = is_rerun and self._training_state.has_hidden_gradients()
        looks = is_hidden or self._training_state.waits_for_forward
        self.attempt = Attempt(
            suspects=suspects,
            confirmed=self._confirmed,
            keeps_values=self._mode is Mode.REPORT_DETERMINISM_STATS,
        )
        self._reactions.run_begins(
            step=self.step,
            coordinate=self.coordinate_of_batches,
            is_rerun=is_rerun,
            device=self.team.here.identity,
            at_forward=self._look_for_gradients if looks else None,
        )

    def _look_for_gradients(self, _: object) -> None:
        """See at the first forward of a rerun whether the loop has dropped gradients."""
        if not self._has_looked:
            self._has_looked = True
            is_rerun = self.state is not State.INITIAL_RUN
            self._has_added = is_rerun and self._training_state.has_hidden_gradients()
            self._training_state.look_at_forward()

    def _run_again(self, suspects: dict[Call, Suspect] | None, *, why: str) -> bool:
        """Run the step again in place, or raise on all ranks if that cannot be. Collective.

        Args:
            suspects: this rank's values that were rejected; None for a run whose results are used.
            why: the step and what has happened in it.
        """
        self._refuse_rerun(why)
        self._is_confirming = suspects is None
        self.team.say(f"{why}: it runs again{', to be used' if suspects is None else ''}")
        return self._rerun(suspects or {})

    def _rerun(self, suspects: dict[Call, Suspect]) -> bool:
        """Restore everything to the start of the step, for another run in place."""
        self.enter(Event.REJECTED)
        self.learned.discard()
        self._num_reruns += 1
        self.team.together(self._bring_back, step=self.step)
        if self._mode is Mode.VALIDATE_RESULTS or not self._was_watched:  # others rerun every step
            self._replayed.watch()
            self._was_watched = True
        if isinstance(self.batches, ReplayableBatches):
            self.batches.rewind()
        self._start_run(suspects)
        return True

    def _bring_back(self) -> None:
        """Restore what the step has started with; ConfigError if it cannot be brought back."""
        self._replayed.restore()
        refusal = self._refusal_of_settings()
        if refusal is not None:
            raise refusal

    def vetoes(self) -> bool:
        """Return True if this rank does not want the step to be updated, as things are now."""
        if not self.is_running:
            return False
        self.attempt.judge()
        if self._mode is Mode.REPORT_DETERMINISM_STATS:
            return self.state is State.INITIAL_RUN  # the second run is the one that counts
        is_judged = self.state is not State.INITIAL_RUN and not self._is_confirming
        return is_judged or bool(self.attempt.rejected or self.observations)

    @property
    def has_voted(self) -> bool:
        """Return True if the sum of an optimizer has carried this rank's word in this run."""
        return self._vetoed is not None

    def take_decision(self, vetoed: bool) -> None:
        """Take from the sum of an optimizer whether any rank has vetoed."""
        self._vetoed = vetoed

    # Phase 3: all ranks report

    def conclude(self) -> bool:
        """End a run of the step; return whether it is run again. Collective."""
        if self._mode is Mode.DISABLED:
            self.learned.commit()
            return False
        self.attempt.judge()
        self._reactions.run_ends()
        self._name_changes()
        if self._mode is Mode.REPORT_DETERMINISM_STATS:
            return self._conclude_comparison()
        changed = self._refusal_of_changes()
        is_plain = self.state is State.INITIAL_RUN or self._is_confirming
        if is_plain and not self._any_rejected(changed is not None):
            self._accept()
            return False
        self.team.agree(changed, phase="changes")
        if self.state is State.RUNNING_FOR_ANOTHER_REPLICA:
            return self._conclude_opinion()
        self.observations.report(step=self.step)
        evidence = self.team.gather(self.attempt, step=self.step)
        if is_plain and not evidence.new_is_fatal:
            if self._vetoed:  # the optimizer has left the step out
                why = f"step {self.step}: its update has waited for what was observed before it"
                return self._run_again(None, why=why)
            self._accept()
            return False
        if self.state is State.INITIAL_RUN:
            self._fault_id = self.team.name_fault()
            self.record("rejected", values=evidence.rejected())
            why = f"step {self.step}: {evidence.describe_rejected()}"
            return self._run_again(self.attempt.rejected, why=why)
        if self.state is State.RERUNNING_IN_PLACE:
            judgement = judge_rerun_in_place(
                evidence.rechecks,
                new_is_fatal=evidence.new_is_fatal,
                num_reruns=self._num_reruns,
                limits=self._limits,
                policy=self._policy,
            )
        else:
            judgement = judge_rerun_from_checkpoint(
                evidence.rechecks,
                new_is_fatal=evidence.new_is_fatal,
                num_restarts=self._num_restarts,
                limits=self._limits,
                policy=self._policy,
                was_given_up=self._was_given_up,
            )
        return self._follow(judgement, evidence)

    def _name_changes(self) -> None:
        """Name what a run has changed, and a rerun would start with."""
        names = self._replayed.changed_attributes()
        if names:
            self.team.note(
                f"step {self.step}: a run on rank {self.team.here.rank} has changed attributes of "
                f"modules ({some_of(names, most=MAX_NAMED)}), which a rerun does not bring "
                f"back: it would start with what the run before has left there. If a run reads "
                f"them (a counter, a queue), pass Replayed(hooks=[(save, restore)]), or keep them "
                f"in buffers; a random generator: Replayed(streams=[RNG(generators=…)])"
            )
        names = self._replayed.changed_others()
        if names and self._vetoed is not False:  # an accepted step is not run again
            self.team.note(
                f"step {self.step}: a run on rank {self.team.here.rank} has changed tensors of "
                f"modules that the machine does not know ({some_of(names, most=MAX_NAMED)}), and a "
                f"rerun would change them once more. Change them after the loop over attempts (an "
                f"average of the parameters, a metric), or pass Replayed(hooks=[(save, restore)])"
            )

    def _any_rejected(self, is_refused: bool) -> bool:
        """Return True if any rank has something to say. Collective, unless a sum has carried it."""
        if self._vetoed is not None:
            return self._vetoed
        has_rejected = is_refused or bool(self.attempt.rejected or self.observations)
        return self.team.any_rank(has_rejected, phase=f"step {self.step}")

    def _refusal_of_changes(self) -> ConfigError | None:
        """Return an error if parameters were changed in the run, or gradients of two runs added.

        It counts for nothing if an optimizer has asked, and no rank had a veto: the step is over.
        """
        if self._has_added:
            return ConfigError(
                f"step {self.step}: gradients of the run before were in buckets of an optimizer "
                f"when the step ran again, which has added its own to them; drop gradients at the "
                f"start of each run, or pass RerunMachine(optimizers=[optimizer])"
            )
        added = self._training_state.added()
        if added:
            return ConfigError(
                f"step {self.step}: gradients that were there before the step "
                f"({some_of(added, most=MAX_NAMED)}), with those of the run before, were still "
                f"there when the step ran again, which has added its own to them; drop gradients "
                f"at the start of each run, and let one step be all microbatches of an update"
            )
        if not self._replayed.has_hooks and not self.has_voted:
            # At the first step, and not at the first fault. Hooks may bring them back.
            refusal = self._refusal_of_settings()
            if refusal is not None:
                return refusal
        changed = self._training_state.changed()
        if not changed:
            return None
        return ConfigError(
            f"step {self.step}: parameters have changed inside the loop over attempts "
            f"({some_of(changed, most=MAX_NAMED)}), so the step cannot run again as it was; step "
            f"the optimizer after the loop, or pass veto=machine to its step"
        )

    def _refusal_of_settings(self) -> ConfigError | None:
        """Return an error if hyperparameters are not those that the step has started with."""
        changed = self._training_state.changed_settings()
        if not changed:
            return None
        return ConfigError(
            f"step {self.step}: hyperparameters have changed inside the loop over attempts "
            f"({some_of(changed, most=MAX_NAMED)}), and a rerun would change them once more; step "
            f"a schedule after the loop, or only if the step of the optimizer had no veto"
        )

    def _accept(self) -> None:
        """Accept the step: no rank has rejected a value."""
        self.learned.commit()
        self.enter(Event.ACCEPTED if self.state is State.INITIAL_RUN else Event.JUDGED)
        if self._passes:
            self.team.record("retired", step=self.step, fault=self._passes)
        if self.step in self.spoiled:
            self.spoiled.discard(self.step)
            self.team.record("recovered", step=self.step, fault="")
        if not self._is_checked:
            # Batches are kept as they are taken. Buffers are kept only at a fault, which would be
            # too late to find out that one of them cannot be.
            self.team.together(lambda: self._replayed.kept(codecs=self.codecs), step=self.step)
            self._is_checked = True

    def _conclude_comparison(self) -> bool:
        """End one of the two runs of a step whose values are compared. Collective."""
        refusal = None if self.has_voted else self._refusal_of_changes()
        if refusal is None and self._takes_from_others():
            refusal = ConfigError(f"step {self.step}: {_OTHER_BATCHES}")
        self.team.agree(refusal, phase="changes")
        if self.state is State.INITIAL_RUN:
            self._comparison.take_first(self.attempt)
            return self._rerun({})
        is_due = self._comparison.take_second(self.attempt)
        self.observations.report(step=self.step)
        evidence = self.team.gather(self.attempt, step=self.step)
        self.enter(Event.JUDGED)
        self.learned.commit()
        if any(evidence.new_is_fatal):
            raise FaultError(f"step {self.step}: {evidence.describe_rejected()}")
        if evidence.new_is_fatal:
            self.team.say(f"step {self.step}: {evidence.describe_rejected()}: the run continues")
        if is_due:
            self.report_statistics()
        return False

    def _refuse_rerun(self, why: str) -> None:
        """Raise ConfigError on all ranks if a rerun could not be what the run was. Collective."""
        error: HoldfastError | None = None
        batches = self.batches
        start = f"{why}; the step cannot run again"
        if batches is not None and not isinstance(batches, ReplayableBatches):
            error = ConfigError(
                f"{start}, because `attempts` was given {kind_of(batches)}, which cannot be "
                f"rewound; pass machine.replayable(iterator)"
            )
        elif self._takes_from_others():
            error = ConfigError(f"{start}: {_OTHER_BATCHES}")
        elif self._reactions.forgotten:
            names = some_of(self._reactions.forgotten, most=MAX_NAMED)
            error = ConfigError(
                f"{start}, because the machine does not know the buffers of {names}; pass "
                f"replayed=Replayed(modules=[model])"
            )
        self.team.agree(error, phase="batches")

    def _takes_from_others(self) -> bool:
        """Return True if the step has taken batches that a rerun would not repeat."""
        return any(
            each.num_requests != num_requests
            for each, num_requests in self.iterators.items()
            if each is not self.batches
        )

    def report_statistics(self) -> None:
        """Report the differences of all ranks so far. Collective."""
        fields, table = self._comparison.report()
        self.record("determinism", **fields)
        self.team.say(f"step {self.step}: two runs of each step, compared\n{table}")

    # Phase 4: a rerun is judged

    def _follow(self, judgement: Judgement, evidence: Evidence) -> bool:
        """Act on a judgement; return whether the step is run again. Collective."""
        values = evidence.rechecked(judgement.verdicts)
        is_in_place = self.state is State.RERUNNING_IN_PLACE
        suspects = evidence.identified(judgement.suspects)
        event = "rerun_in_place" if is_in_place else "rerun_from_checkpoint"
        self.record(event, values=values, suspects=suspects)
        if judgement.event is Event.BAD_AGAIN:
            return self._look_closer(judgement, evidence)
        message = f"step {self.step}: {evidence.describe_rechecked()}"
        if judgement.event is Event.NOTHING_LEARNED:
            self.team.together(self._bring_back, step=self.step)
            self.enter(judgement.event)
            self._decide(
                judgement.exit_code,
                f"{message}: this start ({self._num_restarts} of {self._limits.max_restarts}) "
                f"leaves it open: {evidence.describe_open(judgement)}",
            )
            return False
        if evidence.rechecks:
            message = self._conclude_fault(judgement, evidence, values, message)
        verdict = judgement.verdict
        if not is_in_place and verdict is not None:
            self._passes = self._fault_id
        self.fault = None
        has_new = bool(evidence.new_is_fatal)
        if has_new:  # another fault, with its own id
            self._fault_id = self.team.name_fault()
            self.record("rejected", values=evidence.rejected())
            message += f"; {evidence.describe_rejected()}"
        if judgement.event is Event.REJECTED:
            self._confirm_bad()
            return self._run_again(self.attempt.rejected, why=message)
        if has_new and judgement.exit_code in (None, ExitCode.UNDECIDED):
            verdict = heaviest([verdict, Verdict.UNDECIDED])
            self._record_verdict(Verdict.UNDECIDED, exit_code=judgement.exit_code)
        if judgement.exit_code is None and self._vetoed:
            # The optimizer has left the step out until the verdict was known.
            self._confirm_bad()
            self._confirmed |= self.attempt.rejected.keys()
            self.decision = Decision(verdict=verdict, message=message)
            return self._run_again(None, why=message)
        self.enter(judgement.event)
        if judgement.exit_code is None:
            self.learned.commit()
            if self._passes:
                self.team.record("retired", step=self.step, fault=self._passes)
        else:
            self.learned.discard()
        self._decide(judgement.exit_code, message, verdict=verdict)
        return False

    def _conclude_fault(
        self, judgement: Judgement, evidence: Evidence, values: list[dict[str, Any]], message: str
    ) -> str:
        """Record the verdict on a fault; return the message with its words. Collective.

        It is recorded before the loop hears of it: if the process dies in between, the next start
        has it in the report, and does not run the step again.
        """
        verdict = judgement.verdict
        if verdict is None:
            return message
        devices = evidence.blamed(judgement)
        self._record_verdict(
            verdict,
            exit_code=judgement.exit_code,
            devices=devices,
            convicted=evidence.identified(judgement.convicted),
            suspects=evidence.identified(judgement.suspects),
            values=values,
        )
        blamed = "; ".join(devices)
        return f"{message}: {_WORDS[verdict]}{blamed and f' of {blamed}'}"

    def _confirm_bad(self) -> None:
        """Leave values with a verdict alone: they would be a fault without end."""
        self._confirmed |= {
            call
            for call, (outcome, _, _) in self.attempt.rechecked.items()
            if outcome is not Outcome.GOOD
        }

    def _look_closer(self, judgement: Judgement, evidence: Evidence) -> bool:
        """A value was bad twice: the state, another replica, or another process tells more.

        Returns:
            Whether the step is run again.
        """
        # The state has to be that of the start of the step, for every look at it.
        self.team.together(self._bring_back, step=self.step)
        self.learned.discard()
        suspects = self._bad_suspects()
        if self._is_spoiled():
            return False
        results = self._reactions.diagnose(self.team, evidence)
        if results:
            self.record("diagnostics", results=results)
        if self._asks_replicas and self._opinion.can_tell(evidence.bad_again()):
            if isinstance(self.batches, ReplayableBatches):
                self.batches.rewind()
            others, why = None, f"{_ranks_of(self._differing)} hold other parameters"
            if not self._differing:
                others, why = self._opinion.exchange(self.step, self.batches, suspects)
            if others is not None:
                self.team.say(
                    f"step {self.step}: {evidence.describe_rechecked()}: another data replica runs "
                    f"it"
                )
                self._own_suspects = suspects
                self.enter(Event.ASKED)
                self._start_run(others)
                return True
            self.team.say(f"step {self.step}: no second opinion of another data replica: {why}")
        between = evidence.describe_open(judgement)
        message = f"step {self.step}: {evidence.describe_rechecked()}: {between}"
        self._keep_fault(judgement, suspects, message)
        return False

    def _bad_suspects(self) -> dict[Call, Suspect]:
        """Return this rank's values that were bad once more."""
        rechecked = self.attempt.rechecked
        return {
            call: suspect
            for call, suspect in self.attempt.suspects.items()
            if call in rechecked and rechecked[call][0].is_bad
        }

    def _conclude_opinion(self) -> bool:
        """End the run of another replica's step; return whether the own one runs again."""
        evidence = self.team.gather(self.attempt, step=self.step, now=self.team.with_partners)
        judgement = judge_second_opinion(evidence.rechecks, policy=self._policy)
        self.team.together(lambda: self._opinion.end(self.batches), step=self.step)
        values = evidence.rechecked(judgement.verdicts)
        suspects = evidence.identified(judgement.suspects)
        self.record("second_opinion", values=values, suspects=suspects)
        own = self._own_suspects
        for each in evidence.of_rank(self.team.here.rank):
            call = Call(each.call, each.occurrence)
            if call in own:
                trial = trial_of(each.first_fed_by, each.fed_by, each.outcome)
                own[call] = msgspec.structs.replace(own[call], trials=(*own[call].trials, trial))
        message = f"step {self.step}: {evidence.describe_rechecked()}"
        if judgement.exit_code is ExitCode.RESUME_TO_DISAMBIGUATE:
            message += f": {evidence.describe_open(judgement)}"
        else:
            message = self._conclude_fault(judgement, evidence, values, message)
        if judgement.event is Event.BAD_AGAIN:
            self._keep_fault(judgement, own, message)
            return False
        self._confirmed |= own.keys()
        self.decision = Decision(verdict=judgement.verdict, message=message)
        return self._run_again(None, why=message)

    def _is_spoiled(self, *, is_first: bool = False) -> bool:
        """Return True, with a decision, if the state was bad before the step. Collective.

        It is not finite on some rank, or a data replica has other parameters than the others. That
        replicas are meant to be equal has to be known: they were, before the first step.
        """
        is_compared = self._asks_replicas and bool(self.team.partners)
        state = self._training_state
        values, self._differing = self.team.gather_spoiled(
            state.not_finite(is_first=is_first and self.step not in self.spoiled),
            digest=state.digest(is_sample=is_first) if is_compared and state.is_known else "",
            step=self.step,
            is_first=is_first,
        )
        if is_first:
            self._were_alike = not self._differing
        has_drifted = bool(self._differing) and not is_first and self._were_alike
        if not values and not has_drifted:
            return False
        self._fault_id = self._fault_id or self.team.name_fault()
        if values:
            first = values[0]
            names = ", ".join(repr(name) for name in first["tensors"])
            why = (
                f"{first['num_tensors']} tensors of rank {first['rank']} have a NaN or an infinity "
                f"({names}); an update, a reduction or a gather before it has done that"
            )
        else:
            values = [msgspec.structs.asdict(each) for each in self._differing]
            why = (
                f"the parameters of {_ranks_of(self._differing)} are not those of their data "
                f"replicas any more, as they were before the first step; an update, a message or "
                f"the memory of a device has changed them (if they are meant to differ: "
                f"RerunMachine(second_opinion=False))"
            )
            self.record("drift", message=f"step {self.step}: {why}", values=values)
        self._record_verdict(Verdict.SPOILED_STATE, exit_code=ExitCode.SPOILED_STATE, values=values)
        if self.is_running or self.state is State.WILL_RERUN_FROM_CHECKPOINT:
            self.enter(Event.JUDGED)
        self.fault = None
        self._decide(
            ExitCode.SPOILED_STATE,
            f"step {self.step}: {_WORDS[Verdict.SPOILED_STATE]}: {why}. Continue from a checkpoint "
            f"of an earlier step",
            verdict=Verdict.SPOILED_STATE,
        )
        return True

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
        event = self.team.record_verdict(verdict, step=self.step, fault=self._fault_id, **fields)
        self.judged.add(self._fault_id)
        self._reactions.verdict_is_known(self.team, event)

    # Phase 5: the fault is kept for another process

    def load_fault(self, fault: PendingFault) -> None:
        """Take the pending fault of a checkpoint: its step is to run again."""
        self.fault = fault
        self.enter(Event.LOADED)

    def expect_fault(self, *, unreadable: str = "") -> None:
        """Let all ranks compare what they have loaded, when the next step starts.

        Args:
            unreadable: why this rank's entry cannot be read; empty if it can.
        """
        self._has_loaded, self._unreadable = True, unreadable

    def forget_fault(self) -> None:
        """Drop any pending fault, because another state is loaded; no step runs then."""
        if self.state is State.RUNNING_FOR_ANOTHER_REPLICA:
            # The step was left. What else it has borrowed is overwritten by the load.
            assert isinstance(self.batches, ReplayableBatches)
            self.batches.give_back()
        self.state, self.fault, self._restarted = State.NOT_RUNNING_YET, None, ""

    def _keep_fault(
        self, judgement: Judgement, suspects: Mapping[Call, Suspect], message: str
    ) -> None:
        """Keep what a new process needs to run the step again on another device."""
        # The checkpoint is one of the start of the step: a save refuses gradients in buckets.
        self._training_state.drop_gradients()
        replayed = self.team.together(
            lambda: self._replayed.kept(codecs=self.codecs), step=self.step
        )
        batches = self.batches
        here = self.team.here
        self.fault = PendingFault(
            fault=self._fault_id,
            step=self.step,
            rank=here.rank,
            coordinate=here.coordinate,
            host=here.host,
            device=here.device,
            suspects=[*suspects.values()],
            batches=batches.kept() if isinstance(batches, ReplayableBatches) else None,
            replayed=replayed,
            experts=self.team.experts,
        )
        self.enter(judgement.event)
        is_open = judgement.exit_code is ExitCode.RESUME_TO_DISAMBIGUATE
        then = "start again on other devices" if is_open else "start again from there"
        self._decide(
            judgement.exit_code,
            f"{message}: save the state to {self._checkpoints} and {then}",
            save=True,
            verdict=None if is_open else judgement.verdict,
        )
