"""An error in a microbatch on one rank (I1)."""

from __future__ import annotations

import random
import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from functools import partial
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from holdfast import (
    DeadlineError,
    HoldfastError,
    Layout,
    ModuleGroups,
    ModuleLayouts,
    ProcessGroups,
)
from holdfast.fsdp import fully_shard_model
from holdfast.optim import LossScaler, MultiModuleOptimizer, ReducedOptimizer, ShardedOptimizer
from holdfast.optim.microbatches import Description, Launched, MicrobatchTaker, compare_launched
from tests.harness import RankContext, run_ranks


class Trouble(Exception):
    """An error that a user's model raises."""


def waiting_in_the_model(context: RankContext, has_modules: bool) -> str:
    """Rank 1 fails, and leaves like a crashed trainer; rank 0 waits in a sum of the model."""
    limits: dict[str, Any] = {"data_timeout_s": 600}
    torch.manual_seed(0)

    def optimizer_on(groups: ProcessGroups) -> ReducedOptimizer:
        return ReducedOptimizer(torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1), groups)

    with ExitStack() as stack:
        optimizer: Any
        if has_modules:
            layouts = ModuleLayouts({"vision": Layout(tp=2), "language": Layout(dp=2)})
            modules = stack.enter_context(ModuleGroups.create(layouts, **limits))
            control, groups = modules.control, modules["vision"]
            entries = {name: optimizer_on(modules[name]) for name in layouts}
            optimizer = MultiModuleOptimizer(modules, entries)
        else:
            groups = stack.enter_context(ProcessGroups.create(Layout(tp=2), **limits))
            control, optimizer = groups.control, optimizer_on(groups)
        control.timeout_s = 1.0  # not before: ranks may start late
        try:
            with optimizer.microbatch(is_last=True):
                if context.rank == 1:
                    raise Trouble("before a sum over tp")
                dist.all_reduce(torch.ones(3), group=groups.group("tp"))
        except HoldfastError as error:
            return str(error)
    raise AssertionError("rank 1 has failed")


@pytest.mark.parametrize("has_modules", [False, True])
def test_ranks_that_wait_in_the_models_own_collectives_name_the_one_that_failed(
    has_modules: bool,
) -> None:
    """I1: before, they raised the backend's text after its limit, and named no rank.

    The one that failed waits for them by the limit of agreements; with several modules it waited by
    that of tensors, as if no module had collectives of its own.
    """
    outcome = run_ranks(2, waiting_in_the_model, has_modules, expect_failure=True)
    assert outcome.failed == [1], outcome.errors
    assert "rank 1" in outcome.results[0]
    failed = outcome.errors[1]
    assert failed is not None
    assert failed.message == "before a sum over tp"
    assert "ranks [0] did not arrive" in failed.traceback  # in a note


NUM_MICROBATCHES = 3
WIDTH = 6


class Failing(torch.autograd.Function):
    """The same values; the backward raises an error of some class."""

    @staticmethod
    def forward(context: Any, values: torch.Tensor, error: type[BaseException]) -> torch.Tensor:
        context.error = error
        return values.clone()

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        raise context.error("in a backward")


class Gate(nn.Module):
    """Passes values on; its backward raises if it is to fail."""

    fails = False
    error: type[BaseException] = Trouble

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        passed: torch.Tensor = Failing.apply(values, self.error) if self.fails else values
        return passed


class Trained:
    """A model of three layers, and its steps, on this rank."""

    def __init__(self, way: str, groups: ProcessGroups) -> None:
        torch.manual_seed(0)
        layers = [nn.Linear(WIDTH, WIDTH) for _ in range(3)]
        self.gate = Gate()
        self.model = nn.Sequential(*layers[:2], self.gate, *layers[2:])
        self.groups = groups
        kind, _, detail = way.removesuffix(" by layers").partition(" ")
        self.by_layers = way.endswith(" by layers")
        is_predicted = detail.endswith(" predicted")
        if kind == "fsdp":
            self.taker: Any = fully_shard_model(
                self.model, groups, experts=(), units=layers, strategy=detail.partition(" ")[0]
            )
            # As on a device, where a wait for another rank cannot be left.
            self.taker._predicts = is_predicted
            self.optimizer: Any = torch.optim.SGD(self.model.parameters(), lr=0.1)
        elif kind == "reduced":
            plain = torch.optim.SGD(self.model.parameters(), lr=0.1)
            self.taker = self.optimizer = ReducedOptimizer(plain, groups, reduce="dp_cp")
        else:
            self.taker = self.optimizer = ShardedOptimizer(
                self.model,
                [{"params": [*self.model.parameters()]}],
                make=partial(torch.optim.SGD, lr=0.1),
                groups=groups,
                over="dp_cp",
                divisor=2,
                stage=int(detail[0]),
                overlap=detail.endswith("overlap"),
                bucket_nbytes=200,
                align_nbytes=16,
                elementwise=True,
            )

    def microbatch(self, step: int, number: int, *, fail: bool) -> None:
        around: AbstractContextManager[None] = self.taker.microbatch(
            is_last=number == NUM_MICROBATCHES - 1
        )
        torch.manual_seed(100 * step + 10 * number + self.groups.rank)
        rows = torch.randn(4, WIDTH)
        self.gate.fails = fail
        with around:
            hidden = rows
            for part in self.model if self.by_layers else (self.model,):
                hidden = part(hidden)
            hidden.square().mean().backward()

    def fail(self, step: int, *, at: int, on: Collection[int], error: type[BaseException]) -> str:
        """Run microbatches up to one that fails on ranks; return what this one raises."""
        self.gate.error = error
        with pytest.raises((error, HoldfastError)) as caught:
            self._run_to(step, at, fail=self.groups.rank in on)
        if at == 1:
            with pytest.raises(HoldfastError, match=r"drop_gradients\(\).* on all ranks"):
                self.update()
        self.taker.drop_gradients()
        return f"{caught.typename}: {caught.value}"

    def _run_to(self, step: int, last: int, *, fail: bool) -> None:
        for number in range(last + 1):
            self.microbatch(step, number, fail=fail and number == last)

    def step(self, number: int) -> float:
        for each in range(NUM_MICROBATCHES):
            self.microbatch(number, each, fail=False)
        return self.update()

    def update(self, **options: Any) -> float:
        own = () if self.taker is self.optimizer else (self.optimizer,)
        outcome = self.taker.step(*own, **options)
        norm: float = outcome.norm
        return norm


ERRORS = (Trouble, KeyboardInterrupt)


def failing(context: RankContext, way: str) -> dict[str, list[str]]:
    """What this rank raised; steps repeated after it equal those of a run without an error."""
    raised: dict[str, list[str]] = {}
    with ProcessGroups.create(Layout(dp=2)) as groups:
        groups.clone("dp_cp", purpose="dp_cp_ag")
        undisturbed, trained = Trained(way, groups), Trained(way, groups)
        for step in range(1 + NUM_MICROBATCHES):
            expected = undisturbed.step(step)
            for error in ERRORS if step else ():  # a sharded model completes what it has seen
                for on in ((1,), (0, 1)):
                    told = trained.fail(step, at=step - 1, on=on, error=error)
                    raised.setdefault(f"{error.__name__} {on}", []).append(told)
            assert trained.step(step) == expected, step
    return raised


@pytest.mark.parametrize(
    "way",
    [
        "fsdp optim_grads_params",
        "sharded 2 overlap",
        "reduced",
        *(
            pytest.param(way, marks=pytest.mark.slow)
            for way in (
                *("fsdp no_shard", "fsdp optim", "fsdp optim_grads"),
                "fsdp optim_grads by layers",  # each unit is a root of its own
                "fsdp optim_grads_params predicted",
                *("sharded 1", "sharded 1 overlap", "sharded 2"),
            )
        ),
    ],
)
def test_an_error_or_interrupt_of_one_rank_is_raised_on_all(way: str) -> None:
    """I1: in any of the microbatches of a step, in the middle of a backward.

    An interrupt leaves at once. Before, the rank that dropped its gradients alone was one batch
    ahead of the others from then on: its next microbatch ended with the one that it had left.
    """
    first, second = run_ranks(2, failing, way).results
    for error in ERRORS:
        told = f"{error.__name__}: in a backward"
        assert second[f"{error.__name__} (1,)"] == [told] * NUM_MICROBATCHES
        for others in first[f"{error.__name__} (1,)"]:
            assert "rank 1" in others
            assert told in others
        for each in (first, second):
            # One may hear of the other before it comes to its own.
            assert all(told in text for text in each[f"{error.__name__} (0, 1)"])


LAUNCHING = {
    **dict.fromkeys(("_launch_next", "_launch"), "reducer"),
    "launch_reduction": "buckets",
    **dict.fromkeys(("reduce_scatter", "start"), "collectives"),
    **dict.fromkeys(("__call__", "launch", "watched", "wait"), "launch_log"),
}
"""Functions that launch collectives, and the modules they are in."""


class InterruptAt:
    """Raises KeyboardInterrupt where Python looks for signals the n-th time in `LAUNCHING`.

    It looks after each call of C code, and where a function of Python starts.
    """

    def __init__(self, number: int) -> None:
        self.left = number

    def __enter__(self) -> InterruptAt:
        sys.setprofile(self._profile)
        return self

    def __exit__(self, *error: object) -> None:
        sys.setprofile(None)

    def _profile(self, frame: FrameType, event: str, function: object) -> None:
        module = str(frame.f_globals.get("__name__")).rpartition(".")[2]
        is_place = module in LAUNCHING.values() and frame.f_code.co_name in LAUNCHING
        if is_place and event in ("call", "c_return"):
            self.left -= 1
            if not self.left:
                raise KeyboardInterrupt(f"{function} in {frame.f_code.co_name}")


def interrupted_in_launches(context: RankContext, way: str, stride: int) -> int:
    """Return after how many interrupts steps were those of a run without any."""
    with ProcessGroups.create(Layout(dp=2), data_timeout_s=60) as groups:
        undisturbed, trained = Trained(way, groups), Trained(way, groups)
        assert trained.step(0) == undisturbed.step(0)
        for count in range(1000):
            interrupt = InterruptAt(1 + count * stride)
            with (
                suppress(KeyboardInterrupt, HoldfastError),
                interrupt if context.rank else nullcontext(),
            ):
                trained.microbatch(1, 0, fail=False)
                trained.microbatch(1, NUM_MICROBATCHES - 1, fail=False)
            trained.taker.drop_gradients()
            assert trained.step(count) == undisturbed.step(count), count
            left = torch.tensor([float(interrupt.left)])
            dist.broadcast(left, src=1)
            if left > 0:
                return count
    raise AssertionError("launches have no end")


@pytest.mark.parametrize(
    ("way", "stride"),
    [
        ("sharded 2", 7),
        *(
            pytest.param(way, 1, marks=pytest.mark.slow)
            for way in ("sharded 1", "sharded 2", "fsdp no_shard")
        ),
        pytest.param("fsdp optim_grads_params", 5, marks=pytest.mark.slow),
        pytest.param("fsdp optim_grads_params", 1, marks=pytest.mark.nightly),
    ],
)
def test_an_interrupt_in_a_launch_comes_before_it_or_after_it(way: str, stride: int) -> None:
    """I1: between a launch and its count it was launched again, and met another one's bytes.

    Gloo ended the process, or gradients were wrong from then on.
    """
    first, second = run_ranks(2, interrupted_in_launches, way, stride, timeout_s=280).results
    assert first == second > 3


def interrupted_within_another(context: RankContext) -> tuple[list[str], list[float]]:
    """What this rank raised in the inner of two microbatches, and norms of the steps after it."""
    raised: list[str] = []
    norms: list[float] = []
    with ProcessGroups.create(Layout(dp=2), data_timeout_s=60) as groups:
        outer, inner = Trained("reduced", groups), Trained("sharded 2", groups)
        undisturbed = Trained("reduced", groups), Trained("sharded 2", groups)
        for on in ((1,), (0, 1)):
            inner.gate.error = KeyboardInterrupt
            with (
                pytest.raises((KeyboardInterrupt, HoldfastError)) as caught,
                outer.taker.microbatch(is_last=True),
            ):
                inner.microbatch(0, 0, fail=context.rank in on)
            raised.append(f"{caught.typename}: {caught.value}")
            outer.taker.drop_gradients()  # in this order: the inner one is left first
            inner.taker.drop_gradients()
            for each, twin in zip((outer, inner), undisturbed, strict=True):
                norms.append(each.step(len(norms)))
                assert twin.step(len(norms) - 1) == norms[-1]
    return raised, norms


def test_an_interrupt_within_two_microbatches_leaves_both_on_all_ranks() -> None:
    """I1, M22: whichever optimizer drops its gradients first."""
    (first, norms), (second, others) = run_ranks(2, interrupted_within_another).results
    assert norms == others
    assert second[0] == "KeyboardInterrupt: in a backward"
    assert "rank 1: KeyboardInterrupt: in a backward" in first[0]
    assert all("KeyboardInterrupt: in a backward" in each[1] for each in (first, second))


class Leaving:
    """A veto that raises before the sum of a step, or after it."""

    def __init__(self, place: str, error: type[BaseException] | None) -> None:
        self.place, self.error = place, error

    def vetoes(self) -> bool:
        self.come_to("vetoes")
        return False

    def take_decision(self, vetoed: bool) -> None:
        self.come_to("take_decision")

    def come_to(self, place: str) -> None:
        if self.error is not None and place == self.place:
            raise self.error(f"in {place}")


ENDED_STEP = "an interrupt ended the last step|KeyboardInterrupt has ended a step of"
"""As the step says itself, or the groups that it has cut."""


def left_in_a_step(context: RankContext, way: str, place: str) -> str:
    """What this rank raises where rank 1 leaves a step by an interrupt; an error is one of all."""
    with ProcessGroups.create(Layout(dp=2), data_timeout_s=2.0) as groups:
        groups.clone("dp_cp", purpose="dp_cp_ag")
        trained = Trained(way, groups)
        trained.step(0)
        if place == "take_decision":  # of a step that is skipped, which ends there
            scaler, veto = (
                LossScaler(initial=4.0),
                Leaving(place, Trouble if context.rank else None),
            )
            with pytest.raises(Trouble) if context.rank else nullcontext():
                trained.update(veto=veto, scaler=scaler, is_finite=False)
            assert scaler.scale == 2.0  # on both ranks
        for error in (Trouble, KeyboardInterrupt):
            for number in range(NUM_MICROBATCHES):
                trained.microbatch(1, number, fail=False)
            with pytest.raises((HoldfastError, KeyboardInterrupt)) as caught:
                trained.update(veto=Leaving(place, error if context.rank else None))
            if error is Trouble:
                assert f"rank 1: Trouble: in {place}" in str(caught.value)
                trained.step(2)
        if context.rank:
            trained.taker.drop_gradients()
            for action in (partial(trained.microbatch, 2, 0, fail=False), trained.update):
                with pytest.raises(HoldfastError, match=ENDED_STEP):
                    action()
            assert "of different steps" in trained.taker.unfinished_work()
        return f"{caught.typename}: {caught.value}"


@pytest.mark.parametrize(
    ("way", "place"),
    [
        ("sharded 1", "take_decision"),
        *(
            pytest.param(way, place, marks=pytest.mark.slow)
            for way in ("sharded 1", "reduced", "fsdp optim_grads_params")
            for place in ("vetoes", "take_decision")
            if (way, place) != ("sharded 1", "take_decision")
        ),
    ],
)
def test_a_rank_that_leaves_a_step_makes_no_other_one(way: str, place: str) -> None:
    """I1: before, its next messages met those of the step that the others were in.

    They had updated by then, or gloo ended the process. An error is raised on all ranks.
    """
    first, second = run_ranks(2, left_in_a_step, way, place).results
    assert first.startswith("DeadlineError")
    assert "ranks [1] did not arrive" in first
    assert second == f"KeyboardInterrupt: in {place}"


class Told(MicrobatchTaker):
    """Has launched what a test says, and notes what it is to launch."""

    def __init__(self, launched: Mapping[str, Launched], *, is_late: bool) -> None:
        self._launched, self._is_late = launched, is_late
        self.missing: Mapping[str, Sequence[Description]] = {}
        self.num_waits = 0

    def take_microbatch(self, *, is_last: bool) -> AbstractContextManager[None]:
        raise NotImplementedError

    def launched(self) -> Mapping[str, Launched]:
        return self._launched

    def launch_missing(self, missing: Mapping[str, Sequence[Description]]) -> list[Any]:
        self.missing = missing
        return [self]

    def wait(self) -> None:
        self.num_waits += 1
        if self._is_late:
            raise DeadlineError("late")


def program(chance: random.Random, count: int) -> list[Description]:
    return [(chance.choice(("all-gather", "all-reduce")), 2, "float32") for _ in range(count)]


def histories(chance: random.Random, ranks: Sequence[int]) -> dict[int, Launched]:
    """What each rank has launched on one communicator: as far as it came, most often."""
    whole, before = program(chance, 5), chance.randrange(3)
    found = {}
    for rank in ranks:
        recent = whole[: chance.choice((0, 2, 4, 5, 5))]
        odd = chance.random()
        if odd < 0.1 and recent:
            recent = program(chance, len(recent))
        count = before + len(recent) + (odd > 0.9)
        if 0.1 < odd < 0.15:
            continue  # it has never launched anything there
        found[rank] = Launched(ranks=ranks, count=count, recent=recent)
    return found


def completed(context: RankContext) -> list[tuple[bool, bool]]:
    """Compare drawn histories; by case, whether one is closed, and whether some were missing."""
    found = []
    with ProcessGroups.create(Layout(dp=3)) as groups:
        for seed in range(120):
            chance = random.Random(seed)
            completes, is_late = chance.random() < 0.7, chance.random() < 0.1
            parts = {"a": histories(chance, (0, 1, 2)), "b": histories(chance, (1, 2))}
            own = {n: each[context.rank] for n, each in parts.items() if context.rank in each}
            taker = Told(own, is_late=is_late)
            takers = {"module": taker, "other": Told({}, is_late=False)}
            compare_launched(takers, groups.control, completes=completes)
            is_closed, missing = False, {}
            for name, mine in own.items():
                theirs = [parts[name].get(rank) for rank in mine.ranks]
                counts = {-1 if each is None else each.count for each in theirs}
                if not completes:
                    is_closed |= len(counts) > 1
                    continue
                longest = max((each.recent for each in theirs if each), key=len)
                if all(
                    each is not None
                    and each.count - len(each.recent) == mine.count - len(mine.recent)
                    and each.recent == longest[: len(each.recent)]
                    for each in theirs
                ):
                    missing[name] = [*longest[len(mine.recent) :]]
                else:
                    is_closed = True
            assert taker.missing == missing, seed
            assert taker.num_waits == (completes and not is_closed), seed
            assert taker.has_lost_communicators == (is_closed or (completes and is_late)), seed
            found.append((is_closed, any(missing.values())))
    return found


def test_ranks_complete_what_others_have_launched_or_launch_nothing_any_more() -> None:
    """I1, against whole histories: what ranks launched unlike is never taken for the same."""
    for found in run_ranks(3, completed).results:
        for each in zip(*found, strict=True):
            assert 0.1 < sum(each) / len(found) < 0.9
