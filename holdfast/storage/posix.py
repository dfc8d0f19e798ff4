"""Storage in a directory of a POSIX file system.

Every path is walked name by name from an open directory, without following links. So no file
outside the root can be reached, not even if another process swaps names in the meantime. Reads and
writes are positioned and always complete.

In this order: the store, its open files, the directories it may hold open, the system calls that
Python does not wrap, and the advice for a failed call.
"""

from __future__ import annotations

import builtins
import copy
import ctypes
import errno
import fcntl
import os
import secrets
import shutil
import stat
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import numpy as np

from holdfast.errors import StorageError, in_bytes
from holdfast.storage.storage_protocol import (
    UNKNOWN,
    Observer,
    Sink,
    Source,
    check_fits,
    split_path,
)

# The root may be a link; nothing below it is followed.
_ROOT_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_DIR_FLAGS = _ROOT_FLAGS | os.O_NOFOLLOW
# O_NONBLOCK: a pipe with that name must not block the open. It changes nothing for a file.
_READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_NEW_FLAGS = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
# Not EROFS: by that ext4 says, after an error of its journal, that what was renamed may be lost.
_UNSYNCABLE = (errno.EINVAL, errno.ENOTSUP)
_CLOCK_S = 10.0
"""Seconds for which a reading of the storage's clock is used."""
_NUM_SWEEPS = 20
_DIRECT_ALIGN = 4096
_DIRECT_NBYTES = 1 << 20
"""Smaller writes are not worth going past the page cache."""
_DIRECT_REFUSED = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOENT, errno.EPERM)
_RENAME_NOREPLACE = 1
_RENAME_EXCHANGE = 2
_ABSENT = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTTY)
_SAYS_NOTHING = frozenset({
    errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ETIMEDOUT,
    errno.ENOTCONN, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETUNREACH,
})  # fmt: skip
"""Errors of which none means that a file is damaged or gone."""
_MAX_HELD_DIRS = 8
_LOCAL_SYSTEMS = frozenset({"ext2", "ext3", "ext4", "f2fs", "tmpfs", "xfs", "zfs"})
"""File systems that no two hosts mount at once; overlayfs is left out, whose layers may be NFS."""
_MAX_CALL_NBYTES = 1 << 30  # one call moves at most 0x7ffff000 bytes on Linux
_MAX_VIEWS = 1024  # one call fills at most so many (IOV_MAX)


def absolute(path: str | os.PathLike[str]) -> Path:
    """Return a path that means the same after `os.chdir`.

    Raises:
        StorageError: It is relative to a working directory that was removed.
    """
    try:
        return Path(path).absolute()
    except FileNotFoundError:
        raise StorageError(
            f"{os.fspath(path)} is relative, and the working directory of this process was "
            f"removed: write an absolute path"
        ) from None


class PosixStorage:
    """The storage protocol over one directory.

    It holds no open file between calls, except directories in `holding_dirs`. It remembers which
    directory the root is when it first sees it, by device and inode. If another one is there later,
    or none, as after an unmount, every call is a StorageError, and nothing is made in its place.

    Args:
        root: The directory; it may be a link. It must exist before anything is read.
        observer: Called before every operation.
    """

    def __init__(self, root: str | Path, *, observer: Observer | None = None) -> None:
        self._root = absolute(root)
        self._observer = observer
        self._place = RootPlace(self._root)
        self._pinned: _Pinned | None = None
        self._held: dict[int, HeldDirs] = {}
        self._is_named = False
        self._clock: tuple[float, float] | None = None

    @property
    def root(self) -> Path:
        """The directory all paths are relative to."""
        return self._root

    @property
    def place(self) -> RootPlace:
        """Which directory the root is, for another process of this host."""
        return self._place

    def __repr__(self) -> str:
        """Return the root, for messages."""
        return f"PosixStorage({str(self._root)!r})"

    def read(self, path: str, *, start: int = 0, nbytes: int | None = None) -> bytes:
        """See `Storage.read`; memory is allocated only for bytes that the file has."""
        with self._reading(path) as fd:
            available = max(os.fstat(fd).st_size - start, 0)
            num_read = available if nbytes is None else nbytes
            if num_read > available or start < 0 or num_read < 0:
                raise StorageError(
                    f"{self.describe(path)}: {num_read} bytes are needed at offset {start}, but "
                    f"the file ends at byte {start + available}: it is truncated, or not the file "
                    f"that was written"
                )
            self._observe("read", path, start, num_read)
            buffer = bytearray(num_read)
            read_full(fd, memoryview(buffer), start, self.describe(path))
            return bytes(buffer)

    def readinto(self, path: str, buffer: memoryview, *, start: int = 0) -> None:
        """See `Storage.readinto`."""
        with self._reading(path) as fd:
            self._observe("read", path, start, buffer.nbytes)
            read_full(fd, buffer.cast("B"), start, self.describe(path))

    def open(self, path: str) -> Source:
        """See `Storage.open`; only a regular file is opened."""
        self._observe("open", path, 0, 0)
        with self._guard("open", path):
            return PosixSource(
                self._open_regular(path),
                path=path,
                place=self.describe(path),
                observe=self._observe,
            )

    def size(self, path: str) -> int:
        """See `Storage.size`."""
        with self._guard("examine", path):
            status = self._lstat(path)
        if not stat.S_ISREG(status.st_mode):
            raise StorageError(f"{self.describe(path)} is not a regular file")
        return status.st_size

    def file_stamp(self, path: str) -> tuple[int, int]:
        """Return the number of a file's inode, and when it was last changed, in ns."""
        with self._guard("examine", path):
            status = self._lstat(path)
        return status.st_ino, status.st_mtime_ns

    def exists(self, path: str) -> bool:
        """See `Storage.exists`; a place that cannot be examined is an error, not absence."""
        with self._guard("examine", path):
            return self._mode(path) is not None

    def age_s(self, path: str) -> float:
        """See `Storage.age_s`; every ten seconds a new file shows the storage's clock."""
        with self._guard("examine", path):
            changed = self._lstat(path).st_mtime
        return max(self._now() - changed, 0.0)

    def is_dir(self, path: str) -> bool:
        """See `Storage.is_dir`."""
        with self._guard("examine", path):
            mode = self._mode(path)
        return mode is not None and stat.S_ISDIR(mode)

    def list(self, path: str) -> builtins.list[str]:
        """See `Storage.list`."""
        self._observe("list", path, 0, 0)
        names = split_path(path)
        if not names or (self._pinned is not None and names == self._pinned.names):
            with self._guard("list", path), self._dir(names) as fd:
                return sorted(os.listdir(fd))
        with self._guard("list", path), self._parent(path) as (above, name):
            # Opened again even if held: this makes a network file system's client ask its server.
            fd = os.open(name, _DIR_FLAGS, dir_fd=above)
            try:
                return sorted(os.listdir(fd))
            finally:
                os.close(fd)

    @contextmanager
    def pin(self, path: str) -> Iterator[PosixStorage]:
        """See `Storage.pin`: the directory is held open, and paths below it start there."""
        names = split_path(path)
        with self._guard("open", path), self._dir(names) as fd:
            view = copy.copy(self)
            view._pinned = _Pinned(names, os.dup(fd))
        try:
            yield view
        finally:
            os.close(view._pinned.fd)
            # A late use fails with EBADF, instead of reading whatever gets this number next.
            view._pinned = _Pinned(names, -1)

    @contextmanager
    def holding_dirs(self) -> Iterator[None]:
        """In the body, keep the directories open that this thread's calls open; see `HeldDirs`."""
        # By thread: what one thread holds it may close while another one is in a call.
        thread = threading.get_ident()
        if thread in self._held:
            yield
            return
        self._held[thread] = dirs = HeldDirs(self._place)
        try:
            yield
        finally:
            del self._held[thread]
            dirs.close()

    def write_file(self, path: str, data: bytes, *, durable: bool = True) -> None:
        """See `Storage.write_file`."""
        self._put("write", path, data, durable=durable)

    def replace_file(self, path: str, data: bytes, *, durable: bool = True) -> None:
        """See `Storage.replace_file`."""
        self._put("replace", path, data, durable=durable)

    @contextmanager
    def create(self, path: str, *, nbytes: int) -> Iterator[Sink]:
        """See `Storage.create`; blocks are reserved at once if the file system can do that."""
        self._observe("create", path, 0, nbytes)
        with self._guard("create", path), self._parent(path) as (parent, name):
            fd = os.open(name, _NEW_FLAGS, 0o666, dir_fd=parent)
        place = self._root / path
        sink = PosixSink(fd, path=path, place=place, nbytes=nbytes, observe=self._observe)
        try:
            # If the disk is full, give back the blocks that were reserved before it was.
            try:
                with self._guard(f"reserve {nbytes} bytes for", path):
                    sink.reserve()
            except StorageError:
                with suppress(OSError), self._parent(path) as (parent, name):
                    os.unlink(name, dir_fd=parent)
                raise
            yield sink
        except BaseException:
            with suppress(OSError):
                sink.close()
            raise
        with self._guard("close", path):
            sink.close()

    def make_dir(self, path: str, *, durable: bool = True) -> None:
        """See `Storage.make_dir`; a root that was seen before is never made again."""
        self._observe("make_dir", path, 0, 0)
        names = split_path(path)
        with self._guard("make the directory", path):
            if not names:
                self._place.status()
                self._make_root(durable=durable)
            for depth in range(len(names)):
                with self._dir(names[:depth]) as fd:
                    with suppress(FileExistsError):
                        os.mkdir(names[depth], dir_fd=fd)
                    # Also for a directory that was there: its maker may have died before the sync.
                    if durable:
                        _sync_dir_fd(fd)
            with self._dir(names):
                return

    @contextmanager
    def locking(self, path: str) -> Iterator[Callable[[], None]]:
        """In the body, or until what it yields is called, share a lock on a directory.

        The kernel keeps it whatever name the directory gets, and ends it with this process; a child
        that was forked meanwhile keeps it, too. Where a directory cannot be locked it does nothing.
        """
        lock = self.shared_lock(path)
        fds = [] if lock is None else [lock]

        def release() -> None:
            while fds:
                os.close(fds.pop())

        try:
            yield release
        finally:
            release()

    def shared_lock(self, path: str) -> int | None:
        """Return a descriptor that shares a lock on a directory, for the caller to close.

        The lock is the open file's: it lasts until every process that has been sent the descriptor
        has closed it, or ended. None where the directory cannot be locked.
        """
        with suppress(OSError, StorageError), self._dir(split_path(path)) as directory:
            fd = os.open(".", _DIR_FLAGS, dir_fd=directory)
            try:
                fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _lock(fcntl.F_RDLCK))
            except OSError:
                os.close(fd)
                return None
            return fd
        return None

    def is_locked(self, path: str) -> bool | None:
        """Return True if any process has locked a directory; False if none of any host has.

        None if the kernel cannot know that, because the file system may be in use on other hosts.
        Never waits, and takes no lock that a process could meet.
        """
        try:
            with self._dir(split_path(path)) as directory:
                answer = fcntl.fcntl(directory, fcntl.F_OFD_GETLK, _lock(fcntl.F_WRLCK))
                if struct.unpack_from("h", answer)[0] != fcntl.F_UNLCK:
                    return True
                return False if _is_of_this_host(os.fstat(directory).st_dev) else None
        except (OSError, StorageError):
            return None

    def sync_dir(self, path: str) -> None:
        """See `Storage.sync_dir`; does nothing if the file system cannot sync directories."""
        self._observe("sync_dir", path, 0, 0)
        with self._guard("sync", path), self._dir(split_path(path)) as fd:
            _sync_dir_fd(fd)

    def rename_dir(self, src: str, dst: str, *, durable: bool = True) -> None:
        """See `Storage.rename_dir`; both parent directories are synced before it returns."""
        self._observe("rename", src, 0, 0)
        with (
            self._guard(f"rename to {self.describe(dst)}", src),
            self._parent(src) as (src_fd, old),
            self._parent(dst) as (dst_fd, new),
        ):
            _rename_new(old, new, src_dir_fd=src_fd, dst_dir_fd=dst_fd)
            if durable:
                # The new name first: a crash between the two syncs may leave the directory under
                # both names, but never under neither.
                _sync_dir_fds(dst_fd, src_fd)

    def exchange_dir(self, first: str, second: str) -> None:
        """See `Storage.exchange_dir`; both parent directories are synced before it returns."""
        self._observe("exchange", first, 0, 0)
        with (
            self._guard(f"exchange with {self.describe(second)}", first),
            self._parent(first) as (first_fd, one),
            self._parent(second) as (second_fd, two),
        ):
            if not rename_exchange(one, two, src_dir_fd=first_fd, dst_dir_fd=second_fd):
                aside = _hidden_name("old", two)
                # Fails if there is nothing to put into its place, before its name is gone.
                os.stat(one, dir_fd=first_fd, follow_symlinks=False)
                # Each rename is synced before the next one: after a crash, a repair can interpret
                # the earlier renames without the later ones, but not the reverse.
                os.rename(two, aside, src_dir_fd=second_fd, dst_dir_fd=second_fd)
                _sync_dir_fd(second_fd)
                os.rename(one, two, src_dir_fd=first_fd, dst_dir_fd=second_fd)
                _sync_dir_fds(second_fd, first_fd)
                os.rename(aside, one, src_dir_fd=second_fd, dst_dir_fd=first_fd)
            _sync_dir_fds(second_fd, first_fd)

    def remove_tree(
        self, path: str, *, durable: bool = True, only_if: Callable[[str], bool] | None = None
    ) -> None:
        """See `Storage.remove_tree`; a directory is first renamed to a `.trash-…` name."""
        self._observe("remove", path, 0, 0)
        with self._guard("remove", path), self._parent(path) as (fd, name):
            if not stat.S_ISDIR(os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode):
                os.unlink(name, dir_fd=fd)
                return
            if only_if is not None:
                aside = _hidden_name("old", name)
                os.rename(name, aside, src_dir_fd=fd, dst_dir_fd=fd)
                place = "/".join((*split_path(path)[:-1], aside))
                if not _is_confirmed(only_if, place, fd=fd, aside=aside, name=name):
                    return
                name = aside
            trash = name
            if not name.startswith(".trash-"):
                trash = _hidden_name("trash", name)
                os.rename(name, trash, src_dir_fd=fd, dst_dir_fd=fd)
            # Also if it had that name already: the process that renamed it may have died here.
            if durable:
                _sync_dir_fd(fd)
            # What cannot be removed is there under this name alone.
            with self._guard("remove", "/".join((*split_path(path)[:-1], trash))):
                _remove_all(trash, fd)

    def free_nbytes(self) -> int:
        """See `Storage.free_nbytes`; asks the nearest parent if the root does not exist yet."""
        with self._guard("examine", ""):
            self._place.status()
            stats = os.statvfs(_existing(self._root))
            return stats.f_bavail * stats.f_frsize

    def describe(self, path: str) -> str:
        """Return the absolute path."""
        return str(self._root / path) if path else str(self._root)

    def is_shareable(self) -> bool:
        """Return True unless it is observed, pinned or a subclass: another process lacks these."""
        return type(self) is PosixStorage and self._observer is None and self._pinned is None

    def local_path(self, path: str) -> Path | None:
        """Return the absolute path; never None."""
        split_path(path)
        return self._root / path

    def _observe(self, operation: str, path: str, start: int, nbytes: int) -> None:
        if self._observer is not None:
            self._observer(operation, path, start, nbytes)

    @contextmanager
    def _guard(self, action: str, path: str) -> Iterator[None]:
        """Turn an OSError of the body into a StorageError."""
        try:
            yield
        except OSError as error:
            place = self._root / path if path else self._root
            raise storage_error(error, action=action, place=place) from error

    @contextmanager
    def _dir(self, names: tuple[str, ...]) -> Iterator[int]:
        """Open a directory from the root without following a link; closed after the body."""
        pinned, held = self._pinned, self._held.get(threading.get_ident())
        if pinned is not None and names[: len(pinned.names)] == pinned.names:
            fd = os.open(".", _DIR_FLAGS, dir_fd=pinned.fd)
            names = names[len(pinned.names) :]
        elif held is not None:
            with held.opened(names) as fd:
                yield fd
            return
        else:
            fd = self._place.open()
        try:
            for name in names:
                below = os.open(name, _DIR_FLAGS, dir_fd=fd)
                os.close(fd)
                fd = below
            yield fd
        finally:
            os.close(fd)

    @contextmanager
    def _parent(self, path: str) -> Iterator[tuple[int, str]]:
        """Open the directory that holds a name; gives it and the name."""
        names = split_path(path)
        if not names:
            raise StorageError(
                f"{self.describe('')}: the root itself cannot be renamed or replaced"
            )
        with self._dir(names[:-1]) as fd:
            yield fd, names[-1]

    def _make_root(self, *, durable: bool) -> None:
        """Make the root and its parents; sync the names that are new.

        The root's name is synced once even if it is not new: its maker may have died before the
        sync.
        """
        new: list[Path] = []
        place = self._root
        while not place.exists():
            new.append(place)
            place = place.parent
        try:
            self._root.mkdir(parents=True, exist_ok=True)
        except FileExistsError:
            # Not as EEXIST, whose advice is to remove what is there: it may be a file of value.
            if self._root.is_symlink() and not self._root.exists():
                end = f"it is a link to {os.readlink(self._root)}, which does not exist"
                raise FileNotFoundError(errno.ENOENT, end) from None
            raise NotADirectoryError(errno.ENOTDIR, "it exists and is not a directory") from None
        if not self._is_named and not new:
            new.append(self._root.resolve())
        if not durable or not new:
            return
        for place in new:
            # A directory may allow search without allowing open; then it cannot be synced.
            with suppress(PermissionError):
                fd = os.open(place.parent, _ROOT_FLAGS)
                try:
                    _sync_dir_fd(fd)
                finally:
                    os.close(fd)
        self._is_named = True

    def _now(self) -> float:
        """Return the time that a file made just now would get: the storage's own clock."""
        here = time.monotonic()
        if self._clock is None or here - self._clock[1] > _CLOCK_S:
            try:
                ahead = self._stamp() - time.monotonic()
            except OSError:
                return time.time()  # a read-only storage shows no clock
            self._clock = (ahead, here)
        return self._clock[0] + time.monotonic()

    def _stamp(self) -> float:
        """Return the modification time that the storage gives to a new file."""
        name = _hidden_name("tmp", "clock")
        with self._dir(()) as root:
            fd = os.open(name, _NEW_FLAGS, 0o666, dir_fd=root)
            try:
                return os.fstat(fd).st_mtime
            finally:
                os.close(fd)
                with suppress(OSError):
                    os.unlink(name, dir_fd=root)

    def _lstat(self, path: str) -> os.stat_result:
        """Return the status of a name; a link is not followed."""
        if self._pinned is not None and split_path(path) == self._pinned.names:
            return os.fstat(self._pinned.fd)
        if not path:
            status = self._place.status()
            if status is None:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
            return status
        with self._parent(path) as (fd, name):
            return os.stat(name, dir_fd=fd, follow_symlinks=False)

    def _mode(self, path: str) -> int | None:
        """Return the mode of a name; None if the name does not exist."""
        try:
            return self._lstat(path).st_mode
        except (FileNotFoundError, NotADirectoryError):
            return None

    def _open_regular(self, path: str) -> int:
        """Open a file for reading; StorageError unless it is a regular file."""
        with self._parent(path) as (parent, name):
            fd = os.open(name, _READ_FLAGS, dir_fd=parent)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise StorageError(f"{self.describe(path)} is not a regular file and is not opened")
        return fd

    @contextmanager
    def _reading(self, path: str) -> Iterator[int]:
        """Open a file for the body."""
        with self._guard("read", path):
            fd = self._open_regular(path)
            try:
                yield fd
            finally:
                os.close(fd)

    def _put(self, operation: str, path: str, data: bytes, *, durable: bool) -> None:
        """Write a temporary file, sync it, rename it, sync the directory.

        In this order: a name must never be durable before the bytes that it stands for.
        """
        self._observe(operation, path, 0, len(data))
        with self._guard("write", path), self._parent(path) as (parent, name):
            temporary = _hidden_name("tmp", name)
            fd = os.open(temporary, _NEW_FLAGS, 0o666, dir_fd=parent)
            try:
                try:
                    write_full(fd, memoryview(data), 0)
                    if durable:
                        os.fsync(fd)
                finally:
                    os.close(fd)
                os.rename(temporary, name, src_dir_fd=parent, dst_dir_fd=parent)
            except BaseException:
                with suppress(OSError):
                    os.unlink(temporary, dir_fd=parent)
                raise
            if durable:
                _sync_dir_fd(parent)


@dataclass(slots=True)
class RootPlace:
    """Where a root is, and which directory was there when it was first seen.

    Every use of the root is checked here. If a volume is unmounted, the directory underneath
    appears under the same path. Whatever were written there would be lost from sight at the next
    mount.
    """

    path: Path
    device: int = -1
    inode: int = -1
    """Of the directory; -1 until it has been seen."""

    def open(self) -> int:
        """Open the root; StorageError if it is another directory than before, or has vanished."""
        try:
            fd = os.open(self.path, _ROOT_FLAGS)
        except (FileNotFoundError, NotADirectoryError):
            self._refuse_absence()
            raise
        try:
            self._check(os.fstat(fd))
        except BaseException:
            os.close(fd)
            raise
        return fd

    def status(self) -> os.stat_result | None:
        """Return the root's status; None if it does not exist yet. StorageError as of `open`."""
        try:
            status = os.stat(self.path)
        except (FileNotFoundError, NotADirectoryError):
            self._refuse_absence()
            return None
        self._check(status)
        return status

    def expect(self, *, device: int, inode: int) -> None:
        """Take over what another process of this host has seen; -1 for nothing."""
        if device != -1:
            self.device, self.inode = device, inode

    def _check(self, status: os.stat_result) -> None:
        """Keep which directory this is the first time; StorageError if it is another one later."""
        if self.device == -1:
            if stat.S_ISDIR(status.st_mode):
                self.device, self.inode = status.st_dev, status.st_ino
        elif (status.st_dev, status.st_ino) != (self.device, self.inode):
            raise StorageError(
                f"{self.path} is another directory than before (device {_device(self.device)}, "
                f"inode {self.inode} before; device {_device(status.st_dev)}, inode "
                f"{status.st_ino} now): its volume was unmounted or mounted again, or the "
                f"directory was replaced. Nothing is written there; bring the former one back, or "
                f"start the run again"
            )

    def _refuse_absence(self) -> None:
        """Raise StorageError if the root was there before."""
        if self.device != -1:  # without the cause: that a file is not there is not known
            raise StorageError(
                f"{self.path} has vanished (device {_device(self.device)}, inode {self.inode} "
                f"before): its volume was unmounted, or the directory was moved or removed. "
                f"Nothing is made in its place; bring it back, or start the run again"
            ) from None


def _device(number: int) -> str:
    """Return a device as `ls -l` and /proc/self/mountinfo write it."""
    return f"{os.major(number)}:{os.minor(number)}"


@dataclass(frozen=True, slots=True)
class _Pinned:
    """A directory that is held open, and the names that led to it."""

    names: tuple[str, ...]
    fd: int


def _remove_all(name: str, parent: int) -> None:
    """Remove a directory tree while other processes may remove it or add names to it."""
    for left in reversed(range(_NUM_SWEEPS)):
        try:
            shutil.rmtree(name, dir_fd=parent)  # works on descriptors and never follows a link
            return
        except FileNotFoundError:
            try:
                os.stat(name, dir_fd=parent, follow_symlinks=False)
            except FileNotFoundError:
                return
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST) or not left:
                raise


def _sync_dir_fds(one: int, other: int) -> None:
    """Sync two open directories, or one if they are the same."""
    _sync_dir_fd(one)
    if not os.path.sameopenfile(one, other):
        _sync_dir_fd(other)


def _sync_dir_fd(fd: int) -> None:
    """Sync an open directory, if the file system can."""
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in _UNSYNCABLE:
            raise


def _hidden_name(prefix: str, name: str) -> str:
    """Return an unused name of leftovers, `.<prefix>-<name>-<random>`, at most 255 bytes long."""
    cut = os.fsencode(name)[:200].decode(errors="ignore")
    return f".{prefix}-{cut}-{secrets.token_hex(4)}"


def _is_confirmed(
    only_if: Callable[[str], bool], place: str, *, fd: int, aside: str, name: str
) -> bool:
    """Ask whether to remove the directory at `place`; if not, give it its name back if free."""
    is_confirmed = False
    try:
        is_confirmed = only_if(place)
    finally:
        if not is_confirmed:
            with suppress(FileExistsError):
                _rename_new(aside, name, src_dir_fd=fd, dst_dir_fd=fd)
    return is_confirmed


class PosixSource:
    """An open regular file; see `Source`. Reads move no position, so threads may share it."""

    def __init__(self, fd: int, *, path: str, place: str, observe: Observer) -> None:
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
        """See `Source.readinto`; usually one system call."""
        self._observe("read", self._path, start, buffer.nbytes)
        try:
            read_full(self._fd, buffer.cast("B"), start, self._place)
        except OSError as error:
            raise storage_error(error, action="read", place=Path(self._place)) from error

    def readinto_strips(
        self, buffer: memoryview, *, start: int, strips: Sequence[tuple[int, int]]
    ) -> int:
        """See `read_strips`: one system call for each strip."""
        nbytes = sum(size for _, size in strips)
        self._observe("read", self._path, start, nbytes)
        try:
            # What is not in the page cache comes there in long reads, with the gaps: each strip
            # would be a wait of its own, and a neighbour on this host needs what is between them.
            with suppress(OSError):
                os.posix_fadvise(self._fd, start, len(buffer), os.POSIX_FADV_WILLNEED)
            for at, size in strips:
                part = buffer[at : at + size]
                if os.preadv(self._fd, (part,), start + at) != size:
                    read_full(self._fd, part, start + at, self._place)
        except OSError as error:
            raise storage_error(error, action="read", place=Path(self._place)) from error
        return nbytes

    def readinto_views(self, views: Sequence[memoryview], *, start: int) -> None:
        """See `read_views`: one system call for each thousand views."""
        self._observe("read", self._path, start, sum(map(len, views)))
        try:
            for first in range(0, len(views), _MAX_VIEWS):
                some = views[first : first + _MAX_VIEWS]
                nbytes = sum(map(len, some))
                if os.preadv(self._fd, some, start) == nbytes:
                    start += nbytes
                    continue
                for view in some:
                    read_full(self._fd, view, start, self._place)
                    start += len(view)
        except OSError as error:
            raise storage_error(error, action="read", place=Path(self._place)) from error

    def close(self) -> None:
        """See `Source.close`."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)


class PosixSink:
    """A file of known size being written; see `Sink`.

    Large aligned parts bypass the page cache if the file system allows it, which is tried and never
    assumed. The rest goes through the cache.
    """

    def __init__(self, fd: int, *, path: str, place: Path, nbytes: int, observe: Observer) -> None:
        self._fd = fd
        self._path = path
        self._place = place
        self._nbytes = nbytes
        self._observe = observe
        self._direct_fd = -1
        self._direct = True

    def reserve(self) -> None:
        """Give the file its size, and its blocks if possible, so that a full disk shows early."""
        if self._nbytes and not allocate(self._fd, self._nbytes):
            os.ftruncate(self._fd, self._nbytes)

    def write_at(self, offset: int, buffer: memoryview) -> None:
        """See `Sink.write_at`."""
        check_fits(str(self._place), offset, buffer.nbytes, declared=self._nbytes)
        self._observe("write_at", self._path, offset, buffer.nbytes)
        view = buffer.cast("B")
        try:
            done = self._write_direct(offset, view)
            write_full(self._fd, view[done:], offset + done)
        except OSError as error:
            raise storage_error(error, action="write", place=self._place) from error

    def _write_direct(self, offset: int, view: memoryview) -> int:
        """Write the part of `view` that may bypass the page cache; return its length, maybe 0."""
        nbytes = len(view) // _DIRECT_ALIGN * _DIRECT_ALIGN
        if not self._direct or nbytes < _DIRECT_NBYTES or offset % _DIRECT_ALIGN:
            return 0
        # The device reads the memory itself: O_DIRECT needs an aligned address, too. By numpy,
        # since `ctypes` does not tell the address of memory that is read-only.
        if np.frombuffer(view, dtype=np.uint8).ctypes.data % _DIRECT_ALIGN:
            return 0
        try:
            if self._direct_fd < 0:
                # A second descriptor of the same file, since O_DIRECT holds for a whole descriptor.
                # By /proc and not by path: the name may be another file's by now.
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
        """See `Sink.sync`; also checks that the file has the stated size."""
        self._observe("sync", self._path, 0, 0)
        try:
            os.fdatasync(self._fd)
            nbytes = os.fstat(self._fd).st_size
        except OSError as error:
            raise storage_error(error, action="sync", place=self._place) from error
        if nbytes != self._nbytes:
            raise StorageError(
                f"{self._place} has {nbytes} bytes after writing, not {self._nbytes}: "
                "another process wrote to the same file, or the storage lost a part of it"
            )

    def close(self) -> None:
        """Close the file; some network file systems report a failed write only here."""
        if self._direct_fd >= 0:
            fd, self._direct_fd = self._direct_fd, -1
            os.close(fd)
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)


@dataclass(frozen=True, slots=True)
class HeldDirs:
    """Directories below a root that one thread keeps open between calls.

    Before every use, each name on the way is examined without following it, and a held directory is
    used only if it is still the one with that name. So the result is the same as from opening name
    by name, at the cost of one stat instead of an open and a close.
    """

    root: RootPlace
    _held: dict[tuple[str, ...], tuple[int, os.stat_result]] = field(default_factory=dict)
    _replaced: list[int] = field(default_factory=list)

    @contextmanager
    def opened(self, names: tuple[str, ...]) -> Iterator[int]:
        """Give the directory, open at least during the body."""
        fd, is_held = self._get(names)
        try:
            yield fd
        finally:
            if not is_held:
                os.close(fd)

    def _get(self, names: tuple[str, ...]) -> tuple[int, bool]:
        """Return the open directory, and True if it is held; otherwise the caller closes it."""
        if not names:
            status = self.root.status()
            if status is None:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
            return self._keep(names, status, "", None)
        with self.opened(names[:-1]) as above:
            status = os.stat(names[-1], dir_fd=above, follow_symlinks=False)
            return self._keep(names, status, names[-1], above)

    def _keep(
        self, names: tuple[str, ...], status: os.stat_result, name: str, above: int | None
    ) -> tuple[int, bool]:
        """Return the held directory if it still has this status, else open the one there now."""
        held = self._held.get(names)
        if held is not None:
            if os.path.samestat(held[1], status):
                return held[0], True
            # Closed with the others, later: it may be in use in this very call.
            self._replaced.append(self._held.pop(names)[0])
        fd = os.open(name, _DIR_FLAGS, dir_fd=above) if names else self.root.open()
        if len(self._held) + len(self._replaced) >= _MAX_HELD_DIRS:
            return fd, False
        self._held[names] = fd, os.fstat(fd)
        return fd, True

    def close(self) -> None:
        """Close all of them."""
        for fd in [*(fd for fd, _ in self._held.values()), *self._replaced]:
            os.close(fd)
        self._held.clear()
        self._replaced.clear()


def read_full(fd: int, buffer: memoryview, start: int, place: str) -> None:
    """Fill a byte view from offset `start`; StorageError if the file is too short."""
    done = 0
    while done < len(buffer):
        part = buffer[done : done + _MAX_CALL_NBYTES]
        count = os.preadv(fd, [part], start + done)
        if count == 0:
            raise _truncated(start, done, len(buffer), place)
        done += count


def _truncated(start: int, done: int, nbytes: int, place: str) -> StorageError:
    return StorageError(
        f"{place}: the file ends at byte {start + done}, but {nbytes} bytes at offset {start} are "
        f"needed: it is truncated"
    )


def write_full(fd: int, buffer: memoryview, offset: int) -> None:
    """Write all of a byte view at `offset`, in as many calls as needed; OSError on failure."""
    done = 0
    while done < len(buffer):
        count = os.pwrite(fd, buffer[done : done + _MAX_CALL_NBYTES], offset + done)
        if count <= 0:
            raise OSError(errno.EIO, "the system wrote nothing and gave no reason")
        done += count


def _rename_new(src: str, dst: str, *, src_dir_fd: int, dst_dir_fd: int) -> None:
    """Rename; FileExistsError if `dst` exists, on any file system."""
    if rename_noreplace(src, dst, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd):
        return
    # A plain rename replaces an empty directory, and any file: look first.
    with suppress(FileNotFoundError):
        os.stat(dst, dir_fd=dst_dir_fd, follow_symlinks=False)
        raise FileExistsError(errno.EEXIST, "destination exists")
    os.rename(src, dst, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)


def rename_noreplace(src: str, dst: str, *, src_dir_fd: int, dst_dir_fd: int) -> bool:
    """Rename unless `dst` exists (FileExistsError); False if the file system cannot do that."""
    return _rename(src, dst, src_dir_fd, dst_dir_fd, _RENAME_NOREPLACE)


def rename_exchange(src: str, dst: str, *, src_dir_fd: int, dst_dir_fd: int) -> bool:
    """Exchange two names in one step; False if the kernel or file system cannot do that."""
    return _rename(src, dst, src_dir_fd, dst_dir_fd, _RENAME_EXCHANGE)


def _rename(src: str, dst: str, src_dir_fd: int, dst_dir_fd: int, flag: int) -> bool:
    """Call renameat2, which Python does not wrap; False if it is not supported."""
    path = ctypes.c_char_p
    call = _libc_function("renameat2", ctypes.c_int, path, ctypes.c_int, path, ctypes.c_uint)
    if call is None:
        return False
    if call(src_dir_fd, os.fsencode(src), dst_dir_fd, os.fsencode(dst), flag) == 0:
        return True
    return _refused(ctypes.get_errno())


def allocate(fd: int, nbytes: int) -> bool:
    """Reserve the blocks of a file, so that a full disk shows now; False if not supported.

    `os.posix_fallocate` is not used: if the file system cannot reserve, glibc writes zeros instead.
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


def _lock(kind: int) -> bytes:
    """Return the C structure of a lock on a whole file that belongs to an open file."""
    return struct.pack("hhxxxxqqixxxx", kind, os.SEEK_SET, 0, 0, 0)


def _is_of_this_host(device: int) -> bool:
    """Return True if a file system is one that only one kernel mounts at a time."""
    number = _device(device)
    with suppress(OSError), open("/proc/self/mountinfo") as file:
        for line in file:
            mount, _, system = line.partition(" - ")
            if mount.split()[2] == number:
                return system.split()[0] in _LOCAL_SYSTEMS
    return False


def _libc_function(name: str, *argtypes: type) -> Callable[..., int] | None:
    """Return a function of the C library that sets errno; None if the library lacks it."""
    function = getattr(ctypes.CDLL(None, use_errno=True), name, None)
    if function is not None:
        function.argtypes = argtypes
        function.restype = ctypes.c_int
    return cast("Callable[..., int] | None", function)


def _refused(code: int) -> bool:
    """Return False if the call is not supported here; raise OSError for any other failure."""
    if code in _ABSENT:
        return False
    raise OSError(code, os.strerror(code))


def storage_error(error: OSError, *, action: str, place: Path) -> StorageError:
    """Return the StorageError for a failed `action` at `place`: the cause, and advice."""
    cause = error.strerror or str(error)
    advice = _advice(error.errno, place, action)
    return StorageError(
        f"cannot {action}: {place}: {cause}" + (f" ({advice})" if advice else ""),
        details=UNKNOWN if error.errno in _SAYS_NOTHING else None,
    )


def _advice(code: int | None, place: Path, action: str) -> str:
    """Return what a person can do about an error at a place; empty if nothing is known."""
    if code in (errno.ENOSPC, errno.EDQUOT):
        return f"{_free(place)}; make room or choose another directory, then try again"
    if code in (errno.EACCES, errno.EPERM):
        user = f"this process runs as uid {os.geteuid()}, gid {os.getegid()}"
        # Who may write to the directory that a name is in may remove and rename it.
        is_of_name = action.startswith(("remove", "rename", "exchange"))
        places = [place.parent, place] if is_of_name else [place]
        owners = ", ".join(dict.fromkeys(map(_owner, places)))
        return f"{user}; {owners}{_stickiness(place)}"
    fixed = {
        errno.EROFS: "the file system is mounted read-only; choose another directory",
        errno.EIO: "the device or the network storage failed; see the system log",
        errno.ESTALE: "the network storage lost the file; mount it again",
        errno.EMFILE: "too many open files in this process; raise `ulimit -n`",
        errno.ENFILE: "too many open files on this machine; raise fs.file-max",
        errno.ELOOP: "it is a symbolic link; links are not followed",
        errno.EEXIST: "an existing name is never overwritten; remove it or choose another",
        errno.ENOTEMPTY: "an existing name is never overwritten; remove it or choose another",
        errno.EFBIG: "the file is larger than the file system or `ulimit -f` allows",
        errno.ENAMETOOLONG: "the name is too long for this file system",
    }
    if code == errno.ENOTDIR and place.is_symlink():
        code = errno.ELOOP
    return fixed.get(code, "") if code is not None else ""


def _existing(place: Path) -> Path:
    """Return the nearest parent that exists."""
    while not os.path.lexists(place) and place != place.parent:
        place = place.parent
    return place


def _free(place: Path) -> str:
    """Describe the free space at a place."""
    try:
        stats = os.statvfs(_existing(place))
    except OSError:
        return "the free space is unknown"
    nbytes = stats.f_bavail * stats.f_frsize
    return f"{in_bytes(nbytes)} and {stats.f_favail} inodes are free there"


def _owner(place: Path) -> str:
    """Describe the owner of the nearest parent that can be examined."""
    for nearest in (place, *place.parents):
        with suppress(OSError):
            status = os.lstat(nearest)
            mode = oct(status.st_mode & 0o7777)[2:]
            return f"{nearest} belongs to uid {status.st_uid}, gid {status.st_gid} with mode {mode}"
    return "its owner is unknown"


def _stickiness(place: Path) -> str:
    """Describe a sticky bit of the directory above a place; empty if it has none."""
    with suppress(OSError):
        if os.stat(place.parent).st_mode & stat.S_ISVTX:
            return (
                f"; {place.parent} has the sticky bit, by which only the owner of what is in it "
                f"may rename, replace or remove that"
            )
    return ""
