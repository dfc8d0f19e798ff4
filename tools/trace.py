"""How much code a reader meets who follows one steady save or load: functions, files, jumps.

    python -m tools.trace [--list 'tensors: save'] [--transitions 'training: load']

Two ranks keep a small state. After some saves and loads as warm-up, one call of each kind is traced
on rank 0, in all threads that it starts. (The writer of an asynchronous save is another process,
and is not counted.) There are two states: `tensors` is a dict of DTensors and values, as other
checkpointers take it; `training` is a module, its optimizer, the random streams and values, as a
training run has it, and the budget is for this one.

The table of docs/performance.md is written by each run without options, as `make trace` does.
Exits with 1 if a call is over the budget.

Counted, of the frames whose code lies in `holdfast/`:

- *functions*: distinct functions, methods and properties that are entered; a lambda or a
  comprehension belongs to the function that it is written in;
- *files*: distinct files they lie in;
- *changes of file*: with the functions of each thread in the order in which each is first entered,
  how many lie in another file than the one before. Repeated calls, one for each tensor say, count
  once, so that the number does not depend on the size of the state, nor on how threads take turns.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import CodeType, FrameType

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from holdfast import RNG, Checkpointer, Layout, OptimizerState, PendingSave, ProcessGroups
from tests.harness import RankContext, run_ranks

ROOT = Path(__file__).resolve().parent.parent

MAX_FILES = 30
MAX_CHANGES = 90
PAGE = ROOT / "docs" / "performance.md"
START, END = "<!-- written by make trace -->", "<!-- end of the table -->"
PACKAGE = str(ROOT / "holdfast") + os.sep
Function = tuple[str, str]
"""File, below `holdfast/`, and qualified name."""


class Tracer:
    """Collects every function of the package, thread by thread in the order of first entry."""

    def __init__(self) -> None:
        self._by_thread: dict[int, dict[Function, None]] = {}
        self._names: dict[CodeType, Function | None] = {}

    def run(self, call: Callable[[], object]) -> list[Function]:
        """Return what `call` enters in this process, threads that it starts included."""
        threading.setprofile(self._see)
        sys.setprofile(self._see)
        try:
            call()
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
        functions = dict.fromkeys(each for thread in self._by_thread.values() for each in thread)
        return list(functions)

    def _see(self, frame: FrameType, event: str, argument: object) -> None:
        del argument
        if event != "call":
            return
        code = frame.f_code
        if code not in self._names:
            self._names[code] = _function(code)
        function = self._names[code]
        if function is not None:
            self._by_thread.setdefault(threading.get_ident(), {}).setdefault(function)


def _function(code: CodeType) -> Function | None:
    if not code.co_filename.startswith(PACKAGE) or code.co_name == "<module>":
        return None
    # A lambda or a comprehension belongs to the function that it is written in.
    name = code.co_qualname.partition(".<locals>.<")[0]
    return code.co_filename.removeprefix(PACKAGE), name


def transitions(functions: list[Function]) -> Counter[tuple[str, str]]:
    """Count the changes of file by the two files, in either direction.

    They are neighbours, thread by thread in order of first entry.
    """
    files = [file for file, _ in functions]
    pairs = ((min(pair), max(pair)) for pair in pairwise(files) if pair[0] != pair[1])
    return Counter(pairs)


def _states(groups: ProcessGroups) -> dict[str, dict[str, object]]:
    """Both states, by name."""
    torch.manual_seed(0)
    mesh = groups.mesh("dp")
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    progress = {"step": 1, "tokens": 2048, "losses": [0.5, 0.25]}
    tensors = {
        "weight": DTensor.from_local(torch.ones(4, 8), mesh, [Shard(0)]),
        "norm": DTensor.from_local(torch.ones(8), mesh, [Replicate()]),
    }
    return {
        "tensors": {"model": tensors, "progress": progress},
        "training": {
            "model": model,
            "optimizer": OptimizerState(optimizer, model),
            "rng": RNG(),
            "progress": progress,
        },
    }


def _finish(submit: Callable[[], PendingSave]) -> None:
    submit().result()


def _traced(context: RankContext, root: str) -> dict[str, list[Function]]:
    """Return what one rank enters, by state and call."""
    del context
    groups = ProcessGroups.create(Layout(dp=2))
    found = {}
    for name, state in _states(groups).items():
        with Checkpointer(f"{root}/{name}", groups=groups) as checkpointer:
            for step in (1, 3):
                checkpointer.save(step, state)
                checkpointer.save_async(step + 1, state).result()
                checkpointer.load(state)
            save, load = checkpointer.save, checkpointer.load
            found[f"{name}: save"] = Tracer().run(partial(save, 5, state))
            submit = partial(checkpointer.save_async, 6, state)
            found[f"{name}: save_async"] = Tracer().run(partial(_finish, submit))
            found[f"{name}: load"] = Tracer().run(partial(load, state))
    groups.close()
    return found


def table(found: dict[str, list[Function]]) -> str:
    """The counts as a table of docs/performance.md."""
    lines = ["| state and call | functions | files | changes of file |", "|---|---|---|---|"]
    for name, functions in found.items():
        files = len({file for file, _ in functions})
        lines.append(f"| {name} | {len(functions)} | {files} | {transitions(functions).total()} |")
    return "\n".join(lines)


def over_budget(found: dict[str, list[Function]]) -> list[str]:
    """A line for each call of the training state that enters too much code."""
    counts = {
        name: (len({file for file, _ in functions}), transitions(functions).total())
        for name, functions in found.items()
        if name.startswith("training")
    }
    return [
        f"{name}: {files} files (at most {MAX_FILES}), {changes} changes (at most {MAX_CHANGES})"
        for name, (files, changes) in counts.items()
        if files > MAX_FILES or changes > MAX_CHANGES
    ]


def write_table(page: Path, found: dict[str, list[Function]]) -> None:
    """Replace the table between the page's two markers."""
    before, start, rest = page.read_text().partition(START)
    _, end, after = rest.partition(END)
    if not (start and end):
        raise ValueError(f"{page} has no table between {START} and {END}")
    page.write_text(f"{before}{START}\n{table(found)}\n{END}{after}")


def main() -> int:
    """Write the table and print it; with an option, print what one of the calls enters."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--list", metavar="CALL", help="its functions, in order")
    parser.add_argument("--transitions", metavar="CALL", help="its changes of file, by two files")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        found = run_ranks(2, _traced, root, timeout_s=120).results[0]
    if options.list is not None:
        for file, name in found[options.list]:
            print(f"{file}  {name}")
        return 0
    if options.transitions is not None:
        for (one, other), count in transitions(found[options.transitions]).most_common():
            print(f"{count:3}  {one}  {other}")
        return 0
    write_table(PAGE, found)
    print(table(found))
    over = over_budget(found)
    print(*(f"over the budget: {line}" for line in over), sep="\n", end="\n" if over else "")
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
