"""One rank's share of a save: staged, and written by a job in a thread or in the writer process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime

import msgspec
import numpy as np
import torch

from holdfast.checkpoint.options import SaveRequest, SaverOptions
from holdfast.checkpoint.plan.rank_plan import LocalState, RankPlan
from holdfast.checkpoint.reports import Phases
from holdfast.checkpoint.save.handshake import AgreedSave
from holdfast.checkpoint.save.lazy_staging import LateCopy, LateRows, LazyStaging
from holdfast.checkpoint.save.staging import (
    Copiers,
    Staging,
    StagingBuffer,
    check_sources,
    content_digest,
    devices_of,
    lock_pages,
    prepare_staging,
    stage,
    stage_by_slices,
    unlock_pages,
)
from holdfast.errors import ErrorRecord, StorageError
from holdfast.parallel import ProcessGroups
from holdfast.state.tensor_memory import TensorMemory
from holdfast.storage import Storage
from holdfast.version import __version__
from holdfast.writer.client import Ticket, Writer
from holdfast.writer.job import ImageHasher, JobThread, RowDigests
from holdfast.writer.outcomes import publish_failure
from holdfast.writer.records import KeepImage, SaveHeader, SaveOutcome, WriteJob, column


class SaveExecutor:
    """Stages this rank's share of a save and has a job write it."""

    def __init__(
        self,
        storage: Storage,
        groups: ProcessGroups,
        *,
        options: SaverOptions,
        buffers: Sequence[StagingBuffer],
    ) -> None:
        self._storage = storage
        self._groups = groups
        self._options = options
        self._buffers = buffers
        self._copiers: Copiers = {}

    def prepare(
        self, buffer: StagingBuffer, plan: RankPlan, local: LocalState, phases: Phases
    ) -> None:
        """Lay out the buffer and touch its memory, by a copy of this rank's rows."""
        sources = plan.sources(local)
        staging = self._lay_out(buffer, plan, sources, phases)
        with phases.timed("stage"):
            stage(staging, sources, plan.names, self._copiers)

    def submit(
        self,
        writer: Writer,
        buffer: StagingBuffer,
        agreed: AgreedSave,
        request: SaveRequest,
        phases: Phases,
        *,
        state: Mapping[str, object],
        lazy: LazyStaging,
        after: Callable[[SaveOutcome], None],
    ) -> tuple[Ticket, LateCopy | None]:
        """Stage, then submit the job to the writer, which calls `after` when it has committed.

        Returns:
            The ticket; and of a lazy save the copy of what is not staged yet, to be started, after
            which the job is submitted: None if all is staged, and the job is submitted already.
        """
        plan, local = agreed.plan_or_raise(), agreed.local
        sources = plan.sources(local)
        staging = self._lay_out(buffer, plan, sources, phases)
        rows, others = LateRows({}, {}, []), _others(plan)
        with phases.timed("stage"):
            if request.stage == "lazily":
                # Watched first: what is written from here on is noticed.
                check_sources(staging, sources, plan.names)
                rows = lazy.choose(state, plan, local, sources.tensors, others, self._copiers)
            stage(staging, sources, plan.names, self._copiers, but_for=rows.all_copied)
        commits = plan.commit is not None
        ticket = Ticket(
            self._job(agreed, plan, request),
            commits=commits,
            nbytes=plan.image.nbytes,
            after=after if commits else None,
            receiver=writer.receiver,
        )
        now = [row for row in others if row not in rows.all_compared]
        digests = self._digests_of_others(now, local, phases)

        def submit(phases: Phases) -> None:
            checks = self._checks(staging, plan, digests, phases)
            ticket.job = msgspec.structs.replace(ticket.job, checks=checks)
            with phases.timed("submit"):
                # Before the job, which is submitted last of all.
                self.keep_image(writer, buffer, agreed, request)
                number = self._buffers.index(buffer)
                writer.submit(
                    ticket,
                    buffer=number,
                    memory=buffer.memory,
                    image=staging.view,
                    plan=plan.commit,
                )

        if not rows:
            submit(phases)
            return ticket, None

        def then(failure: BaseException | None, late: dict[int, int]) -> None:
            """Submit the job; what goes wrong reaches the other ranks through storage."""
            try:
                if failure is not None:
                    raise failure
                digests.update(late)
                submit(Phases())
            except BaseException as error:
                rank, record = ticket.job.rank, ErrorRecord.of(error, foreign=StorageError)
                named = msgspec.structs.replace(record, message=f"rank {rank}: {record.message}")
                published = named if ticket.commits else record
                publish_failure(self._storage, ticket.job, published, committer=ticket.commits)
                ticket.fail(named)

        with phases.timed("stage"):
            return ticket, lazy.copy_later(rows, staging, buffer.memory.fd, then)

    def write(self, agreed: AgreedSave, request: SaveRequest, phases: Phases) -> None:
        """Stage and write this rank's share, and commit; all ranks raise if one cannot.

        The job runs in a thread: it writes segment by segment what is staged and hashed here, where
        the caller's device streams are current. It commits when all ranks have written. Every shape
        and dtype is checked against the plan before the first byte is written.
        """
        plan, local = agreed.plan_or_raise(), agreed.local
        job = self._job(agreed, plan, request)
        sources = plan.sources(local)
        staging = self._lay_out(self._buffers[0], plan, sources, phases)
        check_sources(staging, sources, plan.names)
        thread = JobThread(self._storage, job, staging.view, plan=plan.commit)
        gate, hasher = thread.gate, ImageHasher(job, staging.view)
        try:
            with phases.timed("write"):
                thread.start()
                gate.open_to(len(plan.image.header))
                with phases.timed("stage"):
                    for end in stage_by_slices(staging, sources, self._copiers):
                        gate.open_to(end)
                        hasher.advance(end)
                    digests = hasher.finish()
                others = self._digests_of_others(_others(plan), local, phases)
                checks = self._checks(staging, plan, others, phases, digests)
                gate.finish_staging(checks, digests)
                record = thread.wait_written()
            records = self._groups.control.gather(record, phase="save: written")
            with phases.timed("commit"):
                gate.allow_commit(records or ())
                thread.wait_finished()
        finally:
            # After a failure here the job must neither continue nor be left behind.
            thread.stop()

    def keep_image(
        self, writer: Writer, buffer: StagingBuffer, agreed: AgreedSave, request: SaveRequest
    ) -> None:
        """Have the writer keep the staged image when this process has gone, if that is wanted.

        The writer sees on storage whether the save is committed. If the writer is gone, a restart
        reads storage.
        """
        options, plan = self._options, agreed.plan_or_raise()
        nbytes, name, most = plan.image.nbytes, plan.file.name, options.max_kept_nbytes
        if not options.keep_image_s or name is None or (most is not None and nbytes > most):
            return
        image = KeepImage(
            buffer=self._buffers.index(buffer),
            nbytes=nbytes,
            step=request.step,
            save_id=agreed.save_id,
            file=name,
            keep_s=options.keep_image_s,
        )
        with suppress(StorageError):
            writer.keep_image(image, memory=buffer.memory)

    def _job(self, agreed: AgreedSave, plan: RankPlan, request: SaveRequest) -> WriteJob:
        """The job of an agreed save, with what differs between saves under its plan."""
        return msgspec.structs.replace(
            self.empty_job(agreed.directory, agreed.save_id, request),
            plan_digest=plan.plan_digest,
            file=plan.file,
            values=agreed.local.values,
            root=agreed.root,
            row_boxes=plan.row_boxes if self._options.fingerprints else (),
        )

    def empty_job(self, directory: str, save_id: str, request: SaveRequest) -> WriteJob:
        """The job of a save that failed on this rank before it staged; enough to publish that."""
        control = self._groups.control
        return WriteJob(
            directory=directory,
            position=control.index,
            rank=control.rank,
            header=SaveHeader(
                step=request.step,
                save_id=save_id,
                created=datetime.now(UTC).isoformat(timespec="seconds"),
                holdfast=__version__,
                torch=str(torch.__version__),
                overwrite=request.overwrite,
                metadata=request.encoded_metadata,
                on_drift=self._options.on_drift,
            ),
            plan_digest="",
            block_nbytes=self._options.block_nbytes,
            deadline_s=self._options.deadline_s,
        )

    def _lay_out(
        self,
        buffer: StagingBuffer,
        plan: RankPlan,
        sources: TensorMemory,
        phases: Phases,
    ) -> Staging:
        """The buffer laid out as the image of this plan; page-locked if a device copies to it."""
        staging = buffer.staging
        if staging is None or buffer.plan_digest != plan.plan_digest:
            buffer.staging = staging = None
            with phases.timed("lay out"):
                staging = prepare_staging(buffer.memory, plan.image, sources.tensors)
            buffer.staging, buffer.plan_digest = staging, plan.plan_digest
        if any(device.type == "cuda" for device in devices_of(sources)):
            buffer.memory.lock(lock_pages, unlock_pages)
        return staging

    @staticmethod
    def _checks(
        staging: Staging,
        plan: RankPlan,
        others: Mapping[int, int],
        phases: Phases,
        digests: RowDigests | None = None,
    ) -> bytes:
        """Return digests of the boxes this rank vouches for; of the staged bytes if it writes them.

        Args:
            others: of `_digests_of_others`.
            digests: of the staged rows, if they are known; that of a row of one block is the
                row's own.
        """
        if not plan.checks:
            return b""
        with phases.timed("compare"):
            staged = _staged_rows(plan)
            known: dict[int, int] = {}
            if digests is not None:
                places = np.flatnonzero(np.diff(digests.digest_ptr) == 1)
                words = digests.digests[digests.digest_ptr[places]]
                known = dict(zip(places.tolist(), words.tolist(), strict=True))
            reports = []
            for row in plan.checks:
                place = staged.get(row)
                if place is None:
                    reports.append(others[row])
                else:
                    reports.append(known.get(place) or staging.row_digest(place))
        return column(np.array(reports, dtype=np.uint64))

    @staticmethod
    def _digests_of_others(
        rows: Sequence[int], local: LocalState, phases: Phases
    ) -> dict[int, int]:
        """Return digests of the boxes this rank vouches for and others write, as they are now."""
        if not rows:
            return {}
        with phases.timed("compare"):
            return {row: content_digest(local.source(row)) for row in rows}


def _staged_rows(plan: RankPlan) -> dict[int, int]:
    """Return the place in the plan of each row that is written whole."""
    cut = {place for place, _ in plan.cuts}
    return {row: place for place, row in enumerate(plan.rows) if place not in cut}


def _others(plan: RankPlan) -> list[int]:
    """Return the rows that this rank vouches for and does not write whole."""
    staged = _staged_rows(plan) if plan.checks else {}
    return [row for row in plan.checks if row not in staged]
