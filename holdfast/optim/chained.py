"""Several sharded optimizers that step as one: dense and expert, or one per kind of parameter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

from torch import nn

from holdfast.errors import ConfigError
from holdfast.optim.norms import GradientPart
from holdfast.optim.scaler import LossScaler
from holdfast.optim.sharded import ShardedOptimizer, microbatch_of
from holdfast.optim.stepping import StepOutcome, take_step
from holdfast.optim.torch_interface import TorchFace, refuse_closure
from holdfast.state.optimizer.protocol import OptimizerParameter


class ChainedOptimizer(TorchFace):
    """Optimizers of one model, by name: one norm, one decision, one state.

    Its groups are those of all optimizers, in their order. Raises ConfigError for no optimizers,
    optimizers under another name than their own, on different groups, or with a parameter in
    common.
    """

    def __init__(self, optimizers: Mapping[str, ShardedOptimizer]) -> None:
        self._optimizers = dict(optimizers)
        if not self._optimizers:
            raise ConfigError("a ChainedOptimizer needs at least one optimizer")
        first = next(iter(self._optimizers.values()))
        seen: dict[nn.Parameter, str] = {}
        self._held: list[OptimizerParameter] = []
        num_groups = 0
        for name, optimizer in self._optimizers.items():
            if optimizer.name != name:
                raise ConfigError(f"optimizer '{optimizer.name}' is chained under name '{name}'")
            if optimizer.groups is not first.groups:
                raise ConfigError(f"optimizer '{name}' has other process groups than the first one")
            for held in optimizer.optimizer_parameters():
                if held.parameter in seen:
                    raise ConfigError(
                        f"a parameter of shape {list(held.parameter.shape)} is in optimizers "
                        f"'{seen[held.parameter]}' and '{name}'"
                    )
                seen[held.parameter] = name
                self._held.append(replace(held, group=held.group + num_groups))
            num_groups += len(optimizer.param_groups)
        self._groups = first.groups
        super().__init__([optimizer.inner for optimizer in self._optimizers.values()])

    def __getitem__(self, name: str) -> ShardedOptimizer:
        """One of the optimizers."""
        return self._optimizers[name]

    def microbatch(self, *, is_last: bool) -> AbstractContextManager[None]:
        """As `ShardedOptimizer.microbatch`, for all."""
        return microbatch_of(self._optimizers.values(), is_last=is_last)

    def finish_gradients(self) -> None:
        """As `ShardedOptimizer.finish_gradients`, for all."""
        for optimizer in self._optimizers.values():
            optimizer.finish_gradients()

    def gradient_parts(self) -> list[GradientPart]:
        """As `ShardedOptimizer.gradient_parts`, of all."""
        return [part for o in self._optimizers.values() for part in o.gradient_parts()]

    def step(  # type: ignore[override]
        self,
        closure: None = None,
        *,
        max_norm: float = 0.0,
        scaler: LossScaler | None = None,
        count_zeros: bool = False,
    ) -> StepOutcome:
        """One step of all optimizers together; see `take_step`. A closure is refused."""
        refuse_closure(closure)
        return take_step(
            self._optimizers,
            groups=self._groups,
            max_norm=max_norm,
            scaler=scaler,
            count_zeros=count_zeros,
        )

    def drop_gradients(self) -> None:
        """As `ShardedOptimizer.drop_gradients`, for all."""
        for optimizer in self._optimizers.values():
            optimizer.drop_gradients()

    def synchronize(self) -> None:
        """As `ShardedOptimizer.synchronize`, for all."""
        for optimizer in self._optimizers.values():
            optimizer.synchronize()

    def close(self) -> None:
        """As `ShardedOptimizer.close`, for all."""
        for optimizer in self._optimizers.values():
            optimizer.close()

    def optimizer_parameters(self) -> Sequence[OptimizerParameter]:
        """Every parameter of every optimizer."""
        return self._held

    def num_groups(self) -> dict[str, int]:
        """How many groups each optimizer has, by its name."""
        return {
            name: count for o in self._optimizers.values() for name, count in o.num_groups().items()
        }

    def sharding_records(self) -> dict[str, dict[str, object]]:
        """How each optimizer is sharded, by its name."""
        records = [o.sharding_records() for o in self._optimizers.values()]
        return {name: record for found in records for name, record in found.items()}

    def begin_load(self, *, with_main: bool) -> None:
        """As `ShardedOptimizer.begin_load`, for all."""
        for optimizer in self._optimizers.values():
            optimizer.begin_load(with_main=with_main)

    def finish_load(self, *, with_main: bool) -> None:
        """As `ShardedOptimizer.finish_load`, for all."""
        for optimizer in self._optimizers.values():
            optimizer.finish_load(with_main=with_main)
