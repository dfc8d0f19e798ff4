"""What the verbs that look at checkpoints share: finding them, and putting things in words."""

from __future__ import annotations

import json
import math
import os
import stat
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO

from rich import box
from rich.console import Console
from rich.table import Table

from holdfast.cli.support.report import clean as clean
from holdfast.errors import ConfigError
from holdfast.format.manifest import LayoutInfo
from holdfast.format.names import MANIFEST, list_steps, parse_saving_dir, parse_step_dir, step_dir
from holdfast.storage import PosixStorage

_MAX_RUN_DEPTH = 2
_MAX_RUN_PLACES = 2000

EXIT_DAMAGED = 1
"""Something stored is damaged, or two things differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One committed checkpoint: a store, the directory in it, and its path in words."""

    storage: PosixStorage
    directory: str
    label: str


def open_root(path: Path) -> PosixStorage:
    """The store at a directory; ConfigError when there is none."""
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(f"{path} does not exist") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{path} cannot be examined: {reason}") from None
    if not stat.S_ISDIR(found.st_mode):
        raise ConfigError(
            f"{path} is not a directory: name a checkpoint, or the directory that holds them"
        )
    return PosixStorage(path)


def open_steps(path: Path, *, verb: str) -> PosixStorage:
    """The store at a directory of checkpoints, for a verb that works on all of them.

    Raises ConfigError for one checkpoint, and for a directory of runs.
    """
    storage = open_root(path)
    if storage.exists(MANIFEST):
        above = path.resolve().parent
        raise ConfigError(
            f"{path} is one checkpoint; name the directory that holds them: "
            f"`holdfast {verb} {above}`"
        )
    if not _has_steps(storage.list("")) and (runs := find_runs(path)):
        raise ConfigError(_name_one(path, runs))
    return storage


def find_runs(path: Path) -> list[Path]:
    """Directories of checkpoints one or two levels below a directory, in order of their names.

    Looks at so many directories at most that a mistaken `/` is answered at once; what cannot be
    read is passed over.
    """
    found: list[Path] = []
    waiting = [(path, 0)]
    for directory, depth in waiting:
        names = _directories_in(directory)
        if depth and _has_steps(p.name for p in names):
            found.append(directory)
        elif depth < _MAX_RUN_DEPTH:
            waiting += [(p, depth + 1) for p in names if not p.name.startswith(".")]
        if len(waiting) > _MAX_RUN_PLACES:
            break
    return sorted(found)


def _directories_in(path: Path) -> list[Path]:
    try:
        with os.scandir(path) as entries:
            few = islice(entries, _MAX_RUN_PLACES)
            return sorted(Path(e.path) for e in few if e.is_dir(follow_symlinks=False))
    except OSError:
        return []


def _has_steps(names: Iterable[str]) -> bool:
    return any(parse_step_dir(name) is not None or parse_saving_dir(name) for name in names)


def _name_one(path: Path, runs: list[Path]) -> str:
    few = ", ".join(map(str, runs[:4])) + (", …" if len(runs) > 4 else "")
    return (
        f"{path} holds {counted(len(runs), 'run')} and no checkpoint of its own: name one of them "
        f"({few}); `holdfast ls {path}` lists them"
    )


def locate(path: Path, *, step: int | None) -> Place:
    """The checkpoint meant by a path: one checkpoint directory, or a directory of checkpoints.

    Of a directory of checkpoints the newest committed step is taken, or `step`. Raises ConfigError
    that says what was looked for.
    """
    storage = open_root(path)
    if storage.exists(MANIFEST):
        if step is not None and path.resolve().name != step_dir(step):
            raise ConfigError(f"{path} is one checkpoint; --step {step} needs the directory above")
        return Place(storage=storage, directory="", label=str(path))
    steps = list_steps(storage)
    if not steps:
        raise ConfigError(_nothing_at(path, storage))
    if step is not None and step not in steps:
        known = ", ".join(map(str, steps[-8:]))
        raise ConfigError(f"{path} has no committed step {step}; it has {known}")
    directory = step_dir(steps[-1] if step is None else step)
    return Place(storage=storage, directory=directory, label=str(path / directory))


def _nothing_at(path: Path, storage: PosixStorage) -> str:
    if any(parse_saving_dir(name) for name in (path.resolve().name, *storage.list(""))):
        return f"{path} holds no committed checkpoint, only a save that was not finished"
    if runs := find_runs(path):
        return _name_one(path, runs)
    return (
        f"{path} is no checkpoint: neither a {MANIFEST} nor an iter_*/{MANIFEST} is in it; "
        "name one checkpoint or the directory that holds them"
    )


class _Console(Console):
    """A console that lets its caller know when the reader has left."""

    def on_broken_pipe(self) -> None:
        """Raise what rich would turn into an exit with a code of its own."""
        raise BrokenPipeError


def make_console(stream: IO[str] | None = None) -> Console:
    """A console for tables: colours on a terminal; in a pipe plain and wide enough for any key."""
    stream = stream or sys.stdout
    is_terminal = stream.isatty()
    return _Console(
        file=stream,
        markup=False,
        highlight=False,
        emoji=False,
        width=None if is_terminal else 240,
    )


def make_table(columns: Sequence[tuple[str, str]], *, title: str = "") -> Table:
    """A table; each column is a heading and a style ("right" aligns numbers)."""
    table = Table(title=title or None, box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
    for heading, style in columns:
        if style == "right":
            table.add_column(heading, justify="right", no_wrap=True)
        else:
            table.add_column(heading, style=style or None, overflow="fold")
    return table


def print_json(value: object) -> None:
    """One JSON document on standard output; numbers that JSON lacks become strings."""
    print(json.dumps(_finite(value), indent=2, ensure_ascii=False))


def _finite(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def in_bytes(nbytes: int) -> str:
    """A size for people, in powers of 1000: "1.23 GB"."""
    size = float(nbytes)
    for unit in ("B", "kB", "MB", "GB", "TB", "PB"):
        if size < 999.5 or unit == "PB":
            return f"{nbytes} B" if unit == "B" else f"{size:.3g} {unit}"
        size /= 1000
    return f"{nbytes} B"


def counted(number: int, noun: str) -> str:
    """A number and its noun: "1 file", "2,000 files"."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def in_ranges(numbers: Iterable[int]) -> str:
    """Numbers in short: "0-3, 7"."""
    parts: list[list[int]] = []
    for number in sorted(set(numbers)):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


def layout_in_words(layout: LayoutInfo) -> str:
    """A layout in short: "model tp2·dp4 on 8 ranks"."""
    sizes = "·".join(f"{axis}{size}" for axis, size in layout.axes.items() if size > 1)
    ranks = counted(len(layout.ranks), "rank")
    return clean(f"{layout.name} {sizes}{' ' if sizes else ''}on {ranks}")


def metadata_in_words(metadata: Mapping[str, object]) -> str:
    """A user's JSON object in short: "commit=abc, loss=1.5"."""
    return clean(", ".join(f"{key}={_in_json(value)}" for key, value in metadata.items()))


def _in_json(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def when(created: str) -> str:
    """A time from a manifest without its letters: "2026-01-02 03:04:05"."""
    return clean(created).replace("T", " ").removesuffix("Z").removesuffix("+00:00")[:19]
