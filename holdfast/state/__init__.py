"""What a training state is made of, and its two forms: leaves and a tree of values.

In comes a dict of parts: modules, `OptimizerState`, `RNG`, anything with `state_dict`, plain trees.
Out come *leaves* (key, dtype, global shape, the boxes this rank holds, and its replica set) and one
tree per part of everything else, in which tensors are references to keys. A load goes back the same
way, through `match/`.

Replica sets prove ownership without replica ids. A DTensor, `Sharded` and `Replicated` declare
which ranks hold the same boxes. A plain tensor declares nothing: if several ranks hold it, their
bytes are compared at every save, so a slice under a name that looks whole is found by its content.

Padding is removed when leaves are made: boxes are clipped at the declared real shape. The
declaration is on the module and not on the parameter, because parameters are replaced.

Values are common (equal on all ranks that supply them), members of a `Union`, `PerRank`, or
`Transient`. Users' objects decide how they are kept: a module's entries are sorted into its own
tensors, other forms of them and extra state; an optimizer whose class overrides its state methods
is saved and loaded through them; both are proved after a load.

Read first: `parts.py`, `flatten.py`, `placement.py`.
"""

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
