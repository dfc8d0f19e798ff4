"""Every optimizer, schedule and loader of torchtitan that a CPU can train, in its own trainer."""

from __future__ import annotations

import importlib
import inspect
import os
import pkgutil
import re
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tests.integrations.titan_on_cpu  # noqa: F401  before torchtitan

import torch  # isort: skip
import torchtitan.components
from torch.utils.data import IterableDataset
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.lora import LoRAConverter
from torchtitan.components.optimizer import (
    LRSchedulersContainer,
    OptimizersContainer,
    ParamGroupConfig,
)
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.models.deepseek_v3 import config_registry as deepseek
from torchtitan.models.llama3 import config_registry as llama3
from torchtitan.models.qwen3 import config_registry as qwen3

from holdfast.integrations.torchtitan import HoldfastManager

STEPS = 5


class Tokens(IterableDataset[Any]):
    """Rows of tokens of one data rank, from its place on."""

    def __init__(self, rank: int, seq_len: int) -> None:
        self.rank, self.seq_len, self.place = rank, seq_len, 0

    def __iter__(self) -> Iterator[Any]:
        while True:
            self.place += 1
            row = torch.arange(self.seq_len + 1) * (self.place % 7 + 1) + self.rank
            positions = torch.arange(self.seq_len)
            yield {"input": row[:-1] % 2000, "positions": positions}, row[1:] % 2000

    def state_dict(self) -> dict[str, Any]:
        """Return the place."""
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a place."""
        self.place = state["place"]


class Loader(ParallelAwareDataloader):  # type: ignore[misc]
    """torchtitan's loader over rows that are made."""

    @dataclass(kw_only=True, slots=True)
    class Config(ParallelAwareDataloader.Config):  # type: ignore[misc]
        """Its settings."""

    def __init__(
        self,
        config: Any,
        *,
        dp_world_size: int,
        dp_rank: int,
        seq_len: int,
        local_batch_size: int,
        **_: Any,
    ) -> None:
        names = ("num_workers", "persistent_workers", "prefetch_factor")
        options = {name: getattr(config, name) for name in names}
        rows = Tokens(dp_rank, seq_len)
        super().__init__(rows, dp_rank, dp_world_size, batch_size=local_batch_size, **options)


class NoTokenizer(BaseTokenizer):  # type: ignore[misc]
    """Stands for a tokenizer, which rows that are made do not need."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):  # type: ignore[misc]
        """Its settings: none."""

    def __init__(self, config: Any, **_: Any) -> None:
        super().__init__()

    def encode(self, text: str) -> list[int]:
        """Not called."""
        raise NotImplementedError

    def decode(self, tokens: list[int]) -> str:
        """Not called."""
        raise NotImplementedError

    def get_vocab_size(self) -> int:
        """Not called."""
        raise NotImplementedError


def _optimizer(*groups: tuple[str, str, dict[str, Any]], **options: Any) -> Any:
    made = [ParamGroupConfig(pattern=p, optimizer_name=n, optimizer_kwargs=o) for p, n, o in groups]
    return OptimizersContainer.Config(
        param_groups=made, **{"implementation": "for-loop", **options}
    )


def _adam_in_workers(config: Any) -> None:
    config.optimizer = _optimizer((".*", "Adam", {"lr": 1e-2}))
    config.lr_scheduler.decay_type = "sqrt"
    config.dataloader.num_workers, config.dataloader.persistent_workers = 1, True


def _foreach_with_metrics(config: Any) -> None:
    settings = {"lr": 1e-2, "amsgrad": True}
    config.optimizer = _optimizer((".*", "AdamW", settings), implementation="foreach")
    config.lr_scheduler.decay_type, config.lr_scheduler.min_lr_factor = "cosine", 0.1
    config.metrics.enable_tensorboard = True


def _two_kinds(config: Any) -> None:
    config.optimizer = _optimizer(
        ("norm", "Adam", {"lr": 1e-3, "betas": (0.5, 0.9)}),
        ("tok_embeddings", "AdamW", {"lr": 1e-2, "weight_decay": 0.0}),
        (".*", "AdamW", {"lr": 3e-2}),
        implementation="fused",
    )
    config.lr_scheduler.total_steps = 9


def _adapters(config: Any) -> None:
    names = ["wq", "wkv", "wo"]
    spec = llama3.model_registry(
        "debugmodel",
        converters=[LoRAConverter.Config(rank=2, alpha=4.0, target_modules=names)],
    )
    del spec.model.layers[2:]
    config.model_spec = spec


def _as_it_is(config: Any) -> None:
    """Change nothing."""


CASES: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {
    "Adam, sqrt, workers": (llama3.llama3_debugmodel, _adam_in_workers),
    "AdamW, foreach, cosine, metrics": (llama3.llama3_debugmodel, _foreach_with_metrics),
    "groups of two kinds, fused": (llama3.llama3_debugmodel, _two_kinds),
    "adapters": (llama3.llama3_debugmodel, _adapters),
    "balanced experts, MTP": (deepseek.deepseek_v3_debugmodel_mtp, _as_it_is),
    "groups of experts": (qwen3.qwen3_debugmodel_moe_param_groups, _as_it_is),
}
"""The configuration, and what is changed in it."""


_TRAINED = {
    "Adam", "AdamW", "BaseLogger", "DeviceMemStats", "DeviceMemoryMonitor",
    "LRSchedulersContainer", "LoRAConverter",
    "LoggerContainer", "MetricsProcessor", "OptimizersContainer", "ParallelAwareDataloader",
    "ParamGroupConfig", "TensorBoardLogger", "cosine", "for-loop", "foreach", "fused", "linear",
    "sqrt",
}  # fmt: skip
_NOT_TRAINED = {
    "DistMuon": "requires CUDA",
    "fused_opt_states_bf16": "has a kernel for CUDA alone",
    "WandBLogger": "reports to a service",
    **dict.fromkeys(
        ("BaseLoss", "ChunkedLossWrapper", "CrossEntropyLoss", "GradAccumulator", "MSELoss"),
        "no state",
    ),
    **dict.fromkeys(("BaseTokenizer", "HuggingFaceTokenizer", "MultiModalTokenizer"), "no state"),
    **dict.fromkeys(("BaseValidator", "Validator"), "needs `datasets`"),
    **dict.fromkeys(("BaseDataLoader", "DataloaderExhaustedError"), "no state of its own"),
}


def names() -> list[str]:
    """Return what is trained with here."""
    return list(CASES)


def unknown_names() -> list[str]:
    """Return what torchtitan's components have that is in no table, and what they have no more."""
    package = torchtitan.components
    modules = [
        importlib.import_module(each.name)
        for each in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
        if "quantization" not in each.name and "checkpoint" not in each.name  # CUDA; ours
    ]
    own = {
        name
        for module in modules
        for name, each in inspect.getmembers(module, inspect.isclass)
        if each.__module__ == module.__name__ and not name.startswith("_")
    }
    own |= {*typing.get_args(typing.get_type_hints(OptimizersContainer.Config)["implementation"])}
    own |= {*typing.get_args(typing.get_type_hints(LRSchedulersContainer.Config)["decay_type"])}
    source = inspect.getsource(OptimizersContainer._resolve_optimizer_factory)
    own |= {*re.findall(r'"(\w+)":', source)}
    return sorted(own ^ (_TRAINED | _NOT_TRAINED.keys()))


def train(name: str, root: Path, seed: int) -> str:
    """Train with one of them, from the newest checkpoint if there is one.

    Returns:
        The step, tokens and rates, and the weights.
    """
    if "RANK" not in os.environ:
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "0"}
        os.environ["MASTER_ADDR"] = "127.0.0.1"
    make, change = CASES[name]
    config = make()
    del config.model_spec.model.layers[2:]
    config.dump_folder, config.debug.seed = str(root), seed
    config.dataloader, config.tokenizer = Loader.Config(), NoTokenizer.Config()
    config.optimizer.implementation = "for-loop"
    config.activation_checkpoint, config.validator.enable = None, False
    config.parallelism = ParallelismConfig(spmd_backend="partial_dtensor")
    config.training = TrainingConfig(
        steps=STEPS, local_batch_size=2, mixed_precision_param="float32", seq_len=16,
        disable_cuda_graphs=True,
    )  # fmt: skip
    config.checkpoint = HoldfastManager.Config(
        enable=True, interval=1, async_mode="async", last_save_model_only=False
    )
    change(config)
    trainer = config.build()
    trainer.train()
    trainer.close()
    state = {
        key: float(each.double().abs().sum())
        for part in trainer.model_parts
        for key, each in part.state_dict().items()
    }
    rates = [group["lr"] for each in trainer.optimizers for group in each.param_groups]
    draw = torch.rand(1).item()
    return f"step {trainer.step} tokens {trainer.ntokens_seen} rates {rates} draw {draw} {state}"
