"""Dense and expert optimizers step as one: one norm, one decision, one failure for all."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any, Literal

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from holdfast import ConfigError, GroupError, Layout, ProcessGroups
from holdfast.errors import HoldfastError
from holdfast.fsdp import fully_shard_model
from holdfast.optim import ChainedOptimizer, LossScaler, ShardedOptimizer, collectives
from tests.harness import RankContext, run_ranks
from tests.optim.common import OPTIMIZERS, sgd
from tests.optim.experts import build_sparse, chain, rows_of


def one_step(
    net: nn.Module, optimizer: Any, groups: ProcessGroups, step: int, **options: Any
) -> Any:
    scaler = options.get("scaler")
    with optimizer.microbatch(is_last=True):
        loss = net(rows_of(step, groups)).mean()
        (loss if scaler is None else scaler.scale_loss(loss)).backward()
    return optimizer.step(**options)


def trouble(context: RankContext) -> dict[str, Any]:
    reports: dict[str, Any] = {}
    with ProcessGroups.create(Layout(dp=4, ep=2)) as groups:
        net = build_sparse(groups)
        optimizer = chain(net, OPTIMIZERS["momentum"], groups)
        scaler = LossScaler(initial=1024.0, growth_interval=2)
        poisoned(reports, net, optimizer, groups, scaler)
        reports["zeros"] = zeros(net, optimizer, groups)
        failing(reports, net, optimizer, groups)
        refusals(reports, net, groups)
    return reports


class VetoOf:
    """Vetoes on one rank."""

    def __init__(self, rank: int, groups: ProcessGroups) -> None:
        self._is_raised = groups.rank == rank
        self.decisions: list[bool] = []

    def vetoes(self) -> bool:
        return self._is_raised

    def take_decision(self, vetoed: bool) -> None:
        self.decisions.append(vetoed)


def poisoned(
    reports: dict[str, Any],
    net: nn.Module,
    optimizer: ChainedOptimizer,
    groups: ProcessGroups,
    scaler: LossScaler,
) -> None:
    """A value that is not finite, on any one rank and in either module, is seen by all."""
    before = [p.to_local().detach().clone() for p in net.parameters()]  # type: ignore[attr-defined]
    outcomes = []
    for culprit, name, value in [
        (2, "dense", math.nan),
        (1, "mixers", math.inf),
        (3, "bias", -math.inf),
    ]:
        handle = None
        if groups.rank == culprit:
            parameter = net.get_parameter(name)
            handle = parameter.register_hook(lambda g, v=value: g + v)
        outcomes.append(one_step(net, optimizer, groups, 0, scaler=scaler))
        if handle is not None:
            handle.remove()
    for outcome in outcomes:
        assert outcome.skipped
        assert math.isnan(outcome.norm)
        assert outcome.bad_ranks
    optimizer.synchronize()
    for old, parameter in zip(before, net.parameters(), strict=True):
        assert torch.equal(old, parameter.to_local())  # type: ignore[attr-defined]
    reports["bad"] = [outcome.bad_ranks for outcome in outcomes]
    reports["scale"] = scaler.scale
    veto = VetoOf(2, groups)
    refused = one_step(net, optimizer, groups, 0, scaler=scaler, veto=veto, max_norm=1e-6)
    assert veto.decisions == [True]
    assert (refused.vetoed, refused.skipped, refused.clipped) == (True, True, False)
    assert scaler.scale == reports["scale"]
    good = one_step(net, optimizer, groups, 0, scaler=scaler)
    assert not good.skipped
    assert good.loss_scale == 128.0
    one_step(net, optimizer, groups, 0, scaler=scaler)
    reports["grown"] = scaler.scale
    reports["norm"] = good.norm


def zeros(net: nn.Module, optimizer: ChainedOptimizer, groups: ProcessGroups) -> int:
    """Zeros of the gradient: the expert that no row goes through, whole."""
    with optimizer.microbatch(is_last=True):
        rows = rows_of(0, groups)
        (net(rows) * (rows % 4 != 3)).mean().backward()
    outcome = optimizer.step(count_zeros=True)
    return int(outcome.num_zeros)


def failing(
    reports: dict[str, Any], net: nn.Module, optimizer: ChainedOptimizer, groups: ProcessGroups
) -> None:
    """One rank's update raises: all ranks do, and the next step works."""
    inner = optimizer["expert"].inner
    if groups.rank == 1:
        handle = inner.register_step_pre_hook(lambda *_: (_ for _ in ()).throw(OSError("boom")))
    with pytest.raises(HoldfastError) as caught:
        one_step(net, optimizer, groups, 1)
    reports["failure"] = str(caught.value)
    if groups.rank == 1:
        handle.remove()
    assert not one_step(net, optimizer, groups, 2).skipped
    optimizer.synchronize()
    dense = net.get_parameter("dense")
    assert isinstance(dense, DTensor)
    reports["weights"] = dense.to_local().detach().clone()


def refusals(reports: dict[str, Any], net: Any, groups: ProcessGroups) -> None:
    """What cannot be right is refused before anything is touched."""
    common: dict[str, Any] = {"make": sgd, "groups": groups, "divisor": 4}
    with pytest.raises(TypeError, match="divisor"):
        ShardedOptimizer(net, [net.mixers], make=sgd, groups=groups, over="expt_dp")  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match=r"mixers.*experts take over='expt_dp'"):
        ShardedOptimizer(net, [net.mixers], over="dp_cp", **common)
    with pytest.raises(ConfigError, match=r"dense.*dense parameters take over='dp_cp'"):
        ShardedOptimizer(net, [net.dense], over="expt_dp", **common)
    with pytest.raises(ConfigError, match=r"over must be .*, got 'tp'"):
        ShardedOptimizer(net, [net.dense], over="tp", **common)
    with pytest.raises(GroupError, match=r"communicator 'dp_cp' itself"):
        ShardedOptimizer(net, [net.dense], over="dp_cp", gather="dp_cp", **common)
    with pytest.raises(GroupError, match="cut by position"):
        ShardedOptimizer(net, [net.dense], over="dp_cp", gather="expt_dp", **common)
    stranger = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match="not one of the module's"):
        ShardedOptimizer(net, stranger.parameters(), over="dp_cp", **common)
    listed: list[tuple[list[Any], str]] = [
        ([net.dense, {"params": [net.dense]}], "cannot be mixed in one list"),
        ([{"params": [net.dense]}, {"params": net.dense}], "is in the groups twice"),
        ([net.dense.detach()], "a DTensor is not a parameter of a module"),
    ]
    for parameters, match in listed:
        with pytest.raises(ConfigError, match=match):
            ShardedOptimizer(net, parameters, over="dp_cp", **common)
    torch.manual_seed(1)
    plain = nn.Linear(3, 3)
    with pytest.raises(ConfigError, match=r"plain tensor on ranks .*which hold different experts"):
        ShardedOptimizer(plain, plain.parameters(), over="expt_dp", **common)
    mixed = dict(common, make=lambda g: torch.optim.Adafactor(g))
    with pytest.raises(ConfigError, match="Adafactor does not update"):
        ShardedOptimizer(plain, plain.parameters(), over="dp_cp", **mixed)
    sizes = nn.Linear(3, 3 + (groups.rank == 2))
    with pytest.raises(ConfigError, match=r"has shape \[3, 3\].* on rank 0 and.*\[4, 3\].* rank 2"):
        ShardedOptimizer(sizes, sizes.parameters(), over="dp_cp", **common)
    first = ShardedOptimizer(plain, plain.parameters(), over="dp_cp", name="a", **common)
    with pytest.raises(ConfigError, match=r"on rank 2: .*chained under name 'b'|rank 2: .*'b'"):
        ChainedOptimizer({"b" if groups.rank == 2 else "a": first})
    with pytest.raises(ConfigError, match=r"weight is in sharded optimizer 'a' already.*close\(\)"):
        ShardedOptimizer(plain, plain.parameters(), over="dp_cp", name="c", **common)
    first.close()
    again = ShardedOptimizer(plain, plain.parameters(), over="dp_cp", name="c", **common)
    with pytest.raises(ConfigError, match="'a' and 'c'"):
        ChainedOptimizer({"a": first, "c": again})
    with again.microbatch(is_last=True):
        plain(torch.ones(1, 3)).sum().backward()
    with pytest.raises(ConfigError, match="would be lost"), again.microbatch(is_last=False):
        pass
    plain.weight.data = plain.weight.data.clone()
    with pytest.raises(ConfigError, match="memory was replaced"):
        again.step()


def test_trouble_is_shared_by_all_ranks() -> None:
    results = run_ranks(4, trouble).results
    for reports in results[1:]:
        assert reports["bad"] == results[0]["bad"]
        assert reports["failure"] == results[0]["failure"]
        assert reports["norm"] == results[0]["norm"]
        assert torch.equal(reports["weights"], results[0]["weights"])
    reports = results[0]
    assert "1 of 4 ranks failed (optimizer: update)" in reports["failure"]
    assert "rank 1" in reports["failure"]
    assert "boom" in reports["failure"]
    assert (reports["scale"], reports["grown"]) == (128.0, 256.0)
    assert reports["zeros"] == 25


def test_a_scaler_is_saved_and_bounded() -> None:
    scaler = LossScaler(initial=4.0, growth_interval=2)
    scaler.update(overflowed=False)
    fresh = LossScaler(growth_interval=2)
    fresh.load_state_dict(scaler.state_dict())
    fresh.update(overflowed=False)
    assert fresh.scale == 8.0
    for _ in range(9):
        fresh.update(overflowed=True)
    assert fresh.scale == 1.0
    largest = LossScaler(initial=2.0**1023, growth_interval=1)
    largest.update(overflowed=False)
    largest.update(overflowed=True)
    assert largest.scale == 2.0**1022
    with pytest.raises(HoldfastError, match="not a LossScaler"):
        fresh.load_state_dict({"scale": 1})
    with pytest.raises(ConfigError, match="backoff"):
        LossScaler(backoff=1.0)


def order_of(rank: int, step: int, *, last: bool) -> list[int]:
    """Return which layers a rank computes; the last one gets its gradient first."""
    order = [0, 1, 2, 3] if (rank + step) % 2 else [3, 2, 1, 0]
    return [number for number in order if not (last and step and rank == 0 and number == 0)]


class Nested:
    """Optimizers that step one after the other, and take the gradients of one backward."""

    def __init__(self, optimizers: dict[str, ShardedOptimizer]) -> None:
        self._optimizers = [*optimizers.values()]

    @contextlib.contextmanager
    def microbatch(self, *, is_last: bool) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for each in self._optimizers:
                stack.enter_context(each.microbatch(is_last=is_last))
            yield

    def step(self) -> None:
        for each in self._optimizers:
            each.step()

    def drop_gradients(self) -> None:
        for each in self._optimizers:
            each.drop_gradients()


def in_any_order(
    context: RankContext, join: Callable[[dict[str, ShardedOptimizer]], Any], stage: Literal[1, 2]
) -> None:
    """Each rank makes gradients in another order, and one leaves an error in the middle.

    Those of a chain have the same groups; else one has groups that have adopted communicators.
    """
    with contextlib.ExitStack() as stack:
        groups = others = stack.enter_context(ProcessGroups.create(Layout(dp=2)))
        if join is Nested:
            held = {name: groups.group(name) for name in groups.held()}
            others = stack.enter_context(
                ProcessGroups.adopt(Layout(dp=2, name="adopted"), held, data_timeout_s=20)
            )
        torch.manual_seed(3)
        # Of other sizes, gloo ends the process where a sum meets another one.
        widths = [4, 4 if stage == 1 else 8] * 2
        net = nn.ModuleList(nn.Linear(4, width, bias=False) for width in widths)
        members = [*net.parameters()]
        optimizer = join(
            {
                name: ShardedOptimizer(
                    net,
                    members[start::2],
                    make=sgd,
                    groups=others if start else groups,
                    over="dp_cp",
                    divisor=2,
                    stage=stage,
                    overlap=False,
                    bucket_nbytes=64,
                    name=name,
                )
                for start, name in enumerate(("even", "odd"))
            }
        )
        expected = [p.detach().clone() for p in members]
        x = torch.eye(4) * (context.rank + 1)
        for step, fails in ((0, False), (1, True), (2, False), (3, False)):
            try:
                for last in (False, True):
                    with optimizer.microbatch(is_last=last):
                        loss = torch.zeros(())
                        for number in order_of(context.rank, step, last=last):
                            loss = loss + (number + 1) * net[number](x).sum()
                        if fails and last and context.rank == 1:
                            handle = members[1].register_hook(_stop)
                        loss.backward()
                optimizer.step()
            except (HoldfastError, RuntimeError):
                assert fails
                optimizer.drop_gradients()
                if context.rank == 1:
                    handle.remove()
                continue
            for rank, last in itertools.product((0, 1), (False, True)):
                for number in order_of(rank, step, last=last):
                    expected[number] -= 0.1 * (number + 1) * (rank + 1) / 2
            for parameter, value in zip(members, expected, strict=True):
                torch.testing.assert_close(parameter.detach(), value)


def _stop(_: Any) -> None:
    raise RuntimeError("stopped")


@pytest.mark.parametrize("join", [ChainedOptimizer, Nested])
@pytest.mark.parametrize("stage", [1, 2])
def test_sums_of_two_optimizers_on_one_communicator_do_not_meet(join: Any, stage: int) -> None:
    """M12, I1: buckets of equal sizes were added to those of the other optimizer, silently."""
    run_ranks(2, in_any_order, join, stage)


class Trunk(nn.Module):
    """A layer that comes before the head on one rank, and after it on another."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.body(x)
        return out


def trunk_and_head(context: RankContext, stage: Literal[1, 2]) -> None:
    """A fully sharded trunk and a head with a sharded optimizer, under one backward."""
    # As on devices: over gloo messages between ranks never meet a sum.
    with (
        pytest.MonkeyPatch.context() as patch,
        ProcessGroups.create(Layout(dp=2), data_timeout_s=20) as groups,
    ):
        patch.setattr(collectives, "sends_directly", lambda *_: False)
        torch.manual_seed(3)
        trunk, head = Trunk(), nn.Linear(4, 4, bias=False)
        members = [trunk.body.weight, head.weight]
        expected = [p.detach().clone().requires_grad_() for p in members]
        sharded = fully_shard_model(trunk, groups, experts=())
        optimizer = sgd(trunk.parameters())
        of_head = ShardedOptimizer(
            head,
            head.parameters(),
            make=sgd,
            groups=groups,
            over="dp_cp",
            divisor=2,
            stage=stage,
            overlap=False,
        )

        def outer_head() -> Iterator[Any]:
            yield of_head.microbatch(is_last=True)
            yield sharded.microbatch(is_last=True)

        def outer_trunk() -> Iterator[Any]:
            yield from reversed([*outer_head()])

        def only_head() -> Iterator[Any]:
            yield of_head.microbatch(is_last=True)

        for contexts in (outer_head, outer_trunk, only_head):
            with contextlib.ExitStack() as stack:
                for each in contexts():
                    stack.enter_context(each)
                x = torch.eye(4) * (context.rank + 1)
                out = trunk(head(x)) if context.rank else head(trunk(x))
                out.square().sum().backward()
            sharded.step(optimizer)
            of_head.step()
            body, last = expected
            whole = sum(
                (x @ (second @ first).T).square().sum() / 2
                for x, first, second in (
                    (torch.eye(4), body, last),
                    (2 * torch.eye(4), last, body),
                )
            )
            gradients = torch.autograd.grad(whole, expected)
            with torch.no_grad():
                for value, gradient in zip(expected, gradients, strict=True):
                    value -= 0.1 * gradient
            weight: Any = trunk.body.weight
            torch.testing.assert_close(weight.full_tensor().detach(), body.detach())
            torch.testing.assert_close(head.weight.detach(), last.detach())


@pytest.mark.parametrize("stage", [1, 2])
def test_sums_of_a_sharded_model_do_not_meet_those_of_an_optimizer(stage: int) -> None:
    """M12, I1: a bucket was launched where it was full, before the units or after them."""
    run_ranks(2, trunk_and_head, stage)


def too_late(context: RankContext) -> None:
    with ProcessGroups.create(Layout(dp=2)) as groups:
        net = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
        one, other = [
            ShardedOptimizer(
                net, part.parameters(), make=sgd, groups=groups, over="dp_cp", divisor=2, name=name
            )
            for name, part in zip(("one", "other"), net, strict=True)
        ]
        with one.microbatch(is_last=True):
            net[0](torch.ones(2)).sum().backward()
            with (
                pytest.raises(ConfigError, match=r"'other': .* after a backward within .* 'one'"),
                other.microbatch(is_last=True),
            ):
                pass
        assert one.step().norm > 0
        with other.microbatch(is_last=True):
            net[1](torch.ones(2)).sum().backward()
        assert other.step().norm > 0
        outer, inner = one.microbatch(is_last=True), other.microbatch(is_last=True)
        outer.__enter__()
        inner.__enter__()
        with pytest.raises(ConfigError, match=r"'one': .* left before that of optimizer 'other'"):
            outer.__exit__(None, None, None)
        inner.__exit__(None, None, None)


def test_a_microbatch_within_that_of_another_optimizer_begins_and_ends_within_it() -> None:
    run_ranks(2, too_late)
