"""Agreement between the ranks of a layout: small messages, every one with a deadline.

All traffic is on connections that nothing else uses. Each call opens with one collective over
frames of one size, which carry the caller's phase and its payload, if that is short. So ranks that
are out of sync all learn where each of them is, and agreement over small payloads costs exactly one
collective.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, NoReturn, Protocol
from weakref import WeakSet

import msgspec

from holdfast.decoding import decode_json_as, decode_msgpack_as
from holdfast.errors import (
    DeadlineError,
    ErrorRecord,
    GroupError,
    HoldfastError,
    PlanError,
    joined_error,
    late_ranks,
    named_ranks,
)
from holdfast.parallel.control.transport import Transport

INLINE_NBYTES = 512
"""Payloads up to this size travel in the frame itself."""
FRAME_NBYTES = 128 + INLINE_NBYTES
_PHASE_NBYTES = 64
"""Bytes of a phase that a message shows; a digest distinguishes longer phases."""
_LENGTH_NBYTES = 2
FAILED = "failed"
"""The operation of a rank that cannot continue; its payload is a `FailureNotice`."""
_AFTER_LATE_S = 1.5
"""How long a rank that has waited for others up to a limit waits for them to hear of it."""
_WINDOW = 16
"""Messages in flight at the coordinator, to bound its extra memory."""


class FailureNotice(msgspec.Struct, frozen=True, array_like=True):
    """The payload of a `FAILED` frame."""

    error: ErrorRecord
    is_shared: bool
    """True if all ranks have raised this error already."""
    depth: int
    """Number of the rank's guards that are still open around the error."""


class Note(msgspec.Struct, frozen=True, kw_only=True):
    """How far a rank is between two calls of all ranks."""

    waits_in: str
    """The phase of the call that it waits in; empty if it waits in something else."""
    places: dict[str, list[Any]] = {}
    """Its places in what ranks do outside of `control`, by keys equal on all ranks."""
    step: int = 0
    """Number of the steps that it has begun, see `Control.beginning_step`."""
    step_of: str = ""
    """What makes the last of them, in words."""
    left: str = ""
    """What has left a microbatch on this rank alone, in words; empty if nothing has."""


class Noted(Protocol):
    """Knows how far this rank is in something that ranks do together."""

    def places(self) -> Mapping[str, list[Any]]:
        """Return `Note.places`."""


class Cut(Protocol):
    """Has communicators that steps use."""

    def cut(self, reason: str) -> None:
        """End the waits of other ranks for this one, and refuse steps for that reason."""


class Frame(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The place of a rank (sequence number, operation, phase), and its payload if that is short."""

    sequence: int
    operation: str
    phase: str
    phase_digest: bytes
    length: int
    inline: bytes
    misuse: str
    """A mistake in the rank's arguments, sent instead of the payload; empty if there is none."""

    @classmethod
    def make(
        cls, sequence: int, operation: str, phase: str, payload: bytes, misuse: str | None
    ) -> Frame:
        """Return the frame of a call; `misuse` fails the call on all ranks."""
        is_inline = len(payload) <= INLINE_NBYTES and not misuse
        return cls(
            sequence=sequence,
            operation=operation,
            phase=_shorten(phase, _PHASE_NBYTES),
            phase_digest=blake2b(phase.encode(), digest_size=8).digest(),
            length=len(payload),
            inline=payload if is_inline else b"",
            misuse=_shorten(misuse or "", INLINE_NBYTES),
        )

    def encode(self) -> bytes:
        """Return `FRAME_NBYTES` bytes."""
        data = msgspec.msgpack.encode(self)
        return (len(data).to_bytes(_LENGTH_NBYTES, "little") + data).ljust(FRAME_NBYTES, b"\0")

    @classmethod
    def decode(cls, data: bytes) -> Frame:
        """Return the frame that `encode` was called on."""
        stop = _LENGTH_NBYTES + int.from_bytes(data[:_LENGTH_NBYTES], "little")
        return decode_msgpack_as(data[_LENGTH_NBYTES:stop], cls)

    @property
    def call(self) -> tuple[int, str, bytes]:
        """The parts that must be equal on all ranks."""
        return self.sequence, self.operation, self.phase_digest

    def __str__(self) -> str:
        """Return the place for messages."""
        return f"phase {self.phase!r} ({self.operation}, collective {self.sequence})"


@dataclass(slots=True, kw_only=True, eq=False)
class GuardScope:
    """One run of a guard; scopes nest like the guards do."""

    guard: object | None = None
    """The guard itself, to recognise one that is run within itself."""
    outer: GuardScope | None = None
    """The scope around this one."""
    depth: int = 1
    """Number of nested scopes, this one included."""
    answers: dict[str, list[bytes]] = field(default_factory=dict)
    """Payloads that `Control.agree` has returned in it, by phase."""
    has_failed_on_all: bool = False
    """True once it has failed on every rank: no rank waits for another, so calls are refused."""
    failure: BaseException | None = None
    """The error that it has failed with."""

    def refuse_calls_after_failure(self) -> None:
        """Raise the failure again, if there is one on all ranks."""
        if self.has_failed_on_all and self.failure is not None:
            raise self.failure

    def remember(self, error: BaseException) -> None:
        """Keep the error that a call in this scope, or in one around it, raised on all ranks."""
        scope: GuardScope | None = self
        while scope is not None and scope.has_failed_on_all:
            scope.failure = scope.failure or error
            scope = scope.outer

    def fail_on_all(self, depth: int) -> None:
        """Mark the scopes from `depth` inwards as failed on all ranks."""
        scope: GuardScope | None = self
        while scope is not None and scope.depth >= depth:
            scope.has_failed_on_all = True
            scope = scope.outer


class Control:
    """Collectives over the ranks of one layout, for agreement and small tables.

    Not for tensors, and not thread-safe: one thread of each rank calls, all ranks in the same
    order. With one rank nothing is sent and torch.distributed is not needed.

    Args:
        transport: connects exactly `ranks`, in that order; None for one rank.
        ranks: global ranks; the first is the coordinator.
        rank: this process's global rank.
        timeout_s: the longest time that a method takes, about.
        data_timeout_s: the same for calls inside of `in_step`; by default, and at least, timeout_s.
        name: the layout's name, for messages.

    Raises:
        GroupError: By every method, on all ranks: the ranks are in different phases or operations.
            The message names each rank's. In a process that was forked from the one that made it:
            by every method, and nothing is sent.
        DeadlineError: By every method, on all ranks: a rank does not arrive, or its connection
            breaks. The message names it and where it was last seen. Later calls raise.
    """

    def __init__(
        self,
        transport: Transport | None,
        *,
        ranks: Sequence[int],
        rank: int,
        timeout_s: float,
        data_timeout_s: float = 0.0,
        name: str = "model",
    ) -> None:
        if transport is None and len(ranks) != 1:
            raise GroupError(f"{len(ranks)} ranks need a communicator to agree over.")
        self.ranks = tuple(ranks)
        self.size = len(self.ranks)
        self.rank = rank
        self.index = self.ranks.index(rank)
        self.coordinator = self.ranks[0]
        """The rank that gathers and scatters: the first of the layout, whatever its number."""
        self.is_coordinator = self.index == 0
        self.timeout_s = timeout_s
        self.data_timeout_s = data_timeout_s or timeout_s
        self.name = name
        self._transport = transport
        self._pid = os.getpid()
        self._sequence = 0
        self._is_in_step = False
        self._most_s = float("inf")
        """No call waits longer, see `_waiting_less_after`."""
        self.is_out_of_sync = False
        """True if the last call met ranks in other phases or operations."""
        self._is_midway = False
        """True while other ranks may wait for bytes of this one, see `_calling`."""
        self.scope: GuardScope | None = None
        """The innermost guarded operation in progress, kept by `Guard`."""
        self.shared_error: BaseException | None = None
        """The last error that left a guard on all ranks, kept by `Guard`."""
        self.noted: WeakSet[Noted] = WeakSet()
        """What `leave_note` takes notes of."""
        self.cuts: WeakSet[Cut] = WeakSet()
        """What `cut_off` cuts."""
        self.reason_cut = ""
        """Why communicators that steps use are cut; empty if they are not."""
        self._num_steps = 0
        """Steps that this rank has begun, see `beginning_step`."""
        self._step_of = ""
        """What makes the last of them."""
        self._has_left_note = False
        """True if the store has taken a note of the call in progress."""
        self._saw_left_at: float | None = None
        """When the call in progress has first seen that an interrupt has left a microbatch."""
        self._around: Control | None = None
        self._within: WeakSet[Control] = WeakSet()
        self._phase = ""
        """That of the call in progress."""
        if transport is not None:
            transport.call_in_long_waits(self._wait_on)

    @classmethod
    def single(cls, *, rank: int = 0, name: str = "model") -> Control:
        """Return the control of one process, which agrees with itself."""
        return cls(None, ranks=(rank,), rank=rank, timeout_s=60.0, name=name)

    def take_within(self, inner: Control) -> None:
        """Let waits in calls of some of these ranks end where one of them waits elsewhere.

        Args:
            inner: agreement of some of these ranks, which tells no waits of its own. Its name is
                that of no other one.
        """
        inner._around = self
        self._within.add(inner)

    @property
    def is_broken(self) -> bool:
        """True if the communicator failed earlier, so that nothing can be sent any more."""
        return self._transport is not None and self._transport.is_broken

    @property
    def num_collectives(self) -> int:
        """Number of collectives and single messages that this rank has taken part in."""
        return 0 if self._transport is None else self._transport.num_collectives

    @property
    def nbytes_sent(self) -> int:
        """Number of bytes that this rank has contributed to them."""
        return 0 if self._transport is None else self._transport.nbytes_sent

    @property
    def is_forked(self) -> bool:
        """True in a process that was forked from the one that made this."""
        return os.getpid() != self._pid

    def refuse_forked(self, operation: str) -> None:
        """Raise GroupError in a process that was forked from the one that made this.

        Both hold the same connections, and what uses them has the same staging memory and writer:
        what one of them wrote there would be stored as the other's.
        """
        if self.is_forked:
            raise GroupError(
                f"{operation}: process {os.getpid()} was forked from process {self._pid}, which "
                f"made the groups of layout {self.name!r}, or the checkpointer, that this is "
                f"called on. They are of that process alone: make others after the fork."
            )

    def close(self) -> None:
        """Destroy the communicator; later calls raise GroupError. Its ProcessGroups call this.

        In a forked process it does nothing: the connections are its parent's.
        """
        if self._transport is not None and not self.is_forked:
            self._transport.close()

    def all_gather(self, payload: bytes, *, phase: str) -> list[bytes]:
        """Return every rank's payload, in the layout's order of ranks.

        Cost: one collective; if a payload is longer than `INLINE_NBYTES`, a second one in which
        all are padded to the longest.
        """
        with self._calling(phase):
            return self._all_gather("all_gather", payload, phase)

    def gather(self, payload: bytes, *, phase: str) -> list[bytes] | None:
        """Return every rank's payload at the coordinator, in the layout's order; None elsewhere.

        Cost: one collective, and a message for each payload longer than `INLINE_NBYTES`.
        """
        with self._calling(phase):
            frames = self._open("gather", phase, payload)
            if self.scope is not None:
                self.scope.answers[phase] = []  # for messages: how far it came
            payloads = [payload, *(frame.inline for frame in frames[1:])]
            if self._transport is None:
                return payloads
            if not self.is_coordinator:
                if len(payload) > INLINE_NBYTES:
                    self._transport.send([(0, payload)])
                return None
            sizes = [(i, f.length) for i, f in enumerate(frames) if i and f.length > INLINE_NBYTES]
            for start in range(0, len(sizes), _WINDOW):
                window = sizes[start : start + _WINDOW]
                for (i, _), data in zip(window, self._transport.receive(window), strict=True):
                    payloads[i] = data
            return payloads

    def scatter(self, payloads: Sequence[bytes] | None, *, phase: str) -> bytes:
        """Return the coordinator's `payloads[index]` at each rank; the others pass None.

        Cost: one collective, and two messages of the exact size to each other rank.
        """
        misuse = None
        if not self.is_coordinator:
            misuse = (
                None
                if payloads is None
                else "scatter takes payloads at the coordinator alone: pass None here"
            )
        elif payloads is None or len(payloads) != self.size:
            count = "None" if payloads is None else str(len(payloads))
            misuse = f"scatter needs {self.size} payloads at the coordinator, got {count}"
        with self._calling(phase):
            self._open("scatter", phase, b"", misuse=misuse)
            transport = self._transport
            if transport is not None and payloads is None:
                (length,) = transport.receive([(0, 8)])
                return transport.receive([(0, int.from_bytes(length, "little"))])[0]
            assert payloads is not None  # one rank alone is the coordinator
            if transport is not None:
                for start in range(1, self.size, _WINDOW):
                    window = range(start, min(start + _WINDOW, self.size))
                    transport.send([(i, len(payloads[i]).to_bytes(8, "little")) for i in window])
                    transport.send([(i, payloads[i]) for i in window])
            return payloads[0]

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """Let calls inside wait for a late rank as long as collectives of tensors do.

        For agreements that a rank may come to straight from a long forward or backward.
        """
        before, self._is_in_step = self._is_in_step, True
        try:
            yield
        finally:
            self._is_in_step = before

    @property
    def limit_s(self) -> float:
        """Seconds that a call waits for a late rank here: more inside of `in_step`."""
        limit_s = max(self.timeout_s, self.data_timeout_s) if self._is_in_step else self.timeout_s
        return min(limit_s, self._most_s)

    @contextmanager
    def _waiting_less_after(self, error: BaseException) -> Iterator[None]:
        """Wait only a moment more for ranks for which this one has waited in vain already."""
        if isinstance(error, DeadlineError) and "waited_s" in error.details:
            self._most_s = _AFTER_LATE_S
        try:
            yield
        finally:
            self._most_s = float("inf")

    def broadcast(self, payload: bytes | None, *, phase: str) -> bytes:
        """Return the coordinator's payload at every rank; the others pass None.

        Cost: one collective; a second one if the payload is longer than `INLINE_NBYTES`.
        """
        misuse = None
        if self.is_coordinator != (payload is not None):
            misuse = "broadcast takes a payload at the coordinator, and None elsewhere"
        with self._calling(phase):
            source = self._open("broadcast", phase, payload or b"", misuse=misuse)[0]
            if self._transport is not None and source.length > INLINE_NBYTES:
                return self._transport.broadcast(payload, source.length)
            return payload or source.inline

    def gather_and_broadcast(
        self, payload: bytes, data: bytes | None, *, phase: str
    ) -> tuple[list[bytes], bytes]:
        """Return every rank's short payload, and the coordinator's data; the others pass None.

        Cost: one collective if the payloads are shorter than `INLINE_NBYTES` by 8, and a broadcast.
        """
        with self._calling(phase):
            length = len(data or b"").to_bytes(8, "little")
            payloads = self._all_gather("broadcast", length + payload, phase)
            nbytes = int.from_bytes(payloads[0][:8], "little")
            if nbytes and self._transport is not None:
                data = self._transport.broadcast(data, nbytes)
            return [each[8:] for each in payloads], data or b""

    def agree(
        self, error: BaseException | None, *, phase: str, payload: bytes = b""
    ) -> list[bytes]:
        """Return every rank's payload if no rank has an `error`; otherwise all ranks raise.

        Args:
            error: why this rank cannot continue; None if it can.
            phase: the place in the program, for messages; equal on all ranks.
            payload: at most some MiB.

        Raises:
            HoldfastError: Some rank has an error. Its class is that of the first failing rank
                (HoldfastError for an error from outside the hierarchy). Its text lists every
                failing rank with its message, and its ``__cause__`` is this rank's own error. A
                single process raises its own HoldfastError unchanged.

        Cost: as `all_gather`; one collective if no payload is longer than `INLINE_NBYTES`.
        """
        if error is not None:
            self.fail(error, phase=phase)
        with self._calling(phase):
            payloads = self._all_gather("agree", payload, phase)
            if self.scope is not None:
                self.scope.answers[phase] = payloads
            return payloads

    def fail(self, error: BaseException, *, phase: str) -> NoReturn:
        """Join whatever call the other ranks make next, and raise on all of them as `agree` does.

        Args:
            error: why this rank cannot continue.
            phase: the place in the program. If other ranks waited, the text names their place.

        Cost: one collective; a second one for long messages.
        """
        own = ErrorRecord.of(error)
        if self._transport is None:
            if isinstance(error, HoldfastError):
                raise error
            raise joined_error({self.rank: own}, num_ranks=1, phase=phase) from error
        notice = FailureNotice(
            error=own,
            is_shared=error is self.shared_error,
            depth=self.scope.depth if self.scope is not None else 0,
        )
        with self._calling(phase), self._waiting_less_after(error):
            try:
                self._open(FAILED, phase, msgspec.msgpack.encode(notice), error=error)
            except DeadlineError as late:
                if late is error:
                    raise
                # The others have left, and no one but this rank will ever report its error.
                raise late from error
        raise GroupError(f"Phase {phase!r}: no rank received the failure.") from error

    def announce_failure(self, *, of: str) -> None:
        """Let ranks that look, `failing_rank`, know that this one will call `fail` next.

        Ranks that wait in something else than a call of `control` look while they wait.

        Args:
            of: what it fails in: ranks that are in something else do not look for it.

        Cost: one request to the store; none for one rank.
        """
        if self._transport is not None:
            self._transport.announce(self._sequence + 1, of)

    def failing_rank(self, *, of: str) -> int | None:
        """Return a rank that fails the next call of all ranks, as far as this one knows.

        Cost: one request to the store.
        """
        transport = self._transport
        return None if transport is None else transport.announced(self._sequence + 1, of)

    def leave_note(self, *, left: str = "") -> bool:
        """Let ranks that look, `note_of`, know how far this one is before the next call of all.

        A rank that waits long in a call leaves one by itself.

        Args:
            left: `Note.left`.

        Returns:
            False if the store did not take it in time.

        Cost: one request to the store; none for one rank.
        """
        if self._transport is None:
            return True
        note = msgspec.structs.replace(self._note(waits_in="", places=self._places()), left=left)
        return self._transport.note(self._sequence + 1, _encoded(note))

    def note_of(self, rank: int) -> Note:
        """Return what a rank has left since the last call of all ranks; an empty note if nothing.

        Cost: at most two requests to the store.
        """
        return self._note_of(rank, before=self._sequence + 1)

    @contextmanager
    def beginning_step(self, name: str) -> Iterator[None]:
        """Enter from the begin of a step of optimizers up to the sum, for which all have begun it.

        What is inside waits for other ranks without a look at them. So if it lasts, a note is left
        by which those that wait elsewhere find out that they wait for each other, see `is_ahead`.

        Args:
            name: what makes the step.

        Cost: if it is over within a second, neither a request to the store nor a wait.
        """
        self._num_steps, self._step_of = self._num_steps + 1, name
        if self._transport is None:
            yield
            return
        note = self._note(waits_in="", places=self._places())
        self._transport.note_later(self._sequence + 1, _encoded(note))
        try:
            yield
        finally:
            self._transport.withdraw_note()

    def is_ahead(self, note: Note) -> bool:
        """Return True if a rank that has left a note is in a step that this one has not begun.

        That rank comes out of the step no earlier than this one has begun it, but by an error: then
        it waited up to a limit, or an interrupt has ended it, and its communicators are lost. All
        ranks begin the same steps, so a note that is older than what its rank does now is of a step
        that this one has begun, too; a late one is found by a later look. So if this rank waits in
        something for which that one has not come, and will not come in the step, both wait in vain.
        A rank that is slow to begin the step does not wait here.
        """
        return note.step > self._num_steps

    def awaited_by(self, note: Note) -> str | None:
        """Return where a rank that has left a note waits for this one, in words, or None.

        The call is one that this rank has not begun. Without it that rank comes out of it by an
        error alone, after its limit.
        """
        if note.waits_in:
            return f"phase {note.waits_in!r}, for all ranks"
        for each in [*self._within]:
            sequence, phase = note.places.get(each.name, (0, ""))
            if phase and sequence > each._sequence:
                return f"phase {phase!r}, for all ranks of {each.name!r}"
        return None

    def free_from_step(self, rank: int, note: Note, *, waits_in: str) -> PlanError:
        """End the step of ranks that wait in it for this one, which waits for them elsewhere.

        What the steps of this rank use is cut, and cannot be used again.

        Args:
            rank: one of them.
            note: what it has left.
            waits_in: where this rank waits, in words.

        Returns:
            What has happened; the other ranks find it by `why_freed`.
        """
        error = PlanError(
            f"rank {rank} waits in a step of {note.step_of}, which rank {self.rank} has not begun; "
            f"that one waits in {waits_in}. All ranks make the same steps of the same optimizers "
            f"in the same order: what decides whether to make one, or when to stop, is to be equal "
            f"on all of them (a loss that is not finite on one rank is `step(is_finite=False)` "
            f"there). Create the groups and the model again, and load the last checkpoint",
            details={"ranks": [rank, self.rank]},
        )
        self.cut_off(error)
        return error

    def cut_off(self, error: HoldfastError) -> None:
        """Let ranks that wait in a step for this one find an error, see `why_freed`, and end."""
        if self._transport is not None:
            text = msgspec.json.encode(ErrorRecord.of(error)).decode()
            self._transport.leave_reason(self._sequence + (not self._is_midway), text)
        self._cut(error)

    def why_freed(self) -> HoldfastError | None:
        """Return what another rank has left in `cut_off` before the next call of all ranks.

        If it has, what is cut there is cut here, too: of the ranks of a step some wait for this one
        alone, on other communicators.

        Cost: at most two requests to the store.
        """
        text = self._transport and self._transport.reason(self._sequence + (not self._is_midway))
        if not text:
            return None
        error = decode_json_as(text, ErrorRecord).to_error()
        self._cut(error)
        return error

    def leave_text(self, key: str, text: str, *, replaces: bool) -> None:
        """Leave a text for ranks that look, in any thread; see `Transport.leave_reason`.

        Cost: one request to the store.
        """
        if self._transport is not None:
            self._transport.leave_reason(key, text, replaces=replaces)

    def text_of(self, key: str) -> str | None:
        """Return what a rank has left by `leave_text`. Cost: at most two requests to the store."""
        return None if self._transport is None else self._transport.reason(key)

    def count(self, key: str, number: int) -> int:
        """Add a number to what ranks have added under a key, and return the sum.

        Raises:
            GroupError: The store does not answer.

        Cost: one request to the store; none for one rank.
        """
        return number if self._transport is None else self._transport.count(key, number)

    def forget_count(self, key: str) -> None:
        """Forget what was counted under a key, of which no rank asks any more."""
        if self._transport is not None:
            self._transport.forget_count(key)

    def _cut(self, error: HoldfastError) -> None:
        self.reason_cut = str(error)
        for each in [*self.cuts]:
            each.cut(self.reason_cut)
        for inner in [*self._within]:
            inner.abandon(self.reason_cut)

    def abandon(self, why: str) -> None:
        """Break the communicator, so that waits of other ranks for this one end, and name it."""
        if self._transport is not None:
            self._transport.abandon(why)

    def _wait_on(self, phase: str) -> bool:
        """Leave a note in a call that waits, and look at the next rank; False to look again.

        Where some ranks are in a step and some in a call, one is the next of another.
        """
        if self._transport is None or not self._is_midway:
            return True
        if self._around is not None:
            self._around._look_from(self)
            return False
        if self._within:
            freed = self.why_freed()
            if isinstance(freed, DeadlineError):  # of what ranks wait for, they meet here
                raise freed
        if not self._has_left_note:
            note = self._note(waits_in=phase, places=self._places())
            self._has_left_note = self._transport.note(self._sequence, _encoded(note))
        rank = self.ranks[(self.index + 1) % self.size]
        note = self._note_of(rank, before=self._sequence)
        if not self.is_ahead(note):
            return False
        # It has left the note before the call in which this rank waits for it. In the step it comes
        # to that call with an error alone, after its limit, see `is_ahead`.
        self.free_from_step(rank, note, waits_in=f"phase {phase!r}, for all ranks")
        return True

    def _look_from(self, inner: Control) -> None:
        """Leave a note in a call of some ranks that waits, and look at the next of them.

        What it has left is from before that call if it counts fewer calls there.

        Raises:
            HoldfastError: Both wait for each other, or an interrupt has left a microbatch there.
        """
        # A failure is in several calls at once, and one whose cause is known not waited for.
        if self._is_midway or inner._most_s < float("inf"):
            return
        freed = self.why_freed()
        if freed is not None:
            raise freed
        inner._has_left_note = inner._has_left_note or self.leave_note()
        rank = inner.ranks[(inner.index + 1) % inner.size]
        note = self.note_of(rank)
        if note.places.get(inner.name, (inner._sequence, ""))[0] >= inner._sequence:
            return
        here = f"phase {inner._phase!r}"
        if self.is_ahead(note):
            raise self.free_from_step(rank, note, waits_in=here)
        there = self.awaited_by(note)
        error: HoldfastError
        if there is not None:
            error = PlanError(
                f"rank {rank} waits in {there}, and rank {self.rank} in {here}: each for the other "
                f"one. All ranks make the same calls in the same order; an error in a forward or a "
                f"backward ends the microbatch around it. Create the groups and the model again, "
                f"and load the last checkpoint",
                details={"ranks": [rank, self.rank]},
            )
            self.cut_off(error)
            raise error
        if note.left:
            now = time.monotonic()
            inner._saw_left_at = inner._saw_left_at or now
            # It may go on as soon as it has dropped its gradients. Until then it is between two
            # calls, and late for the next one as in any agreement.
            if now - inner._saw_left_at >= self.timeout_s:
                error = DeadlineError(
                    f"{here}: {note.left} on rank {rank}, which has not called drop_gradients() "
                    f"within {self.timeout_s:g} s. Start again from the last checkpoint",
                    details={"missing_ranks": [rank], "waited_s": 0.0},
                )
                self.cut_off(error)
                raise error

    def _note_of(self, rank: int, *, before: int) -> Note:
        """Return what a rank has left that has not made a call yet."""
        text = self._transport and self._transport.noted(rank, before)
        return decode_json_as(text, Note) if text else Note(waits_in="")

    def _note(self, *, waits_in: str, places: dict[str, list[Any]]) -> Note:
        return Note(waits_in=waits_in, places=places, step=self._num_steps, step_of=self._step_of)

    def _places(self) -> dict[str, list[Any]]:
        noted = {key: each for noted in [*self.noted] for key, each in noted.places().items()}
        return noted | {
            each.name: [each._sequence, each._phase if each._is_midway else ""]
            for each in [*self._within]
        }

    def exchange(
        self,
        outgoing: Sequence[tuple[int, memoryview]],
        incoming: Sequence[tuple[int, memoryview]],
        *,
        phase: str,
        error: BaseException | None = None,
    ) -> None:
        """Agree that no rank has an `error`, then move bytes between single ranks.

        For data of some MiB that no training communicator may carry. Nothing is sent unless every
        rank came without an error; else all raise as by `agree`. It has the time limit to itself.

        Args:
            outgoing: (position in the layout, bytes), in an order and sizes that both sides know.
            incoming: (position in the layout, memory to fill), likewise.
            phase: the place in the program, for messages.
            error: why this rank cannot continue; None if it can.

        Cost: one collective, and one message of the exact size for each entry; no copies.
        """
        if error is not None:
            self.fail(error, phase=phase)
        with self._calling(phase):
            self._open("agree", phase, b"")
            if self._transport is None:
                if outgoing or incoming:
                    raise GroupError(f"Phase {phase!r}: a rank alone cannot exchange with others.")
                return
            # The frames may have used up the deadline, while one rank came late.
            self._transport.extend(self.limit_s)
            self._transport.exchange(outgoing, incoming)

    def barrier(self, *, phase: str) -> None:
        """Return when every rank has called. Cost: one collective."""
        with self._calling(phase):
            self._open("barrier", phase, b"")

    def _all_gather(self, operation: str, payload: bytes, phase: str) -> list[bytes]:
        """Return every rank's payload, under the name of the operation that needs them."""
        frames = self._open(operation, phase, payload)
        if self._transport is None:
            return [payload]
        longest = max(frame.length for frame in frames)
        if longest <= INLINE_NBYTES:
            return [frame.inline for frame in frames]
        rows = self._transport.all_gather(payload, longest)
        return [row[: frame.length] for row, frame in zip(rows, frames, strict=True)]

    @contextmanager
    def _calling(self, phase: str) -> Iterator[None]:
        """Run one call; a rank that leaves it midway, for whatever reason, breaks the communicator.

        The others would wait for bytes that do not come. No rank waits before this rank's frame is
        out, nor once all ranks have raised: then the communicator stays usable.
        """
        self.refuse_forked(phase)
        self._is_midway = False
        if self.scope is not None:
            self.scope.refuse_calls_after_failure()
        try:
            yield
        except BaseException as error:
            if self.scope is not None:
                self.scope.remember(error)
            if self._is_midway and self._transport is not None:
                self._transport.abandon(
                    f"Phase {phase!r}: this rank left in the middle ({error!r})."
                )
            raise
        finally:
            self._is_midway = False

    def _open(
        self,
        operation: str,
        phase: str,
        payload: bytes,
        *,
        misuse: str | None = None,
        error: BaseException | None = None,
    ) -> list[Frame]:
        """Exchange frames; check that all ranks make the same call, with correct arguments."""
        self.is_out_of_sync = False
        own = Frame.make(self._sequence + 1, operation, phase, payload, misuse)
        if self._transport is None:
            frames = [own]
            self._sequence += 1
        else:
            data = own.encode()
            self._transport.start(own.sequence, phase, self.limit_s, is_frequent=self._is_in_step)
            # Before a byte is sent: an interrupt from here on breaks the communicator.
            self._is_midway = True
            self._phase = phase
            self._has_left_note, self._saw_left_at = False, None
            self._sequence += 1
            frames = [Frame.decode(row) for row in self._transport.all_gather(data, FRAME_NBYTES)]
        # Failures first: a failed rank is out of sync by design, as its frame stands for any call.
        if any(frame.operation == FAILED for frame in frames):
            self._raise_failures(frames, payload, error)
        try:
            self._check_in_sync(frames)
            misuses = [
                f"rank {self.ranks[i]}: {f.misuse}" for i, f in enumerate(frames) if f.misuse
            ]
            if misuses:
                raise GroupError(f"Wrong call in {own}: {'; '.join(misuses)}.")
        except GroupError:
            self._mark_failed_on_all(0)
            raise
        return frames

    def _raise_failures(
        self, frames: Sequence[Frame], payload: bytes, error: BaseException | None
    ) -> NoReturn:
        """Receive the failure notices of all `FAILED` frames in full, and raise them."""
        failed = [index for index, frame in enumerate(frames) if frame.operation == FAILED]
        self.is_out_of_sync = len({frame.phase_digest for frame in frames}) > 1
        payloads = [frame.inline for frame in frames]
        longest = max(frames[index].length for index in failed)
        if longest > INLINE_NBYTES and self._transport is not None:
            rows = self._transport.all_gather(payload if error is not None else b"", longest)
            payloads = [row[: frame.length] for row, frame in zip(rows, frames, strict=True)]
        notices = {
            self.ranks[index]: decode_msgpack_as(payloads[index], FailureNotice) for index in failed
        }
        # The rank whose error has left most guards ends, on the others, the same guards.
        self._mark_failed_on_all(min(notice.depth for notice in notices.values()))
        new = {rank: notice.error for rank, notice in notices.items() if not notice.is_shared}
        # All ranks pass on an error that all of them know: an outer guard leaves it as it is.
        if error is not None and not new and len(failed) == self.size:
            raise error
        waiting = [frame.phase for frame in frames if frame.operation != FAILED]
        errors = new or {rank: notice.error for rank, notice in notices.items()}
        raise joined_error(
            errors,
            num_ranks=self.size,
            phase=waiting[0] if waiting else frames[0].phase,
            missing_ranks=late_ranks(errors, ranks=self.ranks, limit_s=self.data_timeout_s),
        ) from error

    def _mark_failed_on_all(self, depth: int) -> None:
        """Note that every rank raises now and none waits: guards from `depth` inwards end."""
        self._is_midway = False
        if self.scope is not None:
            self.scope.fail_on_all(depth)

    def _check_in_sync(self, frames: Sequence[Frame]) -> None:
        """Raise GroupError with the place of each rank unless all make the same call."""
        indices_by_call: dict[tuple[int, str, bytes], list[int]] = {}
        for index, frame in enumerate(frames):
            indices_by_call.setdefault(frame.call, []).append(index)
        if len(indices_by_call) == 1:
            return
        self.is_out_of_sync = True
        lines = []
        for indices in indices_by_call.values():
            ranks = [self.ranks[index] for index in indices]
            lines.append(f"{named_ranks(ranks)} in {frames[indices[0]]}")
        raise GroupError(
            f"The ranks of layout {self.name!r} are out of sync: {'; '.join(lines)}. Every "
            "rank must make the same calls in the same order."
        )


def _encoded(note: Note) -> str:
    return msgspec.json.encode(note).decode()


def _shorten(text: str, nbytes: int) -> str:
    """Return at most the first `nbytes` bytes, cut between characters."""
    return text.encode()[:nbytes].decode(errors="ignore")
