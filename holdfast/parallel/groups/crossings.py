"""The crossings of bridges between two steps: what a step has to know of them, and bridges keep."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

Edge = tuple[str, str]
"""Source and destination module."""


class Crossings:
    """The crossings of this rank's bridges since the last step; its `ModuleGroups` has them.

    A crossing is *open* from a forward that needs a backward to that backward. All ranks of an edge
    call forward and backward together, so each of them has the same ones.

    Args:
        edges: of the modules of this rank.
    """

    __slots__ = ("_bridged", "_carried", "_edges", "_num_opened", "_open", "failed", "failure")

    def __init__(self, edges: Iterable[Edge] = ()) -> None:
        self._edges = tuple(edges)
        self._bridged: set[Edge] = set()
        self._carried: set[Edge] = set()
        self._open: dict[int, Edge] = {}
        self._num_opened = 0
        self.failed: set[Edge] = set()
        """Edges whose last call has raised, on all ranks of the edge."""
        self.failure: str | None = None
        """Of a microbatch since the last step, which has failed on all ranks."""

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
        try:
            yield
        except BaseException:
            self.failed.add(edge)
            raise
        self.failed.discard(edge)

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
