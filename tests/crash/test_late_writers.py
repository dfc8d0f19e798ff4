"""Which step a restart continues from while a writer of the run before may still live."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from holdfast import Checkpointer, Layout, PosixStorage, ProcessGroups, StorageError
from holdfast.checkpoint.load import finding
from holdfast.storage import Storage
from holdfast.writer import job, leftovers
from holdfast.writer.records import HEADER_FILE, PLAN_FILE
from tests.crash.common import state_of, versions
from tests.harness import RankContext, run_ranks, wait_until

LATE_S = 1.5
"""How long a writer stands still: longer than `ALIVE_S` and than a save may take to its lock."""
ALIVE_S = 0.3


def saved_late(context: RankContext, root: str, signal_number: int) -> None:
    """Commit step 1; in the commit of step 2 stand still, or be killed."""
    with Checkpointer(root, settle_s=0.0) as checkpointer:
        checkpointer.save(1, state_of(1))
        real = job.commit_save

        def late(*args: Any, **kwargs: Any) -> Any:
            Path(root, "pid").write_text(str(os.getpid()))
            os.kill(os.getpid(), signal_number)
            return real(*args, **kwargs)

        job.commit_save = late
        checkpointer.save(2, state_of(2))


@pytest.fixture
def local(tmp_path: Path) -> Path:
    """A root on a file system of which the kernel knows all users."""
    root = tmp_path / "run"
    root.mkdir()
    if PosixStorage(root).is_locked("") is None:
        pytest.skip("the kernel does not know who else uses this file system")
    return root


def test_a_writer_that_stood_still_is_waited_for(
    local: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, `latest` did not wait at all, and a load took a silent writer for a dead one."""
    monkeypatch.setattr(finding, "_ALIVE_S", ALIVE_S)
    run = threading.Thread(
        target=run_ranks, args=(1, saved_late, str(local), signal.SIGSTOP), kwargs={"fresh": True}
    )
    run.start()
    pid_file = local / "pid"
    wait_until(lambda: pid_file.exists() and pid_file.read_text() != "")
    pid = int(pid_file.read_text())
    wait_until(lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")
    assert Checkpointer(local).steps() == [1]
    wake = threading.Timer(LATE_S, os.kill, (pid, signal.SIGCONT))
    wake.start()
    assert Checkpointer(local).latest() == 2
    wake.join()
    run.join()
    assert versions(local) == {1: 1, 2: 2}


def test_a_writer_that_was_killed_is_not_waited_for(
    local: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, a load waited until its last heartbeat was five seconds old."""
    run_ranks(1, saved_late, str(local), signal.SIGKILL, expect_failure=True)
    slept: list[float] = []
    real = time.sleep

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        real(seconds)

    monkeypatch.setattr(time, "sleep", sleep)
    assert Checkpointer(local).latest() == 2  # all was written: it is finished here
    assert sum(slept) < 1.0
    assert versions(local) == {1: 1, 2: 2}


def test_a_writer_that_may_be_on_another_host_has_its_five_seconds(
    local: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_ranks(1, saved_late, str(local), signal.SIGKILL, expect_failure=True)
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    monkeypatch.setattr(PosixStorage, "age_s", lambda *_: 0.6 + sum(slept))
    monkeypatch.setattr(PosixStorage, "is_locked", lambda *_: None)
    monkeypatch.setattr("holdfast.writer.records.renewed_ago_s", lambda *_, **__: 0.6 + sum(slept))
    assert Checkpointer(local).latest() == 2
    assert 4.0 < sum(slept) < 5.5


def test_a_save_that_is_locked_is_left_alone_by_a_repair(local: Path) -> None:
    """However old its heartbeats are; the lock is gone when the process is."""
    storage = PosixStorage(local)
    storage.make_dir(".saving-iter_0000001-abc")
    with storage.locking(".saving-iter_0000001-abc") as release:
        os.utime(local / ".saving-iter_0000001-abc", (1, 1))
        (found,) = leftovers.repair(storage, alive_s=30.0)
        assert (found.fate, found.why.rpartition(", ")[2]) == ("alive", "a process has it locked")
        release()
        (found,) = leftovers.repair(storage, alive_s=30.0)
        assert found.fate == "removed"


def test_a_save_that_is_locked_is_alive_even_if_it_cannot_be_read(
    local: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While its owner commits it, files come and go; `latest` returned without it."""
    storage = PosixStorage(local)
    storage.make_dir(".saving-iter_0000001-abc/plan")
    storage.write_file(f".saving-iter_0000001-abc/{PLAN_FILE}", b"", durable=False)
    storage.write_file(f".saving-iter_0000001-abc/{HEADER_FILE}", b"", durable=False)

    def gone(storage: Storage, path: str) -> bytes:
        raise StorageError(f"{path}: No such file or directory")

    monkeypatch.setattr(leftovers, "read_record", gone)
    with storage.locking(".saving-iter_0000001-abc") as release:
        (found,) = leftovers.repair(storage, alive_s=30.0, dry_run=True)
        assert found.fate == "alive"
        checkpointer = Checkpointer(local, settle_s=0.3)
        began = time.monotonic()
        assert checkpointer.latest() is None
        assert time.monotonic() - began > 0.3
        release()


def load_behind_a_writer(context: RankContext, root: str, max_fallbacks: int) -> tuple[int, float]:
    """Rank 0 waits for a save in progress for longer than rank 1 would for a message."""
    storage, directory = PosixStorage(root), ".saving-iter_0000009-abc"
    with ProcessGroups.create(Layout(dp=2), timeout_s=2.0) as groups, ExitStack() as stack:
        if context.rank == 0:
            storage.make_dir(directory)
            release = stack.enter_context(storage.locking(directory))
            threading.Timer(3.0, release).start()
        began = time.monotonic()
        report = Checkpointer(root, groups=groups).load_all(max_fallbacks=max_fallbacks)
        return report.step, time.monotonic() - began


@pytest.mark.slow
@pytest.mark.parametrize("max_fallbacks", [0, 1])
def test_no_rank_gives_up_the_one_that_waits_for_a_writer(local: Path, max_fallbacks: int) -> None:
    """P14: ranks that waited for it met their deadline, and the load failed on all."""
    Checkpointer(local, settle_s=0.0).save(1, state_of(1))
    for step, seconds in run_ranks(2, load_behind_a_writer, str(local), max_fallbacks).results:
        assert step == 1
        assert seconds > 2.5


def killed_at_once(context: RankContext, root: str, path: str) -> None:
    """Killed when the first asynchronous save has returned, while its writer is starting."""
    os.environ["PYTHONPATH"] = path
    sys.path.insert(0, path)
    Checkpointer(root).save_async(1, state_of(1))
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_writer_that_has_not_begun_is_waited_for(local: Path, tmp_path: Path) -> None:
    """Before, a restart that was quicker than the writer's start began afresh."""
    gate = tmp_path / "gate"
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys, time\nif 'holdfast.writer.process' in sys.orig_argv:\n    end = 6000\n"
        f"    while end and not os.path.exists({str(gate)!r}):\n        end -= 1\n"
        "        time.sleep(0.01)\n"
    )
    run_ranks(1, killed_at_once, str(local), str(tmp_path), expect_failure=True)
    assert not [name for name in os.listdir(local) if name.startswith((".saving", "iter"))]
    begin = threading.Timer(LATE_S, gate.touch)
    begin.start()
    assert Checkpointer(local).latest() == 1
    begin.join()
    assert versions(local) == {1: 1}
    assert PosixStorage(local).is_locked("") is False
