"""Several ranks as threads of one process: the collectives that a machine uses, and no more.

Thousands of short jobs can be tried this way; the same machine on real processes is tested
elsewhere.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from holdfast.errors import ErrorRecord, HoldfastError, joined_error
from holdfast.parallel import Layout

T = TypeVar("T")


class Meeting:
    """Where the threads of a job meet."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=20)
        # In turn: nobody writes to a row before everyone has come to the meeting after it, and so
        # has read it. One wait is then enough for a meeting.
        self._rows: list[list[Any]] = [[None] * size, [None] * size]
        self._num_meetings = [0] * size
        """Of each thread."""

    @property
    def num_collectives(self) -> int:
        """How often all of them have met."""
        return min(self._num_meetings)

    def exchange(self, index: int, value: Any) -> list[Any]:
        """Every thread's value."""
        row = self._rows[self._num_meetings[index] % 2]
        self._num_meetings[index] += 1
        row[index] = value
        self.barrier.wait()
        return list(row)


class ThreadControl:
    """The part of `Control` that a machine uses."""

    def __init__(self, meeting: Meeting, index: int) -> None:
        self._meeting = meeting
        self.index = self.rank = index
        self.ranks = tuple(range(meeting.size))
        self.is_coordinator = index == 0

    def in_step(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def all_gather(self, payload: bytes, *, phase: str) -> list[bytes]:
        rows = self._meeting.exchange(self.index, (phase, payload))
        assert len({row[0] for row in rows}) == 1, f"out of sync: {rows}"
        return [row[1] for row in rows]

    def broadcast(self, payload: bytes | None, *, phase: str) -> bytes:
        return self.all_gather(payload or b"", phase=phase)[0]

    def agree(
        self, error: BaseException | None, *, phase: str, payload: bytes = b""
    ) -> list[bytes]:
        rows = self._meeting.exchange(self.index, (phase, payload, error))
        assert len({row[0] for row in rows}) == 1, f"out of sync: {rows}"
        failed = {i: ErrorRecord.of(row[2]) for i, row in enumerate(rows) if row[2] is not None}
        if failed:
            raise joined_error(failed, num_ranks=len(rows), phase=phase)
        return [row[1] for row in rows]

    def exchange(
        self,
        outgoing: Sequence[tuple[int, memoryview]],
        incoming: Sequence[tuple[int, memoryview]],
        *,
        phase: str,
    ) -> None:
        sent = {position: bytes(data) for position, data in outgoing}
        rows = self._meeting.exchange(self.index, (phase, sent))
        assert len({row[0] for row in rows}) == 1, f"out of sync: {rows}"
        for position, buffer in incoming:
            buffer[:] = rows[position][1][self.index]


class ThreadGroups:
    """The part of `ProcessGroups` that a machine uses."""

    def __init__(self, meeting: Meeting, index: int, layout: Layout | None = None) -> None:
        self.layout = layout or Layout(dp=meeting.size)
        self.rank = index
        self.control = ThreadControl(meeting, index)


def run_threads(
    size: int, body: Callable[[ThreadGroups], T], *, layout: Layout | None = None
) -> list[T]:
    """What the body returns on each rank; the first error of any is raised."""
    meeting = Meeting(size)
    if size == 1:
        return [body(ThreadGroups(meeting, 0, layout))]
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def run(index: int) -> None:
        try:
            results[index] = body(ThreadGroups(meeting, index, layout))
        except BaseException as error:
            errors.append(error)
            if not isinstance(error, HoldfastError):
                meeting.barrier.abort()

    threads = [threading.Thread(target=run, args=(i,)) for i in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    real = [each for each in errors if not isinstance(each, threading.BrokenBarrierError)]
    if real or errors:
        raise (real or errors)[0]
    return results


def each(values: Sequence[T]) -> T:
    """The value that all ranks have."""
    assert all(value == values[0] for value in values), values
    return values[0]
