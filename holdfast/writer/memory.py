"""Memory in which a rank stages a save, mapped by its writer process too."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import mmap
import os
import weakref
from collections.abc import Callable

from holdfast.errors import StorageError

HUGE_NBYTES = 2 << 20
"""Of a huge page on x86 and on most of ARM; elsewhere a request for them is refused."""
_COLLAPSE = 25  # MADV_COLLAPSE, Linux 6.1


class SharedMemory:
    """A reusable piece of memory, kept as an anonymous memory file.

    It grows to the largest image that it is reserved for and never shrinks. The memory is
    page-aligned, as direct writes need it, and can be sent to another process as a descriptor.

    Attributes:
        nbytes: Size held now.
        fd: Descriptor of the memory file; -1 before the first `reserve`.
        token: A new object for each allocation. A process that has mapped the memory compares it.
        num_allocations: How often memory was allocated.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self.fd = -1
        self.token = object()
        self.num_allocations = 0
        self._map: mmap.mmap | None = None
        self._close_fd: weakref.finalize[[int], SharedMemory] | None = None
        self._unlock: Callable[[int], None] | None = None
        self._is_refused = False

    @property
    def is_locked(self) -> bool:
        """True if the memory is page-locked."""
        return self._unlock is not None

    def reserve(self, nbytes: int) -> memoryview:
        """Return a writable view of the first `nbytes` bytes; StorageError if memory is short."""
        if self._map is None or nbytes > self.nbytes:
            self.close()
            self.token = object()
            rounded = max(-(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE, mmap.PAGESIZE)
            # A memory file and not shared memory with a name: it goes with its last descriptor, so
            # that a killed process leaves nothing behind.
            try:
                flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
                self.fd = os.memfd_create("holdfast-staging", flags)
                # A checkpointer that is dropped without close() gives its memory back, too.
                self._close_fd = weakref.finalize(self, os.close, self.fd)
                self._close_fd.atexit = False
                os.ftruncate(self.fd, rounded)
                # A forked child inherits the mapping, which keeps others from sealing the memory
                # while it lives. It must not be kept from it (MADV_DONTFORK): when the child frees
                # this object, it would unmap whatever lies at that address by then.
                self._map = mmap.mmap(self.fd, rounded)
            except (OSError, ValueError) as error:
                self.close()
                # Memory files have the size limit of all files, too.
                is_limit = isinstance(error, OSError) and error.errno == errno.EFBIG
                advice = "raise `ulimit -f`" if is_limit else "free memory"
                raise StorageError(
                    f"a staging buffer of {rounded} bytes cannot be allocated: {error}; {advice}, "
                    f"or spread the state over more ranks"
                ) from error
            self.nbytes = rounded
            self.num_allocations += 1
        return memoryview(self._map)[:nbytes]

    def lock(self, lock: Callable[[int, int], str], unlock: Callable[[int], None]) -> None:
        """Page-lock the memory until it is freed; does nothing if it is locked already.

        A device can then copy into it by itself. A refusal is logged once as a warning and saves
        continue: copies from a device are then slower and block the caller longer.

        Args:
            lock: Called with address and size in bytes; returns why it refuses, or "".
            unlock: Called with the address before the memory is unmapped.
        """
        if self._map is None or self._unlock is not None or self._is_refused:
            return
        why = lock(self._address(self._map), self.nbytes)
        if why:
            self._is_refused = True
            logging.getLogger("holdfast").warning(
                "staging memory of %d bytes cannot be page-locked: %s; saves from the device "
                "remain correct but take longer; the limit may be `ulimit -l` or the container's",
                self.nbytes,
                why,
            )
        else:
            self._unlock = unlock

    def close(self) -> None:
        """Free the memory; its views must not be used afterwards."""
        if self._map is not None:
            if self._unlock is not None:
                # Before the unmapping: the driver keeps the address, which another mapping may get.
                self._unlock(self._address(self._map))
                self._unlock = None
            # If views exist, the memory is unmapped with the last of them.
            with contextlib.suppress(BufferError):
                self._map.close()
            self._map = None
        if self._close_fd is not None:
            self._close_fd()
            self._close_fd = None
            self.fd = -1
        self.nbytes = 0

    @staticmethod
    def _address(mapped: mmap.mmap) -> int:
        """Return the address of mapped memory, which `mmap` itself does not show."""
        return ctypes.addressof(ctypes.c_char.from_buffer(mapped))


def collapse_pages(start: int, stop: int) -> None:
    """Put the whole huge pages between two addresses into huge pages, where the kernel agrees.

    Cost: one copy of what is not in huge pages yet; 2 MiB of memory at a time.
    """
    first, last = -(-start // HUGE_NBYTES) * HUGE_NBYTES, stop // HUGE_NBYTES * HUGE_NBYTES
    if first < last:
        libc = ctypes.CDLL(None)
        libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        libc.madvise(first, last - first, _COLLAPSE)
