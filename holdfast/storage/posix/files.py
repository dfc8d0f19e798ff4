"""Open files of PosixStorage, and the system calls that Python does not wrap.

Reads and writes are positioned, and always whole. A call that the kernel or file system may lack
returns whether it was made.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from holdfast.errors import StorageError
from holdfast.storage.posix.os_errors import storage_error

_DIRECT_ALIGN = 4096
_DIRECT_NBYTES = 1 << 20
"""Smaller writes are not worth going past the page cache."""
_DIRECT_REFUSED = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOENT, errno.EPERM)
_RENAME_NOREPLACE = 1
_RENAME_EXCHANGE = 2
_ABSENT = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTTY)
_DIR_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_MAX_HELD_DIRS = 8
_MAX_CALL_NBYTES = 1 << 30  # one call moves at most 0x7ffff000 bytes on Linux
_Observe = Callable[[str, str, int, int], None]


def read_full(fd: int, buffer: memoryview, start: int, place: str) -> None:
    """Fill a byte view from offset `start`; StorageError when the file ends before that."""
    done = 0
    while done < len(buffer):
        part = buffer[done : done + _MAX_CALL_NBYTES]
        count = os.preadv(fd, [part], start + done)
        if count == 0:
            raise StorageError(
                f"{place}: the file ends at byte {start + done}, but {len(buffer)} bytes at offset "
                f"{start} are needed: it is truncated"
            )
        done += count


def write_full(fd: int, buffer: memoryview, offset: int) -> None:
    """Write all of a byte view at `offset`, however many calls that takes; OSError on failure."""
    done = 0
    while done < len(buffer):
        count = os.pwrite(fd, buffer[done : done + _MAX_CALL_NBYTES], offset + done)
        if count <= 0:
            raise OSError(errno.EIO, "the system wrote nothing and gave no reason")
        done += count


def rename_noreplace(src: str, dst: str, *, src_dir_fd: int, dst_dir_fd: int) -> bool:
    """Rename unless `dst` exists (FileExistsError). False: the kernel or file system cannot."""
    return _rename(src, dst, src_dir_fd, dst_dir_fd, _RENAME_NOREPLACE)


def rename_exchange(src: str, dst: str, *, src_dir_fd: int, dst_dir_fd: int) -> bool:
    """Exchange two names at once. False: the kernel or file system cannot."""
    return _rename(src, dst, src_dir_fd, dst_dir_fd, _RENAME_EXCHANGE)


def _rename(src: str, dst: str, src_dir_fd: int, dst_dir_fd: int, flag: int) -> bool:
    """Call renameat2. False: the kernel or file system cannot."""
    path = ctypes.c_char_p
    call = _libc_function("renameat2", ctypes.c_int, path, ctypes.c_int, path, ctypes.c_uint)
    if call is None:
        return False
    if call(src_dir_fd, os.fsencode(src), dst_dir_fd, os.fsencode(dst), flag) == 0:
        return True
    return _refused(ctypes.get_errno())


def allocate(fd: int, nbytes: int) -> bool:
    """Reserve the blocks of a file, so that a full disk shows now. False: it cannot be done.

    glibc's posix_fallocate is not used: where the file system cannot reserve, it writes zeros.
    """
    offset = ctypes.c_int64
    call = _libc_function("fallocate", ctypes.c_int, ctypes.c_int, offset, offset)
    if call is None:
        return False
    while call(fd, 0, 0, nbytes) != 0:
        code = ctypes.get_errno()
        if code != errno.EINTR:
            return _refused(code)
    return True


def _libc_function(name: str, *argtypes: type) -> Callable[..., int] | None:
    """A function of the C library that returns an int and sets errno; None where there is none."""
    function = getattr(ctypes.CDLL(None, use_errno=True), name, None)
    if function is not None:
        function.argtypes = argtypes
        function.restype = ctypes.c_int
    return cast("Callable[..., int] | None", function)


def _refused(code: int) -> bool:
    """False when the call is not supported here; OSError for any other failure."""
    if code in _ABSENT:
        return False
    raise OSError(code, os.strerror(code))


@dataclass(frozen=True, slots=True)
class HeldDirs:
    """Directories below a root that one thread keeps open between calls.

    Each name on the way is looked at before every use, without following it, and what is held is
    used only where it still is what has that name. So a use has the result that opening name by
    name would have, and costs a look instead of an open and a close.
    """

    root: Path
    _held: dict[tuple[str, ...], tuple[int, os.stat_result]] = field(default_factory=dict)
    _replaced: list[int] = field(default_factory=list)

    @contextmanager
    def opened(self, names: tuple[str, ...]) -> Iterator[int]:
        """The directory, open for the body at least."""
        fd, is_held = self._get(names)
        try:
            yield fd
        finally:
            if not is_held:
                os.close(fd)

    def _get(self, names: tuple[str, ...]) -> tuple[int, bool]:
        """The open directory, and whether it is held: otherwise the caller closes it."""
        if not names:
            return self._keep(names, os.stat(self.root), self.root, None)
        with self.opened(names[:-1]) as above:
            status = os.stat(names[-1], dir_fd=above, follow_symlinks=False)
            return self._keep(names, status, names[-1], above)

    def _keep(
        self, names: tuple[str, ...], status: os.stat_result, path: str | Path, above: int | None
    ) -> tuple[int, bool]:
        """What is held under these names if it has this status, else what has the name now."""
        held = self._held.get(names)
        if held is not None:
            if os.path.samestat(held[1], status):
                return held[0], True
            # Closed with the others: it may be in use in this call.
            self._replaced.append(self._held.pop(names)[0])
        fd = os.open(path, _DIR_FLAGS | (os.O_NOFOLLOW if names else 0), dir_fd=above)
        if len(self._held) + len(self._replaced) >= _MAX_HELD_DIRS:
            return fd, False
        self._held[names] = fd, os.fstat(fd)
        return fd, True

    def close(self) -> None:
        """Close them all."""
        for fd in [*(fd for fd, _ in self._held.values()), *self._replaced]:
            os.close(fd)
        self._held.clear()
        self._replaced.clear()


class PosixSource:
    """An open regular file; see `Source`. Reads do not move a position, so threads may share it."""

    def __init__(self, fd: int, *, path: str, place: str, observe: _Observe) -> None:
        self._fd = fd
        self._path = path
        self._place = place
        self._observe = observe
        self._nbytes = os.fstat(fd).st_size

    @property
    def nbytes(self) -> int:
        """Size of the file when it was opened."""
        return self._nbytes

    def readinto(self, buffer: memoryview, *, start: int) -> None:
        """See `Source.readinto`: one system call in the common case."""
        self._observe("read", self._path, start, buffer.nbytes)
        try:
            read_full(self._fd, buffer.cast("B"), start, self._place)
        except OSError as error:
            raise storage_error(error, action="read", place=Path(self._place)) from error

    def close(self) -> None:
        """See `Source.close`."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)


class PosixSink:
    """A file of known size being written; see `Sink`.

    Large aligned parts go past the page cache where the file system allows that (tried, never
    assumed), the rest through it.
    """

    def __init__(self, fd: int, *, path: str, place: Path, nbytes: int, observe: _Observe) -> None:
        self._fd = fd
        self._path = path
        self._place = place
        self._nbytes = nbytes
        self._observe = observe
        self._direct_fd = -1
        self._direct = True

    @property
    def alignment(self) -> int:
        """What direct writes ask of offsets, lengths and addresses."""
        return _DIRECT_ALIGN

    def reserve(self) -> None:
        """Give the file its size, and its blocks where that is possible, so ENOSPC shows early."""
        if self._nbytes and not allocate(self._fd, self._nbytes):
            os.ftruncate(self._fd, self._nbytes)

    def write_at(self, offset: int, buffer: memoryview) -> None:
        """See `Sink.write_at`."""
        if offset < 0 or offset + buffer.nbytes > self._nbytes:
            raise StorageError(
                f"{self._place}: {buffer.nbytes} bytes at offset {offset} do not fit a file "
                f"declared with {self._nbytes} bytes"
            )
        self._observe("write_at", self._path, offset, buffer.nbytes)
        view = buffer.cast("B")
        try:
            done = self._write_direct(offset, view)
            write_full(self._fd, view[done:], offset + done)
        except OSError as error:
            raise storage_error(error, action="write", place=self._place) from error

    def _write_direct(self, offset: int, view: memoryview) -> int:
        """Write what of `view` may go directly; the bytes that are done, 0 where none may."""
        nbytes = len(view) // _DIRECT_ALIGN * _DIRECT_ALIGN
        if not self._direct or nbytes < _DIRECT_NBYTES or offset % _DIRECT_ALIGN or view.readonly:
            return 0
        if ctypes.addressof(ctypes.c_char.from_buffer(view)) % _DIRECT_ALIGN:
            return 0
        try:
            if self._direct_fd < 0:
                flags = os.O_WRONLY | os.O_DIRECT | os.O_CLOEXEC
                self._direct_fd = os.open(f"/proc/self/fd/{self._fd}", flags)
            write_full(self._direct_fd, view[:nbytes], offset)
        except OSError as error:
            if error.errno not in _DIRECT_REFUSED:
                raise
            self._direct = False
            return 0
        return nbytes

    def sync(self) -> None:
        """See `Sink.sync`; also proves that the file has the stated size."""
        self._observe("sync", self._path, 0, 0)
        try:
            os.fdatasync(self._fd)
            nbytes = os.fstat(self._fd).st_size
        except OSError as error:
            raise storage_error(error, action="sync", place=self._place) from error
        if nbytes != self._nbytes:
            raise StorageError(
                f"{self._place} has {nbytes} bytes after writing, not {self._nbytes}: "
                "another process writes the same file, or the storage lost a part"
            )

    def close(self) -> None:
        """Close the file; on some network storage this is where a failed write shows."""
        if self._direct_fd >= 0:
            fd, self._direct_fd = self._direct_fd, -1
            os.close(fd)
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)


def is_confirmed(
    only_if: Callable[[str], bool], place: str, *, fd: int, aside: str, name: str
) -> bool:
    """Whether to remove what is at `place`; if not, it gets its name back where that is free."""
    is_confirmed = False
    try:
        is_confirmed = only_if(place)
    finally:
        if not is_confirmed:
            with suppress(FileExistsError, NotADirectoryError):
                if not rename_noreplace(aside, name, src_dir_fd=fd, dst_dir_fd=fd):
                    os.rename(aside, name, src_dir_fd=fd, dst_dir_fd=fd)
    return is_confirmed
