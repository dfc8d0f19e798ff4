"""The shape of the source: imports without circles, one owner for each idea."""

from __future__ import annotations

import ast
from functools import cache
from inspect import isclass, isfunction, signature
from pathlib import Path
from typing import Any, get_type_hints

import holdfast
from holdfast.collector import collector_paused
from tests.harness import RankContext, run_ranks

ROOT = Path(holdfast.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))


@cache
def tree_of(path: Path) -> ast.Module:
    with collector_paused():  # a tree has more objects than the library when it is loaded
        return ast.parse(path.read_text())


@cache
def nodes_of(tree: ast.AST) -> list[ast.AST]:
    """All of a tree: most tests look at each."""
    return [*ast.walk(tree)]


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in FILES}


@cache
def imports_of(path: Path) -> set[str]:
    """The modules of Holdfast that a file imports anywhere, for type checking too."""
    modules = set()
    for node in nodes_of(tree_of(path)):
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


READERS = frozenset(
    {
        *("search", "match", "fullmatch", "findall", "finditer", "sub", "subn"),
        *("startswith", "endswith", "removeprefix", "removesuffix", "partition", "rpartition"),
        *("split", "rsplit", "find", "rfind", "index", "rindex", "count"),
    }
)

TRAINER = ROOT.parent / "trainer"
READS_TORCHS_ERRORS = frozenset({"_torch.py", "worker.py", "_obstore.py"})
"""Of the library and of the trainer: gloo raises a bare RuntimeError when a rank is lost, and
obstore states the status of an answer in the text of its error only."""


def names_of_errors(scope: ast.AST) -> set[str]:
    """What `except` binds, and parameters that are annotated as an error."""
    names = set()
    for node in ast.walk(scope):
        if isinstance(node, ast.ExceptHandler) and node.name:
            names.add(node.name)
        elif isinstance(node, ast.arg) and node.annotation is not None:
            kind = ast.unparse(node.annotation).split(" | ")[0]
            names |= {node.arg} if kind.endswith(("Error", "Exception")) else set()
    return names


def readings_of_error_texts(tree: ast.Module) -> list[int]:
    """The lines in which a program reads the text of an error: by a pattern, by `in`, by parts.

    Its text is str() of it, its `args`, its `message`, and any name that is assigned one of these.
    """
    lines = set()
    for scope in nodes_of(tree):
        if not isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        forms = {
            form
            for name in names_of_errors(scope)
            for form in (f"str({name})", f"repr({name})", f"{name}.args", f"{name}.message")
        }
        if not forms:
            continue

        def is_text(node: ast.AST, forms: set[str] = forms) -> bool:
            return any(isinstance(n, ast.expr) and ast.unparse(n) in forms for n in ast.walk(node))

        nodes = list(ast.walk(scope))
        for node in nodes:
            if isinstance(node, ast.Assign) and is_text(node.value):
                forms |= {t.id for t in node.targets if isinstance(t, ast.Name)}
        for node in nodes:
            match node:
                case ast.Compare(ops=[ast.In() | ast.NotIn()], comparators=[searched]):
                    read = [searched]
                case ast.Call(func=ast.Attribute(value=owner, attr=name), args=[_, *_] as given):
                    read = [owner, *given] if name in READERS else []
                case _:
                    continue
            if any(map(is_text, read)):
                lines.add(node.lineno)
    return sorted(lines)


def test_a_reading_of_an_errors_text_is_found() -> None:
    code = """
def one(error: HoldfastError, other: str) -> None:
    _ODD.findall(str(error))
    text = str(error)
    if "late" in text.lower(): pass
    other.startswith("a"); "a" in other; print(text)
def two() -> None:
    try: pass
    except (OSError, ValueError) as reason:
        re.match("a", reason.args[0])
        reason.details["ranks"].index(1)
        return str(reason).removesuffix(".")
"""
    assert readings_of_error_texts(ast.parse(code)) == [3, 5, 10, 12]


def test_no_program_reads_the_text_of_an_error() -> None:
    """A message is for people and may be written better; a program reads `error.details`."""
    found = [
        f"{path}:{line}"
        for path in [*FILES, *TRAINER.rglob("*.py")]
        if path.name not in READS_TORCHS_ERRORS
        for line in readings_of_error_texts(tree_of(path))
    ]
    assert found == []


def spellings_of_tags(tree: ast.Module) -> list[int]:
    """The lines that know how a node's tag is written: its text, or the constant."""
    return sorted(
        node.lineno
        for node in nodes_of(tree)
        if (isinstance(node, ast.Constant) and node.value == "$")
        or (isinstance(node, ast.alias) and node.name == "TAG")
    )


def test_only_the_format_knows_how_tags_are_written() -> None:
    """Other rooms ask `format.values` what a node is, and walk trees with it."""
    assert spellings_of_tags(tree_of(ROOT / "format/values/value_nodes.py")) != []
    found = [
        f"{name}:{line}"
        for name, path in MODULES.items()
        if not name.startswith("holdfast.format.")
        for line in spellings_of_tags(tree_of(path))
    ]
    assert found == []


def test_distinct_values_are_found_without_the_import_of_masked_arrays() -> None:
    """`np.unique` alone imports `numpy.ma`, which the first load of every restart would wait for.

    With the places of the values it does not.
    """
    calls = {
        f"{name}:{node.lineno}": {each.arg for each in node.keywords}
        for name, path in MODULES.items()
        for node in nodes_of(tree_of(path))
        if isinstance(node, ast.Call)
        and getattr(node.func, "attr", "") in ("unique", "union1d")
        and ast.unparse(node.func) in ("np.unique", "np.union1d")
    }
    places = {"return_index", "return_inverse"}
    assert calls
    assert [where for where, keywords in calls.items() if not keywords & places] == []


def test_the_version_is_the_packages() -> None:
    from holdfast.version import __version__

    assert holdfast.__version__ == __version__


def public_callables() -> list[tuple[str, Any]]:
    """Each public class, function and method by its name, with what has its annotations."""
    found: list[tuple[str, Any]] = []
    for name in sorted(set(holdfast.__all__) - {"__version__"}):
        public = getattr(holdfast, name)
        found.append((name, public))
        for key, member in vars(public).items() if isclass(public) else ():
            inner = member.fget if isinstance(member, property) else member
            inner = getattr(inner, "__func__", inner)
            is_ours = isfunction(inner) and inner.__module__.startswith("holdfast.")
            if is_ours and (key == "__init__" or not key.startswith("_")):
                found.append((f"{name}.{key}", inner))
    return found


def test_the_annotations_of_public_names_resolve() -> None:
    """Tools that make command lines or documents of signatures ask for them."""
    found = dict(public_callables())
    assert {"Bridge.__init__", "ProcessGroups.create", "Checkpointer.save"} <= found.keys()
    for name, public in found.items():
        hints = get_type_hints(public)
        if isfunction(public):
            assert set(signature(public).parameters) - {"self", "cls"} <= hints.keys(), name


def imported_too_early(context: RankContext) -> list[str]:
    from tests import preload

    return preload.IMPORTED_TOO_EARLY


def test_importing_the_library_imports_nothing_that_only_some_runs_need() -> None:
    """A compiler takes a third as long as all else; torch imports it when an optimizer is made.

    Foreign formats are a third of the library's own part: a load from a source imports them.
    """
    assert run_ranks(1, imported_too_early, init=False).results == [[]]


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


TABLES_OF_TORCH = frozenset({
    "_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "_metadata", "_spec",
    "_local_tensor", "_version", "_cdata", "_storage_Use_Count", "_indices", "_values", "_schema",
    "_opt_called", "_is_view", "_torchdynamo_disable",
})  # fmt: skip
"""Private attributes of torch's objects that this library has a use for."""


def private_names_of_torch(tree: ast.AST) -> list[str]:
    """The private names of torch that a file imports, or reads or writes on one of its objects."""
    roots, found = set(), []
    for node in nodes_of(tree):
        if isinstance(node, ast.Import):
            for each in node.names:
                parts = each.name.split(".")
                if parts[0] == "torch":
                    roots.add((each.asname or each.name).split(".")[0])
                    found += [each.name] if any(map(_is_private, parts)) else []
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            for each in node.names:
                whole = f"{node.module}.{each.name}"
                roots.add(each.asname or each.name)
                found += [whole] if any(map(_is_private, whole.split("."))) else []
    for node in nodes_of(tree):
        if isinstance(node, ast.Attribute) and _is_private(node.attr):
            owner: ast.AST = node.value
            while isinstance(owner, ast.Attribute):
                owner = owner.value
            name = owner.id if isinstance(owner, ast.Name) else ""
            is_own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            if name in roots or (node.attr in TABLES_OF_TORCH and not is_own):
                found.append(ast.unparse(node))
    return found


def test_a_private_name_of_torch_is_found() -> None:
    code = """
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch import nn as modules

def one(self, module: modules.Module) -> None:
    torch._foreach_copy_([], [])
    module.inner._parameters.clear()
    self._parameters = torch.nn.Linear(1, 1)
    modules.Module._call_impl(module)
"""
    assert private_names_of_torch(ast.parse(code)) == [
        "torch.utils._python_dispatch.TorchDispatchMode",
        "torch._foreach_copy_",
        "modules.Module._call_impl",
        "module.inner._parameters",
    ]


def test_only_one_file_of_a_room_knows_private_names_of_torch() -> None:
    """A new version of torch is tried against the files called `_torch.py`."""
    paths = [*FILES, *sorted((TRAINER / "holdfast_trainer").rglob("*.py"))]
    assert any(private_names_of_torch(tree_of(p)) for p in paths if p.name == "_torch.py")
    found = [
        f"{path.relative_to(ROOT.parent)}: {name}"
        for path in paths
        if path.name != "_torch.py"
        for name in private_names_of_torch(tree_of(path))
    ]
    assert found == []


STEP = {
    "StepSum": {"holdfast.optim.engine"},
    "StepOutcome": {"holdfast.optim.engine"},
    "clip_factor": {"holdfast.optim.engine"},
    # `gradient_norm` is not a step; a rerun machine asks whether there is to be one.
    "LayoutSum": {"holdfast.optim.engine", "holdfast.optim.norms", "holdfast.rerun.team"},
    "StepEngine": {"holdfast.optim.engine", "holdfast.optim.multi_module"},
}
"""Who may call what makes a step out of sums of all ranks."""


def test_the_sums_of_a_step_are_made_in_the_engine_alone() -> None:
    """A second way to decide a step would be weaker than the first."""
    callers: dict[str, set[str]] = {name: set() for name in STEP}
    for path in [*FILES, *sorted((ROOT.parent / "trainer" / "holdfast_trainer").rglob("*.py"))]:
        for node in nodes_of(tree_of(path)):
            if isinstance(node, ast.Call):
                called = getattr(node.func, "id", getattr(node.func, "attr", ""))
                if called in callers:
                    callers[called].add(name_of(path))
    assert callers == STEP


def test_all_tests_of_other_packages_are_slow() -> None:
    """`make test` does not collect them: their imports take each worker seconds."""
    folder = ROOT.parent / "tests/packages"
    tests = [
        node
        for path in sorted(folder.rglob("test_*.py"))
        for node in nodes_of(tree_of(path))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]
    assert tests
    for test in tests:
        assert "pytest.mark.slow" in map(ast.unparse, test.decorator_list), test.name
