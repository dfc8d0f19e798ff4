"""Runs with one member of a framework's registry each: resumed in a twin that began otherwise."""

from __future__ import annotations

import ast
import shutil
from pathlib import Path
from typing import Any

from holdfast.format.names import list_steps, step_dir
from holdfast.storage import PosixStorage
from tests.integrations.forks import ForkServer
from tests.objects.test_whole_states import contents

_PROGRAM = """
import sys
from pathlib import Path
from {module} import train
print(train(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])))
"""


def check_goes_on(
    server: ForkServer,
    module: str,
    name: str,
    directory: Path,
    *,
    at: tuple[int, ...],
    root: str = "run",
    differ: tuple[str, ...] = (),
    num_ranks: int = 1,
) -> None:
    """Train once, and again from some of its checkpoints; the end, and what is saved, is the same.

    The second run has other initial weights and random streams: what is not in the checkpoint
    differs. It has the same path, since states of callbacks have theirs.

    Args:
        module: with a function `train(name, root, seed)` that returns what is compared.
        name: of the member.
        at: the steps to go on from; -1 is the last one.
        root: of the checkpoints, below the one that `train` is given.
        differ: words in names of saved values that may differ, such as the time that a run took.
        num_ranks: that train.
    """
    program, here = _PROGRAM.format(module=module), directory / "here"
    here.mkdir()
    ranks: dict[str, Any] = {"directory": here, "num_ranks": num_ranks}
    straight = server.lines(program, name, here / "run", 1, **ranks)
    kept = here.rename(directory / "straight")
    saved = kept / "run" if root == "run" else kept / "run" / root
    steps = list_steps(PosixStorage(saved))
    for step in (steps[-1] if each == -1 else each for each in at):
        new = here / saved.relative_to(kept)
        shutil.copytree(saved / step_dir(step), new / step_dir(step))
        assert server.lines(program, name, here / "run", 2, **ranks) == straight, step
        for later in list_steps(PosixStorage(new)):
            before, after = contents(saved, later), contents(new, later)
            changes = [*_changes(before[0], after[0]), *_changes(before[1], after[1])]
            changes = [each for each in changes if not any(word in each for word in differ)]
            assert not changes, (step, later, changes)
        shutil.rmtree(here)


def _changes(one: Any, two: Any, path: str = "") -> list[str]:
    """Return the paths at which two trees differ."""
    if isinstance(one, dict) and isinstance(two, dict):
        names = [*one, *(each for each in two if each not in one)]
        return [
            change
            for each in names
            for change in _changes(one.get(each), two.get(each), f"{path}.{each}")
        ]
    if isinstance(one, list) and isinstance(two, list) and len(one) == len(two):
        pairs = enumerate(zip(one, two, strict=True))
        return [change for i, pair in pairs for change in _changes(*pair, f"{path}.{i}")]
    return [] if one == two else [path]


def unknown_names(server: ForkServer, module: str, directory: Path) -> list[str]:
    """Return the members of a registry that a zoo neither trains with nor gives a reason for."""
    names: list[str] = answer(server, module, "unknown_names", directory)
    return names


def answer(server: ForkServer, module: str, function: str, directory: Path) -> Any:
    """Return what a function of a zoo returns: the tests themselves do not import a framework."""
    program = f"from {module} import {function}\nprint({function}())"
    return ast.literal_eval(server.lines(program, directory=directory)[0])
