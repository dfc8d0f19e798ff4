"""Bridges in real processes against one process that concatenates and narrows (M16)."""

from __future__ import annotations

import pytest
import torch

from holdfast.parallel import Layout
from tests.bridge.steps import Batch, Step, check_step, random_step
from tests.harness import RankContext, run_ranks

UNEVEN = Batch(counts=((3, 0), (1, 2, 4)), seed=1)
"""Two pieces of one source data rank or two, of other numbers of samples."""
EVEN = Batch(counts=((3, 0), (1, 2)), seed=2)
"""Two pieces with equally many samples, as one source data rank has them."""
PLAIN = {
    "fan-in": (Layout(dp=2), Layout(ranks=(2,)), UNEVEN),
    "fan-out": (Layout(), Layout(dp=2, ranks=(1, 2)), EVEN),
    "equal": (Layout(dp=2), Layout(dp=2, ranks=(2, 3)), UNEVEN),
    "one sample without tokens each": (
        Layout(dp=2),
        Layout(dp=2, ranks=(2, 3)),
        Batch(counts=((0,), (0,)), seed=3),
    ),
    "one data rank without samples": (
        Layout(dp=2),
        Layout(ranks=(2,)),
        Batch(counts=((), (2, 2)), seed=4),
    ),
    "no samples at all": (Layout(dp=2), Layout(ranks=(2,)), Batch(counts=((), ()), seed=5)),
    "tp replicas take": (Layout(dp=2), Layout(tp=2, ranks=(2, 3)), UNEVEN),
    "tp replicas give": (Layout(tp=2), Layout(dp=2, ranks=(3, 2)), EVEN),
    "cp shares are added": (Layout(), Layout(cp=3, ranks=(1, 2, 3)), Batch(counts=((5,),), seed=6)),
    "cp shares of bf16": (
        Layout(),
        Layout(cp=3, ranks=(1, 2, 3)),
        Batch(counts=((50,),), seed=7, dtype=torch.bfloat16),
    ),
    "cp replicas give": (Layout(cp=2), Layout(cp=2, ranks=(2, 3)), Batch(counts=((2, 1),), seed=8)),
    "stages at both ends": (
        Layout(pp=2),
        Layout(pp=2, ranks=(2, 3)),
        Batch(counts=((2,),), seed=9),
    ),
    "colocated, equal": (Layout(dp=2), Layout(dp=2), UNEVEN),
    "colocated, crossed": (Layout(dp=2), Layout(dp=2, ranks=(1, 0)), UNEVEN),
    "colocated, fan-in": (
        Layout(dp=4),
        Layout(dp=2, tp=2),
        Batch(counts=((1,), (2,)) * 2, seed=10),
    ),
    "colocated, fan-out": (Layout(tp=2), Layout(dp=2), EVEN),
    "one rank": (Layout(), Layout(), Batch(counts=((2, 1),), seed=11)),
}


def plain_steps(rank: RankContext) -> list[bool]:
    return [
        check_step(
            Step(source=source, destination=destination, batches=(batch, batch), name=name),
            rank.rank,
        )
        for name, (source, destination, batch) in PLAIN.items()
    ]


def test_every_geometry_equals_one_process() -> None:
    """M16: fan-in, fan-out, equal; disjoint and colocated; replicas, stages, empty batches."""
    ran = run_ranks(4, plain_steps).results
    assert [any(each) for each in zip(*ran, strict=True)] == [True] * len(PLAIN)


def generated_steps(rank: RankContext, seeds: range) -> int:
    return sum(check_step(random_step(seed, rank.num_ranks), rank.rank) for seed in seeds)


@pytest.mark.parametrize("seeds", [range(4)])
def test_generated_steps_equal_one_process(seeds: range) -> None:
    """M16: random layouts of up to eight ranks, uneven samples, several forwards at once."""
    assert sum(run_ranks(8, generated_steps, seeds).results) > 3 * len(seeds)


@pytest.mark.parametrize(
    "seeds",
    [
        pytest.param(range(4, 40), marks=pytest.mark.slow),
        pytest.param(range(40, 120), marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_many_generated_steps_equal_one_process(seeds: range) -> None:
    """M16: the same for more of them."""
    found = run_ranks(8, generated_steps, seeds, timeout_s=280).results
    assert sum(found) > 3 * len(seeds)
