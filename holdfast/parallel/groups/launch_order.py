"""The order in which one rank launches on one communicator, whatever launches there.

A communicator pairs the launches of its ranks by their order alone. So ranks compare one sequence
for all that launches on it: two models in another order get each other's weights, and nothing
fails.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from weakref import WeakSet

_MOST = 4096
"""Launches kept by name. Those of a long evaluation are kept as a digest."""


class OrderMark:
    """The place in a `LaunchOrder` up to which one user of the communicator has compared it."""

    def __init__(self, *, number: int, start: int) -> None:
        self.number = number
        """1 for the first user, 0 for `LaunchOrder.unsaved`; equal on all ranks."""
        self.start = start
        self.digest = 0
        """Of uncompared launches that are not kept any more."""


class LaunchOrder:
    """The launches of this rank on a communicator that ranks have not compared yet.

    Each user of the communicator has a mark, from which it compares: what one has compared, or
    forgotten after an error, is not compared for the others.

    Args:
        is_shared: False on a communicator of one rank, on which no orders can part.
    """

    def __init__(self, *, is_shared: bool) -> None:
        self.is_shared = is_shared
        self._names: list[str] = []
        self._launches: list[int] = []
        self._num_users = 0
        self.unsaved = OrderMark(number=0, start=0)
        """What no user has compared or forgotten, for saves: it goes into no checkpoint.

        Not a mark of a user's: the user may be gone, and others may have come later.
        """
        self._marks: WeakSet[OrderMark] = WeakSet([self.unsaved])
        self.note: Callable[[int], object] = self._launches.append if is_shared else _ignore
        """Takes the number of what this rank launches; a method in C, since each launch calls it.
        """

    def add(self, name: str) -> int:
        """Return the number of what is launched from now on; equal on all ranks."""
        self._names.append(name)
        return len(self._names) - 1

    def mark(self) -> OrderMark:
        """Return a new mark, behind everything that was launched."""
        self._num_users += 1
        mark = OrderMark(number=self._num_users, start=len(self._launches))
        self._marks.add(mark)
        return mark

    def has_uncompared(self, mark: OrderMark) -> bool:
        """Return True if there were launches behind a mark."""
        return mark.digest != 0 or len(self._launches) > mark.start

    def digest(self, mark: OrderMark) -> int:
        """Return a digest of all launches behind a mark."""
        return _digest(mark.digest, self._launches[mark.start :])

    def names(self, mark: OrderMark) -> list[str]:
        """Return the last launches behind a mark."""
        return [self._names[number] for number in self._launches[mark.start :]]

    def note_compared(self, mark: OrderMark) -> None:
        """Note that the launches behind a mark are the same on all ranks."""
        start = mark.start  # before the loop, which comes to the marks in any order
        for each in self._marks:
            if each is not mark:
                each.digest = _digest(each.digest, self._launches[each.start : start])
            each.start = 0
        mark.digest = 0
        self._launches.clear()

    def forget(self, mark: OrderMark) -> None:
        """Move a user's mark behind everything that was launched; on all ranks."""
        for each in (mark, self.unsaved):
            each.digest, each.start = 0, len(self._launches)

    def take_back(self, mark: OrderMark, numbers: Collection[int]) -> None:
        """Remove the launches of `numbers` behind a mark, which all ranks have completed."""
        launches = self._launches
        removed = [at for at in range(mark.start, len(launches)) if launches[at] in numbers]
        for each in self._marks:
            each.start -= sum(at < each.start for at in removed)
        for at in reversed(removed):
            del launches[at]

    def fold(self) -> None:
        """Keep no names of many launches; called at the same launch on all ranks."""
        if len(self._launches) < _MOST:
            return
        for each in self._marks:
            each.digest = self.digest(each)
            each.start = 0
        self._launches.clear()


def _digest(before: int, launches: Sequence[int]) -> int:
    return hash((before, *launches)) if launches else before


def _ignore(number: int) -> None:
    pass
