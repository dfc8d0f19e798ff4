"""A rank: takes a job from its pipe, runs it, reports, and says what the job has left behind.

The order of messages, for each job:

    test → rank    the job
    rank → test    its report; a rank that raised leaves at once, like a crashed trainer
    test → rank    all ranks have finished: no group is destroyed while another rank uses it
    rank → test    what the job changed in this process; if nothing, it takes the next job
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pickle
import random
import signal
import sys
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection

from tests.ranks import writers
from tests.ranks.job import Job, RankError, Report
from tests.ranks.state import ProcessState


def serve(pipe: Connection, rank: int, environment: dict[str, str]) -> None:
    """Run jobs until the test closes the pipe, a job fails, or one leaves something behind."""
    os.setsid()
    os.environ.update(environment)
    # All of this before the state is taken: what every job does is not a change.
    _write_to(os.devnull)
    faulthandler.enable(file=sys.stderr, all_threads=True)  # what a fatal signal has interrupted
    faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True)
    state: ProcessState | None = None
    with contextlib.suppress(EOFError, OSError):
        while True:
            pickled = pipe.recv_bytes()
            if state is None and not _is_fresh(pickled):
                writers.use()
                state = ProcessState.take()
            message, returned = _run(rank, pickled)
            sys.stdout.flush()
            sys.stderr.flush()
            pipe.send_bytes(message)
            if not returned:
                break
            pipe.recv_bytes()
            _destroy()
            if state is None:
                break
            _write_to(os.devnull)
            changes = state.changes()
            if not changes:
                state.restore_random_streams()
            pipe.send_bytes(pickle.dumps(changes))
            if changes:
                break
    os._exit(0)


def _is_fresh(pickled: bytes) -> bool:
    return pickled[:1] == b"1"


def _run(rank: int, pickled: bytes) -> tuple[bytes, bool]:
    """Return the pickled report, and whether the target returned."""
    try:
        job: Job = pickle.loads(pickled[1:])
        _write_to(job.log)
        os.environ.update(job.environment)
        random.seed()
        _init(job)
        return pickle.dumps(Report(result=job.target(job.context, *job.args))), True
    except BaseException as error:
        return _pickled_error(rank, error), False


def _write_to(path: str) -> None:
    """Make a file this process's standard output and error."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115


def _init(job: Job) -> None:
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
    hook = sys.excepthook
    dist.init_process_group(
        job.backend,
        store=store,
        rank=job.context.rank,
        world_size=job.context.num_ranks,
        timeout=timeout,
    )
    sys.excepthook = hook  # torch sets one that names the rank, and destroying does not undo it


def _destroy() -> None:
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_initialized():
        with contextlib.suppress(Exception):
            dist.destroy_process_group()


def _pickled_error(rank: int, error: BaseException) -> bytes:
    def report(exception: BaseException | None) -> bytes:
        return pickle.dumps(
            Report(
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
