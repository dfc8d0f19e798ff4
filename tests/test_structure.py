"""The shape of the source: imports without circles, small files and functions, comments."""

from __future__ import annotations

import ast
import io
import tokenize
from functools import cache
from pathlib import Path

import pytest

import holdfast

ROOT = Path(holdfast.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60
MIN_COMMENTS_PER_100_LINES = 3
PRAGMAS = ("noqa", "type:", "fmt:", "pragma")


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in FILES}


def imports_of(path: Path) -> set[str]:
    """The modules of Holdfast that a file imports anywhere, for type checking too."""
    modules = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            modules |= {each.name for each in node.names if each.name in MODULES}
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None, f"{path}: relative import"
            for each in node.names:
                # `from a import b` imports the module a.b where there is one, else a.
                inner = f"{node.module}.{each.name}"
                modules |= {inner if inner in MODULES else node.module} & MODULES.keys()
    return modules - {name_of(path)}


def find_circle(graph: dict[str, set[str]]) -> list[str]:
    """The modules of one circle, in order; empty when there is none."""
    done: set[str] = set()
    for start in graph:
        stack: list[tuple[str, list[str]]] = [(start, sorted(graph[start]))]
        while stack:
            name, rest = stack[-1]
            path = [each for each, _ in stack]
            if not rest:
                done.add(name)
                stack.pop()
                continue
            below = rest.pop()
            if below in path:
                return [*path[path.index(below) :], below]
            if below not in done:
                stack.append((below, sorted(graph[below])))
    return []


def test_a_circle_is_found() -> None:
    assert find_circle({"a": {"b"}, "b": {"c"}, "c": set()}) == []
    assert find_circle({"x": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]


def test_no_files_import_each_other_in_a_circle() -> None:
    """A package's `__init__` may name its files; they must not import from the package."""
    graph = {name: imports_of(path) for name, path in MODULES.items()}
    assert sum(map(len, graph.values())) > 300, "the imports were not read"
    assert find_circle(graph) == []


def test_nothing_inside_imports_the_package_itself() -> None:
    """`holdfast/__init__.py` names everything, so that importing from it is a circle."""
    offenders = [name for name, path in MODULES.items() if "holdfast" in imports_of(path)]
    assert offenders == []


def test_the_version_is_the_packages() -> None:
    from holdfast.version import __version__

    assert holdfast.__version__ == __version__


STEP = {
    "StepSum": {"holdfast.optim.engine"},
    "StepOutcome": {"holdfast.optim.engine"},
    "clip_factor": {"holdfast.optim.engine"},
    "LayoutSum": {"holdfast.optim.engine", "holdfast.optim.norms"},  # `gradient_norm` is no step
    "StepEngine": {"holdfast.optim.engine", "holdfast.optim.multi_module"},
}
"""Who may call what makes a step out of sums of all ranks."""


def test_the_sums_of_a_step_are_made_in_the_engine_alone() -> None:
    """A second way to decide a step would be weaker than the first."""
    callers: dict[str, set[str]] = {name: set() for name in STEP}
    for path in [*FILES, *sorted((ROOT.parent / "trainer" / "holdfast_trainer").rglob("*.py"))]:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Call):
                called = getattr(node.func, "id", getattr(node.func, "attr", ""))
                if called in callers:
                    callers[called].add(name_of(path))
    assert callers == STEP


def test_no_file_and_no_function_is_long() -> None:
    long = []
    for path in FILES:
        num_lines = len(path.read_text().splitlines())
        if num_lines > MAX_FILE_LINES:
            long.append(f"{name_of(path)}: {num_lines} lines")
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                num_lines = node.end_lineno - node.lineno + 1
                if num_lines > MAX_FUNCTION_LINES:
                    long.append(f"{name_of(path)}.{node.name}: {num_lines} lines")
    assert long == []


@pytest.mark.parametrize("room", ["checkpoint/plan", "checkpoint/load", "arrays"])
def test_comments_explain_the_index_algebra(room: str) -> None:
    num_lines = num_comments = 0
    for path in (ROOT / room).rglob("*.py"):
        text = path.read_text()
        num_lines += len(text.splitlines())
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            # A comment on a line of its own, in prose.
            is_own_line = token.line.lstrip().startswith("#")
            if token.type == tokenize.COMMENT and is_own_line:
                num_comments += not any(pragma in token.string for pragma in PRAGMAS)
    assert 100 * num_comments / num_lines >= MIN_COMMENTS_PER_100_LINES, (num_comments, num_lines)
