"""Bytes over one gloo communicator, with deadlines that name the ranks which did not arrive."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

import msgspec
import torch
from torch._C import _distributed_c10d as c10d

from holdfast.errors import DeadlineError, GroupError
from holdfast.parallel.groups import _torch

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import ProcessGroup, Store, Work

_SLACK_S = 0.1
"""Waits may end this much before their deadline."""
_PROGRESS_WAIT_S = 2.0
"""How long to wait for the others' progress entries before a rank is called missing or silent."""

_decode_report = msgspec.json.Decoder(tuple[dict[int, str], list[int]]).decode


class Transport:
    """Moves exact bytes between group indices for `Control`; no protocol of its own.

    Before a collective each rank writes a progress entry, ``sequence:phase``, under one store key
    of its own (overwritten, so the store does not grow). When a wait fails, the entries say who is
    missing and where each was last seen; that is a DeadlineError, and the transport is broken from
    then on: its communicator is closed at once, so that ranks which wait for this one fail too. One
    rank reads the entries, for all that fail in the same collective.

    Two ranks connect when they first send to each other, and find each other's address in the
    store. All-gather goes round a ring, so it needs two connections of each rank; broadcast goes
    down a tree, with at most log2(ranks) of them; a message connects its two ranks. Where ranks are
    connected, a store that is gone costs the names, not the collective.

    Args:
        group: communicator of exactly `ranks`, in that order; owned by the transport.
        ranks: global ranks.
        rank: this process's global rank.
        store: holds the progress entries.
        timeout_s: for messages.
        name: the layout's name, for messages.
    """

    def __init__(
        self,
        group: ProcessGroup,
        *,
        ranks: Sequence[int],
        rank: int,
        store: Store,
        timeout_s: float,
        name: str,
    ) -> None:
        self.num_collectives = 0
        self.nbytes_sent = 0
        self._group: ProcessGroup | None = group
        self._ranks = tuple(ranks)
        self._rank = rank
        self._store = store
        self._timeout_s = timeout_s
        self._name = name
        self._sequence = 0
        self._phase = "created"
        self._deadline = 0.0
        self._broken = ""
        self._post("created")

    @property
    def is_broken(self) -> bool:
        """Whether it failed, or was abandoned or closed."""
        return bool(self._broken) or self._group is None

    def begin(self, sequence: int, phase: str, deadline: float) -> None:
        """Post the progress of the next call; GroupError if an earlier call broke the transport."""
        if self._broken:
            raise GroupError(
                f"Phase {phase!r}: the control communicator of layout {self._name!r} failed "
                f"earlier and cannot be used any more. The reason: {self._broken}"
            )
        self._sequence, self._phase, self._deadline = sequence, phase, deadline
        self._post(phase)

    def close(self) -> None:
        """Destroy the communicator; nothing happens the second time."""
        group, self._group = self._group, None
        if group is not None:
            _torch.destroy(group)

    def abandon(self, why: str) -> None:
        """Break it on purpose; the others' waits end with a DeadlineError that names this rank."""
        if not self._broken:
            self._broken = why
            self.close()

    def all_gather(self, data: bytes, row_nbytes: int) -> list[bytes]:
        """Every rank's `data`, padded to `row_nbytes`, by group index."""
        mine = _tensor(data.ljust(row_nbytes, b"\0"))
        rows = torch.empty((len(self._ranks), row_nbytes), dtype=torch.uint8)
        with self._naming_missing_ranks():
            self._count(row_nbytes)
            options = c10d.AllgatherOptions()
            options.timeout = self._left()
            self._wait([self._live().allgather([list(rows.unbind(0))], [mine], options)])
        return [_bytes(row) for row in rows]

    def broadcast(self, data: bytes | None, nbytes: int) -> bytes:
        """The `data` of index 0, `nbytes` long, at every rank."""
        buffer = torch.empty(nbytes, dtype=torch.uint8) if data is None else _tensor(data)
        with self._naming_missing_ranks():
            self._count(0 if data is None else nbytes)
            options = c10d.BroadcastOptions()
            options.rootRank = 0
            options.timeout = self._left()
            self._wait([self._live().broadcast([buffer], options)])
        return data if data is not None else _bytes(buffer)

    def send(self, messages: Sequence[tuple[int, bytes]]) -> None:
        """Send each (index, data), all in flight at once; empty data is not sent."""
        tensors = [(index, _tensor(data)) for index, data in messages if data]
        with self._naming_missing_ranks():
            for _, tensor in tensors:
                self._count(tensor.numel())
            self._wait([self._live().send([tensor], index, 0) for index, tensor in tensors])

    def receive(self, sizes: Sequence[tuple[int, int]]) -> list[bytes]:
        """One message from each (index, nbytes), all in flight at once; 0 bytes are not waited for.

        Messages of one sender arrive in the order in which they were sent.
        """
        buffers = [torch.empty(nbytes, dtype=torch.uint8) for _, nbytes in sizes]
        expected = [(index, b) for (index, _), b in zip(sizes, buffers, strict=True) if b.numel()]
        with self._naming_missing_ranks():
            for _ in expected:
                self._count(0)
            self._wait([self._live().recv([buffer], index, 0) for index, buffer in expected])
        return [_bytes(buffer) for buffer in buffers]

    def extend(self, deadline: float) -> None:
        """Move the deadline of the call in progress."""
        self._deadline = deadline

    def exchange(
        self,
        outgoing: Sequence[tuple[int, torch.Tensor]],
        incoming: Sequence[tuple[int, torch.Tensor]],
    ) -> None:
        """Send and receive each (index, bytes), all in flight at once, without a copy.

        Messages of one sender arrive in the order in which they were sent; empty ones are left out
        on both sides.
        """
        with self._naming_missing_ranks():
            works: list[Work] = []
            for index, tensor in incoming:
                if tensor.numel():
                    self._count(0)
                    works.append(self._live().recv([tensor], index, 0))
            for index, tensor in outgoing:
                if tensor.numel():
                    self._count(tensor.numel())
                    works.append(self._live().send([tensor], index, 0))
            self._wait(works)

    def _wait(self, works: list[Work]) -> None:
        """Wait for all, the deadline of the call in progress permitting."""
        try:
            while works:
                works.pop(0).wait(self._left())
        finally:
            works.clear()  # work that a traceback keeps alive would keep the connections open

    def _live(self) -> ProcessGroup:
        """The communicator; callers keep no reference, so that `close` really closes it."""
        if self._group is None:
            raise GroupError(f"The control communicator of layout {self._name!r} is closed.")
        return self._group

    def _left(self) -> timedelta:
        """What is left of the call's time."""
        return timedelta(seconds=max(self._deadline - time.monotonic(), 0.001))

    def _count(self, nbytes: int) -> None:
        """Count one collective or message."""
        self.num_collectives += 1
        self.nbytes_sent += nbytes

    def _post(self, phase: str) -> None:
        """Write this rank's progress entry."""
        with contextlib.suppress(RuntimeError):
            self._store.set(f"progress/{self._rank}", f"{self._sequence}:{phase}")

    @contextlib.contextmanager
    def _naming_missing_ranks(self) -> Iterator[None]:
        """Around waits: DeadlineError for one that fails, and the transport is broken."""
        try:
            yield
        except RuntimeError as error:
            self._post(f"{self._phase} (gave up)")
            broke = time.monotonic() < self._deadline - _SLACK_S
            self.close()
            self._broken = self._describe(str(error), broke=broke)
            raise DeadlineError(self._broken) from error

    def _describe(self, cause: str, *, broke: bool) -> str:
        """Why a wait failed, and whom to look at."""
        where = f"Phase {self._phase!r} (collective {self._sequence} of layout {self._name!r})"
        what = "a connection broke" if broke else f"not complete after {self._timeout_s:g} s"
        try:
            missing, silent = self._read_progress(broke=broke)
        except RuntimeError as error:
            return f"{where}: {what}, and the store cannot say who is missing ({error}). {cause}"
        if missing:
            seen = "; ".join(f"rank {rank}: {where}" for rank, where in missing.items())
            who = f"ranks {list(missing)} did not arrive, last seen in {seen}"
        elif silent:
            who = f"all had arrived, but ranks {silent} have not reported since"
        else:
            who = "all had arrived"
        return (
            f"{where}: {what}; {who}. Look at what happened on those ranks first. The control "
            f"communicator cannot be used any more; start again from the last checkpoint. ({cause})"
        )

    def _read_progress(self, *, broke: bool) -> tuple[dict[int, str], list[int]]:
        """Ranks that have not reached this collective, with where they are; and the silent ones.

        The first rank that fails looks, the others read what it reports.
        """
        report = f"report/{self._sequence}"
        if self._store.add(f"{report}/readers", 1) > 1:
            with contextlib.suppress(RuntimeError):  # the rank that was to report failed, too
                self._store.wait([report], timedelta(seconds=2 * _PROGRESS_WAIT_S))
                return _decode_report(self._store.get(report))
        progress = self._look(broke=broke)
        self._store.set(report, msgspec.json.encode(progress).decode())
        return progress

    def _look(self, *, broke: bool) -> tuple[dict[int, str], list[int]]:
        """Read every rank's progress, for a while if that may still change."""
        until = time.monotonic() + _PROGRESS_WAIT_S
        while True:
            missing, silent = {}, []
            entries = self._store.multi_get([f"progress/{rank}" for rank in self._ranks])
            for rank, entry in zip(self._ranks, entries, strict=True):
                number, _, phase = bytes(entry).decode().partition(":")
                if int(number) < self._sequence:
                    missing[rank] = f"phase {phase!r} (collective {number})"
                elif int(number) == self._sequence and not phase.endswith(" (gave up)"):
                    silent.append(rank)
            late = bool(missing) and not broke  # the deadline has passed: late is late
            if late or not (missing or silent) or time.monotonic() >= until:
                return missing, silent
            time.sleep(0.05)


def _tensor(data: bytes) -> torch.Tensor:
    """Bytes as a tensor."""
    if not data:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)  # torch wants a writable buffer


def _bytes(tensor: torch.Tensor) -> bytes:
    """Inverse of `_tensor`."""
    return tensor.numpy().tobytes()
