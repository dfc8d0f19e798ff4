"""An asynchronous save as its caller sees it: state, callbacks, and the counters."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import resource
import signal
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import pytest
import torch

from holdfast import Checkpointer, ConfigError, DeadlineError, PendingSave, StorageError
from holdfast.checkpoint.save.pending import InFlightSave
from tests.checkpoint.common import wait

STATE: dict[str, object] = {"t": {"x": torch.ones(4)}}


@pytest.mark.parametrize(
    "part", [torch.tensor(3.0), {"step": 1}, {}, torch.zeros(0), {"a": torch.tensor(1), "b": 2}]
)
def test_states_without_a_dim_are_saved_too(tmp_path: Path, part: object) -> None:
    """Nothing but scalars, or no tensor at all: the writer must take such a plan."""
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save_async(1, {"p": part}).result(60)
        found = checkpointer.load_all().values["p"]
    if isinstance(part, torch.Tensor):
        assert isinstance(found, torch.Tensor)
        assert torch.equal(found, part)
    else:
        assert found == part


def test_only_what_a_caller_needs_is_public() -> None:
    public = {name for name in dir(PendingSave) if not name.startswith("_")}
    assert public == {
        "add_done_callback", "done", "phase", "progress", "result", "skipped", "staged", "step",
    }  # fmt: skip


def test_callbacks_are_called_once_in_order(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path)
    checkpointer.prepare(STATE)
    writer = checkpointer.stats.writer_pid or 0
    os.kill(writer, signal.SIGSTOP)
    pending = checkpointer.save_async(7, STATE)
    assert repr(pending) == "<PendingSave of step 7: writing>"
    calls: list[tuple[int, str, bool]] = []

    def note(number: int) -> None:
        def callback(done: PendingSave) -> None:
            is_here = threading.current_thread() is threading.main_thread()
            calls.append((number, done.phase, is_here))

        pending.add_done_callback(callback)

    note(1)
    note(2)
    with pytest.raises(DeadlineError, match="still writing"):
        pending.result(0.05)
    assert calls == []
    os.kill(writer, signal.SIGCONT)
    wait(pending)
    assert repr(pending) == "<PendingSave of step 7: committed>"
    assert calls == [(1, "committed", False), (2, "committed", False)]
    note(3)
    assert calls[2:] == [(3, "committed", True)]
    checkpointer.close()


def test_an_exception_of_a_callback_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def wrong(pending: PendingSave) -> None:
        raise KeyError("mine")

    with Checkpointer(tmp_path) as checkpointer:
        pending = checkpointer.save_async(1, STATE)
        with caplog.at_level(logging.ERROR, "holdfast"):
            pending.add_done_callback(wrong)
            wait(pending)  # the next one is called all the same
        pending.result(60)
    assert "a callback of <PendingSave of step 1: committed> failed" in caplog.text
    assert "KeyError: 'mine'" in caplog.text


@pytest.mark.parametrize("ends", [SystemExit, KeyboardInterrupt])
def test_a_callback_that_would_end_its_thread_ends_no_later_save(
    tmp_path: Path, ends: type[BaseException]
) -> None:
    """`sys.exit` in a callback: the thread that receives outcomes is that of all saves."""

    def leave(pending: PendingSave) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise ends

    with Checkpointer(tmp_path) as checkpointer:
        first = checkpointer.save_async(1, STATE)
        first.add_done_callback(leave)
        first.result(60)
        checkpointer.save_async(2, STATE).result(60)


def test_a_callback_that_would_wait_for_its_own_thread_is_refused(tmp_path: Path) -> None:
    """Its thread learns how saves end: to wait there for one, or for its own end, was for ever."""
    checkpointer = Checkpointer(tmp_path)
    refused: list[str] = []

    def wait_in_vain(_: PendingSave) -> None:
        other = checkpointer.save_async(2, STATE)
        for call in (partial(other.result, 5), checkpointer.close):
            with pytest.raises(ConfigError, match="in the thread that") as raised:
                call()
            refused.append(str(raised.value))

    checkpointer.prepare(STATE)
    writer = checkpointer.stats.writer_pid or 0
    os.kill(writer, signal.SIGSTOP)
    pending = checkpointer.save_async(1, STATE)
    pending.add_done_callback(wait_in_vain)
    os.kill(writer, signal.SIGCONT)
    wait(pending)
    checkpointer.close()
    assert len(refused) == 2
    assert checkpointer.steps() == [1, 2]


@pytest.mark.parametrize("handles", [True, False])
def test_a_failure_that_leaves_a_callback_is_raised_later_all_the_same(
    tmp_path: Path, handles: bool
) -> None:
    checkpointer = Checkpointer(tmp_path)
    checkpointer.prepare(STATE)
    writer = checkpointer.stats.writer_pid or 0
    os.kill(writer, signal.SIGSTOP)
    pending = checkpointer.save_async(1, STATE)

    def look(done: PendingSave) -> None:
        try:
            done.result()
        except StorageError:
            if not handles:
                raise

    pending.add_done_callback(look)
    os.kill(writer, signal.SIGKILL)
    wait(pending)
    if handles:
        checkpointer.close()
    else:
        with pytest.raises(StorageError, match="SIGKILL"):
            checkpointer.close()


def test_counters_say_what_happened(tmp_path: Path) -> None:
    state: dict[str, object] = {"t": {"x": torch.ones(1000)}}
    checkpointer = Checkpointer(tmp_path)
    before = checkpointer.stats
    assert (before.num_saves, before.writer_pid, before.num_plans) == (0, None, 0)
    checkpointer.save(1, state)
    with pytest.raises(StorageError, match="exists already"):
        checkpointer.save(1, state)
    checkpointer.save_async(2, state).result(60)
    writer = checkpointer.stats.writer_pid or 0
    os.kill(writer, signal.SIGSTOP)
    pending = checkpointer.save_async(3, state)
    assert checkpointer.save_async(4, state, when_busy="skip").skipped
    assert checkpointer.stats.num_saves_in_flight == 1
    os.kill(writer, signal.SIGKILL)
    with pytest.raises(StorageError):
        pending.result(60)
    checkpointer.load(state)
    with pytest.raises(StorageError):
        checkpointer.load(state, step=9)
    stats = checkpointer.stats
    assert (stats.num_saves, stats.num_failed_saves, stats.num_skipped_saves) == (2, 2, 1)
    assert (stats.num_loads, stats.num_failed_loads, stats.num_saves_in_flight) == (1, 1, 0)
    assert (stats.num_plans, stats.num_plan_reuses, stats.num_allocations) == (1, 2, 1)
    assert (stats.nbytes_saved >= 8000, stats.nbytes_loaded) == (True, 4000)
    assert before.num_saves == 0  # a snapshot
    checkpointer.close()


def doomed(checkpointer: Checkpointer, step: int) -> PendingSave:
    """A save that its writer cannot write: its disk is full, as far as it can tell."""
    checkpointer.prepare(STATE)
    writer = checkpointer.stats.writer_pid
    assert writer is not None
    resource.prlimit(writer, resource.RLIMIT_FSIZE, (0, 0))
    return checkpointer.save_async(step, STATE)


def test_a_failure_that_nothing_raised_is_logged_when_the_checkpointer_goes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """P23: a loop that ends without `close` and `result` would be none the wiser."""
    checkpointer = Checkpointer(tmp_path)
    pending = doomed(checkpointer, 7)
    writer = checkpointer.stats.writer_pid
    wait(pending)
    with caplog.at_level(logging.ERROR, "holdfast"):
        del checkpointer, pending
        gc.collect()
    (line,) = caplog.messages
    assert line.startswith("the save of step 7 failed, and nothing raised it: cannot")
    with contextlib.suppress(ChildProcessError):  # the writer of a lost checkpointer ends
        os.waitpid(writer or 0, 0)


def test_a_failure_that_was_raised_is_not_logged_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpointer = Checkpointer(tmp_path)
    with pytest.raises(StorageError):
        doomed(checkpointer, 7).result(60)
    with caplog.at_level(logging.ERROR, "holdfast"):
        del checkpointer
        gc.collect()
    assert caplog.messages == []


def test_a_failure_that_comes_as_the_time_of_result_is_over_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It counted as raised, since the save was done when the DeadlineError left."""
    checkpointer = Checkpointer(tmp_path)
    pending = doomed(checkpointer, 7)
    wait(pending)
    monkeypatch.setattr(InFlightSave, "wait", lambda save, timeout_s: False)
    with pytest.raises(DeadlineError):
        pending.result(0.1)
    monkeypatch.undo()
    with pytest.raises(StorageError, match="cannot"):
        checkpointer.close()


ENDING = """
import atexit, resource, sys, torch
from holdfast import Checkpointer, OptimizerState
from tests.checkpoint.save.test_pending import doomed
model = torch.nn.Linear(600, 600)
state = {"model": model, "optimizer": OptimizerState(torch.optim.SGD(model.parameters()), model)}
lost, late = Checkpointer(sys.argv[1]), Checkpointer(sys.argv[2])
atexit.register(lambda: late.save_async(1, state, stage="lazily"))
doomed(lost, 7)
"""


@pytest.mark.slow
def test_what_a_process_leaves_at_its_end_is_written_or_logged(tmp_path: Path) -> None:
    """P23: a failure of its last moment, and a lazy save that no thread would copy any more."""
    ended = subprocess.run(
        [sys.executable, "-c", ENDING, str(tmp_path / "lost"), str(tmp_path / "late")],
        capture_output=True, text=True, timeout=240, check=True,
    )  # fmt: skip
    assert "iter_0000007" in ended.stderr or "step 7" in ended.stderr
    assert "failed" in ended.stderr
    with Checkpointer(tmp_path / "late") as checkpointer:
        assert checkpointer.latest() == 1
