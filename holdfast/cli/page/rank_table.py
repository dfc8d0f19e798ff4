"""A table of numbers by rank that stays legible for many ranks: a summary, outliers, then all."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from holdfast.cli.page.html import Column, Html, element, esc, table
from holdfast.cli.support.messages import in_ranges

MAX_PLAIN = 32
"""Rows of a table that is shown as a whole."""
NUM_OUTLIERS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class RankColumn:
    """A number for each rank; None where a rank has none."""

    heading: str
    values: Sequence[float | None]
    in_words: Callable[[float], str]

    def cell(self, place: int) -> str:
        """Return the number of the rank at a place, or a dash."""
        value = self.values[place]
        return "-" if value is None else self.in_words(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outliers:
    """Which ranks come first where not all can: those with the most of something."""

    words: str
    """Such as "that worked longest"."""
    weights: Sequence[float]

    @property
    def places(self) -> list[int]:
        """Return the places of the first ranks, most first."""
        order = sorted(range(len(self.weights)), key=lambda place: -self.weights[place])
        return order[:NUM_OUTLIERS]


def rank_table(
    caption: str,
    ranks: Sequence[int],
    columns: Sequence[RankColumn],
    *,
    id_: str,
    outliers: Outliers,
    has_all: bool = True,
) -> Html:
    """The numbers of all ranks; of many ranks a summary and the outliers, with all to unfold.

    Args:
        caption: of the table.
        ranks: global ranks, ascending.
        columns: what to show of each.
        id_: of the table; those next to it have ids that start with it.
        outliers: which ranks to show first where there are many.
        has_all: whether the numbers of all ranks are in the page.
    """
    heads = [Column(heading="Rank"), *(Column(heading=c.heading, is_number=True) for c in columns)]
    if len(ranks) <= MAX_PLAIN:
        plain = [_row(f"{rank}", columns, place) for place, rank in enumerate(ranks)]
        return table(caption, heads, plain, id_=id_)
    summary = [Column(heading="Of all ranks"), *heads[1:]]
    in_short = f"{caption}: {len(ranks):,} ranks in short"
    parts = [table(in_short, summary, _summary(ranks, columns), id_=f"{id_}-summary")]
    joined = _joined(ranks, columns)
    if len(joined) <= MAX_PLAIN:
        return Html(parts[0] + table(caption, heads, joined, id_=id_))
    rows = [_row(f"{ranks[i]}", columns, i) for i in outliers.places]
    parts.append(table(f"{caption}: the {len(rows)} {outliers.words}", heads, rows, id_=id_))
    if has_all:
        parts.append(
            element(
                "details",
                element("summary", esc(f"All {len(ranks):,} ranks")),
                table(f"{caption}: all ranks", heads, joined, id_=f"{id_}-all"),
                class_="inner",
            )
        )
    return Html("".join(parts))


def _row(rank: str, columns: Sequence[RankColumn], place: int) -> list[Html]:
    return [esc(rank), *(esc(column.cell(place)) for column in columns)]


def _joined(ranks: Sequence[int], columns: Sequence[RankColumn]) -> list[list[Html]]:
    """Return one row for neighbours that have the same in every cell."""
    rows: list[tuple[list[str], list[int]]] = []
    for place, rank in enumerate(ranks):
        cells = [column.cell(place) for column in columns]
        if rows and rows[-1][0] == cells and rows[-1][1][-1] == rank - 1:
            rows[-1][1].append(rank)
        else:
            rows.append((cells, [rank]))
    return [[esc(in_ranges(members)), *map(esc, cells)] for cells, members in rows]


def _summary(ranks: Sequence[int], columns: Sequence[RankColumn]) -> list[list[Html]]:
    """Return the least, the median and the most of each column, and who has the most."""
    known = [[v for v in column.values if v is not None] for column in columns]
    rows = []
    for name, choose in (("Least", min), ("Median", statistics.median_low), ("Most", max)):
        cells = [
            column.in_words(choose(values)) if values else "-"
            for column, values in zip(columns, known, strict=True)
        ]
        rows.append([esc(name), *map(esc, cells)])
    who = []
    for column, values in zip(columns, known, strict=True):
        top = max(values, default=math.nan)
        most = [rank for rank, v in zip(ranks, column.values, strict=True) if v == top]
        if not most or len(most) == len(ranks):
            who.append("all" if most else "-")
        else:
            more = f" and {len(most) - 1:,} more" if len(most) > 1 else ""
            who.append(f"{most[0]}{more}")
    rows.append([esc("Rank with the most"), *map(esc, who)])
    return rows
