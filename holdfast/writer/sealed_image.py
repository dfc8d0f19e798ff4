"""A sealed image: a data file's bytes in memory that the kernel lets nobody change any more."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import sys
from collections.abc import Sequence

from holdfast.arrays.memory import SMALL_NBYTES, memory_at
from holdfast.errors import StorageError
from holdfast.writer.memory import HUGE_NBYTES, collapse_pages

# By number: `fcntl` has the names on Linux only.
_ADD_SEALS, _GET_SEALS = 1033, 1034
_SEALS = 0b1111  # F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_GROW, F_SEAL_WRITE
_FAILED = ctypes.c_void_p(-1).value
_libc = ctypes.CDLL(None, use_errno=True)
_mmap, _munmap = _libc.mmap, _libc.munmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = [
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
]  # fmt: skip
_munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_COPY_NBYTES = 512 << 10
"""Bytes of one memcpy. From the size of a core's second cache on, glibc copies by another loop on
AMD's processors, which reads each line of the target before it writes it."""


def can_seal() -> bool:
    """Return True if the system has memory files that can be sealed, and sockets without files."""
    return sys.platform == "linux"


def seal_memory(fd: int) -> bool:
    """Seal a memory file: neither its bytes nor its size can change any more.

    Args:
        fd: A descriptor that may write.

    Returns:
        False while some process can still write to it: a mapping of it is writable, or a device
        copies to it. That it succeeds proves that there is none, and there will be none.

    Raises:
        OSError: It cannot be sealed at all.
    """
    try:
        fcntl.fcntl(fd, _ADD_SEALS, _SEALS)
    except OSError as error:
        if error.errno == errno.EBUSY:
            return False
        if not is_sealed(fd):
            raise
    return True


def is_sealed(fd: int) -> bool:
    """Return True if a descriptor is that of a sealed memory file."""
    try:
        return fcntl.fcntl(fd, _GET_SEALS) & _SEALS == _SEALS
    except OSError:  # not a memory file
        return False


def open_for_reading(fd: int) -> int:
    """Return a new descriptor of the same memory that can only read; OSError if that fails.

    A shared mapping made by it is not writable and cannot become so, in the kernel's eyes too:
    one made by a descriptor that may write counts as writable, whatever its protection.
    """
    return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)


class SealedImage:
    """A mapped sealed image, read as a data file; see `Source`.

    Any number of threads may read. It must not be closed while one does.

    Args:
        fd: A descriptor for reading; it stays the caller's.
        nbytes: Of the data file; the memory may be larger.
        place: Its name, for messages.

    Raises:
        StorageError: It is not sealed, or shorter, or cannot be mapped.

    Cost: no memory of its own; a page fault for each page that is read, which is 2 MiB large if
    `collapse` was called on the image in any process, else 4 KiB.
    """

    def __init__(self, fd: int, *, nbytes: int, place: str) -> None:
        self._address = self._room = self._room_nbytes = 0
        self._nbytes = nbytes
        self._place = place
        # Without the seals against shrinking, reading a mapping could end this process (SIGBUS).
        if not is_sealed(fd):
            raise StorageError(f"{place}: the memory is not sealed")
        if os.fstat(fd).st_size < nbytes:
            raise StorageError(f"{place}: the memory is shorter than the file's {nbytes} bytes")
        try:
            self._map(fd)
        except OSError as error:
            raise StorageError(f"{place}: the memory cannot be mapped: {error}") from error

    @property
    def nbytes(self) -> int:
        """Size of the data file."""
        return self._nbytes

    def readinto(self, buffer: memoryview, *, start: int) -> None:
        """See `Source.readinto`: a memcpy for each 512 KiB, without the interpreter's lock."""
        nbytes, source = buffer.nbytes, self._address + start
        if not self._address or start < 0 or start + nbytes > self._nbytes:
            raise StorageError(f"{self._place}: no {nbytes} bytes at byte {start}")
        if nbytes:
            target = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
            for at in range(0, nbytes, _COPY_NBYTES):
                ctypes.memmove(target + at, source + at, min(nbytes - at, _COPY_NBYTES))

    def readinto_views(self, views: Sequence[memoryview], *, start: int) -> None:
        """See `read_views`: a memcpy for each, or for each 512 KiB of it."""
        total = sum(map(len, views))
        if not self._address or start < 0 or start + total > self._nbytes:
            raise StorageError(f"{self._place}: no {total} bytes at byte {start}")
        for view in views:
            nbytes = len(view)
            if nbytes > SMALL_NBYTES:
                self.readinto(view, start=start)
            else:
                view[:] = memory_at(self._address + start, nbytes)
            start += nbytes

    def collapse(self) -> None:
        """Put the bytes into huge pages, so that who maps the image later reads it faster.

        Cost: one copy; 2 MiB of memory at a time. Does nothing where the kernel declines.
        """
        collapse_pages(self._address, self._address + self._nbytes)

    def close(self) -> None:
        """See `Source.close`."""
        room, self._room, self._address = self._room, 0, 0
        if room:
            _munmap(room, self._room_nbytes)

    def _map(self, fd: int) -> None:
        """Map the image at a multiple of the size of a huge page, without which none is used.

        First an unused range that is large enough to have such a place, then the image there.
        """
        if not self._nbytes:
            return
        reserve = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        room_nbytes = -(-self._nbytes // mmap.PAGESIZE) * mmap.PAGESIZE + HUGE_NBYTES
        room = _mmap(None, room_nbytes, 0, reserve, -1, 0)
        if room == _FAILED:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        self._room, self._room_nbytes = room, room_nbytes
        place = -(-room // HUGE_NBYTES) * HUGE_NBYTES
        flags = mmap.MAP_SHARED | 0x10  # MAP_FIXED
        if _mmap(place, self._nbytes, mmap.PROT_READ, flags, fd, 0) == _FAILED:
            code = ctypes.get_errno()
            self.close()
            raise OSError(code, os.strerror(code))
        self._address = place
