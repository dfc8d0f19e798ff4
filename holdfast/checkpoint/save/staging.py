"""Staging: a rank's assigned boxes into an arena that already is the image of its data file."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import os
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from holdfast.checkpoint.save.copier import Copier, Copiers, Mark, PageLock
from holdfast.errors import PlanError, StorageError
from holdfast.format.image import Image

_PAGE_NBYTES = mmap.PAGESIZE
SEGMENT_NBYTES = 16 << 20
"""What is staged before the writer is told, where both go on side by side."""


class Arena:
    """A reusable piece of memory, kept as an anonymous memory file.

    Grows to the largest image asked of it and never shrinks; `num_allocations` counts how often it
    had to. The memory is page-aligned and can be handed to another process as a descriptor.
    """

    def __init__(self) -> None:
        self._fd = -1
        self._map: mmap.mmap | None = None
        self._nbytes = 0
        self._pages: PageLock | None = None
        self._refused = False
        self.num_allocations = 0

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self._nbytes

    @property
    def fd(self) -> int:
        """Descriptor of the memory file, -1 before the first `reserve`."""
        return self._fd

    @property
    def is_locked(self) -> bool:
        """Whether the memory is page-locked."""
        return self._pages is not None

    def reserve(self, nbytes: int) -> memoryview:
        """A writable view of the first `nbytes` bytes; StorageError when memory is short."""
        if self._map is None or nbytes > self._nbytes:
            self.close()
            rounded = max(-(-nbytes // _PAGE_NBYTES) * _PAGE_NBYTES, _PAGE_NBYTES)
            try:
                self._fd = os.memfd_create("holdfast-arena", os.MFD_CLOEXEC)
                os.ftruncate(self._fd, rounded)
                self._map = mmap.mmap(self._fd, rounded)
            except (OSError, ValueError) as error:
                self.close()
                raise StorageError(
                    f"no memory for an arena of {rounded} bytes to stage a save in: {error}"
                ) from error
            self._nbytes = rounded
            self.num_allocations += 1
        return memoryview(self._map)[:nbytes]

    def lock(self, pages: PageLock) -> None:
        """Page-lock the memory held, for as long as it is; nothing where it is already.

        A refusal is logged once as a warning, and saves go on: copies from a device are then slower
        and hold the caller for longer.
        """
        if self._map is None or self._pages is not None or self._refused:
            return
        why = pages.lock(self._address(self._map), self._nbytes)
        if why:
            self._refused = True
            logging.getLogger("holdfast").warning(
                "staging memory of %d bytes could not be page-locked: %s; saves from the device "
                "stay right but take longer (the limit may be `ulimit -l` or the container's)",
                self._nbytes,
                why,
            )
        else:
            self._pages = pages

    def close(self) -> None:
        """Give the memory back; views must not be used afterwards."""
        if self._map is not None:
            if self._pages is not None:
                self._pages.unlock(self._address(self._map))
                self._pages = None
            # A view may live on in somebody's hands; the memory goes when the last one does.
            with contextlib.suppress(BufferError):
                self._map.close()
            self._map = None
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        self._nbytes = 0

    @staticmethod
    def _address(mapped: mmap.mmap) -> int:
        return ctypes.addressof(ctypes.c_char.from_buffer(mapped))


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Consecutive rows of an image: `rows` in plan numbering, and the byte where they end."""

    rows: tuple[int, ...]
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Staging:
    """Where a rank's rows go in its arena, kept as long as the plan.

    `destinations[i]` is a view of the arena with row i's dtype and shape. `segments`: all rows in
    the order of the image, cut where a part of about `SEGMENT_NBYTES` is full; a row is never cut.
    `whole`: all of them as one.
    """

    image: Image
    view: memoryview
    destinations: tuple[torch.Tensor, ...]
    starts: npt.NDArray[np.int64]
    row_nbytes: npt.NDArray[np.int64]
    segments: tuple[Segment, ...]
    whole: Segment

    def row_digest(self, row: int) -> int:
        """XXH3-64 of a staged row's bytes, equal to `content_digest` of its source."""
        start = int(self.starts[row])
        return xxhash.xxh3_64_intdigest(self.view[start : start + int(self.row_nbytes[row])])


def prepare_staging(
    arena: Arena,
    image: Image,
    sources: Sequence[torch.Tensor],
    *,
    segment_nbytes: int = SEGMENT_NBYTES,
) -> Staging:
    """Lay the image into the arena: header written, one destination view per source.

    Cost: allocates the arena if it is too small, touches only the header.
    """
    view = arena.reserve(image.nbytes)
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
    segments = _segments(image.starts, nbytes, image.nbytes, segment_nbytes)
    return Staging(
        image=image,
        view=view,
        destinations=tuple(destinations),
        starts=image.starts,
        row_nbytes=nbytes,
        segments=segments,
        whole=Segment(
            rows=tuple(row for segment in segments for row in segment.rows), end=image.nbytes
        ),
    )


def _segments(
    starts: npt.NDArray[np.int64], nbytes: npt.NDArray[np.int64], end: int, limit: int
) -> tuple[Segment, ...]:
    """All rows in the order of their places, in runs of at least `limit` bytes but for the last."""
    order = np.lexsort((nbytes, starts))
    ends = (starts + nbytes)[order]
    found, first = [], 0
    begin = int(starts[order[0]]) if len(order) else end
    while first < len(order):
        stop = min(int(np.searchsorted(ends, begin + limit)) + 1, len(order))
        begin = int(ends[stop - 1]) if stop < len(order) else end
        found.append(Segment(rows=tuple(order[first:stop].tolist()), end=begin))
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


def stage_by_segments(
    staging: Staging, sources: Sequence[torch.Tensor], copiers: Copiers
) -> Iterator[int]:
    """As `stage`, without its check, telling after each segment to which byte the image is there.

    The copies of every segment are enqueued before the first one that is not in place is waited
    for. The sources may be changed only when the iterator has ended.
    """
    return _copied(staging, sources, staging.segments, copiers)


def _copied(
    staging: Staging,
    sources: Sequence[torch.Tensor],
    segments: Sequence[Segment],
    copiers: Copiers,
) -> Iterator[int]:
    used = {device: copiers.of(device) for device in devices_of(sources)}
    under_way: deque[tuple[int, list[Mark]]] = deque()
    try:
        for copier in used.values():
            copier.begin()
        for segment in segments:
            under_way.append((segment.end, _enqueue(staging, sources, segment, used)))
            while under_way and all(mark.query() for mark in under_way[0][1]):
                yield under_way.popleft()[0]
        for end, marks in under_way:
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
    segment: Segment,
    copiers: dict[torch.device, Copier],
) -> list[Mark]:
    """Enqueue one segment; a mark for each device that has a part in it."""
    by_device: dict[torch.device, list[int]] = {}
    if len(copiers) == 1:
        by_device = {device: list(segment.rows) for device in copiers}
    else:
        for row in segment.rows:
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
