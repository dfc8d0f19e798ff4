"""Files in a bucket: one being written, in parts, and one open for reading, by ranges."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TypeVar

from holdfast.errors import StorageError
from holdfast.storage.objects.bucket import BucketClient, RequestFailed, unsettled
from holdfast.storage.reading import in_threads
from holdfast.storage.storage_protocol import check_fits

T = TypeVar("T")

MIN_PART_NBYTES = 5 << 20
"""The smallest part that S3 takes, the last one excepted."""
_MAX_PARTS = 9_000
"""S3 takes 10,000."""
_RANGE_NBYTES = 8 << 20
"""Larger reads are several requests at once."""
_NUM_READS = 8
_QUEUED = 2


class ObjectSink:
    """A file being written; see `Sink`. It appears as a whole when it is synced or closed.

    A file of at most one part is one put. A larger one is uploaded while it is written, several
    parts at once. Pieces that come before their turn wait in memory, so write in order. Bytes that
    are never written are zeros; none can be written twice.

    Cost: a copy of each piece, so memory for `at_once` + 3 parts; none for memory that stays.
    """

    def __init__(
        self,
        bucket: BucketClient,
        key: str,
        *,
        place: str,
        nbytes: int,
        part_nbytes: int,
        at_once: int,
    ) -> None:
        self._bucket, self._key, self._place = bucket, key, place
        self._nbytes = nbytes
        self._part_nbytes = max(part_nbytes, -(-nbytes // _MAX_PARTS))
        self._at_once = at_once
        # Threads write disjoint ranges at once; one of them at a time passes pieces on.
        self._lock = threading.Lock()
        self._next = 0
        self._early: dict[int, bytes] = {}
        self._small = bytearray()
        self._pieces: queue.Queue[bytes | memoryview | None] = queue.Queue(_QUEUED)
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._has_ended = threading.Event()
        self._is_aborted = False
        self._is_done = False
        self._is_whole = False

    def write_at(self, offset: int, buffer: memoryview) -> None:
        """See `Sink.write_at`; waits while `at_once` parts are on their way."""
        self._write(offset, buffer, is_kept=False)

    def write_kept(self, offset: int, buffer: memoryview) -> None:
        """Write from memory that stays and does not change until `sync` or `abort` has returned.

        It is sent from there, without a copy.
        """
        self._write(offset, buffer, is_kept=True)

    def _write(self, offset: int, buffer: memoryview, *, is_kept: bool) -> None:
        check_fits(self._place, offset, buffer.nbytes, declared=self._nbytes)
        if self._is_done:
            raise StorageError(f"{self._place} was synced: an object cannot be changed after that")
        view = buffer.cast("B")
        if not view:  # it must not take the place of what comes there
            return
        with self._lock:
            if offset < self._next or offset in self._early:
                raise self._written_twice(offset)
            if offset > self._next:
                self._early[offset] = bytes(view)
                return
            self._pass_on(view, is_kept=is_kept)
            while (early := self._early.pop(self._next, None)) is not None:
                self._pass_on(memoryview(early))

    def sync(self) -> None:
        """See `Sink.sync`: complete the upload."""
        if self._is_whole:
            return
        if self._is_done:
            raise StorageError(f"{self._place} could not be written before: write it again")
        with self._lock:
            self._fill_gaps()
            self._is_done = True
        try:
            if self._nbytes <= self._part_nbytes:
                self._put_small()
            else:
                self._put(None)
                assert self._thread is not None
                self._thread.join()
                self._raise_error()
        except RequestFailed as error:
            raise unsettled(error, action="write", place=self._place) from None
        self._is_whole = True

    def _put_small(self) -> None:
        """Write a file of one part, unless another one is there by now."""
        data = bytes(self._small)
        if self._bucket.put_if(self._key, data, tag=None).tag is None:
            raise taken("write", self._place, self._key)

    def abort(self) -> None:
        """End the upload so that nothing of it stays, as far as the store can be asked."""
        self._is_done = self._is_aborted = True
        if self._thread is not None:
            self._put(None)
            self._thread.join()

    def _fill_gaps(self) -> None:
        """Pass on what came early, and zeros for what was never written."""
        for start in sorted(self._early):
            if start < self._next:
                raise self._written_twice(start)
            self._pass_zeros(start - self._next)
            self._pass_on(memoryview(self._early.pop(start)))
        self._pass_zeros(self._nbytes - self._next)

    def _written_twice(self, offset: int) -> StorageError:
        return StorageError(
            f"{self._place}: the byte at offset {offset} was written before: what is on its way to "
            f"an object store cannot be changed"
        )

    def _pass_zeros(self, nbytes: int) -> None:
        while nbytes > 0:
            count = min(nbytes, self._part_nbytes)
            self._pass_on(memoryview(bytes(count)))
            nbytes -= count

    def _pass_on(self, view: memoryview, *, is_kept: bool = False) -> None:
        """Give the next bytes to the upload."""
        self._next += len(view)
        if self._nbytes <= self._part_nbytes:
            self._small += view
            return
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._upload, name="holdfast-upload", daemon=True
            )
            self._thread.start()
        for start in range(0, len(view), self._part_nbytes):
            piece = view[start : start + self._part_nbytes]
            # Copied: the caller may change its memory when this returns, and the upload be later.
            self._put(piece if is_kept else bytes(piece))

    def _put(self, piece: bytes | memoryview | None) -> None:
        """Queue a piece, waiting for room; the upload's error ends the waiting."""
        while True:
            if self._has_ended.is_set() and piece is not None:
                self._raise_error()
            try:
                self._pieces.put(piece, timeout=0.1)
                return
            except queue.Full:
                if self._has_ended.is_set():
                    return

    def _upload(self) -> None:
        """Upload the pieces until their end, in a thread of its own."""
        try:
            self._bucket.upload(
                self._key, self._take(), part_nbytes=self._part_nbytes, at_once=self._at_once
            )
        except BaseException as error:
            self._error = error
        finally:
            self._has_ended.set()

    def _take(self) -> Iterator[bytes | memoryview]:
        while (piece := self._pieces.get()) is not None:
            yield piece
        if self._is_aborted:
            raise _AbortedError

    def _raise_error(self) -> None:
        """Raise the error of the upload, unless the object is there after all."""
        error = self._error
        if isinstance(error, RequestFailed):
            # The answer to its last request may have been lost. No other process writes this name,
            # and a part of an upload never shows: an object of this size is this one.
            meta = None
            with suppress(RequestFailed):  # the upload's own error says more
                meta = self._bucket.head(self._key) if self._is_done else None
            if meta is None or meta.nbytes != self._nbytes:
                raise unsettled(error, action="write", place=self._place)
        elif error is not None and not isinstance(error, _AbortedError):
            raise error


class _AbortedError(Exception):
    """Ends an upload that its writer gives up."""


class ObjectSource:
    """A file open for reading; see `Source`.

    Data of a checkpoint is never changed under its prefix, so nothing is asked when it is opened.
    """

    step_nbytes = 16 << 20
    """Bytes to read at once where more than these are wanted."""
    knows_size = False
    """Its size is a request: compare it only where the bytes are not verified."""

    def __init__(
        self, bucket: BucketClient, key: str, *, place: str, nbytes: int | None = None
    ) -> None:
        self._bucket, self._key, self._place = bucket, key, place
        self._size = nbytes

    @property
    def nbytes(self) -> int:
        """Size of the file; one request, the first time."""
        if self._size is None:
            try:
                meta = self._bucket.head(self._key)
            except RequestFailed as error:
                raise unsettled(error, action="read", place=self._place) from None
            if meta is None:
                raise absent("open", self._place)
            self._size = meta.nbytes
        return self._size

    def readinto(self, buffer: memoryview, *, start: int) -> None:
        """See `Source.readinto`; a large read is several requests at once."""
        read_into(self._bucket, self._key, buffer.cast("B"), start, place=self._place)

    def close(self) -> None:
        """Do nothing: no connection belongs to a file."""


class HeldSource:
    """A small file whose bytes are at hand; see `Source`."""

    step_nbytes = ObjectSource.step_nbytes
    knows_size = True

    def __init__(self, data: bytes, *, place: str) -> None:
        self._data, self._place = data, place

    @property
    def nbytes(self) -> int:
        """Size of the file."""
        return len(self._data)

    def readinto(self, buffer: memoryview, *, start: int) -> None:
        """See `Source.readinto`."""
        view = buffer.cast("B")
        data = self._data[start : start + len(view)]
        if len(data) != len(view):
            raise truncated(self._place, start=start, nbytes=len(view), available=len(data))
        view[:] = data

    def close(self) -> None:
        """Do nothing."""


def read_into(bucket: BucketClient, key: str, view: memoryview, start: int, *, place: str) -> None:
    """Fill a byte view from an object; StorageError if it is absent or too short."""
    if len(view) <= 2 * _RANGE_NBYTES:
        _read_range(bucket, key, view, start, place)
        return

    def read(at: int) -> None:
        _read_range(bucket, key, view[at : at + _RANGE_NBYTES], start + at, place)

    starts = range(0, len(view), _RANGE_NBYTES)
    in_threads(read, starts, at_once=_NUM_READS, name="range")


def _read_range(bucket: BucketClient, key: str, view: memoryview, start: int, place: str) -> None:
    if not len(view):
        return
    nbytes = _answer_of(lambda: bucket.get_into(key, view, start=start), beyond=0, place=place)
    if nbytes != len(view):
        raise truncated(place, start=start, nbytes=len(view), available=nbytes)


def fetch(
    bucket: BucketClient, key: str, *, start: int = 0, nbytes: int | None = None, place: str
) -> memoryview:
    """Return at most `nbytes` bytes from `start`; StorageError if the object is absent."""

    def ask() -> memoryview | None:
        answer = bucket.get(key, start=start, nbytes=nbytes)
        return None if answer is None else answer[0]

    return _answer_of(ask, beyond=memoryview(b""), place=place)


def _answer_of(ask: Callable[[], T | None], *, beyond: T, place: str) -> T:
    """Return the answer to a read; `beyond` if the object ends before the range.

    Raises:
        StorageError: The object is absent, or cannot be read.
    """
    try:
        answer = ask()
    except RequestFailed as error:
        if error.failure.kind != "range":
            raise unsettled(error, action="read", place=place) from None
        return beyond
    if answer is None:
        raise absent("read", place)
    return answer


def truncated(place: str, *, start: int, nbytes: int, available: int) -> StorageError:
    """Return the error for an object that ends too early."""
    return StorageError(
        f"{place}: {nbytes} bytes are needed at offset {start}, but the object ends at byte "
        f"{start + available}: it is truncated, or not the file that was written"
    )


def taken(action: str, place: str, path: str) -> StorageError:
    """Return the error for a name that is taken, with the cause that a caller looks for."""
    error = StorageError(
        f"cannot {action}: {place}: an existing name is never overwritten; remove it or choose "
        f"another"
    )
    error.__cause__ = FileExistsError(path)
    return error


def absent(action: str, place: str) -> StorageError:
    """Return the error for a file that is not there, with the cause that a caller looks for."""
    error = StorageError(
        f"cannot {action}: {place}: it does not exist, or is a directory and not a regular file"
    )
    error.__cause__ = FileNotFoundError(place)
    return error
