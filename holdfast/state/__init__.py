"""What a training state is made of, and its two forms: leaves and a tree of values.

In comes a dict of parts: modules, `OptimizerState`, `RNG`, anything with `state_dict`, plain trees.
Out come *leaves* (key, dtype, global shape, the boxes this rank holds, and its replica set) and one
tree per part of everything else, in which tensors are references to keys. A load goes back the same
way: each part makes a template of what it wants, the matcher compares the templates with what is
stored, and after the tensors have been read each part restores itself.

Replica sets prove ownership without replica ids. A DTensor, `Sharded` and `Replicated` declare
which ranks hold the same boxes. A plain tensor declares nothing: if several ranks hold it, their
bytes are compared at every save, so a slice under a name that looks whole is found by its content.

Padding is removed when leaves are made: boxes are clipped at the declared real shape. The
declaration is on the module and not on the parameter, because parameters are replaced.

Values are common (equal on all ranks that supply them), members of a `Union`, `PerRank`, or
`Transient`.

Users' objects decide how they are kept. What a module's `state_dict` shows is either one of its own
tensors, which a load fills in place, or a form (a hook, an override, extra state), which a load
gives to the module's `load_state_dict`. An optimizer is stored by parameter name, in the
parameters' global coordinates, however it is sharded; if its class overrides its state methods, it
is saved and loaded through them. An owner that takes a state by its own code is asked for it again
after a load, and must state what it was given (`arrival.py`).

*"Unexpected"* is judged over the union of all ranks' requests, so that pipeline stages may each
request their layers.

Read first: `parts.py` and `flatten.py` (a save), `matcher.py` (a load). `markers.py` has what users
declare, and `leaves.py` how it becomes boxes. `module_*.py`, `optimizer_*.py` and `rng.py` are the
parts that most states have.
"""

from holdfast.state.flatten import flatten_state
from holdfast.state.gradients import Gradients
from holdfast.state.markers import (
    AppliesLater,
    FlatShard,
    FromPart,
    OnLayout,
    Padded,
    PerRank,
    PerRankValues,
    Pieces,
    Replicated,
    Sharded,
    Stored,
    Transient,
    Union,
)
from holdfast.state.module_state import ModuleState
from holdfast.state.module_tree import declare_padding, declare_wrapper
from holdfast.state.optimizer_protocol import OptimizerParameter, PartitionedOptimizer
from holdfast.state.optimizer_state import OptimizerState
from holdfast.state.parts import OptionalPart, Part, Stateful, module_parts
from holdfast.state.rng import RNG, ModuleRNG, Stream
from holdfast.state.stored import StoredPart, StoredTensor

__all__ = [
    "RNG",
    "AppliesLater",
    "FlatShard",
    "FromPart",
    "Gradients",
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
    "Pieces",
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
