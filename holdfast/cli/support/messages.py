"""What the commands print in words: errors, sizes, counts, layouts and times; exit codes."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime

from holdfast.errors import clean, counted, shorten_ranks
from holdfast.format.manifest import LayoutInfo

EXIT_DAMAGED = 1
"""Something stored is damaged, or two things differ."""

EXIT_MISTAKE = 2
"""Exit code of a mistake or failure that was explained in one line."""

EXIT_INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it: 128 and the signal's number."""


def exit_code(*, is_damaged: bool, has_failed: bool) -> int:
    """The exit code of a command that reports itself what it met; see the text of `holdfast`."""
    if is_damaged:
        return EXIT_DAMAGED
    return EXIT_MISTAKE if has_failed else 0


def print_error(error: BaseException | str) -> None:
    """One line on standard error, whatever line breaks and control characters the message has."""
    print_note(f"error: {error}")


def print_note(text: str) -> None:
    """One line on standard error: something that the user did not ask for, and no failure."""
    print(f"holdfast: {clean(' '.join(text.split()))}", file=sys.stderr, flush=True)


def print_removed(path: str) -> None:
    """Say that something was removed which a killed process has left."""
    print_note(f"{path} was left by a command that was killed, and is removed")


def in_ranges(numbers: Iterable[int]) -> str:
    """All of these numbers in short: "0-3, 7"."""
    return shorten_ranks(sorted(set(numbers)), most=None)


def shape_in_words(shape: Sequence[int]) -> str:
    """The lengths of a tensor's dims: "5 x 7", or "scalar"."""
    return " x ".join(map(str, shape)) or "scalar"


def layout_in_words(layout: LayoutInfo) -> str:
    """A layout in short: "model tp2·dp4 on 8 ranks"."""
    sizes = "·".join(f"{axis}{size}" for axis, size in layout.axes.items() if size > 1)
    ranks = counted(len(layout.ranks), "rank")
    return clean(f"{layout.name} {sizes}{' ' if sizes else ''}on {ranks}")


def metadata_in_words(metadata: Mapping[str, object]) -> str:
    """A user's JSON object in short: "commit=abc, loss=1.5"."""
    pairs = ((k, v if isinstance(v, str) else json.dumps(v)) for k, v in metadata.items())
    return clean(", ".join(f"{key}={value}" for key, value in pairs))


def when(created: str) -> str:
    """A time from a manifest without its letters: "2026-01-02 03:04:05"."""
    return clean(created).replace("T", " ").removesuffix("Z").removesuffix("+00:00")[:19]


def moment(seconds: float) -> str:
    """A time from a log, in seconds since 1970, as `when` has it; empty if it is on no calendar."""
    try:
        return when(datetime.fromtimestamp(seconds, UTC).isoformat())
    except (OverflowError, OSError, ValueError):
        return ""
