"""Patterns of names: text with named wildcards, which match parts of a name and fill others in.

    model.layers.{layer:int}.self_attn.{which:q|k|v}_proj.weight

`{name}` matches letters, digits and underscores; `{name:int}` a number without leading zeros;
`{name:a|b}` one of these texts; `{name:path}` anything, dots too. Nothing else is special.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cached_property

from holdfast.errors import ConfigError

_WILDCARD = re.compile(r"\{([A-Za-z_]\w*)(?::([^{}]*))?\}")
_KINDS = {"name": r"[A-Za-z0-9_]+", "int": r"0|[1-9][0-9]*", "path": r".+"}


class NamePattern:
    """A pattern of names.

    Args:
        text: As above. A wildcard that is in it twice stands for the same text.
        kinds: Of wildcards that the text has without one, from another pattern of the rule.

    Raises:
        ConfigError: It is malformed, or gives a wildcard two kinds.
    """

    def __init__(self, text: str, kinds: Mapping[str, str] | None = None) -> None:
        self.kinds: dict[str, str] = {}
        pieces: list[tuple[str, str]] = []
        end = 0
        for match in _WILDCARD.finditer(text):
            name, kind = match.group(1), match.group(2)
            self._add_kind(text, name, kind, (kinds or {}).get(name))
            pieces.append((text[end : match.start()], name))
            end = match.end()
        self._pieces, self._tail = pieces, text[end:]
        literal = "".join(piece for piece, _ in pieces) + self._tail
        if not text or "{" in literal or "}" in literal:
            raise ConfigError(
                f"pattern {text!r} is malformed: a wildcard is {{name}}, {{name:int}}, "
                f"{{name:path}} or {{name:one|other}}"
            )

    def _add_kind(self, text: str, name: str, kind: str | None, other: str | None) -> None:
        known = self.kinds.get(name) or other
        if kind is not None and known not in (None, kind):
            raise ConfigError(f"pattern {text!r}: wildcard {name!r} is both {known!r} and {kind!r}")
        kind = kind or known or "name"
        if kind not in _KINDS and not all(
            re.fullmatch(r"[\w.-]+", each) for each in kind.split("|")
        ):
            raise ConfigError(f"pattern {text!r}: {kind!r} is not a kind of wildcard")
        self.kinds[name] = kind

    @property
    def wildcards(self) -> frozenset[str]:
        """The names of the wildcards."""
        return frozenset(self.kinds)

    @property
    def text(self) -> str:
        """The pattern as it is written, each wildcard with its kind."""
        marks = {
            name: f"{{{name}}}" if kind == "name" else f"{{{name}:{kind}}}"
            for name, kind in self.kinds.items()
        }
        return "".join(f"{before}{marks[name]}" for before, name in self._pieces) + self._tail

    def __repr__(self) -> str:
        """Return the text."""
        return self.text

    def __eq__(self, other: object) -> bool:
        """Return True if the other has the same text."""
        return isinstance(other, NamePattern) and self.text == other.text

    def __hash__(self) -> int:
        """Return the hash of the text."""
        return hash(self.text)

    @cached_property
    def _regex(self) -> re.Pattern[str]:
        seen: set[str] = set()
        parts = []
        for before, name in self._pieces:
            kind = self.kinds[name]
            choice = _KINDS.get(kind) or "|".join(map(re.escape, kind.split("|")))
            parts.append(
                re.escape(before) + (f"(?P={name})" if name in seen else f"(?P<{name}>{choice})")
            )
            seen.add(name)
        return re.compile("".join(parts) + re.escape(self._tail))

    def match(self, name: str) -> dict[str, str] | None:
        """Return what the wildcards stand for in a name; None if it does not match."""
        match = self._regex.fullmatch(name)
        return None if match is None else match.groupdict()

    def fill(self, values: Mapping[str, str]) -> str:
        """Return the name in which the wildcards stand for these texts."""
        return "".join(f"{before}{values[name]}" for before, name in self._pieces) + self._tail
