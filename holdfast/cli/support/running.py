"""Run a command so that every way it can end is an exit code, and an error one line."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Sequence

from holdfast.cli.support.messages import EXIT_INTERRUPTED, EXIT_MISTAKE, print_error
from holdfast.errors import HoldfastError


def run_command(run: Callable[[Sequence[str]], int], words: Sequence[str]) -> int:
    """Run a command of a terminal; the exit code.

    Args:
        run: the command; its result is the exit code.
        words: of the command line.

    Returns:
        What `run` returned; 2 after a HoldfastError or OSError, which is printed as one line on
        standard error; 0 when the reader of the output has left; 130 after Ctrl-C.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        # File names need not be text; bytes that cannot be printed are shown as escapes.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        return run(list(words))
    except BrokenPipeError:
        return 0
    except KeyboardInterrupt:
        print("holdfast: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except (HoldfastError, OSError) as error:
        print_error(error)
        return EXIT_MISTAKE
    finally:
        _flush()


def _flush() -> None:
    """Write what is buffered, unless the reading end of the pipe (head, less) has closed it."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        # The interpreter flushes once more on its way out.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
