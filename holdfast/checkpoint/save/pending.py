"""An asynchronous save after it is staged: what the caller sees of it, and what the saver keeps."""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

from holdfast.checkpoint.reports import SaveReport
from holdfast.errors import (
    ConfigError,
    DeadlineError,
    GroupError,
    HoldfastError,
)
from holdfast.writer.client import Ticket
from holdfast.writer.outcomes import DISCARDED

_FIRST_LOOK_S, _LONGEST_LOOK_S = 1.0, 8.0
"""A wait for an outcome looks elsewhere after so long, then half as often each time, up to this."""


class PendingSave:
    """A save whose bytes are staged, or are being copied; training continues.

    Made by `Checkpointer.save_async` and `maybe_save`. Everything here is local to this rank: no
    collectives.
    """

    def __init__(self, save: InFlightSave) -> None:
        self._save = save
        # Thread that runs a callback -> whether `result` has raised the failure in it.
        self._callbacks: dict[int, bool] = {}

    def __repr__(self) -> str:
        """Step and state."""
        return f"<PendingSave of step {self.step}: {self.phase}>"

    @property
    def step(self) -> int:
        """The step of the checkpoint."""
        return self._save.step

    @property
    def phase(self) -> str:
        """`staging` (of lazy saves), `writing`, `committing`, `committed`, `failed`, `skipped`."""
        return self._save.phase

    @property
    def progress(self) -> float:
        """Fraction of this rank's bytes that storage has, 0 to 1."""
        return self._save.progress

    @property
    def skipped(self) -> bool:
        """True if nothing was saved, because of `when_busy="skip"` and an earlier save."""
        return self._save.skipped

    def done(self) -> bool:
        """Return True if it is committed, failed or skipped."""
        return self._save.done()

    def staged(self, timeout: float | None = None) -> None:
        """Wait until this rank's bytes are copied, and everything may change.

        Needed only after `save_async(stage="lazily")`, and there before anything but a step of an
        optimizer of the state changes a parameter or an optimizer's state. Whether the copy is good
        is for `result` to say.

        Args:
            timeout: seconds to wait; None waits as long as it takes.

        Raises:
            DeadlineError: they are not copied within `timeout`; the copy continues.
        """
        if not self._save.staged.wait(timeout):
            raise DeadlineError(
                f"the save of step {self.step} is still being copied after {timeout} s"
            )

    def result(self, timeout: float | None = None) -> SaveReport:
        """Wait until the checkpoint is committed and durable, as storage says.

        A failure raised here is not raised again on this rank by `close` or, once every rank has
        raised it, by the next save.

        Args:
            timeout: seconds to wait; None waits until the save's own deadline.

        Raises:
            DeadlineError: it is not done within `timeout`; the save itself continues.
            HoldfastError: what the save failed with, the same on every rank.
        """
        # Apart: the save may fail just after the time is over, and nothing has raised that then.
        self._save.wait_done(timeout)
        try:
            return self._save.result()
        except HoldfastError:
            thread = threading.get_ident()
            if thread in self._callbacks:
                self._callbacks[thread] = True
            else:
                self._save.was_raised = True
            raise

    def add_done_callback(self, callback: Callable[[PendingSave], object]) -> None:
        """Call `callback(self)` once, when the save is committed, failed or skipped.

        It is called by the thread that receives the outcome from the writer, or at once by the
        calling thread if the save is done; several are called in the order they were added. It
        must be short, and must not save, load, communicate, close the checkpointer or wait for
        another save, which the last two refuse (ConfigError). An exception that leaves it is
        logged (logger `holdfast`); a save's failure that leaves it through `result` still counts
        as not raised, and so comes with the next save or `close`.
        """
        self._save.when_done(partial(self._run_callback, callback))

    def _run_callback(self, callback: Callable[[PendingSave], object]) -> None:
        """Call it, log what it raises, and note a failure of the save that it dealt with."""
        thread = threading.get_ident()
        self._callbacks[thread] = False
        try:
            callback(self)
            # Only now: `close` must not take for raised what is about to end in a log.
            self._save.was_raised |= self._callbacks.get(thread, False)
        except BaseException as error:
            # One that ends the main thread may. Any other is the thread that receives outcomes,
            # without which no later save would ever be done.
            is_main = threading.current_thread() is threading.main_thread()
            if is_main and not isinstance(error, Exception):
                raise
            logging.getLogger("holdfast").exception("a callback of %r failed", self)
        finally:
            self._callbacks.pop(thread, None)


def _already() -> threading.Event:
    event = threading.Event()
    event.set()
    return event


@dataclass(slots=True, kw_only=True)
class InFlightSave:
    """An asynchronous save as the saver keeps it until every rank knows its outcome."""

    step: int
    save_id: str
    report: SaveReport | None = None
    """The report of `result` without what the writer measures; None if the save failed early."""
    began: float = 0.0
    """When the call came, by `time.monotonic`."""
    ticket: Ticket | None = None
    """The writer's job; None for a save that was skipped or failed before there was one."""
    look: Callable[[], object] = bool
    """Called in a wait that lasts: another rank may fail without a record of it on storage."""
    cause: Callable[[], HoldfastError | None] = lambda: None
    """Called if all that storage says is that the save was discarded: what another rank knows."""
    staged: threading.Event = field(default_factory=_already)
    """Set when this rank's bytes are copied."""
    failure: HoldfastError | None = None
    """The failure, if the writer does not know of it."""
    pid: int = field(default_factory=os.getpid)
    """The process that made it, whose thread learns the outcome."""
    was_raised: bool = False
    """True if its failure was raised on this rank; the next save need not raise it again."""

    @property
    def skipped(self) -> bool:
        """True if nothing was saved."""
        return self.report is not None and self.report.skipped

    @property
    def phase(self) -> str:
        """`staging`, `writing`, `committing`, `committed`, `failed` or `skipped`."""
        if self.skipped:
            return "skipped"
        if self.failure is not None or self.ticket is None:
            return "failed"
        outcome = self.ticket.outcome
        if outcome is not None:
            return "failed" if outcome.error is not None else "committed"
        if self.ticket.written.is_set():
            return "committing"
        return "writing" if self.staged.is_set() else "staging"

    @property
    def progress(self) -> float:
        """Fraction of this rank's bytes that storage has."""
        if self.ticket is None or self.ticket.nbytes == 0 or self.ticket.written.is_set():
            return 1.0
        return self.ticket.nbytes_written / self.ticket.nbytes

    def done(self) -> bool:
        """Return True if it is committed, failed or skipped."""
        return self.ticket is None or self.ticket.finished.is_set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it is done; False if it is not within the time.

        Raises:
            GroupError: this process was forked from the one that made it, which alone learns.
            ConfigError: a callback of another save waits, in the thread that would learn it.
        """
        if self.ticket is None or self.done():
            return True
        if os.getpid() != self.pid:
            raise GroupError(
                f"the save of step {self.step} is process {self.pid}'s, from which process "
                f"{os.getpid()} was forked: only that one learns how it ends"
            )
        if self.ticket.receiver is threading.current_thread():
            raise ConfigError(
                f"a callback of PendingSave.add_done_callback waits for the save of step "
                f"{self.step}, in the thread that would learn how it ends: a callback must neither "
                f"save nor wait for another save; set a flag there, and do it in the loop"
            )
        began, pause_s = time.monotonic(), _FIRST_LOOK_S
        while True:
            left_s = math.inf if timeout_s is None else began + timeout_s - time.monotonic()
            if self.ticket.finished.wait(min(pause_s, max(left_s, 0.0))):
                return True
            if left_s <= pause_s:
                return False
            self.look()
            pause_s = min(2 * pause_s, _LONGEST_LOOK_S)

    def error(self) -> HoldfastError | None:
        """Why it failed, as far as known now; None otherwise."""
        if self.failure is not None:
            return self.failure
        outcome = self.ticket.outcome if self.ticket is not None else None
        if outcome is None or outcome.error is None:
            return None
        if DISCARDED in outcome.error.details:
            self.failure = self.cause() or outcome.error.to_error()
            return self.failure
        return outcome.error.to_error()

    def when_done(self, callback: Callable[[], object]) -> None:
        """Call it once; see `PendingSave.add_done_callback`."""
        if self.ticket is None:
            callback()
        else:
            self.ticket.when_finished(callback)

    def wait_done(self, timeout_s: float | None) -> None:
        """Wait until it is done; raise DeadlineError if it is not within the time."""
        began = time.monotonic()
        if not self.wait(timeout_s):
            raise DeadlineError(
                f"the save of step {self.step} is still {self.phase} after "
                f"{time.monotonic() - began:.1f} s ({self.progress:.0%} of this rank's bytes)"
            )

    def result(self) -> SaveReport:
        """Return the report of a save that is done, or raise what it failed with."""
        error = self.error()
        if error is not None:
            raise error
        report = self.report
        assert report is not None, "a save without a report has failed"
        if self.ticket is None or self.ticket.outcome is None:
            return report
        outcome = self.ticket.outcome
        start = outcome.began - self.began
        return replace(
            report,
            seconds={**report.seconds, "write": outcome.write_s, "commit": outcome.commit_s},
            starts={**report.starts, "write": start, "commit": start + outcome.write_s},
            requests=dict(Counter(report.requests) + Counter(outcome.requests)),
        )
