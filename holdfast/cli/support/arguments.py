"""The words of a command line, checked against the dataclass that they fill.

Every mistake is found here, before the library that makes the help text and the dataclass sees the
words: its own messages are framed, folded to the width of a terminal and coloured, and read
differently through a pipe.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import re
import textwrap
import types
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import tyro

from holdfast.errors import ConfigError

HELP = ("-h", "--help")

_NUMBER = re.compile(r"-(\d|\.\d|inf|nan)", re.IGNORECASE)
_POWER = re.compile(r"[+-]?\d{1,19}(\.\d{1,19})?[eE]\+?\d{1,2}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One field as the command line has it.

    `choices`: the only values there are; empty: any that `kind` can be made of. `kind`: `int`,
    `float`, `str` or `Path`. `is_required`: positional or not, without it there is nothing to do.
    """

    name: str
    kind: type
    choices: tuple[object, ...] = ()
    is_positional: bool = False
    is_required: bool = False
    is_flag: bool = False
    is_many: bool = False
    is_optional: bool = False

    @property
    def shown(self) -> str:
        """How it is named to people: --steps, or PATH for a positional argument."""
        return self.name.upper() if self.is_positional else f"--{self.name}"

    @property
    def needs(self) -> str:
        """What its value has to be, in words."""
        if self.choices:
            *most, last = map(str, self.choices)
            return f"{', '.join(most)} or {last}" if most else last
        return {int: "a whole number", float: "a number", Path: "a path"}.get(self.kind, "a value")

    def read(self, word: str) -> str:
        """The word as it is to be converted; ConfigError when it is no such value."""
        if self.is_optional and word == "None" and self.kind is not str:
            return word
        if self.choices:
            if word in map(str, self.choices):
                return word
            near = difflib.get_close_matches(word, map(str, self.choices), n=1)
            raise self._refuse(word, f"; did you mean {near[0]}?" if near else "")
        if self.kind is int:
            return self._whole(word)
        if self.kind is float:
            try:
                float(word)
            except ValueError:
                raise self._refuse(word) from None
        if self.kind is Path and not word:
            raise ConfigError(f"{self.shown} is empty: it needs a path (an unset variable?)")
        if "\0" in word:
            raise self._refuse(word)
        return word

    def _whole(self, word: str) -> str:
        try:
            if _POWER.fullmatch(word):  # 1e5, as people write step counts
                number = float(word)
                if number != int(number):
                    raise ValueError
                return str(int(number))
            return str(int(word))
        except ValueError:
            raise self._refuse(word) from None

    def _refuse(self, word: str, hint: str = "") -> ConfigError:
        return ConfigError(f"{self.shown} needs {self.needs}, not {word!r}{hint}")


def options_of(kind: Any) -> list[Option]:
    """The options of a dataclass, those of the dataclasses inside of it included."""
    hints = get_type_hints(kind, include_extras=True)
    found: list[Option] = []
    for field in fields(kind):
        if is_dataclass(hints[field.name]):
            found += options_of(hints[field.name])
        else:
            required = field.default is MISSING and field.default_factory is MISSING
            found.append(_option(field.name, hints[field.name], is_required=required))
    return found


def _option(name: str, hint: Any, *, is_required: bool) -> Option:
    is_positional = False
    if get_origin(hint) is Annotated:
        hint, *notes = get_args(hint)
        is_positional = tyro.conf.Positional in notes
    is_optional = get_origin(hint) in (Union, types.UnionType)
    if is_optional:
        (hint,) = (member for member in get_args(hint) if member is not type(None))
    is_many = get_origin(hint) is tuple
    if is_many:
        hint = get_args(hint)[0]
    choices = get_args(hint) if get_origin(hint) is Literal else ()
    return Option(
        name=name.replace("_", "-"),
        kind=type(choices[0]) if choices else hint,
        choices=choices,
        is_positional=is_positional,
        is_required=is_required,
        is_flag=hint is bool,
        is_many=is_many,
        is_optional=is_optional,
    )


def checked_words(words: Sequence[str], kind: type, *, stray: str = "") -> list[str]:
    """The same command line in one plain form: positional words first, then options.

    Args:
        words: after the verb, without a request for help.
        kind: the dataclass that they fill.
        stray: what to say about a word that belongs to nothing.

    Raises:
        ConfigError: an unknown option, a missing, unwanted or malformed value, or a word too many;
            one line with what, where and what to do.
    """
    options = options_of(kind)
    plain, missing = _Reading(options, stray=stray).read(words)
    if missing:
        raise ConfigError(f"missing {' and '.join(map(partial(_in_full, kind), missing))}")
    return plain


def _in_full(kind: type, option: Option) -> str:
    """A missing argument and what it is for, as its dataclass says."""
    about = " ".join(_docstring(kind, option.name.replace("-", "_")).split()).rstrip(".")
    return f"{option.shown} ({about or option.needs})"


def _docstring(kind: type, name: str) -> str:
    """The string below a field of a dataclass; empty where the source is not at hand."""
    try:
        body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
    except (OSError, SyntaxError):
        return ""
    lines = body.body if isinstance(body, ast.ClassDef) else []
    for field, below in pairwise(lines):
        if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)):
            continue
        if field.target.id != name or not isinstance(below, ast.Expr):
            continue
        if isinstance(below.value, ast.Constant) and isinstance(below.value.value, str):
            return below.value.value
    return ""


class _Reading:
    """One pass over a command line."""

    def __init__(self, options: Sequence[Option], *, stray: str) -> None:
        self._named = {f"--{option.name}": option for option in options if not option.is_positional}
        self._positional = [option for option in options if option.is_positional]
        self._flags = {
            spelt: option
            for option in options
            if option.is_flag
            for spelt in (f"--{option.name}", f"--no-{option.name}")
        }
        self._stray = stray
        self._placed: list[str] = []
        self._given: dict[str, list[str]] = {}

    def read(self, words: Sequence[str]) -> tuple[list[str], list[Option]]:
        """The checked words, and the required arguments that are not among them."""
        rest = list(words)
        while rest:
            word = rest.pop(0)
            if word == "--":
                for plain in rest:
                    self._place(plain)
                break
            if _is_option(word):
                self._option(word, rest)
            else:
                self._place(word)
        named = [part for given in self._given.values() for part in given]
        return [*self._placed, *named], self._missing()

    def _option(self, word: str, rest: list[str]) -> None:
        written, equals, value = word.partition("=")
        name = "--" + written[2:].replace("_", "-") if written.startswith("--") else written
        if name in self._flags:
            if equals:
                raise ConfigError(f"{name} takes no value: write {name} alone, or leave it out")
            self._given[self._flags[name].name] = [name]
            return
        option = self._named.get(name)
        if option is None:
            raise ConfigError(f"unknown option {written}{self._hint(name)}")
        values = [value] if equals else list(_taken(rest, is_many=option.is_many))
        if not values:
            what = "one value or several" if option.is_many else option.needs
            raise ConfigError(f"{name} needs {what} after it")
        self._given[option.name] = [name, *map(option.read, values)]
        if not option.is_many:  # one word, so that a negative number is not an option
            self._given[option.name] = [f"{name}={option.read(values[0])}"]

    def _place(self, word: str) -> None:
        if len(self._placed) == len(self._positional):
            wanted = " ".join(option.shown for option in self._positional)
            taken = f"only {wanted} is taken" if wanted else "only options are taken"
            raise ConfigError(f"unexpected {word!r}: {self._stray or taken}")
        option = self._positional[len(self._placed)]
        read = option.read(word)
        # As a relative path it begins with ./, so that nothing takes it for an option.
        self._placed.append(f"./{read}" if read.startswith("-") and option.kind is Path else read)

    def _missing(self) -> list[Option]:
        missing = [option for option in self._positional[len(self._placed) :] if option.is_required]
        for option in self._named.values():
            if missing and option.is_many and option.name in self._given:
                raise ConfigError(
                    f"missing {missing[0].shown}: {option.shown} took all words after it; put "
                    f"{missing[0].shown} before {option.shown}"
                )
            if option.is_required and option.name not in self._given:
                missing.append(option)
        return missing

    def _hint(self, name: str) -> str:
        names = [*self._named, *(self._flags if name.startswith("--no") else ())]
        if name.startswith("-") and not name.startswith("--") and f"-{name}" in names:
            return f"; did you mean -{name}?"
        near = difflib.get_close_matches(name, names, n=3, cutoff=0.65)
        if not near:
            near = [known for known in names if name[2:] and known[2:].startswith(name[2:])][:3]
        return f"; did you mean {' or '.join(near)}?" if near else ""


def _is_option(word: str) -> bool:
    return word.startswith("-") and word != "-" and not _NUMBER.match(word)


def _taken(rest: list[str], *, is_many: bool) -> Iterator[str]:
    """Take the values of an option off the front of the other words."""
    while rest and not _is_option(rest[0]):
        yield rest.pop(0)
        if not is_many:
            return
