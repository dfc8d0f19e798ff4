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
put then fails. Whatever is written to a name next, a free one too, also states the numbers of the
moves before, and of what has freed it. So who is between (2) and (3), or gets an old answer from a
cache, still learns that its move was made, however the target has changed since.

Who cannot tell whether its move was made looks again, and tries again if it was not. By then
another process may have done (3), and the source stands for what the target had. So a second try is
of the directory of the first, or there is none.

A save states its move when it makes its name: an *early* move, to the name of its step, on
condition that this is absent. So (1) takes no request of its own, and a save is committed by (2)
alone. Who finds such a name and wants to change it prevents the move as any other, by a free name
where the step has none: from then on the step's name is never absent again.

A name may also hold small files of its directory: the records of a checkpoint are in the put that
commits it, and reading the name reads them. And the name of a step states what this process knows
of other steps, so that a list of many takes few requests.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec

from holdfast.decoding import decode_json_as
from holdfast.errors import CorruptionError
from holdfast.storage.objects._obstore import Failure
from holdfast.storage.objects.bucket import (
    BucketClient,
    ObjectListing,
    RequestFailed,
    Tag,
    version_of,
)
from holdfast.storage.reading import in_threads

INNER = ".store"
"""The prefix of what only this room knows: data, the clock."""
SUFFIX = ".dir"
"""The end of a name's key."""
DATA = f"{INNER}/data"
_STEP = re.compile(r"\.saving-(iter_[0-9]{7,18})-", re.ASCII)
_MIN_NBYTES = 64
"""A name of at least so many bytes stands for a directory; a smaller one is free. So a listing
shows which names stand for something."""
NUM_TRIES = 50
"""Of a change that others are before; each of them has made one, so many mean something else."""
_MAX_SEEN = 16
_MAX_MADE = 32
"""Of how many earlier moves a name states the numbers."""
_MAX_MADE_FREE = 2
"""Of how many a free one does, which is small."""
_ID_NBYTES = 16
_FREE = re.compile(rb"(?:[0-9a-f]{16}){1,%d}" % (1 + _MAX_MADE_FREE))
"""A free name: the number of what has freed it, and of moves before."""
_NUM_THREADS = 16
MAX_HELD_NBYTES = 1 << 18
"""Bytes of small files that a name holds; what has more is objects."""
Unread = CorruptionError | RequestFailed
"""Why a name that is there could not be read: it is damaged, another program's, or denied."""
_MAX_OTHERS = 128
_MAX_OTHERS_NBYTES = 1 << 17
"""How much a name says of other names."""


class NameMove(msgspec.Struct, frozen=True, kw_only=True):
    """A move that was begun, in the name of its source.

    Args:
        id: Its number, which no other move has.
        to: The target.
        before: The version of the target's name that the move is on condition of; empty for none.
        other: What the target stood for, for an exchange.
        early: It was stated when the name was made, and may never be wanted.
    """

    id: str
    to: str
    before: str
    other: NameRecord | None = None
    early: bool = False


class Came(msgspec.Struct, frozen=True, kw_only=True):
    """The move by which a directory got its name: its number and source.

    `aside` are directories inside of it that are not part of it any more: with the source's name
    their files are deleted.
    """

    id: str
    source: str
    aside: tuple[str, ...] = ()


class NameRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What a name states.

    Args:
        prefix: Of the directory's data, below `.store/data`.
        nonce: Random: no two puts write the same bytes.
        files: The names in the directory when it got a name without a dot; empty before.
        note: A text about the directory, from who made it, for lists.
        move: The move that is in progress from here.
        came: The move that brought it here.
        made: Numbers of the moves that have brought other directories here before, newest first.
        held: Small files in the directory that are not objects, by their paths in it.
        others: What other names stand for, by name and version; only a help for lists.
    """

    prefix: str
    nonce: str
    files: tuple[str, ...] = ()
    note: str = ""
    move: NameMove | None = None
    came: Came | None = None
    made: tuple[str, ...] = ()
    held: dict[str, bytes] = {}
    others: dict[str, NameRecord] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class NameNotes:
    """What is known of a directory before its next move.

    Args:
        prefix: Of the directory's data: another one of its name has other notes.
        text: For lists.
        files: The names in it.
        held: The small files that its name shall hold; None for those that it holds already.
        aside: The files in it that are not part of it after the move.
    """

    prefix: str
    text: str
    files: Sequence[str]
    held: Mapping[str, bytes] | None = None
    aside: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class NameEntry:
    """A name's object as it was read: what it states, None for a free name; version and time.

    `made` are the numbers of the moves that have brought a directory here or freed the name, as
    far as it states them.
    """

    record: NameRecord | None
    tag: Tag
    changed: float = 0.0
    made: tuple[str, ...] = ()


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
        self._has_looked = False
        self._notes: dict[str, NameNotes] = {}
        # Names with a dot as this process last wrote or saw them. One that another process has
        # changed since only costs a put whose condition does not hold, and is then read again.
        self._seen: dict[str, NameEntry] = {}
        # Numbers of the last moves of which this process has tidied the source.
        self._tidied: dict[str, None] = {}
        # Names without a dot that this process has seen in a listing, read or written: none is ever
        # deleted.
        self._lasting: set[str] = set()

    def annotate(self, name: str, notes: NameNotes) -> None:
        """Say what a directory has, for its name's next move to a name without a dot."""
        self._notes[name] = notes

    def look(self, name: str) -> NameRecord | None:
        """Return what a name stands for now; None for nothing. One request, rarely more."""
        entry = self.entry(name)
        return entry.record if entry is not None else None

    def entry(self, name: str) -> NameEntry | None:
        """Return a name that stands for a directory; None if it does not."""
        for _ in range(NUM_TRIES):
            entry = self._get(name)
            if entry is None or entry.record is None:
                return None
            move = entry.record.move
            if move is None:
                return entry
            there = self._get(move.to)
            if _is_made(move, there):
                return _after(entry, move)
            if there is None and not move.before and not move.to.startswith("."):
                return entry  # no step's name is ever deleted: it was absent at the first look
            # Only if the source is as before was the target's look one of the same moment.
            again = self._get(name)
            if again is not None and again.tag == entry.tag:
                return entry
        raise busy(name)

    def is_taken(self, name: str) -> bool:
        """Return True if it is proven that a name stands for a directory.

        A look alone may be at what a cache has of before, so what it shows is written again.
        """
        for _ in range(NUM_TRIES):
            try:
                own = self._own(name)
            except FileNotFoundError:
                return False
            if self._swap(name, own, own.record) is not None:
                return True
        raise busy(name)

    def make(
        self, name: str, *, to: str = "", held: Mapping[str, bytes] | None = None
    ) -> NameRecord:
        """Give a name to a new, empty directory; or return what it stands for already.

        Args:
            name: The name.
            to: The name that the directory is to have later, if that is known; see the text of the
                module.
            held: Small files in it.
        """
        record = NameRecord(
            prefix=f"{secrets.token_hex(4)}-{name[:200]}",
            nonce=_nonce(),
            move=NameMove(id=_nonce(), to=to, before="", early=True) if to else None,
            held=dict(held or {}),
        )
        put = self._bucket.put_if(name + SUFFIX, msgspec.json.encode(record), tag=None)
        if put.tag is not None:
            self._see(name, NameEntry(record, put.tag))
            return record
        for _ in range(NUM_TRIES):
            # Most often: another rank of the same save was first.
            present = self.entry(name)
            if present is not None and present.record is not None:
                if not held or present.record.held:
                    self._see(name, present)
                    return present.record
                with_files = msgspec.structs.replace(present.record, held=dict(held))
                if (own := self._swap(name, present, with_files)) is not None:
                    assert own.record is not None
                    return own.record
                continue
            entry = self._get(name)
            if entry is not None and entry.record is not None:
                self._tidy_if_made(name, entry)
            elif self._swap(name, entry, record) is not None:
                return record
        raise busy(name)

    def join(self, name: str) -> NameRecord | None:
        """Return what a name stands for that cannot have been moved yet; one request."""
        entry = self._get(name)
        return entry.record if entry is not None else None

    def release(self, name: str, file: str) -> None:
        """Take a file out of those that a name holds, so that it may be an object."""
        for _ in range(NUM_TRIES):
            own = self._own(name)
            assert own.record is not None
            held = {path: data for path, data in own.record.held.items() if path != file}
            if self._swap(name, own, msgspec.structs.replace(own.record, held=held)) is not None:
                return
        raise busy(name)

    def move(self, source: str, target: str) -> None:
        """Give a directory another name.

        Raises:
            FileNotFoundError: The source stands for nothing.
            FileExistsError: The target stands for something.
        """
        seen = self._seen.get(source)
        early = seen.record.move if seen is not None and seen.record is not None else None
        tried: list[NameMove] = []
        if seen is not None and early is not None and early.to == target:
            if self._finish_move(source, seen, early, None):
                return
            tried.append(early)
        for number in range(len(tried), NUM_TRIES):
            own = self._own_again(source, seen, tried)
            if own is None:
                return
            seen = seen or own
            # At first as if the target were absent, as it nearly always is: the condition of the
            # put says whether that is so.
            there = self._get(target) if number else None
            if there is not None and there.record is not None:
                if there.record.came is not None and any(_is_made(each, there) for each in tried):
                    self._tidy_source(there.record.came)
                    return
                if self.look(target) is not None:
                    raise FileExistsError(target)
                self._tidy_if_made(target, there)
                continue
            if self._make_move(source, own, target, there, None, tried):
                return
        raise busy(source)

    def exchange(self, first: str, second: str) -> None:
        """Exchange what two names stand for; FileNotFoundError if one stands for nothing."""
        seen: NameEntry | None = None
        tried: list[NameMove] = []
        for _ in range(NUM_TRIES):
            own = self._own_again(first, seen, tried)
            if own is None:
                return
            seen = seen or own
            there = self._own(second)
            assert there.record is not None
            other = _plain(there.record)
            if self._make_move(first, own, second, there, other, tried):
                return
        raise busy(first)

    def withdraw(self, name: str) -> NameRecord:
        """Free a name; return what it stood for. FileNotFoundError if that is nothing."""
        tried: dict[str, NameRecord] = {}
        for _ in range(NUM_TRIES):
            own = None
            with suppress(FileNotFoundError):
                own = self._own(name)
            if tried:
                # The last try may have freed it, and another process have given it a directory.
                now = own or self._get(name)
                for number in now.made if now is not None else ():
                    if number in tried:
                        return tried[number]
            if own is None or own.record is None:
                raise FileNotFoundError(name)
            if name.startswith(".") and own.record.came is not None:
                self._settle_source(own.record.came)
            number = _nonce()
            tried[number] = own.record
            if self._swap(name, own, None, nonce=number) is not None:
                return own.record
        raise busy(name)

    def seen(self, name: str) -> NameRecord | None:
        """Return what a name with a dot stood for when this process last wrote or saw it."""
        entry = self._seen.get(name)
        return entry.record if entry is not None else None

    def _see(self, name: str, entry: NameEntry, *, is_tidied: bool = False) -> None:
        """Remember a name that this process may change next, with nothing else to be done first.

        With `is_tidied` the source of the move that brought the directory here is known to be.
        """
        record = entry.record
        is_early = record is not None and record.move is not None and record.move.early
        is_moving = record is not None and record.move is not None and not is_early
        is_settled = record is not None and (is_tidied or not record.came) and not is_moving
        if name.startswith(".") and is_settled:
            self._seen[name] = entry
            _keep_newest(self._seen)  # of saves that another rank commits

    def data_key(self, record: NameRecord, *names: str) -> str:
        """Return the key of a file in a directory; without names the prefix of all of them."""
        return "/".join((DATA, record.prefix, *names))

    def records(
        self, listing: ObjectListing, *, steps_only: bool = False
    ) -> dict[str, NameRecord | Unread]:
        """Return what all names of a listing stand for, or those without a dot.

        Without the small files that they hold. Of a name with a dot the move may have been made.
        One name that cannot be read stands in the way of no other: it has its error.

        Cost: one request for the newest name that this process has not seen, which says what it
        knows of others; one for each that is unknown then, several at a time.
        """
        listed = listed_names(listing)
        lasting = [name for name in listed if not name.startswith(".")]
        self._lasting.update(lasting)
        if steps_only:
            listed = lasting
        self._has_looked = True
        records: dict[str, NameRecord | Unread] = {}

        def read(name: str) -> None:
            try:
                record = self.look(name)
            except CorruptionError as error:
                records[name] = error
            except RequestFailed as error:
                if error.failure.kind != "final":
                    raise
                records[name] = error
            else:
                if record is not None:
                    records[name] = record

        unknown = [name for name in listed if _known_key(listing, name) not in self._known]
        while len(unknown) > 1:
            newest = max(unknown, key=lambda each: (listing.objects[each + SUFFIX].changed, each))
            read(newest)
            unknown.remove(newest)
            before = len(unknown)
            unknown = [name for name in unknown if _known_key(listing, name) not in self._known]
            if len(unknown) == before and not isinstance(records.get(newest), Unread):
                break
        in_threads(read, unknown, at_once=_NUM_THREADS, name="names")
        for name in listed:
            known = self._known.get(_known_key(listing, name))
            if known is None or name in records:
                continue
            if known.move is not None and not known.move.early:
                # In progress, or left by a dead process: only the target says which.
                read(name)
            else:
                records[name] = known
        return records

    def tidy(self, listing: ObjectListing) -> list[str]:
        """Complete the moves that were made and not tidied; return the names."""
        done = []
        records = self.records(listing)
        for name in listed_names(listing):
            known = self._known.get(_known_key(listing, name))
            if isinstance(records.get(name), Unread) or (known is not None and known.move is None):
                continue
            entry = self._get(name)
            if entry is not None and self._tidy_if_made(name, entry):
                done.append(name)
        return done

    def nameless(self, prefixes: Collection[str], listing: ObjectListing | None = None) -> set[str]:
        """Return those of these prefixes of data that no name stands for.

        `listing` is one of the names after the data was listed; None for a new one.

        List the data first: who makes a directory writes its name before any data. A name that
        moves during the look may be missed at both of its places, and a listing may be of an
        earlier moment: look twice, and with time in between, before anything is removed.
        """
        if not prefixes:
            return set()
        listing = listing or self._bucket.list("")
        looks = self.records(listing).values()
        records = [each for each in looks if isinstance(each, NameRecord)]
        records += [
            self._known[version]
            for name in listed_names(listing)
            if (version := _known_key(listing, name)) in self._known
        ]
        unseen = {*prefixes} - _prefixes_of(records)
        nameless = {prefix for prefix in unseen if not self._is_at_home(prefix)}
        for each in looks:
            if nameless and isinstance(each, Unread):
                raise each  # it may stand for any of these
        return nameless

    def _is_at_home(self, prefix: str) -> bool:
        """Return True if the name that a prefix was made for, or that of its step, stands for it.

        Nearly all data is there, and these two names need no listing.
        """
        made_for = prefix.partition("-")[2]
        step = _STEP.match(made_for)
        entries = [self._get(name) for name in (made_for, *(step.groups() if step else ())) if name]
        return prefix in _prefixes_of(each.record for each in entries if each and each.record)

    def _make_move(
        self,
        source: str,
        own: NameEntry,
        target: str,
        there: NameEntry | None,
        other: NameRecord | None,
        tried: list[NameMove],
    ) -> bool:
        """Make a move as in the text of the module; False if it is to be tried again.

        After False the source may have no move, or another process's; and the move may have been
        made. It is added to `tried` for `_own_again`.
        """
        assert own.record is not None
        before = version_of(there.tag) if there is not None else ""
        move = NameMove(id=_nonce(), to=target, before=before, other=other)
        plain = msgspec.structs.replace(own.record, move=None, came=None)
        locked = self._swap(source, own, msgspec.structs.replace(plain, move=move))
        tried.append(move)
        if locked is None:
            return False
        if self._finish_move(source, locked, move, there):
            return True
        # Not before it is proven that the move can never be made: else the data had two names, and
        # a process that removed one of them would take it from the other.
        now = self._get(target)
        if _is_made(move, now):
            self._tidy(source, locked, now)
            return True
        if self._prevent(move, now):
            self._swap(source, locked, plain)
        return False

    def _finish_move(
        self, source: str, locked: NameEntry, move: NameMove, there: NameEntry | None
    ) -> bool:
        """Make a move that the source's name states; False if the target is not as it was."""
        assert locked.record is not None
        record, target, aside = _plain(locked.record), move.to, None
        came = Came(id=move.id, source=source)
        if not target.startswith("."):
            notes = self._notes.get(source)
            if notes is None or notes.prefix != record.prefix:
                record = msgspec.structs.replace(record, files=self._files(record))
            else:
                aside = [self.data_key(record, path) for path in notes.aside]
                dirs = sorted({path.partition("/")[0] for path in notes.aside})
                came = msgspec.structs.replace(came, aside=tuple(dirs))
                record = msgspec.structs.replace(
                    record,
                    files=tuple(sorted(notes.files)),
                    note=notes.text,
                    held=record.held if notes.held is None else dict(notes.held),
                )
            record = msgspec.structs.replace(record, others=self._others(target))
        record = msgspec.structs.replace(record, came=came)
        made = self._swap(target, there, record)
        if made is None:
            return False
        # The move is made: what fails from here on is for the next that looks.
        self._notes.pop(source, None)
        self._seen.pop(source, None)
        with suppress(RequestFailed):
            self._tidy(source, locked, made, aside)
        self._see(target, made, is_tidied=move.id in self._tidied)
        return True

    def _others(self, name: str) -> dict[str, NameRecord]:
        """Return what this process knows of other names without a dot, the newest of them."""
        if not self._has_looked:
            with suppress(RequestFailed):
                self.records(self._bucket.list(""), steps_only=True)
        newest: dict[str, NameRecord] = {}
        seen, nbytes = {name}, 0
        for key, record in reversed(self._known.items()):
            other = key.partition(" ")[0]
            if other in seen or other.startswith(".") or record.move is not None:
                continue
            seen.add(other)
            nbytes += len(record.note) + sum(map(len, record.files)) + _MIN_NBYTES
            if len(newest) == _MAX_OTHERS or nbytes > _MAX_OTHERS_NBYTES:
                break
            newest[key] = msgspec.structs.replace(record, came=None)
        return newest

    def _files(self, record: NameRecord) -> tuple[str, ...]:
        listing = self._bucket.list(self.data_key(record))
        held = {path.partition("/")[0] for path in record.held}
        return tuple(sorted({*listing.dirs, *listing.objects, *held}))

    def _own_again(
        self, name: str, seen: NameEntry | None, tried: Sequence[NameMove]
    ) -> NameEntry | None:
        """Return a name as `_own` does, for a next try; None if one of those before was made.

        Args:
            name: The source of the moves.
            seen: What it stood for at the first try; None if this is the first.
            tried: The moves, all to one target.

        Raises:
            FileNotFoundError: It stands for nothing; or has a dot, so that it is used once, and
                stands for another directory: it was replaced, or removed and made again.
        """
        own = None
        with suppress(FileNotFoundError):
            own = self._own(name)
        if own is not None and (seen is None or _is_same(seen, own)):
            return own
        there = self._get(tried[0].to) if tried else None
        if any(_is_made(move, there) for move in tried):
            return None
        if own is None or name.startswith("."):
            raise FileNotFoundError(name)
        return own

    def _own(self, name: str) -> NameEntry:
        """Return a name without a move in it or unfinished before it, to be changed by the caller.

        A move that another process has begun is completed if it was made, else prevented.
        """
        entry = self._seen.pop(name, None)
        if entry is not None and entry.record is not None and entry.record.move is None:
            return entry
        for _ in range(NUM_TRIES):
            entry = entry or self._get(name)
            if entry is None or entry.record is None:
                raise FileNotFoundError(name)
            if entry.record.came is not None:
                self._tidy_source(entry.record.came)
            move = entry.record.move
            if move is None:
                return entry
            there = self._get(move.to)
            if _is_made(move, there):
                self._tidy(name, entry, there)
            elif self._prevent(move, there):
                if move.early:
                    return entry  # it does no harm any more
                freed = msgspec.structs.replace(entry.record, move=None)
                if (own := self._swap(name, entry, freed)) is not None:
                    return own
            entry = None
        raise busy(name)

    def _prevent(self, move: NameMove, there: NameEntry | None) -> bool:
        """Make sure that a move is not made any more; False if the target has changed meanwhile.

        The target's name is written again, with what it states: a look at it proves nothing, since
        a cache on the way may show what it was. Only of a move to an absent name of a step a look
        is enough that shows it, since no such name is ever deleted. `there` is not the outcome of
        the move.
        """
        if there is not None and not move.before and not move.to.startswith("."):
            return True
        record = there.record if there is not None else None
        return self._swap(move.to, there, record) is not None

    def _tidy_source(self, came: Came) -> None:
        """Tidy the source of a move that was made, if that is still to be done."""
        entry = self._get(came.source)
        if entry is None or entry.record is None or entry.record.move is None:
            return
        if entry.record.move.id == came.id:
            try:
                self._tidy(came.source, entry)
            except RequestFailed as error:
                # Who may write and not delete frees the name, which then states no move any more.
                if error.failure.kind != "final" or not self._swap(came.source, entry, None):
                    raise

    def _settle_source(self, came: Came) -> None:
        """Prove that the source of a move that was made is tidied, or tidy it.

        For a target that will be deleted, and with it the number of the move: the source would
        stand for the directory again. A look alone may be at what a cache has of before, so what
        it shows is written again. Only of a source with a dot it is enough that nothing is found:
        it would be a leftover without files.
        """
        for _ in range(NUM_TRIES):
            if came.id in self._tidied:
                return
            entry = self._get(came.source)
            if entry is None and came.source.startswith("."):
                return
            move = entry.record.move if entry is not None and entry.record is not None else None
            if entry is not None and move is not None and move.id == came.id:
                self._tidy(came.source, entry)
            elif entry is not None and self._swap(came.source, entry, entry.record) is not None:
                return
        raise busy(came.source)

    def _tidy_if_made(self, name: str, entry: NameEntry) -> bool:
        """Tidy a name if it states a move that was made; return whether it does.

        It may state anything by now: other processes change it between two requests of this one.
        """
        move = entry.record.move if entry.record is not None else None
        if move is None:
            return False
        there = self._get(move.to)
        is_made = _is_made(move, there)
        if is_made:
            self._tidy(name, entry, there)
        return is_made

    def _tidy(
        self,
        name: str,
        entry: NameEntry,
        there: NameEntry | None = None,
        aside: Sequence[str] | None = None,
    ) -> None:
        """Give the source of a move that was made what it has after that.

        Args:
            name: The source's name.
            entry: What it states.
            there: What the target states; None if it is to be read.
            aside: Keys of the objects that are not part of the directory any more; None if they are
                to be listed.
        """
        assert entry.record is not None
        move = entry.record.move
        assert move is not None
        if aside is None:
            there = there or self._get(move.to)
            came = there.record.came if there is not None and there.record is not None else None
            is_of = came is not None and came.id == move.id
            aside = [
                key
                for each in (came.aside if came is not None and is_of else ())
                for key in self._bucket.list_all(self.data_key(entry.record, each))
            ]
        after = _after(entry, move)
        if after is None and name.startswith("."):
            # The name last: while it is there, the next that looks does the rest.
            self._bucket.delete([*aside, name + SUFFIX])
        else:
            self._bucket.delete(aside)
            if self._swap(name, entry, after.record if after is not None else None) is None:
                return
        self._tidied[move.id] = None
        _keep_newest(self._tidied)

    def _get(self, name: str) -> NameEntry | None:
        """Read a name's object; None if there is none.

        Raises:
            RequestFailed: Also if the store shows it in a listing, and says at each read that it is
                not there.
        """
        answer = self._bucket.get(name + SUFFIX)
        if answer is None and name in self._lasting:
            answer = self._bucket.get_shown(name + SUFFIX)
        if answer is None:
            self._lasting.discard(name)  # another program has deleted it
            return None
        if not name.startswith("."):
            self._lasting.add(name)
        data, meta = answer
        record = _decode(bytes(data), name)
        if record is not None:
            self._known = record.others | self._known
            record = msgspec.structs.replace(record, others={})
            self._know(name, meta.tag, record)
        return NameEntry(record, meta.tag, meta.changed, _moves_to(record, bytes(data)))

    def _know(self, name: str, tag: Tag, record: NameRecord) -> None:
        """Remember what a version of a name states, but for the files that it holds."""
        if not tag:
            return  # a store that names no versions: the next one would look like this
        move = record.move
        if move is not None and move.other is not None:
            other = msgspec.structs.replace(move.other, held={})
            move = msgspec.structs.replace(move, other=other)
        self._known[f"{name} {version_of(tag)}"] = msgspec.structs.replace(
            record, move=move, made=(), held={}, others={}
        )

    def _swap(
        self, name: str, entry: NameEntry | None, record: NameRecord | None, *, nonce: str = ""
    ) -> NameEntry | None:
        """Replace a name that still is as it was read; None if it is not. None frees it."""
        nonce, made = nonce or _nonce(), entry.made if entry is not None else ()
        if record is None:
            data = "".join((nonce, *made[:_MAX_MADE_FREE])).encode()
        else:
            came = record.came.id if record.came is not None else ""
            made = tuple(number for number in made if number != came)[:_MAX_MADE]
            record = msgspec.structs.replace(record, nonce=nonce, made=made)
            data = msgspec.json.encode(record)
        tag = self._bucket.put_if(name + SUFFIX, data, tag=entry.tag if entry else None).tag
        if tag is None:
            return None
        if not name.startswith("."):
            self._lasting.add(name)
        if record is not None:
            self._know(name, tag, record)
            self._see(name, NameEntry(record, tag, made=_moves_to(record, data)))
        return NameEntry(record, tag, made=_moves_to(record, data))


def _prefixes_of(records: Iterable[NameRecord]) -> set[str]:
    """Return the prefixes of all data that names stand for, or will after their moves."""
    prefixes: set[str] = set()
    for record in records:
        prefixes.add(record.prefix)
        if record.move is not None and record.move.other is not None:
            prefixes.add(record.move.other.prefix)
    return prefixes


def listed_names(listing: ObjectListing) -> list[str]:
    """Return the names of directories in a listing of the root, sorted.

    A name that has been moved away stays in listings until it is tidied, an instant later.
    """
    return sorted(
        key.removesuffix(SUFFIX)
        for key, meta in listing.objects.items()
        if key.endswith(SUFFIX) and meta.nbytes >= _MIN_NBYTES
    )


def used_names(listing: ObjectListing) -> list[str]:
    """Return the keys of names that are used once, and stand for nothing any more."""
    return [
        key
        for key, meta in listing.objects.items()
        if key.startswith(".") and key.endswith(SUFFIX) and meta.nbytes < _MIN_NBYTES
    ]


def _keep_newest(memory: dict[str, Any]) -> None:
    """Forget what was noted first, but for so many."""
    while len(memory) > _MAX_SEEN:
        memory.pop(next(iter(memory)), None)


def _known_key(listing: ObjectListing, name: str) -> str:
    return f"{name} {version_of(listing.objects[name + SUFFIX].tag)}"


def _nonce() -> str:
    return secrets.token_hex(_ID_NBYTES // 2)


def _decode(data: bytes, name: str) -> NameRecord | None:
    """Return what a name states, None for a free one; CorruptionError for anything else."""
    if _FREE.fullmatch(data):  # not by its length: a step whose name is cut is not gone
        return None
    try:
        return decode_json_as(data, NameRecord)
    except (msgspec.DecodeError, RecursionError):
        raise CorruptionError(
            f"{name}{SUFFIX} is not the name of a directory: another program has written it, or it "
            f"was damaged on its way; if it stays so, write it back as it was (without it the "
            f"data of the directory is lost)"
        ) from None


def _is_made(move: NameMove, there: NameEntry | None) -> bool:
    """Return True if a move has written the target's name, whatever has changed that since."""
    return there is not None and move.id in there.made


def _moves_to(record: NameRecord | None, data: bytes) -> tuple[str, ...]:
    """Return the numbers of changes that a name's object states: the last one, then earlier ones.

    That a name was freed counts as a move of nothing.
    """
    if record is not None:
        return (*((record.came.id,) if record.came is not None else ()), *record.made)
    numbers = data.decode(errors="replace")
    return tuple(numbers[at : at + _ID_NBYTES] for at in range(0, len(numbers), _ID_NBYTES))


def _after(entry: NameEntry, move: NameMove) -> NameEntry | None:
    """Return what the source of a move stands for after it; None for nothing."""
    if move.other is None:
        return None
    return NameEntry(move.other, entry.tag, entry.changed, entry.made)


def _plain(record: NameRecord) -> NameRecord:
    """Return what a name states of its directory alone."""
    return msgspec.structs.replace(record, nonce="", move=None, came=None, made=(), others={})


def _is_same(seen: NameEntry, now: NameEntry) -> bool:
    """Return True if a name stands for the directory that it stood for."""
    before, after = seen.record, now.record
    return before is not None and after is not None and before.prefix == after.prefix


def busy(name: str) -> RequestFailed:
    """Return the error for a name or file that was changed by others as often as by this one."""
    return RequestFailed(
        Failure(
            "final",
            f"other processes change {name} without end: try again later; or the store gives each "
            f"answer another ETag, and cannot be used",
        )
    )
