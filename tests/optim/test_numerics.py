"""A sharded optimizer does what the same optimizer does in one process on the whole batch."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from holdfast import Layout, ProcessGroups
from tests.harness import RankContext, run_ranks
from tests.optim.common import OPTIMIZERS, STEPS, batches, build, far, reference, sharded, train

CASES = [
    (1, [(1, 1, 1)]),
    (2, [(1, 2, 1), (2, 1, 1)]),
    (3, [(1, 3, 1)]),
    (4, [(1, 4, 1), (2, 2, 1), (1, 4, 2), (2, 2, 2)]),
]
"""Ranks, and the layouts on them as (tp, dp, replicas)."""


def every_way(context: RankContext, layouts: list[tuple[int, int, int]]) -> dict[str, float]:
    """For each way of training, how far it is from one process in the worst element."""
    found: dict[str, float] = {}
    truths = {name: reference(make)[0] for name, make in OPTIMIZERS.items()}
    for tp, dp, replicas in layouts:
        with ProcessGroups.create(Layout(tp=tp, dp=dp, replicas=replicas)) as groups:
            # the trial of an optimizer is the matter of test_elementwise, and as long as a case
            options: dict[str, Any] = {"elementwise": True}
            if replicas > 1:
                options |= {"over": "dp_cp_intra", "divisor": groups.size("dp_cp")}
                if groups.size("dp_cp_intra") > 1:
                    groups.clone("dp_cp_intra", purpose="dp_cp_intra_ag")
            for declared, stage, name, contexts in itertools.product(
                (True, False), (1, 2), OPTIMIZERS, (True, False)
            ):
                if name == "sgd" and not contexts:
                    continue
                net = build(groups if declared else None)
                optimizer = sharded(net, OPTIMIZERS[name], groups, stage=stage, **options)
                train(net, optimizer, groups, steps=range(STEPS), contexts=contexts)
                optimizer.synchronize()
                label = (
                    f"tp={tp} dp={dp} replicas={replicas} {declared=} {stage=} {name} {contexts=}"
                )
                found[label] = far(net, truths[name])
                optimizer.close()
    return found


@pytest.mark.parametrize(("num_ranks", "layouts"), CASES)
def test_equals_one_process(num_ranks: int, layouts: list[tuple[int, int, int]]) -> None:
    outcome = run_ranks(num_ranks, every_way, layouts, init=num_ranks > 1, timeout_s=200)
    for found in outcome.results:
        assert len(found) == 20 * len(layouts)
        assert max(found.values()) < 1e-6, {k: v for k, v in found.items() if v >= 1e-6}
        assert min(found.values()) >= 0.0


def in_bf16(context: RankContext, dp: int, stage: int) -> float:
    """bf16 parameters with float32 main ones, against the same sums made in one process."""
    with ProcessGroups.create(Layout(dp=dp)) as groups:
        net = build(groups, dtype=torch.bfloat16)
        optimizer = sharded(net, OPTIMIZERS["adamw"], groups, stage=stage)
        train(net, optimizer, groups, steps=range(STEPS))
        optimizer.synchronize()
        truth = build(dtype=torch.bfloat16)
        trained = [p for p in truth.parameters() if p.requires_grad]
        mains = [p.detach().float() for p in trained]
        ours = OPTIMIZERS["adamw"](
            [
                {"params": [m for m in mains if m.ndim >= 2], "weight_decay": 0.1},
                {"params": [m for m in mains if m.ndim < 2], "weight_decay": 0.0},
            ]
        )
        for step in range(STEPS):
            sums: dict[int, torch.Tensor] = {}
            for index in range(dp):
                parts = list(batches(step, index=index, shares=dp))
                for rows in parts:
                    (truth(rows).mean() / len(parts)).backward()
                    for i, parameter in enumerate(trained):
                        if parameter.grad is not None:
                            sums[i] = sums.get(i, torch.zeros(())) + parameter.grad.float()
                            parameter.grad = None
            for i, main in enumerate(mains):
                main.grad = sums[i] / dp if i in sums else None
            ours.step()
            with torch.no_grad():
                for parameter, main in zip(trained, mains, strict=True):
                    parameter.copy_(main)
        return far(net, truth)


@pytest.mark.parametrize(("dp", "stage"), [(2, 1), (3, 2)])
def test_bf16_keeps_main_parameters_in_float32(dp: int, stage: int) -> None:
    assert max(run_ranks(dp, in_bf16, dp, stage).results) < 1e-6
