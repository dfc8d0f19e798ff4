"""Explicit groups with a real model, RNG and values per rank: A1, A5, A7, A10, A11."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from holdfast import (
    RNG,
    Checkpointer,
    Layout,
    OnLayout,
    OptimizerState,
    PerRank,
    PlanError,
    ProcessGroups,
    Sharded,
    Stored,
)
from tests.checkpoint.common import assert_equal, full, make_state
from tests.harness import RankContext, run_ranks


def _forbid_default_group(monkey: pytest.MonkeyPatch) -> None:
    """Every way that torch has to a group nobody passed."""

    def refuse(*args: object, **kwargs: object) -> object:
        raise AssertionError("the default process group was looked up")

    monkey.setattr(dist.distributed_c10d, "_get_default_group", refuse)
    for name in ("get_world_size", "get_rank"):
        real = getattr(dist.distributed_c10d, name)

        def guarded(group: object = None, *, real: Any = real) -> object:
            return refuse() if group is None else real(group)

        for module in (dist, dist.distributed_c10d):
            monkey.setattr(module, name, guarded)


def _whole_training_state(context: RankContext, root: str) -> list[float]:
    """Model, optimizer and RNG of TP2 x PP2 x DP2, saved and loaded with no global to be had."""
    layout, rank = Layout(tp=2, pp=2, dp=2), context.rank
    stage = layout.coordinate(rank)["pp"]

    def training(seed: int) -> tuple[nn.Module, torch.optim.Optimizer, dict[str, object]]:
        torch.manual_seed(seed)
        model = nn.ModuleDict({f"{stage}": nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))})
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * seed)
        state: dict[str, object] = make_state(layout, rank, blank=seed != 1)
        return (
            model,
            optimizer,
            state
            | {
                "layers": model,
                "optimizer": OptimizerState(optimizer, model),
                "rng": RNG(),
            },
        )

    with ProcessGroups.create(layout) as groups, pytest.MonkeyPatch.context() as monkey:
        _forbid_default_group(monkey)
        model, optimizer, state = training(1)
        for _ in range(2):
            model[f"{stage}"](torch.ones(2, 4)).sum().backward()  # type: ignore[index]
            optimizer.step()
        torch.manual_seed(100 + rank)
        checkpointer = Checkpointer(root, groups=groups)
        checkpointer.save_async(1, state).result(60)
        checkpointer.save(2, state)
        draws = torch.rand(10).tolist()
        for step, loader in ((1, checkpointer), (2, Checkpointer(root, groups=groups))):
            fresh, other, target = training(2)
            loader.load(target, step=step)
            assert torch.rand(10).tolist() == draws
            assert_equal(target, layout, rank)
            pairs = zip(model.state_dict().values(), fresh.state_dict().values(), strict=True)
            assert all(torch.equal(a, b) for a, b in pairs)
            for one, two in zip(model.parameters(), fresh.parameters(), strict=True):
                assert optimizer.state[one].keys() == other.state[two].keys()
                for name, value in optimizer.state[one].items():
                    assert torch.equal(value, other.state[two][name])
            assert other.param_groups[0]["lr"] == 0.1
    return draws


def test_a_whole_training_state_needs_no_global(tmp_path: Path) -> None:
    """A1."""
    results = run_ranks(8, _whole_training_state, str(tmp_path)).results
    assert len({tuple(draws) for draws in results}) == 8


def _union_without_zero(context: RankContext, root: str) -> object:
    """Two grids on ranks 1 to 4 of five, which rank 0 has no part in; the last of them leads."""
    rank = context.rank
    if rank == 0:
        return None
    mine = Layout(tp=2, ranks=(2, 1) if rank < 3 else (4, 3), name="low" if rank < 3 else "high")
    union = Layout(dp=4, ranks=(4, 3, 2, 1), name="union")
    with ProcessGroups.create(mine) as groups, ProcessGroups.create(union) as both:
        checkpointer = Checkpointer(root, groups=both)
        value = full(mine.name, (4, 2))
        start = 2 * groups.index("tp")

        def state(local: torch.Tensor) -> dict[str, object]:
            tree = {"w": Sharded(local, (4, 2), dims={0: "tp"}), "n": mine.name}
            own = OnLayout(mine, PerRank({"rank": rank}))
            return {f"{mine.name}.model": OnLayout(groups, tree), f"{mine.name}.rng": own}

        checkpointer.save(1, state(value[start : start + 2].clone()))
        local = torch.zeros(2, 2)
        values = checkpointer.load(state(local)).values
        assert torch.equal(local, value[start : start + 2])
        assert values[f"{mine.name}.rng"] == {"rank": rank}
        assert values[f"{mine.name}.model"]["n"] == mine.name  # type: ignore[index]
        return both.control.coordinator, both.control.is_coordinator


def test_the_coordinator_is_one_of_the_union(tmp_path: Path) -> None:
    """A5: not rank 0 by number, which is not there."""
    results = run_ranks(5, _union_without_zero, str(tmp_path)).results
    assert results == [None, (4, False), (4, False), (4, False), (4, True)]


def _by_coordinate(
    context: RankContext, root: str, order: str, ranks: tuple[int, ...], save: bool
) -> None:
    """Values per coordinate and experts, of a layout whose ranks are placed in one way."""
    layout = Layout(tp=2, dp=4, ep=2, expt_tp=2, order=order, ranks=ranks)
    rank = context.rank
    dense, expert = layout.coordinate(rank), layout.expert_coordinate(rank)
    experts = full("experts", (4, 6, 3))
    first, column = 2 * expert["ep"], 3 * expert["expt_tp"]
    local = experts[first : first + 2, column : column + 3].clone()
    with ProcessGroups.create(layout) as groups:
        checkpointer = Checkpointer(root, groups=groups)
        state: dict[str, object] = {
            "experts": {"w": Sharded(local, (4, 6, 3), dims={0: "ep", 1: "expt_tp"})},
            "each": PerRank({"at": dict(dense)} if save else Stored()),
            "stream": PerRank(
                [expert["ep"], expert["expt_dp"]] if save else Stored(), axes=("ep", "expt_dp")
            ),
        }
        if save:
            checkpointer.save(1, state | make_state(layout, rank))
            return
        truth = local.clone()
        local.zero_()
        target = make_state(layout, rank, blank=True)
        values = checkpointer.load(state | target).values
        assert torch.equal(local, truth)
        assert_equal(target, layout, rank)
        assert values["each"] == {"at": dict(dense)}
        assert values["stream"] == [expert["ep"], expert["expt_dp"]]
        assert values["own"]["name"] == "-".join(map(str, dense.values()))  # type: ignore[index, call-overload]


def _save_one_way_load_all(
    context: RankContext, root: str, ways: tuple[tuple[str, tuple[int, ...]], ...]
) -> None:
    _by_coordinate(context, root, *ways[0], True)
    for way in ways:
        _by_coordinate(context, root, *way, False)


def test_coordinates_key_experts_and_values_of_ranks(tmp_path: Path) -> None:
    """A7: another order of axes and ranks permuted; nothing is keyed by a rank's number."""
    ways = (
        ("tp-pp-ep-dp", tuple(range(8))),
        ("tp-cp-ep-dp-pp", (5, 2, 7, 0, 1, 6, 3, 4)),
        ("dp-ep-tp", (7, 6, 5, 4, 3, 2, 1, 0)),
    )
    run_ranks(8, _save_one_way_load_all, str(tmp_path), ways)


def _wrong_claims(context: RankContext, root: str) -> dict[str, str]:
    """Two ranks that both say they own a shard; none that does; all of one wrong in a stack."""
    rank = context.rank
    reports = {}
    with ProcessGroups.create(Layout(dp=4), timeout_s=20) as groups:
        checkpointer = Checkpointer(root, groups=groups)
        rows = full("w", (6, 2))
        # 6 rows over 4 ranks: ranks 2 and 3 both claim rows 4 and 5; or nobody does.
        cases = {"two": ((0, 2), (2, 4), (4, 6), (4, 6)), "none": ((0, 2), (2, 4), (0, 0), (0, 0))}
        for name, places in cases.items():
            start, stop = places[rank]
            piece = Sharded(rows[start:stop].clone(), (6, 2), offset=(start, 0), over=("dp",))
            for save in (checkpointer.save, checkpointer.save_async):
                began = time.monotonic()
                with pytest.raises(PlanError) as caught:
                    save(1, {"m": {"w": piece}})
                assert time.monotonic() - began < 30
                reports[name] = str(caught.value)
        assert checkpointer.latest() is None
    return reports


def test_a_wrong_claim_is_told_with_key_box_and_ranks(tmp_path: Path) -> None:
    """A10 (i), (ii)."""
    for reports in run_ranks(4, _wrong_claims, str(tmp_path)).results:
        assert "m.w [4:6, 0:2]: rank 2" in reports["two"]
        assert "ranks [3] hold the same box" in reports["two"]
        assert "no rank holds [4:6, 0:2]" in reports["none"]
    assert not list(tmp_path.glob(".saving*"))


class _Log(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _streams(
    context: RankContext, root: str, dp: int, save: bool
) -> tuple[list[float], int, list[str]]:
    log = _Log()
    logging.getLogger("holdfast").addHandler(log)
    with ProcessGroups.create(Layout(dp=dp, ep=2)) as groups:
        torch.manual_seed(100 + context.rank if save else 7000 + context.rank)
        checkpointer = Checkpointer(root, groups=groups)
        kept = 0
        if save:
            checkpointer.save(1, {"rng": RNG()})
        else:
            kept = len(checkpointer.load({"rng": RNG()}).kept)
        return torch.rand(10).tolist(), kept, log.lines


def test_streams_of_experts_and_data_ranks(tmp_path: Path) -> None:
    """A11: EP2 x expert-DP2, a stream for each rank; then twice as many ranks."""
    saved = [draws for draws, *_ in run_ranks(4, _streams, str(tmp_path), 4, True).results]
    assert len({tuple(draws) for draws in saved}) == 4
    same = run_ranks(4, _streams, str(tmp_path), 4, False).results
    assert [draws for draws, *_ in same] == saved
    assert [kept for _, kept, _ in same] == [0] * 4
    grown = run_ranks(8, _streams, str(tmp_path), 8, False).results
    assert [draws for draws, *_ in grown[:4]] == saved
    fresh = [torch.rand(10, generator=torch.Generator().manual_seed(7004 + i)) for i in range(4)]
    assert [draws for draws, *_ in grown[4:]] == [draws.tolist() for draws in fresh]
    assert [kept for _, kept, _ in grown] == [0] * 4 + [1] * 4
    for rank, (*_, report) in enumerate(grown):
        assert len(report) == (rank >= 4), report
        assert all(f"rank {rank}" in line and "rng" in line for line in report)
