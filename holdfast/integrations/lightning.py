"""The Trainer of Lightning: its whole state in Holdfast, its resume bitwise.

    checkpoints = HoldfastCheckpoint("checkpoints", every_n_train_steps=100)
    trainer = Trainer(callbacks=[checkpoints])
    trainer.fit(model, loader, ckpt_path="last")

`pip install holdfast[lightning]`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import CheckpointIO
from torch.utils.data import DataLoader

from holdfast.checkpoint import Checkpointer, PendingSave
from holdfast.errors import ConfigError
from holdfast.format.names import parse_step_dir, step_dir
from holdfast.integrations.adapters import put_rank_averages, rank_averages
from holdfast.integrations.fetches import Streams, has_workers, set_streams, start_workers
from holdfast.integrations.gradients import (
    Gradients,
    GradientWatch,
    empty_gradients,
    gradients_of,
    gradients_part,
    unused_gradients,
)
from holdfast.integrations.lightning_callbacks import (
    ConvertedModule,
    averages_statistics,
    compare_trainable,
    end_again,
    forget,
    masks_kept,
    refuse_unsupported,
    restore_before_optimizers,
    restore_modes,
    restore_tickets_and_tuned,
    state_of_callbacks,
    stop_again,
    with_own_patience,
)
from holdfast.integrations.lightning_loops import Boundaries, stateful_loaders
from holdfast.integrations.loaders import LoaderPlace, has_place, place_of, shares_of_data
from holdfast.integrations.names import numbered
from holdfast.integrations.world import (
    groups_of_world,
    newest_step,
    of_each_rank_or_first,
    refuse_bucket,
    refuse_other_run,
    text_of_coordinator,
)
from holdfast.parallel import ProcessGroups
from holdfast.parallel.control.guard import Guard
from holdfast.policies.keep import KeepPolicy
from holdfast.state import RNG, OptimizerState, Stored
from holdfast.state.schedules import follow_groups

_OWN = ("state_dict", "optimizer_states")
"""Entries of Lightning's checkpoint that are parts of their own here."""
_SEED = "PL_GLOBAL_SEED"
"""The environment variable that Lightning seeds the samplers of ranks with, for each new loader."""
_SHARDED = "ModelParallelStrategy"
"""Reads and writes by itself, without a `CheckpointIO`, and gathers what it would write."""
_STRATEGIES = ("SingleDeviceStrategy", "DDPStrategy", _SHARDED)
_REFUSED = (
    "dirpath",
    "filename",
    "save_last",
    "save_on_exception",
    "save_top_k",
    "save_weights_only",
)


class HoldfastCheckpoint(ModelCheckpoint):  # type: ignore[misc]
    """Saves and resumes everything that a Lightning `Trainer` keeps, in place of `ModelCheckpoint`.

    Model, optimizers, schedulers, loops, callbacks, the precision plugin, hyperparameters, a data
    module with a state, random streams of all ranks, and the place of each training loader within
    the epoch. `ckpt_path="last"` is the newest committed checkpoint, and `ckpt_path=` takes the
    path of any; "best" with `monitor`.

    A save that is due in a hook is made when all that belongs to the batch is done: its validation,
    schedules and hooks; at the last batch of an epoch, at the end of the epoch.

    Args:
        root: directory of the checkpoints.
        retention: which checkpoints to keep; None keeps all. Those that are best by a value of
            `self.log("loss", ...)` are kept by `KeepBest("lightning.metrics.loss")`.
        options: further arguments of `Checkpointer`.
        when: when to save, as of `ModelCheckpoint`: `every_n_train_steps`, `every_n_epochs`,
            `train_time_interval`, `save_on_train_epoch_end`, `monitor`, `mode`.

    Raises:
        ConfigError: an argument of `ModelCheckpoint` that has no meaning here, or a root in a
            bucket; later, a strategy that is not supported, by name.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        retention: KeepPolicy | None = None,
        options: Mapping[str, Any] | None = None,
        **when: Any,
    ) -> None:
        # A command line (`LightningCLI`) passes each argument that nobody has set, too.
        own = {name: when.pop(name) for name in _REFUSED if name in when}
        refused = [name for name, each in own.items() if each is not None and each is not False]
        if refused:
            raise ConfigError(
                f"HoldfastCheckpoint: {', '.join(refused)} have no meaning here: checkpoints are "
                f"whole, made between two batches by all ranks, and named by their step; "
                f"retention= says which to keep"
            )
        refuse_bucket(root, why="Lightning finds checkpoints by its own look at a file system")
        super().__init__(dirpath=Path(root), save_top_k=-1, enable_version_counter=False, **when)
        self._root = Path(root).absolute()
        self._options = {**(options or {}), "retention": retention}
        self._groups: ProcessGroups | None = None
        self._checkpointer: Checkpointer | None = None
        self.last_save: PendingSave | None = None
        """The newest save of the run in progress: `last_save.result()` waits for its commit."""
        self._resumed: int | None = None
        self._loads = ExitStack()
        """Holds the version that is loaded until the optimizers have it, too."""
        self._ended_at_once = False
        """True after a run that was resumed and had nothing left to train."""
        self._continues = False
        """True once the newest checkpoint was asked for: a run without one is then a first run."""
        self._now: Mapping[str, Any] | None = None
        self._is_due = False
        self._places: list[LoaderPlace] = []
        self._boundaries: Boundaries | None = None
        self._gradients: GradientWatch | None = None

    @property
    def state_key(self) -> str:
        """The name of this callback's state, without arguments that may change."""
        return type(self).__qualname__

    # ---- What the Trainer calls ----

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Make the communicators, and let the Trainer read and write here."""
        strategy = trainer.strategy
        if type(strategy).__name__ not in _STRATEGIES:
            raise ConfigError(
                f"HoldfastCheckpoint supports {' and '.join(_STRATEGIES)}, not "
                f"{type(strategy).__name__}"
            )
        refuse_unsupported(trainer)
        if type(strategy).__name__ == _SHARDED:
            _read_here(strategy, self, trainer)
        elif not isinstance(strategy.checkpoint_io, HoldfastIO):
            strategy.checkpoint_io = HoldfastIO(self, trainer, strategy.checkpoint_io)
        if self._checkpointer is None:
            self._groups = groups_of_world("lightning")
            self._checkpointer = Checkpointer(self._root, groups=self._groups, **self._options)
        super().setup(trainer, pl_module, stage)
        self._resumed = self._now = None
        self._callbacks: Mapping[str, Any] = {}
        self._has_begun = self._is_due = False
        self._places = []
        if stage == "fit":
            self._boundaries = Boundaries(
                trainer,
                reached=lambda: self._save_if_due(trainer),
                has_loaders=lambda: self._watch_loaders(trainer),
                starts=lambda: self._start(trainer),
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Load the optimizers, which the Trainer has made since the rest was loaded."""
        super().on_train_start(trainer, pl_module)
        self._has_begun = True
        if not trainer.lightning_module.automatic_optimization:
            self._gradients = GradientWatch(trainer.optimizers)
        if self._resumed is not None:
            self._last_global_step_saved = self._resumed
            self._load_optimizers(trainer)
            compare_trainable(self._callbacks, trainer)
            restore_modes(self._callbacks, trainer)
            if not self._is_within_epoch:
                stop_again(self._callbacks, trainer)
        elif self._ended_at_once:
            raise ConfigError(
                "HoldfastCheckpoint: the last fit was resumed and had nothing left to train. One "
                "without a checkpoint would go on with the counters of that one, without its "
                'place in the data and its optimizers; pass ckpt_path="last" to this fit, too'
            )
        else:
            refuse_other_run(
                self._running(),
                self._root,
                continues=self._continues,
                how='Pass ckpt_path="last" to fit',
            )

    def on_train_batch_end(self, trainer: Trainer, *args: Any, **named: Any) -> None:
        """Note if a save is due; while gradients are accumulated, after the optimizer's step."""
        if not trainer.fit_loop._should_accumulate():
            super().on_train_batch_end(trainer, *args, **named)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Load and end the run if nothing was left to train."""
        super().on_fit_end(trainer, pl_module)
        if self._resumed is not None and not self._has_begun:
            self._load_optimizers(trainer)
            end_again(trainer)
            self._ended_at_once = True

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Wait for saves in flight, and raise what failed."""
        self._loads.close()
        if self._checkpointer is not None and self._groups is not None:
            checkpointer, self._checkpointer = self._checkpointer, None
            checkpointer.close()
            self._groups.close()
        if self._gradients is not None:
            self._gradients.close()
        if self._boundaries is not None:
            self._boundaries.remove()
        self._boundaries = self._gradients = None
        forget(trainer)
        super().teardown(trainer, pl_module, stage)

    def format_checkpoint_name(self, metrics: Mapping[str, Any], *args: Any, **named: Any) -> str:
        """Return the path of a step's checkpoint."""
        return str(self._root / step_dir(int(metrics["step"])))

    def _find_last_checkpoints(self, trainer: Trainer) -> set[str]:
        """Return the newest committed checkpoint; each rank looks, since no group is made yet."""
        self._continues = True
        step = newest_step(self._root)
        return set() if step is None else {str(self._root / step_dir(step))}

    def _save_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        """Note that a save is due: what belongs to the batch or epoch is not all done yet."""
        self._last_global_step_saved = trainer.global_step
        self._last_checkpoint_saved = filepath
        self._is_due = True

    def _remove_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        """Nothing: `retention` says what is kept."""

    # ---- State ----

    def _save_if_due(self, trainer: Trainer) -> None:
        """Save between two batches or epochs, if a hook has noted that a save is due."""
        is_due, self._is_due = self._is_due, False
        if is_due and not averages_statistics(trainer):
            self._save(trainer)

    def _save(self, trainer: Trainer) -> None:
        """Save everything in the background.

        Under a guard: what a hook raises on one rank while it adds to the checkpoint, all raise.
        """
        assert self._groups is not None
        guard = Guard[dict[str, object]](self._groups.control, "save")
        parts = guard.run(partial(self._parts, trainer))
        self.last_save = self._running().save_async(trainer.global_step, parts, overwrite=True)

    def _parts(self, trainer: Trainer) -> dict[str, object]:
        """Return what to save."""
        assert self._boundaries is not None
        gradients = self._accumulated(trainer)
        with _nothing_gathered(trainer.strategy) as given, masks_kept(trainer):
            dumped = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        rest = {name: each for name, each in dumped.items() if name not in _OWN}
        # A hook may have put other weights there, such as averages, and takes them from there.
        shown = dumped["state_dict"]
        if any(given.get(name) is not each for name, each in shown.items()):
            if type(trainer.strategy).__name__ == _SHARDED:
                raise ConfigError(
                    f"HoldfastCheckpoint: under {_SHARDED} an on_save_checkpoint hook (of a "
                    f"callback or of the module) has changed the checkpoint's state_dict, which "
                    f"is not supported: weights are saved as they are sharded"
                )
            rest["state_dict"] = dict(shown)
        kept = {
            **state_of_callbacks(trainer),
            "loops": self._boundaries.state(),
            "validates_with": [has_workers(each) for each in _validation_loaders(trainer)],
            "gradients": [*gradients],
            "seed": os.environ.get(_SEED),
            "ranks": rank_averages(trainer.lightning_module),
        }
        return {
            "model": ConvertedModule(trainer.lightning_module, trainer.precision_plugin),
            **_optimizers(trainer),
            **({"gradients": gradients_part(gradients)} if gradients else {}),
            "rng": RNG(),
            "lightning": {
                "checkpoint": of_each_rank_or_first(rest),
                "callbacks": of_each_rank_or_first(kept),
                "metrics": self._metrics(trainer),
            },
        }

    def _metrics(self, trainer: Trainer) -> dict[str, float]:
        """Return what was logged last, by the first rank, as numbers that `KeepBest` can compare.

        Cost: two small collectives.
        """
        assert self._groups is not None

        def own() -> str:
            return json.dumps({n: float(each) for n, each in trainer.callback_metrics.items()})

        metrics: dict[str, float] = json.loads(
            text_of_coordinator(self._groups, own, phase="metrics")
        )
        return metrics

    def read(
        self, trainer: Trainer, path: Any, otherwise: Callable[[], dict[str, Any]]
    ) -> dict[str, Any]:
        """Load a checkpoint below the root by its path; for any other path, what `otherwise` does.

        Raises:
            HoldfastError: on all ranks, as of `Checkpointer.load`.
        """
        step = parse_step_dir(Path(path).name)
        if step is None or Path(path).absolute().parent != self._root:
            return otherwise()
        return self.load(trainer, step)

    def load(self, trainer: Trainer, step: int) -> dict[str, Any]:
        """Load a checkpoint into the module, and return the rest as Lightning's own has it."""
        parts = {
            "model": ConvertedModule(trainer.lightning_module, trainer.precision_plugin),
            "rng": RNG(),
            "lightning": {
                "checkpoint": of_each_rank_or_first(Stored()),
                "callbacks": of_each_rank_or_first(Stored()),
                "metrics": Stored(),
            },
        }
        # As Lightning reads it: what the module lacks is left out, and what it has besides stays.
        other = () if trainer.lightning_module.strict_loading else ("model.*",)
        before = Streams()
        if trainer.training:  # the optimizers follow
            self._loads.close()
            self._loads.enter_context(self._running().one_version())
        options: Any = {"allow_missing": other, "allow_dropped": other}
        values: Any = self._running().load(parts, step=step, **options).values
        self._resumed, self._now, self._ended_at_once = step, Streams().states(), False
        self._callbacks = values["lightning"]["callbacks"]
        if self._boundaries is not None:
            self._boundaries.resume(self._callbacks["loops"])
        restore_tickets_and_tuned(self._callbacks, trainer)
        put_rank_averages(trainer.lightning_module, self._callbacks["ranks"])
        if trainer.training:
            _set_seed(self._callbacks["seed"])
        # What the program still draws before the first batch, it draws as a new run does.
        set_streams(before.states())
        # The module has its state already: Lightning loads it into itself, and no optimizer yet.
        own = {"state_dict": trainer.lightning_module.state_dict(), "optimizer_states": []}
        rest = values["lightning"]["checkpoint"]
        patient = {"callbacks": with_own_patience(rest.get("callbacks", {}), trainer)}
        return {**own, **rest, **patient}

    def _load_optimizers(self, trainer: Trainer) -> None:
        """Load what the Trainer has made since the rest was loaded.

        It has restored its schedules before, by the position of each group: they follow the groups.
        """
        assert self._groups is not None
        restore_before_optimizers(self._callbacks, trainer)
        parts = _optimizers(trainer)
        names = self._callbacks["gradients"]
        if names:
            parts["gradients"] = gradients_part(empty_gradients(_parameters(trainer), names))
        self._running().load(parts, step=self._resumed)
        self._loads.close()
        follow = partial(_follow_groups, trainer, parts)
        Guard[None](self._groups.control, "load: schedules").run(follow)

    def _accumulated(self, trainer: Trainer) -> Gradients:
        """Return the gradients that no step has used."""
        if self._gradients is not None:
            return unused_gradients(_parameters(trainer))
        is_whole = self._boundaries is None or self._boundaries.is_between_epochs
        accumulates = not is_whole and trainer.fit_loop._should_accumulate()
        return gradients_of(_parameters(trainer)) if accumulates else {}

    @property
    def _is_within_epoch(self) -> bool:
        """True if the checkpoint that the run was resumed from was made between two batches."""
        return not self._callbacks["loops"]["is_between_epochs"]

    def _start(self, trainer: Trainer) -> bool:
        """Go on where the run was saved: with its streams, and stopped if it had been stopped.

        Returns:
            True if the loop is to make the iterators of its loaders.
        """
        if self._is_within_epoch:  # which still has to end
            stop_again(self._callbacks, trainer)
        # If the rest of a pass comes, its first batch sets them again.
        now = next((each.now for each in self._places if each.now is not None), self._now)
        self._now = None
        # They would draw their seed at the next validation, from streams that go on after it.
        workers = zip(_validation_loaders(trainer), self._callbacks["validates_with"], strict=False)
        for loader, had_workers in workers:
            if had_workers:
                start_workers(loader, {})
        for each in self._places:
            each.finish_fetch()
        if now is not None:
            set_streams(now)
        is_held = any(each.is_held for each in self._places)
        for each in self._places:
            each.is_held = False
        return is_held

    def _watch_loaders(self, trainer: Trainer) -> None:
        """Let the training loaders know their places."""
        loop, boundaries = trainer.fit_loop, self._boundaries
        loaders = loop._combined_loader.flattened
        num_shares = shares_of_data(trainer.strategy)
        places = [place_of(loader, num_shares=num_shares) for loader in loaders]
        self._places = [each for each in places if each is not None]
        for place in self._places:
            place.limit = lambda: (
                0.0
                if boundaries is not None and boundaries.is_between_epochs
                else float(trainer.num_training_batches)
            )
            # Next to a longer one, with `CombinedLoader(mode="max_size")`.
            place.stays_ended = lambda: boundaries is not None and not boundaries.is_between_epochs
            place.ahead = lambda: len(getattr(loop._data_fetcher, "batches", None) or ())
        if self._now is None or not self._places:
            return
        if self._is_within_epoch:
            self._places[0].now, self._now = self._now, None
        else:  # the loop makes iterators now, which are too early for a new epoch
            for place in self._places:
                place.is_held = True

    def _running(self) -> Checkpointer:
        """Return the checkpointer of the run in progress."""
        if self._checkpointer is None:
            raise ConfigError("HoldfastCheckpoint: it belongs into Trainer(callbacks=[...])")
        return self._checkpointer


class HoldfastIO(CheckpointIO):  # type: ignore[misc]
    """Reads checkpoints of Holdfast for a Trainer, and all others by the plugin that it had.

    Args:
        checkpoints: the callback that installs it.
        trainer: its Trainer.
        inner: the Trainer's own plugin.
    """

    def __init__(self, checkpoints: HoldfastCheckpoint, trainer: Trainer, inner: Any) -> None:
        self._checkpoints, self._trainer, self._inner = checkpoints, trainer, inner

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, *args: Any, **more: Any
    ) -> None:
        """Write a file of Lightning's: only the callback saves to Holdfast, on all ranks."""
        self._inner.save_checkpoint(_without_places(checkpoint, self._trainer), path, *args, **more)

    def load_checkpoint(self, path: Any, *args: Any, **more: Any) -> dict[str, Any]:
        """Load a checkpoint by its path; errors are those of `HoldfastCheckpoint.read`."""
        inner = partial(self._inner.load_checkpoint, path, *args, **more)
        return self._checkpoints.read(self._trainer, path, inner)

    def remove_checkpoint(self, path: Any) -> None:
        """Remove a file of Lightning's."""
        self._inner.remove_checkpoint(path)


def _without_places(checkpoint: dict[str, Any], trainer: Trainer) -> dict[str, Any]:
    """Return a checkpoint as Lightning alone would have it, which has to take it without us."""
    loops = checkpoint.get("loops") or {}
    own = (loops.get("fit_loop") or {}).get("state_dict") or {}
    if "combined_loader" not in own:
        return checkpoint
    states = zip(stateful_loaders(trainer.fit_loop), own["combined_loader"], strict=True)
    kept = [state for loader, state in states if not has_place(loader)]
    inner = {name: each for name, each in own.items() if name != "combined_loader"}
    inner |= {"combined_loader": kept} if kept else {}
    return {
        **checkpoint,
        "loops": {**loops, "fit_loop": {**loops["fit_loop"], "state_dict": inner}},
    }


def _read_here(strategy: Any, checkpoints: HoldfastCheckpoint, trainer: Trainer) -> None:
    """Let a strategy without a `CheckpointIO` read our checkpoints; all others as it does."""

    def load_checkpoint(path: Any, *args: Any, **more: Any) -> dict[str, Any]:
        inner = partial(type(strategy).load_checkpoint, strategy, path, *args, **more)
        return checkpoints.read(trainer, path, inner)

    strategy.load_checkpoint = load_checkpoint


@contextmanager
def _nothing_gathered(strategy: Any) -> Iterator[Mapping[str, Any]]:
    """Let Lightning make its checkpoint without weights where it would gather them for it.

    Yields:
        The weights that it has in its checkpoint before hooks have changed them.
    """
    is_sharded = type(strategy).__name__ == _SHARDED
    weights = {} if is_sharded else strategy.lightning_module_state_dict()
    # The optimizers are parts of their own: their states would be made for nothing.
    made = {"lightning_module_state_dict": lambda: weights, "optimizer_state": lambda *args: {}}
    given = dict(weights)
    for name, make in made.items():
        setattr(strategy, name, make)
    try:
        yield given
    finally:
        for name in made:
            delattr(strategy, name)


def _set_seed(seed: str | None) -> None:
    """Let Lightning seed samplers as in the run that was saved."""
    os.environ.pop(_SEED, None)
    if seed is not None:
        os.environ[_SEED] = seed


def _validation_loaders(trainer: Trainer) -> list[DataLoader[Any]]:
    """Return the loaders of the validations within a training."""
    combined = trainer.fit_loop.epoch_loop.val_loop._combined_loader
    loaders = [] if combined is None else combined.flattened
    return [each for each in loaders if isinstance(each, DataLoader)]


def _parameters(trainer: Trainer) -> dict[str, torch.nn.Parameter]:
    """Return the parameters by name."""
    return dict(trainer.lightning_module.named_parameters())


def _follow_groups(trainer: Trainer, parts: Mapping[str, object]) -> None:
    """Give schedules the values of the groups that a load of the optimizers has found."""
    for number, config in enumerate(trainer.lr_scheduler_configs):
        path = f"lightning.checkpoint.lr_schedulers.{number}"
        for each in parts.values():
            if isinstance(each, OptimizerState):
                follow_groups(config.scheduler, path, each.groups_loaded, {})


def _optimizers(trainer: Trainer) -> dict[str, object]:
    """Return the parts of the optimizers."""
    return {
        name: OptimizerState(optimizer, trainer.lightning_module)
        for name, optimizer in numbered("optimizer", trainer.optimizers)
    }
