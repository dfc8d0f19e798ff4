"""Optimizers whose state is sharded over data parallelism, and what a step of them needs."""

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
