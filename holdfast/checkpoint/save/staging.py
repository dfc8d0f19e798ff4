"""Staging: a rank's assigned boxes are copied into memory laid out as the image of its data file.

There is one copier per device, behind one small protocol. It orders itself after what the caller
has enqueued, enqueues copies that run on their own, and in the end holds the caller until its bytes
are in place.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
import xxhash

from holdfast.arrays.types import IntArray
from holdfast.checkpoint.save.pending import InFlightSave
from holdfast.errors import PlanError
from holdfast.format.image import Image
from holdfast.writer.memory import SharedMemory

SLICE_NBYTES = 16 << 20
"""What is staged before the job may write it, where staging and writing run concurrently."""
_PORTABLE = 1  # cudaHostRegisterPortable: page-locked for every context of the process


class Mark(Protocol):
    """A point in a copier's work; a `torch.cuda.Event` is one."""

    def query(self) -> bool:
        """Whether everything before it is in place."""

    def synchronize(self) -> None:
        """Return when everything before it is in place."""


class Copier(Protocol):
    """Copies tensors of one device into host memory. Used by one thread."""

    def begin(self) -> None:
        """Order the copies that follow after everything the caller has enqueued so far."""

    def copy(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> Mark:
        """Enqueue copies of equal shapes and dtypes; the mark is behind them."""

    def finish(self) -> None:
        """Return when every copy is in place; what the caller enqueues next comes after them."""


class _Done:
    """The mark of a copier that has copied when it returns."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return


class HostCopier:
    """Copies in the calling thread: one `torch._foreach_copy_`, in place when it returns."""

    def begin(self) -> None:
        """Nothing to wait for."""

    def copy(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> Mark:
        """Copy now."""
        torch._foreach_copy_(list(targets), list(sources))
        return _Done()

    def finish(self) -> None:
        """Nothing is in flight."""


class CudaCopier:
    """Copies from one CUDA device on a stream of its own.

    The side stream waits for the caller's current stream, so that the copies see what was computed
    before; `finish` lets the caller's stream wait for them and then holds the calling thread until
    they are done. Holding the thread is the safe choice: afterwards every stream and the host may
    change or free the sources. Returning at once would spare the host the length of the copies,
    but only streams that were told to wait would be held from overwriting what is still being
    read. Sources need no `record_stream`: the caller has them until `finish` returns.

    Cost: strided sources take a contiguous copy on the device, one after another.
    `cuda`: the module `torch.cuda`, or what stands in for it.
    """

    def __init__(self, device: torch.device, *, cuda: Any = None) -> None:
        self._device = device
        self._cuda = torch.cuda if cuda is None else cuda
        self._stream = self._cuda.Stream(device=device)

    def begin(self) -> None:
        """The side stream waits for the caller's current stream."""
        self._stream.wait_stream(self._cuda.current_stream(self._device))

    def copy(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> Mark:
        """Enqueue on the side stream; asynchronous where the targets are page-locked."""
        with self._cuda.stream(self._stream):
            torch._foreach_copy_(list(targets), list(sources), non_blocking=True)
            event: Mark = self._stream.record_event()
        return event

    def finish(self) -> None:
        """The caller's stream waits for the side stream, then the caller does."""
        self._cuda.current_stream(self._device).wait_stream(self._stream)
        self._stream.synchronize()


def make_copier(device: torch.device) -> Copier:
    """The copier for a device; one that is neither CUDA nor host is copied from by the caller."""
    return CudaCopier(device) if device.type == "cuda" else HostCopier()


class Copiers:
    """The copiers of one checkpointer, each made when its device is first met."""

    def __init__(self, make: Callable[[torch.device], Copier] = make_copier) -> None:
        self._make = make
        self._made: dict[torch.device, Copier] = {}

    def of(self, device: torch.device) -> Copier:
        """The copier of a device, always the same one."""
        if device not in self._made:
            self._made[device] = self._make(device)
        return self._made[device]


class CudaPageLock:
    """`cudaHostRegister`, which works on memory files, too. `cuda`: as for `CudaCopier`."""

    def __init__(self, *, cuda: Any = None) -> None:
        self._cuda: Any = torch.cuda if cuda is None else cuda

    def lock(self, address: int, nbytes: int) -> str:
        """See `PageLock.lock`; pages that were never touched are taken now."""
        runtime = self._cuda.cudart()
        code = runtime.cudaHostRegister(address, nbytes, _PORTABLE)
        if int(code) == 0:
            return ""
        # The runtime remembers its last error and would report it at the next kernel's launch.
        with suppress(RuntimeError):
            self._cuda.synchronize()
            torch.zeros(1, device="cuda")
        return f"{runtime.cudaGetErrorString(code)} (error {int(code)})"

    def unlock(self, address: int) -> None:
        """See `PageLock.unlock`; a runtime that is shut down already is let be."""
        with suppress(RuntimeError):
            self._cuda.cudart().cudaHostUnregister(address)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSlice:
    """Consecutive rows of an image: `rows` in plan numbering, and the byte where they end."""

    rows: tuple[int, ...]
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Staging:
    """Where a rank's rows go in its staging buffer, kept as long as the plan.

    `destinations[i]` is a view of the buffer with row i's dtype and shape. `slices`: all rows in
    the order of the image, in slices of at least `SLICE_NBYTES`; a row is never cut.
    `whole`: all of them as one.
    """

    image: Image
    view: memoryview
    destinations: tuple[torch.Tensor, ...]
    starts: IntArray
    row_nbytes: IntArray
    slices: tuple[ImageSlice, ...]
    whole: ImageSlice

    def row_digest(self, row: int) -> int:
        """XXH3-64 of a staged row's bytes, equal to `content_digest` of its source."""
        start = int(self.starts[row])
        return xxhash.xxh3_64_intdigest(self.view[start : start + int(self.row_nbytes[row])])


@dataclass(slots=True)
class StagingBuffer:
    """Memory to stage saves in, what it is laid out for, and the save that uses it."""

    memory: SharedMemory = field(default_factory=SharedMemory)
    plan_digest: str = ""
    staging: Staging | None = None
    pending: InFlightSave | None = None

    def is_free(self) -> bool:
        """Whether no save in flight uses it."""
        return self.pending is None or self.pending.done()

    def reset(self) -> None:
        """Give the memory back and forget its layout, which may be half done.

        A writer that still reads the memory has mapped it on its own.
        """
        self.staging, self.pending, self.plan_digest = None, None, ""
        self.memory.close()


def prepare_staging(
    memory: SharedMemory,
    image: Image,
    sources: Sequence[torch.Tensor],
    *,
    slice_nbytes: int = SLICE_NBYTES,
) -> Staging:
    """Lay the image into the memory: header written, one destination view per source.

    Cost: allocates the memory if it is too small, touches only the header.
    """
    view = memory.reserve(image.nbytes)
    view[: len(image.header)] = image.header
    destinations = []
    nbytes = np.zeros(len(sources), dtype=np.int64)
    for i, (source, start) in enumerate(zip(sources, image.starts.tolist(), strict=True)):
        nbytes[i] = source.numel() * source.element_size()
        if source.numel() == 0:
            destinations.append(torch.empty(source.shape, dtype=source.dtype))
            continue
        flat = torch.frombuffer(view, dtype=source.dtype, count=source.numel(), offset=start)
        destinations.append(flat.view(source.shape))
    slices = _cut_slices(image.starts, nbytes, image.nbytes, slice_nbytes)
    return Staging(
        image=image,
        view=view,
        destinations=tuple(destinations),
        starts=image.starts,
        row_nbytes=nbytes,
        slices=slices,
        whole=ImageSlice(rows=tuple(row for each in slices for row in each.rows), end=image.nbytes),
    )


def _cut_slices(starts: IntArray, nbytes: IntArray, end: int, limit: int) -> tuple[ImageSlice, ...]:
    """All rows in the order of the image, in slices of at least `limit` bytes but for the last."""
    order = np.lexsort((nbytes, starts))
    ends = (starts + nbytes)[order]
    found, first = [], 0
    begin = int(starts[order[0]]) if len(order) else end
    while first < len(order):
        stop = min(int(np.searchsorted(ends, begin + limit)) + 1, len(order))
        begin = int(ends[stop - 1]) if stop < len(order) else end
        found.append(ImageSlice(rows=tuple(order[first:stop].tolist()), end=begin))
        first = stop
    return tuple(found)


def check_sources(staging: Staging, sources: Sequence[torch.Tensor], names: Sequence[str]) -> None:
    """PlanError naming the first source whose shape or dtype is not the planned one."""
    if len(sources) != len(staging.destinations):
        raise PlanError(
            f"the plan has {len(staging.destinations)} chunks for this rank, "
            f"the state {len(sources)}"
        )
    for source, target, name in zip(sources, staging.destinations, names, strict=True):
        if source.shape != target.shape or source.dtype != target.dtype:
            raise PlanError(
                f"{name}: planned as {target.dtype} {list(target.shape)}, but the state now holds "
                f"{source.dtype} {list(source.shape)}"
            )


def stage(
    staging: Staging, sources: Sequence[torch.Tensor], names: Sequence[str], copiers: Copiers
) -> int:
    """Copy every source into the image; returns the bytes copied, all of them in place.

    Sources may be on any devices. Shapes and dtypes are checked against the plan's first.
    Cost: one `torch._foreach_copy_` per device, no allocation for contiguous sources.
    """
    check_sources(staging, sources, names)
    for _ in _copied(staging, sources, [staging.whole], copiers):
        pass
    return int(staging.row_nbytes.sum())


def stage_by_slices(
    staging: Staging, sources: Sequence[torch.Tensor], copiers: Copiers
) -> Iterator[int]:
    """As `stage`, without its check; yields after each slice up to which byte the image is staged.

    The copies of every slice are enqueued before the first one that is not in place is waited
    for. The sources may be changed only when the iterator has ended.
    """
    return _copied(staging, sources, staging.slices, copiers)


def _copied(
    staging: Staging,
    sources: Sequence[torch.Tensor],
    slices: Sequence[ImageSlice],
    copiers: Copiers,
) -> Iterator[int]:
    used = {device: copiers.of(device) for device in devices_of(sources)}
    in_flight: deque[tuple[int, list[Mark]]] = deque()
    try:
        for copier in used.values():
            copier.begin()
        for part in slices:
            in_flight.append((part.end, _enqueue(staging, sources, part, used)))
            while in_flight and all(mark.query() for mark in in_flight[0][1]):
                yield in_flight.popleft()[0]
        for end, marks in in_flight:
            for mark in marks:
                mark.synchronize()
            yield end
    finally:
        for copier in used.values():
            copier.finish()


def devices_of(sources: Sequence[torch.Tensor]) -> list[torch.device]:
    """The devices that tensors are on, each once, in order."""
    if all(source.is_cpu for source in sources):  # the common case, four times as fast
        return [torch.device("cpu")] if sources else []
    return list(dict.fromkeys(source.device for source in sources))


@torch.no_grad()
def _enqueue(
    staging: Staging,
    sources: Sequence[torch.Tensor],
    part: ImageSlice,
    copiers: dict[torch.device, Copier],
) -> list[Mark]:
    """Enqueue one slice; a mark for each device that has a part in it."""
    by_device: dict[torch.device, list[int]] = {}
    if len(copiers) == 1:
        by_device = {device: list(part.rows) for device in copiers}
    else:
        for row in part.rows:
            by_device.setdefault(sources[row].device, []).append(row)
    return [
        copiers[device].copy(
            [staging.destinations[row] for row in rows], [sources[row] for row in rows]
        )
        for device, rows in by_device.items()
        if rows
    ]


@torch.no_grad()
def content_digest(tensor: torch.Tensor) -> int:
    """XXH3-64 of a tensor's bytes in row-major order, dtype and strides set aside.

    Cost: one pass over the bytes; a copy where they are not contiguous host memory.
    """
    host = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return xxhash.xxh3_64_intdigest(tensor_bytes(host))


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous host tensor, shared, writable; nothing is copied."""
    nbytes = tensor.numel() * tensor.element_size()
    if nbytes == 0:
        return memoryview(bytearray())
    array = (ctypes.c_char * nbytes).from_address(tensor.data_ptr())
    return memoryview(array).cast("B")
