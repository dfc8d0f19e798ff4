"""Every promise of `docs/guarantees.md` names tests that exist, and every id in a test is there.

Prevents promises that nothing proves, and ids that refer to nothing. `python -m
tests.test_guarantees` writes the links of the page again after a test has moved.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

from holdfast.collector import collector_paused

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "guarantees.md"
SUITES = (ROOT / "tests", ROOT / "trainer" / "tests")
_ROW = re.compile(r"^\| ([A-Z]\d{1,2}) \| (.+) \| (.+) \|$", re.MULTILINE)
_PROOF = re.compile(r"\[?`(?:(test_\w+)::)?(test_\w+)`\]?(?:\((\S+?)\))?")
_MENTION = re.compile(
    r"\b([ABCDEFGIKMOPRSTVX]\d{1,2})\b(?:\s?(?:-|to)\s?([ABCDEFGIKMOPRSTVX]\d{1,2})\b)?"
)
_ELEMENT_TYPES = {"F8", "F16", "F32", "F64", "C32", "C64"}


def promises() -> dict[str, str]:
    """The tests column of each id; a promise has one row."""
    rows = _ROW.findall(PAGE.read_text())
    columns = {name: proofs for name, _, proofs in rows}
    assert len(columns) == len(rows) > 70
    return columns


def find_tests() -> dict[str, list[Path]]:
    """Where each test function is defined."""
    places: dict[str, list[Path]] = {}
    for path in sorted(path for suite in SUITES for path in suite.rglob("test_*.py")):
        for name in re.findall(r"^def (test_\w+)", path.read_text(), flags=re.MULTILINE):
            places.setdefault(name, []).append(path)
    return places


def place_of(stem: str, name: str, places: dict[str, list[Path]]) -> Path | None:
    """The one file that defines a test, or None."""
    paths = [path for path in places.get(name, []) if stem in ("", path.stem)]
    return paths[0] if len(paths) == 1 else None


def link_to(path: Path) -> str:
    """How the page refers to a test file."""
    return f"../{path.relative_to(ROOT).as_posix()}"


def with_links(text: str) -> str:
    """The page with a link from each row's tests to their files."""
    places = find_tests()

    def linked(proof: re.Match[str]) -> str:
        stem, name = proof.group(1) or "", proof.group(2)
        path = place_of(stem, name, places)
        label = f"`{stem}::{name}`" if stem else f"`{name}`"
        return f"[{label}]({link_to(path)})" if path else label

    def row(match: re.Match[str]) -> str:
        return f"| {match[1]} | {match[2]} | {_PROOF.sub(linked, match[3])} |"

    return _ROW.sub(row, text)


def mentions(text: str) -> list[str]:
    """Ids in a docstring or comment; `G4-G6` is three of them."""
    ids = []
    for first, last in _MENTION.findall(text):
        numbers = range(int(first[1:]), int(last[1:] if last else first[1:]) + 1)
        ids += [f"{first[0]}{number}" for number in numbers]
    return [name for name in ids if name not in _ELEMENT_TYPES]


def prose_of(path: Path) -> str:
    """Docstrings and full-line comments of a test file."""
    text = path.read_text()
    with collector_paused():
        tree = ast.parse(text)
        owners = [
            n for n in ast.walk(tree) if isinstance(n, ast.Module | ast.ClassDef | ast.FunctionDef)
        ]
    docstrings = [ast.get_docstring(owner) or "" for owner in owners]
    comments = re.findall(r"^\s*# (.*)$", text, flags=re.MULTILINE)
    return "\n".join(docstrings + comments)


def test_every_promise_is_proved_by_tests_that_exist() -> None:
    """At least one test per id, and each link leads to the file that defines the test."""
    places = find_tests()
    problems = []
    for promise, column in promises().items():
        proofs = _PROOF.findall(column)
        if not proofs:
            problems.append(f"{promise}: no test")
        for stem, name, link in proofs:
            path = place_of(stem, name, places)
            if path is None:
                problems.append(
                    f"{promise}: {name}: {len(places.get(name, []))} tests of that name"
                )
            elif link != link_to(path):
                problems.append(
                    f"{promise}: {name} is in {path}; run python -m tests.test_guarantees"
                )
    assert not problems, "\n".join(problems)


def test_every_id_that_a_test_mentions_is_a_promise() -> None:
    """An id in a docstring or comment of a test is a row of the page."""
    known = set(promises())
    unknown = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in sorted(path for suite in SUITES for path in suite.rglob("*.py"))
        if "test_guarantees" not in path.name
        # To parse each takes ten times as long as this look at the whole text.
        and not known.issuperset(mentions(re.sub(r"\n\s+", "\n", path.read_text())))
        for name in mentions(prose_of(path))
        if name not in known
    }
    assert not unknown, "\n".join(sorted(unknown))


def test_ids_of_the_rules_are_promises() -> None:
    """The second part of the page refers to ids of the first."""
    rules = PAGE.read_text().split("## Rules in detail")[1]
    unknown = set(mentions(re.sub(r"`[^`]*`", "", rules))) - set(promises())
    assert not unknown


def test_mentions_are_read_as_people_write_them() -> None:
    """Lists, ranges, rows; not element types, layouts or parts of words."""
    text = "rows A1-A3, E7; (G4 to G6): TP2 x EP2 into F32, BF16 and C64; P2P"
    assert mentions(text) == ["A1", "A2", "A3", "E7", "G4", "G5", "G6"]


if __name__ == "__main__":
    PAGE.write_text(with_links(PAGE.read_text()))
