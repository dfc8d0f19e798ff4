"""Optimizers whose state is sharded over data parallelism, and the one step of all kinds.

In come gradients, from autograd's hooks or from `.grad`; out go updated parameters and a
`StepOutcome` that is the same on every rank. Read `engine.py` first (the phases of a step, and what
they ask of a `Stepper`), then `step_sum.py` (what the ranks contribute), then `sharded.py`.

A step waits for the other ranks three times: for its share of the gradients; for one small sum, by
which all is decided before anything is updated; and, while shares are gathered, for one number,
whether the update worked. Which parameters got a gradient is exchanged only if the sum says that
some rank lacks one, and settings only if it says that they differ. Sums are made in the order of a
group's ranks over gloo, so their bits depend neither on the size of buckets nor on the algorithm of
the backend.
"""

from holdfast.optim.chained import ChainedOptimizer
from holdfast.optim.engine import StepOutcome, Stepper
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
    "gradient_norm",
]
