"""Lazy staging: the bytes of a save are copied while training continues.

In a forward and a backward pass parameters and moments do not change. So a save may return when it
is agreed, and copy them before the next step of an optimizer, which waits in a hook. That nobody
else changes them in between is not believed: the kernel watches their memory (`write_watch.py`),
and a save of which a source was written before it was copied fails, and names it. What the kernel
cannot watch is copied before the call returns, as without lazy staging.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn

from holdfast.checkpoint.plan.rank_plan import LocalState, RankPlan
from holdfast.checkpoint.save.staging import Staging, copy_bytes, is_plain
from holdfast.checkpoint.save.write_watch import Span, WatchError, WriteWatch, whole_pages
from holdfast.errors import PlanError, StorageError
from holdfast.state import OnLayout, OptimizerState
from holdfast.state.leaves import held_tensor

LEAST_NBYTES = 256 << 10
"""Smaller sources are copied at once: to watch one costs more."""
_SLICE_NBYTES = 16 << 20
_MAX_NAMED = 5
_MAX_DETAILS = 100


class LateRow(NamedTuple):
    """A row of the image that is copied later."""

    row: int
    name: str
    source: torch.Tensor
    pages: Span
    """The whole pages of its source: the rest is copied at once."""
    storage: tuple[int, int]
    """Address and bytes of its memory at the call."""


class LateCopy:
    """The copy of the late rows of one save, in a thread, and what follows it.

    Args:
        rows: at least one, watched.
        staging: where they go.
        fd: descriptor of the memory of `staging`.
        watch: of their memory; ended here.
        then: called once with the failure, or None, when nothing is to be copied any more; it
            raises nothing.
    """

    def __init__(
        self,
        rows: list[LateRow],
        staging: Staging,
        fd: int,
        watch: WriteWatch,
        then: Callable[[BaseException | None], None],
    ) -> None:
        self.staged = threading.Event()
        """Set when the sources may change."""
        self.ended = threading.Event()
        """Set when the save is submitted or has failed."""
        self._rows = rows
        self._staging = staging
        self._watch = watch
        self._then = then
        self._was_started = False
        self._turn = [True]
        """Taken by the one that ends it: the thread, or whoever finds that there is none."""
        # Its own: the memory may be given up, and the number be another file's, while it copies.
        self._fd = os.dup(fd)
        # No daemon: a process that ends in the meantime waits for the copy, as the caller was told
        # that the save is agreed.
        self._thread = threading.Thread(target=self._run, name="holdfast-late-copy")

    def start(self) -> None:
        """Start the thread."""
        self._was_started = True
        try:
            self._thread.start()
        except BaseException as error:
            self._abandon(error)
            raise

    def wait(self, error: BaseException | None = None) -> None:
        """Wait until the save is submitted, or has failed.

        Args:
            error: what has interrupted the save, if it did: its failure if nothing is copied yet.
        """
        if not self._was_started:
            why = "the save was interrupted before its bytes were copied"
            self._abandon(error or StorageError(why))
        self.ended.wait()

    def _abandon(self, error: BaseException) -> None:
        if self._take_turn():
            self._end(error)

    def _take_turn(self) -> bool:
        """Return True the first time; no lock, which an interrupt could leave held."""
        try:
            return self._turn.pop()
        except IndexError:
            return False

    def _run(self) -> None:
        if not self._take_turn():
            return
        failure: BaseException | None = None
        try:
            changed = [each.name for each in self._rows if not self._copy(each)]
            if changed:
                failure = _changed_error(changed)
        except BaseException as error:
            failure = error
        self._end(failure)

    def _end(self, failure: BaseException | None) -> None:
        try:
            self._watch.end()
            os.close(self._fd)
            self._rows.clear()
        finally:
            self.staged.set()
            try:
                self._then(failure)
            finally:
                self.ended.set()

    def _copy(self, late: LateRow) -> bool:
        """Copy a row; return False if its source was written, moved or freed before."""
        storage = late.source.untyped_storage()
        if late.storage != (storage.data_ptr(), storage.nbytes()):
            return False
        offset = int(self._staging.starts[late.row]) - late.source.data_ptr()
        is_whole = _write_all(self._fd, late.pages, late.pages[0] + offset)
        return is_whole and not self._watch.is_written(late.pages)


class LazyStaging:
    """What a checkpointer keeps for lazy saves: the kernel's watch, hooks, the copy in flight."""

    def __init__(self) -> None:
        self._watch: WriteWatch | None = None
        self._is_refused = False
        self._hooks: list[Callable[[], None]] = []
        self._current: LateCopy | None = None

    def wait(self, error: BaseException | None = None) -> None:
        """Wait until the last save with late rows is staged and submitted, or has failed.

        Args:
            error: as of `LateCopy.wait`.
        """
        if self._current is not None:
            self._current.wait(error)
            self._current = None

    def close(self) -> None:
        """Wait, and give back the hooks and the kernel's watch."""
        self.wait()
        self._unhook()
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    def copy_later(
        self,
        rows: list[LateRow],
        staging: Staging,
        fd: int,
        then: Callable[[BaseException | None], None],
    ) -> LateCopy:
        """Return the copy of rows that `choose` has returned; it is not started."""
        assert self._watch is not None, "rows were chosen"
        self._current = LateCopy(rows, staging, fd, self._watch, then)
        return self._current

    def choose(
        self,
        state: Mapping[str, object],
        plan: RankPlan,
        local: LocalState,
        sources: Sequence[torch.Tensor],
    ) -> list[LateRow]:
        """Return the rows that can be copied later, watched from now on; none if nothing can be.

        Cost: some microseconds for each source of `LEAST_NBYTES` or more, see `WriteWatch.begin`.
        """
        watch = self._open()
        if watch is None:
            return []
        watch.end()  # of a save that was interrupted
        self._unhook()
        memory = self._hook(state)
        rows = []
        cut = {index for index, _ in plan.cuts}
        for row, (claimed, source) in enumerate(zip(plan.rows, sources, strict=True)):
            nbytes = source.numel() * source.element_size()
            if nbytes < LEAST_NBYTES or not source.is_cpu or not is_plain(source):
                continue
            storage = source.untyped_storage()
            key = local.rows[claimed][0]
            if storage.data_ptr() not in memory and not _is_frozen(local.flat.tensors.get(key)):
                continue
            start = source.data_ptr()
            rows.append(
                LateRow(
                    row=row, name=plan.names[row] if row in cut else key, source=source,
                    pages=whole_pages((start, start + nbytes)),
                    storage=(storage.data_ptr(), storage.nbytes()),
                )
            )  # fmt: skip
        watched = watch.begin([each.pages for each in rows])
        return [each for each, is_watched in zip(rows, watched, strict=True) if is_watched]

    def _hold_back(self, *arguments: object) -> None:
        """Wait until every source is copied: the hook before an optimizer's step."""
        del arguments
        current = self._current
        if current is not None:
            current.staged.wait()

    def _hook(self, state: Mapping[str, object]) -> set[int]:
        """Hold back the steps of the optimizers of a state.

        Returns:
            Addresses of the memory that only these steps change.
        """
        memory: set[int] = set()
        for value in state.values():
            part = value.value if isinstance(value, OnLayout) else value
            if not isinstance(part, OptimizerState):
                continue
            for optimizer, tensors in part.changed_by_steps().items():
                try:
                    hook = optimizer.register_step_pre_hook(self._hold_back)
                except AttributeError:
                    continue  # no optimizer of torch's: its tensors are copied at once
                self._hooks.append(hook.remove)
                memory.update(held_tensor(each).untyped_storage().data_ptr() for each in tensors)
        return memory

    def _unhook(self) -> None:
        for remove in self._hooks:
            remove()
        self._hooks = []

    def _open(self) -> WriteWatch | None:
        """Return the watch; None where the kernel has none, which is logged once."""
        if self._watch is None and not self._is_refused:
            try:
                self._watch = WriteWatch()
            except WatchError as error:
                self._is_refused = True
                logging.getLogger("holdfast").warning(
                    "stage='lazily': saves are staged at once, because nothing here can notice "
                    "every write to what is still to be copied: %s", error,
                )  # fmt: skip
        return self._watch


def copy_edges(rows: Iterable[LateRow], staging: Staging) -> None:
    """Copy what late rows have before and behind their whole pages."""
    for each in rows:
        target, source = staging.destinations[each.row], each.source
        start, nbytes = source.data_ptr(), int(staging.row_nbytes[each.row])
        first, last = (edge - start for edge in each.pages)
        copy_bytes(target, source, 0, first)
        copy_bytes(target, source, last, nbytes)


def _write_all(fd: int, span: Span, offset: int) -> bool:
    """Copy memory to a memory file; False if some of it is not mapped any more.

    The kernel copies: it reports memory that is gone, where our own copy would end the process.
    """
    at, stop = span
    while at < stop:
        part = (ctypes.c_char * min(stop - at, _SLICE_NBYTES)).from_address(at)
        try:
            done = os.pwrite(fd, part, offset)
        except OSError as error:
            if error.errno == errno.EFAULT:
                return False
            raise StorageError(f"staging memory cannot be written: {error}") from error
        at, offset = at + done, offset + done
    return True


def _changed_error(changed: Sequence[str]) -> PlanError:
    more = f" and {len(changed) - _MAX_NAMED} more" if len(changed) > _MAX_NAMED else ""
    return PlanError(
        f"{', '.join(changed[:_MAX_NAMED])}{more}: changed while still being copied, "
        f"so what is stored would be of no one time; before anything but a step of an optimizer of "
        f"the state changes it call PendingSave.staged(), or save with stage='at once'",
        details={"changed": list(changed[:_MAX_DETAILS])},
    )


def _is_frozen(held: object) -> bool:
    """Return True for a parameter that is not trained."""
    return isinstance(held, nn.Parameter) and not held.requires_grad
