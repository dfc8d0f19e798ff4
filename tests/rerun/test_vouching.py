"""Evidence without a NaN: replicas that compute one microbatch twice, and norms that are odd."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from holdfast import Layout, ModuleLayouts, ProcessGroups
from holdfast.errors import ConfigError, DriftError, HoldfastError
from holdfast.rerun import (
    DeviceIdentity,
    Rejects,
    Replayed,
    RerunMachine,
    gradient_norm,
    read_report,
    update_norm,
)
from holdfast.rerun.places import Feeders, partner_ranks, replicas_of
from holdfast.rerun.vouching import pairs_of_round
from tests.harness import RankContext, run_ranks
from tests.rerun.threads import ThreadGroups, run_threads


@pytest.mark.parametrize("number", range(2, 10))
def test_every_pair_of_replicas_meets_once_in_a_turn(number: int) -> None:
    """So each device is vouched for by every other one."""
    turn = number - 1 + number % 2
    for start in (0, 5):
        met = [pair for each in range(start, start + turn) for pair in pairs_of_round(number, each)]
        assert sorted(met) == list(itertools.combinations(range(number), 2))
    for each in range(turn):
        paired = [replica for pair in pairs_of_round(number, each) for replica in pair]
        assert len(paired) == len(set(paired)) == number - number % 2
    assert pairs_of_round(1, 0) == []


def test_replicas_are_what_a_forward_connects() -> None:
    """D19, against what the layouts mean."""
    assert Feeders(Layout(tp=2, dp=2), 0).of(None) == (0, 1)
    assert replicas_of(Layout(tp=2, dp=2)) == [(0, 1), (2, 3)]
    assert partner_ranks(Layout(pp=2, dp=2)) == {0: 1, 1: 0, 2: 3, 3: 2}
    assert replicas_of(Layout(cp=2, dp=2)) == [(0, 1), (2, 3)]
    # Experts exchange tokens between data ranks: these belong to one replica.
    assert Feeders(Layout(dp=4, ep=2), 3).of(None) == (2, 3)
    assert partner_ranks(Layout(dp=4, ep=2)) == {0: 2, 1: 3, 2: 0, 3: 1}
    assert partner_ranks(Layout(dp=2, ep=2)) == {}
    for layout in (Layout(tp=2, pp=2, dp=3), Layout(tp=2, dp=4, ep=4, expt_tp=1)):
        partners = partner_ranks(layout)
        assert not partners or sorted(partners.values()) == sorted(layout.ranks)
        for rank, other in partners.items():
            assert Feeders(layout, rank).of(None) != Feeders(layout, other).of(None)


@pytest.mark.parametrize(
    ("vision", "language", "replicas"),
    [
        # Disjoint: data rank 0 of one side feeds data rank 0 of the other, and so on.
        ({"dp": 2}, {"dp": 2, "ranks": (2, 3)}, [(0, 2), (1, 3)]),
        ({"dp": 2}, {"tp": 2, "dp": 2, "ranks": (2, 3, 4, 5)}, [(0, 2, 3), (1, 4, 5)]),
        ({"dp": 4}, {"dp": 2, "ranks": (4, 5)}, [(0, 1, 4), (2, 3, 5)]),
        ({"tp": 2}, {"dp": 2, "ranks": (2, 3)}, [(0, 1, 2, 3)]),
        # On the same ranks: those of the wider replica.
        ({"dp": 4}, {"tp": 2, "dp": 2}, [(0, 1), (2, 3)]),
        ({"dp": 2, "pp": 2}, {"tp": 2, "dp": 2}, [(0, 1, 2, 3)]),
    ],
)
def test_replicas_of_several_modules_are_what_bridges_connect(
    vision: dict[str, Any], language: dict[str, Any], replicas: list[tuple[int, ...]]
) -> None:
    """D19: a loss of the language model is the work of the encoders of its images, too."""
    layouts = ModuleLayouts(
        {"vision": Layout(**vision), "language": Layout(**language)},
        edges=[("vision", "language")],
    )
    assert sorted(tuple(sorted(each)) for each in replicas_of(layouts)) == replicas
    for rank in layouts.union.ranks:
        (own,) = (each for each in replicas if rank in each)
        assert Feeders(layouts, rank).of(None) == own
    # The partner has the same modules, at the same place in them.
    for rank, other in partner_ranks(layouts).items():
        assert layouts.modules_of(rank) == layouts.modules_of(other)
        for mine, theirs in zip(
            layouts.roles_of(rank).values(), layouts.roles_of(other).values(), strict=True
        ):
            assert [mine.coordinates[axis] for axis in ("tp", "pp")] == [
                theirs.coordinates[axis] for axis in ("tp", "pp")
            ]
    # Modules that no bridge joins have nothing to do with one another.
    apart = ModuleLayouts({"one": Layout(dp=2), "other": Layout(tp=2, ranks=(2, 3))})
    assert [Feeders(apart, rank).of(None) for rank in (1, 2)] == [(1,), (2, 3)]


def test_a_synchronised_norm_is_an_ordinary_one_in_one_process() -> None:
    """A fault of it is no error of torch.distributed, which this process does not use."""
    assert Feeders(Layout(), 0, [nn.SyncBatchNorm(2)]).of(None) == (0,)


def feeders(context: RankContext, mesh_shape: tuple[int, ...], names: str) -> tuple[int, ...]:
    """The ranks that feed a value of a model with parameters on a mesh of four ranks."""
    mesh = init_device_mesh("cpu", mesh_shape)
    kinds = {"s": Shard(0), "r": Replicate()}
    weight = distribute_tensor(torch.ones(8, 2), mesh, [kinds[each] for each in names])
    model = nn.Module()
    model.register_parameter("weight", nn.Parameter(weight))
    return Feeders(Layout(dp=4), context.rank, [model]).of(None)


@pytest.mark.parametrize(
    ("mesh_shape", "names", "expected"),
    [
        ((4,), "s", [(0, 1, 2, 3)] * 4),
        ((4,), "r", [(0,), (1,), (2,), (3,)]),
        ((2, 2), "rs", [(0, 1), (0, 1), (2, 3), (2, 3)]),
        ((2, 2), "sr", [(0, 2), (1, 3), (0, 2), (1, 3)]),
    ],
)
def test_shards_of_parameters_feed_what_is_computed_with_them(
    mesh_shape: tuple[int, ...], names: str, expected: list[tuple[int, ...]]
) -> None:
    """D19: a forward gathers along the dims of a mesh that cut a parameter, and no others."""
    assert run_ranks(4, feeders, mesh_shape, names).results == expected


class Model(nn.Module):
    """With dropout and a buffer that each batch changes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 6), nn.Linear(6, 1)
        self.register_buffer("mean", torch.zeros(6), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        self.mean.lerp_(hidden.detach().mean(dim=0), 0.1)
        return self.second(nn.functional.dropout(hidden - self.mean, 0.5))


def vouch(
    context: RankContext, directory: str, layout: Layout, broken: tuple[int, ...]
) -> list[tuple[int, list[int]]]:
    """Rounds of six steps; those that raise, with the odd ranks."""
    with ProcessGroups.create(layout) as groups:
        torch.manual_seed(0)
        model = Model()
        torch.manual_seed(100 + context.rank)
        machine = RerunMachine(
            groups,
            directory=directory,
            replayed=Replayed(modules=[model]),
            device=DeviceIdentity(host="h", uuid=f"GPU {context.rank}"),
            note=lambda line: None,
        )

        def compute(batch: torch.Tensor) -> Iterator[torch.Tensor]:
            loss = model(batch).square().mean()
            for gradient in torch.autograd.grad(loss, list(model.parameters())):
                # Finite, and wrong in one element.
                yield (
                    gradient.index_add(0, torch.tensor([0]), torch.full_like(gradient[:1], 1e-3))
                    if context.rank in broken
                    else gradient
                )

        raised = []
        for step in range(12):
            model(torch.randn(4, 3))  # each rank has drawn other numbers, and has other buffers
            before = torch.get_rng_state(), model.mean.clone()
            try:
                machine.vouch(step, torch.randn(4, 3), compute, every=2)
            except DriftError as error:
                raised.append((step, error.details["odd_ranks"]))
            torch.testing.assert_close(model.mean, before[1], rtol=0, atol=0)
        return raised


@pytest.mark.parametrize(
    ("layout", "broken", "expected"),
    [
        (Layout(dp=2), (), []),
        (Layout(dp=2), (1,), [(step, []) for step in range(0, 12, 2)]),
        (Layout(dp=3), (), []),
        # In one round of three the broken one rests.
        (Layout(dp=3), (1,), [(step, [1]) for step in (0, 4, 6, 10)]),
        (Layout(tp=2, dp=2), (), []),
    ],
    ids=str,
)
def test_a_replica_that_computes_otherwise_is_noticed(
    tmp_path: Path, layout: Layout, broken: tuple[int, ...], expected: list[object]
) -> None:
    """D23, P4: within a turn; with three replicas a majority names it."""
    results = run_ranks(layout.world_size, vouch, str(tmp_path), layout, broken).results
    for each in results:
        assert each == expected
    events = read_report(tmp_path) if expected else []
    assert [each["event"] for each in events] == ["vouch"] * len(expected)
    for each in events:
        assert [place["device"] for place in each["odd"]] == ([] if layout.dp == 2 else ["GPU 1"])


@pytest.mark.parametrize("fails_in", ["a hook", "compute"])
def test_a_replica_that_fails_has_its_own_state_again(tmp_path: Path, fails_in: str) -> None:
    """D24: a loop may catch the error, which is one of all ranks, and continue."""

    def body(groups: ThreadGroups) -> str:
        layer = nn.BatchNorm1d(1)
        layer.running_mean.fill_(groups.rank)  # type: ignore[union-attr]
        machine = RerunMachine(
            groups,  # type: ignore[arg-type]
            directory=tmp_path,
            replayed=Replayed(
                modules=[layer], rng=False, hooks=[(lambda: fail("a hook"), lambda state: None)]
            ),
        )

        def fail(where: str) -> None:
            if groups.rank and where == fails_in:
                raise MemoryError("too large")

        def compute(batch: object) -> list[torch.Tensor]:
            fail("compute")
            return []

        with pytest.raises(HoldfastError) as raised:
            machine.vouch(0, 1.0, compute)
        assert layer.running_mean == groups.rank
        return str(raised.value)

    for said in run_threads(2, body):
        assert "rank 1: MemoryError: too large" in said


def test_norms_between_steps_are_in_the_report(tmp_path: Path) -> None:
    """What no rerun can tell is recorded, once, and the run continues."""
    with ProcessGroups.single() as groups:
        lines: list[str] = []
        machine = RerunMachine(groups, directory=tmp_path, replayed=Replayed(), note=lines.append)
        rule = update_norm(largest=0.5, num_samples=3, window=5)
        runs = 0
        for step, norm in enumerate((0.01, 0.01, 0.02, 0.3, 0.6, math.nan, 0.01)):
            for _ in machine.attempts(step):
                runs += 1
                machine.validate("gradient", 1.0, gradient_norm(num_samples=1, window=1))
            machine.observe("update", norm, rule)
        machine.observe("odd", 1.0, Rejects(bool, "\ud800"))  # was an error of this rank alone
        for _ in machine.attempts(7):
            machine.validate("gradient", 1.0, gradient_norm())
            with pytest.raises(ConfigError, match="inside of a step"):
                machine.observe("update", 1.0, rule)
        assert runs == 7
        assert machine.decision.exit_code is None
    events = read_report(tmp_path)
    assert [(each["event"], each["step"]) for each in events] == [
        ("observed", 4), ("observed", 5), ("observed", 6), ("observed", 7),
    ]  # fmt: skip
    reasons = [each["values"][0]["why"].split()[0] for each in events]
    assert reasons == ["its", "it", "it", "\\ud800"]
    with pytest.raises(ConfigError, match="largest"):
        update_norm(largest=0)
