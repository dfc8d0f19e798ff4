"""What sharded optimizers have in common in a step: gradients in buckets, reduced by others."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Self

from torch import nn

from holdfast.errors import ConfigError
from holdfast.optim.engine import Stepper
from holdfast.optim.reducer import GradientReducer
from holdfast.optim.torch_interface import TorchInterface
from holdfast.state.optimizer.protocol import OptimizerParameter


class SteppingOptimizer(Stepper, TorchInterface):  # type: ignore[misc]  # `step` of torch's returns a loss
    """A sharded optimizer, or several as one."""

    @property
    @abstractmethod
    def reducers(self) -> Sequence[GradientReducer]:
        """What takes the gradients, one for each sharded optimizer."""

    @abstractmethod
    def optimizer_parameters(self) -> Sequence[OptimizerParameter]:
        """Every parameter with the elements of it that this rank updates."""

    @property
    def divisor(self) -> int:
        """What the sum of gradients was divided by; ConfigError if that is not one number."""
        divisors = {reducer.name: reducer.divisor for reducer in self.reducers}
        if len(set(divisors.values())) > 1:
            raise ConfigError(
                f"the optimizers divide gradients by different numbers, {divisors}; with the same "
                f"loss, dense parameters and experts have the same divisor"
            )
        return next(iter(divisors.values()))

    @property
    def optimizer(self) -> Self:
        """Itself: it has the parameter groups."""
        return self

    @property
    def kind(self) -> str:
        """Its class, and the names of the sharded optimizers inside."""
        return f"{type(self).__name__} ({', '.join(each.name for each in self.reducers)})"

    def parameters(self) -> list[nn.Parameter]:
        """The parameters of all groups."""
        return [member.parameter for member in self.optimizer_parameters()]

    def usage(self) -> tuple[int, int]:
        """How many parameters got a gradient on this rank, and how many are trained."""
        slots = [slot for reducer in self.reducers for slot in reducer.slots]
        return sum(slot.is_used for slot in slots), len(slots)

    def exchange_used(self) -> None:
        """Leave alone what got a gradient on no rank; called by all ranks that share parameters.

        Cost: an all-reduce of one number per parameter over the ranks that share them.
        """
        for reducer in self.reducers:
            reducer.exchange_used()
