"""Who writes which box: whole boxes where that balances, pieces of large ones where it does not.

Deterministic: equal claims give equal elections, on any machine.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from holdfast.arrays.boxes import flat_range_boxes
from holdfast.arrays.types import FloatArray as Floats
from holdfast.arrays.types import IntArray as Ints
from holdfast.arrays.water_filling import fill_groups

MIN_PIECE_NBYTES = 1 << 16
"""No box is cut into pieces smaller than this; one that is not twice as large stays whole."""
_MIN_PIECE_SHARE = 1 / 512
"""Nor into pieces smaller than this share of a rank's mean load, which balance nothing."""
_GOOD_ENOUGH = 1.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Holdings:
    """The distinct boxes and who holds them, side by side.

    `holders[first[i]:first[i + 1]]`: the holders (0 to `num_ranks` - 1, ascending) of box i.
    `nbytes` (n,): of each box. `extent` (n, d): of each box, padded with 1. `words` (n,): equal for
    boxes with equal holders.
    """

    holders: Ints
    first: Ints
    nbytes: Ints
    extent: Ints
    words: npt.NDArray[np.uint64]
    num_ranks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Awards:
    """What is written by whom: award i is a part of box `box[i]`, written by its holder `place[i]`.

    `place`: position among the box's holders. `offset` (n, d): of the part within the box;
    `extent` (n, d). The awards of a box tile it; most boxes have one, the whole.
    """

    box: Ints
    place: Ints
    offset: Ints
    extent: Ints


class Part(NamedTuple):
    """The share of one holder in a box that is cut: [start, stop) of its slabs.

    The slabs are the entries of the box's first `depth` dims, in row-major order.
    """

    box: int
    place: int
    depth: int
    start: int
    stop: int


def elect(held: Holdings) -> Awards:
    """One writer per box, balanced by bytes; large boxes are cut where whole ones do not balance.

    First whole boxes, largest first to the least loaded holder. Where the most loaded rank then has
    more than 1.01 times the least that any election could give it, boxes with several holders are
    dealt out again against quotas, and cut at a quota's end. Cost: a heap over the boxes with
    several holders; quotas cost O(holder sets x holders) a sweep.
    """
    place, load = _whole(held)
    total = float(held.nbytes.sum())
    parts: list[Part] = []
    if len(load) and load.max() * held.num_ranks > _GOOD_ENOUGH * total:
        place, parts = _dealt(held, place, load)
    return _awards(held, place, parts)


def _whole(held: Holdings) -> tuple[Ints, Ints]:
    """Each box to one holder: its place among them; and the bytes of every rank."""
    counts = np.diff(held.first)
    place = np.zeros(len(counts), dtype=np.int64)
    load = np.zeros(held.num_ranks, dtype=np.int64)
    alone = counts == 1
    np.add.at(load, held.holders[held.first[:-1][alone]], held.nbytes[alone])
    for group in _groups(held):
        positions = _holders(held, group)
        heap = [(int(load[p]), at) for at, p in enumerate(positions.tolist())]
        heapq.heapify(heap)
        chosen = np.zeros(len(group), dtype=np.int64)
        for i, nbytes in enumerate(held.nbytes[group].tolist()):
            loaded, at = heap[0]
            chosen[i] = at
            heapq.heapreplace(heap, (loaded + nbytes, at))
        place[group] = chosen
        np.add.at(load, positions[chosen], held.nbytes[group])
    return place, load


def _groups(held: Holdings) -> Iterator[Ints]:
    """Boxes with several holders, by set of holders (smallest sets first), largest boxes first."""
    counts = np.diff(held.first)
    shared = np.flatnonzero(counts > 1)
    if len(shared) == 0:
        return
    _, sets = np.unique(held.words[shared], return_inverse=True)
    by_set = np.lexsort((shared, -held.nbytes[shared], sets, counts[shared]))
    ends = np.flatnonzero(np.diff(sets[by_set])) + 1
    yield from np.split(shared[by_set], ends)


def _holders(held: Holdings, group: Ints) -> Ints:
    box = int(group[0])
    return held.holders[held.first[box] : held.first[box + 1]]


def _dealt(held: Holdings, place: Ints, load: Ints) -> tuple[Ints, list[Part]]:
    """The boxes dealt out against quotas, if that lowers the highest load."""
    groups = list(_groups(held))
    counts = np.diff(held.first)
    alone = np.zeros(held.num_ranks, dtype=np.int64)
    only = counts == 1
    np.add.at(alone, held.holders[held.first[:-1][only]], held.nbytes[only])
    members = [_holders(held, group) for group in groups]
    quotas = fill_groups(alone, members, [int(held.nbytes[group].sum()) for group in groups])
    ideal = alone.copy()
    for who, quota in zip(members, quotas, strict=True):
        ideal[who] += quota
    if load.max() <= _GOOD_ENOUGH * ideal.max():
        return place, []
    smallest = max(MIN_PIECE_NBYTES, int(ideal.mean() * _MIN_PIECE_SHARE))
    dealt, parts = place.copy(), []
    for group, quota in zip(groups, quotas, strict=True):
        parts += _deal(held, group, quota, smallest, dealt)
    return (dealt, parts) if _loads(held, dealt, parts).max() < load.max() else (place, [])


def _deal(held: Holdings, group: Ints, quota: Ints, smallest: int, dealt: Ints) -> list[Part]:
    """Boxes of one set of holders, largest first, each to whom most of the quota is left.

    A box that is larger than what is left is cut there. `dealt` gets the places of whole boxes.
    """
    parts: list[Part] = []
    heap = [(-float(left), at) for at, left in enumerate(quota)]
    heapq.heapify(heap)
    for box in group.tolist():
        nbytes = int(held.nbytes[box])
        left = -heap[0][0]
        if nbytes <= left + smallest or nbytes < 2 * smallest:
            dealt[box] = heap[0][1]
            heapq.heapreplace(heap, (float(nbytes) - left, heap[0][1]))
            continue
        depth, units = _units(held.extent[box], nbytes, smallest)
        each = nbytes / units
        start = 0
        while start < units:
            left, at = -heap[0][0], heap[0][1]
            rest = units - start
            take = min(max(round(max(left, smallest) / each), 1), rest)
            if (rest - take) * each < smallest:
                take = rest
            parts.append(Part(box, at, depth, start, start + take))
            heapq.heapreplace(heap, (take * each - left, at))
            start += take
    return parts


def _units(extent: Ints, nbytes: int, smallest: int) -> tuple[int, int]:
    """How many leading dims to cut along, and into how many slabs they divide the box."""
    units = 1
    for depth, size in enumerate(extent.tolist(), start=1):
        units *= size
        if nbytes / units <= smallest / 4:
            return depth, units
    return len(extent), units


def _loads(held: Holdings, place: Ints, parts: Sequence[Part]) -> Floats:
    """Bytes of every rank."""
    load = np.zeros(held.num_ranks, dtype=np.float64)
    whole = _uncut(place, parts)
    writer = held.holders[held.first[:-1] + place]
    np.add.at(load, writer[whole], held.nbytes[whole])
    for part in parts:
        slabs = math.prod(held.extent[part.box][: part.depth].tolist())
        nbytes = held.nbytes[part.box] * (part.stop - part.start) / slabs
        load[held.holders[held.first[part.box] + part.place]] += nbytes
    return load


def _uncut(place: Ints, parts: Sequence[Part]) -> npt.NDArray[np.bool_]:
    whole = np.ones(len(place), dtype=np.bool_)
    whole[[part.box for part in parts]] = False
    return whole


def _awards(held: Holdings, place: Ints, parts: Sequence[Part]) -> Awards:
    whole = _uncut(place, parts)
    extent = held.extent[whole]
    found = Awards(
        box=np.flatnonzero(whole), place=place[whole], offset=np.zeros_like(extent), extent=extent
    )
    if not parts:
        return found
    rows: list[tuple[int, int]] = []
    offsets: list[tuple[int, ...]] = []
    extents: list[tuple[int, ...]] = []
    for part in parts:
        shape = tuple(held.extent[part.box].tolist())
        inner = shape[part.depth :]
        for piece in flat_range_boxes(shape[: part.depth], part.start, part.stop):
            rows.append((part.box, part.place))
            offsets.append(piece.offset + (0,) * len(inner))
            extents.append(piece.shape + inner)
    box, who = np.array(rows, dtype=np.int64).T
    return Awards(
        box=np.concatenate([found.box, box]),
        place=np.concatenate([found.place, who]),
        offset=np.concatenate([found.offset, np.array(offsets, dtype=np.int64)]),
        extent=np.concatenate([found.extent, np.array(extents, dtype=np.int64)]),
    )
