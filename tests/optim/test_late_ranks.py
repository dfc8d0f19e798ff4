"""Ranks that are late in a step: within the limit no harm, after it named on every rank."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from bench.groups import CountingStore
from holdfast import Layout, ProcessGroups
from holdfast.errors import ConfigError, DeadlineError, HoldfastError
from holdfast.optim import ReducedOptimizer
from holdfast.parallel import Control, ModuleGroups
from tests.harness import RankContext, run_ranks
from tests.optim.multi_module.common import Spec, layouts_of, rows_of, train_module
from tests.optim.test_settings import KINDS, SIZES, Alone

DEADLINE_S = 2.0
LATE_S = 4 * DEADLINE_S
"""Longer than both waits of the others: for the sum of a step, and for the rank to hear of it."""
LEFT = "rank 0 has left its step"
SHORT_S = 0.2
"""The limit of agreement, which a rank that is late in a step may exceed."""


@dataclass
class Report:
    """How a step ended on one rank."""

    error: str
    missing_ranks: list[int] | None
    has_own: bool
    """Whether the rank's own error is in the message, or is the cause."""
    is_changed: bool
    seconds: float


def late(context: RankContext, kind: str, phase: str) -> Report:
    layouts = layouts_of({"one": Spec(sizes=SIZES)})
    create: Any = ModuleGroups.create if kind == "modules" else ProcessGroups.create
    with create(
        layouts if kind == "modules" else Layout(**SIZES),
        timeout_s=30.0,
        data_timeout_s=DEADLINE_S,
    ) as groups:
        alone = Alone(kind, groups)
        alone.step(0)
        if phase == "update":  # whoever has waited in vain for the sum does not wait as long again
            for control in controls_of(groups):
                control.timeout_s = DEADLINE_S
        before = [shard.clone() for shard in shards(alone)]
        if context.rank == 1:
            stepper: Any = alone.trained.stepper
            setattr(alone.trained.sharded._stepper if kind == "fsdp" else stepper, phase, fail_late)
        started = time.monotonic()
        with pytest.raises(HoldfastError) as caught:
            alone.step(1)
        error = caught.value
        if context.rank == 0:
            _get_default_store().set(LEFT, "")
        return Report(
            error=type(error).__name__,
            missing_ranks=error.details.get("missing_ranks"),
            has_own="boom" in f"{error} {error.__cause__}",
            is_changed=any(map(torch.ne, map(torch.sum, before), map(torch.sum, shards(alone)))),
            seconds=time.monotonic() - started,
        )


def controls_of(groups: ProcessGroups | ModuleGroups) -> list[Control]:
    return [groups.control, *([groups["one"].control] if isinstance(groups, ModuleGroups) else [])]


def shards(alone: Alone) -> list[torch.Tensor]:
    """What this rank updates."""
    return [
        p.detach().to_local() if hasattr(p, "to_local") else p.detach()
        for group in alone.optimizer.param_groups
        for p in group["params"]
    ]


def _mark(kind: str) -> tuple[pytest.MarkDecorator, ...]:
    """All steppers are of one engine: here those that wait in another way than the others."""
    return () if kind in ("sharded", "fsdp", "modules") else (pytest.mark.slow,)


def fail_late(*_: object) -> None:
    _get_default_store().wait([LEFT])
    raise OSError("boom")


@pytest.mark.parametrize(
    ("kind", "phase"),
    [
        ("sharded", "usage"),
        *(pytest.param(k, "usage", marks=pytest.mark.slow) for k in KINDS if k != "sharded"),
        pytest.param("sharded", "update", marks=pytest.mark.slow),
        ("reduced", "update"),
    ],
)
def test_an_error_after_the_deadline_is_raised_and_no_rank_waits(kind: str, phase: str) -> None:
    """M15: the others name the late rank and leave; it reports its own error, not theirs alone."""
    first, second = run_ranks(2, late, kind, phase, fresh=True, timeout_s=60).results
    assert first.error == DeadlineError.__name__
    assert first.missing_ranks == [1]
    assert not first.has_own
    assert first.is_changed == (phase == "update")
    assert second.has_own
    assert not second.is_changed
    assert second.seconds < 2 * LATE_S


def slowly(call: Callable[..., Any], seconds: float) -> Callable[..., Any]:
    """The same call, late."""

    def slow(*args: Any, **options: Any) -> Any:
        time.sleep(seconds)
        return call(*args, **options)

    return slow


def late_within(context: RankContext, kind: str) -> bool:
    """Whether steps end in the same bits, rank 1 being late in each of their phases."""
    layouts = layouts_of({"one": Spec(sizes=SIZES)})
    create: Any = ModuleGroups.create if kind == "modules" else ProcessGroups.create
    with create(layouts if kind == "modules" else Layout(**SIZES)) as groups:
        prompt, alone = Alone(kind, groups), Alone(kind, groups)
        for control in controls_of(groups):
            control.timeout_s = SHORT_S
        stepper: Any = alone.trained.stepper
        if kind == "fsdp":
            alone.step(0)
            prompt.step(0)
            stepper = alone.trained.sharded._stepper
        engine = stepper._engine if kind != "modules" else alone.call.__self__._engine
        engine._total.is_on_host = False  # as on a GPU: agreement comes in after the update
        for number, phase in enumerate(("", "usage", "update"), start=1):
            prompt.step(number)
            if context.rank == 1 and phase:
                setattr(stepper, phase, slowly(getattr(stepper, phase), 3 * SHORT_S))
            elif context.rank == 1:
                time.sleep(3 * SHORT_S)
            alone.step(number)
        ours, theirs = alone.values(), prompt.values()
        return all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=_mark(kind)) for kind in KINDS])
def test_a_rank_late_by_less_than_the_data_limit_harms_nothing(kind: str) -> None:
    """I7: in the forward, in measuring, in the update; agreement of a step waits for it, too."""
    assert run_ranks(2, late_within, kind).results == [True, True]


def late_by_more(context: RankContext, kind: str, lateness: float) -> tuple[str, Any, str]:
    """The error on this rank when rank 1 comes to its forward after the data limit."""
    with ProcessGroups.create(Layout(**SIZES), timeout_s=30, data_timeout_s=DEADLINE_S) as groups:
        alone = Alone(kind, groups)
        alone.step(0)
        groups.control.timeout_s = SHORT_S
        if context.rank == 1:
            time.sleep(lateness)
        with pytest.raises(HoldfastError) as caught:
            alone.step(1)
        error = caught.value
        return type(error).__name__, error.details.get("missing_ranks"), str(error)


@pytest.mark.parametrize(
    ("kind", "lateness"),
    [
        ("sharded", 1.5 * DEADLINE_S),
        ("fsdp", 1.5 * DEADLINE_S),
        *(pytest.param(kind, LATE_S, marks=pytest.mark.slow) for kind in ("fsdp", "sharded")),
    ],
)
def test_a_rank_later_than_the_data_limit_is_named(kind: str, lateness: float) -> None:
    """I7: as missing if the others have left, and if it comes while they agree.

    In a sharded model others wait in a gather first, and agree after; with whole copies at hand
    they only agree.
    """
    first, second = run_ranks(2, late_by_more, kind, lateness, fresh=True, timeout_s=60).results
    assert (first[0], first[1]) == ("DeadlineError", [1]), first
    assert second[0] == "DeadlineError", second
    if kind == "fsdp" and lateness < 2 * DEADLINE_S:
        assert "waited for rank 1, which came after the time limit" in first[2]


def told_in_vain(context: RankContext) -> list[int] | None:
    """An interrupt leaves a microbatch on rank 1, and the other rank comes to none."""
    with ProcessGroups.create(Layout(**SIZES), timeout_s=30, data_timeout_s=DEADLINE_S) as groups:
        alone = Alone("sharded", groups)
        alone.step(0)
        groups.control.timeout_s = SHORT_S
        missing = None
        if context.rank == 1:
            with pytest.raises(KeyboardInterrupt), alone.around(is_last=False):
                raise KeyboardInterrupt
            with pytest.raises(DeadlineError) as caught:
                alone.trained.stepper.drop_gradients()  # type: ignore[union-attr]
            missing = caught.value.details["missing_ranks"]
        dist.barrier()
        return missing


def test_gradients_dropped_after_an_interrupt_name_ranks_that_do_not_hear_of_it() -> None:
    """M15: the next microbatch would end with the one that they are in; before, it was no error."""
    assert run_ranks(2, told_in_vain, fresh=True, timeout_s=60).results == [None, [0]]


def elsewhere(context: RankContext, kind: str, place: str) -> str:
    """The error on this rank when rank 0 makes a step and rank 1 waits for it in another place."""
    layouts = layouts_of({"one": Spec(sizes=SIZES)})
    create: Any = ModuleGroups.create if kind == "modules" else ProcessGroups.create
    options = {"bucket_nbytes": 1 << 10} if place == "several buckets" else {}
    with create(layouts if kind == "modules" else Layout(**SIZES), timeout_s=300.0) as groups:
        alone = Alone(kind, groups, **options)
        alone.step(0)
        for transport in (control._transport for control in controls_of(groups)):
            assert transport is not None
            transport._connections.after_s = 0.1
        with pytest.raises(HoldfastError) as caught:  # noqa: PT012
            if context.rank == 0 or place != "no backward":
                train_module(alone.trained, rows_of(1, "one"))
            if context.rank == 0:
                alone.call()
            elif place == "evaluation":
                with torch.no_grad():
                    alone.trained.loss(rows_of(2, "one"))
            groups.control.agree(None, phase="after the loop")
        with pytest.raises(ConfigError, match="Create the groups and the model again"):
            alone.around(is_last=True).__enter__()
        return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.parametrize(
    ("kind", "place"),
    [
        ("sharded", "one bucket"),
        ("sharded", "several buckets"),
        ("reduced", "no backward"),
        *(
            pytest.param(kind, place, marks=pytest.mark.slow)
            for kind, place in (
                ("sharded", "no backward"),
                ("chained", "no backward"),
                ("modules", "one bucket"),
                ("stepper", "after the loop"),
                ("fsdp", "after the loop"),
                ("fsdp", "evaluation"),
            )
        ),
    ],
)
def test_a_rank_that_makes_a_step_alone_is_told_where_the_others_are(kind: str, place: str) -> None:
    """I7: before, it waited for the limit of its communicator, and neither error had both places.

    Over sockets of its own (one bucket), in the sum (several), in the reductions before it.
    """
    where = "the gather of unit" if place == "evaluation" else "phase 'after the loop'"
    told = run_ranks(2, elsewhere, kind, place, fresh=True, timeout_s=60).results
    for each in told:
        assert each.startswith("PlanError"), each
        assert "rank 0 waits in a step of" in each, each
        assert f"which rank 1 has not begun; that one waits in {where}" in each


class NotingStore(CountingStore):
    """Has the keys of the notes that were left in it."""

    def __init__(self, store: dist.Store) -> None:
        super().__init__(store)
        self.notes: list[str] = []

    def set(self, key: str, value: Any) -> None:
        super().set(key, value)
        if "/note/" in key:
            self.notes.append(key)


def notes_of_steps(context: RankContext) -> tuple[int, int, int]:
    """Requests and notes of regular steps, and notes of one that waits."""
    store = NotingStore(_get_default_store())
    with ProcessGroups.create(Layout(**SIZES), store=store) as groups:
        small, large = Alone("sharded", groups), Alone("sharded", groups, bucket_nbytes=1 << 10)
        for alone in (small, large):
            alone.step(0)
            alone.backward(1)
        transport = groups.control._transport
        assert transport is not None
        transport._connections.after_s = 300.0
        # Requests are made one after another: those of the microbatches come before the answer.
        transport._store.check(["none"])
        before = store.num_requests
        small.call()
        large.call()
        transport._store.check(["none"])
        requests, regular = store.num_requests - before - 1, len(store.notes)
        transport._connections.after_s = 0.05
        large.backward(2)
        if context.rank == 1:  # which begins once the other one has left its note
            transport._store.wait(["note/0"], timedelta(seconds=60))
        large.call()
        waited = len(store.notes) - regular
    return requests, regular, waited


def test_a_step_leaves_a_note_only_if_it_waits() -> None:
    """I7: of thousands of ranks each would make a request at one process, in each step."""
    first, second = run_ranks(2, notes_of_steps).results
    assert first[:2] == second[:2] == (0, 0)
    assert first[2] == 1


def interrupted(context: RankContext, kind: str, phase: str) -> list[int] | None:
    """Ranks that this one misses when an interrupt leaves the step of rank 1, which then waits."""
    with ProcessGroups.create(Layout(**SIZES), timeout_s=300.0) as groups:
        alone = Alone(kind, groups)
        alone.step(0)
        alone.backward(1)
        if context.rank == 1:
            stepper: Any = alone.trained.stepper
            setattr(alone.trained.sharded._stepper if kind == "fsdp" else stepper, phase, interrupt)
        return missed_in(alone.call, is_interrupted=context.rank == 1)


def missed_in(step: Callable[[], object], *, is_interrupted: bool) -> list[int] | None:
    """The ranks that a step misses; None on the rank that an interrupt leaves, which then waits."""
    missing = None
    if is_interrupted:
        with pytest.raises(KeyboardInterrupt):
            step()
    else:
        with pytest.raises(DeadlineError) as caught:
            step()
        missing = caught.value.details["missing_ranks"]
    dist.barrier()
    return missing


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["usage", "update"])
@pytest.mark.parametrize("kind", ["sharded", "reduced", "fsdp"])
def test_an_interrupt_in_a_step_ends_the_waits_of_other_ranks(kind: str, phase: str) -> None:
    """I7: before, they waited for the limit of their communicators while that rank lived."""
    assert run_ranks(2, interrupted, kind, phase, fresh=True, timeout_s=60).results == [[1], None]


def interrupted_of_four(context: RankContext) -> list[int] | None:
    """As `interrupted`, where a rank waits for ranks that wait for the one with the interrupt."""
    with ProcessGroups.create(Layout(tp=2, dp=2), timeout_s=300.0) as groups:
        net = torch.nn.Linear(4, 4)
        inner = torch.optim.SGD(net.parameters(), lr=0.1)
        stepper = ReducedOptimizer(inner, groups, reduce="dp_cp", divisor=2)
        with stepper.microbatch(is_last=True):
            net(torch.ones(2, 4)).sum().backward()
        if context.rank == 3:
            stepper.update = interrupt  # type: ignore[method-assign]
        return missed_in(stepper.step, is_interrupted=context.rank == 3)


@pytest.mark.slow
def test_an_interrupt_in_a_step_ends_waits_for_ranks_that_it_has_freed() -> None:
    """I7: before, those left their step and communicators stayed open, up to their limit."""
    told = run_ranks(4, interrupted_of_four, fresh=True, timeout_s=60).results
    assert told == [[3], [3], [3], None]
