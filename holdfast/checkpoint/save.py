"""Saves: open together, plan if anything changed, stage, and hand over to the writer."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal

import msgspec

import holdfast
from holdfast.checkpoint.budget import check_budget
from holdfast.checkpoint.local import LocalState, choices, take_apart
from holdfast.checkpoint.opening import (
    Begun,
    Clock,
    Opening,
    SaveAsk,
    Slot,
    collector_paused,
    refuse_disagreement,
)
from holdfast.checkpoint.pending import PendingSave
from holdfast.checkpoint.report import SaveReport
from holdfast.checkpoint.reuse import keep_plan, plan_name
from holdfast.checkpoint.send import SaverOptions, Sender, save_header
from holdfast.checkpoint.shares import RankPlan, plan_again, plan_together
from holdfast.checkpoint.stage import Arena
from holdfast.errors import HoldfastError, PlanError, StorageError
from holdfast.format.names import saving_dir, step_dir
from holdfast.format.retention import apply_retention, plan_retention
from holdfast.format.values import Codecs
from holdfast.parallel import ProcessGroups
from holdfast.state.flatten import LeafCache
from holdfast.storage import Storage
from holdfast.writer.client import Writer, start_writer
from holdfast.writer.commit import discard_save
from holdfast.writer.job import SaveOutcome
from holdfast.writer.repair import repair

WhenBusy = Literal["wait", "skip"]
_MAX_TOLD = 200


class Saver:
    """Saves under one set of groups; keeps plan, arenas and writer between saves."""

    def __init__(
        self, storage: Storage, groups: ProcessGroups, *, codecs: Codecs, options: SaverOptions
    ) -> None:
        self._storage = storage
        self._groups = groups
        self._codecs = codecs
        self._options = options
        self._slots = [Slot(Arena()) for _ in range(options.num_arenas)]
        self._sender = Sender(storage, groups, options=options, slots=self._slots)
        self._plans: dict[bool, RankPlan] = {}
        self._looked: set[bool] = set()
        self._kept: dict[bool, str] = {}
        self._num_saves = 0
        self._writer: Writer | None = None
        self._unreported: list[PendingSave] = []
        self._cleared = False
        self._cache = LeafCache()
        self._local: LocalState | None = None
        self.num_plans = 0

    @property
    def writer_pid(self) -> int | None:
        """Process id of the writer, or None where there is none."""
        return self._writer.pid if self._writer is not None else None

    @property
    def num_allocations(self) -> int:
        """How often staging memory had to be allocated."""
        return sum(slot.arena.num_allocations for slot in self._slots)

    def close(self) -> None:
        """Wait for what is under way, stop the writer, give the memory back; raise a failure."""
        failures = [pending for pending in self._unreported if self._settle(pending) is not None]
        if self._writer is not None:
            self._writer.close(timeout_s=self._options.deadline_s)
            self._writer = None
        self._plans, self._local, self._cache = {}, None, LeafCache()
        self._unreported.clear()
        for slot in self._slots:
            slot.staging, slot.pending, slot.given = None, None, 0
            slot.plan_digest = ""
            slot.arena.close()
        for pending in failures:
            error = pending.error()
            if error is not None:
                raise error

    def save(self, ask: SaveAsk, state: Mapping[str, object]) -> SaveReport:
        """One synchronous save, written by the calling thread; see `Checkpointer.save`."""
        ask = self._due(ask)
        clock = Clock()
        with clock.phase("total"):
            begun = self._begin(ask, state, "wait", clock, in_flight=0)
            local, plan = begun.local, begun.plan_or_raise()
            directory = saving_dir(ask.step, begun.save_id)
            header = save_header(ask, begun.save_id)
            try:
                with self._sender.heartbeat(plan, directory):
                    self._sender.write(plan, local, directory, header, clock)
                    with clock.phase("commit"):
                        committed = self._sender.commit(plan, directory, header)
            except BaseException:
                self._plans = {}
                if self._groups.control.is_coordinator:
                    discard_save(self._storage, directory)
                raise
        with clock.phase("retain"):
            self._after_commit(plan)
        return SaveReport(
            step=ask.step,
            path=self._storage.describe(committed.directory),
            nbytes=plan.image.nbytes - len(plan.image.header),
            total_nbytes=plan.total_nbytes,
            num_tensors=plan.num_tensors,
            planned=begun.planned,
            seconds=dict(clock.seconds),
        )

    def save_async(
        self, ask: SaveAsk, state: Mapping[str, object], *, when_busy: WhenBusy
    ) -> PendingSave:
        """One asynchronous save; see `Checkpointer.save_async`."""
        ask = self._due(ask)
        clock = Clock()
        writer = self._live_writer()
        with clock.phase("stall"):
            begun = self._begin(ask, state, when_busy, clock, in_flight=len(self._slots) - 1)
            if begun.skipped:
                return PendingSave(step=ask.step, ticket=None, skipped=True)
            slot = next(slot for slot in self._slots if slot.is_free())
            pending = self._sender.hand_over(
                writer,
                slot,
                begun,
                ask,
                clock,
                after=partial(self._after_outcome, plan=begun.plan_or_raise()),
            )
        if pending.failure is not None:
            self._plans = {}
        pending.planned = begun.planned
        pending.seconds = dict(clock.seconds)
        slot.pending = pending
        self._unreported.append(pending)
        return pending

    def _due(self, ask: SaveAsk) -> SaveAsk:
        """The same, with replicas compared where it is the turn of that."""
        every = self._options.check_replicas_every
        due = every > 0 and (self._num_saves + 1) % every == 0
        return replace(ask, check_replicas=True) if due else ask

    def prepare(self, state: Mapping[str, object]) -> None:
        """Plan, lay out and touch the memory, start the writer: the first save is then like any."""
        self._live_writer()
        clock, ask = Clock(), SaveAsk(step=0, overwrite=True, check_replicas=False)
        begun = self._begin(ask, state, "wait", clock, in_flight=0, dry=True)
        plan = begun.plan_or_raise()
        for slot in self._slots:
            self._sender.stage(slot, plan, begun.local, clock)

    def _begin(
        self,
        ask: SaveAsk,
        state: Mapping[str, object],
        when_busy: WhenBusy,
        clock: Clock,
        *,
        in_flight: int,
        dry: bool = False,
    ) -> Begun:
        """Everything up to staging: take apart, agree, plan where needed."""
        if when_busy == "wait":
            with clock.phase("wait"):
                self._wait_until(in_flight)
        local: LocalState | None = None
        error: Exception | None = None
        try:
            with clock.phase("flatten"):
                self._groups.require_complete()
                if self._groups.control.is_coordinator and not dry:
                    self._check_target(ask)
                with collector_paused():
                    local = take_apart(
                        state,
                        groups=self._groups,
                        codecs=self._codecs,
                        block_nbytes=self._options.block_nbytes,
                        cache=self._cache,
                        before=self._local,
                    )
                self._local = local
                self._look_back(local, ask.check_replicas)
                self._check_room(self._plan_for(local, ask))
        except Exception as caught:
            error = caught
        with clock.phase("plan"):
            openings = self._open(ask, local, error, in_flight)
            if local is None:
                raise PlanError("the state could not be taken apart")
            tokens = {opening.plan for opening in openings}
            unchanged = len(tokens) == 1 and "" not in tokens
            skipped = any(opening.busy for opening in openings)
            plan = self._plan_for(local, ask) if unchanged else None
            if plan is None and not skipped:
                plan = self._plan_anew(local, ask, [opening.names for opening in openings])
        if not (skipped or dry):
            self._num_saves += 1
        return Begun(
            local=local,
            plan=plan,
            save_id=openings[0].nonce,
            planned=not unchanged,
            skipped=skipped,
        )

    def _look_back(self, local: LocalState, compare_all: bool) -> None:
        """Before the first save of each kind: take the plan that an earlier run left, if it fits.

        It is used if all ranks do, which the opening of the save finds out.
        """
        if compare_all in self._looked:
            return
        self._looked.add(compare_all)
        if compare_all in self._plans:
            return
        found = plan_again(
            local,
            storage=self._storage,
            groups=self._groups,
            block_nbytes=self._options.block_nbytes,
            compare_all=compare_all,
        )
        if found is not None:
            self._plans[compare_all] = found
            self._kept[compare_all] = found.plan_digest

    def _plan_anew(self, local: LocalState, ask: SaveAsk, names: Sequence[str]) -> RankPlan:
        # A plan of the other kind, with replicas compared or not, may serve on.
        self._plans = {
            kind: plan for kind, plan in self._plans.items() if plan.signature == local.signature
        }
        plan = plan_together(
            local,
            groups=self._groups,
            names=names,
            block_nbytes=self._options.block_nbytes,
            compare_all=ask.check_replicas,
        )
        self.num_plans += 1
        error: Exception | None = None
        try:
            self._check_room(plan)
        except Exception as caught:
            error = caught
        self._groups.control.agree(error, phase="save: budget")
        self._plans[ask.check_replicas] = plan
        return plan

    def _plan_for(self, local: LocalState, ask: SaveAsk) -> RankPlan | None:
        held = self._plans.get(ask.check_replicas)
        return held if held is not None and held.signature == local.signature else None

    def _check_room(self, plan: RankPlan | None) -> None:
        if plan is not None:
            check_budget(
                self._storage,
                image_nbytes=plan.image.nbytes,
                held_nbytes=[slot.arena.nbytes for slot in self._slots],
                total_nbytes=plan.total_nbytes if plan.commit is not None else 0,
            )

    def _check_target(self, ask: SaveAsk) -> None:
        self._storage.make_dir("")
        final = step_dir(ask.step)
        if self._storage.exists(final) and not ask.overwrite:
            raise StorageError(
                f"{self._storage.describe(final)} exists already; to replace it save with "
                f"overwrite=True"
            )
        if not self._cleared:
            repair(self._storage)
            self._cleared = True

    def _wait_until(self, in_flight: int) -> None:
        """Wait until at most so many saves are under way on this rank."""
        running = [p for p in self._unreported if not p.done()]
        for pending in running[: max(len(running) - in_flight, 0)]:
            self._settle(pending)

    def _settle(self, pending: PendingSave) -> HoldfastError | None:
        """Wait for a save; its failure, or None. The writer bounds the time itself."""
        pending.wait()
        return pending.error()

    def _open(
        self,
        ask: SaveAsk,
        local: LocalState | None,
        error: Exception | None,
        in_flight: int,
    ) -> list[Opening]:
        """One collective: what every rank says; all are at one save, and nothing failed."""
        control = self._groups.control
        held = self._plan_for(local, ask) if local is not None else None
        opening = Opening(
            step=ask.step,
            overwrite=ask.overwrite,
            check_replicas=ask.check_replicas,
            plan=held.token if held is not None else "",
            names=local.names if local is not None else "",
            nonce=secrets.token_hex(6),
            busy=sum(not p.done() for p in self._unreported) > in_flight,
            failed=self._first_failure(),
        )
        payload = msgspec.msgpack.encode(opening)
        gathered = control.agree(error, phase="save: begin", payload=payload)
        openings = [msgspec.msgpack.decode(data, type=Opening) for data in gathered]
        self._raise_earlier(openings)
        for what in ("step", "overwrite", "check_replicas"):
            refuse_disagreement(what, control.ranks, [getattr(o, what) for o in openings])
        return openings

    def _first_failure(self) -> tuple[str, str, str] | None:
        for pending in self._unreported:
            error = pending.error()
            if error is not None and pending.ticket is not None:
                save_id = pending.ticket.job.header.save_id
                return save_id, type(error).__name__, f"{error}"[:_MAX_TOLD]
        return None

    def _raise_earlier(self, openings: Sequence[Opening]) -> None:
        """An earlier save failed on some rank: all ranks raise it, once."""
        told = [o.failed for o in openings if o.failed is not None]
        if not told:
            self._unreported = [p for p in self._unreported if not p.done()]
            return
        reported = {save_id for save_id, _, _ in told}
        mine = [p for p in self._unreported if p.ticket and _save_id(p) in reported]
        self._unreported = [p for p in self._unreported if p not in mine]
        if self._groups.control.is_coordinator:
            for pending in mine:
                if pending.ticket is not None:
                    discard_save(self._storage, pending.ticket.job.directory)
        own = [error for error in (p.error() for p in mine) if error is not None]
        if own:
            raise own[0]
        kind = getattr(holdfast.errors, told[0][1], HoldfastError)
        raise kind(f"an earlier save failed: {told[0][2]}")

    def _after_outcome(self, outcome: SaveOutcome, *, plan: RankPlan) -> None:
        if not outcome.error_type:
            self._after_commit(plan)

    def _after_commit(self, plan: RankPlan) -> None:
        """What the coordinator does when a checkpoint is committed: keep its plan, clear away."""
        if plan.commit is None:
            return
        self._keep(plan)
        self._retain()

    def _keep(self, plan: RankPlan) -> None:
        """Leave the plan for a later run, once; a failure is logged, and costs that run a plan."""
        if plan.commit is None or plan.record is None or self._known(plan):
            return
        name = plan_name(
            choices(self._groups, self._options.block_nbytes), compare_all=plan.compare_all
        )
        try:
            keep_plan(self._storage, name, plan.commit[1], plan.record)
        except HoldfastError as error:
            logging.getLogger("holdfast").warning("the plan was not kept: %s", error)
        self._kept[plan.compare_all] = plan.plan_digest

    def _known(self, plan: RankPlan) -> bool:
        return self._kept.get(plan.compare_all) == plan.plan_digest

    def _retain(self) -> None:
        """Remove what the retention policy lets go of; a failure is logged, never raised."""
        policy = self._options.retention
        if policy is None:
            return
        log = logging.getLogger("holdfast")
        try:
            result = apply_retention(self._storage, plan_retention(self._storage, policy))
        except HoldfastError as error:
            log.warning("retention: nothing was removed: %s", error)
            return
        for step, why in result.failed.items():
            log.warning("retention: step %s could not be removed: %s", step, why)

    def _live_writer(self) -> Writer:
        """The writer; a new one if it died, which costs its saves and nothing else."""
        if self._writer is None or self._writer.dead:
            self._writer = start_writer(self._storage)
            for slot in self._slots:
                slot.given = 0
        return self._writer


def _save_id(pending: PendingSave) -> str:
    return pending.ticket.job.header.save_id if pending.ticket is not None else ""
