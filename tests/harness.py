"""Runs one function as several ranks, in real processes, and never hangs.

A test reads as what each rank does:

    def add(rank: RankContext, amount: int) -> int:
        return rank.rank + amount

    def test_add():
        assert run_ranks(2, add, 10).results == [10, 11]

The processes are live ones (`tests/ranks/`): a rank that its job leaves as it was serves the next
run, and any other is replaced by one forked from a clean server, so a run of four ranks takes less
than a tenth of a second. `target` and its arguments travel by pickle (tests may), so the target is
a function at module level. The rendezvous store lives in the test process: it survives the death of
any rank, like the store of a launcher's agent.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from tests.ranks.job import Job, RankContext, RankError
from tests.ranks.pool import RankPool, read

__all__ = ["Outcome", "RankContext", "RankError", "run_ranks", "wait_until"]

T = TypeVar("T")

_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
}


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


_POOL = RankPool()


def run_ranks(
    num_ranks: int,
    target: Callable[..., T],
    *args: Any,
    timeout_s: float = 120,
    init: bool = True,
    backend: str = "gloo",
    expect_failure: bool = False,
    env: Mapping[str, str] | None = None,
    fresh: bool = False,
) -> Outcome[T]:
    """Call `target(rank_context, *args)` in `num_ranks` processes and collect what they return.

    With `init`, `torch.distributed` is initialised before and destroyed after. A rank that returns
    stays until all have finished; one that raises leaves at once, like a crashed trainer. Ranks
    that are late after `timeout_s`, counted from when all processes are there, are killed (with
    everything in their process group) and their stacks reported. Unless `expect_failure`, any
    failure raises AssertionError with every rank's traceback.

    With `fresh`, `expect_failure` or `env` the processes are new and end with the run. Otherwise
    they are live ones that served before, if their last jobs left them as they were; ask for
    `fresh` ones where a test measures the process itself, like its peak of memory.
    """
    started = time.monotonic()
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ranks-")))
        port = stack.enter_context(_store()) if init else 0
        jobs = [
            Job(
                context=RankContext(rank=rank, num_ranks=num_ranks),
                target=target,
                args=args,
                backend=backend if init else None,
                store_port=port,
                timeout_s=timeout_s,
                environment={**_ENVIRONMENT, **(env or {})},
                log=str(directory / f"rank{rank}.log"),
                fresh=fresh or expect_failure or env is not None,
            )
            for rank in range(num_ranks)
        ]
        reports = _POOL.run(jobs, timeout_s=timeout_s, expect_failure=expect_failure)
        outputs = [read(Path(job.log)) for job in jobs]
    outcome = Outcome(
        results=[report.result for report in reports],
        errors=[report.error for report in reports],
        outputs=outputs,
        seconds=time.monotonic() - started,
    )
    if outcome.failed and not expect_failure:
        raise AssertionError(_describe(outcome))
    return outcome


def wait_until(condition: Callable[[], object], *, timeout_s: float = 120.0) -> None:
    """Return once it holds; AssertionError after a time that only a hang takes."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "it does not come"
        time.sleep(0.01)


@contextlib.contextmanager
def _store() -> Iterator[int]:
    from torch._C._distributed_c10d import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield store.port
    del store


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
