"""A sharded model and its optimizer as one module of several that step together."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import torch
from torch import nn

from holdfast.optim.norms import GradientPart
from holdfast.parallel import ProcessGroups

if TYPE_CHECKING:
    from holdfast.fsdp.sharded_model import ShardedModel


class ShardedModelStepper:
    """The `ModuleStepper` of a `ShardedModel`; its `stepper` makes one.

    Gradients are reduced in the backward, and parameters gathered in the next forward, so that only
    which parameters are in use is exchanged here.
    """

    def __init__(self, sharded: ShardedModel, optimizer: torch.optim.Optimizer) -> None:
        self._sharded = sharded
        self.optimizer = optimizer
        self.kind = f"ShardedModel with {type(optimizer).__name__}"

    @property
    def groups(self) -> ProcessGroups:
        """The model's communicators."""
        return self._sharded.groups

    @property
    def divisor(self) -> int:
        """What the sum of gradients is divided by: the number of data ranks."""
        return self._sharded.divisor

    def parameters(self) -> list[nn.Parameter]:
        """Those of all groups of the optimizer."""
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def stage_description(self) -> str:
        """Empty: ranks that share shards were compared when the model was sharded."""
        return ""

    def sharding_records(self) -> dict[str, dict[str, object]]:
        """That state is sharded like the parameters, which are DTensors."""
        return {"optimizer": {"type": "fully_sharded", "num_data_ranks": self.divisor}}

    def microbatch(self, *, is_last: bool) -> AbstractContextManager[None]:
        """As `ShardedModel.microbatch`."""
        return self._sharded.microbatch(is_last=is_last)

    def gradient_parts(self) -> list[GradientPart]:
        """This rank's shards of the gradients.

        Raises:
            ConfigError: Some are not reduced, or the optimizer got parameters that are not the
                model's.
        """
        self._sharded.check_optimizer(self.optimizer)
        return self._sharded.gradient_parts()

    def join_reductions(self) -> None:
        """The backward has made all."""

    def usage(self) -> tuple[int, int]:
        """As `ShardedModel.usage`."""
        return self._sharded.usage()

    def exchange_used(self) -> None:
        """As `ShardedModel.exchange_used`."""
        self._sharded.exchange_used()

    def update(self, factor: float) -> None:
        """As `ShardedModel.update`."""
        self._sharded.update(self.optimizer, factor)

    def launch_gathers(self) -> None:
        """The next forward gathers."""

    def publish(self) -> None:
        """The next forward gathers."""

    def drop_gradients(self) -> None:
        """As `ShardedModel.drop_gradients`."""
        self._sharded.drop_gradients()

    def synchronize(self) -> None:
        """Shards are up to date after every step."""

    def close(self) -> None:
        """What is attached to the model goes with it."""
