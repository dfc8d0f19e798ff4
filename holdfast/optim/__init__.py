"""Optimizers whose state is sharded over data parallelism, and what a step of them needs."""

from holdfast.optim.chained import ChainedOptimizer
from holdfast.optim.module_stepper import ModuleStepper, ReducedOptimizer
from holdfast.optim.multi_module import MultiModuleOptimizer, MultiModuleOutcome
from holdfast.optim.norms import GradientNorm, clip_gradients, gradient_norm
from holdfast.optim.scaler import LossScaler
from holdfast.optim.sharded import ShardedOptimizer
from holdfast.optim.stepping import StepOutcome

__all__ = [
    "ChainedOptimizer",
    "GradientNorm",
    "LossScaler",
    "ModuleStepper",
    "MultiModuleOptimizer",
    "MultiModuleOutcome",
    "ReducedOptimizer",
    "ShardedOptimizer",
    "StepOutcome",
    "clip_gradients",
    "gradient_norm",
]
