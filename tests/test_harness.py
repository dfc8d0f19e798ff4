"""The harness itself: results, errors, signals and deadlines are reported, nothing hangs."""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import holdfast
from holdfast import Checkpointer
from holdfast.errors import LayoutError, StorageError
from tests.harness import RankContext, run_ranks, wait_until
from tests.ranks import pool


def _sum(rank: RankContext, amount: int) -> tuple[int, str, int]:
    import torch
    from torch import distributed as dist

    print("hello from", rank.rank)
    value = torch.tensor([rank.rank + amount])
    dist.all_reduce(value)
    return int(value.item()), os.environ["COLOUR"], torch.get_num_threads()


def _all_ways_to_fail(rank: RankContext) -> int:
    if rank.rank == 1:
        raise LayoutError("no such axis")
    if rank.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank.rank == 3:
        os._exit(7)
    if rank.rank == 4:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        print(child.pid, flush=True)
        time.sleep(600)
    return rank.rank


def _wait_for_a_failure(rank: RankContext) -> int:
    if rank.rank == 0:
        time.sleep(600)
    return _all_ways_to_fail(rank)


_TRACES: list[int] = []


def _trace(rank: RankContext, kind: str) -> tuple[int, int, float]:
    """Leave a trace in the process, and return what shows the process and earlier traces."""
    drawn = float(torch.rand(()))
    _TRACES.append(rank.rank)
    leave: dict[str, Callable[[], Any]] = {
        "nothing": lambda: None,
        "random": lambda: torch.manual_seed(rank.rank),
        "environment": lambda: os.environ.update(TRACE="1"),
        "directory": lambda: os.chdir("/tmp"),
        "signal": lambda: signal.signal(signal.SIGUSR2, lambda *_: None),
        "limit": lambda: resource.setrlimit(resource.RLIMIT_CORE, (0, 0)),
        "warnings": lambda: warnings.simplefilter("error"),
        "dtype": lambda: torch.set_default_dtype(torch.float64),
        "deterministic": lambda: torch.use_deterministic_algorithms(True),
        "threads of torch": lambda: torch.set_num_threads(2),
        "thread": lambda: threading.Thread(target=time.sleep, args=(60,), daemon=True).start(),
        "descriptor": lambda: os.dup(1),
        "child": lambda: subprocess.Popen(["sleep", "60"]),
        "module": lambda: setattr(holdfast.errors, "LayoutError", ValueError),
        "method": lambda: setattr(holdfast.Layout, "coordinate", None),
        "attribute": lambda: setattr(holdfast.Layout, "added", None),
        "function": lambda: setattr(os, "rename", os.replace),
        "log": lambda: logging.getLogger("holdfast").addHandler(logging.NullHandler()),
        "hook": lambda: torch.nn.modules.module.register_module_forward_hook(lambda *_: None),
        # Where no collection of garbage finds it.
        "groups": lambda: setattr(
            json, "kept", holdfast.ProcessGroups.create(holdfast.Layout(dp=rank.num_ranks))
        ),
    }
    leave[kind]()
    return os.getpid(), len(_TRACES), drawn


def _of_the_process(rank: RankContext) -> tuple[int, dict[str, str], list[int], bool]:
    """The process, its environment, and what the traces of `_trace` are left in."""
    handlers = logging.getLogger("holdfast").handlers
    places = (holdfast.errors.LayoutError, holdfast.Layout.coordinate, os.rename, *handlers)
    return os.getpid(), dict(os.environ), [*map(id, places)], hasattr(holdfast.Layout, "added")


@pytest.mark.parametrize(
    "kind",
    ["nothing", "random", "environment", "module", "method", "attribute", "function", "log"],
)
def test_a_rank_that_is_as_it_was_or_can_be_put_back_serves_again(kind: str) -> None:
    before = run_ranks(2, _of_the_process).results
    first, second = (run_ranks(2, _trace, kind).results for _ in range(2))
    assert first == second  # the process, the globals of this file, the random stream
    assert run_ranks(2, _of_the_process).results == before


@pytest.mark.parametrize(
    "kind",
    [
        *("directory", "signal", "limit", "warnings", "thread", "descriptor", "child", "groups"),
        *("dtype", "deterministic", "threads of torch", "hook"),
    ],
)
def test_a_rank_that_a_job_has_changed_serves_no_other(kind: str) -> None:
    changed = {pid for pid, _, _ in run_ranks(2, partial(_trace, kind=kind)).results}
    assert changed.isdisjoint(pid for pid, _, _ in run_ranks(2, _trace, "nothing").results)
    assert not any(os.path.exists(f"/proc/{pid}") for pid in changed)


def _on_meshes(rank: RankContext, axes: tuple[str, ...]) -> tuple[Any, ...]:
    """A product and a view, whose results torch works out for each mesh, on several in turn."""
    found = []
    for turn, axis in enumerate(axes):
        layout = holdfast.Layout(**{axis: rank.num_ranks}, name=f"{turn}")
        with holdfast.ProcessGroups.create(layout) as groups:
            mesh = groups.mesh(axis)
            left, right = torch.arange(12.0).reshape(4, 3) + turn, torch.ones(3, 4)
            one = distribute_tensor(left, mesh, [Shard(turn // 2)])
            product = one @ distribute_tensor(right, mesh, [Replicate()])
            view = distribute_tensor(left, mesh, [Shard(0)]).reshape(2, 2, 3)
            assert product.device_mesh is view.device_mesh is mesh
            assert torch.equal(product.full_tensor(), left @ right)
            assert torch.equal(view.full_tensor(), left.reshape(2, 2, 3))
            found.append((product.placements, view.placements, view.to_local().shape))
    return os.getpid(), *found


def test_live_ranks_find_placements_that_they_know_on_any_mesh() -> None:
    """They are those of new ranks, and the mesh is the one that asks."""
    axes = ("dp", "dp", "tp", "dp")
    fresh = run_ranks(2, _on_meshes, axes, fresh=True).results
    new = [each[1:] for each in fresh]
    live = [run_ranks(2, _on_meshes, axes).results for _ in range(2)]
    assert live[0] == live[1]
    assert [each[1:] for each in live[0]] == new


def test_fresh_ranks_serve_once() -> None:
    pids = {pid for _ in range(2) for pid, _, _ in run_ranks(2, _trace, "nothing").results}
    new = [run_ranks(2, _trace, "nothing", fresh=True).results for _ in range(2)]
    assert len(pids | {pid for results in new for pid, _, _ in results}) == 6


def _kill_writer(rank: RankContext, root: str) -> tuple[bytes, bool, bool, str]:
    """The writer's command line, whether it leads a session and has torch, and its end's name."""
    with Checkpointer(f"{root}/{rank.rank}") as checkpointer:
        checkpointer.save_async(1, {"progress": {"step": 1}}).result(60)
        pid = checkpointer.stats.writer_pid
        assert pid is not None
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        has_torch = "libtorch" in Path(f"/proc/{pid}/maps").read_text()
        leads = os.getsid(pid) == pid
        os.kill(pid, signal.SIGSTOP)
        pending = checkpointer.save_async(2, {"progress": {"step": 2}})
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(StorageError) as caught:
            pending.result(60)
        return command, leads, has_torch, str(caught.value)


@pytest.mark.parametrize("fresh", [False, True])
def test_live_ranks_fork_their_writers(tmp_path: Path, fresh: bool) -> None:
    """They commit, are torch-free, have a session and tell how they ended, as those of users do."""
    module = b"holdfast.writer.process" if fresh else b"tests.ranks.writers"
    for command, leads, has_torch, message in run_ranks(
        2, _kill_writer, str(tmp_path), init=False, fresh=fresh
    ).results:
        assert module in command
        assert (leads, has_torch) == (True, False)
        assert "was killed by SIGKILL" in message


def test_results_come_back_in_rank_order() -> None:
    outcome = run_ranks(3, _sum, 10, env={"COLOUR": "blue"})
    assert outcome.results == [(33, "blue", 1)] * 3
    assert outcome.errors == [None] * 3
    assert outcome.outputs[2] == "hello from 2\n"


def test_every_failure_is_reported_and_nothing_is_left_behind() -> None:
    outcome = run_ranks(5, _all_ways_to_fail, init=False, timeout_s=3, expect_failure=True)
    assert outcome.results[0] == 0
    assert outcome.failed == [1, 2, 3, 4]
    raised, killed, exited, late = outcome.errors[1:]
    assert raised is not None
    assert killed is not None
    assert exited is not None
    assert late is not None
    assert isinstance(raised.exception, LayoutError)
    assert raised.message == "no such axis"
    assert "_all_ways_to_fail" in raised.traceback
    assert (killed.type_name, killed.signal) == ("Killed", signal.SIGKILL)
    assert exited.message == "ended by exit code 7 before it reported"
    assert late.timed_out
    assert "_all_ways_to_fail" in late.traceback
    grandchild = int(outcome.outputs[4].split()[0])
    wait_until(lambda: _has_ended(grandchild))


def _has_ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def test_a_failure_that_nobody_expected_raises_with_every_traceback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pool, "_GRACE_S", 100.0)
    started = time.monotonic()
    with pytest.raises(AssertionError, match=r"(?s)rank 1: LayoutError: no such axis.*Traceback"):
        run_ranks(2, _all_ways_to_fail, init=False)
    assert time.monotonic() - started < 60


def test_others_are_not_waited_for_long_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "_GRACE_S", 0.5)
    started = time.monotonic()
    with pytest.raises(AssertionError, match=r"(?s)rank 0: TimedOut.*rank 1: LayoutError"):
        run_ranks(2, _wait_for_a_failure, init=False)
    assert time.monotonic() - started < 60


def test_the_time_of_a_run_starts_when_its_processes_are_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A server that imports for long, on a busy machine, takes nothing from the ranks."""
    passed_s, fork = 0.0, pool.fork

    class Clock:
        sleep = time.sleep

        @staticmethod
        def monotonic() -> float:
            return time.monotonic() + passed_s

    def fork_late(*arguments: Any, **named: Any) -> Any:
        nonlocal passed_s
        passed_s += 1000.0
        return fork(*arguments, **named)

    monkeypatch.setattr(pool, "time", Clock)
    monkeypatch.setattr(pool, "fork", fork_late)
    assert run_ranks(1, _all_ways_to_fail, init=False, fresh=True).results == [0]
