"""Dynamic loss scaling for half precision."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from holdfast.arguments import check_int, check_number
from holdfast.errors import ConfigError, MismatchError

_ENTRIES = ("scale", "num_good_steps")
_LARGEST = 2.0**1023


class LossScaler:
    """Multiplies the loss so that small gradients survive fp16; shared by all optimizers of a run.

    After a step whose gradients were not finite on some rank the scale shrinks by `backoff` and
    the step is skipped; after `growth_interval` good steps in a row it grows by `growth`. It is
    updated once per step, from the decision that all ranks and all optimizers share, so scales
    stay equal. Powers of two keep scaling exact.

    It is a part of the state: `{"scaler": scaler}`.

    Raises:
        ConfigError: A setting is out of its range.
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
        check = partial(check_number, is_finite=True)
        self._minimum = check(minimum, name="LossScaler: minimum", above=0)
        self._scale = check(initial, name="LossScaler: initial", least=self._minimum)
        self._growth = check(growth, name="LossScaler: growth", above=1)
        self._backoff = check(backoff, name="LossScaler: backoff", above=0)
        if self._backoff >= 1:
            raise ConfigError(f"LossScaler: backoff must be below 1, got {backoff}")
        self._growth_interval = check_int(
            growth_interval, name="LossScaler: growth_interval", least=1
        )
        self._num_good_steps = 0

    @property
    def scale(self) -> float:
        """Factor of the loss of the next step."""
        return self._scale

    @property
    def minimum(self) -> float:
        """The scale never falls below this: an overflow there is a fault, not a large scale."""
        return self._minimum

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Return the loss to call `backward` on."""
        return loss * self._scale

    def update(self, *, overflowed: bool) -> None:
        """Update the scale after a step, by the decision of all ranks; `step` calls it."""
        if overflowed:
            self._scale = max(self._scale * self._backoff, self._minimum)
            self._num_good_steps = 0
            return
        self._num_good_steps += 1
        if self._num_good_steps >= self._growth_interval:
            # An infinite one would stay so: half of it is infinite, too.
            self._scale = min(self._scale * self._growth, _LARGEST)
            self._num_good_steps = 0

    def state_dict(self) -> dict[str, object]:
        """Return the scale and the count of good steps; the settings are the run's."""
        return {"scale": self._scale, "num_good_steps": self._num_good_steps}

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Load a scale and a count; raise MismatchError for anything else."""
        scale, count = state.get("scale"), state.get("num_good_steps")
        known = set(state) == set(_ENTRIES)
        if not (known and isinstance(scale, float) and isinstance(count, int)):
            raise MismatchError(f"not a LossScaler's state: it has the entries {sorted(state)}")
        self._scale, self._num_good_steps = scale, count
