"""Interleaved repeats: the machine's noise affects every arm equally."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

Measured = dict[str, float]
"""What one call of an arm measured: quantity -> value."""
Arms = Mapping[str, Callable[[int], Measured]]
"""Name -> what to do in a round; the argument is a number that no other call of a run has."""
Series = dict[str, list[Measured]]
"""Arm -> what it measured in each round."""


def interleave(
    arms: Arms, *, repeats: int, before_each: Callable[[], None], warm_ups: int = 1, first: int = 0
) -> Series:
    """Call every arm once in each round; the warm-ups are dropped.

    In as many rounds as there are arms each arm has each place once, and (for an even number of
    arms) comes after each other one once: what an arm leaves in caches benefits all alike.

    Args:
        arms: what takes turns.
        repeats: rounds that count.
        before_each: called before each call, outside its time: a barrier where several ranks run.
        warm_ups: rounds before them.
        first: calls get the numbers after this one.
    """
    names = list(arms)
    series: Series = {name: [] for name in names}
    number = first
    # A balanced Latin square: 0, 1, n-1, 2, n-2, ..., one more in each round.
    order = [(i + 1) // 2 if i % 2 else -(i // 2) for i in range(len(names))]
    for round_ in range(warm_ups + repeats):
        for name in (names[(place + round_) % len(names)] for place in order):
            before_each()
            number += 1
            measured = arms[name](number)
            if round_ >= warm_ups:
                series[name].append(measured)
    return series


def timed(action: Callable[[], object], name: str = "seconds") -> Measured:
    """Seconds of one call."""
    began = time.perf_counter()
    action()
    return {name: time.perf_counter() - began}


def timed_with_cpu(action: Callable[[], object]) -> Measured:
    """Seconds of one call, and CPU seconds of this process in it."""
    began, cpu = time.perf_counter(), time.process_time()
    action()
    return {"seconds": time.perf_counter() - began, "cpu": time.process_time() - cpu}


def slowest(per_rank: Sequence[Series]) -> Series:
    """The job's series: in each round, of each quantity, the value of the slowest rank."""
    first = per_rank[0]
    return {
        name: [
            {
                quantity: max(series[name][i].get(quantity, 0.0) for series in per_rank)
                for quantity in measured
            }
            for i, measured in enumerate(rounds)
        ]
        for name, rounds in first.items()
    }


def values_of(series: Series, arm: str, quantity: str = "seconds") -> list[float]:
    """All rounds of one quantity of one arm."""
    return [measured[quantity] for measured in series[arm]]


def median_of(series: Series, arm: str, quantity: str = "seconds") -> float:
    """Median over the rounds."""
    return statistics.median(values_of(series, arm, quantity))


def medians(series: Series, arm: str) -> Measured:
    """Medians of all quantities of an arm."""
    return {name: median_of(series, arm, name) for name in series[arm][0]}


def phases_of(series: Series, arm: str) -> Measured:
    """Medians of the phases of an arm, without their prefix."""
    return {
        name.removeprefix("phase "): value
        for name, value in medians(series, arm).items()
        if name.startswith("phase ")
    }
