"""What a save begins with: the opening word of each rank, its staging slots, its clock."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import msgspec

from holdfast.checkpoint.local import LocalState
from holdfast.checkpoint.pending import PendingSave
from holdfast.checkpoint.shares import RankPlan
from holdfast.checkpoint.stage import Arena, Staging
from holdfast.errors import PlanError


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveAsk:
    """What a save is asked for: its step, over an existing one or not, replicas compared or not."""

    step: int
    overwrite: bool
    check_replicas: bool


class Opening(msgspec.Struct, frozen=True, array_like=True):
    """What each rank says at the beginning of a save; small enough for one collective.

    `plan`: token of the plan in hand, empty for none. `names`: digest of the names of its tensors.
    `failed`: id, error class and shortened message of an earlier save that failed, if any.
    """

    step: int
    overwrite: bool
    check_replicas: bool
    plan: str
    names: str
    nonce: str
    busy: bool
    failed: tuple[str, str, str] | None


@dataclass(slots=True)
class Slot:
    """One arena, what it is laid out for, and the save that uses it."""

    arena: Arena
    plan_digest: str = ""
    staging: Staging | None = None
    given: int = 0
    pending: PendingSave | None = None

    def is_free(self) -> bool:
        """Whether nothing is under way in it."""
        return self.pending is None or self.pending.done()


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """A save that all ranks have agreed to: what to stage, under which plan.

    `planned`: the structure was planned anew. `skipped`: some rank is busy, nothing is saved.
    """

    local: LocalState
    plan: RankPlan | None
    save_id: str
    planned: bool
    skipped: bool

    def plan_or_raise(self) -> RankPlan:
        """The plan; PlanError where the save is skipped."""
        if self.plan is None:
            raise PlanError("the save was skipped, there is no plan for it")
        return self.plan


@dataclass(slots=True)
class Clock:
    """Seconds by phase."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the body under a name."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began


@contextmanager
def collector_paused() -> Iterator[None]:
    """Without a collection of cyclic garbage in the body, which makes many objects and no cycles.

    A full collection of a training process takes a tenth of a second and more.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def refuse_disagreement(what: str, ranks: Sequence[int], said: Sequence[object]) -> None:
    """PlanError naming the ranks of each value, unless all said the same."""
    if len(set(said)) > 1:
        by_value = {
            value: [rank for rank, v in zip(ranks, said, strict=True) if v == value]
            for value in dict.fromkeys(said)
        }
        text = "; ".join(f"{value!r} on ranks {held}" for value, held in by_value.items())
        raise PlanError(f"save: the ranks disagree on {what}: {text}")
