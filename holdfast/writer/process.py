"""The writer process: takes staged images from one trainer and brings them to storage.

Run as `python -m holdfast.writer.process FD`. It is torch-free, in a session of its own, has no
communicator, and finishes what it was given even when the trainer is gone. Frames on the socket
are `messages.Frame`s; arenas come as file descriptors beside them.
"""

from __future__ import annotations

import mmap
import os
import signal
import socket
import sys
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

from holdfast.errors import HoldfastError
from holdfast.storage import PosixStorage, Storage
from holdfast.writer.job import SaveOutcome, run_job
from holdfast.writer.messages import (
    ArenaGiven,
    Connection,
    JobGiven,
    OutcomeTold,
    PlanGiven,
    Progressed,
    Written,
)
from holdfast.writer.records import CommitPlan, decode_plan

_PLANS_KEPT = 2
_PROGRESS_S = 0.2


class Server:
    """State of one writer process: its storage, arenas and plans."""

    def __init__(self, connection: Connection, storage: Storage) -> None:
        self._connection = connection
        self._storage = storage
        self._arenas: dict[int, mmap.mmap] = {}
        self._plans: OrderedDict[str, tuple[CommitPlan, bytes]] = OrderedDict()

    def serve(self) -> None:
        """Take frames until the trainer closes its end or dies; every job taken is finished."""
        while True:
            frame, descriptors = self._connection.receive()
            if frame is None:
                return
            if isinstance(frame, ArenaGiven):
                # An arena that is replaced is unmapped when the last view of it goes.
                self._arenas[frame.slot] = mmap.mmap(descriptors[0], frame.nbytes)
                os.close(descriptors[0])
            elif isinstance(frame, PlanGiven):
                self._plans[frame.digest] = (decode_plan(frame.plan, where="plan"), frame.plan)
                while len(self._plans) > _PLANS_KEPT:
                    self._plans.popitem(last=False)
            elif isinstance(frame, JobGiven):
                self._run(frame)

    def _run(self, frame: JobGiven) -> None:
        job = frame.job
        plan, encoded = self._plans[job.plan_digest] if frame.commits else (None, b"")
        image = memoryview(self._arenas[frame.slot])[: frame.nbytes]
        outcome = run_job(
            self._storage,
            job,
            image,
            plan=plan,
            encoded_plan=encoded,
            on_progress=self._progress(job.header.save_id),
            on_written=lambda: self._tell(Written(save_id=job.header.save_id)),
        )
        image.release()
        if not self._tell(OutcomeTold(outcome=outcome)):
            _report_alone(outcome)

    def _progress(self, save_id: str) -> Callable[[int], None]:
        """A reporter of bytes that speaks a few times a second at most."""
        told = time.monotonic()

        def report(nbytes: int) -> None:
            nonlocal told
            if time.monotonic() - told > _PROGRESS_S:
                told = time.monotonic()
                self._tell(Progressed(save_id=save_id, nbytes=nbytes))

        return report

    def _tell(self, frame: Progressed | Written | OutcomeTold) -> bool:
        """Tell the trainer; False when it is gone, which changes nothing here."""
        try:
            self._connection.send(frame)
        except OSError:
            return False
        return True


def _report_alone(outcome: SaveOutcome) -> None:
    """The trainer is gone: the outcome goes to the log it shared with us."""
    error = outcome.error()
    what = "was committed" if error is None else f"failed: {error}"
    try:
        print(f"holdfast writer: {outcome.directory} {what}", file=sys.stderr, flush=True)
    except OSError:
        return


def main(arguments: list[str]) -> int:
    """Serve the socket whose descriptor is the first argument; the root is the second."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    connection = Connection(socket.socket(fileno=int(arguments[0])))
    try:
        Server(connection, PosixStorage(Path(arguments[1]))).serve()
    except HoldfastError as error:
        print(f"holdfast writer: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
