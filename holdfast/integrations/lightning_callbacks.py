"""What callbacks of Lightning have besides their own states, and lack after a resume of its own."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, callbacks
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, Precision
from lightning.pytorch.utilities.parsing import (
    lightning_getattr,
    lightning_hasattr,
    lightning_setattr,
)
from torch import nn
from torch.nn.utils import prune

from holdfast.errors import ConfigError, some_of
from holdfast.state import ModuleState, StoredPart

_BATCH_NORMS = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm
_ORIGINAL, _MASK = "_orig", "_mask"
"""What torch appends to the name of a parameter that is being pruned."""


def refuse_unsupported(trainer: Trainer) -> None:
    """Raise ConfigError for a callback with which no run can be resumed."""
    if _all(trainer, callbacks.SpikeDetection):
        raise ConfigError(
            "HoldfastCheckpoint does not support SpikeDetection: Lightning cannot load its state, "
            "and does not save its running mean"
        )


def state_of_callbacks(trainer: Trainer) -> dict[str, Any]:
    """Return what is kept besides the states that callbacks return."""
    module = trainer.lightning_module
    pruning = _all(trainer, callbacks.ModelPruning)
    return {
        "trainable": _trainable(module),
        "evaluating": _evaluating(module),
        "stopped": trainer.should_stop,
        "patience": _patience(trainer) if trainer.should_stop else {},
        "tuned": {name: lightning_getattr(module, name) for name in _tuned(trainer)},
        "tickets": [_tickets(each) for each in pruning],
    }


def restore_tickets_and_tuned(saved: Mapping[str, Any], trainer: Trainer) -> None:
    """Restore what the Trainer uses before it has an optimizer.

    A run is tuned once, when it starts: a finder trains, and what it sets at a resume is for
    weights that were trained already. `ModelPruning` keeps the weights that a layer began with, and
    puts them back at each pruning.
    """
    for each, tickets in zip(_all(trainer, callbacks.ModelPruning), saved["tickets"], strict=False):
        for ticket, live, stored in zip(*_pairs(each), tickets, strict=True):
            ticket.data = live.data if stored is None else stored.to(ticket.dtype)
    for name, value in saved["tuned"].items():
        if lightning_hasattr(trainer.lightning_module, name):
            lightning_setattr(trainer.lightning_module, name, value)
    for each in _all(trainer, callbacks.BatchSizeFinder, callbacks.LearningRateFinder):
        each.on_fit_start = lambda *args: None


def with_own_patience(states: Mapping[str, Any], trainer: Trainer) -> dict[str, Any]:
    """Return the states of callbacks with the patience that the program gives `EarlyStopping` now.

    Lightning would restore the saved run's, and no program could let a run that was stopped go on.
    """
    now = _patience(trainer)
    return {
        key: {**state, "patience": now[key]} if key in now else state
        for key, state in states.items()
    }


def restore_before_optimizers(saved: Mapping[str, Any], trainer: Trainer) -> None:
    """Restore what is set at the start of an epoch, of which a resume within one has no start.

    It changes optimizers: they are loaded afterwards.
    """
    module, epoch = trainer.lightning_module, trainer.current_epoch
    for each in _all(trainer, callbacks.GradientAccumulationScheduler):
        each.on_train_epoch_start(trainer, module)
    for each in _all(trainer, callbacks.StochasticWeightAveraging):
        if each._scheduler_state is not None and each.swa_start <= epoch <= each.swa_end:
            each.on_train_epoch_start(trainer, module)
    if _all(trainer, callbacks.BaseFinetuning):
        _unfreeze(module, set(saved["trainable"]))


def stop_again(saved: Mapping[str, Any], trainer: Trainer) -> None:
    """Stop a run that had been stopped early, unless it has more patience now."""
    now = _patience(trainer)
    if saved["patience"] and any(now.get(key, 0) <= it for key, it in saved["patience"].items()):
        trainer.should_stop = True
        _log(trainer, "the run had been stopped early; EarlyStopping(patience=...) lets it go on")
    elif saved["stopped"]:
        _log(trainer, "the run had been stopped early (should_stop), and goes on now")


def end_again(trainer: Trainer) -> None:
    """Let callbacks change the weights as they do at the end of a run that was killed right there.

    Lightning does not enter the loop of a run that has nothing left to train.
    """
    kinds = callbacks.StochasticWeightAveraging, callbacks.WeightAveraging, callbacks.ModelPruning
    with torch.no_grad():
        for each in _all(trainer, *kinds):
            # An epoch that only renews batch statistics has followed: the weights are changed.
            if getattr(each, "swa_end", math.inf) >= trainer.current_epoch - 1:
                each.on_train_end(trainer, trainer.lightning_module)


def forget(trainer: Trainer) -> None:
    """Let finders run again when the next run starts."""
    for each in _all(trainer, callbacks.BatchSizeFinder, callbacks.LearningRateFinder):
        each.__dict__.pop("on_fit_start", None)


def averages_statistics(trainer: Trainer) -> bool:
    """Return True in the epoch in which averaged weights get their batch statistics.

    It trains nothing, and what it changes in the loops and modules is in no state.
    """
    return bool(getattr(trainer.fit_loop, "_skip_backward", False))


def compare_trainable(saved: Mapping[str, Any], trainer: Trainer) -> None:
    """Name what was trained when the checkpoint was saved and is frozen now, or the reverse.

    No state dict has it.
    """
    before, now = set(saved["trainable"]), set(_trainable(trainer.lightning_module))
    changes = {
        "trained when the checkpoint was saved, and frozen now": before - now,
        "frozen when the checkpoint was saved, and trained now": now - before,
    }
    for what, names in changes.items():
        if names:
            _log(trainer, f"{what}: {some_of(sorted(names))}")


def restore_modes(saved: Mapping[str, Any], trainer: Trainer) -> None:
    """Put the modules into evaluation mode that were in it, the others into training mode.

    A hook may have set some at the start of an epoch, of which a resume within one has no start.
    No state dict has it.
    """
    before, now = set(saved["evaluating"]), set(_evaluating(trainer.lightning_module))
    for name, each in trainer.lightning_module.named_modules():
        each.training = name not in before
    changes = {"evaluation": before - now, "training": now - before}
    for mode, names in changes.items():
        if names:
            shown = some_of([name or "the module itself" for name in sorted(names)])
            _log(trainer, f"put into {mode} mode, as when the checkpoint was saved: {shown}")


@contextmanager
def masks_kept(trainer: Trainer) -> Iterator[None]:
    """Keep `ModelPruning` from multiplying the masks into the weights of a checkpoint.

    Training could not go on from them: what is pruned would grow again.
    """
    pruning = _all(trainer, callbacks.ModelPruning)
    was = [each._make_pruning_permanent for each in pruning]
    for each in pruning:
        each._make_pruning_permanent = False
    try:
        yield
    finally:
        for each, is_permanent in zip(pruning, was, strict=True):
            each._make_pruning_permanent = is_permanent


class ConvertedModule:
    """A module as a part: a load prunes and converts it as it was when it was saved.

    Args:
        module: The module.
        precision: The Trainer's plugin, which converts the module (`precision="bf16-true"`) once a
            checkpoint is loaded: until then it has the dtype that it was made with.
    """

    def __init__(self, module: nn.Module, precision: Precision) -> None:
        self._module, self._state = module, ModuleState(module)
        self._precision = precision

    def tree(self) -> object:
        """Return the module's tree."""
        return self._state.tree()

    def template(self, stored: StoredPart) -> object:
        """Return the module's template, with the stored masks and originals if it has none."""
        kinds = {each.dtype for each in stored.tensors_under().values()}
        if {kind for kind in kinds if kind.is_floating_point} == {_converted_to(self._precision)}:
            self._precision.convert_module(self._module)
        names = set(stored.keys_under())
        for name, parameter in list(self._module.named_parameters()):
            if name not in names and {name + _ORIGINAL, name + _MASK} <= names:
                owner, _, own = name.rpartition(".")
                module = self._module.get_submodule(owner)
                mask = torch.ones_like(parameter)
                prune.custom_from_mask(module, own, mask)  # type: ignore[no-untyped-call]
        return self._state.template(stored)

    def restore(self, tree: object) -> None:
        """Take the loaded state, and make the pruned weights from it."""
        self._state.restore(tree)
        for module in self._module.modules():
            for hook in module._forward_pre_hooks.values():
                if isinstance(hook, prune.BasePruningMethod):
                    weight = hook.apply_mask(module)  # type: ignore[no-untyped-call]
                    setattr(module, hook._tensor_name, weight)


def _converted_to(precision: Precision) -> torch.dtype | None:
    """Return the dtype that a plugin converts a module to; None if it converts none."""
    if isinstance(precision, DoublePrecision):
        return torch.float64
    is_half = isinstance(precision, HalfPrecision)
    return precision._desired_input_dtype if is_half else None


def _all(trainer: Any, *kinds: type) -> list[Any]:
    """Return the callbacks of some classes, in order."""
    return [each for each in trainer.callbacks if isinstance(each, kinds)]


def _pairs(pruning: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the weights that layers began with, and those that are trained in their places."""
    tickets, live = [], []
    for layer in (pruning._original_layers or {}).values():
        for index, name in layer["names"]:
            module = pruning._parameters_to_prune[index][0]
            tickets.append(getattr(layer["data"], name))
            is_pruned = hasattr(module, name + _ORIGINAL)
            live.append(getattr(module, name + _ORIGINAL if is_pruned else name))
    return tickets, live


def _tickets(pruning: Any) -> list[torch.Tensor | None]:
    """Return the weights that layers began with; None for one that is trained itself.

    Putting one back on the same device makes it the memory of the parameter.
    """
    return [
        None if ticket.data_ptr() == live.data_ptr() else ticket.data
        for ticket, live in zip(*_pairs(pruning), strict=True)
    ]


def _patience(trainer: Trainer) -> dict[str, int]:
    """Return the patience of each callback that stops a run, by its key."""
    return {each.state_key: each.patience for each in _all(trainer, callbacks.EarlyStopping)}


def _tuned(trainer: Trainer) -> list[str]:
    """Return the names of what finders have set: in the module, its hyperparameters, its data."""
    names = [each._batch_arg_name for each in _all(trainer, callbacks.BatchSizeFinder)]
    for each in _all(trainer, callbacks.LearningRateFinder):
        names += [each._attr_name] if each._attr_name else ["lr", "learning_rate"]
    return [name for name in names if lightning_hasattr(trainer.lightning_module, name)]


def _trainable(module: LightningModule) -> list[str]:
    """Return the names of the parameters that are trained."""
    return [name for name, parameter in module.named_parameters() if parameter.requires_grad]


def _evaluating(module: LightningModule) -> list[str]:
    """Return the names of the modules that are in evaluation mode."""
    return [name for name, each in module.named_modules() if not each.training]


def _unfreeze(module: LightningModule, trained: set[str]) -> None:
    """Let parameters be trained that were trained when the checkpoint was saved."""
    for owner, each in module.named_modules():
        prefix = f"{owner}." if owner else ""
        for name, parameter in each.named_parameters(recurse=False):
            if prefix + name in trained and not parameter.requires_grad:
                parameter.requires_grad = True
                if isinstance(each, _BATCH_NORMS):
                    each.track_running_stats = True  # which freezing has turned off


def _log(trainer: Trainer, text: str) -> None:
    if trainer.is_global_zero:
        logging.getLogger("holdfast").warning("%s", text)
