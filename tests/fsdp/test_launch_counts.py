"""Numbers of launches of every strategy, by the formula on the page (F18)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from holdfast import Checkpointer, Layout, OptimizerState, ProcessGroups
from holdfast.fsdp import ShardedModel
from holdfast.parallel.groups.launches import LaunchRecorder
from tests.fsdp.common import ROWS, STRATEGIES, build, difference, full, place, sgd, shard
from tests.harness import RankContext, run_ranks

LAYOUTS: list[dict[str, Any]] = [
    {"dp": 4, "ep": 4},  # each expert on one rank
    {"dp": 4, "ep": 2, "replicas": 2},  # each expert on one rank of each slice
    {"dp": 1, "ranks": (0,)},
    {"dp": 4},
    {"dp": 4, "ep": 2},
]
NUM_LAYERS = 2


def of_unit(
    layout: Layout, kind: str, strategy: str, outer: str, m: int, *, is_root: bool
) -> dict[str, int]:
    """The launches of a step of m microbatches for the parameters of one kind in a unit."""
    ranks = layout.dp * layout.cp if kind == "dense" else layout.expt_dp
    slices = layout.replicas if strategy != "no_shard" else 1
    shards = ranks // slices if strategy != "no_shard" else 1
    often = m if strategy in ("optim_grads", "optim_grads_params") else 1
    gathers = {"optim_grads_params": m if is_root else 2 * m}.get(strategy, 1)
    sums = {"microbatch": often, "step": 1}[outer]
    return {
        "all_gather": gathers if shards > 1 else 0,
        "reduce_scatter": often if shards > 1 else 0,
        "all_reduce": 1 if strategy == "no_shard" else sums * (slices > 1),
    }


def expected_of(layout: Layout, strategy: str, outer: str, m: int) -> dict[str, int]:
    units = [("dense", True)] + [(kind, False) for kind in ("dense", "experts")] * NUM_LAYERS
    found = [of_unit(layout, kind, strategy, outer, m, is_root=root) for kind, root in units]
    return {op: sum(each[op] for each in found) for op in found[0]}


def train(sharded: ShardedModel, optimizer: Any, step: int, m: int) -> None:
    groups = sharded.groups
    mine = (torch.arange(2 * ROWS) + step)[groups.index("dp_cp") :: groups.size("dp_cp")]
    for i, part in enumerate(mine.split(len(mine) // m)):
        with sharded.microbatch(is_last=i == m - 1):
            (sharded.model(part).mean() / m).backward()
    sharded.step(optimizer)


def counted(
    context: RankContext, layouts: list[dict[str, Any]], microbatches: list[int]
) -> list[str]:
    wrong = []
    for number, sizes in enumerate(layouts):
        # Ranks that have no part in a layout agree on none, and so need a name for each.
        layout = Layout(**sizes, name=f"layout {number}")
        if context.rank not in layout.ranks:
            continue
        with ProcessGroups.create(layout) as groups:
            for strategy in STRATEGIES:
                for outer in ("step", "microbatch") if layout.replicas > 1 else ("step",):
                    net = place(build(num_layers=NUM_LAYERS), groups, hybrid=strategy != "no_shard")
                    sharded = shard(net, groups, strategy=strategy, outer_reduction=outer)
                    optimizer = sgd(net.parameters())
                    for step, m in enumerate(microbatches):
                        with LaunchRecorder(groups) as recorder:
                            train(sharded, optimizer, step, m)
                        data = [e for e in recorder.launches if "dp" in e.purpose]
                        found = {
                            op: sum(each.op == op for each in data)
                            for op in ("all_gather", "reduce_scatter", "all_reduce")
                        }
                        expected = expected_of(layout, strategy, outer, m)
                        if found != expected:
                            wrong.append(f"{sizes} {strategy} {outer} {m}: {found} != {expected}")
    return wrong


@pytest.mark.parametrize(
    ("layouts", "microbatches"),
    [
        pytest.param(LAYOUTS[:3], [2], marks=pytest.mark.slow),
        pytest.param(LAYOUTS[3:], [2, 8, 1], marks=pytest.mark.nightly),
        pytest.param(LAYOUTS[:3], [2, 8, 1], marks=pytest.mark.nightly),
    ],
)
def test_launches_of_a_step_are_those_of_the_formula(
    layouts: list[dict[str, Any]], microbatches: list[int]
) -> None:
    """F18: first steps and later ones, data axes of one rank included."""
    for wrong in run_ranks(4, counted, layouts, microbatches, timeout_s=280).results:
        assert not wrong, "\n".join(wrong)


def oracle(dtype: torch.dtype, *, steps: int, m: int, shares: int) -> Any:
    """One process computes each microbatch of each rank in a dtype, and adds up in float32."""
    net = build()
    optimizer = sgd(net.parameters())
    for step in range(steps):
        for share in range(shares):
            mine = (torch.arange(2 * ROWS) + step)[share::shares]
            for part in mine.split(len(mine) // m):
                copy = build().to(dtype)
                copy.load_state_dict(net.state_dict())
                (copy(part).mean() / m).backward()
                for parameter, other in zip(net.parameters(), copy.parameters(), strict=True):
                    if other.grad is not None:
                        gradient = other.grad.float() / shares
                        before = parameter.grad
                        parameter.grad = gradient if before is None else before + gradient
        optimizer.step()
        optimizer.zero_grad()
    return net


def resumed(context: RankContext, folder: str, strategies: list[str]) -> None:
    policies: list[tuple[torch.dtype, Any]] = [
        (torch.float32, None),
        (torch.bfloat16, torch.bfloat16),
        (
            torch.bfloat16,
            MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        ),
    ]
    expected = {dtype: oracle(dtype, steps=3, m=2, shares=2) for dtype, _ in policies}
    with ProcessGroups.create(Layout(dp=2)) as groups:
        for number, (dtype, precision) in enumerate(policies):
            for strategy in strategies:
                net, other = build(), build(seed=2)
                first = shard(net, groups, strategy=strategy, precision=precision)
                second = shard(other, groups, strategy=strategy, precision=precision)
                optimizers = [sgd(each.parameters()) for each in (net, other)]
                with Checkpointer(f"{folder}/{number}-{strategy}", groups=groups) as checkpointer:
                    for step in range(2):
                        train(first, optimizers[0], step, 2)
                    parts = {"model": net, "optimizer": OptimizerState(optimizers[0], net)}
                    checkpointer.save(2, parts)
                    train(first, optimizers[0], 2, 2)
                    parts = {"model": other, "optimizer": OptimizerState(optimizers[1], other)}
                    checkpointer.load(parts)
                    train(second, optimizers[1], 2, 2)
                whole = {name: full(p) for name, p in other.named_parameters()}
                for name, parameter in net.named_parameters():
                    assert torch.equal(full(parameter), whole[name]), (precision, strategy, name)
                limit = 1e-6 if dtype == torch.float32 else 1e-5
                assert difference(net, expected[dtype]) < limit, (precision, strategy)


@pytest.mark.parametrize(
    "strategies",
    [STRATEGIES[3:], pytest.param(STRATEGIES[:3], marks=pytest.mark.slow)],
)
def test_any_precision_trains_as_one_process_and_resumes(
    tmp_path: Any, strategies: list[str]
) -> None:
    """F18: also with a dtype alone, which is that of the computation."""
    run_ranks(2, resumed, str(tmp_path), strategies, timeout_s=200)
