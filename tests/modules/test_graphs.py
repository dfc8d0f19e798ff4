"""The invariant of several modules, over generated graphs and placements.

Training equals one process; a checkpoint loaded under any other placement and saved again is the
same checkpoint; no record depends on which rank is 0 (M1, M4, M7, M9, M10, M12, M16, M19).
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from holdfast import Checkpointer, ModuleGroups, ModuleLayouts, module_parts
from tests.harness import RankContext, run_ranks
from tests.modules.common import assert_same_checkpoints
from tests.modules.graphs import Graph, World, make_graph, place, whole

NUM_STEPS = 2


def _assert_like_twin(world: World, twin: World, case: str) -> None:
    expected = dict(twin.parameters())
    for name, parameter in world.parameters():
        torch.testing.assert_close(
            whole(parameter),
            whole(expected[name]),
            rtol=1e-9,
            atol=1e-9,
            msg=f"{case}: {name}",
        )


def _go_on(world: World, twin: World, steps: range, case: str) -> None:
    for step in steps:
        norm, expected = world.step(step), twin.step(step)
        assert abs(norm - expected) <= 1e-9 * max(1.0, expected), f"{case}: {norm} {expected}"
        world.optimizer.synchronize()
        _assert_like_twin(world, twin, f"{case} step {step}")


def _run_case(context: RankContext, root: str, seed: int, num_ranks: int, first: int) -> None:
    rng = random.Random(seed)
    graph = make_graph(rng)
    placements = [
        place(graph, rng, num_ranks=num_ranks, first=first, name=f"{seed} {number}")
        for number in range(2)
    ]
    if context.rank not in placements[0].union.ranks:
        return
    twin = World(graph, None)
    for number, layouts in enumerate(placements):
        case = f"seed {seed}, {layouts!r}, {graph}"
        with (
            ModuleGroups.create(layouts) as groups,
            Checkpointer(f"{root}/{seed}-{number}", groups=groups.union) as checkpointer,
        ):
            world = World(graph, groups)
            if number:
                _blank(world)
                before = Checkpointer(f"{root}/{seed}-0", groups=groups.union)
                before.load(module_parts(groups, world.parts()))
                _assert_like_twin(world, twin, case)
            else:
                _go_on(world, twin, range(NUM_STEPS), case)
            checkpointer.save(NUM_STEPS, module_parts(groups, world.parts()))
            if number:
                _go_on(world, twin, range(NUM_STEPS, 2 * NUM_STEPS), case)
            world.optimizer.close()


def _blank(world: World) -> None:
    with torch.no_grad():
        for _, parameter in world.parameters():
            parameter.fill_(float("nan"))


def _cases(context: RankContext, root: str, seeds: list[int], num_ranks: int, first: int) -> None:
    for seed in seeds:
        _run_case(context, root, seed, num_ranks, first)


def _check(tmp_path: Path, seeds: list[int], *, num_ranks: int, first: int) -> None:
    run_ranks(first + num_ranks, _cases, str(tmp_path), seeds, num_ranks, first, timeout_s=400)
    for seed in seeds:
        one, other = (tmp_path / f"{seed}-{n}" / f"iter_{NUM_STEPS:07}" for n in range(2))
        assert_same_checkpoints(one, other)


@pytest.mark.parametrize(
    ("num_ranks", "first", "count"),
    [
        (4, 0, 1),
        pytest.param(4, 0, 4, marks=pytest.mark.slow),
        pytest.param(2, 1, 4, marks=pytest.mark.slow),
    ],
)
def test_any_graph_trains_as_one_process_and_moves(
    tmp_path: Path, num_ranks: int, first: int, count: int
) -> None:
    seeds = list(range(10 * num_ranks, 10 * num_ranks + count))
    _check(tmp_path, seeds, num_ranks=num_ranks, first=first)


@pytest.mark.parametrize(
    "seeds",
    [
        pytest.param(range(1000, 1001), marks=pytest.mark.slow),
        pytest.param(range(1001, 1011), marks=pytest.mark.nightly),
        pytest.param(range(1011, 1019), marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_many_graphs_on_eight_ranks(tmp_path: Path, seeds: range) -> None:
    _check(tmp_path, list(seeds), num_ranks=8, first=0)


def test_the_generator_makes_what_the_invariant_is_about() -> None:
    """Disjoint and equal spans, either module on rank 0, every axis, frozen and bare modules."""
    graphs: list[Graph] = []
    layouts: list[ModuleLayouts] = []
    for seed in range(200):
        rng = random.Random(seed)
        graphs.append(make_graph(rng))
        layouts.append(place(graphs[-1], rng, num_ranks=8, first=seed % 2, name="x"))
    assert {len(graph.modules) for graph in graphs} == {2, 3, 4}
    assert any(graph.frozen for graph in graphs)
    assert any(graph.bare for graph in graphs)
    assert any(len(graph.sinks) > 1 for graph in graphs)
    assert {graph.is_per_token for graph in graphs} == {True, False}
    assert {"vision", "language"} <= {each.modules_of(each.union.ranks[0])[0] for each in layouts}
    spans = [{layout.ranks for layout in each.values()} for each in layouts]
    assert {len({frozenset(ranks) for ranks in each}) for each in spans} >= {1, 2, 3}
    for axis in ("tp", "cp", "dp", "pp"):
        assert any(getattr(each, axis) > 1 for one in layouts for each in one.values())
