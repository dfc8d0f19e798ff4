"""Optimizers whose state is sharded over data parallelism, and the one step of all kinds.

Gradients come in, from autograd's hooks or from `.grad`. Updated parameters go out, and a
`StepOutcome` that is the same on every rank. Read first `engine.py` (the phases of a step, and the
`Stepper` that they call), then `step_sum.py` (the contribution of a rank), then `sharded.py`.

A step waits for the other ranks three times: for its share of the gradients; for one small sum, by
which everything is decided before anything is updated; and for a smaller one that says whether the
update worked and was the same everywhere (`scalars.py`), while shares are gathered. If all
parameters are in one small bucket it waits twice: the first sum travels with whole gradients, of
which each rank computes the norm itself, and the second one with parameters (`joint.py`). Ranks
exchange which parameters got a gradient only if the sum shows that a rank lacks one, and settings
only if it shows that they differ. Over gloo sums are made in the order of a group's ranks, so their
bits depend neither on the size of buckets nor on the algorithm of the backend.

What ranks hold is compared when an optimizer is built (`agreement.py`): copies are equal, and
plain shards are declared (`plain_shards.py`).
"""

from holdfast.optim.chained import ChainedOptimizer
from holdfast.optim.engine import StepOutcome, Stepper, Veto
from holdfast.optim.multi_module import MultiModuleOptimizer
from holdfast.optim.norms import GradientNorm, gradient_norm
from holdfast.optim.reduced import ReducedOptimizer
from holdfast.optim.scaler import LossScaler
from holdfast.optim.sharded import ShardedOptimizer

__all__ = [
    "ChainedOptimizer",
    "GradientNorm",
    "LossScaler",
    "MultiModuleOptimizer",
    "ReducedOptimizer",
    "ShardedOptimizer",
    "StepOutcome",
    "Stepper",
    "Veto",
    "gradient_norm",
]
