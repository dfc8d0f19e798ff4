"""Explicit groups in saves and loads (rows A1-A4, A6, A7, A12 of the acceptance list)."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch.distributed as dist

from holdfast import (
    Checkpointer,
    GroupError,
    HoldfastError,
    Layout,
    PlanError,
    ProcessGroups,
    Sharded,
)
from tests.checkpoint.common import assert_equal, files_of, make_state
from tests.harness import RankContext, run_ranks


def _forbid_default_group(monkey: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> object:
        raise AssertionError("the default process group was looked up")

    for name in ("_get_default_group", "get_world_size", "get_rank"):
        monkey.setattr(dist.distributed_c10d, name, refuse)
    monkey.setattr(dist, "get_world_size", refuse)
    monkey.setattr(dist, "get_rank", refuse)


def _explicit_and_default(context: RankContext, root: str) -> tuple[bool, list[int]]:
    layout = Layout(tp=2, pp=2, dp=2)
    rank = context.rank
    with ProcessGroups.create(layout) as groups, pytest.MonkeyPatch.context() as monkey:
        _forbid_default_group(monkey)
        explicit = Checkpointer(f"{root}/explicit", groups=groups)
        report = explicit.save(3, make_state(layout, rank))
        with groups.as_default():
            Checkpointer(f"{root}/default").save(3, make_state(layout, rank))
        target = make_state(layout, rank, blank=True)
        loaded = explicit.load(target)
        assert_equal(target, layout, rank)
        assert loaded.values["values"] == make_state(layout, rank)["values"]
        own = loaded.values["own"]
        assert isinstance(own, dict)
        assert own["name"] == "-".join(map(str, layout.coordinate(rank).values()))
        assert int(own["t"]) == rank
        again = explicit.save(4, make_state(layout, rank))
        return again.planned, [report.nbytes, loaded.nbytes_read]


def test_save_and_load_with_explicit_groups_need_no_global(tmp_path: Path) -> None:
    """A1, A2: no default group is looked up; passing groups and as_default() give equal bytes."""
    outcome = run_ranks(8, _explicit_and_default, str(tmp_path))
    explicit = files_of(tmp_path / "explicit" / "iter_0000003")
    default = files_of(tmp_path / "default" / "iter_0000003")
    assert explicit.keys() == default.keys()
    for name in explicit:
        if name != "manifest.json":
            assert explicit[name] == default[name], name
    assert len([name for name in explicit if name.startswith("data/")]) == 8
    assert [planned for planned, _ in outcome.results] == [False] * 8
    written = [nbytes for _, (nbytes, _) in outcome.results]
    assert max(written) < 1.5 * sum(written) / len(written)


def _with_omissions(context: RankContext, root: str) -> list[str]:
    layout = Layout(tp=2, pp=2, dp=2)
    messages = []
    made = {name: _group(layout.groups(name), context.rank) for name in ("tp", "pp", "dp")}
    for missing in ("tp", "pp", "dp"):
        supplied = {name: group for name, group in made.items() if name != missing}
        with ProcessGroups.adopt(layout, supplied) as groups:
            with pytest.raises(GroupError) as caught:
                Checkpointer(f"{root}/{missing}", groups=groups).save(
                    1, make_state(layout, context.rank)
                )
            messages.append(str(caught.value))
    return messages


def _group(groups: tuple[tuple[int, ...], ...], rank: int) -> dist.ProcessGroup:
    made = [dist.new_group(list(ranks)) for ranks in groups]
    return next(g for g, ranks in zip(made, groups, strict=True) if rank in ranks)


def test_each_single_omitted_group_is_refused_before_any_file(tmp_path: Path) -> None:
    """A3: an axis in use without its communicator is an error on every rank, by name."""
    outcome = run_ranks(8, _with_omissions, str(tmp_path))
    for messages in outcome.results:
        for name, message in zip(("tp", "pp", "dp"), messages, strict=True):
            assert f"supplied for: {name} (size 2)." in message
    assert files_of(tmp_path) == {}


def _on_a_subset(context: RankContext, root: str) -> str:
    if context.rank < 2:
        dist.distributed_c10d._get_default_store().wait(["done"])
        return "outside"
    layout = Layout(tp=2, dp=2, ranks=(2, 3, 4, 5))
    rank = context.rank
    with ProcessGroups.create(layout) as groups:
        checkpointer = Checkpointer(root, groups=groups)
        checkpointer.save(1, make_state(layout, rank))
        target = make_state(layout, rank, blank=True)
        checkpointer.load(target)
        assert_equal(target, layout, rank)
        wrong = make_state(layout, rank)
        if rank == 4:
            # Rank 4 claims the piece of its tensor-parallel neighbour: two owners, and a gap.
            neighbour = make_state(layout, 5)["model"].mapping
            theirs = neighbour["layers.0.column"]
            wrong["model"].mapping["layers.0.column"] = Sharded(
                theirs.local, theirs.shape, offset=(5, 0), over=("tp",)
            )
        with pytest.raises(PlanError) as caught:
            checkpointer.save(2, wrong)
        assert checkpointer.latest() == 1
        dist.distributed_c10d._get_default_store().set("done", "")
        return str(caught.value)


def test_a_grid_on_a_subset_of_the_world_saves_loads_and_validates(tmp_path: Path) -> None:
    """A4: ranks outside take no part; a duplicate owner inside is found by all of the grid."""
    outcome = run_ranks(6, _on_a_subset, str(tmp_path))
    assert outcome.results[:2] == ["outside", "outside"]
    for message in outcome.results[2:]:
        assert "model.layers.0.column" in message
        assert "4" in message


def _foreign_member(context: RankContext, root: str) -> str:
    layout = Layout(tp=2, dp=2)
    tp = _group(layout.groups("tp"), context.rank)
    dp_groups = [dist.new_group(list(ranks)) for ranks in layout.groups("dp")]
    dp = dp_groups[0] if context.rank == 3 else _own(dp_groups, layout, context.rank)
    began = time.monotonic()
    with pytest.raises(GroupError) as caught:
        ProcessGroups.adopt(layout, {"tp": tp, "dp": dp}, timeout_s=20)
    assert time.monotonic() - began < 30
    return str(caught.value)


def _own(groups: list[dist.ProcessGroup], layout: Layout, rank: int) -> dist.ProcessGroup:
    return next(g for g, ranks in zip(groups, layout.groups("dp"), strict=True) if rank in ranks)


def test_a_group_one_is_not_a_member_of_is_an_error_everywhere(tmp_path: Path) -> None:
    """A6."""
    outcome = run_ranks(4, _foreign_member, str(tmp_path))
    assert all("rank 3" in message for message in outcome.results)


def _save_in_order(context: RankContext, root: str, order: str, ranks: tuple[int, ...]) -> None:
    layout = Layout(tp=2, pp=2, dp=2, order=order, ranks=ranks)
    with ProcessGroups.create(layout) as groups:
        checkpointer = Checkpointer(root, groups=groups)
        if checkpointer.latest() is None:
            groups.control.barrier(phase="before the first save")
            state = make_state(layout, context.rank)
            del state["own"]
            checkpointer.save(1, state)
        else:
            target = make_state(layout, context.rank, blank=True)
            del target["own"]
            checkpointer.load(target)
            assert_equal(target, layout, context.rank)


def test_coordinates_not_ranks_key_the_data(tmp_path: Path) -> None:
    """A7: saved with one order, loaded with another order and permuted ranks."""
    run_ranks(8, _save_in_order, str(tmp_path), "tp-pp-dp", tuple(range(8)))
    run_ranks(8, _save_in_order, str(tmp_path), "tp-cp-ep-dp-pp", (5, 2, 7, 0, 1, 6, 3, 4))


class _Breaks:
    def state_dict(self) -> dict[str, object]:
        raise RuntimeError("the loader's position is gone")

    def load_state_dict(self, state: dict[str, object]) -> None:
        raise AssertionError("not reached")


def _one_rank_fails(context: RankContext, root: str) -> str:
    layout = Layout(tp=2, dp=2)
    rank = context.rank
    with ProcessGroups.create(layout, timeout_s=20) as groups:
        checkpointer = Checkpointer(root, groups=groups)
        checkpointer.save(1, make_state(layout, rank))
        state = make_state(layout, rank)
        if rank == 2:
            state["loader"] = _Breaks()
        began = time.monotonic()
        with pytest.raises(HoldfastError) as caught:
            checkpointer.save(2, state)
        assert time.monotonic() - began < 30
        assert checkpointer.latest() == 1
        checkpointer.save(3, make_state(layout, rank))
        assert checkpointer.steps() == [1, 3]
        return str(caught.value)


def test_one_rank_failing_to_build_its_state_fails_all(tmp_path: Path) -> None:
    """A12: bounded, by name, and the previous checkpoint stays the newest."""
    outcome = run_ranks(4, _one_rank_fails, str(tmp_path))
    for message in outcome.results:
        assert "rank 2" in message
        assert "the loader's position is gone" in message
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".saving")]


def _no_groups_given(context: RankContext, root: str) -> str:
    with pytest.raises(GroupError) as caught:
        Checkpointer(root)
    return str(caught.value)


def test_several_processes_without_groups_are_refused(tmp_path: Path) -> None:
    """One forgotten argument must not turn every rank into 'rank 0 of size 1'."""
    outcome = run_ranks(2, _no_groups_given, str(tmp_path))
    assert all("groups" in message for message in outcome.results)
