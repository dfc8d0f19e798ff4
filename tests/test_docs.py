"""The documents stay true to the tree: links lead somewhere, named files and functions exist.

Prevents a page that sends its reader to a file that has moved.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted(ROOT.glob("*.md")),
    ROOT / "examples/README.md",
    ROOT / "trainer/README.md",
]
_FENCE = re.compile(r"```.*?```", re.DOTALL)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_PATH = re.compile(r"`((?:[\w.-]+/)+[\w.-]*\.(?:py|md|toml|yml)|(?:[\w.-]+/)+)`")
_SYMBOL = re.compile(r"`([A-Za-z_][\w.]*)` in `([\w./-]+\.py)`")
_BASES = ("", "holdfast/", "trainer/", "trainer/holdfast_trainer/", "tests/", "docs/")


def prose(page: Path) -> str:
    """The page without its programs, and without the table of retired words."""
    text = _FENCE.sub("", page.read_text())
    return re.sub(r"<!-- retired.*?end -->", "", text, flags=re.DOTALL)


def anchors(page: Path) -> set[str]:
    """The ids of a page's headings, as forges and the site make them."""
    heads = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_to_files_and_headings(page: Path) -> None:
    broken = []
    for link in _LINK.findall(prose(page)):
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert not broken


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_files_and_functions_that_a_page_names_exist(page: Path) -> None:
    if page.name == "CHANGELOG.md":  # it speaks of the past, too
        return
    text = prose(page)
    missing = [
        path
        for path in _PATH.findall(text)
        if not any((ROOT / base / path).exists() for base in _BASES) and not _is_product(path)
    ]
    for symbol, path in _SYMBOL.findall(text):
        file = next((ROOT / base / path for base in _BASES if (ROOT / base / path).exists()), None)
        name = symbol.split(".")[-1]
        if file is None or not re.search(
            rf"\b(class|def) {name}\b|^{name}\b", file.read_text(), re.M
        ):
            missing.append(f"{symbol} in {path}")
    assert not missing


def _is_product(path: str) -> bool:
    """Directories that programs make: parts of a checkpoint, of a build."""
    return path.split("/")[0] in {"data", "tags", "site", "plan", "done", "dist", "runs"} or (
        path.startswith((".", "demo/out", "bench/out"))
    )


def test_every_page_is_in_the_navigation_of_the_site() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text().split("\nnav:")[1]
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    listed = set(re.findall(r"([\w/-]+\.md)", navigation))
    assert pages <= listed
    assert {"contributing.md", "changelog.md", "security.md", "examples.md"} <= listed


def test_every_public_name_is_in_the_reference() -> None:
    """Also under `holdfast.`, so that a reader finds it as it is imported."""
    import holdfast

    reference = "\n".join(page.read_text() for page in (ROOT / "docs/reference").glob("*.md"))
    listed = set(re.findall(r"^::: holdfast\.(\w+)$", reference, re.MULTILINE))
    assert set(holdfast.__all__) - {"__version__"} == {
        name for name in listed if name in dir(holdfast)
    }


@pytest.mark.slow
def test_the_site_is_built_without_a_warning() -> None:
    """Where its environment is set up (`make docs`)."""
    mkdocs = ROOT / ".venv-docs/bin/mkdocs"
    if not mkdocs.exists():
        pytest.skip("make docs has not been run here")
    command = [str(mkdocs), "build", "--strict", "--quiet"]
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=240, env=quiet
    )
    assert built.returncode == 0, built.stderr
