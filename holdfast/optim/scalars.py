"""Numbers that an optimizer keeps about several elements, compared between ranks in every step.

An optimizer that joins elements (a step size learned from all of them) computes other numbers from
each rank's shards, and then trains them in different ways. A trial before training cannot show
everything; these numbers can, at the step in which they part.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor

from holdfast.errors import ConfigError, values_by_rank
from holdfast.optim.torch_interface import torch_optimizers
from holdfast.parallel import Layout

Numbers = dict[str, float]
"""By their names in messages."""
_Key = tuple[int, str]
"""Of a number in a parameter group: the group's number, and the name in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Border:
    """The place at which a parameter is cut between the shards of two ranks."""

    place: str
    """The same on both ranks, and at no other border."""
    is_end: bool
    """True on the rank whose shard ends there, False on the one whose shard starts there."""
    numbers: Numbers
    """Of the state of the parameter, which both ranks must have alike."""


class Watched(Protocol):
    """What is asked of a stepper."""

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The torch optimizer."""

    def borders(self) -> list[Border]:
        """Return the borders of this rank's shards."""


class ScalarWatch:
    """Compares numbers that steps change, in groups and in states, between the ranks of a module.

    In `param_groups` those of one pipeline stage are compared, except ranks on which some group got
    no gradient. In states those of the parameters that are cut between two ranks are compared;
    those on a device are not, which would wait for it.

    Args:
        layouts: of all modules.
    """

    def __init__(self, layouts: Mapping[str, Layout]) -> None:
        self._layouts = dict(layouts.items())
        # Once: a step that went through the ranks for it would cost more with each of them.
        self._stages = {m: layout.groups("tp-cp-dp") for m, layout in layouts.items()}
        self._before: dict[str, dict[_Key, float]] = {}
        self._changing: dict[str, set[_Key]] = {}
        self._of_groups: dict[str, Numbers] = {}
        """By module, what this rank states; not for a rank on which a group got no gradient."""
        self._borders: list[Border] = []
        self.has_missed_update = False
        """True from an update that failed on some ranks, until all have equal numbers again."""

    def before_update(self, steppers: Mapping[str, Watched]) -> None:
        """Remember the numbers before an update."""
        self._of_groups, self._borders = {}, []
        self._before = {m: _numbers(_groups(each.optimizer)) for m, each in steppers.items()}

    def after_update(self, steppers: Mapping[str, Watched]) -> None:
        """Look at the numbers after an update, while gradients are there."""
        for module, stepper in steppers.items():
            groups = _groups(stepper.optimizer)
            now, before = _numbers(groups), self._before[module]
            changing = self._changing.setdefault(module, set())
            for key, number in now.items():
                # Most are the same object, which needs no text; a NaN is not equal to itself.
                if number is not before.get(key) and repr(number) != repr(before.get(key)):
                    changing.add(key)
            if all(any(p.grad is not None for p in group["params"]) for group in groups):
                self._of_groups[module] = {
                    f"'{key}' of parameter group {group}": now[group, key]
                    for group, key in sorted(changing)
                    if (group, key) in now
                }
            self._borders += stepper.borders()

    def pack(self, *, rank: int) -> list[float]:
        """Return this rank's numbers of a sum over all ranks; every rank has as many."""
        # What ends on one rank is added, what starts on the next one subtracted: equal ones cancel.
        values = [
            float(sum((1 if b.is_end else -1) * _digest(b.place, b.numbers) for b in self._borders))
        ]
        for module, layout in self._layouts.items():
            numbers = self._of_groups.get(module)
            digest = 0.0 if numbers is None else float(_digest(module, numbers))
            values += [digest if each == rank else 0.0 for each in layout.ranks]
        return values

    def has_parted(self, sums: Sequence[float]) -> bool:
        """Return True if the sums of all ranks' numbers show that some differ."""
        borders, *rest = sums
        digests = iter(rest)
        parted = borders != 0
        for module, layout in self._layouts.items():
            by_rank = {rank: next(digests) for rank in layout.ranks}
            for ranks in self._stages[module]:
                parted |= len({by_rank[rank] for rank in ranks} - {0.0}) > 1
        self.has_missed_update &= parted
        return parted

    def described(self) -> bytes:
        """Return all numbers of this rank, for `refuse`."""
        borders = [[b.place, b.numbers] for b in self._borders]
        return json.dumps([self._of_groups, borders]).encode()

    def refuse(self, described: Mapping[int, bytes], *, name: str) -> NoReturn:
        """Raise ConfigError that names a number and the values of all ranks.

        Args:
            described: by rank, `described`.
            name: of the optimizer.
        """
        answers = {rank: json.loads(each) for rank, each in described.items()}
        advice = _MISSED if self.has_missed_update else _ADVICE
        for module, stages in self._stages.items():
            for ranks in stages:
                stated = {rank: answers[rank][0].get(module) for rank in ranks}
                what = f"module {module!r}: " if module else ""
                _refuse(
                    {r: n for r, n in stated.items() if n is not None}, f"{name}: {what}", advice
                )
        places = dict.fromkeys(place for _, borders in answers.values() for place, _ in borders)
        for place in places:
            by_rank = {r: dict(borders).get(place) for r, (_, borders) in answers.items()}
            _refuse({r: n for r, n in by_rank.items() if n is not None}, f"{name}: ", advice)
        raise ConfigError(f"{name}: ranks differ in numbers of the optimizer. {advice}")


_ADVICE = (
    "Its shards were updated in different ways in this step: the optimizer joins elements. Load "
    "the last checkpoint, and take an optimizer that updates elements one by one, or keep its "
    "parameters whole, in a ReducedOptimizer"
)
_MISSED = (
    "An update before this one has failed on some ranks, and the others have made it, so their "
    "shards are of different steps: load the last checkpoint"
)


def numbers_of(state: Mapping[str, Any], *, name: str) -> Numbers:
    """Return the numbers on the host in the state of a parameter."""
    numbers = {f"'{key}' of the state of {name}": _number(value) for key, value in state.items()}
    return {key: number for key, number in numbers.items() if number is not None}


def _groups(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [group for inner in torch_optimizers([optimizer]) for group in inner.param_groups]


def _numbers(groups: Iterable[Mapping[str, Any]]) -> dict[_Key, float]:
    """Return the numbers in parameter groups."""
    return {
        (position, key): number
        for position, group in enumerate(groups)
        for key, value in group.items()
        if (number := _number(value)) is not None
    }


def _number(value: object) -> float | None:
    """Return a number on the host, or None for anything else."""
    if type(value) is float:  # most of them, several times in every step
        return value
    if value is None or isinstance(value, bool | list):
        return None
    if isinstance(value, Tensor):
        is_scalar = value.ndim == 0 and value.device.type == "cpu" and not value.is_complex()
        return float(value) if is_scalar else None
    if isinstance(value, int):
        return float(value) if abs(value) < 2**1000 else None
    return float(value) if isinstance(value, Real) else None  # numpy's, too


def _digest(place: str, numbers: Numbers) -> int:
    """Return an integer from 1 to 2**32: sums of many are exact in float64."""
    text = json.dumps([place, numbers], sort_keys=True).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=4).digest()) + 1


def _refuse(by_rank: Mapping[int, Mapping[str, float]], where: str, advice: str) -> None:
    """Raise ConfigError that names the first number that is not equal on all of some ranks."""
    for key in dict.fromkeys(key for numbers in by_rank.values() for key in numbers):
        values = {rank: repr(numbers.get(key, "absent")) for rank, numbers in by_rank.items()}
        if len({*values.values()}) > 1:
            listed = values_by_rank(values)
            raise ConfigError(f"{where}ranks differ in {key} after the update: {listed}. {advice}")
