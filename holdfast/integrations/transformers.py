"""The Trainer of Hugging Face: its whole state in Holdfast, its resume bitwise.

    checkpoints = HoldfastCallback.attach(trainer)
    trainer.train(resume_from_checkpoint=checkpoints.latest())

`pip install holdfast[transformers]`.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from transformers.trainer import TRAINER_STATE_NAME, Trainer
from transformers.trainer_callback import (
    EarlyStoppingCallback,
    ExportableState,
    TrainerCallback,
)
from transformers.trainer_utils import get_last_checkpoint

from holdfast.checkpoint import Checkpointer, PendingSave
from holdfast.errors import ConfigError, MismatchError
from holdfast.format.names import parse_step_dir, step_dir
from holdfast.integrations.adapters import Adapters, put_rank_averages
from holdfast.integrations.fetches import Draws, Streams, set_epoch_of_samplers, set_streams
from holdfast.integrations.world import (
    committed_steps,
    groups_of_world,
    keep_newest,
    newest_step,
    of_each_rank,
    of_each_rank_or_first,
    refuse_other_run,
    step_of_coordinator,
    text_of_coordinator,
)
from holdfast.parallel import ProcessGroups
from holdfast.parallel.control.guard import Guard
from holdfast.policies.keep import KeepPolicy
from holdfast.state import RNG, ModuleState, OptimizerState, Stored
from holdfast.storage import shown

_NATIVE = re.compile(r"checkpoint-(\d+)")


class _Position(NamedTuple):
    """Where a run is in its data."""

    epoch: int
    """Whole passes over the data."""
    batches: int
    """Batches of this rank that are trained, of the current pass."""
    total_batch_size: int
    """Samples of one optimizer step, over all ranks."""


class HoldfastCallback(TrainerCallback):  # type: ignore[misc]
    """Saves and resumes everything that a `Trainer` keeps.

    Made by `attach`. At each save of the Trainer (`save_strategy`, `save_steps`) the whole state
    goes to Holdfast in the background: model (of a PEFT model what is trained), optimizer,
    scheduler, scaler, `TrainerState`, states of callbacks, random streams of all ranks, the place
    in the data and the losses since the last log. The Trainer itself writes the model next to it,
    for `from_pretrained`, and rotates these folders.

    A save that is due at the last step of an epoch is made after the evaluation and the logs of
    that epoch.
    """

    def __init__(self, trainer: Trainer, root: Path, options: Mapping[str, Any]) -> None:
        self._trainer = trainer
        self._root = root
        self._options = dict(options)
        self._train = trainer.train
        self._checkpointer: Checkpointer | None = None
        self.last_save: PendingSave | None = None
        """The newest save of this training: `last_save.result()` waits for its commit."""
        self._resumed: int | None = None
        self._loads = ExitStack()
        """Holds the version whose counters the Trainer has until its weights have it, too."""
        self._continues = False
        """True once the newest checkpoint was asked for: a run without one is then a first run."""
        self._draws: Draws | None = None
        self._adapters: Adapters | None = None
        """Those of a PEFT model."""
        self._loaded_adapters: Any = None
        self._epoch = self._batches = self._steps_in_epoch = self._total_batch_size = 0
        self._replay: dict[str, Any] | None = None
        self._begun = 0, 0
        """The epoch, and the batch of it, at which the Trainer starts."""
        self._is_due_at_epoch_end = False

    @classmethod
    def attach(
        cls,
        trainer: Trainer,
        root: str | os.PathLike[str] | None = None,
        *,
        retention: KeepPolicy | None = None,
        **options: Any,
    ) -> HoldfastCallback:
        """Let Holdfast save and resume a Trainer; the last callback that is added to it.

        The Trainer's own files of optimizer, scheduler and random streams are no longer written
        (`save_only_model`), and states of callbacks are restored
        (`restore_callback_states_from_checkpoint`).

        Args:
            trainer: made, and not yet trained.
            root: directory of the checkpoints; by default `holdfast` in `output_dir`.
            retention: which checkpoints to keep; by default as many as `save_total_limit` says.
            options: further arguments of `Checkpointer`.

        Raises:
            ConfigError: the Trainer runs under something that is not supported, by name.
        """
        _refuse_unsupported(trainer)
        limit = trainer.args.save_total_limit
        if retention is None and limit is not None and limit > 0:
            retention = keep_newest(limit)
        chosen = Path(root) if root is not None else Path(trainer.args.output_dir, "holdfast")
        callback = cls(trainer, chosen, {**options, "retention": retention})
        trainer.args.save_only_model = True
        trainer.args.restore_callback_states_from_checkpoint = True
        trainer.add_callback(callback)
        trainer.callback_handler.callbacks.insert(0, _BeforeOthers(callback._resume_streams))
        trainer.train = callback.train
        return callback

    def latest(self) -> str | None:
        """Return the path of the newest committed checkpoint, for `resume_from_checkpoint`.

        None if there is none. Each rank looks for itself; `train` takes what the first rank says.
        """
        self._continues = True
        newest = newest_step(self._root)
        return None if newest is None else shown(self._root / step_dir(newest))

    def train(
        self, resume_from_checkpoint: str | bool | None = None, *args: Any, **named: Any
    ) -> Any:
        """Train as the Trainer does, resuming from Holdfast where it has the checkpoint.

        Args:
            resume_from_checkpoint: what `latest` returned, True for the newest checkpoint, or a
                folder of the Trainer's. A folder `checkpoint-N` whose step N is committed here is
                resumed from here; any other one as the Trainer does it.
            args, named: as of `Trainer.train`.

        Raises:
            HoldfastError: on all ranks, as of `Checkpointer.load` and `save_async`.
        """
        self._resumed = None
        with (
            groups_of_world("transformers") as groups,
            Checkpointer(self._root, groups=groups, **self._options) as checkpointer,
        ):
            self._checkpointer = checkpointer
            try:
                find = partial(self._agreed_step, groups, resume_from_checkpoint)
                self._resumed = Guard[int | None](groups.control, "resume").run(find)
                if self._resumed is None:
                    return self._train(resume_from_checkpoint, *args, **named)
                with (
                    self._loads,
                    self._starts_once(),
                    self._resume_folder(checkpointer, self._resumed) as folder,
                ):
                    return self._train(folder, *args, **named)
            finally:
                self._checkpointer = None

    # ---- What the Trainer calls ----

    def on_train_begin(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        """Load everything into what the Trainer has prepared."""
        checkpointer = self._running()
        self._count_batches(args, named["train_dataloader"])
        self._adapters = Adapters(self._model) if self._is_adapted else None
        if self._resumed is not None:
            self._load(checkpointer, self._resumed, args, state)
        else:
            how = "Pass resume_from_checkpoint=checkpoints.latest()"
            refuse_other_run(checkpointer, self._root, continues=self._continues, how=how)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        """Bring the streams back with which the order of the epoch was drawn."""
        replay, self._replay = self._replay, None
        if replay is None:
            self._batches = 0
        elif self._draws is not None:
            set_epoch_of_samplers(named["train_dataloader"], self._epoch)
            if self._batches:
                set_streams(replay.get("start", {}), self._draws.generators)
                fetch = replay.get("fetch")
                self._draws.watch.replay(self._batches, fetch=fetch, after=replay["now"])
        if self._draws is not None:
            self._draws.begin()

    def _resume_streams(self) -> None:
        """Bring the streams of a save between two epochs back, as the next one begins."""
        if self._replay is not None and self._draws is not None and not self._batches:
            set_streams(self._replay["now"], self._draws.generators)

    def on_step_begin(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        """Continue with the streams of the save, if no fetch has set them."""
        if self._draws is not None:
            self._draws.watch.finish()

    def on_substep_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        """Count a batch."""
        self._batches += 1

    def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        """Count a batch; a save at the end of an epoch waits for what the epoch ends with."""
        self._batches += 1
        if control.should_save and self._batches == self._steps_in_epoch:
            control.should_save, self._is_due_at_epoch_end = False, True

    def on_epoch_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        """Count an epoch."""
        if self._is_due_at_epoch_end:
            control.should_save, self._is_due_at_epoch_end = True, False
        if self._draws is not None:  # nothing was left of the pass
            self._draws.watch.finish()
        self._epoch, self._batches = self._epoch + 1, 0

    def on_save(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        """Save everything in the background."""
        if self._batches == self._steps_in_epoch:  # of `save_strategy="best"`, by an evaluation
            self._is_due_at_epoch_end = True
            return
        checkpointer = self._running()
        parts = self._parts(checkpointer, state)
        self.last_save = checkpointer.save_async(state.global_step, parts, overwrite=True)

    # ---- State ----

    def _parts(self, checkpointer: Checkpointer, state: Any) -> dict[str, object]:
        """Return what to save."""
        assert self._draws is not None
        trainer: Any = self._trainer
        if self._adapters is not None:
            self._adapters.note_changes(checkpointer.groups.control)
        own = text_of_coordinator(
            checkpointer.groups, lambda: self._text_of(state), phase="trainer state"
        )
        is_whole = self._batches == self._steps_in_epoch
        epoch, batches = (self._epoch + 1, 0) if is_whole else (self._epoch, self._batches)
        return {
            **self._trained(),
            **({} if self._adapters is None else {"adapters": self._adapters.tree()}),
            "rng": RNG(),
            "trainer": {"state": own},
            "position": {
                **_Position(epoch, batches, self._total_batch_size)._asdict(),
                "data": of_each_rank_or_first(self._draws.data()),
                "streams": of_each_rank(self._draws.streams(batches)),
                "loss": of_each_rank(float(trainer._tr_loss)),
                "last_logged": trainer._globalstep_last_logged,
            },
        }

    @property
    def _model(self) -> Any:
        """The model in its wrappers."""
        trainer: Any = self._trainer
        return trainer.accelerator.unwrap_model(trainer.model_wrapped)

    @property
    def _is_adapted(self) -> bool:
        return hasattr(self._model, "peft_config")

    def _trained(self) -> dict[str, object]:
        """Return the parts that are objects of the Trainer."""
        trainer: Any = self._trainer
        model: Any = trainer.model_wrapped
        adapters = self._adapters
        scaler = getattr(trainer.accelerator, "scaler", None)
        return {
            "model": model if adapters is None else ModuleState(model, only=adapters.has),
            "optimizer": OptimizerState(trainer.optimizer, model),
            "scheduler": trainer.lr_scheduler,
            **({} if scaler is None else {"scaler": scaler}),
        }

    def _text_of(self, state: Any) -> str:
        """Return the `TrainerState` as in its file, with the states of callbacks as they are."""
        fields = dataclasses.asdict(state)
        trainer: Any = self._trainer
        by_name: dict[str, list[object]] = {}
        for each in [*trainer.callback_handler.callbacks, trainer.control]:
            if isinstance(each, ExportableState):
                by_name.setdefault(type(each).__name__, []).append(each.state())
        fields["stateful_callbacks"] = {
            name: states if len(states) > 1 else states[0] for name, states in by_name.items()
        }
        return json.dumps(fields, indent=2) + "\n"

    def _load(self, checkpointer: Checkpointer, step: int, args: Any, state: Any) -> None:
        """Load a checkpoint into the Trainer, and set its own counters."""
        trainer: Any = self._trainer
        here = _Position(self._epoch, self._batches, self._total_batch_size)
        if self._adapters is not None:
            self._adapters.compare(*(self._loaded_adapters[each] for each in ("base", "changed")))
            put_rank_averages(self._model, self._loaded_adapters["ranks"])
        parts = {**self._trained(), "rng": RNG(), "position": _position_template()}
        values: Any = checkpointer.load(parts, step=step).values
        self._loads.close()
        loaded = values["position"]
        saved = _Position(*(loaded[name] for name in _Position._fields))
        if saved != here and not args.ignore_data_skip:
            raise MismatchError(_moved(saved, here))
        streams = loaded["streams"] if isinstance(loaded["streams"], dict) else {}
        assert self._draws is not None
        self._draws.load(loaded["data"], streams, is_within_pass=saved.batches > 0)
        self._replay = {**streams, "now": {**Streams().states(), **streams.get("own", {})}}
        loss = loaded["loss"] if isinstance(loaded["loss"], float) else 0.0
        trainer._tr_loss = torch.tensor(loss, device=args.device)
        mean = trainer.accelerator.reduce(trainer._tr_loss.clone(), reduction="mean")
        # `train_loss` is that of this call alone: what was trained before is taken off again.
        trainer._total_loss_scalar = -float(mean)
        trainer._globalstep_last_logged = loaded["last_logged"]

    def _count_batches(self, args: Any, loader: Any) -> None:
        """Take from the Trainer where it will start, and watch its loader."""
        trainer: Any = self._trainer
        numbers = trainer.set_initial_training_values(args, loader)
        self._total_batch_size, self._steps_in_epoch = numbers[4], numbers[5]
        self._epoch, self._batches = self._begun if self._resumed is not None else (0, 0)
        self._draws = Draws(loader, base=getattr(loader, "base_dataloader", None))

    # ---- Where ----

    def _running(self) -> Checkpointer:
        """Return the checkpointer of the training in progress."""
        if self._checkpointer is None:
            raise ConfigError("HoldfastCallback: train with the Trainer it was attached to")
        return self._checkpointer

    def _agreed_step(self, groups: ProcessGroups, resume: Any) -> int | None:
        """Return the step that the first rank resumes from; None if it is not one of these.

        Raises:
            MismatchError: then this rank would resume from one of these alone.
        """
        step = step_of_coordinator(groups, lambda: self._step_for(resume), phase="resume")
        is_path = resume is not None and not isinstance(resume, bool)
        if step is None and is_path and self._own_step(Path(resume)) is not None:
            raise MismatchError(
                f"resume_from_checkpoint is {resume}, and the first rank resumes from no "
                f"checkpoint of {self._root}. Let all ranks pass the same one, from a root that "
                f"all of them see"
            )
        return step

    def _step_for(self, resume: str | bool | None) -> int | None:
        """Return the step to resume from; None if it is not one of these.

        Raises:
            ConfigError: the Trainer would resume from a folder without its optimizer.
        """
        if not resume:
            return None
        newest = newest_step(self._root)
        if resume is True and newest is not None:
            return newest
        output_dir = Path(self._trainer.args.output_dir)
        folder = get_last_checkpoint(output_dir) if resume is True else resume
        if folder is None:
            return None  # the Trainer says so
        path = Path(folder)
        step = self._own_step(path)
        native = _NATIVE.fullmatch(path.name)
        if native and path.absolute().parent == output_dir.absolute():
            step = int(native[1]) if int(native[1]) in committed_steps(self._root) else None
        if step is None:
            _refuse_weights_alone(path, self._root)
        return step

    def _own_step(self, path: Path) -> int | None:
        """Return the step of a path of `latest`; None for any other."""
        is_below = path.absolute().parent == self._root.absolute()
        return parse_step_dir(path.name) if is_below else None

    @contextmanager
    def _resume_folder(self, checkpointer: Checkpointer, step: int) -> Iterator[str]:
        """Yield a folder from which the Trainer takes its state, and nothing else.

        Weights, optimizer and streams follow in `on_train_begin`, once they are placed.
        """
        trainer: Any = self._trainer
        self._loads.enter_context(checkpointer.one_version())
        parts = {"trainer": {"state": Stored()}, "position": _position_template()}
        if self._is_adapted:
            parts["adapters"] = dict.fromkeys(("base", "ranks", "changed"), Stored())
        values: Any = checkpointer.load(parts, step=step).values
        self._loaded_adapters = values.get("adapters")
        own, place = values["trainer"]["state"], values["position"]

        def begin(max_steps: int, per_epoch: int, num_epochs: int, *args: Any) -> tuple[int, int]:
            init: Any = type(trainer)._init_training_state
            given = [*trainer.callback_handler.callbacks]
            counted = init(trainer, max_steps, per_epoch, num_epochs, *args)
            _put_back(given, trainer.callback_handler)
            # Of data without a length the Trainer counts all steps as of the first pass.
            is_endless = num_epochs == sys.maxsize and not trainer.args.ignore_data_skip
            self._begun = (place["epoch"], place["batches"]) if is_endless else counted
            # No epoch is left of a run that has ended.
            return (num_epochs, 0) if _stays_stopped(trainer, json.loads(own)) else self._begun

        own_methods = {
            "_load_from_checkpoint": lambda *args, **named: None,
            "_init_training_state": begin,
        }
        with TemporaryDirectory(prefix="holdfast-") as folder:
            Path(folder, TRAINER_STATE_NAME).write_text(own)
            for name, method in own_methods.items():
                setattr(trainer, name, method)
            try:
                yield folder
            finally:
                for name in own_methods:
                    trainer.__dict__.pop(name, None)

    @contextmanager
    def _starts_once(self) -> Iterator[None]:
        """Leave out the evaluation of a start: its count of patience would be one too many."""
        arguments = self._trainer.args
        evaluates, arguments.eval_on_start = arguments.eval_on_start, False
        try:
            yield
        finally:
            arguments.eval_on_start = evaluates


class _BeforeOthers(TrainerCallback):  # type: ignore[misc]
    """The first callback: what others draw as an epoch begins is drawn behind the save.

    Args:
        resume: brings the streams back.
    """

    def __init__(self, resume: Callable[[], None]) -> None:
        self._resume = resume

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        """Continue with the streams of the save."""
        self._resume()


def _put_back(given: list[Any], handler: Any) -> None:
    """Put the callbacks that the Trainer has made of saved states where the program's own were.

    The Trainer appends them, behind the one of ours, with the arguments of the saved run. How
    patient a run is, is the program's to say.
    """
    made = [each for each in handler.callbacks if not any(each is other for other in given)]
    for index, old in enumerate(given):
        new = next((each for each in made if type(each) is type(old)), None)
        if new is not None:
            made.remove(new)
            given[index] = new
            if isinstance(old, EarlyStoppingCallback):
                new.early_stopping_patience = old.early_stopping_patience
                new.early_stopping_threshold = old.early_stopping_threshold
    handler.callbacks[:] = given


def _stays_stopped(trainer: Any, saved: Mapping[str, Any]) -> bool:
    """Return True for a run that had been stopped early, unless it has more patience now."""
    if not trainer.control.should_training_stop or saved["global_step"] >= saved["max_steps"]:
        return False
    stays = any(
        isinstance(each, EarlyStoppingCallback)
        and each.early_stopping_patience_counter >= each.early_stopping_patience
        for each in trainer.callback_handler.callbacks
    )
    if trainer.is_world_process_zero():
        logging.getLogger("holdfast").warning(
            "the run had been stopped early; EarlyStoppingCallback(early_stopping_patience=...) "
            "lets it go on"
            if stays
            else "the run had been stopped early (should_training_stop), and goes on now"
        )
    return stays


def _position_template() -> dict[str, object]:
    """Return what is loaded of a position."""
    return {
        **dict.fromkeys((*_Position._fields, "last_logged"), Stored()),
        "data": of_each_rank_or_first(Stored()),
        "streams": of_each_rank(Stored()),
        "loss": of_each_rank(Stored()),
    }


def _moved(saved: _Position, here: _Position) -> str:
    """Return why a run cannot continue where it was."""
    return (
        f"the checkpoint is at batch {saved.batches} of epoch {saved.epoch}, with "
        f"{saved.total_batch_size} samples a step; this Trainer, which counts steps, would go on "
        f"at batch {here.batches} of epoch {here.epoch}, with {here.total_batch_size} "
        f"samples a step. Keep the product of per_device_train_batch_size, "
        f"gradient_accumulation_steps and the number of ranks, and the size of the dataset; or "
        f"start the data again with ignore_data_skip=True"
    )


def _refuse_weights_alone(folder: Path, root: Path) -> None:
    """Raise ConfigError if a folder of the Trainer's has no optimizer: it would begin a new one.

    Such a folder is written next to each checkpoint here, and before that is committed.
    """
    if (folder / TRAINER_STATE_NAME).is_file() and not any(folder.glob("*optimizer*")):
        raise ConfigError(
            f"{folder} has weights and no optimizer: the Trainer would start with a new one. "
            f"{root} has no checkpoint of its step. Pass "
            f"resume_from_checkpoint=checkpoints.latest(), which is None if there is none; to "
            f"start from these weights, load the model by from_pretrained"
        )


def _fsdp_version(trainer: Any) -> int:
    """Return the version of FSDP by which the Trainer shards its model; 0 without."""
    plugin = trainer.accelerator.state.fsdp_plugin if trainer.is_fsdp_enabled else None
    return 0 if plugin is None else int(getattr(plugin, "fsdp_version", 1))


def _refuse_unsupported(trainer: Any) -> None:
    """Raise ConfigError for what this integration does not cover."""
    fsdp = _fsdp_version(trainer)
    unsupported = {
        "DeepSpeed": trainer.is_deepspeed_enabled,
        "FSDP of version 1": fsdp == 1,
        # The Trainer reads a file for it that it writes with its own optimizer's state alone.
        "load_best_model_at_end under FSDP": fsdp and trainer.args.load_best_model_at_end,
        "a model that is sharded while it is loaded (tp_plan)": getattr(
            trainer, "is_distributed_loading_by_transformers", False
        ),
        "Accelerate's stateful loaders": trainer.accelerator.use_stateful_dataloader,
        "torch.nn.DataParallel (n_gpu > 1)": trainer.args.n_gpu > 1,
        # A loader draws the seed of its workers when it starts them: once in a run, not in each.
        "dataloader_persistent_workers": trainer.args.dataloader_persistent_workers,
        "auto_find_batch_size": trainer.args.auto_find_batch_size,
        # It writes the Trainer's own folder within a step, which nothing could be resumed from.
        "enable_jit_checkpoint": getattr(trainer.args, "enable_jit_checkpoint", False),
        "TPU": trainer.args.device.type == "xla",
    }
    named = [name for name, is_used in unsupported.items() if is_used]
    if named:
        raise ConfigError(f"HoldfastCallback does not support {', '.join(named)}")
