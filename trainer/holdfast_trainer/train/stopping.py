"""Stopping a run on request: a signal asks once, and the run ends at a step with everything saved.

Torch-free. A thread reads signals from a file descriptor, because Python runs handlers only between
two instructions of the main thread: while that waits in a collective, no handler runs.
"""

from __future__ import annotations

import os
import signal
import socket
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from holdfast import Moment, SavePolicy
from holdfast.errors import HoldfastError
from holdfast.format.names import list_steps, parse_saving_dir
from holdfast.storage import PosixStorage

if TYPE_CHECKING:
    from holdfast_trainer.train.metrics import Reporter

STOP_DIR = "HOLDFAST_STOP_DIR"
"""Variable in the environment of our launcher's processes: where requests and answers lie."""

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_REQUEST = "stop"
_STOPPED = "stopped"
_EXIT_CODE = "exit_code"


class StopRequest:
    """Whether this process has been asked to stop, and by which signal.

    Threads may look at it; it changes once.

    Args:
        directory: where our own launcher, which gets the signals of a terminal, forwards them to
            its processes as files; None without it.
    """

    def __init__(self, *, directory: Path | None = None) -> None:
        self._signal = 0
        self._directory = directory

    @property
    def signal(self) -> int:
        """Number of the signal that asked for it; 0 if none has. Cost: one look at a file."""
        if not self._signal:
            self._signal = self._read(_REQUEST)
        return self._signal

    def ask(self, number: int) -> None:
        """Ask for a stop; a later one changes nothing."""
        self._signal = self._signal or number

    def forward(self) -> None:
        """Write the request where the processes of this launcher read it."""
        self._write(_REQUEST, self._signal)

    def record_stop(self, number: int) -> None:
        """Record for our launcher, if there is one, which signal has stopped the run."""
        self._write(_STOPPED, number)

    def recorded_stop(self) -> int:
        """The signal that a launcher's processes have stopped for; 0 if they have not."""
        return self._read(_STOPPED)

    def record_exit(self, code: int) -> None:
        """Record for our launcher, if there is one, with which exit code the run is to end."""
        self._write(_EXIT_CODE, code)

    def recorded_exit(self) -> int:
        """The exit code that a launcher's processes ask for; 0 if they ask for none."""
        return self._read(_EXIT_CODE)

    def _read(self, name: str) -> int:
        """A number published in the directory; 0 without one."""
        if self._directory is not None:
            with suppress(OSError, ValueError):
                return int((self._directory / name).read_text())
        return 0

    def _write(self, name: str, number: int) -> None:
        """Publish a number in the directory, if there is one."""
        if self._directory is None:
            return
        # Whole or not at all: others read it while it is written.
        temporary = self._directory / f"{name}.{os.getpid()}"
        with suppress(OSError):
            temporary.write_text(str(number))
            temporary.replace(self._directory / name)


class StopWhenAsked(SavePolicy):
    """Save and stop where any rank is asked to, or the reader of the reports has left.

    Its vote is the signal's number; SIGPIPE for a reader that has left.
    """

    decided_by = "any rank"
    stop = True

    def __init__(self, request: StopRequest, reporter: Reporter | None) -> None:
        self._request = request
        self._reporter = reporter

    def __repr__(self) -> str:
        """The same on all ranks, of which one reports."""
        return "StopWhenAsked()"

    def vote(self, moment: Moment) -> int:
        """One look at a file, under our own launcher."""
        del moment
        if self._reporter is not None and not self._reporter.has_reader:
            return self._request.signal or signal.SIGPIPE
        return self._request.signal

    def reason(self, vote: int) -> str:
        """The signal's name."""
        return signal_name(vote)


@contextmanager
def stop_directory() -> Iterator[StopRequest]:
    """A launcher's request, in a directory that its processes know by their environment."""
    with tempfile.TemporaryDirectory(prefix="holdfast-stop-") as directory:
        os.environ[STOP_DIR] = directory
        try:
            yield StopRequest(directory=Path(directory))
        finally:
            os.environ.pop(STOP_DIR)


def request_of_launcher() -> StopRequest:
    """The request of a process that our launcher has started."""
    directory = os.environ.get(STOP_DIR)
    return StopRequest(directory=Path(directory) if directory else None)


@contextmanager
def handle_stop_signals(
    request: StopRequest, *, directories: Sequence[Path | None] | None
) -> Iterator[None]:
    """Take SIGTERM and SIGINT as requests to stop; a second one ends the process at once.

    Args:
        request: gets the first one.
        directories: where `safe_on_disk` looks, to tell a person; None for a process that prints
            nothing, because another one does.

    Main thread only.
    """
    with ExitStack() as stack:
        ours, theirs = socket.socketpair()
        stack.enter_context(ours)
        stack.enter_context(theirs)
        theirs.setblocking(False)
        for number in _SIGNALS:
            stack.callback(signal.signal, number, signal.signal(number, _only_wake))
        before = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
        stack.callback(signal.set_wakeup_fd, before)
        threading.Thread(target=_listen, args=(ours, request, directories), daemon=True).start()
        yield


def _only_wake(number: int, frame: FrameType | None) -> None:
    """The thread at the other end of the descriptor has got it."""
    del number, frame


def _listen(
    ours: socket.socket, request: StopRequest, directories: Sequence[Path | None] | None
) -> None:
    """Read signals from the socket until it is closed; runs in a thread."""
    while True:
        try:
            numbers = ours.recv(64)
        except OSError:
            return
        if not numbers:
            return
        for number in numbers:
            if number not in _SIGNALS:
                continue
            if request.signal:
                _exit_now(number, directories)
            request.ask(number)
            if directories is not None:
                print_line(stopping_message(number))


def _exit_now(number: int, directories: Sequence[Path | None] | None) -> None:
    """End this process now; storage that does not answer does not hold it up."""
    if directories is not None:
        timer = threading.Timer(2.0, os._exit, args=(128 + number,))
        timer.daemon = True
        timer.start()
        print_line(f"left at once by {signal_name(number)}: {safe_on_disk(directories)}")
    os._exit(128 + number)


def print_line(line: str) -> None:
    """One line on standard error, from any thread and from a signal handler."""
    with suppress(OSError):
        os.write(2, f"holdfast: {line}\n".encode())


def signal_name(number: int) -> str:
    """SIGTERM for 15."""
    return signal.Signals(number).name


def stopping_message(number: int) -> str:
    """What the first signal gets as its answer."""
    return f"{signal_name(number)}: stopping after this step; once more leaves at once"


def safe_on_disk(directories: Sequence[Path | None]) -> str:
    """Which step a run can go on from, in words.

    Args:
        directories: where it saved to, and where it was loaded from, in order of preference.
    """
    for directory in directories:
        if directory is None:
            continue
        try:
            storage = PosixStorage(directory)
            steps = list_steps(storage)
            names = storage.list("")
        except HoldfastError:
            continue
        if not steps:
            continue
        saving = sorted(s[0] for name in names if (s := parse_saving_dir(name)) is not None)
        newer = [step for step in saving if step > steps[-1]]
        also = f" (step {newer[-1]} was being saved)" if newer else ""
        return f"step {steps[-1]} is safe in {directory}{also}; --load {directory} goes on from it"
    return "no step of it is on disk"
