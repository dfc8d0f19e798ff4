"""Fully sharded models: torch's FSDP2 on the communicators of a layout, with its traps closed."""

from holdfast.fsdp.model import fully_shard_model
from holdfast.fsdp.sharded_model import ShardedModel, ShardedModelStepper
from holdfast.fsdp.strategy import OuterReduction, Strategy

__all__ = ["OuterReduction", "ShardedModel", "ShardedModelStepper", "Strategy", "fully_shard_model"]
