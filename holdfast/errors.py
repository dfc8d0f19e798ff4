"""The closed error hierarchy of Holdfast, and the form of an error between processes.

    HoldfastError            everything Holdfast raises on purpose
    ├── ConfigError          a setting, flag or argument is wrong (also a ValueError)
    ├── LayoutError          axis sizes, order or ranks do not describe a layout
    ├── GroupError           a communicator is missing or wrong, or ranks are out of sync
    ├── PlacementError       a tensor or value cannot be stored as declared
    ├── PlanError            the ranks' declarations do not add up to one state
    │   └── DriftError       ranks hold different bytes where they should hold the same
    ├── StorageError         the storage refused an operation
    ├── CorruptionError      stored bytes are not the bytes that were saved
    ├── MismatchError        a checkpoint and the state that asks for it do not fit each other
    ├── DeadlineError        a rank did not arrive in time
    └── FaultError           a computation produced a value that the run does not accept

A message states what happened, where (key, rank, file, offset), why, and what to do. It is for
people; a program reads `details`. An error that concerns a group of ranks is raised on all of them;
`ErrorRecord` carries it there.
"""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from numbers import Integral, Real
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")

MAX_MESSAGE_LENGTH = 4096
"""Limit of the characters of a message in an `ErrorRecord`."""
MAX_DETAILS_SIZE = 32 * 1024
"""Limit of the size of an error's details: 8 for each value, 1 for each character of text."""
_MAX_DEPTH = 4
_MAX_PLAIN_INT = 2**63
_INCOMPLETE = "incomplete"


def clean(text: str) -> str:
    """Return text from elsewhere made safe to print: control and direction marks are escaped."""
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode()
        for c in text
    )


def counted(number: int, noun: str) -> str:
    """Return a number and its noun: "1 file", "2,000 files", "2 entries"."""
    ends_in_ies = noun.endswith("y") and noun[-2] not in "aeiou"
    nouns = f"{noun[:-1]}ies" if ends_in_ies else f"{noun}s"
    return f"{number:,} {noun if number == 1 else nouns}"


def signal_name(number: int) -> str:
    """Return the name of a signal; "signal 35" for one without a name, as most real-time ones."""
    return signal.Signals(number).name if number in {*signal.Signals} else f"signal {number}"


def some_of(names: Sequence[str], *, most: int = 10) -> str:
    """Return names for a message: the first of them, and how many more there are."""
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")


def some_sentences(sentences: Sequence[str], *, most: int) -> str:
    """Return sentences in one line: the first of them, and how many more there are."""
    rest = len(sentences) - most
    return "; ".join(sentences[:most]) + (f"; and {rest} more" if rest > 0 else "")


def shorten_ranks(ranks: Iterable[int], *, most: int | None = 16) -> str:
    """Return ranks for a message, in their order: "0-3, 7, 8"; at most so many numbers and ranges.

    Of more it says how many ranks there are in all.
    """
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    shown: list[str] = []
    for run in runs:
        shown += [f"{run[0]}-{run[-1]}"] if len(run) > 2 else map(str, run)
    if most is None or len(shown) <= most:
        return ", ".join(shown)
    return f"{', '.join(shown[:most])}, ... ({sum(map(len, runs))} in all)"


def named_ranks(ranks: Sequence[int]) -> str:
    """Return ranks for a sentence: "rank 3", "ranks 0-3, 7"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {shorten_ranks(ranks)}"


def values_by_rank(values: Mapping[int, object]) -> str:
    """Return which ranks have which value: "1 on ranks 0, 2; 2 on rank 1"."""
    return "; ".join(f"{value} on {named_ranks(held)}" for value, held in _holders(values).items())


def _holders(values: Mapping[int, T]) -> dict[T, list[int]]:
    """Return the ranks that have each value."""
    holders: dict[T, list[int]] = {}
    for rank, value in values.items():
        holders.setdefault(value, []).append(rank)
    return holders


def in_bytes(nbytes: int) -> str:
    """Return a size for people, in powers of 1000: "1.23 GB"."""
    size = float(nbytes)
    for unit in ("B", "kB", "MB", "GB", "TB", "PB"):
        if size < 999.5 or unit == "PB":
            return f"{nbytes} B" if unit == "B" else f"{size:.3g} {unit}"
        size /= 1000
    return f"{nbytes} B"


class HoldfastError(Exception):
    """Base class of everything Holdfast raises on purpose.

    Args:
        args: The message. What cannot be printed in it is escaped, but for line breaks: names that
            it quotes may be anything.
        details: The things that the message names, as values for a program: `ranks`, `odd_ranks`,
            `missing_ranks`, `keys`, `steps`, `files`, ... Types other than None, bool, int, float,
            str, list and dict are converted to the nearest of these. Values beyond
            `MAX_DETAILS_SIZE` are left out, and `details["incomplete"]` is then True.
    """

    details: dict[str, Any]
    """The same on every rank that raises the error; `failed_ranks` are those that caused it."""

    def __init__(self, *args: object, details: Mapping[str, object] | None = None) -> None:
        super().__init__(*(_clean_lines(arg) if isinstance(arg, str) else arg for arg in args))
        self.details = plain_details(details) if details else {}


def _clean_lines(text: str) -> str:
    return "\n".join(map(clean, text.split("\n")))


class ConfigError(HoldfastError, ValueError):
    """A setting, flag or argument is wrong; the message names it and the fix."""


class LayoutError(HoldfastError):
    """Axis sizes, order or ranks do not describe a layout."""


class GroupError(HoldfastError):
    """A communicator is missing or contradicts the layout, or ranks disagree in a collective."""


class PlacementError(HoldfastError):
    """A tensor or value cannot be stored as declared: bad box, bad axis, no codec."""


class PlanError(HoldfastError):
    """The ranks' declarations together do not make one whole state: gap, overlap, disagreement."""


class DriftError(PlanError):
    """Ranks hold different bytes of one tensor under one key; the message names the odd ranks.

    A save raises it on all ranks. `RerunMachine.record_drift` puts it into the machine's report.
    """


class StorageError(HoldfastError):
    """The storage refused: not found, no space, no permission, short read or write."""


class CorruptionError(HoldfastError):
    """Stored bytes are not the bytes that were saved."""


class MismatchError(HoldfastError):
    """A checkpoint and the state that asks for it do not fit each other."""


class DeadlineError(HoldfastError):
    """A rank or writer did not arrive in time; the message names it, and the phase."""


class FaultError(HoldfastError):
    """A computation produced a value that the run does not accept."""


def disagreement(
    operation: str, what: str, values: Sequence[object], *, ranks: Sequence[int]
) -> PlanError:
    """Return the error for ranks whose values must be equal and differ; it names each one's."""
    listed = values_by_rank(dict(zip(ranks, values, strict=True)))
    return PlanError(f"{operation}: the ranks disagree on {what}: {listed}")


_TYPES: Mapping[str, type[HoldfastError]] = {
    value.__name__: value
    for value in list(globals().values())
    if isinstance(value, type) and issubclass(value, HoldfastError)
}


class ErrorRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An error for another process: a class of the hierarchy by name, a message, details.

    Control frames, failure records on storage, outcomes of saves and save proposals all have this
    form. A record may be damaged or come from another version, so the name of its class is looked
    up only in the hierarchy above.
    """

    error_type: str
    message: str
    details: dict[str, Any] = {}

    @classmethod
    def of(
        cls, error: BaseException, *, foreign: type[HoldfastError] = HoldfastError
    ) -> ErrorRecord:
        """Record an error.

        A subclass defined elsewhere is recorded as its nearest base in the hierarchy.

        Args:
            error: Any exception, even one whose text cannot be produced.
            foreign: The class for an error from outside the hierarchy. The name of its own class
                and its notes (`add_note`) are then part of the message.
        """
        name = type(error).__name__
        try:
            text = str(error)
        except Exception:
            text = "(its text cannot be produced)"
        known = next((t for t in type(error).__mro__ if _TYPES.get(t.__name__) is t), None)
        if known is None:
            notes = getattr(error, "__notes__", None)
            notes = [n for n in notes if isinstance(n, str)] if isinstance(notes, list) else []
            text = ": ".join([*notes, name, *([text] if text else [])])
        # Names of files may contain bytes that are not UTF-8, which JSON and msgpack cannot carry.
        text = _encodable(text or name)
        if len(text) > MAX_MESSAGE_LENGTH:
            text = text[: MAX_MESSAGE_LENGTH - 3] + "..."
        # The `details` of another library's error mean something else.
        details = plain_details(error.details) if isinstance(error, HoldfastError) else {}
        return cls(error_type=(known or foreign).__name__, message=text, details=details)

    def to_error(self) -> HoldfastError:
        """Return the error to raise; a HoldfastError with the name if the class is unknown."""
        known = _TYPES.get(self.error_type)
        if known is None:
            text = f"{self.message} (recorded as {self.error_type[:100]!r})"
            return HoldfastError(text, details=self.details)
        return known(self.message, details=self.details)


def joined_error(
    by_rank: Mapping[int, ErrorRecord],
    *,
    num_ranks: int,
    phase: str,
    missing_ranks: Sequence[int] = (),
) -> HoldfastError:
    """Join the failures of several ranks in one error of the first one's class.

    The message has every distinct message, with the ranks that have it. The details are those of
    all records (see `joined_details`), `failed_ranks`, and `missing_ranks` if there are any.
    """
    messages = {rank: record.message for rank, record in by_rank.items()}
    if num_ranks == 1:
        text = f"{phase}: {next(iter(messages.values()))}"
    else:
        lines = [f"{named_ranks(ranks)}: {each}" for each, ranks in _holders(messages).items()]
        text = "\n".join([f"{len(by_rank)} of {num_ranks} ranks failed ({phase}):", *lines])
    if missing_ranks:
        text += (
            f"\nThe others waited for {named_ranks(missing_ranks)}, which came after the time "
            f"limit: look there."
        )
    first = next(iter(by_rank.values()))
    details = joined_details([record.details for record in by_rank.values()])
    return ErrorRecord(
        error_type=first.error_type,
        message=text,
        details={
            "failed_ranks": sorted(by_rank),
            **details,
            **({"missing_ranks": list(missing_ranks)} if missing_ranks else {}),
        },
    ).to_error()


def late_ranks(
    by_rank: Mapping[int, ErrorRecord], *, ranks: Sequence[int], limit_s: float
) -> list[int]:
    """Return the ranks that others waited for in vain, though in the end all ranks have come.

    These are the ranks that did not wait for others themselves (`waited_s`, a detail of a
    DeadlineError). A rank that comes late finds connections that the others gave up, or nothing
    wrong at all.

    Args:
        by_rank: why ranks failed.
        ranks: all of them.
        limit_s: the time limit of collectives. Most of it counts: the first rank that gives up ends
            the waits of the others.
    """
    # An error that was joined of several has a list.
    waits = {rank: record.details.get("waited_s", 0.0) for rank, record in by_rank.items()}
    waited = {
        rank
        for rank, each in waits.items()
        if max(each if isinstance(each, list) else [each]) >= limit_s / 2
    }
    return [rank for rank in ranks if rank not in waited] if waited else []


def exchange_lost(what: str, error: BaseException, *, waited_s: float) -> DeadlineError:
    """Return the error for an exchange of all ranks that others did not complete."""
    return DeadlineError(
        f"{what} did not complete: {error}. Look at what happened on the other ranks first; "
        f"start again from the last checkpoint.",
        details={"waited_s": waited_s},
    )


def joined_details(all_details: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Join the details of several errors.

    A value that is the same in all of them stays. Otherwise lists are joined, with each member
    once, and single values become a list.
    """
    joined: dict[str, Any] = {}
    for details in all_details:
        for name, value in details.items():
            if name not in joined:
                joined[name] = value
            elif joined[name] != value:
                lists = [v if isinstance(v, list) else [v] for v in (joined[name], value)]
                joined[name] = _each_once(lists)
    return joined


def _each_once(lists: Iterable[list[Any]]) -> list[Any]:
    """Return the distinct members of all lists, in order; True and 1 are distinct."""
    members: dict[str, Any] = {}
    for each in lists:
        for member in each:
            members.setdefault(repr(member), member)
    return list(members.values())


def plain_details(details: object, *, max_size: int = MAX_DETAILS_SIZE) -> dict[str, Any]:
    """Return details as values that JSON and msgpack can carry, bounded in size; never raise."""
    copy = _PlainCopy(max_size)
    try:
        plain = copy.of(details, 0)
    except Exception:  # a foreign object may raise anything from any method
        return {_INCOMPLETE: True}
    result = plain if isinstance(plain, dict) else {}
    if copy.is_cut:
        result[_INCOMPLETE] = True
    return result


class _PlainCopy:
    """A copy of details, and the size that remains for it."""

    def __init__(self, max_size: int) -> None:
        self._left = max_size
        self.is_cut = False

    def of(self, value: object, depth: int) -> Any:
        """Return the nearest plain value; lists and dicts lose what no longer fits."""
        if isinstance(value, Mapping) and depth < _MAX_DEPTH:
            result = {}
            for key, item in value.items():
                if not self._take(8):
                    break
                name = self._text(key)
                result[name] = self.of(item, depth + 1)
            return result
        if isinstance(value, AbstractSet):
            value = sorted(value, key=lambda item: (type(item).__name__, item))
        is_items = isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray)
        if is_items and depth < _MAX_DEPTH:
            items: list[Any] = []
            for item in value:  # type: ignore[attr-defined]
                if not self._take(8):
                    break
                items.append(self.of(item, depth + 1))
            return items
        return self._scalar(value)

    def _scalar(self, value: object) -> bool | int | float | str | None:
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, Integral):
            number = int(value)
            return number if -_MAX_PLAIN_INT <= number < _MAX_PLAIN_INT else self._text(number)
        # JSON lacks NaN and infinity.
        if isinstance(value, Real) and math.isfinite(value):
            return float(value)
        return self._text(value)

    def _text(self, value: object) -> str:
        """Return a value as text, cut at the size that remains."""
        text = _encodable(os.fsdecode(value) if isinstance(value, os.PathLike) else str(value))
        kept = text[: self._left]
        self._left -= len(kept)
        self.is_cut |= len(kept) < len(text)
        return kept

    def _take(self, size: int) -> bool:
        """Take from the size that remains; return False if it is too little."""
        if self._left < size:
            self.is_cut = True
            return False
        self._left -= size
        return True


def _encodable(text: str) -> str:
    """Return a text without lone surrogates, which JSON and msgpack cannot carry."""
    return text.encode(errors="backslashreplace").decode()
