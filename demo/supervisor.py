"""A small supervisor: starts ranks as plain processes, kills one on request, never leaves any.

torch's elastic launcher would do the restart too; on one machine its rendezvous takes long to
notice a death, and a demonstration should not wait for that.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

POLL_S = 0.05
SILENCE_S = 120.0
"""Seconds without a report after which a run is given up."""
GRACE_S = 3.0
"""Between asking a process to stop and killing it."""


class RunFailed(Exception):
    """A run failed; the message names the logs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """SIGKILL for one rank as soon as a step is reported."""

    rank: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOutcome:
    """How a set of processes ended."""

    exit_codes: tuple[int, ...]
    """By rank; negative for a signal."""
    killed_at: int | None
    """The last step reported when the signal was sent."""
    seconds: float


def run_ranks(
    words: Sequence[str],
    *,
    num_ranks: int,
    directory: Path,
    label: str,
    kill: Kill | None = None,
    on_event: Callable[[dict[str, Any]], None],
) -> RunOutcome:
    """Run `python <words>` as every rank until all ended, or one died.

    Args:
        words: arguments of the interpreter, the same for every rank.
        num_ranks: how many processes.
        directory: where `events.jsonl` appears and logs go.
        label: part of the logs' names.
        kill: what to kill and when.
        on_event: called with each new object of `events.jsonl`.

    Raises:
        RunFailed: a rank failed by itself, or nothing was reported for two minutes.
    """
    started = time.monotonic()
    killed_at: int | None = None
    path = directory / "events.jsonl"
    # Measured before any process starts, or the first events could be taken for an earlier start's.
    events = follow(path, position=path.stat().st_size if path.exists() else 0)
    with processes(words, num_ranks=num_ranks, directory=directory, label=label) as ranks:
        heard = time.monotonic()
        while True:
            for event in next(events):
                heard = time.monotonic()
                on_event(event)
                is_due = kill is not None and event.get("step", 0) >= kill.step
                if kill is not None and is_due and killed_at is None:
                    ranks[kill.rank].send_signal(signal.SIGKILL)
                    killed_at = int(event["step"])
            codes = [rank.poll() for rank in ranks]
            if all(code is not None for code in codes):
                break
            if any(code not in (None, 0) for code in codes) and killed_at is None:
                raise RunFailed(_explain(codes, directory=directory, label=label))
            if killed_at is not None and any(code is not None for code in codes):
                break
            if time.monotonic() - heard > SILENCE_S:
                raise RunFailed(f"no word for {SILENCE_S:.0f} s; see {directory}/{label}-rank*.log")
            time.sleep(POLL_S)
        for event in next(events):
            on_event(event)
    codes = [rank.returncode for rank in ranks]
    if killed_at is None and any(codes):
        raise RunFailed(_explain(codes, directory=directory, label=label))
    return RunOutcome(
        exit_codes=tuple(int(code or 0) for code in codes),
        killed_at=killed_at,
        seconds=time.monotonic() - started,
    )


@contextmanager
def processes(
    words: Sequence[str], *, num_ranks: int, directory: Path, label: str
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start one process per rank; none is left running afterwards, in any case."""
    directory.mkdir(parents=True, exist_ok=True)
    port = str(_free_port())
    ranks: list[subprocess.Popen[bytes]] = []
    with ExitStack() as stack:
        stack.callback(_stop, ranks)
        for rank in range(num_ranks):
            log = stack.enter_context((directory / f"{label}-rank{rank}.log").open("wb"))
            environment = os.environ | {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(num_ranks),
                "LOCAL_WORLD_SIZE": str(num_ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "OMP_NUM_THREADS": "1",
                "PYTHONUNBUFFERED": "1",
            }
            ranks.append(
                subprocess.Popen(
                    [sys.executable, *words],
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            )
        yield ranks


def follow(path: Path, *, position: int) -> Iterator[list[dict[str, Any]]]:
    """Without end: the objects appended to a JSON lines file since the last batch."""
    while True:
        fresh: list[dict[str, Any]] = []
        if path.exists():
            with path.open("rb") as file:
                file.seek(position)
                data = file.read()
            whole = data.rfind(b"\n") + 1
            position += whole
            fresh = [json.loads(line) for line in data[:whole].splitlines()]
        yield fresh


def _stop(ranks: list[subprocess.Popen[bytes]]) -> None:
    """End all ranks; those that do not end in time are killed."""
    for rank in ranks:
        if rank.poll() is None:
            rank.terminate()
    deadline = time.monotonic() + GRACE_S
    for rank in ranks:
        try:
            rank.wait(timeout=max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            rank.kill()
            rank.wait()


def _explain(codes: Sequence[int | None], *, directory: Path, label: str) -> str:
    bad = {rank: code for rank, code in enumerate(codes) if code not in (None, 0)}
    rank = next(iter(bad))
    log = directory / f"{label}-rank{rank}.log"
    tail = log.read_text(errors="replace").strip().splitlines()[-3:]
    return f"rank {rank} ended with exit code {bad[rank]}; {log} ends with: {' | '.join(tail)}"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
