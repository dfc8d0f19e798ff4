"""Every optimizer, schedule and callback of the Hugging Face Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
    set_seed,
    trainer_callback,
)
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK
from transformers.trainer_utils import SchedulerType
from transformers.training_args import OptimizerNames

from holdfast.integrations.transformers import HoldfastCallback

_UNAVAILABLE = {
    "adamw_anyprecision": "torchdistx",
    "adamw_torch_npu_fused": "an NPU",
    "adamw_torch_xla": "torch_xla",
    "apollo_adamw": "apollo_torch",
    "apollo_adamw_layerwise": "apollo_torch",
    "adalomo": "lomo_optim",
    "lomo": "lomo_optim",
    "galore_adafactor": "galore_torch",
    "galore_adafactor_layerwise": "galore_torch",
    "galore_adamw": "galore_torch",
    "galore_adamw_8bit": "galore_torch",
    "galore_adamw_8bit_layerwise": "galore_torch",
    "galore_adamw_layerwise": "galore_torch",
    "grokadamw": "grokadamw",
    "stable_adamw": "torch-optimi",
}
"""Optimizers of packages or devices that the tests do not have."""
REFUSED = ("adamw_torch_4bit", "adamw_torch_8bit")
"""Optimizers whose states are tensor subclasses of torchao: a save names the class."""
_SCHEDULES: dict[str, dict[str, Any]] = {
    "cosine_with_min_lr": {"lr_scheduler_kwargs": {"min_lr_rate": 0.1}},
    "cosine_warmup_with_min_lr": {"lr_scheduler_kwargs": {"min_lr_rate": 0.1}},
    "warmup_stable_decay": {"lr_scheduler_kwargs": {"num_decay_steps": 4, "min_lr_ratio": 0.1}},
}
"""Arguments of schedules that need some."""
_CALLBACKS: dict[str, Any] = {
    "EarlyStoppingCallback": lambda: trainer_callback.EarlyStoppingCallback(2, 1e9),
    "PrinterCallback": trainer_callback.PrinterCallback,
    "ProgressCallback": trainer_callback.ProgressCallback,
}
_ALWAYS_THERE = {"CallbackHandler", "DefaultFlowCallback", "TrainerCallback"}


def names() -> list[str]:
    """Return what can be trained with here.

    Raises:
        AssertionError: a callback that is not known, or one with a state that reports to a service.
    """
    own = {
        name
        for name, each in vars(trainer_callback).items()
        if isinstance(each, type) and issubclass(each, trainer_callback.TrainerCallback)
    }
    assert own == _CALLBACKS.keys() | _ALWAYS_THERE, own
    for each in INTEGRATION_TO_CALLBACK.values():
        assert not issubclass(each, trainer_callback.ExportableState), each
    optimizers = {each.value for each in OptimizerNames}
    assert optimizers >= _UNAVAILABLE.keys()
    return [
        *(f"optimizer {each}" for each in sorted(optimizers - _UNAVAILABLE.keys() - {*REFUSED})),
        *(f"schedule {each.value}" for each in SchedulerType),
        *(f"callback {each}" for each in _CALLBACKS),
    ]


def _network() -> LlamaForCausalLM:
    shape = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = LlamaConfig(vocab_size=256, hidden_size=16, intermediate_size=24, **shape)
    return LlamaForCausalLM(config)


def train(name: str, root: Path, seed: int) -> str:
    """Train with one of them, named by its kind and its name.

    Returns:
        The step, and the weights.
    """
    set_seed(seed)
    kind, member = name.split()
    chosen: dict[str, Any] = {}
    if kind == "optimizer":
        chosen = {"optim": member}
    if kind == "schedule":
        chosen = {"lr_scheduler_type": member, **_SCHEDULES.get(member, {})}
    tokens = [torch.arange(8) * i % 256 for i in range(12)]
    data = [{"input_ids": each, "labels": each} for each in tokens]
    model = _network()
    arguments = TrainingArguments(
        output_dir=str(root), num_train_epochs=2, per_device_train_batch_size=2, save_steps=4,
        eval_strategy="steps", eval_steps=2, logging_steps=1, learning_rate=1e-2, warmup_steps=2,
        load_best_model_at_end=False, metric_for_best_model="eval_loss",
        use_cpu=True, report_to=[], disable_tqdm=kind != "callback", **chosen,
    )  # fmt: skip
    trainer = Trainer(model=model, args=arguments, train_dataset=data, eval_dataset=data[:4])
    if kind == "callback":
        trainer.add_callback(_CALLBACKS[member]())
    checkpoints = HoldfastCallback.attach(trainer)
    trainer.train(resume_from_checkpoint=checkpoints.latest())
    state = {key: each.tolist() for key, each in model.state_dict().items()}
    rates = [(each.get("learning_rate"), each.get("loss")) for each in trainer.state.log_history]
    return f"step {trainer.state.global_step} rates and losses {rates} {state}"
