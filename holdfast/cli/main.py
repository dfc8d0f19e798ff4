"""Entry point of `holdfast`: dispatches to a command, and prints errors as one line.

Torch is imported only by commands that need it. Other distributions add commands as entry points
of the group `holdfast.commands`.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING

from holdfast.cli.support.arguments import parse_arguments
from holdfast.cli.support.messages import EXIT_DAMAGED, EXIT_MISTAKE, print_error
from holdfast.cli.support.running import run_command, stopping_cleanly
from holdfast.errors import ConfigError, CorruptionError, HoldfastError
from holdfast.version import __version__

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

VERBS = {
    "ls": "list the checkpoints in a directory",
    "show": "show what is in a checkpoint",
    "verify": "check every byte of a checkpoint",
    "diff": "compare two checkpoints, whatever their layouts",
    "view": "write one HTML page about a checkpoint and its run",
    "copy": "copy a checkpoint to another disk or bucket, byte for byte",
    "convert": "write a checkpoint in another format",
    "export": "write tensors as safetensors or npy files",
    "prune": "remove old checkpoints by a policy",
    "faults": "show which faults a run had, on which devices, and what to do",
    "repair": "finish or remove what saves have left behind",
    "tag": "name steps, list and remove names",
}
"""Each command and what it is for."""

_ABOUT_THE_RUN = {"faults"}
"""Commands whose own exit codes are about a run, not about what is stored."""

COMMANDS_GROUP = "holdfast.commands"
"""Entry points of other distributions: `run(words) -> int`, the words after the command's name."""

_ELSEWHERE = {
    "train": "the reference trainer is its own distribution, holdfast-trainer, which is not "
    "installed; from a checkout: pip install ./trainer"
}
"""Commands that people know, and where to get them."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line.

    Args:
        argv: the words after `holdfast`; default those of this process.

    Returns:
        The exit code: 0; 1 after a CorruptionError and 2 for another mistake or failure, explained
        on standard error; or the command's own.
    """
    return run_command(_run, sys.argv[1:] if argv is None else argv)


def _run(words: Sequence[str]) -> int:
    """Run the command of these words; the exit code."""
    if not words or words[0] in ("-h", "--help", "help"):
        print(_usage())
        return 0
    if words[0] in ("-V", "--version"):
        print(f"holdfast {__version__}")
        return 0
    return _dispatch(words[0], list(words[1:]))


def _dispatch(verb: str, words: list[str]) -> int:
    """Import the module of a command and run it; the exit code."""
    if verb not in VERBS:
        return _dispatch_elsewhere(verb, words)
    module = import_module(f"holdfast.cli.commands.{verb}")
    about = " ".join((module.Args.__doc__ or VERBS[verb]).split())
    args = parse_arguments(module.Args, words, prog=f"holdfast {verb}", about=about)
    with stopping_cleanly():
        try:
            return int(module.run(args))
        except CorruptionError as error:
            print_error(error)
            return EXIT_MISTAKE if verb in _ABOUT_THE_RUN else EXIT_DAMAGED


def _dispatch_elsewhere(verb: str, words: list[str]) -> int:
    """Run a command of another distribution; the exit code."""
    installed = _installed_commands()
    if verb in installed:
        return int(installed[verb].load()(words))
    if verb in _ELSEWHERE:
        raise ConfigError(f"holdfast {verb}: {_ELSEWHERE[verb]}")
    raise _unknown(verb, [*VERBS, *_ELSEWHERE, *installed])


def _installed_commands() -> dict[str, EntryPoint]:
    """The commands of other distributions, by name.

    Cost: looks into every installed distribution, so only help and words that are not ours do it.
    """
    from importlib.metadata import entry_points

    return {point.name: point for point in entry_points(group=COMMANDS_GROUP)}


def _unknown(verb: str, known: Sequence[str]) -> HoldfastError:
    """The error for a word that names no command."""
    near = difflib.get_close_matches(verb, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(dict.fromkeys(known))}"
    return ConfigError(f"unknown command {verb!r}; {hint}")


def _usage() -> str:
    """The help text of `holdfast` itself."""
    commands = dict(VERBS)
    for name, point in _installed_commands().items():
        commands.setdefault(name, point.dist.metadata["Summary"] if point.dist else "")
    width = max(map(len, commands))
    verbs = "\n".join(f"  {verb:<{width}}  {about}" for verb, about in commands.items())
    return (
        "usage: holdfast COMMAND [ARGUMENTS]\n\n"
        "Keeps the whole training state of a distributed PyTorch run safe.\n\n"
        f"commands:\n{verbs}\n\n"
        "holdfast COMMAND --help says what a command takes; holdfast --version, which version.\n\n"
        "exit codes: 0 done; 1 something stored is damaged, or two things differ; 2 a mistake\n"
        "or a failure, explained in one line; 128 + N stopped by signal N (130 for Ctrl-C);\n"
        "faults: 16 to 21, what the newest job of a run has ended with."
    )


if __name__ == "__main__":
    sys.exit(main())
