"""Saves whose structure changes: planned anew once, right each time, whatever runs meanwhile."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from holdfast import (
    Checkpointer,
    HoldfastError,
    Layout,
    PendingSave,
    PlanError,
    PosixStorage,
    ProcessGroups,
    Replicated,
    SaveReport,
    Sharded,
    StorageError,
    Stored,
    Union,
)
from holdfast.format.names import step_dir
from holdfast.format.reader import Snapshot
from holdfast.format.verifier import verify_snapshot
from tests.harness import RankContext, run_ranks

LAYOUT = Layout(dp=4)
Truth = dict[str, object]
Change = Callable[[int], dict[str, object]]
"""A rank -> what it holds."""


def rows(rank: int, *, width: int = 3, base: float = 0.0) -> torch.Tensor:
    """The two rows of a rank in a tensor of eight."""
    return torch.arange(2.0 * width).reshape(2, width) + 10 * rank + base


def whole(*, width: int = 3, base: float = 0.0) -> torch.Tensor:
    return torch.cat([rows(rank, width=width, base=base) for rank in range(4)])


def base(rank: int) -> dict[str, object]:
    """A sharded, a declared and an undeclared tensor, a value, and one tensor of rank 2 alone."""
    state: dict[str, object] = {
        "cut": Sharded(rows(rank), (8, 3), dims={0: "dp"}),
        "norm": Replicated(torch.arange(4.0)),
        "plain": torch.arange(5.0),
        "lr": 0.5,
    }
    if rank == 2:
        state["own"] = torch.arange(6.0)
    return state


BASE: Truth = {
    "cut": whole(),
    "norm": torch.arange(4.0),
    "plain": torch.arange(5.0),
    "lr": 0.5,
    "own": torch.arange(6.0),
}


def changes() -> Iterator[tuple[str, Change, Truth, bool]]:
    """Name, state, what the checkpoint must hold, whether the plan has to be made anew."""

    def on_two(key: str, value: Callable[[], object]) -> Change:
        return lambda rank: base(rank) | ({key: value()} if rank == 2 else {})

    def uneven(rank: int) -> dict[str, object]:
        start, stop = ((0, 1), (1, 5), (5, 5), (5, 8))[rank]
        piece = Sharded(whole()[start:stop].clone(), (8, 3), offset=(start, 0), over=("dp",))
        return base(rank) | {"cut": piece}

    def two_trade(rank: int) -> dict[str, object]:
        """Ranks 1 and 2 alone trade their rows; 0 and 3 are as before."""
        if rank not in (1, 2):
            return base(rank)
        piece = Sharded(rows(3 - rank), (8, 3), offset=(2 * (3 - rank), 0), over=("dp",))
        return base(rank) | {"cut": piece}

    def wide(rank: int) -> dict[str, object]:
        return base(rank) | {"cut": Sharded(rows(rank, width=5), (8, 5), dims={0: "dp"})}

    def half(rank: int) -> dict[str, object]:
        return base(rank) | {"cut": Sharded(rows(rank).bfloat16(), (8, 3), dims={0: "dp"})}

    def undeclared(rank: int) -> dict[str, object]:
        return base(rank) | {"norm": torch.arange(4.0)}

    def without(key: str, ranks: tuple[int, ...]) -> Change:
        return lambda rank: {k: v for k, v in base(rank).items() if k != key or rank not in ranks}

    def moved(rank: int) -> dict[str, object]:
        """The tensor that rank 2 had is now rank 1's."""
        state = base(rank)
        own = state.pop("own", None)
        return state | ({"own": torch.arange(6.0)} if rank == 1 else {}) if own is None else state

    no_own = {key: value for key, value in BASE.items() if key != "own"}
    yield (
        "a tensor on one rank",
        on_two("new", lambda: torch.ones(7)),
        BASE | {"new": torch.ones(7)},
        True,
    )
    yield "a value on one rank", on_two("word", lambda: "x"), BASE | {"word": "x"}, False
    yield "a key less, on one rank", without("own", (2,)), no_own, True
    yield "a replica less, on one rank", without("plain", (1,)), BASE, True
    yield "wider", wide, BASE | {"cut": whole(width=5)}, True
    yield (
        "longer on one rank",
        on_two("own", lambda: torch.arange(9.0)),
        BASE | {"own": torch.arange(9.0)},
        True,
    )
    yield "split unevenly", uneven, BASE, True
    yield "two ranks trade places", two_trade, BASE, True
    yield "bf16", half, BASE | {"cut": whole().bfloat16()}, True
    yield (
        "bf16 on one rank",
        on_two("own", lambda: torch.arange(6.0).bfloat16()),
        BASE | {"own": torch.arange(6.0).bfloat16()},
        True,
    )
    yield (
        "same bytes, other dtype",
        on_two("own", lambda: torch.arange(6, dtype=torch.int32)),
        BASE | {"own": torch.arange(6, dtype=torch.int32)},
        True,
    )
    yield "compared, not declared", undeclared, BASE, True
    yield "another owner", moved, BASE, True
    yield "a tensor becomes a value", on_two("own", lambda: [1, 2]), BASE | {"own": [1, 2]}, True
    yield (
        "a value becomes a tensor",
        lambda rank: base(rank) | {"lr": torch.tensor([2.5])},
        BASE | {"lr": torch.tensor([2.5])},
        True,
    )


def check(root: str, step: int, truth: Truth) -> None:
    """A step holds the truth, read in one process that knows no plan; each element has one copy."""
    storage = PosixStorage(root)
    assert verify_snapshot(storage, step_dir(step)) == []
    found = Checkpointer(root, groups=ProcessGroups.single()).load({"m": Stored()}, step=step)
    stored = found.values["m"]
    assert isinstance(stored, dict)
    assert stored.keys() == truth.keys()
    for key, value in truth.items():
        got = stored[key]
        if not isinstance(value, torch.Tensor):
            assert got == value, key
            continue
        assert isinstance(got, torch.Tensor)
        assert got.dtype == value.dtype, key
        assert torch.equal(got, value), key
    with Snapshot.open(storage, step_dir(step)) as snapshot:
        manifest, index = snapshot.manifest, snapshot.index
        told = {info.key: (tuple(info.shape)) for info in manifest.tensors}
        tensors = {k: v for k, v in truth.items() if isinstance(v, torch.Tensor)}
        assert told == {f"m.{key}": tuple(value.shape) for key, value in tensors.items()}
        assert int(index.nbytes.sum()) == sum(value.nbytes for value in tensors.values())


def every_change(context: RankContext, root: str) -> dict[str, list[bool]]:
    """Each change after the base state, in one process, sync and async: whether saves planned."""
    found: dict[str, list[bool]] = {}
    rank, step = context.rank, 0
    with ProcessGroups.create(LAYOUT, timeout_s=20) as groups:
        control = groups.control
        with Checkpointer(root, groups=groups) as checkpointer:

            def save(state: dict[str, object], truth: Truth) -> bool:
                nonlocal step
                step += 1
                began, before = time.monotonic(), checkpointer.stats.num_plans
                if step % 2:
                    planned = checkpointer.save(step, {"m": Union(state)}).planned
                else:
                    planned = checkpointer.save_async(step, {"m": Union(state)}).result(60).planned
                assert time.monotonic() - began < 30
                assert checkpointer.stats.num_plans - before == planned
                control.barrier(phase="test: saved")
                if rank == step % 4:
                    check(root, step, truth)
                return planned

            assert save(base(rank), BASE)
            for name, change, truth, _ in changes():
                planned = [save(change(rank), truth), save(change(rank), truth)]
                planned += [save(base(rank), BASE), save(base(rank), BASE)]
                found[name] = planned
    return found


@pytest.mark.slow
def test_any_change_on_any_rank_is_planned_once_and_stored_right(tmp_path: Path) -> None:
    """C2, C3, C4, C12."""
    results = run_ranks(4, every_change, str(tmp_path), timeout_s=240).results
    for found in results:
        assert found == results[0]
        for name, _, _, needed in changes():
            assert found[name] == [needed, False, needed, False], name


def steady(context: RankContext, root: str) -> tuple[list[int], list[int], list[bool]]:
    """Five saves of one structure and other contents: collectives and bytes of each."""
    collectives, sent, planned = [], [], []
    with (
        ProcessGroups.create(LAYOUT) as groups,
        Checkpointer(root, groups=groups) as checkpointer,
    ):
        control = groups.control
        for step in range(5):
            state = {
                "cut": Sharded(rows(context.rank, base=step), (8, 3), dims={0: "dp"}),
                "plain": torch.full((5,), float(step)),
                "step": step,
            }
            before, nbytes = control.num_collectives, control.nbytes_sent
            pending = checkpointer.save_async(step, {"m": Union(state)})
            collectives.append(control.num_collectives - before)
            sent.append(control.nbytes_sent - nbytes)
            planned.append(pending.result(30).planned)
    return collectives, sent, planned


def test_saves_of_one_structure_exchange_no_plan(tmp_path: Path) -> None:
    """C1: five saves, each of other contents: one plan, then one small collective each."""
    for collectives, sent, planned in run_ranks(4, steady, str(tmp_path)).results:
        assert planned == [True, False, False, False, False]
        assert collectives[1:] == [1] * 4
        assert max(sent[1:]) <= 700
    for step in range(5):
        truth = {"cut": whole(base=step), "plain": torch.full((5,), float(step)), "step": step}
        check(str(tmp_path), step, truth)


def regrouped(context: RankContext, root: str) -> list[bool]:
    """C3, grid membership: the ranks save under one grid after the other, each in its own plan."""
    planned = []
    pairs = [Layout(dp=2, ranks=(0, 1)), Layout(dp=2, ranks=(2, 3))]
    grids = [LAYOUT, pairs[context.rank // 2], Layout(dp=4, ranks=(3, 1, 0, 2)), LAYOUT]
    for number, layout in enumerate(grids):
        place = f"{root}/{context.rank // 2}" if layout.world_size == 2 else f"{root}/all"
        with ProcessGroups.create(layout) as groups, Checkpointer(place, groups=groups) as saver:
            index, size = groups.index("dp"), groups.size("dp")
            share = 8 // size
            local = whole()[index * share : (index + 1) * share].clone()
            state = {"cut": Sharded(local, (8, 3), dims={0: "dp"})}
            planned.append(saver.save(number, {"m": Union(state)}).planned)
            groups.control.barrier(phase="test: saved")
            check(place, number, {"cut": whole()})
    return planned


def test_another_grid_is_another_plan(tmp_path: Path) -> None:
    for planned in run_ranks(4, regrouped, str(tmp_path)).results:
        assert planned == [True, True, True, False]  # the last one is the first grid again


def in_flight(context: RankContext, root: str) -> list[object]:
    """A save is held up in one rank's writer; the structure changes, and the next save begins."""
    rank = context.rank
    seen: list[object] = []
    with (
        ProcessGroups.create(Layout(dp=2)) as groups,
        Checkpointer(root, groups=groups, staging_buffers=2) as checkpointer,
    ):

        def state(step: int, *, width: int) -> dict[str, Union]:
            local = torch.full((2, width), float(10 * step + rank))
            extra = {"extra": torch.full((4,), float(step))} if width > 3 and rank == 1 else {}
            cut = Sharded(local, (4, width), dims={0: "dp"})
            return {"m": Union({"cut": cut, **extra})}

        checkpointer.save_async(0, state(0, width=3)).result(30)
        groups.control.barrier(phase="test: first")
        if rank == 1:
            os.kill(checkpointer.stats.writer_pid or 0, signal.SIGSTOP)
        groups.control.barrier(phase="test: stopped")
        try:
            first = state(1, width=3)
            one = checkpointer.save_async(1, first)
            first["m"].mapping["cut"].local.fill_(-1.0)
            second = state(2, width=5)
            two = checkpointer.save_async(2, second)
            second["m"].mapping["cut"].local.fill_(-1.0)
            time.sleep(0.5)
            seen += [one.done(), two.done(), checkpointer.latest()]
            groups.control.barrier(phase="test: looked")
        finally:
            if rank == 1:
                os.kill(checkpointer.stats.writer_pid or 0, signal.SIGCONT)
        reports = [one.result(30), two.result(30)]
        seen += [reports[0].planned, reports[1].planned, checkpointer.latest()]
    return seen


def test_a_save_in_flight_keeps_its_own_plan_and_data(tmp_path: Path) -> None:
    """C7, E12: nothing is committed before all ranks have written, then both are right."""
    for seen in run_ranks(2, in_flight, str(tmp_path)).results:
        assert seen == [False, False, 0, False, True, 2]
    for step, width in ((1, 3), (2, 5)):
        cut = torch.cat([torch.full((2, width), float(10 * step + rank)) for rank in range(2)])
        extra = {"extra": torch.full((4,), 2.0)} if width > 3 else {}
        check(str(tmp_path), step, {"cut": cut, **extra})


class Failing(PosixStorage):
    """Cannot make data files while `broken` is set."""

    broken = False

    def create(self, path: str, *, nbytes: int) -> object:  # type: ignore[override]
        if self.broken and "/data/" in path:
            raise StorageError(f"{self.describe(path)}: input/output error (EIO)")
        return super().create(path, nbytes=nbytes)


def finished(saved: SaveReport | PendingSave) -> SaveReport:
    return saved.result(60) if isinstance(saved, PendingSave) else saved


def failing(context: RankContext, root: str) -> list[object]:
    """A change of structure whose save fails on rank 1; then the same again, then back."""
    seen: list[object] = []
    storage = Failing(root)
    with (
        ProcessGroups.create(LAYOUT, timeout_s=20) as groups,
        Checkpointer(storage, groups=groups) as checkpointer,
    ):
        cases = {name: (change, truth) for name, change, truth, _ in changes()}
        step = 0
        for name in ("a tensor on one rank", "two ranks trade places", "bf16"):
            change, truth = cases[name]
            for asynchronous in (False, True):
                checkpointer.save(step, {"m": Union(base(context.rank))})
                storage.broken = context.rank == 1
                save = checkpointer.save_async if asynchronous else checkpointer.save
                with pytest.raises(HoldfastError, match="EIO"):
                    finished(save(step + 1, {"m": Union(change(context.rank))}))
                storage.broken = False
                assert checkpointer.latest() == step
                checkpointer.save(step + 1, {"m": Union(change(context.rank))})
                groups.control.barrier(phase="test: retried")
                if context.rank == 0:
                    check(root, step + 1, truth)
                checkpointer.save(step + 2, {"m": Union(base(context.rank))})
                groups.control.barrier(phase="test: back")
                if context.rank == 0:
                    check(root, step + 2, BASE)
                step += 10
        seen.append(checkpointer.steps())
    return seen


def test_a_failed_save_leaves_no_plan_that_is_not_true(tmp_path: Path) -> None:
    """C11: the retry after a failure is right, and so is the structure before it."""
    for (steps,) in run_ranks(4, failing, str(tmp_path), timeout_s=200).results:
        assert steps == [10 * i + j for i in range(6) for j in range(3)]


def test_a_directory_that_another_job_rewrote_is_read_anew(tmp_path: Path) -> None:
    """C10: same path, same step, another content, shape, split and set of keys."""
    mine, other = tmp_path / "run", tmp_path / "other"
    checkpointer = Checkpointer(mine)
    checkpointer.save(5, {"m": {"x": torch.arange(6.0), "y": torch.ones(2)}})
    target = torch.zeros(6)
    checkpointer.load({"m": {"x": target, "y": torch.zeros(2)}})
    assert torch.equal(target, torch.arange(6.0))
    for number, state in enumerate(
        ({"x": -torch.arange(6.0), "y": torch.ones(2)}, {"x": torch.ones(3, 5), "z": torch.ones(1)})
    ):
        shutil.rmtree(other, ignore_errors=True)
        Checkpointer(other).save(5, {"m": Union(state)})
        shutil.rmtree(mine / step_dir(5))
        shutil.copytree(other / step_dir(5), mine / step_dir(5))
        loaded = checkpointer.load({"m": Stored()}, step=5).values["m"]
        assert isinstance(loaded, dict)
        assert loaded.keys() == state.keys(), number
        for key, value in state.items():
            assert torch.equal(loaded[key], value)
        report = checkpointer.save(6 + number, {"m": Union(state)})
        assert report.num_tensors == 2
    with pytest.raises(PlanError):
        checkpointer.save(9, {"m": {"x": Sharded(torch.ones(1), (2,), offset=(0,))}})
