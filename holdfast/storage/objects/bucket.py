"""Requests to one bucket, below one prefix: counted, repeated where that is safe, and explained.

A request that was not answered may have been carried out. For a plain put, a get, a listing or a
deletion that makes no difference, so it is sent again. A conditional put is *settled*: the object
is read back, and its bytes, which no other put has, decide.

After a request that got no answer for as long as it may be sent again, each of the next ones is
sent once, with little time, until one is answered: what is to be done after a failure (looks,
cleaning) would else wait as long for each of its requests, and other ranks for all of them.
"""

from __future__ import annotations

import logging
import math
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from holdfast.errors import StorageError
from holdfast.storage.objects._obstore import (
    Failure,
    explain,
    library,
    make_store,
    memory_store,
    untagged,
)
from holdfast.storage.objects.uploads import S3Uploads, Upload
from holdfast.storage.reading import in_threads
from holdfast.storage.storage_protocol import UNKNOWN, Observer

T = TypeVar("T")
Tag = dict[str, str]
"""Which version of an object: what a conditional put compares."""

_PAGE = 1000
"""Names in one answer of a listing, and keys in one request that deletes."""
_NUM_DELETES = 16
_CHUNK_NBYTES = 64 << 10
"""Of an answer, what is copied at a time: still in the cache, and enough for one step here."""
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 10.0
_SHARE_OF_UPLOAD = 2 / 5
_SHARE_OF_REQUEST = 2 / 3
"""Of the seconds that others wait for a failure: those for which a part is sent again, after which
obstore does the same with the request that aborts the upload; and for one request."""
_SHARE_OF_LOOK = 1 / 20
"""Of the seconds for which a request is sent again: those for the next ones, if it was given up."""
_SHORTEST_LOOK_S = 0.2
_REFUSED_S = 3.0
"""Seconds for which a request is sent again whose answer contradicts another one (a put is refused
although its condition holds, an object is absent that a listing shows): a cache may have shown what
was before."""
_WARN_S = 3.0
"""Seconds after which a person ought to know why nothing happens."""
_WARN_AGAIN_S = 30.0


class RequestFailed(Exception):
    """A request failed for good; only within this room, which makes a StorageError of it."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.words)
        self.failure = failure


@dataclass(frozen=True, slots=True)
class Meta:
    """What a store says about an object: size, time of its last change, version."""

    nbytes: int
    changed: float
    tag: Tag


@dataclass(frozen=True, slots=True)
class Put:
    """The outcome of a conditional put: the new version; or None, and what is there instead."""

    tag: Tag | None
    present: tuple[memoryview, Meta] | None


@dataclass(frozen=True, slots=True)
class ObjectListing:
    """The names directly below a prefix: those that lead further, and objects."""

    dirs: frozenset[str]
    objects: Mapping[str, Meta]


class BucketClient:
    """The requests of one process to the objects below one prefix.

    Args:
        scheme: "s3", "gs", "az" or "memory".
        name: Of the bucket.
        prefix: Before each key, without a slash at its end; "" for the whole bucket.
        options: For obstore.
        timeout_s: Seconds for one request.
        retry_s: Seconds for which a request that failed is sent again.
        observer: Called before every request, as (kind, key, start, bytes).
        has_conditions: The store does conditional puts. Otherwise one is a look and a plain put,
            which is good enough for a single writer only.

    Attributes:
        requests: Requests so far, by kind: "get", "head", "put", "list", "delete"; of uploads in
            parts "upload" and "complete", one each, and "part". A request that obstore repeats
            inside an upload counts once.
    """

    def __init__(
        self,
        scheme: str,
        name: str,
        prefix: str,
        options: Mapping[str, Any],
        *,
        timeout_s: float,
        retry_s: float,
        observer: Observer | None,
        has_conditions: bool = True,
    ) -> None:
        self._obstore = library()
        self._scheme, self._name, self._prefix = scheme, name, prefix
        self._place = f"{scheme}://{name}"
        self._make_store = partial(make_store, scheme, name, options)
        self._retry_s, self._timeout_s = retry_s, timeout_s
        self._gave_up_at = -math.inf
        self._make_stores(upload_s=retry_s)
        self._s3_uploads = S3Uploads(self._patient, options) if scheme == "s3" else None
        self._observer = observer
        self._has_conditions = has_conditions
        self._lock = threading.Lock()
        self._unread: set[str] = set()
        self._warned = -_WARN_AGAIN_S
        self._has_said = False
        self.requests: Counter[str] = Counter()

    def _make_stores(self, *, upload_s: float, most_s: float | None = None) -> None:
        """Make obstore's clients.

        Of a single request this class counts and times each try itself; the parts of an upload
        obstore must repeat, since it alone has them.
        """
        self._hasty: Any = None
        if self._scheme == "memory":
            self._patient = self._uploads = memory_store(self._name)
            return
        make = partial(self._make_store, timeout_s=self._timeout_s, most_s=most_s)
        self._patient, self._uploads = make(retry_s=0.0), make(retry_s=upload_s)

    def fail_within(self, limit_s: float) -> None:
        """Send no failed request again for longer than this, from now on.

        Nor is one answer waited for as long, nor are those to the end of a failed upload.
        """
        self._retry_s = min(self._retry_s, limit_s)
        self._timeout_s = min(self._timeout_s, limit_s * _SHARE_OF_REQUEST)
        upload_s = min(self._retry_s, limit_s * _SHARE_OF_UPLOAD)
        self._make_stores(upload_s=upload_s, most_s=self._timeout_s)

    @property
    def _store(self) -> Any:
        """obstore's client for the next request."""
        if not self._is_silent() or self._scheme == "memory":
            return self._patient
        if self._hasty is None:
            self._hasty = self._make_store(
                retry_s=0.0, timeout_s=self._timeout_s, most_s=self._answer_s()
            )
        return self._hasty

    def _is_silent(self) -> bool:
        """Return True if a request was given up not long ago, and none was answered since."""
        return time.monotonic() < self._gave_up_at + self._retry_s

    def _answer_s(self) -> float:
        """Return the seconds to wait for the answer to the next request."""
        if not self._is_silent():
            return self._timeout_s
        return min(self._timeout_s, max(self._retry_s * _SHARE_OF_LOOK, _SHORTEST_LOOK_S))

    def _give_up(self, failure: Failure) -> RequestFailed:
        """Return the error for a request that is not sent again."""
        if failure.kind == "again" and not self._is_silent():
            self._gave_up_at = time.monotonic()
        return RequestFailed(failure)

    def get(
        self, key: str, *, start: int = 0, nbytes: int | None = None, until: float = math.inf
    ) -> tuple[memoryview, Meta] | None:
        """Return bytes of an object, fewer if it ends before, and what it is; None if absent.

        Args:
            key: The object.
            start: The first byte.
            nbytes: How many; None for all.
            until: When it is not sent again any more, by `time.monotonic`, if that is sooner.

        Raises:
            RequestFailed: The store failed, or the object ends before `start` (kind "range").
        """
        options: dict[str, Any] = {}
        if nbytes is not None:
            options["range"] = (start, start + nbytes)
        elif start:
            options["range"] = {"offset": start}

        def ask() -> tuple[memoryview, Meta] | Failure:
            answer = self._obstore.get(self._store, self._key(key), options=options)
            data = memoryview(answer.bytes())
            return _miscounted(answer, len(data)) or (data, _meta(answer.meta))

        return _or_absent(
            lambda: self._send("get", key, ask, start=start, nbytes=nbytes or 0, until=until)
        )

    def get_shown(self, key: str) -> tuple[memoryview, Meta] | None:
        """Read an object that was there, and that a read says is absent; None if it is deleted.

        Raises:
            RequestFailed: As `get`; or a listing still shows the object, and reads do not.
        """
        # Many looks at one name must not wait for it one after the other.
        until = time.monotonic() + (_REFUSED_S if key not in self._unread else 0.0)
        above, _, name = key.rpartition("/")
        for pause_s in _pauses():
            if name not in self.list(above).objects:
                return None
            if (answer := self.get(key)) is not None:
                self._unread.discard(key)
                return answer
            if time.monotonic() + pause_s > until:
                break
            time.sleep(pause_s)
        self._unread.add(key)
        raise RequestFailed(
            Failure(
                "final",
                f"{self._place} shows {self._key(key)} in a listing, and answers reads of it with "
                f"404: check the endpoint, and proxies and gateways on the way",
            )
        )

    def get_into(self, key: str, view: memoryview, *, start: int = 0) -> int | None:
        """Fill a byte view from an object; how many bytes it had there. None if it is absent.

        What arrives goes to its place at once: no other memory holds the answer, and a range of
        any size takes some chunks of 64 KiB. The view is undefined after an error.

        Raises:
            RequestFailed: As `get`.
        """
        options: dict[str, Any] = {"range": (start, start + len(view))}

        def ask() -> int | Failure:
            answer = self._obstore.get(self._store, self._key(key), options=options)
            at = 0
            for chunk in answer.stream(min_chunk_size=_CHUNK_NBYTES):
                end = at + len(chunk)
                if end <= len(view):
                    view[at:end] = memoryview(chunk)
                at = end
            return _miscounted(answer, at) or at

        return _or_absent(lambda: self._send("get", key, ask, start=start, nbytes=len(view)))

    def head(self, key: str) -> Meta | None:
        """Return what an object is; None if it is absent."""

        def ask() -> Meta:
            return _meta(self._obstore.head(self._store, self._key(key)))

        return _or_absent(lambda: self._send("head", key, ask))

    def put(self, key: str, data: bytes | memoryview) -> Tag:
        """Write an object as a whole, whatever is there."""
        return self._send(
            "put",
            key,
            lambda: _tag(self._obstore.put(self._store, self._key(key), data, use_multipart=False)),
            nbytes=len(data),
        )

    def put_if(self, key: str, data: bytes, *, tag: Tag | None) -> Put:
        """Write an object if it still is of version `tag`, or absent for None.

        The bytes must be such that no other put has them. If the answer is lost, the object is read
        back: with these bytes, the put was carried out; if nothing has changed, it was not, and is
        sent again; anything else is another's. A put that is refused while the object is shown as
        the condition needs it is sent again for a moment, too.

        Raises:
            RequestFailed: The store failed, or its conditional puts do not work.
        """
        if not self._has_conditions:
            there = self.get(key)
            if there is not None if tag is None else not _is_of(there, tag):
                return Put(None, there)
            return Put(self.put(key, data), None)
        if tag is not None and not tag:
            raise self._give_up(untagged(self._place))
        mode: Any = "create" if tag is None else tag
        deadline = time.monotonic() + self._retry_s
        refused_until = min(deadline, time.monotonic() + _REFUSED_S)
        for pause_s in _pauses():
            began = time.monotonic()
            failure = self._try(
                "put",
                key,
                lambda: _tag(self._obstore.put(self._store, self._key(key), data, mode=mode)),
                nbytes=len(data),
            )
            if not isinstance(failure, Failure):
                return Put(failure, None)
            if failure.kind == "final":
                raise self._give_up(failure)
            # Also after "exists" and "changed": a first try of ours may be what is there.
            present = self.get(key, until=deadline)
            if present is not None and bytes(present[0]) == data and present[1].tag:
                return Put(present[1].tag, None)
            if failure.kind == "untagged":
                raise self._give_up(failure)
            if present is not None if tag is None else not _is_of(present, tag):
                return Put(None, present)
            until = deadline if failure.kind == "again" else refused_until
            if self._is_silent() or _is_last(began, pause_s, until):
                raise self._give_up(failure if failure.kind == "again" else self._contrary())
            self._warn(failure, deadline)
            time.sleep(pause_s)
        raise AssertionError("the pauses do not end")

    def _contrary(self) -> Failure:
        """Return the failure of a store that refuses puts although their condition holds."""
        return Failure(
            "final",
            f"{self._place} refuses a put on condition that an object is as the store itself shows "
            f"it: its conditional puts (If-None-Match, If-Match) do not work; check the endpoint, "
            f"and proxies and caches on the way, which may change ETags or answer what was before",
        )

    def is_refused(self, key: str, data: bytes, *, tag: Tag | None) -> bool:
        """Put an object on a condition as `put_if` does; return whether the store refuses it.

        Nothing is read back: after a try whose answer was lost the next one is refused, too.
        """
        mode: Any = "create" if tag is None else tag
        try:
            self._send(
                "put",
                key,
                lambda: self._obstore.put(self._store, self._key(key), data, mode=mode),
                nbytes=len(data),
            )
        except RequestFailed as error:
            if error.failure.kind in ("exists", "changed"):
                return True
            raise
        return False

    def upload(
        self, key: str, pieces: Iterable[bytes | memoryview], *, part_nbytes: int, at_once: int
    ) -> None:
        """Write an object in parts as its pieces come; an error in `pieces` aborts it.

        Raises:
            RequestFailed: The store failed, after obstore's own retries. The upload was aborted if
                the store could be asked to.
        """
        sent = 0

        def counted() -> Iterator[bytes | memoryview]:
            nonlocal sent
            for piece in pieces:
                sent += len(piece)
                yield piece

        problem = self._try(
            "upload",
            key,
            lambda: self._obstore.put(
                self._uploads, self._key(key), counted(), use_multipart=True,
                chunk_size=part_nbytes, max_concurrency=at_once,
            ),
        )  # fmt: skip
        with self._lock:
            self.requests["part"] += -(-sent // part_nbytes)
            self.requests["complete"] += 1
        if isinstance(problem, Failure):
            raise self._give_up(problem)

    def list(self, prefix: str) -> ObjectListing:
        """Return the names directly below a prefix ("" for the bucket's own)."""

        def ask() -> ObjectListing:
            answer = self._obstore.list_with_delimiter(self._store, self._key(prefix) or None)
            objects = {_last(each["path"]): _meta(each) for each in answer["objects"]}
            dirs = frozenset(map(_last, answer["common_prefixes"]))
            self._count_pages(len(objects) + len(dirs))
            return ObjectListing(dirs, objects)

        return self._send("list", prefix, ask)

    def list_all(self, prefix: str) -> dict[str, Meta]:
        """Return every object below a prefix, by key."""

        def ask() -> dict[str, Meta]:
            chunks = self._obstore.list(self._store, self._key(prefix) or None, chunk_size=_PAGE)
            objects = {self._below(x["path"]): _meta(x) for chunk in chunks for x in chunk}
            self._count_pages(len(objects))
            return objects

        return self._send("list", prefix, ask)

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects, many with each request; those that are absent are not an error.

        Raises:
            RequestFailed: The store failed, or says of an object that it is absent, and shows it.
        """
        for first in range(0, len(keys), _PAGE):
            batch = keys[first : first + _PAGE]
            if self._delete(batch):
                continue
            # GCS has no request for many: obstore sends one for each, and ends with the first
            # object that is absent. The others are still to go.
            in_threads(self._delete_one, batch, at_once=_NUM_DELETES, name="delete")

    def _delete_one(self, key: str) -> None:
        """Delete an object that may be absent.

        It is looked at: a gateway that does not know the request answers that nothing is there.
        """
        if self._delete([key]) or self.head(key) is None:
            return
        failure = Failure(
            "final",
            f"{self._place} answers a deletion with 404, and still shows the object: check the "
            f"endpoint, and whether the store, or a gateway before it, can delete (DeleteObjects)",
        )
        self._say_undeleted(failure)
        raise RequestFailed(failure)

    def _delete(self, keys: Sequence[str]) -> bool:
        """Delete objects at once; False if the store reports one absent, and others may be left."""
        paths = [self._key(key) for key in keys]
        try:
            self._send("delete", keys[0], lambda: self._obstore.delete(self._store, paths))
        except RequestFailed as error:
            if error.failure.kind != "absent":
                if error.failure.kind == "final":
                    self._say_undeleted(error.failure)
                raise
            return False
        return True

    def _say_undeleted(self, failure: Failure) -> None:
        """Say once that nothing can be deleted: what has to go may stay without any other word.

        A save whose last request this is, is committed, and a load that leaves a lease has loaded.
        """
        with self._lock:
            has_said, self._has_said = self._has_said, True
        if not has_said:
            logging.getLogger("holdfast").warning(
                "%s; what this process is done with (a save's own files, removed checkpoints, "
                "leases) stays there and is paid for, until `holdfast repair` may delete it",
                failure.words,
            )

    def unfinished(self, prefix: str) -> dict[str, Upload]:
        """Return the unfinished uploads below a prefix, by key; none but on S3.

        Of several to one key, one. Raises UploadsUnknown if they cannot be listed.
        """
        if self._s3_uploads is None:
            return {}
        self._note("list", prefix)
        uploads = self._s3_uploads.list(f"{self._key(prefix)}/", timeout_s=self._answer_s())
        return {self._below(each.key): each for each in uploads}

    def abort(self, upload: Upload) -> None:
        """Abort an unfinished upload; UploadsUnknown if that fails."""
        assert self._s3_uploads is not None
        self._note("delete", upload.key)
        self._s3_uploads.abort(upload, timeout_s=self._answer_s())

    def _key(self, key: str) -> str:
        return f"{self._prefix}/{key}" if self._prefix and key else self._prefix or key

    def _below(self, path: str) -> str:
        """Return the key of an object of the bucket: what `_key` has put before it is cut off."""
        return path[len(self._prefix) + 1 :] if self._prefix else path

    def _note(self, kind: str, key: str, start: int = 0, nbytes: int = 0) -> None:
        """Count a request, and let the observer know of it before it is sent."""
        if self._observer is not None:
            self._observer(kind, key, start, nbytes)
        with self._lock:
            self.requests[kind] += 1

    def _count_pages(self, num_names: int) -> None:
        """Count the requests of a listing beyond the first."""
        with self._lock:
            self.requests["list"] += max(num_names - 1, 0) // _PAGE

    def _send(
        self,
        kind: str,
        key: str,
        ask: Callable[[], T | Failure],
        *,
        start: int = 0,
        nbytes: int = 0,
        until: float = math.inf,
    ) -> T:
        """Send a request that does no harm if it is carried out twice, until it is answered."""
        deadline = min(time.monotonic() + self._retry_s, until)
        for pause_s in _pauses():
            began = time.monotonic()
            answer = self._try(kind, key, ask, start=start, nbytes=nbytes)
            if not isinstance(answer, Failure):
                return answer
            if answer.kind != "again" or self._is_silent() or _is_last(began, pause_s, deadline):
                raise self._give_up(answer)
            self._warn(answer, deadline)
            time.sleep(pause_s)
        raise AssertionError("the pauses do not end")

    def _warn(self, failure: Failure, deadline: float) -> None:
        """Say that requests fail and are sent again, if that lasts; seldom, whatever fails."""
        now = time.monotonic()
        with self._lock:
            if now < max(deadline - self._retry_s + _WARN_S, self._warned + _WARN_AGAIN_S):
                return
            self._warned = now
        logging.getLogger("holdfast").warning(
            "%s: %s; trying again, for %.0f s at most", self._place, failure.words, deadline - now
        )

    def _try(
        self,
        kind: str,
        key: str,
        ask: Callable[[], T | Failure],
        *,
        start: int = 0,
        nbytes: int = 0,
    ) -> T | Failure:
        """Send a request once. An error that is not the store's is raised as it is."""
        self._note(kind, key, start, nbytes)
        errors = (self._obstore.exceptions.BaseError, FileNotFoundError, NotImplementedError)
        answer: T | Failure
        try:
            answer = ask()
        except errors as error:
            # Returned, not raised from here: the error would be kept as the context of another
            # one, and its text may have a credential.
            answer = explain(
                error, scheme=self._scheme, bucket=self._name, kind=kind, key=self._key(key)
            )
        if not isinstance(answer, Failure) or answer.kind != "again":
            self._gave_up_at = -math.inf
        return answer


def _miscounted(answer: Any, nbytes: int) -> Failure | None:
    """Return the failure of an answer that has other bytes than it states; None for a good one."""
    first, end = answer.range
    if nbytes == end - first:
        return None
    return Failure(
        "again",
        f"the answer has {nbytes} bytes and states {end - first}: check the endpoint, and proxies "
        f"on the way",
    )


def _or_absent(send: Callable[[], T]) -> T | None:
    """Send a request for an object; None if it is absent."""
    try:
        return send()
    except RequestFailed as error:
        if error.failure.kind == "absent":
            return None
        raise


def unsettled(error: RequestFailed, *, action: str, place: str) -> StorageError:
    """Return the StorageError for a request that failed for good."""
    is_unknown = error.failure.kind in ("again", "untagged", "final")  # the others are answers
    return StorageError(
        f"cannot {action}: {place}: {error.failure.words}", details=UNKNOWN if is_unknown else None
    )


def _pauses() -> Iterator[float]:
    """Yield pauses between tries, each up to twice as long, and random, so that ranks part."""
    # Of the system: the streams of the module random are part of the training state.
    generator = secrets.SystemRandom()
    longest = _FIRST_PAUSE_S
    while True:
        yield generator.uniform(longest / 4, longest)
        longest = min(2 * longest, _LONGEST_PAUSE_S)


def _is_last(began: float, pause_s: float, deadline: float) -> bool:
    """Return True if another try would end after the deadline: it may take as long as the last.

    One that is not answered takes all of `timeout_s`.
    """
    now = time.monotonic()
    return now + pause_s + (now - began) > deadline


def _is_of(present: tuple[memoryview, Meta] | None, tag: Tag) -> bool:
    """Return True if an object is of a version."""
    return present is not None and version_of(present[1].tag) == version_of(tag)


def version_of(tag: Tag) -> str:
    """Return a version as text; of an ETag without its quotes, which some answers lack."""
    return (tag.get("e_tag") or tag.get("version") or "").strip('"')


def _meta(answer: Mapping[str, Any]) -> Meta:
    return Meta(answer["size"], answer["last_modified"].timestamp(), _tag(answer))


def _tag(answer: Mapping[str, Any]) -> Tag:
    """Return the version in an answer, without what it lacks."""
    # moto and some stores answer a put in an unversioned bucket with the version "null". A proxy
    # that compresses marks an ETag as weak (W/), and no condition on a weak one ever holds.
    tag = {key: answer[key].removeprefix("W/") for key in ("e_tag", "version") if answer.get(key)}
    return {key: value for key, value in tag.items() if value != "null"}


def _last(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]
