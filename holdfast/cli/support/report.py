"""How the command says that something went wrong."""

from __future__ import annotations

import sys

EXIT_MISTAKE = 2
"""Exit code of a mistake or failure that was explained in one line."""

EXIT_INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it: 128 and the signal's number."""


def print_error(error: BaseException | str) -> None:
    """One line on standard error, whatever line breaks and control characters the message has."""
    text = clean(" ".join(str(error).split()))
    print(f"holdfast: error: {text}", file=sys.stderr, flush=True)


def clean(text: str) -> str:
    """Text from elsewhere made safe for a terminal: control characters become escapes."""
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode()
        for c in text
    )
