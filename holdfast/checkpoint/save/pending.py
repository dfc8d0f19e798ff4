"""A save under way, as the training loop sees it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from holdfast.checkpoint.reports import SaveReport
from holdfast.errors import DeadlineError, HoldfastError
from holdfast.storage import Storage
from holdfast.writer.client import Ticket


@dataclass(slots=True, kw_only=True)
class PendingSave:
    """A save whose bytes are staged; training may go on and change everything.

    `step`: of the checkpoint. `skipped`: nothing was saved, because an earlier save was under way
    and `when_busy="skip"`. Looking at it, waiting for it and `result` are local: no collectives.
    `was_raised`: its failure has been raised on this rank, which the next save need not do again.
    """

    step: int
    ticket: Ticket | None
    save_id: str = ""
    planned: bool = False
    total_nbytes: int = 0
    num_tensors: int = 0
    skipped: bool = False
    failure: HoldfastError | None = None
    was_raised: bool = False
    seconds: Mapping[str, float] = field(default_factory=dict)
    storage: Storage | None = None

    @property
    def phase(self) -> str:
        """`writing`, `committing`, `committed`, `failed` or `skipped`."""
        if self.skipped:
            return "skipped"
        if self.failure is not None or self.ticket is None:
            return "failed"
        outcome = self.ticket.outcome
        if outcome is not None:
            return "failed" if outcome.error is not None else "committed"
        return "committing" if self.ticket.written.is_set() else "writing"

    @property
    def progress(self) -> float:
        """Part of this rank's bytes handed to storage, 0 to 1."""
        if self.ticket is None or self.ticket.nbytes == 0 or self.ticket.written.is_set():
            return 1.0
        return self.ticket.nbytes_written / self.ticket.nbytes

    def done(self) -> bool:
        """Whether it is committed, failed or skipped."""
        return self.ticket is None or self.ticket.finished.is_set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it is done; False if it is not within the time."""
        return self.ticket is None or self.ticket.finished.wait(timeout_s)

    def error(self) -> HoldfastError | None:
        """Why it failed, as far as known now; None otherwise."""
        if self.failure is not None:
            return self.failure
        outcome = self.ticket.outcome if self.ticket is not None else None
        if outcome is None or outcome.error is None:
            return None
        return outcome.error.to_error()

    def result(self, timeout_s: float | None = None) -> SaveReport:
        """Wait until the checkpoint is committed and durable, as storage says.

        Raises what the save failed with, on every rank alike; DeadlineError if it is not done
        within `timeout_s` (the save itself goes on). A failure raised here is not raised again on
        this rank by `close` or, once every rank has raised it, by the next save.
        """
        began = time.monotonic()
        if not self.wait(timeout_s):
            raise DeadlineError(
                f"the save of step {self.step} is still {self.phase} after "
                f"{time.monotonic() - began:.1f} s ({self.progress:.0%} of this rank's bytes)"
            )
        error = self.error()
        if error is not None:
            self.was_raised = True
            raise error
        outcome = self.ticket.outcome if self.ticket is not None else None
        if outcome is None:
            return SaveReport(
                step=self.step, path="", nbytes=0, total_nbytes=0, num_tensors=0,
                planned=False, skipped=True, seconds=dict(self.seconds),
            )  # fmt: skip
        where = self.storage.describe(outcome.directory) if self.storage else outcome.directory
        return SaveReport(
            step=self.step,
            path=where,
            nbytes=outcome.nbytes,
            total_nbytes=self.total_nbytes,
            num_tensors=self.num_tensors,
            planned=self.planned,
            skipped=False,
            seconds={
                **self.seconds, "write": outcome.write_s, "commit": outcome.commit_s
            },
        )  # fmt: skip
