"""Turning an OSError into a StorageError that says what to do."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from holdfast.errors import StorageError


def storage_error(error: OSError, *, action: str, place: Path) -> StorageError:
    """The StorageError for a failed `action` at `place`: cause in words, and advice."""
    cause = error.strerror or str(error)
    advice = _advice(error.errno, place)
    return StorageError(f"cannot {action}: {place}: {cause}" + (f" ({advice})" if advice else ""))


def _advice(code: int | None, place: Path) -> str:
    """What to do about an error number at a place."""
    if code in (errno.ENOSPC, errno.EDQUOT):
        return f"{_free(place)}; make room or choose another directory, then save again"
    if code in (errno.EACCES, errno.EPERM):
        return f"this process runs as {_who()}; {_owner(place)}"
    fixed = {
        errno.EROFS: "the file system is mounted read-only",
        errno.EIO: "the device or the network storage failed; look at the system log",
        errno.ESTALE: "the network storage lost the file; mount it again",
        errno.EMFILE: "too many open files in this process; raise `ulimit -n`",
        errno.ENFILE: "too many open files on this machine",
        errno.ELOOP: "it is a symbolic link, and links are not followed",
        errno.EEXIST: "it is never overwritten; remove it or choose another name",
        errno.ENOTEMPTY: "it is never overwritten; remove it or choose another name",
        errno.EFBIG: "larger than the file system or `ulimit -f` allows",
        errno.ENAMETOOLONG: "the name is too long for this file system",
    }
    if code == errno.ENOTDIR and place.is_symlink():
        code = errno.ELOOP
    return fixed.get(code, "") if code is not None else ""


def _existing(place: Path) -> Path:
    """The nearest parent that exists."""
    while not os.path.lexists(place) and place != place.parent:
        place = place.parent
    return place


def _free(place: Path) -> str:
    """Room at a place, in words."""
    try:
        stats = os.statvfs(_existing(place))
    except OSError:
        return "how much is free is unknown"
    nbytes = stats.f_bavail * stats.f_frsize
    return f"{nbytes / 2**30:.2f} GiB and {stats.f_favail} names are free there"


def _who() -> str:
    """The user of this process."""
    return f"uid {os.geteuid()}, gid {os.getegid()}"


def _owner(place: Path) -> str:
    """Whose the nearest parent is, in words."""
    nearest = place
    while True:
        try:
            status = os.lstat(nearest)
        except OSError:
            if nearest == nearest.parent:
                return "its owner is unknown"
            nearest = nearest.parent
            continue
        mode = oct(status.st_mode & 0o7777)[2:]
        return f"{nearest} belongs to uid {status.st_uid}, gid {status.st_gid} with mode {mode}"
