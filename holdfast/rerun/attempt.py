"""One run of a step on one rank: the validation calls it made, and their outcomes."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec
import torch

from holdfast.arguments import check_callable, check_int, check_number
from holdfast.errors import ConfigError
from holdfast.format.values import is_unicode
from holdfast.rerun.attribution import ValueRun
from holdfast.rerun.places import Place
from holdfast.rerun.states import Outcome
from holdfast.rerun.values import Value, describe, host_value, relative_difference
from holdfast.state.tensor_elements import flat_copies

Compare = Callable[[Any, Any], float]
"""Returns the relative difference of two values: 0.0 if they are equal."""


class Call(NamedTuple):
    """One validation call of a step: its name, and its number among the calls of that name."""

    name: str
    occurrence: int


class Suspect(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A value that was rejected, on the rank that validated it; a part of checkpoints."""

    call: Call
    value: Value
    why: str
    fatal: bool
    tolerance: float
    fed_by: tuple[Place, ...]
    """The ranks that fed it, ascending, and where they ran."""
    place: Place
    """Of the rank that validated it."""
    trials: tuple[ValueRun, ...] = ()
    """Later runs on other devices, which have left it open."""


class RejectedValue(msgspec.Struct, frozen=True, kw_only=True):
    """A rejected value, as it is sent to other ranks and written to the report."""

    call: str
    occurrence: int
    value: Any
    why: str
    fatal: bool
    fed_by: list[Place]


class RecheckedValue(msgspec.Struct, frozen=True, kw_only=True):
    """A rejected value and its outcome in a rerun, for other ranks and the report."""

    call: str
    occurrence: int
    before: Any
    value: Any
    why: str
    fatal: bool
    outcome: Outcome
    difference: float | str | None
    """Relative; "inf" if the two values cannot be compared, None if the call was not made."""
    is_same_device: bool
    """True if every rank that feeds it runs where it ran at first."""
    first_rank: int
    first_host: str
    first_device: str
    first_fed_by: list[Place]
    fed_by: list[Place]
    """In the order of `first_fed_by`: the same roles."""
    trials: list[ValueRun]
    """Runs between the first one and this."""


class AttemptReport(msgspec.Struct, frozen=True, kw_only=True):
    """The report of one rank at the end of a run of a step."""

    rejected: list[RejectedValue]
    rechecked: list[RecheckedValue]


class Attempt:
    """The validation calls of one run of a step, on this rank.

    Args:
        suspects: values that were rejected in an earlier run, by call.
        confirmed: calls whose rejected value is known to be correct, or already has a verdict.
        keeps_values: True to keep every value, for a comparison with another run.
    """

    def __init__(
        self,
        *,
        suspects: Mapping[Call, Suspect] | None = None,
        confirmed: Collection[Call] = (),
        keeps_values: bool = False,
    ) -> None:
        self.suspects = dict(suspects or {})
        self.rejected: dict[Call, Suspect] = {}
        self.rechecked: dict[Call, tuple[Outcome, Value, float]] = {}
        self.values: dict[Call, Value] = {}
        self._waiting: list[tuple[torch.Tensor, Callable[[Value], None]]] = []
        """Values on a device, which are read together when the run ends."""
        self._confirmed = frozenset(confirmed)
        self._keeps_values = keeps_values
        self._counts: Counter[str] = Counter()

    def next_call(self, name: str) -> Call:
        """Count a validation call, and return it."""
        call = Call(name, self._counts[name])
        self._counts[name] += 1
        return call

    def judge_later(self, value: torch.Tensor, judge: Callable[[Value], None]) -> None:
        """Judge a value on a device at the end of the run: one wait for all of them."""
        self._waiting.append((value.clone(), judge))

    def judge(self) -> None:
        """Judge the values that wait. Cost: one read for each device and dtype."""
        waiting, self._waiting = self._waiting, []
        on_host = flat_copies([value for value, _ in waiting], on_host=True)
        for (_, judge), each in zip(waiting, on_host, strict=True):
            judge(host_value(each))

    def take(
        self,
        call: Call,
        value: Value,
        why: str | None,
        *,
        fatal: bool,
        tolerance: float,
        compare: Compare | None,
        feeders: Callable[[], tuple[Place, tuple[Place, ...]]],
    ) -> None:
        """Take the value of a call, and the reason for its rejection; None if it is accepted.

        Args:
            call: which.
            value: of the call.
            why: the reason.
            fatal, tolerance, compare: see `RerunMachine.validate`.
            feeders: returns this rank's place, and those of the ranks that feed the value.
        """
        if self._keeps_values:
            self.values[call] = value
        suspect = self.suspects.get(call)
        if suspect is not None:
            difference = (compare or relative_difference)(suspect.value, value)
            if difference <= tolerance:
                outcome = Outcome.REPRODUCED
            else:  # also if a user's own comparison returns NaN
                outcome = Outcome.GOOD if why is None else Outcome.CHANGED
            self.rechecked[call] = outcome, value, float(difference)
        elif why is not None and call not in self._confirmed:
            place, fed_by = feeders()
            self.rejected[call] = Suspect(
                call=call,
                value=value,
                why=why,
                fatal=fatal,
                tolerance=tolerance,
                fed_by=fed_by,
                place=place,
            )

    def report_rejected(self) -> list[RejectedValue]:
        """Return the values that were rejected for the first time."""
        return [
            RejectedValue(
                call=call.name,
                occurrence=call.occurrence,
                value=describe(each.value),
                why=each.why,
                fatal=each.fatal,
                fed_by=[*each.fed_by],
            )
            for call, each in self.rejected.items()
        ]

    def report_rechecked(
        self, now: Callable[[Sequence[Place]], Sequence[Place]]
    ) -> list[RecheckedValue]:
        """Return the outcomes of the values that were rejected before.

        Args:
            now: returns where the roles of some places are computed in this run.
        """
        reports = []
        for call, suspect in self.suspects.items():
            outcome, value, difference = self.rechecked.get(call, (Outcome.UNREACHED, None, None))
            finite = difference is None or difference < float("inf")
            places = [*now(suspect.fed_by)]
            reports.append(
                RecheckedValue(
                    call=call.name,
                    occurrence=call.occurrence,
                    before=describe(suspect.value),
                    value=None if value is None else describe(value),
                    why=suspect.why,
                    fatal=suspect.fatal,
                    outcome=outcome,
                    difference=difference if finite else "inf",
                    is_same_device=all(
                        one.identity.is_same(other.identity)
                        for one, other in zip(suspect.fed_by, places, strict=True)
                    ),
                    first_rank=suspect.place.rank,
                    first_host=suspect.place.host,
                    first_device=suspect.place.device,
                    first_fed_by=[*suspect.fed_by],
                    fed_by=places,
                    trials=[*suspect.trials],
                )
            )
        return reports


def trial_of(first: Sequence[Place], now: Sequence[Place], outcome: Outcome) -> ValueRun:
    """Return a trial of a value whose roles were at the first places before, and are at `now`."""
    pairs = zip(first, now, strict=True)
    return ValueRun(
        devices={role.coordinate: place.identity.key for role, place in pairs}, outcome=outcome
    )


def check_call(name: object, rule: object, tolerance: object, compare: object = None) -> float:
    """Return the tolerance of a validation call; check the arguments that a fault would need.

    A fault may come after weeks: an argument that could not be recorded or compared then is refused
    at the first call.

    Raises:
        ConfigError: an argument is wrong.
    """
    if not isinstance(name, str) or not is_unicode(name):
        raise ConfigError(
            f"validate({name!r}): the name must be a valid Unicode string, the same in each step"
        )
    is_rule = callable(getattr(rule, "rejects", None)) and hasattr(rule, "window")
    if not is_rule or isinstance(rule, type):
        fix = "; wrap a function: Rejects(function, message)" if callable(rule) else ""
        raise ConfigError(f"validate({name!r}): a {type(rule).__name__} is not a rule{fix}")
    check_callable(compare, name=f"validate({name!r}): compare")
    return check_number(tolerance, name=f"validate({name!r}): tolerance", least=0)


def checked_step(step: object) -> int:
    """Return the number of a step as an int; ConfigError if it is not an integer of 64 bits."""
    with suppress(TypeError):
        # A tensor or an array of one integer is accepted too; a bool is left for `check_int`.
        step = step if isinstance(step, bool) else operator.index(step)  # type: ignore[arg-type]
    return check_int(step, name="step", least=-(2**63), below=2**63)
