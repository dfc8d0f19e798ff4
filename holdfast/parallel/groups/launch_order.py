"""The order in which one rank launches on one communicator, whatever launches there.

A communicator pairs the launches of its ranks by their order alone. So ranks compare one sequence
for all that launches on it: two models in another order get each other's weights, and nothing
fails.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

_MOST = 4096
"""Launches kept by name. Those of a long evaluation are kept as a digest."""
_SHOWN = 32
"""Launches that a rank notes by number, of which the first that differs is named."""


class OrderMark:
    """The place in a `LaunchOrder` up to which one user of the communicator has compared it."""

    def __init__(self, *, number: int, start: int) -> None:
        self.number = number
        """1 for the first user, 0 for `LaunchOrder.unsaved`; equal on all ranks."""
        self.start = start
        self.digest = 0
        """Of uncompared launches that are not kept any more."""
        self.num_forgotten = 0
        """How often launches were forgotten: only between the same two times ranks can compare."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchProgress:
    """How far this rank's launches have come on a communicator behind one user's mark."""

    key: str
    """Of communicator, user and what is forgotten; equal on all ranks."""
    ranks: Sequence[int]
    """Members of the communicator."""
    before: int
    """Digest of what is not in `launches` any more."""
    launches: Sequence[int]
    name_of: Callable[[int], str]
    """What launches of a number are, in words."""
    waited: int = -1
    """Position, in `launches`, of the one that this rank waits in; -1 if it waits in none."""

    def note(self) -> list[Any]:
        """Return what other ranks compare, in JSON's types, however much was launched."""
        last = [*self.launches[-_SHOWN:]]
        digest = _digest(self.before, self.launches)
        return [self.before, len(self.launches), digest, last, self.waited]

    def has_met_others(self, note: Sequence[Any]) -> bool:
        """Return True if launches differ from those of a rank that has left a note.

        Known of what both have launched; on the rank that has launched less, of the last of that.
        """
        before, count, digest, *_ = note
        if before != self.before or not count:
            return False
        if count <= len(self.launches):
            return bool(_digest(before, self.launches[:count]) != digest)
        return any(own != other for own, other in self._last_of_both(note))

    def awaited_from(self, note: Sequence[Any]) -> str | None:
        """Return what this rank waits in, if a rank that has left a note had not launched it."""
        before, count, *_ = note
        if before != self.before or self.waited < count:
            return None
        return self.name_of(self.launches[self.waited])

    def awaited_by(self, note: Sequence[Any]) -> str | None:
        """Return where a rank that has left a note waits, if it is behind all launches here."""
        before, *_, last, waited = note
        if before != self.before or waited < len(self.launches):
            return None
        behind = note[1] - waited
        return self.name_of(last[-behind]) if behind <= len(last) else "something"

    def first_met(self, note: Sequence[Any]) -> tuple[str, str] | None:
        """Return what met first, here and on the other rank; None if that was long ago."""
        for own, other in self._last_of_both(note):
            if own != other:
                return self.name_of(own), self.name_of(other)
        return None

    def _last_of_both(self, note: Sequence[Any]) -> Iterator[tuple[int, int]]:
        """Iterate over what met, as far as a note has it."""
        _, count, _, last, _ = note
        return zip(self.launches[count - len(last) :], last, strict=False)


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
        self._num_gone = 0
        """Launches that are not in the list any more."""
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

    def num_launches(self) -> int:
        """Return the number of all launches so far."""
        return self._num_gone + len(self._launches)

    def has_uncompared(self, mark: OrderMark) -> bool:
        """Return True if there were launches behind a mark."""
        return mark.digest != 0 or len(self._launches) > mark.start

    def digest(self, mark: OrderMark) -> int:
        """Return a digest of all launches behind a mark."""
        return _digest(mark.digest, self._launches[mark.start :])

    def names(self, mark: OrderMark) -> list[str]:
        """Return the last launches behind a mark."""
        return [self._names[number] for number in self._launches[mark.start :]]

    def progress(
        self, mark: OrderMark, *, communicator: str, ranks: Sequence[int], waited: int = 0
    ) -> LaunchProgress:
        """Return how far launches have come behind a mark.

        Args:
            mark: the user's.
            communicator: its name.
            ranks: its members.
            waited: `num_launches` after the launch that this rank waits in; 0 if it waits in none.
        """
        return LaunchProgress(
            key=f"{communicator}/{mark.number}/{mark.num_forgotten}",
            ranks=ranks,
            before=mark.digest,
            launches=self._launches[mark.start :],
            name_of=self._names.__getitem__,
            waited=max(waited - 1 - self._num_gone - mark.start, -1),
        )

    def note_compared(self, mark: OrderMark) -> None:
        """Note that the launches behind a mark are the same on all ranks."""
        start = mark.start  # before the loop, which comes to the marks in any order
        for each in self._marks:
            if each is not mark:
                each.digest = _digest(each.digest, self._launches[each.start : start])
            each.start = 0
        mark.digest = 0
        self._clear()

    def forget(self, mark: OrderMark) -> None:
        """Move a user's mark behind everything that was launched; on all ranks."""
        for each in (mark, self.unsaved):
            each.digest, each.start = 0, len(self._launches)
            each.num_forgotten += 1

    def take_back(self, mark: OrderMark, numbers: Collection[int]) -> None:
        """Remove the launches of `numbers` behind a mark, which all ranks have completed."""
        launches = self._launches
        removed = [at for at in range(mark.start, len(launches)) if launches[at] in numbers]
        for each in self._marks:
            each.start -= sum(at < each.start for at in removed)
        for at in reversed(removed):
            del launches[at]
        self._num_gone += len(removed)

    def fold(self) -> None:
        """Keep no names of many launches; called at the same launch on all ranks."""
        if len(self._launches) < _MOST:
            return
        for each in self._marks:
            each.digest = self.digest(each)
            each.start = 0
        self._clear()

    def _clear(self) -> None:
        self._num_gone += len(self._launches)
        self._launches.clear()


def _digest(before: int, launches: Sequence[int]) -> int:
    return hash((before, *launches)) if launches else before


def _ignore(number: int) -> None:
    pass
