"""Models to begin with, by name: `holdfast train moe --steps 50`. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from holdfast.reference.models.config import GPTConfig
from holdfast.reference.train.config import TrainConfig

PRESETS: Mapping[str, TrainConfig] = MappingProxyType(
    {
        "dense": TrainConfig(),
        "moe": TrainConfig(model=GPTConfig(feeds="de", num_experts=8, top_k=2, expert_dim=128)),
        "hybrid": TrainConfig(
            model=GPTConfig(
                num_layers=6, mixers="ssa", feeds="de", num_experts=8, top_k=2, expert_dim=128
            )
        ),
    }
)
"""dense: attention and an MLP in each layer. moe: every second layer has experts instead of the
MLP. hybrid: two layers of state space to one of attention, and experts in every second one."""
