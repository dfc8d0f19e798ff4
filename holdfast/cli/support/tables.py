"""How the commands print: tables and JSON on standard output, a progress bar on standard error."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any, TypeVar

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table
from rich.text import Text

from holdfast.errors import clean, counted

T = TypeVar("T")

MAX_ROWS = 50
"""Rows of a table that are printed when not all were asked for."""
_LONGEST_WORDS = range(24, 5, -2)
"""Words of so many characters are not cut: tried one after the other until a table fits."""
_GAP = 2
"""Between columns, and at both edges together."""


class _Console(Console):
    """A console that no text steers, and that lets its caller know when the reader has left.

    Every string is made safe here: names and messages from elsewhere may be in any of them.
    """

    def render_str(self, text: str, **settings: Any) -> Text:
        """Show control and direction marks of a string as escapes."""
        return super().render_str(clean(text), **settings)

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


@dataclass(frozen=True, slots=True)
class _Needs:
    """The widths that a column needs: for all on one line, for the words of heading and cells."""

    all: int
    heading: int
    word: int
    is_number: bool

    @classmethod
    def of(cls, heading: str, cells: Sequence[str], is_number: bool) -> _Needs:
        """Measure a column; the cells of numbers are words as a whole: 1.23 GB."""
        longest = max(map(cell_len, cells), default=0)
        words = (word for cell in cells for word in cell.split())
        return cls(
            all=max(longest, cell_len(heading), 1),
            heading=max(map(cell_len, heading.split()), default=1),
            word=longest if is_number else max(map(cell_len, words), default=0),
            is_number=is_number,
        )

    def least(self, longest: int) -> int:
        """Return the width that cuts no number, and no word of up to so many characters."""
        return max(self.heading, self.word if self.is_number else min(self.word, longest))


class Listing:
    """A table that keeps every column at any width: text and headings wrap, numbers do not.

    Where the terminal has no room for that, each row is printed as lines of heading and cell.

    Args:
        columns: A heading and a style each ("right" aligns numbers).
        title: Above the table.
    """

    def __init__(self, columns: Sequence[tuple[str, str]], *, title: str = "") -> None:
        self._columns, self._title = columns, title
        self._rows: list[tuple[Sequence[str], str | None]] = []

    def add_row(self, *cells: str, style: str | None = None) -> None:
        """Add a row; columns that it has no cell for stay empty."""
        missing = len(self._columns) - len(cells)
        self._rows.append(((*map(clean, cells), *[""] * missing), style))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Lay it out for the width of the console."""
        widths = self._widths(options.max_width - _GAP * len(self._columns))
        if widths is None:
            yield from self._records()
            return
        table = Table(
            title=self._title or None, box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False,
            collapse_padding=True,
        )  # fmt: skip
        for (heading, style), width in zip(self._columns, widths, strict=True):
            is_number = style == "right"
            table.add_column(
                heading, justify="right" if is_number else "left", overflow="fold", width=width,
                style=None if is_number else style or None,
            )  # fmt: skip
        for cells, row_style in self._rows:
            table.add_row(*cells, style=row_style)
        yield table

    def _widths(self, room: int) -> list[int] | None:
        """Return the width of each column; None if there is no room to keep numbers whole."""
        needs = [
            _Needs.of(heading, [cells[number] for cells, _ in self._rows], style == "right")
            for number, (heading, style) in enumerate(self._columns)
        ]
        for longest in _LONGEST_WORDS:
            widths = [need.least(longest) for need in needs]
            if sum(widths) <= room:
                break
        else:
            return None
        # Each further cell goes to the column that would wrap most.
        while sum(widths) < room and any(
            w < need.all for w, need in zip(widths, needs, strict=True)
        ):
            most = max(range(len(widths)), key=lambda i: needs[i].all / widths[i])
            widths[most] += 1
        return widths

    def _records(self) -> Iterator[Text]:
        """Yield a line for each cell, and an empty one after each row."""
        if self._title:
            yield Text(self._title, style="italic")
        for cells, style in self._rows:
            for (heading, _), cell in zip(self._columns, cells, strict=True):
                if cell:
                    yield Text(f"{heading}: {cell}" if heading else cell, style=style or "")
            yield Text()


def print_rows(
    console: Console,
    columns: Sequence[tuple[str, str]],
    items: Sequence[T],
    cells: Callable[[T], Sequence[str]],
    *,
    noun: str,
    title: str = "",
    most: int = MAX_ROWS,
    rest: str = "--json lists all",
) -> None:
    """A table with a row of `cells` for each of the first items; nothing without any.

    Of more than `most` items it says how many `noun`s there are, and by `rest` how to see them.
    """
    if not items:
        return
    table = Listing(columns, title=title)
    for item in items[:most]:
        table.add_row(*cells(item))
    console.print(table)
    if len(items) > most:
        console.print(f"… and {counted(len(items) - most, f'more {noun}')}; {rest}", style="dim")


def print_json(value: object) -> None:
    """One JSON document on standard output; numbers that JSON lacks become strings.

    What `clean` would escape has the escapes of JSON: it reads the same, and steers no terminal.
    """
    text = json.dumps(_finite(value), indent=2, ensure_ascii=False)
    odd = {c for c in set(text) if not c.isprintable() and c != "\n"}
    print(text.translate({ord(c): json.dumps(c)[1:-1] for c in odd}))


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
