"""What a sharded optimizer leaves in its process when nothing refers to it any more."""

from __future__ import annotations

import gc
import os
import weakref
from functools import partial

import torch
from torch import nn

from holdfast import Layout, ProcessGroups, ShardedOptimizer
from tests.harness import RankContext, run_ranks


def trained_and_dropped(context: RankContext) -> list[tuple[str, list[bool], int]]:
    """By variant: whether model, weight and optimizer are still there; number of new threads."""
    left = []
    for stage in (1, 2):
        for is_stepped in (True, False):
            before = len(os.listdir("/proc/self/task"))
            dropped = [each() is not None for each in trained(stage, is_stepped=is_stepped)]
            threads = len(os.listdir("/proc/self/task")) - before
            left.append((f"stage {stage}, {is_stepped=}", dropped, threads))
    return [each for each in left if any(each[1]) or each[2] > 0]


def trained(stage: int, *, is_stepped: bool) -> list[weakref.ref[object]]:
    """Train without `close()`: what is dropped may be in the middle of a step."""
    with ProcessGroups.create(Layout(dp=2)) as groups:
        net = nn.Linear(8, 4)
        optimizer = ShardedOptimizer(
            net,
            net.parameters(),
            make=partial(torch.optim.AdamW, lr=1e-3),
            groups=groups,
            over="dp_cp",
            divisor=2,
            stage=1 if stage == 1 else 2,
            elementwise=True,
        )
        with optimizer.microbatch(is_last=is_stepped):
            net(torch.ones(2, 8)).sum().backward()
        if is_stepped:
            optimizer.step()
    left: list[weakref.ref[object]] = [weakref.ref(each) for each in (net, net.weight, optimizer)]
    del net, optimizer, groups
    gc.collect()
    return left


def test_an_optimizer_that_was_not_closed_goes_with_its_model_and_communicators() -> None:
    """Before, a hook at each parameter kept buckets and communicators: Python does not see it."""
    for left in run_ranks(2, trained_and_dropped).results:
        assert left == []
