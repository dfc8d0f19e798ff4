"""Loaders that one loop trains with: side by side, or one after the other.

A framework's loop is the user's: nobody tells which loaders it goes over, and in which order. What
is seen is in which passes steps are made. A pass with a loop of its own is one that begins training
while no other pass does. Where two loaders have such passes, the passes of neither are epochs, and
a program that is started again begins with the first loop whichever of them was saved in.

A shorter loader next to a longer one (`zip_longest`, `itertools.cycle`) has ended while the pass
over the other one is in progress. A program that is started again would begin it again.

A loop within a loop makes several steps with one batch of the outer loader. A program that is
started again takes the next batch there, and the rest of the inner loop with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from holdfast.errors import ConfigError, MismatchError, counted


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
    takes: Callable[[], None]
    """Called when the loop takes a batch, which is counted already."""

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
        self._nesting = Nesting(name, places)
        self._num_saved = 0
        """How many loaders the run had that a load has brought back."""

    def tree(self) -> dict[str, Any]:
        """Return what is saved."""
        longer = [[n, m] for n, m in sorted(self._longer.items())]
        own, ended, within = sorted(self.loops), sorted(self._ended), self._nesting.tree()
        num_loaders = len(self._places)
        return {
            "loaders": num_loaders,
            "own": own,
            "ended": ended,
            "longer": longer,
            "within": within,
        }

    def load(self, tree: Mapping[str, Any]) -> None:
        """Continue after a load.

        Raises:
            MismatchError: The saved run had loaders that this program lacks.
        """
        self._num_saved = tree["loaders"]
        if self._places:  # a program without any loader may only evaluate
            self._refuse_fewer()
        self.loops, self._has_asked = set(tree["own"]), False
        self._beside, self._longer = {}, dict(tree["longer"])
        self._ended, self._loaded = set(tree["ended"]), set(tree["ended"])
        self._nesting.load(tree["within"])

    def longer(self, number: int) -> int:
        """Return the loader next to which one has ended, or this one."""
        return self._longer[number] if number in self._ended else number

    def note_step(self) -> None:
        """Note that a step was made with the passes in progress.

        Raises:
            ConfigError: They are not those that the saved run was in.
            MismatchError: As of `load`.
        """
        self._refuse_fewer()
        self._refuse_used_up()
        self._nesting.refuse_saved()
        self._note()

    def note_save(self) -> None:
        """Note that the passes in progress are saved.

        Raises:
            ConfigError: The resumed program has begun a loop again that the saved one had ended; or
                the save is inside of a loop within the loop over a batch.
            MismatchError: As of `load`.
        """
        self._refuse_fewer()
        self._nesting.refuse_save()
        self._note()

    def _note(self) -> None:
        """Note which passes are in progress."""
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
            MismatchError: As of `load`.
        """
        self._refuse_fewer()
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

    def _refuse_fewer(self) -> None:
        """Raise MismatchError if the saved run had more loaders than the program has."""
        if self._num_saved > len(self._places):
            raise MismatchError(
                f"{self._name}: the checkpoint has the places of "
                f"{counted(self._num_saved, 'loader')}, and the program has "
                f"{counted(len(self._places), 'loader')} now: a loop over one that is not known "
                f"would begin again. Give all of them, in the order in which the saved run had them"
            )

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


class Nesting:
    """Which passes are loops within one batch of another pass.

    A pass that is one began after the outer loop had taken its batch, and goes on while the outer
    one takes no other. Its first batch alone does not tell it from loops side by side (`zip`),
    unless an earlier one had begun and ended within another batch of the outer pass.

    Args:
        name, places: As of `Turns`.
    """

    def __init__(self, name: str, places: Sequence[PassPlace]) -> None:
        self._name, self._places = name, places
        self._around: dict[int, dict[int, tuple[int, int]]] = {}
        """Of each loader: those in progress when its pass began, with the batches of them, and of
        it, that the loop had taken then."""
        self._side_by_side: set[tuple[int, int]] = set()
        """Of which the first one has given a batch while a pass over the second was in progress."""
        self._first_in: dict[tuple[int, int], int] = {}
        """When the pass over the second began, of the last pass over the first within it."""
        self._again: set[tuple[int, int]] = set()
        """Of which passes over the first began again within one over the second."""
        self._saved: set[tuple[int, int]] = set()
        """Which may have been nested when the newest checkpoint was made."""
        for number, place in enumerate(places):
            place.takes = partial(self._take, number)

    def tree(self) -> list[list[int]]:
        """Return what is saved: which passes may be nested, as far as is known."""
        return [[n, m] for n, m in sorted(self._saved)]

    def load(self, tree: Sequence[Sequence[int]]) -> None:
        """Continue after a load."""
        self._saved = {(n, m) for n, m in tree}
        self._around, self._first_in = {}, {}

    def refuse_save(self) -> None:
        """Note what is saved.

        Raises:
            ConfigError: A pass is known to be nested: a resumed run would leave out the rest of it.
        """
        self._saved = {(n, m) for n in self._around for m in self._unchanged(n)}
        for n, m in sorted(self._saved):
            if self._is_nested(n, m):
                raise ConfigError(
                    f"{self._name}: this save is {self._within(n, m)}. {_SAVE_OUTSIDE}"
                )

    def refuse_saved(self) -> None:
        """Raise ConfigError if the newest checkpoint was made in a pass that is nested."""
        for n, m in sorted(self._saved):
            if (m, n) in self._side_by_side:
                self._saved.remove((n, m))
            elif self._is_nested(n, m):
                raise ConfigError(
                    f"{self._name}: the last checkpoint was made {self._within(n, m)}. Remove that "
                    f"checkpoint. {_SAVE_OUTSIDE}"
                )

    def _take(self, number: int) -> None:
        """Note that the loop has taken a batch."""
        place = self._places[number]
        others = [m for m, each in enumerate(self._places) if m != number and each.is_inside]
        self._side_by_side |= {(number, m) for m in others}
        if place.num_batches == 1 or number not in self._around:
            taken = place.num_batches
            self._around[number] = {m: (self._places[m].num_batches, taken) for m in others}
            for m in others:
                began = self._places[m].began
                if self._first_in.get((number, m)) == began:
                    self._again.add((number, m))
                self._first_in[number, m] = began

    def _unchanged(self, number: int) -> list[int]:
        """Return those around a pass in progress that have given no batch since it began."""
        if not self._places[number].is_inside:
            return []
        return [
            m
            for m, (taken, _) in self._around.get(number, {}).items()
            if self._places[m].is_inside
            and self._places[m].num_batches == taken
            and (m, number) not in self._side_by_side
        ]

    def _is_nested(self, n: int, m: int) -> bool:
        """Return True if passes over one loader are known to be loops within batches of another."""
        if (m, n) in self._side_by_side:
            return False
        goes_on = m in self._unchanged(n) and self._places[n].num_batches > self._around[n][m][1]
        return goes_on or (n, m) in self._again

    def _within(self, n: int, m: int) -> str:
        return (
            f"inside of the loop over loader {n} (in the order in which loaders were given), which "
            f"is within one batch of the loop over loader {m}: a run that is resumed would take "
            f"the next batch of loader {m}, and train with what is left of loader {n} there"
        )


_SAVE_OUTSIDE = (
    "Save behind the inner loop, where the outer batch is done: after_step(every=0) inside, and "
    "save() there"
)
_HOW_TO_COUNT = (
    "count the passes of each: `for epoch in range(checkpoints.epoch_of(last), num_epochs)`, and "
    "`if checkpoints.epoch_of(first) == epoch:` before each loop over a loader but the last"
)
