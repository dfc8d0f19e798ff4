"""The test's side of its ranks: live processes that wait for jobs, and new ones where needed.

Ranks are forked from a clean server that has imported everything heavy once (`tests/preload.py`).
The i-th idle process serves as rank i, so that what torch compiled or cached for it is warm.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from tests.ranks.job import Job, RankError, Report
from tests.ranks.process import serve

_PRELOAD = ["tests.preload"]
_GRACE_S = 10.0
"""How long the other ranks may continue after one failed, if no failure is expected."""


class RankProcess:
    """A process that serves as a rank, for one job or for many."""

    def __init__(self, rank: int, environment: Mapping[str, str]) -> None:
        self.pipe, self._process = fork(serve, rank, dict(environment), environment=environment)

    def receive(self, rank: int) -> Report:
        """Return its report; if it ended before, how."""
        try:
            report = pickle.loads(self.pipe.recv_bytes())
        except (EOFError, ConnectionError):
            return self._ended(rank)
        assert isinstance(report, Report)
        return report

    def _ended(self, rank: int) -> Report:
        self._process.join(10)
        code = self._process.exitcode
        number = -code if code is not None and code < 0 else None
        what = f"signal {signal.Signals(number).name}" if number else f"exit code {code}"
        return Report(
            error=RankError(
                rank=rank,
                type_name="Killed" if number else "Exited",
                message=f"ended by {what} before it reported",
                traceback="",
                signal=number,
            )
        )

    def stacks(self, log: Path) -> str:
        """Have the process write the stacks of all its threads to its log; return them."""
        before = len(read(log))
        if self._process.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGUSR1)  # the rank has registered faulthandler
                time.sleep(0.3)
        return read(log)[before:]

    def left_behind(self, deadline: float) -> list[str]:
        """Return what its job changed in it; it can serve again only if that is nothing."""
        try:
            if not self.pipe.poll(max(0.0, deadline - time.monotonic())):
                return ["does not say what it left behind"]
            changes: list[str] = pickle.loads(self.pipe.recv_bytes())
        except (EOFError, OSError):
            return ["has ended"]
        return changes

    def join(self, timeout_s: float) -> None:
        """Wait until it has left."""
        self._process.join(timeout_s)

    def signal(self, number: signal.Signals) -> None:
        """Signal it and everything it started in its process group."""
        if self._process.pid is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, number)

    def kill(self) -> None:
        """Kill it, with its process group, and forget it."""
        self.signal(signal.SIGKILL)
        if self._process.is_alive():
            self._process.kill()
        self._process.join(10)
        self._process.close()
        self.pipe.close()


class RankPool:
    """The live ranks of this process."""

    def __init__(self) -> None:
        self._idle: dict[int, RankProcess] = {}
        self.thrown_away: list[tuple[str, int, list[str]]] = []
        """Jobs that left something behind: target, rank, and what."""
        # Later than multiprocessing's own handler, hence called earlier: that one would wait.
        atexit.register(self.close)

    def run(self, jobs: list[Job], *, timeout_s: float, expect_failure: bool) -> list[Report]:
        """Run one job per rank, and return their reports by rank.

        Args:
            jobs: By rank.
            timeout_s: Of the jobs, without the start of processes and of the server: on a busy
                machine its imports take longer than most jobs may.
            expect_failure: Wait for all ranks, also if one fails.
        """
        fresh = jobs[0].fresh
        ranks: list[RankProcess] = []
        try:
            for rank, job in enumerate(jobs):
                process = None if fresh else self._idle.pop(rank, None)
                ranks.append(process or RankProcess(rank, job.environment))
            deadline = time.monotonic() + timeout_s
            for process, job in zip(ranks, jobs, strict=True):
                # A rank that is killed between two jobs is found here or when it reports.
                with contextlib.suppress(OSError):
                    process.pipe.send_bytes((b"1" if fresh else b"0") + pickle.dumps(job))
            reports = _collect(ranks, jobs, deadline=deadline, expect_failure=expect_failure)
            for process in ranks:
                with contextlib.suppress(OSError):
                    process.pipe.send_bytes(b"all ranks have finished")
            end = min(time.monotonic() + 10.0, deadline + 10.0)
            if not fresh and all(report.error is None for report in reports):
                self._keep_clean(ranks, jobs, end)
            for process in ranks:
                if process not in self._idle.values():
                    process.pipe.close()  # a live rank would wait for its next job
                    process.join(max(0.0, end - time.monotonic()))
        finally:
            for process in ranks:
                if process not in self._idle.values():
                    process.kill()
        return reports

    def _keep_clean(self, ranks: list[RankProcess], jobs: list[Job], end: float) -> None:
        for rank, (process, job) in enumerate(zip(ranks, jobs, strict=True)):
            changes = process.left_behind(end)
            if changes:
                self.thrown_away.append((_name_of(job.target), rank, changes))
            else:
                self._idle[rank] = process

    def close(self) -> None:
        """End all live ranks."""
        for process in self._idle.values():
            process.kill()
        self._idle.clear()


def _name_of(target: Callable[..., object]) -> str:
    """Return module and name of a job's function, also if arguments are bound to it."""
    while isinstance(target, partial):
        target = target.func
    return f"{target.__module__}.{target.__qualname__}"


def _collect(
    ranks: list[RankProcess], jobs: list[Job], *, deadline: float, expect_failure: bool
) -> list[Report]:
    """Wait for all reports; a rank that is late is asked for its stacks and killed."""
    reports: dict[int, Report] = {}
    waiting = {process.pipe: rank for rank, process in enumerate(ranks)}
    while waiting and time.monotonic() < deadline:
        wait_s = max(0.0, deadline - time.monotonic())
        for pipe in multiprocessing.connection.wait(list(waiting), wait_s):
            assert isinstance(pipe, Connection)
            rank = waiting.pop(pipe)
            reports[rank] = ranks[rank].receive(rank)
            if reports[rank].error is not None and not expect_failure:
                deadline = min(deadline, time.monotonic() + _GRACE_S)
    for rank in waiting.values():
        reports[rank] = Report(
            error=RankError(
                rank=rank,
                type_name="TimedOut",
                message="had not finished when the time of the run was over",
                traceback=ranks[rank].stacks(Path(jobs[rank].log)),
                timed_out=True,
            )
        )
        ranks[rank].signal(signal.SIGKILL)
    return [reports[rank] for rank in range(len(jobs))]


def read(path: Path) -> str:
    """Return the text of a log, if there is one."""
    return path.read_text(errors="replace") if path.exists() else ""


def fork(
    target: Callable[..., None], *args: object, environment: Mapping[str, str]
) -> tuple[Connection, ForkServerProcess]:
    """Fork a process from the server, and return the pipe to it.

    Args:
        target: What the process runs: its end of the pipe, and `args`, are its arguments.
        environment: Set while the server starts, if it does not run yet.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    ours, theirs = context.Pipe()
    with theirs, _environment(environment):
        process = context.Process(target=target, args=(theirs, *args))
        process.start()
    return ours, process


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set variables while the fork server may start: it hands them to the libraries it loads."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
