"""What a step of several modules asks of the optimizer of one, and plain torch optimizers in it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, runtime_checkable

import torch
from torch import nn

from holdfast.arguments import check_int
from holdfast.errors import ConfigError
from holdfast.optim import collectives
from holdfast.optim.norms import GradientPart, gradient_parts, scale_gradients
from holdfast.optim.torch_interface import TorchInterface
from holdfast.parallel import ProcessGroups


@runtime_checkable
class ModuleStepper(Protocol):
    """The phases of a step of one module on one rank.

    Phases that say so are collective over the module's own groups; every rank of the module is in
    them, whatever happened to it before.
    """

    @property
    def groups(self) -> ProcessGroups:
        """The module's communicators."""

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """What has the parameter groups, and whose state is saved."""

    @property
    def kind(self) -> str:
        """What it is, equal on all ranks of the module."""

    @property
    def divisor(self) -> int:
        """What the sum of the data ranks' gradients is divided by."""

    def parameters(self) -> list[nn.Parameter]:
        """The parameters of which this rank has something."""

    def stage_description(self) -> str:
        """What is equal on the ranks of one pipeline stage; compared when a step is set up."""

    def sharding_records(self) -> dict[str, dict[str, object]]:
        """How the state is sharded, by the name of each optimizer inside."""

    def microbatch(self, *, is_last: bool) -> AbstractContextManager[None]:
        """Around one microbatch with one backward. May be collective."""

    def gradient_parts(self) -> list[GradientPart]:
        """This rank's shares of the reduced gradients; what is not reduced yet is so here."""

    def join_reductions(self) -> None:
        """Make the collectives of `gradient_parts` that are left, after it failed on this rank."""

    def usage(self) -> tuple[int, int]:
        """How many parameters got a gradient on this rank, and how many are trained."""

    def exchange_used(self) -> None:
        """Leave alone what got a gradient on no rank. Collective."""

    def update(self, factor: float) -> None:
        """Update this rank's shares with its gradients times `factor`."""

    def launch_gathers(self) -> None:
        """Start gathering the updated parameters, whatever happened. Collective."""

    def publish(self) -> None:
        """Let parameters be used again."""

    def drop_gradients(self) -> None:
        """Forget all gradients."""

    def synchronize(self) -> None:
        """Wait until this rank's parameters are whole and up to date."""

    def close(self) -> None:
        """Take all hooks off the model."""


class ReducedOptimizer:
    """A plain torch optimizer of one module whose gradients something else reduces, for a step.

        steppers = {"language": ReducedOptimizer(optimizer, groups["language"], reduce=sum_up)}
        optimizer = MultiModuleOptimizer(groups, steppers)

    State and update are whole on every rank. After a step that failed on some rank, copies of a
    parameter may differ between the ranks: load the last checkpoint.

    Args:
        optimizer: of the module's parameters on this rank. Where there are none, of one group
            without parameters.
        groups: the module's. A plain parameter is the same on all ranks of its pipeline stage, a
            DTensor on those that its mesh says, and on those that its mesh leaves out.
        reduce: makes gradients equal on all ranks that hold the parameter, at the beginning of each
            step; None where that has happened by then. It leaves parameters that no rank used
            without a gradient, or gives them zeros.
        divisor: what the sum over data ranks is divided by then. Of no matter without `num_tokens`.

    Raises:
        ConfigError: `divisor` is no whole number from 1 on, or `optimizer` no torch optimizer, or
            one that reduces gradients itself.
    """

    kind = "ReducedOptimizer"

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        groups: ProcessGroups,
        *,
        reduce: Callable[[], object] | None = None,
        divisor: int = 1,
    ) -> None:
        if not isinstance(optimizer, torch.optim.Optimizer) or isinstance(
            optimizer, TorchInterface
        ):
            raise ConfigError(
                f"ReducedOptimizer: a {type(optimizer).__name__} is not a plain torch optimizer; a "
                f"sharded or chained one is given to MultiModuleOptimizer as it is"
            )
        check_int(divisor, name="ReducedOptimizer: divisor", least=1)
        self.optimizer = optimizer
        self.groups = groups
        self.divisor = divisor
        self._reduce = reduce

    def parameters(self) -> list[nn.Parameter]:
        """Those of all groups of the optimizer."""
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def stage_description(self) -> str:
        """Digest of whole shapes and dtypes: what is taken for equal on all ranks looks so."""
        looks = [[list(p.shape), str(p.dtype), p.requires_grad] for p in self.parameters()]
        digest = hashlib.blake2b(json.dumps(looks).encode(), digest_size=8).hexdigest()
        return f"{len(looks)} parameters of digest {digest}"

    def sharding_records(self) -> dict[str, dict[str, object]]:
        """That every rank has the state of all that it holds."""
        return {"optimizer": {"type": "whole"}}

    def microbatch(self, *, is_last: bool) -> AbstractContextManager[None]:
        """Nothing happens during a backward."""
        del is_last
        return nullcontext()

    def gradient_parts(self) -> list[GradientPart]:
        """Reduce, and take what lies in `.grad`."""
        if self._reduce is not None:
            self._reduce()
        return gradient_parts(self.parameters(), groups=self.groups)

    def join_reductions(self) -> None:
        """The caller's `reduce` cannot be joined; the others get its communicator's timeout."""

    def usage(self) -> tuple[int, int]:
        """Parameters with a gradient, and those that can get one."""
        trained = [p for p in self.parameters() if p.requires_grad]
        return sum(p.grad is not None for p in trained), len(trained)

    def exchange_used(self) -> None:
        """ConfigError, on all ranks of a data axis, for a gradient that only some of them have.

        Cost: an all-reduce of one number per parameter over `dp_cp`.
        """
        if self.groups.size("dp_cp") == 1:
            return
        group = self.groups.group("dp_cp")
        flags = torch.tensor([float(p.grad is not None) for p in self.parameters()])
        flags = flags.to(collectives.flag_device(group))
        collectives.wait(collectives.all_reduce(flags, group), "the exchange of used parameters")
        for parameter, count in zip(self.parameters(), flags.tolist(), strict=True):
            if 0 < count < self.groups.size("dp_cp"):
                raise ConfigError(
                    f"a parameter of shape {list(parameter.shape)} has a gradient on {int(count)} "
                    f"of the {self.groups.size('dp_cp')} ranks of 'dp_cp', so it is not reduced; "
                    f"reduce gradients before the step, or with reduce="
                )

    @torch.no_grad()
    def update(self, factor: float) -> None:
        """Scale what lies in `.grad`, and step."""
        scale_gradients(self.parameters(), factor)
        self.optimizer.step()

    def launch_gathers(self) -> None:
        """Parameters are whole."""

    def publish(self) -> None:
        """Parameters are whole."""

    def drop_gradients(self) -> None:
        """Forget what lies in `.grad`."""
        self.optimizer.zero_grad(set_to_none=True)

    def synchronize(self) -> None:
        """Parameters are whole."""

    def close(self) -> None:
        """Nothing is attached to the model."""
