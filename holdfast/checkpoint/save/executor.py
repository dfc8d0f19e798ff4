"""One rank's share of a save: staged, and written by a job in a thread or in the writer process."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import numpy as np
import torch

from holdfast.checkpoint.options import SaverOptions
from holdfast.checkpoint.plan.rank_plan import LocalState, RankPlan
from holdfast.checkpoint.save.handshake import AgreedSave, SaveRequest, timed
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
from holdfast.errors import StorageError
from holdfast.format.names import data_file
from holdfast.parallel import ProcessGroups
from holdfast.storage import Storage
from holdfast.version import __version__
from holdfast.writer.client import Ticket, Writer, WriterThread
from holdfast.writer.job import JobGate, SaveOutcome, WriteJob
from holdfast.writer.records import SaveHeader, column

_NUM_DESCRIPTORS = 8
_DISK_SLACK_NBYTES = 4 << 20
_UNLIMITED_NBYTES = 1 << 60


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

    def stage(
        self, buffer: StagingBuffer, plan: RankPlan, local: LocalState, seconds: dict[str, float]
    ) -> tuple[Staging, bytes]:
        """Copy this rank's rows into the buffer; with the digests of the boxes it vouches for."""
        sources = plan.sources(local)
        staging = self._lay_out(buffer, plan, sources, seconds)
        with timed(seconds, "stage"):
            stage(staging, sources, plan.names, self._copiers)
        return staging, self._checks(staging, plan, local, seconds)

    def submit(
        self,
        writer: Writer,
        buffer: StagingBuffer,
        agreed: AgreedSave,
        request: SaveRequest,
        seconds: dict[str, float],
        *,
        after: Callable[[SaveOutcome], None],
    ) -> Ticket:
        """Stage, then submit the job to the writer, which calls `after` when it has committed."""
        plan = agreed.plan_or_raise()
        staging, checks = self.stage(buffer, plan, agreed.local, seconds)
        job = self._job(agreed, plan, request, checks)
        with timed(seconds, "submit"):
            return writer.submit(
                job,
                buffer=self._buffers.index(buffer),
                memory=buffer.memory,
                image=staging.view,
                plan=plan.commit,
                after=after if plan.commit is not None else None,
            )

    def write(self, agreed: AgreedSave, request: SaveRequest, seconds: dict[str, float]) -> None:
        """Stage and write this rank's share, and commit; all ranks raise if one cannot.

        The job runs in a thread: it writes and hashes segment by segment what is staged here, where
        the caller's device streams are current. It commits when all ranks have written. Every shape
        and dtype is checked against the plan before the first byte is written.
        """
        plan, local, buffer = agreed.plan_or_raise(), agreed.local, self._buffers[0]
        sources = plan.sources(local)
        staging = self._lay_out(buffer, plan, sources, seconds)
        check_sources(staging, sources, plan.names)
        gate, writer = JobGate(), WriterThread(self._storage)
        try:
            with timed(seconds, "write"):
                gate.open_to(len(plan.image.header))
                ticket = writer.submit(
                    self._job(agreed, plan, request, b""),
                    buffer=0,
                    memory=buffer.memory,
                    image=staging.view,
                    plan=plan.commit,
                    gate=gate,
                )
                with timed(seconds, "stage"):
                    for end in stage_by_slices(staging, sources, self._copiers):
                        gate.open_to(end)
                gate.finish_staging(self._checks(staging, plan, local, seconds))
                ticket.wait_written()
            self._groups.control.agree(None, phase="save: written")
            with timed(seconds, "commit"):
                gate.allow_commit()
                ticket.wait_finished()
        finally:
            # After a failure here the job must not go on, nor be left behind.
            gate.close()
            writer.close(timeout_s=None)

    def _job(
        self, agreed: AgreedSave, plan: RankPlan, request: SaveRequest, checks: bytes
    ) -> WriteJob:
        job = self.empty_job(agreed.directory, agreed.save_id, request)
        writes = plan.file >= 0
        return msgspec.structs.replace(
            job,
            plan_digest=plan.plan_digest,
            file=data_file(plan.file) if writes else None,
            header_nbytes=len(plan.image.header) if writes else 0,
            starts=column(plan.image.starts),
            row_nbytes=column(plan.row_nbytes),
            checks=checks,
            values=agreed.local.values,
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
                metadata=request.metadata,
            ),
            plan_digest="",
            block_nbytes=self._options.block_nbytes,
            deadline_s=self._options.deadline_s,
        )

    def _lay_out(
        self,
        buffer: StagingBuffer,
        plan: RankPlan,
        sources: Sequence[torch.Tensor],
        seconds: dict[str, float],
    ) -> Staging:
        """The buffer laid out as the image of this plan; page-locked if a device copies to it."""
        staging = buffer.staging
        if staging is None or buffer.plan_digest != plan.plan_digest:
            buffer.staging = staging = None
            with timed(seconds, "lay out"):
                staging = prepare_staging(buffer.memory, plan.image, sources)
            buffer.staging, buffer.plan_digest = staging, plan.plan_digest
        if any(device.type == "cuda" for device in devices_of(sources)):
            buffer.memory.lock(lock_pages, unlock_pages)
        return staging

    @staticmethod
    def _checks(
        staging: Staging, plan: RankPlan, local: LocalState, seconds: dict[str, float]
    ) -> bytes:
        """Digests of the boxes this rank vouches for; of the staged bytes where it writes them."""
        if not plan.checks:
            return b""
        with timed(seconds, "compare"):
            cut = {place for place, _ in plan.cuts}
            staged = {row: place for place, row in enumerate(plan.rows) if place not in cut}
            digests = [
                staging.row_digest(staged[row])
                if row in staged
                else content_digest(local.sources[row])
                for row in plan.checks
            ]
        return column(np.array(digests, dtype=np.uint64))


def check_budget(
    storage: Storage, *, image_nbytes: int, held_nbytes: Sequence[int], total_nbytes: int
) -> None:
    """StorageError naming what is short and by how much; a few system calls.

    `image_nbytes`: this rank's image, once per buffer; `held_nbytes`: what each buffer has already.
    `total_nbytes`: the whole checkpoint, 0 on ranks that do not answer for the disk.
    """
    if total_nbytes:
        needed = total_nbytes + total_nbytes // 50 + _DISK_SLACK_NBYTES
        free = storage.free_nbytes()
        if free < needed:
            raise StorageError(
                f"{storage.describe('')}: the checkpoint needs {_size(needed)}, but only "
                f"{_size(free)} are free: {_size(needed - free)} short; remove old checkpoints "
                f"(holdfast prune) or save elsewhere"
            )
    needed = sum(max(image_nbytes - held, 0) for held in held_nbytes)
    if needed:
        free = available_memory_nbytes()
        if free < needed:
            raise StorageError(
                f"staging this rank's share needs {_size(needed)} more memory in "
                f"{len(held_nbytes)} staging buffer(s), but only {_size(free)} are available: "
                f"{_size(needed - free)} short; use staging_buffers=1 or more ranks to save with"
            )
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY:
        used = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0
        if used + _NUM_DESCRIPTORS > soft:
            raise StorageError(
                f"{used} of {soft} file descriptors are open and a save needs {_NUM_DESCRIPTORS}: "
                f"{used + _NUM_DESCRIPTORS - soft} short; raise the limit (ulimit -n)"
            )


def available_memory_nbytes() -> int:
    """Memory this process may still take: the machine's, or its control group's if that is less."""
    available = _UNLIMITED_NBYTES
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
    except OSError:
        return available
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        (
            "/sys/fs/cgroup/memory/memory.limit_in_bytes",
            "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        ),
    ):
        try:
            most = Path(limit).read_text().strip()
            if most != "max":
                available = min(available, int(most) - int(Path(used).read_text()))
        except (OSError, ValueError):
            continue
    return max(available, 0)


def _size(nbytes: int) -> str:
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if nbytes >= factor:
            return f"{nbytes / factor:.1f} {unit}"
    return f"{nbytes} B"
