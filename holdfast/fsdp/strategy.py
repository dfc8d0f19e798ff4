"""What each strategy shards, and when it communicates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

Strategy = Literal["no_shard", "optim", "optim_grads", "optim_grads_params"]
"""What is sharded: nothing, and what ZeRO 1 to 3 shard (Rajbhandari et al. 2020)."""
OuterReduction = Literal["microbatch", "step"]
"""With replicas, when gradients are summed between slices: after each microbatch, or the last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategySchedule:
    """When a strategy gathers parameters and reduces gradients."""

    shards: bool
    """Whether parameters lie in shards between steps, and with them gradients and state."""
    regathers: bool
    """Whether whole parameters are freed after each use; otherwise they stay until the step."""
    reduces_each_microbatch: bool
    """Whether gradients are reduced after every microbatch; otherwise whole ones add up."""


SCHEDULES: Mapping[Strategy, StrategySchedule] = MappingProxyType(
    {
        "no_shard": StrategySchedule(shards=False, regathers=False, reduces_each_microbatch=False),
        "optim": StrategySchedule(shards=True, regathers=False, reduces_each_microbatch=False),
        "optim_grads": StrategySchedule(shards=True, regathers=False, reduces_each_microbatch=True),
        "optim_grads_params": StrategySchedule(
            shards=True, regathers=True, reduces_each_microbatch=True
        ),
    }
)
"""All four run on FSDP2. `optim` and `optim_grads` gather parameters once a step and keep them
whole to its end; between steps they are in shards, as gradients and state are.
"""
