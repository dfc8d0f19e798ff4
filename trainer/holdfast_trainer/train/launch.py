"""Our own launcher: starts the processes of a run on this machine, and waits for them.

It has no part in the training, and imports of torch no more than the launcher of torch does.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING

from holdfast_trainer.train.config import TrainConfig
from holdfast_trainer.train.launch_environment import RUN_PREFIX
from holdfast_trainer.train.stopping import (
    StopDir,
    print_line,
    safe_on_disk,
    signal_name,
    stop_directory,
    stopping_message,
)

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFailure:
    """Why a launched run ended early."""

    message: str
    """One line; empty where everything was printed already."""
    exit_code: int
    """2 for an error of Holdfast's own, with what to do in it; 1 for a death; 128 and the signal's
    number for a run that a signal has stopped; 16 to 21 for one that the rerun machine has."""


def launch(config: TrainConfig, *, arguments: Sequence[str]) -> WorkerFailure | None:
    """Start the processes of `holdfast train` on this machine and wait for them.

    A first SIGTERM or SIGINT is passed on as a request to stop; a second one ends them at once.

    Args:
        config: says how many, and where checkpoints are.
        arguments: the command line after `holdfast train`; each process gets the same.

    Returns:
        Why the run ended early; None if it did not.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    nproc = config.nproc

    # The launcher logs each failure at length; our caller prints the one line that matters.
    logging.disable(logging.CRITICAL)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // nproc)))
    settings = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nproc,
        run_id=f"{RUN_PREFIX}{uuid.uuid4().hex}",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        shutdown_timeout=5,
        # The other two would end the processes at once; `_forwarding_signals` has them.
        signals_to_handle="SIGHUP,SIGQUIT",
    )
    command = ["-m", "holdfast_trainer", *arguments]
    with stop_directory() as stop_dir:
        try:
            with _forwarding_signals(stop_dir):
                elastic_launch(settings, entrypoint=sys.executable)(*command)
        except ChildFailedError as error:
            return _root_cause(error.failures)
        except (KeyboardInterrupt, SignalException) as error:
            number = getattr(error, "sigval", signal.SIGINT)
            safe = safe_on_disk(config.checkpoint.directories)
            print_line(f"left at once by {signal_name(number)}: {safe}")
            return WorkerFailure(message="", exit_code=128 + number)
        finally:
            logging.disable(logging.NOTSET)
        stop_signal, exit_code = stop_dir.recorded_stop(), stop_dir.recorded_exit()
    if exit_code:
        return WorkerFailure(message="", exit_code=exit_code)
    return WorkerFailure(message="", exit_code=128 + stop_signal) if stop_signal else None


@contextmanager
def _forwarding_signals(stop_dir: StopDir) -> Iterator[None]:
    """Send a first SIGTERM or SIGINT to the processes; a second one ends the launcher.

    Raises:
        SignalException: at the second one; the launcher then ends its processes.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException

    is_sent = False

    def take(number: int, frame: FrameType | None) -> None:
        nonlocal is_sent
        del frame
        if is_sent:
            raise SignalException("second signal", sigval=signal.Signals(number))
        is_sent = True
        stop_dir.send(number)
        print_line(stopping_message(number))

    before = {number: signal.signal(number, take) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _root_cause(failures: Mapping[int, ProcessFailure]) -> WorkerFailure:
    """The failure that explains the others.

    A recorded error ranks before a death without one; a rank that timed out waiting (DeadlineError)
    or was stopped by the launcher (SIGTERM) ranks last.
    """

    def weight(item: tuple[int, ProcessFailure]) -> tuple[bool, bool, int, int]:
        rank, failure = item
        is_victim = failure.exitcode == -signal.SIGTERM or _recorded(failure)[0] == "DeadlineError"
        return is_victim, not _recorded(failure)[0], failure.timestamp, rank

    rank, failure = min(failures.items(), key=weight)
    kind, message = _recorded(failure)
    if kind:
        return WorkerFailure(message=message, exit_code=2)
    if failure.exitcode < 0:
        name = signal.Signals(-failure.exitcode).name
        return WorkerFailure(message=f"rank {rank} was killed by {name}", exit_code=1)
    return WorkerFailure(
        message=f"rank {rank} ended with exit code {failure.exitcode}; its traceback is above",
        exit_code=1,
    )


def _recorded(failure: ProcessFailure) -> tuple[str, str]:
    """Class and text of the error that a process recorded; empty if it recorded none."""
    recorded = failure.error_file_data.get("message")
    text = recorded.get("message", "") if isinstance(recorded, dict) else ""
    kind, _, message = str(text).partition(": ")
    return (kind, message) if message else ("", "")
