"""Every example runs as it is: straight through, and stopped half-way and started again."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests import programs
from tests.harness import RankContext, run_ranks

FOLDER = Path(__file__).parents[1] / "examples"
NUM_RANKS = {"single_process": 1, "fsdp2": 2, "sharded_optimizer": 2, "async_policies": 2}
READER = "read_without_torch"
STEPS = 10


def program(name: str) -> str:
    return (FOLDER / f"{name}.py").read_text()


def launch(name: str, num_ranks: int, root: Path, steps: int) -> list[str]:
    """The last line that each rank prints."""
    outputs = programs.launch(
        program(name), root, steps, num_ranks=num_ranks, directory=root.parent
    )
    return [re.findall(r"step \d+, loss .*", text)[-1] for text in outputs]


def read(root: Path) -> str:
    """What the reader prints; it fails if torch was imported."""
    program = (
        f"import runpy, sys; sys.argv = ['read', {str(root)!r}]; "
        f"runpy.run_path({str(FOLDER / f'{READER}.py')!r}, run_name='__main__'); "
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_example_is_run_and_listed() -> None:
    found = {path.stem for path in FOLDER.glob("*.py")}
    assert found == {*NUM_RANKS, READER}
    page = (FOLDER / "README.md").read_text()
    assert set(re.findall(r"\[(\w+)\.py\]", page)) == found


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name == "fsdp2" else pytest.mark.slow) for name in NUM_RANKS],
)
def test_an_example_continues_after_a_stop_as_if_there_had_been_none(
    name: str, tmp_path: Path
) -> None:
    num_ranks = NUM_RANKS[name]
    straight = launch(name, num_ranks, tmp_path / "straight", STEPS)
    assert all(line.startswith(f"step {STEPS}, loss ") for line in straight)
    launch(name, num_ranks, tmp_path / "stopped", STEPS // 2)
    assert launch(name, num_ranks, tmp_path / "stopped", STEPS) == straight
    text = read(tmp_path / "stopped")
    assert f"step {STEPS}, saved by torch" in text
    assert re.search(r"^model\.\S+: F32 \(\d+.*mean", text, re.MULTILINE)
    assert re.search(rf"^progress: {{'step': {STEPS}", text, re.MULTILINE)


def stop_early(context: RankContext, root: str, port: int) -> None:
    """The program, with a SIGTERM to rank 1 alone while it trains."""
    if context.rank == 1:
        threading.Timer(3.0, os.kill, (os.getpid(), signal.SIGTERM)).start()
    words = [root, str(10**6)]
    programs.run_program(context, program("async_policies"), words, str(Path(root).parent), port)


@pytest.mark.slow
def test_sigterm_to_one_rank_stops_all_after_the_same_saved_step(tmp_path: Path) -> None:
    arguments = (str(tmp_path / "runs"), programs.free_port())
    outcome = run_ranks(2, stop_early, *arguments, init=False, fresh=True)
    steps = {int(re.findall(r"stopped at step (\d+)", text)[-1]) for text in outcome.outputs}
    assert len(steps) == 1
    assert (tmp_path / "runs" / f"iter_{steps.pop():07d}" / "manifest.json").is_file()
