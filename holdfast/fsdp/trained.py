"""What is trained is changed alike by all ranks that reduce together, or by none."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from torch import distributed as dist

from holdfast.errors import DeadlineError, some_of
from holdfast.fsdp import _torch
from holdfast.fsdp.launch_log import LaunchLog
from holdfast.optim.microbatches import Change
from holdfast.parallel import Control

_LOOK_EACH_S = 0.5
_LONGEST_PAUSE_S = 0.02


class TrainedParameters:
    """Lets ranks agree before a change of `requires_grad` has an effect.

    It decides what a reduction takes, and in which order units are reduced. If ranks differed in
    it, gradients of different parameters would be added up, or gloo would end the process.

    Each rank sees a change of its own alone: at the next forward with gradients of a unit, or as
    one is reduced. It counts itself in the store and waits until all ranks of the communicator have
    made the same change there. One that has not waits for this one in something else, and leaves a
    note of that. At first ranks agree: they compare what is trained before a model is sharded.

    Args:
        groups: parameters, of all units of a model.
        log: of the same model.
        control: of all ranks.

    Cost: none without a change; else a few requests to the store for each communicator.
    """

    def __init__(self, groups: Sequence[Any], *, log: LaunchLog, control: Control) -> None:
        self._groups = groups
        self._log = log
        self._control = control
        self._reduced: dict[dist.ProcessGroup, list[Any]] = {}
        """By communicator of several ranks, what is reduced on it."""
        for group in groups:
            group.agree = self.agree
            for over in _torch.reduced_over(group):
                if over.size() > 1:
                    self._reduced.setdefault(over, []).append(group)
        self._agreed = {over: self._trained_on(over) for over in self._reduced}
        self._last: dict[dist.ProcessGroup, tuple[int, str]] = {}
        """How often ranks have agreed, and where they counted themselves then."""

    def agree(self) -> None:
        """Wait until all ranks that reduce together have changed what this one has.

        Raises:
            PlanError: Some have not.
            DeadlineError: Some have not within the limit of collectives.
        """
        for over, agreed in self._agreed.items():
            now = self._trained_on(over)
            if now != agreed:
                self._agree_on(over, now)
        for group in self._groups:
            group.change_trained()

    def _trained_on(self, over: dist.ProcessGroup) -> list[bool]:
        return [each for group in self._reduced[over] for each in _torch.trained(group)]

    def _agree_on(self, over: dist.ProcessGroup, now: list[bool]) -> None:
        size, digest = over.size(), hash((*now,))
        number, last_key = self._last.get(over, (0, ""))
        place = f"trained/{self._log.name_on(over)}/{number}"
        key = f"{place}/{digest}"
        what = self._changed(over, now)
        self._control.count(key, 1)
        try:
            self._wait(key, size, Change(key=place, digest=digest, what=what))
        except BaseException:
            if self._control.count(key, -1) + 1 < size:
                raise
            # All have come meanwhile: others go on by this, up to what ends the microbatch here.
            self._control.count(key, 1)
            self._agreed[over], self._last[over] = now, (number + 1, key)
            raise
        self._agreed[over], self._last[over] = now, (number + 1, key)
        if last_key and over.rank() == 0:  # all have left it
            self._control.forget_count(last_key)

    def _changed(self, over: dist.ProcessGroup, now: list[bool]) -> str:
        """Return in words what is not as ranks have agreed."""
        names = [name for group in self._reduced[over] for name in group.names]
        rows = zip(names, now, self._agreed[over], strict=True)
        changed = [f"'{name}' (now {each})" for name, each, before in rows if each != before]
        return f"requires_grad of {some_of(changed, most=3)}"

    def _wait(self, key: str, size: int, change: Change) -> None:
        """Wait until so many ranks have counted themselves."""
        limit_s = self._control.data_timeout_s
        started = time.monotonic()
        pause_s, look_at_s = 0.0005, _LOOK_EACH_S
        while (count := self._control.count(key, 0)) < size:
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            waited_s = time.monotonic() - started
            if waited_s > limit_s:
                raise DeadlineError(
                    f"{change.what} was changed on rank {self._control.rank}, and on {count - 1} "
                    f"of the {size - 1} other ranks of a data axis within {limit_s:g} s. Freeze "
                    f"and thaw on all ranks. Look at what happened on the others first; start "
                    f"again from the last checkpoint",
                    details={"waited_s": waited_s},
                )
            if waited_s >= look_at_s and self._log.look is not None:
                look_at_s = waited_s + _LOOK_EACH_S
                self._log.look(waited_s, change)
