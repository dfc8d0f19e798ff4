"""The one sum over all ranks of all modules by which a step is decided."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from holdfast.errors import ConfigError
from holdfast.optim.norms import GradientNorm, GradientSums, NormTerms
from holdfast.parallel import ModuleLayouts
from holdfast.parallel.ranks import shorten_ranks

_NO_SCALER = 0.0
"""In the place of a loss scale, which is greater than zero."""


@dataclass(slots=True, kw_only=True)
class Contribution:
    """What one rank contributes to the sum."""

    has_failed: bool = False
    """Whether this rank cannot go on. Nothing else of it counts then."""
    max_norm: float = 0.0
    scale: float | None = None
    """Of the loss; None without a scaler."""
    count_zeros: bool = False
    num_tokens: int | None = None
    """Loss tokens of this rank; None where it has no loss, or nothing is normalised by them."""
    terms: dict[str, list[float]] = field(default_factory=dict)
    """By module, what `NormTerms` makes of this rank's gradients."""
    usage: dict[str, tuple[int, int]] = field(default_factory=dict)
    """By module, parameters that got a gradient on this rank, and trained ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSums:
    """What all ranks know after the sum; the same on every one."""

    gradients: Mapping[str, GradientSums]
    """By module."""
    usage: Mapping[str, tuple[int, int]]
    """By module, sums over its ranks."""
    failed: tuple[int, ...]
    """Ranks that cannot go on."""
    max_norms: Mapping[int, float]
    scales: Mapping[int, float]
    counts_zeros: Mapping[int, float]
    tokens: Mapping[int, int | None]
    """By rank of the module with the loss."""

    def norm(
        self, *, divisor: float, weights: Mapping[str, float]
    ) -> tuple[GradientNorm, dict[str, float]]:
        """The norm over all modules, and that of each; NaN where it is not finite.

        Args:
            divisor: what gradients are divided by: the loss scale, the number of tokens.
            weights: by module, what its gradients are multiplied by.
        """
        squares = {
            module: math.nan if each.bad_ranks else each.square * weights[module] ** 2
            for module, each in self.gradients.items()
        }
        bad = {rank for each in self.gradients.values() for rank in each.bad_ranks}
        norm = GradientNorm(
            value=math.sqrt(math.fsum(squares.values())) / divisor,
            bad_ranks=tuple(sorted(bad)),
            num_zeros=sum(each.num_zeros for each in self.gradients.values()),
        )
        return norm, {module: math.sqrt(each) / divisor for module, each in squares.items()}

    def check_settings(self) -> None:
        """ConfigError where ranks were called with different settings, or scale differently."""
        for values, what, why in (
            (self.max_norms, "max_norm", "one limit holds for the norm of all modules"),
            (self.counts_zeros, "count_zeros", "zeros are counted on all ranks or on none"),
            (
                self.scales,
                "loss scale (0 without a scaler)",
                "one loss is scaled once: give all modules on all ranks one LossScaler, or equal "
                "ones, and load them from one checkpoint",
            ),
        ):
            by_value: dict[float, list[int]] = {}
            for rank, value in values.items():
                by_value.setdefault(value, []).append(rank)
            if len(by_value) > 1:
                listed = "; ".join(
                    f"{value:g} on ranks {shorten_ranks(ranks)}"
                    for value, ranks in by_value.items()
                )
                raise ConfigError(
                    f"step of several modules: ranks differ in {what}: {listed}; {why}. Nothing "
                    f"was updated"
                )

    def check_used(self) -> None:
        """ConfigError where parameters are trained and none of any module got a gradient."""
        trained = [module for module, (_, count) in self.usage.items() if count]
        if trained and not any(count for count, _ in self.usage.values()):
            raise ConfigError(
                f"step of several modules: no parameter of {', '.join(map(repr, trained))} got a "
                f"gradient on any rank since the last step; call backward first, on the loss of "
                f"the modules that the optimizers were built for"
            )


class StepSum:
    """Which number of the sum means what.

    Args:
        layouts: of all modules.
        loss_module: whose ranks count tokens; None where nothing is normalised by them.
    """

    def __init__(self, layouts: ModuleLayouts, *, loss_module: str | None) -> None:
        self.terms = {module: NormTerms(layout) for module, layout in layouts.items()}
        """By module, what of its gradients is summed."""
        self._ranks = layouts.union.ranks
        self._loss_module = loss_module
        self._loss_layout = None if loss_module is None else layouts[loss_module]

    def pack(self, mine: Contribution, *, rank: int) -> list[float]:
        """This rank's numbers: as many on every rank."""
        values: list[float] = []
        for module, terms in self.terms.items():
            values += mine.terms.get(module, [0.0] * terms.size)
            values += mine.usage.get(module, (0, 0))
        for own in (
            float(mine.has_failed),
            mine.max_norm,
            _NO_SCALER if mine.scale is None else mine.scale,
            float(mine.count_zeros),
        ):
            values += [own if each == rank else 0.0 for each in self._ranks]
        # One more than the tokens, so that none at all is not the same as no answer.
        count = 0 if mine.num_tokens is None else mine.num_tokens + 1
        values += [float(count) if each == rank else 0.0 for each in self._loss_ranks]
        return values

    def read(self, sums: Sequence[float]) -> StepSums:
        """The inverse of `pack`, of the sums of all ranks' numbers."""
        rest = iter(sums)

        def take(number: int) -> list[float]:
            return [next(rest) for _ in range(number)]

        gradients: dict[str, GradientSums] = {}
        usage: dict[str, tuple[int, int]] = {}
        for module, terms in self.terms.items():
            gradients[module] = terms.read(take(terms.size))
            used, trained = take(2)
            usage[module] = int(used), int(trained)
        failed, max_norms, scales, counts_zeros = (
            dict(zip(self._ranks, take(len(self._ranks)), strict=True)) for _ in range(4)
        )
        tokens = {rank: int(next(rest)) - 1 for rank in self._loss_ranks}
        return StepSums(
            gradients=gradients,
            usage=usage,
            failed=tuple(sorted(rank for rank, flag in failed.items() if flag)),
            max_norms=max_norms,
            scales=scales,
            counts_zeros=counts_zeros,
            tokens={rank: None if count < 0 else count for rank, count in tokens.items()},
        )

    def total_tokens(self, sums: StepSums) -> int | None:
        """Loss tokens of all data ranks, each once; None where no rank has counted any.

        Every data rank (coordinate of `dp_cp`) of the module with the loss has a count, which is
        equal on all its ranks that pass one (tensor ranks, pipeline stages); others pass None.

        Raises:
            ConfigError: On all ranks: counts of one data rank differ, a data rank has none while
                another has one, or the total is 0.
        """
        if self._loss_layout is None or all(count is None for count in sums.tokens.values()):
            return None
        total = 0
        where = f"num_tokens of module {self._loss_module!r}"
        for ranks in self._data_ranks():
            counts = {rank: sums.tokens[rank] for rank in ranks if sums.tokens[rank] is not None}
            if not counts:
                raise ConfigError(
                    f"{where}: none of the ranks {shorten_ranks(ranks)}, which have the same "
                    f"samples, has passed a count, and other ranks have; ranks with the loss pass "
                    f"num_tokens= in each step, 0 where there is no token"
                )
            if len(set(counts.values())) > 1:
                listed = ", ".join(f"{count} on rank {rank}" for rank, count in counts.items())
                raise ConfigError(
                    f"{where}: ranks with the same samples count different tokens: {listed}; "
                    f"tensor ranks pass equal counts, context ranks those of their own positions"
                )
            total += next(iter(counts.values())) or 0
        if not total:
            raise ConfigError(
                f"{where}: no data rank has any token in this step, so that its gradient has no "
                f"mean; nothing was updated, and gradients are forgotten: leave such a batch out, "
                f"or catch this error on all ranks and go on with the next one"
            )
        return total

    @property
    def _loss_ranks(self) -> tuple[int, ...]:
        return () if self._loss_layout is None else self._loss_layout.ranks

    def _data_ranks(self) -> list[list[int]]:
        """The ranks of the module with the loss by their coordinate of `dp_cp`."""
        layout = self._loss_layout
        if layout is None:
            return []
        by_index: dict[int, list[int]] = {}
        for rank in layout.ranks:
            index = layout.group("dp_cp", rank).index(rank)
            by_index.setdefault(index, []).append(rank)
        return list(by_index.values())
