from __future__ import annotations

from typing import Any

import torch

from holdfast.bridge import Bridge
from holdfast.parallel import Layout, ModuleGroups, ModuleLayouts
from tests.harness import RankContext, run_ranks


def first(rank: RankContext) -> Any:
    layouts = ModuleLayouts(
        {"vision": Layout(dp=2), "language": Layout(tp=2, ranks=(2, 3))},
        edges=[("vision", "language")],
    )
    with ModuleGroups.create(layouts) as groups:
        bridge = Bridge(groups, "vision", "language")
        if groups.has("vision"):
            x = torch.arange(6.0).view(3, 2) + 10 * rank.rank
            x.requires_grad_()
            b = bridge(x, [1, 0, 2])
            assert b.tokens is None
            b.anchor.backward()
            return x.grad
        b = bridge()
        (b.tokens.sum() * 2 + b.anchor).backward()
        return b.tokens, b.counts


def test_first() -> None:
    print(run_ranks(4, first).results)
