"""The one sum over all ranks of all modules by which a step is decided."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, NoReturn

from holdfast.errors import ConfigError, shorten_ranks, values_by_rank
from holdfast.optim.norms import GradientNorm, GradientSums, NormTerms
from holdfast.parallel import Layout

_FAILED = 0.0
"""The digest of a rank that failed; a real one is at least 1."""
_NUMBER = "number of the optimizer"
_TURNS = "number of the reduction before the step"
_REASONS = {
    _TURNS: "all ranks call share_norm() and finish_gradients() of several optimizers in the same "
    "order: gradients of this one were added to those of another",
    _NUMBER: "all ranks step the optimizers on their groups in the same order, "
    "which are numbered as they were built (a set of them has another order in each process)",
    "max_norm": "one limit holds for the norm of the whole gradient",
    "count_zeros": "zeros are counted on all ranks or on none",
    "veto": "a veto is asked on all ranks or on none",
    "loss scale": "one loss is scaled once: give all ranks, and all modules, one LossScaler or "
    "equal ones, and load them from one checkpoint",
}


@dataclass(slots=True, kw_only=True)
class Contribution:
    """The contribution of one rank to the sum."""

    number: int = 0
    """Of the optimizer, see `Stepper.number`."""
    has_failed: bool = False
    """True if this rank cannot continue; then nothing else of it counts."""
    is_finite: bool = True
    """False if the loss of this rank is not finite."""
    vetoes: bool | None = None
    """True if this rank does not want the step to be updated; None if it was not asked."""
    max_norm: float = 0.0
    scale: float | None = None
    """Of the loss; None without a scaler."""
    count_zeros: bool = False
    num_tokens: int | None = None
    """Loss tokens of this rank; None if it has no loss, or nothing is normalised by them."""
    terms: dict[str, list[float]] = field(default_factory=dict)
    """By module, the numbers that `NormTerms` makes of this rank's gradients."""
    usage: dict[str, tuple[int, int]] = field(default_factory=dict)
    """By module, parameters that got a gradient on this rank, and trained ones."""
    num_new: dict[str, int] = field(default_factory=dict)
    """By module, `Stepper.num_new` of this rank."""
    hyperparameters: dict[str, list[dict[str, object]]] = field(default_factory=dict)
    """By module, by parameter group, by name."""
    turns: dict[str, list[int]] = field(default_factory=dict)
    """By module, `Stepper.turns`."""
    carried: set[tuple[str, str]] = field(default_factory=set)
    """Edges of this rank over which gradients may have come."""

    @property
    def settings(self) -> dict[str, object]:
        """Settings that must be equal on all ranks, by their names in messages."""
        return {
            _NUMBER: self.number,
            "max_norm": self.max_norm,
            "loss scale": self.scale,
            "count_zeros": self.count_zeros,
            "veto": self.vetoes is not None,
        }

    def described(self) -> bytes:
        """Return everything that ranks may differ in, for `StepSum.refuse_differences`."""
        return _text([self.settings, self.hyperparameters, self.turns])


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSums:
    """The sums over all ranks; the same on every rank."""

    gradients: Mapping[str, GradientSums]
    """By module."""
    usage: Mapping[str, tuple[int, int]]
    """By module, sums over its ranks."""
    num_new: Mapping[str, int]
    """By module, sum over its ranks."""
    failed: tuple[int, ...]
    """Ranks that cannot continue."""
    settings: Mapping[int, float]
    """By rank, a digest of its settings of the step."""
    differ: bool
    """True if ranks differ in settings, or those of one pipeline stage in hyperparameters."""
    num_bad_losses: int
    """Ranks whose loss is not finite."""
    num_vetoes: int
    """Ranks that do not want the step to be updated."""
    tokens: Mapping[int, int | None]
    """By rank of the module with the loss."""
    carried: tuple[tuple[str, str], ...]
    """Edges over which gradients may have come, on any rank."""

    def norm(
        self, *, divisor: float, weights: Mapping[str, float]
    ) -> tuple[GradientNorm, dict[str, float]]:
        """Return the norm over all modules, and that of each; NaN if it is not finite.

        Args:
            divisor: gradients are divided by it: the loss scale times the number of tokens.
            weights: by module, a factor of its gradients.
        """
        squares = {
            module: math.nan if each.bad_ranks else each.square * weights[module] ** 2
            for module, each in self.gradients.items()
        }
        bad = {rank for each in self.gradients.values() for rank in each.bad_ranks}
        norm = GradientNorm(
            # Not `fsum`, which raises for a sum that is too large.
            value=math.sqrt(sum(squares.values())) / divisor,
            bad_ranks=tuple(sorted(bad)),
            num_zeros=sum(each.num_zeros for each in self.gradients.values()),
        )
        return norm, {module: math.sqrt(each) / divisor for module, each in squares.items()}

    def check_used(self, *, name: str) -> None:
        """Raise ConfigError if parameters are trained and none of any module got a gradient."""
        trained = [module for module, (_, count) in self.usage.items() if count]
        if trained and not any(count for count, _ in self.usage.values()):
            named = ", ".join(repr(module) for module in trained if module)
            raise ConfigError(
                f"{name}: no parameter{f' of {named}' if named else ''} got a gradient on any rank "
                f"since the last step; call backward first, on the loss of the model that the "
                f"optimizer was built for"
            )


class StepSum:
    """The meaning of each number in the sum.

    Settings are compared by digests of 48 bits, each rank's in its own slot: the sum of a number
    and zeros is exact in float64, and shows which ranks differ.

    Args:
        layouts: of all modules.
        ranks: of all modules, in the same order on every rank.
        loss_module: the one whose ranks count tokens; None without tokens.
        edges: between the modules.
    """

    def __init__(
        self,
        layouts: Mapping[str, Layout],
        *,
        ranks: Sequence[int],
        loss_module: str | None,
        edges: Sequence[tuple[str, str]] = (),
    ) -> None:
        self.terms = {module: NormTerms(layout) for module, layout in layouts.items()}
        """By module, the numbers of its gradients."""
        self._layouts = dict(layouts.items())
        self._ranks = ranks
        self._edges = tuple(edges)
        self._loss_module = loss_module
        with_loss = None if loss_module is None else layouts[loss_module]
        self._loss_ranks = () if with_loss is None else with_loss.ranks
        self._data_ranks = () if with_loss is None else with_loss.groups("tp-pp")
        """Ranks of the module with the loss, by their coordinate of `dp_cp`."""
        self._stages = [
            (module, ranks)
            for module, layout in layouts.items()
            for ranks in layout.groups("tp-cp-dp")
        ]
        """Ranks of one stage of a module: each stage may have its own hyperparameters."""
        self._digests: dict[str | None, tuple[str, float]] = {}
        """By module, and None for the settings of the step: the last entries and their digest."""

    def pack(self, mine: Contribution, *, rank: int) -> list[float]:
        """Return this rank's numbers; every rank has the same number of them."""

        def slots(ranks: Iterable[int], value: float) -> list[float]:
            return [value if each == rank else 0.0 for each in ranks]

        digest = _FAILED if mine.has_failed else self._digest(None, mine.settings)
        values = slots(self._ranks, digest)
        values += [float(not mine.is_finite), float(bool(mine.vetoes))]
        for module, terms in self.terms.items():
            values += mine.terms.get(module, [0.0] * terms.size)
            values += mine.usage.get(module, (0, 0))
            values.append(mine.num_new.get(module, 0))
            settings = [mine.hyperparameters.get(module, []), mine.turns.get(module, [])]
            values += slots(self._layouts[module].ranks, self._digest(module, settings))
        values += [float(edge in mine.carried) for edge in self._edges]
        # One more than the tokens: 0 is the slot of a rank that does not count.
        count = 0 if mine.num_tokens is None else mine.num_tokens + 1
        return values + slots(self._loss_ranks, float(count))

    def read(self, sums: Sequence[float]) -> StepSums:
        """Return what the sums of all ranks' numbers mean: the inverse of `pack`."""
        rest = iter(sums)

        def slots(ranks: Sequence[int]) -> dict[int, float]:
            return {rank: next(rest) for rank in ranks}

        settings = slots(self._ranks)
        num_bad_losses, num_vetoes = int(next(rest)), int(next(rest))
        gradients: dict[str, GradientSums] = {}
        usage: dict[str, tuple[int, int]] = {}
        num_new: dict[str, int] = {}
        digests: dict[str, dict[int, float]] = {}
        for module, terms in self.terms.items():
            gradients[module] = terms.read([next(rest) for _ in range(terms.size)])
            usage[module] = int(next(rest)), int(next(rest))
            num_new[module] = int(next(rest))
            digests[module] = slots(self._layouts[module].ranks)
        carried = tuple(edge for edge in self._edges if next(rest))
        counts = {rank: int(each) - 1 for rank, each in slots(self._loss_ranks).items()}
        return StepSums(
            gradients=gradients,
            usage=usage,
            num_new=num_new,
            failed=tuple(sorted(rank for rank, each in settings.items() if each == _FAILED)),
            settings=settings,
            differ=len(set(settings.values())) > 1
            or any(
                len({digests[module][rank] for rank in ranks}) > 1 for module, ranks in self._stages
            ),
            num_bad_losses=num_bad_losses,
            num_vetoes=num_vetoes,
            tokens={rank: None if count < 0 else count for rank, count in counts.items()},
            carried=carried,
        )

    def refuse_numbers(
        self, sums: StepSums, mine: Contribution, *, last_number: int, name: str
    ) -> None:
        """Raise ConfigError if ranks step different optimizers, with the same settings.

        Known from the digests alone: an exchange need not come about, because each of the
        optimizers may have groups, and so a control, of its own on the same communicators.

        Args:
            sums: of the step.
            mine: this rank's contribution to them.
            last_number: of the optimizers on these communicators.
            name: of this rank's optimizer.
        """
        numbers = {
            _digest_of({**mine.settings, _NUMBER: number}): number
            for number in range(1, last_number + 1)
        }
        by_rank = {rank: numbers.get(digest) for rank, digest in sums.settings.items()}
        if None not in by_rank.values():
            refuse_different({r: {_NUMBER: number} for r, number in by_rank.items()}, where=name)

    def refuse_differences(self, described: Mapping[int, bytes], *, name: str) -> NoReturn:
        """Raise ConfigError that names a setting and the values of all ranks.

        Args:
            described: by rank, `Contribution.described`.
            name: of the optimizer.
        """
        answers = {rank: json.loads(each) for rank, each in described.items()}
        refuse_different({rank: answers[rank][0] for rank in self._ranks}, where=name)
        for module, ranks in self._stages:
            by_rank = {
                rank: {
                    **_named(answers[rank][1].get(module, [])),
                    _TURNS: answers[rank][2].get(module, []),
                }
                for rank in ranks
            }
            refuse_different(by_rank, where=f"{name}: module {module!r}" if module else name)
        raise ConfigError(f"{name}: ranks differ in settings of the step. Nothing was updated")

    def _digest(self, key: str | None, entries: Any) -> float:
        """Return an integer of at least 1 that a float64 holds exactly; equal for equal entries."""
        now = repr(entries)
        before, digest = self._digests.get(key, ("", _FAILED))
        if before != now:  # seldom: a digest takes longer than `repr`
            digest = _digest_of(entries)
            self._digests[key] = now, digest
        return digest

    def total_tokens(self, sums: StepSums) -> int | None:
        """Return the loss tokens of all data ranks, each counted once; None if no rank counts them.

        A data rank is a coordinate of `dp_cp` of the module with the loss. Those of its ranks that
        pass a count (tensor ranks, pipeline stages) pass the same; the others pass None.

        Raises:
            ConfigError: On all ranks: counts of one data rank differ, a data rank has none while
                another has one, or the total is 0.
        """
        if all(count is None for count in sums.tokens.values()):
            return None
        total = 0
        where = f"num_tokens of module {self._loss_module!r}"
        for ranks in self._data_ranks:
            counts = {rank: sums.tokens[rank] for rank in ranks if sums.tokens[rank] is not None}
            if not counts:
                raise ConfigError(
                    f"{where}: none of the ranks {shorten_ranks(ranks)}, which have the same "
                    f"samples, has passed a count, but other ranks have; ranks with the loss pass "
                    f"num_tokens= in each step, 0 if they have no token"
                )
            if len(set(counts.values())) > 1:
                listed = ", ".join(f"{count} on rank {rank}" for rank, count in counts.items())
                raise ConfigError(
                    f"{where}: ranks with the same samples count different tokens: {listed}; "
                    f"tensor ranks pass equal counts, context ranks count their own positions"
                )
            total += next(iter(counts.values())) or 0
        if not total:
            raise ConfigError(
                f"{where}: no data rank has any token in this step, so its gradient has no mean. "
                f"Nothing was updated, and gradients are forgotten. Leave such a batch out, or "
                f"catch this error on all ranks and continue with the next one"
            )
        return total


def refuse_different(by_rank: Mapping[int, Mapping[str, Any]], *, where: str) -> None:
    """Raise ConfigError that names the first entry that is not equal on all ranks, if any."""
    for key in dict.fromkeys(key for entries in by_rank.values() for key in entries):
        values = {
            rank: _shown(entries[key]) if key in entries else "absent"
            for rank, entries in by_rank.items()
        }
        if len({*values.values()}) > 1:
            listed = values_by_rank(values)
            reason = _REASONS.get(key, "ranks that share parameters make the same updates")
            raise ConfigError(
                f"{where}: ranks differ in {key}: {listed}; {reason}. Nothing was updated"
            )


def _digest_of(entries: object) -> float:
    number = hashlib.blake2b(_text(entries), digest_size=6).digest()
    return float(int.from_bytes(number) + 1)


def _named(groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return hyperparameters by their names in messages."""
    return {
        f"{key} of parameter group {number}": value
        for number, group in enumerate(groups)
        for key, value in group.items()
    }


def _text(entries: object) -> bytes:
    """Return a text that is equal on two ranks if, and only if, the entries are."""
    return json.dumps(_plain(entries), default=repr).encode()


def _plain(value: object) -> object:
    """Return one form for equal values: 1 and 1.0, a tuple and a list are the same setting."""
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, bool):
        return value
    return float(value) if isinstance(value, Real) else value  # numpy's, too


def _shown(value: object) -> str:
    """Return a value in the fewest digits that show it exactly."""
    is_short = isinstance(value, float) and float(f"{value:g}") == value
    return f"{value:g}" if is_short else str(value)
