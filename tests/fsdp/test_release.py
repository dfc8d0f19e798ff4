"""What a sharded model leaves in its process when nothing refers to it any more."""

from __future__ import annotations

import gc
import os
import weakref

from holdfast import Layout, ProcessGroups
from tests.fsdp.common import STRATEGIES, build, place, sgd, shard, train
from tests.harness import RankContext, run_ranks


def trained_and_dropped(context: RankContext) -> list[tuple[str, bool, int]]:
    """By strategy: whether the model is still there, and the number of new threads."""
    left = []
    for strategy in STRATEGIES:
        before = len(os.listdir("/proc/self/task"))
        model = trained(strategy)
        gc.collect()
        left.append((strategy, model() is not None, len(os.listdir("/proc/self/task")) - before))
    return [each for each in left if each[1] or each[2] > 0]


def trained(strategy: str) -> weakref.ref[object]:
    with ProcessGroups.create(Layout(dp=2)) as groups:
        net = place(build(), groups)
        sharded = shard(net, groups, strategy=strategy)
        train(sharded, sgd(net.parameters()), steps=1)
    return weakref.ref(sharded)


def test_a_model_that_was_trained_goes_with_its_communicators() -> None:
    """Before, a hook at gradients kept each model for ever: Python's collector does not see it."""
    for left in run_ranks(2, trained_and_dropped).results:
        assert left == []
