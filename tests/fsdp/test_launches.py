"""What is launched where and when: F4, F6, F7."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from holdfast import Layout, ProcessGroups
from holdfast.fsdp import ShardedModel
from holdfast.fsdp.launch_log import UnitLaunch
from holdfast.fsdp.sharded_model import MicrobatchKind, Programs
from holdfast.parallel.groups.launches import Launch, LaunchRecorder
from tests.fsdp.common import build, difference, full, place, rows_of, sgd, shard, train, truth
from tests.harness import RankContext, run_ranks

LAYOUTS: list[dict[str, Any]] = [
    {"dp": 4, "ep": 2, "ranks": (4, 1, 3, 2)},
    {"dp": 2, "cp": 2, "ep": 2, "order": "dp-cp-ep-tp-pp", "ranks": (2, 4, 1, 3)},
    {"dp": 4, "ep": 2, "replicas": 2, "ranks": (1, 2, 3, 4)},
]
GATHERS, REDUCES = ("all_gather",), ("reduce_scatter", "all_reduce")


def recorded(context: RankContext) -> list[tuple[dict[str, Any], list[Launch], float]]:
    """Per layout: what two steps launched, and how far the weights are from the truth's."""
    found = []
    expected, _ = truth(sgd, steps=2)
    for sizes in LAYOUTS:
        layout = Layout(**sizes)
        if context.rank not in layout.ranks:
            continue
        with ProcessGroups.create(layout) as groups:
            net = place(build(), groups)
            sharded = shard(net, groups)
            optimizer = sgd(net.parameters())
            with LaunchRecorder(groups) as recorder:
                train(sharded, optimizer, steps=2)
            for launch in recorder.launches:
                members = layout.ranks if launch.purpose == "control" else None
                assert launch.ranks == (members or groups.ranks(launch.purpose)), launch
            found.append((sizes, list(recorder.launches), difference(net, expected)))
    return found


@pytest.mark.slow
def test_units_are_gathered_on_the_gathering_communicators() -> None:
    """F4: every all-gather on the clone, every reduction on the main one; odd orders and spans."""
    outcome = run_ranks(5, recorded, timeout_s=280)
    assert outcome.results[0] == []  # not in any of the layouts
    for found in outcome.results[1:]:
        assert len(found) == len(LAYOUTS)
        for sizes, launches, off in found:
            assert off < 1e-6, sizes
            slices = "_intra" if sizes.get("replicas", 1) > 1 else ""
            dense, expert = f"dp_cp{slices}", f"expt_dp{slices}"
            gathers = {each.purpose for each in launches if each.op == "all_gather"}
            scatters = {each.purpose for each in launches if each.op == "reduce_scatter"}
            sums = {each.purpose for each in launches if each.op == "all_reduce"}
            several = {expert} if Layout(**sizes).expt_dp > 1 else set()
            if slices and "ep" in sizes:
                several = set()  # one rank in each slice of two: nothing to gather
            user = {"ep", "cp"} if "ep" in sizes else set()  # the model itself gathers experts
            assert gathers - user == {f"{name}_ag" for name in {dense} | several}, sizes
            assert scatters - user == {dense} | several, sizes
            between = {"dp_cp_inter", "expt_dp_inter"} if slices else set()
            # the sum of the norm is messages, over gloo
            assert sums - user == between, sizes


def one_communicator(context: RankContext) -> tuple[float, bool, set[str]]:
    """Without clones: everything on the main communicators, and bitwise the same weights."""
    del context
    layout = Layout(dp=4, ep=2)
    with ProcessGroups.create(layout) as groups:
        net = place(build(), groups)
        train(shard(net, groups), sgd(net.parameters()), steps=2)
        before = {name: full(p) for name, p in net.named_parameters()}
    names = ("dp", "dp_cp", "ep", "expt_dp")
    with ProcessGroups.create(layout, names=names) as groups:
        other = place(build(), groups)
        sharded = shard(other, groups)
        with LaunchRecorder(groups) as recorder:
            train(sharded, sgd(other.parameters()), steps=2)
        expected, _ = truth(sgd, steps=2)
        purposes = {each.purpose for each in recorder.launches}
        same = all(torch.equal(full(p), before[name]) for name, p in other.named_parameters())
        return difference(other, expected), same, purposes


def test_without_clones_everything_is_on_the_main_communicator() -> None:
    """F6: the groups decide, and nothing else; the numbers are the same bits."""
    for off, same, purposes in run_ranks(4, one_communicator).results:
        assert off < 1e-6
        assert same
        assert purposes == {"dp_cp", "expt_dp", "ep"}


@contextlib.contextmanager
def releases(sharded: ShardedModel, recorder: LaunchRecorder) -> Iterator[list[tuple[str, int]]]:
    """(name of a unit, number of launches before) when the whole parameters of it are freed."""
    noted: list[tuple[str, int]] = []

    def spied(name: str, group: Any) -> None:
        real = group._to_sharded

        def to_sharded() -> None:
            if group.is_unsharded:
                noted.append((name, len(recorder.launches)))
            real()

        group._to_sharded = to_sharded

    for name, module in sharded.model.named_modules():
        if hasattr(module, "_get_fsdp_state"):
            for group in module._get_fsdp_state()._fsdp_param_groups:
                spied(name, group)
    yield noted


def traced(context: RankContext, names: tuple[str, ...] | None) -> dict[str, Any]:
    """The launches of one backward after a first step, and when layers were released."""
    del context
    with ProcessGroups.create(Layout(dp=4), names=names) as groups:
        net = build(num_layers=4)
        sharded = shard(net, groups)
        optimizer = sgd(net.parameters())
        train(sharded, optimizer, steps=1)
        shares, index = groups.size("dp_cp"), groups.index("dp_cp")
        begun: list[int] = []
        with LaunchRecorder(groups) as recorder:
            for layer in net.layers:
                layer.register_forward_hook(lambda *_: begun.append(len(recorder.of("all_gather"))))
            loss = net(rows_of(1, index=index, shares=shares)[0]).mean()
        with LaunchRecorder(groups) as recorder, releases(sharded, recorder) as freed:
            loss.backward()
        found = [(each.op, each.purpose) for each in recorder.launches]
        return {"begun": begun, "launches": found, "freed": freed, "layers": len(list(net.layers))}


@pytest.mark.slow
def test_the_next_layer_is_gathered_before_this_one_is_reduced_and_released() -> None:
    """F7: AG of layer i-1 is issued before RS of layer i, and before layer i is freed."""
    for names in (None, ("dp_cp", "expt_dp")):
        for found in run_ranks(4, traced, names).results:
            launches, freed = found["launches"], found["freed"]
            # two groups in each layer: dense parameters and specialists
            at = {op: [i for i, each in enumerate(launches) if each[0] == op] for op in
                  ("all_gather", "reduce_scatter")}  # fmt: skip
            num_layers = found["layers"]
            # By the end of a layer's forward: the model's table, this layer, and the next one.
            assert found["begun"] == [1 + 2 * min(i + 2, num_layers) for i in range(num_layers)]
            assert len(at["all_gather"]) == 2 * num_layers
            assert len(at["reduce_scatter"]) == 2 * num_layers + 1  # the table of the model
            for layer in range(num_layers - 1):  # counted from the end, as backward goes
                ahead = at["all_gather"][2 * layer + 2 : 2 * layer + 4]
                assert max(ahead) < min(at["reduce_scatter"][2 * layer : 2 * layer + 2])
            order = [name for name, _ in freed if name.startswith("layers")]
            assert [order[i] for i in range(0, len(order), 2)] == [
                f"layers.{i}" for i in reversed(range(num_layers))
            ]
            for layer, name in enumerate(dict.fromkeys(order)):
                when = min(count for each, count in freed if each == name)
                ahead = at["all_gather"][2 * layer + 2 : 2 * layer + 4]
                assert all(position < when for position in ahead), (name, when, ahead)


def launches_of(chance: random.Random, count: int) -> list[UnitLaunch]:
    """Gathers and reductions of a few units, on a communicator each."""
    operations: Any = {"gathers": "all-gather", "reductions": "reduce-scatter"}
    names = [chance.choice([*operations]) for _ in range(count)]
    device = torch.device("cpu")
    return [
        UnitLaunch(operations[name], name, chance.choice((2, 3)), torch.float32, device)  # type: ignore[arg-type]
        for name in names
    ]


def by_communicator(launches: list[UnitLaunch]) -> dict[Any, list[UnitLaunch]]:
    return {name: [x for x in launches if x.group == name] for name in ("gathers", "reductions")}


def known_rest(
    kept: list[tuple[MicrobatchKind, list[UnitLaunch]]],
    kind: MicrobatchKind,
    done: list[UnitLaunch],
    *,
    is_apart: bool,
) -> dict[Any, list[UnitLaunch]]:
    """What is left to launch on each communicator, from a list of programs, newest first."""
    nothing: list[UnitLaunch] = []
    same = [x for each, x in kept if each == kind and x[: len(done)] == done]
    if same:
        return by_communicator(same[0][len(done) :])
    rests = []
    for each, launches in kept if is_apart else ():
        mine, whole = by_communicator(done), by_communicator(launches)
        if each.settings == kind.settings and all(
            whole[name][: len(mine[name])] == mine[name] for name in mine
        ):
            rests.append({name: whole[name][len(mine[name]) :] for name in mine})
    alike = bool(rests) and all(each == rests[0] for each in rests)
    return rests[0] if alike else by_communicator(nothing)


@pytest.mark.parametrize("is_apart", [False, True])
def test_the_rest_of_a_microbatch_is_that_of_one_before_or_nothing(is_apart: bool) -> None:
    """I1, against a list of whole programs: a rank never launches what the others would not."""
    found = []
    for seed in range(300):
        chance = random.Random(f"{is_apart} {seed}")
        kinds = [MicrobatchKind(settings=(a,), order=(b,)) for a in range(2) for b in range(2)]
        programs = Programs(gathers_apart=is_apart)
        kept: list[tuple[MicrobatchKind, list[UnitLaunch]]] = []
        drawn = [launches_of(chance, chance.randrange(1, 6)) for _ in range(3)]
        drawn += [each[: chance.randrange(len(each) + 1)] + drawn[0][-1:] for each in drawn]
        for _ in range(chance.randrange(12)):
            kind, launches = chance.choice(kinds), chance.choice(drawn)
            programs.remember(kind, launches)
            kept = [(kind, launches), *(each for each in kept if each != (kind, launches))]
            of_kind = [each for each in kept if each[0] == kind]
            kept = [each for each in kept if each not in of_kind[4:]]  # few of each kind
        for kind in kinds:
            done = chance.choice(drawn)
            done = done[: chance.randrange(len(done) + 1)]
            if chance.random() < 0.5:
                chance.shuffle(done)
            rest = by_communicator([*programs.rest(kind, done)])
            assert rest == known_rest(kept, kind, done, is_apart=is_apart), (seed, kind, done)
            found.append(any(rest.values()))
    assert 0.2 < sum(found) / len(found) < 0.9
