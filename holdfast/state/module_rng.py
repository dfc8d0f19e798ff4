"""Random streams of one module, which no other module draws from."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from holdfast.arguments import check_int
from holdfast.errors import ConfigError
from holdfast.parallel.layout import DENSE_AXES
from holdfast.state.generators import State
from holdfast.state.rng import RNG


class ModuleRNG(RNG):
    """Random streams of one module's own: no other module, and nothing outside, draws from them.

        streams = ModuleRNG(seed=1)
        with streams:
            features = encoder(images)  # dropout draws from this module's streams

    Python's, NumPy's, torch's and the current CUDA device's global generators are what modules
    draw from. Inside `with` they are this module's; outside they are what they would be without it.
    So modules on the same ranks do not shift each other's masks, and a module has the same streams
    wherever it runs. A part of the state, like `RNG`, in whose place it is stored and loaded; a
    load sets the streams whether or not they are entered.

    Args:
        seed: what the streams start from; one for each module, and for ranks that draw
            differently (see `groups.index("dp_cp")`), equal along `shared`.
        axes: as of `RNG`.
        shared: as of `RNG`.

    Raises:
        ConfigError: A seed that is no integer from 0, entering twice.

    Cost: two copies of some kB at each entry and exit; on a CUDA device it waits for nothing.
    """

    def __init__(
        self,
        *,
        seed: int,
        axes: Sequence[str] = DENSE_AXES,
        shared: Sequence[str] | None = None,
    ) -> None:
        """Seed the streams; the global ones are left as they are."""
        super().__init__(axes=axes, shared=shared)
        seed = check_int(seed, name="ModuleRNG: seed", least=0)
        self._held: dict[str, State] = {}
        self._outer: dict[str, State] | None = None
        outer = super()._states()
        try:
            _seed_global(seed)
            self._held = super()._states()
        finally:
            self._set_global(outer)

    @property
    def is_entered(self) -> bool:
        """Whether the global generators are this module's now."""
        return self._outer is not None

    def __enter__(self) -> ModuleRNG:
        """Let everything draw from these streams."""
        if self._outer is not None:
            raise ConfigError("the streams of a module were entered twice; leave them first")
        self._outer = super()._states()
        self._set_global(self._held)
        return self

    def __exit__(self, *exception: object) -> None:
        """Keep the streams where they are, and give back what was there before."""
        if self._outer is None:
            return
        self._held = super()._states()
        outer, self._outer = self._outer, None
        self._set_global(outer)

    def _states(self) -> dict[str, State]:
        """The streams of the module, whether entered or not."""
        return super()._states() if self.is_entered else dict(self._held)

    def _set_state(self, name: str, state: object) -> None:
        """Set one of the module's streams; MismatchError where the state is of another kind."""
        if self.is_entered:
            super()._set_state(name, state)
            return
        with self:
            super()._set_state(name, state)

    def _set_global(self, states: Mapping[str, State]) -> None:
        for name, state in states.items():
            super()._set_state(name, state)


def _seed_global(seed: int) -> None:
    """Seed Python's, NumPy's and torch's generators, that of the current device included."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_available():
        torch.cuda.manual_seed(seed)
