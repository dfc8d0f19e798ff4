"""What is launched where: gradients on the main communicator, parameters on their own (F4)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from holdfast import Layout, ProcessGroups
from holdfast.optim import ShardedOptimizer
from holdfast.parallel.groups.launches import Launch, LaunchRecorder
from tests.harness import RankContext, run_ranks
from tests.optim.common import adamw, build, sharded, train
from tests.optim.experts import build_sparse, chain, rows_of

LAYOUTS: list[dict[str, Any]] = [
    {"tp": 2, "dp": 2, "ranks": (1, 2, 3, 4)},
    {"tp": 2, "dp": 2, "order": "dp-tp-cp-ep-pp", "ranks": (4, 1, 3, 2)},
    {"dp": 4, "replicas": 2, "ranks": (2, 4, 1, 3)},
]
DATA = ("dp_cp", "dp_cp_ag", "dp_cp_intra", "dp_cp_intra_ag", "dp_cp_inter")


def recorded(context: RankContext) -> list[list[Launch]]:
    found: list[list[Launch]] = []
    for sizes in LAYOUTS:
        layout = Layout(**sizes)
        if context.rank not in layout.ranks:
            continue
        with ProcessGroups.create(layout) as groups:
            over = "dp_cp_intra" if layout.replicas > 1 else "dp_cp"
            if over == "dp_cp_intra":
                groups.clone(over, purpose="dp_cp_intra_ag")
            net = build(groups)
            for stage in (1, 2):
                optimizer = sharded(
                    net, adamw, groups, over=over, divisor=groups.size("dp_cp"), stage=stage
                )
                with LaunchRecorder(groups) as recorder:
                    train(net, optimizer, groups, steps=range(2))
                    optimizer.synchronize()
                optimizer.close()
                mine = [launch for launch in recorder.launches if launch.purpose in DATA]
                for launch in recorder.launches:
                    assert launch.ranks == (
                        layout.ranks
                        if launch.purpose == "control"
                        else groups.ranks(launch.purpose)
                    )
                check(mine, over=over, stage=stage)
                found.append(mine)
    return found


def check(launches: list[Launch], *, over: str, stage: int) -> None:
    gathers = [launch for launch in launches if launch.op == "all_gather"]
    scatters = [launch for launch in launches if launch.op == "reduce_scatter"]
    assert {launch.purpose for launch in gathers} == {f"{over}_ag"}
    assert {launch.purpose for launch in scatters} == {over}
    assert len(gathers) >= 6  # several buckets in each of two steps
    assert len(scatters) == len(gathers) * stage  # two microbatches: one round, or two
    others = {launch.op for launch in launches} - {"all_gather", "reduce_scatter"}
    assert others == {"all_reduce"}
    per_step = len(gathers) // 2
    assert [g.nbytes for g in gathers[:per_step]] == [g.nbytes for g in gathers[per_step:]]


def test_parameters_are_gathered_on_their_own_communicator() -> None:
    """Also for other orders, for ranks that do not begin at 0, and for hybrid slices."""
    results = run_ranks(5, recorded).results
    assert results[0] == []
    made: dict[tuple[int, str, tuple[int, ...]], list[list[tuple[str, int]]]] = {}
    for found in results[1:]:
        assert len(found) == 2 * len(LAYOUTS)
        for number, launches in enumerate(found):
            own: dict[tuple[int, str, tuple[int, ...]], list[tuple[str, int]]] = {}
            for launch in launches:
                place = (number, launch.purpose, launch.ranks)
                own.setdefault(place, []).append((launch.op, launch.nbytes))
            for place, sequence in own.items():
                made.setdefault(place, []).append(sequence)
    for (_, _, ranks), sequences in made.items():
        assert len(sequences) == len(ranks)  # every member took part,
        assert all(sequence == sequences[0] for sequence in sequences)  # in the same order


def overlapping(context: RankContext) -> list[int]:
    """How many buckets were on their way when the gradient of each layer came."""
    with ProcessGroups.create(Layout(dp=2)) as groups:
        torch.manual_seed(0)
        net = torch.nn.Sequential(*(torch.nn.Linear(8, 8, bias=False) for _ in range(4)))
        optimizer = ShardedOptimizer(
            net,
            net.parameters(),
            make=adamw,
            groups=groups,
            over="dp_cp",
            divisor=2,
            bucket_nbytes=256,
            overlap=True,
        )
        seen: list[int] = []
        for layer in net:
            layer.weight.register_hook(lambda g: seen.append(len(recorder.of("reduce_scatter"))))
        x = torch.ones(2, 8)
        for is_last in (False, True):
            with LaunchRecorder(groups) as recorder, optimizer.microbatch(is_last=is_last):
                net(x).sum().backward()
            assert len(recorder.of("reduce_scatter")) == (4 if is_last else 0)
        with LaunchRecorder(groups) as recorder:
            optimizer.step()
        assert len(recorder.of("all_gather")) == 4 + 1  # and one of the agreement
        before = net[3].weight.detach()
        with torch.no_grad():
            after = net(x)
        copy = torch.nn.Sequential(*(torch.nn.Linear(8, 8, bias=False) for _ in range(4)))
        optimizer.synchronize()
        copy.load_state_dict(net.state_dict())
        assert torch.equal(after, copy(x))  # forward had waited
        assert torch.equal(before, net[3].weight)  # a view of the bucket all along
        return seen


def test_full_buckets_are_reduced_beside_the_backward() -> None:
    for seen in run_ranks(2, overlapping).results:
        assert seen == [0, 0, 0, 0, 0, 1, 2, 3]  # layers come last to first


def experts(context: RankContext) -> list[tuple[str, str, tuple[int, ...]]]:
    layout = Layout(dp=4, ep=2, ranks=(4, 3, 2, 1), order="tp-cp-dp-ep-pp")
    if context.rank not in layout.ranks:
        return []
    with ProcessGroups.create(layout) as groups:
        net = build_sparse(groups)
        optimizer = chain(net, adamw, groups)
        with LaunchRecorder(groups) as recorder:
            with optimizer.microbatch(is_last=True):
                net(rows_of(0, groups)).mean().backward()
            optimizer.step()
            optimizer.synchronize()
            dist.broadcast(torch.ones(1), group=groups.group("ep"), group_src=0)
        assert recorder.launches[-1].op == "broadcast"
        assert [launch.order for launch in recorder.launches] == list(range(len(recorder.launches)))
        assert recorder.of("all_reduce")
        for launch in recorder.launches:
            if launch.purpose.startswith("expt_dp"):
                assert launch.ranks == layout.group("expt_dp", context.rank)
        return [(launch.op, launch.purpose, launch.ranks) for launch in recorder.launches]


def test_experts_use_the_expert_communicators() -> None:
    for reports in run_ranks(5, experts).results[1:]:
        places = {(op, purpose) for op, purpose, _ in reports}
        assert ("reduce_scatter", "expt_dp") in places
        assert ("all_gather", "expt_dp_ag") in places
        assert ("reduce_scatter", "dp_cp") in places
        assert ("all_gather", "dp_cp_ag") in places
        assert ("all_gather", "dp_cp") not in places
        assert ("all_gather", "expt_dp") not in places
        assert ("all_gather", "control") in places


def test_missing_gather_communicator_is_an_error() -> None:
    run_ranks(2, without_gather)


def without_gather(context: RankContext) -> None:
    with ProcessGroups.create(Layout(dp=2), names=["dp_cp"]) as groups:
        net = build()
        with pytest.raises(Exception, match=r"'dp_cp_ag' is missing.*groups\.clone\('dp_cp'"):
            sharded(net, adamw, groups)
        groups.clone("dp_cp", purpose="mine")
        train(net, sharded(net, adamw, groups, gather="mine"), groups, steps=range(1))


def local_versions(net: nn.Module) -> list[int]:
    """Changes that autograd has counted; views of these tensors share the count."""
    return [p._local_tensor._version for p in net.parameters() if isinstance(p, DTensor)]


def versions(context: RankContext) -> tuple[list[int], list[int]]:
    with ProcessGroups.create(Layout(dp=2)) as groups:
        net = build(groups)
        optimizer = sharded(net, adamw, groups, over="dp_cp", divisor=2)
        train(net, optimizer, groups, steps=range(1))
        before = local_versions(net)
        optimizer.publish()
        optimizer.synchronize()
        return before, local_versions(net)


def test_gathering_changes_no_view_that_a_forward_has_taken() -> None:
    """A model may take views of parameters first and call its modules, which wait, later."""
    for before, after in run_ranks(2, versions).results:
        assert after == before
