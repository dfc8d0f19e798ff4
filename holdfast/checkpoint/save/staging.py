"""Staging: a rank's assigned boxes are copied into memory laid out as the image of its data file.

Tensors of the host are copied by the calling thread. A CUDA device has a copier: it orders itself
after what the caller has enqueued, enqueues copies that run on their own, and in the end holds the
caller until its bytes are in place.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import xxhash

from holdfast._torch import copy_each
from holdfast.arrays.memory import copy_ranges, join_ranges
from holdfast.arrays.types import IntArray
from holdfast.checkpoint.save.pending import InFlightSave
from holdfast.errors import PlanError
from holdfast.format.index import Image
from holdfast.state.tensor_memory import TensorMemory
from holdfast.writer.memory import SharedMemory

SLICE_NBYTES = 16 << 20
"""Bytes that are enqueued on a device at once if staging and writing run concurrently."""
PIECE_NBYTES = 1 << 20
"""Bytes that are copied on the host before they are hashed: the cache of a core holds as many."""
_LARGE_NBYTES = 128 << 10
"""Up to here torch copies a tensor in one thread."""
_PORTABLE = 1  # cudaHostRegisterPortable: page-locked for every context of the process


class CudaCopier:
    """Copies from one CUDA device on a side stream.

    The side stream waits for the caller's current stream, so that the copies see what was computed
    before; `finish` lets the caller's stream wait for them and then holds the calling thread until
    they are done. Holding the thread is the safe choice: afterwards every stream and the host may
    change or free the sources. Returning at once would spare the host the length of the copies,
    but only streams that wait for them would be held from overwriting what is still being
    read. Sources need no `record_stream`: the caller has them until `finish` returns.

    Args:
        device: to copy from.
        cuda: the module `torch.cuda`, or what stands in for it.

    Cost: strided sources take a contiguous copy on the device, one after another.
    """

    def __init__(self, device: torch.device, *, cuda: Any = None) -> None:
        self._device = device
        self._cuda = torch.cuda if cuda is None else cuda
        self._stream = self._cuda.Stream(device=device)

    def begin(self) -> None:
        """The side stream waits for the caller's current stream."""
        self._stream.wait_stream(self._cuda.current_stream(self._device))

    def copy(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> Any:
        """Enqueue on the side stream; asynchronous if the targets are page-locked.

        Returns:
            A `torch.cuda.Event` behind the copies.
        """
        with self.on_stream():
            copy_each(targets, sources, non_blocking=True)
            return self.record()

    @contextmanager
    def on_stream(self) -> Iterator[None]:
        """What is launched inside runs on the side stream, whatever the thread."""
        with self._cuda.stream(self._stream):
            yield

    def record(self) -> Any:
        """Return a `torch.cuda.Event` behind all that is on the side stream."""
        return self._stream.record_event()

    def hold_back(self, event: Any) -> None:
        """The caller's stream waits for an event of the side stream, and the caller does not."""
        self._cuda.current_stream(self._device).wait_event(event)

    def finish(self) -> None:
        """The caller's stream waits for the side stream, then the caller does."""
        self._cuda.current_stream(self._device).wait_stream(self._stream)
        self._stream.synchronize()


Copiers = dict[torch.device, CudaCopier]
"""The copiers of one checkpointer, each made when its device is first met."""


def copier_of(device: torch.device, copiers: Copiers) -> CudaCopier | None:
    """Return the one copier of a device; None if the calling thread copies."""
    if device.type == "cuda" and device not in copiers:
        copiers[device] = CudaCopier(device)
    return copiers.get(device)


@torch.no_grad()
def copy_now(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy in the calling thread: everything is in place when it returns."""
    copy_each(targets, sources)


def copy_bytes(target: torch.Tensor, source: torch.Tensor, first: int, stop: int) -> None:
    """Copy a range of bytes between two contiguous host tensors of one dtype and shape."""
    ctypes.memmove(target.data_ptr() + first, source.data_ptr() + first, stop - first)


def _copy_rows(staging: Staging, sources: TensorMemory, rows: Sequence[int]) -> None:
    """Copy rows of host tensors; small ones that are neighbours here and in the image as one.

    Parameters and moments that are views of one buffer lie so. A large tensor is torch's to copy
    where it has threads to share the work; in one thread, memcpy takes less. Of a small one, the
    call of torch costs more than the copy.
    """
    number = np.array(rows, dtype=np.int64)
    nbytes = staging.row_nbytes[number]
    by_torch = ~sources.is_plain[number]
    if torch.get_num_threads() > 1:
        by_torch |= nbytes > _LARGE_NBYTES
    if by_torch.any():
        chosen = number[by_torch].tolist()
        targets = [staging.destinations[row] for row in chosen]
        copy_now(targets, [sources.tensors[row] for row in chosen])
        number, nbytes = number[~by_torch], nbytes[~by_torch]
    target = staging.address + staging.starts[number]
    copy_ranges(*join_ranges(target, sources.address[number], nbytes))


def is_plain(tensor: torch.Tensor) -> bool:
    """Return True if its bytes in memory are those to store."""
    return tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())


def storage_span(tensor: torch.Tensor) -> tuple[int, int]:
    """Return address and bytes of the storage of a tensor, as they are now."""
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes()


def lock_pages(address: int, nbytes: int, *, cuda: Any = None) -> str:
    """Page-lock memory with `cudaHostRegister`, which works on memory files, too.

    Pages that were never touched are taken now.

    Args:
        address: of the first byte.
        nbytes: to lock.
        cuda: as for `CudaCopier`.

    Returns:
        Nothing if that was done, else why it was refused.
    """
    cuda = torch.cuda if cuda is None else cuda
    runtime = cuda.cudart()
    code = runtime.cudaHostRegister(address, nbytes, _PORTABLE)
    if int(code) == 0:
        return ""
    # The runtime remembers its last error and would report it at the next kernel's launch.
    with suppress(RuntimeError):
        cuda.synchronize()
        torch.zeros(1, device="cuda")
    return f"{runtime.cudaGetErrorString(code)} (error {int(code)})"


def unlock_pages(address: int, *, cuda: Any = None) -> None:
    """Undo `lock_pages`; a runtime that is shut down already is ignored."""
    cuda = torch.cuda if cuda is None else cuda
    with suppress(RuntimeError):
        cuda.cudart().cudaHostUnregister(address)


ImageSlice = tuple[tuple[int, ...], int]
"""Consecutive rows of an image, in plan numbering, and the byte at which they end."""


@dataclass(slots=True, kw_only=True)
class Staging:
    """The places of a rank's rows in its staging buffer, kept as long as the plan.

    Args:
        image: of the data file.
        view: the buffer's bytes.
        address: of the first of them.
        destinations: of each row, a view of the buffer with its dtype and shape.
        planned: shape and dtype of each row.
        starts: byte at which each row starts.
        row_nbytes: of each row.
        slices: all rows in the order of the image, in slices of at least `SLICE_NBYTES`; a row is
            never cut.
        pieces: the same, in slices of at least `PIECE_NBYTES`.
        whole: all of them as one.
        forms: those of the sources that were checked last, see `TensorMemory`.
    """

    image: Image
    view: memoryview
    address: int
    destinations: tuple[torch.Tensor, ...]
    planned: list[tuple[torch.Size, torch.dtype]]
    starts: IntArray
    row_nbytes: IntArray
    slices: tuple[ImageSlice, ...]
    pieces: tuple[ImageSlice, ...]
    whole: ImageSlice
    forms: object = None

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
        """Return True if no save in flight uses it."""
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
    piece_nbytes: int = PIECE_NBYTES,
) -> Staging:
    """Lay the image into the memory: its envelope written, one destination view per source.

    Cost: allocates the memory if it is too small, touches only the envelope.
    """
    view = memory.reserve(image.nbytes)
    for at, data in ((0, image.header), *image.literals):
        view[at : at + len(data)] = data
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
        address=ctypes.addressof(ctypes.c_char.from_buffer(view)) if len(view) else 0,
        destinations=tuple(destinations),
        planned=[(source.shape, source.dtype) for source in sources],
        starts=image.starts,
        row_nbytes=nbytes,
        slices=slices,
        pieces=_cut_slices(image.starts, nbytes, image.nbytes, piece_nbytes),
        whole=(tuple(row for rows, _ in slices for row in rows), image.nbytes),
    )


def _cut_slices(starts: IntArray, nbytes: IntArray, end: int, limit: int) -> tuple[ImageSlice, ...]:
    """All rows in the order of the image, in slices of at least `limit` bytes but for the last."""
    order = np.lexsort((nbytes, starts))
    ends = (starts + nbytes)[order]
    slices, first = [], 0
    begin = int(starts[order[0]]) if len(order) else end
    while first < len(order):
        stop = min(int(np.searchsorted(ends, begin + limit)) + 1, len(order))
        begin = int(ends[stop - 1]) if stop < len(order) else end
        slices.append((tuple(order[first:stop].tolist()), begin))
        first = stop
    return tuple(slices)


def check_sources(staging: Staging, memory: TensorMemory, names: Sequence[str]) -> None:
    """Raise PlanError naming the first source whose shape or dtype is not the planned one."""
    sources = memory.tensors
    if memory.forms is not None and memory.forms is staging.forms:
        return
    if [(source.shape, source.dtype) for source in sources] == staging.planned:
        staging.forms = memory.forms
        return
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
    staging: Staging,
    sources: TensorMemory,
    names: Sequence[str],
    copiers: Copiers,
    *,
    but_for: Collection[int] = (),
) -> None:
    """Copy the sources into the image, all rows but some; they are in place when it returns.

    Sources may be on any devices. Shapes and dtypes are checked against the plan's first.
    Cost: one `torch._foreach_copy_` per device, no allocation for contiguous sources.
    """
    check_sources(staging, sources, names)
    rows, end = staging.whole
    devices = devices_of(sources)
    if but_for:
        rows = tuple(row for row in rows if row not in but_for)
        # Of a device without rows nothing is waited for.
        devices = list(dict.fromkeys(sources.tensors[row].device for row in rows))
    for _ in _copied(staging, sources, [(rows, end)], devices, copiers):
        pass


def stage_by_slices(staging: Staging, sources: TensorMemory, copiers: Copiers) -> Iterator[int]:
    """Stage without the check of `stage`; yield the byte up to which the image is staged, often.

    On the host that is after each MiB or so, which the caller then finds in the cache. Of devices,
    the copies of every slice are enqueued before the first one that is not in place is waited
    for. The sources may be changed only when the iterator has ended.
    """
    if is_of_host(sources):
        return _copied_closely(staging, sources)
    return _copied(staging, sources, staging.slices, devices_of(sources), copiers)


def _copied_closely(staging: Staging, sources: TensorMemory) -> Iterator[int]:
    """Copy piece after piece in this thread, large contiguous rows MiB by MiB."""
    for rows, end in staging.pieces:
        last = rows[-1]
        is_cut = int(staging.row_nbytes[last]) > PIECE_NBYTES and bool(sources.is_plain[last])
        whole = rows[:-1] if is_cut else rows
        if whole:
            _copy_rows(staging, sources, whole)
        if is_cut:
            start, nbytes = int(staging.starts[last]), int(staging.row_nbytes[last])
            for first in range(0, nbytes, PIECE_NBYTES):
                stop = min(first + PIECE_NBYTES, nbytes)
                copy_bytes(staging.destinations[last], sources.tensors[last], first, stop)
                yield start + stop
        yield end


def _copied(
    staging: Staging,
    sources: TensorMemory,
    slices: Sequence[ImageSlice],
    devices: Sequence[torch.device],
    copiers: Copiers,
) -> Iterator[int]:
    """Copy slice after slice, of rows on these devices; yields as `stage_by_slices`."""
    used = {device: copier_of(device, copiers) for device in devices}
    on_their_own = [copier for copier in used.values() if copier is not None]
    in_flight: deque[tuple[int, list[Any]]] = deque()
    try:
        for copier in on_their_own:
            copier.begin()
        for rows, end in slices:
            in_flight.append((end, _enqueue(staging, sources, rows, used)))
            while in_flight and all(event.query() for event in in_flight[0][1]):
                yield in_flight.popleft()[0]
        for end, events in in_flight:
            for event in events:
                event.synchronize()
            yield end
    finally:
        for copier in on_their_own:
            copier.finish()


def is_of_host(sources: TensorMemory) -> bool:
    """Return True if no tensor is on a device."""
    return sources.is_all_plain or all(source.is_cpu for source in sources.tensors)


def devices_of(sources: TensorMemory) -> list[torch.device]:
    """The devices that tensors are on, each once, in order."""
    if is_of_host(sources):  # the common case
        return [torch.device("cpu")] if len(sources) else []
    return list(dict.fromkeys(source.device for source in sources.tensors))


@torch.no_grad()
def _enqueue(
    staging: Staging,
    sources: TensorMemory,
    rows: Sequence[int],
    copiers: Mapping[torch.device, CudaCopier | None],
) -> list[Any]:
    """Copy or enqueue the rows of one slice; an event for each copier that has a part in it."""
    by_device: dict[torch.device, list[int]] = {}
    if len(copiers) == 1:
        by_device = {device: list(rows) for device in copiers}
    else:
        for row in rows:
            by_device.setdefault(sources.tensors[row].device, []).append(row)
    events = []
    for device, own_rows in by_device.items():
        if not own_rows:
            continue
        copier = copiers[device]
        if device.type == "cpu":
            _copy_rows(staging, sources, own_rows)
            continue
        targets = [staging.destinations[row] for row in own_rows]
        own = [sources.tensors[row] for row in own_rows]
        if copier is None:
            copy_now(targets, own)
        else:
            events.append(copier.copy(targets, own))
    return events


@torch.no_grad()
def content_digest(tensor: torch.Tensor) -> int:
    """XXH3-64 of a tensor's bytes in row-major order, dtype and strides set aside.

    Cost: one pass over the bytes; a copy if they are not contiguous host memory.
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
