"""A rank whose error comes after the others' deadline: every rank raises, and none waits for it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from holdfast import Layout, ProcessGroups
from holdfast.errors import DeadlineError, HoldfastError
from holdfast.parallel import ModuleGroups
from tests.harness import RankContext, run_ranks
from tests.optim.multi_module.common import Spec, layouts_of
from tests.optim.test_settings import KINDS, SIZES, Alone

DEADLINE_S = 1.0
LATE_S = 2.5 * DEADLINE_S
"""Longer than both waits of the others: for the sum of a step, and for the rank by its name."""


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
    with create(layouts if kind == "modules" else Layout(**SIZES), timeout_s=DEADLINE_S) as groups:
        alone = Alone(kind, groups)
        alone.step(0)
        before = [shard.clone() for shard in shards(alone)]
        if context.rank == 1:
            stepper: Any = alone.trained.stepper
            setattr(alone.trained.sharded._stepper if kind == "fsdp" else stepper, phase, fail_late)
        started = time.monotonic()
        with pytest.raises(HoldfastError) as caught:
            alone.step(1)
        error = caught.value
        return Report(
            error=type(error).__name__,
            missing_ranks=error.details.get("missing_ranks"),
            has_own="boom" in f"{error} {error.__cause__}",
            is_changed=any(map(torch.ne, map(torch.sum, before), map(torch.sum, shards(alone)))),
            seconds=time.monotonic() - started,
        )


def shards(alone: Alone) -> list[torch.Tensor]:
    """What this rank updates."""
    return [
        p.detach().to_local() if hasattr(p, "to_local") else p.detach()
        for group in alone.optimizer.param_groups
        for p in group["params"]
    ]


def fail_late(*_: object) -> None:
    time.sleep(LATE_S)
    raise OSError("boom")


@pytest.mark.parametrize(
    ("kind", "phase"),
    [*((kind, "usage") for kind in KINDS), ("sharded", "update"), ("reduced", "update")],
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
