"""One rank's share of a save on its way to storage: staged, then written here or handed over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from datetime import UTC, datetime

import msgspec
import numpy as np
import torch

from holdfast.checkpoint.options import SaverOptions
from holdfast.checkpoint.plan.rank_plan import RankPlan
from holdfast.checkpoint.save.copier import Copiers, CudaPageLock, PageLock
from holdfast.checkpoint.save.handshake import Begun, Clock, Opened, SaveAsk, Slot
from holdfast.checkpoint.save.local_state import LocalState
from holdfast.checkpoint.save.pending import InFlightSave
from holdfast.checkpoint.save.staging import (
    Staging,
    check_sources,
    content_digest,
    devices_of,
    prepare_staging,
    stage,
    stage_by_segments,
)
from holdfast.format.names import data_file
from holdfast.parallel import ProcessGroups
from holdfast.storage import Storage
from holdfast.version import __version__
from holdfast.writer.client import Writer
from holdfast.writer.commit import commit_save
from holdfast.writer.heartbeat import Heartbeat
from holdfast.writer.job import SaveOutcome, prepare_directory
from holdfast.writer.records import SaveHeader, column
from holdfast.writer.write import Gate, Payload, WriteJob, publish_done, write_payload


class Sender:
    """Stages this rank's share of a save and brings it to storage."""

    def __init__(
        self,
        storage: Storage,
        groups: ProcessGroups,
        *,
        options: SaverOptions,
        slots: Sequence[Slot],
    ) -> None:
        self._storage = storage
        self._groups = groups
        self._options = options
        self._slots = slots
        self._copiers = Copiers()
        self._pages: PageLock = CudaPageLock()

    def stage(
        self, slot: Slot, plan: RankPlan, local: LocalState, clock: Clock
    ) -> tuple[Staging, list[int]]:
        """Copy this rank's rows into the slot; digests of the boxes it must vouch for."""
        sources = plan.sources(local)
        staging = self._lay_out(slot, plan, sources, clock)
        with clock.phase("stage"):
            stage(staging, sources, plan.names, self._copiers)
        return staging, self._checks(staging, plan, local, clock)

    def _lay_out(
        self, slot: Slot, plan: RankPlan, sources: Sequence[torch.Tensor], clock: Clock
    ) -> Staging:
        """The slot's memory as the image of this plan; page-locked where a device copies to it."""
        staging = slot.staging
        if staging is None or slot.plan_digest != plan.plan_digest:
            slot.staging = staging = None
            with clock.phase("lay out"):
                staging = prepare_staging(slot.arena, plan.image, sources)
            slot.staging, slot.plan_digest = staging, plan.plan_digest
        if any(device.type == "cuda" for device in devices_of(sources)):
            slot.arena.lock(self._pages)
        return staging

    @staticmethod
    def _checks(staging: Staging, plan: RankPlan, local: LocalState, clock: Clock) -> list[int]:
        """Digests of the boxes this rank vouches for; of the staged bytes where it writes them."""
        if not plan.checks:
            return []
        with clock.phase("compare"):
            cut = {place for place, _ in plan.cuts}
            staged = {row: place for place, row in enumerate(plan.rows) if place not in cut}
            return [
                staging.row_digest(staged[row])
                if row in staged
                else content_digest(local.sources[row])
                for row in plan.checks
            ]

    def prepare_job(
        self, slot: Slot, begun: Begun, header: SaveHeader, clock: Clock
    ) -> tuple[WriteJob, int]:
        """Stage, and say what is to be written: the job, and the bytes of the slot it takes."""
        plan = begun.plan_or_raise()
        staging, checks = self.stage(slot, plan, begun.local, clock)
        job = self._job(plan, begun.local, begun.directory, header, checks)
        return job, staging.view.nbytes

    def hand_over(
        self,
        writer: Writer,
        slot: Slot,
        plan: RankPlan,
        job: WriteJob,
        nbytes: int,
        pending: InFlightSave,
        *,
        after: Callable[[SaveOutcome], None],
    ) -> None:
        """Submit a job; the coordinator's writer calls `after` when it has committed."""
        number = self._slots.index(slot)
        if slot.given != slot.arena.num_allocations:
            writer.give_arena(number, slot.arena.fd, slot.arena.nbytes)
            slot.given = slot.arena.num_allocations
        commits = plan.commit is not None
        if plan.commit is not None:
            writer.give_plan(plan.plan_digest, plan.commit[1])
        pending.ticket = writer.submit(
            job, slot=number, nbytes=nbytes, commits=commits, after=after if commits else None
        )

    def empty_job(self, opened: Opened) -> WriteJob:
        """The job of a save that came to nothing on this rank; enough to publish its failure."""
        control = self._groups.control
        none = column(np.zeros(0, dtype=np.uint64))
        ask = SaveAsk(
            kind="save_async",
            step=opened.openings[0].step,
            overwrite=opened.openings[0].overwrite,
            check_replicas=False,
        )
        return WriteJob(
            directory=opened.directory,
            position=control.index,
            rank=control.rank,
            header=save_header(ask, opened.save_id),
            plan_digest="",
            block_nbytes=self._options.block_nbytes,
            file=None,
            header_nbytes=0,
            starts=none,
            row_nbytes=none,
            checks=none,
            values=b"",
            places=(),
            deadline_s=self._options.deadline_s,
        )

    def _job(
        self,
        plan: RankPlan,
        local: LocalState,
        directory: str,
        header: SaveHeader,
        checks: Sequence[int],
    ) -> WriteJob:
        control = self._groups.control
        writes = plan.file >= 0
        return WriteJob(
            directory=directory,
            position=control.index,
            rank=control.rank,
            header=header,
            plan_digest=plan.plan_digest,
            block_nbytes=self._options.block_nbytes,
            file=data_file(plan.file) if writes else None,
            header_nbytes=len(plan.image.header) if writes else 0,
            starts=column(plan.image.starts),
            row_nbytes=column(plan.row_nbytes),
            checks=column(np.array(checks, dtype=np.uint64)),
            values=local.values,
            places=plan.places if self._options.fingerprints else (),
            deadline_s=self._options.deadline_s,
        )

    def write(
        self,
        plan: RankPlan,
        local: LocalState,
        directory: str,
        header: SaveHeader,
        clock: Clock,
    ) -> None:
        """Stage and write this rank's share here; all ranks raise if one cannot.

        Writing and hashing follow the staging segment by segment, in threads beside it. Every shape
        and dtype is checked against the plan before the first byte is written.
        """
        sources = plan.sources(local)
        staging = self._lay_out(self._slots[0], plan, sources, clock)
        check_sources(staging, sources, plan.names)
        job = self._job(plan, local, directory, header, [])
        with clock.phase("write"), self._own_heartbeat(plan, directory):
            payload, checks = self._write_beside(job, plan, local, staging, sources, clock)
            job = msgspec.structs.replace(job, checks=column(np.array(checks, dtype=np.uint64)))
            publish_done(self._storage, job, payload)
        self._groups.control.agree(None, phase="save: written")

    def _write_beside(
        self,
        job: WriteJob,
        plan: RankPlan,
        local: LocalState,
        staging: Staging,
        sources: Sequence[torch.Tensor],
        clock: Clock,
    ) -> tuple[Payload, list[int]]:
        """Stage here, where the caller's device streams are current; write in a thread."""
        gate = Gate()
        gate.open_to(len(plan.image.header))

        def write() -> Payload:
            prepare_directory(self._storage, job, *(plan.commit or (None, b"")))
            return write_payload(self._storage, job, staging.view, gate=gate)

        with ThreadPoolExecutor(1, thread_name_prefix="holdfast-write") as pool:
            written = pool.submit(write)
            try:
                with clock.phase("stage"):
                    for end in stage_by_segments(staging, sources, self._copiers):
                        gate.open_to(end)
                checks = self._checks(staging, plan, local, clock)
            except BaseException:
                gate.break_off()
                raise
            return written.result(), checks

    def heartbeat(self, plan: RankPlan, directory: str) -> AbstractContextManager[object]:
        """For the whole of a synchronous save, on the committer: other ranks may be slow."""
        if plan.commit is None:
            return nullcontext()
        return Heartbeat(self._storage, directory, position=self._groups.control.index)

    def _own_heartbeat(self, plan: RankPlan, directory: str) -> AbstractContextManager[object]:
        """While this rank writes; the committer's lasts longer."""
        if plan.commit is not None:
            return nullcontext()
        return Heartbeat(self._storage, directory, position=self._groups.control.index)

    def commit(self, plan: RankPlan, directory: str, header: SaveHeader) -> None:
        """Commit on the coordinator; nothing elsewhere."""
        if plan.commit is not None:
            commit_save(
                self._storage,
                directory,
                plan=plan.commit[0],
                plan_digest=plan.plan_digest,
                header=header,
            )


def save_header(ask: SaveAsk, save_id: str) -> SaveHeader:
    """What a save says of itself in every record."""
    return SaveHeader(
        step=ask.step,
        save_id=save_id,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        holdfast=__version__,
        torch=str(torch.__version__),
        overwrite=ask.overwrite,
        metadata=ask.metadata,
    )
