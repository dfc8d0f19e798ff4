"""The trainer's source: public names of the library only, no circles, no state in modules."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import holdfast
from tests.acceptance.test_nothing_global import state_in
from tests.test_structure import find_circle

ROOT = Path(__file__).parents[1] / "holdfast_trainer"
FILES = sorted(ROOT.rglob("*.py"))
DOCUMENTED = set(
    re.findall(
        r"^::: (holdfast\.[\w.]+)$",
        "\n".join(page.read_text() for page in (ROOT.parents[1] / "docs/reference").glob("*.md")),
        re.MULTILINE,
    )
)
"""What the reference names by its full name."""
NOT_PUBLIC_YET = {"holdfast_trainer/train/update.py": "holdfast.optim.norms"}
"""Files that step by pieces of the library's own engine."""


def imports_of(source: str) -> Iterator[tuple[str, str]]:
    """Module and name of each import; the name is empty for `import module`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            yield from ((node.module or "", each.name) for each in node.names)
        elif isinstance(node, ast.Import):
            yield from ((each.name, "") for each in node.names)


def is_public(module: str, name: str) -> bool:
    """Whether a name of the library is one that users may import, from where it is imported."""
    if module == "holdfast.errors":
        return name in holdfast.__all__
    loaded = importlib.import_module(module)
    is_room = hasattr(loaded, "__path__")
    return f"{module}.{name}" in DOCUMENTED or (is_room and name in getattr(loaded, "__all__", ()))


def private_imports(source: str) -> list[str]:
    return [
        f"{module}.{name}"
        for module, name in imports_of(source)
        if module.split(".")[0] == "holdfast" and not is_public(module, name)
    ]


def test_the_library_is_imported_by_its_public_names_only() -> None:
    assert len(FILES) > 30
    problems = {}
    for path in FILES:
        name = path.relative_to(ROOT.parent).as_posix()
        found = private_imports(path.read_text())
        allowed = NOT_PUBLIC_YET.get(name)
        problems[name] = [each for each in found if allowed is None or not each.startswith(allowed)]
    assert {name: found for name, found in problems.items() if found} == {}


@pytest.mark.parametrize(
    "line",
    [
        "from holdfast.parallel.layout import Layout",
        "from holdfast.parallel import ranks",
        "from holdfast.format.names import _STEP",
        "from holdfast.errors import _HINTS",
        "import holdfast.parallel.groups.process_groups",
        "def f():\n    from holdfast.optim.scaler import LossScaler",
    ],
)
def test_a_name_that_is_not_public_is_found(line: str) -> None:
    assert private_imports(line)


@pytest.mark.parametrize(
    "line",
    [
        "from holdfast import Layout",
        "from holdfast.parallel import Layout, ProcessGroups",
        "from holdfast.errors import ConfigError",
        "from holdfast.format.names import list_steps",
        "from holdfast_trainer.train.config import TrainConfig",
    ],
)
def test_a_public_name_is_not_a_problem(line: str) -> None:
    assert private_imports(line) == []


def test_no_files_import_each_other_in_a_circle() -> None:
    modules = {
        ".".join(path.relative_to(ROOT.parent).with_suffix("").parts): path for path in FILES
    }
    graph = {
        name: {module for module, _ in imports_of(path.read_text())} & modules.keys() - {name}
        for name, path in modules.items()
    }
    assert sum(map(len, graph.values())) > 60
    assert find_circle(graph) == []


def test_no_module_of_the_trainer_keeps_state() -> None:
    found = {str(path.relative_to(ROOT)): list(state_in(path.read_text())) for path in FILES}
    assert {name: reports for name, reports in found.items() if reports} == {}
