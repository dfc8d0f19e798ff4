"""One rank's part of a reading plan: what it reads, keeps, hands on and is handed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from holdfast.arrays.box_table import enumerate_ranges as stretches
from holdfast.arrays.boxes import Box, flat_range_boxes
from holdfast.arrays.types import BoolArray as Bools
from holdfast.arrays.types import IntArray as Ints
from holdfast.checkpoint.load.reading_plan import ReadingPlan

_LARGE_NBYTES = 128 << 10
"""Runs from this size on are sent from and received into their places, without packing."""


class Part(NamedTuple):
    """A box inside of a piece: where its bytes begin there, how it is cut out, where it goes.

    `source` cuts the wanted elements out of an array of `shape` at byte `at` of the piece;
    `target` is their place in the box asked for, `wanted` their shape.
    """

    at: int
    shape: tuple[int, ...]
    source: tuple[slice, ...]
    target: tuple[slice, ...]
    wanted: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Deliveries:
    """What pieces have for boxes, as columns.

    `is_run`: one run of bytes on both sides: `nbytes` from byte `source` of the piece to byte
    `target` of the box. Otherwise see `Movements.parts`; `nbytes` holds for both. `peer`: the other
    rank's position. `at`: where it lies in the packed message between the two; a delivery that
    `is_large` is a message of its own behind that one, in this order.
    """

    piece: Ints
    pair: Ints
    request: Ints
    is_run: Bools
    source: Ints
    target: Ints
    nbytes: Ints
    peer: Ints
    at: Ints
    is_large: Bools

    def __len__(self) -> int:
        """Number of deliveries."""
        return len(self.piece)

    def take(self, rows: Ints | Bools) -> Deliveries:
        """The chosen ones, in their order."""
        return Deliveries(**{name: getattr(self, name)[rows] for name in self.__slots__})


class Moves:
    """The part of one rank, by position `me` among the ranks.

    `pieces`: numbers of the pieces it reads. `local`: what those have for its own boxes, `outgoing`
    for the others', `incoming` what it gets; the last two sorted by round, peer, piece, pair, with
    their places in the messages, which the other side works out alike.
    """

    def __init__(self, plan: ReadingPlan, *, me: int) -> None:
        self.plan = plan
        self._parts: dict[tuple[int, int], list[Part]] = {}
        requests, piece, pair = plan.requests, plan.piece, plan.pair
        reader, request = plan.reader[piece], plan.pairs.request[pair]
        asked = np.zeros(len(requests.boxes), dtype=np.bool_)
        owner, _ = stretches(np.diff(requests.asker_ptr))
        asked[owner[requests.asker == me]] = True
        mine, wanted = reader == me, asked[request]
        self.pieces = np.flatnonzero(plan.reader == me)
        self.local = self._deliveries(np.flatnonzero(mine & wanted), None)
        coming = np.flatnonzero(~mine & wanted)
        self.incoming = self._in_messages(coming, reader[coming])
        going = np.flatnonzero(mine & (plan.round[piece] >= 0))
        begin = requests.asker_ptr[request[going]]
        entry, position = stretches(requests.asker_ptr[request[going] + 1] - begin)
        asker = requests.asker[begin[entry] + position]
        others = asker != me
        self.outgoing = self._in_messages(going[entry[others]], asker[others])

    def of_round(self, deliveries: Deliveries, number: int) -> Deliveries:
        """Those of one round; the deliveries are sorted by round."""
        rounds = self.plan.round[deliveries.piece]
        begin, end = np.searchsorted(rounds, [number, number + 1])
        return deliveries.take(np.arange(begin, end))

    def parts(self, piece: int, pair: int) -> list[Part]:
        """The boxes of a delivery that is not one run, in the order in which they are packed."""
        known = self._parts.get((piece, pair))
        if known is None:
            known = self._parts[piece, pair] = self._cut(piece, pair)
        return known

    def _cut(self, piece: int, pair: int) -> list[Part]:
        plan, pairs = self.plan, self.plan.pairs
        size = int(pairs.itemsize[pair])
        chunk, common = pairs.chunk(pair), pairs.common(pair)
        origin = tuple(plan.requests.boxes.offset[int(pairs.request[pair])].tolist())
        first, last = int(plan.start[piece]) // size, int(plan.stop[piece]) // size
        found, at = [], 0
        for box in flat_range_boxes(chunk.shape, first, last):
            offset = tuple(a + b for a, b in zip(box.offset, chunk.offset, strict=True))
            wanted = Box(offset, box.shape).intersect(common)
            if wanted is not None:
                source, target = wanted.relative_to(offset), wanted.relative_to(origin)
                found.append(Part(at, box.shape, source, target, wanted.shape))
            at += box.numel * size
        return found

    def _in_messages(self, chosen: Ints, peer: Ints) -> Deliveries:
        plan = self.plan
        rounds = plan.round[plan.piece[chosen]]
        order = np.lexsort((plan.pair[chosen], plan.piece[chosen], peer, rounds))
        return self._deliveries(chosen[order], peer[order])

    def _deliveries(self, chosen: Ints, peer: Ints | None) -> Deliveries:
        """The columns of deliveries of the plan; with peers, their places in the messages."""
        plan, pairs = self.plan, self.plan.pairs
        piece, pair = plan.piece[chosen], plan.pair[chosen]
        is_run = pairs.stored.is_run[pair] & pairs.wanted.is_run[pair]
        size = pairs.itemsize[pair]
        stored, wanted = pairs.stored.start[pair] * size, pairs.wanted.start[pair] * size
        length = pairs.extent[pair].prod(axis=1) * size
        begin = np.maximum(plan.start[piece], stored)
        nbytes = np.maximum(np.minimum(plan.stop[piece], stored + length) - begin, 0)
        for i in np.flatnonzero(~is_run).tolist():
            parts = self.parts(int(piece[i]), int(pair[i]))
            nbytes[i] = sum(int(np.prod(part.wanted, dtype=np.int64)) for part in parts) * size[i]
        is_large: Bools = is_run & (nbytes >= _LARGE_NBYTES)
        at = np.zeros(len(chosen), dtype=np.int64)
        if peer is not None and len(chosen):
            rounds = plan.round[piece]
            new = np.concatenate([[True], (peer[1:] != peer[:-1]) | (rounds[1:] != rounds[:-1])])
            packed = np.where(is_large, 0, nbytes)
            before = np.cumsum(packed) - packed
            at = before - before[np.flatnonzero(new)][np.cumsum(new) - 1]
        return Deliveries(
            piece=piece,
            pair=pair,
            request=pairs.request[pair],
            is_run=is_run,
            source=begin - plan.start[piece],
            target=wanted + begin - stored,
            nbytes=nbytes,
            peer=at if peer is None else peer,
            at=at,
            is_large=is_large,
        )
