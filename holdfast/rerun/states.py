"""States of the rerun machine, the transitions between them, and how outcomes become verdicts.

Everything here is a pure function of what all ranks know, so every rank comes to the same decision,
and tests walk through all sequences.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum

from holdfast.arguments import check_int
from holdfast.errors import ConfigError


class Mode(StrEnum):
    """The work that a machine does."""

    DISABLED = "disabled"
    """Nothing is recorded and nothing is sent; a fatal rejected value is a FaultError."""
    VALIDATE_RESULTS = "validate_results"
    """A step with a rejected value runs again, and the fault gets a verdict."""
    REPORT_DETERMINISM_STATS = "report_determinism_stats"
    """Every step runs twice, and the values of both runs are compared."""


class State(StrEnum):
    """The state of a machine."""

    NOT_RUNNING_YET = "not_running_yet"
    """Between steps."""
    INITIAL_RUN = "initial_run"
    """A step runs for the first time."""
    RERUNNING_IN_PLACE = "rerunning_in_place"
    """A step runs again in the same process, because a value was rejected."""
    WILL_RERUN_FROM_CHECKPOINT = "will_rerun_from_checkpoint"
    """A value was bad twice: the step is to run again in a new process, on another device."""
    RERUNNING_FROM_CHECKPOINT = "rerunning_from_checkpoint"
    """The step runs again in a new process, from the fault checkpoint."""
    RERUNNING_AGAIN_FROM_CHECKPOINT = "rerunning_again_from_checkpoint"
    """That decided nothing (the same device, or the call was not reached): once more, in another
    process."""


class Event(StrEnum):
    """An event that takes a machine from one state to another."""

    BEGIN = "begin"
    """A step starts."""
    ACCEPTED = "accepted"
    """No rank has rejected a value."""
    REJECTED = "rejected"
    """Some rank has rejected a value that was not rejected before."""
    BAD_AGAIN = "bad_again"
    """A rejected value was rejected, or came out the same, in the same process."""
    JUDGED = "judged"
    """Every rejected value has a verdict."""
    NOTHING_LEARNED = "nothing_learned"
    """The rerun could not tell anything: the same device, or a call was not reached."""
    LOADED = "loaded"
    """A checkpoint with a pending fault was loaded."""
    LEFT = "left"
    """The loop left a step before its end, with an exception or a `break`."""
    DROPPED = "dropped"
    """The pending fault is not of this run any more."""


TRANSITIONS: Mapping[tuple[State, Event], State] = {
    (State.NOT_RUNNING_YET, Event.BEGIN): State.INITIAL_RUN,
    (State.NOT_RUNNING_YET, Event.LOADED): State.WILL_RERUN_FROM_CHECKPOINT,
    (State.INITIAL_RUN, Event.ACCEPTED): State.NOT_RUNNING_YET,
    (State.INITIAL_RUN, Event.REJECTED): State.RERUNNING_IN_PLACE,
    (State.INITIAL_RUN, Event.LEFT): State.NOT_RUNNING_YET,
    (State.RERUNNING_IN_PLACE, Event.LEFT): State.NOT_RUNNING_YET,
    (State.RERUNNING_IN_PLACE, Event.JUDGED): State.NOT_RUNNING_YET,
    (State.RERUNNING_IN_PLACE, Event.REJECTED): State.RERUNNING_IN_PLACE,
    (State.RERUNNING_IN_PLACE, Event.BAD_AGAIN): State.WILL_RERUN_FROM_CHECKPOINT,
    (State.WILL_RERUN_FROM_CHECKPOINT, Event.BEGIN): State.RERUNNING_FROM_CHECKPOINT,
    (State.WILL_RERUN_FROM_CHECKPOINT, Event.LOADED): State.WILL_RERUN_FROM_CHECKPOINT,
    (State.WILL_RERUN_FROM_CHECKPOINT, Event.DROPPED): State.NOT_RUNNING_YET,
    (State.WILL_RERUN_FROM_CHECKPOINT, Event.JUDGED): State.NOT_RUNNING_YET,
    (State.RERUNNING_FROM_CHECKPOINT, Event.JUDGED): State.NOT_RUNNING_YET,
    (State.RERUNNING_FROM_CHECKPOINT, Event.REJECTED): State.RERUNNING_IN_PLACE,
    (State.RERUNNING_FROM_CHECKPOINT, Event.LEFT): State.WILL_RERUN_FROM_CHECKPOINT,
    (
        State.RERUNNING_FROM_CHECKPOINT,
        Event.NOTHING_LEARNED,
    ): State.RERUNNING_AGAIN_FROM_CHECKPOINT,
}
"""Every transition there is; any other one is an error. `docs/rerun.md` shows the same table, and a
test compares the two. In mode `report_determinism_stats` every step is rerun in place: REJECTED
after the first run, JUDGED after the second."""


def next_state(state: State, event: Event) -> State:
    """The state after an event; ConfigError for one that cannot happen there."""
    after = TRANSITIONS.get((state, event))
    if after is None:
        raise ConfigError(
            f"the rerun machine cannot take {event.name} in state {state.name}: a loop calls "
            f"`attempts` once for each step, and ends if `decision.exit_code` is not None"
        )
    return after


class Verdict(StrEnum):
    """The cause of a rejected value. In order of weight, the heaviest last."""

    TRANSIENT_ERROR = "transient_error"
    """The device computed something else when the step ran again on it."""
    CORRECT_RESULT = "correct_result"
    """Another device computes the same: it is the data, the code or the settings."""
    UNDECIDED = "undecided"
    """The step could not be run again in a way that tells."""
    PERSISTENT_ERROR = "persistent_error"
    """The device computed it again, and another one does not: take the device out of service."""


_WEIGHT = {verdict: i for i, verdict in enumerate(Verdict)}


class ExitCode(IntEnum):
    """With which code a process ends whose machine asks for an end."""

    RESUME_TO_DISAMBIGUATE = 16
    """Start again from the fault checkpoint, on other devices."""
    TRANSIENT_ERROR = 17
    """Start again; nothing has to be replaced."""
    PERSISTENT_ERROR = 18
    """Start again without the device that the report names."""
    CORRECT_RESULT = 19
    """Devices are right: look at data, code and settings."""
    UNDECIDED = 20
    """The report tells what is known."""


EXIT_CODES: Mapping[Verdict, ExitCode] = {
    Verdict.TRANSIENT_ERROR: ExitCode.TRANSIENT_ERROR,
    Verdict.PERSISTENT_ERROR: ExitCode.PERSISTENT_ERROR,
    Verdict.CORRECT_RESULT: ExitCode.CORRECT_RESULT,
    Verdict.UNDECIDED: ExitCode.UNDECIDED,
}


class Outcome(StrEnum):
    """The outcome of a rejected value in a rerun."""

    GOOD = "good"
    """Accepted, and another value than before."""
    REPRODUCED = "reproduced"
    """The same value, within the tolerance."""
    CHANGED = "changed"
    """Rejected again, with another value."""
    UNREACHED = "unreached"
    """The call was not made."""

    @property
    def is_bad(self) -> bool:
        """True if the value was bad once more."""
        return self in (Outcome.REPRODUCED, Outcome.CHANGED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recheck:
    """One rejected value after a rerun, as far as a verdict depends on it."""

    outcome: Outcome
    fatal: bool = True
    is_same_device: bool = True
    """True if the rerun was on the device that produced the value before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """The consequence of one rerun."""

    event: Event
    verdicts: tuple[Verdict | None, ...]
    """Of each rejected value; None if it is still open."""
    exit_code: ExitCode | None = None
    needs_checkpoint: bool = False
    """True if a fault checkpoint has to be saved before the exit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The next action of a loop after the runs of a step; the same on all ranks.

    Args:
        exit_code: with which the process ends; None to continue.
        save: whether the state has to be saved to `RerunMachine.checkpoints` before.
        verdict: on the values that were rejected; None if none was, or if it is still open.
        message: what has happened, in a sentence; empty if nothing has.
    """

    exit_code: ExitCode | None = None
    save: bool = False
    verdict: Verdict | None = None
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """After how many tries a machine gives up.

    Args:
        max_restarts: starts from one fault checkpoint, at least 1.
        max_reruns: reruns of one step in one process, at least 1.
    """

    max_restarts: int = 3
    max_reruns: int = 3

    def __post_init__(self) -> None:
        """Check that there is one of each."""
        for name in ("max_restarts", "max_reruns"):
            check_int(getattr(self, name), name=f"Limits: {name}", least=1)


def judge_rerun_in_place(
    rechecks: Sequence[Recheck], *, new_is_fatal: Sequence[bool], num_reruns: int, limits: Limits
) -> Judgement:
    """Return the consequence of a rerun in the same process.

    Args:
        rechecks: the values that were rejected before, of all ranks.
        new_is_fatal: of each value that was rejected in this rerun for the first time.
        num_reruns: reruns of this step in this process, this one included.
        limits: when to give up.
    """
    if any(each.outcome.is_bad for each in rechecks):
        open_ones = tuple(None if each.outcome.is_bad else _in_place(each) for each in rechecks)
        return Judgement(
            event=Event.BAD_AGAIN,
            verdicts=open_ones,
            exit_code=ExitCode.RESUME_TO_DISAMBIGUATE,
            needs_checkpoint=True,
        )
    verdicts = tuple(_in_place(each) for each in rechecks)
    exit_code = _exit_code(rechecks, verdicts)
    if new_is_fatal and exit_code is None:
        if num_reruns < limits.max_reruns:
            return Judgement(event=Event.REJECTED, verdicts=verdicts)
        exit_code = ExitCode.UNDECIDED if any(new_is_fatal) else None
    return Judgement(event=Event.JUDGED, verdicts=verdicts, exit_code=exit_code)


def judge_rerun_from_checkpoint(
    rechecks: Sequence[Recheck], *, new_is_fatal: Sequence[bool], num_restarts: int, limits: Limits
) -> Judgement:
    """Return the consequence of a rerun in a new process.

    Args:
        rechecks: the values that were bad twice, of all ranks.
        new_is_fatal: of each value that was rejected in this rerun for the first time.
        num_restarts: starts from this fault checkpoint, this one included.
        limits: when to give up.
    """
    verdicts = tuple(_on_restart(each) for each in rechecks)
    if None in verdicts:
        if num_restarts < limits.max_restarts:
            return Judgement(
                event=Event.NOTHING_LEARNED,
                verdicts=verdicts,
                exit_code=ExitCode.RESUME_TO_DISAMBIGUATE,
            )
        verdicts = tuple(each or Verdict.UNDECIDED for each in verdicts)
    exit_code = _exit_code(rechecks, verdicts)
    if new_is_fatal and exit_code is None:
        return Judgement(event=Event.REJECTED, verdicts=verdicts)
    return Judgement(event=Event.JUDGED, verdicts=verdicts, exit_code=exit_code)


def _in_place(recheck: Recheck) -> Verdict:
    """The verdict on a value that was not bad again."""
    is_good = recheck.outcome is Outcome.GOOD
    return Verdict.TRANSIENT_ERROR if is_good else Verdict.UNDECIDED


def _on_restart(recheck: Recheck) -> Verdict | None:
    """Return the verdict on a value that was bad twice, after a restart; None if it stays open."""
    if recheck.outcome is Outcome.UNREACHED:
        return None
    if recheck.is_same_device:
        # It was bad twice, and good in the same place: whatever it was has gone.
        return Verdict.TRANSIENT_ERROR if recheck.outcome is Outcome.GOOD else None
    if recheck.outcome is Outcome.GOOD:
        return Verdict.PERSISTENT_ERROR
    is_same = recheck.outcome is Outcome.REPRODUCED
    return Verdict.CORRECT_RESULT if is_same else Verdict.UNDECIDED


def _exit_code(rechecks: Sequence[Recheck], verdicts: Sequence[Verdict | None]) -> ExitCode | None:
    """Return the code of the heaviest verdict on a fatal value; None if no value is fatal."""
    pairs = zip(rechecks, verdicts, strict=True)
    fatal = [verdict for each, verdict in pairs if each.fatal and verdict is not None]
    return EXIT_CODES[max(fatal, key=_WEIGHT.__getitem__)] if fatal else None


def heaviest(verdicts: Sequence[Verdict]) -> Verdict | None:
    """The verdict that stands for several; None for none."""
    return max(verdicts, key=_WEIGHT.__getitem__, default=None)
