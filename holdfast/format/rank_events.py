"""The lines in the log of a run's saves and loads: JSON, one file per rank.

`DIR/events/00003.jsonl` is the file of rank 3 of a run that saves to DIR. `docs/view.md` documents
the form. Members that a line lacks have the defaults below; unknown members are ignored.
"""

from __future__ import annotations

import msgspec

from holdfast.decoding import decode_json_as


class _RankEvent(msgspec.Struct, frozen=True, kw_only=True, tag_field="event"):
    """The members of every line."""

    rank: int
    step: int
    began: float
    """Start of the call, in seconds since 1970."""
    time: float = 0.0
    """Time at which the line was written, in seconds since 1970."""
    path: str = ""
    axes: dict[str, int] = {}
    """Sizes of the layout's axes."""


class SaveEvent(_RankEvent, frozen=True, kw_only=True, tag="save"):
    """One committed save, as one rank saw it."""

    nbytes: int = 0
    """Bytes written by this rank."""
    total_nbytes: int = 0
    planned: bool = False
    phases: dict[str, float] = {}
    """Seconds by phase: `SaveReport.seconds`."""
    starts: dict[str, float] = {}
    """Seconds from the call to the start of each phase; a line of an older version has none."""


class LoadEvent(_RankEvent, frozen=True, kw_only=True, tag="load"):
    """One finished load, as one rank saw it; members as in `LoadReport`."""

    seconds: float = 0.0
    nbytes_needed: int = 0
    nbytes_read: int = 0
    nbytes_received: int = 0
    num_opens: int = 0
    nbytes_by_file: dict[str, int] = {}


def encode_event(event: SaveEvent | LoadEvent) -> bytes:
    """Encode an event as one line."""
    return msgspec.json.encode(event) + b"\n"


def decode_event(line: bytes) -> SaveEvent | LoadEvent:
    """Decode the event of a line.

    Raises:
        ValueError: The line does not have the documented form.
    """
    try:
        return decode_json_as(line, SaveEvent | LoadEvent)
    except RecursionError as error:
        raise ValueError(str(error)) from error
