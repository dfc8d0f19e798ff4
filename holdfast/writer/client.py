"""The trainer's side of its writer: submit jobs to a process or a thread, receive outcomes."""

from __future__ import annotations

import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from holdfast.errors import ErrorRecord, StorageError, signal_name
from holdfast.format.names import step_dir
from holdfast.storage import PosixStorage, Storage
from holdfast.storage.reading import shared_lock
from holdfast.writer.job import run_job
from holdfast.writer.keeper import TRAINERS_SIGNALS
from holdfast.writer.memory import SharedMemory
from holdfast.writer.outcomes import is_committed, is_discarded, publish_failure
from holdfast.writer.process import (
    PLANS_KEPT,
    Connection,
    JobFinished,
    JobProgress,
    JobWritten,
    KeepPlan,
    MapMemory,
    Message,
    OpenBucket,
    RunJob,
)
from holdfast.writer.records import EncodedPlan, KeepImage, SaveOutcome, WriteJob

_LEAVE_S = 1.0
"""Seconds that an ending process waits for the outcomes that have arrived."""


class Ticket:
    """A submitted job: the writer's messages are recorded here, the trainer waits for them.

    Args:
        job: The job; it may be completed until it is submitted.
        commits: True if the job commits the save.
        nbytes: Size of the image.
        after: Called with the outcome, by the thread that receives it.
        receiver: That thread, in which nothing may wait for the outcome.
    """

    def __init__(
        self,
        job: WriteJob,
        *,
        commits: bool,
        nbytes: int,
        after: Callable[[SaveOutcome], object] | None = None,
        receiver: threading.Thread | None = None,
    ) -> None:
        self.job = job
        self.receiver = receiver
        self.commits = commits
        self.nbytes = nbytes
        self.nbytes_written = 0
        self.written = threading.Event()
        self.finished = threading.Event()
        self.outcome: SaveOutcome | None = None
        self._after = after
        self._callbacks: list[Callable[[], object]] = []
        self._lock = threading.Lock()

    def progress(self, nbytes: int) -> None:
        """Record how many bytes were passed to storage."""
        self.nbytes_written = nbytes

    def finish(self, outcome: SaveOutcome) -> None:
        """Record the outcome, then make the calls that wait for it."""
        self.outcome = outcome
        self.written.set()
        # The lock closes the gap in `when_finished` between its look at the event and its append.
        with self._lock:
            self.finished.set()
            callbacks, self._callbacks = self._callbacks, []
        after, self._after = self._after, None  # which may keep alive who waits for it
        if after is not None:
            after(outcome)
        for callback in callbacks:
            callback()

    def fail(self, error: ErrorRecord) -> None:
        """Record the failure of a job that no writer can report."""
        self.finish(
            SaveOutcome(save_id=self.job.header.save_id, directory=self.job.directory, error=error)
        )

    def when_finished(self, callback: Callable[[], object]) -> None:
        """Call it once: in the thread that receives the outcome, or now if it is there."""
        with self._lock:
            if not self.finished.is_set():
                self._callbacks.append(callback)
                return
        callback()


class WriterProcess:
    """One torch-free writer process in its own session, and the thread that listens to it.

    It outlives this process and finishes every job that it has received. If it dies first, this
    process fails its jobs and publishes the failure on storage, so that the other ranks do not
    wait for it.

    Args:
        storage: The storage as this process has it.
        root: The directory or the URL by which the writer opens it.
        settings: Of a URL.

    Cost: about 0.3 s to start (not waited for), two descriptors, one thread.
    """

    def __init__(
        self, storage: Storage, root: str, settings: Mapping[str, Any] | None = None
    ) -> None:
        self._storage = storage
        ours, theirs = socket.socketpair()
        self._connection = Connection(ours)
        # The writer imports what this process imports, wherever it was started: cwd is "/", so that
        # it keeps no directory busy after the trainer has gone.
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        # They wait until the writer ignores them: it inherits this thread's mask.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, TRAINERS_SIGNALS)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "holdfast.writer.process", str(theirs.fileno()), root],
                pass_fds=[theirs.fileno()],
                # Its own session: Ctrl-C and a launcher's group kill must not end a save.
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                env=environment,
                cwd="/",
            )
        except OSError as error:
            self._connection.close()
            raise StorageError(f"the writer process cannot be started: {error}") from error
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            # Only the writer holds this end now: the listener sees its death as the end of stream.
            theirs.close()
        self._tickets: OrderedDict[str, Ticket] = OrderedDict()
        self._mapped: dict[int, object] = {}
        self._plans: list[str] = []
        # For `_tickets`: the trainer adds to them while the listener takes out of them.
        self._lock = threading.Lock()
        self.dead = ""
        self._is_left = False
        if settings is not None:
            self._send(OpenBucket(dict(settings)))
        self.receiver = threading.Thread(
            target=self._listen, name="holdfast-writer-listener", daemon=True
        )
        self.receiver.start()

    @property
    def pid(self) -> int:
        """Id of the writer process."""
        return self._process.pid

    def submit(
        self,
        ticket: Ticket,
        *,
        buffer: int,
        memory: SharedMemory,
        image: memoryview,
        plan: EncodedPlan | None,
    ) -> None:
        """Submit the job of one save; StorageError if the writer is gone.

        Memory and plan are sent only if they are new to the writer.

        Args:
            ticket: With this rank's share, `job`.
            buffer: Number of the staging buffer with the image.
            memory: The memory of that buffer.
            image: The first bytes of that memory.
            plan: The plan, on the rank that commits the save; None on the others.
        """
        job = ticket.job
        self._map(buffer, memory)
        if plan is not None and job.plan_digest not in self._plans:
            self._send(KeepPlan(job.plan_digest, plan.data))
            self._plans = [*self._plans, job.plan_digest][-PLANS_KEPT:]
        # Before it is sent: the answer may come before `send` returns.
        with self._lock:
            self._tickets[job.header.save_id] = ticket
        # From here on the save is the writer's, and storage shows that before it has begun, also if
        # this process ends at once: the lock lasts while the message waits to be read.
        lock = shared_lock(self._storage, "")
        try:
            locks = [] if lock is None else [lock]
            self._send(RunJob(job, buffer, image.nbytes, ticket.commits, self._place()), *locks)
        except StorageError:
            with self._lock:
                self._tickets.pop(job.header.save_id, None)
            raise
        finally:
            if lock is not None:
                os.close(lock)

    def keep_image(self, image: KeepImage, *, memory: SharedMemory) -> None:
        """Have the image kept when this process has gone; StorageError if the writer is gone.

        Args:
            image: What to keep, in the staging buffer with this memory. Its save need not be
                committed yet: the writer looks for that on storage.
            memory: The memory of that buffer.
        """
        self._map(image.buffer, memory)
        self._send(image)

    def close(self, *, timeout_s: float) -> None:
        """Let the writer finish and end; after `timeout_s` it is left to itself."""
        self._connection.shutdown()
        self.receiver.join(timeout_s)
        if not self.receiver.is_alive():
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(5)
            self._connection.close()

    def leave(self) -> str:
        """Let the writer finish alone, without waiting, and report to its log from now on.

        Returns:
            Why it does not finish the jobs that it has; empty, as it does.
        """
        self._is_left = True
        self._connection.leave()
        if threading.current_thread() is not self.receiver:  # in which garbage is collected, too
            self.receiver.join(_LEAVE_S)  # what has arrived is recorded
        return ""

    def _map(self, buffer: int, memory: SharedMemory) -> None:
        """Send the memory of a buffer, unless the writer has it."""
        # The token, not the descriptor: a number that was closed is soon another memory's.
        if self._mapped.get(buffer) is not memory.token:
            self._send(MapMemory(buffer, memory.nbytes), memory.fd)
            self._mapped[buffer] = memory.token

    def _place(self) -> tuple[int, int]:
        """Return device and inode of the root as this process knows it; -1 for unknown."""
        if not isinstance(self._storage, PosixStorage):
            return -1, -1
        return self._storage.place.device, self._storage.place.inode

    def _send(self, message: Message, *descriptors: int) -> None:
        """Send a message; StorageError if the writer is gone."""
        try:
            if self.dead:
                raise BrokenPipeError(self.dead)
            self._connection.send(message, descriptors)
        except OSError as error:
            raise StorageError(
                f"the writer process {self.pid} is gone: {self.dead or error}"
            ) from error

    def _listen(self) -> None:
        """Record what the writer reports, until it is gone."""
        while True:
            try:
                message, _ = self._connection.receive()
            except StorageError as error:
                # Of another release, if the package was replaced while this process ran.
                self.dead = f"was ended ({error}; start the run again)"
                os.kill(self.pid, signal.SIGKILL)
                break
            if isinstance(message, JobProgress):
                if (ticket := self._tickets.get(message.save_id)) is not None:
                    ticket.progress(message.nbytes)
            elif isinstance(message, JobWritten):
                if (ticket := self._tickets.get(message.save_id)) is not None:
                    ticket.written.set()
            elif isinstance(message, JobFinished):
                with self._lock:
                    ticket = self._tickets.pop(message.outcome.save_id, None)
                if ticket is not None:
                    ticket.finish(message.outcome)
            elif message is None:
                break
        if not self._is_left:
            self._fail_the_rest()

    def _fail_the_rest(self) -> None:
        """Fail the jobs of a writer that is gone, here and on storage for the other ranks."""
        # Its socket closes some time before the system has its exit status.
        began = time.monotonic()
        while self._process.poll() is None and time.monotonic() - began < 5:
            time.sleep(0.01)
        self.dead = self.dead or _how_it_ended(self._process.returncode)
        with self._lock:
            orphans = list(self._tickets.values())
            self._tickets.clear()
        for ticket in orphans:
            job, step, save_id = ticket.job, ticket.job.header.step, ticket.job.header.save_id
            is_there = False
            with suppress(StorageError):
                is_there = is_committed(self._storage, step=step, save_id=save_id)
            if is_there:
                # All that is lost is how long it took.
                now = time.monotonic()
                ticket.finish(SaveOutcome(save_id=save_id, directory=step_dir(step), began=now))
                continue
            error = StorageError(
                f"rank {job.rank}: the writer process {self.pid} {self.dead} during the save of "
                f"step {step}; save again"
            )
            record = ErrorRecord.of(error)
            # A directory that was removed has ended every wait, as in `run_job`.
            if not (ticket.written.is_set() and is_discarded(self._storage, job.directory)):
                publish_failure(self._storage, job, record, committer=ticket.commits)
            ticket.fail(record)


class WriterThread:
    """The same service in a thread, for a storage that no other process can open.

    Jobs run one after another.
    """

    pid: int | None = None
    """Always None: the writer is not a process."""
    dead = ""
    """Always empty: the thread lives as long as this process."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._jobs: queue.Queue[tuple[Ticket, memoryview, EncodedPlan | None] | None]
        self._jobs = queue.Queue()
        self.receiver = threading.Thread(target=self._serve, name="holdfast-writer", daemon=True)
        self.receiver.start()

    def submit(
        self,
        ticket: Ticket,
        *,
        buffer: int,
        memory: SharedMemory,
        image: memoryview,
        plan: EncodedPlan | None,
    ) -> None:
        """Queue the job of one save; see `WriterProcess.submit`."""
        del buffer, memory
        self._jobs.put((ticket, image, plan))

    def keep_image(self, image: KeepImage, *, memory: SharedMemory) -> None:
        """Do nothing: what this process has staged ends with it."""

    def close(self, *, timeout_s: float) -> None:
        """Finish the queued jobs and end."""
        self._jobs.put(None)
        self.receiver.join(timeout_s)

    def leave(self) -> str:
        """Return why the jobs that it has are not finished: the thread ends with this process."""
        self._jobs.put(None)
        return "it was being written by a thread, which ends with its process"

    def _serve(self) -> None:
        """Run the jobs in order, until `close`."""
        while (item := self._jobs.get()) is not None:
            ticket, image, plan = item
            outcome = run_job(
                self._storage, ticket.job, image, plan=plan, on_progress=ticket.progress,
                on_written=ticket.written.set,
            )  # fmt: skip
            # Both hold views of staging memory, which can only be freed after its last view.
            del item, image
            ticket.finish(outcome)


Writer = WriterProcess | WriterThread


def start_writer(storage: Storage) -> Writer:
    """Start a writer process, or a thread if no other process can open the storage."""
    root = storage.local_path("") if storage.is_shareable() else None
    if root is not None:
        return WriterProcess(storage, str(root))
    address_of = getattr(storage, "address", None)
    address = address_of() if address_of is not None else None
    return WriterProcess(storage, *address) if address is not None else WriterThread(storage)


def _how_it_ended(code: int | None) -> str:
    """Describe how a process ended, for messages."""
    if code is None:
        return "closed its socket"
    if code < 0:
        return f"was killed by {signal_name(-code)}"
    return f"ended with status {code}"
