"""Programs of pages that are killed and started again: at many steps, and with sharded models."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.integrations.forks import ForkServer

KILL_AT_ADAMW = """
import os, signal, torch
step = torch.optim.AdamW.step
count = 0
def kill(self, *args, **named):
    global count
    count += 1
    if count == {at} and rank == {rank}:
        os.kill(os.getpid(), signal.SIGKILL)
    return step(self, *args, **named)
torch.optim.AdamW.step = kill
"""
"""A prelude that ends a rank at a step of its optimizer."""


def check_twenty_kills(
    resumed: Callable[[Path, int], list[str]],
    straight: list[str],
    root: Path,
    *,
    first: int,
    stop: int,
) -> None:
    """Kill a run at twenty random steps, one after the other, and at each if there are fewer.

    Args:
        resumed: What a run in a root prints that is killed at a step and started again.
        straight: What a run prints that is not.
        root: Of the runs, removed after each.
        first: The first step to kill at.
        stop: The one after the last.
    """
    draws, steps = random.Random(28), range(first, stop)
    chosen = [*draws.sample(steps, min(20, len(steps)))]
    chosen += draws.choices(steps, k=20 - len(chosen))
    for at in chosen:
        assert resumed(root, at) == straight, at
        shutil.rmtree(root)


def check_sharded(
    server: ForkServer,
    directory: Path,
    program: str,
    at_end: str,
    *,
    epochs: int,
    kill: str,
    step: int,
) -> None:
    """Two ranks with a sharded model are killed and go on; four take what two have saved.

    Args:
        program: With `batch_size=2`; its command line is a root and the number of epochs.
        at_end: The same, saved at the last step of each epoch, and silent about the loss of a rank.
        epochs: Of the run that is killed.
        kill: The prelude that ends a rank of it.
        step: The last of the second epoch.
    """
    two: dict[str, Any] = {"directory": directory, "num_ranks": 2}
    four: dict[str, Any] = {"directory": directory, "num_ranks": 4}
    straight = server.lines(program, directory / "a", epochs, **two)
    resumed = server.lines_after_kill(program, directory / "b", epochs, kill=kill, num_ranks=2)
    assert resumed == straight
    saved = server.lines(at_end, directory / "c", 1, **two)
    halved = at_end.replace("batch_size=2", "batch_size=1")
    assert server.lines(halved, directory / "c", 1, **four) == saved * 2
    lines = server.lines(halved, directory / "c", 2, **four)
    assert lines[0].startswith(f"step {step}, weights")
    assert len(set(lines)) == 1


def check_killed_twenty_times(
    server: ForkServer,
    program: str,
    directory: Path,
    *words: object,
    num_ranks: int,
) -> None:
    """Kill one run twenty times, each after a random number of steps, and let it end.

    Half as many starts as twenty runs that are killed once; what one start resumes wrongly, the
    last one ends with.

    Args:
        program: its command line is a root, the number of steps, and `words`; it has one optimizer.
    """
    draws = random.Random(28)
    kills = [(draws.randrange(1, 6), draws.randrange(num_ranks)) for _ in range(20)]
    steps = 1 + sum(at - 1 for at, _ in kills)  # what they reach if every step is saved, and one
    named: dict[str, Any] = {"directory": directory, "num_ranks": num_ranks}
    straight = server.lines(program, directory / "a", steps, *words, **named)
    for at, rank in kills:
        kill = KILL_AT_ADAMW.format(at=at, rank=rank)
        ends = server.run(program, directory / "b", steps, *words, prelude=kill, **named)
        assert -9 in {end.code for end in ends}, ends[0].output[-2000:]
    assert server.lines(program, directory / "b", steps, *words, **named) == straight
