"""What ranks have to pass alike in a step, of every kind of optimizer: I2."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from holdfast import Layout, ProcessGroups
from holdfast.errors import ConfigError, HoldfastError, PlanError
from holdfast.optim import LossScaler, MultiModuleOptimizer, ShardedOptimizer
from holdfast.optim.scalars import ScalarWatch
from holdfast.optim.step_sum import Contribution, StepSum, refuse_different
from holdfast.optim.torch_interface import hyperparameters
from holdfast.parallel import ModuleGroups
from tests.harness import RankContext, run_ranks
from tests.optim.multi_module.common import (
    Spec,
    Trained,
    layouts_of,
    momentum,
    rows_of,
    sgd,
    train_module,
    whole_values,
)

KINDS = ("sharded", "chained", "fsdp", "stepper", "reduced", "modules")
SOME = [
    pytest.param(kind, marks=() if kind in ("chained", "fsdp", "reduced") else pytest.mark.slow)
    for kind in KINDS
]
"""Of those that share a step, one by day: a chain is of sharded ones, and a stepper steps FSDP."""
ASKED = ("sharded", "chained", "reduced")
"""Kinds that reduce gradients where their norm is asked for."""
SIZES = {"dp": 2}


class Alone:
    """One module on both ranks, and its step in one of the ways that there are."""

    def __init__(self, kind: str, groups: ProcessGroups | ModuleGroups, **options: object) -> None:
        own = groups["one"] if isinstance(groups, ModuleGroups) else groups
        kind_of = {"stepper": "fsdp", "modules": "sharded"}.get(kind, kind)
        spec = Spec(sizes=SIZES, kind=kind_of, options=options)
        self.trained = Trained("one", spec, own, momentum)
        stepper = self.trained.stepper
        assert stepper is not None
        self.optimizer = stepper.optimizer
        self.around: Any = stepper.microbatch
        self.call: Callable[..., Any] = stepper.step
        if kind == "fsdp":
            sharded = self.trained.sharded
            self.call = lambda **options: sharded.step(self.optimizer, **options)
        elif isinstance(groups, ModuleGroups):
            self.call = MultiModuleOptimizer(groups, {"one": stepper}).step

    def step(self, number: int, **options: Any) -> Any:
        self.backward(number)
        return self.call(**options)

    def backward(self, number: int) -> None:
        with self.around(is_last=True):
            train_module(self.trained, rows_of(number, "one"))

    def drop_gradients(self) -> None:
        stepper = self.trained.stepper
        assert stepper is not None
        stepper.drop_gradients()

    def values(self) -> dict[str, Tensor]:
        stepper = self.trained.stepper
        assert stepper is not None
        stepper.synchronize()
        return whole_values(self.trained.model)


@contextmanager
def stepped_once(kind: str) -> Iterator[Alone]:
    """An optimizer of this kind on its groups, after a first step."""
    layouts = layouts_of({"one": Spec(sizes=SIZES)})
    create: Any = ModuleGroups.create if kind == "modules" else ProcessGroups.create
    with create(layouts if kind == "modules" else Layout(**SIZES)) as groups:
        alone = Alone(kind, groups)
        alone.step(0)
        yield alone


def cases(odd: bool) -> dict[str, dict[str, Any]]:
    """By what the message says, the options of one rank; `odd` on rank 1."""
    return {
        r"differ in max_norm: 1 on rank 0; 0\.01 on rank 1;": {"max_norm": 0.01 if odd else 1.0},
        r"differ in loss scale: 4 on rank 0; 2 on rank 1;": {
            "scaler": LossScaler(initial=2.0 if odd else 4.0)
        },
        r"differ in loss scale: 1 on rank 0; None on rank 1;": {
            "scaler": None if odd else LossScaler(initial=1.0)
        },
        r"differ in count_zeros: False on rank 0; True on rank 1;": {"count_zeros": odd},
        r"1 of 2 ranks failed .*\s.*rank 1: .*max_norm must be .*, got -1": {
            "max_norm": -1 if odd else 0.0
        },
        r"1 of 2 ranks failed .*\s.*rank 1: .*str is not a LossScaler": {
            "scaler": "2" if odd else None
        },
        r"1 of 2 ranks failed .*\s.*rank 1: .*step\(closure\)": {"closure": print if odd else None},
    }


def refused(context: RankContext, kind: str) -> list[str]:
    """What each rank was told; nothing is updated, and the next step works."""
    report: list[str] = []
    with stepped_once(kind) as alone:
        before = alone.values()

        def refuse(match: str, **options: Any) -> None:
            with pytest.raises(HoldfastError, match=match) as caught:
                alone.step(1, **options)
            after = alone.values()
            assert all(torch.equal(after[name], before[name]) for name in before), match
            report.append(str(caught.value))

        for match, options in cases(context.rank == 1).items():
            if kind != "fsdp" or "closure" not in options:  # `ShardedModel.step` takes none
                refuse(match, **options)
        group = alone.optimizer.param_groups[0]
        for key, other in (("lr", 0.25), ("weight_decay", 0.5), ("nesterov", True)):
            was = group[key]
            if context.rank:
                group[key] = other
            shown = f"{was:g}" if isinstance(was, float) else str(was)
            refuse(rf"differ in {key} of parameter group 0: {shown} on rank 0; {other} on rank 1;")
            group[key] = was
        group["lr"] = 0.2  # on all
        group["momentum"] = 1.0 if context.rank else 1  # equal, in another form
        # Another implementation, and an entry that no optimizer has declared.
        group["foreach"], group["note"] = None if context.rank else False, context.rank
        assert not alone.step(2, max_norm=1.0, scaler=LossScaler(), count_zeros=True).skipped
        group["foreach"] = None
        del group["note"]
        now = alone.values()
        assert any(not torch.equal(now[name], before[name]) for name in before)
        skipped = alone.step(3, is_finite=context.rank == 0)
        assert skipped.skipped
        assert not skipped.clipped
        assert skipped.norm > 0
        after = alone.values()
        assert all(torch.equal(after[name], now[name]) for name in now)
        assert not alone.step(4).skipped
        final = alone.values()
        report.append(str({name: value.tolist() for name, value in final.items()}))
    return report


@pytest.mark.parametrize("kind", SOME)
def test_ranks_that_differ_in_a_setting_are_refused_by_name(kind: str) -> None:
    """I2: before, ranks scaled shards of one parameter by different factors without a word.

    A loss that is not finite on one rank is one decision for all, too.
    """
    first, second = run_ranks(2, refused, kind).results
    assert first == second
    assert len(first) == (10 if kind == "fsdp" else 11)


def in_other_orders(context: RankContext) -> None:
    """A loop over a set of two optimizers: each process has an order of its own."""
    order = (1, 0) if context.rank else (0, 1)
    for kind, options in (("sharded", {"bucket_nbytes": 1 << 10}), *((k, {}) for k in KINDS[:-1])):
        with ProcessGroups.create(Layout(**SIZES), data_timeout_s=20) as groups:
            both = [Alone(kind, groups, **options) for _ in range(2)]
            for each in both:
                each.step(0)
            before = [each.values() for each in both]
            for each in both:
                each.backward(1)
            for place in order:
                with pytest.raises(ConfigError, match=r"number of the optimizer: \d on rank 0; \d"):
                    both[place].call(max_norm=1.0)
            with pytest.raises(PlanError, match=r"what comes next: .* on rank 0; .* on rank 1"):
                both[order[0]].backward(1)
            for each in both:
                each.drop_gradients()
            for each, values in zip(both, before, strict=True):
                now = each.values()
                assert all(torch.equal(now[name], values[name]) for name in values), kind
                assert not each.step(2).skipped
            ask_before_the_step(both, order, kind=kind)
    ask_of_small_models(order)
    end_other_microbatches(context)


def end_other_microbatches(context: RankContext) -> None:
    """At stage 2 the step of rank 1 would reduce again, in the sum of rank 0: gloo aborted that."""
    with ProcessGroups.create(Layout(**SIZES), data_timeout_s=20) as groups:
        for kind in ("sharded", "chained"):
            alone = Alone(kind, groups, stage=2)
            alone.step(0)
            differ = r"is_last=True.* on rank 0; .*is_last=False.* on rank 1"
            with pytest.raises(PlanError, match=differ), alone.around(is_last=not context.rank):
                train_module(alone.trained, rows_of(1, "one"))
            alone.drop_gradients()
            assert not alone.step(2).skipped


def ask_of_small_models(order: tuple[int, int]) -> None:
    """All parameters of each are in one bucket, which no microbatch reduces, but the norm does."""
    with ProcessGroups.create(Layout(**SIZES), data_timeout_s=20) as groups:
        nets = [torch.nn.Linear(3, 3) for _ in range(2)]
        both = [
            ShardedOptimizer(
                net, net.parameters(), make=momentum, groups=groups, over="dp_cp", divisor=2
            )
            for net in nets
        ]
        for places, is_refused in (((), False), ((1, 0), False), (order, True)):
            before = [[p.detach().clone() for p in net.parameters()] for net in nets]
            for net, each in zip(nets, both, strict=True):
                with each.microbatch(is_last=True):
                    net(torch.ones(3)).sum().backward()
            for place in places:
                for _ in range(1 + (place == order[0])):  # the second time nothing is left to do
                    both[place].share_norm()
            for net, each, values in zip(nets, both, before, strict=True):
                if is_refused:
                    with pytest.raises(ConfigError, match=r"before the step: \[\d.*added to"):
                        each.step()
                    each.synchronize()
                else:
                    assert not each.step().skipped
                for p, value in zip(net.parameters(), values, strict=True):
                    assert torch.equal(p, value) == is_refused


def in_other_orders_on_adopted_groups(context: RankContext) -> None:
    """Each of the two optimizers has groups of its own, on the same communicators."""
    order = (1, 0) if context.rank else (0, 1)
    for kind, options in (("sharded", {"bucket_nbytes": 1 << 10}), ("fsdp", {}), ("reduced", {})):
        with (
            ProcessGroups.create(Layout(**SIZES), data_timeout_s=20) as groups,
            adopted(groups, "adopted") as others,
        ):
            with adopted(groups, "for a while") as closed:  # the others agree without it then
                Alone(kind, closed, **options).step(0)
            both = [Alone(kind, each, **options) for each in (groups, others)]
            for number in (0, 1):
                for each in both:
                    each.backward(number)
                before = [each.values() for each in both]
                for place in order if number else (1, 0):
                    if number:
                        with pytest.raises(
                            ConfigError, match=r"of the optimizer: \d on rank 0; \d"
                        ):
                            both[place].call(max_norm=1.0)
                    else:
                        both[place].call(max_norm=1.0)
            with pytest.raises(PlanError, match=r"what comes next: .* on rank 0; .* on rank 1"):
                both[order[0]].backward(2)
            for each, values in zip(both, before, strict=True):
                each.drop_gradients()
                now = each.values()
                assert all(torch.equal(now[name], values[name]) for name in values), kind
            ask_before_the_step(both, order, kind=kind)


def adopted(groups: ProcessGroups, name: str) -> ProcessGroups:
    supplied = {held: groups.group(held) for held in groups.held()}
    return ProcessGroups.adopt(Layout(dp=2, name=name), supplied, data_timeout_s=20)


def ask_before_the_step(both: list[Alone], order: tuple[int, int], *, kind: str) -> None:
    """Norms that each rank asks in an order of its own, and then in one order.

    After a microbatch in which gradients are reduced any order is right.
    """
    for number, is_around, has_order in ((3, False, False), (4, False, True), (5, True, False)):
        for each in both:
            if is_around:
                each.backward(number)
            else:
                train_module(each.trained, rows_of(number, "one"))
        steppers = [each.trained.stepper for each in both]
        for place in (1, 0) if has_order else order:
            stepper = steppers[place]
            assert stepper is not None
            stepper.share_norm()
        before = [each.values() for each in both]
        for each, values in zip(both, before, strict=True):
            if not has_order and kind in ASKED and (not is_around or kind == "reduced"):
                with pytest.raises(
                    ConfigError, match=r"before the step: \[\d.* on rank 1; .*added to"
                ):
                    each.call()
                now = each.values()
                assert all(torch.equal(now[name], values[name]) for name in values), kind
            else:
                assert not each.call().skipped


@pytest.mark.slow
def test_optimizers_that_a_rank_takes_in_another_order_do_not_mix() -> None:
    """I2: norms and updates of one were made of gradients of the other, silently."""
    run_ranks(2, in_other_orders)


def test_optimizers_whose_groups_share_communicators_do_not_mix() -> None:
    """I2: each of them was number 1 on its groups, so that nothing showed another order."""
    run_ranks(2, in_other_orders_on_adopted_groups)


def failing(context: RankContext, kind: str) -> list[str]:
    """One rank's gradients cannot be finished, then its update fails."""
    report: list[str] = []
    with stepped_once(kind) as alone:
        before = alone.values()
        owner: Any = alone.trained.sharded or alone.trained.stepper
        name = "check_optimizer" if alone.trained.sharded else "usage"
        if context.rank == 1:
            setattr(owner, name, boom)
        with pytest.raises(
            HoldfastError, match=r"\(optimizer: gradients\):\s.*rank 1: .*boom"
        ) as one:
            alone.step(1)
        if context.rank == 1:
            delattr(owner, name)
        after = alone.values()
        assert all(torch.equal(after[name], before[name]) for name in before)
        inner = getattr(alone.optimizer, "inners", [alone.optimizer])[0]
        handle = inner.register_step_pre_hook(boom) if context.rank == 1 else None
        with pytest.raises(HoldfastError, match=r"\(optimizer: update\):\s.*rank 1: .*boom") as two:
            alone.step(2)
        if handle is not None:
            handle.remove()
        assert not alone.step(3).skipped
        report += [str(one.value), str(two.value)]
    return report


def boom(*_: object) -> None:
    raise OSError("boom")


@pytest.mark.parametrize("kind", KINDS)
def test_what_fails_on_one_rank_of_any_kind_is_raised_on_all(kind: str) -> None:
    """M15, for optimizers that step alone, too."""
    first, second = run_ranks(2, failing, kind).results
    assert first == second


def replaced(context: RankContext) -> str:
    """Slices that hold one whole each: gradients are summed between them alone."""
    layout = Layout(dp=2, replicas=2)
    with ProcessGroups.create(layout, timeout_s=20, data_timeout_s=20) as groups:
        net = torch.nn.Linear(3, 3)
        optimizer = ShardedOptimizer(
            net, net.parameters(), make=sgd, groups=groups, over="dp_cp_intra", divisor=2
        )
        own = net.weight.data
        for is_good in (True, False, True):
            net.weight.data = own if is_good or context.rank == 0 else own.clone()
            before = net.weight.detach().clone()
            with optimizer.microbatch(is_last=True):
                net(torch.full((3,), 1.0 + context.rank)).sum().backward()
            if is_good:
                optimizer.step()
                torch.testing.assert_close(net.weight.detach(), before - 0.1 * 1.5)
                continue
            with pytest.raises(HoldfastError, match=r"weight: its memory was replaced") as raised:
                optimizer.step()
            assert torch.equal(net.weight, before)
        return str(raised.value)


def test_a_rank_that_cannot_use_its_gradients_adds_them_to_those_of_other_slices() -> None:
    """M15: the others would wait for its part of the sum between slices."""
    first, second = run_ranks(2, replaced).results
    assert first == second


def divisors(context: RankContext) -> None:
    """Also on pipeline stages, which share no bucket."""
    with ProcessGroups.create(Layout(pp=2)) as groups:
        net = torch.nn.Linear(2, 2)
        with pytest.raises(
            ConfigError, match=r"rank 1 was called with divisor=2 .*rank 0 with divisor=1 "
        ):
            ShardedOptimizer(
                net,
                net.parameters(),
                make=momentum,
                groups=groups,
                over="dp_cp",
                divisor=1 + context.rank,
            )


def test_ranks_that_divide_gradients_by_different_numbers_are_refused() -> None:
    """I2."""
    run_ranks(2, divisors)


def stages(context: RankContext) -> bool:
    """Pipeline stages may have hyperparameters of their own."""
    with ProcessGroups.create(Layout(pp=2)) as groups:
        trained = Trained("one", Spec(sizes={"pp": 2}, kind="reduced"), groups, momentum)
        stepper = trained.stepper
        assert stepper is not None
        stepper.optimizer.param_groups[0]["lr"] = 0.1 * (1 + context.rank)
        train_module(trained, rows_of(0, "one"))
        return bool(stepper.step(max_norm=1.0).skipped)


def test_pipeline_stages_may_differ_in_hyperparameters() -> None:
    assert run_ranks(2, stages).results == [False, False]


def test_settings_that_differ_in_their_last_digits_are_shown_in_all_of_them() -> None:
    """I2: an error that says 0.1 on rank 0 and 0.1 on rank 1 names nothing."""
    by_rank = {0: {"lr": 0.1}, 1: {"lr": 0.1 + 1e-12}}
    with pytest.raises(
        ConfigError, match=r"differ in lr: 0\.1 on rank 0; 0\.10000000000100001 on rank 1"
    ):
        refuse_different(by_rank, where="optimizer")


def test_settings_of_tensors_and_numpy_are_compared_like_others() -> None:
    """I2: a tensor in a tuple shows four digits, and numbers of numpy were not looked at."""

    def digest(lr: Any, beta: Any) -> float:
        parameter = torch.nn.Parameter(torch.ones(3))
        optimizer = torch.optim.AdamW([parameter], lr=lr, betas=(torch.tensor(0.5), beta))
        mine = Contribution(hyperparameters={"": hyperparameters(optimizer)})
        ranks = StepSum({"": Layout()}, ranks=(0,), loss_module=None)
        return ranks.pack(mine, rank=0)[-1]

    first = digest(np.float32(0.25), torch.tensor(0.75))
    assert first == digest(0.25, torch.tensor(0.75))
    assert first != digest(np.float32(0.125), torch.tensor(0.75))
    assert first != digest(np.float32(0.25), torch.tensor(0.75 + 1e-6))


def test_a_norm_that_is_too_large_is_not_finite() -> None:
    """I2: every share of the squares is finite, and to clip by an infinite norm leaves zeros."""
    ranks = StepSum({"a": Layout(), "b": Layout()}, ranks=(0,), loss_module=None)
    for square, is_finite in ((8e307, True), (1e308, False)):
        mine = Contribution(terms={"a": [square, 0, 0, 0], "b": [square, 0, 0, 0]})
        sums = ranks.read(ranks.pack(mine, rank=0))
        norm, _ = sums.norm(divisor=1.0, weights={"a": 1.0, "b": 1.0})
        assert (norm.is_finite, norm.bad_ranks) == (is_finite, ())


def test_a_step_does_not_look_up_the_place_of_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would cost more with each rank of the job; the stages of a layout do not change."""
    watch = ScalarWatch({"": Layout(dp=8, pp=2)})
    monkeypatch.delattr(Layout, "coordinates")
    numbers = watch.pack(rank=0)
    assert not watch.has_parted(numbers)
    # Ranks 0 and 1 are in one stage, 8 in the other one.
    assert watch.has_parted([0.0, 1.0, 2.0, *[0.0] * 14])
    assert not watch.has_parted([0.0, *[1.0] * 8, *[2.0] * 8])
