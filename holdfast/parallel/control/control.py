"""Agreement between the ranks of a layout: small messages, every one with a deadline.

All traffic is on a gloo communicator that nothing else uses. Each call opens with one collective
over fixed-size records, which carry the caller's phase and, if it is short, its payload. So ranks
that have come apart are told where each of them is, on all of them, and agreement over small
payloads costs exactly one collective.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

from holdfast.errors import GroupError, HoldfastError
from holdfast.parallel.control.frame import FAILED, INLINE_NBYTES, RECORD_NBYTES, Frame
from holdfast.parallel.control.guard import Guard
from holdfast.parallel.control.outcome import Outcome, raise_failures
from holdfast.parallel.ranks import shorten_ranks

if TYPE_CHECKING:
    import torch

    from holdfast.parallel.control.transport import Transport

_WINDOW = 16
"""Messages in flight at the coordinator, which bounds its extra memory."""


class Control:
    """Collectives over the ranks of one layout, for agreement and small tables.

    Not for tensors, and not thread-safe: one thread of each rank calls, all ranks in the same
    order. Every method takes at most about `timeout_s` and raises, on all ranks alike,

    - GroupError if the ranks are in different phases or operations, naming each one's;
    - DeadlineError if a rank does not arrive or its connection breaks, naming it, the phase, and
      where it was last seen. The communicator is of no further use then: later calls raise at once.

    With one rank nothing is sent and torch.distributed is not needed. `num_collectives` and
    `nbytes_sent` count what this rank has launched (collectives and messages) and contributed.
    `running`: the guard that calls are made under; `shared`: the last error that left a guard on
    all ranks. Both are kept by `Guard`.
    """

    def __init__(
        self,
        link: Transport | None,
        *,
        ranks: Sequence[int],
        rank: int,
        timeout_s: float,
        name: str = "model",
    ) -> None:
        """Agree over `link`, which joins exactly `ranks` in that order; None for one rank."""
        if link is None and len(ranks) != 1:
            raise GroupError(f"{len(ranks)} ranks need a communicator to agree over.")
        self.ranks = tuple(ranks)
        self.rank = rank
        self.index = self.ranks.index(rank)
        self.timeout_s = timeout_s
        self.name = name
        self._link = link
        self._sequence = 0
        self._is_midway = False
        self.running: Guard[Any] | None = None
        self.shared: BaseException | None = None

    @classmethod
    def single(cls, *, rank: int = 0, name: str = "model") -> Control:
        """The control of one process, which agrees with itself."""
        return cls(None, ranks=(rank,), rank=rank, timeout_s=60.0, name=name)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @property
    def coordinator(self) -> int:
        """The rank that gathers and scatters: the first of the layout, whatever its number."""
        return self.ranks[0]

    @property
    def is_coordinator(self) -> bool:
        """Whether this rank is the coordinator."""
        return self.index == 0

    @property
    def is_broken(self) -> bool:
        """Whether the communicator failed earlier, so that nothing can be sent any more."""
        return self._link is not None and self._link.is_broken

    @property
    def num_collectives(self) -> int:
        """Collectives and single messages that this rank has taken part in."""
        return 0 if self._link is None else self._link.num_collectives

    @property
    def nbytes_sent(self) -> int:
        """Bytes that this rank has contributed to them."""
        return 0 if self._link is None else self._link.nbytes_sent

    def close(self) -> None:
        """Destroy the communicator; later calls raise GroupError. Its ProcessGroups call this."""
        if self._link is not None:
            self._link.close()

    def all_gather(self, payload: bytes, *, phase: str) -> list[bytes]:
        """Every rank's payload, in the layout's order of ranks.

        Cost: one collective; a second one, padded to the longest payload (so memory is ranks *
        longest), if any payload is longer than `INLINE_NBYTES`.
        """
        with self._calling(phase):
            return self._all_gather("all_gather", payload, phase)

    def gather(self, payload: bytes, *, phase: str) -> list[bytes] | None:
        """Every rank's payload at the coordinator, in the layout's order of ranks; None elsewhere.

        Cost: one collective, and one message of the exact size for each payload longer than
        `INLINE_NBYTES`.
        """
        with self._calling(phase):
            records = self._open("gather", phase, payload)
            payloads = [record.inline for record in records]
            payloads[0] = payload
            if self._link is None:
                return payloads
            if not self.is_coordinator:
                if len(payload) > INLINE_NBYTES:
                    self._link.send([(0, payload)])
                return None
            sizes = [(i, r.length) for i, r in enumerate(records) if i and r.length > INLINE_NBYTES]
            for start in range(0, len(sizes), _WINDOW):
                window = sizes[start : start + _WINDOW]
                for (i, _), data in zip(window, self._link.receive(window), strict=True):
                    payloads[i] = data
            return payloads

    def scatter(self, payloads: Sequence[bytes] | None, *, phase: str) -> bytes:
        """The coordinator's `payloads[index]` at each rank; the others pass None.

        Cost: one collective, and two messages of the exact size to each other rank.
        """
        fault = None
        if not self.is_coordinator:
            fault = None if payloads is None else "scatter takes payloads at the coordinator only"
        elif payloads is None or len(payloads) != self.size:
            count = "none" if payloads is None else str(len(payloads))
            fault = f"scatter needs {self.size} payloads at the coordinator, got {count}"
        with self._calling(phase):
            self._open("scatter", phase, b"", fault=fault)
            if payloads is not None:
                for start in range(1, self.size, _WINDOW):
                    self._send_sized(payloads, range(start, min(start + _WINDOW, self.size)))
                return payloads[0]
            if self._link is None:
                raise GroupError(f"Phase {phase!r}: nobody to scatter from.")
            (length,) = self._link.receive([(0, 8)])
            return self._link.receive([(0, int.from_bytes(length, "little"))])[0]

    def broadcast(self, payload: bytes | None, *, phase: str) -> bytes:
        """The coordinator's payload at every rank; the others pass None.

        Cost: one collective; a second one of the payload's size if it is longer than
        `INLINE_NBYTES`.
        """
        fault = None
        if self.is_coordinator != (payload is not None):
            fault = "broadcast takes a payload at the coordinator, and None elsewhere"
        with self._calling(phase):
            source = self._open("broadcast", phase, payload or b"", fault=fault)[0]
            if payload is None and source.length <= INLINE_NBYTES:
                return source.inline
            if self._link is not None and source.length > INLINE_NBYTES:
                return self._link.broadcast(payload, source.length)
            return payload or b""

    def agree(
        self, error: BaseException | None, *, phase: str, payload: bytes = b""
    ) -> list[bytes]:
        """Every rank's payload if no rank had an `error`; otherwise all ranks raise.

        What is raised is of the class of the first failing rank (HoldfastError for an error from
        outside the hierarchy), and its text lists every failing rank and its message. The rank's
        own error is the ``__cause__``. A single process raises its own HoldfastError unchanged.
        Cost: as `all_gather`; one collective if no payload is longer than `INLINE_NBYTES`.
        """
        if error is not None:
            self.fail(error, phase=phase)
        with self._calling(phase):
            answers = self._all_gather("agree", payload, phase)
            if self.running is not None:
                self.running.answers[phase] = answers
            return answers

    def fail(self, error: BaseException, *, phase: str) -> NoReturn:
        """Come to whatever call the other ranks make next, and raise on all of them with it.

        What is raised is as `agree` says. `phase`: where this rank is; the text names the place
        where the others waited, if any did. Cost: one collective; a second one for long messages.
        """
        if self._link is None:
            if isinstance(error, HoldfastError):
                raise error
            raise_failures([Outcome.of(error)], ranks=self.ranks, phase=phase, cause=error)
        depth = self.running.depth if self.running is not None else 0
        outcome = Outcome.of(error, is_shared=error is self.shared, depth=depth)
        message = outcome.to_json().encode()
        with self._calling(phase):
            self._open(FAILED, phase, message, error=error)
        raise GroupError(f"Phase {phase!r}: a failure was not heard.") from error

    def exchange(
        self,
        outgoing: Sequence[tuple[int, torch.Tensor]],
        incoming: Sequence[tuple[int, torch.Tensor]],
        *,
        phase: str,
        error: BaseException | None = None,
    ) -> None:
        """Agree that no rank has an `error`, then move bytes between single ranks.

        `outgoing` and `incoming`: (position in the layout, contiguous host tensor of bytes), in an
        order that both sides know; sizes are known on both sides, too. Nothing is sent unless every
        rank came without an error; otherwise all raise as by `agree`. What is sent and received has
        `timeout_s` of its own. For data of some MiB that no training communicator may carry.
        Cost: one collective, and one message of the exact size for each entry; no copies.
        """
        if error is not None:
            self.fail(error, phase=phase)
        with self._calling(phase):
            self._open("agree", phase, b"")
            if self._link is None:
                if outgoing or incoming:
                    raise GroupError(f"Phase {phase!r}: one rank has nobody to exchange with.")
                return
            self._link.renew(time.monotonic() + self.timeout_s)
            self._link.swap(outgoing, incoming)

    def barrier(self, *, phase: str) -> None:
        """Return when every rank has come. Cost: one collective."""
        with self._calling(phase):
            self._open("barrier", phase, b"")

    def _all_gather(self, operation: str, payload: bytes, phase: str) -> list[bytes]:
        records = self._open(operation, phase, payload)
        if self._link is None:
            return [payload]
        longest = max(record.length for record in records)
        if longest <= INLINE_NBYTES:
            return [record.inline for record in records]
        rows = self._link.all_gather(payload, longest)
        return [row[: record.length] for row, record in zip(rows, records, strict=True)]

    @contextmanager
    def _calling(self, phase: str) -> Iterator[None]:
        """One call. A rank that leaves it midway, whatever the reason, breaks the communicator.

        The others wait for bytes then that will not come. Before its record is out, or when all
        have raised, nobody waits.
        """
        self._is_midway = False
        if self.running is not None:
            self.running.refuse_more()
        try:
            yield
        except BaseException as error:
            if self.running is not None:
                self.running.remember(error)
            if self._is_midway and self._link is not None:
                self._link.abandon(f"Phase {phase!r}: this rank left in the middle ({error!r}).")
            raise
        finally:
            self._is_midway = False

    def _open(
        self,
        operation: str,
        phase: str,
        payload: bytes,
        *,
        fault: str | None = None,
        error: BaseException | None = None,
    ) -> list[Frame]:
        """Exchange records, and check that all ranks make the same call and no call is faulty."""
        mine = Frame.make(self._sequence + 1, operation, phase, payload, fault)
        if self._link is None:
            records = [mine]
            self._sequence += 1
        else:
            self._link.enter(mine.sequence, phase, time.monotonic() + self.timeout_s)
            data = mine.encode()
            self._is_midway = True
            self._sequence += 1
            rows = self._link.all_gather(data, RECORD_NBYTES)
            records = [Frame.decode(row) for row in rows]
        if any(record.operation == FAILED for record in records):
            self._raise_failed(records, payload, error)
        try:
            self._check_together(records)
            told = [f"rank {self.ranks[i]}: {r.fault}" for i, r in enumerate(records) if r.fault]
            if told:
                raise GroupError(f"Wrong call in {mine}: {'; '.join(told)}.")
        except GroupError:
            self._all_know(0)
            raise
        return records

    def _raise_failed(
        self, records: Sequence[Frame], payload: bytes, error: BaseException | None
    ) -> NoReturn:
        """Some rank came with a failure: hear all failures in full, and raise them."""
        messages = [record.inline for record in records]
        longest = max(record.length for record in records if record.operation == FAILED)
        if longest > INLINE_NBYTES and self._link is not None:
            mine = payload if error is not None else b""
            rows = self._link.all_gather(mine, longest)
            messages = [row[: r.length] for row, r in zip(rows, records, strict=True)]
        outcomes = [
            Outcome.from_json(message.decode()) if record.operation == FAILED else Outcome()
            for message, record in zip(messages, records, strict=True)
        ]
        waiting = [record.phase for record in records if record.operation != FAILED]
        places = waiting or [record.phase for record in records]
        # The rank that has left most guards ends what the others do under theirs, too.
        self._all_know(min(outcome.depth for outcome in outcomes if outcome.kind))
        if error is not None and all(outcome.is_shared for outcome in outcomes):
            raise error
        raise_failures(outcomes, ranks=self.ranks, phase=places[0], cause=error)
        raise GroupError("a failure came without its reason") from error

    def _all_know(self, depth: int) -> None:
        """What is raised now is raised by every rank, and nobody waits for anybody.

        That ends all guards from `depth` inwards, on every rank.
        """
        self._is_midway = False
        guard = self.running
        while guard is not None and guard.depth >= depth:
            guard.is_told = True
            guard = guard.outer

    def _check_together(self, records: Sequence[Frame]) -> None:
        places: dict[tuple[int, str, bytes], list[int]] = {}
        for index, record in enumerate(records):
            places.setdefault(record.place, []).append(index)
        if len(places) == 1:
            return
        said = []
        for indices in places.values():
            ranks = [self.ranks[index] for index in indices]
            plural = "s" if len(ranks) > 1 else ""
            said.append(f"rank{plural} {shorten_ranks(ranks)} in {records[indices[0]]}")
        raise GroupError(
            f"The ranks of layout {self.name!r} have come apart: {'; '.join(said)}. Every rank has "
            "to make the same calls in the same order."
        )

    def _send_sized(self, payloads: Sequence[bytes], indices: range) -> None:
        if self._link is not None:
            self._link.send([(i, len(payloads[i]).to_bytes(8, "little")) for i in indices])
            self._link.send([(i, payloads[i]) for i in indices])
