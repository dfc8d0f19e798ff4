"""torchtitan: a checkpoint manager that is selected in its configuration.

    config.checkpoint = HoldfastManager.Config(enable=True, interval=500)

`pip install holdfast[torchtitan]` (0.3).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torchtitan.components.checkpointer import (
    DATALOADER,
    LR_SCHEDULER,
    MODEL,
    OPTIMIZER,
    TRAIN_STATE,
    CheckpointManager,
)
from torchtitan.tools import filesystem

from holdfast.checkpoint import Checkpointer, LoadReport
from holdfast.errors import ConfigError
from holdfast.format.names import parse_step_dir
from holdfast.integrations.fetches import States, Streams, replace_methods, set_streams
from holdfast.integrations.world import (
    agreed_newest_step,
    committed_steps,
    groups_of_world,
    keep_newest,
    of_each_rank_or_first,
    text_of_coordinator,
)
from holdfast.state import RNG, Stored, Union

_RNG = "rng"


class HoldfastManager(CheckpointManager):  # type: ignore[misc]
    """Saves and loads everything that a trainer of torchtitan keeps, and its random streams.

    Model parts and optimizers are stored by parameter, under any FSDP, TP, PP, CP and EP layout;
    schedulers and the loader's place as their own objects state them; the train state and the
    random streams of every rank for itself.

    Hugging Face's format, and a last checkpoint of the model alone, are written and read by
    torchtitan's own code, as ever. A run whose folder has checkpoints of torchtitan's own, and none
    of Holdfast's, continues from these. `initial_load_path` may be either's: for Holdfast's, a run,
    of which the newest step is taken, or one of its steps.

    Made by all ranks of the default process group, of which one communicator is made.

    Raises:
        ConfigError: a setting that is not supported, by name.
        GroupError, DeadlineError: a rank does not arrive.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):  # type: ignore[misc]
        """Settings of torchtitan's `CheckpointManager`, and further arguments of `Checkpointer`."""

        options: dict[str, Any] = field(default_factory=dict)

    def __init__(self, config: Any, **components: Any) -> None:
        self.enable = config.enable
        if not self.enable:
            return
        self.enable = False  # until all is made: `close` is called for half a manager, too
        if filesystem.is_remote(config.folder) or filesystem.is_remote(
            components.get("base_folder", "")
        ):
            raise ConfigError("HoldfastManager does not support a remote checkpoint.folder")
        if _RNG in components["states"]:
            raise ConfigError(
                f"HoldfastManager does not support a state named {_RNG!r}, under which it keeps "
                f"the random streams of all ranks; give it another name"
            )
        # Threads and communicators of torchtitan's own manager are not needed.
        super().__init__(
            dataclasses.replace(config, keep_latest_k=0, async_mode="disabled"), **components
        )
        self._is_async = config.async_mode != "disabled"
        self._groups = groups_of_world("torchtitan")
        retention = keep_newest(config.keep_latest_k) if config.keep_latest_k else None
        self._checkpointer = Checkpointer(
            self.folder, groups=self._groups, **{"retention": retention, **config.options}
        )

    save_future: Any
    """The save in flight, which the trainer waits for before the next one."""

    def __del__(self) -> None:
        """Nothing: `close` is a call of all ranks."""

    def _close(self) -> None:
        """Wait for saves in flight, and raise what failed."""
        self.enable = False
        try:
            self._checkpointer.close()
        finally:
            self._groups.close()

    @torch.no_grad()
    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        """Save if a save is due; in the background unless `async_mode` is disabled."""
        if not self._should_save(curr_step, last_step):
            return False
        self.maybe_wait_for_saving()
        if last_step and self.last_save_model_only:
            self._save_last_step(curr_step)
            return True
        parts = self._parts()
        # What a writer that outlived a killed run has committed meanwhile is made again.
        if self._is_async and not last_step:
            self.save_future = self._checkpointer.save_async(curr_step, parts, overwrite=True)
        else:
            self._checkpointer.save(curr_step, parts, overwrite=True)
        return True

    def _wait_for_saving(self) -> None:
        """Wait for the save in flight, and raise what failed."""
        pending, self.save_future = self.save_future, None
        pending.result()

    def _maybe_wait_for_staging(self) -> None:
        """Nothing: a save returns when the state is copied."""

    @torch.no_grad()
    def _load(self, step: int = -1) -> bool:
        """Load a checkpoint of Holdfast; without one, what torchtitan's own manager would load."""
        newest = agreed_newest_step(self._groups, Path(self.folder))
        source = self._initial_source(step) if newest is None else None
        if newest is None and source is None:
            return bool(super()._load(step))
        unknown = set(self.exclude_from_loading) - self.states.keys()
        if unknown:
            raise ConfigError(f"checkpoint.exclude_from_loading: {sorted(unknown)} is not a state")
        at = newest if step == -1 else step
        is_model_only = at == 0 if source is None else self.initial_load_model_only
        requested = {MODEL} if is_model_only else self.states.keys() - {*self.exclude_from_loading}
        parts = {
            name: part
            for name, part in self._parts(of_load=True).items()
            if name in requested or (name == _RNG and not is_model_only)
        }
        # Under another number of ranks, streams without a place are dropped, and new ones fresh.
        report = self._checkpointer.load(
            parts, step=at, source=source, allow_missing=(f"{_RNG}*",), allow_dropped=(f"{_RNG}*",)
        )
        streams = Streams().states()
        self._take(report, parts)
        if self.states[DATALOADER] is not None:
            _keep_streams(self.states[DATALOADER], streams)
        return True

    def _initial_source(self, step: int) -> str | None:
        """Return `initial_load_path` if it is of Holdfast, and what torchtitan would load now.

        Raises:
            ConfigError: it is to be read as a folder of Hugging Face.
        """
        if not self.initial_load_path or step != -1:
            return None

        def own_path() -> str:
            if filesystem.is_remote(self.initial_load_path):
                return ""
            path = Path(self.initial_load_path)
            step_of_path = parse_step_dir(path.name)
            steps = committed_steps(path if step_of_path is None else path.parent)
            is_own = bool(steps) if step_of_path is None else step_of_path in steps
            return str(path) if is_own and self._find_load_step() == -1 else ""

        text = text_of_coordinator(self._groups, own_path, phase="initial load")
        if text and self.initial_load_in_hf:
            raise ConfigError(f"checkpoint.initial_load_in_hf: {text} is a checkpoint of Holdfast")
        return text or None

    def _parts(self, *, of_load: bool = False) -> dict[str, object]:
        """Return everything by the names that torchtitan has for it."""
        parts: dict[str, object] = {}
        for name, value in self.states.items():
            if value is None:
                continue
            state: Any = value.state_dict() if hasattr(value, "state_dict") else value
            if of_load and name not in (MODEL, OPTIMIZER):
                state = dict.fromkeys(state, Stored()) if isinstance(state, Mapping) else Stored()
            if name in (MODEL, OPTIMIZER, DATALOADER):
                # Each pipeline stage, and each data rank, has entries of its own.
                parts[name] = Union(state)
            elif name == TRAIN_STATE:
                parts[name] = of_each_rank_or_first(state)
            else:
                parts[name] = state
        return {**parts, _RNG: RNG()}

    def _take(self, report: LoadReport, parts: Mapping[str, object]) -> None:
        """Give each object its loaded state; tensors were filled in place before."""
        values: Any = report.values
        # The optimizers' groups come after the schedulers, whose rates they have.
        order = sorted(parts.keys() - {_RNG}, key=lambda name: name != LR_SCHEDULER)
        for name in order:
            value = self.states[name]
            if hasattr(value, "load_state_dict"):
                value.load_state_dict(values[name])
            else:
                self.states[name] = values[name]


def _keep_streams(loader: Any, streams: States) -> None:
    """Let the next iterator of a loader be made without a trace in the process's streams.

    Every loader draws a seed from them when it makes one: the saved run has done so at its start.
    """
    kind = type(loader)

    def make(self: Any) -> Any:
        self.__class__ = kind
        iterator = kind.__iter__(self)
        set_streams(streams)
        return iterator

    replace_methods(loader, {"__iter__": make}, module=__name__)
