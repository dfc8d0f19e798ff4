"""Memory that a rank stages a save in, shared with its writer process as a file descriptor."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import os
from typing import Protocol

from holdfast.errors import StorageError


class PageLock(Protocol):
    """Keeps host memory from being moved, so that a device can copy into it by itself."""

    def lock(self, address: int, nbytes: int) -> str:
        """Page-lock memory; empty if that was done, else why it was refused."""

    def unlock(self, address: int) -> None:
        """Undo `lock`; needed before the memory is unmapped."""


class SharedMemory:
    """A reusable piece of memory, kept as an anonymous memory file.

    Grows to the largest image it is reserved for and never shrinks. The memory is page-aligned and
    can be sent to another process as a descriptor.

    Args:
        nbytes: held now.
        fd: descriptor of the memory file, -1 before the first `reserve`.
        token: another object for each allocation; who has mapped the memory compares by it.
        num_allocations: how often memory had to be allocated.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self.fd = -1
        self.token = object()
        self.num_allocations = 0
        self._map: mmap.mmap | None = None
        self._pages: PageLock | None = None
        self._is_refused = False

    @property
    def is_locked(self) -> bool:
        """Whether the memory is page-locked."""
        return self._pages is not None

    def reserve(self, nbytes: int) -> memoryview:
        """A writable view of the first `nbytes` bytes; StorageError when memory is short."""
        if self._map is None or nbytes > self.nbytes:
            self.close()
            self.token = object()
            rounded = max(-(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE, mmap.PAGESIZE)
            try:
                self.fd = os.memfd_create("holdfast-staging", os.MFD_CLOEXEC)
                os.ftruncate(self.fd, rounded)
                self._map = mmap.mmap(self.fd, rounded)
            except (OSError, ValueError) as error:
                self.close()
                raise StorageError(
                    f"no memory for a staging buffer of {rounded} bytes: {error}"
                ) from error
            self.nbytes = rounded
            self.num_allocations += 1
        return memoryview(self._map)[:nbytes]

    def lock(self, pages: PageLock) -> None:
        """Page-lock the memory held, for as long as it is; nothing where it is already.

        A refusal is logged once as a warning, and saves go on: copies from a device are then slower
        and hold the caller for longer.
        """
        if self._map is None or self._pages is not None or self._is_refused:
            return
        why = pages.lock(self._address(self._map), self.nbytes)
        if why:
            self._is_refused = True
            logging.getLogger("holdfast").warning(
                "staging memory of %d bytes could not be page-locked: %s; saves from the device "
                "stay right but take longer (the limit may be `ulimit -l` or the container's)",
                self.nbytes,
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
            # The memory goes when the last view of it does.
            with contextlib.suppress(BufferError):
                self._map.close()
            self._map = None
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        self.nbytes = 0

    @staticmethod
    def _address(mapped: mmap.mmap) -> int:
        return ctypes.addressof(ctypes.c_char.from_buffer(mapped))
