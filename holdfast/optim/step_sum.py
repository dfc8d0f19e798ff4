"""The one sum over all ranks of all modules by which a step is decided."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from holdfast.errors import ConfigError
from holdfast.optim.norms import GradientNorm, GradientSums, NormTerms
from holdfast.parallel import Layout
from holdfast.parallel.ranks import shorten_ranks

_FAILED = 0.0
"""In the place of a digest, which is at least 1."""
_REASONS = {
    "max_norm": "one limit holds for the norm of the whole gradient",
    "count_zeros": "zeros are counted on all ranks or on none",
    "loss scale": "one loss is scaled once: give all ranks, and all modules, one LossScaler or "
    "equal ones, and load them from one checkpoint",
}


@dataclass(slots=True, kw_only=True)
class Contribution:
    """What one rank contributes to the sum."""

    has_failed: bool = False
    """Whether this rank cannot continue. Nothing else of it counts then."""
    is_finite: bool = True
    """Whether the loss is, as far as this rank knows."""
    max_norm: float = 0.0
    scale: float | None = None
    """Of the loss; None without a scaler."""
    count_zeros: bool = False
    num_tokens: int | None = None
    """Loss tokens of this rank; None if it has no loss, or nothing is normalised by them."""
    terms: dict[str, list[float]] = field(default_factory=dict)
    """By module, what `NormTerms` makes of this rank's gradients."""
    usage: dict[str, tuple[int, int]] = field(default_factory=dict)
    """By module, parameters that got a gradient on this rank, and trained ones."""
    hyperparameters: dict[str, list[dict[str, object]]] = field(default_factory=dict)
    """By module, by parameter group, by name."""

    @property
    def settings(self) -> dict[str, object]:
        """What is equal on all ranks, by the name that a message gives it."""
        return {
            "max_norm": self.max_norm,
            "loss scale": self.scale,
            "count_zeros": self.count_zeros,
        }

    def described(self) -> bytes:
        """Everything that ranks may differ in, for `StepSum.refuse_differences`."""
        return _text([self.settings, self.hyperparameters])


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSums:
    """What all ranks know after the sum; the same on every one."""

    gradients: Mapping[str, GradientSums]
    """By module."""
    usage: Mapping[str, tuple[int, int]]
    """By module, sums over its ranks."""
    failed: tuple[int, ...]
    """Ranks that cannot continue."""
    differ: bool
    """Whether ranks differ in settings, or those of one pipeline stage in hyperparameters."""
    num_bad_losses: int
    """Ranks whose loss is not finite."""
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

    def check_used(self, *, name: str) -> None:
        """ConfigError if parameters are trained and none of any module got a gradient."""
        trained = [module for module, (_, count) in self.usage.items() if count]
        if trained and not any(count for count, _ in self.usage.values()):
            named = ", ".join(repr(module) for module in trained if module)
            raise ConfigError(
                f"{name}: no parameter{f' of {named}' if named else ''} got a gradient on any rank "
                f"since the last step; call backward first, on the loss of the model that the "
                f"optimizer was built for"
            )


class StepSum:
    """Which number of the sum means what.

    Settings are compared by digests of 48 bits, each rank's in a slot of its own: the sum of a
    number and zeros is exact, and ranks that differ are known from it.

    Args:
        layouts: of all modules.
        ranks: of all modules, in one order.
        loss_module: whose ranks count tokens; None if nothing is normalised by them.
    """

    def __init__(
        self, layouts: Mapping[str, Layout], *, ranks: Sequence[int], loss_module: str | None
    ) -> None:
        self.terms = {module: NormTerms(layout) for module, layout in layouts.items()}
        """By module, what of its gradients is summed."""
        self._layouts = dict(layouts.items())
        self._ranks = ranks
        self._loss_module = loss_module
        self._loss_layout = None if loss_module is None else layouts[loss_module]
        self._stages = [
            (module, ranks) for module, layout in layouts.items() for ranks in _stages(layout)
        ]
        """Ranks of one stage of a module: stages may have hyperparameters of their own."""
        self._digests: dict[str | None, tuple[str, float]] = {}
        """By module, and None for the settings of the step: the last entries and their digest."""

    def pack(self, mine: Contribution, *, rank: int) -> list[float]:
        """This rank's numbers: as many on every rank."""

        def slots(ranks: Iterable[int], value: float) -> list[float]:
            return [value if each == rank else 0.0 for each in ranks]

        digest = _FAILED if mine.has_failed else self._digest(None, mine.settings)
        values = slots(self._ranks, digest)
        values.append(float(not mine.is_finite))
        for module, terms in self.terms.items():
            values += mine.terms.get(module, [0.0] * terms.size)
            values += mine.usage.get(module, (0, 0))
            digest = self._digest(module, mine.hyperparameters.get(module, []))
            values += slots(self._layouts[module].ranks, digest)
        # One more than the tokens, so that none at all is not the same as no answer.
        count = 0 if mine.num_tokens is None else mine.num_tokens + 1
        return values + slots(self._loss_ranks, float(count))

    def read(self, sums: Sequence[float]) -> StepSums:
        """The inverse of `pack`, of the sums of all ranks' numbers."""
        rest = iter(sums)

        def slots(ranks: Sequence[int]) -> dict[int, float]:
            return {rank: next(rest) for rank in ranks}

        settings = slots(self._ranks)
        num_bad_losses = int(next(rest))
        gradients: dict[str, GradientSums] = {}
        usage: dict[str, tuple[int, int]] = {}
        digests: dict[str, dict[int, float]] = {}
        for module, terms in self.terms.items():
            gradients[module] = terms.read([next(rest) for _ in range(terms.size)])
            usage[module] = int(next(rest)), int(next(rest))
            digests[module] = slots(self._layouts[module].ranks)
        counts = {rank: int(each) - 1 for rank, each in slots(self._loss_ranks).items()}
        return StepSums(
            gradients=gradients,
            usage=usage,
            failed=tuple(sorted(rank for rank, each in settings.items() if each == _FAILED)),
            differ=len(set(settings.values())) > 1
            or any(
                len({digests[module][rank] for rank in ranks}) > 1 for module, ranks in self._stages
            ),
            num_bad_losses=num_bad_losses,
            tokens={rank: None if count < 0 else count for rank, count in counts.items()},
        )

    def refuse_differences(self, described: Mapping[int, bytes], *, name: str) -> NoReturn:
        """Raise ConfigError that names a setting and the values of all ranks.

        Args:
            described: by rank, `Contribution.described`.
            name: of what steps.
        """
        answers = {rank: json.loads(each) for rank, each in described.items()}
        refuse_different({rank: answers[rank][0] for rank in self._ranks}, where=name)
        for module, ranks in self._stages:
            by_rank = {rank: _named(answers[rank][1].get(module, [])) for rank in ranks}
            refuse_different(by_rank, where=f"{name}: module {module!r}" if module else name)
        raise ConfigError(f"{name}: ranks differ in settings of the step. Nothing was updated")

    def _digest(self, key: str | None, entries: Any) -> float:
        """An integer from 1 on that a float64 holds exactly; equal for equal entries."""
        now = repr(entries)
        before, digest = self._digests.get(key, ("", _FAILED))
        if before != now:  # seldom: a digest takes longer than `repr`
            number = hashlib.blake2b(_text(entries), digest_size=6).digest()
            digest = float(int.from_bytes(number) + 1)
            self._digests[key] = now, digest
        return digest

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


def _stages(layout: Layout) -> Iterable[list[int]]:
    """The ranks of a layout by pipeline stage."""
    by_stage: dict[int, list[int]] = {}
    for rank in layout.ranks:
        by_stage.setdefault(layout.coordinates(rank)["pp"], []).append(rank)
    return by_stage.values()


def refuse_different(by_rank: Mapping[int, Mapping[str, Any]], *, where: str) -> None:
    """ConfigError for the first entry, by its name, that is not equal on all ranks."""
    for key in dict.fromkeys(key for entries in by_rank.values() for key in entries):
        ranks_of: dict[str, list[int]] = {}
        for rank, entries in by_rank.items():
            shown = _shown(entries[key]) if key in entries else "absent"
            ranks_of.setdefault(shown, []).append(rank)
        if len(ranks_of) > 1:
            listed = "; ".join(f"{v} on ranks {shorten_ranks(r)}" for v, r in ranks_of.items())
            reason = _REASONS.get(key, "ranks that share parameters update them alike")
            raise ConfigError(
                f"{where}: ranks differ in {key}: {listed}; {reason}. Nothing was updated"
            )


def _named(groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Hyperparameters by the name that a message gives them."""
    return {
        f"{key} of parameter group {number}": value
        for number, group in enumerate(groups)
        for key, value in group.items()
    }


def _text(entries: object) -> bytes:
    """Equal on two ranks if, and only if, the entries are."""
    return json.dumps(_plain(entries), default=repr).encode()


def _plain(value: object) -> object:
    """A value with one form for equal ones: 1 and 1.0, a tuple and a list are the same setting."""
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    return value


def _shown(value: object) -> str:
    """A value in as few digits as show it exactly."""
    is_short = isinstance(value, float) and float(f"{value:g}") == value
    return f"{value:g}" if is_short else str(value)
