"""The reports of all ranks on one run of a step: for the verdict, the report and a person."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from holdfast.rerun.attempt import AttemptReport, RecheckedValue
from holdfast.rerun.states import Outcome, Recheck, Verdict

_MAX_NAMED = 4


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """The host and the device that a rank runs on."""

    rank: int
    coordinate: str
    host: str
    device: str


class Evidence:
    """The reports of all ranks after one run of a step, the same on every rank.

    Args:
        places: of all ranks, in order.
        payloads: `AttemptReport` of each, as msgpack; empty if it has nothing to report.
    """

    def __init__(self, places: Sequence[Place], payloads: Sequence[bytes]) -> None:
        self._reports = [
            (place, msgspec.msgpack.decode(data, type=AttemptReport))
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
            Recheck(outcome=each.outcome, fatal=each.fatal, is_same_device=each.is_same_device)
            for _, each in self._rechecked()
        ]

    def rejected(self) -> list[dict[str, Any]]:
        """Return the values that were rejected for the first time, for the report."""
        return [
            {**msgspec.structs.asdict(place), **msgspec.structs.asdict(each)}
            for place, report in self._reports
            for each in report.rejected
        ]

    def rechecked(self, verdicts: Sequence[Verdict | None]) -> list[dict[str, Any]]:
        """Return the values that were rejected before, with their verdicts, for the report."""
        return [
            {
                **msgspec.structs.asdict(place),
                **msgspec.structs.asdict(each),
                "outcome": each.outcome.value,
                "verdict": None if verdict is None else verdict.value,
            }
            for (place, each), verdict in zip(self._rechecked(), verdicts, strict=True)
        ]

    def describe_rejected(self) -> str:
        """Describe for a person which values were rejected, on which ranks and why."""
        return _joined(
            [
                f"'{each.call}' on rank {place.rank} ({place.host}, {place.device}) is "
                f"{_shown(each.value)} ({each.why})"
                for place, report in self._reports
                for each in report.rejected
            ]
        )

    def describe_rechecked(self) -> str:
        """Describe for a person the outcomes of the values that were rejected before."""
        return _joined([_sentence(place, each) for place, each in self._rechecked()])

    def suspect_devices(self, verdicts: Sequence[Verdict | None]) -> list[str]:
        """Return the devices that produced persistent errors, each once."""
        pairs = zip(self._rechecked(), verdicts, strict=True)
        names = {
            f"{each.first_host}, {each.first_device} (rank {each.first_rank} then)": None
            for (_, each), verdict in pairs
            if verdict is Verdict.PERSISTENT_ERROR
        }
        return list(names)

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
    if not isinstance(value, Mapping):
        text = f"{value:g}" if isinstance(value, float) else str(value)
    elif "shape" not in value:
        text = f"{_shown(value['real'])} + {_shown(value['imag'])}i"
    else:
        text = f"{value['dtype']}{value['shape']}"
        if "values" in value:
            text += f" {', '.join(map(_shown, value['values']))}"
        elif "min" in value:
            ends = " to ".join(_shown(value[end]) for end in ("min", "max"))
            text += f" {ends}, {value['num_nan']} NaN, {value['num_inf']} infinite"
    return text if len(text) <= 60 else text[:57] + "..."


def _joined(sentences: Sequence[str]) -> str:
    """Join the first sentences, and say how many more there are."""
    more = len(sentences) - _MAX_NAMED
    shown = "; ".join(sentences[:_MAX_NAMED])
    return shown if more <= 0 else f"{shown}; and {more} more"
