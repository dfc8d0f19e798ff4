"""What is launched where and when: F4, F6, F7."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from holdfast import Layout, ProcessGroups
from holdfast.fsdp import ShardedModel
from holdfast.parallel.groups.launches import Launch, LaunchRecorder
from tests.fsdp.common import build, difference, full, place, rows_of, sgd, shard, train, truth
from tests.harness import RankContext, run_ranks

LAYOUTS: list[dict[str, Any]] = [
    {"dp": 4, "ranks": (1, 2, 3, 4)},
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


def test_units_are_gathered_on_the_gathering_communicators() -> None:
    """F4: every all-gather on the clone, every reduction on the main one; odd orders and spans."""
    outcome = run_ranks(5, recorded)
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
