"""Models to start with, by name: `holdfast train moe --steps 50`. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from holdfast_trainer.models.config import GPTConfig, VisionConfig
from holdfast_trainer.train.config import DataConfig, OptimConfig, TrainConfig

PRESETS: Mapping[str, TrainConfig] = MappingProxyType(
    {
        "dense": TrainConfig(),
        "moe": TrainConfig(model=GPTConfig(feeds="de", num_experts=8, top_k=2, expert_dim=128)),
        "hybrid": TrainConfig(
            model=GPTConfig(
                num_layers=6, mixers="ssa", feeds="de", num_experts=8, top_k=2, expert_dim=128
            )
        ),
        "multimodal": TrainConfig(
            steps=400,
            model=GPTConfig(
                num_layers=2,
                model_dim=64,
                init_std=0.08,
                feeds="de",
                num_experts=4,
                top_k=2,
                expert_dim=64,
            ),
            data=DataConfig(seq_len=40, global_batch_size=32),
            optim=OptimConfig(lr=3e-3, min_lr=1.5e-4, warmup_steps=20, zero=1),
            vision=VisionConfig(multimodal=True),
        ),
    }
)
"""dense: attention and an MLP in each layer. moe: every second layer has experts instead of the
MLP. hybrid: two layers of state space to one of attention, and experts in every second one.
multimodal: a vision encoder, a projector and a small language model with experts, on handwritten
digits."""
