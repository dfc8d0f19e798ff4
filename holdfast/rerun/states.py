"""States of the rerun machine, the transitions between them, verdicts and exit codes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum, StrEnum

from holdfast.arguments import check_choice, check_int
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
    RUNNING_FOR_ANOTHER_REPLICA = "running_for_another_replica"
    """A value was bad twice: each data replica runs the step of the one before it."""
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
    ASKED = "asked"
    """A value was bad twice, and another data replica gives a second opinion."""
    JUDGED = "judged"
    """Every rejected value has a verdict."""
    NOTHING_LEARNED = "nothing_learned"
    """The rerun leaves it open: devices are the same, or a call was not reached."""
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
    (State.RERUNNING_IN_PLACE, Event.ASKED): State.RUNNING_FOR_ANOTHER_REPLICA,
    (State.RUNNING_FOR_ANOTHER_REPLICA, Event.LEFT): State.NOT_RUNNING_YET,
    (State.RUNNING_FOR_ANOTHER_REPLICA, Event.REJECTED): State.RERUNNING_IN_PLACE,
    (State.RUNNING_FOR_ANOTHER_REPLICA, Event.BAD_AGAIN): State.WILL_RERUN_FROM_CHECKPOINT,
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
    """The same devices computed something else when the step ran again."""
    CORRECT_RESULT = "correct_result"
    """Devices that have none in common compute the same: it is the data, the code or the
    settings."""
    UNDECIDED = "undecided"
    """The step could not be run again in a way that tells."""
    SPOILED_STATE = "spoiled_state"
    """The state was bad before the step: a parameter or a state of the optimizer was not finite, or
    a data replica held other parameters than the others."""
    PERSISTENT_ERROR = "persistent_error"
    """One device computes it wrong, and another one in its place does not: take it out of
    service."""


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
    SPOILED_STATE = 21
    """Start again from a checkpoint of an earlier step."""


EXIT_CODES: Mapping[Verdict, ExitCode] = {
    Verdict.TRANSIENT_ERROR: ExitCode.TRANSIENT_ERROR,
    Verdict.PERSISTENT_ERROR: ExitCode.PERSISTENT_ERROR,
    Verdict.CORRECT_RESULT: ExitCode.CORRECT_RESULT,
    Verdict.UNDECIDED: ExitCode.UNDECIDED,
    Verdict.SPOILED_STATE: ExitCode.SPOILED_STATE,
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
        max_restarts: starts from one fault checkpoint that may leave a fault open, at least 1.
        max_reruns: reruns of one step in one process, at least 1.
    """

    max_restarts: int = 3
    max_reruns: int = 3

    def __post_init__(self) -> None:
        """Check that there is one of each."""
        for name in ("max_restarts", "max_reruns"):
            check_int(getattr(self, name), name=f"Limits: {name}", least=1)


_ACTIONS = ("exit", "continue")


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What follows from the verdict on a fatal value: "exit" with its code, or "continue".

    Args:
        on_transient: the run was good when it was repeated.
        on_persistent: "continue" counts only where the broken device does not take part any more,
            after a restart.
        on_correct: to continue is to train on what was rejected.
        on_undecided: to continue may be to train on wrong values.

    Raises:
        ConfigError: an action is neither of the two.
    """

    on_transient: str = "exit"
    on_persistent: str = "exit"
    on_correct: str = "exit"
    on_undecided: str = "exit"

    def __post_init__(self) -> None:
        """Check the actions."""
        for name in ("on_transient", "on_persistent", "on_correct", "on_undecided"):
            check_choice(getattr(self, name), name=f"Policy: {name}", choices=_ACTIONS)

    def exit_code(self, verdict: Verdict) -> ExitCode | None:
        """Return the code that a verdict on a fatal value ends the run with; None to continue."""
        action = {
            Verdict.TRANSIENT_ERROR: self.on_transient,
            Verdict.PERSISTENT_ERROR: self.on_persistent,
            Verdict.CORRECT_RESULT: self.on_correct,
            Verdict.UNDECIDED: self.on_undecided,
        }.get(verdict, "exit")
        return EXIT_CODES[verdict] if action == "exit" else None
