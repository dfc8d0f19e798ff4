"""Every strategy trains as one process does: F1, F2, F9."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast import Layout, ProcessGroups
from tests.fsdp.common import (
    STEPS,
    STRATEGIES,
    adamw,
    build,
    difference,
    place,
    sgd,
    shard,
    train,
    truth,
)
from tests.harness import RankContext, run_ranks

FOUR: list[dict[str, Any]] = [
    {"dp": 4},
    {"dp": 4, "ep": 2},
    {"dp": 4, "ep": 4},
    {"dp": 2, "cp": 2, "ep": 2, "order": "dp-cp-ep-tp-pp", "ranks": (2, 0, 3, 1)},
    {"dp": 4, "replicas": 2},
    {"dp": 4, "ep": 2, "replicas": 2},
]


def equal_to_one_process(
    context: RankContext, layouts: list[dict[str, Any]], strategies: tuple[str, ...], steps: int
) -> dict[str, tuple[float, float]]:
    """By case, the largest difference of a parameter, and of a loss or norm."""
    found = {}
    truths = {make: truth(make, steps=steps, max_norm=0.7) for make in (sgd, adamw)}
    for number, sizes in enumerate(layouts):
        layout = Layout(**sizes)
        if context.rank not in layout.ranks:
            continue
        with ProcessGroups.create(layout) as groups:
            for strategy in strategies:
                for outer in ("step", "microbatch")[: 1 + (layout.replicas > 1)]:
                    for make in (sgd, adamw):
                        net = place(build(), groups)
                        sharded = shard(net, groups, strategy=strategy, outer_reduction=outer)
                        optimizer = make(net.parameters())
                        seen = train(sharded, optimizer, steps=steps, max_norm=0.7)
                        expected, reference = truths[make]
                        off = max(abs(a[1] - b[1]) for a, b in zip(seen, reference, strict=True))
                        name = "sgd" if make is sgd else "adamw"
                        found[f"{number} {strategy} {outer} {name}"] = (
                            difference(net, expected),
                            off,
                        )
    return found


def check(layouts: list[dict[str, Any]], strategies: tuple[str, ...], *, steps: int) -> None:
    for found in run_ranks(
        4, equal_to_one_process, layouts, strategies, steps, timeout_s=280
    ).results:
        assert found
        for case, (parameters, norms) in found.items():
            assert parameters < 1e-6, (case, parameters)
            assert norms < 1e-5, (case, norms)


def test_four_ranks_train_as_one() -> None:
    """F1, F2, F9: dense, experts and hybrid; SGD shows a wrong divisor, AdamW does not."""
    check([FOUR[1], FOUR[4]], ("optim", "optim_grads_params"), steps=2)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_on_every_layout(strategy: str) -> None:
    """F1, F2, F9: odd orders, permuted ranks, ep over all ranks, hybrid with experts."""
    check(FOUR, (strategy,), steps=STEPS)
