"""The pages of the frameworks: how many lines a user changes, as the index states it."""

from __future__ import annotations

import re

from tests.integrations.pages import PAGES, lines_to_change

_ROW = re.compile(
    r"^\| [^|]+ \| (\d)[^|]* \| [^|]+ \| \[\w+\]\((\w+\.md)(#[\w-]+)?\) \|$", re.MULTILINE
)
_PROGRAM = re.compile(r"<!-- (\w+): begin -->\n```python\n(.*?)```\n<!-- \1: end -->", re.DOTALL)


def test_the_index_counts_the_lines_of_each_program() -> None:
    """X20. At most five, on each page; a page with two programs has two rows, in their order."""
    rows: dict[str, list[int]] = {}
    for number, page, _ in _ROW.findall((PAGES / "index.md").read_text()):
        rows.setdefault(page, []).append(int(number))
    counts = {
        path.name: [len(lines_to_change(each)) for _, each in _PROGRAM.findall(path.read_text())]
        for path in PAGES.glob("*.md")
        if path.name != "index.md"
    }
    assert rows == counts
    assert sum(map(len, counts.values())) >= 9
    assert all(1 <= each <= 5 for page in counts.values() for each in page)
