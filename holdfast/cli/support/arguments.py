"""Command lines made from dataclasses: each field is an option, its docstring the help text.

argparse parses the words and lays out the help text. Every mistake is a `ConfigError` of one line,
the same on a terminal and through a pipe, that names the option, what it needs and what was meant.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import inspect
import re
import sys
import textwrap
import types
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import (
    Annotated,
    Any,
    Literal,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from holdfast.errors import ConfigError
from holdfast.storage.places import check_place

T = TypeVar("T")

POSITIONAL = "positional"
"""Annotation of a field that is given by its position: `path: Annotated[Path, POSITIONAL]`."""

_HELP = ("-h", "--help")
_NUMBER = re.compile(r"-(\d|\.\d|inf|nan)", re.IGNORECASE)
_POWER = re.compile(r"[+-]?\d{1,19}(\.\d{1,19})?[eE]\+?\d{1,2}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One field of a dataclass as the command line has it."""

    field: str
    """Name of the field; the option's has dashes for its underscores."""
    kind: type
    """`int`, `float`, `str`, `Path` or, for a flag, `bool`."""
    owner: type
    """The dataclass that has the field."""
    section: str
    """Name of the field that has the owner, where dataclasses are nested; else ""."""
    default: object
    """`MISSING` where the command needs a value."""
    choices: tuple[object, ...] = ()
    """The only values there are; empty: any that `kind` can be made of."""
    is_positional: bool = False
    is_many: bool = False
    is_optional: bool = False

    @property
    def shown(self) -> str:
        """Return how messages name it: --steps, or PATH for a positional argument."""
        name = self.field.rstrip("_").replace("_", "-")
        return name.upper() if self.is_positional else f"--{name}"

    @property
    def metavar(self) -> str:
        """Return what the help text shows for its value."""
        if self.choices:
            return f"{{{','.join(map(str, self.choices))}}}"
        return self.shown if self.is_positional else self.kind.__name__.upper()

    @property
    def needs(self) -> str:
        """Return what its value has to be, in words."""
        if self.choices:
            *most, last = map(str, self.choices)
            return f"{', '.join(most)} or {last}" if most else last
        return {int: "a whole number", float: "a number", Path: "a path"}.get(self.kind, "a value")

    def convert(self, word: str) -> object:
        """The value that a word stands for; ConfigError if it stands for no value."""
        if self.is_optional and word == "None" and self.kind is not str:
            return None
        if self.choices:
            for choice in self.choices:
                if word == str(choice):
                    return choice
            near = difflib.get_close_matches(word, map(str, self.choices), n=1)
            raise self._refuse(word, f"; did you mean {near[0]}?" if near else "")
        if self.kind is Path and not word:
            raise ConfigError(f"{self.shown} is empty: it needs a path (an unset variable?)")
        try:
            if "\0" in word:
                raise ValueError
            value = _whole_number(word) if self.kind is int else self.kind(word)
        except ValueError:
            raise self._refuse(word) from None
        if self.kind is Path:
            check_place(word)  # a shell leaves the ~ of --out=~/page.html to the program
        return value

    def _refuse(self, word: str, hint: str = "") -> ConfigError:
        return ConfigError(
            f"{self.shown} needs {self.needs}, not {word!r}{hint}", details={"hint": hint}
        )


def _whole_number(word: str) -> int:
    """An int; also one written as a power, 1e5, which is usual for numbers of steps."""
    if not _POWER.fullmatch(word):
        return int(word)
    number = float(word)
    if number != int(number):
        raise ValueError
    return int(number)


def options_of(kind: Any, default: object = None, *, section: str = "") -> list[Option]:
    """The options of a dataclass, those of nested dataclasses included.

    Args:
        kind: the dataclass.
        default: an instance with the values of options that are not given; absent: those of its
            fields.
        section: name of the field that has the dataclass; "" for the outermost.
    """
    hints = get_type_hints(kind, include_extras=True)
    options: list[Option] = []
    for field in fields(kind):
        hint = hints[field.name]
        value = getattr(default, field.name, field.default)
        if is_dataclass(hint):
            options += options_of(hint, value, section=field.name)
        else:
            options.append(_option(field.name, hint, value, owner=kind, section=section))
    return options


def _option(name: str, hint: Any, default: object, *, owner: type, section: str) -> Option:
    """One field as an option."""
    is_positional = False
    if get_origin(hint) is Annotated:
        hint, *notes = get_args(hint)
        is_positional = POSITIONAL in notes
    is_optional = get_origin(hint) in (Union, types.UnionType)
    if is_optional:
        (hint,) = (member for member in get_args(hint) if member is not type(None))
    is_many = get_origin(hint) is tuple
    if is_many:
        hint = get_args(hint)[0]
    choices = get_args(hint) if get_origin(hint) is Literal else ()
    return Option(
        field=name,
        kind=type(choices[0]) if choices else hint,
        owner=owner,
        section=section,
        default=default,
        choices=choices,
        is_positional=is_positional,
        is_many=is_many,
        is_optional=is_optional,
    )


def _docstrings(kind: type) -> dict[str, str]:
    """The string below each field of a dataclass, on one line; "" where the source is missing."""
    texts = {field.name: "" for field in fields(cast("Any", kind))}
    try:
        body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
    except (OSError, SyntaxError):
        return texts
    for field, below in pairwise(body.body if isinstance(body, ast.ClassDef) else []):
        match field, below:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                texts[name] = " ".join(text.split())
    return texts


def parse_arguments(
    kind: type[T],
    words: Sequence[str],
    *,
    prog: str,
    about: str,
    default: T | None = None,
    has_pairs: bool = False,
    stray: str = "",
) -> T:
    """Read a command line into a dataclass; `--help` prints and exits.

    Args:
        kind: a dataclass; fields of nested dataclasses become options without a prefix.
        words: the command line after the command's name.
        prog: what the help text calls the command.
        about: what the command does, in the first lines of help.
        default: values of the options that are not given; needed where dataclasses are nested.
        has_pairs: whether the help lists `--x` and `--no-x` for each boolean, because a file may
            set it. Both are understood in any case.
        stray: what to say about a word that belongs to nothing.

    Raises:
        ConfigError: an unknown option, a missing, unwanted or malformed value, or a word too many;
            one line with what, where and what to do.
    """
    if any(word in _HELP for word in (words[: words.index("--")] if "--" in words else words)):
        print(_help(kind, prog=prog, about=about, default=default, has_pairs=has_pairs), end="")
        sys.exit(0)
    try:
        values = _values(options_of(kind, default), words, stray=stray)
    except ConfigError as error:
        see = f"See `{prog} --help`"
        raise ConfigError(
            f"{error} {see}" if error.details.get("hint") else f"{error}; {see.lower()}"
        ) from None
    return kind(**values) if default is None else _replaced(default, values)


def _values(options: Sequence[Option], words: Sequence[str], *, stray: str) -> dict[str, object]:
    """Return the values that were given, by field; ConfigError if a required one is missing."""
    ahead = list(words)
    end = ahead.index("--") if "--" in ahead else len(ahead)
    values, others = _Parser(options).parse(ahead[:end])
    values |= _placed([*others, *ahead[end + 1 :]], options, stray=stray)
    _check_required(options, values)
    return values


def _replaced(default: Any, values: dict[str, object]) -> Any:
    """A copy of a dataclass, and of those inside of it, with other values in the fields named."""
    changes = {}
    for field in fields(default):
        value = getattr(default, field.name)
        if is_dataclass(value):
            changes[field.name] = _replaced(value, values)
        elif field.name in values:
            changes[field.name] = values[field.name]
    return replace(default, **changes)


class _Convert(argparse.Action):
    """Converts the value of an option where it is written, so that no mistake is overwritten."""

    def __init__(
        self, option_strings: Sequence[str], dest: str, *, option: Option, **settings: Any
    ) -> None:
        super().__init__(option_strings, dest, **settings)
        self._option = option

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Keep the value; argparse would replace a ConfigError of `type=` by its own message."""
        convert = self._option.convert
        many = self._option.is_many
        setattr(namespace, self.dest, tuple(map(convert, values)) if many else convert(values))


class _Parser(argparse.ArgumentParser):
    """Options alone: words by position are what argparse does not know, in their order."""

    def __init__(self, options: Sequence[Option]) -> None:
        super().__init__(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
        # The default is True: argparse would print its own message and end the process.
        self.exit_on_error = False
        # argparse takes -1 for a number, but -1e3 and -inf for options.
        self._negative_number_matcher = _NUMBER
        self._by_name = {option.shown: option for option in options if not option.is_positional}
        self._switches = {
            f"--no-{name[2:]}": option
            for name, option in self._by_name.items()
            if option.kind is bool
        }
        for name, option in self._by_name.items():
            if option.kind is bool:
                self.add_argument(name, dest=option.field, action="store_true")
            else:
                nargs = "+" if option.is_many else None
                self.add_argument(
                    name, dest=option.field, action=_Convert, option=option, nargs=nargs
                )
        for name, option in self._switches.items():
            self.add_argument(name, dest=option.field, action="store_false")

    def parse(self, words: Sequence[str]) -> tuple[dict[str, object], list[str]]:
        """Return the values of options by field, and the words that belong to none."""
        try:
            given, others = self.parse_known_args(list(map(self._prepared, words)))
        except argparse.ArgumentError as error:  # a value for a flag, or an option without one
            name = str(error.argument_name)
            option = self._by_name.get(name)
            if option is None or option.kind is bool:
                raise ConfigError(
                    f"{name} takes no value: write {name} alone, or leave it out"
                ) from None
            needs = "one value or several" if option.is_many else option.needs
            raise ConfigError(f"{name} needs {needs} after it") from None
        for word in others:
            if _is_option(word):
                raise self._unknown(word)
        return vars(given), others

    def _prepared(self, word: str) -> str:
        """Return a word as argparse is to read it: --a_b is --a-b.

        Raises:
            ConfigError: An unknown option has a space in it, which argparse would take for a value:
                `--save "$OPTIONS"`.
        """
        name, equals, value = word.partition("=")
        known = name.replace("_", "-") if name.startswith("--") else name
        if known in self._by_name or known in self._switches:
            return f"{known}{equals}{value}"
        if _is_option(word) and " " in word:
            raise self._unknown(word)
        return word

    def _unknown(self, word: str) -> ConfigError:
        """Return the error for an option that does not exist."""
        name = word.partition("=")[0]
        hint = self._hint(name.replace("_", "-"))
        return ConfigError(f"unknown option {name}{hint}", details={"hint": hint})

    def _hint(self, name: str) -> str:
        """Return what the writer of an unknown option may have meant; empty if nothing is near."""
        names = [*self._by_name, *(self._switches if name.startswith("--no") else ())]
        if name.startswith("-") and not name.startswith("--") and f"-{name}" in names:
            return f"; did you mean -{name}?"
        near = difflib.get_close_matches(name, names, n=3, cutoff=0.65)
        if not near:
            near = [known for known in names if name[2:] and known[2:].startswith(name[2:])][:3]
        return f"; did you mean {' or '.join(near)}?" if near else ""


def _placed(words: Sequence[str], options: Sequence[Option], *, stray: str) -> dict[str, object]:
    """Return the values that words stand for by their position, by field."""
    positional = [option for option in options if option.is_positional]
    if len(words) > len(positional):
        names = " ".join(option.shown for option in positional)
        taken = f"only {names} is taken" if names else "only options are taken"
        raise ConfigError(f"unexpected {words[len(positional)]!r}: {stray or taken}")
    return {o.field: o.convert(word) for o, word in zip(positional, words, strict=False)}


def _check_required(options: Sequence[Option], values: Mapping[str, object]) -> None:
    """Raise ConfigError that names every missing option, with its help text."""
    missing = [o for o in options if o.default is MISSING and o.field not in values]
    missing.sort(key=lambda option: not option.is_positional)
    if not missing:
        return
    for option in options if missing[0].is_positional else ():
        if option.is_many and option.field in values:
            name = missing[0].shown
            raise ConfigError(
                f"missing {name}: {option.shown} took all words after it; put {name} before "
                f"{option.shown}"
            )
    about = {owner: _docstrings(owner) for owner in {option.owner for option in missing}}
    names = [f"{o.shown} ({about[o.owner][o.field].rstrip('.')})" for o in missing]
    raise ConfigError(f"missing {' and '.join(names)}")


def _is_option(word: str) -> bool:
    """Return True if a word is an option, and not a negative number or "-"."""
    return word.startswith("-") and word != "-" and not _NUMBER.match(word)


def _help(kind: type, *, prog: str, about: str, default: object, has_pairs: bool) -> str:
    """The help text, with a section for each nested dataclass; as wide as the terminal."""
    options = options_of(kind, default)
    names = [
        option.shown if option.default is MISSING else f"[{option.shown}]"
        for option in options
        if option.is_positional
    ]
    usage = " ".join([prog, *names, "[OPTIONS]"])
    parser = argparse.ArgumentParser(prog=prog, usage=usage, description=about, add_help=False)
    sections = {"": parser.add_argument_group("arguments")}
    sections[""].add_argument(*_HELP, action="help", help="show this text and exit")
    texts = {owner: _docstrings(owner) for owner in {kind, *(option.owner for option in options)}}
    for option in options:
        if option.section not in sections:
            about_section = texts[kind][option.section]
            sections[option.section] = parser.add_argument_group(option.section, about_section)
        text = texts[option.owner][option.field].replace("%", "%%")
        shown: list[str] = [option.shown]
        form: dict[str, Any] = {"metavar": option.metavar, "nargs": "+" if option.is_many else None}
        if option.kind is bool:
            shown += [f"--no-{option.shown[2:]}"] if has_pairs else []
            form = {"action": "store_true"}
        if option.default is MISSING:
            text += " (required)"
        elif option.default not in (None, ()) and (has_pairs or option.kind is not bool):
            text += f" (default: {option.default})"
        sections[option.section].add_argument(*shown, help=text, **form)
    return parser.format_help()
