"""How the commands print: tables and JSON on standard output, a progress bar on standard error."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from typing import IO

from rich import box
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table

MAX_ROWS = 50
"""Rows of a table that are printed when not all were asked for."""


class _Console(Console):
    """A console that lets its caller know when the reader has left."""

    def on_broken_pipe(self) -> None:
        """Raise what rich would turn into an exit with its own code."""
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


def print_rows(
    console: Console, columns: Sequence[tuple[str, str]], rows: Sequence[Sequence[str]]
) -> None:
    """A table of the first `MAX_ROWS` rows, and how many more there are; nothing without rows."""
    if not rows:
        return
    table = make_table(columns)
    for row in rows[:MAX_ROWS]:
        table.add_row(*row)
    console.print(table)
    if len(rows) > MAX_ROWS:
        console.print(f"… and {len(rows) - MAX_ROWS:,} more; --json lists all", style="dim")


def print_json(value: object) -> None:
    """One JSON document on standard output; numbers that JSON lacks become strings."""
    print(json.dumps(_finite(value), indent=2, ensure_ascii=False))


def _finite(value: object) -> object:
    """A copy in which numbers that JSON lacks are strings."""
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def progress_bar(*, quiet: bool) -> Progress:
    """A bar of bytes read, on standard error while that is a terminal; add a task to start it."""
    return Progress(
        BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn(),
        console=make_console(sys.stderr), transient=True, disable=quiet or not sys.stderr.isatty(),
    )  # fmt: skip
