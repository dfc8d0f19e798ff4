"""The source distribution is complete: what git tracks is in it, and README's commands have it all.

Prevents an unpacked sdist in which `make test` or a link of the README leads nowhere.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NOT_NEEDED = {".gitattributes", ".mailmap"}


def tracked() -> set[str]:
    """Files that git tracks; the test means nothing outside of a checkout."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    names = {name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()}
    return names - NOT_NEEDED


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Names in an sdist built from this checkout, without the leading directory."""
    pytest.importorskip("hatchling")
    out = tmp_path_factory.mktemp("dist")
    program = f"from hatchling.build import build_sdist; print(build_sdist({str(out)!r}))"
    built = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=240
    )
    assert built.returncode == 0, built.stderr
    with tarfile.open(out / built.stdout.split()[-1]) as archive:
        return {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}


def test_every_tracked_file_is_in_the_sdist(packed: set[str]) -> None:
    assert not tracked() - packed


def test_nothing_that_is_not_tracked_is_in_the_sdist(packed: set[str]) -> None:
    """No results, caches or environments; new files of a change count as tracked."""
    new = subprocess.run(
        ["git", "ls-files", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    ).stdout.splitlines()  # fmt: skip
    assert packed - tracked() - set(new) <= {"PKG-INFO"}


def test_commands_and_links_of_the_readme_are_in_the_sdist(packed: set[str]) -> None:
    readme = (ROOT / "README.md").read_text()
    links = {link for link in re.findall(r"\]\(([^)#]+)", readme) if "://" not in link}
    targets = set(re.findall(r"make ([\w-]+)", readme))
    makefile = (ROOT / "Makefile").read_text()
    assert not links - packed
    assert {"demo", "test", "docs"} <= targets
    assert not {name for name in targets if not re.search(rf"^{name}:", makefile, re.MULTILINE)}
    assert {"Makefile", "constraints.txt", "pyproject.toml", "mkdocs.yml", ".ci/run"} <= packed


def test_the_version_is_stated_once_and_has_a_section_in_the_changelog() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    version_file = (ROOT / project["tool"]["hatch"]["version"]["path"]).read_text()
    version = re.search(r'^__version__ = "([^"]+)"', version_file, re.MULTILINE)
    assert version is not None
    assert version[1] in (ROOT / "CHANGELOG.md").read_text()
    trainer = ROOT / "trainer/pyproject.toml"
    if trainer.exists():
        assert tomllib.loads(trainer.read_text())["project"]["version"] == version[1]
