"""Saves: agree with all ranks, plan if anything changed, stage, and submit to the writer."""

from __future__ import annotations

import logging
import secrets
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import msgspec

from holdfast.checkpoint.options import SaverOptions, WhenBusy
from holdfast.checkpoint.plan.cache import PlanCache
from holdfast.checkpoint.plan.rank_plan import (
    LocalState,
    RankPlan,
    flatten_local_state,
    plan_together,
)
from holdfast.checkpoint.reports import SaveReport
from holdfast.checkpoint.save.executor import SaveExecutor, check_budget
from holdfast.checkpoint.save.handshake import (
    BEGIN,
    BUDGET,
    AgreedSave,
    Proposals,
    SaveProposal,
    SaveRequest,
    collector_paused,
    is_staging,
    timed,
)
from holdfast.checkpoint.save.pending import (
    InFlightSave,
    PendingSave,
    raise_failures,
    shortened,
)
from holdfast.checkpoint.save.staging import StagingBuffer
from holdfast.errors import ConfigError, ErrorRecord, HoldfastError, StorageError
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


class Saver:
    """Saves under one set of groups; keeps plan, staging buffers and writer between saves."""

    def __init__(
        self, storage: Storage, groups: ProcessGroups, *, codecs: Codecs, options: SaverOptions
    ) -> None:
        self._storage = storage
        self._groups = groups
        self._codecs = codecs
        self._options = options
        self._buffers = [StagingBuffer() for _ in range(options.staging_buffers)]
        self._executor = SaveExecutor(storage, groups, options=options, buffers=self._buffers)
        self._plans = PlanCache(storage, groups, block_nbytes=options.block_nbytes)
        self._num_saves = 0
        self._writer: Writer | None = None
        self._unreported: list[InFlightSave] = []
        self._is_repaired = False
        self._cache = LeafCache()
        self._local: LocalState | None = None
        self._submitted: InFlightSave | None = None
        self._counts: Counter[str] = Counter()
        # Appended to by the thread that learns outcomes. No lock: an interrupt in the wrong place
        # would leave it held, and the next save would wait for it without end.
        self._outcomes: deque[tuple[str, int]] = deque()
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
    def counts(self) -> Counter[str]:
        """Of this rank: `planned`, `reused`, `nbytes` written; by outcome `committed`, `failed`,
        `skipped`."""
        while self._outcomes:
            outcome, nbytes = self._outcomes.popleft()
            self._counts[outcome] += 1
            self._counts["nbytes"] += nbytes
        return self._counts

    @property
    def num_in_flight(self) -> int:
        """Asynchronous saves that are not done."""
        return sum(not pending.done() for pending in self._unreported)

    @property
    def num_allocations(self) -> int:
        """How often staging memory had to be allocated."""
        return sum(buffer.memory.num_allocations for buffer in self._buffers)

    def close(self) -> None:
        """Wait for the saves in flight, stop the writer, free the memory; raise a failure."""
        for pending in self._unreported:
            pending.wait()
        failures = self._not_raised()
        if self._writer is not None:
            self._writer.close(timeout_s=self._options.deadline_s)
            self._writer = None
        self._plans.clear()
        self._local, self._cache = None, LeafCache()
        self._unreported.clear()
        for buffer in self._buffers:
            buffer.reset()
        raise_failures(failures)

    def save(self, request: SaveRequest, state: Mapping[str, object]) -> SaveReport:
        """One synchronous save; see `Checkpointer.save`.

        Under `save_guard`, whose end is where the other ranks learn that it is committed.
        """
        seconds: dict[str, float] = {}
        with timed(seconds, "total"):
            agreed = self._agree(request, state, "wait", seconds, in_flight=0)
            plan = agreed.plan_or_raise()
            self._executor.write(agreed, request, seconds)
            with timed(seconds, "retain"):
                self._after_commit(plan)
        nbytes = plan.image.nbytes - len(plan.image.header)
        self._counts["nbytes"] += nbytes
        return SaveReport(
            step=request.step,
            path=self._storage.describe(step_dir(request.step)),
            nbytes=nbytes,
            total_nbytes=plan.total_nbytes,
            num_tensors=plan.num_tensors,
            planned=agreed.planned,
            seconds=seconds,
        )

    def _undo_save(self) -> None:
        """A synchronous save failed on all ranks: nothing of it is left here or on storage."""
        answers = self.save_guard.answers.get(BEGIN)
        if answers is None:
            return
        self._plans.clear()
        self._undo_prepare()
        proposals = Proposals(answers)
        if self._groups.control.is_coordinator and proposals.agrees():
            discard_save(self._storage, proposals.directory)

    def _undo_prepare(self) -> None:
        """Free staging buffers may be half laid out: the next save does that again."""
        for buffer in self._buffers:
            if buffer.is_free():
                buffer.reset()

    def save_async(
        self, request: SaveRequest, state: Mapping[str, object], *, when_busy: WhenBusy
    ) -> PendingSave:
        """One asynchronous save; see `Checkpointer.save_async`.

        Under `async_guard`: what goes wrong after its last collective reaches the other ranks
        through storage, see `_rescue`. The job is submitted last of all.
        """
        if when_busy not in ("wait", "skip"):
            raise ConfigError(f"when_busy={when_busy!r} is not one of 'wait', 'skip'")
        seconds: dict[str, float] = {}
        self._submitted = None
        with timed(seconds, "stall"):
            request.check()
            writer = self._live_writer()
            agreed = self._agree(
                request, state, when_busy, seconds, in_flight=len(self._buffers) - 1
            )
            plan = agreed.plan
            if plan is None:
                self._counts["skipped"] += 1
                return PendingSave(InFlightSave(step=request.step, ticket=None, skipped=True))
            buffer = next(buffer for buffer in self._buffers if buffer.is_free())
            pending = self._submitted = buffer.pending = InFlightSave(
                step=request.step,
                ticket=None,
                save_id=agreed.save_id,
                planned=agreed.planned,
                total_nbytes=plan.total_nbytes,
                num_tensors=plan.num_tensors,
                storage=self._storage,
            )
            after = partial(self._after_outcome, plan=plan)
            pending.ticket = self._executor.submit(
                writer, buffer, agreed, request, seconds, after=after
            )
        pending.seconds = seconds
        self._report_later(pending)
        return PendingSave(pending)

    def _report_later(self, pending: InFlightSave) -> None:
        """Keep it until every rank knows its outcome, which is counted when this rank does."""
        self._unreported.append(pending)
        pending.when_done(partial(self._count_outcome, pending))

    def _count_outcome(self, pending: InFlightSave) -> None:
        outcome = pending.ticket.outcome if pending.ticket is not None else None
        nbytes = outcome.nbytes if outcome is not None else 0
        self._outcomes.append(("committed" if pending.phase == "committed" else "failed", nbytes))

    def _rescue(self, error: BaseException) -> PendingSave:
        """An asynchronous save failed here after its last collective.

        The failure is published on storage, where every rank's writer finds it, and raised by its
        `result`, and by the next save on all ranks. A save that the writer has already goes on.
        """
        pending = self._submitted
        if pending is not None and pending.ticket is not None:
            if pending not in self._unreported:
                self._report_later(pending)
            if not isinstance(error, Exception):
                raise error
            # All that can be missing is how long it took; the other ranks go on, too.
            logging.getLogger("holdfast").warning(
                "the save of step %s was submitted, then: %r", pending.step, error
            )
            return PendingSave(pending)
        proposals = Proposals(self.async_guard.answers[BEGIN])
        record = ErrorRecord.of(error, foreign=StorageError)
        failure = error if isinstance(error, HoldfastError) else record.to_error()
        step, overwrite = proposals.by_rank[0].step, proposals.by_rank[0].overwrite
        pending = InFlightSave(step=step, ticket=None, save_id=proposals.save_id, failure=failure)
        self._report_later(pending)
        self._plans.clear()
        for buffer in self._buffers:
            if buffer.is_free():
                buffer.reset()
        if not proposals.is_skipped:
            request = SaveRequest(
                kind="save_async", step=step, overwrite=overwrite, check_replicas=False
            )
            job = self._executor.empty_job(proposals.directory, proposals.save_id, request)
            commits = self._groups.control.is_coordinator
            pending.ticket = Ticket(job, commits=commits, nbytes=0)
            pending.ticket.fail(failure)
            publish_failure(self._storage, job, record, committer=commits)
        if not isinstance(error, Exception):
            pending.was_raised = True
            raise error
        return PendingSave(pending)

    def prepare(self, state: Mapping[str, object]) -> None:
        """Plan, lay out and touch the memory, start the writer: the first save is then like any.

        Under `prepare_guard`.
        """
        self._live_writer()
        seconds: dict[str, float] = {}
        request = SaveRequest(kind="prepare", step=0, overwrite=True, check_replicas=False)
        agreed = self._agree(request, state, "wait", seconds, in_flight=0)
        plan = agreed.plan_or_raise()
        for buffer in self._buffers:
            self._executor.stage(buffer, plan, agreed.local, seconds)

    def _agree(
        self,
        request: SaveRequest,
        state: Mapping[str, object],
        when_busy: WhenBusy,
        seconds: dict[str, float],
        *,
        in_flight: int,
    ) -> AgreedSave:
        """Everything up to staging: flatten the state, agree, plan where needed."""
        request.check()
        if not isinstance(state, Mapping):
            raise ConfigError(f"the state must map names to parts, got {type(state).__name__}")
        if when_busy == "wait":
            with timed(seconds, "wait"):
                self._wait_until(in_flight)
        with timed(seconds, "flatten"):
            self._groups.require_complete()
            if self._groups.control.is_coordinator and request.kind != "prepare":
                self._check_target(request)
            with collector_paused():
                local = flatten_local_state(
                    state,
                    groups=self._groups,
                    codecs=self._codecs,
                    block_nbytes=self._options.block_nbytes,
                    cache=self._cache,
                    previous=self._local,
                )
            self._local = local
            due = self._due(request, self._num_saves)
            result = self._plans.lookup(local, compare_all=due.check_replicas)
            plan = result if isinstance(result, RankPlan) else None
            if plan is not None:
                self._check_room(plan)
        with timed(seconds, "plan"):
            proposals = self._propose(request, due, local, plan, in_flight)
            if proposals.is_skipped:
                plan = None
            elif not proposals.is_unchanged:
                plan = self._make_plan(local, proposals, self._due(request, proposals.num_saves))
        if not (proposals.is_skipped or request.kind == "prepare"):
            self._num_saves = proposals.num_saves + 1
            self._counts["reused"] += proposals.is_unchanged
        return AgreedSave(
            local=local,
            plan=plan,
            save_id=proposals.save_id,
            directory=proposals.directory,
            planned=not proposals.is_unchanged,
        )

    def _due(self, request: SaveRequest, num_saves: int) -> SaveRequest:
        """The request, with replicas compared where that is due after so many saves."""
        every = self._options.check_replicas_every
        due = every > 0 and (num_saves + 1) % every == 0 and request.kind != "prepare"
        return replace(request, check_replicas=True) if due else request

    def _make_plan(self, local: LocalState, proposals: Proposals, request: SaveRequest) -> RankPlan:
        """Plan with all ranks."""
        plan, claims = plan_together(
            local,
            groups=self._groups,
            names=[proposal.names for proposal in proposals.by_rank],
            block_nbytes=self._options.block_nbytes,
            compare_all=request.check_replicas,
        )
        self._counts["planned"] += 1
        self._check_room(plan)
        self._groups.control.agree(None, phase=BUDGET)
        self._plans.add(plan, claims)
        return plan

    def _check_room(self, plan: RankPlan) -> None:
        check_budget(
            self._storage,
            image_nbytes=plan.image.nbytes,
            held_nbytes=[buffer.memory.nbytes for buffer in self._buffers],
            total_nbytes=plan.total_nbytes if plan.commit is not None else 0,
        )

    def _check_target(self, request: SaveRequest) -> None:
        self._storage.make_dir("")
        final = step_dir(request.step)
        if self._storage.exists(final) and not request.overwrite:
            raise StorageError(
                f"{self._storage.describe(final)} exists already; to replace it save with "
                f"overwrite=True"
            )
        if not self._is_repaired:
            repair(self._storage)
            self._is_repaired = True

    def _wait_until(self, in_flight: int) -> None:
        """Wait until at most so many saves are in flight on this rank."""
        running = [p for p in self._unreported if not p.done()]
        for pending in running[: max(len(running) - in_flight, 0)]:
            pending.wait()

    def _propose(
        self,
        request: SaveRequest,
        due: SaveRequest,
        local: LocalState,
        plan: RankPlan | None,
        in_flight: int,
    ) -> Proposals:
        """One collective: the proposals of all ranks, which request one save; none has failed."""
        control = self._groups.control
        running = [pending for pending in self._unreported if not pending.done()]
        proposal = SaveProposal(
            kind=request.kind,
            step=request.step,
            overwrite=request.overwrite,
            check_replicas=request.check_replicas,
            plan=plan.plan_digest if plan is not None else "",
            names=local.names,
            compares=due.check_replicas,
            num_saves=self._num_saves,
            nonce=secrets.token_hex(6),
            metadata=digest128(request.metadata)[:16] if request.metadata else "",
            busy=len(running) > in_flight,
            failed=tuple(
                (pending.save_id, shortened(error)) for pending, error in self._not_raised()
            ),
            running=tuple(pending.save_id for pending in running),
        )
        proposals = Proposals(
            control.agree(None, phase=BEGIN, payload=msgspec.msgpack.encode(proposal))
        )
        self._raise_earlier_failures(proposals)
        proposals.refuse_disagreement(control.ranks)
        return proposals

    def _not_raised(self) -> list[tuple[InFlightSave, HoldfastError]]:
        """The saves that failed, as far as known, without their failure being raised here."""
        failed = [(pending, pending.error()) for pending in self._unreported]
        return [(p, error) for p, error in failed if error is not None and not p.was_raised]

    def _raise_earlier_failures(self, proposals: Proposals) -> None:
        """Where an earlier save failed and some rank has not raised that, all ranks do, together.

        What all have raised, or what succeeded, is forgotten, and what is left of it removed.
        """
        failed = proposals.failed
        running = {save_id for proposal in proposals.by_rank for save_id in proposal.running}
        over = [p for p in self._unreported if p.done() and p.save_id not in running]
        own = [each for each in self._not_raised() if each[0].save_id in failed]
        self._unreported = [p for p in self._unreported if p not in over]
        if self._groups.control.is_coordinator:
            for pending in over:
                if pending.ticket is not None and pending.error() is not None:
                    discard_save(self._storage, pending.ticket.job.directory)
        known = {pending.save_id for pending, _ in own}
        others = [record for save_id, record in failed.items() if save_id not in known]
        raise_failures(own, others)

    def _after_outcome(self, outcome: SaveOutcome, *, plan: RankPlan) -> None:
        if outcome.error is not None:
            return
        try:
            self._after_commit(plan)
        except Exception:
            # In the thread that receives outcomes, which must go on, and the save is committed.
            logging.getLogger("holdfast").exception("after the commit of %s", outcome.directory)

    def _after_commit(self, plan: RankPlan) -> None:
        """What the coordinator does when a checkpoint is committed: keep its plan, clear away."""
        if plan.commit is None:
            return
        self._plans.keep(plan)
        self._retain()

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
        return self._writer
