"""The language of the house: `docs/glossary.md` lists retired words, and none of them is in use.

Prevents that a noun that was replaced comes back under its old name, in code or in documents.
"""

from __future__ import annotations

import io
import re
import subprocess
import tokenize
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
GLOSSARY = ROOT / "docs" / "glossary.md"
FOLDERS = ("holdfast", "trainer/holdfast_trainer", "tools", "bench", "demo", "examples", "docs")
FOLDER_PREFIXES = tuple(f"{folder}/" for folder in FOLDERS)
PAGES = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "trainer/README.md")
_SPAN = re.compile(r"`([^`]+)`")
_CODE = re.compile(r"```.*?```|`[^`\n]+`", re.DOTALL)
_NAME = re.compile(r"\b[A-Za-z_][A-Za-z0-9_]*\b")
_WORD = re.compile(r"\w+")
_GAP = r"(?:\s+(?:[#>]\s+)?|\s*\n\s*[#>]?\s*)"


@dataclass(frozen=True)
class Retired:
    """A word that is no longer used: what replaces it, and the folder it is retired in."""

    word: str
    instead: str
    folder: str = ""


def rows_of(kind: str) -> list[Retired]:
    """The retired words of one of the glossary's two tables."""
    text = GLOSSARY.read_text()
    table = text.split(f"<!-- retired {kind}: begin -->")[1].split(f"<!-- retired {kind}: end")[0]
    rows = []
    for line in table.strip().splitlines()[2:]:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        folder = cells[2].strip("`") if len(cells) > 2 else ""
        rows += [Retired(word, cells[1], folder) for word in _SPAN.findall(cells[0])]
    return rows


def pattern_of(phrases: list[Retired]) -> re.Pattern[str]:
    """Any of the phrases as whole words, also across the lines of a comment."""
    words = (_GAP.join(map(re.escape, phrase.word.split())) for phrase in phrases)
    return re.compile(r"(?<![\w-])(" + "|".join(words) + r")(?![\w-])", re.IGNORECASE)


def checked_files() -> list[Path]:
    """Python files and documents that the rule covers, tracked or new."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    names = listed.stdout.splitlines() or [
        str(path.relative_to(ROOT)) for path in ROOT.rglob("*") if path.is_file()
    ]
    covered = [name for name in names if name.startswith(FOLDER_PREFIXES) or name in PAGES]
    paths = [ROOT / name for name in sorted(covered) if name.endswith((".py", ".md", ".toml"))]
    return [path for path in paths if path.is_file()]


def text_of(path: Path) -> str:
    """The text to search: without the glossary's own tables."""
    text = path.read_text()
    if path == GLOSSARY:
        text = re.sub(
            r"<!-- retired \w+: begin -->.*?<!-- retired \w+: end -->",
            lambda match: "\n" * match.group().count("\n"),
            text,
            flags=re.DOTALL,
        )
    return text


def phrases_in(text: str, pattern: re.Pattern[str]) -> Iterator[tuple[int, str]]:
    """Line and phrase of each match."""
    for match in pattern.finditer(text):
        words = re.sub(r"[\s#>]+", " ", match.group(1)).lower()
        yield text.count("\n", 0, match.start()) + 1, words


def names_in(path: Path, text: str) -> Iterator[tuple[int, str]]:
    """Line and identifier: Python's names, and what documents show as code."""
    if path.suffix == ".py":
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.NAME:
                yield token.start[0], token.string
    else:
        for code in _CODE.finditer(text):
            for name in _NAME.finditer(code.group()):
                line = text.count("\n", 0, code.start() + name.start()) + 1
                yield line, name.group()


def uses_in(
    path: Path, phrases: Mapping[Retired, set[str]], names: Mapping[str, list[Retired]]
) -> list[str]:
    """One line per use of a retired word: file:line, the word, what to write.

    Args:
        path: of the file.
        phrases: with the words of each.
        names: by the identifier.
    """
    place = path.relative_to(ROOT).as_posix()
    text = text_of(path)
    uses = []
    # A search for all phrases takes ten times as long as this look at the words.
    words = set(_WORD.findall(text.lower()))
    if found := [phrase for phrase, needed in phrases.items() if needed <= words]:
        instead = {retired.word.lower(): retired.instead for retired in found}
        uses += [
            f"{place}:{line}: '{phrase}' is retired; write: {instead[phrase]}"
            for line, phrase in phrases_in(text, pattern_of(found))
        ]
    # To take a program apart takes five times as long as to search it for words.
    if names.keys().isdisjoint(_NAME.findall(text)):
        return uses
    for line, name in names_in(path, text):
        uses += [
            f"{place}:{line}: `{name}` is retired; write: {retired.instead}"
            for retired in names.get(name, [])
            if place.startswith(retired.folder)
        ]
    return uses


_NEGATED = re.compile(
    r"(?i)(?<!there )\b((?:is|are|was|were)[\s#>]+no)\b(?![\s#>]+(longer|more)\b)"
)
"""'This is no checkpoint': correct, rare in technical English, and hard to read in a message."""


def test_a_predicate_is_negated_by_not() -> None:
    """Write 'is not a checkpoint'; 'there is no checkpoint' stays."""
    uses = [
        f"{path.relative_to(ROOT)}:{line}: '{words} …': write '{words.split()[0]} not …'"
        for path in checked_files()
        for line, words in phrases_in(text_of(path), _NEGATED)
    ]
    assert not uses, "\n".join(uses)


def test_no_retired_word_is_in_use() -> None:
    """Every word that the glossary retires is gone from code and documents."""
    phrases = {each: set(_WORD.findall(each.word.lower())) for each in rows_of("phrases")}
    names: dict[str, list[Retired]] = {}
    for retired in rows_of("identifiers"):
        names.setdefault(retired.word, []).append(retired)
    uses = [use for path in checked_files() for use in uses_in(path, phrases, names)]
    assert not uses, f"{len(uses)} retired words in use:\n" + "\n".join(uses)


def test_retired_words_are_found_where_they_hide() -> None:
    """In any case, across the lines of a comment, in strings; not in ordinary words."""
    pattern = pattern_of([Retired("under way", ""), Retired("told", ""), Retired("for ever", "")])
    text = "a = 1  # a save Under\n    # way\nb = 'was told'\n# lasts for\n# ever, untold, forever"
    assert list(phrases_in(text, pattern)) == [(1, "under way"), (3, "told"), (4, "for ever")]
    names = list(names_in(Path("a.md"), "On the `On(layout)` call\n```\nx = On\n```"))
    assert (1, "On") in names
    assert (3, "On") in names
    assert sum(name == "On" for _, name in names) == 2


def test_every_noun_names_a_file_that_exists() -> None:
    """A class in the glossary is defined in the file that its row names."""
    head = GLOSSARY.read_text().split("## Retired words")[0]
    problems = []
    for line in head.splitlines():
        spans = _SPAN.findall(line.rsplit("|", 2)[-2]) if line.startswith("|") else []
        for path in [span for span in spans if "/" in span]:
            if not (ROOT / path).exists():
                problems.append(f"{path} does not exist: {line}")
                continue
            for name in [span.split(".")[0] for span in spans if span.isidentifier()]:
                files = (
                    [ROOT / path] if path.endswith(".py") else sorted((ROOT / path).glob("*.py"))
                )
                if not any(re.search(rf"\b(class|def) {name}\b", f.read_text()) for f in files):
                    problems.append(f"{name} is not defined in {path}")
    assert not problems, "\n".join(problems)


def test_no_two_public_classes_share_a_name() -> None:
    """One name for one thing: a reader who searches for a class finds one."""
    places: dict[str, list[str]] = {}
    for path in [
        *sorted((ROOT / "holdfast").rglob("*.py")),
        *sorted((ROOT / "trainer/holdfast_trainer").rglob("*.py")),
    ]:
        for name in re.findall(r"^class ([A-Z]\w*)", path.read_text(), flags=re.MULTILINE):
            if name == "Args" and path.parent.name == "commands":
                continue  # each verb's arguments
            places.setdefault(name, []).append(path.relative_to(ROOT).as_posix())
    twice = {name: paths for name, paths in places.items() if len(paths) > 1}
    assert not twice, twice


def test_each_noun_is_defined_once() -> None:
    """Two definitions of a noun would be two meanings."""
    head = GLOSSARY.read_text().split("## Retired words")[0]
    nouns = re.findall(r"^\| ([^|`]+?) \|", head, flags=re.MULTILINE)
    nouns = [noun for noun in nouns if noun not in ("noun", "error") and not noun.startswith("-")]
    assert len(nouns) > 60
    assert len(nouns) == len(set(nouns)), sorted({n for n in nouns if nouns.count(n) > 1})
