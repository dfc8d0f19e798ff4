"""The report of a machine: one JSON object a line, in a file that only the coordinator writes.

It outlives the processes, and it is the only log of rejected values. Everything that a start has to
know of earlier ones is a query over it: the verdict on a fault, what its restarts have shown on
which devices, the steps whose data was proved bad, and those whose state was not finite.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from holdfast.errors import ConfigError, CorruptionError, StorageError
from holdfast.format.rerun_report import REPORT_NAME, read_events, steps_to_leave_out
from holdfast.rerun.attribution import ValueRun
from holdfast.rerun.devices import DeviceIdentity
from holdfast.rerun.injection import point_of
from holdfast.rerun.states import Outcome, Verdict
from holdfast.storage.posix import absolute

_OWNER_NAME = "owner"


class Past(msgspec.Struct, array_like=True):
    """What the report has of earlier jobs, the same on all ranks."""

    skipped: list[int] = msgspec.field(default_factory=list)
    """Steps whose data was proved bad."""
    points: list[str] = msgspec.field(default_factory=list)
    """Steps of ranks that fed values with a verdict, see `point_of`: an injector leaves them."""
    faults: list[str] = msgspec.field(default_factory=list)
    """Faults with a verdict, by id."""
    spoiled: list[int] = msgspec.field(default_factory=list)
    """Steps whose state was bad before they ran."""
    retired: list[int] = msgspec.field(default_factory=list)
    """Steps whose fault is over: training has passed them."""


class RunsOfValue(msgspec.Struct, frozen=True, kw_only=True):
    """The trials of one value in starts from a fault checkpoint."""

    coordinate: str
    call: str
    occurrence: int
    trials: list[ValueRun]


class FaultHistory(msgspec.Struct, frozen=True, kw_only=True):
    """The entries of the report on one fault.

    Args:
        verdict: the last one; empty until there is one.
        num_restarts: starts that have run its step again since then, or since it was kept.
        arrangements: by start from its checkpoint, and of the first run, the device of each
            coordinate.
        trials: what these starts have shown, by value.
    """

    verdict: str = ""
    num_restarts: int = 0
    arrangements: list[dict[str, str]] = msgspec.field(default_factory=list)
    trials: list[RunsOfValue] = msgspec.field(default_factory=list)

    @property
    def is_final(self) -> bool:
        """True if nothing that another start could show would change the verdict."""
        return self.verdict not in ("", Verdict.UNDECIDED.value)


class Journal:
    """The report file in a directory; the first event creates both.

    Args:
        directory: of the machine.
    """

    def __init__(self, directory: Path) -> None:
        """Name the file; nothing is read or written yet."""
        self.path = absolute(directory) / REPORT_NAME
        self._owner = self._owner_before = ""

    def append(self, event: str, fields: Mapping[str, Any]) -> None:
        """Add one event, durably.

        Raises:
            StorageError: the file cannot be written.
        """
        record = {"event": event, "time": round(time.time(), 3), **fields}
        line = json.dumps(record, allow_nan=False, ensure_ascii=False)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if self._owner:
                self.check_owner()
                self._take_ownership()
            with self.path.open("a+b") as file:
                # A process that died may have left half a line. It stays as it is, and
                # `read_events` passes over it; this event starts a new line.
                if file.seek(0, os.SEEK_END) > 0:
                    file.seek(-1, os.SEEK_END)
                    if file.read(1) != b"\n":
                        file.write(b"\n")
                file.write(line.encode(errors="backslashreplace") + b"\n")
                # On disk before the loop hears of a verdict: a restart that did not find it here
                # would run the step once more, or count one restart too few.
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise self._cannot_write(error) from error

    def history_of(self, fault: str) -> FaultHistory:
        """Return what the report has on a fault, by its id."""
        verdict, num_restarts = "", 0
        arrangements: list[dict[str, str]] = []
        trials: dict[tuple[str, str, int], list[ValueRun]] = {}
        with self._reading() as events:
            for event in events:
                if event.get("fault") != fault:
                    continue
                kind = event["event"]
                if kind == "verdict":
                    verdict, num_restarts = str(event["verdict"]), 0
                elif kind == "restart":
                    num_restarts += 1
                    arrangements.append(_arrangement(event["places"]))
                elif kind == "rerun_from_checkpoint":
                    for each in event["values"]:
                        key = each["coordinate"], each["call"], each["occurrence"]
                        trials.setdefault(key, []).append(_trial(each))
        return FaultHistory(
            verdict=verdict,
            num_restarts=num_restarts,
            arrangements=arrangements,
            trials=[
                RunsOfValue(coordinate=at, call=call, occurrence=number, trials=each)
                for (at, call, number), each in trials.items()
            ],
        )

    def past(self) -> Past:
        """Return what starts have to know of the jobs before them."""
        with self._reading() as events:
            return _past_of(events)

    @contextmanager
    def _reading(self) -> Iterator[list[dict[str, Any]]]:
        """Yield all events; CorruptionError if one lacks what is read of its kind."""
        try:
            yield read_events(self.path)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise CorruptionError(
                f"an event of the rerun report {self.path} is not as this version writes it "
                f"({type(error).__name__}: {error}); use another directory"
            ) from error

    def open(self, owner: str) -> Past:
        """Take the directory for a machine, and return the past; nothing is written yet.

        Raises:
            StorageError, CorruptionError: as of `read_events`.
        """
        self._owner = owner
        self._owner_before = self._owner_now()
        return self.past()

    def check_owner(self) -> None:
        """Raise ConfigError if another machine has the directory, which was made since `open`.

        It is known from the first event of the other one.
        """
        now = self._owner_now()
        if now not in (self._owner, self._owner_before):
            raise ConfigError(
                f"{self.path.parent} belongs to another machine, which was made later: two "
                f"machines would mix their faults. Give each machine a directory of its own, and "
                f"end a job before it is started again"
            )

    def _take_ownership(self) -> None:
        """Name this machine as the one that has written last, in one step.

        A full disk would leave a file cut short, which is of no machine.
        """
        if self._owner_now() == self._owner:
            return
        written = self.path.parent / f"{_OWNER_NAME}.new"
        written.write_text(self._owner)
        written.replace(self.path.parent / _OWNER_NAME)

    def _owner_now(self) -> str:
        """Return the machine that has written last."""
        try:
            return (self.path.parent / _OWNER_NAME).read_text()
        except FileNotFoundError:
            return ""
        except OSError as error:
            raise StorageError(
                f"the rerun report {self.path} cannot be read ({error.strerror})"
            ) from error

    def _cannot_write(self, error: OSError) -> StorageError:
        return StorageError(
            f"the rerun report {self.path} cannot be written ({error.strerror}); give the "
            f"machine a directory that it can write to"
        )


def _past_of(events: Sequence[dict[str, Any]]) -> Past:
    """Return what `events` say to later starts."""
    spoiled, retired = steps_to_leave_out(events)
    past = Past(spoiled=sorted(spoiled), retired=sorted(retired))
    for event in events:
        if event["event"] != "verdict":
            continue
        past.faults.append(str(event["fault"]))
        past.points += [
            point_of(event["step"], place["coordinate"])
            for each in event["values"]
            if "call" in each
            # The error may have been on any rank that feeds the value.
            for place in each.get("first_fed_by") or each.get("fed_by") or [each]
        ]
        # Transient errors, and whatever is open, say nothing against the data.
        if event["verdict"] == Verdict.CORRECT_RESULT:
            past.skipped.append(event["step"])
    return past


def _arrangement(places: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Return the device of each coordinate, from the places of an event."""
    return {
        str(each["coordinate"]): DeviceIdentity(host=each["host"], uuid=each["device"]).key
        for each in places
    }


def _trial(value: Mapping[str, Any]) -> ValueRun:
    """Return the trial of a value in an event; in an old report of its own place alone."""
    first = value.get("first_fed_by") or [value]
    now = value.get("fed_by") or [value]
    devices = dict(zip(_arrangement(first), _arrangement(now).values(), strict=True))
    return ValueRun(devices=devices, outcome=Outcome(value["outcome"]))


def read_report(directory: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Return the events of a machine's report, in order: for scripts that act on verdicts.

    Args:
        directory: of the machine.

    Raises:
        StorageError: the report does not exist, or cannot be read.
        CorruptionError: a line is not an event, see `read_events`.
    """
    path = absolute(Path(directory)) / REPORT_NAME
    if not path.exists():
        raise StorageError(f"{directory} has no {REPORT_NAME}; pass the directory of a machine")
    return read_events(path)
