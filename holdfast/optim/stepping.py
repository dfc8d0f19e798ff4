"""One step of one or more sharded optimizers, decided once for all of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from holdfast.errors import ConfigError
from holdfast.optim.checks import check_limit
from holdfast.optim.norms import clip_factor, measure
from holdfast.optim.scaler import LossScaler
from holdfast.parallel import ProcessGroups

if TYPE_CHECKING:
    from holdfast.optim.sharded import ShardedOptimizer


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """What came of a step; the same on every rank."""

    norm: float
    """2-norm of the whole averaged gradient, loss scale removed; NaN if it was not finite."""
    clipped: bool
    """Whether gradients were scaled down to the largest norm allowed."""
    skipped: bool
    """Whether nothing was updated, because a gradient was not finite."""
    bad_ranks: tuple[int, ...]
    """Global ranks whose share of the reduced gradients was not finite, ascending."""
    num_zeros: int | None
    """Elements of the gradient that are exactly zero; None if not asked for."""
    loss_scale: float
    """What the loss of this step was multiplied by; 1 without a scaler."""


def take_step(
    optimizers: Mapping[str, ShardedOptimizer],
    *,
    groups: ProcessGroups,
    max_norm: float = 0.0,
    scaler: LossScaler | None = None,
    count_zeros: bool = False,
) -> StepOutcome:
    """Finish gradients, measure, clip, update, and start gathering parameters; collective.

    One norm and one decision hold for all optimizers: where any rank's gradients are not finite,
    nothing is updated anywhere, and `scaler`, if given, learns it once. `max_norm`: gradients are
    scaled down to it; 0 or infinity for no limit. Gradients are forgotten in every case.

    Raises ConfigError for a `max_norm` that is negative or NaN, and on all ranks where no rank got
    a gradient for any parameter since the last step.

    If the update raises on one rank, all ranks raise, naming the ranks and what they said. The
    other ranks have updated their shares by then, and parameters are equal on all ranks
    afterwards: training can go on with the next step, or from the last checkpoint.

    Cost: the reductions not made yet, the all-reduces of `norms.measure`, an all-gather per bucket
    that goes on beside the next forward, and one agreement.
    """
    max_norm = check_limit(max_norm)
    scale = 1.0 if scaler is None else scaler.scale
    try:
        for optimizer in optimizers.values():
            optimizer.finish_gradients()
        parts = [part for o in optimizers.values() for part in o.gradient_parts()]
        counts = [o.count_gradients() for o in optimizers.values()]
        norm = measure(
            parts,
            groups=groups,
            count_zeros=count_zeros,
            scale=scale,
            counts=[sum(column) for column in zip(*counts, strict=True)],
        )
        num_used, num_trained = norm.counts
        if num_trained and not num_used:
            raise ConfigError(
                f"optimizer {', '.join(repr(name) for name in optimizers)}: no parameter got a "
                f"gradient on any rank since the last step; call backward first, on the loss of "
                f"the model that the optimizer was built for"
            )
        if scaler is not None:
            scaler.update(overflowed=not norm.is_finite)
        factor = clip_factor(norm, limit=max_norm)
        if norm.is_finite:
            _update(optimizers, groups=groups, factor=factor / scale)
    finally:
        for optimizer in optimizers.values():
            optimizer.drop_gradients()
    return StepOutcome(
        norm=norm.value,
        clipped=norm.is_finite and factor != 1.0,
        skipped=not norm.is_finite,
        bad_ranks=norm.bad_ranks,
        num_zeros=norm.num_zeros,
        loss_scale=scale,
    )


def _update(
    optimizers: Mapping[str, ShardedOptimizer], *, groups: ProcessGroups, factor: float
) -> None:
    """Update and publish on every rank, then agree on whether it worked everywhere."""
    failure: Exception | None = None
    try:
        for optimizer in optimizers.values():
            optimizer.update(factor)
    except Exception as error:
        failure = error
    for optimizer in optimizers.values():
        optimizer.publish()
    try:
        groups.control.agree(failure, phase="optimizer: update")
    except BaseException:
        for optimizer in optimizers.values():
            optimizer.synchronize()
        raise
