"""Per-token normalisation: losses are sums, and one count of all data ranks divides (M19)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from holdfast.errors import ConfigError
from holdfast.optim import LossScaler, MultiModuleOptimizer
from holdfast.parallel import ModuleGroups
from tests.harness import RankContext, run_ranks
from tests.optim.multi_module.common import (
    Spec,
    Trained,
    Twin,
    build,
    layouts_of,
    rows_of,
)

EDGES = [("vision", "language")]
MIXES: dict[str, dict[str, Spec]] = {
    "tensor and context": {
        "vision": Spec(sizes={"dp": 4}, kind="fsdp"),
        "language": Spec(sizes={"dp": 1, "tp": 2, "cp": 2}, kind="chained", options={"divisor": 1}),
    },
    "disjoint": {
        "vision": Spec(sizes={"dp": 1, "ranks": (3,)}, options={"divisor": 1}),
        "language": Spec(sizes={"dp": 3, "ranks": (0, 1, 2)}, kind="reduced"),
    },
    "stages": {
        "vision": Spec(sizes={"dp": 4}, kind="chained", options={"divisor": 1}),
        "language": Spec(sizes={"dp": 2, "pp": 2}, options={"divisor": 2}),
    },
}


def counts_of(num_shares: int, step: int) -> list[int]:
    """The tokens of each data rank: other ones on each, on some none."""
    cuts = sorted((7 * i + 5 * step) % 13 for i in range(1, num_shares))
    return [b - a for a, b in zip([0, *cuts], [*cuts, 12], strict=True)]


def backward(modules: dict[str, Trained], step: int, *, scale: float) -> None:
    for name, each in modules.items():
        counts = counts_of(each.groups.size("dp_cp"), step)
        # Rows of vision tokens have nothing to do with how many text tokens there are.
        loss = each.loss(rows_of(step, name), counts=counts)
        if loss.requires_grad:  # not on a rank without any row
            torch.autograd.backward(loss * scale)


def tokens_here(groups: ModuleGroups, step: int, *, stages: bool) -> int | None:
    """What this rank passes: nothing without the language model, or without its last stage."""
    if not groups.has("language") or not (stages or groups.roles["language"].is_last_stage):
        return None
    own = groups["language"]
    return counts_of(own.size("dp_cp"), step)[own.index("dp_cp")]


def every_mix(context: RankContext) -> list[Any]:
    report: list[Any] = []
    for mix, specs in MIXES.items():
        twin = Twin(specs)
        with ModuleGroups.create(layouts_of(specs, tag=f"{mix}: ", edges=EDGES)) as groups:
            modules = build(groups, specs)
            optimizer = MultiModuleOptimizer(groups, {n: m.stepper for n, m in modules.items()})
            scaler = LossScaler(initial=8.0)
            for step in range(4):
                norms = twin.step(
                    {name: rows_of(step, name) for name in specs}, max_norm=0.7, num_tokens=12
                )
                backward(modules, step, scale=scaler.scale)
                outcome = optimizer.step(
                    max_norm=0.7,
                    scaler=scaler,
                    num_tokens=tokens_here(groups, step, stages=step % 2 == 0),
                )
                assert outcome.num_tokens == 12
                assert outcome.norm == pytest.approx(norms[""], rel=1e-6), mix
                assert outcome.clipped
                report.append(outcome)
            optimizer.synchronize()
            assert twin.difference(modules) < 1e-6, mix
            report += refused(groups, optimizer, modules)
    return report


def refused(
    groups: ModuleGroups, optimizer: MultiModuleOptimizer, modules: dict[str, Trained]
) -> list[str]:
    """Counts that contradict each other stop all ranks, and nothing of them is kept."""
    language = groups.layouts["language"]
    last = language.ranks[-1]
    copies = language.world_size > language.dp * language.cp
    has_language = groups.has("language")
    cases: list[tuple[Any, str]] = [
        (0 if has_language else None, "no data rank has any token"),
        (-1 if groups.rank == last else None, f"rank {last}: num_tokens must be .*, got -1"),
        (2.5 if groups.rank == last else None, f"rank {last}: num_tokens must be .*, got 2.5"),
        (4 if groups.rank == language.ranks[0] else None, "none of the ranks .* has passed"),
    ]
    if copies:
        cases.append((4 + (groups.rank == last) if has_language else None, f"5 on rank {last}"))
    else:
        cases.append((1, "rank 3: num_tokens=1: this rank does not have module 'language'"))
    before = [p.detach().clone() for each in modules.values() for p in each.model.parameters()]
    report = []
    for tokens, match in cases:
        backward(modules, 0, scale=1.0)
        with pytest.raises(ConfigError, match=match) as caught:
            optimizer.step(num_tokens=tokens)
        report.append(str(caught.value))
    after = [p.detach() for each in modules.values() for p in each.model.parameters()]
    for one, other in zip(before, after, strict=True):
        assert torch.equal(
            one.to_local() if hasattr(one, "to_local") else one,
            other.to_local() if hasattr(other, "to_local") else other,
        )
    return report


@pytest.mark.slow
def test_different_tokens_per_rank_and_widths_per_module_equal_one_process() -> None:
    """M19 under SGD, which shows any wrong divisor."""
    first, *others = run_ranks(4, every_mix).results
    assert all(other == first for other in others)


def undecided(context: RankContext) -> None:
    specs = {"one": Spec(sizes={"dp": 2}), "other": Spec(sizes={"dp": 2})}
    with ModuleGroups.create(layouts_of(specs)) as groups:
        modules = build(groups, specs)
        steppers = {name: each.stepper for name, each in modules.items()}
        optimizer = MultiModuleOptimizer(groups, steppers)
        with pytest.raises(ConfigError, match="pass loss_module="):
            optimizer.step(num_tokens=3)
        optimizer = MultiModuleOptimizer(groups, steppers, loss_module="other")
        for each in modules.values():
            torch.autograd.backward(each.loss(torch.arange(12)))
        assert optimizer.step(num_tokens=3).num_tokens == 6


def test_whose_tokens_count_is_stated_where_it_is_not_obvious() -> None:
    run_ranks(2, undecided)
