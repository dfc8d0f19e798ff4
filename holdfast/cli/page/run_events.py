"""The saves and loads of a run, joined from the logs of its ranks (`format/rank_log.py`).

Lines that cannot be read are counted, not fatal: the last one of a killed run may be cut off.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

from holdfast.format.names import RANK_LOG_DIR
from holdfast.format.rank_events import LoadEvent, SaveEvent, decode_event

_MAX_FILES = 4096
_MAX_NBYTES = 4 << 20
"""Of each rank's log, from its end."""
_MAX_GAP_S = 600.0
"""Ranks of one save call for it within this time."""


E = TypeVar("E", SaveEvent, LoadEvent)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEvent(Generic[E]):
    """One save or load of all its ranks, ascending by rank."""

    step: int
    began: float
    path: str
    axes: dict[str, int]
    ranks: list[E]


@dataclass(slots=True, kw_only=True)
class RunLog:
    """The saves and loads of a run, oldest first."""

    saves: list[RunEvent[SaveEvent]] = field(default_factory=list)
    loads: list[RunEvent[LoadEvent]] = field(default_factory=list)
    num_files: int = 0
    num_unreadable: int = 0
    """Lines that are not events."""


def read_run_log(root: Path) -> RunLog:
    """The logs below a run's directory; an empty one if there are none."""
    log = RunLog()
    paths = sorted((root / RANK_LOG_DIR).glob("[0-9]*.jsonl"))[:_MAX_FILES]
    saves: list[SaveEvent] = []
    loads: list[LoadEvent] = []
    for path in paths:
        try:
            lines = _tail(path)
        except OSError:
            log.num_unreadable += 1
            continue
        log.num_files += 1
        for line in lines:
            try:
                event = decode_event(line)
            except ValueError:
                log.num_unreadable += 1
                continue
            if isinstance(event, SaveEvent):
                saves.append(event)
            else:
                loads.append(event)
    log.saves, log.loads = _of_all_ranks(saves), _of_all_ranks(loads)
    return log


def _tail(path: Path) -> list[bytes]:
    """The whole lines at the end of a file."""
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(size - _MAX_NBYTES, 0))
        lines = file.read(_MAX_NBYTES).splitlines()
    return lines[1:] if size > _MAX_NBYTES else lines


def _of_all_ranks(events: Iterable[E]) -> list[RunEvent[E]]:
    """Join what the ranks have of one save or load: a rank that comes again starts another one."""
    groups: dict[tuple[int, str], list[dict[int, E]]] = {}
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
    return sorted(joined, key=lambda each: each.began)
