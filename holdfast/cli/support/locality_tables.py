"""`holdfast show --locality`: where the bytes lie that each rank needs, as tables and as JSON."""

from __future__ import annotations

from dataclasses import asdict

from rich.console import Console

from holdfast.cli.support.holders import SavedPlacement
from holdfast.cli.support.locality import (
    RankLocality,
    placement_counts,
    rank_localities,
    stored_kinds,
)
from holdfast.cli.support.tables import Listing, print_rows
from holdfast.errors import in_bytes

SCOPE = (
    "Who held a box is stored in the index. Between copies of a chunk ranks are taken to choose as "
    "those of one host do."
)


KIND_COLUMNS = (
    ("part", "bold"), ("kind", ""), ("tensors", "right"), ("size", "right"),
    ("stored", "right"), ("times stored", "right"), ("extra", "right"),
)  # fmt: skip
"""How often tensors are stored, by part and kind, here and on the page of `holdfast view`."""


def kind_rows(saved: SavedPlacement) -> list[list[str]]:
    """The cells of `KIND_COLUMNS`."""
    return [
        [
            kind.part, kind.kind, f"{kind.num_tensors:,}", in_bytes(kind.nbytes),
            in_bytes(kind.stored_nbytes), _times(kind.min_copies, kind.max_copies),
            size_or_dash(kind.extra_nbytes),
        ]
        for kind in stored_kinds(saved)
    ]  # fmt: skip


def size_or_dash(nbytes: int) -> str:
    """A size, or a dash for nothing."""
    return in_bytes(nbytes) if nbytes else "-"


def _times(least: int, most: int) -> str:
    return f"{least}" if least == most else f"{least}-{most}"


def locality_json(saved: SavedPlacement) -> dict[str, object]:
    """The member `locality` of `--json`; sizes in bytes."""
    totals = saved.manifest.totals
    return {
        "ranks": [asdict(rank) for rank in rank_localities(saved)],
        "kinds": [
            asdict(kind) | {"extra_nbytes": kind.extra_nbytes} for kind in stored_kinds(saved)
        ],
        "extra_nbytes": totals.stored_nbytes - totals.nbytes,
        "placements": [asdict(count) for count in placement_counts(saved)],
    }


def print_locality(console: Console, saved: SavedPlacement) -> None:
    """Three tables: by rank, by part and kind of tensor, and by placement."""
    print_rows(
        console,
        [
            ("rank", "right"), ("in its own file", "right"), ("in files of others", "right"),
            ("own share", "right"), ("files to open", "right"),
        ],
        list(rank_localities(saved)),
        _rank_cells,
        noun="rank",
        title="bytes that each rank needs under the saved layout",
    )  # fmt: skip
    _print_kinds(console, saved)
    table = Listing(
        [("tensors", "right"), ("size", "right"), ("placement", "bold"), ("which means", "")],
        title="how tensors are placed",
    )
    for count in placement_counts(saved):
        table.add_row(
            f"{count.num_tensors:,}", in_bytes(count.nbytes), count.placement, count.meaning
        )
    console.print(table)
    console.print(SCOPE, style="dim", soft_wrap=True)


def _rank_cells(each: RankLocality) -> list[str]:
    needed = each.own_nbytes + each.other_nbytes
    share = f"{100 * each.own_nbytes / needed:.0f} %" if needed else "-"
    own, others = in_bytes(each.own_nbytes), in_bytes(each.other_nbytes)
    return [f"{each.rank}", own, others, share, f"{each.num_files}"]


def _print_kinds(console: Console, saved: SavedPlacement) -> None:
    """Print how often tensors are stored, by part and kind, and the bytes of copies."""
    table = Listing([*KIND_COLUMNS], title="copies that are stored")
    for row in kind_rows(saved):
        table.add_row(*row)
    console.print(table)
    totals = saved.manifest.totals
    extra = totals.stored_nbytes - totals.nbytes
    console.print(
        f"all tensors: {in_bytes(totals.nbytes)} once, {in_bytes(totals.stored_nbytes)} stored, "
        f"{in_bytes(extra)} of it further copies"
    )
