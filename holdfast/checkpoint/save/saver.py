"""Saves: agree with all ranks, plan if anything changed, stage, and submit to the writer."""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import dropwhile

import msgspec

from holdfast.checkpoint.options import SaveRequest, SaverOptions
from holdfast.checkpoint.plan.rank_plan import RankPlan
from holdfast.checkpoint.reports import Phases, SaveReport
from holdfast.checkpoint.save.executor import SaveExecutor
from holdfast.checkpoint.save.handshake import (
    BEGIN,
    Handshake,
    Proposals,
    UnreportedSaves,
    is_staging,
    raise_failures,
)
from holdfast.checkpoint.save.lazy_staging import LazyStaging
from holdfast.checkpoint.save.pending import InFlightSave, PendingSave
from holdfast.checkpoint.save.staging import StagingBuffer
from holdfast.collector import collector_paused
from holdfast.decoding import decode_json_as
from holdfast.errors import ConfigError, ErrorRecord, HoldfastError, StorageError
from holdfast.format.root_identity import RootIdentity
from holdfast.format.values import Codecs
from holdfast.parallel import ProcessGroups
from holdfast.parallel.control.guard import Guard
from holdfast.retention.removal import apply_retention, plan_retention
from holdfast.storage import Storage
from holdfast.storage.reading import requests_of
from holdfast.writer.client import Ticket, Writer, start_writer
from holdfast.writer.outcomes import (
    DISCARDED,
    discard_save,
    of_rank,
    pass_on_failure,
    publish_failure,
)
from holdfast.writer.records import SaveOutcome
from holdfast.writer.sealed_image import can_seal

_CAUSE_WITHIN_S = 1.0


class _LeftFailure(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank's writer has failed with."""

    position: int
    """The rank's position in the plan."""
    committer: bool
    """True if the rank commits the save."""
    record: ErrorRecord


class Saver:
    """Saves under one set of groups; keeps plans, staging buffers and writer between saves."""

    def __init__(
        self,
        storage: Storage,
        groups: ProcessGroups,
        *,
        codecs: Codecs,
        options: SaverOptions,
        root: RootIdentity,
    ) -> None:
        self._storage = storage
        self._groups = groups
        self._options = options
        self._buffers = [StagingBuffer() for _ in range(options.staging_buffers)]
        self._executor = SaveExecutor(storage, groups, options=options, buffers=self._buffers)
        self._handshake = Handshake(
            storage, groups, codecs=codecs, options=options, buffers=self._buffers, root=root
        )
        self._lazy = LazyStaging()
        self._writer: Writer | None = None
        self._end: weakref.finalize[..., Saver] | None = None
        if options.keep_image_s > 0 and hasattr(storage, "address"):
            # A keeper is forked from the writer, and a client with threads does not survive that.
            raise ConfigError(
                f"keep_image_s={options.keep_image_s:g}: images are kept of checkpoints in a "
                f"directory, not of those in a bucket ({storage.describe('')}): leave it out"
            )
        self._keeps_images = options.keep_image_s > 0 and can_seal() and storage.is_shareable()
        if options.keep_image_s > 0 and not self._keeps_images:
            logging.getLogger("holdfast").warning(
                "keep_image_s=%g has no effect: images are kept on Linux only, and of a storage "
                "that other processes can open",
                options.keep_image_s,
            )
        self._is_closed = False
        self._submitted: InFlightSave | None = None
        # The steps of the last saves, in the order of their calls; all that can be in flight fit.
        self._last_steps: deque[int] = deque(maxlen=2 + len(self._buffers))
        self._counts: Counter[str] = Counter()
        # Appended to by the thread that learns outcomes. No lock: an interrupt in the wrong place
        # would leave it held, and the next save would wait for it without end.
        self._outcomes: deque[tuple[str, int]] = deque()
        self.on_failure: Callable[[], None] = lambda: None
        """Called when a save has failed on all ranks, before its error is raised."""
        control = groups.control
        self.save_guard: Guard[SaveReport] = Guard(control, "save", undo=self._undo_save)
        self.prepare_guard: Guard[None] = Guard(control, "prepare", undo=self._undo_prepare)
        self.async_guard: Guard[PendingSave] = Guard(
            control,
            "save_async",
            is_complete=is_staging,
            rescue=self._rescue,
            undo=self._undo_async,
        )

    @property
    def writer_pid(self) -> int | None:
        """Process id of the writer; None before it starts and after it is closed."""
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
        return len(self._handshake.unreported.running())

    @property
    def num_allocations(self) -> int:
        """Number of times staging memory had to be allocated."""
        return sum(buffer.memory.num_allocations for buffer in self._buffers)

    def wait_staged(self) -> None:
        """Wait until the last save is staged and submitted: then the state may change."""
        self._lazy.wait()

    def require_open(self) -> None:
        """Raise ConfigError after `close`: a failure of a later save would be raised by nothing."""
        if self._is_closed:
            raise ConfigError(
                f"the checkpointer of {self._storage.describe('')} is closed, and saves nothing "
                f"any more: save before close() or the end of its `with` block, or make another one"
            )

    def close(self) -> None:
        """Wait for the saves in flight, stop the writer, free the memory; raise a failure.

        In a forked process it does nothing: all of that is its parent's.
        """
        if self._groups.control.is_forked:
            return
        if self._writer is not None and self._writer.receiver is threading.current_thread():
            raise ConfigError(
                "a callback of PendingSave.add_done_callback closes the checkpointer, in the "
                "thread that has to end with it: close it in the loop, after PendingSave.result()"
            )
        self._is_closed = True
        self._lazy.close()
        failures = self._handshake.unreported.close()
        if self._writer is not None:
            self._writer.close(timeout_s=self._options.deadline_s)
            self._writer = None
        if self._end is not None:
            self._end.detach()
            self._end = None
        self._handshake.planner.forget()
        for buffer in self._buffers:
            buffer.reset()
        raise_failures(failures)

    def save(self, request: SaveRequest, state: Mapping[str, object]) -> SaveReport:
        """One synchronous save; see `Checkpointer.save`.

        Under `save_guard`: at its end the other ranks learn that the save is committed.
        """
        self.require_open()
        self.wait_staged()
        phases = Phases()
        # A save makes many objects and no cycles, and so does its job, in a thread of its own.
        before = requests_of(self._storage)
        with collector_paused(), phases.timed("total"):
            writer = self._keeping_writer()
            agreed = self._handshake.agree(request, state, phases)
            plan = agreed.plan_or_raise()
            report = agreed.report(request.step, self._storage, phases)
            self._counts["planned" if agreed.planned else "reused"] += 1
            self._last_steps.append(request.step)
            self._executor.write(agreed, request, phases)
            if writer is not None:
                self._executor.keep_image(writer, self._buffers[0], agreed, request)
            with phases.timed("retain"):
                self._after_commit(plan, request.step)
        self._counts["nbytes"] += report.nbytes
        return replace(report, requests=dict(requests_of(self._storage) - before))

    def _undo_save(self) -> None:
        """A synchronous save failed on all ranks: nothing of it is left here or on storage."""
        self.on_failure()
        answers = self.save_guard.answers.get(BEGIN)
        if answers is None:
            return
        self._handshake.planner.clear()
        self._undo_prepare()
        proposals = Proposals(answers)
        if self._groups.control.is_coordinator and proposals.agrees():
            discard_save(self._storage, proposals.directory)

    def _undo_async(self) -> None:
        self.on_failure()

    def _undo_prepare(self) -> None:
        """Free staging buffers may be half laid out: the next save does that again."""
        for buffer in self._buffers:
            if buffer.is_free():
                buffer.reset()

    def save_async(self, request: SaveRequest, state: Mapping[str, object]) -> PendingSave:
        """One asynchronous save; see `Checkpointer.save_async`.

        Under `async_guard`: what goes wrong after its last collective reaches the other ranks
        through storage, see `_rescue`. The job is submitted last of all.
        """
        self.require_open()
        self.wait_staged()
        phases, before = Phases(), requests_of(self._storage)
        self._submitted = None
        with collector_paused(), phases.timed("stall"):
            writer = self._live_writer()
            agreed = self._handshake.agree(request, state, phases, in_flight=len(self._buffers) - 1)
            report = agreed.report(request.step, self._storage, phases)
            sent = dict(requests_of(self._storage) - before)
            report = replace(report, requests=sent)
            pending = InFlightSave(
                step=request.step, save_id=agreed.save_id, report=report, began=phases.began
            )
            plan = agreed.plan
            if plan is None:
                self._counts["skipped"] += 1
                return PendingSave(pending)
            self._counts["planned" if agreed.planned else "reused"] += 1
            buffer = next(buffer for buffer in self._buffers if buffer.is_free())
            self._submitted = buffer.pending = pending
            self._last_steps.append(request.step)
            after = partial(self._after_outcome, plan=plan, step=request.step)
            pending.ticket, late = self._executor.submit(
                writer, buffer, agreed, request, phases, state=state, lazy=self._lazy, after=after
            )
            self._tell_of_failure(pending, pending.ticket)
            if late is not None:
                pending.staged = late.staged
                late.start()
        self._report_later(pending)
        return PendingSave(pending)

    def _tell_of_failure(self, pending: InFlightSave, ticket: Ticket) -> None:
        """Let waits of this rank and of others find what one of them has failed with.

        Its storage may refuse even the record of it, while that of other ranks works.
        """
        if self._groups.control.size > 1:
            pending.look = partial(self._look_for_failure, ticket)
            pending.cause = partial(self._cause_of_discard, ticket)
            ticket.when_finished(partial(self._leave_failure, ticket))

    def _leave_failure(self, ticket: Ticket) -> None:
        """Let ranks that wait know what this one has failed with."""
        outcome, job = ticket.outcome, ticket.job
        if outcome is None or outcome.error is None:
            return
        if outcome.error.details.get("failed_ranks", [job.rank]) != [job.rank]:
            return  # another one's, as found on storage
        if DISCARDED in outcome.error.details:
            return  # this rank does not know why
        record = of_rank(job.rank, outcome.error)
        left = _LeftFailure(position=job.position, committer=ticket.commits, record=record)
        # That of another rank is for the committing one alone, which has failed if it leaves one.
        self._groups.control.leave_text(
            f"save/{job.header.save_id}",
            msgspec.json.encode(left).decode(),
            replaces=ticket.commits,
        )

    def _left_failure(self, ticket: Ticket) -> _LeftFailure | None:
        """Return what another rank has left of this save, if one has."""
        text = self._groups.control.text_of(f"save/{ticket.job.header.save_id}")
        return None if text is None else decode_json_as(text, _LeftFailure)

    def _cause_of_discard(self, ticket: Ticket) -> HoldfastError | None:
        """Return what another rank has failed with, whose record of it is gone from storage.

        It may have removed that, as a new checkpointer does with what failed saves have left,
        before this rank's writer looked. So it knows, and leaves it within a moment.
        """
        deadline = time.monotonic() + _CAUSE_WITHIN_S
        while (left := self._left_failure(ticket)) is None and time.monotonic() < deadline:
            time.sleep(_CAUSE_WITHIN_S / 20)
        return None if left is None else left.record.to_error()

    def _look_for_failure(self, ticket: Ticket) -> None:
        """Publish on storage, where all writers look, what another rank has left of this save."""
        left = self._left_failure(ticket)
        if left is not None:
            pass_on_failure(
                self._storage,
                ticket.job,
                left.record,
                position=left.position,
                committer=left.committer,
            )

    def _report_later(self, pending: InFlightSave) -> None:
        """Keep it until every rank knows its outcome, which is counted when this rank does."""
        self._handshake.unreported.add(pending)
        pending.when_done(partial(self._count_outcome, pending))

    def _count_outcome(self, pending: InFlightSave) -> None:
        """Note the outcome for `counts`; called by the thread that learns it."""
        if pending.phase == "committed" and pending.report is not None:
            self._outcomes.append(("committed", pending.report.nbytes))
        else:
            self._outcomes.append(("failed", 0))

    def _rescue(self, error: BaseException) -> PendingSave:
        """An asynchronous save failed here after its last collective.

        The failure is left on storage, for every rank's writer, and in the groups' store, for those
        that wait. It is raised by its `result`, and by the next save on all ranks. A save that the
        writer has already continues.
        """
        pending = self._submitted
        self._lazy.wait(error)
        if pending is not None and pending.ticket is not None:
            if pending not in self._handshake.unreported:
                self._report_later(pending)
            if not isinstance(error, Exception):
                raise error
            if pending.error() is not None:
                return PendingSave(pending)
            # All that can be missing is how long it took; the other ranks continue, too.
            logging.getLogger("holdfast").warning(
                "the save of step %s was submitted, then: %r", pending.step, error
            )
            return PendingSave(pending)
        proposals = Proposals(self.async_guard.answers[BEGIN])
        record = ErrorRecord.of(error, foreign=StorageError)
        failure = error if isinstance(error, HoldfastError) else record.to_error()
        step, overwrite = proposals.by_rank[0].step, proposals.by_rank[0].overwrite
        pending = InFlightSave(step=step, save_id=proposals.save_id, failure=failure)
        self._report_later(pending)
        self._handshake.planner.clear()
        self._undo_prepare()
        if not proposals.is_skipped:
            request = SaveRequest(kind="save_async", step=step, overwrite=overwrite)
            job = self._executor.empty_job(proposals.directory, proposals.save_id, request)
            commits = self._groups.control.is_coordinator
            pending.ticket = Ticket(job, commits=commits, nbytes=0)
            self._tell_of_failure(pending, pending.ticket)
            pending.ticket.fail(record)
            publish_failure(self._storage, job, record, committer=commits)
        if not isinstance(error, Exception):
            pending.was_raised = True
            raise error
        return PendingSave(pending)

    def prepare(self, state: Mapping[str, object]) -> None:
        """Plan, lay out and touch the memory, start the writer: the first save is then like any.

        Under `prepare_guard`.
        """
        self.require_open()
        self.wait_staged()
        self._live_writer()
        phases = Phases()
        request = SaveRequest(kind="prepare", overwrite=True)
        agreed = self._handshake.agree(request, state, phases)
        self._counts["planned"] += agreed.planned
        plan = agreed.plan_or_raise()
        for buffer in self._buffers:
            self._executor.prepare(buffer, plan, agreed.local, phases)

    def _after_outcome(self, outcome: SaveOutcome, *, plan: RankPlan, step: int) -> None:
        """`_after_commit` in the thread that receives outcomes."""
        if outcome.error is None:
            self._after_commit(plan, step)

    def _after_commit(self, plan: RankPlan, step: int) -> None:
        """On the coordinator, keep the plan of a committed checkpoint and apply the retention.

        What goes wrong, in a policy of the caller's too, is logged: the save has succeeded.
        """
        if plan.commit is None:
            return
        try:
            self._handshake.planner.keep(plan)
            self._retain(step)
        except Exception:
            logging.getLogger("holdfast").exception("after the commit of step %s", step)

    def _saved_since(self, step: int) -> set[int]:
        """The step and those of later saves.

        The outcome of an asynchronous save can arrive when a later save of a lower step, by a run
        that has gone back, is committed.
        """
        later = dropwhile(lambda other: other != step, tuple(self._last_steps))
        return {step, *later}

    def _retain(self, saved: int) -> None:
        """Remove what the retention policy lets go of; a failure is logged, never raised."""
        policy = self._options.retention
        if policy is None:
            return
        log = logging.getLogger("holdfast")
        try:
            plan = plan_retention(self._storage, policy, saved=partial(self._saved_since, saved))
            result = apply_retention(self._storage, plan)
        except HoldfastError as error:
            log.warning("retention: nothing was removed: %s", error)
            return
        for step, why in result.failed.items():
            log.warning("retention: step %s could not be removed: %s", step, why)

    def _keeping_writer(self) -> Writer | None:
        """A writer for a synchronous save, which needs one only for an image to be kept.

        It starts while the save is made. None if it cannot: the save is made without it.
        """
        if not self._keeps_images:
            return None
        try:
            return self._live_writer()
        except StorageError as error:
            logging.getLogger("holdfast").warning("no image will be kept: %s", error)
            return None

    def _live_writer(self) -> Writer:
        """The writer; a new one if it died, which costs its saves and nothing else."""
        if self._writer is None or self._writer.dead:
            self._writer = start_writer(self._storage)
            if self._end is not None:
                self._end.detach()
            unreported = self._handshake.unreported
            self._end = weakref.finalize(self, _leave, os.getpid(), self._writer, unreported)
        return self._writer


def _leave(pid: int, writer: Writer, unreported: UnreportedSaves) -> None:
    """Log the failures that nothing will raise any more: the checkpointer was not closed.

    Called when it is collected as garbage, or at the end of the process. The writer continues, and
    its own log says what becomes of saves in flight.
    """
    if os.getpid() != pid:
        return  # all of that is the parent's
    lost = writer.leave()
    log = logging.getLogger("holdfast")
    for save, error in unreported.not_raised():
        log.error("the save of step %s failed, and nothing raised it: %s", save.step, error)
    for save in unreported.running() if lost else ():
        log.error("the save of step %s is lost: %s; call close()", save.step, lost)
