"""What a save begins with: the opening word of each rank, its staging slots, its clock."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from holdfast.checkpoint.plan.rank_plan import RankPlan
from holdfast.checkpoint.save.local_state import LocalState
from holdfast.checkpoint.save.pending import InFlightSave
from holdfast.checkpoint.save.staging import Arena, Staging
from holdfast.errors import ConfigError, PlanError
from holdfast.format.names import saving_dir

BEGIN = "save: begin"
"""The phase of the one collective that opens every save; its answers are `Opening`s."""
BUDGET = "save: budget"
"""The phase of the last one where the structure is planned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveAsk:
    """What a save is asked for: its step, over an existing one or not, replicas compared or not.

    `kind`: of the call, which has to be the same on all ranks.
    """

    kind: Literal["save", "save_async", "prepare"]
    step: int
    overwrite: bool
    check_replicas: bool
    metadata: bytes = b""
    """What `format.metadata.encode_metadata` made of the caller's."""

    def check(self) -> None:
        """ConfigError for an argument of a wrong type or out of range."""
        if isinstance(self.step, bool) or not isinstance(self.step, int):
            raise ConfigError(f"step must be an int, got {self.step!r}")
        if not 0 <= self.step < 10**18:
            raise ConfigError(f"step {self.step} cannot be stored: it must be in [0, 10**18)")
        for name in ("overwrite", "check_replicas"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name}={getattr(self, name)!r} must be True or False")


class Opening(msgspec.Struct, frozen=True, array_like=True):
    """What each rank says at the beginning of a save; small enough for one collective.

    `plan`: token of the plan in hand, empty for none. `names`: digest of the names of its tensors.
    `compares`: whether it would compare all replicas, which it was asked for or which follows from
    `num_saves`, the saves that it has counted.
    `failed`: id, error class and shortened message of each earlier save that failed and was not
    raised on this rank. `running`: ids of the saves in flight on it.
    """

    kind: str
    step: int
    overwrite: bool
    check_replicas: bool
    plan: str
    names: str
    compares: bool
    num_saves: int
    nonce: str
    busy: bool
    failed: tuple[tuple[str, str, str], ...]
    running: tuple[str, ...]
    metadata: str = ""
    """Digest of the caller's metadata; empty for none."""


class Opened:
    """What all ranks know once a save is open, from the answers alone: each rank finds the same."""

    def __init__(self, answers: Sequence[bytes]) -> None:
        self.openings = [msgspec.msgpack.decode(data, type=Opening) for data in answers]

    @property
    def directory(self) -> str:
        """Where this save is staged on storage."""
        return saving_dir(self.openings[0].step, self.save_id)

    @property
    def save_id(self) -> str:
        """The id of this save: the coordinator's nonce."""
        return self.openings[0].nonce

    @property
    def is_skipped(self) -> bool:
        """Whether some rank is busy, so that nothing is saved."""
        return any(opening.busy for opening in self.openings)

    @property
    def num_saves(self) -> int:
        """The count of saves that all go on from; a rank that missed a failed one catches up."""
        return max(opening.num_saves for opening in self.openings)

    @property
    def is_unchanged(self) -> bool:
        """Whether all ranks hold one and the same plan, which is used again."""
        plans = {(opening.plan, opening.compares) for opening in self.openings}
        return len(plans) == 1 and self.openings[0].plan != ""

    @property
    def failed(self) -> dict[str, tuple[str, str]]:
        """By id, class and message of each earlier failure that some rank has not raised."""
        found: dict[str, tuple[str, str]] = {}
        for opening in self.openings:
            for save_id, kind, text in opening.failed:
                found.setdefault(save_id, (kind, text))
        return found

    def refuse_disagreement(self, ranks: Sequence[int]) -> None:
        """PlanError where the ranks do not ask for the same."""
        for what, asked in self._asked().items():
            refuse_disagreement(what, ranks, asked)

    def agrees(self) -> bool:
        """Whether the ranks ask for the same, and no failure is to be raised."""
        return not self.failed and all(len(set(asked)) == 1 for asked in self._asked().values())

    def _asked(self) -> dict[str, list[object]]:
        """What has to be the same on all ranks, by name, one for each rank."""
        asked: dict[str, list[object]] = {
            what: [getattr(opening, what) for opening in self.openings]
            for what in ("kind", "step", "overwrite", "check_replicas", "metadata")
        }
        if len({opening.num_saves for opening in self.openings}) == 1:
            # Else some rank missed a save that failed, and catches up here.
            asked["check_replicas"] = [opening.compares for opening in self.openings]
        return asked


def is_staging(answers: Mapping[str, Sequence[bytes]]) -> bool:
    """Whether an asynchronous save has all its collectives behind it, from the answers by phase."""
    if BUDGET in answers:
        return True
    if BEGIN not in answers:
        return False
    opened = Opened(answers[BEGIN])
    return opened.agrees() and (opened.is_unchanged or opened.is_skipped)


@dataclass(slots=True)
class Slot:
    """One arena, what it is laid out for, and the save that uses it."""

    arena: Arena
    plan_digest: str = ""
    staging: Staging | None = None
    given: int = -1
    pending: InFlightSave | None = None

    def is_free(self) -> bool:
        """Whether nothing is under way in it."""
        return self.pending is None or self.pending.done()

    def reset(self) -> None:
        """Give the memory back and forget what it was laid out for, whatever was half done in it.

        A writer that still reads the memory has it mapped on its own.
        """
        self.staging, self.pending, self.plan_digest, self.given = None, None, "", -1
        self.arena.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """A save that all ranks have agreed to: what to stage, under which plan.

    `planned`: the structure was planned anew. `skipped`: some rank is busy, nothing is saved.
    """

    local: LocalState
    plan: RankPlan | None
    save_id: str
    directory: str
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


def refuse_disagreement(
    what: str, ranks: Sequence[int], asked: Sequence[object], *, operation: str = "save"
) -> None:
    """PlanError naming the ranks of each value, unless all asked for the same."""
    if len(set(asked)) > 1:
        by_value = {
            value: [rank for rank, v in zip(ranks, asked, strict=True) if v == value]
            for value in dict.fromkeys(asked)
        }
        text = "; ".join(f"{value!r} on ranks {held}" for value, held in by_value.items())
        raise PlanError(f"{operation}: the ranks disagree on {what}: {text}")
