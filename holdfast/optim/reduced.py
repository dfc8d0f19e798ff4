"""A plain torch optimizer whose gradients something else reduces, in a step of all ranks."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from holdfast.arguments import check_int
from holdfast.errors import ConfigError
from holdfast.optim import collectives
from holdfast.optim.engine import Stepper
from holdfast.optim.norms import GradientPart, gradient_parts, scale_gradients
from holdfast.optim.shard_groups import mesh_lines
from holdfast.optim.torch_interface import TorchInterface
from holdfast.parallel import ProcessGroups
from holdfast.state.unfinished import set_worker


class PlainStepper(Stepper):
    """Steps with a torch optimizer over this rank's parameters as they are.

    Args:
        optimizer: of the parameters.
        groups: the module's communicators.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, groups: ProcessGroups) -> None:
        self._optimizer = optimizer
        self._groups = groups

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self._optimizer

    @property
    def groups(self) -> ProcessGroups:
        return self._groups

    @torch.no_grad()
    def update(self, factor: float) -> None:
        scale_gradients(self.parameters(), factor)
        self.optimizer.step()


class ReducedOptimizer(PlainStepper):
    """A plain torch optimizer of one module whose gradients something else reduces.

        optimizer = ReducedOptimizer(torch.optim.AdamW(model.parameters()), groups, reduce=sum_up)
        loss(model(batch)).backward()
        outcome = optimizer.step(max_norm=1.0)

    It steps alone, or as an entry of a `MultiModuleOptimizer`. State and update are whole on every
    rank. After an update that failed on some rank, copies of a parameter may differ between the
    ranks: load the last checkpoint.

    Args:
        optimizer: of the module's parameters on this rank. If there are none, of one group without
            parameters.
        groups: the module's. A plain parameter is the same on all ranks of its pipeline stage, a
            DTensor on those that its mesh says, and on those that its mesh leaves out.
        reduce: makes gradients equal on all ranks that hold the parameter, once in each step; None
            if that has happened by then. It leaves parameters that no rank used without a gradient,
            or gives them zeros.
        divisor: `reduce` divides the sum over data ranks by it. Needed for `num_tokens`, and to be
            compared with those of modules on other layouts.

    Raises:
        ConfigError: `divisor` is not an integer of at least 1, or `optimizer` is not a torch
            optimizer, or is one that reduces gradients itself.
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
                f"sharded or chained one needs no wrapper, alone or in a MultiModuleOptimizer"
            )
        check_int(divisor, name="ReducedOptimizer: divisor", least=1)
        super().__init__(optimizer, groups)
        self._divisor = divisor
        self._reduce = reduce
        self._is_reduced = False
        self._last_used: set[nn.Parameter] | None = None
        """Parameters with a gradient in the last step, for which `reduce` made collectives."""
        # What is saved is the torch optimizer, which does not know of this one.
        set_worker(self, on=optimizer)

    @property
    def divisor(self) -> int:
        return self._divisor

    def stage_description(self) -> str:
        """Return a digest of whole shapes and dtypes, which are the same on all ranks."""
        looks = [[list(p.shape), str(p.dtype), p.requires_grad] for p in self.parameters()]
        digest = hashlib.blake2b(json.dumps(looks).encode(), digest_size=8).hexdigest()
        return f"{len(looks)} parameters of digest {digest}"

    def sharding_records(self) -> dict[str, dict[str, object]]:
        return {"optimizer": {"type": "whole"}}

    def take_microbatch(self, *, is_last: bool) -> AbstractContextManager[None]:
        del is_last  # nothing happens during a backward
        return nullcontext()

    def gradient_parts(self) -> list[GradientPart]:
        """Reduce what is in `.grad`, once until `drop_gradients`, and return it.

        A `reduce` that fails on one rank cannot be joined there: the other ranks get the timeout of
        its communicator.
        """
        if self._reduce is not None and not self._is_reduced:
            self._is_reduced = True  # before it: a call that failed cannot be joined by another
            self._reduce()
        self._is_reduced = True
        self._last_used = {p for p in self.parameters() if p.grad is not None}
        return gradient_parts(self.parameters(), groups=self.groups)

    def join_reductions(self) -> None:
        """Call `reduce` as the other ranks do, after an error in a microbatch of this one.

        It sees a gradient for the same parameters as in the last step, so that one that leaves out
        parameters without a gradient makes the same collectives.
        """
        if self._reduce is None or self._is_reduced:
            return
        for parameter in self.parameters():
            is_used = self._last_used is None or parameter in self._last_used
            if parameter.requires_grad and parameter.grad is None and is_used:
                parameter.grad = torch.zeros_like(parameter)
        self._is_reduced = True
        self._reduce()

    def usage(self) -> tuple[int, int]:
        trained = [p for p in self.parameters() if p.requires_grad]
        return sum(p.grad is not None for p in trained), len(trained)

    def exchange_used(self) -> None:
        """Check that each gradient is on all ranks of its parameter's data axis, or on none.

        Ranks of `dp_cp` hold different experts, and one that no token was sent to has no gradient;
        copies of an expert are along `expt_dp`.

        Raises:
            ConfigError: On all ranks of a data axis, for a gradient that only some of them have.

        Cost: an all-reduce of one number per parameter over `dp_cp`, and over `expt_dp` if there
            are experts.
        """
        by_axis: dict[str, list[nn.Parameter]] = {"dp_cp": [], "expt_dp": []}
        for parameter in self.parameters():
            by_axis[_data_axis(parameter)].append(parameter)
        error: ConfigError | None = None
        for over, members in by_axis.items():
            if not members or self.groups.size(over) == 1:
                continue
            counts = collectives.count_ranks(
                [p.grad is not None for p in members],
                self.groups.group(over),
                what="the exchange of used parameters",
            )
            for parameter, count in zip(members, counts, strict=True):
                if 0 < count < self.groups.size(over) and error is None:
                    error = ConfigError(
                        f"a parameter of shape {list(parameter.shape)} has a gradient on {count} "
                        f"of the {self.groups.size(over)} ranks of {over!r}, so it is not "
                        f"reduced; reduce gradients before the step, or with reduce="
                    )
        if error is not None:  # only now: ranks of the other axis wait for this one
            raise error

    def drop_gradients(self) -> None:
        self._is_interrupted = False
        self.optimizer.zero_grad(set_to_none=True)
        self._is_reduced = False

    def unfinished_work(self) -> str | None:
        if self._is_interrupted or not self._is_reduced:
            return super().unfinished_work()
        return (
            "ReducedOptimizer holds gradients that are reduced and that no step has used; call "
            "step() first, or forget them with drop_gradients() on all ranks"
        )


def _data_axis(parameter: nn.Parameter) -> str:
    """Return the group of ranks whose gradients of a parameter are added up.

    A DTensor that is cut along `ep` or `expt_tp` is an expert: its copies are along `expt_dp`.
    """
    if not isinstance(parameter, DTensor):
        return "dp_cp"
    cut = {dim for dim, placement, _ in mesh_lines(parameter) if not placement.is_replicate()}
    return "dp_cp" if cut.isdisjoint(("ep", "expt_tp")) else "expt_dp"
