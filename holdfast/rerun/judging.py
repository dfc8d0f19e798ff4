"""What follows from a rerun: verdicts, the next event, an exit code.

Everything here is a pure function of what all ranks know, so every rank comes to the same decision,
and tests walk through all sequences. Whom a verdict blames is decided in `attribution.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from holdfast.rerun.attribution import Attribution, ValueRun, attribute
from holdfast.rerun.states import Event, ExitCode, Limits, Outcome, Policy, Verdict

_WEIGHT = {verdict: i for i, verdict in enumerate(Verdict)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Recheck:
    """One rejected value after a rerun, as far as a verdict depends on it."""

    outcome: Outcome
    fatal: bool = True
    trials: tuple[ValueRun, ...] = ()
    """All runs so far on whatever devices, the first one and this one included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """The consequence of one rerun."""

    event: Event
    verdicts: tuple[Verdict | None, ...]
    """Of each rejected value; None if it is still open."""
    attributions: tuple[Attribution, ...] = ()
    """Of each rejected value."""
    exit_code: ExitCode | None = None

    @property
    def verdict(self) -> Verdict | None:
        """The verdict that stands for all values; None if all are open."""
        return heaviest(self.verdicts)

    @property
    def convicted(self) -> frozenset[str]:
        """The devices that are proved broken."""
        return frozenset(device for each in self.attributions for device in each.convicted)

    @property
    def suspects(self) -> frozenset[str]:
        """The devices that open values lie between."""
        return frozenset(
            device
            for each, verdict in zip(self.attributions, self.verdicts, strict=True)
            if verdict in (None, Verdict.UNDECIDED)
            for device in each.suspects
        )


def judge_rerun_in_place(
    rechecks: Sequence[Recheck],
    *,
    new_is_fatal: Sequence[bool],
    num_reruns: int,
    limits: Limits,
    policy: Policy,
) -> Judgement:
    """Return the consequence of a rerun in the same process.

    Args:
        rechecks: the values that were rejected before, of all ranks.
        new_is_fatal: of each value that was rejected in this rerun for the first time.
        num_reruns: reruns of this step in this process, this one included.
        limits: when to give up.
        policy: which verdicts end the run.
    """
    attributions = tuple(
        Attribution(verdict=None if each.outcome.is_bad else _in_place(each), suspects=_fed(each))
        for each in rechecks
    )
    verdicts = tuple(each.verdict for each in attributions)
    judged = partial(Judgement, verdicts=verdicts, attributions=attributions)
    if any(each.outcome.is_bad for each in rechecks):
        return judged(event=Event.BAD_AGAIN, exit_code=ExitCode.RESUME_TO_DISAMBIGUATE)
    exit_code = _exit_code(rechecks, verdicts, policy)
    if new_is_fatal and exit_code is None:
        if num_reruns < limits.max_reruns:
            return judged(event=Event.REJECTED)
        exit_code = policy.exit_code(Verdict.UNDECIDED) if any(new_is_fatal) else None
    return judged(event=Event.JUDGED, exit_code=exit_code)


def judge_second_opinion(rechecks: Sequence[Recheck], *, policy: Policy) -> Judgement:
    """Return the consequence of a run on another data replica, in the same process.

    Args:
        rechecks: the values that were bad twice, of all ranks, and came out again elsewhere.
        policy: which verdicts end the run. A persistent error of a fatal value always does: the
            broken device is still there.
    """
    attributions = tuple(attribute([each.trials for each in rechecks]))
    verdicts = tuple(
        # Another bad value on the other replica: devices elsewhere may tell, so it is not final.
        None if each.verdict is Verdict.UNDECIDED else each.verdict
        for each in attributions
    )
    judged = partial(Judgement, verdicts=verdicts, attributions=attributions)
    if None in verdicts:
        return judged(event=Event.BAD_AGAIN, exit_code=ExitCode.RESUME_TO_DISAMBIGUATE)
    is_broken = any(
        each.fatal and verdict is Verdict.PERSISTENT_ERROR
        for each, verdict in zip(rechecks, verdicts, strict=True)
    )
    exit_code = _exit_code(rechecks, verdicts, Policy() if is_broken else policy)
    event = Event.BAD_AGAIN if exit_code is not None else Event.REJECTED
    return judged(event=event, exit_code=exit_code)


def judge_rerun_from_checkpoint(
    rechecks: Sequence[Recheck],
    *,
    new_is_fatal: Sequence[bool],
    num_restarts: int,
    limits: Limits,
    policy: Policy,
    was_given_up: bool = False,
) -> Judgement:
    """Return the consequence of a rerun in a new process.

    Args:
        rechecks: the values that were bad twice, of all ranks.
        new_is_fatal: of each value that was rejected in this rerun for the first time.
        num_restarts: starts from this fault checkpoint, this one included.
        limits: when to give up.
        policy: which verdicts end the run.
        was_given_up: True if the fault was undecided once: a start in which all values are good
            continues then, whatever else remains open. Otherwise a job that gets fresh devices at
            every start would never be through.
    """
    attributions = tuple(attribute([each.trials for each in rechecks]))
    known = tuple(each.verdict for each in attributions)
    verdicts = tuple(each or Verdict.UNDECIDED for each in known)
    judged = partial(Judgement, verdicts=verdicts, attributions=attributions)
    if None in known:
        if was_given_up and all(each.outcome is Outcome.GOOD for each in rechecks):
            return judged(event=Event.REJECTED if new_is_fatal else Event.JUDGED)
        if num_restarts < limits.max_restarts:
            return Judgement(
                event=Event.NOTHING_LEARNED,
                verdicts=known,
                attributions=attributions,
                exit_code=ExitCode.RESUME_TO_DISAMBIGUATE,
            )
    exit_code = _exit_code(rechecks, verdicts, policy)
    is_done = exit_code is not None or not new_is_fatal
    return judged(event=Event.JUDGED if is_done else Event.REJECTED, exit_code=exit_code)


def _fed(recheck: Recheck) -> frozenset[str]:
    """The devices that fed a value when it was bad first."""
    return frozenset(recheck.trials[0].devices.values()) if recheck.trials else frozenset()


def _in_place(recheck: Recheck) -> Verdict:
    """The verdict on a value that was not bad again."""
    is_good = recheck.outcome is Outcome.GOOD
    return Verdict.TRANSIENT_ERROR if is_good else Verdict.UNDECIDED


def _exit_code(
    rechecks: Sequence[Recheck], verdicts: Sequence[Verdict | None], policy: Policy
) -> ExitCode | None:
    """Return the code of the heaviest verdict on a fatal value that ends the run; None for none."""
    pairs = zip(rechecks, verdicts, strict=True)
    fatal = [verdict for each, verdict in pairs if each.fatal and verdict is not None]
    ending = heaviest([each for each in fatal if policy.exit_code(each) is not None])
    return None if ending is None else policy.exit_code(ending)


def heaviest(verdicts: Sequence[Verdict | None]) -> Verdict | None:
    """The verdict that stands for several; None if all are open."""
    known = [each for each in verdicts if each is not None]
    return max(known, key=_WEIGHT.__getitem__, default=None)
