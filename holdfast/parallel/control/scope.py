"""What `Control` and `Guard` both know of one guarded operation that is in progress on a rank."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True, kw_only=True, eq=False)
class GuardScope:
    """One run of a guard; scopes nest like the guards do."""

    guard: object | None = None
    """The guard itself, by which one that is run within itself is recognised."""
    outer: GuardScope | None = None
    """The scope that this one runs in."""
    depth: int = 1
    """How many scopes there are, this one included."""
    answers: dict[str, list[bytes]] = field(default_factory=dict)
    """What `Control.agree` has returned in it, by phase."""
    has_failed_on_all: bool = False
    """Whether it has failed on every rank. No rank waits for another then, so no more calls."""
    failure: BaseException | None = None
    """What it has failed with."""

    def refuse_calls_after_failure(self) -> None:
        """Raise the failure again, if there is one on all ranks."""
        if self.has_failed_on_all and self.failure is not None:
            raise self.failure

    def remember(self, error: BaseException) -> None:
        """Keep what a call in this scope, or in one around it, has failed with on all ranks."""
        scope: GuardScope | None = self
        while scope is not None and scope.has_failed_on_all:
            scope.failure = scope.failure or error
            scope = scope.outer

    def fail_on_all(self, depth: int) -> None:
        """Mark the scopes from `depth` inwards as failed on all ranks."""
        scope: GuardScope | None = self
        while scope is not None and scope.depth >= depth:
            scope.has_failed_on_all = True
            scope = scope.outer
