"""One rank's share of a save on its way to storage: staged, then written here or handed over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime

import msgspec
import numpy as np
import torch

import holdfast
from holdfast.checkpoint.copier import Copiers, CudaPageLock, PageLock
from holdfast.checkpoint.local import LocalState
from holdfast.checkpoint.opening import Begun, Clock, SaveAsk, Slot
from holdfast.checkpoint.pending import PendingSave
from holdfast.checkpoint.shares import RankPlan
from holdfast.checkpoint.stage import (
    Staging,
    check_sources,
    content_digest,
    devices_of,
    prepare_staging,
    stage,
    stage_by_segments,
)
from holdfast.errors import HoldfastError, StorageError
from holdfast.format.names import data_file, saving_dir
from holdfast.format.policies import Policy
from holdfast.parallel import ProcessGroups
from holdfast.storage import Storage
from holdfast.writer.client import Ticket, Writer
from holdfast.writer.commit import Committed, commit_save
from holdfast.writer.heartbeat import Heartbeat
from holdfast.writer.job import SaveOutcome, prepare_directory, publish_failure
from holdfast.writer.records import SaveHeader, column
from holdfast.writer.write import Gate, Payload, WriteJob, publish_done, write_payload


@dataclass(frozen=True, slots=True, kw_only=True)
class SaverOptions:
    """How a `Checkpointer` saves; see there."""

    block_nbytes: int
    num_arenas: int
    deadline_s: float
    retention: Policy | None
    fingerprints: bool
    check_replicas_every: int


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

    def hand_over(
        self,
        writer: Writer,
        slot: Slot,
        begun: Begun,
        ask: SaveAsk,
        clock: Clock,
        *,
        after: Callable[[SaveOutcome], None],
    ) -> PendingSave:
        """Stage and submit; the coordinator's writer calls `after` when it has committed.

        A failure here is in the result, and fails the save on all ranks, through storage.
        """
        local, plan = begun.local, begun.plan_or_raise()
        directory = saving_dir(ask.step, begun.save_id)
        header = save_header(ask, begun.save_id)
        pending = PendingSave(
            step=header.step,
            ticket=None,
            total_nbytes=plan.total_nbytes,
            num_tensors=plan.num_tensors,
            storage=self._storage,
        )
        commits = plan.commit is not None
        job = self._job(plan, local, directory, header, [])
        try:
            staging, checks = self.stage(slot, plan, local, clock)
            job = msgspec.structs.replace(job, checks=column(np.array(checks, dtype=np.uint64)))
            with clock.phase("submit"):
                if slot.given != slot.arena.num_allocations:
                    number = self._slots.index(slot)
                    writer.give_arena(number, slot.arena.fd, slot.arena.nbytes)
                    slot.given = slot.arena.num_allocations
                if plan.commit is not None:
                    writer.give_plan(plan.plan_digest, plan.commit[1])
                pending.ticket = writer.submit(
                    job,
                    slot=self._slots.index(slot),
                    nbytes=staging.view.nbytes,
                    commits=commits,
                    after=after if commits else None,
                )
        except Exception as error:
            publish_failure(self._storage, job, error, committer=commits)
            failure = error if isinstance(error, HoldfastError) else StorageError(repr(error))
            pending.failure = failure
            pending.ticket = Ticket.failed(job, failure, commits=commits)
        return pending

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
        error: Exception | None = None
        try:
            sources = plan.sources(local)
            staging = self._lay_out(self._slots[0], plan, sources, clock)
            check_sources(staging, sources, plan.names)
            job = self._job(plan, local, directory, header, [])
            with clock.phase("write"), self._own_heartbeat(plan, directory):
                payload, checks = self._write_beside(job, plan, local, staging, sources, clock)
                job = msgspec.structs.replace(job, checks=column(np.array(checks, dtype=np.uint64)))
                publish_done(self._storage, job, payload)
        except Exception as caught:
            error = caught
        self._groups.control.agree(error, phase="save: written")

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

    def commit(self, plan: RankPlan, directory: str, header: SaveHeader) -> Committed:
        """Commit on the coordinator; every rank learns the outcome."""
        error: Exception | None = None
        payload = b""
        if plan.commit is not None:
            try:
                made = commit_save(
                    self._storage,
                    directory,
                    plan=plan.commit[0],
                    plan_digest=plan.plan_digest,
                    header=header,
                )
                payload = msgspec.msgpack.encode(made)
            except Exception as caught:
                error = caught
        outcomes = self._groups.control.agree(error, phase="save: committed", payload=payload)
        return msgspec.msgpack.decode(outcomes[0], type=Committed)


def save_header(ask: SaveAsk, save_id: str) -> SaveHeader:
    """What a save says of itself in every record."""
    return SaveHeader(
        step=ask.step,
        save_id=save_id,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        holdfast=holdfast.__version__,
        torch=str(torch.__version__),
        overwrite=ask.overwrite,
    )
