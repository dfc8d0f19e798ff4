"""The page as a whole: what it is given becomes sections of one HTML file."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files

from holdfast.cli.page.heat_map import OWN, HeatMap, heat_map_table
from holdfast.cli.page.history import History, history_section
from holdfast.cli.page.html import (
    Column,
    Html,
    bullets,
    element,
    embedded_json,
    esc,
    paragraph,
    table,
)
from holdfast.cli.page.rank_table import Outliers, RankColumn, rank_table
from holdfast.cli.page.run_events import RunLog
from holdfast.cli.page.tensors import tensor_data
from holdfast.cli.page.timeline import timeline_section
from holdfast.cli.page.verdict import judge, verdict_section
from holdfast.cli.support.holders import SavedPlacement
from holdfast.cli.support.locality import RankLocality, placement_counts, rank_localities
from holdfast.cli.support.locality_tables import KIND_COLUMNS, SCOPE, kind_rows, size_or_dash
from holdfast.cli.support.messages import in_ranges, layout_in_words, metadata_in_words, when
from holdfast.errors import clean, counted, in_bytes
from holdfast.format.manifest import Manifest
from holdfast.version import __version__

MARK = "<!doctype html><!-- holdfast view -->"
"""How a page starts; a file that starts otherwise is not overwritten."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PageData:
    """What a page shows."""

    label: str
    saved: SavedPlacement
    heat_maps: Sequence[HeatMap]
    planned_nbytes: int
    """That all ranks read together in a load under the saved layout, as planned."""
    history: History
    log: RunLog


def build_page(data: PageData) -> str:
    """The page, complete: style, script and data are in it, and nothing is fetched."""
    manifest = data.saved.manifest
    style, script = _asset("page.css"), _asset("page.js")
    title = f"Step {manifest.step}, {data.label}"
    ranks = list(rank_localities(data.saved))
    findings = judge(data.saved, ranks, data.log, planned_nbytes=data.planned_nbytes)
    sections = [
        ("overview", "Overview", Html(verdict_section(findings) + _overview(manifest))),
        ("tensors", "Tensors and placements", _tensors(manifest)),
        ("locality", "Locality", _locality(data.saved, ranks)),
        ("reads", "Bytes read by a load", _heat_maps(data.heat_maps)),
        ("saves", "Save timeline", timeline_section(data.log)),
        ("history", "Retention history",
         history_section(data.history, shown_step=manifest.step,
                         has_log=data.log.num_files > 0)),
    ]  # fmt: skip
    links = [
        element("li", element("a", esc(name), href=f"#{id_}")) for id_, name, _ in sections
    ]  # fmt: skip
    body = [
        element("a", esc("Skip to the content"), href="#content", class_="skip"),
        element(
            "header",
            element("p", esc("holdfast view"), class_="brand"),
            element("h1", esc(f"Checkpoint of step {manifest.step}")),
            element("p", element("code", esc(data.label)), class_="path"),
        ),
        element("nav", element("ul", *links), aria_label="Sections"),
        element(
            "main",
            *(
                element("section", element("h2", esc(name), id=f"{id_}-title"), content, id=id_,
                        aria_labelledby=f"{id_}-title")
                for id_, name, content in sections
            ),
            id="content", tabindex="-1",
        ),
        element(
            "footer",
            paragraph(f"Made by holdfast {__version__}. Sizes are in powers of 1000. This page "
                      "holds all it shows; it fetches nothing."),
        ),
        embedded_json(tensor_data(data.saved), id_="data"),
        Html(f"<script>{script}</script>"),
    ]  # fmt: skip
    # The policy names the script by its digest: no other one can run, whatever a key contains.
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; "
        "base-uri 'none'; form-action 'none'"
    )
    head = [
        Html('<meta charset="utf-8">'),
        Html(f'<meta http-equiv="Content-Security-Policy" content="{esc(policy)}">'),
        Html('<meta name="viewport" content="width=device-width, initial-scale=1">'),
        Html('<meta name="color-scheme" content="light dark">'),
        element("title", esc(title)),
        Html(f"<style>{style}</style>"),
    ]
    html = f'<html lang="en"><head>{"".join(head)}</head><body>{"".join(body)}</body></html>'
    return f"{MARK}\n{html}\n"


def _asset(name: str) -> str:
    return (files("holdfast.cli.page") / name).read_text(encoding="utf-8")


def _overview(manifest: Manifest) -> Html:
    """Name and value of what is known of the checkpoint as a whole."""
    totals = manifest.totals
    extra = totals.stored_nbytes - totals.nbytes
    facts = [
        ("Tensors", f"{totals.num_tensors:,}"),
        ("Size", in_bytes(totals.nbytes)),
        ("Copies", in_bytes(extra) if extra else "none"),
        ("Data files", f"{len(manifest.files):,}"),
        ("Chunks", f"{manifest.index.num_rows:,}"),
    ]
    more = [
        ("Saved", f"{when(manifest.created)} UTC"),
        *(("Layout", f"{layout_in_words(x)} ({in_ranges(x.ranks)}), order {x.order}")
          for x in manifest.layouts),
        ("Written by", f"holdfast {manifest.holdfast}, torch {manifest.torch}, format "
                       f"{manifest.version}"),
        ("Save id", manifest.save_id),
    ]  # fmt: skip
    if manifest.metadata:
        more.append(("Metadata", metadata_in_words(manifest.metadata)))
    return Html(
        element("dl", *map(_fact, facts), class_="tiles")
        + element("dl", *map(_fact, more), class_="facts")
    )


def _fact(fact: tuple[str, str]) -> Html:
    return element("div", element("dt", esc(fact[0])), element("dd", esc(fact[1])))


def _tensors(manifest: Manifest) -> Html:
    """The place of the tree, which the script fills; a table of the parts without it."""
    sizes = {info.key: info.nbytes for info in manifest.tensors}
    count = counted(len(sizes), "tensor")
    return Html(
        element("p", esc("Each picture is a tensor, cut into its stored chunks; the number in a "
                         "chunk is the rank that wrote it. Open a part, or type to filter."))
        + element(
            "form",
            element("label", esc("Filter by key"), for_="filter"),
            Html('<input id="filter" type="search" autocomplete="off" spellcheck="false" '
                 'aria-describedby="matches" placeholder="attn weight">'),
            element("p", esc(count), id="matches", role="status", aria_live="polite"),
            role="search", id="search", aria_label="Tensors",
        )
        + element("div", id="tree")
        + element("noscript", paragraph("The tree of tensors needs the script that is in this "
                                        "page; every table below works without it."))
    )  # fmt: skip


def _locality(saved: SavedPlacement, ranks: Sequence[RankLocality]) -> Html:
    """The tables of `show --locality`, and what each rank needs of each part."""
    needs = [float(sum(each.nbytes_by_part.values())) for each in ranks]
    others = [float(each.other_nbytes) for each in ranks]
    shares = [
        100 * each.own_nbytes / need if need else None
        for each, need in zip(ranks, needs, strict=True)
    ]
    sizes = {
        "In its own file": [float(each.own_nbytes) for each in ranks],
        "In files of others": others,
    }
    columns = [_sizes(heading, values) for heading, values in sizes.items()]
    columns += [
        RankColumn(heading="Own share", values=shares, in_words=lambda share: f"{share:.0f} %"),
        RankColumn(heading="Files to open", values=[each.num_files for each in ranks],
                   in_words=lambda number: f"{number:.0f}"),
    ]  # fmt: skip
    parts = list(ranks[0].nbytes_by_part) if ranks else []
    by_part = [
        _sizes(part or "(no part)", [float(each.nbytes_by_part[part]) for each in ranks])
        for part in parts
    ]
    by_part = [column for column in by_part if any(column.values)]
    by_part.append(_sizes("All parts", needs))
    numbers = [each.rank for each in ranks]
    return Html(
        paragraph("Where the bytes lie that each rank needs when the saved layout is loaded.")
        + rank_table("Bytes that each rank needs under the saved layout", numbers, columns,
                     id_="ranks", outliers=Outliers(words="with most in files of others",
                                                    weights=others))
        + rank_table("Bytes that each rank needs of each part", numbers, by_part, id_="parts",
                     outliers=Outliers(words="that need most", weights=needs))
        + _copies(saved)
        + _placements(saved)
    )  # fmt: skip


def _sizes(heading: str, values: Sequence[float]) -> RankColumn:
    return RankColumn(heading=heading, values=values, in_words=lambda n: size_or_dash(int(n)))


def _copies(saved: SavedPlacement) -> Html:
    """Return how often tensors are stored, by part and kind."""
    columns = [
        Column(heading=heading.capitalize(), is_number=style == "right")
        for heading, style in KIND_COLUMNS
    ]
    rows = [[*map(esc, row)] for row in kind_rows(saved)]
    totals = saved.manifest.totals
    foot = ["All", "", f"{totals.num_tensors:,}", in_bytes(totals.nbytes),
            in_bytes(totals.stored_nbytes), "",
            size_or_dash(totals.stored_nbytes - totals.nbytes)]  # fmt: skip
    caption = "Copies that are stored, by part and kind of tensor"
    return table(caption, columns, rows, id_="copies", foot=list(map(esc, foot)))


def _placements(saved: SavedPlacement) -> Html:
    """Return how many tensors are placed in which way."""
    columns = [Column(heading="Placement"), Column(heading="Tensors", is_number=True),
               Column(heading="Size", is_number=True), Column(heading="Which means")]  # fmt: skip
    rows = [
        [
            esc(clean(c.placement)), esc(f"{c.num_tensors:,}"), esc(in_bytes(c.nbytes)),
            esc(clean(c.meaning)),
        ]
        for c in placement_counts(saved)
    ]  # fmt: skip
    caption = "How tensors are placed"
    return Html(table(caption, columns, rows, id_="placements") + paragraph(SCOPE, class_="note"))


def _heat_maps(heat_maps: Sequence[HeatMap]) -> Html:
    """Every heat map, each with its notes."""
    keys = [
        element("li", element("span", class_=f"swatch h{shade}"), esc(text))
        for shade, text in ((0, "nothing"), (1, "little"), (4, "half of the most"), (8, "most"))
    ]
    keys.append(element("li", element("span", esc(OWN), class_="own"),
                        esc("the file that the rank wrote itself")))  # fmt: skip
    return Html(
        paragraph("Which rank reads how much of which data file. Whole digest blocks are counted, "
                  "because these are what is read and checked.")
        + element("ul", *keys, class_="legend", aria_label="Shades")
        + "".join(heat_map_table(heat, id_=f"heat-{i}") for i, heat in enumerate(heat_maps))
        + bullets([] if heat_maps else ["No load was logged, and none could be planned."])
    )  # fmt: skip
