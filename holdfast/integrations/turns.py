"""Loaders that one loop trains with: side by side, or one after the other.

A framework's loop is the user's: nobody tells which loaders it goes over, and in which order. What
is seen is in which passes steps are made. A pass with a loop of its own is one that begins training
while no other pass does. Where two loaders have such passes, the passes of neither are epochs, and
a program that is started again begins with the first loop whichever of them was saved in.

A shorter loader next to a longer one (`zip_longest`, `itertools.cycle`) has ended while the pass
over the other one is in progress. A program that is started again would begin it again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from holdfast.errors import ConfigError


class PassPlace(Protocol):
    """Where a loader is. The pass here is the one in progress, else the last one."""

    began: int
    """When it began, in nanoseconds of a monotonic clock."""
    is_rest: bool
    """True if it is the rest of a pass that a load moved to."""
    has_steps: bool
    """True once a step was counted or saved in it; `Turns` sets it."""
    was_left: bool
    """True if the loop has left it before its end."""

    @property
    def num_batches(self) -> int:
        """Batches of the pass in progress that the loop has taken."""

    @property
    def is_inside(self) -> bool:
        """True while a pass is in progress."""

    @property
    def is_waiting(self) -> bool:
        """True while the rest of a pass that a load has moved to has not begun."""


class Turns:
    """The loaders that have loops of their own, and whether a resumed program continues in one.

    Args:
        name: Of the class that has them, for messages.
        places: Of the loaders.
    """

    def __init__(self, name: str, places: Sequence[PassPlace]) -> None:
        self._name, self._places = name, places
        self.loops: set[int] = set()
        """The numbers of those that have loops of their own."""
        self._counts_epochs = self._has_asked = False
        self._beside: dict[tuple[int, int], int] = {}
        """Of loaders whose passes began together (a shorter one, a longer one): batches of the
        longer one when both were last seen in progress."""
        self._longer: dict[int, int] = {}
        """Of loaders that have ended next to a longer one: that one."""
        self._ended: set[int] = set()
        """Those of them next to which the pass over the longer one is still in progress."""
        self._loaded: set[int] = set()
        """Those of a load, until the program has made a step or asked for their passes."""

    def tree(self) -> dict[str, Any]:
        """Return what is saved."""
        longer = [[n, m] for n, m in sorted(self._longer.items())]
        return {"own": sorted(self.loops), "ended": sorted(self._ended), "longer": longer}

    def load(self, tree: Mapping[str, Any]) -> None:
        """Continue after a load."""
        self.loops, self._has_asked = set(tree["own"]), False
        self._beside, self._longer = {}, dict(tree["longer"])
        self._ended, self._loaded = set(tree["ended"]), set(tree["ended"])

    def longer(self, number: int) -> int:
        """Return the loader next to which one has ended, or this one."""
        return self._longer[number] if number in self._ended else number

    def note_step(self) -> None:
        """Note that a step was made with the passes in progress.

        Raises:
            ConfigError: They are not those that the saved run was in.
        """
        self._refuse_used_up()
        self.note_save()

    def note_save(self) -> None:
        """Note that the passes in progress are saved.

        Raises:
            ConfigError: The resumed program has begun a loop again that the saved one had ended.
        """
        inside = [n for n, place in enumerate(self._places) if place.is_inside]
        new = [n for n in inside if not self._places[n].has_steps]
        self._note_ended(inside, new)
        for n in new:
            self._places[n].has_steps = True
        # The rest of a pass was noted before it was saved.
        if not new or len(new) < len(inside) or any(self._places[n].is_rest for n in new):
            return
        outer = min(new, key=lambda n: self._places[n].began)
        if self._longer.get(outer) in new:  # the pass that goes on is the epoch
            outer = self._longer[outer]
        waiting = [n for n in self.loops if self._places[n].is_waiting]
        if waiting:
            raise ConfigError(
                f"{self._name}: the checkpoint was saved in the loop over loader {waiting[0]} (in "
                f"the order in which loaders were given), and the resumed program has begun the "
                f"loop over loader {outer} again, which would train on its data twice; "
                f"{_HOW_TO_COUNT}"
            )
        self.loops.add(outer)
        self._refuse_epoch()

    def _note_ended(self, inside: Sequence[int], new: Sequence[int]) -> None:
        """Note which loaders have ended next to a longer one.

        That is one whose pass began before the other's first step, and that is over while the loop
        takes further batches of the other. A loop within a loop begins again there.

        Raises:
            ConfigError: The resumed program has begun one of them again.
        """
        loaded, self._loaded = self._loaded, set()
        for n in loaded.intersection(inside):
            longer = self._longer[n]
            if longer not in inside or self._places[longer].is_rest:
                raise ConfigError(
                    f"{self._name}: the checkpoint was saved when loader {n} (in the order in "
                    f"which loaders were given) had ended next to loader {longer}, and the resumed "
                    f"program has begun it again, which would train on its data twice. Let the "
                    f"program say that it stays ended: `zip_longest(longer, shorter if "
                    f"checkpoints.epoch_of(shorter) == epoch else ())`; or let the loader begin "
                    f"again whenever it ends, by a generator `while True: yield from shorter` in "
                    f"place of itertools.cycle, whose place nobody can tell. If the loop begins it "
                    f"again on purpose, ask for epoch_of(shorter) before"
                )
        for n in new:
            self._beside |= {(n, m): 0 for m in new if m != n}
        for n, m in list(self._beside):
            if m not in inside or (n in new) != (m in new) or self._places[n].was_left:
                del self._beside[n, m]
            elif n in inside:
                self._beside[n, m] = self._places[m].num_batches
            elif self._places[m].num_batches > self._beside[n, m]:
                self._longer[n] = m
                self._ended.add(n)
                if n in self.loops:
                    self.loops = self.loops - {n} | {m}
        for n in [*self._ended]:
            if n in inside or self._longer[n] not in inside:
                self._ended.remove(n)

    def count_epochs(self) -> None:
        """Note that the program takes the passes over one loader for epochs.

        Raises:
            ConfigError: Several loaders have loops of their own.
        """
        self.count_passes()
        self._counts_epochs = True
        self._refuse_epoch()

    def count_passes(self, number: int | None = None) -> None:
        """Note that the program knows at which pass it continues.

        Args:
            number: Of the loader whose passes it asks for.

        Raises:
            ConfigError: The pass is used up.
        """
        self._refuse_used_up()
        self._has_asked = True
        if number is not None:
            self._loaded.discard(number)

    def _refuse_epoch(self) -> None:
        """Raise ConfigError if epochs are counted that no loader has."""
        if self._counts_epochs and len(self.loops) > 1:
            raise ConfigError(
                f"{self._name}.epoch: the loop trains with several loaders one after the other, "
                f"and a resumed run would begin with the first of them again; {_HOW_TO_COUNT}"
            )

    def _refuse_used_up(self) -> None:
        """Raise ConfigError if the program has used up the rest of a pass without a step."""
        if self._has_asked:  # a loop that knows where it is may leave a pass at once
            return
        for n, place in enumerate(self._places):
            if place.is_rest and place.was_left and not place.has_steps:
                raise ConfigError(
                    f"{self._name}: the checkpoint was saved within a pass over loader {n}, and "
                    f"the program has taken a batch of its rest and left it, so that the rest "
                    f"would not be trained. Look at batches (next(iter(loader))) before the "
                    f"resume; a loop that leaves a pass at its first batch asks for "
                    f"epoch or epoch_of before"
                )


_HOW_TO_COUNT = (
    "count the passes of each: `for epoch in range(checkpoints.epoch_of(last), num_epochs)`, and "
    "`if checkpoints.epoch_of(first) == epoch:` before each loop over a loader but the last"
)
