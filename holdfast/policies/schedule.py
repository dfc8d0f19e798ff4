"""One decision about saving for all ranks, from the votes of each."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import msgspec

from holdfast.arguments import check_int
from holdfast.decoding import decode_msgpack_as
from holdfast.errors import ConfigError, disagreement
from holdfast.parallel import Control
from holdfast.parallel.control.guard import Guard
from holdfast.policies.save import Moment, SavePolicy

PHASE = "save when: decide"
"""Name of the collective's phase; `Control` names ranks that wait in it by this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveDecision:
    """The decision about saving at a step, the same on all ranks."""

    save: bool
    """True to save now."""
    stop: bool
    """True if a policy asks the run to stop, after the save if `save` is True."""
    reason: str
    """The reasons of the policies that voted for a save; empty if none did."""
    stop_vote: int
    """The largest vote of the policies that stop the run, a signal's number for signals; else 0."""


class _Ballot(msgspec.Struct, frozen=True, array_like=True):
    """The message of one rank: its step, its policies, and their votes."""

    step: int
    policies: str
    votes: bytes


class SaveSchedule:
    """Collects the votes of the policies after each step, and makes one decision on all ranks.

    Args:
        policy: One policy, or several joined with `|`; the same on all ranks.
        control: The control of the ranks that save together.
        clock: Returns seconds, for `EveryMinutes`.

    Raises:
        ConfigError: A policy cannot start to watch.
    """

    def __init__(
        self,
        policy: SavePolicy,
        *,
        control: Control,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not isinstance(policy, SavePolicy):
            raise ConfigError(f"save_when={policy!r} is not a save policy, such as EverySteps(100)")
        self._policies = policy.leaves()
        self._control = control
        self._clock = clock
        self._began = clock()
        self._saved_step: int | None = None
        self._fired: set[int] = set()
        # The votes for a save that was not made; and of a save that was only decided, its votes,
        # the policies that it is the last one of, and what was known before.
        self._owed = bytes(len(self._policies))
        self._before: tuple[int | None, float, bytes] | None = None
        self._stopping: set[int] = set()
        self._is_first = True
        # The guard needs no call at the end: if `decide` makes one, it has all ranks in step.
        self._guard: Guard[SaveDecision] = Guard(
            control, "maybe_save", is_complete=lambda answers: PHASE in answers
        )
        started: list[SavePolicy] = []
        try:
            for each in self._policies:
                each.start()
                started.append(each)
        except BaseException:
            for each in started:
                each.close()
            raise

    def decide(self, step: int) -> SaveDecision:
        """Decide whether to save after this step. Collective: every rank calls it after each step.

        The step that was last saved or loaded is not saved again. A policy that stops the run asks
        for it only once.

        Raises:
            ConfigError: `step` is not an integer of at least 0.
            PlanError: Ranks are at different steps, or have different policies.
            HoldfastError: The error of a policy on any rank, on all of them.

        Cost: nothing if only the step decides. Otherwise, at the steps that a policy's
        `check_every` divides, one collective of about 50 bytes per rank. The first call always
        makes one, which compares the policies.
        """
        return self._guard.run(lambda: self._decide(step))

    def saved(self, step: int) -> None:
        """Record that a save of this step started or that it was loaded: nothing is owed."""
        self._saved_step, self._began = step, self._clock()
        self._owed, self._before = bytes(len(self._policies)), None

    def not_saved(self) -> None:
        """Take back the save that was decided last and has not started: it was skipped, or failed.

        What has asked for it by a clock, a file or a signal asks again at its next look; a policy
        of steps at its next step, or if it is asked about this one again.
        """
        if self._before is not None:
            self._saved_step, self._began, self._owed = self._before
            self._fired -= self._stopping
            self._before = None

    def close(self) -> None:
        """Let the policies stop watching, each of them, whatever another one raises."""
        with ExitStack() as stack:
            for policy in self._policies:
                stack.callback(policy.close)

    def _decide(self, step: int) -> SaveDecision:
        """Decide about one step; communicate if a policy needs it."""
        step = check_int(step, name="step", least=0)
        looks = [
            number not in self._fired and step % policy.check_every == 0
            for number, policy in enumerate(self._policies)
        ]
        communicates = self._is_first or any(
            looks_now and policy.decided_by != "step"
            for looks_now, policy in zip(looks, self._policies, strict=True)
        )
        error: Exception | None = None
        votes = b""
        try:
            votes = self._votes(step, looks)
        except Exception as caught:
            if not communicates:
                raise
            error = caught
        if communicates:
            votes = self._count(error, step, votes)
        return self._conclude(step, votes)

    def _votes(self, step: int, looks: Sequence[bool]) -> bytes:
        """Return this rank's vote for each policy; 0 if another rank's counts."""
        moment = Moment(step=step, seconds_since_save=self._clock() - self._began)
        own = bytes(
            policy.vote(moment)
            if looks_now and (policy.decided_by != "coordinator" or self._control.is_coordinator)
            else 0
            for looks_now, policy in zip(looks, self._policies, strict=True)
        )
        owed = zip(looks, self._owed, own, strict=True)
        return bytes(max(vote, before * looks_now) for looks_now, before, vote in owed)

    def _count(self, error: Exception | None, step: int, votes: bytes) -> bytes:
        """Join the votes of all ranks; all raise if one cannot vote or is at another step."""
        policies = "; ".join(each.shared() for each in self._policies) if self._is_first else ""
        payload = msgspec.msgpack.encode(_Ballot(step, policies, votes))
        answers = self._control.agree(error, phase=PHASE, payload=payload)
        ballots = [decode_msgpack_as(answer, _Ballot) for answer in answers]
        for name, values in (
            ("step", [ballot.step for ballot in ballots]),
            ("save_when", [ballot.policies for ballot in ballots]),
        ):
            if len(set(values)) > 1:
                raise disagreement("maybe_save", name, values, ranks=self._control.ranks)
        self._is_first = False
        return bytes(map(max, zip(*(ballot.votes for ballot in ballots), strict=True)))

    def _conclude(self, step: int, votes: bytes) -> SaveDecision:
        """Make the decision from the joined votes."""
        asking = [number for number, vote in enumerate(votes) if vote]
        stopping = [number for number in asking if self._policies[number].stop]
        self._fired.update(stopping)
        save = bool(asking) and step != self._saved_step
        if save:
            of_steps = [policy.decided_by == "step" for policy in self._policies]
            owed = bytes(0 if each else vote for each, vote in zip(of_steps, votes, strict=True))
            before = (self._saved_step, self._began, owed)
            self.saved(step)
            self._before, self._stopping = before, set(stopping)
        elif step != self._saved_step:
            # The run has passed it: if the number comes again (from step 0), the state differs.
            self._saved_step = None
        return SaveDecision(
            save=save,
            stop=bool(stopping),
            reason="; ".join(self._policies[number].reason(votes[number]) for number in asking),
            stop_vote=max((votes[number] for number in stopping), default=0),
        )
