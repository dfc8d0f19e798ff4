"""Memory that a rank stages a save in, shared with its writer process as a file descriptor."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import os
from collections.abc import Callable

from holdfast.errors import StorageError


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
        self._unlock: Callable[[int], None] | None = None
        self._is_refused = False

    @property
    def is_locked(self) -> bool:
        """Whether the memory is page-locked."""
        return self._unlock is not None

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

    def lock(self, lock: Callable[[int, int], str], unlock: Callable[[int], None]) -> None:
        """Page-lock the memory held, for as long as it is; nothing where it is already.

        A device can then copy into it by itself. A refusal is logged once as a warning, and saves
        go on: copies from a device are then slower and hold the caller for longer.

        Args:
            lock: called with address and size in bytes; returns why it refuses, or nothing.
            unlock: called with the address before the memory is unmapped.
        """
        if self._map is None or self._unlock is not None or self._is_refused:
            return
        why = lock(self._address(self._map), self.nbytes)
        if why:
            self._is_refused = True
            logging.getLogger("holdfast").warning(
                "staging memory of %d bytes could not be page-locked: %s; saves from the device "
                "stay right but take longer (the limit may be `ulimit -l` or the container's)",
                self.nbytes,
                why,
            )
        else:
            self._unlock = unlock

    def close(self) -> None:
        """Give the memory back; views must not be used afterwards."""
        if self._map is not None:
            if self._unlock is not None:
                self._unlock(self._address(self._map))
                self._unlock = None
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
        """Where mapped memory begins."""
        return ctypes.addressof(ctypes.c_char.from_buffer(mapped))
