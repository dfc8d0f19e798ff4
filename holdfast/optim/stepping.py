"""The step of sharded optimizers: one norm, one decision, on all ranks and for all of them."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch

from holdfast.errors import ConfigError
from holdfast.optim.checks import check_limit
from holdfast.optim.norms import GradientNorm, GradientPart, clip_factor, measure
from holdfast.optim.scaler import LossScaler
from holdfast.optim.torch_interface import TorchInterface, refuse_closure
from holdfast.parallel import ProcessGroups


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


class SteppingOptimizer(TorchInterface):
    """A sharded optimizer, or several as one: what a step does, in terms of its phases."""

    @property
    @abstractmethod
    def groups(self) -> ProcessGroups:
        """The communicators in use."""

    @abstractmethod
    def finish_gradients(self) -> None:
        """Reduce what is not reduced yet and wait."""

    @abstractmethod
    def gradient_parts(self) -> list[GradientPart]:
        """This rank's shares of the reduced gradients, for `norms.measure`."""

    @abstractmethod
    def count_gradients(self) -> tuple[int, int]:
        """On this rank: parameters that got a gradient in this step, and those that could."""

    @abstractmethod
    def update(self, factor: float) -> None:
        """Update this rank's shares with its gradients times `factor`; nothing is gathered yet."""

    @abstractmethod
    def publish(self) -> None:
        """Start gathering the updated parameters; every rank calls this, whatever happened."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until this rank's parameters are whole and up to date."""

    @abstractmethod
    def num_groups(self) -> dict[str, int]:
        """How many parameter groups each optimizer has, by its name."""

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

        Cost: the reductions not made yet, the all-reduces of `norms.measure`, an all-gather per
        bucket that may run concurrently with the next forward, and one agreement.
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
        return StepOutcome(
            norm=norm.value,
            clipped=norm.is_finite and factor != 1.0,
            skipped=not norm.is_finite,
            bad_ranks=norm.bad_ranks,
            num_zeros=norm.num_zeros,
            loss_scale=scale,
        )

    def _measure(self, scale: float, *, count_zeros: bool) -> GradientNorm:
        self.finish_gradients()
        norm = measure(
            self.gradient_parts(),
            groups=self.groups,
            count_zeros=count_zeros,
            scale=scale,
            counts=self.count_gradients(),
        )
        num_used, num_trained = norm.counts
        if num_trained and not num_used:
            raise ConfigError(
                f"optimizer {', '.join(map(repr, self.num_groups()))}: no parameter got a "
                f"gradient on any rank since the last step; call backward first, on the loss of "
                f"the model that the optimizer was built for"
            )
        return norm

    @torch.no_grad()
    def _update_together(self, factor: float) -> None:
        """Update and publish on every rank, then agree on whether it worked everywhere."""
        failure: Exception | None = None
        try:
            self.update(factor)
        except Exception as error:
            failure = error
        self.publish()
        try:
            self.groups.control.agree(failure, phase="optimizer: update")
        except BaseException:
            self.synchronize()
            raise
