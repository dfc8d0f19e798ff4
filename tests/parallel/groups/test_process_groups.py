"""Communicators of a layout in real processes: G4-G8, G10, G13, A3, A4, A6."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from holdfast.errors import DeadlineError, GroupError, HoldfastError, LayoutError
from holdfast.parallel import Layout, ProcessGroups, current_groups
from tests.harness import RankContext, run_ranks

Report = tuple[str, str, float]


def report(action: Callable[[], Any]) -> Report:
    """Class and text of what an action raises, and how long it took."""
    started = time.monotonic()
    try:
        made = action()
    except HoldfastError as error:
        return type(error).__name__, str(error), time.monotonic() - started
    if isinstance(made, ProcessGroups):
        made.close()
    return "", "", time.monotonic() - started


def num_communicators() -> int:
    from torch.distributed import distributed_c10d as c10d

    return len(c10d._world.pg_map)


def members_in_order(group: Any) -> list[int]:
    """The ranks of a communicator as a collective over it really orders them."""
    import torch
    from torch import distributed as dist

    mine = torch.tensor([dist.get_rank()])
    out = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(out, mine, group=group)
    return [int(rank) for rank in out]


# A4, G6, G8: a grid of four ranks out of six, in an order of its own.


def subset_grid(rank: RankContext) -> str:
    import torch
    from torch import distributed as dist

    if rank.rank in (2, 5):  # ranks of one group are in different numbers of others beforehand
        dist.new_group([2, 5], use_local_synchronization=True)
    before = num_communicators()
    layout = Layout(tp=2, dp=2, ep=2, expt_tp=1, ranks=[4, 2, 5, 3])
    if rank.rank < 2:
        reports = report(lambda: ProcessGroups.create(layout))
        assert reports[0] == "LayoutError"
        assert f"Rank {rank.rank} is not in layout 'model'" in reports[1]
        dist.distributed_c10d._get_default_store().wait(["done"])
        return "bystander"
    for _ in range(2):  # the second time finds nothing stale
        with ProcessGroups.create(layout) as groups:
            check_subset(groups, layout)
        assert num_communicators() == before
        with pytest.raises(GroupError, match="closed"):
            groups.group("tp")
        groups.close()
    with pytest.raises(RuntimeError, match="mine"), ProcessGroups.create(layout):
        raise RuntimeError("mine")
    assert num_communicators() == before
    torch.manual_seed(0)
    dist.distributed_c10d._get_default_store().set("done", "1")
    return "member"


def check_subset(groups: ProcessGroups, layout: Layout) -> None:
    from torch import distributed as dist

    rank = dist.get_rank()
    names = ["tp", "dp", "dp_cp", "mp", "tp_cp", "ep", "expt_dp", "tp_ep", "tp_ep_pp"]
    for name in [*names, "dp_cp_ag", "expt_dp_ag"]:
        planned = list(layout.group(name, rank))
        assert groups.has(name)
        assert dist.get_process_group_ranks(groups.group(name)) == planned
        assert members_in_order(groups.group(name)) == planned
        assert groups.index(name) == planned.index(rank) == groups.group(name).rank()
        assert groups.size(name) == 2 or name in ("tp_ep", "tp_ep_pp", "dp", "dp_cp", "expt_dp")
    for name in ("cp", "pp", "expt_tp", "dp_cp_inter"):
        assert not groups.has(name)
        assert groups.ranks(name) == (rank,)
        with pytest.raises(GroupError, match=f"'{name}' .* has size 1 .*mesh.'{name}'"):
            groups.group(name)
    groups.require("tp", "cp", "dp", "pp", "ep", "expt_dp")
    groups.require_complete()
    check_probing(groups)
    check_clones(groups, layout)
    check_meshes(groups, layout)
    assert groups.control.all_gather(str(rank).encode(), phase="who") == [b"4", b"2", b"5", b"3"]
    assert groups.control.coordinator == 4


def check_probing(groups: ProcessGroups) -> None:
    """G8: nothing can be had by guessing."""
    for name in ("tp", "dp", "pp", "cp", "tp_group", "dp_cp"):
        assert not hasattr(groups, name)
    with pytest.raises(AttributeError, match=r"looked up with group\('tp'\)"):
        _ = groups.tp
    for question in (groups.group, groups.has, groups.require):
        with pytest.raises(GroupError, match="'dpcp' is not a group"):
            question("dpcp")
    with pytest.raises(GroupError, match=r"groups\.control"):
        groups.group("control")
    with pytest.raises(GroupError, match="No process groups were given"):
        current_groups()
    with groups.as_default():
        assert current_groups() is groups
        with ProcessGroups.single().as_default() as inner:
            assert current_groups() is inner
        assert current_groups() is groups
    with pytest.raises(GroupError, match=r"groups\.as_default\(\)"):
        current_groups()


def check_clones(groups: ProcessGroups, layout: Layout) -> None:
    """G6: the members of the communicator, whatever the layout says by now."""
    assert groups.group("dp_cp_ag") is not groups.group("dp_cp")
    assert groups.group("dp_cp_ag").group_name != groups.group("dp_cp").group_name
    members = members_in_order(groups.group("dp_cp"))
    patched = Layout(tp=4, ranks=layout.ranks)
    groups.layout = patched
    try:
        clone = groups.clone("dp_cp", purpose="overlap")
        assert groups.group("overlap") is clone
        assert groups.ranks("overlap") == groups.ranks("dp_cp") == tuple(members)
    finally:
        groups.layout = layout
    assert members_in_order(clone) == members
    assert clone.group_name not in {
        groups.group(name).group_name for name in ("dp", "dp_cp", "dp_cp_ag")
    }
    for purpose, reports in [
        ("overlap", "already"),
        ("pp", "is a group of the layout, not a clone"),
    ]:
        with pytest.raises(GroupError, match=reports):
            groups.clone("dp_cp", purpose=purpose)


def check_meshes(groups: ProcessGroups, layout: Layout) -> None:
    import torch
    from torch.distributed.tensor import Shard, distribute_tensor

    rank = groups.rank
    mesh = groups.mesh("dp_cp", "tp")
    assert mesh.mesh_dim_names == ("dp_cp", "tp")
    assert mesh.mesh.tolist() == [[4, 2], [5, 3]]
    assert mesh.get_group("tp") is groups.group("tp")
    assert mesh.get_group("dp_cp") is groups.group("dp_cp")
    assert list(mesh.get_coordinate()) == [groups.index("dp_cp"), groups.index("tp")]
    whole = torch.arange(16.0).reshape(4, 4)
    tensor = distribute_tensor(whole, groups.mesh("tp"), [Shard(0)], src_data_rank=None)
    start = groups.index("tp") * 2
    assert torch.equal(tensor.to_local(), whole[start : start + 2])
    assert torch.equal(tensor.full_tensor(), whole)
    wide = groups.mesh("pp", "dp", "cp", "tp")
    assert tuple(wide.shape) == (1, 2, 1, 2)
    assert members_in_order(wide.get_group("pp")) == [rank]
    assert groups.mesh("cp", "tp").get_group("cp") is wide.get_group("cp")
    for names in (("tp", "mp"), ("tp", "ep"), ("dp", "dp_cp")):
        with pytest.raises(GroupError, match="do not form a grid"):
            groups.mesh(*names)
    for second in ("tp", "tensor_model_parallel"):
        with pytest.raises(GroupError, match="one or more different groups"):
            groups.mesh("tp", second)


def test_a_grid_on_some_ranks_leaves_the_others_alone() -> None:
    outcome = run_ranks(6, subset_grid, timeout_s=60)
    assert outcome.results == ["bystander"] * 2 + ["member"] * 4


# G4: disagreement and absence.


def disagreeing(rank: RankContext) -> dict[str, Report]:
    import torch.distributed as dist

    me = rank.rank
    reports: dict[str, Report] = {}

    def create(case: str, layout: Layout, *, timeout_s: float = 30, **options: Any) -> None:
        reports[case] = report(lambda: ProcessGroups.create(layout, timeout_s=timeout_s, **options))

    create("order", Layout(tp=2, dp=2, order="dp-tp-pp" if me == 3 else "tp-cp-ep-dp-pp"))
    create("sizes", Layout(tp=4) if me == 1 else Layout(tp=2, dp=2))
    create("halves", Layout(tp=4) if me > 1 else Layout(tp=2, dp=2))
    create("names", Layout(tp=2, dp=2), names=["tp"] if me == 0 else ["tp", "dp"])
    create("typo", Layout(tp=2, dp=2), names=["tp", "dq"] if me == 2 else ["tp", "dp"])
    create("orphan", Layout(tp=2, dp=2), names=["dp_cp_ag"])
    create("world", Layout(dp=2, ranks=(me, 5)), timeout_s=25)
    dist.barrier()
    reports["outsider"] = report(lambda: create_with_outsider(me == 1))
    dist.barrier()
    if me == 2:
        create("absent", Layout(dp=4, name="elsewhere"), timeout_s=2.5)
    else:
        create("absent", Layout(tp=2, dp=2, name="late"), timeout_s=2.5)
    dist.barrier()
    before = num_communicators()
    reports["halfway"] = report(lambda: create_with_fault(me == 1))
    assert num_communicators() == before
    dist.barrier()
    with ProcessGroups.create(Layout(tp=2, dp=2)) as groups:
        reports["well"] = ("", str(groups.control.all_gather(b"", phase="x")), 0.0)
    assert num_communicators() == before
    return reports


def create_with_outsider(is_outsider: bool) -> ProcessGroups:
    """One rank counts on ranks that do not count on it, and has announced itself before them."""
    from torch.distributed.distributed_c10d import _get_default_store

    from holdfast.parallel.groups.rendezvous import Rendezvous

    store, announce = _get_default_store(), Rendezvous._announce
    if not is_outsider:
        store.wait(["the outsider is there"])
        return ProcessGroups.create(Layout(tp=3, ranks=[0, 2, 3]), timeout_s=60)
    with pytest.MonkeyPatch.context() as patch:

        def announce_and_say_so(self: Rendezvous, text: str) -> None:
            announce(self, text)
            store.set("the outsider is there", "")

        patch.setattr(Rendezvous, "_announce", announce_and_say_so)
        return ProcessGroups.create(Layout(tp=4), timeout_s=60)


def create_with_fault(faulty: bool) -> ProcessGroups:
    """One rank cannot make its second communicator."""
    from holdfast.parallel.groups import _torch

    with pytest.MonkeyPatch.context() as patch:
        if faulty:
            real = _torch.new_group

            def new_group(ranks: Any, *, name: str, **options: Any) -> Any:
                if "/dp/" in name:
                    raise GroupError("no such device")
                return real(ranks, name=name, **options)

            patch.setattr(_torch, "new_group", new_group)
        return ProcessGroups.create(Layout(tp=2, dp=2), names=["tp", "dp"], timeout_s=2)


def test_disagreement_is_an_error_on_every_rank() -> None:
    results = run_ranks(4, disagreeing, timeout_s=90).results
    expected = {
        "order": (LayoutError, "Ranks [3] disagree with the others"),
        "sizes": (LayoutError, "Ranks [1] disagree with the others"),
        "halves": (LayoutError, "Ranks [2, 3] disagree with the others"),
        "names": (LayoutError, "Ranks [0] disagree with the others"),
        "typo": (GroupError, "rank 2: Cannot create 'dq'"),
        "world": (LayoutError, "needs 6 processes, and 4 run: start 6"),
        "orphan": (GroupError, "'dp_cp_ag' is a clone of 'dp_cp': create 'dp_cp' with it"),
    }
    for rank, reports in enumerate(results):
        for case, (kind, text) in expected.items():
            assert reports[case][0] == kind.__name__, (rank, case, reports[case])
            assert text in reports[case][1], (rank, case, reports[case])
            assert reports[case][2] < 20, "a disagreement is not a matter of waiting"
        assert reports["well"][1]
        assert reports["halfway"][0] in ("GroupError", "DeadlineError")
        assert reports["halfway"][2] < 20
        if rank != 3:  # the one that waits for rank 1 to connect says so
            assert "no such device" in reports["halfway"][1]
        assert "order dp-tp-pp" in reports["order"][1]
        assert "order tp-cp-ep-dp-pp" in reports["order"][1]
        kind_name, text, seconds = reports["outsider"]
        assert kind_name == "LayoutError"
        assert "Ranks [1] disagree with ranks 0, 2, 3" in text
        assert "rank 1 counts on ranks 0, 2, 3 for layout" in text
        assert seconds < 40
        kind_name, text, seconds = reports["absent"]
        assert kind_name == DeadlineError.__name__
        assert seconds < 20
        if rank != 2:
            assert "ranks [2] did not arrive (rank 2: create layout 'elsewhere'" in text
    # The first whose time is over reports for all: the others began to wait a moment later.
    assert max(reports["absent"][2] for reports in results) >= 2.5
    assert len({results[rank]["absent"][1] for rank in (0, 1, 3)}) == 1


# G5, A3, A6: groups that somebody else made.


def adopting(rank: RankContext) -> dict[str, Report]:
    from torch import distributed as dist

    me = rank.rank

    def new(*ranks: int) -> Any:
        return dist.new_group(list(ranks), sort_ranks=False)  # on every rank, as torch wants it

    tp = [new(0, 1), new(2, 3)][me // 2]
    dp = [new(0, 2), new(1, 3)][me % 2]
    back = [new(1, 0), new(3, 2)][me // 2]
    foreign = [new(2, 3), new(0, 1)]
    triple, both, gone = new(0, 1, 2), new(0, 1, 2, 3), new(0, 1)
    twins = [new(0, 1), new(2, 3)][me // 2]
    layout = Layout(tp=2, dp=2)
    before = num_communicators()
    reports: dict[str, Report] = {}

    def adopt(case: str, supplied: dict[str, Any], layout: Layout = layout) -> None:
        reports[case] = report(lambda: ProcessGroups.adopt(layout, supplied, timeout_s=5))
        assert num_communicators() == before

    good = {"tp": tp, "dp": dp}
    adopt("good", good)
    adopt("swapped", {"tp": dp, "dp": tp} if me == 2 else good)
    adopt("permuted", {"tp": back, "dp": dp} if me >= 2 else good)
    adopt("missing", {"mp": tp}, layout=Layout(tp=4))
    adopt("extra", {"tp": triple if me == 0 else tp, "dp": dp})
    adopt("whole", {"tp": both, "dp": dp})
    adopt("nonmember", {"tp": foreign[me // 2] if me == 1 else tp, "dp": dp})
    adopt("none", {"tp": None if me == 3 else tp, "dp": dp})
    adopt("object", {"tp": "tp" if me == 0 else tp, "dp": dp})
    adopt("forgot", {"tp": tp} if me == 1 else good)
    adopt("unknown", {"tp": tp, "ddp": dp} if me == 1 else good)
    adopt("aliased", {**good, "dp_cp": dp, "dp_cp_ag": dp})
    adopt("mixed", {"tp": twins if me == 0 else tp, "dp": dp})
    if gone != -100:
        dist.destroy_process_group(gone)
        before = num_communicators()
    adopt("destroyed", {"tp": gone if me == 0 else tp, "dp": dp})
    check_adopted(layout, tp, dp, both)
    return reports


def check_adopted(layout: Layout, tp: Any, dp: Any, both: Any) -> None:
    """What was adopted is used as it is, completed only by saying so, and left alive (A3)."""
    from torch import distributed as dist

    with ProcessGroups.adopt(layout, {"tp": tp, "dp": dp}) as groups:
        assert groups.group("tp") is tp
        groups.require_complete()
        assert groups.mesh("dp", "tp").get_group("tp") is tp
        with pytest.raises(GroupError, match=r"'mp' \(ranks .*was not created .*it holds tp, dp"):
            groups.group("mp")
        groups.require("tp", "dp", "pp")
        with pytest.raises(GroupError, match="Groups mp, tp_cp are missing"):
            groups.require("tp", "mp", "tp_cp")
        clone = groups.clone("dp", purpose="prefetch")
        assert dist.get_process_group_ranks(clone) == dist.get_process_group_ranks(dp)
    dist.barrier(group=tp)
    dist.barrier(group=dp)
    for supplied, missing in [({"tp": tp}, "dp"), ({"dp": dp}, "tp")]:
        reports = report(lambda supplied=supplied: require_complete(layout, supplied))
        assert reports[0] == "GroupError"
        assert f"no communicator was supplied for: {missing} (size 2)." in reports[1]
    with ProcessGroups.adopt(layout, {"tp": tp, "dp_cp": dp, "mp": tp}) as groups:
        groups.require_complete()  # cp is 1, so dp_cp is dp
    experts = Layout(tp=2, dp=2, ep=4, expt_tp=1)
    reports = report(lambda: require_complete(experts, {"tp": tp, "dp": dp}))
    assert "no communicator was supplied for: ep (size 4)." in reports[1]
    with ProcessGroups.adopt(experts, {"tp": tp, "dp": dp, "tp_ep": both}) as groups:
        groups.require_complete()
    check_experts_without_ep(tp, dp, both)
    check_other_names(layout, tp, dp, both)


def check_experts_without_ep(tp: Any, dp: Any, both: Any) -> None:
    """Experts whose tensor axis is not tp have groups of their own, though ep is 1."""
    for expt_tp, missing in ((1, "expt_dp (size 4)"), (4, "expt_tp (size 4)")):
        experts = Layout(tp=2, dp=2, expt_tp=expt_tp)
        reports = report(lambda experts=experts: require_complete(experts, {"tp": tp, "dp": dp}))
        assert reports[0] == "GroupError"
        assert f"no communicator was supplied for: {missing}." in reports[1]
        name = missing.split()[0]
        with ProcessGroups.adopt(experts, {"tp": tp, "dp": dp, name: both}) as groups:
            groups.require_complete()


def check_other_names(layout: Layout, tp: Any, dp: Any, both: Any) -> None:
    """Groups may be supplied, made and looked up by the names that Megatron gives them."""
    from torch import distributed as dist

    me = dist.get_rank()
    with ProcessGroups.adopt(
        layout, {"tensor_model_parallel": tp, "data_parallel": dp, "intra_dist_opt": both}
    ) as groups:
        groups.require_complete()
        assert set(groups.held()) == {"tp", "dp", "tp-cp-dp-pp"}
        assert groups.group("tp") is groups.group("tensor_model_parallel") is tp
        assert groups.has("data_parallel")
        assert not groups.has("intra_dp_cp")
        assert groups.ranks("data_parallel") == groups.ranks("dp")
        assert groups.size("position_embedding") == 1
        assert groups.mesh("data_parallel", "tensor_model_parallel").get_group("dp") is dp
        with pytest.raises(GroupError, match="'ddp' is not a group"):
            groups.group("ddp")
        clone = groups.clone("data_parallel", purpose="prefetch")
        assert dist.get_process_group_ranks(clone) == dist.get_process_group_ranks(dp)
    with ProcessGroups.adopt(layout, {"tp": tp, "tensor_model_parallel": tp, "dp": dp}) as groups:
        assert set(groups.held()) == {"dp", "tp"}
    reports = report(lambda: require_complete(layout, {"tp": tp, "tensor_model_parallel": both}))
    assert "'tensor_model_parallel' has ranks" in reports[1]
    twin = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])][me // 2]
    both_named = {"tp": tp, "tensor_model_parallel": twin, "dp": dp}
    reports = report(lambda: require_complete(layout, both_named))
    assert "'tp', for which another communicator was supplied, too" in reports[1]
    names = ["tensor_model_parallel", "tp", "tp_dp_cp"]
    with ProcessGroups.create(layout, names=names) as groups:
        assert groups.held() == ("tp", "tp-cp-dp")
        assert members_in_order(groups.group("tensor_and_data_parallel_with_cp")) == [0, 1, 2, 3]
    dense = Layout(tp=1, cp=2, pp=2, order="cp-pp-dp")
    with ProcessGroups.create(dense) as groups:
        assert groups.held() == ("cp", "pp", "dp_cp", "tp_cp", "mp", "embd", "dp_cp_ag")
        groups.require_complete()
        with pytest.raises(GroupError, match="no expert view"):
            groups.group("expt_dp")
        with pytest.raises(LayoutError, match="no expert view"):
            groups.ranks("ep")
        with pytest.raises(GroupError, match="no expert view"):
            groups.has("expt_dp")
    sliced = Layout(dp=4, replicas=2)
    with ProcessGroups.create(sliced) as groups:
        assert groups.group("dp_cp_intra_ag") is not groups.group("dp_cp_intra")
        assert groups.ranks("dp_cp_intra_ag") == groups.ranks("intra_dp_cp")
        # who asks for a clone that is made by default has it
        made = groups.clone("intra_dp_cp", purpose="dp_cp_intra_ag")
        assert made is groups.group("dp_cp_intra_ag")
        with pytest.raises(GroupError, match="already"):
            groups.clone("dp_cp", purpose="dp_cp_intra_ag")
        assert members_in_order(groups.group("inter_dist_opt")) == [me % 2, me % 2 + 2]


def require_complete(layout: Layout, supplied: dict[str, Any]) -> None:
    with ProcessGroups.adopt(layout, supplied) as groups:
        groups.require_complete()


def test_supplied_groups_are_verified_on_every_rank() -> None:
    results = run_ranks(4, adopting, timeout_s=90).results
    assert [reports["good"][0] for reports in results] == [""] * 4
    for case, text in {
        "swapped": "rank 2: Supplied groups do not fit layout 'model'",
        "permuted": "'tp' has ranks [3, 2], but planned are [2, 3]: the same ranks in another",
        "missing": "'mp' has ranks [2, 3], but planned are [0, 1, 2, 3]: missing [0, 1], extra []",
        "extra": "'tp' has ranks [0, 1, 2], but planned are [0, 1]: missing [], extra [2]",
        "whole": "extra [0, 1]",
        "nonmember": "rank 1: Supplied groups do not fit layout 'model'",
        "none": "'tp' is None, not a communicator; planned are ranks [2, 3]",
        "object": "'tp' is a str, not a torch.distributed.ProcessGroup",
        "unknown": "'ddp'",
        "aliased": "'dp_cp_ag' must be another communicator than 'dp_cp'",
        "mixed": "Group 'tp' (ranks [0, 1])",
        "destroyed": "'tp' is a communicator that torch does not know",
    }.items():
        for reports in results:
            assert reports[case][0] == "GroupError", (case, reports[case])
            assert text in reports[case][1], (case, reports[case])
            assert reports[case][2] < 5
    for reports in results:
        assert "'tp' has ranks [0, 2], but planned are [2, 3]" in reports["swapped"][1]
        assert "'dp' has ranks [2, 3], but planned are [0, 2]" in reports["swapped"][1]
        assert (
            "is -100, not a communicator: the handle new_group returns" in reports["nonmember"][1]
        )
        assert "planned are ranks [0, 1]" in reports["nonmember"][1]
        assert reports["forgot"][0] == "LayoutError"
        assert "Ranks [1] disagree with the others" in reports["forgot"][1]


# The larger grids: pipeline ends, hybrid sharding, several layouts at once (G3, G7, G10).


def several_layouts(rank: RankContext) -> list[dict[str, int]]:
    from torch import distributed as dist

    me = rank.rank
    before = num_communicators()
    pipeline = Layout(pp=8, ranks=[7, 6, 5, 4, 3, 2, 1, 0], name="pipeline")
    hybrid = Layout(cp=2, dp=4, ep=2, replicas=2, name="hybrid")
    halves = Layout(tp=2, dp=2, ranks=range(4) if me < 4 else range(4, 8), name="half")
    with (
        ProcessGroups.create(pipeline, names=["embd", "pp"]) as a,
        ProcessGroups.create(hybrid) as b,
        ProcessGroups.create(halves, names=["tp", "dp", "tp-dp"]) as c,
    ):
        assert a.has("embd") == (me in (0, 7))
        if me in (0, 7):
            assert members_in_order(a.group("embd")) == [7, 0]
        else:
            a.require("embd")
            with pytest.raises(GroupError, match="interior stage"):
                a.group("embd")
        for whole in ("dp_cp", "expt_dp"):
            for part in ("intra", "inter"):
                name = f"{whole}_{part}"
                if hybrid.size(name) > 1:
                    assert members_in_order(b.group(name)) == list(hybrid.group(name, me))
        mesh = b.mesh("dp_cp_inter", "dp_cp_intra")
        assert mesh.mesh.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
        assert mesh.get_group("dp_cp_intra") is b.group("dp_cp_intra")
        assert members_in_order(c.group("tp-dp")) == list(halves.ranks)
        assert c.control.ranks == halves.ranks
        phases = [g.control.all_gather(b"%d" % me, phase="same words") for g in (c, a, b)]
        assert [len(phase) for phase in phases] == [4, 8, 8]
        assert phases[1] == [b"7", b"6", b"5", b"4", b"3", b"2", b"1", b"0"]
        coordinates = [g.layout.coordinate(me) for g in (a, b, c)]
    assert num_communicators() == before
    dist.barrier()
    return coordinates


def test_layouts_in_one_process_do_not_interact() -> None:
    results = run_ranks(8, several_layouts, timeout_s=90).results
    assert results[7][0]["pp"] == 0
    assert [r[1]["dp"] for r in results] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [r[2]["dp"] for r in results] == [0, 0, 1, 1] * 2


# One process, with and without torch.distributed (G7).


def used_meshes(rank: RankContext) -> list[int]:
    """Count descriptors after each of three layouts whose meshes operations were cached for."""
    counts = []
    for _ in range(3):
        with ProcessGroups.create(Layout(tp=2)) as groups:
            mesh = groups.mesh("tp")
            rows = distribute_tensor(torch.ones(4, 6), mesh, [Shard(0)])
            columns = distribute_tensor(torch.ones(6, 4), mesh, [Shard(1)])
            (rows @ columns.redistribute(mesh, [Replicate()])).full_tensor()
            del mesh, rows, columns
        gc.collect()
        counts.append(len(os.listdir("/proc/self/fd")))
    return counts


def test_communicators_of_closed_groups_are_let_go_of_by_torchs_caches() -> None:
    for counts in run_ranks(2, used_meshes).results:
        assert len(set(counts)) == 1, counts


def threads_of_torch() -> int:
    return len(os.listdir("/proc/self/task")) - threading.active_count()


def added_by_groups(rank: RankContext) -> tuple[int, int]:
    """Count the communicators of a layout, and the threads of torch that they add."""
    gc.collect()
    communicators, threads = num_communicators(), threads_of_torch()
    with ProcessGroups.create(Layout(tp=2)) as groups:
        # The class that torch makes them of is its own again: a user's are as they were.
        assert type(dist.new_group([0, 1])._get_backend(torch.device("cpu"))) is (
            dist.ProcessGroupGloo
        )
        communicators, threads = num_communicators() - communicators, threads_of_torch() - threads
        assert groups.has("tp")
    return communicators - 1, threads - 3


def test_a_communicator_of_gloo_has_one_worker() -> None:
    """G13: one thread for connections and one for collectives; two would crash now and then."""
    for communicators, threads in run_ranks(2, added_by_groups).results:
        assert communicators > 0
        assert threads == 2 * communicators


def alone(rank: RankContext) -> None:
    with ProcessGroups.create(Layout(ranks=[0], name="one")) as groups:
        assert groups.control.all_gather(b"x", phase="p") == [b"x"]
        assert tuple(groups.mesh("dp", "tp").shape) == (1, 1)
        groups.require_complete()


def test_one_process_of_a_world_of_one() -> None:
    run_ranks(1, alone)


def test_one_process_needs_no_torch_distributed() -> None:
    for groups in (
        ProcessGroups.single(),
        ProcessGroups.single(rank=3),
        ProcessGroups.create(Layout()),
        ProcessGroups.adopt(Layout(), {}),
    ):
        with groups:
            groups.require_complete()
            assert groups.index("tp") == 0
            assert groups.size("dp_cp") == 1
            with pytest.raises(GroupError, match="size 1 and needs no communicator"):
                groups.group("dp")
            with pytest.raises(GroupError, match="one process"):
                groups.mesh("dp")
    with pytest.raises(GroupError, match="init_process_group first"):
        ProcessGroups.create(Layout(tp=2))
    with pytest.raises(GroupError, match="init_process_group first"):
        ProcessGroups.adopt(Layout(tp=2), {})
    with pytest.raises(GroupError, match="No process groups were given"):
        current_groups()
