"""Saves: open together, plan if anything changed, stage, and hand over to the writer."""

from __future__ import annotations

import logging
import secrets
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import msgspec

import holdfast.errors
from holdfast.checkpoint.options import SaverOptions, WhenBusy
from holdfast.checkpoint.plan.cache import keep_plan, plan_name
from holdfast.checkpoint.plan.rank_plan import RankPlan, plan_again, plan_together
from holdfast.checkpoint.reports import SaveReport
from holdfast.checkpoint.save.budget import check_budget
from holdfast.checkpoint.save.executor import Sender, save_header
from holdfast.checkpoint.save.handshake import (
    BEGIN,
    BUDGET,
    Begun,
    Clock,
    Opened,
    Opening,
    SaveAsk,
    Slot,
    collector_paused,
    is_staging,
)
from holdfast.checkpoint.save.local_state import LocalState, choices, take_apart
from holdfast.checkpoint.save.pending import InFlightSave, PendingSave
from holdfast.checkpoint.save.staging import Arena
from holdfast.errors import ConfigError, HoldfastError, StorageError
from holdfast.format.digest import digest128
from holdfast.format.names import step_dir
from holdfast.format.values import Codecs
from holdfast.parallel import ProcessGroups
from holdfast.parallel.control.guard import Guard
from holdfast.retention.removal import apply_retention, plan_retention
from holdfast.state.flatten import LeafCache
from holdfast.storage import Storage
from holdfast.writer.client import Ticket, Writer, start_writer
from holdfast.writer.commit import discard_save
from holdfast.writer.job import SaveOutcome, publish_failure
from holdfast.writer.repair import repair

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
        self._slots = [Slot(Arena()) for _ in range(options.staging_buffers)]
        self._sender = Sender(storage, groups, options=options, slots=self._slots)
        self._plans: dict[bool, RankPlan] = {}
        self._looked: set[bool] = set()
        self._kept: dict[bool, str] = {}
        self._num_saves = 0
        self._writer: Writer | None = None
        self._unreported: list[InFlightSave] = []
        self._cleared = False
        self._cache = LeafCache()
        self._local: LocalState | None = None
        self._handed: InFlightSave | None = None
        self.counts: Counter[str] = Counter()
        """Of this rank: `planned`, `reused`, and by outcome `committed`, `failed`, `skipped`;
        `nbytes` written."""
        self._counting = threading.Lock()
        control = groups.control
        self.save_guard: Guard[SaveReport] = Guard(control, "save", undo=self._undo_save)
        self.prepare_guard: Guard[None] = Guard(control, "prepare", undo=self._undo_prepare)
        self.async_guard: Guard[PendingSave] = Guard(
            control, "save_async", is_complete=is_staging, rescue=self._rescue
        )

    @property
    def writer_pid(self) -> int | None:
        """Process id of the writer, or None where there is none."""
        return self._writer.pid if self._writer is not None else None

    @property
    def num_in_flight(self) -> int:
        """Asynchronous saves that are not done."""
        return sum(not pending.done() for pending in self._unreported)

    @property
    def num_allocations(self) -> int:
        """How often staging memory had to be allocated."""
        return sum(slot.arena.num_allocations for slot in self._slots)

    def close(self) -> None:
        """Wait for what is under way, stop the writer, give the memory back; raise a failure."""
        for pending in self._unreported:
            pending.wait()
        failures = self._not_raised()
        if self._writer is not None:
            self._writer.close(timeout_s=self._options.deadline_s)
            self._writer = None
        self._plans, self._local, self._cache = {}, None, LeafCache()
        self._unreported.clear()
        for slot in self._slots:
            slot.reset()
        _raise_all(failures)

    def save(self, ask: SaveAsk, state: Mapping[str, object]) -> SaveReport:
        """One synchronous save, written by the calling thread; see `Checkpointer.save`.

        Under `save_guard`, whose end is where the other ranks learn that it is committed.
        """
        clock = Clock()
        with clock.phase("total"):
            begun = self._begin(ask, state, "wait", clock, in_flight=0)
            plan = begun.plan_or_raise()
            header = save_header(ask, begun.save_id)
            with self._sender.heartbeat(plan, begun.directory):
                self._sender.write(plan, begun.local, begun.directory, header, clock)
                with clock.phase("commit"):
                    self._sender.commit(plan, begun.directory, header)
            with clock.phase("retain"):
                self._after_commit(plan)
        nbytes = plan.image.nbytes - len(plan.image.header)
        with self._counting:
            self.counts["nbytes"] += nbytes
        return SaveReport(
            step=ask.step,
            path=self._storage.describe(step_dir(ask.step)),
            nbytes=nbytes,
            total_nbytes=plan.total_nbytes,
            num_tensors=plan.num_tensors,
            planned=begun.planned,
            seconds=dict(clock.seconds),
        )

    def _undo_save(self) -> None:
        """A synchronous save failed on all ranks: nothing of it is left here or on storage."""
        begun = self.save_guard.answers.get(BEGIN)
        if begun is None:
            return
        self._plans = {}
        self._undo_prepare()
        opened = Opened(begun)
        if self._groups.control.is_coordinator and opened.agrees():
            discard_save(self._storage, opened.directory)

    def _undo_prepare(self) -> None:
        """What may be half done in staging memory that nobody uses is done again next time."""
        for slot in self._slots:
            if slot.is_free():
                slot.reset()

    def save_async(
        self, ask: SaveAsk, state: Mapping[str, object], *, when_busy: WhenBusy
    ) -> PendingSave:
        """One asynchronous save; see `Checkpointer.save_async`.

        Under `async_guard`: what goes wrong after its last collective is told to the other ranks
        through storage, see `_rescue`. The job is handed over last of all.
        """
        if when_busy not in ("wait", "skip"):
            raise ConfigError(f"when_busy={when_busy!r} is not one of 'wait', 'skip'")
        clock = Clock()
        self._handed = None
        with clock.phase("stall"):
            ask.check()
            writer = self._live_writer()
            begun = self._begin(ask, state, when_busy, clock, in_flight=len(self._slots) - 1)
            if begun.skipped:
                self.counts["skipped"] += 1
                return PendingSave(InFlightSave(step=ask.step, ticket=None, skipped=True))
            plan = begun.plan_or_raise()
            slot = next(slot for slot in self._slots if slot.is_free())
            pending = self._handed = slot.pending = InFlightSave(
                step=ask.step,
                ticket=None,
                save_id=begun.save_id,
                planned=begun.planned,
                total_nbytes=plan.total_nbytes,
                num_tensors=plan.num_tensors,
                storage=self._storage,
            )
            header = save_header(ask, begun.save_id)
            job, nbytes = self._sender.prepare_job(slot, begun, header, clock)
            after = partial(self._after_outcome, plan=plan)
            with clock.phase("submit"):
                self._sender.hand_over(writer, slot, plan, job, nbytes, pending, after=after)
        pending.seconds = dict(clock.seconds)
        self._report_later(pending)
        return PendingSave(pending)

    def _report_later(self, pending: InFlightSave) -> None:
        """Keep it until every rank knows its outcome, which is counted when this rank does."""
        self._unreported.append(pending)
        pending.when_done(partial(self._count_outcome, pending))

    def _count_outcome(self, pending: InFlightSave) -> None:
        outcome = pending.ticket.outcome if pending.ticket is not None else None
        with self._counting:
            self.counts["committed" if pending.phase == "committed" else "failed"] += 1
            self.counts["nbytes"] += outcome.nbytes if outcome is not None else 0

    def _rescue(self, error: BaseException) -> PendingSave:
        """An asynchronous save went wrong here where no collective is left to say so.

        Its failure is published on storage, where every rank's writer finds it, and raised by its
        `result`, and by the next save on all ranks. A save that the writer has already goes on.
        """
        pending = self._handed
        if pending is not None and pending.ticket is not None:
            if pending not in self._unreported:
                self._report_later(pending)
            if not isinstance(error, Exception):
                raise error
            # All that can be missing is a note of how long it took; the other ranks go on, too.
            logging.getLogger("holdfast").warning(
                "the save of step %s was submitted, then: %r", pending.step, error
            )
            return PendingSave(pending)
        opened = Opened(self.async_guard.answers[BEGIN])
        failure = error if isinstance(error, HoldfastError) else StorageError(repr(error))
        pending = InFlightSave(
            step=opened.openings[0].step, ticket=None, save_id=opened.save_id, failure=failure
        )
        self._report_later(pending)
        self._plans = {}
        for slot in self._slots:
            if slot.is_free():
                slot.reset()
        if not opened.is_skipped:
            job = self._sender.empty_job(opened)
            commits = self._groups.control.is_coordinator
            pending.ticket = Ticket.failed(job, failure, commits=commits)
            publish_failure(self._storage, job, failure, committer=commits)
        if not isinstance(error, Exception):
            pending.was_raised = True
            raise error
        return PendingSave(pending)

    def prepare(self, state: Mapping[str, object]) -> None:
        """Plan, lay out and touch the memory, start the writer: the first save is then like any.

        Under `prepare_guard`.
        """
        self._live_writer()
        clock = Clock()
        ask = SaveAsk(kind="prepare", step=0, overwrite=True, check_replicas=False)
        begun = self._begin(ask, state, "wait", clock, in_flight=0)
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
    ) -> Begun:
        """Everything up to staging: take apart, agree, plan where needed."""
        ask.check()
        if not isinstance(state, Mapping):
            raise ConfigError(f"the state must map names to parts, got {type(state).__name__}")
        if when_busy == "wait":
            with clock.phase("wait"):
                self._wait_until(in_flight)
        with clock.phase("flatten"):
            self._groups.require_complete()
            if self._groups.control.is_coordinator and ask.kind != "prepare":
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
            due = self._due(ask, self._num_saves)
            self._look_back(local, due.check_replicas)
            self._check_room(self._plan_for(local, due))
        with clock.phase("plan"):
            opened = self._open(ask, due, local, in_flight)
            plan = self._plan_for(local, due) if opened.is_unchanged else None
            if plan is None and not opened.is_skipped:
                plan = self._plan_anew(local, opened, self._due(ask, opened.num_saves))
        if not (opened.is_skipped or ask.kind == "prepare"):
            self._num_saves = opened.num_saves + 1
            self.counts["reused"] += opened.is_unchanged
        return Begun(
            local=local,
            plan=plan,
            save_id=opened.save_id,
            directory=opened.directory,
            planned=not opened.is_unchanged,
            skipped=opened.is_skipped,
        )

    def _due(self, ask: SaveAsk, num_saves: int) -> SaveAsk:
        """The same, with replicas compared where it is the turn of that after so many saves."""
        every = self._options.check_replicas_every
        due = every > 0 and (num_saves + 1) % every == 0 and ask.kind != "prepare"
        return replace(ask, check_replicas=True) if due else ask

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

    def _plan_anew(self, local: LocalState, opened: Opened, ask: SaveAsk) -> RankPlan:
        # A plan of the other kind, with replicas compared or not, may serve on.
        self._plans = {
            kind: plan for kind, plan in self._plans.items() if plan.signature == local.signature
        }
        plan = plan_together(
            local,
            groups=self._groups,
            names=[opening.names for opening in opened.openings],
            block_nbytes=self._options.block_nbytes,
            compare_all=ask.check_replicas,
        )
        self.counts["planned"] += 1
        self._check_room(plan)
        self._groups.control.agree(None, phase=BUDGET)
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
            pending.wait()

    def _open(self, ask: SaveAsk, due: SaveAsk, local: LocalState, in_flight: int) -> Opened:
        """One collective: what every rank says; all are at one save, and nothing failed."""
        control = self._groups.control
        held = self._plan_for(local, due)
        running = [pending for pending in self._unreported if not pending.done()]
        opening = Opening(
            kind=ask.kind,
            step=ask.step,
            overwrite=ask.overwrite,
            check_replicas=ask.check_replicas,
            plan=held.token if held is not None else "",
            names=local.names,
            compares=due.check_replicas,
            num_saves=self._num_saves,
            metadata=digest128(ask.metadata)[:16] if ask.metadata else "",
            nonce=secrets.token_hex(6),
            busy=len(running) > in_flight,
            failed=tuple(
                (pending.save_id, type(error).__name__, f"{error}"[:_MAX_TOLD])
                for pending, error in self._not_raised()
            ),
            running=tuple(pending.save_id for pending in running),
        )
        opened = Opened(control.agree(None, phase=BEGIN, payload=msgspec.msgpack.encode(opening)))
        self._raise_earlier(opened)
        opened.refuse_disagreement(control.ranks)
        return opened

    def _not_raised(self) -> list[tuple[InFlightSave, HoldfastError]]:
        """The saves that failed, as far as known, without their failure being raised here."""
        failed = [(pending, pending.error()) for pending in self._unreported]
        return [(p, error) for p, error in failed if error is not None and not p.was_raised]

    def _raise_earlier(self, opened: Opened) -> None:
        """Earlier saves failed, and some rank has not raised it: all ranks do, together.

        What all have raised, or what succeeded, is forgotten, and what is left of it removed.
        """
        failed = opened.failed
        running = {save_id for opening in opened.openings for save_id in opening.running}
        over = [p for p in self._unreported if p.done() and p.save_id not in running]
        own = [each for each in self._not_raised() if each[0].save_id in failed]
        self._unreported = [p for p in self._unreported if p not in over]
        if self._groups.control.is_coordinator:
            for pending in over:
                if pending.ticket is not None and pending.error() is not None:
                    discard_save(self._storage, pending.ticket.job.directory)
        known = {pending.save_id for pending, _ in own}
        others = [each for save_id, each in failed.items() if save_id not in known]
        _raise_all(own, others)

    def _after_outcome(self, outcome: SaveOutcome, *, plan: RankPlan) -> None:
        if outcome.error_type:
            return
        try:
            self._after_commit(plan)
        except Exception:
            # In the thread that hears of outcomes, which must go on, and the save is committed.
            logging.getLogger("holdfast").exception("after the commit of %s", outcome.directory)

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
                slot.given = -1
        return self._writer


def _raise_all(
    own: list[tuple[InFlightSave, HoldfastError]], others: list[tuple[str, str]] | None = None
) -> None:
    """Raise the failures of earlier saves, once: this rank's own, and what others say of theirs."""
    for pending, _ in own:
        pending.was_raised = True
    if len(own) == 1 and not others:
        raise own[0][1]
    found = [(type(error).__name__, f"{error}") for _, error in own] + (others or [])
    if found:
        kind = getattr(holdfast.errors, found[0][0], HoldfastError)
        few = "an earlier save failed" if len(found) == 1 else f"{len(found)} earlier saves failed"
        raise kind(f"{few}: {'; '.join(text for _, text in found)}")
