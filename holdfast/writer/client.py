"""The trainer's side of a writer process: start it, hand it images, hear what came of them."""

from __future__ import annotations

import mmap
import os
import queue
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

from holdfast.errors import HoldfastError, StorageError
from holdfast.storage import Storage
from holdfast.writer.job import SaveOutcome, publish_failure, run_job
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
        self.after: Callable[[SaveOutcome], object] | None = None
        self._callbacks: list[Callable[[], object]] = []
        self._lock = threading.Lock()

    @classmethod
    def failed(cls, job: WriteJob, error: HoldfastError, *, commits: bool) -> Ticket:
        """A job that never reached the writer."""
        ticket = cls(job, commits=commits, nbytes=0)
        ticket.finish(_failure(job, error))
        return ticket

    def finish(self, outcome: SaveOutcome) -> None:
        """Record what came of it, then do what was asked for after it."""
        self.outcome = outcome
        self.written.set()
        with self._lock:
            self.finished.set()
            callbacks, self._callbacks = self._callbacks, []
        if self.after is not None:
            self.after(outcome)
        for callback in callbacks:
            callback()

    def when_finished(self, callback: Callable[[], object]) -> None:
        """Call it once: by the thread that receives the outcome, or now where that is there."""
        with self._lock:
            if not self.finished.is_set():
                self._callbacks.append(callback)
                return
        callback()


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

    def submit(
        self,
        job: WriteJob,
        *,
        slot: int,
        nbytes: int,
        commits: bool,
        after: Callable[[SaveOutcome], object] | None = None,
    ) -> Ticket:
        """Hand over one save's job; StorageError if the writer is gone.

        `after` is called with the outcome, by the thread that hears it.
        """
        ticket = Ticket(job, commits=commits, nbytes=nbytes)
        ticket.after = after
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
            ticket.finish(_failure(ticket.job, error))


class WriterThread:
    """The same service by a thread of this process, for storages no other process can open."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._arenas: dict[int, mmap.mmap] = {}
        self._plan: tuple[CommitPlan, bytes] | None = None
        self._jobs: queue.Queue[tuple[Ticket, int, tuple[CommitPlan, bytes] | None] | None] = (
            queue.Queue()
        )
        self._thread = threading.Thread(target=self._serve, name="holdfast-writer", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int | None:
        """None: there is no process."""
        return None

    @property
    def dead(self) -> str:
        """Empty: it lives as long as this process."""
        return ""

    def give_arena(self, slot: int, descriptor: int, nbytes: int) -> None:
        """Map the memory of a slot a second time."""
        self._arenas[slot] = mmap.mmap(descriptor, nbytes)

    def give_plan(self, digest: str, plan: bytes) -> None:
        """Keep a plan for the jobs that follow."""
        del digest
        if self._plan is None or self._plan[1] != plan:
            self._plan = (decode_plan(plan, where="plan"), plan)

    def submit(
        self,
        job: WriteJob,
        *,
        slot: int,
        nbytes: int,
        commits: bool,
        after: Callable[[SaveOutcome], object] | None = None,
    ) -> Ticket:
        """Queue one save's job; `after` is called with the outcome, by the writing thread."""
        ticket = Ticket(job, commits=commits, nbytes=nbytes)
        ticket.after = after
        self._jobs.put((ticket, slot, self._plan if commits else None))
        return ticket

    def close(self, *, timeout_s: float) -> None:
        """Finish what is queued and end."""
        self._jobs.put(None)
        self._thread.join(timeout_s)

    def _serve(self) -> None:
        while (entry := self._jobs.get()) is not None:
            ticket, slot, planned = entry
            plan, encoded = planned if planned is not None else (None, b"")

            def progress(nbytes: int, ticket: Ticket = ticket) -> None:
                ticket.nbytes_written = nbytes

            outcome = run_job(
                self._storage,
                ticket.job,
                memoryview(self._arenas[slot])[: ticket.nbytes],
                plan=plan,
                encoded_plan=encoded,
                on_progress=progress,
                on_written=ticket.written.set,
            )
            ticket.finish(outcome)


Writer = WriterProcess | WriterThread


def start_writer(storage: Storage) -> Writer:
    """A writer process where another process can open the storage, else a thread."""
    root = storage.local_path("") if storage.is_shareable() else None
    return WriterProcess(storage, root) if root is not None else WriterThread(storage)


def _failure(job: WriteJob, error: HoldfastError) -> SaveOutcome:
    return SaveOutcome(
        save_id=job.header.save_id,
        directory=job.directory,
        error_type=type(error).__name__,
        message=str(error),
    )


def _how_it_ended(code: int | None) -> str:
    if code is None:
        return "closed its socket"
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with status {code}"
