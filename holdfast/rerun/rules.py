"""Rules that reject validated values, and the accepted values that rules learn from."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch

from holdfast.arguments import check_int, check_number
from holdfast.errors import ConfigError, CorruptionError
from holdfast.rerun.values import Value, magnitude


@runtime_checkable
class Rule(Protocol):
    """Decides whether a value is rejected. It has no state: the machine keeps what it learns."""

    @property
    def window(self) -> int:
        """The number of the call's last accepted values that the rule looks at; 0 to keep none."""
        ...

    def rejects(self, value: Value, accepted: Sequence[float]) -> str | None:
        """Return in words why the value is rejected, or None if it is accepted.

        Args:
            value: a float, or a tuple of them, all of which count.
            accepted: magnitudes of the call's accepted values, oldest first: `Learned.of(name)`.
        """
        ...


@dataclass(frozen=True, slots=True)
class NotFinite:
    """Rejects NaN and infinities."""

    window: ClassVar[int] = 0

    def rejects(self, value: Value, accepted: Sequence[float]) -> str | None:
        """See `Rule`."""
        return IsNaN().rejects(value, accepted) or IsInf().rejects(value, accepted)


@dataclass(frozen=True, slots=True)
class IsNaN:
    """Rejects NaN."""

    window: ClassVar[int] = 0

    def rejects(self, value: Value, accepted: Sequence[float]) -> str | None:
        """See `Rule`."""
        return _in_words("NaN", value, math.isnan)


@dataclass(frozen=True, slots=True)
class IsInf:
    """Rejects infinities of either sign."""

    window: ClassVar[int] = 0

    def rejects(self, value: Value, accepted: Sequence[float]) -> str | None:
        """See `Rule`."""
        return _in_words("infinite", value, math.isinf)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spike:
    """Rejects a value much larger than usual: |value| > factor x median of accepted |values|.

    Of several numbers the largest finite one counts. NaN and infinities are left to other rules. A
    median of zero gives no scale, so nothing is rejected. A rejected value is not learned, so
    values that stay at a new level stay rejected.

    Args:
        factor: greater than 1.
        num_samples: number of accepted values before the rule rejects any.
        window: number of last accepted values that the median is taken of; at least `num_samples`.

    Raises:
        ConfigError: an argument is out of its range.
    """

    factor: float = 10.0
    num_samples: int = 100
    window: int = 100

    def __post_init__(self) -> None:
        """Check the settings."""
        check_number(self.factor, name="Spike: factor", above=1, is_finite=True)
        least = check_int(self.num_samples, name="Spike: num_samples", least=1)
        hint = f" (num_samples is {least}: the median is taken of the window)"
        check_int(self.window, name="Spike: window", least=least, hint=hint)

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
    """Rejects a value by a function of the caller: `Rejects(lambda x: x < 0, "a negative loss")`.

    Args:
        predicate: returns True for a value to reject; always the same for the same value.
        message: says what is wrong with a rejected value, for messages and reports.

    Raises:
        ConfigError: `predicate` is not a function, or `message` is not a string.
    """

    predicate: Callable[[Value], object]
    message: str
    window: ClassVar[int] = 0

    def __post_init__(self) -> None:
        """Check the arguments."""
        if not callable(self.predicate) or not isinstance(self.message, str):
            raise ConfigError(
                f"Rejects({self.predicate!r}, {self.message!r}): pass a function of the value and "
                f"a string"
            )

    def rejects(self, value: Value, accepted: Sequence[float]) -> str | None:
        """See `Rule`."""
        return self.message if self.predicate(value) else None


@dataclass(frozen=True, slots=True, init=False)
class RejectsAny:
    """Rejects a value if any of its rules does; the first such rule gives the reason."""

    rules: tuple[Rule, ...]

    def __init__(self, *rules: Rule) -> None:
        """Take the rules in the order in which they are tried; ConfigError without any."""
        if not rules:
            raise ConfigError("RejectsAny() would accept everything; pass at least one rule")
        object.__setattr__(self, "rules", rules)

    @property
    def window(self) -> int:
        """The largest window of its rules."""
        return max(rule.window for rule in self.rules)

    def rejects(self, value: Value, accepted: Sequence[float]) -> str | None:
        """See `Rule`."""
        reasons = (rule.rejects(value, accepted) for rule in self.rules)
        return next((reason for reason in reasons if reason is not None), None)


def gradient_norm(*, factor: float = 10.0, num_samples: int = 100, window: int = 100) -> RejectsAny:
    """Return a rule for the norm of gradients: rejects what is not finite, and spikes.

    Args:
        factor, num_samples, window: see `Spike`.
    """
    return RejectsAny(NotFinite(), Spike(factor=factor, num_samples=num_samples, window=window))


def update_norm(
    *, largest: float = 0.1, factor: float = 10.0, num_samples: int = 100, window: int = 100
) -> RejectsAny:
    """Return a rule for the norm of an update relative to that of the parameters.

    For `RerunMachine.observe` after the optimizer's step: an update of a tenth of the parameters is
    not ordinary, whatever the norm of the gradient was.

    Args:
        largest: relative update above which it is rejected, above 0.
        factor, num_samples, window: see `Spike`.

    Raises:
        ConfigError: an argument is out of its range.
    """
    limit = check_number(largest, name="update_norm: largest", above=0, is_finite=True)
    return RejectsAny(
        NotFinite(),
        Rejects(partial(_is_larger, limit), f"it is more than {limit:g} of the parameters"),
        Spike(factor=factor, num_samples=num_samples, window=window),
    )


def _is_larger(limit: float, value: Value) -> bool:
    size = magnitude(value)
    return size is not None and size > limit


class Learned:
    """Magnitudes of accepted values by validation call, only of accepted steps.

    Values are staged while a step runs: `commit` when it is accepted, `discard` when it is rejected
    or run again, so that no value is learned twice. The magnitudes are in the checkpoint, so that a
    resumed run knows what was usual.
    """

    def __init__(self) -> None:
        """Start without any magnitude."""
        self._accepted: dict[str, list[float]] = {}
        self._windows: dict[str, int] = {}
        """Number of magnitudes to keep for each call."""
        self._staged: list[tuple[str, float, int]] = []

    def of(self, name: str) -> Sequence[float]:
        """Return the magnitudes of a call in accepted steps, oldest first; do not change them."""
        return self._accepted.get(name, ())

    def accept(self, name: str, value: Value, *, window: int) -> None:
        """Stage the magnitude of an accepted value; NaN and infinities are passed over.

        Args:
            name: of the validation call.
            value: the accepted value.
            window: of the call's rule; 0 to keep nothing, at no cost.
        """
        if window == 0:
            return
        size = magnitude(value, only_finite=True)
        if size is not None:
            self._staged.append((name, size, window))

    def commit(self) -> None:
        """Learn the staged values: the step is accepted."""
        for name, size, window in self._staged:
            accepted = self._accepted.setdefault(name, [])
            self._windows[name] = window
            accepted.append(size)
            del accepted[:-window]
        self._staged.clear()

    def discard(self) -> None:
        """Forget the staged values: the step is run again, or given up."""
        self._staged.clear()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the magnitudes by the name of the call, without staged ones.

        Each tensor is as long as the window of its rule, so that its shape is the same in every
        save. It is filled up with NaN, which is never learned.
        """
        return {
            name: torch.tensor(
                [*sizes, *[math.nan] * (self._windows[name] - len(sizes))], dtype=torch.float64
            )
            for name, sizes in self._accepted.items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace all magnitudes by those of another process.

        Raises:
            CorruptionError: `state_dict` does not return such a state. Nothing has changed then.
        """
        for name, sizes in state.items():
            is_known = isinstance(sizes, torch.Tensor) and sizes.dtype == torch.float64
            if not is_known or sizes.dim() != 1:
                raise CorruptionError(
                    f"the magnitudes of the call {name!r} are not a list of numbers in this "
                    f"checkpoint; load an older one, or continue without them"
                )
        self._accepted = {name: sizes[~sizes.isnan()].tolist() for name, sizes in state.items()}
        self._windows = {name: len(sizes) for name, sizes in state.items()}
        self._staged.clear()


def _in_words(fault: str, value: Value, is_faulty: Callable[[float], bool]) -> str | None:
    """Say how many elements of a value are faulty; None if there are none."""
    if not isinstance(value, tuple):
        return f"it is {fault}" if is_faulty(value) else None
    num = sum(map(is_faulty, value))
    if num == 0:
        return None
    return f"{num} of its {len(value)} elements {'is' if num == 1 else 'are'} {fault}"
