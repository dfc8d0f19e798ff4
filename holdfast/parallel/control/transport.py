"""Bytes between the ranks of a layout, with deadlines that name the ranks that did not arrive."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

import msgspec

from holdfast.decoding import decode_json_as
from holdfast.errors import DeadlineError, GroupError
from holdfast.parallel.bounded_store import BoundedStore
from holdfast.parallel.control.connections import Connections, LateError

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

_PROGRESS_WAIT_S = 1.5
"""Time for the others to post their progress before a rank is called missing or silent; also the
limit of a request to the store."""
_EXPLAIN_S = 3.0
"""Time in which the store must have named who is missing; see `BoundedStore.within`."""

_Report = tuple[dict[int, str], list[int]]


class Transport:
    """Moves exact bytes between group indices for `Control`, with a deadline for each call.

    Before a collective each rank writes a progress entry, ``sequence:phase``, under its own store
    key (overwritten, so the store does not grow); of calls in every microbatch it writes the last
    one of a second. When a wait fails, the entries say who is missing and where each was last seen.
    That is a DeadlineError, and the transport is broken from then on: its connections are closed at
    once, so that ranks that wait for this one fail, too. One rank reads the entries, for all that
    fail in the same collective.

    Two ranks connect when one first sends to the other, and finds its address in the store.
    All-gather and broadcast take ceil(log2(ranks)) rounds over the same connections: each rank has
    one to and one from the ranks at distances 1, 2, 4, … before and after it. Once ranks are
    connected, a store that is gone costs the names of missing ranks, not the collective.

    Args:
        ranks: global ranks, in order.
        rank: this process's global rank.
        store: holds the addresses and progress entries; nothing else uses it.
        name: the layout's name, for messages.
    """

    def __init__(
        self,
        *,
        ranks: Sequence[int],
        rank: int,
        store: Store,
        name: str,
    ) -> None:
        self.num_collectives = 0
        self.nbytes_sent = 0
        self._ranks = tuple(ranks)
        self._index = self._ranks.index(rank)
        self._rank = rank
        self._store = BoundedStore.of(store, limit_s=_PROGRESS_WAIT_S)
        self._timeout_s = 0.0
        self._name = name
        self._sequence = 0
        self._phase = "created"
        self._deadline = 0.0
        self._posted_after_s = 0.0
        """Seconds after which the progress of the call in progress is posted."""
        self._broken = ""
        self._is_closed = False
        self._connections = Connections(index=self._index, store=store)
        self._post("created")

    def call_in_long_waits(self, call: Callable[[str], bool]) -> None:
        """Call this from now on when a wait lasts, with the phase; again until it returns True."""
        self._connections.when_long = lambda: call(self._phase)

    @property
    def is_broken(self) -> bool:
        """True if it failed, or was abandoned or closed."""
        return bool(self._broken) or self._is_closed

    def start(
        self, sequence: int, phase: str, timeout_s: float, *, is_frequent: bool = False
    ) -> None:
        """Post the progress of the next call; GroupError if an earlier call broke the transport.

        Args:
            sequence, phase: of the call.
            timeout_s: what it has from now on.
            is_frequent: True for calls of every microbatch. With thousands of ranks a request for
                each would be too much for the store: their progress is posted later.
        """
        if self._broken:
            raise GroupError(
                f"Phase {phase!r}: the control communicator of layout {self._name!r} failed "
                f"earlier and cannot be used any more. The reason: {self._broken}"
            )
        self._sequence, self._phase = sequence, phase
        self.extend(timeout_s)
        key, progress = self._progress(phase)
        if is_frequent:
            self._posted_after_s = min(self._connections.after_s, timeout_s / 4)
            self._store.post_later(key, progress, after_s=self._posted_after_s)
            return
        self._posted_after_s = 0.0
        self._store.withdraw(key)  # of an earlier call
        # Not waited for: a call would take several times as long as its own messages.
        self._store.post(key, progress)

    def close(self) -> None:
        """End the connections; a second call does nothing."""
        self._is_closed = True
        self._store.withdraw(f"progress/{self._rank}")
        self._connections.close()

    def abandon(self, why: str) -> None:
        """Break it on purpose: the others' waits end with a DeadlineError that names this rank."""
        if not self._broken:
            self._broken = why
            self.close()

    def all_gather(self, data: bytes, row_nbytes: int) -> list[bytes]:
        """Return every rank's `data`, padded to `row_nbytes`, by group index.

        In each round a rank sends on all rows it has, and so has twice as many after it.
        """
        size = len(self._ranks)
        # By distance from this rank, so that what it has, and what it receives next, is contiguous.
        # With ranks 0 to 4 this rank sends its first 1, 2 and 1 rows to the ranks 1, 2 and 4 before
        # it, and receives as many from the ranks 1, 2 and 4 after it.
        rows = bytearray(size * row_nbytes)
        rows[:row_nbytes] = data.ljust(row_nbytes, b"\0")
        view = memoryview(rows)
        self._check_open()
        with self._naming_missing_ranks():
            self._count(row_nbytes)
            self._connections.connect((self._at(-d) for d in self._distances()), self._deadline)
            for held in self._distances():
                # Twice as many after each round; the last lacks only the rest.
                nbytes = min(held, size - held) * row_nbytes
                have = held * row_nbytes
                outgoing = [(self._at(-held), view[:nbytes])]
                self._transfer(outgoing, [(self._at(held), view[have : have + nbytes])])
        # Index 0 is at distance size - index: rotate the rows into the order of the layout.
        start = (size - self._index) * row_nbytes
        ordered = bytes(view[start:]) + bytes(view[:start])
        return [ordered[i * row_nbytes : (i + 1) * row_nbytes] for i in range(size)]

    def broadcast(self, data: bytes | None, nbytes: int) -> bytes:
        """Return the `data` of index 0, `nbytes` long, at every rank.

        Down a binomial tree: over the connections of an all-gather.
        """
        buffer = memoryview(bytearray(nbytes) if data is None else data)
        # Towards lower indices, as rows of an all-gather go, so that no rank needs another
        # connection. A rank at distance d before index 0 hears from that at d without its
        # highest bit, and tells those at d with one higher bit.
        from_root = -self._index % len(self._ranks)
        with self._naming_missing_ranks():
            self._count(0 if data is None else nbytes)
            if from_root:
                parent = 1 << (from_root.bit_length() - 1)
                self._transfer([], [(self._at(parent), buffer)])
            children = [
                d for d in self._distances() if d > from_root and d + from_root < len(self._ranks)
            ]
            self._transfer([(self._at(-d), buffer) for d in reversed(children)], [])
        return data if data is not None else bytes(buffer)

    def send(self, messages: Sequence[tuple[int, bytes]]) -> None:
        """Send each (index, data), all in flight at once; empty data is not sent."""
        self.exchange([(index, memoryview(data)) for index, data in messages], [])

    def receive(self, sizes: Sequence[tuple[int, int]]) -> list[bytes]:
        """Return a message from each (index, nbytes), all in flight at once; 0 bytes are left out.

        Messages of one sender arrive in the order in which they were sent.
        """
        buffers = [bytearray(nbytes) for _, nbytes in sizes]
        pairs = zip(sizes, buffers, strict=True)
        self.exchange([], [(index, memoryview(buffer)) for (index, _), buffer in pairs])
        return [bytes(buffer) for buffer in buffers]

    def announce(self, sequence: int, of: str) -> None:
        """Note in the store that this rank fails a call; without it the others wait longer."""
        with contextlib.suppress(RuntimeError):
            self._store.set(f"failing/{of}/{sequence}", str(self._rank))

    def announced(self, sequence: int, of: str) -> int | None:
        """Return the rank that has noted that it fails a call, if one has."""
        key = f"failing/{of}/{sequence}"
        with contextlib.suppress(RuntimeError):  # a store that is gone knows of none
            return int(self._store.get(key)) if self._store.check([key]) else None
        return None

    def note(self, sequence: int, text: str) -> bool:
        """Leave a text in the store for ranks that look before they make a call.

        Returns False if the store did not take it in time.
        """
        try:
            self._store.set(f"note/{self._rank}", f"{sequence}:{text}")
        except RuntimeError:
            return False
        return True

    def note_later(self, sequence: int, text: str) -> None:
        """Leave a text as `note` does once a wait would, unless it is withdrawn by then."""
        key, after_s = f"note/{self._rank}", self._connections.after_s
        self._store.post_later(key, f"{sequence}:{text}", after_s=after_s)

    def withdraw_note(self) -> None:
        """Withdraw what `note_later` has not left yet."""
        self._store.withdraw(f"note/{self._rank}")

    def leave_reason(self, of: int | str, text: str, *, replaces: bool = True) -> None:
        """Leave a text for all ranks, of the call by which they meet again, or of anything else.

        Args:
            of: what it is left of.
            text: the text.
            replaces: True to leave it also where another rank has left one.
        """
        key = f"reason/{of}"
        with contextlib.suppress(RuntimeError):
            if replaces:
                self._store.set(key, text)
            else:
                self._store.compare_set(key, "", text)

    def reason(self, of: int | str) -> str | None:
        """Return the text that a rank has left of a call, or of anything else, if one has."""
        key = f"reason/{of}"
        with contextlib.suppress(RuntimeError):
            return bytes(self._store.get(key)).decode() if self._store.check([key]) else None
        return None

    def count(self, key: str, number: int) -> int:
        """Add a number to that under a key, and return the sum; GroupError without the store."""
        try:
            return self._store.add(f"count/{key}", number)
        except RuntimeError as error:
            raise GroupError(f"The store of layout {self._name!r} cannot count: {error}") from error

    def forget_count(self, key: str) -> None:
        """Remove a key of `count`."""
        with contextlib.suppress(RuntimeError):
            self._store.delete_key(f"count/{key}")

    def noted(self, rank: int, sequence: int) -> str | None:
        """Return the text that a rank has left before it makes a call, if it has."""
        key = f"note/{rank}"
        with contextlib.suppress(RuntimeError):
            if self._store.check([key]):
                number, _, text = bytes(self._store.get(key)).decode().partition(":")
                return text if int(number) == sequence else None
        return None

    def extend(self, timeout_s: float) -> None:
        """Give the call in progress `timeout_s` from now on."""
        self._timeout_s, self._deadline = timeout_s, time.monotonic() + timeout_s

    def exchange(
        self,
        outgoing: Sequence[tuple[int, memoryview]],
        incoming: Sequence[tuple[int, memoryview]],
    ) -> None:
        """Send and receive each (index, bytes), all in flight at once, without a copy.

        Messages of one sender arrive in the order in which they were sent; empty ones are left out
        on both sides.
        """
        outgoing, incoming = ([p for p in pairs if p[1].nbytes] for pairs in (outgoing, incoming))
        with self._naming_missing_ranks(is_direct=True):
            for _, data in outgoing:
                self._count(data.nbytes)
            for _ in incoming:
                self._count(0)
            self._transfer(outgoing, incoming)

    def _transfer(
        self,
        outgoing: Sequence[tuple[int, memoryview]],
        incoming: Sequence[tuple[int, memoryview]],
    ) -> None:
        """Move bytes within the deadline of the call in progress."""
        self._check_open()
        self._connections.transfer(outgoing, incoming, self._deadline)

    def _check_open(self) -> None:
        """Raise GroupError after `close`."""
        if self._is_closed:
            raise GroupError(f"The control communicator of layout {self._name!r} is closed.")

    def _distances(self) -> list[int]:
        """Return the powers of two below the number of ranks: collectives connect so far apart."""
        return [1 << bit for bit in range((len(self._ranks) - 1).bit_length())]

    def _at(self, distance: int) -> int:
        """Return the index at a distance round the ranks."""
        return (self._index + distance) % len(self._ranks)

    def _count(self, nbytes: int) -> None:
        """Count one collective or message."""
        self.num_collectives += 1
        self.nbytes_sent += nbytes

    def _post(self, phase: str) -> None:
        """Write this rank's progress entry."""
        key, progress = self._progress(phase)
        self._store.withdraw(key)  # that of the call
        with contextlib.suppress(RuntimeError):  # progress is for messages: calls work without it
            self._store.set(key, progress)

    def _progress(self, phase: str) -> tuple[str, str]:
        """Return key and value of this rank's progress entry."""
        return f"progress/{self._rank}", f"{self._sequence}:{phase}"

    @contextlib.contextmanager
    def _naming_missing_ranks(self, *, is_direct: bool = False) -> Iterator[None]:
        """Raise DeadlineError if a transfer inside fails, and break the transport.

        Args:
            is_direct: All messages are in flight at once, so that no rank waits for another one to
                pass something on: only those are late for which this one waits.
        """
        try:
            yield
        except (OSError, LateError, RuntimeError) as error:  # the last is the store's
            if isinstance(error, GroupError):
                raise
            with self._store.within(_EXPLAIN_S):
                # Post, then close: who sees the connection break finds that this rank is only a
                # victim.
                self._post(f"{self._phase} (gave up)")
                self.close()
                self._broken, ranks = self._describe(error, is_direct=is_direct)
            raise DeadlineError(self._broken, details={"missing_ranks": ranks}) from error

    def _describe(self, cause: Exception, *, is_direct: bool) -> tuple[str, list[int]]:
        """Return why a wait failed, and the ranks to look at."""
        broke = not isinstance(cause, LateError)
        awaited = {self._ranks[i] for i in cause.indices} if isinstance(cause, LateError) else set()
        where = f"Phase {self._phase!r} (collective {self._sequence} of layout {self._name!r})"
        what = "a connection broke" if broke else f"not complete after {self._timeout_s:g} s"
        try:
            missing, silent = self._read_progress(broke=broke)
        except RuntimeError as error:
            return (
                f"{where}: {what}, and the store cannot say who is missing ({error}). {cause}",
                [],
            )
        if is_direct and awaited.intersection(silent):
            silent = [rank for rank in silent if rank in awaited]
        if missing:
            seen = "; ".join(f"rank {rank}: {where}" for rank, where in missing.items())
            who = f"ranks {list(missing)} did not arrive, last seen in {seen}"
        elif silent:
            who = f"all had arrived, but ranks {silent} have not reported since"
        else:
            who = "all had arrived"
        return (
            f"{where}: {what}; {who}. Look at what happened on those ranks first. The control "
            f"communicator cannot be used any more; start again from the last checkpoint. "
            f"({cause})",
            list(missing) or silent,
        )

    def _read_progress(self, *, broke: bool) -> tuple[dict[int, str], list[int]]:
        """Return the ranks that have not reached this collective, with places; and the silent ones.

        The first rank that fails looks, the others read what it reports: if all looked, the store
        would send ranks * ranks entries at the worst time.
        """
        report = f"report/{self._sequence}"
        if self._store.add(f"{report}/readers", 1) > 1:
            with contextlib.suppress(RuntimeError):  # the rank that should report is gone, too
                self._store.wait([report], timedelta(seconds=1.5 * _PROGRESS_WAIT_S))
                known: _Report = decode_json_as(self._store.get(report), _Report)
                return known
        progress = self._look(broke=broke)
        self._store.set(report, msgspec.json.encode(progress).decode())
        return progress

    def _look(self, *, broke: bool) -> tuple[dict[int, str], list[int]]:
        """Read every rank's progress, for a while if that may still change.

        Ranks that gave up in an earlier collective are named only if there are no others.
        """
        began = time.monotonic()
        posted, until = began + self._posted_after_s, began + _PROGRESS_WAIT_S
        while True:
            missing: dict[int, str] = {}
            victims: dict[int, str] = {}
            silent: list[int] = []
            entries = self._store.multi_get([f"progress/{rank}" for rank in self._ranks])
            for rank, entry in zip(self._ranks, entries, strict=True):
                number, _, phase = bytes(entry).decode().partition(":")
                if int(number) < self._sequence:
                    is_victim = phase.endswith(" (gave up)")
                    where = f"phase {phase!r} (collective {number})"
                    (victims if is_victim else missing)[rank] = where
                elif int(number) == self._sequence and not phase.endswith(" (gave up)"):
                    silent.append(rank)
            # A rank posts that it gave up before it closes. So after a connection broke, the one
            # rank that has not is the one that died; of several some may still be about to post.
            is_last = broke and len(missing) + len(silent) == 1
            missing = missing or victims
            # The deadline has passed: late is late. Who came before it has posted by `posted`.
            late = bool(missing) and not broke and time.monotonic() >= posted
            if late or is_last or not (missing or silent) or time.monotonic() >= until:
                return missing, silent
            time.sleep(0.05)
