"""The step of sharded optimizers: one norm, one decision, on all ranks and for all of them."""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import Self

from torch import nn

from holdfast.errors import ConfigError, DeadlineError
from holdfast.optim.checks import check_limit
from holdfast.optim.norms import GradientNorm, GradientPart, LayoutSum, clip_factor, measure
from holdfast.optim.reducer import GradientReducer
from holdfast.optim.scaler import LossScaler
from holdfast.optim.torch_interface import TorchInterface, refuse_closure
from holdfast.parallel import ProcessGroups
from holdfast.state.optimizer.protocol import OptimizerParameter


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """The result of a step; the same on every rank."""

    norm: float
    """2-norm of the whole averaged gradient, loss scale removed; NaN if it was not finite."""
    clipped: bool
    """Whether gradients were scaled down to the largest norm allowed."""
    skipped: bool
    """Whether nothing was updated, because a gradient was not finite."""
    bad_ranks: tuple[int, ...]
    """Global ranks whose share of the reduced gradients was not finite, ascending."""
    num_zeros: int | None
    """Elements of the gradient that are exactly zero; None if not requested."""
    loss_scale: float
    """What the loss of this step was multiplied by; 1 without a scaler."""

    @classmethod
    def of(cls, norm: GradientNorm, *, factor: float, scale: float) -> Self:
        """The outcome of a step that, where the gradient is finite, has scaled it by `factor`."""
        return cls(
            norm=norm.value,
            clipped=norm.is_finite and factor != 1.0,
            skipped=not norm.is_finite,
            bad_ranks=norm.bad_ranks,
            num_zeros=norm.num_zeros,
            loss_scale=scale,
        )


class SteppingOptimizer(TorchInterface):
    """A sharded optimizer, or several as one: what a step does, in terms of its phases."""

    @property
    @abstractmethod
    def groups(self) -> ProcessGroups:
        """The communicators in use."""

    @property
    @abstractmethod
    def reducers(self) -> Sequence[GradientReducer]:
        """What takes the gradients, one for each sharded optimizer."""

    @abstractmethod
    def gradient_parts(self) -> list[GradientPart]:
        """This rank's shares of the gradients, reduced: what is not yet is so here."""

    @abstractmethod
    def join_reductions(self) -> None:
        """Make the collectives of `gradient_parts` that are left, after a failure of this rank."""

    @abstractmethod
    def microbatch(self, *, is_last: bool) -> AbstractContextManager[None]:
        """Around one microbatch with one backward."""

    @abstractmethod
    def update(self, factor: float) -> None:
        """Update this rank's shares with its gradients times `factor`; nothing is gathered yet."""

    @abstractmethod
    def launch_gathers(self) -> None:
        """Start gathering the updated parameters; every rank calls this, whatever happened."""

    @abstractmethod
    def publish(self) -> None:
        """Let parameters be used again: wait for those that cannot be overlapped."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until this rank's parameters are whole and up to date."""

    @abstractmethod
    def close(self) -> None:
        """Take all hooks off the model."""

    @abstractmethod
    def optimizer_parameters(self) -> Sequence[OptimizerParameter]:
        """Every parameter with the elements of it that this rank updates."""

    @abstractmethod
    def sharding_records(self) -> dict[str, dict[str, object]]:
        """How each optimizer is sharded, by its name."""

    @property
    def divisor(self) -> int:
        """What the sum of gradients was divided by; ConfigError where that is not one number."""
        divisors = {reducer.name: reducer.divisor for reducer in self.reducers}
        if len(set(divisors.values())) > 1:
            raise ConfigError(
                f"the optimizers divide gradients by different numbers, {divisors}; with the same "
                f"loss, dense parameters and experts have the same divisor"
            )
        return next(iter(divisors.values()))

    @property
    def optimizer(self) -> Self:
        """Itself: the `ModuleStepper` of a module is its optimizer."""
        return self

    @property
    def kind(self) -> str:
        """Its class, and the names of the sharded optimizers inside."""
        return f"{type(self).__name__} ({', '.join(each.name for each in self.reducers)})"

    def parameters(self) -> list[nn.Parameter]:
        """The parameters of all groups."""
        return [member.parameter for member in self.optimizer_parameters()]

    def stage_description(self) -> str:
        """Empty: ranks that share buckets have compared them."""
        return ""

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

    def step(  # type: ignore[override]
        self,
        closure: None = None,
        *,
        max_norm: float = 0.0,
        scaler: LossScaler | None = None,
        count_zeros: bool = False,
    ) -> StepOutcome:
        """Finish gradients, measure, clip, update, and start gathering parameters; collective.

        Where any rank's gradients are not finite, nothing is updated anywhere. Gradients are
        forgotten in every case.

        Args:
            closure: refused; call backward before the step.
            max_norm: gradients are scaled down to this 2-norm; 0 or infinity for no limit.
            scaler: has scaled the loss; it learns once whether gradients were finite.
            count_zeros: whether to count the elements of the gradient that are exactly zero.

        Raises:
            ConfigError: `max_norm` is negative or NaN, or, on all ranks, no rank got a gradient
                for any parameter since the last step.
            HoldfastError: The update failed on some rank; raised on all, naming the ranks and
                their messages. The others have updated their shares by then, and parameters are
                equal on all ranks afterwards: training can go on with the next step, or from the
                last checkpoint.

        Cost: the reductions not made yet; one small sum over the layout, by which all is decided
        before anything is updated, and one after the update, of whether it worked (a sum is an
        all-reduce over each of `tp`, `dp_cp` and `pp` that has several ranks); an all-gather per
        bucket, which with overlap runs concurrently with the next forward. Where a parameter got no
        gradient on some rank, also an all-reduce of a number per parameter.
        """
        refuse_closure(closure)
        max_norm = check_limit(max_norm)
        scale = 1.0 if scaler is None else scaler.scale
        try:
            norm = self._measure(scale, count_zeros=count_zeros)
            if scaler is not None:
                scaler.update(overflowed=not norm.is_finite)
            factor = clip_factor(norm, limit=max_norm)
            if norm.is_finite:
                self._update_together(factor / scale)
        finally:
            self.drop_gradients()
        return StepOutcome.of(norm, factor=factor, scale=scale)

    def _measure(self, scale: float, *, count_zeros: bool) -> GradientNorm:
        parts = self.gradient_parts()
        norm = measure(
            parts,
            total=self._total,
            count_zeros=count_zeros,
            scale=scale,
            counts=self.usage(),
        )
        num_used, num_trained = norm.counts
        if num_trained and not num_used:
            raise ConfigError(
                f"optimizer {', '.join(repr(each.name) for each in self.reducers)}: no parameter "
                f"got a gradient on any rank since the last step; call backward first, on the loss "
                f"of the model that the optimizer was built for"
            )
        if num_used < num_trained:
            self.exchange_used()
        return norm

    @cached_property
    def _total(self) -> LayoutSum:
        return LayoutSum(self.groups)

    def _update_together(self, factor: float) -> None:
        """Update and gather on every rank, and agree on whether it worked everywhere."""
        failure: Exception | None = None
        try:
            self.update(factor)
        except Exception as error:
            failure = error
        self.launch_gathers()
        try:
            agree_on_update(failure, total=self._total, groups=self.groups)
        except BaseException:
            with contextlib.suppress(DeadlineError):  # of a rank that the agreement has named
                self.synchronize()
            raise
        self.publish()


def agree_on_update(failure: Exception | None, *, total: LayoutSum, groups: ProcessGroups) -> None:
    """Raise on all ranks what any rank has; nothing where no rank has an error.

    Cost: one sum of a number over the layout; where that would make the host wait for a device,
    and where there is an error, one agreement of `Control`.
    """
    is_in_doubt = True
    if total.is_on_host:
        with contextlib.suppress(DeadlineError):  # `agree` names the ranks that are missing
            is_in_doubt = any(total([failure is not None], what="the agreement after an update"))
    if is_in_doubt:
        groups.control.agree(failure, phase="optimizer: update")
