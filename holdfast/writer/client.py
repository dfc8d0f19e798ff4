"""The trainer's side of a writer process: start it, hand it images, hear what came of them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from holdfast.errors import StorageError
from holdfast.storage import Storage
from holdfast.writer.job import SaveOutcome, publish_failure
from holdfast.writer.messages import (
    ArenaGiven,
    Connection,
    JobGiven,
    OutcomeTold,
    PlanGiven,
    Progressed,
    Written,
)
from holdfast.writer.write import WriteJob

_PLANS_REMEMBERED = 2


class Ticket:
    """One job under way: set by the writer's words, waited for by the trainer."""

    def __init__(self, job: WriteJob, *, commits: bool, nbytes: int) -> None:
        self.job = job
        self.commits = commits
        self.nbytes = nbytes
        self.nbytes_written = 0
        self.written = threading.Event()
        self.finished = threading.Event()
        self.outcome: SaveOutcome | None = None

    def finish(self, outcome: SaveOutcome) -> None:
        """Record what came of it."""
        self.outcome = outcome
        self.written.set()
        self.finished.set()


class WriterProcess:
    """One torch-free writer process in a session of its own, and the thread that listens to it.

    It outlives this process: what it was given is finished. If it dies first, every job it had is
    failed here and the failure published on storage, so that the other ranks do not wait.
    Cost: about 0.3 s to start (not waited for), two descriptors, one thread.
    """

    def __init__(self, storage: Storage, root: Path) -> None:
        self._storage = storage
        ours, theirs = socket.socketpair()
        self._connection = Connection(ours)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "holdfast.writer.process", str(theirs.fileno()), str(root)],
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                env=environment,
                cwd="/",
            )
        except OSError as error:
            self._connection.close()
            raise StorageError(f"the writer process cannot be started: {error}") from error
        finally:
            theirs.close()
        self._tickets: OrderedDict[str, Ticket] = OrderedDict()
        self._plans: list[str] = []
        self._lock = threading.Lock()
        self._dead = ""
        self._listener = threading.Thread(
            target=self._listen, name="holdfast-writer-listener", daemon=True
        )
        self._listener.start()

    @property
    def pid(self) -> int:
        """Process id of the writer."""
        return self._process.pid

    @property
    def dead(self) -> str:
        """Why it can take no more jobs; empty while it can."""
        return self._dead

    def give_arena(self, slot: int, descriptor: int, nbytes: int) -> None:
        """Hand over the memory of a slot, whenever it is new."""
        self._send(lambda: self._connection.send(ArenaGiven(slot, nbytes), [descriptor]))

    def give_plan(self, digest: str, plan: bytes) -> None:
        """Hand over a plan; one that it has already is not sent again."""
        if digest in self._plans:
            return
        self._send(lambda: self._connection.send(PlanGiven(digest, plan)))
        self._plans = [*self._plans, digest][-_PLANS_REMEMBERED:]

    def submit(self, job: WriteJob, *, slot: int, nbytes: int, commits: bool) -> Ticket:
        """Hand over one save's job; StorageError if the writer is gone."""
        ticket = Ticket(job, commits=commits, nbytes=nbytes)
        with self._lock:
            self._tickets[job.header.save_id] = ticket
        try:
            self._send(lambda: self._connection.send(JobGiven(job, slot, nbytes, commits)))
        except StorageError:
            with self._lock:
                self._tickets.pop(job.header.save_id, None)
            raise
        return ticket

    def close(self, *, timeout_s: float) -> None:
        """Let it finish and go; a writer that does not within the time is left to itself."""
        self._connection.shutdown()
        self._listener.join(timeout_s)
        if not self._listener.is_alive():
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(5)
            self._connection.close()

    def _send(self, send: Callable[[], None]) -> None:
        try:
            if self._dead:
                raise BrokenPipeError(self._dead)
            send()
        except OSError as error:
            raise StorageError(
                f"the writer process {self.pid} is gone: {self._dead or error}"
            ) from error

    def _listen(self) -> None:
        while True:
            frame, _ = self._connection.receive()
            if frame is None:
                break
            if isinstance(frame, Written | Progressed):
                ticket = self._tickets.get(frame.save_id)
                if ticket is None:
                    continue
                if isinstance(frame, Written):
                    ticket.nbytes_written = ticket.nbytes
                    ticket.written.set()
                else:
                    ticket.nbytes_written = frame.nbytes
            elif isinstance(frame, OutcomeTold):
                with self._lock:
                    ticket = self._tickets.pop(frame.outcome.save_id, None)
                if ticket is not None:
                    ticket.finish(frame.outcome)
        self._bury()

    def _bury(self) -> None:
        """The writer is gone: fail what it had, and tell the other ranks through storage."""
        began = time.monotonic()
        while self._process.poll() is None and time.monotonic() - began < 5:
            time.sleep(0.01)
        self._dead = _how_it_ended(self._process.returncode)
        with self._lock:
            orphans = list(self._tickets.values())
            self._tickets.clear()
        for ticket in orphans:
            error = StorageError(
                f"rank {ticket.job.rank}: the writer process {self.pid} {self._dead} during the "
                f"save of step {ticket.job.header.step}"
            )
            publish_failure(self._storage, ticket.job, error, committer=ticket.commits)
            ticket.finish(
                SaveOutcome(
                    save_id=ticket.job.header.save_id,
                    directory=ticket.job.directory,
                    error_type="StorageError",
                    message=str(error),
                )
            )


def _how_it_ended(code: int | None) -> str:
    if code is None:
        return "closed its socket"
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with status {code}"
