"""Programs of the pages of integrations, and the lines in them that are Holdfast's."""

from __future__ import annotations

import re
from pathlib import Path

PAGES = Path(__file__).parents[2] / "docs" / "integrations"


def program_of(page: str, name: str) -> str:
    """Return the program that a page prints between the marks of `name`."""
    text = (PAGES / f"{page}.md").read_text()
    marked = re.search(
        rf"<!-- {name}: begin -->\n```python\n(.*?)```\n<!-- {name}: end -->", text, re.DOTALL
    )
    assert marked is not None, f"{page}.md has no program {name}"
    return marked[1]


def lines_to_change(program: str) -> list[str]:
    """Return the lines of a program that are marked as those that a user adds or changes."""
    return [line for line in program.splitlines() if line.rstrip().endswith("# holdfast")]
