"""Modules import each other where they are; only a user's program imports `holdfast` itself."""

import ast
from pathlib import Path

import holdfast

ROOT = Path(holdfast.__file__).parent


def test_nothing_inside_imports_the_package_itself():
    """`holdfast/__init__.py` names everything, so that importing from it is a circle."""
    found = []
    for path in sorted(ROOT.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names = [each.name for each in node.names if each.name == "holdfast"]
            elif isinstance(node, ast.ImportFrom) and node.module == "holdfast":
                modules = {entry.stem for entry in ROOT.iterdir()}
                names = [each.name for each in node.names if each.name not in modules]
            else:
                continue
            found += [f"{path.relative_to(ROOT)}:{node.lineno}: {name}" for name in names]
    assert not found


def test_the_version_is_the_packages():
    from holdfast.version import __version__

    assert holdfast.__version__ == __version__
