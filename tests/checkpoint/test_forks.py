"""A process that is forked from a run, such as a worker of a pool, harms nothing."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from holdfast import Checkpointer, Layout, OnSignal, OptimizerState, ProcessGroups
from holdfast.errors import HoldfastError
from tests.checkpoint.common import wait
from tests.harness import RankContext, run_ranks


def forked(*calls: Callable[[], object]) -> list[str]:
    """What each call raises in a forked process; empty for nothing."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            # A handler of Python would not run in a kernel that waits. With one thread, as in a
            # worker of a DataLoader, none waits for threads that only the parent has.
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(20)
            torch.set_num_threads(1)
            answers = []
            for call in calls:
                try:
                    call()
                    answers.append("")
                except HoldfastError as error:
                    answers.append(f"{type(error).__name__}: {error}")
            os.write(writer, json.dumps(answers).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as lines:
        text = lines.read()
    os.waitpid(child, 0)
    assert text, "the forked process ended early: it waited for what only its parent has"
    answers = json.loads(text)
    assert isinstance(answers, list)
    return answers


def state_of(version: int) -> dict[str, object]:
    return {"model": {"w": torch.full((50_000,), float(version)), "version": version}}


def stored(root: Path, step: int) -> tuple[list[float], object]:
    with Checkpointer(root) as checkpointer:
        model = checkpointer.load_all(step=step).values["model"]
    return model["w"].unique().tolist(), model["version"]


def test_a_forked_process_stages_nothing_into_its_parents_save(tmp_path: Path) -> None:
    """R9: the two share staging memory, so that each would store what the other has staged."""
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save_async(1, state_of(1)).result()
        pending = checkpointer.save_async(2, state_of(2))
        refused = forked(
            lambda: checkpointer.save(90, state_of(90)),
            lambda: checkpointer.save_async(91, state_of(91)),
            lambda: checkpointer.prepare(state_of(92)),
            lambda: checkpointer.load(state_of(0)),
            lambda: checkpointer.load_all(),
        )
        assert all(
            "GroupError" in each and f"was forked from process {os.getpid()}" in each
            for each in refused
        ), refused
        pending.result()
        checkpointer.save_async(3, state_of(3)).result()
        assert checkpointer.steps() == [1, 2, 3]
        assert checkpointer.stats.num_failed_saves == 0
    assert [stored(tmp_path, step) for step in (1, 2, 3)] == [
        ([float(step)], step) for step in (1, 2, 3)
    ]


def test_a_forked_process_that_ends_its_blocks_leaves_the_writer_to_its_parent(
    tmp_path: Path,
) -> None:
    """R9: `with Checkpointer(...)` ends in the child, too, if its code returns or raises."""
    with Checkpointer(tmp_path) as checkpointer:
        pending = checkpointer.save_async(1, state_of(1))
        writer = checkpointer.stats.writer_pid
        known = forked(pending.result, checkpointer.close, checkpointer.steps)
        # Unless it was done when the child was made, which then knows the outcome.
        assert not known[0] or "was forked" in known[0]
        assert known[1:] == ["", ""]
        wait(pending)
        checkpointer.save_async(2, state_of(2)).result()
        assert checkpointer.stats.writer_pid == writer
    assert stored(tmp_path, 2) == ([2.0], 2)


def _ranks_of_which_one_forks(rank: RankContext, root: str) -> list[int]:
    with ProcessGroups.create(Layout(dp=2)) as groups, Checkpointer(root, groups=groups) as both:
        both.save(1, state_of(1))
        if rank.rank == 0:
            said = forked(lambda: groups.control.barrier(phase="x"), both.close, groups.close)
            assert "was forked" in said[0]
            assert said[1:] == ["", ""]
        both.save(2, state_of(2))
        return both.steps()


def test_connections_of_a_forked_process_are_its_parents(tmp_path: Path) -> None:
    """R9: closed in the child, or used by it, they would end the run of all ranks."""
    assert run_ranks(2, _ranks_of_which_one_forks, str(tmp_path)).results == [[1, 2]] * 2


def test_a_forked_process_steps_while_its_parent_copies(tmp_path: Path) -> None:
    """R9: the thread that copies is not in the child, whose step would wait for it without end."""
    model = torch.nn.Linear(1000, 1000)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model.weight.grad = torch.ones_like(model.weight)
    before = model.weight.detach().clone()
    state = {"optimizer": OptimizerState(optimizer, model), "model": model}
    with Checkpointer(tmp_path) as checkpointer:
        pending = checkpointer.save_async(1, state, stage="lazily")
        assert forked(lambda: optimizer.step() and None) == [""]
        optimizer.step()
        pending.result()
        assert torch.equal(checkpointer.load_all().values["model"]["weight"], before)
    assert torch.equal(model.weight, before - 1)


def _work(began: Any) -> None:
    began.set()
    time.sleep(60)


def _refuse_a_handler() -> None:
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        raise HoldfastError("a handler of Python ends no call into C")


def test_a_signal_to_a_forked_process_is_not_the_runs(tmp_path: Path) -> None:
    """R9: it ends that process, as without the policy, and neither stops the run nor counts."""
    noticed: list[tuple[int, int]] = []
    policy = OnSignal(notice=lambda number, count: noticed.append((number, count)))
    with Checkpointer(tmp_path, save_when=policy) as checkpointer:
        assert forked(_refuse_a_handler) == [""]
        context = multiprocessing.get_context("fork")
        for _ in range(2):  # the second signal of a run would end it at once
            began = context.Event()  # Python drops a signal that comes while it forks
            # The signal may come just before it sleeps: a handler would run after the sleep.
            worker = context.Process(target=_work, args=(began,))
            worker.start()
            assert began.wait(60)
            worker.terminate()
            worker.join(60)
            assert worker.exitcode == -signal.SIGTERM
        assert not checkpointer.should_save(1)
        os.kill(os.getpid(), signal.SIGTERM)
        deadline = time.monotonic() + 20
        while not noticed and time.monotonic() < deadline:
            time.sleep(0.01)
        assert noticed == [(signal.SIGTERM, 1)]
        assert checkpointer.should_save(2)
        assert checkpointer.preempted == "SIGTERM"
