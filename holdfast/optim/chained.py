"""Several optimizers of one model that step as one: dense and expert, or one per kind of use."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

from torch import nn

from holdfast.errors import ConfigError, DeadlineError, values_by_rank
from holdfast.optim.checks import refuse_shared
from holdfast.optim.collectives import Pending
from holdfast.optim.engine import Stepper
from holdfast.optim.microbatches import Launched
from holdfast.optim.norms import GradientPart
from holdfast.optim.reduced import ReducedOptimizer, in_one_numbering
from holdfast.optim.scalars import Border
from holdfast.optim.sharded import LAST, ShardedOptimizer
from holdfast.optim.torch_interface import TorchInterface
from holdfast.state.optimizer_protocol import OptimizerParameter
from holdfast.state.unfinished import unfinished_on

_CHAINED = (ShardedOptimizer, ReducedOptimizer)


class ChainedOptimizer(Stepper, TorchInterface):  # type: ignore[misc]  # torch's `step` returns a loss
    """Optimizers of one model, by name: one norm, one decision, one state.

    Its parameter groups are those of all optimizers, in their order. Every method calls that of
    each, in the same order on all ranks. An optimizer that needs whole matrices keeps its
    parameters whole, in a `ReducedOptimizer`, and the others are sharded:

        optimizer = ChainedOptimizer({
            "matrices": ReducedOptimizer(
                torch.optim.Muon(matrices), groups, reduce="dp_cp", divisor=n, name="matrices"
            ),
            "rest": ShardedOptimizer(
                model, rest, make=torch.optim.AdamW, groups=groups, over="dp_cp", divisor=n,
                name="rest",
            ),
        })

    Args:
        optimizers: `ShardedOptimizer` and `ReducedOptimizer`, each under its own name.

    Raises:
        ConfigError: On all ranks: some optimizers are under another name than their own, on
            different process groups, or have a parameter in common; or ranks have other optimizers,
            or the same in another order. Where no entry can be chained, on that rank alone.

    Cost: one small agreement.
    """

    def __init__(self, optimizers: Mapping[str, ShardedOptimizer | ReducedOptimizer]) -> None:
        self._optimizers = dict(optimizers)
        chained = [each for each in self._optimizers.values() if isinstance(each, _CHAINED)]
        if not chained:  # so there are no groups over which other ranks could hear of it
            self._check_kinds()
            raise ConfigError("a ChainedOptimizer needs at least one optimizer")
        self._groups = chained[0].groups
        failure: Exception | None = None
        try:
            self._check_kinds()
            self._check_names()
            super().__init__(
                [
                    each.inner if isinstance(each, ShardedOptimizer) else each.optimizer
                    for each in self._optimizers.values()
                ]
            )
        except Exception as error:
            failure = error
        control = self._groups.control
        names = ", ".join(map(str, self._optimizers))
        answers = control.agree(failure, phase="chained optimizer", payload=names.encode())
        by_rank = {r: a.decode() for r, a in zip(control.ranks, answers, strict=True)}
        if len({*answers}) > 1:
            raise ConfigError(
                f"ChainedOptimizer: ranks chain other optimizers: {values_by_rank(by_rank)}; each "
                f"would add its gradients to those of another one. Chain the same ones in the same "
                f"order on all ranks (a set has another order in each process)"
            )
        self.number = self._groups.next_number("optimizer")

    def _check_kinds(self) -> None:
        for name, optimizer in self._optimizers.items():
            if not isinstance(optimizer, _CHAINED):
                raise ConfigError(
                    f"optimizer '{name}': a {type(optimizer).__name__} cannot be chained: give a "
                    f"ShardedOptimizer, or a ReducedOptimizer around a plain torch optimizer"
                )

    def _check_names(self) -> None:
        for name, optimizer in self._optimizers.items():
            if optimizer.name != name:
                raise ConfigError(f"optimizer '{optimizer.name}' is chained under name '{name}'")
            if optimizer.groups is not self._groups:
                raise ConfigError(f"optimizer '{name}' has other process groups than the first one")
        members = {name: each.parameters() for name, each in self._optimizers.items()}
        refuse_shared(members, where="optimizers")
        chained = self._optimizers.items()
        # Others may get gradients that are averaged already, and divide by 1.
        _common_divisor(
            {n: each.divisor for n, each in chained if isinstance(each, ShardedOptimizer)}
        )

    def __getitem__(self, name: str) -> Any:
        """Return one of the optimizers."""
        return self._optimizers[name]

    @property
    def optimizer(self) -> Self:
        return self

    @property
    def kind(self) -> str:
        return f"{type(self).__name__} ({', '.join(self._optimizers)})"

    @property
    def divisor(self) -> int:
        """Divisor of the sum of gradients; ConfigError if the optimizers differ in it."""
        return _common_divisor({name: each.divisor for name, each in self._optimizers.items()})

    def parameters(self) -> list[nn.Parameter]:
        return [p for each in self._optimizers.values() for p in each.parameters()]

    def check_ended(self) -> None:
        for optimizer in self._optimizers.values():
            optimizer.check_ended()
        super().check_ended()

    @contextlib.contextmanager
    def take_microbatch(self, *, is_last: bool) -> Iterator[None]:
        # Left in their order, in which `join_microbatch` takes them on a rank that has failed: of
        # those on one communicator the first one reduces during the backward, see the reducer.
        with contextlib.ExitStack() as stack:
            for optimizer in reversed(self._optimizers.values()):
                stack.enter_context(optimizer.take_microbatch(is_last=is_last))
            yield

    def launched(self) -> dict[str, Launched]:
        return {k: v for each in self._optimizers.values() for k, v in each.launched().items()}

    def join_microbatch(self) -> Sequence[Pending]:
        return [work for each in self._optimizers.values() for work in each.join_microbatch()]

    def orders(self) -> Mapping[str, int]:
        orders = super().orders()
        for each in self._sharded():
            orders = {**each.orders(), **orders}  # with the number of the chain, not its own
        return orders

    def launches_on(self, communicator: str) -> Sequence[str]:
        if communicator != LAST:
            return super().launches_on(communicator)
        return next(e for e in self._sharded() if LAST in e.orders()).launches_on(LAST)

    def take_turn(self) -> None:
        for optimizer in self._optimizers.values():
            optimizer.take_turn()

    def turns(self) -> list[int]:
        return [turn for each in self._optimizers.values() for turn in each.turns()]

    def gradient_parts(self) -> list[GradientPart]:
        return [part for each in self._optimizers.values() for part in each.gradient_parts()]

    def join_reductions(self) -> None:
        for optimizer in self._optimizers.values():
            optimizer.join_reductions()

    def usage(self) -> tuple[int, int]:
        used, trained = zip(*(each.usage() for each in self._optimizers.values()), strict=True)
        return sum(used), sum(trained)

    def hyperparameters(self) -> list[dict[str, object]]:
        return [group for each in self._optimizers.values() for group in each.hyperparameters()]

    def num_new(self) -> int:
        return sum(each.num_new() for each in self._optimizers.values())

    def compare_new(self) -> None:
        for optimizer in self._optimizers.values():
            optimizer.compare_new()

    def exchange_used(self) -> None:
        for optimizer in self._optimizers.values():
            optimizer.exchange_used()

    def update(self, factor: float) -> None:
        for optimizer in self._optimizers.values():
            optimizer.update(factor)

    def borders(self) -> list[Border]:
        return [border for each in self._optimizers.values() for border in each.borders()]

    def launch_gathers(self) -> None:
        for optimizer in self._optimizers.values():
            optimizer.launch_gathers()

    def publish(self) -> None:
        for optimizer in self._optimizers.values():
            optimizer.publish()

    def drop_gradients(self) -> None:
        self.tell_others()
        self._is_interrupted = False
        for optimizer in self._optimizers.values():
            optimizer.drop_gradients()

    def synchronize(self) -> None:
        for optimizer in self._optimizers.values():
            optimizer.synchronize()

    def give_up_gathers(self, error: DeadlineError) -> None:
        for optimizer in self._optimizers.values():
            optimizer.give_up_gathers(error)

    def close(self) -> None:
        for optimizer in self._optimizers.values():
            optimizer.close()

    # ---- state (see `holdfast.state.OptimizerState`) ----

    def unfinished_work(self) -> str | None:
        return super().unfinished_work() or unfinished_on(*self._optimizers.values())

    def optimizer_parameters(self) -> Sequence[OptimizerParameter]:
        """Return the parameters of all optimizers, their groups in one numbering."""
        each = self._optimizers.values()
        return in_one_numbering(
            [one.optimizer for one in each], [one.optimizer_parameters() for one in each]
        )

    def num_groups(self) -> dict[str, int]:
        """Return the number of parameter groups of each optimizer, by its name."""
        each = (optimizer.num_groups() for optimizer in self._optimizers.values())
        return {name: count for counts in each for name, count in counts.items()}

    def sharding_records(self) -> dict[str, dict[str, object]]:
        each = (optimizer.sharding_records() for optimizer in self._optimizers.values())
        return {name: record for records in each for name, record in records.items()}

    def begin_load(self, *, with_main: bool) -> None:
        """Prepare the sharded optimizers for a load; called by `OptimizerState`."""
        for optimizer in self._sharded():
            optimizer.begin_load(with_main=with_main)

    def finish_load(self, *, with_main: bool) -> None:
        """Complete what a load has filled in; called by `OptimizerState`."""
        for optimizer in self._sharded():
            optimizer.finish_load(with_main=with_main)

    def _sharded(self) -> list[ShardedOptimizer]:
        return [each for each in self._optimizers.values() if isinstance(each, ShardedOptimizer)]


def _common_divisor(divisors: Mapping[str, int]) -> int:
    """Return the divisor of all optimizers, 1 if there is none; ConfigError if they differ."""
    if len({*divisors.values()}) > 1:
        raise ConfigError(
            f"the optimizers divide gradients by different numbers, {divisors}; with the same "
            f"loss, dense parameters and experts have the same divisor"
        )
    return next(iter(divisors.values()), 1)
