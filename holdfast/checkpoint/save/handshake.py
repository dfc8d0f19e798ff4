"""How the ranks agree on a save: the request, the proposal of each rank, the save agreed on."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import msgspec

from holdfast.checkpoint.plan.rank_plan import LocalState, RankPlan
from holdfast.errors import ConfigError, ErrorRecord, PlanError
from holdfast.format.names import saving_dir

BEGIN = "save: begin"
"""The phase of the one collective that opens every save; its answers are `SaveProposal`s."""
BUDGET = "save: budget"
"""The phase of the last collective where the structure is planned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveRequest:
    """The arguments of one save.

    Args:
        kind: of the call, which has to be the same on all ranks.
        step: of the checkpoint.
        overwrite: whether it may replace a checkpoint of that step.
        check_replicas: whether declared replicas are compared, too.
        metadata: the caller's, from `format.metadata.encode_metadata`.
    """

    kind: Literal["save", "save_async", "prepare"]
    step: int
    overwrite: bool
    check_replicas: bool
    metadata: bytes = b""

    def check(self) -> None:
        """ConfigError for an argument of a wrong type or out of range."""
        if isinstance(self.step, bool) or not isinstance(self.step, int):
            raise ConfigError(f"step must be an int, got {self.step!r}")
        if not 0 <= self.step < 10**18:
            raise ConfigError(f"step {self.step} cannot be stored: it must be in [0, 10**18)")
        for name in ("overwrite", "check_replicas"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name}={getattr(self, name)!r} must be True or False")


class SaveProposal(msgspec.Struct, frozen=True, array_like=True):
    """What each rank proposes at the beginning of a save; small enough for one collective.

    Args:
        plan: token of the plan at hand, empty for none.
        names: digest of the names of the rank's tensors.
        compares: whether it would compare all replicas, as requested or as follows from
            `num_saves`.
        num_saves: how many saves the rank has counted.
        nonce: the coordinator's is the id of the save.
        busy: whether no staging buffer is free.
        failed: id and shortened error of each earlier save that failed and was not raised on this
            rank.
        running: ids of the saves in flight on it.
        metadata: digest of the caller's metadata; empty for none.
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
    failed: tuple[tuple[str, ErrorRecord], ...]
    running: tuple[str, ...]
    metadata: str = ""


class Proposals:
    """The proposals of all ranks: each rank concludes the same from them.

    Args:
        by_rank: in the order of the control group.
        save_id: of this save.
        directory: where it is written before its commit.
        is_skipped: whether some rank is busy, so that nothing is saved.
        is_unchanged: whether all ranks hold one and the same plan, which is used again.
        num_saves: the count of saves that all go on from; a rank that missed a failed one catches
            up.
        failed: by id, each earlier failure that some rank has not raised.
    """

    def __init__(self, answers: Sequence[bytes]) -> None:
        decoder = msgspec.msgpack.Decoder(SaveProposal)
        self.by_rank = [decoder.decode(data) for data in answers]
        first = self.by_rank[0]
        self.save_id = first.nonce
        self.directory = saving_dir(first.step, first.nonce)
        self.is_skipped = any(proposal.busy for proposal in self.by_rank)
        plans = {(proposal.plan, proposal.compares) for proposal in self.by_rank}
        self.is_unchanged = len(plans) == 1 and first.plan != ""
        self.num_saves = max(proposal.num_saves for proposal in self.by_rank)
        self.failed: dict[str, ErrorRecord] = {}
        for proposal in self.by_rank:
            for save_id, error in proposal.failed:
                self.failed.setdefault(save_id, error)

    def refuse_disagreement(self, ranks: Sequence[int]) -> None:
        """PlanError where the ranks do not request the same."""
        for what, values in self._to_agree_on().items():
            refuse_disagreement(what, ranks, values)

    def agrees(self) -> bool:
        """Whether the ranks request the same, and no failure is to be raised."""
        return not self.failed and all(
            len(set(values)) == 1 for values in self._to_agree_on().values()
        )

    def _to_agree_on(self) -> dict[str, list[object]]:
        """What has to be the same on all ranks, by name, one value for each rank."""
        values: dict[str, list[object]] = {
            what: [getattr(proposal, what) for proposal in self.by_rank]
            for what in ("kind", "step", "overwrite", "check_replicas", "metadata")
        }
        if len({proposal.num_saves for proposal in self.by_rank}) == 1:
            # Else some rank missed a save that failed, and catches up here.
            values["check_replicas"] = [proposal.compares for proposal in self.by_rank]
        return values


def is_staging(answers: Mapping[str, Sequence[bytes]]) -> bool:
    """Whether an asynchronous save has all its collectives behind it, from the answers by phase."""
    if BUDGET in answers:
        return True
    if BEGIN not in answers:
        return False
    proposals = Proposals(answers[BEGIN])
    return proposals.agrees() and (proposals.is_unchanged or proposals.is_skipped)


@dataclass(frozen=True, slots=True, kw_only=True)
class AgreedSave:
    """A save that all ranks have agreed on: what to stage, under which plan.

    Args:
        plan: None where some rank is busy and the save is skipped.
        directory: where it is written before its commit.
        planned: whether the structure was planned for it.
    """

    local: LocalState
    plan: RankPlan | None
    save_id: str
    directory: str
    planned: bool

    def plan_or_raise(self) -> RankPlan:
        """The plan; PlanError where the save is skipped."""
        if self.plan is None:
            raise PlanError("the save was skipped, there is no plan for it")
        return self.plan


@contextmanager
def timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    """Add the time that the body takes to `seconds[phase]`."""
    began = time.perf_counter()
    try:
        yield
    finally:
        seconds[phase] = seconds.get(phase, 0.0) + time.perf_counter() - began


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
    what: str, ranks: Sequence[int], values: Sequence[object], *, operation: str = "save"
) -> None:
    """PlanError naming the ranks of each value, unless all ranks have the same."""
    if len(set(values)) > 1:
        by_value = {
            value: [rank for rank, v in zip(ranks, values, strict=True) if v == value]
            for value in dict.fromkeys(values)
        }
        text = "; ".join(f"{value!r} on ranks {held}" for value, held in by_value.items())
        raise PlanError(f"{operation}: the ranks disagree on {what}: {text}")
