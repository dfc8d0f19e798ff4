"""A rank that leaves a bridge, or waits elsewhere, ends the waits of the others by name."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import _get_default_store

from bench.groups import CountingStore
from holdfast import Checkpointer, HoldfastError, Layout, ModuleGroups, ModuleLayouts
from holdfast.bridge import Bridge
from holdfast.bridge.crossing import Crossing
from holdfast.optim import MultiModuleOptimizer, ReducedOptimizer
from tests.harness import RankContext, run_ranks

LAYOUTS = ModuleLayouts(
    {"vision": Layout(ranks=(0,)), "language": Layout(dp=2, ranks=(1, 2))},
    edges=[("vision", "language")],
)
LONG_S = 300.0
"""A limit that no test comes to."""


class Trouble(Exception):
    """An error that a user's model raises."""


class Trained:
    """The module of this rank, and its microbatches."""

    def __init__(self, groups: ModuleGroups) -> None:
        self.name = groups.modules[0]
        self.net = nn.Linear(3, 3)
        inner = torch.optim.SGD(self.net.parameters(), lr=0.1)
        self.optimizer = MultiModuleOptimizer(
            groups, {self.name: ReducedOptimizer(inner, groups[self.name])}
        )
        self.bridge = Bridge(groups, "vision", "language")
        for control in controls_of(groups):
            transport = control._transport
            assert transport is not None
            transport._connections.after_s = 0.05

    def cross(self, before: Callable[[], object] = bool) -> None:
        """Forward and backward; the source calls `before` in front of its bridge."""
        if self.name == "language":
            bridged = self.bridge()
            assert bridged.tokens is not None
            (self.net(bridged.tokens).sum() + bridged.anchor).backward()
            return
        tokens = self.net(torch.ones(4, 3))
        before()
        self.bridge(tokens, [1, 3]).backward()

    def microbatch(self, before: Callable[[], object] = bool) -> None:
        with self.optimizer.microbatch(is_last=True):
            self.cross(before)


def controls_of(groups: ModuleGroups) -> list[Any]:
    return [groups.control, groups.edge("vision", "language").control]


def fail(error: type[BaseException] = Trouble, *_: object) -> None:
    raise error("boom")


def told(action: Callable[[], object]) -> str:
    """Class and text of what an action raises."""
    with pytest.raises((HoldfastError, KeyboardInterrupt)) as caught:
        action()
    return f"{caught.typename}: {caught.value}"


def elsewhere(context: RankContext, place: str, root: str) -> str:
    """What this rank raises; rank 0 has caught an error of its module, and goes on elsewhere."""
    with ModuleGroups.create(LAYOUTS, timeout_s=LONG_S, data_timeout_s=LONG_S) as groups:
        trained = Trained(groups)
        trained.microbatch()
        trained.optimizer.step()

        def caught_within() -> None:
            with trained.optimizer.microbatch(is_last=True), suppress(Trouble):
                trained.cross(fail)

        def interrupted_first() -> None:
            with suppress(KeyboardInterrupt):
                trained.microbatch(lambda: fail(KeyboardInterrupt))
            trained.optimizer.step()

        if context.rank == 0:
            actions: dict[str, Callable[[], object]] = {
                "microbatch": caught_within,
                "save": lambda: Checkpointer(root, groups=groups.union).save(1, {}),
                "step": trained.optimizer.step,
                "interrupted": interrupted_first,
            }
            found = told(actions[place])
        elif place == "save":
            found = told(trained.cross)
        else:
            if place == "interrupted":
                assert "KeyboardInterrupt: boom" in told(trained.microbatch)
                trained.optimizer.drop_gradients()
            found = told(trained.microbatch)
        dist.barrier()
        return found


@pytest.mark.parametrize(
    ("place", "where"),
    [
        ("microbatch", "rank 0 waits in phase 'microbatch', for all ranks"),
        ("step", "rank 0 waits in a step of MultiModuleOptimizer"),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (
                ("save", "rank 0 waits in phase 'save: begin', for all ranks"),
                ("interrupted", "rank 0 waits in a step of MultiModuleOptimizer"),
            )
        ),
    ],
)
def test_a_rank_that_waits_elsewhere_is_named_in_a_bridge(
    place: str, where: str, tmp_path: Any
) -> None:
    """I7: before, both waited for the limit of tensors, ten minutes."""
    for found in run_ranks(3, elsewhere, place, str(tmp_path), timeout_s=60).results:
        assert where in found, found
        assert "in phase 'forward 2 of vision -> language'" in found or (
            "in phase 'forward 3 of vision -> language'" in found
        ), found


def left(context: RankContext, place: str, victim: int, error: type[BaseException]) -> str:
    """What this rank raises when one leaves a bridge behind its agreement, or before its call."""
    with ModuleGroups.create(LAYOUTS, timeout_s=LONG_S, data_timeout_s=LONG_S) as groups:
        trained = Trained(groups)
        trained.microbatch()
        before: Callable[[], object] = bool
        if context.rank == victim and place == "before":
            before = lambda: fail(error)  # noqa: E731
        elif context.rank == victim:
            setattr(Crossing, place, lambda *_: fail(error))
        trained.optimizer.step()
        groups.control.timeout_s = 0.1
        found = told(lambda: trained.microbatch(before))
        dist.barrier()  # silently
        return found


@pytest.mark.parametrize(
    ("place", "victim", "error"),
    [
        ("_allocate", 1, MemoryError),
        ("before", 0, KeyboardInterrupt),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (
                ("_allocate", 1, KeyboardInterrupt),
                ("_exchange_gradients", 0, MemoryError),
                ("_exchange_gradients", 2, KeyboardInterrupt),
            )
        ),
    ],
)
def test_what_leaves_a_bridge_on_one_rank_ends_the_waits_of_the_others(
    place: str, victim: int, error: type[BaseException]
) -> None:
    """I7: before, they waited for its messages, or its call, for the limit of tensors."""
    results = run_ranks(3, left, place, victim, error, fresh=True, timeout_s=60).results
    for rank, found in enumerate(results):
        if rank == victim and error is KeyboardInterrupt:
            assert found == "KeyboardInterrupt: boom"
        else:
            assert error.__name__ in found, (rank, found)
            assert f"rank {victim}" in found, (rank, found)


def requests_of_bridges(context: RankContext) -> int:
    """Requests to the store in regular microbatches."""
    store = CountingStore(_get_default_store())
    with ModuleGroups.create(LAYOUTS, store=store) as groups:
        trained = Trained(groups)
        trained.microbatch()
        trained.optimizer.step()
        for control in controls_of(groups):
            control._transport._connections.after_s = LONG_S
            control._transport._store.withdraw(f"progress/{context.rank}")
            control._transport._store.check(["none"])
        before = store.num_requests
        for _ in range(5):
            trained.microbatch()
        controls_of(groups)[1]._transport._store.check(["none"])
        return store.num_requests - before - 1


def test_a_regular_bridge_makes_no_request_to_the_store() -> None:
    """I7: with thousands of ranks one for each microbatch would be too much for it."""
    assert run_ranks(3, requests_of_bridges).results == [0, 0, 0]
