"""Small files read in as few operations as a storage can, and what else only some storages can.

In a file system an operation costs a microsecond, and a file is examined before it is read. In an
object store each one is a request of some ten milliseconds, and several may be in progress. A store
may therefore have a method `read_at_most` (bytes from `start`, fewer where the file ends) and
numbers `reads_at_once` and `range_nbytes`, and its sources methods `readinto_strips` and
`readinto_views`; without them these functions do what any store can.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

from holdfast.errors import HoldfastError, StorageError
from holdfast.storage.storage_protocol import Source, Storage

A = TypeVar("A")
B = TypeVar("B")


def read_at_most(storage: Storage, path: str, nbytes: int) -> bytes:
    """Return the first bytes of a file, at most `nbytes`; StorageError if it is not there."""
    read = getattr(storage, "read_at_most", None)
    if read is None:
        return storage.read(path, nbytes=min(storage.size(path), nbytes))
    data: bytes = read(path, nbytes)
    return data


def fail_within(storage: Storage, limit_s: float) -> None:
    """Have failed requests sent again for this long at most, from now on, by this process.

    For a process for which others wait no longer: they shall learn what has failed, instead of
    finding that it is late. A storage without requests is asked once and needs no limit.
    """
    limit = getattr(storage, "fail_within", None)
    if limit is not None:
        limit(limit_s)


def read_if_there(
    storage: Storage, path: str, *, max_nbytes: int, too_large: Callable[[], HoldfastError]
) -> bytes | None:
    """Return a whole file; None if it does not exist.

    Raises:
        HoldfastError: What `too_large` returns, if it has more than `max_nbytes` bytes.
        StorageError: It cannot be read.
    """
    read = getattr(storage, "read_at_most", None)
    if read is None:
        if not storage.exists(path):
            return None
        if storage.size(path) > max_nbytes:
            raise too_large()
        return storage.read(path)
    try:
        data: bytes = read(path, max_nbytes + 1)
    except StorageError as error:
        if is_absence(error):
            return None
        raise
    if len(data) > max_nbytes:
        raise too_large()
    return data


def read_strips(
    source: Source, buffer: memoryview, *, start: int, strips: Sequence[tuple[int, int]]
) -> int:
    """Fill strips of a buffer, whose first byte is byte `start` of a file.

    Args:
        source: The file.
        buffer: Bytes; those in no strip are undefined afterwards.
        start: Byte of the file.
        strips: (byte of the buffer, number of bytes) of each, ascending, none in common.

    Returns:
        How many bytes were read: those of the strips where skipping costs no more than reading,
        else all of the buffer.
    """
    read = getattr(source, "readinto_strips", None)
    if read is None:
        source.readinto(buffer, start=start)
        return len(buffer)
    nbytes: int = read(buffer, start=start, strips=strips)
    return nbytes


def fills_views(source: Source) -> bool:
    """Return True if `read_views` takes one operation, however many views there are."""
    return hasattr(source, "readinto_views")


def read_views(source: Source, views: Sequence[memoryview], *, start: int) -> None:
    """Fill memory with the bytes of a file, one view after another.

    Args:
        source: The file.
        views: Of bytes, anywhere in memory.
        start: Byte of the file at which the first one starts.
    """
    read = getattr(source, "readinto_views", None)
    if read is not None:
        read(views, start=start)
        return
    for view in views:
        source.readinto(view, start=start)
        start += len(view)


def is_absence(error: StorageError) -> bool:
    """Return True if an operation failed because nothing is there."""
    return isinstance(error.__cause__, FileNotFoundError)


def is_unknown(error: HoldfastError) -> bool:
    """Return True if an operation failed in a way that says nothing of what is stored there.

    The storage could not be reached, or denies the request. So nothing is damaged or gone for all
    that is known, and no other checkpoint may be taken in its place. All ranks that raise the error
    say the same.
    """
    return bool(error.details.get("is_unknown"))  # `storage_protocol.UNKNOWN`


def read_tail(storage: Storage, path: str, *, nbytes: int, file_nbytes: int) -> bytes | None:
    """Return the last bytes of a file of `file_nbytes`; None if it is of another size."""
    start = max(file_nbytes - nbytes, 0)
    read = getattr(storage, "read_at_most", None)
    if read is None:
        if storage.size(path) != file_nbytes:
            return None
        return storage.read(path, start=start, nbytes=file_nbytes - start)
    data: bytes = read(path, file_nbytes - start + 1, start=start)
    return data if len(data) == file_nbytes - start else None


def for_each(storage: Storage, function: Callable[[A], B], items: Sequence[A]) -> list[B]:
    """Return the results of a function that asks the storage, in order; several at once if it can.

    The first error is raised, in the order of the items.
    """
    return in_threads(function, items, at_once=getattr(storage, "reads_at_once", 1), name="ask")


def in_threads(
    function: Callable[[A], B], items: Sequence[A], *, at_once: int, name: str
) -> list[B]:
    """Return the results of a function, in order, of several items at once; errors as `for_each`.

    Args:
        function: Is called in threads, unless there is one item.
        items: Its arguments.
        at_once: The most threads.
        name: Of the threads, behind `holdfast-`.
    """
    at_once = min(at_once, len(items))
    if at_once <= 1:
        return [function(item) for item in items]
    with ThreadPoolExecutor(at_once, thread_name_prefix=f"holdfast-{name}") as pool:
        return list(pool.map(function, items))


def sizes_below(storage: Storage, directory: str) -> dict[str, int] | None:
    """Return the size of every file below a directory by its path in it; None if it takes a look
    at each file to know them."""
    look = getattr(storage, "file_sizes", None)
    sizes: dict[str, int] | None = look(directory) if look is not None else None
    return sizes


def make_dir_with(storage: Storage, path: str, files: Mapping[str, bytes]) -> None:
    """Make a directory of the first level with small files in it, in one request if they fit."""
    make = getattr(storage, "make_dir_with", None)
    if make is not None:
        make(path, files)
        return
    storage.make_dir(path, durable=False)
    for name, data in files.items():
        storage.write_file(f"{path}/{name}", data, durable=False)


def is_joined(storage: Storage, path: str) -> bool:
    """Return True if another process has made a directory that lacks this process's files."""
    join = getattr(storage, "join_dir", None)
    return bool(storage.is_dir(path) if join is None else join(path))


def held_with_name(storage: Storage, files: Mapping[str, bytes]) -> dict[str, bytes] | None:
    """Return the small files of a directory that its name shall hold, so that no request is theirs.

    All of them or, if they are too large, none; None where names hold no files.
    """
    holds = getattr(storage, "holds", None)
    if holds is None:
        return None
    return dict(files) if holds(files) else {}


def file_stamp(storage: Storage, path: str) -> tuple[int, int] | None:
    """Return inode and time of last change of a file; no copy of it has both.

    None where files appear as a whole, so that a copy of half of one cannot be.
    """
    look = getattr(storage, "file_stamp", None)
    stamp: tuple[int, int] | None = look(path) if look is not None else None
    return stamp


def locking(storage: Storage, directory: str) -> AbstractContextManager[Callable[[], None]]:
    """In the body, or until what it yields is called, share the kernel's lock on a directory.

    A storage without locks does nothing.
    """
    lock = getattr(storage, "locking", None)
    return lock(directory) if lock is not None else nullcontext(lambda: None)


def shared_lock(storage: Storage, directory: str) -> int | None:
    """Return a descriptor that shares the kernel's lock on a directory; None without locks."""
    lock = getattr(storage, "shared_lock", None)
    return lock(directory) if lock is not None else None


def is_locked(storage: Storage, directory: str) -> bool | None:
    """Return whether any process has a directory locked; None if that cannot be known."""
    look = getattr(storage, "is_locked", None)
    return look(directory) if look is not None else None


def requests_of(storage: Storage) -> Counter[str]:
    """Return the requests so far by kind, of a storage that counts them; else nothing."""
    return Counter(getattr(storage, "requests", None) or {})


def is_durable_at_once(storage: Storage) -> bool:
    """Return True if a rename that can be seen is durable, so that it never needs to be undone."""
    return bool(getattr(storage, "is_durable_at_once", False))


def is_cached_on_host(storage: Storage) -> bool:
    """Return True if the processes of a host share a page cache for the storage's files."""
    return bool(getattr(storage, "is_cached_on_host", True))


def range_nbytes(storage: Storage) -> int | None:
    """Return the bytes of a large read where each read is a request; None for a file system's."""
    nbytes: int | None = getattr(storage, "range_nbytes", None)
    return nbytes


def pause_of(storage: Storage) -> float:
    """Return the least seconds between two looks while a process waits for another's files."""
    return float(getattr(storage, "least_pause_s", 0.0))
