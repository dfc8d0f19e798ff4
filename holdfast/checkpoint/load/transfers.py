"""The transfers of one rank of a load: which pieces it sends and receives, and the messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from holdfast.arrays.box_table import enumerate_ranges
from holdfast.arrays.types import BoolArray, IntArray
from holdfast.checkpoint.load.read_plan import ReadPlan
from holdfast.checkpoint.load.target_memory import Target, takes_as_it_is
from holdfast.format.byte_ranges import StridedCopy, elements, sums_before

_LARGE_NBYTES = 128 << 10
"""Runs from this size on are sent from and received into their places, without packing."""

Targets = Mapping[int, Sequence[Target]]
"""Number of a requested box -> what to fill with it on this rank."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Transfers:
    """The parts of pieces that belong to requested boxes, as columns; n transfers.

    Args:
        piece: (n,) piece of the plan.
        overlap: (n,) overlap of the plan.
        request: (n,) requested box.
        is_run: (n,) whether it is one run of bytes in the piece and in the box; otherwise it is
            made of `RankTransfers.strided_copies`.
        source: (n,) byte of the piece where a run begins.
        target: (n,) byte of the box where it goes.
        nbytes: (n,) bytes, of runs and of others.
        peer: (n,) position of the other rank.
        at: (n,) byte of the packed message between the two, for all but large ones.
        is_large: (n,) whether it is a message of its own; these follow the packed one, in order.
    """

    piece: IntArray
    overlap: IntArray
    request: IntArray
    is_run: BoolArray
    source: IntArray
    target: IntArray
    nbytes: IntArray
    peer: IntArray
    at: IntArray
    is_large: BoolArray

    def __len__(self) -> int:
        """Number of transfers."""
        return len(self.piece)

    def take(self, chosen: IntArray | BoolArray | slice) -> Transfers:
        """The chosen ones, in their order."""
        return Transfers(**{name: getattr(self, name)[chosen] for name in self.__slots__})

    def by_peer(self) -> list[tuple[int, range]]:
        """(peer, numbers of its transfers) of each peer; the transfers are sorted by peer."""
        if not len(self):
            return []
        heads = np.flatnonzero(np.concatenate([[True], self.peer[1:] != self.peer[:-1]]))
        bounds = [*heads.tolist(), len(self)]
        return [(int(self.peer[a]), range(a, b)) for a, b in pairwise(bounds)]


class RankTransfers:
    """The transfers that one rank sends and receives.

    Each rank works out the messages of both sides from the plan: so sender and receiver agree on
    every byte without exchanging tables. Example, three ranks, a box requested by ranks 0 and 1
    whose two pieces are read by ranks 0 and 1, and a box of rank 2 alone:

        rank    reads      sends            receives
        0       piece 0    piece 0 to 1     piece 1 from 1
        1       piece 1    piece 1 to 0     piece 0 from 0
        2       piece 2    nothing          nothing

    Attributes:
        outgoing: What it sends, sorted by round, peer, piece, overlap.
        incoming: What it receives, sorted alike.
    """

    def __init__(self, plan: ReadPlan, *, position: int) -> None:
        self.plan = plan
        self._copies: dict[tuple[int, int], list[StridedCopy]] = {}
        requests, reader = plan.requests, plan.reader[plan.piece]
        is_sent = plan.round[plan.piece] >= 0
        is_received = plan.is_received(plan.piece, position) & plan.is_needed(position)
        incoming = np.flatnonzero(is_sent & is_received)
        self.incoming = self.in_messages(incoming, reader[incoming])
        # One transfer for each rank that requests the box and does not read it itself.
        read = np.flatnonzero(is_sent & (reader == position))
        request = plan.overlaps.request[plan.overlap[read]]
        first = requests.rank_ptr[request]
        number, i = enumerate_ranges(requests.rank_ptr[request + 1] - first)
        peer = requests.rank[first[number] + i]
        is_received = plan.is_received(plan.piece[read[number]], peer)
        self.outgoing = self.in_messages(read[number[is_received]], peer[is_received])

    def of_round(self, transfers: Transfers, number: int) -> Transfers:
        """Those of one round; `transfers` are sorted by round."""
        rounds = self.plan.round[transfers.piece]
        first, last = np.searchsorted(rounds, [number, number + 1]).tolist()
        return transfers.take(slice(first, last))

    def strided_copies(self, piece: int, overlap: int) -> list[StridedCopy]:
        """The copies of a transfer that is not one run, in the order in which they are packed."""
        # Needed for the size, to pack and to unpack: worked out once. Two threads may do it twice.
        copies = self._copies.get((piece, overlap))
        if copies is None:
            start, stop = int(self.plan.start[piece]), int(self.plan.stop[piece])
            copies = self.plan.overlaps.strided_copies(overlap, start, stop)
            self._copies[piece, overlap] = copies
        return copies

    def in_messages(self, chosen: IntArray, peer: IntArray) -> Transfers:
        """Transfers of the plan to or from these peers, with their places in the messages."""
        plan = self.plan
        rounds = plan.round[plan.piece[chosen]]
        # The one order that both sides sort by; whatever it is, it must not depend on the rank.
        order = np.lexsort((plan.overlap[chosen], plan.piece[chosen], peer, rounds))
        chosen, peer = chosen[order], peer[order]
        overlaps = plan.overlaps
        piece, overlap = plan.piece[chosen], plan.overlap[chosen]
        is_run = overlaps.is_run[overlap]
        source, target, nbytes = overlaps.run_copies(overlap, plan.start[piece], plan.stop[piece])
        # The bytes of strided ones are known only from their copies.
        for i in np.flatnonzero(~is_run).tolist():
            copies = self.strided_copies(int(piece[i]), int(overlap[i]))
            numel = sum(int(np.prod(copy.extent, dtype=np.int64)) for copy in copies)
            nbytes[i] = numel * overlaps.itemsize[overlap[i]]
        is_large = is_run & (nbytes >= _LARGE_NBYTES)
        return Transfers(
            piece=piece,
            overlap=overlap,
            request=overlaps.request[overlap],
            is_run=is_run,
            source=source,
            target=target,
            nbytes=nbytes,
            peer=peer,
            at=sums_before(np.where(is_large, 0, nbytes), peer, plan.round[piece]),
            is_large=is_large,
        )


class Round:
    """The messages of one round on one rank, in flight while the round before is exchanged.

    Small transfers to a peer are packed into one message, large ones are sent from the memory that
    they were read to and received into their targets. `pack` may be called by several threads.

    Attributes:
        reads: The reads whose pieces are packed.
        receives: Memory for the messages of other ranks, by position, in the order of sending.
    """

    def __init__(self, transfers: RankTransfers, number: int, targets: Targets) -> None:
        self._transfers = transfers
        self._itemsize = transfers.plan.overlaps.itemsize
        self._targets = targets
        self._outgoing = transfers.of_round(transfers.outgoing, number)
        self._incoming = transfers.of_round(transfers.incoming, number)
        # Piece -> (transfer, packed message; None for a large one) of what is sent of it.
        self._by_piece: dict[int, list[tuple[int, memoryview | None]]] = {}
        self._packed_out: list[tuple[int, range, memoryview]] = []
        self._large_out: dict[int, memoryview] = {}
        self._packed_in: dict[int, memoryview] = {}
        self._large_in: dict[int, memoryview] = {}
        self.reads: list[Future[None]] = []
        self.receives: list[tuple[int, memoryview]] = []

    def prepare(self) -> None:
        """Make memory for all messages.

        Cost: the packed messages, and large ones that do not fit their targets as they are; at most
        the bytes of the round, each way.
        """
        self._prepare_sends()
        self._prepare_receives()

    def sends(self) -> list[tuple[int, memoryview]]:
        """All messages by position of the peer: the packed one first, then the large ones.

        Call it when every piece of the round has been packed.
        """
        messages = []
        # The order of `_prepare_receives` on the other side.
        for peer, numbers, buffer in self._packed_out:
            messages.append((peer, buffer))
            messages += [(peer, self._large_out[n]) for n in numbers if n in self._large_out]
        return messages

    def pack(self, piece: int, data: memoryview) -> None:
        """Copy what is sent of a piece to its messages; large transfers are sent in place."""
        sent = self._outgoing
        for number, buffer in self._by_piece.get(piece, ()):
            at, nbytes = int(sent.at[number]), int(sent.nbytes[number])
            source = int(sent.source[number])
            # Threads write to disjoint bytes of a message, hence without a lock.
            if buffer is None:
                self._large_out[number] = data[source : source + nbytes]
            elif sent.is_run[number]:
                buffer[at : at + nbytes] = data[source : source + nbytes]
            else:
                overlap = int(sent.overlap[number])
                size = int(self._itemsize[overlap])
                for copy in self._transfers.strided_copies(piece, overlap):
                    values = elements(data, copy.start, copy.shape, size)[copy.source]
                    elements(buffer, at, copy.extent, size)[...] = values
                    at += values.nbytes

    def unpack(self) -> int:
        """Write what has been received to the targets; how many bytes that is."""
        received = self._incoming
        columns = (received.peer, received.at, received.nbytes, received.request, received.target)
        rows = zip(*(column.tolist() for column in columns), strict=True)
        for number, (peer, at, nbytes, request, start) in enumerate(rows):
            targets = self._targets[request]
            if received.is_run[number]:
                data = self._large_in.get(number)
                if data is None:
                    data = self._packed_in[peer][at : at + nbytes]
                elif takes_as_it_is(targets):
                    # It has been received into its place.
                    continue
                for target in targets:
                    target.put(start, data)
                continue
            overlap = int(received.overlap[number])
            size = int(self._itemsize[overlap])
            for copy in self._transfers.strided_copies(int(received.piece[number]), overlap):
                values = elements(self._packed_in[peer], at, copy.extent, size)
                for target in targets:
                    target.put_strided(copy, values, size)
                at += values.nbytes
        return int(received.nbytes.sum())

    def _prepare_sends(self) -> None:
        """Make the messages; peers that get the same small transfers share one."""
        sent = self._outgoing
        shared: dict[bytes, memoryview] = {}
        for peer, numbers in sent.by_peer():
            is_large = sent.is_large[numbers.start : numbers.stop]
            # In a group of replicas all peers get the same: one buffer instead of one for each.
            small = numbers.start + np.flatnonzero(~is_large)
            content = np.stack([sent.piece[small], sent.overlap[small]]).tobytes()
            if content not in shared:
                shared[content] = host_memory(int(sent.nbytes[small].sum()))
                self._note(small, shared[content])
            self._note(numbers.start + np.flatnonzero(is_large), None)
            self._packed_out.append((peer, numbers, shared[content]))

    def _note(self, numbers: IntArray, buffer: memoryview | None) -> None:
        """Remember which transfers take of which piece, and the message that they are packed in."""
        for number, piece in zip(
            numbers.tolist(), self._outgoing.piece[numbers].tolist(), strict=True
        ):
            self._by_piece.setdefault(piece, []).append((number, buffer))

    def _prepare_receives(self) -> None:
        """Make memory for what arrives, or take that of the targets."""
        received = self._incoming
        for peer, numbers in received.by_peer():
            is_large = received.is_large[numbers.start : numbers.stop]
            # A packed message comes first even if it is empty, so that both sides count alike.
            nbytes = np.where(is_large, 0, received.nbytes[numbers.start : numbers.stop])
            self._packed_in[peer] = host_memory(int(nbytes.sum()))
            self.receives.append((peer, self._packed_in[peer]))
            for number in (numbers.start + np.flatnonzero(is_large)).tolist():
                at, size = int(received.target[number]), int(received.nbytes[number])
                targets = self._targets[int(received.request[number])]
                # With several targets it is copied to each when it has arrived.
                direct = takes_as_it_is(targets)
                data = targets[0].region(at, at + size) if direct else host_memory(size)
                self.receives.append((peer, data))
                self._large_in[number] = data


def host_memory(nbytes: int) -> memoryview:
    """Host memory that is not initialised."""
    return np.empty(nbytes, dtype=np.uint8).data
