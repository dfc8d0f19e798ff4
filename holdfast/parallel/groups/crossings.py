"""The crossings of bridges between two steps: what a step has to know of them, and bridges keep."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from holdfast.errors import DeadlineError, HoldfastError
from holdfast.parallel.control.control import Control

Edge = tuple[str, str]
"""Source and destination module."""


class Crossings:
    """The crossings of this rank's bridges since the last step; its `ModuleGroups` has them.

    A crossing is *open* from a forward that needs a backward to that backward. All ranks of an edge
    call forward and backward together, so each of them has the same ones.

    Args:
        edges: of the modules of this rank.
        control: of all ranks of all modules; None without edges.
    """

    __slots__ = (
        "_bridged",
        "_carried",
        "_control",
        "_edges",
        "_num_opened",
        "_open",
        "failed",
        "failure",
        "is_cut",
    )

    def __init__(self, edges: Iterable[Edge] = (), control: Control | None = None) -> None:
        self._control = control
        self._edges = tuple(edges)
        self._bridged: set[Edge] = set()
        self._carried: set[Edge] = set()
        self._open: dict[int, Edge] = {}
        self._num_opened = 0
        self.failed: set[Edge] = set()
        """Edges whose last call has raised, on all ranks of the edge."""
        self.failure: str | None = None
        """Of a microbatch since the last step, which has failed on all ranks."""
        self.is_cut = False
        """True if all ranks know that a call can be one of all ranks of its edge no more."""

    def add_bridge(self, edge: Edge) -> None:
        """Note that a bridge reports the crossings of an edge."""
        self._bridged.add(edge)

    def open(self, edge: Edge) -> int:
        """Note a forward that needs a backward, and return its number here."""
        self._num_opened += 1
        self._open[self._num_opened] = edge
        return self._num_opened

    def close(self, edge: Edge, number: int, *, has_gradient: bool) -> None:
        """Note the backward of a crossing; it may have been forgotten, or closed before."""
        self._open.pop(number, None)
        if has_gradient:
            self._carried.add(edge)

    @contextmanager
    def calling(self, edge: Edge) -> Iterator[None]:
        """Enter around a call of all ranks of an edge, which succeeds or raises on all of them."""
        was_cut = self._control is None or self._control.reason_cut
        try:
            yield
        except BaseException as error:
            self.failed.add(edge)
            if isinstance(error, HoldfastError) and self._control is not None and not was_cut:
                self._raise_cause(error, self._control)
            raise
        self.failed.discard(edge)

    def _raise_cause(self, error: HoldfastError, control: Control) -> None:
        """Raise what has ended a wait for another rank of an edge; return if nothing more is known.

        Where ranks have waited for each other, all ranks of all modules raise it together: some of
        them wait elsewhere.
        """
        if isinstance(error, DeadlineError) and not control.reason_cut:
            cause = control.why_freed()
            if cause is None:
                cause = _named_by_its_note(error, control)
                control.cut_off(cause)  # no rank of the edge can go on
            cause.__cause__ = None if cause is error else error
            error = cause
        if not control.reason_cut:
            return
        self.is_cut = True
        if not (isinstance(error, DeadlineError) or control.is_broken):
            with control.in_step():
                control.fail(error, phase="bridge")
        raise error

    def forget(self) -> None:
        """Start again: after a step, and where gradients are dropped."""
        self.failure = None
        self._open.clear()
        self._carried.clear()

    def carried(self) -> set[Edge]:
        """Return the edges here over which gradients came, or may have come without a bridge."""
        return {e for e in self._edges if e in self._carried or e not in self._bridged}

    def unfinished_work(self, edge: Edge | None = None) -> str | None:
        """Return what is left to do, over one edge or over all, as a sentence; None for nothing."""
        if self.failure is not None:
            return self.failure
        edges = [each for each in self._open.values() if edge in (None, each)]
        counts = {each: edges.count(each) for each in edges}
        listed = [
            f"{count} forward{'s' if count > 1 else ''} over the bridge {source} -> {destination}"
            for (source, destination), count in counts.items()
        ]
        if not listed:
            return None
        return f"{' and '.join(listed)} {'wait' if len(edges) > 1 else 'waits'} for a backward"


def _named_by_its_note(late: DeadlineError, control: Control) -> DeadlineError:
    """Return the error with what has left a microbatch on the rank that it names."""
    for rank in late.details.get("missing_ranks", ())[:1]:
        left = control.note_of(rank).left
        if left:
            return DeadlineError(f"{left} on rank {rank}. {late}", details=late.details)
    return late
