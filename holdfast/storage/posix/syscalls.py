"""Two system calls that Python does not wrap; each can answer that it is missing here."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable
from typing import cast

_RENAME_NOREPLACE = 1
_RENAME_EXCHANGE = 2
_ABSENT = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTTY)


def rename_noreplace(src: str, dst: str, *, src_dir_fd: int, dst_dir_fd: int) -> bool:
    """Rename unless `dst` exists (FileExistsError). False: the kernel or file system cannot."""
    return _rename(src, dst, src_dir_fd, dst_dir_fd, _RENAME_NOREPLACE)


def rename_exchange(src: str, dst: str, *, src_dir_fd: int, dst_dir_fd: int) -> bool:
    """Exchange two names at once. False: the kernel or file system cannot."""
    return _rename(src, dst, src_dir_fd, dst_dir_fd, _RENAME_EXCHANGE)


def _rename(src: str, dst: str, src_dir_fd: int, dst_dir_fd: int, flag: int) -> bool:
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
