"""How the command says that something went wrong."""

from __future__ import annotations

import sys

EXIT_MISTAKE = 2
"""Exit code of a mistake or failure that was explained in one line."""


def print_error(error: BaseException | str) -> None:
    """One line on standard error, whatever line breaks the message has."""
    text = " ".join(str(error).split())
    print(f"holdfast: error: {text}", file=sys.stderr, flush=True)
