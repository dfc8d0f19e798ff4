"""Two system calls that Python does not wrap; each can answer that it is missing here."""

from __future__ import annotations

import ctypes
import errno
import os

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
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is None:
        return False
    call.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint]
    call.restype = ctypes.c_int
    if call(src_dir_fd, os.fsencode(src), dst_dir_fd, os.fsencode(dst), flag) == 0:
        return True
    code = ctypes.get_errno()
    if code in _ABSENT:
        return False
    raise OSError(code, os.strerror(code))


def allocate(fd: int, nbytes: int) -> bool:
    """Reserve the blocks of a file, so that a full disk shows now. False: it cannot be done.

    glibc's posix_fallocate is not used: where the file system cannot reserve, it writes zeros.
    """
    call = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)
    if call is None:
        return False
    call.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    call.restype = ctypes.c_int
    while call(fd, 0, 0, nbytes) != 0:
        code = ctypes.get_errno()
        if code == errno.EINTR:
            continue
        if code in _ABSENT:
            return False
        raise OSError(code, os.strerror(code))
    return True
