"""The report of a machine: one JSON object a line, in a file that only the coordinator writes.

It outlives the processes: the verdict on a fault, and how often the run was restarted for it, are
read from it by the next one.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.errors import StorageError
from holdfast.rerun.lines import append_line

REPORT_NAME = "report.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultHistory:
    """What the report says about one fault.

    Args:
        verdict: the final one; empty while there is none.
        num_restarts: how often it was begun to rerun from its checkpoint.
    """

    verdict: str = ""
    num_restarts: int = 0


class Journal:
    """The report file in a directory; both are made by the first event.

    Args:
        directory: of the machine.
    """

    def __init__(self, directory: Path) -> None:
        """Nothing is read or written yet."""
        self.path = directory / REPORT_NAME

    def append(self, event: str, fields: Mapping[str, Any]) -> None:
        """Add one event, durably.

        Raises:
            StorageError: the file cannot be written.
        """
        record = {"event": event, "time": round(time.time(), 3), **fields}
        try:
            append_line(self.path, json.dumps(record, allow_nan=False, ensure_ascii=False))
        except OSError as error:
            raise StorageError(
                f"the rerun report {self.path} cannot be written ({error.strerror}); give the "
                f"machine a directory that can"
            ) from error

    def events(self) -> list[dict[str, Any]]:
        """Every event so far, in order; lines that are no event, of a torn write, are left out.

        Raises:
            StorageError: the file is there and cannot be read.
        """
        try:
            lines = self.path.read_bytes().splitlines()
        except FileNotFoundError:
            return []
        except OSError as error:
            raise StorageError(
                f"the rerun report {self.path} cannot be read ({error.strerror})"
            ) from error
        events = []
        for line in lines:
            with suppress(ValueError):
                record = json.loads(line)
                if isinstance(record, dict) and isinstance(record.get("event"), str):
                    events.append(record)
        return events

    def history_of(self, fault: str) -> FaultHistory:
        """What is recorded of a fault, by its id."""
        mine = [each for each in self.events() if each.get("fault") == fault]
        verdicts = [str(each["verdict"]) for each in mine if each["event"] == "verdict"]
        restarts = sum(each["event"] == "restart" for each in mine)
        return FaultHistory(verdict=verdicts[-1] if verdicts else "", num_restarts=restarts)


def read_report(directory: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The events of a machine's report, in order: for scripts that act on verdicts.

    Args:
        directory: of the machine.

    Raises:
        StorageError: there is none, or it cannot be read.
    """
    journal = Journal(Path(directory))
    if not journal.path.exists():
        raise StorageError(f"{directory} has no {REPORT_NAME}: name the directory of a machine")
    return journal.events()
