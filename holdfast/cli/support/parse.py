"""Flags of a dataclass, with mistakes as one line."""

from __future__ import annotations

import contextlib
import io
import re
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin

import tyro

from holdfast.cli.support.arguments import HELP, checked_words
from holdfast.errors import ConfigError

T = TypeVar("T")

_Spec = tyro.constructors.PrimitiveConstructorSpec[Any]

_COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_FRAME = re.compile(r"[╭╮╰╯│─┌┐└┘]")


def parse_flags(
    kind: type[T],
    words: Sequence[str],
    *,
    prog: str,
    about: str,
    default: T | None = None,
    is_reversible: bool = False,
    stray: str = "",
) -> T:
    """Read words into a dataclass; `--help` prints and exits.

    Args:
        kind: a dataclass; fields of nested dataclasses become flags without a prefix.
        words: the command line after the verb.
        prog: what the help text calls the command.
        about: one line of help.
        default: where values come from that no flag sets.
        is_reversible: whether the help lists `--x` and `--no-x` for each boolean, as where a file
            may set it. Both are understood anyway.
        stray: what to say about a word that belongs to nothing.

    Raises:
        ConfigError: an unknown flag, a missing or a malformed value; the same line on a terminal
            and through a pipe.
    """
    before = words[: words.index("--")] if "--" in words else words
    if any(word in HELP for word in before):
        plain = ["--help"]
    else:
        try:
            plain = checked_words(words, kind, stray=stray)
        except ConfigError as error:
            raise ConfigError(_with_help(str(error), prog)) from None
    return _filled(kind, plain, prog=prog, about=about, default=default, pairs=is_reversible)


def _filled(
    kind: type[T], words: list[str], *, prog: str, about: str, default: T | None, pairs: bool
) -> T:
    """The dataclass that checked words describe, or help and exit."""
    is_help = words == ["--help"]
    config: list[Any] = [tyro.conf.OmitArgPrefixes]
    config += [tyro.conf.FlagCreatePairsOff] if is_help and not pairs else []
    registry = tyro.constructors.ConstructorRegistry()
    registry.primitive_rule(_optional_values)
    text = io.StringIO()
    absent = tyro.MISSING_NONPROP
    try:
        with contextlib.redirect_stderr(text):
            return tyro.cli(
                kind,
                args=words,
                prog=prog,
                description=about,
                default=absent if default is None else default,
                config=config,
                registry=registry,
            )
    except SystemExit as stop:
        if not stop.code:
            raise
        # Not known to happen: whatever it has against words that are in order, on one line.
        plain = _FRAME.sub(" ", _COLOUR.sub("", text.getvalue()))
        raise ConfigError(_with_help(" ".join(plain.split()), prog)) from None


def _with_help(text: str, prog: str) -> str:
    return f"{text} See `{prog} --help`" if text.endswith("?") else f"{text}; see `{prog} --help`"


def _optional_values(info: tyro.constructors.PrimitiveTypeInfo) -> _Spec | None:
    """How `int | None` and its like are read and shown: as INT, without a word about None."""
    if get_origin(info.type) not in (Union, types.UnionType):
        return None
    members = [member for member in get_args(info.type) if member is not type(None)]
    if len(members) != 1 or members[0] not in (int, float, str, Path):
        return None
    kind: type = members[0]
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar=kind.__name__.upper(),
        instance_from_str=lambda words: (
            None if words[0] == "None" and kind is not str else kind(words[0])
        ),
        is_instance=lambda value: value is None or isinstance(value, kind),
        str_from_instance=lambda value: [str(value)],
    )
