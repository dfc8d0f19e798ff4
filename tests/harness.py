"""Runs one function as several ranks, in real processes, and never hangs.

A test reads as what each rank does:

    def add(rank: RankContext, amount: int) -> int:
        return rank.rank + amount

    def test_add():
        assert run_ranks(2, add, 10).results == [10, 11]

The processes are forked from a clean server that has imported everything heavy once
(`tests/preload.py`), so a run of four ranks takes about a tenth of a second. `target` and its
arguments travel by pickle (tests may), so the target is a function at module level. The rendezvous
store lives in the test process: it survives the death of any rank, like the store of a launcher's
agent.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import multiprocessing.connection
import os
import pickle
import random
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any, Generic, TypeVar

T = TypeVar("T")

_PRELOAD = ["tests.preload"]
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
}
_GRACE_S = 10.0
"""How long the other ranks may go on after one failed, where no failure is expected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankContext:
    """What a rank knows about itself."""

    rank: int
    num_ranks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankError:
    """How one rank failed."""

    rank: int
    type_name: str
    """Class of the exception; "Killed", "Exited" or "TimedOut" where there was none."""
    message: str
    traceback: str
    exception: BaseException | None = None
    """The exception itself, where it survives pickling."""
    signal: int | None = None
    """The signal that ended the process."""
    timed_out: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome(Generic[T]):
    """The results of all ranks, indexed by rank."""

    results: list[T]
    """What `target` returned; None for a rank that failed."""
    errors: list[RankError | None]
    outputs: list[str]
    """What the rank printed to its standard output and error."""
    seconds: float

    @property
    def failed(self) -> list[int]:
        """Ranks that did not return."""
        return [index for index, error in enumerate(self.errors) if error is not None]


@dataclass(frozen=True, slots=True)
class _Report:
    result: Any = None
    error: RankError | None = None


@dataclass(frozen=True, slots=True)
class _Job:
    context: RankContext
    target: Callable[..., Any]
    args: tuple[Any, ...]
    backend: str | None
    store_port: int
    timeout_s: float
    environment: dict[str, str]
    log: str


def run_ranks(
    num_ranks: int,
    target: Callable[..., T],
    *args: Any,
    timeout_s: float = 120,
    init: bool = True,
    backend: str = "gloo",
    expect_failure: bool = False,
    env: Mapping[str, str] | None = None,
) -> Outcome[T]:
    """Call `target(rank_context, *args)` in `num_ranks` processes and collect what they return.

    With `init`, `torch.distributed` is initialised before and destroyed after. A rank that returns
    stays until all have finished; one that raises leaves at once, like a crashed trainer. Ranks
    that are late after `timeout_s` are killed (with everything in their process group) and their
    stacks reported. Unless `expect_failure`, any failure raises AssertionError with every rank's
    traceback.
    """
    started = time.monotonic()
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ranks-")))
        port = stack.enter_context(_store()) if init else 0
        jobs = [
            _Job(
                context=RankContext(rank=rank, num_ranks=num_ranks),
                target=target,
                args=args,
                backend=backend if init else None,
                store_port=port,
                timeout_s=timeout_s,
                environment={**_ENVIRONMENT, **(env or {})},
                log=str(directory / f"rank{rank}.log"),
            )
            for rank in range(num_ranks)
        ]
        reports = _run(jobs, deadline=started + timeout_s, expect_failure=expect_failure)
        outputs = [_read(Path(job.log)) for job in jobs]
    outcome = Outcome(
        results=[report.result for report in reports],
        errors=[report.error for report in reports],
        outputs=outputs,
        seconds=time.monotonic() - started,
    )
    if outcome.failed and not expect_failure:
        raise AssertionError(_describe(outcome))
    return outcome


@contextlib.contextmanager
def _store() -> Iterator[int]:
    from torch._C._distributed_c10d import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield store.port
    del store


def _context() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    return context


def _run(jobs: list[_Job], *, deadline: float, expect_failure: bool) -> list[_Report]:
    reports: dict[int, _Report] = {}
    processes: list[ForkServerProcess] = []
    pipes: list[Connection] = []
    context = _context()
    try:
        with _environment(_ENVIRONMENT):
            for rank, job in enumerate(jobs):
                ours, theirs = context.Pipe()
                process = context.Process(target=_rank_main, args=(theirs, rank, pickle.dumps(job)))
                process.start()
                theirs.close()
                processes.append(process)
                pipes.append(ours)
        waiting = dict(enumerate(pipes))
        while waiting and time.monotonic() < deadline:
            by_pipe = {pipe: rank for rank, pipe in waiting.items()}
            wait_s = max(0.0, deadline - time.monotonic())
            for pipe in multiprocessing.connection.wait(list(by_pipe), wait_s):
                assert isinstance(pipe, Connection)
                rank = by_pipe[pipe]
                del waiting[rank]
                reports[rank] = _receive(rank, pipe, processes[rank])
                if reports[rank].error is not None and not expect_failure:
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
        for rank in waiting:
            reports[rank] = _late(rank, processes[rank], Path(jobs[rank].log))
            _signal(processes[rank], signal.SIGKILL)
        for pipe in pipes:
            with contextlib.suppress(OSError):
                pipe.send_bytes(b"all ranks have finished")
        for process in processes:
            process.join(max(0.0, min(10.0, deadline + 10.0 - time.monotonic())))
    finally:
        for process in processes:
            _kill(process)
        for pipe in pipes:
            pipe.close()
    return [reports[rank] for rank in range(len(jobs))]


def _receive(rank: int, pipe: Connection, process: ForkServerProcess) -> _Report:
    try:
        report = pickle.loads(pipe.recv_bytes())
    except (EOFError, ConnectionError):
        process.join(10)
        code = process.exitcode
        number = -code if code is not None and code < 0 else None
        what = f"signal {signal.Signals(number).name}" if number else f"exit code {code}"
        return _Report(
            error=RankError(
                rank=rank,
                type_name="Killed" if number else "Exited",
                message=f"ended by {what} before it reported",
                traceback="",
                signal=number,
            )
        )
    assert isinstance(report, _Report)
    return report


def _late(rank: int, process: ForkServerProcess, log: Path) -> _Report:
    before = len(_read(log))
    if process.pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGUSR1)  # faulthandler writes every stack to the log
            time.sleep(0.3)
    return _Report(
        error=RankError(
            rank=rank,
            type_name="TimedOut",
            message="had not finished when the time of the run was over",
            traceback=_read(log)[before:],
            timed_out=True,
        )
    )


def _signal(process: ForkServerProcess, number: signal.Signals) -> None:
    """Signal the rank and everything it started in its process group."""
    if process.pid is not None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)


def _kill(process: ForkServerProcess) -> None:
    _signal(process, signal.SIGKILL)
    if process.is_alive():
        process.kill()
    process.join(10)
    process.close()


def _rank_main(pipe: Connection, rank: int, pickled: bytes) -> None:
    os.setsid()
    returned = False
    try:
        job: _Job = pickle.loads(pickled)
        _prepare(job)
        _init(job)
        message = pickle.dumps(_Report(result=job.target(job.context, *job.args)))
        returned = True
    except BaseException as error:
        message = _pickled_error(rank, error)
    sys.stdout.flush()
    sys.stderr.flush()
    pipe.send_bytes(message)
    if returned:
        with contextlib.suppress(EOFError, OSError):
            pipe.recv_bytes()
        _destroy()
    os._exit(0)


def _prepare(job: _Job) -> None:
    log = os.open(job.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True)
    os.environ.update(job.environment)
    random.seed()


def _init(job: _Job) -> None:
    if job.backend is None:
        return
    import torch
    from torch import distributed as dist
    from torch._C._distributed_c10d import TCPStore

    torch.set_num_threads(1)
    timeout = timedelta(seconds=job.timeout_s)
    store = TCPStore(
        "127.0.0.1", job.store_port, is_master=False, timeout=timeout, wait_for_workers=False
    )
    dist.init_process_group(
        job.backend,
        store=store,
        rank=job.context.rank,
        world_size=job.context.num_ranks,
        timeout=timeout,
    )


def _destroy() -> None:
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_initialized():
        with contextlib.suppress(Exception):
            dist.destroy_process_group()


def _pickled_error(rank: int, error: BaseException) -> bytes:
    def report(exception: BaseException | None) -> bytes:
        return pickle.dumps(
            _Report(
                error=RankError(
                    rank=rank,
                    type_name=type(error).__name__,
                    message=str(error),
                    traceback="".join(traceback.format_exception(error)),
                    exception=exception,
                )
            )
        )

    try:
        message = report(error)
        pickle.loads(message)
    except Exception:
        return report(None)
    return message


def _read(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


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


def _describe(outcome: Outcome[Any]) -> str:
    parts = [f"{len(outcome.failed)} of {len(outcome.errors)} ranks failed: {outcome.failed}"]
    for rank, error in enumerate(outcome.errors):
        if error is None:
            continue
        parts.append(f"--- rank {rank}: {error.type_name}: {error.message}")
        parts.append(error.traceback.rstrip())
        if outcome.outputs[rank].strip():
            parts.append(f"--- rank {rank} printed:\n{outcome.outputs[rank][-4000:].rstrip()}")
    return "\n".join(parts)
