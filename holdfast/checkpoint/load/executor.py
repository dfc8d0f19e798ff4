"""Carrying out the read plan of a load on one rank: read, verify, fill targets, exchange."""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import pairwise

import numpy as np

from holdfast.arrays.box_table import BoxTable, union_nbytes
from holdfast.arrays.types import IntArray
from holdfast.checkpoint.load.assign_readers import ReadPlan, plan_reads
from holdfast.checkpoint.load.requests import ReadRequests, gather_requests
from holdfast.checkpoint.load.targets import Target
from holdfast.checkpoint.load.transfers import RankTransfers, Round, host_memory
from holdfast.checkpoint.reports import JobReading
from holdfast.format.byte_ranges import elements, join_neighbours
from holdfast.format.dtypes import DTYPES
from holdfast.format.manifest import Manifest
from holdfast.format.reader import Snapshot
from holdfast.parallel import Control
from holdfast.state.match.result import TensorRequest
from holdfast.state.torch_dtypes import torch_dtype

_COUNTERS = struct.Struct("<4Q")
_MAX_THREADS = 8
_UNVERIFIED_NBYTES = 64 << 10
"""Without verification, reads are cut and joined at multiples of this."""
_ALONE = -1
"""The round of what is not sent to any rank: read before the first."""


class LoadExecutor:
    """Plans and carries out the reads of one load on one rank.

    The plan is made at once, without communication; `run` is collective.

    Args:
        snapshot: The checkpoint.
        control: Of all ranks of the load.
        requests: What this rank fills.
        boxes: What each rank requests, by position.
        hosts: The machine of each rank, by position.
        verify: Check the digests of what is read.
        exchange: Read what several ranks request once, and send it; otherwise each rank reads for
            itself.

    Cost: see `plan_reads`.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        control: Control,
        requests: Sequence[TensorRequest],
        *,
        boxes: Sequence[BoxTable],
        hosts: Sequence[str],
        verify: bool,
        exchange: bool,
    ) -> None:
        self._snapshot = snapshot
        self._control = control
        self._verify = verify
        manifest, position = snapshot.manifest, control.index
        itemsize = np.array([DTYPES[t.dtype].itemsize for t in manifest.tensors], dtype=np.int64)
        # All ranks' requests, also without exchange: the report counts what the job needs.
        everything, numbers = gather_requests(boxes)
        own = boxes[position]
        self._nbytes_unique = union_nbytes(everything.boxes, itemsize)
        self.nbytes_needed = int((own.numel() * itemsize[own.tensor]).sum())
        self.nbytes_received = 0
        own_numbers, num_ranks = numbers[position], len(boxes)
        if not exchange:
            # The same plan, for a load of one rank.
            everything, (own_numbers,) = gather_requests([own])
            num_ranks, position = 1, 0
        plan = self._plan(everything, itemsize, num_ranks)
        self._targets = _make_targets(requests, own_numbers, manifest)
        self._transfers = RankTransfers(plan, position=position)
        own_files = {i for i, info in enumerate(manifest.files) if info.writer == control.rank}
        self._order_reads(plan, frozenset(own_files))
        self._num_threads = num_reading_threads(hosts.count(hosts[control.index]))
        self._has_failed = threading.Event()

    def run(self) -> JobReading:
        """Read everything and exchange it; what all ranks read. All ranks together.

        Raises:
            HoldfastError: Any rank's error, on all of them, before anything is waited for.

        Cost: a collective for each round and one at the end; in each round one message, and one for
        each large transfer, to and from every other rank that has something.
        """
        num_rounds = self._transfers.plan.num_rounds
        with ExitStack() as stack:
            # Reading releases the interpreter, and so does hashing: threads help on one core, too,
            # where a round is read while another one is exchanged.
            pool: ThreadPoolExecutor | None = None
            if self._num_threads > 1 or num_rounds:
                pool = ThreadPoolExecutor(self._num_threads, "holdfast-load")
                stack.callback(pool.shutdown, wait=True, cancel_futures=True)
            alone, error = self._start(_ALONE, pool)
            # While a round is exchanged, the next one is read.
            following, late = self._start(0, pool) if num_rounds else (alone, None)
            error = error or alone.first_error() or late
            for number in range(num_rounds):
                current = following
                error = error or current.first_error()
                if error is None and number + 1 < num_rounds:
                    following, error = self._start(number + 1, pool)
                self._control.exchange(
                    current.sends() if error is None else [],
                    current.receives if error is None else [],
                    phase="load: exchange",
                    error=error,
                )
                # An error of this rank takes the place of the messages: `exchange` has raised it on
                # all ranks. One from here on is raised by the next collective.
                try:
                    self.nbytes_received += current.unpack()
                except Exception as caught:
                    error = caught
        return self._gather_counters(error)

    def touched(self) -> list[str]:
        """Paths of the targets that something was written to."""
        return [t.path for each in self._targets.values() for t in each if t.is_touched]

    def _gather_counters(self, error: Exception | None) -> JobReading:
        # One collective for two things: whether all ranks have read, and what it cost.
        stats = self._snapshot.stats
        counters = _COUNTERS.pack(
            self.nbytes_needed, stats.nbytes_read, self.nbytes_received, stats.opens
        )
        reports = self._control.agree(error, phase="load: read", payload=counters)
        columns = zip(*(_COUNTERS.unpack(report) for report in reports), strict=True)
        needed, read, received, opens = columns
        return JobReading(
            nbytes_unique=self._nbytes_unique,
            nbytes_needed=sum(needed),
            nbytes_read=sum(read),
            nbytes_received=sum(received),
            num_opens=sum(opens),
            max_nbytes_read=max(read),
        )

    def _plan(self, requests: ReadRequests, itemsize: IntArray, num_ranks: int) -> ReadPlan:
        manifest, ranks = self._snapshot.manifest, self._control.ranks
        # Files of ranks that are not here (another layout wrote them) have no preferred reader.
        positions = {rank: i for i, rank in enumerate(ranks)}
        writer = [positions.get(info.writer, -1) for info in manifest.files]
        block = manifest.block_nbytes
        return plan_reads(
            self._snapshot.index,
            requests,
            itemsize=itemsize,
            writer=np.array(writer, dtype=np.int64),
            num_ranks=num_ranks,
            grain=block if self._verify else min(block, _UNVERIFIED_NBYTES),
        )

    def _order_reads(self, plan: ReadPlan, own_files: frozenset[int]) -> None:
        """Choose a copy for each piece of this rank, and order them by round, file and byte.

        Everything that threads look up per piece becomes a list here: indexing arrays one by one
        is slow.
        """
        index, pieces = self._snapshot.index, self._transfers.pieces
        row = plan.row[pieces]
        if self._snapshot.copies:
            choose = self._snapshot.choose_copy
            row = np.array([choose(r, own_files) for r in row.tolist()], dtype=np.int64)
        file, place = index.file[row], index.start[row] + plan.start[pieces]
        order = np.lexsort((place, file, plan.round[pieces]))
        self._pieces = pieces[order]
        self._file, self._place = file[order], place[order]
        self._rounds = plan.round[self._pieces]
        self._rows: list[int] = row[order].tolist()
        self._bounds: list[tuple[int, int]] = list(
            zip(plan.start[self._pieces].tolist(), plan.stop[self._pieces].tolist(), strict=True)
        )
        # What this rank keeps of each piece, in the order of the pieces.
        number = np.empty(len(plan.row), dtype=np.int64)
        number[self._pieces] = np.arange(len(self._pieces))
        local = self._transfers.local
        local = local.take(np.argsort(number[local.piece], kind="stable"))
        counts = np.searchsorted(number[local.piece], np.arange(len(self._pieces) + 1))
        self._local_ptr: list[int] = counts.tolist()
        self._local_overlap = local.overlap
        self._local: list[tuple[int, bool, int, int, int]] = list(
            zip(
                local.request.tolist(),
                local.is_run.tolist(),
                local.source.tolist(),
                local.target.tolist(),
                local.nbytes.tolist(),
                strict=True,
            )
        )

    def _start(
        self, number: int, pool: ThreadPoolExecutor | None
    ) -> tuple[Round, Exception | None]:
        """Make a round's messages and start to read its pieces; at once where there is no pool."""
        current = Round(self._transfers, number, self._targets)
        try:
            current.prepare()
            first, last = np.searchsorted(self._rounds, [number, number + 1]).tolist()
            nbytes = np.array([b - a for a, b in self._bounds[first:last]], dtype=np.int64)
            cuts = join_neighbours(self._file[first:last], self._place[first:last], nbytes)
            for a, b in pairwise((first + cuts).tolist()):
                if pool is None:
                    self._read(range(a, b), current)
                else:
                    current.reads.append(pool.submit(self._read, range(a, b), current))
        except Exception as caught:
            # Reads that are in flight finish by themselves; the pool waits for them.
            return current, caught
        return current, None

    def _read(self, numbers: range, current: Round) -> None:
        """Read and distribute pieces that lie next to each other, unless a read has failed."""
        if self._has_failed.is_set():
            return
        try:
            self._read_pieces(numbers, current)
        except BaseException:  # an interrupt, too, must stop the other threads
            self._has_failed.set()
            raise

    def _read_pieces(self, numbers: range, current: Round) -> None:
        rows = self._rows[numbers.start : numbers.stop]
        bounds = self._bounds[numbers.start : numbers.stop]
        nbytes = sum(stop - start for start, stop in bounds)
        # Straight into the target where possible: no copy, and no page of a buffer to touch first.
        direct = self._direct_target(numbers)
        if direct is not None:
            target, start = direct
            data = target.region(start, start + nbytes)
        else:
            data = host_memory(nbytes)
        self._snapshot.read_pieces(rows, bounds, data, verify=self._verify)
        if direct is not None:
            direct[0].done(nbytes)
        at = 0
        for number, (start, stop) in zip(numbers, bounds, strict=True):
            piece = data[at : at + stop - start]
            if direct is None:
                self._keep(number, piece)
            # A piece that is sent is sent from where it lies now, the target included.
            current.pack(int(self._pieces[number]), piece)
            at += stop - start

    def _direct_target(self, numbers: range) -> tuple[Target, int] | None:
        """The one target that a piece read alone belongs to as it is, and the byte to write at."""
        first, last = self._local_ptr[numbers.start], self._local_ptr[numbers.start + 1]
        if len(numbers) != 1 or last != first + 1:
            return None
        request, is_run, source, at, nbytes = self._local[first]
        start, stop = self._bounds[numbers.start]
        targets = self._targets[request]
        is_whole = is_run and source == 0 and nbytes == stop - start
        return (targets[0], at) if is_whole and len(targets) == 1 else None

    def _keep(self, number: int, data: memoryview) -> None:
        """Copy what this rank requests of a piece to its targets."""
        for entry in range(self._local_ptr[number], self._local_ptr[number + 1]):
            request, is_run, source, at, nbytes = self._local[entry]
            targets = self._targets[request]
            if is_run:
                for target in targets:
                    target.put(at, data[source : source + nbytes])
                continue
            overlap = int(self._local_overlap[entry])
            size = int(self._transfers.plan.overlaps.itemsize[overlap])
            for copy in self._transfers.strided_copies(int(self._pieces[number]), overlap):
                values = elements(data, copy.start, copy.shape, size)[copy.source]
                for target in targets:
                    target.put_strided(copy, values, size)


def num_reading_threads(num_local_ranks: int) -> int:
    """Threads that read and hash on each of so many ranks of this machine: its cores divided."""
    # The cores that this process may use, not those of the machine: containers have fewer.
    cores = len(os.sched_getaffinity(0))
    return max(1, min(_MAX_THREADS, cores // max(num_local_ranks, 1)))


def _make_targets(
    requests: Sequence[TensorRequest], numbers: IntArray, manifest: Manifest
) -> dict[int, list[Target]]:
    """Number of a requested box -> what to fill with it.

    `numbers` has one entry for each local tensor of the requests, in order; -1 for empty ones.
    """
    dtypes = {name: torch_dtype(name) for name in {t.dtype for t in manifest.tensors}}
    targets: dict[int, list[Target]] = {}
    number = iter(numbers.tolist())
    for request in requests:
        stored = dtypes[manifest.tensors[request.tensor].dtype]
        for local in request.locals:
            box = next(number)
            if box >= 0:
                target = Target(local, path=request.path, stored=stored)
                targets.setdefault(box, []).append(target)
    return targets
