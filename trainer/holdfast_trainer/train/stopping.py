"""Stopping a run on request: a signal asks once, and the run ends at a step with everything saved.

Torch-free. `OnSignal` takes the signals in each process. Our own launcher, which gets those of a
terminal, sends them on to its processes; what they answer, it finds in a directory.
"""

from __future__ import annotations

import ctypes
import os
import signal
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast import Moment, OnSignal, SavePolicy
from holdfast.errors import HoldfastError
from holdfast.format.names import list_steps, parse_saving_dir
from holdfast.storage import open_storage, shown

if TYPE_CHECKING:
    from holdfast_trainer.train.metrics import Reporter

STOP_DIR = "HOLDFAST_STOP_DIR"
"""Variable in the environment of our launcher's processes: the directory of `StopDir`."""

_REQUEST = "stop"
_STOPPED = "stopped"
_EXIT_CODE = "exit_code"
_LAUNCHER = "launcher"
_PID_SUFFIX = ".pid"
_PR_SET_PDEATHSIG = 1


class StopDir:
    """What a launcher and its processes tell each other, as small files; nothing without one.

    Args:
        directory: of our own launcher; None in a process that another one has started.
    """

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory

    def send(self, number: int) -> None:
        """Send a signal to all processes of this launcher, also to those still starting."""
        assert self._directory is not None
        # Before the look for processes: one that enlists later finds it.
        self._write(_REQUEST, number)
        for path in self._directory.glob(f"*{_PID_SUFFIX}"):
            self._deliver(path, number)

    @contextmanager
    def enlisted(self) -> Iterator[None]:
        """Have this process get what the launcher sends, or has sent before.

        A launcher that is killed sends nothing: SIGTERM comes in its place.
        """
        if self._directory is None:
            yield
            return
        own = self._directory / f"{os.getpid()}{_PID_SUFFIX}"
        self._write(own.name, os.getpid())

        def outlived(*_: object) -> None:
            self._deliver(own, signal.SIGTERM)

        # The kernel tells of the end of each thread of the launcher, so perhaps more than once.
        before = signal.signal(signal.SIGHUP, outlived)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGHUP)
        if self._read(_LAUNCHER) not in (0, os.getppid()):  # it had ended before
            outlived()
        if number := self._read(_REQUEST):
            self._deliver(own, number)
        try:
            yield
        finally:
            own.unlink(missing_ok=True)
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, 0)
            signal.signal(signal.SIGHUP, before)

    def record_launcher(self) -> None:
        """Record this process as the one that its processes do not outlive."""
        self._write(_LAUNCHER, os.getpid())

    def record_stop(self, number: int) -> None:
        """Record for the launcher which signal has stopped the run."""
        self._write(_STOPPED, number)

    def recorded_stop(self) -> int:
        """The signal that a launcher's processes have stopped for; 0 if they have not."""
        return self._read(_STOPPED)

    def record_exit(self, code: int) -> None:
        """Record for the launcher with which exit code the run is to end."""
        self._write(_EXIT_CODE, code)

    def recorded_exit(self) -> int:
        """The exit code that a launcher's processes ask for; 0 if they ask for none."""
        return self._read(_EXIT_CODE)

    @staticmethod
    def _deliver(path: Path, number: int) -> None:
        """Send a signal to the process that a file names, once.

        Launcher and process may both come here; only the one that removes the file sends, since a
        second signal would end the process at once.
        """
        with suppress(OSError):
            path.unlink()
            os.kill(int(path.name.removesuffix(_PID_SUFFIX)), number)

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


class WhenReaderLeaves(SavePolicy):
    """Save and stop when the reader of the reports has left; the vote is SIGPIPE."""

    decided_by = "any rank"
    stop = True

    def __init__(self, reporter: Reporter | None) -> None:
        self._reporter = reporter

    def __repr__(self) -> str:
        """The same on all ranks, of which one reports."""
        return "WhenReaderLeaves()"

    def vote(self, moment: Moment) -> int:
        """By the last write."""
        del moment
        has_left = self._reporter is not None and not self._reporter.has_reader
        return signal.SIGPIPE if has_left else 0


@contextmanager
def stop_directory() -> Iterator[StopDir]:
    """A launcher's directory, which its processes know by their environment."""
    with tempfile.TemporaryDirectory(prefix="holdfast-stop-") as directory:
        os.environ[STOP_DIR] = directory
        stop_dir = StopDir(Path(directory))
        stop_dir.record_launcher()
        try:
            yield stop_dir
        finally:
            os.environ.pop(STOP_DIR)


def stop_directory_of_launcher() -> StopDir:
    """The directory of the launcher that has started this process, if it is ours."""
    directory = os.environ.get(STOP_DIR)
    return StopDir(Path(directory) if directory else None)


def on_stop_signals(*, directories: Sequence[Path | None] | None) -> OnSignal:
    """A policy that stops for SIGTERM or SIGINT; a second one ends the process at once.

    Args:
        directories: where `safe_on_disk` looks, to tell a person; None for a process that prints
            nothing, because another one does.
    """

    def answer(number: int, num_signals: int) -> None:
        if num_signals > 1:
            _exit_now(number, directories)
        if directories is not None:
            print_line(stopping_message(number))

    return OnSignal(signal.SIGTERM, signal.SIGINT, notice=answer)


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
    """Return what the first signal gets as its answer."""
    return f"{signal_name(number)}: stopping after this step; once more leaves at once"


def safe_on_disk(directories: Sequence[Path | None]) -> str:
    """Return which step a run can continue from, in words.

    Args:
        directories: where it saved to, and where it was loaded from, in order of preference.
    """
    for directory in directories:
        if directory is None:
            continue
        try:
            storage = open_storage(directory)
            steps = list_steps(storage)
            names = storage.list("")
        except HoldfastError:
            continue
        if not steps:
            continue
        saving = sorted(s[0] for name in names if (s := parse_saving_dir(name)) is not None)
        newer = [step for step in saving if step > steps[-1]]
        also = f" (step {newer[-1]} was being saved)" if newer else ""
        return (
            f"step {steps[-1]} is safe in {shown(directory)}{also}; --load {shown(directory)} "
            f"continues from it"
        )
    return "no step of it is on disk"
