"""HTML as text: everything from elsewhere is escaped where it becomes part of a page."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NewType

from holdfast.errors import clean

Html = NewType("Html", str)
"""Text that is HTML already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column of a table: its heading, and whether it holds numbers."""

    heading: str
    is_number: bool = False


def esc(text: object) -> Html:
    """Text from elsewhere as content or attribute: markup is escaped, and so is what is invisible.

    Control and direction characters are shown as escapes: a key cannot look like another one.
    """
    return Html(html.escape(clean(str(text)), quote=True))


def element(tag: str, *content: Html, **attributes: str | None) -> Html:
    """An element. Attributes are escaped; `class_` is class, `aria_label` aria-label; no None."""
    words = [
        f' {name.rstrip("_").replace("_", "-")}="{esc(value)}"'
        for name, value in attributes.items()
        if value is not None
    ]
    return Html(f"<{tag}{''.join(words)}>{''.join(content)}</{tag}>")


def paragraph(text: str, *, class_: str | None = None) -> Html:
    """Plain text as a paragraph."""
    return element("p", esc(text), class_=class_)


def bullets(texts: Sequence[str]) -> Html:
    """Plain texts as a list; nothing for none."""
    if not texts:
        return Html("")
    return element("ul", *(element("li", esc(text)) for text in texts), class_="notes")


def table(
    caption: str,
    columns: Sequence[Column],
    rows: Sequence[Sequence[Html]],
    *,
    id_: str,
    foot: Sequence[Html] = (),
) -> Html:
    """A table whose first column heads its rows, scrollable by keyboard where it is too wide."""
    head = element(
        "tr", *(element("th", esc(c.heading), scope="col", class_=_class(c)) for c in columns)
    )
    body = [_row(columns, row) for row in rows]
    parts = [
        element("caption", esc(caption), id=f"{id_}-caption"),
        element("thead", head),
        element("tbody", *body),
    ]
    if foot:
        parts.append(element("tfoot", _row(columns, foot)))
    return scrollable(element("table", *parts, id=id_), label_id=f"{id_}-caption")


def scrollable(content: Html, *, label_id: str) -> Html:
    """A region that can be reached and scrolled with the keyboard."""
    return element(
        "div", content, class_="scroll", role="region", tabindex="0", aria_labelledby=label_id
    )


def _row(columns: Sequence[Column], cells: Sequence[Html]) -> Html:
    """One row of a table."""
    first, *rest = cells
    return element(
        "tr",
        element("th", first, scope="row", class_=_class(columns[0])),
        *(
            element("td", cell, class_=_class(column))
            for column, cell in zip(columns[1:], rest, strict=True)
        ),
    )


def _class(column: Column) -> str | None:
    return "num" if column.is_number else None


def embedded_json(value: object, *, id_: str) -> Html:
    """Data for the page's script; no text in it can end the element that holds it."""
    text = json.dumps(value, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Html(f'<script type="application/json" id="{esc(id_)}">{text}</script>')
