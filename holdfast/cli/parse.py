"""Flags of a dataclass, with mistakes as one line."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Sequence
from typing import TypeVar

import tyro

from holdfast.errors import ConfigError

T = TypeVar("T")

_FRAME = "╭╮╰╯│─"


def parse_flags(
    kind: type[T], words: Sequence[str], *, prog: str, about: str, default: T | None = None
) -> T:
    """Read words into a dataclass; `--help` prints and exits.

    Args:
        kind: a dataclass; fields of nested dataclasses become flags without a prefix, and a
            boolean becomes one flag that turns its default round (`--no-x` for true).
        words: the command line after the verb.
        prog: what the help text calls the command.
        about: one line of help.
        default: where values come from that no flag sets.

    Raises:
        ConfigError: an unknown flag, a missing or a malformed value.
    """
    config = (tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff)
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            if default is None:
                return tyro.cli(kind, args=words, prog=prog, description=about, config=config)
            return tyro.cli(
                kind, args=words, prog=prog, description=about, config=config, default=default
            )
    except SystemExit as stop:
        if not stop.code:
            raise
        raise ConfigError(f"{_first_sentences(said.getvalue())}; see `{prog} --help`") from None


def _first_sentences(box: str) -> str:
    """What tyro's framed message says before its first ruler, as one line.

    The nearest flags that it lists after the ruler are added in brackets.
    """
    lines = [line.strip(_FRAME + " ") for line in box.splitlines()]
    said, hints = [], []
    is_hint = False
    for raw, line in zip(box.splitlines(), lines, strict=True):
        if raw.startswith(("╭", "╰")):
            continue
        is_hint = is_hint or set(raw.strip("│ ")) == {"─"}
        if not is_hint and line:
            said.append(line)
        elif line.startswith("--"):
            hints.append(re.split(r"[ ,]", line)[0])
    text = " ".join(said) or "the command line cannot be read"
    text = re.sub(r"^Error parsing [\w.]+: (?=--)", "", text)
    text = re.sub(
        r"Error parsing (--\S+): (?:invalid literal for int.*|could not convert string to float): "
        r"(?='[^']*'$)",
        r"\1 needs a number, not ",
        text,
    )
    new = [hint for hint in hints if not re.search(rf"{hint}(?![\w-])", text)]
    return text + (f" (did you mean {' or '.join(new[:3])}?)" if new else "")
