"""The storage protocol: what a place for checkpoints must be able to do, see `Storage`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

Observer = Callable[[str, str, int, int], None]
"""Called as (operation, path, start, nbytes) before each operation; for counting and tracing."""


class Source(Protocol):
    """An open file to read from; any number of threads may read at once."""

    @property
    def nbytes(self) -> int:
        """Size of the file when it was opened."""

    def readinto(self, buffer: memoryview, *, start: int) -> None:
        """Fill `buffer` (bytes, C-contiguous) from offset `start`; a short file is an error."""

    def close(self) -> None:
        """Release the file; a second call does nothing."""


class Sink(Protocol):
    """A file being written, of a size known beforehand; threads may write disjoint ranges."""

    @property
    def alignment(self) -> int:
        """Offsets, lengths and addresses in multiples of this go the fast way; others work too."""

    def write_at(self, offset: int, buffer: memoryview) -> None:
        """Write all of `buffer` at `offset`; leaving the stated size is an error."""

    def sync(self) -> None:
        """Return when everything written is durable."""


class Storage(Protocol):
    """A directory tree of files, seen alike by all processes of a job.

    Paths are relative strings with "/" between names; "" is the root. A path that could leave the
    root (absolute, "..", ".", empty name, NUL) is refused before anything happens, and symbolic
    links below the root are never followed. Every failure is a StorageError that says what, where,
    why and what to do.

    What a store must promise, and what depends on it:

    1. *Atomic rename.* `rename_dir` gives a directory its new name at once or not at all, and
       fails where the name is taken. A checkpoint is committed by this step alone.
    2. *Atomic replacement.* `write_file` and `replace_file` show the old or the new content, never
       a part. The pointer file, tags, records and leases depend on it.
    3. *Durable after sync.* What `Sink.sync` was called for, and every name after `sync_dir` or
       after an operation with `durable=True`, is still there when the machine has stopped, and
       becomes durable in the order of these calls. A committed checkpoint depends on it.
    4. *Read after write, across processes.* A process that lists a directory or opens a file after
       another one has closed, renamed or removed something there sees it, if it has itself written
       to that directory before (which makes a network file system's client look again). The
       committer's wait for the ranks' records and the leases of readers depend on it.
    5. *Exclusive creation.* `create` fails where the name is taken. Two writers never share a file.
    6. *Open files live on.* A pinned or open file gives the bytes it had when it was opened, or an
       error, whatever is renamed over it. A load during an overwrite depends on it.
    7. *One clock.* `age_s` compares times of one clock, good to some seconds, for all processes.
       Leases, heartbeats and repair depend on it; without it, what is alive could look dead.

    A storage whose files go through no page cache that processes of a host share (an object store's
    client in each process) has an attribute `is_cached_on_host = False`: a load then counts each
    rank's reads.

    `exchange_dir` may be two renames, and `sync_dir` may do nothing where directories cannot be
    synced: promise 3 then is the file system's own.
    """

    def read(self, path: str, *, start: int = 0, nbytes: int | None = None) -> bytes:
        """`nbytes` bytes from `start` (None: to the end); a shorter file is an error."""

    def readinto(self, path: str, buffer: memoryview, *, start: int = 0) -> None:
        """Fill `buffer` from offset `start`; a shorter file is an error."""

    def open(self, path: str) -> Source:
        """Open a file for many reads; the caller closes it."""

    def size(self, path: str) -> int:
        """Bytes of a file."""

    def exists(self, path: str) -> bool:
        """Whether the name is there, whatever it is (a dangling link is there)."""

    def age_s(self, path: str) -> float:
        """Seconds since a file or directory was last changed, by the storage's own clock.

        The clock that stamps the files is the one to ask, not this machine's, which may be minutes
        off; this machine's only where nothing can be written that would show the other.
        """

    def is_dir(self, path: str) -> bool:
        """Whether it is a directory (a link to one is not)."""

    def list(self, path: str) -> list[str]:
        """Names in a directory, sorted; temporary names (`.tmp-…`) included."""

    def pin(self, path: str) -> AbstractContextManager[Storage]:
        """The same storage, for reading, in which the directory at `path` stays what it is now.

        Under that path it gives the content of this one directory, whatever is renamed, or put in
        its place, while it is open. It does not keep the directory from being removed: what is
        gone is a StorageError, never another directory's content.
        """

    def write_file(self, path: str, data: bytes, *, durable: bool = True) -> None:
        """Write a small file whole: no reader ever sees a part of it.

        It is durable when this returns, unless `durable` is False: then its bytes and its name may
        be lost, or its bytes be wrong, when the machine stops.
        """

    def replace_file(self, path: str, data: bytes, *, durable: bool = True) -> None:
        """Replace a small file atomically: readers see the old or the new one; see `write_file`."""

    def create(self, path: str, *, nbytes: int) -> AbstractContextManager[Sink]:
        """Create a file of `nbytes` to be filled through a Sink; it must not exist yet."""

    def make_dir(self, path: str, *, durable: bool = True) -> None:
        """Make a directory and its parents, the root included; one that is there already is fine.

        All these names are durable when this returns, unless `durable` is False; those above the
        root as far as they are new or this process may sync them.
        """

    def sync_dir(self, path: str) -> None:
        """Make the names in a directory durable."""

    def rename_dir(self, src: str, dst: str, *, durable: bool = True) -> None:
        """Rename atomically; a destination that exists is an error.

        It is durable when this returns, unless `durable` is False.
        """

    def exchange_dir(self, first: str, second: str) -> None:
        """Let two directories change names, durably; atomic where the file system can.

        Elsewhere `second` is for an instant under a `.old-…` name next to its own: never lost, but
        not at its name if the machine stops just then.
        """

    def remove_tree(
        self, path: str, *, durable: bool = True, only_if: Callable[[str], bool] | None = None
    ) -> None:
        """Remove a file or a directory with all in it; links are removed, never followed.

        A directory loses its name first, in one step. Unless `durable` is False that is durable
        before anything in it goes, so that it never comes back with a part of its content. Several
        processes may remove the same directory at once. `only_if` is called for a directory that
        has lost its name, with the path where it is now (`.old-…`); it gets its name back where
        the answer is no, or an error.
        """

    def free_nbytes(self) -> int:
        """Bytes this process may still write."""

    def describe(self, path: str) -> str:
        """The path as a person would write it, for messages."""

    def is_shareable(self) -> bool:
        """Whether another process that opens the same `local_path` has the same storage."""

    def local_path(self, path: str) -> Path | None:
        """The path in the local file system, or None for a store that has none."""
