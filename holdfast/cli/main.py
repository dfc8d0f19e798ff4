"""Entry point of `holdfast`: dispatches to a command, and prints errors as one line.

Torch is imported only by commands that need it.
"""

from __future__ import annotations

import difflib
import io
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from holdfast.cli.support.messages import EXIT_INTERRUPTED, EXIT_MISTAKE, print_error
from holdfast.errors import ConfigError, HoldfastError
from holdfast.version import __version__

VERBS = {
    "train": "train the reference model, save and resume under any layout",
    "ls": "list the checkpoints in a directory",
    "show": "show what is in a checkpoint",
    "verify": "check every byte of a checkpoint",
    "diff": "compare two checkpoints, whatever their layouts",
    "view": "write one HTML page about a checkpoint and its run",
    "export": "write tensors as safetensors or npy files",
    "prune": "remove old checkpoints by a policy",
    "repair": "finish or remove what saves have left behind",
    "tag": "name steps, list and remove names",
}
"""Each command and what it is for."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line.

    Args:
        argv: the words after `holdfast`; default those of this process.

    Returns:
        The exit code: 0; 2 for a mistake or failure, explained on standard error; or the
        command's own.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # File names need not be text; bytes that cannot be printed are shown as escapes.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        return _run(words)
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


def _run(words: list[str]) -> int:
    """Run the command of these words; the exit code."""
    if not words or words[0] in ("-h", "--help", "help"):
        print(_usage())
        return 0
    if words[0] in ("-V", "--version"):
        print(f"holdfast {__version__}")
        return 0
    return _dispatch(words[0], words[1:])


def _flush() -> None:
    """Write what is buffered, unless the reading end of the pipe (head, less) has closed it."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        # The interpreter flushes once more on its way out.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _dispatch(verb: str, words: list[str]) -> int:
    """Import the module of a command and run it; the exit code."""
    if verb not in VERBS:
        raise _unknown(verb)
    if verb == "train":
        return int(import_module("holdfast_trainer.command").run_command(words))
    module = import_module(f"holdfast.cli.commands.{verb}")
    from holdfast.cli.support.arguments import parse_arguments

    args = parse_arguments(module.Args, words, prog=f"holdfast {verb}", about=VERBS[verb])
    return int(module.run(args))


def _unknown(verb: str) -> HoldfastError:
    """The error for a word that is no command."""
    near = difflib.get_close_matches(verb, VERBS, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(VERBS)}"
    return ConfigError(f"unknown command {verb!r}; {hint}")


def _usage() -> str:
    """The help text of `holdfast` itself."""
    width = max(map(len, VERBS))
    verbs = "\n".join(f"  {verb:<{width}}  {about}" for verb, about in VERBS.items())
    return (
        "usage: holdfast COMMAND [ARGUMENTS]\n\n"
        "Keeps the whole training state of a distributed PyTorch run safe.\n\n"
        f"commands:\n{verbs}\n\n"
        "holdfast COMMAND --help says what a command takes; holdfast --version, which version.\n\n"
        "exit codes: 0 done; 1 something stored is damaged, or two things differ; 2 a mistake\n"
        "or a failure, explained in one line; 128 + N stopped by signal N (130 for Ctrl-C)."
    )


if __name__ == "__main__":
    sys.exit(main())
