"""The closed error hierarchy of Holdfast, and the form in which an error moves between processes.

    HoldfastError            everything Holdfast raises on purpose
    ├── ConfigError          a setting, flag or argument is wrong (also a ValueError)
    ├── LayoutError          axis sizes, order or ranks do not describe a layout
    ├── GroupError           a communicator is missing or wrong, or ranks are out of sync
    ├── PlacementError       a tensor or value cannot be stored as declared
    ├── PlanError            the ranks' declarations do not add up to one state
    │   └── DriftError       ranks hold different bytes of what they all should hold
    ├── StorageError         the storage refused an operation
    ├── CorruptionError      stored bytes are not the bytes that were saved
    ├── MismatchError        a checkpoint and the state that asks for it do not fit each other
    ├── DeadlineError        a rank did not arrive in time
    └── FaultError           a computation produced a value that the run does not accept

A message states what happened, where (key, rank, file, offset), why, and what to do. Errors that
concern a group of ranks are raised on all of them; `ErrorRecord` carries them there.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

MAX_MESSAGE_LENGTH = 4096
"""Characters of a message that an `ErrorRecord` keeps."""


class HoldfastError(Exception):
    """Base class of everything Holdfast raises on purpose."""


class ConfigError(HoldfastError, ValueError):
    """A setting, flag or argument is wrong; the message names it and the fix."""


class LayoutError(HoldfastError):
    """Axis sizes, order or ranks do not describe a layout."""


class GroupError(HoldfastError):
    """A communicator is missing, is not what the layout says, or ranks disagree in a collective."""


class PlacementError(HoldfastError):
    """A tensor or value cannot be stored as declared: bad box, bad axis, no codec."""


class PlanError(HoldfastError):
    """The ranks' declarations together do not make one whole state: gap, overlap, disagreement."""


class DriftError(PlanError):
    """Ranks that hold one tensor under one key hold different bytes; names the odd ones.

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


_TYPES: Mapping[str, type[HoldfastError]] = {
    value.__name__: value
    for value in list(globals().values())
    if isinstance(value, type) and issubclass(value, HoldfastError)
}


class ErrorRecord(msgspec.Struct, frozen=True, kw_only=True):
    """An error as another process reads it: the name of a class of the hierarchy, and a message.

    Control frames, failure records on storage, outcomes of saves and save proposals all carry this
    one form. It may have been written by another version or damaged, so no name in it is looked up
    anywhere but in the hierarchy above.
    """

    error_type: str
    message: str

    @classmethod
    def of(
        cls, error: BaseException, *, foreign: type[HoldfastError] = HoldfastError
    ) -> ErrorRecord:
        """The record of an error.

        A subclass defined elsewhere is recorded as its nearest base in the hierarchy.

        Args:
            error: any exception; one whose text cannot be produced is recorded all the same.
            foreign: the class for an error from outside the hierarchy. Its own class and its notes
                (`add_note`) are then part of the message.
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
        # Names of files may hold bytes that are no UTF-8, which neither JSON nor msgpack can carry.
        text = (text or name).encode(errors="backslashreplace").decode()
        if len(text) > MAX_MESSAGE_LENGTH:
            text = text[: MAX_MESSAGE_LENGTH - 3] + "..."
        return cls(error_type=(known or foreign).__name__, message=text)

    def to_error(self) -> HoldfastError:
        """The error to raise; a HoldfastError that quotes the name where that is not known."""
        known = _TYPES.get(self.error_type)
        if known is None:
            return HoldfastError(f"{self.message} (recorded as {self.error_type[:100]!r})")
        return known(self.message)


def joined_error(
    by_rank: Mapping[int, ErrorRecord], *, num_ranks: int, phase: str
) -> HoldfastError:
    """One error for the failures of several ranks: of the first one's class, with every message.

    Ranks with equal messages are listed together, so that a failure of all reads as one.
    """
    ranks_by_message: dict[str, list[int]] = {}
    for rank, record in by_rank.items():
        ranks_by_message.setdefault(record.message, []).append(rank)
    lines = [
        f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}: {message}"
        for message, ranks in ranks_by_message.items()
    ]
    text = "\n".join([f"{len(by_rank)} of {num_ranks} ranks failed ({phase}):", *lines])
    first = next(iter(by_rank.values()))
    return ErrorRecord(error_type=first.error_type, message=text).to_error()
