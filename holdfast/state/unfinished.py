"""Work that an object has started and not finished: a save or load in the middle of it is refused.

Between two steps, everything that training continues from is in the parts of a state. Inside of a
step it is not: gradients are in buckets or half reduced, microbatches are on their way. An object
that holds such work says so by `unfinished_work`. It is asked if it is a part of a state, or if it
has made itself known as a worker on what is one: a model, a module inside, a torch optimizer.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Literal, Protocol, cast

from holdfast.errors import ConfigError

_WORKERS = "_holdfast_workers"


class Worker(Protocol):
    """An object that may hold work of a step that no checkpoint has."""

    def unfinished_work(self) -> str | None:
        """Return what is not finished, and what to do first; None between two steps.

        The text continues a sentence: "ShardedOptimizer (dense) holds gradients that no step has
        used; call step() first, or ...". Operations in flight that every save waits for (gathers
        of updated parameters) are finished work.

        Cost: asked by every save and load; no collectives.
        """


class _Workers:
    """Weak references to the workers on an object; a copy of the object has no workers."""

    __slots__ = ("refs",)

    def __init__(self) -> None:
        self.refs: tuple[weakref.ref[Worker], ...] = ()

    def __deepcopy__(self, memo: dict[int, object]) -> _Workers:
        return _Workers()

    def __copy__(self) -> _Workers:
        return _Workers()

    def __reduce__(self) -> tuple[type[_Workers], tuple[()]]:
        return _Workers, ()


def set_worker(worker: Worker, *, on: object) -> None:
    """Have saves and loads of `on`, a module or a torch optimizer, ask `worker`, too.

    The worker is referred to weakly; the object may have several.
    """
    workers = vars(on).setdefault(_WORKERS, _Workers())
    alive = [ref for ref in workers.refs if ref() not in (None, worker)]
    workers.refs = (*alive, weakref.ref(worker))


def workers_on(thing: object) -> Iterator[Worker]:
    """Yield the object itself, if it is a worker, and those that were set on it."""
    # Asked of the type: `isinstance` of a protocol is slow, and models have many modules.
    if hasattr(type(thing), "unfinished_work"):
        yield cast("Worker", thing)
    workers = getattr(thing, "__dict__", {}).get(_WORKERS)
    for ref in () if workers is None else workers.refs:
        worker = ref()
        if worker is not None:
            yield worker


def unfinished_on(*things: object) -> str | None:
    """Return the first unfinished work on any of these objects, each worker asked once."""
    known: set[int] = set()
    for thing in things:
        for worker in workers_on(thing):
            if id(worker) not in known:
                known.add(id(worker))
                reason = worker.unfinished_work()
                if reason is not None:
                    return reason
    return None


def refuse_unfinished(part: object, *, operation: Literal["save", "load"]) -> None:
    """Raise ConfigError if a part holds work of a step that has not ended."""
    reason = unfinished_on(part)
    if reason is not None:
        harm = "lose" if operation == "save" else "be mixed with"
        raise ConfigError(f"a {operation} in the middle of a step would {harm} its work: {reason}")
