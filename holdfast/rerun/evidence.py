"""The reports of all ranks on one run of a step: for the verdict, the report and a person."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from holdfast.decoding import decode_msgpack_as
from holdfast.errors import some_of, some_sentences
from holdfast.rerun.attempt import AttemptReport, RecheckedValue, trial_of
from holdfast.rerun.judging import Judgement, Recheck
from holdfast.rerun.places import Place
from holdfast.rerun.states import Outcome, Verdict

_MAX_NAMED = 4


class Evidence:
    """The reports of all ranks after one run of a step, the same on every rank.

    Args:
        places: of all ranks, in order.
        payloads: `AttemptReport` of each, as msgpack; empty if it has nothing to report.
    """

    def __init__(self, places: Sequence[Place], payloads: Sequence[bytes]) -> None:
        self._reports = [
            (place, decode_msgpack_as(data, AttemptReport))
            for place, data in zip(places, payloads, strict=True)
            if data
        ]

    @property
    def new_is_fatal(self) -> list[bool]:
        """For each value that was rejected for the first time, True if it is fatal."""
        return [each.fatal for _, report in self._reports for each in report.rejected]

    @property
    def rechecks(self) -> list[Recheck]:
        """For each value that was rejected before, what a verdict depends on."""
        return [
            Recheck(
                outcome=each.outcome,
                fatal=each.fatal,
                trials=(
                    trial_of(each.first_fed_by, each.first_fed_by, Outcome.REPRODUCED),
                    *each.trials,
                    trial_of(each.first_fed_by, each.fed_by, each.outcome),
                ),
            )
            for _, each in self._rechecked()
        ]

    def rejected(self) -> list[dict[str, Any]]:
        """Return the values that were rejected for the first time, for the report."""
        return [
            msgspec.to_builtins(place) | msgspec.to_builtins(each)
            for place, report in self._reports
            for each in report.rejected
        ]

    def bad_again(self) -> list[RecheckedValue]:
        """Return the values that were bad once more, of all ranks."""
        return [each for _, each in self._rechecked() if each.outcome.is_bad]

    def of_rank(self, rank: int) -> list[RecheckedValue]:
        """Return the outcomes of the values that a rank has validated first."""
        return [each for _, each in self._rechecked() if each.first_rank == rank]

    def rechecked(self, verdicts: Sequence[Verdict | None]) -> list[dict[str, Any]]:
        """Return the values that were rejected before, with their verdicts, for the report."""
        return [
            {
                **msgspec.to_builtins(place),
                **msgspec.to_builtins(each),
                "verdict": None if verdict is None else verdict.value,
            }
            for (place, each), verdict in zip(self._rechecked(), verdicts, strict=True)
        ]

    def describe_rejected(self) -> str:
        """Describe for a person which values were rejected, on which ranks and why."""
        return some_sentences(
            [
                f"'{each.call}' on rank {place.rank} ({place.host}, {place.device}) is "
                f"{_shown(each.value)} ({each.why})"
                for place, report in self._reports
                for each in report.rejected
            ],
            most=_MAX_NAMED,
        )

    def describe_rechecked(self) -> str:
        """Describe for a person the outcomes of the values that were rejected before."""
        return some_sentences(
            [_sentence(place, each) for place, each in self._rechecked()], most=_MAX_NAMED
        )

    def blamed(self, judgement: Judgement) -> list[str]:
        """Return the convicted devices in words, each once, with the rank that each one was."""
        return self._in_words(judgement.convicted)

    def identified(self, keys: Iterable[str]) -> list[dict[str, str]]:
        """Return the host and device of each key, for the report."""
        places = self._places()
        known = [places[key] for key in sorted(keys) if key in places]
        return [{"host": each.host, "device": each.device} for each in known]

    def describe_open(self, judgement: Judgement) -> str:
        """Describe for a person what an open fault lies between, and which start decides it."""
        named = self._in_words(judgement.suspects)
        between = some_of(named, most=_MAX_NAMED)
        attributions = [
            each
            for each, verdict in zip(judgement.attributions, judgement.verdicts, strict=True)
            if verdict is None
        ]
        if all(each.is_data_cleared for each in attributions) and attributions:
            return (
                f"it lies between {between}; a start with one of them as the rank that it was, and "
                f"devices that were good there in place of the others, tells which"
            )
        return (
            f"it is the data, the code, or one of {between}; a start without any of these devices "
            f"tells which"
        )

    def _in_words(self, keys: Iterable[str]) -> list[str]:
        """Return each device with the rank that it was; the mere key of one of an earlier start."""
        words = {key: f"{place} (rank {place.rank} then)" for key, place in self._places().items()}
        return [words.get(key, key) for key in sorted(keys)]

    def _places(self) -> dict[str, Place]:
        """Return every device that has fed a rechecked value, by key, where it was at first."""
        places: dict[str, Place] = {}
        for place, each in self._rechecked():
            by_rank = sorted(each.first_fed_by, key=lambda one: one.rank != each.first_rank)
            for one in (*by_rank, *each.fed_by, place):
                places.setdefault(one.identity.key, one)
        return places

    def _rechecked(self) -> list[tuple[Place, RecheckedValue]]:
        return [(place, each) for place, report in self._reports for each in report.rechecked]


def _sentence(place: Place, each: RecheckedValue) -> str:
    """Describe one value in a rerun."""
    where = f"'{each.call}' on rank {place.rank} ({place.host}, {place.device})"
    if each.outcome is Outcome.UNREACHED:
        return f"{where} was {_shown(each.before)}, and was not validated again"
    what = {
        Outcome.GOOD: "is accepted now",
        Outcome.REPRODUCED: "is the same",
        Outcome.CHANGED: "is rejected again",
    }[each.outcome]
    before = _shown(each.before)
    if not each.is_same_device:
        before += f" on {each.first_host}, {each.first_device}"
    return f"{where} was {before} and {what}: {_shown(each.value)}"


def _shown(value: object) -> str:
    """Return what `describe` has made of a value as a short text."""
    if isinstance(value, list):
        text = ", ".join(map(_shown, value))
    else:
        text = f"{value:g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 60 else text[:57] + "..."
