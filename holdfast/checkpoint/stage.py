"""Staging: a rank's assigned boxes into an arena that already is the image of its data file."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from holdfast.errors import PlanError, StorageError
from holdfast.format.image import Image

_PAGE_NBYTES = mmap.PAGESIZE


class Arena:
    """A reusable piece of memory, kept as an anonymous memory file.

    Grows to the largest image asked of it and never shrinks; `num_allocations` counts how often it
    had to. The memory is page-aligned and can be handed to another process as a descriptor.
    """

    def __init__(self) -> None:
        self._fd = -1
        self._map: mmap.mmap | None = None
        self._nbytes = 0
        self.num_allocations = 0

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self._nbytes

    @property
    def fd(self) -> int:
        """Descriptor of the memory file, -1 before the first `reserve`."""
        return self._fd

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

    def close(self) -> None:
        """Give the memory back; views must not be used afterwards."""
        if self._map is not None:
            # A view may live on in somebody's hands; the memory goes when the last one does.
            with contextlib.suppress(BufferError):
                self._map.close()
            self._map = None
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        self._nbytes = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Staging:
    """Where a rank's rows go in its arena, kept as long as the plan.

    `destinations[i]` is a view of the arena with row i's dtype and shape.
    """

    image: Image
    view: memoryview
    destinations: tuple[torch.Tensor, ...]
    starts: npt.NDArray[np.int64]
    row_nbytes: npt.NDArray[np.int64]


def prepare_staging(arena: Arena, image: Image, sources: Sequence[torch.Tensor]) -> Staging:
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
    return Staging(
        image=image,
        view=view,
        destinations=tuple(destinations),
        starts=image.starts,
        row_nbytes=nbytes,
    )


@torch.no_grad()
def stage(staging: Staging, sources: Sequence[torch.Tensor], names: Sequence[str]) -> int:
    """Copy every source into the image; returns the bytes copied.

    Shapes and dtypes are checked against the plan's; PlanError naming the key that differs.
    Cost: one `torch._foreach_copy_`, no allocation for contiguous sources on the host.
    """
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
    if sources:
        torch._foreach_copy_(list(staging.destinations), list(sources))
    return int(staging.row_nbytes.sum())


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
