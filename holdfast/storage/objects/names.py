"""Names of directories in a bucket: which data each one stands for, and how it gets another.

A directory of the first level is two things: *data*, objects below a prefix that is used once and
never moves, and a *name*, one small object that states the prefix. To rename a directory is to
write names; no byte of data is copied.

A name changes by conditional puts alone, so of two processes that change it at once one sees the
other's change and looks again. A step's name is never deleted: a name that stands for nothing is
a *free* one, a small object that the next directory of that name replaces. (A deletion without a
condition, delayed on its way, could hit a new checkpoint.) Names that begin with a dot have a
random part and are used once; they are deleted.

A move writes two names, and must not be made twice from one source, nor be seen half. So:

1. the source's name is replaced by one that also states the move: its number, its target, and the
   version of the target's name as it is now. The directory still has its old name;
2. the target's name is written, on condition that it still is of that version, with the number of
   the move. **This one put makes the move**, and from it on the directory has its new name;
3. the source's name is tidied: deleted or freed, or, for an exchange, given what the target had.

A process that looks at a name with a move in it looks at the target: with that number, the move was
made. A process that wants to change a name first completes (3) what a dead one has left, or
prevents (2) by writing the target's name again with the same content: the condition of the other's
put then fails. A target with a number is not changed again before its source is tidied, so the
number is there for as long as a look at the source needs it.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from holdfast.errors import CorruptionError
from holdfast.storage.objects._obstore import Failure
from holdfast.storage.objects.bucket import BucketClient, Meta, ObjectListing, RequestFailed, Tag

INNER = ".store"
"""The prefix of what only this room knows: data, the summary of names, the clock."""
SUFFIX = ".dir"
"""The end of a name's key."""
_DATA = f"{INNER}/data"
_SUMMARY = f"{INNER}/names.json"
_MIN_NBYTES = 64
"""A name of at least so many bytes stands for a directory; a smaller one is free. So a listing
shows which names stand for something."""
_NUM_TRIES = 50
_NUM_SUMMARY_TRIES = 4
_MAX_SEEN = 16
_NUM_THREADS = 16
_MAX_SUMMARY_NBYTES = 1 << 22
_MAX_NAMES = 1000


class NameMove(msgspec.Struct, frozen=True, kw_only=True):
    """A move that was begun, in the name of its source.

    Args:
        id: Its number, which no other move has.
        to: The target.
        before: The version of the target's name that the move is on condition of; empty for none.
        other: Prefix, files and note of the target, for an exchange.
    """

    id: str
    to: str
    before: str
    other: tuple[str, tuple[str, ...], str] | None = None


class Came(msgspec.Struct, frozen=True, kw_only=True):
    """The move by which a directory got its name: its number and source."""

    id: str
    source: str


class NameRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What a name states.

    Args:
        prefix: Of the directory's data, below `.store/data`.
        nonce: Random: no two puts write the same bytes.
        files: The names in the directory when it got a name without a dot; empty before.
        note: A text about the directory, from who made it, for lists.
        move: The move that is in progress from here.
        came: The move that brought it here.
    """

    prefix: str
    nonce: str
    files: tuple[str, ...] = ()
    note: str = ""
    move: NameMove | None = None
    came: Came | None = None


@dataclass(frozen=True, slots=True)
class NameEntry:
    """A name's object as it was read: what it states, None for a free name; version and time."""

    record: NameRecord | None
    tag: Tag
    changed: float = 0.0


class Names:
    """The names of the directories below one prefix.

    Raises, from every method: RequestFailed if the store failed; FileNotFoundError or
    FileExistsError as stated.
    """

    def __init__(self, bucket: BucketClient) -> None:
        self._bucket = bucket
        # By name and version. A version is never changed, so this is never wrong. By the name, too:
        # in some stores two objects written at one instant have versions that look alike.
        self._known: dict[str, NameRecord] = {}
        self._notes: dict[str, tuple[str, tuple[str, ...]]] = {}
        # Names with a dot as this process last wrote or saw them. One that another process has
        # changed since only costs a put whose condition does not hold, and is then read again.
        self._seen: dict[str, NameEntry] = {}
        self._summary: tuple[dict[str, NameRecord], Tag] | None = None

    def annotate(self, name: str, note: str, files: Sequence[str]) -> None:
        """Give a directory a note and say which files it has, for its name's next move."""
        self._notes[name] = note, tuple(sorted(files))

    def look(self, name: str) -> NameRecord | None:
        """Return what a name stands for now; None for nothing. One request, rarely more."""
        entry = self.entry(name)
        return entry.record if entry is not None else None

    def entry(self, name: str) -> NameEntry | None:
        """Return a name that stands for a directory; None if it does not."""
        for _ in range(_NUM_TRIES):
            entry = self._get(name)
            if entry is None or entry.record is None:
                return None
            move = entry.record.move
            if move is None:
                return entry
            if _is_made(move, self._get(move.to)):
                return _after(entry, move)
            # Only if the source is as before was the target's look one of the same moment.
            again = self._get(name)
            if again is not None and again.tag == entry.tag:
                return entry
        raise _busy(name)

    def make(self, name: str) -> NameRecord:
        """Give a name to a new, empty directory; or return what it stands for already."""
        record = NameRecord(prefix=f"{secrets.token_hex(4)}-{name[:200]}", nonce=_nonce())
        put = self._bucket.put_if(name + SUFFIX, msgspec.json.encode(record), tag=None)
        if put.tag is not None:
            self._see(name, NameEntry(record, put.tag))
            return record
        if put.present is not None:
            # Most often: another rank of the same save was first.
            there = _decode(bytes(put.present[0]), name)
            if there is not None and there.move is None:
                self._see(name, NameEntry(there, put.present[1].tag))
                return there
        for _ in range(_NUM_TRIES):
            present = self.look(name)
            if present is not None:
                return present
            entry = self._get(name)
            if entry is not None and entry.record is not None:
                self._tidy(name, entry)
            elif self._swap(name, entry, record) is not None:
                return record
        raise _busy(name)

    def move(self, source: str, target: str) -> None:
        """Give a directory another name.

        Raises:
            FileNotFoundError: The source stands for nothing.
            FileExistsError: The target stands for something.
        """
        for number in range(_NUM_TRIES):
            own = self._own(source)
            # At first as if the target were absent, as it nearly always is: the condition of the
            # put says whether that is so.
            there = self._get(target) if number else None
            if there is not None and there.record is not None:
                if self.look(target) is not None:
                    raise FileExistsError(target)
                self._tidy(target, there)
                continue
            if self._make_move(source, own, target, there, None):
                return
        raise _busy(source)

    def exchange(self, first: str, second: str) -> None:
        """Exchange what two names stand for; FileNotFoundError if one stands for nothing."""
        for _ in range(_NUM_TRIES):
            own, there = self._own(first), self._own(second)
            assert there.record is not None
            other = (there.record.prefix, there.record.files, there.record.note)
            if self._make_move(first, own, second, there, other):
                return
        raise _busy(first)

    def withdraw(self, name: str) -> NameRecord:
        """Free a name; return what it stood for. FileNotFoundError if that is nothing."""
        for _ in range(_NUM_TRIES):
            own = self._own(name)
            assert own.record is not None
            if self._swap(name, own, None) is not None:
                return own.record
        raise _busy(name)

    def forget(self, name: str) -> None:
        """Delete a free name that is used only once."""
        self._bucket.delete(self.keys_to_forget(name))

    def keys_to_forget(self, name: str) -> list[str]:
        """Return what is to be deleted of a free name: nothing if it is not used only once."""
        return [name + SUFFIX] if name.startswith(".") else []

    def seen(self, name: str) -> NameRecord | None:
        """Return what a name with a dot stood for when this process last wrote or saw it."""
        entry = self._seen.get(name)
        return entry.record if entry is not None else None

    def _see(self, name: str, entry: NameEntry) -> None:
        """Remember a name that this process may change next."""
        record = entry.record
        if name.startswith(".") and record is not None and not (record.move or record.came):
            self._seen[name] = entry
            while len(self._seen) > _MAX_SEEN:  # of saves that another rank commits
                self._seen.pop(next(iter(self._seen)), None)

    def data_key(self, record: NameRecord, *names: str) -> str:
        """Return the key of a file in a directory; without names the prefix of all of them."""
        return "/".join((_DATA, record.prefix, *names))

    def records(self, listing: ObjectListing) -> dict[str, NameRecord]:
        """Return what all names of a listing stand for.

        Cost: one request for the summary; one for each name that it lacks and this process has
        not seen, several at a time.
        """
        listed = listed_names(listing)
        unknown = [name for name in listed if _known_key(listing, name) not in self._known]
        if len(unknown) > 1:
            self._read_summary()
            unknown = [name for name in listed if _known_key(listing, name) not in self._known]
        records: dict[str, NameRecord] = {}
        with ThreadPoolExecutor(_NUM_THREADS) as pool:
            for name, entry in zip(unknown, pool.map(self.entry, unknown), strict=True):
                if entry is not None and entry.record is not None:
                    records[name] = entry.record
        for name in listed:
            known = self._known.get(_known_key(listing, name))
            if known is not None and known.move is not None:
                # In progress, or left by a dead process: only the target says which.
                known = self.look(name)
            if known is not None:
                records.setdefault(name, known)
        return records

    def tidy(self, listing: ObjectListing) -> list[str]:
        """Complete the moves that were made and not tidied; return the names."""
        done = []
        for name in listed_names(listing):
            entry = self._get(name)
            move = entry.record.move if entry is not None and entry.record is not None else None
            if entry is not None and move is not None and _is_made(move, self._get(move.to)):
                self._tidy(name, entry)
                done.append(name)
        return done

    def nameless(self) -> list[str]:
        """Return the prefixes of data that no name stands for.

        A name that moves during the look may be missed at both of its places: look twice, and
        with time in between, before anything is removed.
        """
        # The data first: who makes a directory writes its name before any data.
        prefixes = self._bucket.list(_DATA).dirs
        if not prefixes:
            return []
        listing = self._bucket.list("")
        records = [*self.records(listing).values()]
        records += [
            self._known[version]
            for name in listed_names(listing)
            if (version := _known_key(listing, name)) in self._known
        ]
        named = {record.prefix for record in records}
        named |= {r.move.other[0] for r in records if r.move is not None and r.move.other}
        return sorted(f"{_DATA}/{prefix}" for prefix in prefixes - named)

    def _make_move(
        self,
        source: str,
        own: NameEntry,
        target: str,
        there: NameEntry | None,
        other: tuple[str, tuple[str, ...], str] | None,
    ) -> bool:
        """Make a move as in the text of the module; False if it is to be tried again.

        After False the source may have no move, or another process's.
        """
        assert own.record is not None
        before = _version(there.tag) if there is not None else ""
        move = NameMove(id=_nonce(), to=target, before=before, other=other)
        plain = msgspec.structs.replace(own.record, move=None, came=None)
        locked = self._swap(source, own, msgspec.structs.replace(plain, move=move))
        if locked is None:
            return False
        record = msgspec.structs.replace(plain, came=Came(id=move.id, source=source))
        if not target.startswith("."):
            note, files = self._notes.get(source, (plain.note, None))
            files = self._files(plain) if files is None else files
            record = msgspec.structs.replace(record, files=files, note=note)
        made = self._swap(target, there, record)
        if made is None:
            self._swap(source, locked, plain)
            return False
        # The move is made: what fails from here on is for the next that looks.
        self._notes.pop(source, None)
        with suppress(RequestFailed):
            self._tidy(source, locked)
        if made.record is not None and not target.startswith("."):
            self._write_summary(target, made)
        return True

    def _files(self, record: NameRecord) -> tuple[str, ...]:
        listing = self._bucket.list(self.data_key(record))
        return tuple(sorted({*listing.dirs, *listing.objects}))

    def _own(self, name: str) -> NameEntry:
        """Return a name without a move in it or unfinished before it, to be changed by the caller.

        A move that another process has begun is completed if it was made, else prevented.
        """
        if (seen := self._seen.pop(name, None)) is not None:
            return seen
        for _ in range(_NUM_TRIES):
            entry = self._get(name)
            if entry is None or entry.record is None:
                raise FileNotFoundError(name)
            if entry.record.came is not None:
                self._tidy_source(entry.record.came)
            move = entry.record.move
            if move is None:
                return entry
            there = self._get(move.to)
            if _is_made(move, there):
                self._tidy(name, entry)
            elif self._prevent(move, there):
                freed = msgspec.structs.replace(entry.record, move=None)
                if (own := self._swap(name, entry, freed)) is not None:
                    return own
        raise _busy(name)

    def _prevent(self, move: NameMove, there: NameEntry | None) -> bool:
        """Make sure that a move is not made any more; False if the target has changed meanwhile."""
        if (_version(there.tag) if there is not None else "") != move.before:
            return True  # its put is on a condition that does not hold any more
        record = there.record if there is not None else None
        return self._swap(move.to, there, record) is not None

    def _tidy_source(self, came: Came) -> None:
        """Tidy the source of a move that was made, if that is still to be done."""
        entry = self._get(came.source)
        if entry is None or entry.record is None or entry.record.move is None:
            return
        if entry.record.move.id == came.id:
            self._tidy(came.source, entry)

    def _tidy(self, name: str, entry: NameEntry) -> None:
        """Give the source of a move that was made what it has after that."""
        assert entry.record is not None
        assert entry.record.move is not None
        record = _after(entry, entry.record.move)
        if record is not None or not name.startswith("."):
            self._swap(name, entry, record.record if record is not None else None)
        else:
            self._bucket.delete([name + SUFFIX])

    def _get(self, name: str) -> NameEntry | None:
        """Read a name's object; None if there is none."""
        answer = self._bucket.get(name + SUFFIX)
        if answer is None:
            return None
        data, meta = answer
        record = _decode(bytes(data), name)
        if record is not None:
            self._known[f"{name} {_version(meta.tag)}"] = record
        return NameEntry(record, meta.tag, meta.changed)

    def _swap(
        self, name: str, entry: NameEntry | None, record: NameRecord | None
    ) -> NameEntry | None:
        """Replace a name that still is as it was read; None if it is not. None frees it."""
        nonce = _nonce()
        if record is None:
            data = nonce.encode()
        else:
            record = msgspec.structs.replace(record, nonce=nonce)
            data = msgspec.json.encode(record)
        tag = self._bucket.put_if(name + SUFFIX, data, tag=entry.tag if entry else None).tag
        if tag is None:
            return None
        if record is not None:
            self._known[f"{name} {_version(tag)}"] = record
            self._see(name, NameEntry(record, tag))
        return NameEntry(record, tag)

    def _read_summary(self) -> tuple[dict[str, NameRecord], Tag | None]:
        """Learn the names in the summary; an unreadable one is of no use and no harm."""
        answer = self._bucket.get(_SUMMARY)
        return ({}, None) if answer is None else self._learn(*answer)

    def _learn(self, data: memoryview, meta: Meta) -> tuple[dict[str, NameRecord], Tag | None]:
        stored: dict[str, NameRecord] = {}
        if meta.nbytes <= _MAX_SUMMARY_NBYTES:
            with suppress(msgspec.DecodeError):
                stored = msgspec.json.decode(data, type=dict[str, NameRecord])
        self._known |= stored
        return stored, meta.tag

    def _write_summary(self, name: str, made: NameEntry) -> None:
        """Add a name to the summary, from which a list of many steps takes few requests.

        One put, if this process wrote it last; after some tries the name is left out, and a list
        then reads it alone.
        """
        assert made.record is not None
        try:
            stored, before = self._summary or self._read_summary()
            for _ in range(_NUM_SUMMARY_TRIES):
                stored = stored | {f"{name} {_version(made.tag)}": made.record}
                data = msgspec.json.encode(stored)
                while stored and (len(data) > _MAX_SUMMARY_NBYTES or len(stored) > _MAX_NAMES):
                    for tag in list(stored)[: 1 + len(stored) // 10]:  # the oldest
                        del stored[tag]
                    data = msgspec.json.encode(stored)
                put = self._bucket.put_if(_SUMMARY, data, tag=before)
                self._summary = (stored, put.tag) if put.tag is not None else None
                if put.tag is not None:
                    return
                stored, before = ({}, None) if put.present is None else self._learn(*put.present)
        except RequestFailed:
            return  # the move was made, and this is only a help


def listed_names(listing: ObjectListing) -> list[str]:
    """Return the names of directories in a listing of the root, sorted.

    A name that has been moved away stays in listings until it is tidied, an instant later.
    """
    return sorted(
        key.removesuffix(SUFFIX)
        for key, meta in listing.objects.items()
        if key.endswith(SUFFIX) and meta.nbytes >= _MIN_NBYTES
    )


def _known_key(listing: ObjectListing, name: str) -> str:
    return f"{name} {_version(listing.objects[name + SUFFIX].tag)}"


def _version(tag: Tag) -> str:
    return (tag.get("e_tag") or tag.get("version") or "").strip('"')


def _nonce() -> str:
    return secrets.token_hex(8)


def _decode(data: bytes, name: str) -> NameRecord | None:
    """Return what a name states, None for a free one; CorruptionError for anything else."""
    if len(data) < _MIN_NBYTES:
        return None
    try:
        return msgspec.json.decode(data, type=NameRecord)
    except (msgspec.DecodeError, RecursionError):
        raise CorruptionError(
            f"{name}{SUFFIX} is not the name of a directory: another program has written it; "
            f"remove the object, or write it back"
        ) from None


def _is_made(move: NameMove, there: NameEntry | None) -> bool:
    """Return True if the target's name is the one that a move has written."""
    record = there.record if there is not None else None
    return record is not None and record.came is not None and record.came.id == move.id


def _after(entry: NameEntry, move: NameMove) -> NameEntry | None:
    """Return what the source of a move stands for after it; None for nothing."""
    if move.other is None:
        return None
    prefix, files, note = move.other
    return NameEntry(
        NameRecord(prefix=prefix, nonce="", files=files, note=note), entry.tag, entry.changed
    )


def _busy(name: str) -> RequestFailed:
    return RequestFailed(
        Failure("final", f"other processes change the name {name} without end: try again later")
    )
