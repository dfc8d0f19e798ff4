"""The Trainer of Lightning: its whole state in Holdfast, its resume bitwise.

    checkpoints = HoldfastCheckpoint("checkpoints", every_n_train_steps=100)
    trainer = Trainer(callbacks=[checkpoints])
    trainer.fit(model, loader, ckpt_path="last")

`pip install holdfast[lightning]`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import CheckpointIO

from holdfast.checkpoint import Checkpointer, PendingSave
from holdfast.errors import ConfigError
from holdfast.format.names import parse_step_dir, step_dir
from holdfast.integrations.fetches import Streams, set_streams
from holdfast.integrations.lightning_callbacks import (
    PrunableModule,
    averages_statistics,
    compare_trainable,
    end_again,
    forget,
    masks_kept,
    refuse_unsupported,
    restore_before_optimizers,
    restore_tickets_and_tuned,
    state_of_callbacks,
    stop_again,
)
from holdfast.integrations.loaders import has_place, place_of, shares_of_data
from holdfast.integrations.world import groups_of_world, newest_step, of_each_rank_or_first
from holdfast.parallel import ProcessGroups
from holdfast.policies.keep import KeepPolicy
from holdfast.state import RNG, OptimizerState, Stored

_OWN = ("state_dict", "optimizer_states")
"""Entries of Lightning's checkpoint that are parts of their own here."""
_SHARDED = "ModelParallelStrategy"
"""Reads and writes by itself, without a `CheckpointIO`, and gathers what it would write."""
_STRATEGIES = ("SingleDeviceStrategy", "DDPStrategy", _SHARDED)
_REFUSED = ("dirpath", "filename", "save_last", "save_top_k", "save_weights_only")


class HoldfastCheckpoint(ModelCheckpoint):  # type: ignore[misc]
    """Saves and resumes everything that a Lightning `Trainer` keeps, in place of `ModelCheckpoint`.

    Model, optimizers, schedulers, loops, callbacks, the precision plugin, hyperparameters, a data
    module with a state, random streams of all ranks, and the place of each training loader within
    the epoch. `ckpt_path="last"` is the newest committed checkpoint, and `ckpt_path=` takes the
    path of any; "best" with `monitor`.

    A save that is due at the last batch of an epoch is made at the end of the epoch, after its
    validation.

    Args:
        root: directory of the checkpoints.
        retention: which checkpoints to keep; None keeps all.
        options: further arguments of `Checkpointer`.
        when: when to save, as of `ModelCheckpoint`: `every_n_train_steps`, `every_n_epochs`,
            `train_time_interval`, `save_on_train_epoch_end`, `monitor`, `mode`.

    Raises:
        ConfigError: an argument of `ModelCheckpoint` that has no meaning here; later, a strategy
            that is not supported, by name.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        retention: KeepPolicy | None = None,
        options: Mapping[str, Any] | None = None,
        **when: Any,
    ) -> None:
        refused = [name for name in _REFUSED if name in when]
        if refused:
            raise ConfigError(
                f"HoldfastCheckpoint: {', '.join(refused)} have no meaning here: checkpoints are "
                f"whole, and named by their step; retention= says which to keep"
            )
        super().__init__(dirpath=Path(root), save_top_k=-1, enable_version_counter=False, **when)
        self._root = Path(root).absolute()
        self._options = {**(options or {}), "retention": retention}
        self._groups: ProcessGroups | None = None
        self._checkpointer: Checkpointer | None = None
        self.last_save: PendingSave | None = None
        """The newest save of the run in progress: `last_save.result()` waits for its commit."""
        self._resumed: int | None = None
        self._continues = False
        """True once the newest checkpoint was asked for: a run without one is then a first run."""
        self._now: Mapping[str, Any] | None = None
        self._is_due_at_epoch_end = self._is_due_at_validation_end = False
        self._is_last_batch = self._is_before_validation = False

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
        self._has_begun = False
        if stage == "fit":
            _before_first_pass(trainer, self._watch_loaders)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Load the optimizers, which the Trainer has made since the rest was loaded."""
        super().on_train_start(trainer, pl_module)
        self._has_begun = True
        if self._resumed is not None:
            self._last_global_step_saved = self._resumed
            restore_before_optimizers(self._callbacks, trainer)
            self._running().load(_optimizers(trainer), step=self._resumed)
            compare_trainable(self._callbacks, trainer)
            stop_again(self._callbacks, trainer)
            if self._now is not None:  # no loader has taken them
                set_streams(self._now)
        elif not self._continues and self._running().latest() is not None:
            raise ConfigError(
                f"{self._root} has checkpoints, the newest of step {self._running().latest()}, "
                f"and this run does not continue from them: it would be resumed from them later. "
                f'Pass ckpt_path="last" to fit, or choose another root'
            )

    def on_train_batch_end(self, trainer: Trainer, *args: Any, **named: Any) -> None:
        """Save if a save is due; at the last batch of an epoch, at the end of the epoch.

        Where a validation comes next, it is made at the end of that, since a resumed run would not
        make it again. A save that is due while gradients are accumulated is made after the
        optimizer's step.
        """
        if trainer.fit_loop._should_accumulate():
            return
        self._is_last_batch = bool(trainer.is_last_batch)
        self._is_before_validation = not self._is_last_batch and _is_validation_next(trainer)
        try:
            super().on_train_batch_end(trainer, *args, **named)
        finally:
            self._is_last_batch = self._is_before_validation = False

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save if a save is due."""
        super().on_validation_end(trainer, pl_module)
        if self._is_due_at_validation_end:
            self._save(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save if a save is due."""
        super().on_train_epoch_end(trainer, pl_module)
        if self._is_due_at_epoch_end:
            self._save(trainer)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End the run if nothing was left to train."""
        super().on_fit_end(trainer, pl_module)
        if self._resumed is not None and not self._has_begun:
            end_again(trainer)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Wait for saves in flight, and raise what failed."""
        if self._checkpointer is not None and self._groups is not None:
            checkpointer, self._checkpointer = self._checkpointer, None
            checkpointer.close()
            self._groups.close()
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
        """Save, or note that a save is due."""
        self._last_global_step_saved = trainer.global_step
        self._last_checkpoint_saved = filepath
        if self._is_last_batch:
            self._is_due_at_epoch_end = True
        elif self._is_before_validation:
            self._is_due_at_validation_end = True
        else:
            self._save(trainer)

    def _remove_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        """Nothing: `retention` says what is kept."""

    # ---- State ----

    def _save(self, trainer: Trainer) -> None:
        """Save everything in the background."""
        self._is_due_at_epoch_end = self._is_due_at_validation_end = False
        if averages_statistics(trainer):
            return
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
        parts = {
            "model": PrunableModule(trainer.lightning_module),
            **_optimizers(trainer),
            "rng": RNG(),
            "lightning": {
                "checkpoint": of_each_rank_or_first(rest),
                "callbacks": of_each_rank_or_first(state_of_callbacks(trainer)),
            },
        }
        self.last_save = self._running().save_async(trainer.global_step, parts, overwrite=True)

    def step_at(self, path: Any) -> int | None:
        """Return the step of a checkpoint below the root by its path; None for any other path."""
        step = parse_step_dir(Path(path).name)
        return step if Path(path).absolute().parent == self._root else None

    def load(self, trainer: Trainer, step: int) -> dict[str, Any]:
        """Load a checkpoint into the module, and return the rest as Lightning's own has it."""
        parts = {
            "model": PrunableModule(trainer.lightning_module),
            "rng": RNG(),
            "lightning": {
                "checkpoint": of_each_rank_or_first(Stored()),
                "callbacks": of_each_rank_or_first(Stored()),
            },
        }
        before = Streams()
        values: Any = self._running().load(parts, step=step).values
        self._resumed, self._now = step, Streams().states()
        self._callbacks = values["lightning"]["callbacks"]
        restore_tickets_and_tuned(self._callbacks, trainer)
        # What the program still draws before the first batch, it draws as a new run does.
        set_streams(before.states())
        # The module has its state already: Lightning loads it into itself, and no optimizer yet.
        own = {"state_dict": trainer.lightning_module.state_dict(), "optimizer_states": []}
        return {**own, **values["lightning"]["checkpoint"]}

    def _watch_loaders(self, trainer: Trainer) -> None:
        """Let the training loaders know their places."""
        loop = trainer.fit_loop
        now = self._now
        for loader in loop._combined_loader.flattened:
            place = place_of(loader, num_shares=shares_of_data(trainer.strategy))
            if place is None:
                continue
            place.limit = lambda: float(trainer.num_training_batches)
            place.ahead = lambda: len(getattr(loop._data_fetcher, "batches", None) or ())
            place.now, now = now, None
            self._now = None

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
        """Load a checkpoint by its path.

        Raises:
            HoldfastError: on all ranks, as of `Checkpointer.load`.
        """
        step = self._checkpoints.step_at(path)
        if step is not None:
            return self._checkpoints.load(self._trainer, step)
        loaded: dict[str, Any] = self._inner.load_checkpoint(path, *args, **more)
        return loaded

    def remove_checkpoint(self, path: Any) -> None:
        """Remove a file of Lightning's."""
        self._inner.remove_checkpoint(path)


def _is_validation_next(trainer: Trainer) -> bool:
    """Return True if a validation within an epoch follows the batch that has just ended."""
    loop: Any = trainer.fit_loop
    # By time it may be due a moment later: that one is made again by a resumed run.
    by_time = getattr(trainer, "_val_check_time_interval", None) is not None
    return not by_time and bool(loop.epoch_loop._should_check_val_fx(loop._data_fetcher))


def _without_places(checkpoint: dict[str, Any], trainer: Trainer) -> dict[str, Any]:
    """Return a checkpoint as Lightning alone would have it, which has to take it without us."""
    loops = checkpoint.get("loops") or {}
    own = (loops.get("fit_loop") or {}).get("state_dict") or {}
    if "combined_loader" not in own:
        return checkpoint
    combined: Any = trainer.fit_loop._combined_loader
    states = zip(_stateful(combined), own["combined_loader"], strict=True)
    kept = [state for loader, state in states if not has_place(loader)]
    inner = {name: each for name, each in own.items() if name != "combined_loader"}
    inner |= {"combined_loader": kept} if kept else {}
    return {
        **checkpoint,
        "loops": {**loops, "fit_loop": {**loops["fit_loop"], "state_dict": inner}},
    }


def _stateful(combined: Any) -> list[Any]:
    """Return the loaders that Lightning takes for ones with a state."""
    return [
        each
        for each in combined.flattened
        if hasattr(each, "state_dict") and hasattr(each, "load_state_dict")
    ]


def _read_here(strategy: Any, checkpoints: HoldfastCheckpoint, trainer: Trainer) -> None:
    """Let a strategy without a `CheckpointIO` read our checkpoints; all others as it does."""
    inner = type(strategy).load_checkpoint

    def load_checkpoint(path: Any, *args: Any, **more: Any) -> dict[str, Any]:
        step = checkpoints.step_at(path)
        if step is not None:
            return checkpoints.load(trainer, step)
        loaded: dict[str, Any] = inner(strategy, path, *args, **more)
        return loaded

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


def _before_first_pass(trainer: Trainer, call: Any) -> None:
    """Call back once the loop has its loaders, before it takes the first iterator of them."""
    loop: Any = trainer.fit_loop
    load_states = type(loop)._load_combined_loader_states

    def load_combined_loader_states() -> None:
        stateful = _stateful(loop._combined_loader)
        if len(stateful) == len(loop._combined_loader_states_to_load):  # of a file of Lightning's
            load_states(loop)
        call(trainer)
        load_states(loop)

    loop._load_combined_loader_states = load_combined_loader_states


def _optimizers(trainer: Trainer) -> dict[str, object]:
    """Return the parts of the optimizers."""
    module = trainer.lightning_module
    return {
        "optimizer" if index == 0 else f"optimizer{index}": OptimizerState(optimizer, module)
        for index, optimizer in enumerate(trainer.optimizers)
    }
