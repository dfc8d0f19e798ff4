"""The physical floor: programs that do nothing but move, write, sync, read or hash bytes."""

from __future__ import annotations

import mmap
import os
from contextlib import suppress
from pathlib import Path

import numpy as np
import xxhash

_WRITE_NBYTES = 16 << 20
_READ_NBYTES = 1 << 20
_PAGE = mmap.PAGESIZE


class FloorMemory:
    """Two pieces of page-aligned memory, touched once: as fast as memory gets."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        rounded = max(-(-nbytes // _PAGE) * _PAGE, _PAGE)
        self._maps = [mmap.mmap(-1, rounded) for _ in range(2)]
        self._source, self._target = (
            np.frombuffer(each, dtype=np.uint8, count=rounded) for each in self._maps
        )
        pattern = np.random.default_rng(0).integers(0, 256, _READ_NBYTES, dtype=np.uint8)
        for start in range(0, rounded, len(pattern)):
            piece = self._source[start : start + len(pattern)]
            piece[:] = pattern[: len(piece)]
        self._target[:] = 0

    def copy(self) -> None:
        """One memcpy into reused memory."""
        np.copyto(self._target[: self.nbytes], self._source[: self.nbytes])

    def write(self, path: Path, *, direct: bool) -> None:
        """A new file of these bytes, blocks allocated first, on the device when this returns."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | (os.O_DIRECT if direct else 0)
        fd = os.open(path, flags, 0o600)
        try:
            view = memoryview(self._maps[0])
            os.posix_fallocate(fd, 0, max(self.nbytes, 1))
            size = len(view) if direct else self.nbytes
            for start in range(0, size, _WRITE_NBYTES):
                piece = view[start : min(start + _WRITE_NBYTES, size)]
                if os.pwrite(fd, piece, start) != len(piece):
                    raise OSError(f"{path}: short write")
            os.fdatasync(fd)
        finally:
            os.close(fd)

    def read_and_hash(self, path: Path) -> None:
        """Read this many bytes into reused memory and hash each MiB while it is in the cache."""
        fd = os.open(path, os.O_RDONLY)
        try:
            view = memoryview(self._maps[1])
            for start in range(0, self.nbytes, _READ_NBYTES):
                piece = view[start : min(start + _READ_NBYTES, self.nbytes)]
                if os.preadv(fd, [piece], start) != len(piece):
                    raise OSError(f"{path}: short read")
                xxhash.xxh3_64_intdigest(piece)
        finally:
            os.close(fd)


def has_direct_writes(directory: Path) -> bool:
    """Whether the file system supports writes past the page cache."""
    path = directory / "direct-probe"
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o600)
        os.close(fd)
        return True
    except OSError:
        return False
    finally:
        with suppress(FileNotFoundError):
            path.unlink()
