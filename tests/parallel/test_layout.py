"""Layouts against an independent brute-force definition (G1, G2, G10), and what they refuse."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
import math
import pickle
import random
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.errors import LayoutError
from holdfast.parallel.layout import ALIASES, GROUP_NAMES, Layout
from tests.drawn import drawn

DENSE = {"tp": "tp", "cp": "cp", "dp": "dp", "pp": "pp"}
EXPERT = {"tp": "expt_tp", "ep": "ep", "dp": "expt_dp", "pp": "pp"}
NAMED = {
    "tp": {"tp"},
    "cp": {"cp"},
    "dp": {"dp"},
    "pp": {"pp"},
    "dp_cp": {"dp", "cp"},
    "dp_cp_ag": {"dp", "cp"},
    "mp": {"tp", "pp"},
    "tp_cp": {"tp", "cp"},
    "ep": {"ep"},
    "expt_tp": {"expt_tp"},
    "expt_dp": {"expt_dp"},
    "expt_dp_ag": {"expt_dp"},
    "tp_ep": {"expt_tp", "ep"},
    "tp_ep_pp": {"expt_tp", "ep", "pp"},
    "control": {"tp", "cp", "dp", "pp"},
}


def coordinates(layout: Layout, view: dict[str, str]) -> list[tuple[int, dict[str, int]]]:
    """Every (rank, coordinate), by counting like an odometer: no strides."""
    axes = [view[token] for token in layout.order.split("-") if token in view]
    spaces = [range(getattr(layout, axis)) for axis in reversed(axes)]
    found = []
    for rank, place in zip(layout.ranks, itertools.product(*spaces), strict=True):
        at = dict.fromkeys(view.values(), 0)
        at.update(zip(reversed(axes), place, strict=True))
        found.append((rank, at))
    return found


def ranks_by_place(layout: Layout, view: dict[str, str]) -> dict[tuple[int, ...], int]:
    """The rank at each place of a view, as the layout states the ranks' coordinates."""
    places = {}
    for rank in layout.ranks:
        at = layout.coordinate(rank) if view is DENSE else layout.expert_coordinate(rank)
        places[tuple(at[axis] for axis in view.values())] = rank
    return places


def brute_groups(layout: Layout, tokens: set[str]) -> list[tuple[int, ...]]:
    """All ranks that agree outside the tokens, in the order of the odometer."""
    view = DENSE if tokens <= set(DENSE.values()) else EXPERT
    buckets: dict[tuple[tuple[str, int], ...], list[int]] = {}
    for rank, at in coordinates(layout, view):
        outside = tuple((axis, i) for axis, i in at.items() if axis not in tokens)
        buckets.setdefault(outside, []).append(rank)
    return [tuple(bucket) for bucket in buckets.values()]


@st.composite
def layouts(draw: st.DrawFn, limit: int = 256) -> Layout:
    sizes = {}
    world = 1
    for axis in ("tp", "cp", "dp", "pp"):
        sizes[axis] = draw(st.sampled_from([n for n in (1, 2, 3, 4, 8) if n * world <= limit]))
        world *= sizes[axis]
    rest = world // sizes["pp"]
    expt_tp = draw(st.sampled_from([n for n in range(1, rest + 1) if rest % n == 0]))
    ep = draw(
        st.sampled_from([n for n in range(1, rest // expt_tp + 1) if rest // expt_tp % n == 0])
    )
    order = draw(st.permutations(["tp", "cp", "ep", "dp", "pp"]))
    dp_cp, expt_dp = sizes["cp"] * sizes["dp"], rest // (expt_tp * ep)
    replicas = draw(st.sampled_from([n for n in (1, 2, 3, 4) if dp_cp % n == expt_dp % n == 0]))
    ranks = None
    if draw(st.booleans()):
        start = draw(st.integers(0, 9))
        ranks = [start + 2 * r for r in range(world)]
        random.Random(draw(st.integers(0, 99))).shuffle(ranks)
    left = order[: order.index("pp")]
    dense = math.prod(sizes.get(token, 1) for token in left)
    expert = math.prod({"tp": expt_tp, "ep": ep, "dp": expt_dp}.get(token, 1) for token in left)
    if dense != expert:  # the views would not agree on pp: see the test of G2
        order = [*(token for token in order if token != "pp"), "pp"]
    return Layout(
        **sizes, ep=ep, expt_tp=expt_tp, order="-".join(order), ranks=ranks, replicas=replicas
    )


@drawn(quick=40, slow=120, layout=layouts(), data=st.data())
def test_every_group_equals_the_brute_force_definition(layout: Layout, data: st.DataObject) -> None:
    subsets = [
        (view, data.draw(st.sets(st.sampled_from(sorted(view.values())), min_size=1)))
        for view in (DENSE, EXPERT)
    ]
    named: list[tuple[str, set[str]]] = list(NAMED.items())
    named += [
        ("-".join(data.draw(st.permutations(sorted(tokens)))), tokens) for _, tokens in subsets
    ]
    for axes, tokens in named:
        expected = brute_groups(layout, tokens)
        assert sorted(layout.groups(axes)) == sorted(expected), axes
        assert sorted(rank for group in layout.groups(axes) for rank in group) == sorted(
            layout.ranks
        )
        assert {layout.size(axes)} == {len(group) for group in expected}
    rank = data.draw(st.sampled_from(layout.ranks))
    for axes, tokens in named:
        (expected_group,) = [g for g in brute_groups(layout, tokens) if rank in g]
        assert layout.group(axes, rank) == expected_group
        assert layout.has_group(axes, rank)


@settings(deadline=None, max_examples=60)
@given(layout=layouts())
def test_coordinates_are_the_odometer_and_lead_back(layout: Layout) -> None:
    dense, expert = ranks_by_place(layout, DENSE), ranks_by_place(layout, EXPERT)
    for rank, at in coordinates(layout, DENSE):
        assert layout.coordinate(rank) == at
        assert dense[tuple(at[axis] for axis in DENSE.values())] == rank
    for rank, at in coordinates(layout, EXPERT):
        assert layout.expert_coordinate(rank) == at
        assert expert[tuple(at[axis] for axis in EXPERT.values())] == rank
        assert layout.coordinate(rank)["pp"] == at["pp"]
    assert list(layout.coordinate(layout.ranks[0])) == ["tp", "cp", "dp", "pp"]
    assert Layout.from_dict(json.loads(json.dumps(layout.to_dict()))) == layout
    assert dataclasses.replace(layout) == layout
    assert pickle.loads(pickle.dumps(layout)) == layout == copy.deepcopy(layout)
    assert pickle.loads(pickle.dumps(layout)).coordinate(rank) == layout.coordinate(rank)


@settings(deadline=None, max_examples=60)
@given(layout=layouts())
def test_slices_and_pipeline_ends(layout: Layout) -> None:
    for whole in ("dp_cp", "expt_dp"):
        intra, inter = layout.groups(f"{whole}_intra"), layout.groups(f"{whole}_inter")
        length = layout.size(whole) // layout.replicas
        assert layout.size(f"{whole}_intra") == length
        assert layout.size(f"{whole}_inter") == layout.replicas
        for group in layout.groups(whole):
            mine = [piece for piece in intra if set(piece) <= set(group)]
            assert sum(sorted(mine, key=lambda piece: group.index(piece[0])), ()) == group
            for position in range(length):
                equal = tuple(rank for i, rank in enumerate(group) if i % length == position)
                assert equal in inter
                assert all(layout.group(f"{whole}_inter", rank) == equal for rank in equal)
        assert len(inter) * layout.replicas == len(intra) * length == layout.world_size
    for pipeline, ends in zip(layout.groups("pp"), layout.groups("embd"), strict=True):
        assert ends == (pipeline if layout.pp == 1 else (pipeline[0], pipeline[-1]))
        for rank in pipeline:
            assert layout.has_group("embd", rank) == (rank in ends)
            if rank in ends:
                assert layout.group("embd", rank) == ends
            else:
                with pytest.raises(LayoutError, match=f"Rank {rank} is an interior pipeline stage"):
                    layout.group("embd", rank)


def test_four_thousand_ranks() -> None:
    layout = Layout(
        tp=8, cp=2, dp=16, pp=16, ep=8, expt_tp=2, order="cp-tp-ep-dp-pp", ranks=range(7, 4103)
    )
    for axes, tokens in NAMED.items():
        assert sorted(layout.groups(axes)) == sorted(brute_groups(layout, tokens))
    assert layout.expt_dp == 16


@settings(deadline=None, max_examples=8)
@given(layout=layouts(limit=4096))
def test_large_layouts_equal_the_brute_force_definition(layout: Layout) -> None:
    for axes, tokens in NAMED.items():
        assert sorted(layout.groups(axes)) == sorted(brute_groups(layout, tokens))


def brute_pipelines(
    sizes: dict[str, int], order: tuple[str, ...], view: dict[str, str]
) -> list[list[int]]:
    axes = [view[token] for token in reversed(order) if token in view]
    counted = {**sizes, "expt_dp": 4}
    places = list(itertools.product(*(range(counted[axis]) for axis in axes)))
    pp = axes.index("pp")
    outside = {place[:pp] + place[pp + 1 :] for place in places}
    return [[r for r, p in enumerate(places) if p[:pp] + p[pp + 1 :] == o] for o in outside]


def test_both_views_share_pipelines_or_construction_fails_naming_both() -> None:
    """G2: over all orders of a layout with experts, agreement is checked, not hoped for."""
    accepted = 0
    for order in itertools.permutations(["tp", "cp", "ep", "dp", "pp"]):
        sizes = {"tp": 2, "cp": 2, "dp": 4, "pp": 2, "ep": 2, "expt_tp": 2}
        order_string = "-".join(order)
        pipelines = [
            {tuple(g) for g in brute_pipelines(sizes, order, view)} for view in (DENSE, EXPERT)
        ]
        if pipelines[0] != pipelines[1]:
            with pytest.raises(LayoutError, match=r"Dense: \[\[.*Expert: \[\["):
                Layout(**sizes, order=order_string)
            continue
        accepted += 1
        assert set(Layout(**sizes, order=order_string).groups("pp")) == pipelines[0]
    assert 0 < accepted < 120
    with pytest.raises(LayoutError) as caught:
        Layout(tp=2, pp=2, expt_tp=1, order="tp-pp-dp")
    assert "Dense: [[0, 2], [1, 3]]" in str(caught.value)
    assert "Expert: [[0, 1], [2, 3]]" in str(caught.value)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tp": 0}, "tp must be an integer of at least 1, got 0"),
    ({"dp": 2.0}, "dp must be an integer of at least 1, got 2.0"),
    ({"pp": True}, "pp must be an integer"),
    (
        {"tp": 3, "dp": 2, "ep": 4},
        r"3 \* 1 \* 2 \* 1 = 6 ranks .* 3 \* 4 \* 1 = 12 \(remainder 6\)",
    ),
    ({"tp": 2, "dp": 2, "ranks": [0, 1, 2]}, r"2 \* 1 \* 2 \* 1 = 4, but it has 3 ranks"),
    ({"dp": 2, "ranks": [3, 3]}, r"ranks \[3\] are in the list more than once"),
    ({"dp": 2, "ranks": [0, -1]}, r"must not be negative, got \[-1\]"),
    ({"dp": 2, "ranks": ["0", "1"]}, "must be integers"),
    ({"order": "tp-xp"}, r"unknown axes \['xp'\]"),
    ({"order": "tp-dp-tp"}, "names tp more than once"),
    ({"tp": 2, "order": "dp-pp"}, "lacks 'tp', but tp = 2"),
    ({"tp": 2, "expt_tp": 1, "order": "tp-pp"}, "lacks 'dp', but expt_dp = 2"),
    ({"ep": 2, "dp": 2, "order": "tp-dp-pp"}, "lacks 'ep', but ep = 2"),
    ({"dp": 3, "replicas": 2}, r"dp_cp has 3 ranks, .* replicas = 2 .*remainder 1"),
    ({"dp": 4, "ep": 4, "replicas": 2}, "expt_dp has 1 ranks"),
    ({"name": ""}, "must be a non-empty string"),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED)
def test_refusals_show_the_arithmetic(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        Layout(**fields)


def test_questions_that_have_no_answer() -> None:
    layout = Layout(tp=2, dp=2, ep=2, ranks=[4, 5, 6, 7])
    for axes, message in [
        ("xp", "in neither view"),
        ("tp-ep", "in neither view"),
        ("tp-tp", "names? an axis twice"),
        ("", "in neither view"),
    ]:
        with pytest.raises(LayoutError, match=message):
            layout.groups(axes)
    with pytest.raises(LayoutError, match="Rank 3 is not in layout 'model'"):
        layout.coordinate(3)
    with pytest.raises(LayoutError, match="Rank 3 is not in"):
        layout.has_group("embd", 3)
    with pytest.raises(LayoutError, match=r"unknown \['x'\], missing"):
        Layout.from_dict({"x": 1})


def test_layout_of_a_world_derives_dp() -> None:
    assert Layout.of_world(24, tp=2, pp=3).dp == 4
    assert Layout.of_world(24, tp=2, pp=3, dp=4) == Layout(tp=2, pp=3, dp=4)
    with pytest.raises(LayoutError, match=r"24 ranks cannot be divided by .* 5 .* \(remainder 4\)"):
        Layout.of_world(24, tp=5)
    with pytest.raises(LayoutError, match=r"'model': 1 rank cannot be divided"):
        Layout.of_world(1, tp=2)
    with pytest.raises(LayoutError, match=r"times dp = 3 makes 18 ranks, but world_size is 24"):
        Layout.of_world(24, tp=2, pp=3, dp=3)


def test_equal_layouts_have_equal_digests_and_others_do_not() -> None:
    base = {"tp": 2, "dp": 4, "pp": 2}
    layout = Layout(**base)
    assert Layout(**base, ranks=range(16), expt_tp=2).digest() == layout.digest()
    others = [
        Layout(**base, ranks=range(1, 17)),
        Layout(**base, order="tp-dp-pp"),
        Layout(**base, name="other"),
        Layout(**base, ep=2),
        Layout(**base, replicas=2),
        Layout(**{**base, "tp": 4, "dp": 2}),
    ]
    assert len({layout.digest(), *(other.digest() for other in others)}) == 7
    with pytest.raises(dataclasses.FrozenInstanceError):
        layout.tp = 4  # type: ignore[misc]


def test_layout_never_imports_torch() -> None:
    code = (
        "import sys; from holdfast.parallel import Layout; Layout(); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_every_named_group_is_known_to_the_oracle() -> None:
    parts = ("intra", "inter", "intra_ag")
    slices = {f"{whole}_{part}" for whole in ("dp_cp", "expt_dp") for part in parts}
    assert set(GROUP_NAMES) == set(NAMED) - {"control"} | slices | {"embd"}


# Layouts without experts, and other names of groups (G2).


@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_a_layout_without_experts_is_never_refused_for_its_order(data: st.DataObject) -> None:
    """G2: its dense groups are right, its expert groups right or refused, never others."""
    sizes = {axis: data.draw(st.sampled_from([1, 2, 3]), label=axis) for axis in DENSE}
    needed = [axis for axis, size in sizes.items() if size > 1]
    left_out = data.draw(st.sets(st.sampled_from(["tp", "cp", "ep", "dp", "pp"])))
    order = [
        token
        for token in data.draw(st.permutations(["tp", "cp", "ep", "dp", "pp"]))
        if token in needed or token not in left_out
    ] or ["dp"]
    layout = Layout(**sizes, order="-".join(order))
    for axes, tokens in NAMED.items():
        if tokens <= set(DENSE):
            assert sorted(layout.groups(axes)) == sorted(brute_groups(layout, tokens))
    pipelines = {tuple(group) for group in layout.groups("pp")}
    rank = data.draw(st.sampled_from(layout.ranks))
    if layout.has_expert_view:
        assert layout.expert_coordinate(rank)["pp"] == layout.coordinate(rank)["pp"]
        places = ranks_by_place(layout, EXPERT)
        for stage in range(layout.pp):
            at = {**layout.expert_coordinate(rank), "pp": stage}
            assert places[tuple(at[axis] for axis in EXPERT.values())] in next(
                group for group in pipelines if rank in group
            )
        assert set(layout.coordinates(rank)) == {*DENSE, *EXPERT.values()}
        return
    assert set(layout.coordinates(rank)) == set(DENSE)
    for axes in ("ep", "expt_tp", "expt_dp", "tp_ep", "tp_ep_pp", "expt_dp_intra", "expt_dp_ag"):
        with pytest.raises(LayoutError, match="no expert view"):
            layout.group(axes, rank)
        with pytest.raises(LayoutError, match=r"no expert view.*Dense: \[\[.*Expert: \[\["):
            layout.groups(axes)
    with pytest.raises(LayoutError, match="no expert view"):
        layout.expert_coordinate(rank)


def test_the_order_that_data_ranks_come_last_in() -> None:
    layout = Layout(tp=2, cp=2, pp=2, dp=2, order="tp-cp-pp-dp")
    assert layout.group("pp", 0) == (0, 4)
    assert layout.group("dp", 0) == (0, 8)
    assert not layout.has_expert_view
    with pytest.raises(LayoutError, match="enumerate pp differently"):
        Layout(tp=2, cp=2, pp=2, dp=2, ep=2, order="tp-cp-pp-ep-dp")
    assert Layout(cp=2, order="tp-cp-pp").size("expt_dp") == 2


@settings(deadline=None, max_examples=60)
@given(layout=layouts(limit=64))
def test_other_names_are_the_same_groups(layout: Layout) -> None:
    assert not set(ALIASES) & {*GROUP_NAMES, "control", "pos_embd"}
    for alias, name in ALIASES.items():
        if name.endswith("dist_opt"):
            continue
        assert layout.groups(alias) == layout.groups(name), alias
        assert layout.size(alias) == layout.size(name)
        assert layout.resolve(alias) == name
        for rank in layout.ranks[:3]:
            assert layout.has_group(alias, rank) == layout.has_group(name, rank)
            if layout.has_group(alias, rank):
                assert layout.group(alias, rank) == layout.group(name, rank)
    for alias, tokens in {"tp_dp_cp": {"tp", "dp", "cp"}, "tp_dp": {"tp", "dp"}}.items():
        assert sorted(layout.groups(alias)) == sorted(brute_groups(layout, tokens))
    firsts = [group[:1] for group in layout.groups("pp")]
    assert list(layout.groups("pos_embd")) == firsts
    for rank in layout.ranks:
        assert layout.has_group("pos_embd", rank) == ((rank,) in firsts)


@settings(deadline=None, max_examples=100)
@given(layout=layouts(limit=64))
def test_instances_of_a_sharded_optimizer(layout: Layout) -> None:
    """`intra_dist_opt`: all ranks of one slice; `inter_dist_opt`: equal places of all slices."""
    wholes = ["dp_cp", "expt_dp"] if layout.has_experts else ["dp_cp"]
    instances = []
    for whole in wholes:
        length = layout.size(whole) // layout.replicas
        at = {rank: i // length for group in layout.groups(whole) for i, rank in enumerate(group)}
        instances.append(
            tuple(
                tuple(rank for rank in layout.ranks if at[rank] == number)
                for number in range(layout.replicas)
            )
        )
    if len(set(instances)) > 1:
        for name in ("intra_dist_opt", "inter_dist_opt"):
            with pytest.raises(LayoutError, match=r"slices of dp_cp .* those of expt_dp"):
                layout.groups(name)
        return
    assert {frozenset(group) for group in layout.groups("intra_dist_opt")} == {
        frozenset(group) for group in instances[0]
    }
    assert layout.size("intra_dist_opt") == layout.world_size // layout.replicas
    for rank in layout.ranks:
        assert rank in layout.group("intra_dist_opt", rank)
    inter = {frozenset(group) for group in layout.groups("inter_dist_opt")}
    assert inter == {frozenset(group) for group in layout.groups("dp_cp_inter")}
    if layout.has_experts:
        assert inter == {frozenset(group) for group in layout.groups("expt_dp_inter")}
