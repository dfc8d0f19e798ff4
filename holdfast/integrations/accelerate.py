"""Accelerate of Hugging Face: the whole state of an `Accelerator`, its loaders' places included.

    checkpoints = AccelerateCheckpoints.resume(accelerator, "checkpoints", every=100)
    for epoch in range(checkpoints.epoch, num_epochs):
        for batch in loader:
            ...
            checkpoints.after_step()
    checkpoints.close()

`pip install holdfast[accelerate]`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from accelerate import Accelerator
from accelerate.data_loader import DataLoaderDispatcher, IterableDatasetShard
from torch import nn

from holdfast.checkpoint import LoadReport, PendingSave
from holdfast.errors import ConfigError, MismatchError
from holdfast.integrations.adapters import put_rank_averages, rank_averages
from holdfast.integrations.fetches import Draws, LoadedStreams, States, set_streams
from holdfast.integrations.gradients import (
    GradientWatch,
    own_gradients,
    parameters_of,
    put_gradients,
    unused_of_replicas,
)
from holdfast.integrations.names import numbered, owners_of
from holdfast.integrations.turns import Turns
from holdfast.integrations.world import (
    CheckpointsOfWorld,
    keep_newest,
    of_each_rank,
    of_each_rank_or_first,
)
from holdfast.state import RNG, OptimizerState, Stored

_PLACE = "_holdfast_place"


class AccelerateCheckpoints(CheckpointsOfWorld):
    """Saves and resumes everything that an `Accelerator` has prepared and registered.

    Models, optimizers, schedulers, the gradient scaler, objects of `register_for_checkpointing`,
    random streams of all ranks, and where each prepared loader is: after a load the next pass over
    it begins behind the last batch that was trained.

    Args:
        accelerator: after `prepare` and `register_for_checkpointing`.
        root: directory of the checkpoints.
        every: optimizer steps between the saves of `after_step`; 0 for none.
        ignore_hooks: leave alone what hooks of `register_save_state_pre_hook` and
            `register_load_state_pre_hook` keep. They are called by `accelerator.save_state` and
            `load_state` alone, so that an accelerator with hooks is refused without it.
        options: further arguments of `Checkpointer`, such as `retention`; by default as many
            checkpoints are kept as the `total_limit` of a `ProjectConfiguration` with automatic
            names says.

    Called by all ranks, as every method.

    Raises:
        ConfigError: the accelerator uses something that is not supported, by name.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        root: str | os.PathLike[str],
        *,
        every: int = 0,
        ignore_hooks: bool = False,
        **options: Any,
    ) -> None:
        _refuse_unsupported(accelerator)
        self._ignores_hooks = ignore_hooks
        project = accelerator.project_configuration
        if project.automatic_checkpoint_naming and project.total_limit:
            options = {"retention": keep_newest(project.total_limit), **options}
        self._accelerator: Any = accelerator
        self._every = every
        self._places = [_Place.of(loader) for loader in self._accelerator._dataloaders]
        self._turns = Turns("AccelerateCheckpoints", self._places)
        self._gradients = GradientWatch(each.optimizer for each in self._accelerator._optimizers)
        super().__init__(root, name="accelerate", **options)
        self._trained: int | None = None
        """The number of the loader that was trained with last."""

    @classmethod
    def resume(
        cls,
        accelerator: Accelerator,
        root: str | os.PathLike[str],
        *,
        every: int = 0,
        ignore_hooks: bool = False,
        **options: Any,
    ) -> AccelerateCheckpoints:
        """Return checkpoints, with the newest of them loaded, if there is one.

        Args, errors: as of the class, and of `Checkpointer.load`.
        """
        made = cls(accelerator, root, every=every, ignore_hooks=ignore_hooks, **options)
        return made._resumed()

    @property
    def epoch(self) -> int:
        """The pass over the loader that is trained with, in progress or next.

        That is the loader in whose loop steps were counted or saved, not one that the loop takes
        batches of besides, and begins again where it ends. A pass that the loop has left
        early counts as a whole one.

        Raises:
            ConfigError: no loader was prepared: a loop over it would begin again. Or loops over
                several loaders follow each other: `epoch_of` has the passes of each.
        """
        self._turns.count_epochs()
        if not self._places:
            raise ConfigError(
                "AccelerateCheckpoints.epoch: the accelerator has prepared no loader whose passes "
                "could be counted; prepare the one you train with, or count epochs in an object of "
                "register_for_checkpointing"
            )
        if self._trained is None and self.step == 0:
            return 0  # whatever was validated before
        return self._places[self._trained or 0].num_passes

    def epoch_of(self, loader: Any) -> int:
        """The pass over a prepared loader that is in progress or next.

        Where loops over several loaders follow each other, each but the last has a condition, so
        that a resumed run continues in the right one:

            for epoch in range(checkpoints.epoch_of(second), num_epochs):
                if checkpoints.epoch_of(first) == epoch:
                    for batch in first: ...
                for batch in second: ...

        Raises:
            ConfigError: the loader was not prepared before this object was made.
        """
        for number, place in enumerate(self._places):
            if place.loader is loader:
                self._turns.count_passes(number)
                return place.num_passes
        raise ConfigError(
            "AccelerateCheckpoints.epoch_of: the loader is not one that the accelerator had "
            "prepared before; pass what accelerator.prepare returned"
        )

    def after_step(self) -> PendingSave | None:
        """Count an optimizer step, and save in the background if one is due; after each batch.

        A batch after which gradients are accumulated is not a step.

        Raises:
            ConfigError: a resumed loop is not where the saved one was.
            HoldfastError: as of `Checkpointer.save_async`.
        """
        self._turns.note_step()
        self._note_trained()
        if not self._accelerator.sync_gradients:
            return None
        self.step += 1
        return self.save() if self._every and self.step % self._every == 0 else None

    def save(self, **options: Any) -> PendingSave:
        """Save everything now, as checkpoint `step`, in the background.

        Gradients that no step has used are saved with the rest, such as those that the generator's
        backward leaves in the discriminator.

        Args:
            options: of `Checkpointer.save_async`.

        Raises:
            ConfigError: something would be lost, which the message names: accumulated gradients,
                the place of a loader that was made after this object, what hooks keep. Or a
                resumed loop is not where the saved one was.
            HoldfastError: as of `Checkpointer.save_async`.
        """
        return self._save(self._made, options)

    def _made(self) -> dict[str, object]:
        """Return what to save."""
        accelerator = self._accelerator
        self._refuse_loss()
        self._turns.note_save()
        self._note_trained()
        if not accelerator.sync_gradients:
            raise ConfigError(
                "AccelerateCheckpoints.save: gradients are being accumulated, and would be lost; "
                "save after a step of the optimizer (accelerator.sync_gradients)"
            )
        own: dict[str, object] = {
            "step": self.step,
            "accumulated": accelerator.step,
            "save_iteration": accelerator.save_iteration,
            "loader": self._trained or 0,
            "loops": self._turns.tree(),
            "gradients": unused_of_replicas(self._parameters(), "AccelerateCheckpoints.save"),
            "ranks": [rank_averages(each) for each in accelerator._models],
        }
        places = {str(i): place.tree() for i, place in enumerate(self._places)}
        order = sorted(range(len(self._places)), key=lambda n: self._places[n].began)
        own["order"] = order
        return {**self._parts(), "accelerator": own, "loaders": places}

    def load(self, step: int | None = None, **options: Any) -> LoadReport:
        """Load a checkpoint into everything that the accelerator has.

        Args:
            step: by default the newest.
            options: of `Checkpointer.load`.

        Raises:
            MismatchError: as of `Checkpointer.load`; or a loader cannot continue at a whole batch,
                or is not there now.
        """
        self._refuse_loss()
        names = ("step", "accumulated", "save_iteration", "loader", "loops", "order", "ranks")
        known = {**dict.fromkeys(names, Stored()), "gradients": own_gradients(Stored())}
        places = {str(i): place.template() for i, place in enumerate(self._places)}
        parts = {**self._parts(), "accelerator": known, "loaders": places}
        report = self._checkpointer.load(parts, step=step, **options)
        values: Any = report.values
        loaded, own = LoadedStreams(), values["accelerator"]
        put_gradients(self._parameters(), own["gradients"])
        self._turns.load(own["loops"])
        for i, place in enumerate(self._places[: own["loops"]["loaders"]]):
            place.move(values["loaders"][str(i)], loaded)
        for number, n in enumerate(own["order"] if self._places else ()):
            self._places[n].move_in_order(number - len(self._places))
        self.step, self._trained = own["step"], own["loader"]
        for model, ranks in zip(self._accelerator._models, own["ranks"], strict=False):
            put_rank_averages(model, ranks)
        # Nothing is accumulated at a save: with another number of steps the count begins again.
        is_whole = own["accumulated"] % self._accelerator.gradient_accumulation_steps == 0
        self._accelerator.step = own["accumulated"] if is_whole else 0
        self._accelerator.project_configuration.iteration = own["save_iteration"]
        return report

    def close(self) -> None:
        """Wait for saves in flight, and raise what failed; destroy the communicators made here."""
        self._gradients.close()
        super().close()

    def _note_trained(self) -> None:
        """Note in the loop over which loader a step was made."""
        # A loader next to another one, which is begun again whenever it ends, has no loop.
        loops = [n for n in self._turns.loops if self._places[n].is_inside]
        if loops:
            self._trained = max(loops, key=lambda n: self._places[n].began)

    def _refuse_loss(self) -> None:
        """Raise ConfigError if the accelerator has something that a save would not keep."""
        accelerator = self._accelerator
        if not accelerator._models:
            raise ConfigError("AccelerateCheckpoints: the accelerator has prepared no model")
        hooks = [*accelerator._save_model_state_pre_hook.values()]
        hooks += accelerator._load_model_state_pre_hook.values()
        if hooks and not self._ignores_hooks:
            names = ", ".join(getattr(each, "__qualname__", repr(each)) for each in hooks)
            raise ConfigError(
                f"AccelerateCheckpoints does not call hooks of accelerator.save_state and "
                f"load_state ({names}), and what they keep would be lost; give it to "
                f"register_for_checkpointing, or pass ignore_hooks=True"
            )
        known = [place.loader for place in self._places]
        active = accelerator.gradient_state.dataloader_references
        for each in [*accelerator._dataloaders, *active]:
            if each is not None and not any(each is other for other in known):
                raise ConfigError(
                    "AccelerateCheckpoints does not know the place of a loader that was prepared "
                    "after it was made, or made by skip_first_batches; prepare all loaders before, "
                    "and loop over them as they are: the loop continues behind the last batch"
                )

    def _parameters(self) -> dict[str, nn.Parameter]:
        return parameters_of(numbered("model", self._accelerator._models))

    def _parts(self) -> dict[str, object]:
        """Return the objects that are saved as they are."""
        accelerator = self._accelerator
        models: list[nn.Module] = accelerator._models
        parts: dict[str, object] = dict(numbered("model", models))
        for name, optimizer in numbered("optimizer", accelerator._optimizers):
            owners = owners_of(optimizer, numbered("model", models), name=name)
            parts[name] = OptimizerState(optimizer, owners)
        parts |= numbered("scheduler", accelerator._schedulers)
        parts |= numbered("custom", accelerator._custom_objects)
        if accelerator.scaler is not None:
            parts["scaler"] = accelerator.scaler
        return {**parts, "rng": RNG()}


class _Place:
    """Where a prepared loader is: its pass, and the batches of it that are trained."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self._kind: Any = type(loader)
        self._is_dispatched = is_dispatched = self._kind is DataLoaderDispatcher
        # A dispatcher gives each rank a share of several batches that the first rank has fetched.
        is_split = is_dispatched and (loader.split_batches or loader.submesh_tp)
        num_ranks = loader.state.num_processes if is_dispatched else 1
        num_fetches = 1 if is_split else num_ranks
        self._draws = Draws(loader, base=loader.base_dataloader, num_fetches=num_fetches)
        self._num_samples = _batch_size(loader) * num_fetches
        self._batches = 0
        self._is_whole = False
        self._moved: Mapping[str, Any] | None = None
        self._order = 0
        """When the moved pass began: before any of this process, in their order."""
        self.loaded: LoadedStreams | None = None
        """The streams that the moved pass continues with."""
        self._num_left = 0
        """Passes that a loop has left early: the loader itself counts those that ended."""
        self.is_rest = self.has_steps = self.was_left = False
        self.began = 0
        self.takes: Callable[[], None] = lambda: None

    @classmethod
    def of(cls, loader: Any) -> _Place:
        """Return the place of a loader, which counts its batches from now on."""
        known: _Place | None = loader.__dict__.get(_PLACE)
        if known is not None:
            return known
        place = loader.__dict__[_PLACE] = cls(loader)
        kind = type(loader)
        methods = {"__iter__": lambda self: place.batches(), "__module__": __name__}
        counting = type(kind.__name__, (kind,), methods)
        # The class of a prepared loader is hidden behind a property: this is what sets it.
        object.__dict__["__class__"].__set__(loader, counting)
        return place

    @property
    def num_passes(self) -> int:
        """Passes that have ended, or were left early after a step."""
        return int(self.loader.iteration) + self._num_left

    @property
    def num_batches(self) -> int:
        """Batches of the pass in progress that the loop has taken."""
        return self._batches

    @property
    def is_inside(self) -> bool:
        """True while a pass is in progress."""
        return self._moved is None and self._batches > 0

    @property
    def is_waiting(self) -> bool:
        """True while the rest of a pass that a load has moved to has not begun."""
        return self._moved is not None and (self._is_whole or self._batches > 0)

    def batches(self) -> Iterator[object]:
        """Yield the batches of one pass: of a new one, or of the one that a load has moved to.

        A loop may leave a pass early; one in which nothing was trained was only looked at.
        """
        moved, self._moved = self._moved, None
        loaded, self.loaded = self.loaded, None
        if moved is not None and loaded is not None and self._is_whole:
            set_streams(loaded.take())
            self.loader.iteration += 1
            self._batches = 0
            return
        self.has_steps = self.is_rest = self.was_left = has_ended = False
        try:
            if moved is not None and loaded is not None and self._batches:
                self.is_rest = True
                self._begin_moved(moved, loaded.take())
            else:
                self._begin_new()
            for batch in self._kind.__iter__(self.loader):
                self._draws.watch.finish()
                self._batches += 1
                if self.is_rest:
                    self._put_in_order()
                self.takes()
                yield batch
            self._draws.watch.finish()
            has_ended = True
        finally:
            self._batches, self.loader.skip_batches = 0, 0
            self.was_left = not has_ended
            if not has_ended and (self.has_steps or self.is_rest):
                self._num_left += 1

    def _begin_new(self) -> None:
        """Take note of the streams that the order of a new pass is drawn with."""
        self._draws.begin()
        self._batches = 0
        self.began = time.monotonic_ns()

    def _begin_moved(self, moved: Mapping[str, Any], now: States) -> None:
        """Let the next pass be the rest of one, whose order is drawn with its first streams.

        Where draws are watched, indices alone are passed over. Worker processes and iterable
        datasets fetch again what is passed over, so that their own streams are right, too.
        """
        batches = self._batches
        set_streams(moved.get("start") or {}, self._draws.generators)
        self._begin_new()
        self._batches, self.began = batches, self._order
        # A dispatcher fills up the last batch of a pass with rows of the first one.
        first = 1 if self._is_dispatched else 0
        pass_over = range(first, batches) if self._draws.watch.is_watching else range(0)
        self.loader.skip_batches = batches - len(pass_over)
        after = {**now, **moved.get("own", {})}
        self._draws.watch.replay(
            batches, fetch=moved.get("fetch"), after=after, pass_over=pass_over
        )

    def _put_in_order(self) -> None:
        """Let passes in progress be in the order in which they began before the save.

        At the end of the one that began last Accelerate makes a step, however much is accumulated.
        """
        state = self.loader.gradient_state
        active = [each for each in state.dataloader_references if each is not None]
        places = [each.__dict__.get(_PLACE, self) for each in active]
        order = sorted(range(len(active)), key=lambda n: places[n].began)
        state.dataloader_references = [None, *(active[n] for n in order)]

    def tree(self) -> dict[str, object]:
        """Return what is saved."""
        return {
            "epoch": int(self.loader.iteration),
            "left": self._num_left,
            "batches": self._batches,
            "is_whole": self._is_at_end(),
            "total_batch_size": self._num_samples,
            "data": of_each_rank_or_first(self._draws.data()),
            "streams": of_each_rank(self._streams()),
        }

    def _is_at_end(self) -> bool:
        """Return True between the last batch of a pass and its end."""
        if self._moved is not None:
            return self._is_whole
        return self._batches > 0 and bool(self.loader.end_of_dataloader)

    def _streams(self) -> Mapping[str, Any]:
        """Return the streams that a resume draws with."""
        if self._moved is not None and self._batches and not self._is_whole:
            return self._moved  # nothing was fetched since the load
        return self._draws.streams(0 if self._is_at_end() else self._batches)

    def template(self) -> dict[str, object]:
        """Return what is loaded."""
        whole: dict[str, object] = dict.fromkeys(
            ("epoch", "left", "batches", "is_whole", "total_batch_size"), Stored()
        )
        data, streams = of_each_rank_or_first(Stored()), of_each_rank(Stored())
        return {**whole, "data": data, "streams": streams}

    def move(self, tree: Mapping[str, Any], loaded: LoadedStreams) -> None:
        """Go to where a checkpoint was, and continue with the streams of its load."""
        samples, size = tree["batches"] * tree["total_batch_size"], self._num_samples
        if samples % size and not tree["is_whole"]:
            raise MismatchError(
                f"a loader was at sample {samples} of epoch {tree['epoch']}, which is not a "
                f"multiple of its {size} samples a step now; choose a batch size that divides it"
            )
        self.loader.iteration, self._batches = tree["epoch"], samples // size
        self._is_whole, self._num_left = tree["is_whole"], tree["left"]
        streams = tree["streams"] if isinstance(tree["streams"], dict) else {}
        is_within_pass = samples > 0 and not self._is_whole
        self._draws.load(tree["data"], streams, is_within_pass=is_within_pass)
        self._moved, self.loaded = streams, loaded

    def move_in_order(self, order: int) -> None:
        """Let the moved pass have begun before passes of a greater number."""
        self._order = self.began = order


def _batch_size(loader: Any) -> int:
    """Return how many samples all ranks take of a loader at once; 1 each if batches vary in size.

    The loaders' own `total_batch_size` is missing for iterable datasets, or that of one rank.
    """
    shard, batches = loader.dataset, loader.batch_sampler
    if isinstance(shard, IterableDatasetShard):
        is_split, num_ranks, size = shard.split_batches, shard.num_processes, shard.batch_size
    else:
        is_split = getattr(batches, "split_batches", False)
        num_ranks = getattr(batches, "num_processes", 1)
        size = getattr(batches, "batch_size", None) or loader.batch_size or 1
    return int(size) * (1 if is_split else int(num_ranks))


def _refuse_unsupported(accelerator: Any) -> None:
    """Raise ConfigError for what this integration does not cover."""
    kind = accelerator.distributed_type.name
    unsupported = [kind] if kind in ("DEEPSPEED", "MEGATRON_LM", "XLA") else []
    if kind == "FSDP" and not accelerator.is_fsdp2:
        unsupported.append("FSDP of version 1 (fsdp_version=2 is supported)")
    # The hook is that of a wrapper which Accelerate does not keep: a save would not see it.
    hook = getattr(getattr(accelerator.ddp_handler, "comm_hook", None), "value", "no")
    if "power_sgd" in hook:
        unsupported.append(f"comm_hook={hook}, whose error feedback would be lost")
    if accelerator.use_stateful_dataloader:
        unsupported.append("use_stateful_dataloader")
    if unsupported:
        raise ConfigError(f"AccelerateCheckpoints does not support {', '.join(unsupported)}")
