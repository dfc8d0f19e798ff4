"""The `holdfast` command, and what a distribution needs that adds a command to it.

`main.py` runs the file of a verb in `commands/`, or an entry point of the group
`holdfast.commands`: a function that takes the words after its name and returns the exit code. With
the names below its options, errors and exit codes are the same as those of the verbs here.

All verbs here but `view` work without torch, so that they answer at once. What verbs share is in
`support/`, the page of `view` is made in `page/`.

Read first: `main.py`, `commands/show.py`.
"""

from holdfast.cli.support.arguments import POSITIONAL, parse_arguments
from holdfast.cli.support.messages import EXIT_MISTAKE, print_error
from holdfast.cli.support.running import run_command

__all__ = ["EXIT_MISTAKE", "POSITIONAL", "parse_arguments", "print_error", "run_command"]
