"""Optimizers of packages over shards: bitwise as whole ones, or refused where they are built."""

from __future__ import annotations

from typing import Any

import dadaptation
import lion_pytorch
import prodigyopt
import pytest
import pytorch_optimizer as po
import torch
from torch import nn

from holdfast import HoldfastError, Layout, ProcessGroups
from holdfast.optim import ShardedOptimizer
from tests.harness import RankContext, run_ranks

JOINING = (
    *(po.Lamb, po.LARS, po.AdaFactor, po.NovoGrad, po.StableAdamW, po.AdamP),
    *(prodigyopt.Prodigy, dadaptation.DAdaptSGD),
)
OTHERS = (
    *(po.Lion, po.AdEMAMix, po.ADOPT, po.AdaBelief, po.Adan, po.LaProp, po.Tiger),
    lion_pytorch.Lion,
)


def backward(net: nn.Module, step: int) -> None:
    data = torch.randn(5, 7, generator=torch.Generator().manual_seed(step))
    net(data).square().mean().backward()


def named(kind: Any) -> str:
    return f"{kind.__module__.split('.')[0]}.{kind.__name__}"


def verdicts(context: RankContext) -> dict[str, str]:
    """Return for each class how it ends: as the whole one, refused, or otherwise."""
    found = {}
    with ProcessGroups.create(Layout(dp=2)) as groups:
        for kind in (*JOINING, *OTHERS):
            torch.manual_seed(3)
            net = nn.Linear(7, 3)
            torch.manual_seed(3)
            twin = nn.Linear(7, 3)
            whole = kind(twin.parameters())
            try:
                optimizer = ShardedOptimizer(
                    net, net.parameters(), make=lambda p, kind=kind: kind(p),
                    groups=groups, over="dp_cp", divisor=2, align_nbytes=4,
                )  # fmt: skip
                for step in range(6):
                    with optimizer.microbatch(is_last=True):
                        backward(net, step)
                    optimizer.step()
                    backward(twin, step)
                    whole.step()
                    whole.zero_grad()
            except HoldfastError as error:
                found[named(kind)] = f"refused: {str(error)[:300]}"
                continue
            same = all(map(torch.equal, net.parameters(), twin.parameters()))
            found[named(kind)] = "same" if same else "differs"
    return found


@pytest.mark.slow
def test_optimizers_over_shards_equal_whole_ones_or_are_refused() -> None:
    """I5, S3: which packaged optimizers may be sharded by elements."""
    first, second = run_ranks(2, verdicts, timeout_s=240).results
    assert first == second
    for kind in JOINING:
        assert f"{kind.__name__} does not update elements one by one" in first[named(kind)]
    assert {named(kind): first[named(kind)] for kind in OTHERS} == dict.fromkeys(
        map(named, OTHERS), "same"
    )
