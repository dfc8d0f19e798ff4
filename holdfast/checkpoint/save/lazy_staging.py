"""Lazy staging: the bytes of a save are copied while training continues.

In a forward and a backward pass parameters and moments do not change. So a save may return when it
is agreed, and copy them before the next step of an optimizer, which waits in a hook. That nobody
else changes them in between is not believed: the kernel watches their memory (`write_watch.py`),
and a save of which a source was written before it was copied fails, and names it. What the kernel
cannot watch is copied before the call returns, as without lazy staging. What is on a CUDA device is
copied and watched there (`device_rows.py`).
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from io import FileIO
from typing import NamedTuple, TypeVar

import torch
import xxhash
from torch import nn

from holdfast.checkpoint.plan.rank_plan import LocalState, RankPlan
from holdfast.checkpoint.save.device_rows import DeviceRows, DeviceSource, can_be_summed, snapshots
from holdfast.checkpoint.save.staging import (
    PIECE_NBYTES,
    SLICE_NBYTES,
    Copiers,
    Staging,
    copier_of,
    copy_bytes,
    is_plain,
    storage_span,
    tensor_bytes,
)
from holdfast.checkpoint.save.write_watch import Span, WatchError, WriteWatch, whole_pages
from holdfast.errors import PlanError, StorageError, some_of
from holdfast.state import OnLayout, OptimizerState
from holdfast.state.leaves import held_tensor

LEAST_NBYTES = 256 << 10
"""Smaller sources are copied at once, on their device: to watch one costs more."""
_MAX_NAMED = 5
_MAX_DETAILS = 100


class LateSource(NamedTuple):
    """A tensor that is read later, and watched until then."""

    name: str
    tensor: torch.Tensor
    pages: Span
    """Its whole pages: the rest is read at once."""
    storage: tuple[int, int]
    """Address and bytes of its memory at the call."""

    @property
    def has_moved(self) -> bool:
        """True if its memory was freed, resized or replaced since."""
        return self.storage != storage_span(self.tensor)


class LateRows(NamedTuple):
    """What a save reads later."""

    copied: dict[int, LateSource]
    """By place in the plan: what this rank writes."""
    compared: dict[int, LateSource]
    """By row of its claims: what others write, and this rank reports the digest of."""
    on_devices: list[DeviceRows]
    """The same, device by device."""

    def __bool__(self) -> bool:
        """Return True if anything is read later."""
        return bool(self.copied or self.compared or self.on_devices)

    @property
    def all_copied(self) -> set[int]:
        """Places in the plan, wherever their tensors are."""
        return set(self.copied).union(*(each.copied for each in self.on_devices))

    @property
    def all_compared(self) -> set[int]:
        """Rows of claims, wherever their tensors are."""
        return set(self.compared).union(*(each.compared for each in self.on_devices))


Then = Callable[[BaseException | None, dict[int, int]], None]
"""What follows: given the failure, or None, and the digests of what is compared, by row."""


class LateCopy:
    """Reads the late rows of one save in a thread, and does what follows.

    Args:
        rows: watched; what they have around their whole pages is read here.
        staging: where the copies go.
        fd: descriptor of the memory of `staging`.
        watch: of their memory; ended here. None if all are on devices.
        then: called once, when nothing is to be read any more; it raises nothing.
    """

    def __init__(
        self,
        rows: LateRows,
        staging: Staging,
        fd: int,
        watch: WriteWatch | None,
        then: Then,
    ) -> None:
        self.staged = threading.Event()
        """Set when the sources may change."""
        self._launched = threading.Event()
        """Set when those of the host may, and the copies from devices are on their streams."""
        self.ended = threading.Event()
        """Set when the save is submitted or has failed."""
        self._rows = rows
        self._staging = staging
        self._edges = {row: _edges(each) for row, each in rows.compared.items()}
        for place, each in rows.copied.items():
            target, start = staging.destinations[place], each.tensor.data_ptr()
            copy_bytes(target, each.tensor, 0, each.pages[0] - start)
            copy_bytes(target, each.tensor, each.pages[1] - start, int(staging.row_nbytes[place]))
        self._watch = watch
        self._then = then
        self._pid = os.getpid()
        self._was_started = False
        self._turn = [True]
        """Taken by what ends it: the thread, or the caller if there is none."""
        # Its own: the memory may be given up, and the number be another file's, while it copies.
        self._fd = os.dup(fd)
        # No daemon: a process that ends in the meantime waits for the copy, as the caller knows
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

    def hold_back(self) -> None:
        """What the caller does next may change the sources.

        The host waits for the copies of host memory only. Those from a device are waited for by
        the caller's stream of the device. A process that was forked in the meantime has memory of
        its own, and not the thread: it does not wait.
        """
        if os.getpid() != self._pid:
            return
        self._launched.wait()
        for each in tuple(self._rows.on_devices):
            each.hold_back()

    def _abandon(self, error: BaseException) -> None:
        if self._take_turn():
            self._end(error, {})

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
        digests: dict[int, int] = {}
        try:
            for rows in self._rows.on_devices:
                digests |= rows.enqueue(self._staging)
            changed = [
                each.name
                for place, each in self._rows.copied.items()
                if not self._copy(place, each)
            ]
            changed += self._compare(digests)
            self._launched.set()
            for rows in self._rows.on_devices:
                changed += rows.finish()
            if changed:
                failure = _changed_error(list(dict.fromkeys(changed)))
        except BaseException as error:
            failure = error
        self._end(failure, digests)

    def _end(self, failure: BaseException | None, digests: dict[int, int]) -> None:
        try:
            for each in self._rows.on_devices:
                each.wait()
            if self._watch is not None:
                self._watch.end()
            os.close(self._fd)
            self._rows.on_devices.clear()
            self._rows.copied.clear()
            self._rows.compared.clear()
        finally:
            self._launched.set()
            self.staged.set()
            try:
                self._then(failure, digests)
            finally:
                self.ended.set()

    def _copy(self, place: int, late: LateSource) -> bool:
        """Copy a row; return False if its source was written, moved or freed before."""
        offset = int(self._staging.starts[place]) - late.tensor.data_ptr()
        return (
            not late.has_moved
            and _write_all(self._fd, late.pages, late.pages[0] + offset)
            and not self._is_written(late)
        )

    def _is_written(self, late: LateSource) -> bool:
        assert self._watch is not None, "rows of the host were chosen"
        return self._watch.is_written(late.pages)

    def _compare(self, digests: dict[int, int]) -> list[str]:
        """Add the digest of each row that is compared; return names of those that changed."""
        changed: list[str] = []
        if not self._rows.compared:
            return changed
        with open("/proc/self/mem", "rb", buffering=0) as memory:
            for row, late in self._rows.compared.items():
                digest = None if late.has_moved else _digest(memory, late, *self._edges[row])
                if digest is None or self._is_written(late):
                    changed.append(late.name)
                else:
                    digests[row] = digest
        return changed


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
        rows: LateRows,
        staging: Staging,
        fd: int,
        then: Then,
    ) -> LateCopy:
        """Return the copy of rows that `choose` has returned; it is not started."""
        self._current = LateCopy(rows, staging, fd, self._watch, then)
        return self._current

    def choose(
        self,
        state: Mapping[str, object],
        plan: RankPlan,
        local: LocalState,
        sources: Sequence[torch.Tensor],
        others: Collection[int],
        copiers: Copiers,
    ) -> LateRows:
        """Return what can be read later, watched from now on; nothing where nothing can be.

        Args:
            state: its optimizers are held back.
            plan: of the save.
            local: the state, flattened.
            sources: of the plan, in its order.
            others: rows of claims that this rank reports digests of and does not write.
            copiers: of the devices.

        Cost: some microseconds for each source of `LEAST_NBYTES` or more, see `WriteWatch.begin`;
        for one on a device some launches, see `WordSums`.
        """
        if self._watch is not None:
            self._watch.end()  # of a save that was interrupted
        self._unhook()
        if not threading.main_thread().is_alive():
            return LateRows({}, {}, [])  # the process ends, and waits for no further thread
        memory = self._hook(state)
        named = [
            (local.rows[row][0], source) for row, source in zip(plan.rows, sources, strict=True)
        ]
        copied = _late(dict(enumerate(named)), memory, local)
        compared = _late(
            {row: (local.rows[row][0], local.source(row)) for row in others}, memory, local
        )
        return LateRows(
            *self._watched(_of_host(copied), _of_host(compared)),
            _of_devices(copied, compared, copiers),
        )

    def _watched(
        self, copied: dict[int, LateSource], compared: dict[int, LateSource]
    ) -> tuple[dict[int, LateSource], dict[int, LateSource]]:
        """Return those of the host's rows that the kernel watches from now on."""
        watch = self._open() if copied or compared else None
        if watch is None:
            return {}, {}
        pages = [each.pages for rows in (copied, compared) for each in rows.values()]
        are_watched = iter(watch.begin(pages))
        return _chosen(copied, are_watched), _chosen(compared, are_watched)

    def _hold_back(self, *arguments: object) -> None:
        """Wait until every source is read: the hook before an optimizer's step."""
        del arguments
        current = self._current
        if current is not None:
            current.hold_back()

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


def _late(
    sources: Mapping[int, tuple[str, torch.Tensor]], memory: Collection[int], local: LocalState
) -> dict[int, LateSource | DeviceSource]:
    """Return the sources that can be read later, by number."""
    late: dict[int, LateSource | DeviceSource] = {}
    small: dict[int, tuple[str, torch.Tensor]] = {}
    for number, (key, source) in sources.items():
        if source.nbytes < LEAST_NBYTES:
            if source.device.type == "cuda":
                small[number] = key, source
        elif is_plain(source) and _is_unchanged(key, source, memory, local):
            row = _late_source(key, source)
            if row is not None:
                late[number] = row
    # To copy them to the host at once, it would have to wait for all that the device has to do.
    return late | snapshots(small)


def _is_unchanged(
    key: str, source: torch.Tensor, memory: Collection[int], local: LocalState
) -> bool:
    """Return True if nothing but a step that is held back is expected to change a tensor."""
    is_changed_by_steps = source.untyped_storage().data_ptr() in memory
    return is_changed_by_steps or _is_frozen(local.flat.tensors.get(key))


def _late_source(name: str, source: torch.Tensor) -> LateSource | DeviceSource | None:
    """Return a contiguous tensor as a late source; None if nothing can notice writes to it."""
    if source.device.type == "cuda":
        return DeviceSource.of(name, source) if can_be_summed(source) else None
    if not source.is_cpu:
        return None
    start = source.data_ptr()
    return LateSource(
        name=name,
        tensor=source.detach(),  # of the memory that it has now
        pages=whole_pages((start, start + source.nbytes)),
        storage=storage_span(source),
    )


def _of_host(rows: Mapping[int, LateSource | DeviceSource]) -> dict[int, LateSource]:
    return {number: each for number, each in rows.items() if isinstance(each, LateSource)}


def _of_devices(
    copied: Mapping[int, LateSource | DeviceSource],
    compared: Mapping[int, LateSource | DeviceSource],
    copiers: Copiers,
) -> list[DeviceRows]:
    """Return the sources on devices, device by device, as they are from now on."""
    rows_of: dict[torch.device, tuple[dict[int, DeviceSource], dict[int, DeviceSource]]] = {}
    for kind, rows in enumerate((copied, compared)):
        for number, each in rows.items():
            if isinstance(each, DeviceSource):
                rows_of.setdefault(each.tensor.device, ({}, {}))[kind][number] = each
    devices = []
    for device, (own, others) in rows_of.items():
        copier = copier_of(device, copiers)
        assert copier is not None, "a CUDA device"
        devices.append(DeviceRows(own, others, copier))
    return devices


_Row = TypeVar("_Row")


def _chosen(rows: Mapping[int, _Row], are_chosen: Iterator[bool]) -> dict[int, _Row]:
    """Return the rows that are chosen, of as many answers as there are rows."""
    answers = zip(rows.items(), are_chosen, strict=False)
    return {number: each for (number, each), is_chosen in answers if is_chosen}


def _edges(late: LateSource) -> tuple[bytes, bytes]:
    """Return the bytes of a late source in front of its whole pages, and those behind them."""
    data, start = tensor_bytes(late.tensor), late.tensor.data_ptr()
    return bytes(data[: late.pages[0] - start]), bytes(data[late.pages[1] - start :])


def _digest(memory: FileIO, late: LateSource, head: bytes, tail: bytes) -> int | None:
    """Return what `content_digest` would have returned at the call; None if memory is gone.

    Read through the system: it reports memory that is gone, where our own look would end the
    process.
    """
    digest = xxhash.xxh3_64(head)
    at, stop = late.pages
    while at < stop:
        try:
            data = os.pread(memory.fileno(), min(stop - at, PIECE_NBYTES), at)
        except OSError:
            return None
        if not data:
            return None
        digest.update(data)
        at += len(data)
    digest.update(tail)
    return digest.intdigest()


def _write_all(fd: int, span: Span, offset: int) -> bool:
    """Copy memory to a memory file; False if some of it is not mapped any more.

    The kernel copies: it reports memory that is gone, where our own copy would end the process.
    """
    at, stop = span
    while at < stop:
        part = (ctypes.c_char * min(stop - at, SLICE_NBYTES)).from_address(at)
        try:
            done = os.pwrite(fd, part, offset)
        except OSError as error:
            if error.errno == errno.EFAULT:
                return False
            raise StorageError(f"staging memory cannot be written: {error}") from error
        at, offset = at + done, offset + done
    return True


def _changed_error(changed: Sequence[str]) -> PlanError:
    return PlanError(
        f"{some_of(changed, most=_MAX_NAMED)}: changed while still being copied, "
        f"so what is stored would be of no one time; before anything but a step of an optimizer of "
        f"the state changes it call PendingSave.staged(), or save with stage='at once'",
        details={"changed": list(changed[:_MAX_DETAILS])},
    )


def _is_frozen(held: object) -> bool:
    """Return True for a parameter that is not trained."""
    return isinstance(held, nn.Parameter) and not held.requires_grad
