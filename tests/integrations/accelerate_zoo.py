"""Every loader, optimizer wrapper, scheduler wrapper and plugin of Accelerate that has a state."""

from __future__ import annotations

import enum
import inspect
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import accelerate
import accelerate.data_loader
import accelerate.local_sgd
import accelerate.optimizer
import accelerate.scheduler
import accelerate.tracking
import accelerate.utils.dataclasses
import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.local_sgd import LocalSGD
from accelerate.utils import (
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    ProjectConfiguration,
    set_seed,
)
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, Dataset, IterableDataset

from holdfast.integrations.accelerate import AccelerateCheckpoints

EPOCHS = 3


class Rows(Dataset[torch.Tensor]):
    """Eleven rows with noise from the streams of the process."""

    def __len__(self) -> int:
        return 11

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.arange(4.0) * index + torch.randn(4)


class Stream(IterableDataset[torch.Tensor]):
    """Eleven rows, one after the other, other ones at each pass."""

    epoch = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        for index in range(11):
            yield torch.arange(4.0) * index + self.epoch

    def __len__(self) -> int:
        return 11

    def set_epoch(self, epoch: int) -> None:
        """Take note of the pass."""
        self.epoch = epoch


class Drawn(IterableDataset[torch.Tensor]):
    """Eleven rows of a generator that Accelerate seeds or spreads."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(torch.initial_seed())

    def __iter__(self) -> Iterator[torch.Tensor]:
        for _ in range(11):
            yield torch.randn(4, generator=self.generator)


class Still(Rows):
    """The rows without noise."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.arange(4.0) * index


class Seen:
    """How many rows all ranks had of each batch: padding is left out of the last one."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def state_dict(self) -> dict[str, Any]:
        """Return what is saved."""
        return {"sizes": self.sizes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take what was saved."""
        self.sizes = state["sizes"]


def _shuffled(rows: Rows | None = None, **options: Any) -> DataLoader[torch.Tensor]:
    return DataLoader(rows or Rows(), batch_size=2, shuffle=True, **options)


def _of_varying_size() -> DataLoader[torch.Tensor]:
    return DataLoader(Rows(), batch_sampler=[[0], [1, 2, 3], [4, 5], [6], [7, 8, 9], [10]])


def _halved_slices(tensors: Any, where: Any, **_: Any) -> Any:
    return tensors[where] / 2


CASES: dict[str, dict[str, Any]] = {
    # DataLoaderShard, BatchSamplerShard, IterableDatasetShard
    "shard": {},
    "shard, two ranks": {"ranks": 2},
    "shard, halves of batches": {"ranks": 2, "data": {"split_batches": True}},
    "shard, uneven batches": {
        "ranks": 2,
        "data": {"even_batches": False},
        "loader": lambda: _shuffled(drop_last=True),
    },
    "shard, dropped last": {"loader": lambda: _shuffled(drop_last=True)},
    "shard, own generator": {
        "loader": lambda: _shuffled(generator=torch.Generator().manual_seed(torch.initial_seed()))
    },
    "shard, batches of varying size": {
        "ranks": 2, "loader": _of_varying_size, "data": {"even_batches": False}, "gather": False,
    },
    "shard, worker processes": {"loader": lambda: _shuffled(num_workers=2)},
    "shard, workers that stay": {
        "loader": lambda: _shuffled(Still(), num_workers=1, persistent_workers=True)
    },
    "shard, stream": {"loader": lambda: DataLoader(Stream(), batch_size=2)},
    "shard, stream, two ranks": {
        "ranks": 2,
        "loader": lambda: DataLoader(Stream(), batch_size=2),
        "data": {"dispatch_batches": False},
    },
    "shard, stream in halves": {
        "ranks": 2,
        "loader": lambda: DataLoader(Stream(), batch_size=2),
        "data": {"dispatch_batches": False, "split_batches": True},
    },
    "shard, drawn stream": {
        "ranks": 2,
        "loader": lambda: DataLoader(Drawn(), batch_size=2),
        "data": {"dispatch_batches": False},
    },
    "seedable": {"data": {"use_seedable_sampler": True}},
    "seedable, two ranks": {"ranks": 2, "data": {"use_seedable_sampler": True}},
    "seedable, data seed": {"data": {"use_seedable_sampler": True, "data_seed": 5}},
    # DataLoaderDispatcher
    "dispatcher": {"data": {"dispatch_batches": True}},
    "dispatcher, two ranks": {"ranks": 2, "data": {"dispatch_batches": True}},
    "dispatcher, halves of batches": {
        "ranks": 2, "data": {"dispatch_batches": True, "split_batches": True},
    },
    "dispatcher, seedable": {
        "ranks": 2, "data": {"dispatch_batches": True, "use_seedable_sampler": True},
    },
    "dispatcher, stream": {"ranks": 2, "loader": lambda: DataLoader(Stream(), batch_size=2)},
    "dispatcher, own slices": {
        "ranks": 2, "data": {"dispatch_batches": True}, "slices": _halved_slices,
    },
    # GradientAccumulationPlugin
    "accumulation": {"accumulation": {"num_steps": 2}},
    "accumulation, over epochs": {"accumulation": {"num_steps": 4, "sync_with_dataloader": False}},
    "accumulation, schedule as it is": {
        "accumulation": {"num_steps": 2, "adjust_scheduler": False},
        "schedule": lambda each: lr_scheduler.OneCycleLR(each, 0.02, total_steps=20),
    },
    "accumulation, each batch": {
        "ranks": 2, "accumulation": {"num_steps": 2, "sync_each_batch": True},
    },
    # AcceleratedOptimizer, AcceleratedScheduler
    "schedule, one cycle": {
        "ranks": 2, "schedule": lambda each: lr_scheduler.OneCycleLR(each, 0.02, total_steps=12),
    },
    "schedule, alone": {"options": {"step_scheduler_with_optimizer": False}},
    "schedule, in sequence": {
        "schedule": lambda each: lr_scheduler.SequentialLR(
            each,
            [lr_scheduler.LinearLR(each, 0.1), lr_scheduler.ExponentialLR(each, 0.9)],
            [5],
        ),
    },
    "scaler": {"scaler": True},
    "bf16": {"options": {"mixed_precision": "bf16"}},
    # KwargsHandler and others
    "hook, fp16": {"ranks": 2, "hook": DDPCommunicationHookType.FP16},
    "tracker": {"options": {"log_with": "tensorboard"}},
    "project": {"names": {"automatic_checkpoint_naming": True, "total_limit": 30}},
    "local": {"ranks": 2, "local": 2, "plain": True, "every": 2},
}  # fmt: skip
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "hook, power_sgd": (
        "comm_hook=power_sgd, whose error feedback would be lost",
        {"ranks": 2, "hook": DDPCommunicationHookType.POWER_SGD},
    ),
    "hook, batched_power_sgd": (
        "comm_hook=batched_power_sgd",
        {"ranks": 2, "hook": DDPCommunicationHookType.BATCHED_POWER_SGD},
    ),
    "local, moments": ("exp_avg: different bytes on ranks", {"ranks": 2, "local": 1}),
    "local, between averages": (
        "model.0.weight: different bytes on ranks",
        {"ranks": 2, "local": 2, "plain": True},
    ),
    "stateful": ("use_stateful_dataloader", {"data": {"use_stateful_dataloader": True}}),
    "skipped": ("or made by skip_first_batches", {"skip": True}),
    "second loader": ("that was prepared after it was made", {"late": True}),
    "hooks": ("does not call hooks of accelerator.save_state", {"hooks": True}),
}
"""What is refused, and the words of a message."""
_NOT_TRAINED = {
    "hook, bf16": "needs an accelerator",
    "AORecipeKwargs": "float8 needs an accelerator",
    "AutocastKwargs": "no state",
    "BnbQuantizationConfig": "bitsandbytes needs an accelerator",
    "DataLoaderAdapter": "abstract; DataLoaderShard is one",
    "DataLoaderStateMixin": "abstract; DataLoaderShard is one",
    "DeepSpeedPlugin": "refused by name",
    "DeepSpeedSequenceParallelConfig": "refused by name",
    "FP8RecipeKwargs": "needs an accelerator",
    "FullyShardedDataParallelPlugin": "test_accelerate.py trains with it on four ranks",
    "GradScalerKwargs": "settings of a scaler",
    "InitProcessGroupKwargs": "no state",
    "KwargsHandler": "abstract",
    "MSAMPRecipeKwargs": "needs an accelerator",
    "MegatronLMPlugin": "refused by name",
    "ProfileKwargs": "no state",
    "SkipBatchSampler": "of skip_first_batches: refused by name",
    "SkipDataLoader": "of skip_first_batches: refused by name",
    "TERecipeKwargs": "needs an accelerator",
    "TensorInformation": "no state",
    "TorchContextParallelConfig": "needs an accelerator",
    "TorchDynamoPlugin": "names look through torch.compile; test_parts.py",
    "TorchTensorParallelConfig": "needs a model that transformers shards",
    "TorchTensorParallelPlugin": "needs a model that transformers shards",
    "EnumWithContains": "abstract",
    **dict.fromkeys(
        ("AimTracker", "ClearMLTracker", "CometMLTracker", "DVCLiveTracker", "GeneralTracker",
         "MLflowTracker", "SwanLabTracker", "TrackioTracker", "WandBTracker"),
        "reports to a service, and has no state that training reads",
    ),
}  # fmt: skip
_TRAINED = {
    "AcceleratedOptimizer", "AcceleratedScheduler", "BatchSamplerShard", "DataLoaderConfiguration",
    "DataLoaderDispatcher", "DataLoaderShard", "DistributedDataParallelKwargs",
    "GradientAccumulationPlugin", "IterableDatasetShard", "LocalSGD", "ProjectConfiguration",
    "SeedableRandomSampler", "TensorBoardTracker",
}  # fmt: skip


def names() -> dict[str, int]:
    """Return what is trained with here, and the number of ranks."""
    return {name: case.get("ranks", 1) for name, case in CASES.items()}


def refusals() -> dict[str, tuple[str, int]]:
    """Return what is refused, by which words, and the number of ranks."""
    return {name: (words, case.get("ranks", 1)) for name, (words, case) in REFUSED.items()}


def unknown_names() -> list[str]:
    """Return the classes of Accelerate that are in no table, and those that it has no more."""
    modules = (
        accelerate.data_loader,
        accelerate.local_sgd,
        accelerate.optimizer,
        accelerate.scheduler,
        accelerate.tracking,
        accelerate.utils.dataclasses,
    )
    own = {
        name
        for module in modules
        for name, each in inspect.getmembers(module, inspect.isclass)
        if each.__module__ == module.__name__ and not issubclass(each, enum.Enum)
    }
    own |= {f"hook, {each.value}" for each in DDPCommunicationHookType} - {"hook, no"}
    hooks = {each for each in (*CASES, *REFUSED) if each.startswith("hook, ")}
    return sorted(own ^ (_TRAINED | _NOT_TRAINED.keys() | hooks))


def train(name: str, root: Path, seed: int) -> str:
    """Train with one of them, from the newest checkpoint if there is one.

    Returns:
        The steps, and the weights.
    """
    case = CASES[name] if name in CASES else REFUSED[name][1]
    set_seed(seed)
    handlers: list[Any] = [
        DistributedDataParallelKwargs(
            find_unused_parameters=True, comm_hook=case.get("hook", DDPCommunicationHookType.NO)
        )
    ]
    accelerator = Accelerator(
        cpu=True,
        kwargs_handlers=handlers,
        dataloader_config=DataLoaderConfiguration(**case.get("data", {})),
        gradient_accumulation_plugin=GradientAccumulationPlugin(
            **{"num_steps": 1, **case.get("accumulation", {})}
        ),
        project_config=ProjectConfiguration(str(root.parent / "own"), **case.get("names", {})),
        **case.get("options", {}),
    )
    if case.get("scaler"):  # which Accelerate itself makes on accelerators alone
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**60, growth_interval=3)
        accelerator.native_amp = True
    layers = [torch.nn.Linear(4, 6), torch.nn.Dropout(0.2), torch.nn.Linear(6, 1)]
    model: Any = torch.nn.Sequential(*layers)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if case.get("plain"):
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    make: Callable[..., Any] = case.get("schedule", lambda each: lr_scheduler.StepLR(each, 2, 0.9))
    loader = case.get("loader", _shuffled)()
    model, optimizer, schedule = accelerator.prepare(model, optimizer, make(optimizer))
    loader = accelerator.prepare_data_loader(loader, slice_fn_for_dispatch=case.get("slices"))
    if case.get("options", {}).get("log_with"):
        accelerator.init_trackers("run")
    if case.get("hooks"):
        accelerator.register_save_state_pre_hook(lambda models, weights, folder: None)
    seen = Seen()
    accelerator.register_for_checkpointing(seen)
    every = case.get("every", 1)
    checkpoints = AccelerateCheckpoints.resume(accelerator, root, every=every)
    if case.get("late"):
        accelerator.prepare_data_loader(_shuffled())
    local = LocalSGD(accelerator, model, case.get("local", 1), enabled="local" in case)
    with local:
        for _ in range(checkpoints.epoch, EPOCHS):
            rows = accelerator.skip_first_batches(loader, 1) if case.get("skip") else loader
            for batch in rows:
                with accelerator.accumulate(model):
                    loss = (model(batch) - 1).square().mean()
                    accelerator.backward(loss)
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
                    local.step()
                if case.get("gather", True):
                    seen.sizes.append(len(accelerator.gather_for_metrics(batch)))
                accelerator.log({"loss": loss.item()}, step=checkpoints.step)
                if case.get("names") and checkpoints.step % 4 == 3:
                    accelerator.save_state()
                checkpoints.after_step()
    checkpoints.close()
    accelerator.end_training()
    state = {key: each.tolist() for key, each in model.state_dict().items()}
    return (
        f"rank {os.environ.get('RANK', 0)} steps {checkpoints.step} sizes {seen.sizes} "
        f"rate {schedule.get_last_lr()} draw {torch.rand(1).item()} {state}"
    )
