"""Storage in a directory of a POSIX file system.

Every path is walked name by name from an open directory, without following links, so that no
file outside the root can be reached, not even when another process swaps names meanwhile.
"""

from __future__ import annotations

import builtins
import copy
import errno
import os
import secrets
import shutil
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from holdfast.errors import StorageError
from holdfast.storage.posix import files
from holdfast.storage.posix.files import PosixSink, PosixSource, read_full, write_full
from holdfast.storage.posix.os_errors import storage_error
from holdfast.storage.storage_protocol import Observer, Sink, Source

_DIR_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_NEW_FLAGS = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_UNSYNCABLE = (errno.EINVAL, errno.ENOTSUP, errno.EROFS)
_CLOCK_S = 10.0
"""How long a reading of the storage's clock is used."""
_NUM_SWEEPS = 20


class PosixStorage:
    """The storage protocol over the directory `root` (itself may be a link; it must exist to read).

    `observer` is called before every operation. Holds no open file between calls, but directories
    in `holding_dirs`.
    """

    def __init__(self, root: str | Path, *, observer: Observer | None = None) -> None:
        self._root = Path(root).absolute()
        self._observer = observer
        self._pinned: _Pinned | None = None
        self._held: dict[int, files.HeldDirs] = {}
        self._is_named = False
        self._clock: tuple[float, float] | None = None

    @property
    def root(self) -> Path:
        """The directory all paths are relative to."""
        return self._root

    def __repr__(self) -> str:
        """The root, for messages."""
        return f"PosixStorage({str(self._root)!r})"

    def read(self, path: str, *, start: int = 0, nbytes: int | None = None) -> bytes:
        """See `Storage.read`; memory is taken only for bytes that the file has."""
        with self._reading(path) as fd:
            available = max(os.fstat(fd).st_size - start, 0)
            num_read = available if nbytes is None else nbytes
            if num_read > available or start < 0 or num_read < 0:
                raise StorageError(
                    f"{self.describe(path)}: {num_read} bytes needed at offset {start}, but the "
                    f"file has {start + available} bytes: it is truncated or not what it should be"
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
        """See `Storage.open`; refuses anything but a regular file."""
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

    def exists(self, path: str) -> bool:
        """See `Storage.exists`; a place that cannot be examined is an error, not absent."""
        with self._guard("examine", path):
            return self._mode(path) is not None

    def age_s(self, path: str) -> float:
        """See `Storage.age_s`; the clock is read from a new file's time, every ten seconds."""
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
        names = _split_path(path)
        with self._guard("list", path), self._dir(names[:-1]) as above:
            if not names:
                return sorted(os.listdir(above))
            # Opened now, even if it is held: a network file system's client then looks again.
            fd = os.open(names[-1], _DIR_FLAGS, dir_fd=above)
            try:
                return sorted(os.listdir(fd))
            finally:
                os.close(fd)

    @contextmanager
    def pin(self, path: str) -> Iterator[PosixStorage]:
        """See `Storage.pin`: the directory is held open, and every path below it begins there."""
        names = _split_path(path)
        with self._guard("open", path), self._dir(names) as fd:
            view = copy.copy(self)
            view._pinned = _Pinned(names, os.dup(fd))
        try:
            yield view
        finally:
            os.close(view._pinned.fd)
            view._pinned = _Pinned(names, -1)

    @contextmanager
    def holding_dirs(self) -> Iterator[None]:
        """Keep the directories that calls of this thread open in the body, see `HeldDirs`."""
        thread = threading.get_ident()
        if thread in self._held:
            yield
            return
        self._held[thread] = dirs = files.HeldDirs(self._root)
        try:
            yield
        finally:
            del self._held[thread]
            dirs.close()

    def write_file(self, path: str, data: bytes, *, durable: bool = True) -> None:
        """See `Storage.write_file`: temporary name, file sync, rename, directory sync."""
        self._put("write", path, data, durable=durable)

    def replace_file(self, path: str, data: bytes, *, durable: bool = True) -> None:
        """See `Storage.replace_file`: temporary name, file sync, rename, directory sync."""
        self._put("replace", path, data, durable=durable)

    @contextmanager
    def create(self, path: str, *, nbytes: int) -> Iterator[Sink]:
        """See `Storage.create`; blocks are reserved at once where the file system can."""
        self._observe("create", path, 0, nbytes)
        with self._guard("create", path), self._parent(path) as (parent, name):
            fd = os.open(name, _NEW_FLAGS, 0o666, dir_fd=parent)
        place = self._root / path
        sink = PosixSink(fd, path=path, place=place, nbytes=nbytes, observe=self._observe)
        try:
            # If the disk is full, what it gave before it was is free again.
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
        """See `Storage.make_dir`; makes the root, too."""
        self._observe("make_dir", path, 0, 0)
        names = _split_path(path)
        with self._guard("make the directory", path):
            self._make_root(durable=durable, by_itself=not names)
            for depth in range(len(names)):
                with self._dir(names[:depth]) as fd:
                    with suppress(FileExistsError):
                        os.mkdir(names[depth], dir_fd=fd)
                    # Also of one that is there: its maker may have died before the sync.
                    if durable:
                        _sync_dir_fd(fd)
            with self._dir(names):
                return

    def sync_dir(self, path: str) -> None:
        """See `Storage.sync_dir`; file systems without directory sync are left at that."""
        self._observe("sync_dir", path, 0, 0)
        with self._guard("sync", path), self._dir(_split_path(path)) as fd:
            _sync_dir_fd(fd)

    def rename_dir(self, src: str, dst: str, *, durable: bool = True) -> None:
        """See `Storage.rename_dir`; both parent directories are synced before it returns."""
        self._observe("rename", src, 0, 0)
        with (
            self._guard(f"rename to {self.describe(dst)}", src),
            self._parent(src) as (src_fd, old),
            self._parent(dst) as (dst_fd, new),
        ):
            if not files.rename_noreplace(old, new, src_dir_fd=src_fd, dst_dir_fd=dst_fd):
                if self._mode(dst) is not None:
                    raise FileExistsError(errno.EEXIST, "destination exists")
                os.rename(old, new, src_dir_fd=src_fd, dst_dir_fd=dst_fd)
            if durable:
                _sync_dir_fds(dst_fd, src_fd)

    def exchange_dir(self, first: str, second: str) -> None:
        """See `Storage.exchange_dir`; both parent directories are synced before it returns."""
        self._observe("exchange", first, 0, 0)
        with (
            self._guard(f"exchange with {self.describe(second)}", first),
            self._parent(first) as (first_fd, one),
            self._parent(second) as (second_fd, two),
        ):
            if not files.rename_exchange(one, two, src_dir_fd=first_fd, dst_dir_fd=second_fd):
                aside = f".old-{two[:200]}-{secrets.token_hex(4)}"
                os.stat(one, dir_fd=first_fd, follow_symlinks=False)
                # Synced one by one: a repair could not make sense of later renames without earlier.
                os.rename(two, aside, src_dir_fd=second_fd, dst_dir_fd=second_fd)
                _sync_dir_fd(second_fd)
                os.rename(one, two, src_dir_fd=first_fd, dst_dir_fd=second_fd)
                _sync_dir_fds(second_fd, first_fd)
                os.rename(aside, one, src_dir_fd=second_fd, dst_dir_fd=first_fd)
            _sync_dir_fds(second_fd, first_fd)

    def remove_tree(
        self, path: str, *, durable: bool = True, only_if: Callable[[str], bool] | None = None
    ) -> None:
        """See `Storage.remove_tree`; a directory first gets a `.trash-…` name, in one step."""
        self._observe("remove", path, 0, 0)
        with self._guard("remove", path), self._parent(path) as (fd, name):
            if not stat.S_ISDIR(os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode):
                os.unlink(name, dir_fd=fd)
                return
            if only_if is not None:
                aside = f".old-{name[:200]}-{secrets.token_hex(4)}"
                os.rename(name, aside, src_dir_fd=fd, dst_dir_fd=fd)
                place = "/".join((*_split_path(path)[:-1], aside))
                if not files.is_confirmed(only_if, place, fd=fd, aside=aside, name=name):
                    return
                name = aside
            trash = name
            if not name.startswith(".trash-"):
                trash = f".trash-{name[:200]}-{secrets.token_hex(4)}"
                os.rename(name, trash, src_dir_fd=fd, dst_dir_fd=fd)
            # Also of what has that name already: the process that renamed it may have died here.
            if durable:
                _sync_dir_fd(fd)
            _remove_all(trash, fd)

    def free_nbytes(self) -> int:
        """See `Storage.free_nbytes`; of the nearest parent when the root is not there yet."""
        with self._guard("examine", ""):
            place = self._root
            while not place.exists() and place != place.parent:
                place = place.parent
            stats = os.statvfs(place)
            return stats.f_bavail * stats.f_frsize

    def describe(self, path: str) -> str:
        """The absolute path."""
        return str(self._root / path) if path else str(self._root)

    def is_shareable(self) -> bool:
        """True unless it is observed, pinned or of a derived class: another process lacks these."""
        return type(self) is PosixStorage and self._observer is None and self._pinned is None

    def local_path(self, path: str) -> Path | None:
        """The absolute path; never None here."""
        _split_path(path)
        return self._root / path

    def _observe(self, operation: str, path: str, start: int, nbytes: int) -> None:
        """Call the observer."""
        if self._observer is not None:
            self._observer(operation, path, start, nbytes)

    @contextmanager
    def _guard(self, action: str, path: str) -> Iterator[None]:
        """Raise an OSError of the body as a StorageError."""
        try:
            yield
        except OSError as error:
            place = self._root / path if path else self._root
            raise storage_error(error, action=action, place=place) from error

    @contextmanager
    def _dir(self, names: tuple[str, ...]) -> Iterator[int]:
        """An open directory, reached from the root without following a link."""
        pinned, held = self._pinned, self._held.get(threading.get_ident())
        if pinned is not None and names[: len(pinned.names)] == pinned.names:
            fd = os.open(".", _DIR_FLAGS, dir_fd=pinned.fd)
            names = names[len(pinned.names) :]
        elif held is not None:
            with held.opened(names) as fd:
                yield fd
            return
        else:
            fd = os.open(self._root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
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
        """The open directory that holds a name, and the name."""
        names = _split_path(path)
        if not names:
            raise StorageError(
                f"{self.describe('')}: the root itself cannot be renamed or replaced"
            )
        with self._dir(names[:-1]) as fd:
            yield fd, names[-1]

    def _make_root(self, *, durable: bool, by_itself: bool) -> None:
        """Make the root and what is above it, durably where they are new.

        With `by_itself` its name is synced once even if it is there: its maker may have died before
        that.
        """
        new: list[Path] = []
        place = self._root
        while not place.exists():
            new.append(place)
            place = place.parent
        self._root.mkdir(parents=True, exist_ok=True)
        if by_itself and not self._is_named and not new:
            new.append(self._root.resolve())
        if not durable or not new:
            return
        for place in new:
            # A directory that may be passed through, but not opened, cannot be synced.
            with suppress(PermissionError):
                fd = os.open(place.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                try:
                    _sync_dir_fd(fd)
                finally:
                    os.close(fd)
        self._is_named = True

    def _now(self) -> float:
        """The storage's clock: the time that a file made just now would get."""
        here = time.monotonic()
        if self._clock is None or here - self._clock[1] > _CLOCK_S:
            try:
                ahead = self._stamp() - time.monotonic()
            except OSError:
                return time.time()
            self._clock = (ahead, here)
        return self._clock[0] + time.monotonic()

    def _stamp(self) -> float:
        """The time that a new file gets."""
        name = f".tmp-clock-{secrets.token_hex(4)}"
        with self._dir(()) as root:
            fd = os.open(name, _NEW_FLAGS, 0o666, dir_fd=root)
            try:
                return os.fstat(fd).st_mtime
            finally:
                os.close(fd)
                with suppress(OSError):
                    os.unlink(name, dir_fd=root)

    def _lstat(self, path: str) -> os.stat_result:
        """Status of a name; a link is not followed."""
        if self._pinned is not None and _split_path(path) == self._pinned.names:
            return os.fstat(self._pinned.fd)
        if not path:
            return os.stat(self._root)
        with self._parent(path) as (fd, name):
            return os.stat(name, dir_fd=fd, follow_symlinks=False)

    def _mode(self, path: str) -> int | None:
        """Mode of a name; None where there is none."""
        try:
            return self._lstat(path).st_mode
        except (FileNotFoundError, NotADirectoryError):
            return None

    def _open_regular(self, path: str) -> int:
        """Open a file for reading; StorageError where it is something else."""
        # _READ_FLAGS has O_NONBLOCK: a pipe of that name must not block the open.
        with self._parent(path) as (parent, name):
            fd = os.open(name, _READ_FLAGS, dir_fd=parent)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise StorageError(f"{self.describe(path)} is not a regular file: not opened")
        return fd

    @contextmanager
    def _reading(self, path: str) -> Iterator[int]:
        """A file opened for the body."""
        with self._guard("read", path):
            fd = self._open_regular(path)
            try:
                yield fd
            finally:
                os.close(fd)

    def _put(self, operation: str, path: str, data: bytes, *, durable: bool) -> None:
        """Write under a temporary name, then rename."""
        self._observe(operation, path, 0, len(data))
        with self._guard("write", path), self._parent(path) as (parent, name):
            temporary = f".tmp-{name[:200]}-{secrets.token_hex(4)}"
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


@dataclass(frozen=True, slots=True)
class _Pinned:
    """A directory held open, and the names it was reached by."""

    names: tuple[str, ...]
    fd: int


def _remove_all(name: str, parent: int) -> None:
    """Remove a directory tree that others may be removing, or still put names into, as well."""
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
    """Sync two open directories; once where both are the same."""
    _sync_dir_fd(one)
    if not os.path.sameopenfile(one, other):
        _sync_dir_fd(other)


def _sync_dir_fd(fd: int) -> None:
    """Sync an open directory, where the file system can."""
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in _UNSYNCABLE:
            raise


def _split_path(path: str) -> tuple[str, ...]:
    """The names of a relative path, () for the root; StorageError for one that could escape."""
    if path == "":
        return ()
    names = tuple(path.split("/"))
    if any(name in ("", ".", "..") or "\0" in name or len(name) > 255 for name in names):
        raise StorageError(
            f"path {path[:200]!r} is refused: only relative paths of plain names, "
            'without "." or "..", are opened'
        )
    return names
