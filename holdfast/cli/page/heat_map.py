"""A table of bytes, rank by file, whose cells are shaded by size; every number is also text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from holdfast.arrays.types import IntArray
from holdfast.cli.page.html import Html, bullets, element, esc, scrollable
from holdfast.cli.support.messages import in_ranges
from holdfast.errors import counted, in_bytes

_MAX_LINES = 40
"""Rows and columns of a table; more ranks or files are summed up."""
_NUM_SHADES = 8
_NUM_NAMED = 5
OWN = "◆"
"""Marks the file that a rank wrote itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeatMap:
    """Bytes that each rank reads of each file.

    Args:
        title: Of the table.
        ranks: Global ranks.
        files: Names of data files.
        writers: The rank that wrote each file; -1 where that is unknown.
        nbytes: (ranks, files).
        notes: What to know about it.
    """

    title: str
    ranks: Sequence[int]
    files: Sequence[str]
    writers: Sequence[int]
    nbytes: IntArray
    notes: Sequence[str] = field(default_factory=list)


def heat_map_table(heat: HeatMap, *, id_: str) -> Html:
    """The table, with sums by rank and by file, and the notes below."""
    rows, columns = _bins(len(heat.ranks)), _bins(len(heat.files))
    sums = (
        np.add.reduceat(heat.nbytes, [row.start for row in rows], axis=0) if rows else heat.nbytes
    )
    if columns:
        sums = np.add.reduceat(sums, [column.start for column in columns], axis=1)
    top = int(sums.max(initial=0))
    head = [element("th", esc("Rank"), scope="col")]
    head += [element("th", _file_heading(heat, column), scope="col") for column in columns]
    head += [element("th", esc(name), scope="col", class_="num") for name in ("Sum", "Files")]
    body = []
    for number, row in enumerate(rows):
        ranks = [heat.ranks[i] for i in row]
        cells = [
            _cell(int(sums[number, i]), top, is_own=_is_own(heat, row, column))
            for i, column in enumerate(columns)
        ]
        num_files = [int((heat.nbytes[i] > 0).sum()) for i in row]
        files = (
            f"{num_files[0]}" if len(set(num_files)) == 1 else f"{min(num_files)}-{max(num_files)}"
        )
        body.append(
            element(
                "tr",
                element("th", esc(in_ranges(ranks)), scope="row"),
                *cells,
                element("td", esc(in_bytes(int(sums[number].sum()))), class_="num"),
                element("td", esc(files), class_="num"),
            )
        )
    foot = [element("th", esc("Sum"), scope="row")]
    foot += [element("td", esc(in_bytes(int(n))), class_="num") for n in sums.sum(axis=0)]
    foot += [element("td", esc(in_bytes(int(sums.sum()))), class_="num"), element("td")]
    table = element(
        "table",
        element("caption", esc(heat.title), id=f"{id_}-caption"),
        element("thead", element("tr", *head)),
        element("tbody", *body),
        element("tfoot", element("tr", *foot)),
        id=id_, class_="heat",
    )  # fmt: skip
    notes = list(heat.notes)
    if len(rows) < len(heat.ranks) or len(columns) < len(heat.files):
        notes.append(
            f"{len(heat.ranks):,} ranks and {len(heat.files):,} files: neighbours are summed up."
        )
        notes.append(_who_reads_most(heat))
    return Html(scrollable(table, label_id=f"{id_}-caption") + bullets(notes))


def _bins(count: int) -> list[range]:
    """At most `_MAX_LINES` ranges that cover so many; of 2, 4, 8, … neighbours, as hosts are."""
    length = 1
    while length * _MAX_LINES < count:
        length *= 2
    return [range(at, min(at + length, count)) for at in range(0, count, length)]


def _who_reads_most(heat: HeatMap) -> str:
    """Name the single ranks that stand out, which sums of neighbours hide."""
    sums, num_files = heat.nbytes.sum(axis=1), (heat.nbytes > 0).sum(axis=1)
    order = np.argsort(-sums, kind="stable").tolist()
    named = [
        f"rank {heat.ranks[i]} ({in_bytes(int(sums[i]))}, {counted(int(num_files[i]), 'file')})"
        for i in order[:_NUM_NAMED]
    ]
    middle = order[len(order) // 2]
    return (
        f"Most is read by {', '.join(named)}; the median rank reads {in_bytes(int(sums[middle]))}."
    )


def _file_heading(heat: HeatMap, column: range) -> Html:
    """The number of a file and the rank that wrote it, or those of several."""
    names = [
        heat.files[i].removeprefix("data/").removesuffix(".safetensors").removesuffix(".distcp")
        for i in column
    ]
    writers = sorted({heat.writers[i] for i in column} - {-1})
    by = f"by rank {in_ranges(writers)}" if writers else ""
    short = [name.lstrip("0") or "0" for name in names]
    shown = short[0] if len(short) == 1 else f"{short[0]}-{short[-1]}"
    return Html(
        element("span", esc(f"file {shown}"), class_="file")
        + element("span", esc(by), class_="by")
    )  # fmt: skip


def _is_own(heat: HeatMap, row: range, column: range) -> bool:
    """Return True if a cell has the file that a rank of it wrote."""
    return not {heat.ranks[i] for i in row}.isdisjoint(heat.writers[i] for i in column)


def _cell(nbytes: int, top: int, *, is_own: bool) -> Html:
    """One cell; the shade grows with the bytes, nothing has none."""
    shade = min(-(-nbytes * _NUM_SHADES // top), _NUM_SHADES) if top else 0
    mark = (
        element("span", esc(f" {OWN}"), class_="own", aria_label="own file", role="img")
        if is_own
        else Html("")
    )
    text = esc(in_bytes(nbytes)) if nbytes else element("span", esc("0"), class_="none")
    return element("td", text, mark, class_=f"num h{shade}")
