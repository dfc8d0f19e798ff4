"""The storage protocol: the operations and promises of a place for checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from holdfast.errors import StorageError

_MAX_NAME = 255
UNKNOWN = {"is_unknown": True}
"""Details of an error that says nothing of what is stored, see `storage.reading.is_unknown`."""
Observer = Callable[[str, str, int, int], None]
"""Called as (operation, path, start, nbytes) before each operation, to count or trace."""


def check_fits(place: str, offset: int, nbytes: int, *, declared: int) -> None:
    """Raise StorageError unless a range lies in a file of the size that was declared for it."""
    if offset < 0 or offset + nbytes > declared:
        raise StorageError(
            f"{place}: {nbytes} bytes at offset {offset} do not fit a file declared with "
            f"{declared} bytes"
        )


class Source(Protocol):
    """An open file to read from; any number of threads may read at once."""

    @property
    def nbytes(self) -> int:
        """Size of the file when it was opened, in bytes."""

    def readinto(self, buffer: memoryview, *, start: int) -> None:
        """Fill `buffer` (bytes, C-contiguous) from offset `start`; a short file is an error."""

    def close(self) -> None:
        """Release the file; a second call does nothing."""


class Sink(Protocol):
    """A file being written, of a size known beforehand; threads may write disjoint ranges."""

    def write_at(self, offset: int, buffer: memoryview) -> None:
        """Write all of `buffer` at `offset`; exceeding the stated size is an error.

        The caller may change `buffer` when this has returned.
        """

    def sync(self) -> None:
        """Return when everything written is durable."""


class Storage(Protocol):
    """A directory tree of files that all processes of a job see alike.

    Paths are relative strings with "/" between names; "" is the root. A path that could leave the
    root (absolute, "..", ".", empty name, NUL) is refused before anything happens, and symbolic
    links below the root are never followed. Every failure is a StorageError that says what, where,
    why and what to do.

    A store must promise the following, and what is named depends on it:

    1. *Atomic rename.* `rename_dir` gives a directory its new name at once or not at all, and
       fails if the name is taken. A checkpoint is committed by this step alone.
    2. *Atomic replacement.* `write_file` and `replace_file` show the old or the new content, never
       a part. The pointer file, tags, records and leases depend on it.
    3. *Durable after sync.* What `Sink.sync` was called for, and every name after `sync_dir` or
       after an operation with `durable=True`, is still there when the machine has stopped, and
       becomes durable in the order of these calls. A committed checkpoint depends on it.
    4. *Read after write, across processes.* A process that lists a directory or opens a file after
       another one has closed, renamed or removed something there sees it, if it has itself written
       to that directory before (which makes a network file system's client look again). The
       committer's wait for the ranks' records and the leases of readers depend on it.
    5. *Exclusive creation.* `create` fails if the name is taken. Two writers never share a file.
    6. *Open files live on.* A pinned or open file gives the bytes it had when it was opened, or an
       error, whatever is renamed over it. A load during an overwrite depends on it.
    7. *One clock.* `age_s` compares times of one clock, good to some seconds, for all processes.
       Leases, heartbeats and repair depend on it. Otherwise a living process could look dead.

    If the processes of a host do not share a page cache for the storage's files (an object store's
    client in each process), it has an attribute `is_cached_on_host = False`. A load then counts the
    reads of each rank.

    A storage where each operation is a request may have more, and what it lacks is done by the
    methods below: `read_at_most`, `reads_at_once`, `range_nbytes` and `least_pause_s`
    (`storage/reading.py`),
    `dirs_with`, `survey` and `annotate` (lists of steps without a look at each), `make_dir_with`,
    `join_dir` and `holds` (directories whose names hold small files), `file_sizes` (of many files
    with one request), `update_file` (a put on condition), `requests` (how many so far, by kind, for
    reports), `note` (see `annotate`), `is_one_place` (its root cannot be unmounted), `stamps_all`
    (the times of all files are by its own clock), `is_durable_at_once` (a rename that can be seen
    is durable),
    `collect_garbage` (for `repair`), `fail_within` (see `reading.py`), `folders` (those that other
    programs have made, which `list` leaves out), and `address` (how a writer process opens it).
    `storage/objects/storage.py` has all of them. One whose processes share a kernel may have
    `locking` and `is_locked` (whether a save has a writer), and one that shows files before they
    are whole `file_stamp` (whether a file is the one that was written, or a copy), as
    `storage/posix.py` has.

    `exchange_dir` may be two renames. `sync_dir` may do nothing if directories cannot be synced:
    then promise 3 depends on the file system.
    """

    def read(self, path: str, *, start: int = 0, nbytes: int | None = None) -> bytes:
        """Return `nbytes` bytes from `start` (None: to the end); a shorter file is an error."""

    def readinto(self, path: str, buffer: memoryview, *, start: int = 0) -> None:
        """Fill `buffer` from offset `start`; a shorter file is an error."""

    def open(self, path: str) -> Source:
        """Open a file for many reads; the caller closes it."""

    def size(self, path: str) -> int:
        """Return the size of a file in bytes."""

    def exists(self, path: str) -> bool:
        """Return True if the name exists, whatever it is (a dangling link exists)."""

    def age_s(self, path: str) -> float:
        """Return the seconds since a file or directory was last changed, by the storage's clock.

        This machine's clock may be minutes off the clock that stamps the files. It is used only if
        nothing can be written that would show the storage's clock.
        """

    def is_dir(self, path: str) -> bool:
        """Return True if it is a directory (a link to one is not)."""

    def list(self, path: str) -> list[str]:
        """Return the names in a directory, sorted, including temporary ones (`.tmp-…`)."""

    def pin(self, path: str) -> AbstractContextManager[Storage]:
        """Give the same storage, for reading, in which `path` remains the directory it is now.

        Under that path it gives the content of this one directory, whatever is renamed or put at
        its name while it is open. The directory may still be removed: then reading raises
        StorageError and never gives the content of another directory.
        """

    def write_file(self, path: str, data: bytes, *, durable: bool = True) -> None:
        """Write a small file as a whole: no reader ever sees a part of it.

        It is durable when this returns, unless `durable` is False. Then a crash of the machine may
        lose its name, or leave the name with other bytes.
        """

    def replace_file(self, path: str, data: bytes, *, durable: bool = True) -> None:
        """Replace a small file atomically: readers see the old or the new one; see `write_file`."""

    def create(self, path: str, *, nbytes: int) -> AbstractContextManager[Sink]:
        """Create a file of `nbytes` to fill through a Sink; it must not exist yet."""

    def make_dir(self, path: str, *, durable: bool = True) -> None:
        """Make a directory and its parents, if they do not exist; the root itself only for "".

        A root that vanishes while it is in use is not made again: what is there instead is not it.

        All these names are durable when this returns, unless `durable` is False. Above the root,
        this holds for names that are new and that this process may sync.
        """

    def sync_dir(self, path: str) -> None:
        """Make the names in a directory durable."""

    def rename_dir(self, src: str, dst: str, *, durable: bool = True) -> None:
        """Rename atomically; an existing destination is an error.

        It is durable when this returns, unless `durable` is False.
        """

    def exchange_dir(self, first: str, second: str) -> None:
        """Exchange the names of two directories durably, and atomically if possible.

        Otherwise `second` has a `.old-…` name for an instant: it is never lost, but does not have
        its name if the machine stops in that instant.
        """

    def remove_tree(
        self, path: str, *, durable: bool = True, only_if: Callable[[str], bool] | None = None
    ) -> None:
        """Remove a file or a directory with its content; links are removed, never followed.

        A directory first loses its name, in one step. Unless `durable` is False, that is durable
        before anything in it is removed, so that it never comes back with a part of its content.
        Several processes may remove the same directory at once. `only_if` is called for a directory
        that has lost its name, with its path now (`.old-…`). If it returns False or raises, the
        directory gets its name back.
        """

    def free_nbytes(self) -> int:
        """Return the bytes that this process may still write."""

    def describe(self, path: str) -> str:
        """Return the path as a person would write it, for messages."""

    def is_shareable(self) -> bool:
        """Return True if another process that opens `local_path` has the same storage."""

    def local_path(self, path: str) -> Path | None:
        """Return the path in the local file system; None if the store is not in one."""


def split_path(path: str) -> tuple[str, ...]:
    """Return the names of a relative path, () for the root; StorageError if it could escape.

    For every store alike.
    """
    if path == "":
        return ()
    names = tuple(path.split("/"))
    if any(name in ("", ".", "..") or "\0" in name or len(name) > _MAX_NAME for name in names):
        raise StorageError(
            f"path {path[:200]!r} is refused: a path must be relative and consist of plain names, "
            'without "." or ".."'
        )
    return names
