"""When a validated value is rejected: rules, and what they learn from accepted values."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from holdfast.errors import ConfigError, CorruptionError
from holdfast.rerun.kept_trees import is_sparse
from holdfast.rerun.values import Value, describe, plain_tensor


@runtime_checkable
class Rule(Protocol):
    """Decides on one value of a validation call. It holds no state of its own."""

    @property
    def window(self) -> int:
        """How many of the call's last accepted values the rule looks at; 0: none are kept."""
        ...

    def rejects(self, value: Value, accepted: Sequence[float]) -> str | None:
        """Why the value is rejected, in words; None where it is accepted.

        Args:
            value: a number or a tensor; of a tensor every element counts.
            accepted: what the call has learned, oldest first: `Learned.of(name)`.
        """
        ...


@dataclass(frozen=True, slots=True)
class NotFinite:
    """Rejects NaN and infinities. Cost: one pass over a tensor, and a wait for its device."""

    @property
    def window(self) -> int:
        """Nothing is learned."""
        return 0

    def rejects(self, value: Value, accepted: Sequence[float]) -> str | None:
        """See `Rule`."""
        return IsNaN().rejects(value, accepted) or IsInf().rejects(value, accepted)


@dataclass(frozen=True, slots=True)
class IsNaN:
    """Rejects NaN."""

    @property
    def window(self) -> int:
        """Nothing is learned."""
        return 0

    def rejects(self, value: Value, accepted: Sequence[float]) -> str | None:
        """See `Rule`."""
        if isinstance(value, torch.Tensor):
            return _in_words("NaN", value, _elements(value).isnan())
        is_nan = value != value
        return "it is NaN" if is_nan else None


@dataclass(frozen=True, slots=True)
class IsInf:
    """Rejects infinities of either sign."""

    @property
    def window(self) -> int:
        """Nothing is learned."""
        return 0

    def rejects(self, value: Value, accepted: Sequence[float]) -> str | None:
        """See `Rule`."""
        if isinstance(value, torch.Tensor):
            return _in_words("infinite", value, _elements(value).isinf())
        is_inf = math.inf in (abs(value.real), abs(value.imag))
        return "it is infinite" if is_inf else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Spike:
    """Rejects what is much larger than usual: |value| > factor x median of accepted |values|.

    Of a tensor its largest finite element counts. NaN and infinities are left to other rules. While
    the median is zero there is no scale, and nothing is rejected. A rejected value is not learned,
    so values that stay at a new level stay rejected.

    Args:
        factor: greater than 1.
        num_samples: accepted values before the rule begins to reject.
        window: how many of the last accepted values the median is of; at least `num_samples`.

    Raises:
        ConfigError: For settings that contradict this.
    """

    factor: float = 10.0
    num_samples: int = 100
    window: int = 100

    def __post_init__(self) -> None:
        """Check the settings."""
        if not (math.isfinite(self.factor) and self.factor > 1):
            raise ConfigError(f"Spike(factor={self.factor!r}): it is a finite number above 1")
        if not 1 <= self.num_samples <= self.window:
            raise ConfigError(
                f"Spike(num_samples={self.num_samples}, window={self.window}): num_samples is at "
                f"least 1 and at most window, of which the median is taken"
            )

    def rejects(self, value: Value, accepted: Sequence[float]) -> str | None:
        """See `Rule`."""
        if len(accepted) < self.num_samples:
            return None
        size = magnitude(value)
        usual = statistics.median(accepted[-self.window :])
        if size is None or usual == 0 or size <= self.factor * usual:
            return None
        return (
            f"its magnitude {size:.6g} is more than {self.factor:g} times {usual:.6g}, the median "
            f"of the last {min(len(accepted), self.window)} accepted ones"
        )


@dataclass(frozen=True, slots=True)
class Rejects:
    """Rejects what a function of the caller's says: `Rejects(lambda x: x < 0, "a negative loss")`.

    Args:
        predicate: value -> whether it is rejected; the same on every call with one value.
        message: what is wrong with a rejected value, for messages and reports.

    Raises:
        ConfigError: They are not a function and a text.
    """

    predicate: Callable[[Value], object]
    message: str

    def __post_init__(self) -> None:
        """Check the arguments."""
        if not callable(self.predicate) or not isinstance(self.message, str):
            raise ConfigError(
                f"Rejects({self.predicate!r}, {self.message!r}): it takes a function of the value "
                f"and a text"
            )

    @property
    def window(self) -> int:
        """Nothing is learned."""
        return 0

    def rejects(self, value: Value, accepted: Sequence[float]) -> str | None:
        """See `Rule`. ConfigError where the predicate returns a tensor of several elements."""
        verdict = self.predicate(value)
        if isinstance(verdict, torch.Tensor) and verdict.numel() != 1:
            raise ConfigError(
                f"Rejects({self.message!r}): its predicate returned a tensor of shape "
                f"{tuple(verdict.shape)}; return one truth value, such as .any() of it"
            )
        return self.message if verdict else None


@dataclass(frozen=True, slots=True, init=False)
class RejectsAny:
    """Rejects what any of its rules rejects; the first one gives the reason."""

    rules: tuple[Rule, ...]

    def __init__(self, *rules: Rule) -> None:
        """Take the rules in the order in which they are tried; ConfigError without any."""
        if not rules:
            raise ConfigError("RejectsAny() has no rules: it would accept everything; name one")
        object.__setattr__(self, "rules", rules)

    @property
    def window(self) -> int:
        """The largest of its rules'."""
        return max(rule.window for rule in self.rules)

    def rejects(self, value: Value, accepted: Sequence[float]) -> str | None:
        """See `Rule`."""
        reasons = (rule.rejects(value, accepted) for rule in self.rules)
        return next((reason for reason in reasons if reason is not None), None)


class Learned:
    """Magnitudes of accepted values by validation call, of accepted steps alone.

    Values are staged while a step is attempted: `commit` when it is accepted, `discard` when it is
    rejected or run again, so that no value is learned twice. Part of the checkpoint, so that a
    resume knows what was usual.
    """

    def __init__(self) -> None:
        """Nothing is learned yet."""
        self._accepted: dict[str, list[float]] = {}
        self._windows: dict[str, int] = {}
        """How many are kept of each call."""
        self._staged: list[tuple[str, float, int]] = []

    def of(self, name: str) -> Sequence[float]:
        """What a call has learned in accepted steps, oldest first; not to be changed."""
        return self._accepted.get(name, ())

    def accept(self, name: str, value: Value, *, window: int) -> None:
        """Stage the magnitude of an accepted value; NaN and infinities are passed over.

        Args:
            name: of the validation call.
            value: what was accepted.
            window: that of the call's rule; 0: nothing is kept, at no cost.
        """
        if window == 0:
            return
        size = magnitude(value, only_finite=True)
        if size is not None:
            self._staged.append((name, size, window))

    def commit(self) -> None:
        """Learn what is staged: the step is accepted."""
        for name, size, window in self._staged:
            accepted = self._accepted.setdefault(name, [])
            self._windows[name] = window
            accepted.append(size)
            del accepted[:-window]
        self._staged.clear()

    def discard(self) -> None:
        """Forget what is staged: the step is run again, or given up."""
        self._staged.clear()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Magnitudes by the name of the call, without what is only staged.

        Each tensor is as long as the window of its rule, filled up with NaN, which is never
        learned: so its shape is the same in every save.
        """
        return {
            name: torch.tensor(
                [*sizes, *[math.nan] * (self._windows[name] - len(sizes))], dtype=torch.float64
            )
            for name, sizes in self._accepted.items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what another process learned, in the place of everything here.

        Raises:
            CorruptionError: It is not what `state_dict` makes. Nothing has changed then.
        """
        for name, sizes in state.items():
            is_known = isinstance(sizes, torch.Tensor) and sizes.dtype == torch.float64
            if not is_known or sizes.dim() != 1:
                raise CorruptionError(
                    f"what the call {name!r} has learned is not a list of numbers in this "
                    f"checkpoint; load an older one, or continue without it"
                )
        self._accepted = {name: sizes[~sizes.isnan()].tolist() for name, sizes in state.items()}
        self._windows = {name: len(sizes) for name, sizes in state.items()}
        self._staged.clear()


def magnitude(value: Value, *, only_finite: bool = False) -> float | None:
    """The largest |element| that is finite, as a float; None where none is.

    Args:
        value: a number or a tensor; of a DTensor what this rank has of it.
        only_finite: None as well where any element is NaN or infinite.

    Cost: one pass over a tensor in float64, and a wait for its device.
    """
    if not isinstance(value, torch.Tensor):
        try:
            size = float(abs(value))
        except OverflowError:  # an integer beyond every float
            return None
        return size if math.isfinite(size) else None
    with torch.no_grad():
        elements = _elements(value)
        wide = elements.to(torch.complex128 if elements.is_complex() else torch.float64)
        sizes = wide.abs().reshape(-1)
        is_finite = sizes.isfinite()
        finite = sizes[is_finite]
        if finite.numel() == 0 or (only_finite and finite.numel() < sizes.numel()):
            return None
        return float(finite.max())


def _elements(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of this rank, in a form for which torch has `isnan`, `isinf` and `abs`.

    Of a sparse tensor those that it stores: all others are zero.
    """
    local = plain_tensor(tensor)
    if is_sparse(local):
        local = local.values()
    if local.is_floating_point() and local.element_size() == 1:
        return local.to(torch.float32)
    return local.to(torch.complex64) if local.dtype == torch.complex32 else local


def _in_words(fault: str, value: torch.Tensor, is_faulty: torch.Tensor) -> str | None:
    """That a tensor has faulty elements, and how many; None where it has none."""
    num = int(is_faulty.sum())
    if num == 0:
        return None
    if value.dim() == 0:
        return f"it is {describe(value)}" if fault != "NaN" else "it is NaN"
    return f"{num} of its {is_faulty.numel()} elements {'is' if num == 1 else 'are'} {fault}"
