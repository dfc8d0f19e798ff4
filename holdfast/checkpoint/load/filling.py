"""Filling the targets of a load: from what all ranks ask for to bytes in place."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from holdfast.arrays.box_table import BoxTable, union_nbytes
from holdfast.arrays.types import IntArray as Ints
from holdfast.checkpoint.load.executor import Reader, num_reading_threads
from holdfast.checkpoint.load.reading_plan import Requests, gather_requests, plan_reading
from holdfast.checkpoint.load.targets import Target
from holdfast.checkpoint.load.transfers import Moves
from holdfast.checkpoint.reports import JobReading
from holdfast.format.dtypes import DTYPES
from holdfast.format.manifest import Manifest
from holdfast.format.reader import Snapshot
from holdfast.parallel import Control
from holdfast.state.match.result import Wanted
from holdfast.state.torch_dtypes import torch_dtype

_COUNTERS = struct.Struct("<4Q")
_UNVERIFIED_NBYTES = 64 << 10
"""Without verification, reads are cut and joined at multiples of this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What the ranks ask for: `boxes[i]` by the rank at position i, which is on `hosts[i]`."""

    boxes: Sequence[BoxTable]
    hosts: Sequence[str]


class Filler:
    """Plans and carries out the reading of one load on one rank.

    With `exchange`, what several ranks ask for is read by one of them; without, each rank reads for
    itself. `nbytes_unique`: of all that is asked for, each element once.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        control: Control,
        asked: Asked,
        wanted: Sequence[Wanted],
        *,
        verify: bool,
        exchange: bool,
    ) -> None:
        self._control = control
        self._snapshot = snapshot
        manifest = snapshot.manifest
        itemsize = np.array([DTYPES[t.dtype].itemsize for t in manifest.tensors], dtype=np.int64)
        requests, numbers = gather_requests(asked.boxes)
        self.nbytes_unique = union_nbytes(requests.boxes, itemsize)
        mine = asked.boxes[control.index]
        self.nbytes_needed = int((mine.numel() * itemsize[mine.tensor]).sum())
        me = control.index
        own_numbers = numbers[me]
        if not exchange:
            requests, (own_numbers,) = gather_requests([mine])
            me = 0
        self._reader = Reader(
            snapshot,
            self._plan(snapshot, requests, itemsize, me, exchange=exchange, verify=verify),
            _targets(wanted, own_numbers, manifest),
            verify=verify,
            num_threads=num_reading_threads(asked.hosts.count(asked.hosts[control.index])),
            prefer=frozenset(
                i for i, info in enumerate(manifest.files) if info.writer == control.rank
            ),
        )

    def _plan(
        self,
        snapshot: Snapshot,
        requests: Requests,
        itemsize: Ints,
        me: int,
        *,
        exchange: bool,
        verify: bool,
    ) -> Moves:
        place = {rank: i for i, rank in enumerate(self._control.ranks)}
        files = snapshot.manifest.files
        block = snapshot.manifest.block_nbytes
        plan = plan_reading(
            snapshot.index,
            requests,
            itemsize=itemsize,
            writer=np.array([place.get(f.writer, -1) for f in files], dtype=np.int64),
            num_ranks=self._control.size if exchange else 1,
            grain=block if verify else min(block, _UNVERIFIED_NBYTES),
        )
        return Moves(plan, me=me)

    @property
    def nbytes_received(self) -> int:
        """Bytes got from other ranks so far."""
        return self._reader.nbytes_received

    def run(self) -> JobReading:
        """Read, verify, exchange, put in place: what all ranks did. Collective: `Reader.run`."""
        told = self._reader.run(self._control, self._counted)
        needed, read, received, opens = zip(*(_COUNTERS.unpack(data) for data in told), strict=True)
        return JobReading(
            nbytes_unique=self.nbytes_unique,
            nbytes_needed=sum(needed),
            nbytes_read=sum(read),
            nbytes_received=sum(received),
            num_opens=sum(opens),
            max_nbytes_read=max(read),
        )

    def _counted(self) -> bytes:
        stats = self._snapshot.stats
        return _COUNTERS.pack(
            self.nbytes_needed, stats.nbytes_read, self.nbytes_received, stats.opens
        )

    def touched(self) -> list[str]:
        """Paths of the targets written to so far."""
        return self._reader.touched()


def _targets(
    wanted: Sequence[Wanted], numbers: Ints, manifest: Manifest
) -> dict[int, list[Target]]:
    """Number of a box -> what to fill with it; `numbers` has one entry for each box in order."""
    dtypes = {name: torch_dtype(name) for name in {t.dtype for t in manifest.tensors}}
    found: dict[int, list[Target]] = {}
    row = 0
    rows = numbers.tolist()
    for entry in wanted:
        stored = dtypes[manifest.tensors[entry.tensor].dtype]
        for local in entry.locals:
            if rows[row] >= 0:
                target = Target(local, path=entry.path, stored=stored)
                found.setdefault(rows[row], []).append(target)
            row += 1
    return found
