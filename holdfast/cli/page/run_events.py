"""What the ranks of a run logged of their saves and loads, as `holdfast train` writes it.

Files are `DIR/events/NNNNN.jsonl`, one per rank (`holdfast_trainer/train/rank_log.py`). Lines that
cannot be read are counted, not fatal: the last one of a killed run may be cut off.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

RANK_LOG_DIR = "events"
_MAX_FILES = 4096
_MAX_NBYTES = 4 << 20
"""Of each rank's log, from its end."""
_MAX_GAP_S = 600.0
"""Ranks of one save call for it within this time."""


class RankEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One save or load of one rank."""

    event: str
    rank: int
    step: int
    began: float
    path: str = ""
    axes: dict[str, int] = {}
    nbytes: int = 0
    phases: dict[str, float] = {}
    seconds: float = 0.0
    nbytes_read: int = 0
    nbytes_received: int = 0
    num_opens: int = 0
    nbytes_by_file: dict[str, int] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEvent:
    """One save or load of all its ranks, ascending by rank."""

    step: int
    began: float
    path: str
    axes: dict[str, int]
    ranks: list[RankEvent]


@dataclass(slots=True, kw_only=True)
class RunLog:
    """The saves and loads of a run, oldest first."""

    saves: list[RunEvent] = field(default_factory=list)
    loads: list[RunEvent] = field(default_factory=list)
    num_files: int = 0
    num_unreadable: int = 0
    """Lines that are no events."""


def read_run_log(root: Path) -> RunLog:
    """The logs below a run's directory; an empty one where there are none."""
    log = RunLog()
    paths = sorted((root / RANK_LOG_DIR).glob("[0-9]*.jsonl"))[:_MAX_FILES]
    events: list[RankEvent] = []
    for path in paths:
        try:
            lines = _tail(path)
        except OSError:
            log.num_unreadable += 1
            continue
        log.num_files += 1
        for line in lines:
            try:
                events.append(msgspec.json.decode(line, type=RankEvent))
            except (msgspec.DecodeError, UnicodeDecodeError):
                log.num_unreadable += 1
    log.saves = list(_of_all_ranks(event for event in events if event.event == "save"))
    log.loads = list(_of_all_ranks(event for event in events if event.event == "load"))
    return log


def _tail(path: Path) -> list[bytes]:
    """The whole lines at the end of a file."""
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(size - _MAX_NBYTES, 0))
        lines = file.read(_MAX_NBYTES).splitlines()
    return lines[1:] if size > _MAX_NBYTES else lines


def _of_all_ranks(events: Iterable[RankEvent]) -> Iterator[RunEvent]:
    """Events of one save or load together: a rank that comes again begins another one."""
    groups: dict[tuple[int, str], list[dict[int, RankEvent]]] = {}
    for event in sorted(events, key=lambda each: (each.began, each.rank)):
        turns = groups.setdefault((event.step, event.path), [])
        last = turns[-1] if turns else None
        began = min((each.began for each in last.values()), default=0.0) if last else 0.0
        if last is None or event.rank in last or event.began - began > _MAX_GAP_S:
            turns.append({event.rank: event})
        else:
            last[event.rank] = event
    joined = [
        RunEvent(
            step=step,
            began=min(each.began for each in turn.values()),
            path=path,
            axes=next(iter(turn.values())).axes,
            ranks=[turn[rank] for rank in sorted(turn)],
        )
        for (step, path), turns in groups.items()
        for turn in turns
    ]
    yield from sorted(joined, key=lambda each: each.began)
