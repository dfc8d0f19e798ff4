"""Everything is killed at a random instant: two trainers and their writers, real ones."""

from __future__ import annotations

import os
import random
import signal
import threading
from pathlib import Path

import pytest

from holdfast import Checkpointer, Layout, ProcessGroups
from tests.crash.common import assert_recovers, state_of, versions
from tests.harness import RankContext, run_ranks

_BASE = 3
_LONGEST_S = 0.4


def _doomed(context: RankContext, root: str, delay_s: float, kills_writer: bool) -> None:
    """Save after save, new and replaced, sync and async in turn, until the timer ends it all."""
    layout = Layout(dp=2)
    with ProcessGroups.create(layout, timeout_s=20) as groups:
        checkpointer = Checkpointer(root, groups=groups, deadline_s=20)
        state = state_of(1, index=context.rank, size=2)
        checkpointer.save(1, state)
        checkpointer.save_async(2, state_of(2, index=context.rank, size=2)).result(60)
        groups.control.barrier(phase="ready")

        def die() -> None:
            writer = checkpointer.stats.writer_pid
            if kills_writer and writer is not None:
                os.kill(writer, signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)

        threading.Timer(delay_s, die).start()
        for version in range(_BASE, 10_000):
            mine = state_of(version, index=context.rank, size=2)
            step = version // 2 + 2  # each step is saved twice
            if version % 5 == 0:
                checkpointer.save(step, mine, overwrite=True)
            else:
                checkpointer.save_async(step, mine, overwrite=True)


def _killed_at(root: Path, *, delay_s: float, kills_writer: bool) -> tuple[int, int]:
    """One instant; the newest step, and the number of leftovers the kill made."""
    outcome = run_ranks(
        2, _doomed, str(root), delay_s, kills_writer, expect_failure=True, timeout_s=60
    )
    for error in outcome.errors:
        assert error is not None
        assert error.signal == signal.SIGKILL, error
    found = versions(root)
    newest = max(found)
    # Not `latest`, which finishes what a killed writer left complete.
    assert max(Checkpointer(root).steps()) == newest
    assert found[1] == 1
    for step, version in found.items():
        assert step == 1 or version // 2 + 2 == step or (step, version) == (2, 2)
    assert [*found] == [*range(1, newest + 1)], "a step that had been saved is gone"
    num_leftovers = len(list(root.glob(".saving-*")))
    if kills_writer:
        assert_recovers(root, step=newest + 5, version=newest)
    return newest, num_leftovers


def _sweep(root: Path, *, seed: int, num_instants: int) -> None:
    generator = random.Random(seed)
    newest: list[int] = []
    num_leftovers = 0
    # Instants that miss every save prove little: then more of them, up to four times as many.
    while len(newest) < num_instants or (
        num_leftovers < num_instants // 6 and len(newest) < 4 * num_instants
    ):
        number = len(newest)
        step, left = _killed_at(
            root / str(number), delay_s=generator.uniform(0.0, _LONGEST_S), kills_writer=True
        )
        newest.append(step)
        num_leftovers += left > 0
    print(f"{len(newest)} instants, newest steps {min(newest)}..{max(newest)}, "
          f"{num_leftovers} with a save under way")  # fmt: skip
    assert len({*newest}) > 1
    assert num_leftovers >= num_instants // 6


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_killed_at_a_few_random_instants(fast_dir: Path) -> None:
    """E1, P6: whatever has been committed is whole, and the next save works.

    Every boundary has its turn in `test_boundaries`.
    """
    _sweep(fast_dir, seed=1, num_instants=6)


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(2, 10))
def test_killed_at_hundreds_of_random_instants(fast_dir: Path, seed: int) -> None:
    """E1, P6: four hundred instants in all."""
    _sweep(fast_dir, seed=seed, num_instants=50)
