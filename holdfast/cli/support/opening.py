"""What the verbs that read tensors share: open a checkpoint so that nobody removes it meanwhile."""

from __future__ import annotations

import difflib
import fnmatch
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from holdfast.cli.support.inspecting import Place, locate, make_console
from holdfast.errors import ConfigError, StorageError
from holdfast.format.leases import Lease, lease_checkpoint
from holdfast.format.names import parse_step_dir
from holdfast.format.reader import Snapshot
from holdfast.format.versions import save_id_of
from holdfast.storage import PosixStorage

_NUM_LOOKS = 5
_MAX_LOOKED_AT = 10_000
"""Names among which a mistyped one is looked for."""

Advance = Callable[[int], None]
"""Called with the number of bytes read since the last call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A checkpoint open for reading, and its path in words."""

    snapshot: Snapshot
    label: str


@contextmanager
def open_marked(path: Path, *, step: int | None = None) -> Iterator[Opened]:
    """Open the checkpoint meant by a path; while it is open, `prune` leaves it alone.

    A place that cannot be written to is read all the same. Raises ConfigError as `locate` does,
    StorageError and CorruptionError as `Snapshot.open` does.
    """
    with (
        mark_place(path, step=step) as (place, reading),
        Snapshot.open(place.storage, place.directory) as snapshot,
    ):
        reading.set_version(snapshot.manifest.save_id)
        yield Opened(snapshot=snapshot, label=place.label)


@contextmanager
def mark_place(path: Path, *, step: int | None = None) -> Iterator[tuple[Place, Lease]]:
    """The checkpoint meant by a path; while this is open, nobody removes what is read of it.

    Raises ConfigError as `locate` does. Of a directory of checkpoints, a newest one that retention
    removes just now has a newer one beside it: that is taken.
    """
    for left in reversed(range(_NUM_LOOKS)):
        place = _from_above(path, locate(path, step=step))
        with ExitStack() as stack:
            try:
                reading = stack.enter_context(lease_checkpoint(place.storage, place.directory))
            except StorageError:
                if not left:
                    raise
                continue
            if left and save_id_of(place.storage, place.directory) is None:
                continue
            yield place, reading
            return


def _from_above(path: Path, place: Place) -> Place:
    """A checkpoint named by its own directory, as one in the directory above: marks are there."""
    real = path.resolve()
    if place.directory or parse_step_dir(real.name) is None:
        return place
    return Place(storage=PosixStorage(real.parent), directory=real.name, label=place.label)


def matching_keys(snapshot: Snapshot, pattern: str) -> list[str]:
    """Keys of tensors that are this, or match this pattern (`*`, `?`); may be none.

    Keys hold brackets of their own (one per coordinate), so "[" stands for itself.
    """
    if snapshot.has(pattern):
        return [pattern]
    glob = pattern.replace("[", "[[]")
    return [key for key in snapshot.keys if fnmatch.fnmatchcase(key, glob)]


def no_match(pattern: str, keys: list[str]) -> ConfigError:
    """The mistake of a pattern that no key matches: how wildcards would, or what is near."""
    few = keys[:_MAX_LOOKED_AT]
    return ConfigError(f"no tensor matches {pattern!r}{_suggestion(pattern, few)}")


def _suggestion(pattern: str, keys: list[str]) -> str:
    wanted = pattern.strip("*?").lower()
    inside = [key for key in keys if wanted and wanted in key.lower()]
    if inside and wanted != "" and not set("*?") & set(wanted):
        stem = inside[0][inside[0].lower().index(wanted) :][: len(wanted)]
        if all(stem in key for key in inside):
            more = "" if len(inside) == 1 else f" and {len(inside) - 1:,} more"
            return f"; the pattern '*{stem}*' matches {inside[0]}{more}"
    near = difflib.get_close_matches(pattern, keys, n=3)
    if near:
        return f"; did you mean {' or '.join(near)}?"
    words = sorted({word for key in keys for word in key.split(".") if not word.isdigit()})
    near = difflib.get_close_matches(wanted, words[:_MAX_LOOKED_AT], n=3)
    if near:
        return f"; did you mean {' or '.join(repr(f'*{word}*') for word in near)}?"
    return f"; there are {', '.join(keys[:3])}{', …' if len(keys) > 3 else ''}" if keys else ""


@contextmanager
def progress_bar(what: str, *, total: int, quiet: bool) -> Iterator[Advance]:
    """A bar of bytes on standard error while that is a terminal."""
    bar = Progress(
        BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn(),
        console=make_console(sys.stderr), transient=True, disable=quiet or not sys.stderr.isatty(),
    )  # fmt: skip
    with bar:
        task = bar.add_task(what, total=total)

        def advance(nbytes: int) -> None:
            bar.advance(task, nbytes)

        yield advance
