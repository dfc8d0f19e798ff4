"""What is launched where: gradients on the main communicator, parameters on their own (F4).

Over gloo a collective is messages between the ranks: `called` has the collectives, a LaunchRecorder
what went out.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from holdfast import Layout, ProcessGroups
from holdfast.optim import ShardedOptimizer, collectives
from holdfast.parallel.groups.launches import Launch, LaunchRecorder
from tests.harness import RankContext, run_ranks
from tests.optim.common import adamw, build, sharded, train
from tests.optim.experts import build_sparse, chain, rows_of

LAYOUTS: dict[int, dict[str, Any]] = {
    1: {"tp": 2, "dp": 2, "order": "dp-tp-cp-ep-pp", "ranks": (4, 1, 3, 2)},
    2: {"dp": 4, "replicas": 2, "ranks": (2, 4, 1, 3)},
}
"""By the stage of the optimizer on it."""
SEVERAL = 64
"""Bytes of buckets of which a model has several."""
DATA = ("dp_cp", "dp_cp_ag", "dp_cp_intra", "dp_cp_intra_ag", "dp_cp_inter")


@dataclass(frozen=True)
class Call:
    """One collective of a sharded optimizer, and what it launched."""

    op: str
    purpose: str
    nbytes: int
    launches: tuple[Launch, ...]


@contextlib.contextmanager
def called(groups: ProcessGroups) -> Iterator[list[Call]]:
    """The collectives of sharded optimizers; nothing of them is launched anywhere else."""
    calls: list[Call] = []
    real = {op: getattr(collectives, op) for op in ("reduce_scatter", "all_gather", "all_reduce")}

    def noted(op: str, *args: Any, **options: Any) -> Any:
        purpose = next(name for name in groups.held() if groups.group(name) is args[-1])
        with LaunchRecorder(groups) as recorder:
            work = real[op](*args, **options)
        launches = recorder.launches
        assert {launch.purpose for launch in launches} == {purpose}
        others = len(groups.ranks(purpose)) - 1
        assert Counter(each.op for each in launches) == {"receive": others, "send": others}
        calls.append(Call(op, purpose, args[0].nbytes, launches))
        return work

    for op in real:
        setattr(collectives, op, partial(noted, op))
    try:
        yield calls
    finally:
        for op, function in real.items():
            setattr(collectives, op, function)


def recorded(context: RankContext) -> list[list[Launch]]:
    found: list[list[Launch]] = []
    for stage, sizes in LAYOUTS.items():
        layout = Layout(**sizes)
        if context.rank not in layout.ranks:
            continue
        with ProcessGroups.create(layout) as groups:
            over = "dp_cp_intra" if layout.replicas > 1 else "dp_cp"
            if over == "dp_cp_intra":
                groups.clone(over, purpose="dp_cp_intra_ag")
            net = build(groups)
            optimizer = sharded(
                net, adamw, groups, over=over, divisor=groups.size("dp_cp"), stage=stage
            )
            with LaunchRecorder(groups) as recorder:
                train(net, optimizer, groups, steps=range(2))
                optimizer.synchronize()
            with called(groups) as calls:
                train(net, optimizer, groups, steps=range(2, 4))
                optimizer.synchronize()
            optimizer.close()
            mine = [launch for launch in recorder.launches if launch.purpose in DATA]
            for launch in recorder.launches:
                assert launch.ranks == (
                    layout.ranks if launch.purpose == "control" else groups.ranks(launch.purpose)
                )
            check(calls, over=over, stage=stage)
            sent = [launch for call in calls for launch in call.launches]
            assert Counter((each.op, each.purpose, each.nbytes) for each in sent) == Counter(
                (each.op, each.purpose, each.nbytes)
                for each in recorder.launches
                if each.op in ("send", "receive")
            )
            found.append(mine)
    return found


def check(calls: list[Call], *, over: str, stage: int) -> None:
    gathers = [call for call in calls if call.op == "all_gather"]
    scatters = [call for call in calls if call.op == "reduce_scatter"]
    assert {call.purpose for call in gathers} == {f"{over}_ag"}
    assert {call.purpose for call in scatters} == {over}
    assert len(gathers) >= 6  # several buckets in each of two steps
    assert len(scatters) == len(gathers) * stage  # two microbatches: one round, or two
    assert {call.op for call in calls} == {"all_gather", "reduce_scatter", "all_reduce"}
    per_step = len(gathers) // 2
    assert [g.nbytes for g in gathers[:per_step]] == [g.nbytes for g in gathers[per_step:]]


def test_parameters_are_gathered_on_their_own_communicator() -> None:
    """Also for other orders, for ranks that do not begin at 0, and for hybrid slices."""
    results = run_ranks(5, recorded).results
    assert results[0] == []
    made: dict[tuple[int, str, tuple[int, ...]], list[list[tuple[str, int]]]] = {}
    for found in results[1:]:
        assert len(found) == len(LAYOUTS)
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
            elementwise=True,
        )
        seen: list[int] = []
        for layer in net:
            layer.weight.register_hook(lambda g: seen.append(len(calls)))
        x = torch.ones(2, 8)
        for is_last in (False, True):
            with called(groups) as calls, optimizer.microbatch(is_last=is_last):
                net(x).sum().backward()
            assert [call.op for call in calls] == ["reduce_scatter"] * (4 if is_last else 0)
        with LaunchRecorder(groups) as recorder, called(groups) as calls:
            optimizer.step()
        # of the norm with all else that decides about the step; and whether it worked
        assert [call.op for call in calls] == ["all_reduce", *["all_gather"] * 4, "all_reduce"]
        assert not recorder.of("all_gather")  # of the control communicator
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


def small(context: RankContext, nbytes: int) -> list[list[Tensor]]:
    """Three steps, with and without gradients for all; in buckets of so many bytes."""
    with ProcessGroups.create(Layout(dp=2)) as groups:
        torch.manual_seed(0)
        net = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))
        optimizer = ShardedOptimizer(
            net, net.parameters(), make=adamw, groups=groups, over="dp_cp", divisor=2,
            bucket_nbytes=nbytes, elementwise=True,
        )  # fmt: skip
        after = []
        for used in (net, net[: 1 + context.rank], net[1:]):
            before = groups.direct().num_exchanges
            with called(groups) as calls:
                with optimizer.microbatch(is_last=True):
                    torch.stack([layer(torch.ones(3)) for layer in used]).sum().backward()
                assert not optimizer.step(max_norm=1.0).skipped
            exchanges = groups.direct().num_exchanges - before
            of_use = [] if used is net else [("all_reduce", 4 * 6)]
            sums = [(call.op, call.nbytes) for call in calls if call.op == "all_reduce"]
            if nbytes == SEVERAL:
                # of all that decides about the step; of each parameter's use; of whether it worked
                assert sums == [("all_reduce", 8 * 14), *of_use, ("all_reduce", 8 * 4)]
                assert exchanges == 0
            else:
                assert [(call.op, call.nbytes) for call in calls] == of_use
                assert exchanges == 2
            after.append([p.detach().clone() for p in net.parameters()])
        return after


def test_a_step_makes_one_small_sum_before_and_one_after_the_update() -> None:
    """And one more where a rank had no gradient for a parameter: it is updated if any had one.

    If all parameters are in one small bucket, they travel with gradients and with parameters.
    """
    apart = run_ranks(2, small, SEVERAL).results
    together = run_ranks(2, small, 1 << 20).results
    for first, second, third in apart + together:
        assert [torch.equal(a, b) for a, b in zip(first, second, strict=True)] == [
            *[False] * 4,
            *[True] * 2,
        ]
        assert [torch.equal(a, b) for a, b in zip(second, third, strict=True)] == [
            *[True] * 2,
            *[False] * 4,
        ]
    for ours, theirs in zip(together, apart, strict=True):
        for a, b in zip(itertools.chain(*ours), itertools.chain(*theirs), strict=True):
            torch.testing.assert_close(a, b)


def experts(context: RankContext) -> list[tuple[str, str]]:
    layout = Layout(dp=4, ep=2, ranks=(4, 3, 2, 1), order="tp-cp-dp-ep-pp")
    if context.rank not in layout.ranks:
        return []
    with ProcessGroups.create(layout) as groups:
        net = build_sparse(groups)
        optimizer = chain(net, adamw, groups)
        with LaunchRecorder(groups) as recorder, called(groups) as calls:
            with optimizer.microbatch(is_last=True):
                net(rows_of(0, groups)).mean().backward()
            optimizer.step()
            optimizer.synchronize()
            dist.broadcast(torch.ones(1), group=groups.group("ep"), group_src=0)
        assert recorder.launches[-1].op == "broadcast"
        assert [launch.order for launch in recorder.launches] == list(range(len(recorder.launches)))
        for launch in recorder.launches:
            if launch.purpose.startswith("expt_dp"):
                assert launch.ranks == layout.group("expt_dp", context.rank)
        assert len([call for call in calls if call.op == "all_reduce"]) == 2  # for both optimizers
        return [(call.op, call.purpose) for call in calls]


def test_experts_use_the_expert_communicators() -> None:
    for reports in run_ranks(5, experts).results[1:]:
        places = set(reports)
        assert ("reduce_scatter", "expt_dp") in places
        assert ("all_gather", "expt_dp_ag") in places
        assert ("reduce_scatter", "dp_cp") in places
        assert ("all_gather", "dp_cp_ag") in places
        assert ("all_gather", "dp_cp") not in places
        assert ("all_gather", "expt_dp") not in places
        assert {purpose for op, purpose in places if op == "all_reduce"} == {"dp_cp"}


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
        optimizer.launch_gathers()
        optimizer.publish()
        optimizer.synchronize()
        return before, local_versions(net)


def test_gathering_changes_no_view_that_a_forward_has_taken() -> None:
    """A model may take views of parameters first and call its modules, which wait, later."""
    for before, after in run_ranks(2, versions).results:
        assert after == before
