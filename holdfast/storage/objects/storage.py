"""`ObjectStorage`: the storage protocol over one prefix of a bucket."""

from __future__ import annotations

import builtins
import copy
import math
import re
import secrets
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from holdfast.errors import ConfigError, CorruptionError, StorageError
from holdfast.storage.objects._obstore import Failure, Options
from holdfast.storage.objects.bucket import (
    BucketClient,
    Meta,
    ObjectListing,
    RequestFailed,
    Tag,
    unsettled,
)
from holdfast.storage.objects.files import (
    MIN_PART_NBYTES,
    HeldSource,
    ObjectSink,
    ObjectSource,
    absent,
    fetch,
    read_into,
    taken,
    truncated,
)
from holdfast.storage.objects.names import (
    DATA,
    INNER,
    MAX_HELD_NBYTES,
    NUM_TRIES,
    SUFFIX,
    NameNotes,
    NameRecord,
    Names,
    busy,
    listed_names,
    used_names,
)
from holdfast.storage.objects.uploads import Upload, UploadsUnknown
from holdfast.storage.objects.urls import parse_url
from holdfast.storage.storage_protocol import Observer, Sink, Source, split_path

T = TypeVar("T")

FIXED_DIRS = frozenset({"tags", ".reading", ".plans", "events"})
"""Directories that are never renamed: their files are objects under their own names."""
_DIRS_ONLY = re.compile(r"iter_[0-9]{7,18}|\.(saving|old|replaced)-.+", re.DOTALL)
"""Names at the root that only directories have. So it takes no request to know that none of them
is a file's."""
_SAVING = re.compile(r"\.saving-(iter_[0-9]{7,18})-.+", re.DOTALL)
"""Names of directories that are made to get the name of a step."""
_CLOCK = f"{INNER}/clock"
_PROBE = f"{INNER}/probe"
_CLOCK_S = 600.0
"""Seconds for which a reading of the store's clock is used."""
_SURE_S = 10.0
"""Seconds for which a reading may call something older than that: the clock may be set back."""
_RESOLVED_S = 10.0
"""Seconds for which the prefix of a directory with a dot is remembered: less than a save must be
silent before a repair takes it for abandoned."""
_GARBAGE_S = 3600.0
"""Seconds after its last write, and after it was seen without a name, for which data is left alone.
"""
_MARK = ".unnamed"
"""The end of the key of a mark: when data was seen without a name, next to its prefix."""
_MAX_PART_NBYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """What one look at a root shows: its names, and by directory the files and the note.

    `moved` are names of saves that were committed, and that nobody could delete; `unread` those
    that are there, and damaged or denied.
    """

    names: Sequence[str]
    moved: Collection[str]
    files: Mapping[str, Sequence[str]]
    notes: Mapping[str, str]
    unread: Collection[str]


class ObjectStorage:
    """The storage protocol over a prefix of a bucket: `s3://bucket/run`, `gs://`, `az://`.

    What differs from a file system:

    - Only directories of the first level can be renamed, exchanged, pinned or removed
      conditionally; those in `FIXED_DIRS` cannot. Directories inside of them are implied by the
      files in them.
    - A file appears as a whole when its sink is synced or closed.
    - `remove_tree` of a file below a directory that is not there is no error.

    Credentials, endpoint and region come from the environment, as the cloud's own tools read them
    (`AWS_…`, `GOOGLE_…`, `AZURE_…`), or from `options`. They are never written anywhere.

    Args:
        url: The place. `memory://name` is in the memory of this process, for tests.
        single_writer: Use a store without conditional puts. Then nothing protects two jobs, or a
            job and a repair, from each other: only one process may save, remove or repair here.
        part_nbytes: Bytes of a part of an upload, 5 to 64 MiB.
        uploads_at_once: Parts of one file that are on their way at once.
        timeout_s: Seconds for one request.
        retry_s: Seconds for which a failed request is sent again.
        observer: Called before every request, as (kind, key, start, bytes).
        options: Settings of obstore for this cloud: `endpoint`, `region`, `access_key_id`, ….

    Raises:
        ConfigError: The URL or an option is wrong, or obstore is not installed.
    """

    is_cached_on_host = False
    """Processes of a host share no page cache for objects."""
    is_one_place = True
    """A URL leads to one bucket, from every host and at any time; a directory may be a mount."""
    reads_at_once = 16
    """Requests for small files that one process may have in progress."""
    range_nbytes = 16 << 20
    """Bytes of one request of a large read. More would save hardly any time where a request takes
    0.1 s to begin, and eight at once must be answered within `timeout_s` by a slow network, too."""
    stamps_all = True
    """Ages are by the clock that stamps the objects, not by what a process says of its own."""
    is_durable_at_once = True
    """What a process sees has been stored."""
    least_pause_s = 0.25
    """Seconds between two looks while a process waits for another: each look is a request."""

    def __init__(
        self,
        url: str,
        *,
        single_writer: bool = False,
        part_nbytes: int = 16 << 20,
        uploads_at_once: int = 8,
        timeout_s: float = 30.0,
        retry_s: float = 120.0,
        observer: Observer | None = None,
        **options: Any,
    ) -> None:
        options = Options(options)
        if not MIN_PART_NBYTES <= part_nbytes <= _MAX_PART_NBYTES:
            raise ConfigError(f"part_nbytes must be 5 to 64 MiB, not {part_nbytes} bytes")
        place = parse_url(url)
        self._place = place
        self._settings = Options(
            single_writer=single_writer,
            part_nbytes=part_nbytes,
            uploads_at_once=uploads_at_once,
            timeout_s=timeout_s,
            retry_s=retry_s,
            **options,
        )
        self._is_observed = observer is not None
        self._bucket = BucketClient(
            place.scheme, place.bucket, place.prefix, options, timeout_s=timeout_s,
            retry_s=retry_s, observer=observer, has_conditions=not single_writer,
        )  # fmt: skip
        self._names = Names(self._bucket)
        self._single_writer = single_writer
        self._is_proven = False
        self._pinned: tuple[str, NameRecord] | None = None
        # By key, of a pinned directory that was listed: what is there never changes.
        self._sizes: dict[str, int] = {}
        self._resolved: dict[str, tuple[NameRecord, float]] = {}
        # Readings of the store's clock, the newest last: its time at the start of this machine's
        # count of seconds, and when that was last thought to be so.
        self._clock: tuple[tuple[float, float], ...] = ()
        self._updated: dict[str, tuple[bytes, Tag]] = {}

    @property
    def url(self) -> str:
        """The place, without credentials or options."""
        return self._place.url

    @property
    def requests(self) -> Counter[str]:
        """Requests of this object so far, by kind; with what `pin` gave."""
        return self._bucket.requests

    def __repr__(self) -> str:
        """Return the place, for messages."""
        return f"ObjectStorage({self.url!r})"

    def fail_within(self, limit_s: float) -> None:
        """See `storage.reading.fail_within`; another process that opens it has its full time."""
        self._bucket.fail_within(limit_s)

    # ---- Reading ----

    def read(self, path: str, *, start: int = 0, nbytes: int | None = None) -> bytes:
        """See `Storage.read`; one request, and one for the directory's name."""
        place = self.describe(path)
        if start < 0 or (nbytes or 0) < 0:
            raise StorageError(f"{place}: {nbytes} bytes at offset {start} are not in any file")
        data = self._fetch(path, start, nbytes)
        if nbytes is not None and len(data) != nbytes:
            raise truncated(place, start=start, nbytes=nbytes, available=len(data))
        return bytes(data)

    def read_at_most(self, path: str, nbytes: int, *, start: int = 0) -> bytes:
        """Return bytes from `start`, fewer than `nbytes` if the file ends before; one request."""
        return bytes(self._fetch(path, start, nbytes))

    def _fetch(self, path: str, start: int, nbytes: int | None) -> memoryview:
        """Return the bytes of a file from `start`, at most `nbytes` of them (None: all)."""
        key, held = self._file(path, "read")
        if held is not None:
            return memoryview(held)[start : None if nbytes is None else start + nbytes]
        if nbytes == 0:  # no range is empty
            self.size(path)
            return memoryview(b"")
        return fetch(self._bucket, key, start=start, nbytes=nbytes, place=self.describe(path))

    def readinto(self, path: str, buffer: memoryview, *, start: int = 0) -> None:
        """See `Storage.readinto`; a large read is several requests at once."""
        key, held = self._file(path, "read")
        if held is not None:
            HeldSource(held, place=self.describe(path)).readinto(buffer, start=start)
            return
        if not buffer.nbytes:  # no range is empty
            self.size(path)
            return
        read_into(self._bucket, key, buffer.cast("B"), start, place=self.describe(path))

    def open(self, path: str) -> Source:
        """See `Storage.open`; of a pinned directory without a request."""
        (key, held), place = self._file(path, "open"), self.describe(path)
        if held is not None:
            return HeldSource(held, place=place)
        if self._pinned is not None:
            return ObjectSource(self._bucket, key, place=place, nbytes=self._sizes.get(key))
        source = ObjectSource(self._bucket, key, place=place)
        _ = source.nbytes  # whether it is there
        return source

    def size(self, path: str) -> int:
        """See `Storage.size`."""
        key, held = self._file(path, "examine")
        if held is not None:
            return len(held)
        meta = self._do("examine", path, lambda: self._bucket.head(key))
        if meta is None:
            raise absent("examine", self.describe(path))
        return meta.nbytes

    def exists(self, path: str) -> bool:
        """See `Storage.exists`; of a directory whose name is damaged, a read has the reason."""
        names = split_path(path)
        if len(names) > 1 and not self._is_in_fixed(names):
            try:
                record = self._do("examine", path, lambda: self._find(names[0]))
            except CorruptionError:
                return True
            if record is None or "/".join(names[1:]) in record.held:
                return record is not None
        return self._do("examine", path, lambda: self._examine(path) is not None)

    def age_s(self, path: str) -> float:
        """See `Storage.age_s`; every ten minutes an object is written to see the store's clock.

        A directory's age is that of its name: since it was made or renamed. The root has none.
        """
        names = split_path(path)
        if not names or (len(names) == 1 and names[0] in FIXED_DIRS):
            return 0.0
        changed = self._do("examine", path, lambda: self._examine(path))
        if changed is None:
            raise absent("examine", self.describe(path))
        return self._do("examine", path, lambda: self._since(changed))

    def is_dir(self, path: str) -> bool:
        """See `Storage.is_dir`; a directory inside another is one if a file is in it."""
        names = split_path(path)
        return self._do("examine", path, lambda: self._is_dir(names))

    def list(self, path: str) -> builtins.list[str]:
        """See `Storage.list`; one request for each thousand names.

        Inside a directory, what has no file in it has no names.
        """
        names = split_path(path)
        if not names:
            return self._names_in(self._do("list", "", lambda: self._bucket.list("")))
        if self._is_in_fixed(names):
            listing = self._do("list", path, lambda: self._bucket.list(path))
            return sorted({*listing.dirs, *listing.objects})
        record = self._resolve(names[0], "list", path)
        key = self._names.data_key(record, *names[1:])
        listing = self._do("list", path, lambda: self._bucket.list(key))
        below = "/".join((*names[1:], ""))
        held = {
            each[len(below) :].partition("/")[0] for each in record.held if each.startswith(below)
        }
        is_over = set(_over(record)) if len(names) == 1 else set()
        return sorted({*listing.dirs, *listing.objects, *held} - is_over)

    def dirs_with(self, file: str) -> dict[str, bool]:
        """Return which directories of the first level had a file when they got their name.

        Only names without a dot, which a whole directory gets in one step. One that is removed
        after the listing had it not; of one that cannot be read, a read of it has the reason. Two
        requests, and one for each name that has changed since this process looked and that the
        newest does not know.
        """
        listing, records, unread = self._look()
        names = (name for name in listed_names(listing) if not name.startswith("."))
        return {
            name: name in unread or (name in records and file in records[name].files)
            for name in names
        }

    def survey(self) -> Survey:
        """Return all names of the first level, and what is known of the directories; two requests.

        See `dirs_with` for what is known without a request for each.
        """
        listing, records, unread = self._look()
        made_for = {record.prefix.partition("-")[2] for record in records.values()}
        names = self._names_in(listing)
        return Survey(
            names=names,
            moved={name for name in names if name[:200] in made_for and name.startswith(".")},
            files={name: record.files for name, record in records.items()},
            notes={name: record.note for name, record in records.items() if record.note},
            unread=unread,
        )

    def annotate(
        self,
        path: str,
        note: str,
        files: Sequence[str],
        *,
        held: Mapping[str, bytes] | None = None,
        aside: Sequence[str] = (),
    ) -> None:
        """Give a directory a short text, kept with its name from the next `rename_dir` on.

        Args:
            path: The directory.
            note: The text.
            files: The names in it, which need not be listed then.
            held: Small files that its name shall hold from then on instead of those that it holds;
                see `holds`.
            aside: Files below it that are not part of it from then on, and are deleted.
        """
        record = self._do("examine", path, lambda: self._find(path))
        if record is not None:  # else there is nothing to rename either
            notes = NameNotes(prefix=record.prefix, text=note, files=files, held=held, aside=aside)
            self._names.annotate(path, notes)

    def holds(self, files: Mapping[str, bytes]) -> bool:
        """Return True if a directory's name can hold these files, so that they take no request."""
        return sum(map(len, files.values())) <= MAX_HELD_NBYTES

    def note(self, path: str) -> str:
        """Return the text that a directory got by `annotate`; empty for none. One request."""
        record = self._do("examine", path, lambda: self._find(path))
        return record.note if record is not None else ""

    def file_sizes(self, path: str) -> dict[str, int]:
        """Return the size of every file below a directory, by its path in it.

        One request for each thousand files.
        """
        record = self._resolve(split_path(path)[0], "list", path)
        names = split_path(path)
        key = self._names.data_key(record, *names[1:])
        objects = self._do("list", path, lambda: self._bucket.list_all(key))
        if self._pinned is not None:
            self._sizes.update((name, meta.nbytes) for name, meta in objects.items())
        below = "/".join((*names[1:], ""))
        sizes = {name[len(key) + 1 :]: meta.nbytes for name, meta in objects.items()}
        sizes |= {
            name[len(below) :]: len(data)
            for name, data in record.held.items()
            if name.startswith(below)
        }
        is_over = _over(record) if len(names) == 1 else ()
        return {name: size for name, size in sizes.items() if name.partition("/")[0] not in is_over}

    @contextmanager
    def pin(self, path: str) -> Iterator[ObjectStorage]:
        """See `Storage.pin`: the prefix is kept, which no other directory ever has."""
        names = split_path(path)
        view = self
        if names:
            if len(names) > 1 or names[0] in FIXED_DIRS:
                raise _refused("pin", self.describe(path))
            view = copy.copy(self)
            view._pinned = (names[0], self._resolve(names[0], "open", path))
            view._sizes = {}
        yield view

    # ---- Writing ----

    def write_file(self, path: str, data: bytes, *, durable: bool = True) -> None:
        """See `Storage.write_file`; durable in any case."""
        key = self._new_key(path, "write")
        self._do("write", path, lambda: self._bucket.put(key, data))

    def replace_file(self, path: str, data: bytes, *, durable: bool = True) -> None:
        """See `Storage.replace_file`; durable in any case."""
        self.write_file(path, data)

    def update_file(self, path: str, make: Callable[[bytes | None], bytes | None]) -> bool:
        """Replace a small file by what `make` returns, unless another process does meanwhile.

        Then `make` is called again: so the file has what was made after the last look at it. It is
        given what this process has written last, as long as no other is known to have changed it.
        Return False if nothing was written: `make` returned None, or the content is there. One put,
        if this process wrote it last and nothing has changed it. Files of equal content are equal.
        """
        key = self._new_key(path, "write")
        known = self._updated.pop(path, None)
        own, has_looked = (known[0] if known is not None else None), known is not None
        for _ in range(NUM_TRIES):
            if (data := make(own)) is None:
                return False
            if not has_looked or (known is not None and known[0] == data):
                # What this process remembers may be of long ago; what is there now counts.
                known = self._do("read", path, lambda: self._content(key))
                own, has_looked = None, True
                if known is not None and known[0] == data:
                    self._updated[path] = known
                    return False
                if known is not None:
                    continue
            tag = known[1] if known is not None else None
            put = self._do("write", path, partial(self._bucket.put_if, key, data, tag=tag))
            if put.tag is not None:
                self._updated[path] = data, put.tag
                return True
            known = (bytes(put.present[0]), put.present[1].tag) if put.present else None
            own = None
        raise unsettled(busy(path), action="write", place=self.describe(path))

    def _content(self, key: str) -> tuple[bytes, Tag] | None:
        answer = self._bucket.get(key)
        return (bytes(answer[0]), answer[1].tag) if answer is not None else None

    @contextmanager
    def create(self, path: str, *, nbytes: int) -> Iterator[Sink]:
        """See `Storage.create`; the file appears when the sink is synced, or after the body.

        If two processes create one file at once, a file of one part is refused when it is synced. A
        larger one is not: names of data files are unique to a save and a rank.
        """
        key = self._new_key(path, "create")
        # Not in a directory: its files are one rank's of one save. There a small file's own put is
        # on condition that it is new; a large one has no such put.
        is_inner = "/" in path
        if not is_inner and self._do("create", path, lambda: self._bucket.head(key)) is not None:
            raise taken("create", self.describe(path), path)
        sink = ObjectSink(
            self._bucket, key, place=self.describe(path), nbytes=nbytes,
            part_nbytes=self._settings["part_nbytes"], at_once=self._settings["uploads_at_once"],
        )  # fmt: skip
        try:
            yield sink
        except BaseException:
            sink.abort()
            raise
        sink.sync()

    def make_dir(self, path: str, *, durable: bool = True) -> None:
        """See `Storage.make_dir`; one conditional put for the name of the first level."""
        names = split_path(path)
        if not names or names[0] in FIXED_DIRS or self._remembered(names[0]) is not None:
            return
        self._make(names[0], {})

    def make_dir_with(self, path: str, files: Mapping[str, bytes]) -> None:
        """Make a directory of the first level with small files in it.

        One conditional put, if its name can hold them; a plain one for each file otherwise.
        """
        is_small = self.holds(files)
        self._make(path, files if is_small else {})
        for name, data in {} if is_small else files.items():
            self.write_file(f"{path}/{name}", data)

    def join_dir(self, path: str) -> bool:
        """Return True if a directory is there, which lacks this process's files to be whole.

        One request: so it cannot have been given another name, and nothing else is looked at.
        """
        record = self._do("make the directory", path, lambda: self._names.join(path))
        if record is not None:
            self._remember(path, record)
        return record is not None

    def _make(self, name: str, files: Mapping[str, bytes]) -> None:
        self._prove()
        to = _SAVING.fullmatch(name)
        record = self._do(
            "make the directory",
            name,
            lambda: self._names.make(name, to=to[1] if to is not None else "", held=files),
        )
        self._remember(name, record)

    def sync_dir(self, path: str) -> None:
        """See `Storage.sync_dir`: every put is durable, so this only looks whether it is there."""
        names = split_path(path)
        if names and not self._is_in_fixed(names) and names[0] not in self._resolved:
            self._resolve(names[0], "sync", path)

    def rename_dir(self, src: str, dst: str, *, durable: bool = True) -> None:
        """See `Storage.rename_dir`; the one conditional put of the new name makes it."""
        self._check_first_level(src, dst)
        self._prove()
        self._forget(src, dst)
        action = f"rename to {self.describe(dst)}"
        if self._do(action, dst, lambda: self._examine(dst, is_dir=False)) is not None:
            raise taken(action, self.describe(src), dst)
        try:
            self._do(action, src, lambda: self._names.move(src, dst))
        except FileExistsError:
            raise taken(action, self.describe(src), dst) from FileExistsError(dst)
        finally:
            self._forget(src, dst)

    def exchange_dir(self, first: str, second: str) -> None:
        """See `Storage.exchange_dir`: atomic."""
        self._check_first_level(first, second)
        self._prove()
        self._forget(first, second)
        action = f"exchange with {self.describe(second)}"
        try:
            self._do(action, first, lambda: self._names.exchange(first, second))
        finally:
            self._forget(first, second)
        for name in (first, second):
            if (record := self._names.seen(name)) is not None:
                self._remember(name, record)

    def remove_tree(
        self, path: str, *, durable: bool = True, only_if: Callable[[str], bool] | None = None
    ) -> None:
        """See `Storage.remove_tree`: the name is withdrawn first, then the objects are deleted."""
        names = self._names_below(path)
        if self._is_in_fixed(names):
            self._delete_below(path, path)
            return
        if len(names) > 1:
            key, held = self._file(path, "remove")
            if held is not None:
                self._release(path)
            else:
                self._delete_below(path, key)
            return
        is_dir = _DIRS_ONLY.fullmatch(path) is not None or self._names.seen(path) is not None
        if not is_dir and self._do("remove", path, lambda: self._names.entry(path)) is None:
            meta = self._do("remove", path, lambda: self._bucket.head(path))
            if meta is None:
                raise absent("remove", self.describe(path))
            self._do("remove", path, lambda: self._bucket.delete([path]))
            return
        if only_if is not None and not self._is_confirmed(path, only_if):
            return
        if only_if is None:
            self._remove_dir(path)

    def collect_garbage(self, *, dry_run: bool = False) -> tuple[dict[str, str], str]:
        """Complete what dead processes left of renames and removals; return what was removed.

        Data without a name is marked, and removed if it still has none an hour later and was not
        written to for an hour. An unfinished upload is aborted if it is to such data: nothing can
        name that any more.

        Returns:
            What was removed -> why; and why unfinished uploads cannot be listed or aborted, empty
            if they can.
        """
        removed: dict[str, str] = {}
        # Uploads before names: one that begins after this look may be of a name that comes later.
        problem, uploads = "", dict[str, Upload]()
        try:
            uploads = self._bucket.unfinished(DATA)
        except UploadsUnknown as error:
            problem = str(error)
        data = self._do("list", "", lambda: self._bucket.list(DATA))
        started = {key.split("/")[2] for key in uploads}
        listing = self._do("list", "", lambda: self._bucket.list(""))
        nameless = self._do("list", "", lambda: self._names.nameless(data.dirs | started, listing))
        over = self._used_names(listing)
        removed.update(dict.fromkeys(over, "a name that was used once, and nobody could delete"))
        if not dry_run:
            self._do("list", "", lambda: self._names.tidy(listing))
        marks = {f"{DATA}/{name}": meta.changed for name, meta in data.objects.items()}
        over += [mark for mark in marks if mark.rpartition("/")[2][: -len(_MARK)] not in nameless]
        for prefix in sorted(nameless):
            key, mark = f"{DATA}/{prefix}", f"{DATA}/{prefix}{_MARK}"
            objects = self._do("list", "", partial(self._bucket.list_all, key))
            changes = [meta.changed for meta in objects.values()]
            is_old = bool(changes) and self._is_old(max(changes))
            of_it = {at: each for at, each in uploads.items() if at.startswith(f"{key}/")}
            if not (is_old or of_it) or not self._do(
                "list", "", partial(self._names.nameless, {prefix})
            ):
                continue
            try:
                for at, upload in of_it.items():
                    if not dry_run:
                        self._bucket.abort(upload)
                    removed[at] = "an unfinished upload of a save that is gone"
            except UploadsUnknown as error:
                problem = str(error)
            # Both looks took an instant: a directory may have been between two names, or the
            # listings were old. Only what has no name an hour later never gets one again.
            if is_old and mark not in marks and not dry_run:
                self._do("write", "", partial(self._bucket.put, mark, b"without a name"))
            # A mark of this look is new, whatever the clock says.
            if is_old and self._is_old(marks.get(mark, math.inf)):
                removed[key] = "data of an interrupted removal"
                over += [*objects, mark]
        if over and not dry_run:
            self._do("remove", "", partial(self._bucket.delete, over))
        return removed, problem

    def _used_names(self, listing: ObjectListing) -> builtins.list[str]:
        """Return the keys of free names that are used once, and were not changed for an hour."""
        return [key for key in used_names(listing) if self._is_old(listing.objects[key].changed)]

    def _is_old(self, changed: float) -> bool:
        return self._do("list", "", lambda: self._since(changed)) >= _GARBAGE_S

    def free_nbytes(self) -> int:
        """See `Storage.free_nbytes`: a bucket has no end."""
        return 1 << 62

    def describe(self, path: str) -> str:
        """Return the URL of a path."""
        return f"{self.url}/{path}" if path else self.url

    def is_shareable(self) -> bool:
        """Return False: there is no `local_path`. A writer process opens it by `address`."""
        return False

    def local_path(self, path: str) -> Path | None:
        """Return None."""
        split_path(path)
        return None

    def address(self) -> tuple[str, dict[str, Any]] | None:
        """Return URL and settings with which another process opens the same storage.

        They may have a credential: give them by a pipe. None if no other process can: in memory,
        observed, pinned, or with a setting that is an object of this process.
        """
        is_own = self._is_observed or self._pinned is not None or type(self) is not ObjectStorage
        if is_own or self._place.scheme == "memory" or not _is_plain(self._settings):
            return None
        return self.url, Options(self._settings)

    # ---- Names and keys ----

    def _examine(self, path: str, *, is_dir: bool = True) -> float | None:
        """Return when a file or directory was last changed; None if there is none."""
        names = split_path(path)
        if not names or (len(names) == 1 and names[0] in FIXED_DIRS):
            return 0.0
        if len(names) == 1:
            if self._pinned is not None and self._pinned[0] == path:
                return 0.0
            # A name with a dot inside is nearly always a file's.
            looks = [self._dir_changed, self._file_changed] if is_dir else [self._file_changed]
            if _DIRS_ONLY.fullmatch(path):
                looks.remove(self._file_changed)
            for look in reversed(looks) if "." in path[1:] else looks:
                if (changed := look(path)) is not None:
                    return changed
            return None
        if self._is_in_fixed(names):
            return self._file_changed(path)
        record = self._find(names[0])
        if record is None:
            return None
        if "/".join(names[1:]) in record.held:
            entry = self._names.entry(names[0])
            return entry.changed if entry is not None else None
        key = self._names.data_key(record, *names[1:])
        changed = self._file_changed(key)
        if changed is None and is_dir and "." not in names[-1][1:]:
            changed = max((m.changed for m in self._bucket.list_all(key).values()), default=None)
        return changed

    def _dir_changed(self, name: str) -> float | None:
        entry = self._names.entry(name)
        return entry.changed if entry is not None else None

    def _file_changed(self, key: str) -> float | None:
        meta: Meta | None = self._bucket.head(key)
        return meta.changed if meta is not None else None

    def _is_dir(self, names: Sequence[str]) -> bool:
        if not names or names[0] in FIXED_DIRS:
            return len(names) < 2
        record = self._find(names[0])
        if record is None or len(names) == 1:
            return record is not None
        below = "/".join((*names[1:], ""))
        if any(each.startswith(below) for each in record.held):
            return True
        listing = self._bucket.list(self._names.data_key(record, *names[1:]))
        return bool(listing.dirs or listing.objects)

    def _look(self) -> tuple[ObjectListing, dict[str, NameRecord], Collection[str]]:
        """Return the listing of the root, and what the names in it without a dot stand for.

        And those of these names that cannot be read.
        """
        listing = self._do("list", "", lambda: self._bucket.list(""))
        looks = self._do("list", "", lambda: self._names.records(listing, steps_only=True))
        records = {name: each for name, each in looks.items() if isinstance(each, NameRecord)}
        return listing, records, looks.keys() - records

    def folders(self) -> builtins.list[str]:
        """Return the names of folders in the root that other programs have made.

        `list` has none of them: a directory of ours is one by its name's record. Cost: as `list`.
        """
        listing = self._do("list", "", lambda: self._bucket.list(""))
        return sorted(listing.dirs - FIXED_DIRS - {INNER})

    def _names_in(self, listing: ObjectListing) -> builtins.list[str]:
        files = [name for name in listing.objects if not name.endswith(SUFFIX)]
        dirs = listing.dirs & FIXED_DIRS
        return sorted({*files, *dirs, *listed_names(listing)})

    def _file(self, path: str, action: str) -> tuple[str, bytes | None]:
        """Return the key of a file, and its bytes if its directory's name holds them.

        StorageError if the directory is not there.
        """
        names = split_path(path)
        if not names:
            raise StorageError(f"cannot {action}: {self.url} is the root and not a regular file")
        if len(names) == 1 or names[0] in FIXED_DIRS:
            return path, None
        record = self._resolve(names[0], action, path)
        return self._names.data_key(record, *names[1:]), record.held.get("/".join(names[1:]))

    def _new_key(self, path: str, action: str) -> str:
        """Return the key of a file to write; StorageError for the root and for reserved names."""
        names = self._names_below(path)
        if names[0] == INNER or (len(names) == 1 and path.endswith(SUFFIX)):
            raise StorageError(f"{self.describe(path)}: names like this are the store's own")
        if len(names) == 1 and _DIRS_ONLY.fullmatch(path):
            raise StorageError(f"{self.describe(path)}: only a directory has a name like this")
        key, held = self._file(path, action)
        if held is not None:
            self._release(path)  # from now on it is an object
        return key

    def _release(self, path: str) -> None:
        """Take a file out of its directory's name, which holds it."""
        name, _, file = path.partition("/")
        self._do("write", path, lambda: self._names.release(name, file))
        self._forget(name)

    def _names_below(self, path: str) -> tuple[str, ...]:
        """Return the names of a path; StorageError for the root."""
        names = split_path(path)
        if not names:
            raise StorageError(f"{self.url}: the root itself cannot be renamed or replaced")
        return names

    def _is_in_fixed(self, names: Sequence[str]) -> bool:
        return bool(names) and names[0] in FIXED_DIRS

    def _find(self, name: str) -> NameRecord | None:
        """Return what a name of the first level stands for; None for nothing."""
        if self._pinned is not None and self._pinned[0] == name:
            return self._pinned[1]
        if (known := self._remembered(name)) is not None:
            return known
        record = self._names.look(name)
        if record is not None:
            self._remember(name, record)
        return record

    def _resolve(self, name: str, action: str, path: str) -> NameRecord:
        """Return what a name stands for; StorageError if that is nothing."""
        record = self._do(action, path, lambda: self._find(name))
        if record is None:
            raise absent(action, self.describe(path))
        return record

    def _remembered(self, name: str) -> NameRecord | None:
        known = self._resolved.get(name)
        if known is not None and _since_boot() - known[1] < _RESOLVED_S:
            return known[0]
        return None

    def _remember(self, name: str, record: NameRecord) -> None:
        # Not a step's: another save may replace it at any time. A directory with a dot is of one
        # save. If a repair takes that over, this process sees it later by these two seconds, as if
        # a request had taken so long; and it can rename the directory only by its name as it is.
        if name.startswith("."):
            self._resolved[name] = (record, _since_boot())

    def _forget(self, *names: str) -> None:
        for name in names:
            self._resolved.pop(name, None)

    def _check_first_level(self, *paths: str) -> None:
        """Raise StorageError unless both can be renamed."""
        for path in paths:
            names = self._names_below(path)
            if len(names) > 1 or names[0] in FIXED_DIRS or names[0] == INNER:
                raise _refused("rename", self.describe(path))

    # ---- Removal ----

    def _is_confirmed(self, name: str, only_if: Callable[[str], bool]) -> bool:
        """Take a directory's name, ask whether to remove it, and do so or give the name back."""
        aside = f".old-{name[:200]}-{secrets.token_hex(4)}"
        self._prove()
        self._do("remove", name, lambda: self._names.move(name, aside))
        is_confirmed = False
        try:
            is_confirmed = only_if(aside)
        finally:
            self._forget(aside)
            if not is_confirmed:
                self._give_back(aside, name)
        if is_confirmed:
            self._remove_dir(aside)
        return is_confirmed

    def _give_back(self, aside: str, name: str) -> None:
        """Give a directory its name back, unless another has that by now.

        Raises:
            StorageError: It has not got it, as far as this process can tell.
        """
        try:
            self._do("rename", aside, lambda: self._names.move(aside, name))
        except (FileExistsError, StorageError) as error:
            with suppress(StorageError):
                # A repair has given it back, or a save has replaced it.
                if self._do("rename", name, lambda: self._names.is_taken(name)):
                    return
            raise StorageError(
                f"{self.describe(name)} was not to be removed, and could not be given its name "
                f"back; it is {aside} until `holdfast repair` gives it back: {error}",
                details=getattr(error, "details", None),
            ) from error

    def _remove_dir(self, name: str) -> None:
        self._prove()
        self._forget(name)
        is_own = self._names.seen(name) is not None
        record = self._do("remove", name, lambda: self._names.withdraw(name))
        # A name with a dot may have been written by a put that came late, after the directory had
        # gone on to another one and this had been deleted. One that this process has written
        # itself is the only one, and that of a step is never deleted.
        is_only = is_own or not name.startswith(".")
        keys: builtins.list[str] = []
        if is_only or self._do("remove", name, lambda: self._names.nameless([record.prefix])):
            key = self._names.data_key(record)
            keys += self._do("remove", name, lambda: self._bucket.list_all(key))
        if name.startswith("."):  # used once, and free by now
            # Last: while it is there, a reader of a listing knows of the directory.
            keys.append(name + SUFFIX)
        self._do("remove", name, lambda: self._bucket.delete(keys))

    def _delete_below(self, path: str, key: str) -> None:
        """Delete a file, or all files of a directory inside another."""
        is_file = self._is_in_fixed(split_path(path)) and "/" in path
        objects = {} if is_file else self._do("remove", path, lambda: self._bucket.list_all(key))
        self._do("remove", path, lambda: self._bucket.delete([*objects] or [key]))

    # ---- The store ----

    def _do(self, action: str, path: str, ask: Callable[[], T]) -> T:
        """Send requests; StorageError that says what, where, why and what to do."""
        try:
            return ask()
        except RequestFailed as error:
            failed = error
        except FileNotFoundError:
            raise absent(action, self.describe(path)) from FileNotFoundError(path)
        raise unsettled(failed, action=action, place=self.describe(path))

    def _prove(self) -> None:
        """Prove once that the store refuses a conditional put whose condition does not hold.

        A store that ignores conditions would let two saves of one step both succeed.

        Raises:
            StorageError: It does not, and there may be several writers.
        """
        if self._is_proven or self._single_writer:
            return
        problem: StorageError | None = None
        try:
            # Of two puts that need a free name one is refused: the first, if the bucket was in use.
            wrong = {"e_tag": '"0123456789abcdef"', "version": "1"}
            if not ((self._is_refused(None) or self._is_refused(None)) and self._is_refused(wrong)):
                problem = self._unconditional()
        except RequestFailed as error:
            problem = unsettled(error, action="write", place=self.url)
            if error.failure.is_unsupported:
                problem = self._unconditional()
        if problem is not None:
            raise problem
        self._is_proven = True

    def _is_refused(self, tag: Tag | None) -> bool:
        """Write the probe on a condition; return whether the store refuses it."""
        return self._bucket.is_refused(_PROBE, secrets.token_hex(8).encode(), tag=tag)

    def _unconditional(self) -> StorageError:
        return StorageError(
            f"{self.url}: this store does not do conditional puts (If-None-Match, If-Match), so "
            f"two saves of one step could both succeed. If only one process ever saves, removes "
            f"and repairs here, use ObjectStorage(url, single_writer=True)"
        )

    def _since(self, changed: float) -> float:
        """Return the seconds since a moment by the store's clock, never less than none.

        Raises:
            RequestFailed: The clock cannot be read now. A clock of this machine's in its place
                might be hours off, and make what is alive look dead.
        """
        age_s = self._now() - changed
        if age_s > _SURE_S:
            age_s = self._now(_SURE_S) - changed
        return max(age_s, 0.0)

    def _now(self, within_s: float = _CLOCK_S) -> float:
        """Return the time by the store's clock, which stamps the objects, as read not long ago.

        A clock that is set back is noticed by a new reading. If it is set forward, the reading
        before counts as long as a lease lives: until then each lease has been renewed.
        """
        here = _since_boot()
        if not self._clock or here - self._clock[-1][1] > within_s:
            try:
                reading = self._read_clock()
            except RequestFailed as error:
                if error.failure.kind == "again":
                    raise
                if not self._clock:
                    return time.time()  # it may write nothing, so it removes nothing either
            else:
                before = [*self._clock[:-1], *((start, here) for start, _ in self._clock[-1:])]
                self._clock = (
                    *((start, at) for start, at in before
                      if start < reading[0] and here - at <= _CLOCK_S),
                    reading,
                )  # fmt: skip
        return min(start for start, _ in self._clock) + _since_boot()

    def _read_clock(self) -> tuple[float, float]:
        """Return the store's time at the start of this machine's count of seconds, and when."""
        self._bucket.put(_CLOCK, b"%d" % time.time_ns())
        meta = self._bucket.head(_CLOCK)
        if meta is None:
            raise RequestFailed(Failure("again", "the store does not show what was put"))
        here = _since_boot()
        return meta.changed - here, here


def _since_boot() -> float:
    """Return seconds that go on while the machine is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _is_plain(value: object) -> bool:
    """Return True if a setting can be sent to another process."""
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _is_plain(each) for key, each in value.items())
    return value is None or isinstance(value, bool | int | float | str)


def _over(record: NameRecord) -> Sequence[str]:
    """Return what is not part of a directory any more, but may still have files."""
    return record.came.aside if record.came is not None else ()


def _refused(action: str, place: str) -> StorageError:
    return StorageError(
        f"cannot {action}: {place}: in an object store only directories of the first level can be, "
        f"and none of {', '.join(sorted(FIXED_DIRS))}"
    )
