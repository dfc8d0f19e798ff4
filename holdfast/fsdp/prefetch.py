"""Gathers units ahead in the order in which they run, which a model alone knows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from holdfast.fsdp import _torch


class Prefetch:
    """Records the order of units in each forward of a model, and gathers by that of the last one.

    The module tree says nothing about it: a layer gathered ahead that ran long ago stays whole to
    the end. Until the order is known nothing is gathered ahead in forward. A unit that runs at
    another place than last time is looked up in the order, and what was gathered ahead in vain is
    freed: its values would be out of date after a step.

    Ranks of a data axis run the same units in the same order, so they launch the same gathers.

    Args:
        states: FSDP2's states of all units, the model's first.
        num_prefetched: number of units to gather ahead, in forward and in backward; with 0 FSDP2
            chooses in backward.

    Cost: some microseconds a unit and forward; lists as long as the order if it has changed.
    """

    def __init__(self, states: Sequence[Any], num_prefetched: int) -> None:
        self._root = states[0] if states else None
        self._num = num_prefetched
        self._unit_of = {id(group): each for each in states for group in _torch.param_groups(each)}
        self._order: list[Any] = []
        """Units in the order in which they began in the last forward."""
        self._ahead: list[list[Any]] = []
        """By place in the order, the units to gather."""
        self._now: list[Any] | None = None
        """Units that have begun in this forward; None between two."""
        self._place = 0
        """Place in the order where the next unit is expected."""
        self._requested: list[Any] = []
        """Units gathered ahead of the last one that began."""
        self._num_ran = 0
        self._ended: list[Any] = []
        """Groups in the order in which they ended in the last forward with a backward."""
        self.order: tuple[Any, ...] = ()
        """Units in the order by which they are gathered ahead; empty if it is not known."""

    @property
    def is_running(self) -> bool:
        """True while a forward of the model runs."""
        return self._now is not None

    def forget(self) -> None:
        """Forget the order, on all ranks after an error: some have not seen the last forward."""
        self._order, self._ahead, self._ended, self.order = [], [], [], ()
        self._now, self._requested = None, []
        for state in self._unit_of.values():  # what is gathered ahead in a forward is chosen there
            _torch.set_behind(state, [])

    def begin(self) -> None:
        """Note that a forward of the model begins."""
        for each in self._requested:  # by one that an error has left
            _torch.drop_ahead(each)
        self._now, self._place, self._requested = [], 0, []
        self._num_ran = _torch.num_ran(self._root)

    def before(self, state: Any) -> None:
        """Choose what to gather ahead of a unit that is about to run."""
        ahead: list[Any] = []
        # Outside of a forward of the model (recomputed, or called alone) nothing is known.
        if self._now is not None:
            self._now.append(state)
            place: int | None = self._place
            if self._place >= len(self._order) or self._order[self._place] is not state:
                place = self._find(state)
            if place is not None:
                self._place, ahead = place + 1, self._ahead[place]
            for each in self._requested:
                if each is not state and each not in ahead:
                    _torch.drop_ahead(each)
            self._requested = ahead
        if _torch.AHEAD(state) is not ahead:
            _torch.set_ahead(state, ahead)

    def end(self) -> None:
        """Note that a forward of the model has ended, and choose for its backward and the next."""
        now, self._now = self._now, None
        for each in self._requested:
            _torch.drop_ahead(each)
        self._requested = []
        if now is not None and now != self._order:
            self._order = now
            self.order = tuple(now) if self._num else ()
            self._ahead = [
                _distinct(now[place + 1 :], self._num, but=state) for place, state in enumerate(now)
            ]
        if not torch.is_grad_enabled():
            _torch.forget_ran(self._root, first=self._num_ran)
        elif self._num:
            self._choose_behind(_torch.ran(self._root, first=self._num_ran))

    def leave(self) -> None:
        """Note that no forward of the model runs: also one that an error has left is over.

        What it has gathered ahead others may not have: nobody waits for that here.
        """
        self._now = None

    def _find(self, state: Any) -> int | None:
        """Return the place of a unit that is not where it is expected: a later one, or any."""
        order = self._order
        for first in (self._place, 0):
            if state in order[first:]:
                return order.index(state, first)
        return None

    def _choose_behind(self, ended: list[Any]) -> None:
        """Choose what each unit gathers in its backward: the units that ended before it.

        Of units that ran several times FSDP2 knows which time it is.
        """
        if not ended or ended == self._ended:
            return
        self._ended = ended
        several = {id(group) for group, count in Counter(ended).items() if count > 1}
        order = [self._unit_of[id(group)] for group in ended]
        for place, state in enumerate(order):
            is_once = several.isdisjoint(map(id, _torch.param_groups(state)))
            behind = _distinct(order[:place][::-1], self._num, but=state) if is_once else []
            _torch.set_behind(state, behind)


def _distinct(states: Iterable[Any], num: int, *, but: Any) -> list[Any]:
    """Return the first units of some, each once, but for one."""
    result: list[Any] = []
    for each in states:
        if len(result) == num:
            break
        if each is not but and each not in result:
            result.append(each)
    return result
