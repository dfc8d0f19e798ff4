"""Which checkpoint a path on the command line means, and opening it under a reader's lease."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Literal

from holdfast.errors import ConfigError, HoldfastError, counted
from holdfast.foreign.formats import (
    find_step,
    unknown,
    why_unknown,
)
from holdfast.foreign.location import Location
from holdfast.foreign.own_format import find_own
from holdfast.foreign.view import CatalogStorage
from holdfast.format.names import (
    MANIFEST,
    linked_steps,
    parse_saving_dir,
    parse_step_dir,
    step_dir,
    survey_steps,
)
from holdfast.format.reader import Snapshot
from holdfast.format.summaries import requests_of_save
from holdfast.format.versions import Lease, lease_chosen
from holdfast.storage import PosixStorage, Storage, is_url, open_storage, shown
from holdfast.storage.places import as_url, check_place, is_folder
from holdfast.storage.reading import is_unknown

_MAX_RUN_DEPTH = 2
_MAX_RUN_DIRECTORIES = 2000
_MAX_NAMED = 8

StepState = Literal["damaged", "unreadable", "removed"]
"""Why a step is not shown as a checkpoint; one that is unreadable may be whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredCheckpoint:
    """One committed checkpoint: its storage, the directory in it, and its path for messages."""

    storage: Storage
    directory: str
    label: str
    foreign: str = ""
    """Name of its format, if it is not our own."""


def open_root(path: Path) -> Storage:
    """Return the storage at a directory or URL; ConfigError if the directory does not exist."""
    check_place(path)
    if is_url(path):
        return open_storage(path)
    if not is_folder(path):
        raise ConfigError(
            f"{path} is not a directory: name a checkpoint, or the directory that holds them"
        )
    return PosixStorage(path)


def open_steps(path: Path, *, verb: str) -> Storage:
    """The storage at a directory of checkpoints, for a command that works on all of them.

    Raises:
        ConfigError: the path is one checkpoint, or a directory of runs.
    """
    storage = open_root(path)
    if is_url(path):
        above_url, _, name = as_url(path).rstrip("/").rpartition("/")
        if parse_step_dir(name) is not None:
            raise ConfigError(
                f"{shown(path)} is one checkpoint; name the place that holds them: "
                f"`holdfast {verb} {above_url}`"
            )
        require_something(storage, storage.list(""), shown(path))
        return storage
    if storage.exists(MANIFEST):
        above = path.resolve().parent
        raise ConfigError(
            f"{path} is one checkpoint; name the directory that holds them: "
            f"`holdfast {verb} {above}`"
        )
    if not _has_steps(storage.list("")) and (runs := find_runs(path)):
        raise ConfigError(_choose_a_run(path, runs))
    return storage


def require_something(storage: Storage, names: Sequence[str], label: str) -> None:
    """Raise ConfigError if nothing of a run is at a URL: most often it is mistyped.

    Args:
        storage: the storage at the URL.
        names: the names in it.
        label: the URL.
    """
    if names:
        return
    folders = getattr(storage, "folders", lambda: ())()
    if not folders:
        raise ConfigError(f"nothing is at {label}")
    some = ", ".join(f"{name}/" for name in folders[:_MAX_NAMED])
    raise ConfigError(f"{label} holds no checkpoints; below it are {some}: name one of these")


def state_of(storage: Storage, step: int, error: HoldfastError) -> StepState:
    """Return what is known of a step that was listed, and whose manifest could not be read."""
    if is_unknown(error):
        return "unreadable"
    return "damaged" if storage.exists(f"{step_dir(step)}/{MANIFEST}") else "removed"


def find_runs(path: Path) -> list[Path]:
    """Directories of checkpoints one or two levels below a directory, in order of their names.

    Directories that cannot be read are skipped.

    Cost: lists 2,000 directories at most, so that a mistaken `/` is answered at once.
    """
    runs: list[Path] = []
    queue = [] if is_url(path) else [(path, 0)]
    for directory, depth in queue:
        names = _directories_in(directory)
        if depth and _has_steps(p.name for p in names):
            runs.append(directory)
        elif depth < _MAX_RUN_DEPTH:
            queue += [(p, depth + 1) for p in names if not p.name.startswith(".")]
        if len(queue) > _MAX_RUN_DIRECTORIES:
            break
    return sorted(runs)


def _directories_in(path: Path) -> list[Path]:
    """The directories below a path; none where it cannot be read."""
    try:
        with os.scandir(path) as entries:
            few = islice(entries, _MAX_RUN_DIRECTORIES)
            return sorted(Path(e.path) for e in few if e.is_dir(follow_symlinks=False))
    except OSError:
        return []


def _has_steps(names: Iterable[str]) -> bool:
    """Return True if any of these names is of a checkpoint, committed or being saved."""
    return any(parse_step_dir(name) is not None or parse_saving_dir(name) for name in names)


def _choose_a_run(path: Path, runs: list[Path]) -> str:
    """The message for a directory of runs where one run is needed."""
    few = ", ".join(map(str, runs[:4])) + (", …" if len(runs) > 4 else "")
    return (
        f"{path} holds {counted(len(runs), 'run')} and no checkpoint of its own: name one of them "
        f"({few}); `holdfast ls {path}` lists them"
    )


def find_checkpoint(path: Path, *, step: int | None) -> StoredCheckpoint:
    """The checkpoint meant by a path: one checkpoint directory, or a directory of checkpoints.

    Args:
        path: either of them.
        step: which step of a directory of checkpoints; absent: the newest committed one.

    Raises:
        ConfigError: there is none; the message says what was looked for.
    """
    # By `os.path`, for which a path that may not be examined is none: the root's error names it.
    is_directory = not (is_url(path) or os.path.isfile(path))
    storage = open_root(path) if is_directory else None
    own = find_own(path, step)
    if own is not None:
        return StoredCheckpoint(storage=own.storage, directory=own.directory, label=own.label)
    place = as_url(path).rstrip("/") if is_url(path) else path
    if foreign := _find_foreign(place, step=step):
        return foreign
    if storage is not None:
        raise ConfigError(_nothing_at(path, storage))
    if is_url(path):
        raise ConfigError(f"{place} has no committed checkpoint, nor one in a format that is known")
    raise ConfigError(unknown(Location.of(path)))


def _find_foreign(path: Path | str, *, step: int | None) -> StoredCheckpoint | None:
    """The checkpoint in a foreign format at a path; None if it is in none that is known."""
    catalog = find_step(Location.of(path), step)
    if catalog is None:
        return None
    storage = CatalogStorage(catalog)
    return StoredCheckpoint(
        storage=storage,
        directory=storage.directory,
        label=catalog.label,
        foreign=catalog.format,
    )


def _nothing_at(path: Path, storage: Storage) -> str:
    """Why a path means no checkpoint, and what to name instead."""
    if any(parse_saving_dir(name) for name in (path.resolve().name, *storage.list(""))):
        return f"{path} holds no committed checkpoint, only a save that was not finished"
    if runs := find_runs(path):
        return _choose_a_run(path, runs)
    if links := linked_steps(storage, survey_steps(storage)[1]):
        return f"{path} holds no committed checkpoint; {links}"
    if reason := why_unknown(Location.of(path)):
        return reason
    return (
        f"{path} is not a checkpoint: neither a {MANIFEST} nor an iter_*/{MANIFEST} is in it; "
        "name one checkpoint or the directory that holds them"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenCheckpoint:
    """A checkpoint open for reading, and its path for messages."""

    snapshot: Snapshot
    label: str
    foreign: str = ""
    """Name of its format, if it is not our own."""
    left_out: Sequence[str] = ()
    """What a foreign checkpoint has that is not shown, one sentence each."""
    requests: Mapping[str, int] = field(default_factory=dict)
    """By kind, what its save asked of storage, where that is counted."""


@contextmanager
def open_checkpoint(path: Path, *, step: int | None = None) -> Iterator[OpenCheckpoint]:
    """Open the checkpoint meant by a path; while it is open, `prune` leaves it alone.

    On storage that cannot be written to it is read without a lease.

    Raises:
        ConfigError: as `find_checkpoint`.
        StorageError: it is no longer there.
        CorruptionError: manifest or index are damaged.
    """
    with (
        lease_checkpoint(path, step=step) as (checkpoint, lease),
        Snapshot.open(checkpoint.storage, checkpoint.directory) as snapshot,
    ):
        lease.set_version(snapshot.manifest.save_id)
        storage = checkpoint.storage
        yield OpenCheckpoint(
            snapshot=snapshot,
            label=checkpoint.label,
            foreign=checkpoint.foreign,
            left_out=storage.catalog.left_out if isinstance(storage, CatalogStorage) else (),
            requests=requests_of_save(storage, checkpoint.directory, step=snapshot.manifest.step),
        )


@contextmanager
def lease_checkpoint(
    path: Path, *, step: int | None = None
) -> Iterator[tuple[StoredCheckpoint, Lease]]:
    """The checkpoint meant by a path; until this is closed, no process removes it.

    Its storage shows the version that has its name now, also if the step is saved again.

    Raises:
        ConfigError: as `find_checkpoint`.
        StorageError: the checkpoint was removed each time.
    """
    with lease_chosen(lambda: find_checkpoint(path, step=step)) as (chosen, lease):
        yield replace(chosen, storage=lease.view or chosen.storage), lease
