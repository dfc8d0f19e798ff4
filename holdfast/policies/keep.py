"""What to keep: small policies that choose which checkpoints stay, joined with `|`."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

import numpy as np

from holdfast.arguments import (
    check_choice,
    check_instance,
    check_int,
    check_number,
    check_patterns,
)
from holdfast.errors import CorruptionError, HoldfastError
from holdfast.format.values import SETS, Node, decode_tree, is_per_rank, members, tag_of
from holdfast.retention.removal import Candidate

_SCALARS = ("int", "float", "numpy")


class KeepPolicy:
    """Chooses which of several checkpoints to keep; `a | b` keeps what either keeps."""

    __slots__ = ()

    def keep(self, candidates: Sequence[Candidate], *, now: datetime) -> dict[int, str]:
        """Return step -> why it stays, for those that stay; `candidates` ascend by step."""
        raise NotImplementedError

    def __or__(self, other: KeepPolicy) -> AnyOf:
        """Keep what either policy keeps."""
        if not isinstance(other, KeepPolicy):
            return NotImplemented
        return AnyOf((self, other))


@dataclass(frozen=True, slots=True)
class AnyOf(KeepPolicy):
    """Keep what any of these policies keeps."""

    policies: tuple[KeepPolicy, ...]

    def keep(self, candidates: Sequence[Candidate], *, now: datetime) -> dict[int, str]:
        """Join the reasons of all policies."""
        reasons: dict[int, str] = {}
        for policy in self.policies:
            for step, reason in policy.keep(candidates, now=now).items():
                reasons[step] = f"{reasons[step]}; {reason}" if step in reasons else reason
        return reasons


@dataclass(frozen=True, slots=True)
class KeepLast(KeepPolicy):
    """Keep the newest `n` steps."""

    n: int

    def __post_init__(self) -> None:
        check_int(self.n, name="KeepLast: n", least=1)

    def keep(self, candidates: Sequence[Candidate], *, now: datetime) -> dict[int, str]:
        newest = candidates[-self.n :]
        return {c.step: f"one of the last {self.n}" for c in newest}


@dataclass(frozen=True, slots=True)
class KeepEvery(KeepPolicy):
    """Keep the steps that `m` divides."""

    m: int

    def __post_init__(self) -> None:
        check_int(self.m, name="KeepEvery: m", least=1)

    def keep(self, candidates: Sequence[Candidate], *, now: datetime) -> dict[int, str]:
        return {c.step: f"every {self.m} steps" for c in candidates if c.step % self.m == 0}


@dataclass(frozen=True, slots=True)
class KeepWithin(KeepPolicy):
    """Keep the steps that were saved in the last `seconds`, by the time in their manifests."""

    seconds: float

    def __post_init__(self) -> None:
        check_number(self.seconds, name="KeepWithin: seconds", above=0)

    def keep(self, candidates: Sequence[Candidate], *, now: datetime) -> dict[int, str]:
        """A checkpoint whose time cannot be read stays."""
        kept = {}
        for candidate in candidates:
            created = _parse_time(candidate.created)
            if created is None:
                kept[candidate.step] = f"its time {candidate.created[:40]!r} cannot be read"
            elif (now - created).total_seconds() <= self.seconds:
                kept[candidate.step] = f"younger than {_in_time(self.seconds)}"
        return kept


@dataclass(frozen=True, slots=True)
class KeepBest(KeepPolicy):
    """Keep the `n` steps whose number at a path, such as "progress.loss", is best.

    A checkpoint without a number there (or with nan) is not among the best. If no checkpoint has a
    number there, all are kept, because a misspelt metric must not cost the checkpoints. Of equals
    the newer one is better.
    """

    metric: str
    n: int = 1
    mode: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        check_instance(self.metric, name="KeepBest: metric", kind=str)
        check_int(self.n, name="KeepBest: n", least=1)
        check_choice(self.mode, name="KeepBest: mode", choices=("min", "max"))

    def keep(self, candidates: Sequence[Candidate], *, now: datetime) -> dict[int, str]:
        """See `KeepPolicy.keep`; the number is in the manifest, and no tensor is read."""
        sign = 1 if self.mode == "min" else -1
        ranked = []
        for candidate in candidates:
            value = number_at(candidate.parts, self.metric)
            if value is not None:
                ranked.append((sign * value, -candidate.step, value))
        if not ranked:
            return {c.step: f"no checkpoint has a number at {self.metric!r}" for c in candidates}
        best = sorted(ranked)[: self.n]
        return {
            -negative: f"best {place} by {self.metric} ({value:g})"
            for place, (_, negative, value) in enumerate(best, start=1)
        }


@dataclass(frozen=True, slots=True)
class KeepTagged(KeepPolicy):
    """Keep tagged steps; with `names`, one or several, only those with a tag that matches one.

    `*` and `?` stand for any characters, and for one.
    """

    names: str | Sequence[str] = ()

    def __post_init__(self) -> None:
        # One name alone would be taken for its letters, which match no tag, so nothing would stay.
        names = check_patterns(self.names, name="KeepTagged: names")
        object.__setattr__(self, "names", names)

    def keep(self, candidates: Sequence[Candidate], *, now: datetime) -> dict[int, str]:
        kept = {}
        for candidate in candidates:
            tags = [tag for tag in candidate.tags if self._matches(tag)]
            if tags:
                kept[candidate.step] = f"tagged {', '.join(tags)}"
        return kept

    def _matches(self, tag: str) -> bool:
        return not self.names or any(fnmatch.fnmatchcase(tag, name) for name in self.names)


def number_at(parts: Mapping[str, Node], path: str) -> float | None:
    """Return the number stored at a path like "progress.loss"; None if there is no number, or nan.

    A value per rank and a tensor do not count as numbers.
    """
    try:
        return _number(dict(parts), path) if path else None
    except CorruptionError:
        return None


def _number(node: Node, path: str) -> float | None:
    """Return the number at a path below a node, or None."""
    if not path:
        return _as_number(node)
    inside = [] if is_per_rank(node) or tag_of(node) in SETS else members(node)
    for key, child in inside:
        name = str(key)
        if path == name or path.startswith(f"{name}."):
            value = _number(child, path[len(name) + 1 :])
            if value is not None:
                return value
    return None


def _as_number(node: Node) -> float | None:
    """Return a node as a float, or None; a bool is not a number."""
    if isinstance(node, dict):
        if tag_of(node) not in _SCALARS:
            return None
        try:
            decoded = decode_tree(node)
        except HoldfastError:
            return None
    else:
        decoded = node
    if isinstance(decoded, bool | np.bool_) or not isinstance(
        decoded, int | float | np.integer | np.floating
    ):
        return None
    try:
        value = float(decoded)
    except OverflowError:
        return math.inf if decoded > 0 else -math.inf
    return None if math.isnan(value) else value


def _parse_time(text: str) -> datetime | None:
    """Parse the time of a manifest, in UTC by default; None if it cannot be read."""
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        return None
    return time if time.tzinfo is not None else time.replace(tzinfo=UTC)


def _in_time(seconds: float) -> str:
    """Return a length of time in its largest whole unit."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length and seconds % length == 0:
            return f"{seconds / length:g} {unit}"
    return f"{seconds:g} s"
