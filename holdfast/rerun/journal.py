"""The report of a machine: one JSON object a line, in a file that only the coordinator writes.

It outlives the processes, and it is the only log of rejected values. Three things are queries over
it: the verdict on a fault, the number of restarts for it, and the steps that are bad wherever they
run.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.errors import CorruptionError, StorageError
from holdfast.rerun.injection import point_of
from holdfast.rerun.states import Outcome

REPORT_NAME = "report.jsonl"
_START = b'{"event": '


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultHistory:
    """The entries of the report on one fault.

    Args:
        verdict: the final one; empty until there is one.
        num_restarts: number of starts that have run its step again.
    """

    verdict: str = ""
    num_restarts: int = 0


class Journal:
    """The report file in a directory; the first event creates both.

    Args:
        directory: of the machine.
    """

    def __init__(self, directory: Path) -> None:
        """Name the file; nothing is read or written yet."""
        self.path = directory / REPORT_NAME

    def append(self, event: str, fields: Mapping[str, Any]) -> None:
        """Add one event, durably.

        Raises:
            StorageError: the file cannot be written.
        """
        record = {"event": event, "time": round(time.time(), 3), **fields}
        line = json.dumps(record, allow_nan=False, ensure_ascii=False)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a+b") as file:
                # A process that died may have left half a line. It stays as it is, and `events`
                # passes over it; this event starts a new line.
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
            raise StorageError(
                f"the rerun report {self.path} cannot be written ({error.strerror}); give the "
                f"machine a directory that it can write to"
            ) from error

    def events(self) -> list[dict[str, Any]]:
        """Return every event so far, in order; a line that a dying process has cut is left out.

        Raises:
            StorageError: the file exists and cannot be read.
            CorruptionError: a line is neither an event nor the start of one; the message names it.
        """
        try:
            lines = self.path.read_bytes().split(b"\n")
        except FileNotFoundError:
            return []
        except OSError as error:
            raise StorageError(
                f"the rerun report {self.path} cannot be read ({error.strerror})"
            ) from error
        events = []
        for number, line in enumerate(lines, start=1):
            event = _parse(line)
            if event is not None:
                events.append(event)
            elif not _is_torn(line):
                raise CorruptionError(
                    f"line {number} of the rerun report {self.path} is not an event: "
                    f"{line[:80].decode(errors='replace')!r}; remove the line, or use another "
                    f"directory"
                )
        return events

    def history_of(self, fault: str) -> FaultHistory:
        """Return what the report has on a fault, by its id."""
        mine = [each for each in self.events() if each.get("fault") == fault]
        verdicts = [str(each["verdict"]) for each in mine if each["event"] == "verdict"]
        restarts = sum(each["event"] == "restart" for each in mine)
        return FaultHistory(verdict=verdicts[-1] if verdicts else "", num_restarts=restarts)

    def verdicts(self) -> tuple[list[str], list[str]]:
        """Return the points (see `point_of`) and the ids of the faults that have a verdict.

        An injector leaves these points alone; the step of such a fault may be skipped.
        """
        verdicts = [event for event in self.events() if event["event"] == "verdict"]
        points = [
            point_of(event["step"], each["coordinate"])
            for event in verdicts
            for each in event["values"]
        ]
        return points, [str(event["fault"]) for event in verdicts]

    def steps_to_skip(self) -> frozenset[int]:
        """Return the steps that one rank has rejected in two or more jobs: their data is bad.

        Several ranks that reject a step in one job are not enough: they may share one cause, which
        can be a fault. A value that is bad again on the same device says nothing new.
        """
        jobs: dict[tuple[int, int], set[str]] = {}
        for event in self.events():
            for each in _rejected_in(event):
                jobs.setdefault((each["rank"], event["step"]), set()).add(event["job"])
        return frozenset(step for (_, step), seen in jobs.items() if len(seen) > 1)


def read_report(directory: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Return the events of a machine's report, in order: for scripts that act on verdicts.

    Args:
        directory: of the machine.

    Raises:
        StorageError: the report does not exist, or cannot be read.
        CorruptionError: a line is not an event, see `Journal.events`.
    """
    journal = Journal(Path(directory))
    if not journal.path.exists():
        raise StorageError(f"{directory} has no {REPORT_NAME}; pass the directory of a machine")
    return journal.events()


def _rejected_in(event: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the values of an event that count against the data of its step."""
    if event["event"] == "rejected":
        yield from event["values"]
    elif event["event"] in ("rerun_in_place", "rerun_from_checkpoint"):
        for each in event["values"]:
            if Outcome(each["outcome"]).is_bad and not each["is_same_device"]:
                yield each


def _parse(line: bytes) -> dict[str, Any] | None:
    """Return the event of a line, or None if the line is not one."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    is_event = isinstance(record, dict) and isinstance(record.get("event"), str)
    return record if is_event else None


def _is_torn(line: bytes) -> bool:
    """Return True if a line is what a dying process or power loss leaves of an event."""
    # After power loss a file may have its new length, but zeros in place of the last blocks.
    line = line.rstrip(b"\0").strip()
    is_start = line.startswith(_START) or _START.startswith(line)
    return (is_start and not line.endswith(b"}")) or not line
