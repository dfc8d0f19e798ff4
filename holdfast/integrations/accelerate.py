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
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.data_loader import DataLoaderDispatcher, skip_first_batches
from torch import nn

from holdfast.checkpoint import Checkpointer, LoadReport, PendingSave
from holdfast.errors import ConfigError, MismatchError
from holdfast.integrations.fetches import (
    FetchWatch,
    Streams,
    generators_of,
    set_epoch_of_samplers,
    set_streams,
)
from holdfast.integrations.owners import owners_of
from holdfast.integrations.world import agreed_newest_step, groups_of_world, of_each_rank
from holdfast.state import RNG, OptimizerState, Stored

_PLACE = "_holdfast_place"


class AccelerateCheckpoints:
    """Saves and resumes everything that an `Accelerator` has prepared and registered.

    Models, optimizers, schedulers, the gradient scaler, objects of `register_for_checkpointing`,
    random streams of all ranks, and where each prepared loader is: after a load the next pass over
    it begins behind the last batch that was trained.

    Args:
        accelerator: after `prepare` and `register_for_checkpointing`.
        root: directory of the checkpoints.
        every: optimizer steps between the saves of `after_step`; 0 for none.
        options: further arguments of `Checkpointer`, such as `retention`.

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
        **options: Any,
    ) -> None:
        _refuse_unsupported(accelerator)
        self._accelerator: Any = accelerator
        self._every = every
        self._places = [_Place.of(loader) for loader in self._accelerator._dataloaders]
        self._groups = groups_of_world("accelerate")
        self._checkpointer = Checkpointer(root, groups=self._groups, **options)
        self._overwrite = False
        self.step = 0
        """Optimizer steps that were made so far, those before a resume included."""

    @classmethod
    def resume(
        cls,
        accelerator: Accelerator,
        root: str | os.PathLike[str],
        *,
        every: int = 0,
        **options: Any,
    ) -> AccelerateCheckpoints:
        """Return checkpoints, with the newest of them loaded, if there is one.

        Args, errors: as of the class, and of `Checkpointer.load`.
        """
        checkpoints = cls(accelerator, root, every=every, **options)
        newest = agreed_newest_step(checkpoints._groups, Path(root))
        if newest is not None:
            checkpoints.load(newest)
        # A writer that has outlived the last run may still commit a step that this run makes again.
        checkpoints._overwrite = True
        return checkpoints

    @property
    def checkpointer(self) -> Checkpointer:
        """The `Checkpointer` in use."""
        return self._checkpointer

    @property
    def epoch(self) -> int:
        """The pass over the first prepared loader that is in progress, or comes next."""
        return int(self._accelerator._dataloaders[0].iteration) if self._places else 0

    def after_step(self) -> PendingSave | None:
        """Count an optimizer step, and save in the background if one is due; after each batch.

        A batch after which gradients are accumulated is not a step.

        Raises:
            HoldfastError: as of `Checkpointer.save_async`.
        """
        if not self._accelerator.sync_gradients:
            return None
        self.step += 1
        return self.save() if self._every and self.step % self._every == 0 else None

    def save(self, **options: Any) -> PendingSave:
        """Save everything now, as checkpoint `step`, in the background.

        Args:
            options: of `Checkpointer.save_async`.

        Raises:
            ConfigError: gradients are accumulated: they would be lost.
            HoldfastError: as of `Checkpointer.save_async`.
        """
        accelerator = self._accelerator
        if not accelerator.sync_gradients:
            raise ConfigError(
                "AccelerateCheckpoints.save: gradients are being accumulated, and would be lost; "
                "save after a step of the optimizer (accelerator.sync_gradients)"
            )
        own = {"step": self.step, "accumulated": accelerator.step}
        places = {str(i): place.tree() for i, place in enumerate(self._places)}
        parts = {**self._parts(), "accelerator": own, "loaders": places}
        return self._checkpointer.save_async(
            self.step, parts, **{"overwrite": self._overwrite, **options}
        )

    def load(self, step: int | None = None, **options: Any) -> LoadReport:
        """Load a checkpoint into everything that the accelerator has.

        Args:
            step: by default the newest.
            options: of `Checkpointer.load`.

        Raises:
            MismatchError: as of `Checkpointer.load`; or a loader cannot continue at a whole batch.
        """
        own = {"step": Stored(), "accumulated": Stored()}
        places = {str(i): place.template() for i, place in enumerate(self._places)}
        parts = {**self._parts(), "accelerator": own, "loaders": places}
        report = self._checkpointer.load(parts, step=step, **options)
        values: Any = report.values
        for i, place in enumerate(self._places):
            place.move(values["loaders"][str(i)])
        self.step = values["accelerator"]["step"]
        self._accelerator.step = values["accelerator"]["accumulated"]
        return report

    def close(self) -> None:
        """Wait for saves in flight, and raise what failed; destroy the communicators made here."""
        self._checkpointer.close()
        self._groups.close()

    def _parts(self) -> dict[str, object]:
        """Return the objects that are saved as they are."""
        accelerator = self._accelerator
        models: list[nn.Module] = accelerator._models
        parts: dict[str, object] = dict(_numbered("model", models))
        for name, optimizer in _numbered("optimizer", accelerator._optimizers):
            parts[name] = OptimizerState(optimizer, _owners(optimizer, models))
        parts |= _numbered("scheduler", accelerator._schedulers)
        parts |= _numbered("custom", accelerator._custom_objects)
        if accelerator.scaler is not None:
            parts["scaler"] = accelerator.scaler
        return {**parts, "rng": RNG()}


class _Place:
    """Where a prepared loader is: its pass, and the batches of it that are trained."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._watch = None if type(loader) is DataLoaderDispatcher else FetchWatch(loader)
        self._generators = generators_of(loader)
        self._batches = 0
        self._start: Streams | None = None
        self._moved: Mapping[str, Any] | None = None

    @classmethod
    def of(cls, loader: Any) -> _Place:
        """Return the place of a loader, which counts its batches from now on."""
        known: _Place | None = loader.__dict__.get(_PLACE)
        if known is not None:
            return known
        place = loader.__dict__[_PLACE] = cls(loader)
        kind = type(loader)

        def batches(self: Any) -> Iterator[object]:
            return place.batches(lambda: kind.__iter__(self))

        counting = type(kind.__name__, (kind,), {"__iter__": batches, "__module__": __name__})
        # The class of a prepared loader is hidden behind a property: this is what sets it.
        object.__dict__["__class__"].__set__(loader, counting)
        return place

    def batches(self, begin: Callable[[], Iterator[object]]) -> Iterator[object]:
        """Yield the batches of one pass: of a new one, or of the one that a load has moved to."""
        moved, self._moved = self._moved, None
        epoch = self._loader.iteration
        try:
            if moved is None:
                self._batches, self._start = 0, Streams(self._generators)
                source = begin()
            else:
                source = self._begin_moved(moved, epoch)
            for batch in source:
                if self._watch is not None:
                    self._watch.finish()
                self._batches += 1
                yield batch
            if self._watch is not None:
                self._watch.finish()
            self._loader.iteration = epoch + 1
        finally:
            self._batches = 0

    def _begin_moved(self, moved: Mapping[str, Any], epoch: int) -> Iterator[object]:
        """Return the rest of a pass, whose order is drawn with the streams of its beginning."""
        now = Streams().states()
        set_epoch_of_samplers(self._loader, epoch)
        set_streams(moved.get("start") or {}, self._generators)
        self._start = Streams(self._generators)
        if self._watch is None:
            self._watch = FetchWatch(None)
        self._watch.replay(self._batches, fetch=moved.get("fetch"), after=now)
        return iter(skip_first_batches(self._loader, self._batches))

    def tree(self) -> dict[str, object]:
        """Return what is saved."""
        return {
            "epoch": int(self._loader.iteration),
            "batches": self._batches,
            "total_batch_size": int(self._loader.total_batch_size),
            "streams": of_each_rank(self._streams()),
        }

    def _streams(self) -> Mapping[str, Any]:
        """Return the streams of the pass's beginning, and those before the batch fetched ahead."""
        if self._moved is not None:  # nothing was fetched since the load
            return self._moved
        is_inside = self._batches > 0
        start = self._start if self._start is not None and is_inside else Streams(self._generators)
        fetch = self._watch.before(self._batches) if self._watch is not None and is_inside else None
        return {"start": start.states(), "fetch": fetch}

    def template(self) -> dict[str, object]:
        """Return what is loaded."""
        whole: dict[str, object] = dict.fromkeys(("epoch", "batches", "total_batch_size"), Stored())
        return {**whole, "streams": of_each_rank(Stored())}

    def move(self, tree: Mapping[str, Any]) -> None:
        """Go to where a checkpoint was."""
        samples, size = tree["batches"] * tree["total_batch_size"], self._loader.total_batch_size
        if samples % size:
            raise MismatchError(
                f"a loader was at sample {samples} of epoch {tree['epoch']}, which is no multiple "
                f"of its {size} samples a step now; choose a batch size that divides it"
            )
        self._loader.iteration, self._batches = tree["epoch"], samples // size
        streams = tree["streams"] if isinstance(tree["streams"], dict) else {}
        if self._batches:
            self._moved = streams
        else:
            own = {n: s for n, s in (streams.get("start") or {}).items() if n in self._generators}
            set_streams(own, self._generators)


def _numbered(name: str, objects: list[Any]) -> Iterator[tuple[str, Any]]:
    """Yield objects by name: the first one by the name alone."""
    for index, each in enumerate(objects):
        yield (name if index == 0 else f"{name}{index}"), each


def _owners(optimizer: Any, models: list[nn.Module]) -> nn.Module | dict[str, nn.Module]:
    """Return the model whose parameters an optimizer has, or those by name if there are several."""
    owners = owners_of(optimizer, _numbered("model", models))
    if owners is None:
        raise ConfigError("an optimizer has no parameter of a model that the accelerator prepared")
    return owners


def _refuse_unsupported(accelerator: Any) -> None:
    """Raise ConfigError for what this integration does not cover."""
    kind = accelerator.distributed_type.name
    unsupported = [kind] if kind in ("DEEPSPEED", "MEGATRON_LM", "XLA") else []
    if kind == "FSDP" and not accelerator.is_fsdp2:
        unsupported.append("FSDP of version 1 (fsdp_version=2 is supported)")
    if accelerator.use_stateful_dataloader:
        unsupported.append("use_stateful_dataloader")
    if unsupported:
        raise ConfigError(f"AccelerateCheckpoints does not support {', '.join(unsupported)}")
