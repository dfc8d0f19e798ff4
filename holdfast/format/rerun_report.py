"""The report of a rerun machine on storage: its lines, and which names in it are one device.

One JSON object a line, with at least `event`. `holdfast/rerun/` writes it; commands read it without
torch. docs/rerun.md lists the events.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from holdfast.errors import CorruptionError, StorageError

REPORT_NAME = "report.jsonl"
"""The file, in the directory of a machine."""

_START = b'{"event": '
_OF_ITS_HOST = re.compile(r"cpu|[a-z]+:[0-9.]+", re.ASCII)


def read_events(path: Path) -> list[dict[str, Any]]:
    """Return every event of a report, in order; a line that a dying process has cut is left out.

    Args:
        path: of the file; there is no event if it does not exist.

    Raises:
        StorageError: the file exists and cannot be read.
        CorruptionError: a line is neither an event nor the start of one; the message names it.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise StorageError(f"the rerun report {path} cannot be read ({error.strerror})") from error
    events = []
    for number, line in enumerate(lines, start=1):
        event = _parse(line)
        if event is not None:
            events.append(event)
        elif not _is_torn(line):
            raise CorruptionError(
                f"line {number} of the rerun report {path} is not an event: "
                f"{line[:80].decode(errors='replace')!r}; remove the line, or use another "
                f"directory"
            )
    return events


def steps_to_leave_out(events: Iterable[Mapping[str, Any]]) -> tuple[set[int], set[int]]:
    """Return the steps not to continue from, by the numbers that the machine was given.

    Returns:
        Those whose state was bad before they ran, and those of faults that are over.
    """
    spoiled: set[int] = set()
    retired: set[int] = set()
    for event in events:
        if event["event"] == "verdict" and event["verdict"] == "spoiled_state":
            spoiled.add(event["step"])
        elif event["event"] == "recovered":
            spoiled.discard(event["step"])
        elif event["event"] == "retired":
            retired.add(event["step"])
    return spoiled, retired


def device_key(host: str, device: str) -> str:
    """Return a text that is equal exactly for the same device.

    A name from a driver (a UUID) or from a user identifies a device whatever the host is called:
    containers change the names of hosts. `cpu` and an index (`xpu:0`) mean something else on each
    host.
    """
    return f"{host}: {device}" if _OF_ITS_HOST.fullmatch(device) else device


def _parse(line: bytes) -> dict[str, Any] | None:
    """Return the event of a line, or None if the line is not one."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    is_event = isinstance(record, dict) and isinstance(record.get("event"), str)
    return record if is_event else None


def _is_torn(line: bytes) -> bool:
    """Return True if a line is what a dying process or power loss leaves of an event."""
    # After power loss a file may have its new length, but zeros in place of the last blocks.
    line = line.rstrip(b"\0").strip()
    is_start = line.startswith(_START) or _START.startswith(line)
    return (is_start and not line.endswith(b"}")) or not line
