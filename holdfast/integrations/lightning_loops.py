"""Where the loops of Lightning's Trainer are between two batches, and how a run goes on there.

Lightning makes its checkpoints inside of hooks: of a batch, a validation, an epoch. What it does
after the hook belongs to the step that was saved, and a resumed run does not do it, or does it
twice: the module's own hook of a batch, schedules that follow a metric, means over an epoch, the
hooks of an epoch's end. So a checkpoint is made here between two batches, or between two epochs,
when all of that is done, and has what Lightning's own lacks: values that were logged, and metrics.
"""

from __future__ import annotations

import builtins
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.connectors.logger_connector.result import (
    _Metadata,
    _ResultMetric,
    _Sync,
)
from torchmetrics import Metric, MetricCollection

from holdfast.integrations.loaders import OwnStatePlace, has_place, shares_of_data

_SHOWN = ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics")
"""Values that were logged last, by which callbacks and schedules decide."""
_CONSUMED = "_consumed"
"""Of the iterator of several loaders of which the shorter ones begin again."""
_PLAIN = (
    "fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph",
    "add_dataloader_idx", "dataloader_idx", "metric_attribute",
)  # fmt: skip
"""Arguments of `self.log` that are kept as they are."""


class Boundaries:
    """Calls back between batches and between epochs, and lets a run go on from there.

    Args:
        trainer: Of which the training loop is followed.
        reached: Called between two batches of an epoch, and between two epochs.
        has_loaders: Called when the loop has its loaders, before their first iterator is made.
        starts: Called in a run that was resumed, right before its first batch or epoch. It returns
            True if the loop is to make the iterators of its loaders, as before any epoch.
    """

    def __init__(
        self,
        trainer: Trainer,
        *,
        reached: Callable[[], None],
        has_loaders: Callable[[], None],
        starts: Callable[[], bool],
    ) -> None:
        self._trainer: Any = trainer
        self._fit: Any = trainer.fit_loop
        self._epoch: Any = self._fit.epoch_loop
        self._reached, self._has_loaders, self._starts = reached, has_loaders, starts
        self.is_between_epochs = False
        self._saved: Mapping[str, Any] | None = None
        self._num_sanity_steps: int | None = None
        self._own: list[OwnStatePlace] = []
        self._fit._load_combined_loader_states = self._load_places
        self._fit.on_advance_start = self._start_epoch
        self._fit.on_advance_end = self._end_epoch
        self._epoch.on_advance_end = self._end_batch

    def remove(self) -> None:
        """Leave the loops alone."""
        self._check_validation_again()
        for each in self._own:
            each.remove()
        for name in ("_load_combined_loader_states", "on_advance_start", "on_advance_end"):
            self._fit.__dict__.pop(name, None)
        self._epoch.__dict__.pop("on_advance_end", None)

    def resume(self, saved: Mapping[str, Any]) -> None:
        """Go on from what `state` returned.

        There is no second check of the validation, whose hooks may change what was loaded.
        """
        self._saved = saved
        self._num_sanity_steps = self._trainer.num_sanity_val_steps
        self._trainer.num_sanity_val_steps = 0

    def state(self) -> dict[str, Any]:
        """Return what is kept besides the states of the loops."""
        connector, fetcher = self._trainer._logger_connector, self._fit._data_fetcher
        return {
            "is_between_epochs": self.is_between_epochs,
            "reloaded": self._fit._last_train_dl_reload_epoch,
            "has_read_to_end": fetcher.length is None and fetcher.done,
            "own_orders": [each.order() for each in self._own],
            "consumed": list(getattr(self._fit._combined_loader._iterator, _CONSUMED, ())),
            "shown": {name: _copied(getattr(connector, name)) for name in _SHOWN},
            "first_batch": connector._first_loop_iter,
            "hook": connector._current_fx,
            "logged": {key: _kept(each) for key, each in self._epoch._results.items()},
            "metrics": _metrics_of(self._trainer.lightning_module),
        }

    def _check_validation_again(self) -> None:
        """Put back what `resume` has taken from the trainer."""
        if self._num_sanity_steps is not None:
            self._trainer.num_sanity_val_steps = self._num_sanity_steps
            self._num_sanity_steps = None

    # ---- What the loops call ----

    def _load_places(self) -> None:
        fit, load = self._fit, type(self._fit)._load_combined_loader_states
        self._watch_own_loaders()
        saved, is_first = self._saved, self._num_sanity_steps is not None
        if saved is not None and is_first:
            for each, order in zip(self._own, saved["own_orders"], strict=False):
                each.move(order, is_within_pass=not saved["is_between_epochs"])
        if len(stateful_loaders(fit)) == len(fit._combined_loader_states_to_load):
            load(fit)  # of a file of Lightning's
        self._has_loaders()
        if saved is not None and is_first:
            self._check_validation_again()
            fit._restarting = True  # which it needs to take the places of loaders
        load(fit)
        if saved is not None and is_first and saved["is_between_epochs"]:
            # With `max_steps` Lightning would end the epoch again, and train an empty one.
            fit._restarting = self._epoch.restarting = False
            for each in self._own:
                each.leave_pass(has_ended=saved.get("has_read_to_end", False))
                each.is_held = True

    def _watch_own_loaders(self) -> None:
        """Let loaders with a state of their own know their places."""
        for each in self._own:
            each.remove()

        def ahead() -> int:
            return 0 if self.is_between_epochs else len(self._fetched_ahead())

        self._own = [
            OwnStatePlace(
                each,
                fetches_ahead=lambda: self._fit._data_fetcher.length is None,
                ahead=ahead,
                num_shares=shares_of_data(self._trainer.strategy),
            )
            for each in stateful_loaders(self._fit)
            if not has_place(each)
        ]

    def _fetched_ahead(self) -> Sequence[Any]:
        """Return the batches that the loop has fetched and not trained yet."""
        return getattr(self._fit._data_fetcher, "batches", None) or ()

    def _start_epoch(self) -> None:
        fit, saved, loaders = self._fit, self._saved, self._fit._combined_loader
        if saved is not None:
            fit._last_train_dl_reload_epoch = saved["reloaded"]
            self._restore(saved)
            is_held = any(each.is_held for each in self._own)
            for each, order in zip(self._own, saved["own_orders"], strict=False):
                each.set_generators(order)
            for each in self._own:
                each.is_held = False
            if self._starts() or is_held:
                fit._resuming_from_checkpoint = False
        type(fit).on_advance_start(fit)
        if fit._combined_loader is not loaders:  # loaders of this epoch
            fit._resuming_from_checkpoint = False
        if saved is not None and not saved["is_between_epochs"]:
            self._restore_consumed(saved["consumed"])

    def _restore_consumed(self, saved: Sequence[bool]) -> None:
        """Restore which loaders have ended once: if they have no length, by that an epoch ends."""
        iterator = self._fit._combined_loader._iterator
        now = getattr(iterator, _CONSUMED, ())
        if now and len(now) == len(saved):
            setattr(iterator, _CONSUMED, [a or b for a, b in zip(saved, now, strict=True)])

    def _end_batch(self, data_fetcher: Any) -> None:
        epoch = self._epoch
        if self._saved is not None and epoch._skip_next_val:
            # The saved batch, whose end was all done when it was saved.
            epoch._skip_next_val = False
            return
        type(epoch).on_advance_end(epoch, data_fetcher)
        if not epoch._num_ready_batches_reached():
            self._reached()

    def _end_epoch(self) -> None:
        if self._saved is not None:
            # Lightning would leave out schedules that follow a metric, which it does not keep.
            self._fit._restarting, self._saved = False, None
        type(self._fit).on_advance_end(self._fit)
        self.is_between_epochs = True
        try:
            self._reached()
        finally:
            self.is_between_epochs = False

    def _restore(self, saved: Mapping[str, Any]) -> None:
        """Restore the values that were logged, and the metrics of the module."""
        connector, device = self._trainer._logger_connector, self._trainer.strategy.root_device
        for name, values in saved["shown"].items():
            setattr(connector, name, _on(device, values))
        connector._first_loop_iter, connector._current_fx = saved["first_batch"], saved["hook"]
        modules = dict(self._trainer.lightning_module.named_modules())
        for name, kept in saved["metrics"].items():
            if isinstance(modules.get(name), Metric):
                _restore_metric(modules[name], kept, device)
        for key, kept in saved["logged"].items():
            made = self._logged(kept, modules, device)
            if made is not None:
                self._epoch._results[key] = made

    def _logged(
        self, kept: Mapping[str, Any], modules: Mapping[str, Any], device: torch.device
    ) -> Any:
        """Return what `self.log` had made of a value; None if it cannot be made again."""
        meta, sync, reduced = kept["meta"], kept["sync"], kept["reduce"].split(".")
        metric = modules.get(meta["metric_attribute"])
        if sync is None or (kept["states"] is None and not isinstance(metric, Metric)):
            logging.getLogger("holdfast").warning(
                "the value of self.log(%r) over the epoch begins again: it is synchronized over a "
                "group of its own, or its metric is not a member of the module",
                meta["name"],
            )
            return None
        reduce_fx = getattr(torch if reduced[0] == "torch" else builtins, reduced[1])
        made: Any = _Metadata(**meta, reduce_fx=reduce_fx)
        made.sync = _Sync(
            fn=self._trainer.strategy.reduce,
            _should=sync["should"],
            rank_zero_only=sync["rank_zero_only"],
            _op=sync["op"],
        )
        result: Any = _ResultMetric(made, is_tensor=kept["states"] is not None)
        if kept["states"] is None:
            result.value = metric
        for name, value in (kept["states"] or {}).items():
            setattr(result, name, value.to(device))
        if kept["begins"] is not None:
            result._defaults["value"] = kept["begins"]
        result._update_count, result.has_reset = kept["updates"], kept["has_reset"]
        result._forward_cache = _on(device, kept["cache"])
        return result.to(device)


def stateful_loaders(fit: Any) -> list[Any]:
    """Return the loaders of a training loop that Lightning takes for ones with a state."""
    return [
        each
        for each in fit._combined_loader.flattened
        if hasattr(each, "state_dict") and hasattr(each, "load_state_dict")
    ]


def _kept(result: Any) -> dict[str, Any]:
    """Return what `self.log` has made of a value over the epoch."""
    meta, names = result.meta, ("value", "cumulated_batch_size")
    reduced = meta.reduce_fx
    owner = "torch" if reduced is getattr(torch, reduced.__name__, None) else "builtins"
    sync = {
        "should": meta.sync.should,
        "rank_zero_only": meta.sync.rank_zero_only,
        "op": meta.sync.op,
    }
    held = {
        n: getattr(result, n).detach() for n in names if result.is_tensor and hasattr(result, n)
    }
    return {
        "meta": {name: getattr(meta, name) for name in _PLAIN},
        "reduce": f"{owner}.{reduced.__name__}",
        "sync": sync if meta.sync.group is None else None,
        "states": held if result.is_tensor else None,
        # Of 64 bits with `precision="64-true"`, under which it was made.
        "begins": result._defaults["value"] if result.is_tensor else None,
        "updates": result._update_count,
        "has_reset": result.has_reset,
        "cache": _copied(result._forward_cache),
    }


def _metrics_of(module: torch.nn.Module) -> dict[str, Any]:
    """Return the states of metrics that no state dict shows, by the metric's name."""
    for each in module.modules():
        if isinstance(each, MetricCollection):
            each.items(keep_base=True)  # metrics with equal states have them in one until then
    return {
        name: {
            "states": {state: getattr(each, state) for state in hidden},
            "updates": each._update_count,
        }
        for name, each in module.named_modules()
        if isinstance(each, Metric)
        and (hidden := [state for state, shown in each._persistent.items() if not shown])
    }


def _restore_metric(metric: Any, kept: Mapping[str, Any], device: torch.device) -> None:
    """Give a metric the states that no state dict shows."""
    for state, value in kept["states"].items():
        setattr(metric, state, _on(device, value))
    metric._update_count, metric._computed = kept["updates"], None


def _copied(value: Any) -> Any:
    """Return values that were logged by themselves: a callback may hold the very same tensor."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return {name: _copied(each) for name, each in value.items()} if type(value) is dict else value


def _on(device: torch.device, value: Any) -> Any:
    """Return a tree with its tensors on a device."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {name: _on(device, each) for name, each in value.items()}
    return [_on(device, each) for each in value] if isinstance(value, list) else value
