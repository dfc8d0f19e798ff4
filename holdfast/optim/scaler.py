"""Dynamic loss scaling for half precision."""

from __future__ import annotations

import math

from torch import Tensor

from holdfast.errors import ConfigError, MismatchError

_ENTRIES = ("scale", "num_good_steps")


class LossScaler:
    """Multiplies the loss so that small gradients survive fp16; shared by all optimizers of a run.

    After a step whose gradients were not finite on some rank the scale shrinks by `backoff` and
    the step is skipped; after `growth_interval` good steps in a row it grows by `growth`. It is
    updated once per step, from the decision that all ranks and all optimizers share, so scales
    cannot drift apart. Powers of two keep scaling exact.

    A part of the state: `{"scaler": scaler}`. Raises ConfigError for settings that cannot work.
    """

    def __init__(
        self,
        *,
        initial: float = 2.0**16,
        growth: float = 2.0,
        backoff: float = 0.5,
        growth_interval: int = 2000,
        minimum: float = 1.0,
    ) -> None:
        numbers = (initial, growth, backoff, growth_interval, minimum)
        are_finite = all(isinstance(n, int | float) and math.isfinite(n) for n in numbers)
        if not are_finite or not (
            initial >= minimum > 0 and growth > 1 and 0 < backoff < 1 and growth_interval > 0
        ):
            raise ConfigError(
                f"LossScaler(initial={initial}, growth={growth}, backoff={backoff}, "
                f"growth_interval={growth_interval}, minimum={minimum}): needs finite numbers with "
                f"initial >= minimum > 0, growth > 1, 0 < backoff < 1, growth_interval > 0"
            )
        self._scale = float(initial)
        self._growth = growth
        self._backoff = backoff
        self._growth_interval = growth_interval
        self._minimum = minimum
        self._num_good_steps = 0

    @property
    def scale(self) -> float:
        """What the loss of the next step is multiplied by."""
        return self._scale

    @property
    def minimum(self) -> float:
        """What the scale never falls below: an overflow there is a fault, not a large scale."""
        return self._minimum

    def scale_loss(self, loss: Tensor) -> Tensor:
        """The loss to call `backward` on."""
        return loss * self._scale

    def update(self, *, overflowed: bool) -> None:
        """A step is over; `overflowed` as agreed by all ranks. The optimizers' step calls this."""
        if overflowed:
            self._scale = max(self._scale * self._backoff, self._minimum)
            self._num_good_steps = 0
            return
        self._num_good_steps += 1
        if self._num_good_steps >= self._growth_interval:
            self._scale *= self._growth
            self._num_good_steps = 0

    def state_dict(self) -> dict[str, object]:
        """Scale and the count of good steps; the settings are the run's."""
        return {"scale": self._scale, "num_good_steps": self._num_good_steps}

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Take a scale and a count; MismatchError for anything else."""
        scale, count = state.get("scale"), state.get("num_good_steps")
        known = set(state) == set(_ENTRIES)
        if not (known and isinstance(scale, float) and isinstance(count, int)):
            raise MismatchError(f"not a LossScaler's state: it has the entries {sorted(state)}")
        self._scale, self._num_good_steps = scale, count
