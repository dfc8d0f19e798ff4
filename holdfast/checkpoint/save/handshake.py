"""Agree with all ranks on a save: the request, the proposal of each rank, the plan."""

from __future__ import annotations

import logging
import os
import resource
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from holdfast.checkpoint.options import SaveRequest, SaverOptions
from holdfast.checkpoint.plan.planner import Planner
from holdfast.checkpoint.plan.rank_plan import LocalState, RankPlan
from holdfast.checkpoint.reports import Phases, SaveReport
from holdfast.checkpoint.save.pending import InFlightSave
from holdfast.checkpoint.save.staging import StagingBuffer
from holdfast.decoding import decode_msgpack_as
from holdfast.errors import (
    ConfigError,
    ErrorRecord,
    HoldfastError,
    PlanError,
    StorageError,
    disagreement,
    in_bytes,
    joined_details,
    plain_details,
    some_of,
    values_by_rank,
)
from holdfast.format.digest import digest128
from holdfast.format.names import ROOT_ID, saving_dir, step_dir
from holdfast.format.root_identity import (
    NOT_MOUNTED,
    RootIdentity,
    new_root_id,
)
from holdfast.format.values import Codecs
from holdfast.parallel import ProcessGroups
from holdfast.parallel.groups.order_comparison import (
    compare_orders,
    first_difference,
    pack_orders,
)
from holdfast.storage import Storage
from holdfast.storage.host_memory import available_memory_nbytes
from holdfast.storage.reading import pause_of
from holdfast.writer.kept_images import end_keepers
from holdfast.writer.leftovers import repair_root
from holdfast.writer.outcomes import discard_save

_LOG = logging.getLogger("holdfast")
_MAX_MESSAGE_LENGTH = 200
_MAX_DETAILS_SIZE = 1024
_NUM_DESCRIPTORS = 16
_DISK_SLACK_NBYTES = 4 << 20

BEGIN = "save: begin"
"""The phase of the one collective that opens every save; its answers are `SaveProposal`s."""
BUDGET = "save: budget"
"""The phase of the last collective of a save that makes a plan, if all know the root."""
ROOT = "save: root"
"""The phase of the last collective of a save whose root is new to some rank."""


class SaveProposal(msgspec.Struct, frozen=True, array_like=True):
    """The proposal of one rank at the start of a save; small enough for one collective.

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
        options: what all checkpointers have to be made with alike.
        metadata: digest of the caller's metadata; empty for none.
        root: the id of its root; the coordinator's is the one of the save.
        new_root: whether the coordinator found no checkpoint in a root without an id.
        is_empty: whether its state has no part.
        orders: what it has launched and not compared, see `pack_orders`.
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
    options: str
    metadata: str = ""
    root: str = ""
    new_root: bool = False
    is_empty: bool = False
    orders: bytes = b""


class Proposals:
    """The proposals of all ranks: each rank concludes the same from them.

    Args:
        by_rank: in the order of the control group.
        save_id: of this save.
        directory: the place where it is written before its commit.
        is_skipped: whether some rank is busy, so that nothing is saved.
        is_unchanged: whether all ranks hold one and the same plan, which is used again.
        num_saves: the count of saves that all continue from; a rank that missed a failed one
            catches up.
        failed: by id, each earlier failure that some rank has not raised.
        is_root_new: whether some rank has not seen the id of the root yet.
        orders: by rank, what it has launched since ranks have compared it.
    """

    def __init__(self, answers: Sequence[bytes]) -> None:
        self.by_rank = [decode_msgpack_as(data, SaveProposal) for data in answers]
        first = self.by_rank[0]
        self.save_id = first.nonce
        self.directory = saving_dir(first.step, first.nonce)
        self.is_skipped = any(proposal.busy for proposal in self.by_rank)
        plans = {(proposal.plan, proposal.compares) for proposal in self.by_rank}
        self.is_unchanged = len(plans) == 1 and first.plan != ""
        self.num_saves = max(proposal.num_saves for proposal in self.by_rank)
        self.is_root_new = any(proposal.root != first.root for proposal in self.by_rank)
        self.orders = [proposal.orders for proposal in self.by_rank]
        self.failed: dict[str, ErrorRecord] = {}
        for proposal in self.by_rank:
            for save_id, error in proposal.failed:
                self.failed.setdefault(save_id, error)

    def refuse_disagreement(self, ranks: Sequence[int]) -> None:
        """Raise PlanError if the ranks do not request the same, ConfigError if all have nothing.

        StorageError if they see different roots; one without an id may be seen to have it later.
        """
        for what, values in self._to_agree_on().items():
            if len(set(values)) > 1:
                raise disagreement("save", what, values, ranks=ranks)
        if len(self._root_ids()) > 1:
            # What the coordinator would give a new root is nowhere yet.
            ids = ["none" if each.new_root else each.root or "none" for each in self.by_rank]
            raise StorageError(
                f"save: the ranks see different roots, by the id in {ROOT_ID}: "
                f"{values_by_rank(dict(zip(ranks, ids, strict=True)))}. {NOT_MOUNTED}"
            )
        if all(proposal.is_empty for proposal in self.by_rank):
            raise ConfigError(
                "the state has no part on any rank: a checkpoint of nothing would be the newest "
                "one, and a resume would start from it"
            )

    def agrees(self) -> bool:
        """Return True if all ranks request the same and no failure is to be raised."""
        return (
            not self.failed
            and len(self._root_ids()) < 2
            and all(len(set(values)) == 1 for values in self._to_agree_on().values())
            and first_difference(self.orders) is None
        )

    def _root_ids(self) -> set[str]:
        """Return the ids of the roots that the ranks see."""
        return {proposal.root for proposal in self.by_rank if proposal.root}

    def _to_agree_on(self) -> dict[str, list[object]]:
        """Return what has to be the same on all ranks, by name: one value for each rank."""
        values: dict[str, list[object]] = {
            what: [getattr(proposal, what) for proposal in self.by_rank]
            for what in ("kind", "step", "overwrite", "check_replicas", "options", "metadata")
        }
        if len({proposal.num_saves for proposal in self.by_rank}) == 1:
            # Else some rank missed a save that failed, and catches up here.
            values["check_replicas"] = [proposal.compares for proposal in self.by_rank]
        return values


def is_staging(answers: Mapping[str, Sequence[bytes]]) -> bool:
    """Return True if an asynchronous save has made all its collectives, by the answers so far."""
    if BEGIN not in answers:
        return False
    proposals = Proposals(answers[BEGIN])
    if proposals.is_skipped or not proposals.agrees():
        return proposals.agrees()
    if proposals.is_root_new:
        return ROOT in answers
    return proposals.is_unchanged or BUDGET in answers


@dataclass(frozen=True, slots=True, kw_only=True)
class AgreedSave:
    """A save that all ranks have agreed on: what to stage, under which plan.

    Args:
        plan: None if some rank is busy and the save is skipped.
        directory: the place where it is written before its commit.
        planned: whether the structure was planned for it.
        root: the id of the root that the save belongs to.
        new_root: whether it is the first save in that root.
    """

    local: LocalState
    plan: RankPlan | None
    save_id: str
    directory: str
    planned: bool
    root: str
    new_root: bool

    def plan_or_raise(self) -> RankPlan:
        """Return the plan; raise PlanError if the save is skipped."""
        if self.plan is None:
            raise PlanError("the save was skipped, so it has no plan")
        return self.plan

    def report(self, step: int, storage: Storage, phases: Phases) -> SaveReport:
        """Return what is known of the save when it is staged; `phases` may be added to later."""
        plan = self.plan
        return SaveReport(
            step=step,
            path=storage.describe(step_dir(step)) if plan else "",
            nbytes=plan.image.nbytes - plan.image.envelope_nbytes if plan else 0,
            total_nbytes=plan.total_nbytes if plan else 0,
            copies_nbytes=plan.copies_nbytes if plan else 0,
            num_tensors=plan.num_tensors if plan else 0,
            planned=self.planned,
            seconds=phases.seconds,
            starts=phases.starts,
            skipped=plan is None,
            unstored=[*self.local.flat.unstored, *self.local.flat.unstored_orders],
            new_root=self.new_root and plan is not None,
        )


class UnreportedSaves:
    """The asynchronous saves of one rank whose outcome not every rank knows."""

    def __init__(self) -> None:
        self._saves: list[InFlightSave] = []

    def __contains__(self, save: InFlightSave) -> bool:
        """Return whether it is one of them."""
        return save in self._saves

    def add(self, save: InFlightSave) -> None:
        """Keep a save until every rank knows its outcome."""
        self._saves.append(save)

    def running(self) -> list[InFlightSave]:
        """Return those that are not done, in the order of their start."""
        return [save for save in self._saves if not save.done()]

    def wait_until(self, in_flight: int) -> None:
        """Wait until at most so many of them are in flight."""
        running = self.running()
        for save in running[: max(len(running) - in_flight, 0)]:
            save.wait()

    def not_raised(self) -> list[tuple[InFlightSave, HoldfastError]]:
        """Return those that failed, as far as known, and whose failure was not raised here."""
        failed = [(save, save.error()) for save in self._saves]
        return [(p, error) for p, error in failed if error is not None and not p.was_raised]

    def forget_over(self, running: Collection[str]) -> list[InFlightSave]:
        """Forget the saves that are over on all ranks, and return them.

        Args:
            running: ids of the saves that are in flight on some rank.
        """
        over = [save for save in self._saves if save.done() and save.save_id not in running]
        self._saves = [save for save in self._saves if save not in over]
        return over

    def close(self) -> list[tuple[InFlightSave, HoldfastError]]:
        """Wait for all of them and forget them; return the failures that were not raised here."""
        for save in self._saves:
            save.wait()
        failures = self.not_raised()
        self._saves = []
        return failures


class Handshake:
    """Brings all ranks to one save: what each has, what each requests, and the plan for it.

    Keeps the plans, and the asynchronous saves whose outcome not every rank knows, between saves.

    Args:
        storage: where the checkpoints are.
        groups: the ranks that save together.
        codecs: for values of types that are registered.
        options: of the checkpointer.
        buffers: this rank's staging buffers, which its share has to fit.
        root: the identity of the storage's root.
    """

    def __init__(
        self,
        storage: Storage,
        groups: ProcessGroups,
        *,
        codecs: Codecs,
        options: SaverOptions,
        buffers: Sequence[StagingBuffer],
        root: RootIdentity,
    ) -> None:
        self._storage = storage
        self._root = root
        self._groups = groups
        self._options = options
        self._buffers = buffers
        self.planner = Planner(
            storage,
            groups,
            codecs=codecs,
            block_nbytes=options.block_nbytes,
            copies=options.copies,
            envelope=options.envelope,
        )
        self.unreported = UnreportedSaves()
        self._found: list[int] | None = None
        self._is_compared = False
        self._steps: set[int] = set()
        self._num_saves = 0

    def agree(
        self,
        request: SaveRequest,
        state: Mapping[str, object],
        phases: Phases,
        *,
        in_flight: int = 0,
    ) -> AgreedSave:
        """Do everything up to staging.

        Args:
            request: what the caller asks for.
            state: of this rank.
            phases: receives the time of each phase.
            in_flight: how many asynchronous saves may be in flight on a rank.

        Cost: one small collective; three more and O(rows) vector work if a plan is made; one more
        if the root is new.
        """
        if not isinstance(state, Mapping):
            raise ConfigError(f"the state must map names to parts, got {type(state).__name__}")
        if request.when_busy == "wait":
            with phases.timed("wait"):
                self.unreported.wait_until(in_flight)
        running = tuple(save.save_id for save in self.unreported.running())
        failed = self.unreported.not_raised()
        # Phase 1, on each rank: take the state apart, and look up the plan at hand for it.
        with phases.timed("flatten"):
            compares = self._compares(request, self._num_saves)
            self._groups.require_complete()
            self._root.check()
            root_id, is_new = self._root.id, False
            if self._groups.control.is_coordinator and request.kind != "prepare":
                self._prepare_storage(request)
                is_new = not root_id and not self._found
                root_id = root_id or new_root_id()
            local = self.planner.flatten(state)
            if local.flat.unstored:
                warn_of_unstored(local.flat.unstored, self._groups.rank)
            for path, why in local.flat.unstored_orders.items():
                _LOG.warning("rank %s: %s is not stored: %s", self._groups.rank, path, why)
            plan = self._plan_at_hand(local, compares)
        # Phase 2, one collective: every rank learns what all request, and which plan each holds.
        with phases.timed("plan"):
            proposals = self._propose(
                SaveProposal(
                    kind=request.kind,
                    step=request.step,
                    overwrite=request.overwrite,
                    check_replicas=request.check_replicas,
                    plan=plan.identity if plan is not None else "",
                    names=local.names,
                    compares=compares,
                    num_saves=self._num_saves,
                    nonce=secrets.token_hex(6),
                    options=self._options.in_words(),
                    metadata=_digest(request.encoded_metadata),
                    busy=len(running) > in_flight,
                    failed=tuple((each.save_id, _shortened(error)) for each, error in failed),
                    running=running,
                    root=root_id,
                    new_root=is_new,
                    is_empty=not local.flat.nodes,
                    orders=pack_orders(self._groups.uncompared_orders()),
                )
            )
            # Phase 3, three collectives: plan with all ranks, unless all hold one and the same.
            if not (proposals.is_skipped or proposals.is_unchanged):
                plan = self._make_plan(local, proposals, request)
        if not (proposals.is_skipped or request.kind == "prepare"):
            self._num_saves = proposals.num_saves + 1
            if self._groups.control.is_coordinator and not self._root.id:
                self._adopt_root(proposals)
            if proposals.is_root_new:
                # Before a job begins: one that finds itself in another root reaches no other rank.
                self._root.expect(proposals.by_rank[0].root)
                self._groups.control.agree(None, phase=ROOT)
        return AgreedSave(
            local=local,
            plan=None if proposals.is_skipped else plan,
            save_id=proposals.save_id,
            directory=proposals.directory,
            planned=not proposals.is_unchanged,
            root=proposals.by_rank[0].root,
            new_root=proposals.by_rank[0].new_root,
        )

    def _adopt_root(self, proposals: Proposals) -> None:
        """Give a root its id, at the first save in it, and say so."""
        first = proposals.by_rank[0]
        self._root.write(first.root)
        what = "a new root, without checkpoints" if first.new_root else "a root without an id"
        _LOG.info("%s is %s; its id is %s", self._storage.describe(""), what, first.root)

    def _compares(self, request: SaveRequest, num_saves: int) -> bool:
        """Return True if declared replicas are compared: on request, or after so many saves."""
        every = self._options.check_replicas_every
        is_due = every > 0 and (num_saves + 1) % every == 0 and request.kind != "prepare"
        return request.check_replicas or is_due

    # ---- Phase 1: on each rank ----

    def _prepare_storage(self, request: SaveRequest) -> None:
        """Create the root, remove what dead runs have left, and refuse a step that exists."""
        final = step_dir(request.step)
        if not self._root.id:
            self._storage.make_dir("")
        if self._found is None:
            self._found = repair_root(self._storage)
            self._steps.update(self._found)
        if not request.overwrite and self._may_exist(request.step) and self._storage.exists(final):
            before = max(request.step - 1, 0)
            raise StorageError(
                f"{self._storage.describe(final)} exists already; to replace it save with "
                f"overwrite=True, or, if the run has gone back, remove what it has given up: "
                f"holdfast prune {self._storage.describe('')} --after {before}"
            )
        is_compared, self._is_compared = self._is_compared, True
        if not is_compared and self._found and self._found[-1] > request.step:
            _LOG.warning(
                "step %s is saved below step %s, the newest checkpoint in %s, which a load "
                "without step= takes. If the run has gone back, remove what it has given up: "
                "holdfast prune %s --after %s",
                request.step, self._found[-1], *[self._storage.describe("")] * 2, request.step,
            )  # fmt: skip
        self._steps.add(request.step)

    def _may_exist(self, step: int) -> bool:
        """Return False if it is enough that the commit refuses a step that exists.

        Where a look is a request, that is so of a step that was not there at the first save, and
        that this process has not tried to save since.
        """
        return not pause_of(self._storage) or step in self._steps

    def _plan_at_hand(self, local: LocalState, compares: bool) -> RankPlan | None:
        """Return the plan at hand if it fits the state; StorageError if there is no room for it."""
        plan = self.planner.lookup(local, compare_all=compares)
        if not isinstance(plan, RankPlan):
            return None
        self._check_room(plan)
        return plan

    def _check_room(self, plan: RankPlan) -> None:
        """Raise StorageError if disk, memory or descriptors are insufficient for the plan."""
        check_budget(
            self._storage,
            image_nbytes=plan.image.nbytes,
            held_nbytes=[buffer.memory.nbytes for buffer in self._buffers],
            total_nbytes=(plan.total_nbytes + plan.copies_nbytes) * (plan.commit is not None),
        )

    # ---- Phase 2: one collective ----

    def _propose(self, proposal: SaveProposal) -> Proposals:
        """Exchange proposals; raise on all ranks if one has failed, or if they differ.

        Cost: one collective; another one if ranks have launched unlike.
        """
        control = self._groups.control
        proposals = Proposals(
            control.agree(None, phase=BEGIN, payload=msgspec.msgpack.encode(proposal))
        )
        self._close_earlier(proposals)
        proposals.refuse_disagreement(control.ranks)
        # What an evaluation in another order has computed may be in the state, such as its best
        # loss.
        compare_orders(proposals.orders, launches=self._groups.uncompared_launches, control=control)
        return proposals

    def _close_earlier(self, proposals: Proposals) -> None:
        """Forget the earlier saves that are over on all ranks, and remove what failed ones left.

        If some rank has not raised the failure of one, all ranks raise it, together.
        """
        running = {save_id for proposal in proposals.by_rank for save_id in proposal.running}
        failed = proposals.failed
        own = [each for each in self.unreported.not_raised() if each[0].save_id in failed]
        for save in self.unreported.forget_over(running):
            ticket = save.ticket if save.error() is not None else None
            if ticket is not None and self._groups.control.is_coordinator:
                discard_save(self._storage, ticket.job.directory)
        known = {save.save_id for save, _ in own}
        raise_failures(own, [error for save_id, error in failed.items() if save_id not in known])

    # ---- Phase 3: plan with all ranks ----

    def _make_plan(self, local: LocalState, proposals: Proposals, request: SaveRequest) -> RankPlan:
        """Plan, check that every rank has room for its share, and keep the plan."""
        plan, notes = self.planner.plan_together(
            local,
            names=[proposal.names for proposal in proposals.by_rank],
            compare_all=self._compares(request, proposals.num_saves),
        )
        self._check_room(plan)
        self._groups.control.agree(None, phase=BUDGET)
        self.planner.add(plan, notes)
        return plan


def warn_of_unstored(attributes: Sequence[str], rank: int) -> None:
    """Say once that training changes attributes that no checkpoint has."""
    _LOG.warning(
        "rank %s: %s changed since the last save, and no state dict shows it: a load does not "
        "bring it back. If training depends on it, register it as a buffer, return it from "
        "get_extra_state (an optimizer: keep it in state or param_groups), or save it as a part of "
        "its own",
        rank,
        some_of(attributes),
    )


def _digest(metadata: bytes) -> str:
    """Return a short digest of the caller's metadata; empty for none."""
    return digest128(metadata)[:16] if metadata else ""


def check_budget(
    storage: Storage, *, image_nbytes: int, held_nbytes: Sequence[int], total_nbytes: int
) -> None:
    """Check the budget of a save, disk, memory and file descriptors, before anything is staged.

    Args:
        image_nbytes: this rank's image, once per buffer.
        held_nbytes: what each buffer has already.
        total_nbytes: the whole checkpoint; 0 on ranks that do not answer for the disk.

    Raises:
        StorageError: names what is short and by how much.

    Cost: a few system calls.
    """
    if total_nbytes:
        needed = total_nbytes + total_nbytes // 50 + _DISK_SLACK_NBYTES
        free = storage.free_nbytes()
        if free < needed:
            raise StorageError(
                f"{storage.describe('')}: the checkpoint needs {in_bytes(needed)}, but only "
                f"{in_bytes(free)} are free: {in_bytes(needed - free)} short; remove old "
                f"checkpoints (holdfast prune) or save elsewhere"
            )
    needed = sum(max(image_nbytes - held, 0) for held in held_nbytes)
    if needed:
        free = available_memory_nbytes()
        if free < needed and end_keepers():
            # An image that is kept for a restart must not cost a running job its save.
            free = available_memory_nbytes()
        if free < needed:
            raise StorageError(
                f"staging this rank's share needs {in_bytes(needed)} more memory in "
                f"{len(held_nbytes)} staging buffer(s), but only {in_bytes(free)} are available: "
                f"{in_bytes(needed - free)} short; use staging_buffers=1 or more ranks to save with"
            )
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY:
        used = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0
        if used + _NUM_DESCRIPTORS > soft:
            raise StorageError(
                f"{used} of {soft} file descriptors are open and a save needs {_NUM_DESCRIPTORS}: "
                f"{used + _NUM_DESCRIPTORS - soft} short; raise the limit (ulimit -n)"
            )


def raise_failures(
    own: list[tuple[InFlightSave, HoldfastError]], others: Sequence[ErrorRecord] = ()
) -> None:
    """Raise the failures of earlier saves, once: this rank's own, and those of other ranks."""
    for pending, _ in own:
        pending.was_raised = True
    if len(own) == 1 and not others:
        raise own[0][1]
    records = [*(ErrorRecord.of(error) for _, error in own), *others]
    if records:
        num = "an earlier save" if len(records) == 1 else f"{len(records)} earlier saves"
        message = f"{num} failed: {'; '.join(record.message for record in records)}"
        details = joined_details(record.details for record in records)
        raise msgspec.structs.replace(records[0], message=message, details=details).to_error()


def _shortened(error: HoldfastError) -> ErrorRecord:
    """Return what a proposal carries of an error."""
    record = ErrorRecord.of(error)
    return msgspec.structs.replace(
        record,
        message=record.message[:_MAX_MESSAGE_LENGTH],
        details=plain_details(record.details, max_size=_MAX_DETAILS_SIZE),
    )
