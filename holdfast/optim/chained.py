"""Several sharded optimizers that step as one: dense and expert, or one per kind of parameter."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from torch import nn

from holdfast.errors import ConfigError
from holdfast.optim.norms import GradientPart
from holdfast.optim.reducer import GradientReducer
from holdfast.optim.sharded import ShardedOptimizer
from holdfast.optim.stepping import SteppingOptimizer
from holdfast.parallel import ProcessGroups
from holdfast.state.optimizer.protocol import OptimizerParameter


class ChainedOptimizer(SteppingOptimizer):
    """Optimizers of one model, by name: one norm, one decision, one state.

    Its parameter groups are those of all optimizers, in their order. Every method does what that of
    `ShardedOptimizer` does, for all of them.

    Raises:
        ConfigError: There are no optimizers, or some are under another name than their own, on
            different process groups, or have a parameter in common.
    """

    def __init__(self, optimizers: Mapping[str, ShardedOptimizer]) -> None:
        self._optimizers = dict(optimizers)
        if not self._optimizers:
            raise ConfigError("a ChainedOptimizer needs at least one optimizer")
        self._groups = next(iter(self._optimizers.values())).groups
        names: dict[nn.Parameter, str] = {}
        self._parameters: list[OptimizerParameter] = []
        num_groups = 0
        for name, optimizer in self._optimizers.items():
            if optimizer.name != name:
                raise ConfigError(f"optimizer '{optimizer.name}' is chained under name '{name}'")
            if optimizer.groups is not self._groups:
                raise ConfigError(f"optimizer '{name}' has other process groups than the first one")
            for member in optimizer.optimizer_parameters():
                if member.parameter in names:
                    raise ConfigError(
                        f"a parameter of shape {list(member.parameter.shape)} is in optimizers "
                        f"'{names[member.parameter]}' and '{name}'"
                    )
                names[member.parameter] = name
                self._parameters.append(replace(member, group=member.group + num_groups))
            num_groups += len(optimizer.param_groups)
        super().__init__([optimizer.inner for optimizer in self._optimizers.values()])

    def __getitem__(self, name: str) -> ShardedOptimizer:
        """One of the optimizers."""
        return self._optimizers[name]

    @property
    def groups(self) -> ProcessGroups:
        """The communicators in use."""
        return self._groups

    @contextlib.contextmanager
    def microbatch(self, *, is_last: bool) -> Iterator[None]:
        """As `ShardedOptimizer.microbatch`, for all."""
        with contextlib.ExitStack() as stack:
            for optimizer in self._optimizers.values():
                stack.enter_context(optimizer.microbatch(is_last=is_last))
            yield

    def gradient_parts(self) -> list[GradientPart]:
        """As `ShardedOptimizer.gradient_parts`, of all."""
        return [part for o in self._optimizers.values() for part in o.gradient_parts()]

    def join_reductions(self) -> None:
        """As `ShardedOptimizer.join_reductions`, of all."""
        for optimizer in self._optimizers.values():
            optimizer.join_reductions()

    @property
    def reducers(self) -> Sequence[GradientReducer]:
        """Those of all."""
        return [reducer for o in self._optimizers.values() for reducer in o.reducers]

    def update(self, factor: float) -> None:
        """As `ShardedOptimizer.update`, for all."""
        for optimizer in self._optimizers.values():
            optimizer.update(factor)

    def launch_gathers(self) -> None:
        """As `ShardedOptimizer.launch_gathers`, for all."""
        for optimizer in self._optimizers.values():
            optimizer.launch_gathers()

    def publish(self) -> None:
        """As `ShardedOptimizer.publish`, for all."""
        for optimizer in self._optimizers.values():
            optimizer.publish()

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
        return self._parameters

    def num_groups(self) -> dict[str, int]:
        """How many groups each optimizer has, by its name."""
        return {
            name: count for o in self._optimizers.values() for name, count in o.num_groups().items()
        }

    def sharding_records(self) -> dict[str, dict[str, object]]:
        """How each optimizer is sharded, by its name."""
        records = [o.sharding_records() for o in self._optimizers.values()]
        return {name: record for by_name in records for name, record in by_name.items()}

    def begin_load(self, *, with_main: bool) -> None:
        """As `ShardedOptimizer.begin_load`, for all."""
        for optimizer in self._optimizers.values():
            optimizer.begin_load(with_main=with_main)

    def finish_load(self, *, with_main: bool) -> None:
        """As `ShardedOptimizer.finish_load`, for all."""
        for optimizer in self._optimizers.values():
            optimizer.finish_load(with_main=with_main)
