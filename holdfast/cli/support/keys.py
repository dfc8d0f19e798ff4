"""Which tensors a pattern on the command line stands for, and what to say when there are none."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from holdfast.errors import ConfigError
from holdfast.format.reader import Snapshot
from holdfast.format.values import tensor_paths

_MAX_COMPARED = 10_000
"""Names among which a mistyped one is looked for."""


def other_names(snapshot: Snapshot) -> dict[str, str]:
    """Return by name the key of the tensor for each name that is not a key: of tied tensors.

    Cost: a walk of the stored tree.
    """
    return {
        path: key
        for part, node in snapshot.manifest.parts.items()
        for path, key in tensor_paths(node, part)
        if not snapshot.has(path)
    }


def select_keys(
    pattern: str, keys: Sequence[str], others: Mapping[str, str] = MappingProxyType({})
) -> list[str]:
    """The keys of tensors with a name that equals a pattern, or matches it (`*`, `?`).

    Keys contain brackets of their own (one per coordinate), so "[" stands for itself.

    Args:
        pattern: Name or pattern.
        keys: Of the tensors; each is a name of its tensor.
        others: By further name of a tensor its key.

    Raises:
        ConfigError: no name matches; it names near ones, or the pattern that was probably meant.
    """
    if pattern in keys:
        return [pattern]
    names = {**others, **dict(zip(keys, keys, strict=True))}
    glob = pattern.replace("[", "[[]")
    chosen = {key for name, key in names.items() if fnmatch.fnmatchcase(name, glob)}
    if not chosen:
        hint = _suggestion(pattern, [*keys, *others][:_MAX_COMPARED])
        raise ConfigError(f"no tensor matches {pattern!r}{hint}")
    return [key for key in keys if key in chosen]


def _suggestion(pattern: str, keys: Sequence[str]) -> str:
    """Return what the writer of a pattern without a match may have meant."""
    stem = pattern.strip("*?").lower()
    inside = [key for key in keys if stem and stem in key.lower()]
    if inside and stem != "" and not set("*?") & set(stem):
        start = inside[0].lower().index(stem)
        cased = inside[0][start : start + len(stem)]
        if all(cased in key for key in inside):
            more = "" if len(inside) == 1 else f" and {len(inside) - 1:,} more"
            return f"; the pattern '*{cased}*' matches {inside[0]}{more}"
    near = difflib.get_close_matches(pattern, keys, n=3)
    if near:
        return f"; did you mean {' or '.join(near)}?"
    words = sorted({word for key in keys for word in key.split(".") if not word.isdigit()})
    near = difflib.get_close_matches(stem, words[:_MAX_COMPARED], n=3)
    if near:
        return f"; did you mean {' or '.join(repr(f'*{word}*') for word in near)}?"
    return f"; there are {', '.join(keys[:3])}{', …' if len(keys) > 3 else ''}" if keys else ""
