"""Lightning Fabric: modules, optimizers and the places of loaders, saved and resumed.

    checkpoints = FabricCheckpoints.resume(fabric, "checkpoints", state, loaders=[loader])
    for epoch in range(checkpoints.epoch, num_epochs):
        for batch in loader:
            ...
            checkpoints.after_step(every=100)
    checkpoints.close()

`pip install holdfast[fabric]`.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping, Sequence
from typing import Any

import torch
from torch import nn

from holdfast.checkpoint import LoadReport, PendingSave
from holdfast.errors import ConfigError
from holdfast.integrations.adapters import put_rank_averages, rank_averages
from holdfast.integrations.fetches import LoadedStreams
from holdfast.integrations.gradients import (
    GradientWatch,
    own_gradients,
    parameters_of,
    put_gradients,
    unused_of_replicas,
)
from holdfast.integrations.loaders import LoaderPlace, place_of, shares_of_data
from holdfast.integrations.names import owners_of
from holdfast.integrations.turns import Turns
from holdfast.integrations.world import CheckpointsOfWorld, of_each_rank_or_first, put_values
from holdfast.state import RNG, OptimizerState, Stored

_STRATEGIES = ("SingleDeviceStrategy", "DDPStrategy", "ModelParallelStrategy")
_OWN, _RNG = "fabric", "rng"
"""The parts that are not entries of the caller's state."""


class FabricCheckpoints(CheckpointsOfWorld):
    """Saves and resumes a state of Fabric's objects, and where its loaders are.

    Args:
        fabric: the `Fabric`, launched.
        root: directory of the checkpoints.
        state: what `fabric.save` would take: modules and optimizers that `fabric.setup` returned,
            schedulers and other objects with a state, values (a count of steps), which a load puts
            into it.
        loaders: those that `fabric.setup_dataloaders` returned.
        options: further arguments of `Checkpointer`.

    Called by all ranks, as every method.

    Raises:
        ConfigError: a strategy, a loader or a name in the state that is not supported.
    """

    def __init__(
        self,
        fabric: Any,
        root: str | os.PathLike[str],
        state: MutableMapping[str, Any],
        *,
        loaders: Sequence[Any] = (),
        **options: Any,
    ) -> None:
        strategy = type(fabric.strategy).__name__
        if strategy not in _STRATEGIES:
            raise ConfigError(f"FabricCheckpoints does not support {strategy}")
        taken = sorted({_OWN, _RNG} & state.keys())
        if taken:
            raise ConfigError(
                f"FabricCheckpoints does not support an entry of the state named {taken[0]!r}, "
                f"under which it keeps what is its own; give it another name"
            )
        self._state, self._loaders = state, list(loaders)
        num_shares = shares_of_data(fabric.strategy)
        self._places = [_place(loader, num_shares) for loader in loaders]
        self._turns = Turns("FabricCheckpoints", self._places)
        optimizers = [getattr(each, "optimizer", each) for each in state.values()]
        self._gradients = GradientWatch(
            each for each in optimizers if isinstance(each, torch.optim.Optimizer)
        )
        super().__init__(root, name="fabric", **options)

    @classmethod
    def resume(
        cls,
        fabric: Any,
        root: str | os.PathLike[str],
        state: MutableMapping[str, Any],
        *,
        loaders: Sequence[Any] = (),
        **options: Any,
    ) -> FabricCheckpoints:
        """Return checkpoints, with the newest of them loaded, if there is one.

        Args, errors: as of the class, and of `Checkpointer.load`.
        """
        return cls(fabric, root, state, loaders=loaders, **options)._resumed()

    @property
    def epoch(self) -> int:
        """The pass over the first loader that is in progress, or comes next.

        Raises:
            ConfigError: loops over several loaders follow each other: `epoch_of` has the passes of
                each.
        """
        self._turns.count_epochs()
        return self._epoch_of(self._turns.longer(0)) if self._loaders else 0

    def epoch_of(self, loader: Any) -> int:
        """The pass over a loader of `loaders` that is in progress, or comes next.

        Where loops over several loaders follow each other, each but the last has a condition, so
        that a resumed run continues in the right one:

            for epoch in range(checkpoints.epoch_of(second), num_epochs):
                if checkpoints.epoch_of(first) == epoch:
                    for batch in first: ...
                for batch in second: ...

        Raises:
            ConfigError: it is not one of `loaders`.
        """
        for index, each in enumerate(self._loaders):
            if each is loader:
                self._turns.count_passes(index)
                return self._epoch_of(index)
        raise ConfigError("FabricCheckpoints.epoch_of: the loader is not one of loaders=[...]")

    def after_step(self, *, every: int) -> PendingSave | None:
        """Count a step, and save in the background at each `every`-th; 0 for none.

        Raises:
            ConfigError: a resumed loop is not where the saved one was.
            HoldfastError: as of `Checkpointer.save_async`.
        """
        self._turns.note_step()
        self.step += 1
        return self.save() if every and self.step % every == 0 else None

    def save(self, **options: Any) -> PendingSave:
        """Save everything now, as checkpoint `step`, in the background.

        Gradients that no step has used, while they are accumulated, are saved with the rest.

        Args:
            options: of `Checkpointer.save_async`.

        Raises:
            ConfigError: gradients of a sharded module are being accumulated, and would be lost.
                Or a resumed loop is not where the saved one was.
            HoldfastError: as of `Checkpointer.save_async`.
        """
        return self._save(self._made, options)

    def _made(self) -> dict[str, object]:
        """Return what to save."""
        self._turns.note_save()
        places = {
            str(i): {"epoch": self._epoch_of(i), "place": of_each_rank_or_first(place.state_dict())}
            for i, place in enumerate(self._places)
        }
        own = {
            "step": self.step,
            "loaders": places,
            "loops": self._turns.tree(),
            "gradients": unused_of_replicas(self._parameters(), "FabricCheckpoints.save"),
            "ranks": {name: rank_averages(each) for name, each in self._modules().items()},
        }
        return {**self._parts(), _OWN: own}

    def load(self, step: int | None = None, **options: Any) -> LoadReport:
        """Load a checkpoint into the state and the loaders.

        Args:
            step: by default the newest.
            options: of `Checkpointer.load`.

        Raises:
            MismatchError: as of `Checkpointer.load`; or a loader cannot continue at a whole batch,
                or is not there now.
        """
        places = {
            str(i): {"epoch": Stored(), "place": of_each_rank_or_first(Stored())}
            for i in range(len(self._places))
        }
        own = {
            "step": Stored(),
            "loaders": places,
            "loops": Stored(),
            "gradients": own_gradients(Stored()),
            "ranks": Stored(),
        }
        parts = {**self._parts(), _OWN: own}
        report = self._checkpointer.load(parts, step=step, **options)
        values: Any = report.values
        put_values(self._state, values)
        own = values[_OWN]
        loaded = LoadedStreams()
        self._turns.load(own["loops"])
        for i, place in enumerate(self._places[: own["loops"]["loaders"]]):
            stored = own["loaders"][str(i)]
            place.load_state_dict(stored["place"])
            place.continue_with = loaded.take
            self._loaders[i]._num_iter_calls = stored["epoch"]
        put_gradients(self._parameters(), own["gradients"])
        for name, each in self._modules().items():
            put_rank_averages(each, own["ranks"].get(name, ()))
        self.step = own["step"]
        return report

    def close(self) -> None:
        """Wait for saves in flight, and raise what failed; destroy the communicators made here."""
        self._gradients.close()
        super().close()

    def _epoch_of(self, index: int) -> int:
        """Return the pass over a loader that is in progress, or comes next."""
        num_passes = int(self._loaders[index]._num_iter_calls)
        return num_passes - 1 if self._places[index].is_inside else num_passes

    def _parameters(self) -> dict[str, nn.Parameter]:
        return parameters_of(self._modules().items())

    def _modules(self) -> dict[str, nn.Module]:
        """Return the modules of the state."""
        return {n: each for n, each in self._state.items() if isinstance(each, nn.Module)}

    def _parts(self) -> dict[str, object]:
        """Return the objects of the state as parts."""
        modules = self._modules()
        parts: dict[str, object] = {}
        for name, value in self._state.items():
            is_optimizer = isinstance(value, torch.optim.Optimizer) or hasattr(value, "optimizer")
            if is_optimizer and hasattr(value, "param_groups"):
                owners = owners_of(value, modules.items(), name=f"state[{name!r}]")
                parts[name] = OptimizerState(value, owners)
            else:
                parts[name] = value
        return {**parts, _RNG: RNG()}


def _place(loader: Any, num_shares: int) -> LoaderPlace:
    """Return the place of a loader that Fabric has set up."""
    inner = getattr(loader, "_dataloader", None)
    place = place_of(inner, num_shares=num_shares) if inner is not None else None
    if place is None:
        raise ConfigError(
            f"FabricCheckpoints takes a DataLoader that fabric.setup_dataloaders returned; a "
            f"{type(inner if inner is not None else loader).__name__} with a state of its own "
            f"belongs into the state as a part of its own, AppliesLater(loader) if it takes its "
            f"state only at iter"
        )
    return place
