"""Lies about the structure are caught where it is written (C8); replicas compared every N saves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

from holdfast import (
    Checkpointer,
    ConfigError,
    Layout,
    PendingSave,
    PlanError,
    ProcessGroups,
    Replicated,
    SaveReport,
    Sharded,
    Stored,
)
from holdfast.checkpoint.plan.planner import Planner
from tests.harness import RankContext, run_ranks

Change = Callable[[int], dict[str, object]]


def _state(index: int) -> dict[str, object]:
    rows = torch.arange(6.0).reshape(2, 3) + 10 * index
    return {
        "a": Sharded(rows, (4, 3), dims={0: "dp"}),
        "b": Sharded(rows + 100, (4, 3), dims={0: "dp"}),
        "norm": Replicated(torch.arange(4.0)),
    }


def _shape(index: int) -> dict[str, object]:
    wide = torch.full((2, 5), float(index))
    return _state(index) | {"b": Sharded(wide, (4, 5), dims={0: "dp"})}


def _dtype(index: int) -> dict[str, object]:
    half = torch.full((2, 3), float(index), dtype=torch.float16)
    return _state(index) | {"b": Sharded(half, (4, 3), dims={0: "dp"})}


def _same_size(index: int) -> dict[str, object]:
    """float32 as int32: the bytes fit, the meaning does not."""
    whole = torch.full((2, 3), index, dtype=torch.int32)
    return _state(index) | {"b": Sharded(whole, (4, 3), dims={0: "dp"})}


def _renamed(index: int) -> dict[str, object]:
    """The second tensor goes and a third comes: rows, shapes and dtypes are as before."""
    state = _state(index)
    return {"a": state["a"], "c": state["b"], "norm": state["norm"]}


def _reordered(index: int) -> dict[str, object]:
    state = _state(index)
    return {"b": state["b"], "a": state["a"], "norm": state["norm"]}


def _added(index: int) -> dict[str, object]:
    return _state(index) | {"z": Replicated(torch.ones(2))}


def _removed(index: int) -> dict[str, object]:
    state = _state(index)
    del state["norm"]
    return state


def _moved(index: int) -> dict[str, object]:
    """The ranks trade places: the same shapes at other offsets."""
    rows = torch.full((2, 3), float(index))
    moved = Sharded(rows, (4, 3), offset=(2 * (1 - index), 0), over=("dp",))
    return _state(index) | {"b": moved}


def _reshaped(index: int) -> dict[str, object]:
    """The whole grows, this rank's piece does not."""
    rows = torch.full((2, 3), float(index))
    placed = Sharded(rows, (6, 3), offset=(2 * index, 0), over=("dp",))
    return _state(index) | {"b": placed}


CHANGES: Mapping[str, Change] = {
    change.__name__.strip("_"): change
    for change in (
        _shape, _dtype, _same_size, _renamed, _reordered, _added, _removed, _moved, _reshaped
    )
}  # fmt: skip


def _finished(saved: SaveReport | PendingSave) -> SaveReport:
    return saved.result(60) if isinstance(saved, PendingSave) else saved


def _lie(
    context: RankContext, root: str, liars: tuple[int, ...]
) -> dict[tuple[str, bool], tuple[str, int | None, bool]]:
    """Every change, sync and async: the error, the latest step after it, and the save after that.

    The ranks in `liars` change their state and say that it is unchanged.
    """
    found = {}
    with (
        ProcessGroups.create(Layout(dp=2)) as groups,
        Checkpointer(root, groups=groups) as checkpointer,
    ):
        step = 0
        for name, change in CHANGES.items():
            for asynchronous in (False, True):
                save = checkpointer.save_async if asynchronous else checkpointer.save
                _finished(checkpointer.save(step, {"m": _state(context.rank)}))
                lying = context.rank in liars
                state = {"m": change(context.rank) if lying else _state(context.rank)}
                with pytest.MonkeyPatch.context() as patch:
                    if lying:
                        patch.setattr(
                            Planner,
                            "lookup",
                            lambda self, _, *, compare_all: self._plans[compare_all],
                        )
                    with pytest.raises(PlanError) as caught:
                        _finished(save(step + 1, state))
                latest = checkpointer.latest()
                truth = {"m": _state(context.rank)}
                _finished(save(step + 3, truth))
                blank = {"m": _blank(_state(context.rank))}
                right = checkpointer.load(blank).step == step + 3
                found[name, asynchronous] = (
                    str(caught.value),
                    latest,
                    right and _equal(blank["m"], truth["m"]),
                )
                assert latest == step
                step += 4
    return found


def _tensor(value: object) -> torch.Tensor:
    assert isinstance(value, Sharded | Replicated)
    return value.local


def _blank(state: dict[str, object]) -> dict[str, object]:
    for value in state.values():
        _tensor(value).fill_(-1)
    return state


def _equal(one: Mapping[str, object], two: Mapping[str, object]) -> bool:
    return all(torch.equal(_tensor(one[key]), _tensor(two[key])) for key in two)


@pytest.mark.parametrize(
    "liars", [(0, 1), *(pytest.param((one,), marks=pytest.mark.slow) for one in (0, 1))], ids=str
)
def test_a_lie_about_the_structure_fails_the_save_everywhere(
    tmp_path: Path, liars: tuple[int, ...]
) -> None:
    """C8: caught on all ranks, the checkpoint before stays the latest, the next save is right."""
    results = run_ranks(2, _lie, str(tmp_path), liars, timeout_s=240).results
    assert len(results[0]) == 2 * len(CHANGES)
    for (name, asynchronous), first in results[0].items():
        for message, _, right in (first, results[1][name, asynchronous]):
            assert "planned" in message, (name, message)
            assert right, (name, asynchronous)
    assert not list(tmp_path.glob(".saving*"))


def _every(context: RankContext, root: str) -> tuple[list[bool], list[int], list[int], list[str]]:
    """Seven saves with a check at each third, of both sorts; then drift."""
    planned, collectives, plans = [], [], []
    messages = []
    layout = Layout(dp=4)
    with ProcessGroups.create(layout) as groups:
        tensor = torch.arange(1000, dtype=torch.float32)
        state = {"m": {"norm": Replicated(tensor), "own": torch.ones(3)}}
        with Checkpointer(root, groups=groups, check_replicas_every=3) as checkpointer:
            for step in range(1, 13):
                before = groups.control.num_collectives
                pending = checkpointer.save_async(step, state)
                collectives.append(groups.control.num_collectives - before)
                planned.append(pending.result(60).planned)
                plans.append(checkpointer.stats.num_plans)
                if step == 8:
                    checkpointer.save(100, state, check_replicas=True)  # the ninth save
                    before = groups.control.num_collectives
            assert checkpointer.stats.num_allocations == 1
            # 13 saves so far: the fifteenth compares.
            if context.rank == 2:
                tensor.view(torch.int32)[500] ^= 1
            checkpointer.save(13, state)
            for save in (checkpointer.save, checkpointer.save_async):
                with pytest.raises(PlanError) as caught:
                    _finished(save(14, state))
                messages.append(str(caught.value))
                if save == checkpointer.save:
                    checkpointer.save(20, state)
                    checkpointer.save(21, state)
            assert checkpointer.latest() == 100
            assert 14 not in checkpointer.steps()
            checkpointer.save(101, state)
    return planned, collectives, plans, messages


def test_replicas_are_compared_every_so_many_saves(tmp_path: Path) -> None:
    """P4: two plans, one of each kind; after that one collective a save; drift is named."""
    for planned, collectives, plans, messages in run_ranks(4, _every, str(tmp_path)).results:
        assert planned == [True, False, True] + [False] * 9
        assert plans == [1, 1] + [2] * 10
        assert [collectives[i] for i in (1, *range(3, 12))] == [1] * 10
        assert len(messages) == 2
        for message in messages:
            assert "m.norm" in message
            assert "majority: [2]" in message


def _together(context: RankContext, root: str) -> list[str]:
    messages = []
    with ProcessGroups.create(Layout(dp=2)) as groups:
        every = 1 + context.rank
        checkpointer = Checkpointer(root, groups=groups, check_replicas_every=every)
        with pytest.raises(PlanError) as caught:
            checkpointer.save(1, {"m": {"x": Replicated(torch.ones(2))}})
        messages.append(str(caught.value))
        for save in (checkpointer.save, checkpointer.save_async):
            _finished(save(2, {"m": {"x": Replicated(torch.ones(2))}}, check_replicas=True,
                           overwrite=True))  # fmt: skip
    return messages


def test_ranks_that_compare_at_different_saves_are_told(tmp_path: Path) -> None:
    for messages in run_ranks(2, _together, str(tmp_path)).results:
        assert "disagree on check_replicas" in messages[0]


def test_a_number_of_saves_is_asked_for(tmp_path: Path) -> None:
    for wrong in (-1, True):
        with pytest.raises(ConfigError, match="check_replicas_every"):
            Checkpointer(tmp_path, check_replicas_every=wrong)
    checkpointer = Checkpointer(tmp_path, check_replicas_every=1)
    state = {"t": {"x": torch.ones(3)}}
    assert [checkpointer.save(step, state).planned for step in (1, 2)] == [True, False]
    assert checkpointer.load({"t": Stored()}).step == 2
