"""The reference trainer can be taken away: library, command, tests and contracts need none of it.

Prevents a test or a module that works only next to the trainer. `demo/` shows the trainer, and is
taken away with it.
"""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("holdfast", "tests", "bench", "tools", "examples")
THEIRS = {"holdfast_trainer", "trainer", "demo"}


def imported_by(path: Path) -> set[str]:
    """Return which of these packages a file imports."""
    text, names = path.read_text(), set()
    if not any(name in text for name in THEIRS):  # most files: parsing all takes seconds
        return set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names |= {each.name.split(".")[0] for each in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add((node.module or "").split(".")[0])
    return names & THEIRS


def test_only_the_demonstration_imports_the_trainer() -> None:
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    assert len(files) > 300
    found = {str(path.relative_to(ROOT)): imported_by(path) for path in files}
    assert {name: modules for name, modules in found.items() if modules} == {}


@pytest.fixture(scope="module")
def without(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tree without the trainer, and an interpreter that cannot import it."""
    copy = tmp_path_factory.mktemp("without") / "tree"
    skipped = shutil.ignore_patterns(
        ".*", "__pycache__", "trainer", "demo", "site", "out", "dist", "shared"
    )
    shutil.copytree(ROOT, copy, ignore=skipped)
    # An installed trainer is none either: None in sys.modules makes an import of it fail.
    (copy / "sitecustomize.py").write_text("import sys\nsys.modules['holdfast_trainer'] = None\n")
    return copy


def run(words: list[str], *, directory: Path) -> str:
    """What a program answers in the copy; it must succeed."""
    environment = os.environ | {"PYTHONPATH": str(directory)}
    done = subprocess.run(
        words, cwd=directory, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "collected",
    [
        # What other files import is read above.
        pytest.param(("tests/test_harness.py",), marks=pytest.mark.slow),
        pytest.param((), marks=pytest.mark.nightly),
    ],
)
def test_the_library_works_without_the_trainer(without: Path, collected: tuple[str, ...]) -> None:
    code = (
        "import holdfast; print(holdfast.__file__, *(getattr(holdfast, n) for n in dir(holdfast)))"
    )
    assert str(without) in run([sys.executable, "-c", code], directory=without)
    assert "verify" in run([sys.executable, "-m", "holdfast.cli.main", "--help"], directory=without)
    # One test with ranks runs of what is collected; without assertions to rewrite, which would take
    # most of the time.
    words = [sys.executable, "-m", "pytest", "--assert=plain"]
    words += ["-k", "test_results_come_back_in_rank_order"]
    assert "1 passed" in run([*words, "-o", "addopts=", *collected], directory=without)


@pytest.mark.slow
def test_the_contracts_hold_without_the_trainer(without: Path) -> None:
    linter = Path(sys.executable).with_name("lint-imports")
    assert "0 broken" in run([str(linter), "--no-cache"], directory=without)
