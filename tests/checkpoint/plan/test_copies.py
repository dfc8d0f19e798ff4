"""Copies of replicated boxes in the plan: one for each coordinate, by a rank that has it."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast import ConfigError, Layout, PlanError, Replicated, Sharded
from holdfast.checkpoint.options import SaverOptions
from holdfast.checkpoint.plan import assign_writers
from holdfast.checkpoint.plan.claims import claims_of
from holdfast.checkpoint.plan.make_plan import RankShare, make_plan
from holdfast.format.stored_copies import CopyPolicy
from holdfast.format.values import Codecs
from holdfast.parallel.layout import DENSE_AXES
from holdfast.state.flatten import flatten_state
from holdfast.state.markers import OnLayout
from holdfast.writer.records import CommitPlan

State = dict[str, object]


def plan_of(
    layout: Layout, states: list[State], policy: CopyPolicy | None
) -> tuple[CommitPlan, list[RankShare]]:
    claims = [
        claims_of(flatten_state(state, layout=layout, rank=rank, codecs=Codecs()))[0]
        for rank, state in zip(layout.ranks, states, strict=True)
    ]
    return make_plan(
        claims, ranks=layout.ranks, coordinates=[layout.coordinates(r) for r in layout.ranks],
        signature="0" * 32, block_nbytes=1 << 20, copies=policy,
    )  # fmt: skip


def state_of(layout: Layout, rank: int, tensors: dict[str, tuple[int, tuple[str, ...]]]) -> State:
    """Tensors of (rows, axes that cut them); whole where there are none."""
    state: State = {}
    for name, (rows, axes) in tensors.items():
        if not axes:
            state[name] = Replicated(torch.zeros(rows, 3))
            continue
        group = layout.group(axes[0], rank)
        size = -(-rows // len(group))
        start = min(size * group.index(rank), rows)
        local = torch.zeros(max(min(size, rows - start), 0), 3)
        state[name] = Sharded(local, (rows, 3), dims={0: axes[0]})
    return {"t": state}


def written(plan: CommitPlan) -> dict[tuple[str, int], list[tuple[int, tuple[int, ...], int]]]:
    """(key, copy) -> writer, box (offset, extent), bytes of each row."""
    rows: dict[tuple[str, int], list[tuple[int, tuple[int, ...], int]]] = defaultdict(list)
    for i in range(len(plan.row_tensor)):
        key = plan.keys[plan.row_tensor[i]]
        box = (*plan.row_offset[i].tolist(), *plan.row_extent[i].tolist())
        writer = plan.ranks[plan.writers[plan.row_file[i]]]
        rows[key, int(plan.row_copy[i])].append((writer, box, int(plan.row_nbytes[i])))
    return rows


def holders_of(plan: CommitPlan, row: int) -> list[int]:
    """The ranks that the plan states to hold the box of a row."""
    first, last = plan.holder_ptr[plan.row_holders[row] :][:2].tolist()
    ranks: list[int] = plan.holder[first:last].tolist()
    return ranks


def check_holders(plan: CommitPlan, layout: Layout, states: list[State]) -> None:
    """Every row has the ranks, ascending, whose states have its box."""
    holders: dict[tuple[str, tuple[int, ...]], list[int]] = defaultdict(list)
    for rank, state in sorted(zip(layout.ranks, states, strict=True), key=lambda pair: pair[0]):
        for leaf in flatten_state(state, layout=layout, rank=rank, codecs=Codecs()).leaves.values():
            for box in leaf.boxes:
                holders[leaf.key, (*box.offset, *box.shape)].append(rank)
    for i in range(len(plan.row_tensor)):
        box = (*plan.row_offset[i].tolist(), *plan.row_extent[i].tolist())
        assert holders_of(plan, i) == holders[plan.keys[plan.row_tensor[i]], box]


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_each_coordinate_has_one_whole_copy(data: st.DataObject) -> None:
    """B1 and B10, by brute force over layouts, tensors and axes."""
    sizes = {axis: data.draw(st.sampled_from([1, 2, 3])) for axis in ("tp", "cp", "dp", "pp")}
    if np.prod(list(sizes.values())) > 16:
        sizes["cp"] = sizes["pp"] = 1
    ranks = [*range(int(np.prod(list(sizes.values()))))]
    layout = Layout(**sizes, ranks=ranks[:: data.draw(st.sampled_from([1, -1]))])
    tensors = data.draw(
        st.dictionaries(
            st.sampled_from("abcdef"),
            st.tuples(
                st.integers(1, 9),
                st.sampled_from([(), ("tp",), ("dp",), ("cp",)]),
            ),
            min_size=1,
        )
    )
    axes = tuple(data.draw(st.sets(st.sampled_from(DENSE_AXES), min_size=1)))
    axes = tuple(axis for axis in DENSE_AXES if axis in axes)
    states = [state_of(layout, rank, tensors) for rank in layout.ranks]
    plan, shares = plan_of(layout, states, CopyPolicy(axes=axes, max_fraction=100))
    plain, _ = plan_of(layout, states, None)
    check_holders(plan, layout, states)
    check_holders(plain, layout, states)
    rows = written(plan)
    for name, (_, cut) in tensors.items():
        primary = {box for _, box, _ in rows[f"t.{name}", 0]}
        assert {box for _, box, _ in written(plain)[f"t.{name}", 0]} == primary
        # The axes along which the holders of one box differ, of those that were asked for.
        free = [axis for axis in axes if axis not in cut]
        expected = {tuple(layout.coordinates(rank)[axis] for axis in free) for rank in layout.ranks}
        by_place = defaultdict(set)
        for copy in range(len(expected)):
            for writer, box, _ in rows[f"t.{name}", copy]:
                place = tuple(layout.coordinates(writer)[axis] for axis in free)
                assert box not in by_place[place]
                by_place[place].add(box)
        assert dict(by_place) == dict.fromkeys(expected, primary)
        assert (f"t.{name}", len(expected)) not in rows
    assert plan.total_nbytes == plain.total_nbytes
    assert plan.copies_nbytes == int(plan.row_nbytes.sum()) - plain.total_nbytes
    assert sum(len(share.rows) for share in shares) == len(plan.row_tensor)


def test_large_copies_are_cut_alike_and_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy that outweighs the rest is written by all ranks of its coordinate, in equal parts."""
    monkeypatch.setattr(assign_writers, "MIN_PIECE_NBYTES", 64)
    layout = Layout(tp=2, dp=3)
    states: list[State] = [{"t": {"big": Replicated(torch.zeros(300_000, 3))}}] * 6
    plan, shares = plan_of(layout, states, CopyPolicy(axes=("tp",)))
    assert all(holders_of(plan, i) == [*range(6)] for i in range(len(plan.row_tensor)))
    loads = np.zeros(6)
    np.add.at(loads, np.array(plan.writers)[plan.row_file], plan.row_nbytes)
    assert loads.max() / loads.mean() < 1.02
    boxes = [sorted(box for _, box, _ in rows) for _, rows in sorted(written(plan).items())]
    assert len(boxes) == 2
    assert boxes[0] == boxes[1]
    assert all(len(share.cuts) == len(share.rows) >= 1 for share in shares)


def test_experts_and_modules_on_other_layouts_follow_their_own_coordinates() -> None:
    layout = Layout(tp=2, dp=2, name="language")
    vision = Layout(tp=1, dp=4, name="vision")
    states: list[State] = [
        {
            "language": {"norm": Replicated(torch.zeros(4))},
            "vision": OnLayout(vision, {"norm": Replicated(torch.zeros(4))}),
        }
    ] * 4
    plan, _ = plan_of(layout, states, CopyPolicy(axes=("tp",)))
    copies = dict(sorted(written(plan)))
    assert copies == {"language.norm": 1, "vision.norm": 0}


def test_experts_are_copied_along_the_axes_of_their_own_view() -> None:
    """B7: with expt_tp < tp no rank along tp holds a copy that `tp` asks for; B1: a limit."""
    layout = Layout(tp=2, dp=2, expt_tp=1)
    up = torch.zeros(8, 4)
    states: list[State] = [
        {
            "t": {
                "norm": Replicated(torch.zeros(4)),
                "table": Replicated(torch.zeros(40)),
                "expert": Sharded(up.clone(), (8, 4), dims={0: "expt_tp"}),
            }
        }
        for _ in layout.ranks
    ]
    for axes, limit, expected in (
        (("tp",), None, {"t.expert": 0, "t.norm": 1, "t.table": 1}),
        (("tp",), 16, {"t.expert": 0, "t.norm": 1, "t.table": 0}),
        (("tp",), 15, {"t.expert": 0, "t.norm": 0, "t.table": 0}),
        (("dp",), None, {"t.expert": 3, "t.norm": 1, "t.table": 1}),
    ):
        policy = CopyPolicy(axes=axes, max_fraction=9, max_nbytes=limit)
        plan, _ = plan_of(layout, states, policy)
        assert dict(sorted(written(plan))) == expected
        assert plan.copies_nbytes == int(plan.row_nbytes.sum()) - plan.total_nbytes


def test_more_than_the_fraction_is_refused_by_name() -> None:
    layout = Layout(tp=4)
    states = [
        state_of(layout, rank, {"norm": (2, ()), "head": (40, ("tp",))}) for rank in layout.ranks
    ]
    plan_of(layout, states, CopyPolicy(axes=("tp",), max_fraction=72 / 504))
    with pytest.raises(PlanError, match=r"72 bytes of copies for 504 .* \(bytes\): t\.norm 72"):
        plan_of(layout, states, CopyPolicy(axes=("tp",), max_fraction=71 / 504))


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("replicate_over", ("tq",)),
        ("replicate_over", 3),
        ("replicate_over", b"tp"),
        ("max_copy_fraction", -0.1),
        ("max_copy_fraction", float("nan")),
        ("max_copy_fraction", True),
        ("max_copied_nbytes", -1),
        ("max_copied_nbytes", 2.5),
        ("on_drift", "ignore"),
    ],
)
def test_what_cannot_be_meant_is_refused(argument: str, value: object) -> None:
    with pytest.raises(ConfigError, match=argument):
        SaverOptions(**{argument: value})  # type: ignore[arg-type]


def test_axes_are_taken_in_one_order() -> None:
    assert SaverOptions(replicate_over="tp").copies.axes == ("tp",)
    assert SaverOptions(replicate_over=["dp", "tp", "tp"]).copies.axes == ("tp", "dp")
