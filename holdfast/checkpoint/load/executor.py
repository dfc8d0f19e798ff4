"""Carrying out a reading plan on one rank: read, verify, put in place, hand on, be handed."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch

from holdfast.arrays.types import IntArray as Ints
from holdfast.checkpoint.load.targets import Target
from holdfast.checkpoint.load.transfers import Deliveries, Moves
from holdfast.format.blocks import element_of
from holdfast.format.reader import Snapshot
from holdfast.parallel import Control

_DIRECT_NBYTES = 64 << 10
"""Smaller pieces are read together, through a buffer."""
_BATCH_NBYTES = 4 << 20
_MAX_THREADS = 8

Targets = Mapping[int, Sequence[Target]]


@dataclass(slots=True)
class Mail:
    """What goes out in one round.

    `buffers`: the packed messages by position of the other rank, ascending, each with the numbers
    of its deliveries; ranks that get equal small deliveries share one. `places`: for each piece
    read here, what of it goes where in which buffer: (number of the delivery, buffer; None for a
    large one). `large`: number of a large delivery -> its bytes, where they were read to.
    """

    buffers: list[tuple[int, range, memoryview]] = field(default_factory=list)
    places: dict[int, list[tuple[int, memoryview | None]]] = field(default_factory=dict)
    large: dict[int, memoryview] = field(default_factory=dict)
    deliveries: Deliveries | None = None

    def messages(self) -> list[tuple[int, torch.Tensor]]:
        """All messages, each to its rank's position: the packed one first, then the large ones."""
        found = []
        for peer, entries, buffer in self.buffers:
            found.append((peer, _tensor(buffer)))
            found += [(peer, _tensor(self.large[n])) for n in entries if n in self.large]
        return found


@dataclass(slots=True)
class Round:
    """A round under way: what goes out, memory for what comes in, and the reading.

    `packed`: by position of the other rank. `large`: number of a large delivery -> memory, a part
    of its target where that takes it as it is.
    """

    mail: Mail = field(default_factory=Mail)
    packed: dict[int, memoryview] = field(default_factory=dict)
    large: dict[int, memoryview] = field(default_factory=dict)
    coming: list[tuple[int, torch.Tensor]] = field(default_factory=list)
    reading: list[Future[None]] = field(default_factory=list)

    def first_error(self) -> Exception | None:
        """Wait until all is read; the first that failed."""
        errors = [future.exception() for future in self.reading]
        return next((error for error in errors if isinstance(error, Exception)), None)


@dataclass(frozen=True, slots=True)
class Batch:
    """Pieces that lie one behind the other in one file and are read at once.

    `numbers`: positions in the reading order; `direct`: a target that takes the one piece as it is,
    and the byte of it to begin at.
    """

    numbers: range
    nbytes: int
    direct: tuple[Target, int] | None


class Reader:
    """Reads one rank's pieces of a plan, round by round, and exchanges them.

    `targets`: number of a box asked for -> what to fill with it. `num_threads`: that read and hash
    beside each other.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        moves: Moves,
        targets: Targets,
        *,
        verify: bool,
        num_threads: int,
        prefer: frozenset[int],
    ) -> None:
        self._snapshot = snapshot
        self._moves = moves
        self._plan = moves.plan
        self._targets = targets
        self._verify = verify
        self._num_threads = num_threads
        self.nbytes_received = 0
        self._failed = threading.Event()
        self._order(prefer)

    def run(self, control: Control, told: Callable[[], bytes]) -> list[bytes]:
        """Read everything and exchange it; all ranks together. What each rank `told` at the end.

        Any rank's error is raised on all of them before anything is waited for.
        Cost: a collective for each round and one at the end; one message to and from each other
        rank that has something, each round.
        """
        rounds = self._plan.num_rounds
        with ExitStack() as stack:
            pool: ThreadPoolExecutor | None = None
            if self._num_threads > 1 or rounds:
                pool = ThreadPoolExecutor(self._num_threads, "holdfast-load")
                stack.callback(pool.shutdown, wait=True, cancel_futures=True)
            alone, error = self._begin(-1, pool)
            ahead, late = self._begin(0, pool) if rounds else (alone, None)
            error = error or alone.first_error() or late
            for number in range(rounds):
                now = ahead
                error = error or now.first_error()
                if error is None and number + 1 < rounds:
                    ahead, error = self._begin(number + 1, pool)
                control.exchange(
                    now.mail.messages() if error is None else [],
                    now.coming if error is None else [],
                    phase="load: exchange",
                    error=error,
                )
                try:
                    self._unpack(number, now)
                except Exception as caught:
                    error = caught
        return control.agree(error, phase="load: read", payload=told())

    def touched(self) -> list[str]:
        """Paths of the targets that something was written to."""
        return [t.path for each in self._targets.values() for t in each if t.is_touched]

    def _order(self, prefer: frozenset[int]) -> None:
        """Choose a copy for each piece, and the order to read in: by round, then file."""
        plan, index, pieces = self._plan, self._snapshot.index, self._moves.pieces
        row = plan.row[pieces].copy()
        if self._snapshot.copies:
            for i, primary in enumerate(row.tolist()):
                copies = self._snapshot.copies.get(primary, (primary,))
                row[i] = min(
                    copies, key=lambda r: (int(index.file[r]) not in prefer, copies.index(r))
                )
        file, begin = index.file[row], index.start[row] + plan.start[pieces]
        order = np.lexsort((begin, file, plan.round[pieces]))
        self._pieces = pieces[order]
        self._rows: list[int] = row[order].tolist()
        self._file, self._place = file[order], begin[order]
        self._starts: list[int] = plan.start[self._pieces].tolist()
        self._stops: list[int] = plan.stop[self._pieces].tolist()
        place = np.empty(len(plan.row), dtype=np.int64)
        place[self._pieces] = np.arange(len(self._pieces))
        local = self._moves.local
        local = local.take(np.argsort(place[local.piece], kind="stable"))
        self._local = local
        self._local_ptr: list[int] = np.searchsorted(
            place[local.piece], np.arange(len(self._pieces) + 1)
        ).tolist()
        self._runs: list[tuple[int, int, int, int]] = list(
            zip(
                local.request.tolist(),
                np.where(local.is_run, local.source, -1).tolist(),
                local.target.tolist(),
                local.nbytes.tolist(),
                strict=True,
            )
        )

    def _begin(
        self, number: int, pool: ThreadPoolExecutor | None
    ) -> tuple[Round, Exception | None]:
        """Make a round's buffers and begin to read its pieces; here and now without a pool."""
        begun = Round()
        try:
            self._address(number, begun.mail)
            self._expect(number, begun)
            for batch in self._batches(number):
                if pool is None:
                    self._read(batch, begun.mail)
                else:
                    begun.reading.append(pool.submit(self._read, batch, begun.mail))
        except Exception as caught:
            return begun, caught
        return begun, None

    def _batches(self, number: int) -> list[Batch]:
        """The pieces of a round: large ones on their own, small neighbours together."""
        rounds = self._plan.round[self._pieces]
        first, last = np.searchsorted(rounds, [number, number + 1]).tolist()
        if first == last:
            return []
        here = slice(first, last)
        size = self._plan.stop[self._pieces[here]] - self._plan.start[self._pieces[here]]
        begin, file = self._place[here], self._file[here]
        large = size >= _DIRECT_NBYTES
        apart = (file[1:] != file[:-1]) | (begin[1:] != begin[:-1] + size[:-1])
        new = np.concatenate([[True], apart | large[1:] | large[:-1]])
        before = np.cumsum(size) - size
        begun = before[np.flatnonzero(new)][np.cumsum(new) - 1]
        part = (before - begun) // _BATCH_NBYTES
        new[1:] |= part[1:] != part[:-1]
        bounds = [*np.flatnonzero(new).tolist(), last - first]
        total = np.append(before, size.sum())
        return [
            Batch(
                range(first + a, first + b),
                int(total[b] - total[a]),
                self._direct(first + a) if b == a + 1 and large[a] else None,
            )
            for a, b in pairwise(bounds)
        ]

    def _direct(self, number: int) -> tuple[Target, int] | None:
        """The target that the whole piece belongs to as it is, if there is one such."""
        begin, end = self._local_ptr[number], self._local_ptr[number + 1]
        if end != begin + 1:
            return None
        request, source, at, nbytes = self._runs[begin]
        targets = self._targets[request]
        whole = source == 0 and nbytes == self._stops[number] - self._starts[number]
        return (targets[0], at) if whole and len(targets) == 1 else None

    def _read(self, batch: Batch, mail: Mail) -> None:
        """Read, verify and deliver one batch; nothing, once another one failed."""
        if self._failed.is_set():
            return
        try:
            self._read_batch(batch, mail)
        except BaseException:
            self._failed.set()
            raise

    def _read_batch(self, batch: Batch, mail: Mail) -> None:
        numbers = batch.numbers
        bounds = [(self._starts[n], self._stops[n]) for n in numbers]
        if batch.direct is not None:
            target, at = batch.direct
            data = target.region(at, at + batch.nbytes)
        else:
            data = _memory(batch.nbytes)
        rows = self._rows[numbers.start : numbers.stop]
        self._snapshot.read_pieces(rows, bounds, data, verify=self._verify)
        if batch.direct is not None:
            batch.direct[0].done(batch.nbytes)
        else:
            self._keep(numbers, bounds, data)
        if mail.places:
            at = 0
            for number, (start, stop) in zip(numbers, bounds, strict=True):
                self._post(int(self._pieces[number]), data[at : at + stop - start], mail)
                at += stop - start

    def _keep(self, numbers: range, bounds: Sequence[tuple[int, int]], data: memoryview) -> None:
        """Put what was read where this rank wants it."""
        at = 0
        for number, (start, stop) in zip(numbers, bounds, strict=True):
            for entry in range(self._local_ptr[number], self._local_ptr[number + 1]):
                request, source, target, nbytes = self._runs[entry]
                if source >= 0:
                    run = data[at + source : at + source + nbytes]
                    for each in self._targets[request]:
                        each.put(target, run)
                else:
                    piece = data[at : at + stop - start]
                    self._keep_parts(int(self._pieces[number]), entry, piece)
            at += stop - start

    def _keep_parts(self, piece: int, entry: int, data: memoryview) -> None:
        pair = int(self._local.pair[entry])
        size = int(self._plan.pairs.itemsize[pair])
        for part in self._moves.parts(piece, pair):
            values = _values(data, part.at, part.shape, size)[part.source]
            for each in self._targets[int(self._local.request[entry])]:
                each.put_part(part, values, size)

    def _address(self, number: int, mail: Mail) -> None:
        """Make empty buffers for a round's messages, and note what goes where in them."""
        deliveries = self._moves.of_round(self._moves.outgoing, number)
        mail.deliveries = deliveries
        shared: dict[bytes, memoryview] = {}
        for peer, begin, end in _by_peer(deliveries):
            small = begin + np.flatnonzero(~deliveries.is_large[begin:end])
            content = np.stack([deliveries.piece[small], deliveries.pair[small]]).tobytes()
            is_new = content not in shared
            if is_new:
                shared[content] = _memory(int(deliveries.nbytes[small].sum()))
            large = begin + np.flatnonzero(deliveries.is_large[begin:end])
            for entries, buffer in ((small if is_new else [], shared[content]), (large, None)):
                for entry in entries:
                    piece = int(deliveries.piece[entry])
                    mail.places.setdefault(piece, []).append((int(entry), buffer))
            mail.buffers.append((peer, range(begin, end), shared[content]))

    def _post(self, piece: int, data: memoryview, mail: Mail) -> None:
        """Pack what others want of a piece, and keep hold of what is sent as it is."""
        sent = mail.deliveries
        for entry, buffer in mail.places.get(piece, ()):
            if sent is None:
                return
            at, nbytes = int(sent.at[entry]), int(sent.nbytes[entry])
            source = int(sent.source[entry])
            if buffer is None:
                mail.large[entry] = data[source : source + nbytes]
                continue
            if sent.is_run[entry]:
                buffer[at : at + nbytes] = data[source : source + nbytes]
                continue
            pair = int(sent.pair[entry])
            size = int(self._plan.pairs.itemsize[pair])
            for part in self._moves.parts(piece, pair):
                values = _values(data, part.at, part.shape, size)[part.source]
                _values(buffer, at, part.wanted, size)[...] = values
                at += values.nbytes

    def _expect(self, number: int, begun: Round) -> None:
        """Have memory for what the others send in a round."""
        deliveries = self._moves.of_round(self._moves.incoming, number)
        for peer, begin, end in _by_peer(deliveries):
            size = np.where(deliveries.is_large[begin:end], 0, deliveries.nbytes[begin:end])
            begun.packed[peer] = _memory(int(size.sum()))
            begun.coming.append((peer, _tensor(begun.packed[peer])))
            for entry in (begin + np.flatnonzero(deliveries.is_large[begin:end])).tolist():
                at, nbytes = int(deliveries.target[entry]), int(deliveries.nbytes[entry])
                targets = self._targets[int(deliveries.request[entry])]
                alone = len(targets) == 1 and targets[0].is_direct
                data = targets[0].region(at, at + nbytes) if alone else _memory(nbytes)
                begun.coming.append((peer, _tensor(data)))
                begun.large[entry] = data

    def _unpack(self, number: int, done: Round) -> None:
        """Put what the others sent where this rank wants it."""
        coming = self._moves.of_round(self._moves.incoming, number)
        self.nbytes_received += int(coming.nbytes.sum())
        columns = (coming.peer, coming.at, coming.nbytes, coming.request, coming.target)
        rows = zip(*(column.tolist() for column in columns), strict=True)
        for entry, (peer, at, nbytes, request, target) in enumerate(rows):
            targets = self._targets[request]
            if coming.is_run[entry]:
                data = done.large.get(entry)
                if data is not None and len(targets) == 1 and targets[0].is_direct:
                    continue
                if data is None:
                    data = done.packed[peer][at : at + nbytes]
                for each in targets:
                    each.put(target, data)
                continue
            pair = int(coming.pair[entry])
            size = int(self._plan.pairs.itemsize[pair])
            for part in self._moves.parts(int(coming.piece[entry]), pair):
                values = _values(done.packed[peer], at, part.wanted, size)
                for each in targets:
                    each.put_part(part, values, size)
                at += values.nbytes


def num_reading_threads(num_local_ranks: int) -> int:
    """Threads for each of so many ranks on this machine: its cores shared out, at least one."""
    cores = len(os.sched_getaffinity(0))
    return max(1, min(_MAX_THREADS, cores // max(num_local_ranks, 1)))


def _by_peer(deliveries: Deliveries) -> list[tuple[int, int, int]]:
    """(peer, begin, end) of the deliveries of each peer in one round."""
    peer: Ints = deliveries.peer
    if not len(peer):
        return []
    begins = np.flatnonzero(np.concatenate([[True], peer[1:] != peer[:-1]]))
    bounds = [*begins.tolist(), len(peer)]
    return [(int(peer[a]), a, b) for a, b in pairwise(bounds)]


def _values(data: memoryview, at: int, shape: tuple[int, ...], itemsize: int) -> np.ndarray:
    """Elements at byte `at` as an array of this shape; shares the memory."""
    element, tail = element_of(itemsize)
    nbytes = int(np.prod(shape, dtype=np.int64)) * itemsize
    return np.frombuffer(data[at : at + nbytes], dtype=element).reshape(shape + tail)


def _memory(nbytes: int) -> memoryview:
    """Host memory with nothing in it yet."""
    return np.empty(nbytes, dtype=np.uint8).data


def _tensor(data: memoryview) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(data, dtype=np.uint8))
