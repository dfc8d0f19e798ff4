"""What a training state is made of: parts, placements, markers, random streams."""

from holdfast.state.flatten import flatten_state
from holdfast.state.generators import Stream
from holdfast.state.markers import (
    FlatShard,
    FromPart,
    OnLayout,
    Padded,
    PerRank,
    PerRankValues,
    Replicated,
    Sharded,
    Stored,
    Transient,
    Union,
)
from holdfast.state.match.nodes import StoredPart, StoredTensor
from holdfast.state.module.part import ModuleState
from holdfast.state.module.tree import declare_padding, declare_wrapper
from holdfast.state.module_parts import module_parts
from holdfast.state.module_rng import ModuleRNG
from holdfast.state.optimizer.part import OptimizerState
from holdfast.state.optimizer.protocol import OptimizerParameter, PartitionedOptimizer
from holdfast.state.parts import OptionalPart, Part, Stateful
from holdfast.state.rng import RNG

__all__ = [
    "RNG",
    "FlatShard",
    "FromPart",
    "ModuleRNG",
    "ModuleState",
    "OnLayout",
    "OptimizerParameter",
    "OptimizerState",
    "OptionalPart",
    "Padded",
    "Part",
    "PartitionedOptimizer",
    "PerRank",
    "PerRankValues",
    "Replicated",
    "Sharded",
    "Stateful",
    "Stored",
    "StoredPart",
    "StoredTensor",
    "Stream",
    "Transient",
    "Union",
    "declare_padding",
    "declare_wrapper",
    "flatten_state",
    "module_parts",
]
