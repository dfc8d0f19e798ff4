"""How something went on one rank, in a form that other ranks can raise again."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from holdfast import errors
from holdfast.errors import HoldfastError

_MAX_MESSAGE = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Success (both fields empty), or class name and message of an error.

    `is_shared`: the error is one that all ranks have raised already. `depth`: how many guards of
    the rank it has left open.
    """

    kind: str = ""
    message: str = ""
    is_shared: bool = False
    depth: int = 0

    @classmethod
    def of(cls, error: BaseException | None, *, is_shared: bool = False, depth: int = 0) -> Outcome:
        """The outcome of something that raised `error`, or did not."""
        if error is None:
            return cls()
        kind = type(error).__name__
        try:
            text = str(error)
        except Exception:
            text = "(its text cannot be had)"
        if not isinstance(error, HoldfastError):
            text = f"{kind}: {text}" if text else kind
            text = "".join(f"{note}: " for note in _notes(error)) + text
        return cls(
            kind=kind, message=(text or kind)[:_MAX_MESSAGE], is_shared=is_shared, depth=depth
        )

    @classmethod
    def from_json(cls, text: str) -> Outcome:
        """Inverse of `to_json`."""
        kind, message, is_shared, depth = json.loads(text) if text else ("", "", False, 0)
        return cls(kind=kind, message=message, is_shared=is_shared, depth=depth)

    def to_json(self) -> str:
        """Empty for success."""
        if not self.kind:
            return ""
        return json.dumps([self.kind, self.message, self.is_shared, self.depth])

    def error_type(self) -> type[HoldfastError]:
        """The class of the closed hierarchy to raise it as; HoldfastError for foreign errors."""
        found = getattr(errors, self.kind, None)
        if isinstance(found, type) and issubclass(found, HoldfastError):
            return found
        return HoldfastError


def raise_failures(
    outcomes: Sequence[Outcome],
    *,
    ranks: Sequence[int],
    phase: str,
    cause: BaseException | None,
) -> None:
    """Raise if any outcome is a failure: the first one's class, a text that lists every one,
    equal messages once.

    All ranks that hold the same outcomes raise the same class and text; `cause`, the rank's own
    error, is kept as ``__cause__``.
    """
    failures = [(rank, o) for rank, o in zip(ranks, outcomes, strict=True) if o.kind]
    failures = [each for each in failures if not each[1].is_shared] or failures
    if not failures:
        return
    by_message: dict[str, list[int]] = {}
    for rank, outcome in failures:
        by_message.setdefault(outcome.message, []).append(rank)
    listed = "\n".join(f"{_who(held)}: {message}" for message, held in by_message.items())
    raise failures[0][1].error_type()(
        f"{len(failures)} of {len(outcomes)} ranks failed ({phase}):\n{listed}"
    ) from cause


def _notes(error: BaseException) -> list[str]:
    """Where it happened, as `add_note` has it."""
    notes = getattr(error, "__notes__", ())
    return [note for note in notes if isinstance(note, str)] if isinstance(notes, list) else []


def _who(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
