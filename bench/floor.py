"""The physical floor: programs that only copy, write, sync or read the same bytes.

Files are written and read in both ways that Holdfast may take: through the page cache and past it
(direct I/O). The better one is the floor.
"""

from __future__ import annotations

import mmap
import os
from contextlib import suppress
from pathlib import Path

import numpy as np

_WRITE_NBYTES = 16 << 20
_READ_NBYTES = 1 << 20
_DIRECT_READ_NBYTES = 16 << 20
_PAGE = mmap.PAGESIZE


class FloorMemory:
    """Page-aligned memory, touched once: as fast as memory gets."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._memory = mmap.mmap(-1, max(-(-nbytes // _PAGE) * _PAGE, _PAGE))
        _fill(self._memory)

    def copy(self) -> None:
        """Memcpy of so many bytes: one half onto the other, and back."""
        half = -(-self.nbytes // 2)
        whole = np.frombuffer(self._memory, dtype=np.uint8)
        np.copyto(whole[half : 2 * half], whole[:half])
        np.copyto(whole[:half], whole[half : 2 * half])

    def write(self, path: Path, *, direct: bool) -> None:
        """A new file of these bytes, blocks allocated first, on the device when this returns."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | (os.O_DIRECT if direct else 0)
        fd = os.open(path, flags, 0o600)
        try:
            view = memoryview(self._memory)
            os.posix_fallocate(fd, 0, max(self.nbytes, 1))
            size = len(view) if direct else self.nbytes
            for start in range(0, size, _WRITE_NBYTES):
                piece = view[start : min(start + _WRITE_NBYTES, size)]
                if os.pwrite(fd, piece, start) != len(piece):
                    raise OSError(f"{path}: short write")
            os.fdatasync(fd)
        finally:
            os.close(fd)

    def read(self, path: Path, *, direct: bool) -> None:
        """Read this many bytes of a file into reused memory."""
        fd = os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
        step = _DIRECT_READ_NBYTES if direct else _READ_NBYTES
        try:
            view = memoryview(self._memory)
            for start in range(0, self.nbytes, step):
                stop = min(start + step, len(view) if direct else self.nbytes)
                if os.preadv(fd, [view[start:stop]], start) < min(stop, self.nbytes) - start:
                    raise OSError(f"{path}: short read")
        finally:
            os.close(fd)


def write_file(path: Path, nbytes: int) -> None:
    """A file of so many bytes for `FloorMemory.read`; on the device when this returns."""
    piece = bytearray(_WRITE_NBYTES)
    _fill(piece)
    with path.open("wb") as file:
        for start in range(0, nbytes, len(piece)):
            file.write(memoryview(piece)[: nbytes - start])
        file.flush()
        os.fsync(file.fileno())


def _fill(memory: mmap.mmap | bytearray) -> None:
    """Bytes that no file system or memory shortens."""
    pattern = np.random.default_rng(0).integers(0, 256, _READ_NBYTES, dtype=np.uint8)
    array = np.frombuffer(memory, dtype=np.uint8)
    for start in range(0, len(array), len(pattern)):
        piece = array[start : start + len(pattern)]
        piece[:] = pattern[: len(piece)]


def has_direct_io(directory: Path) -> bool:
    """Return True if the file system reads and writes past the page cache."""
    path = directory / "direct-probe"
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        os.close(fd)
        return True
    except OSError:
        return False
    finally:
        with suppress(FileNotFoundError):
            path.unlink()


def drop_pages(directory: Path) -> None:
    """Let the kernel drop the pages of every file below a directory from its page cache.

    Each file is written back first, because only clean pages are dropped (`posix_fadvise`,
    DONTNEED). What the device or the host of a virtual machine keeps is not reached.
    """
    for path in directory.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            try:
                os.fsync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)
