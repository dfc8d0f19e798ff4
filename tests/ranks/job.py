"""What a rank is given, and what it reports."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class RankContext:
    """What a rank knows about itself."""

    rank: int
    num_ranks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankError:
    """How one rank failed."""

    rank: int
    type_name: str
    """Class of the exception; "Killed", "Exited" or "TimedOut" if there was none."""
    message: str
    traceback: str
    exception: BaseException | None = None
    """The exception itself, if it survives pickling."""
    signal: int | None = None
    """The signal that ended the process."""
    timed_out: bool = False


@dataclass(frozen=True, slots=True)
class Report:
    """The end of one rank's job."""

    result: Any = None
    error: RankError | None = None


@dataclass(frozen=True, slots=True)
class Job:
    """One rank's part of a run."""

    context: RankContext
    target: Callable[..., Any]
    args: tuple[Any, ...]
    backend: str | None
    store_port: int
    timeout_s: float
    environment: dict[str, str]
    log: str
    fresh: bool
    """The process leaves after this job."""
