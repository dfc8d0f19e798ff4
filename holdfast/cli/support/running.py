"""Run a command so that every way it can end is an exit code, and an error one line."""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from holdfast.cli.support.messages import (
    EXIT_INTERRUPTED,
    EXIT_MISTAKE,
    print_error,
    print_note,
)
from holdfast.errors import HoldfastError, signal_name

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_AGAIN_S = 1.0
"""Seconds after which a second signal is meant as one: `timeout` sends its signal twice at once."""


class Stopped(BaseException):
    """A signal that asks to stop has come. Not an Exception: nothing but clean-up handles it."""

    def __init__(self, number: int) -> None:
        super().__init__(signal_name(number))
        self.number = number


@contextmanager
def stopping_cleanly() -> Iterator[None]:
    """In the body, SIGTERM and SIGHUP stop a command as Ctrl-C does: what it makes is removed.

    A second signal, some time after the first, ends the process at once. A signal that is ignored
    (nohup) or has another handler keeps it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    first: list[float] = []

    def stop(number: int, _: object) -> None:
        if not first:
            first.append(time.monotonic())
            raise KeyboardInterrupt if number == signal.SIGINT else Stopped(number)
        if time.monotonic() - first[0] > _AGAIN_S:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    plain = (signal.SIG_DFL, signal.default_int_handler)
    before = {n: handler for n in _SIGNALS if (handler := signal.getsignal(n)) in plain}
    for number in before:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_command(run: Callable[[Sequence[str]], int], words: Sequence[str]) -> int:
    """Run a command of a terminal; the exit code.

    Args:
        run: the command; its result is the exit code.
        words: of the command line.

    Returns:
        What `run` returned; 2 after a HoldfastError, an OSError or for a package that is not
        installed, printed as one line on standard error; 0 when the reader of the output has left;
        130 after Ctrl-C, and 128 and the signal's number after another one that stopped it.

    Raises:
        SystemExit: With code 2, after any other error, whose traceback is printed.
    """
    _open_standard_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):
        # File names need not be text; bytes that cannot be printed are shown as escapes.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        return run(list(words))
    except BrokenPipeError:
        return 0
    except KeyboardInterrupt:
        print_note("interrupted")
        return EXIT_INTERRUPTED
    except Stopped as stopped:
        print_note(f"stopped by {stopped}")
        return 128 + stopped.number
    except (HoldfastError, OSError) as error:
        print_error(error)
        return EXIT_MISTAKE
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0]
        print_error(f"this needs the package {name}, which is not installed: pip install {name}")
        return EXIT_MISTAKE
    except Exception:
        # Python would end with 1, which says that something stored is damaged.
        traceback.print_exc()
        print_error("the program failed, which says nothing of what is stored; please report this")
        raise SystemExit(EXIT_MISTAKE) from None
    finally:
        _flush()


def _open_standard_streams() -> None:
    """Give a process that was started with closed streams (`>&-`, some schedulers) ones to use.

    Otherwise the first file it opens gets their number, and what Python prints fails.
    """
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115


def _flush() -> None:
    """Write what is buffered, unless the reading end of the pipe (head, less) has closed it."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        # The interpreter flushes once more on its way out.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
