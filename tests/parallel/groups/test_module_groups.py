"""Communicators of several modules in real processes (M18): who has which, what fails on all."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from holdfast.errors import GroupError, HoldfastError, LayoutError
from holdfast.parallel import Layout, ModuleGroups, ModuleLayouts, ProcessGroups
from tests.harness import RankContext, run_ranks


def num_communicators() -> int:
    from torch.distributed import distributed_c10d as c10d

    return len(c10d._world.pg_map)


def members(groups: ProcessGroups, name: str) -> list[int]:
    """The ranks of a communicator, as a collective over it orders them."""
    group = groups.group(name)
    out = [torch.empty(1, dtype=torch.int64) for _ in range(group.size())]
    dist.all_gather(out, torch.tensor([groups.rank]), group=group)
    return [int(rank) for rank in out]


# Modules on ranks 1-5 of seven: two colocated, one of its own.

OFFSET = ModuleLayouts(
    {
        "vision": Layout(dp=2, ranks=(2, 1)),
        "language": Layout(tp=2, pp=2, ranks=(3, 4, 5, 6)),
        "head": Layout(tp=2, ranks=(1, 2)),
    },
    edges=[("vision", "language"), ("vision", "head")],
)


def offset(rank: RankContext) -> Any:
    """What each rank has, and the members of its communicators."""
    before = num_communicators()
    if not 1 <= rank.rank <= 6:
        with pytest.raises(LayoutError, match=r"Rank [07] is not in layout 'modules'"):
            ModuleGroups.create(OFFSET)
        return num_communicators() == before
    with ModuleGroups.create(OFFSET) as groups:
        assert groups.rank == rank.rank
        assert groups.modules == OFFSET.modules_of(rank.rank)
        assert groups.roles == OFFSET.roles_of(rank.rank)
        assert members(groups.union, "dp_cp") == [1, 2, 3, 4, 5, 6]
        assert groups.control is groups.union.control
        for module, layout in OFFSET.items():
            assert groups.has(module) == (module in groups.modules)
            if not groups.has(module):
                with pytest.raises(GroupError, match=f"Rank {rank.rank} does not have .*{module}"):
                    _ = groups[module]
                continue
            assert groups[module].layout == layout
            for name in ("tp", "dp", "pp"):
                if layout.size(name) > 1:
                    assert members(groups[module], name) == list(layout.group(name, rank.rank))
        check_edges(groups)
        if rank.rank in (1, 2):
            check_colocated(groups)
        with pytest.raises(LayoutError, match="Unknown module 'audio'"):
            groups.has("audio")
        kept = groups
    assert num_communicators() == before
    kept.close()
    with pytest.raises(GroupError, match="closed"):
        kept.union.group("dp_cp")
    with pytest.raises(GroupError, match="closed"):
        kept[kept.modules[0]].held()
    return True


def check_edges(groups: ModuleGroups) -> None:
    """All ranks of both ends by number, on communicators of their own."""
    assert members(groups.edge("vision", "language"), "dp") == [1, 2, 3, 4, 5, 6]
    with pytest.raises(
        GroupError, match=r"Unknown edge language -> vision; the edges are: vision -> langu"
    ):
        groups.edge("language", "vision")
    if groups.rank in (1, 2):
        assert members(groups.edge("vision", "head"), "dp") == [1, 2]
    else:
        with pytest.raises(GroupError, match=f"Rank {groups.rank} has neither 'vision' nor 'head'"):
            groups.edge("vision", "head")


def check_colocated(groups: ModuleGroups) -> None:
    """The same ranks, but nothing that one module launches waits for the other."""
    held = {
        groups["vision"].group("dp").group_name,
        groups["head"].group("tp").group_name,
        groups.edge("vision", "head").group("dp").group_name,
        groups.edge("vision", "language").group("dp").group_name,
        groups.union.group("dp_cp").group_name,
    }
    assert len(held) == 5
    assert groups["vision"].control is not groups["head"].control
    assert members(groups["vision"], "dp") == [2, 1]
    assert members(groups["head"], "tp") == [1, 2]


def test_each_rank_has_its_modules_and_edges_and_others_take_no_part() -> None:
    """M18: offset spans, colocated modules, ranks outside; and all is destroyed at the end."""
    assert run_ranks(8, offset).results == [True] * 8


# Two models in one program.


def two_models(rank: RankContext) -> Any:
    """The modules have equal names, and their ranks overlap without being equal."""
    actor = ModuleLayouts(
        {"vision": Layout(), "language": Layout(dp=2, ranks=(1, 2))}, name="actor"
    )
    critic = ModuleLayouts({"vision": Layout(dp=2, ranks=(1, 2)), "language": Layout(ranks=(3,))},
                           name="critic")  # fmt: skip
    seen = []
    for layouts in (actor, critic):
        if rank.rank in layouts.union.ranks:
            with ModuleGroups.create(layouts, timeout_s=20) as groups:
                for module in groups.modules:
                    if layouts[module].dp > 1:
                        seen.append(members(groups[module], "dp"))
    return seen


def test_two_models_in_one_program_do_not_meet() -> None:
    """Ranks find each other under the name of the model, not of the module alone."""
    assert run_ranks(4, two_models).results == [[], [[1, 2]] * 2, [[1, 2]] * 2, []]


def moved(rank: RankContext) -> Any:
    """The ranks of a module, on ranks that have made its groups before and ranks that have not."""
    seen = []
    for ranks in ((0, 1), (1, 2)):
        (other,) = {0, 1, 2} - {*ranks}
        layouts = ModuleLayouts(
            {"vision": Layout(dp=2, ranks=ranks), "head": Layout(ranks=(other,))}
        )
        with ModuleGroups.create(layouts, timeout_s=20) as groups:
            if groups.has("vision"):
                seen.append(members(groups["vision"], "dp"))
    return seen


def test_a_module_may_move_to_other_ranks() -> None:
    """Its creations are counted within each placement of all modules."""
    assert run_ranks(3, moved).results == [[[0, 1]], [[0, 1], [1, 2]], [[1, 2]]]


# Which groups are made.


def chosen_names(rank: RankContext) -> Any:
    layouts = ModuleLayouts({"vision": Layout(tp=2, dp=2), "language": Layout(tp=2, dp=2)})
    with ModuleGroups.create(layouts, names={"vision": ("tp",)}) as groups:
        return groups["vision"].held(), groups["language"].has("dp"), groups["language"].has("tp")


def test_the_groups_of_a_module_can_be_chosen() -> None:
    assert run_ranks(4, chosen_names).results == [(("tp",), True, True)] * 4


# What fails on one rank.


def failing(rank: RankContext, what: str) -> Any:
    """Class and text of the error here, and whether all communicators are destroyed."""
    before = num_communicators()
    language = Layout(tp=2, ranks=(2, 3))
    names: dict[str, tuple[str, ...]] = {}
    edges = [("vision", "language")]
    if what == "layouts" and rank.rank == 1:
        language = Layout(dp=2, ranks=(2, 3))
    if what == "edges" and rank.rank == 2:
        edges = []
    if what == "a module" and rank.rank >= 2:
        names = {"language": ("no such group",)}
    if what == "an unknown module" and rank.rank == 0:
        names = {"audio": ("tp",)}
    if what == "a module on one rank" and rank.rank == 3:
        names = {"language": ("tp", "dp")}
    layouts = ModuleLayouts({"vision": Layout(dp=2), "language": language}, edges=edges)
    if what in ("an edge", "not ours"):
        error = GroupError("no more descriptors") if what == "an edge" else OSError("descriptors")
        fail_on_edges(rank.rank, error)
    started = time.monotonic()
    try:
        ModuleGroups.create(layouts, names=names, timeout_s=60)
    except HoldfastError as error:
        assert time.monotonic() - started < 30, "no rank waits for its deadline"
        return type(error).__name__, " ".join(str(error).split()), num_communicators() == before
    return "", "", False


def fail_on_edges(rank: int, error: Exception) -> None:
    """On rank 0 the groups of the edge cannot be made."""
    create = ProcessGroups.create

    def fails(layout: Layout, **settings: Any) -> ProcessGroups:
        made = create(layout, **settings)
        if rank == 0 and "->" in layout.name:
            made.close()
            raise error
        return made

    ProcessGroups.create = fails  # type: ignore[method-assign,assignment]


@pytest.mark.parametrize(
    ("what", "kind", "parts"),
    [
        (
            "layouts",
            "PlanError",
            ["the ranks disagree on the module layouts", "on ranks 0, 2, 3", "on rank 1"],
        ),
        ("edges", "PlanError", ["the ranks disagree", "on ranks 0, 1, 3", "on rank 2"]),
        ("a module", "GroupError", ["groups of all modules", "ranks 2, 3:", "no such group"]),
        ("a module on one rank", "", ["groups of all modules", "rank"]),
        (
            "an unknown module",
            "LayoutError",
            ["1 of 4 ranks failed (compare module layouts): rank 0:", "Unknown module 'audio'"],
        ),
        ("not ours", "HoldfastError", ["module groups: end", "rank 0: OSError: descriptors"]),
        ("an edge", "GroupError", ["create module groups: end", "rank 0: no more descriptors"]),
    ],
)  # fmt: skip
def test_what_fails_on_one_rank_is_raised_on_all(what: str, kind: str, parts: list[str]) -> None:
    """With its name, and nothing that was made before is left on any rank."""
    results = run_ranks(4, failing, what).results
    for rank, (name, text, is_clean) in enumerate(results):
        assert name == (kind or name) != "", (rank, text)
        for part in parts:
            assert part in text, (rank, text)
        assert is_clean, (rank, text)


def test_module_groups_do_not_pass_for_those_of_one_layout() -> None:
    """What takes ProcessGroups says which of them to give."""
    with (
        ModuleGroups.create(ModuleLayouts({"vision": Layout()})) as groups,
        pytest.raises(AttributeError, match=r"groups\[module\].*groups\.union"),
    ):
        _ = groups.layout
