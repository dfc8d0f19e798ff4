"""Learning rate and weight decay as functions of the step."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import Any, Protocol

from holdfast.errors import MismatchError


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleSettings:
    """The two curves: linear warm-up, then a cosine, to values that stay from `decay_steps` on."""

    lr: float
    """Learning rate after warm-up."""
    min_lr: float
    """Learning rate from `decay_steps` on."""
    warmup_steps: int
    """Steps of the linear rise: step i of them runs at lr x (i + 1) / warmup_steps."""
    decay_steps: int
    """Step at which both curves end."""
    weight_decay: float
    """Weight decay at step 0."""
    end_weight_decay: float
    """Weight decay from `decay_steps` on."""

    def lr_at(self, step: int) -> float:
        """Learning rate of the update that follows `step` finished ones."""
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        length = self.decay_steps - self.warmup_steps
        done = 1.0 if step >= self.decay_steps else (step - self.warmup_steps) / length
        return _cosine(self.lr, self.min_lr, done=done)

    def weight_decay_at(self, step: int) -> float:
        """Weight decay of the update that follows `step` finished ones."""
        done = 1.0 if step >= self.decay_steps else step / self.decay_steps
        return _cosine(self.weight_decay, self.end_weight_decay, done=done)


class HasParamGroups(Protocol):
    """An optimizer, of torch or in shards."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Hyperparameters by group; setting an entry changes the group."""
        ...


class Schedule:
    """Sets lr and weight decay of an optimizer's groups; used like a torch scheduler.

    Groups whose weight decay is 0 at construction keep it. The state is the position and the
    settings: a resumed run continues along the curves it was started with, whatever its flags say
    now; `on_override` is called then.
    """

    def __init__(
        self,
        optimizer: HasParamGroups,
        *,
        settings: ScheduleSettings,
        on_override: Callable[[str], None] | None = None,
    ) -> None:
        self.settings = settings
        self._optimizer = optimizer
        self._on_override = on_override
        self._num_steps = 0
        self._decays = [group["weight_decay"] != 0 for group in optimizer.param_groups]
        self.apply()

    @property
    def num_steps(self) -> int:
        """Finished steps."""
        return self._num_steps

    @property
    def lr(self) -> float:
        """Learning rate of the next update."""
        return self.settings.lr_at(self._num_steps)

    @property
    def weight_decay(self) -> float:
        """Weight decay of the next update, in groups that have any."""
        return self.settings.weight_decay_at(self._num_steps)

    def step(self) -> None:
        """Move on by one finished step."""
        self._num_steps += 1
        self.apply()

    def state_dict(self) -> dict[str, object]:
        """Position and settings, plain numbers."""
        return {"num_steps": self._num_steps, "settings": asdict(self.settings)}

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Take position and settings, and set the optimizer's groups.

        Raises:
            MismatchError: the state is not one of this schedule.
        """
        num_steps, stored = state.get("num_steps"), state.get("settings")
        names = [item.name for item in fields(ScheduleSettings)]
        if (
            not isinstance(num_steps, int)
            or not isinstance(stored, dict)
            or set(stored) != set(names)
        ):
            raise MismatchError(
                f"the stored scheduler state has the entries {sorted(state)}, which is not a "
                f"warm-up and cosine schedule: add --no-load-scheduler to start it afresh"
            )
        loaded = ScheduleSettings(**stored)
        if loaded != self.settings and self._on_override is not None:
            changed = [name for name in names if stored[name] != getattr(self.settings, name)]
            text = ", ".join(
                f"{name} {stored[name]:g} (not {getattr(self.settings, name):g})"
                for name in changed
            )
            self._on_override(
                f"the schedule continues as the checkpoint's: {text}; "
                f"--no-load-scheduler starts it afresh with this run's settings"
            )
        self.settings = loaded
        self._num_steps = num_steps
        self.apply()

    def apply(self) -> None:
        """Set the optimizer's groups; needed after something else changed them."""
        for group, decays in zip(self._optimizer.param_groups, self._decays, strict=True):
            group["lr"] = self.lr
            if decays:
                group["weight_decay"] = self.weight_decay


def _cosine(start: float, end: float, *, done: float) -> float:
    return end + (start - end) * 0.5 * (1.0 + math.cos(math.pi * done))
