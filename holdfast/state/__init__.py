"""What a training state is made of: parts, placements, markers, random streams."""

from holdfast.state.flatten import flatten_state
from holdfast.state.leaves import Domain, FlatState, TensorLeaf
from holdfast.state.markers import On, PerRank, Replicated, Sharded, Stored, Transient
from holdfast.state.optimizer import OptimizerState
from holdfast.state.parts import Part, Stateful
from holdfast.state.rng import RNG
from holdfast.state.stored import StoredPart, StoredTensor

__all__ = [
    "RNG",
    "Domain",
    "FlatState",
    "On",
    "OptimizerState",
    "Part",
    "PerRank",
    "Replicated",
    "Sharded",
    "Stateful",
    "Stored",
    "StoredPart",
    "StoredTensor",
    "TensorLeaf",
    "Transient",
    "flatten_state",
]
