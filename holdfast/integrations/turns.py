"""Loaders that one loop trains with: side by side, or one after the other.

A framework's loop is the user's: nobody tells which loaders it goes over, and in which order. What
is seen is in which passes steps are made. A pass with a loop of its own is one that begins training
while no other pass does. Where two loaders have such passes, the passes of neither are epochs, and
a program that is started again begins with the first loop whichever of them was saved in.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

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

    def tree(self) -> list[int]:
        """Return what is saved."""
        return sorted(self.loops)

    def load(self, loops: Iterable[int]) -> None:
        """Continue after a load."""
        self.loops, self._has_asked = set(loops), False

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
        for n in new:
            self._places[n].has_steps = True
        # The rest of a pass was noted before it was saved.
        if not new or len(new) < len(inside) or any(self._places[n].is_rest for n in new):
            return
        outer = min(new, key=lambda n: self._places[n].began)
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

    def count_epochs(self) -> None:
        """Note that the program takes the passes over one loader for epochs.

        Raises:
            ConfigError: Several loaders have loops of their own.
        """
        self.count_passes()
        self._counts_epochs = True
        self._refuse_epoch()

    def count_passes(self) -> None:
        """Note that the program knows at which pass it continues.

        Raises:
            ConfigError: The pass is used up.
        """
        self._refuse_used_up()
        self._has_asked = True

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
