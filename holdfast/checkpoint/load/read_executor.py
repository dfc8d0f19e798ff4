"""The reads of a load on one rank: planned, verified, brought to their targets, exchanged."""

from __future__ import annotations

import ctypes
import logging
import os
import struct
import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from operator import attrgetter
from typing import Any, Literal

import msgspec
import numpy as np

from holdfast.arrays.box_table import BoxTable, enumerate_ranges, pad_shapes, union_nbytes
from holdfast.arrays.distinct import distinct
from holdfast.arrays.memory import copy_ranges, join_ranges, memory_at
from holdfast.arrays.types import BoolArray, IntArray
from holdfast.checkpoint.load.choose_exchange import (
    Choose,
    choose_exchange,
    host_numbers,
    measure_rates,
)
from holdfast.checkpoint.load.read_plan import ReadPlan, plan_reads
from holdfast.checkpoint.load.target_memory import make_targets, takes_as_it_is
from holdfast.checkpoint.load.transfers import RankTransfers, Round, host_memory
from holdfast.checkpoint.options import OnDrift
from holdfast.checkpoint.reports import JobReading
from holdfast.decoding import decode_msgpack_as
from holdfast.errors import CorruptionError
from holdfast.format.byte_ranges import DIRECT_NBYTES, elements, join_neighbours, join_runs
from holdfast.format.checkpoint_files import CheckpointFiles
from holdfast.format.manifest import TensorForms
from holdfast.format.stored_copies import choose_copies
from holdfast.parallel import Control
from holdfast.state.matcher import LocalMemory, TensorRequest
from holdfast.state.tensor_elements import TORCH_TO_NAME
from holdfast.storage.reading import is_cached_on_host, range_nbytes, requests_of

_COUNTERS = struct.Struct("<5Q")
_MAX_THREADS = 8
_THREADS_NBYTES = 1 << 20
"""What is read from this host's page cache and hashed in less time than threads take to start."""
_RUN_NBYTES = 16 << 20
"""What one thread reads to plain memory without a look at anything else."""
_MIN_RUN_NBYTES = 1 << 20
"""The same of a small load, so that each thread has some."""
_PAGE_NBYTES = 4 << 10
"""Without verification, reads are cut at multiples of this, and gaps of so many bytes or more in
what a rank needs are not read. Of the page cache, a system call for a strip costs what a copy of 8
KiB does; below a page nothing is saved, because the kernel brings whole pages."""
_PIECE_GAP_NBYTES = 64 << 10
"""Without verification, what is needed and less far apart is in one piece, which is read by strips:
a piece costs far more than a strip."""
_REQUESTED = ("tensor", "boxes", "locals")
_ALONE = -1
"""The round of what is not sent to any rank: read before the first."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Kept:
    """What this rank keeps of its pieces for requested boxes: columns of n rows, by piece.

    Many small tensors: the least work for each. So most columns are lists, which are faster to look
    up one by one.
    """

    piece: list[int]
    """Among those that this rank reads, in their order."""
    overlap: list[int]
    """Of the plan."""
    box: list[int]
    """Requested box."""
    is_run: list[bool]
    """Whether it is one run of bytes; otherwise it is copied with strides."""
    source: IntArray
    """Byte of the piece at which the run starts; 0 without one."""
    at: list[int]
    """Byte of the box where the run goes."""
    nbytes: IntArray
    """Of the run."""
    address: IntArray
    """Where it goes in plain memory; -1 if a `Target` takes it."""
    num_others: IntArray
    """(n + 1,) how many rows before each a `Target` takes."""
    num_parts: IntArray
    """(n + 1,) how many rows before each are not all of their piece, or a `Target` takes them."""


class LoadExecutor:
    """Plans and carries out the reads of one load on one rank.

    Args:
        files: The checkpoint.
        control: Of all ranks of the load.
        requests: What this rank fills.
        memory: The local tensors of the requests.
        hosts: Of each rank, by position.
        on_drift: "raise" or "warn", if copies of a box that is read differ.
        verify: Check the digests of what is read.
        requests_before: The storage's requests before the load, by kind, which are not the load's.

    Attributes:
        boxes: What this rank requests.
    """

    def __init__(
        self,
        files: CheckpointFiles,
        control: Control,
        requests: Sequence[TensorRequest],
        *,
        memory: LocalMemory,
        hosts: Sequence[str],
        on_drift: OnDrift,
        verify: bool,
        requests_before: Counter[str],
    ) -> None:
        self._hosts = hosts
        self._on_drift = on_drift
        self._files = files
        self._control = control
        self._requests = requests
        self._memory = memory
        self._verify = verify and files.has_digests
        self._is_cached = is_cached_on_host(files.storage)
        self._num_threads = _MAX_THREADS
        # Of a remote storage each thread waits for answers, most of the time; others need a core.
        if self._is_cached:
            self._num_threads = num_reading_threads(hosts.count(hosts[control.index]))
        self._requests_before = requests_before
        self._has_failed = threading.Event()
        self._local = threading.local()
        self._written: list[tuple[int, int]] = []
        self._transfers: RankTransfers | None = None
        self._nbytes_unique: int | None = None
        self._itemsize = files.manifest.forms.itemsize
        self.boxes = requested_boxes(requests, files.manifest.forms)
        self.nbytes_needed = int(self.boxes.extent.prod(axis=1) @ self._itemsize[self.boxes.tensor])
        self.nbytes_received = 0

    def may_share(self, exchange: bool | Literal["auto"]) -> bool:
        """Return True if ranks may send each other what they read, so must know all requests."""
        if exchange == "auto":
            # Ranks of one host share its page cache: none needs what another one has read.
            exchange = len(set(self._hosts)) > 1 or not self._is_cached
        return exchange and self._control.size > 1

    def plan(self, boxes: Sequence[BoxTable] | None = None, *, is_chosen: bool = False) -> None:
        """Plan the reads, without communication but for that of `measure_rates`.

        Args:
            boxes: What each rank requests, by position; None if each rank reads for itself.
            is_chosen: Send what several hosts request if that is faster, and nothing within a host
                that has a page cache. Otherwise all that several ranks request is read once.

        Cost: see `plan_reads`.
        """
        files, control = self._files, self._control
        manifest, ranks = files.manifest, control.ranks
        tables = [self.boxes] if boxes is None else boxes
        choose: Choose | None = None
        hosts = np.arange(len(tables))  # as if each rank had its own
        if is_chosen:
            if self._is_cached:
                hosts = host_numbers(self._hosts)
            choose = partial(
                choose_exchange,
                hosts=self._hosts,
                is_cached=self._is_cached,
                measure=partial(measure_rates, files, control, self._hosts),
            )
        position = 0 if boxes is None else self._control.index
        # Files of ranks that are not here (another layout wrote them) have no preferred reader.
        positions = {rank: i for i, rank in enumerate(ranks)} if boxes is not None else {}
        writer = [positions.get(info.writer, -1) for info in manifest.files]
        block = manifest.block_nbytes
        plan = plan_reads(
            self._files.index,
            tables,
            itemsize=self._itemsize,
            writer=np.array(writer, dtype=np.int64),
            hosts=hosts,
            grain=block if self._verify else min(block or _PAGE_NBYTES, _PAGE_NBYTES),
            max_gap=None if self._verify else _PIECE_GAP_NBYTES,
            range_nbytes=range_nbytes(self._files.storage),
            copies=self._files.copies if self._files.has_copies else None,
            choose=choose,
        )
        if self._files.has_copies:
            self._refuse_drift(plan.row)
        kept = np.arange(len(plan.piece)) if boxes is None else plan.kept(position)
        kept = self._order_reads(plan, position, kept)
        self._find_places(plan, plan.numbers[position], kept, is_alone=boxes is None)
        self._join_reads(plan)
        if boxes is not None:
            self._transfers = RankTransfers(plan, position=position)
        if boxes is not None or self._control.size == 1:
            self._nbytes_unique = union_nbytes(plan.requests.boxes, self._itemsize)

    def run(self) -> JobReading:
        """Read everything and exchange it; what all ranks read. All ranks together.

        Raises:
            HoldfastError: Any rank's error, on all of them, before anything is waited for.

        Cost: a collective at the end; with an exchange one more for each round, in which one
        message, and one for each large transfer, goes to and from every other rank that has
        something.
        """
        error: Exception | None = None
        alone = self._reads_of(_ALONE)
        # One read needs no second thread, and few bytes none.
        is_small = len(alone) <= 1 or (self._is_cached and self.nbytes_needed < _THREADS_NBYTES)
        if self._transfers is None and (self._num_threads == 1 or is_small):
            try:
                for pieces in alone:
                    self._read(pieces, None)
            except Exception as caught:
                error = caught
        else:
            # Reading releases the interpreter, and so does hashing: threads help on one core, too,
            # since a round is read while another one is exchanged.
            pool = ThreadPoolExecutor(self._num_threads, "holdfast-load")
            try:
                error = self._run_rounds(pool)
            finally:
                pool.shutdown(wait=True, cancel_futures=True)
        # One collective for two things: whether all ranks have read, and what it cost.
        stats = self._files.stats
        counters = _COUNTERS.pack(
            self.nbytes_needed,
            stats.nbytes_read,
            self.nbytes_received,
            stats.opens,
            stats.nbytes_from_images,
        )
        sent = requests_of(self._files.storage) - self._requests_before
        counters += msgspec.msgpack.encode(dict(sent))
        reports = self._control.agree(error, phase="load: read", payload=counters)
        needed, read, received, opens, from_images = zip(
            *map(_COUNTERS.unpack_from, reports), strict=True
        )
        requests: Counter[str] = Counter()
        for report in reports:
            by_kind = decode_msgpack_as(report[_COUNTERS.size :], dict[str, int])
            requests += Counter(by_kind)
        return JobReading(
            nbytes_unique=self._nbytes_unique,
            nbytes_needed=sum(needed),
            nbytes_read=sum(read),
            nbytes_received=sum(received),
            num_opens=sum(opens),
            max_nbytes_read=max(read),
            nbytes_from_images=sum(from_images),
            requests=dict(requests),
        )

    def touched(self) -> list[str]:
        """Paths of the targets that something was written to, each once."""
        kept, rows = self._kept, [i for first, last in self._written for i in range(first, last)]
        boxes = np.array([kept.box[i] for i in rows if kept.address[i] >= 0], dtype=np.int64)
        requests = distinct(self._request_of[boxes])
        paths = [self._requests[number].path for number in requests.tolist()]
        # A request may have a target for each of its boxes.
        paths += [t.path for each in self._targets.values() for t in each if t.is_touched]
        return list(dict.fromkeys(paths))

    def _order_reads(self, plan: ReadPlan, position: int, kept: IntArray) -> IntArray:
        """Choose a copy for each piece of this rank, and order them by round, file and byte.

        Everything that is looked up per piece becomes a list here: indexing arrays one by one is
        slow.

        Returns:
            `kept`, what this rank keeps, in the order of its pieces.
        """
        self._plan = plan
        files, index = self._files, self._files.index
        pieces = np.flatnonzero(plan.reader == position)
        row = plan.row[pieces]
        if files.has_copies:
            row = self._choose_copies(row)
        file, place = index.file[row], index.start[row] + plan.start[pieces]
        order = np.lexsort((place, file, plan.round[pieces]))
        self._pieces = pieces = pieces[order]
        start, stop = plan.start[pieces], plan.stop[pieces]
        self._row_of_each, self._bounds_of_each = row[order], np.stack([start, stop], axis=1)
        self._rows: list[int] = self._row_of_each.tolist()
        self._bounds = list(zip(start.tolist(), stop.tolist(), strict=True))
        # What this rank keeps of each piece, in the order of the pieces.
        number = np.full(len(plan.row), -1, dtype=np.int64)
        number[pieces] = np.arange(len(pieces))
        kept = kept[np.argsort(number[plan.piece[kept]], kind="stable")]
        self._kept_ptr: list[int] = np.searchsorted(
            number[plan.piece[kept]], np.arange(len(pieces) + 1)
        ).tolist()
        return kept

    def _refuse_drift(self, rows: IntArray) -> None:
        """Raise CorruptionError, or warn, if stored copies of one of these rows differ."""
        files = self._files
        drift = files.copies.drift(files.index, files.manifest, rows)
        if drift and self._on_drift == "raise":
            raise CorruptionError(
                f"{files.storage.describe(files.directory)}: {drift}. Which copy is right "
                f"is not stored; on_drift='warn' loads the first copy on all ranks"
            )
        if drift:
            logging.getLogger("holdfast").warning(
                "rank %s: %s; the first copy is loaded", self._control.rank, drift
            )

    def _choose_copies(self, rows: IntArray) -> IntArray:
        """The copy of each row that this rank reads."""
        files, control = self._files, self._control
        host_of = dict(zip(control.ranks, self._hosts, strict=True))
        writers = [info.writer for info in files.manifest.files]
        here = self._hosts[control.index]
        return choose_copies(
            files.index,
            files.copies,
            rows,
            is_own=np.array([writer == control.rank for writer in writers], dtype=np.bool_),
            is_near=np.array([host_of.get(each) == here for each in writers], dtype=np.bool_),
            position=control.index,
        )

    def _find_places(
        self, plan: ReadPlan, numbers: IntArray, kept: IntArray, *, is_alone: bool
    ) -> None:
        """Work out where the kept bytes go: to addresses of plain memory, else to a `Target`.

        Args:
            plan: Of the load.
            numbers: Of the box of each local tensor of the requests, in order; -1 for empty ones.
            kept: As `_order_reads` returns it.
            is_alone: Whether nothing is exchanged, which needs a `Target` for each box.
        """
        piece, overlap = plan.piece[kept], plan.overlap[kept]
        source, at, size = plan.overlaps.run_copies(overlap, plan.start[piece], plan.stop[piece])
        box, is_run = plan.overlaps.request[overlap], plan.overlaps.is_run[overlap]
        forms = self._files.manifest.forms
        stored = [dtype for dtype, *_ in forms.distinct]
        memory, tensor = self._memory, self.boxes.tensor
        dtypes = memory.dtypes
        codes = {name: code for code, name in enumerate(sorted(set(stored)))}
        code_of = {each: codes.get(TORCH_TO_NAME.get(each, ""), -1) for each in set(dtypes)}
        held = np.array([code_of[each] for each in dtypes], dtype=np.int64)
        code_of_form = np.array([codes[name] for name in stored], dtype=np.int64)
        is_alike = held == code_of_form[forms.number[tensor]]
        num_boxes = max(len(plan.requests.boxes), 1)
        counts = np.bincount(numbers[numbers >= 0], minlength=num_boxes)
        # No box that several tensors get, or of which some piece is copied with strides.
        counts[box[~is_run]] = 0
        is_direct = memory.is_plain & is_alike & is_alone
        is_direct &= (numbers >= 0) & (counts[numbers] == 1)
        address = np.full(num_boxes, -1, dtype=np.int64)
        nbytes = np.zeros(num_boxes, dtype=np.int64)
        address[numbers[is_direct]] = memory.address[is_direct]
        nbytes[numbers[is_direct]] = memory.nbytes[is_direct]
        self._request_of = np.zeros(num_boxes, dtype=np.int64)
        self._request_of[numbers[is_direct]] = memory.request[is_direct]
        self._targets = make_targets(
            self._requests,
            memory,
            np.where(is_direct, -1, numbers),
            self._files.manifest.tensors,
            is_gathered=self._has_small_pieces(plan),
        )
        # A kept run goes to an address if its box is plain memory and the run lies inside.
        fits = (address[box] >= 0) & (at + size <= nbytes[box])
        place = np.where(fits, address[box] + at, -1)
        number = np.repeat(np.arange(len(self._pieces)), np.diff(self._kept_ptr))
        piece_nbytes = self._bounds_of_each[:, 1] - self._bounds_of_each[:, 0]
        is_whole = (place >= 0) & is_run & (size == piece_nbytes[number])
        self._kept = _Kept(
            piece=number.tolist(),
            overlap=overlap.tolist(),
            box=box.tolist(),
            is_run=is_run.tolist(),
            source=np.where(is_run, source, 0),
            at=at.tolist(),
            nbytes=size,
            address=place,
            num_others=np.concatenate([[0], np.cumsum(place < 0)]),
            num_parts=np.concatenate([[0], np.cumsum(~is_whole)]),
        )

    def _join_reads(self, plan: ReadPlan) -> None:
        """Choose which pieces are read together, and which reads one thread does in a row.

        Small pieces of one round and one file, next to each other, are one read, through a buffer.
        Reads of which all goes as it is to plain memory are done in a row: they take steps through
        the files, whatever tensors a step has bytes of.
        """
        row, (start, stop) = self._row_of_each, self._bounds_of_each.T
        index, rounds, size = self._files.index, plan.round[self._pieces], stop - start
        file = (rounds + 1) * len(self._files.manifest.files) + index.file[row]
        cuts = join_neighbours(
            file, index.start[row] + start, size, range_nbytes=plan.request_nbytes
        )
        before, kept = np.concatenate([[0], np.cumsum(size)]), np.array(self._kept_ptr)[cuts]
        # Of each piece something is kept: as many rows as pieces are one of each.
        is_plain = np.diff(kept) == np.diff(cuts)
        is_plain &= np.diff(self._kept.num_parts[kept]) == 0
        at, share = before[cuts], self.nbytes_needed // (4 * self._num_threads)
        runs = join_runs(
            np.zeros_like(at[:-1]),
            at[:-1],
            np.diff(at),
            most=max(min(share, _RUN_NBYTES), _MIN_RUN_NBYTES),
            is_apart=~is_plain,
        )
        self._cuts: list[int] = cuts.tolist()
        self._runs, self._round_of_run = runs, rounds[cuts[runs[:-1]]]
        # Where what is kept starts in the bytes that are read together.
        number = np.array(self._kept.piece, dtype=np.int64)
        first = cuts[np.searchsorted(cuts, number, side="right") - 1]
        self._begin = before[number] - before[first] + self._kept.source

    def _has_small_pieces(self, plan: ReadPlan) -> BoolArray:
        """(boxes,) whether each requested box is filled by several pieces, most of them small."""
        boxes = plan.requests.boxes
        num_pieces = np.bincount(plan.overlaps.request[plan.overlap], minlength=len(boxes))
        nbytes = boxes.numel() * self._itemsize[boxes.tensor]
        is_small: BoolArray = (num_pieces > 1) & (nbytes < num_pieces * DIRECT_NBYTES)
        return is_small

    def _reads_of(self, number: int) -> list[range]:
        """The reads of a round, by number, that one thread does one after another."""
        first, last = np.searchsorted(self._round_of_run, [number, number + 1]).tolist()
        return [range(a, b) for a, b in pairwise(self._runs[first : last + 1].tolist())]

    def _run_rounds(self, pool: ThreadPoolExecutor) -> Exception | None:
        """Read what is kept, then each round while the one before is exchanged; an own error."""
        alone = [pool.submit(self._read, pieces, None) for pieces in self._reads_of(_ALONE)]
        if self._transfers is None or not self._plan.num_rounds:
            return first_error(alone)
        following, late = self._start(self._transfers, 0, pool)
        error = first_error(alone) or late
        for number in range(self._plan.num_rounds):
            current = following
            error = error or first_error(current.reads)
            if error is None and number + 1 < self._plan.num_rounds:
                following, error = self._start(self._transfers, number + 1, pool)
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
        return error

    def _start(
        self, transfers: RankTransfers, number: int, pool: ThreadPoolExecutor
    ) -> tuple[Round, Exception | None]:
        """Make a round's messages and start to read its pieces."""
        current = Round(transfers, number, self._targets)
        try:
            current.prepare()
            reads = self._reads_of(number)
            current.reads += [pool.submit(self._read, pieces, current) for pieces in reads]
        except Exception as caught:
            # Reads that are in flight finish by themselves; the pool waits for them.
            return current, caught
        return current, None

    def _read(self, reads: range, messages: Round | None) -> None:
        """Read and distribute pieces that lie next to each other, unless a read has failed."""
        if self._has_failed.is_set():
            return
        try:
            if messages is None and self._read_plain(reads):
                return
            for cut in reads:
                self._read_pieces(range(self._cuts[cut], self._cuts[cut + 1]), messages)
        except BaseException:  # an interrupt, too, must stop the other threads
            self._has_failed.set()
            raise

    def _read_plain(self, reads: range) -> bool:
        """Read what goes as it is to plain memory, each piece to its own, by as few calls as the
        bytes need; return False if something goes elsewhere, or the source has no such call."""
        numbers = slice(self._cuts[reads.start], self._cuts[reads.stop])
        first, last = self._kept_ptr[numbers.start], self._kept_ptr[numbers.stop]
        num_parts = self._kept.num_parts
        # Of each piece something is kept: as many rows as pieces are one of each.
        is_plain = last - first == numbers.stop - numbers.start
        if not is_plain or num_parts[first] != num_parts[last]:
            return False
        if not self._files.fills_views(self._rows[numbers.start]):
            return False
        self._written.append((first, last))
        self._files.read_views(
            self._row_of_each[numbers],
            self._bounds_of_each[numbers],
            self._kept.address[first:last],
            verify=self._verify,
        )
        return True

    def _read_pieces(self, numbers: range, messages: Round | None) -> None:
        """Read pieces, keep what this rank requests of each, and pack what it sends."""
        rows = self._rows[numbers.start : numbers.stop]
        bounds = self._bounds[numbers.start : numbers.stop]
        first, last = self._kept_ptr[numbers.start], self._kept_ptr[numbers.stop]
        nbytes = sum(stop - start for start, stop in bounds)
        # Straight into the target if possible: no copy, and no page of a buffer to touch first.
        data = self._whole_place(first, last, nbytes)
        is_in_place = data is not None
        if data is None:
            data = host_memory(nbytes) if messages is not None else self._scratch(nbytes)
        strips = None
        if len(rows) == 1 and messages is None and not is_in_place and not self._verify:
            needed = self._kept.overlap[first:last]
            strips = self._plan.overlaps.strips(needed, *bounds[0], max_gap=_PAGE_NBYTES)
        self._files.read_pieces(rows, bounds, data, verify=self._verify, strips=strips)
        if not is_in_place:
            self._keep(first, last, data)
        if messages is not None:
            at = 0
            for piece, (start, stop) in zip(self._pieces[numbers].tolist(), bounds, strict=True):
                # A piece that is sent is sent from where it lies now, the target included.
                messages.pack(piece, data[at : at + stop - start])
                at += stop - start

    def _scratch(self, nbytes: int) -> memoryview:
        """The buffer of this thread: memory that is used again stays in the cache."""
        buffer: memoryview | None = getattr(self._local, "buffer", None)
        if buffer is None or len(buffer) < nbytes:
            buffer = self._local.buffer = np.empty(nbytes, dtype=np.uint8).data
        return buffer[:nbytes]

    def _whole_place(self, first: int, last: int, nbytes: int) -> memoryview | None:
        """The memory that a joint read belongs into as it is, if there is."""
        if last != first + 1:
            return None
        kept = self._kept
        box, at = kept.box[first], kept.at[first]
        size, address = int(kept.nbytes[first]), int(kept.address[first])
        if not kept.is_run[first] or size != nbytes:
            return None
        if address >= 0:
            self._written.append((first, last))
            return memory_at(address, nbytes)
        targets = self._targets[box]
        return targets[0].region(at, at + size) if takes_as_it_is(targets) else None

    def _keep(self, first: int, last: int, data: memoryview) -> None:
        """Copy what this rank requests of a joint read to its targets."""
        base = ctypes.addressof(ctypes.c_char.from_buffer(data)) if len(data) else 0
        overlaps, kept = self._plan.overlaps, self._kept
        self._written.append((first, last))
        columns: list[Any] = [
            kept.address[first:last], base + self._begin[first:last], kept.nbytes[first:last]
        ]  # fmt: skip
        # The plan has checked every bound.
        if kept.num_others[first] == kept.num_others[last]:
            copy_ranges(*join_ranges(*columns))
            return
        columns = [each.tolist() for each in columns]
        columns += [
            each[first:last] for each in (kept.piece, kept.overlap, kept.box, kept.is_run, kept.at)
        ]
        for address, source, nbytes, piece, overlap, box, is_run, at in zip(*columns, strict=True):
            start = source - base
            if address >= 0:
                ctypes.memmove(address, source, nbytes)
            elif is_run:
                for target in self._targets[box]:
                    target.put(at, data[start : start + nbytes])
            else:
                size = int(overlaps.itemsize[overlap])
                for copy in overlaps.strided_copies(overlap, *self._bounds[piece]):
                    values = elements(data[start:], copy.start, copy.shape, size)[copy.source]
                    for target in self._targets[box]:
                        target.put_strided(copy, values, size)


def requested_boxes(requests: Sequence[TensorRequest], forms: TensorForms) -> BoxTable:
    """The boxes of one rank's requests, one row for each of their local tensors, in order."""
    # As wide as the widest tensor of the checkpoint, so that tables of all ranks fit together.
    num_dims = max(1, forms.num_dims)
    of_each, boxes_of, locals_ = (list(map(attrgetter(n), requests)) for n in _REQUESTED)
    counts = np.fromiter(map(len, locals_), np.int64, len(requests))
    tensors = np.array(of_each, dtype=np.int64)
    tensor = np.repeat(tensors, counts)
    offset = np.zeros((len(tensor), num_dims), dtype=np.int64)
    extent = forms.shapes(num_dims)[tensor]
    # Requests for whole tensors are complete. Of the others many have the same boxes.
    ids = np.array(list(map(id, boxes_of)), dtype=np.int64)
    cut = ids != id(None)
    if cut.any():
        _, firsts, number = np.unique(ids[cut], return_index=True, return_inverse=True)
        distinct = [boxes_of[i] or () for i in np.flatnonzero(cut)[firsts].tolist()]
        boxes = [box for each in distinct for box in each]
        sizes = np.array(list(map(len, distinct)), dtype=np.int64)
        which, place = enumerate_ranges(counts[cut])
        rows = (np.cumsum(counts) - counts)[cut][which] + place
        at = (np.cumsum(sizes) - sizes)[number][which] + place
        offset[rows] = pad_shapes([box.offset for box in boxes], num_dims, fill=0)[at]
        extent[rows] = pad_shapes([box.shape for box in boxes], num_dims)[at]
    return BoxTable(tensor=tensor, offset=offset, extent=extent)


def first_error(reads: Sequence[Future[None]]) -> Exception | None:
    """Wait for all reads; return the error of the first one that failed.

    What is not an `Exception`, as a client's CancelledError, is raised: it has stopped the other
    reads, too.
    """
    errors = [read.exception() for read in reads]
    for error in errors:
        if not isinstance(error, Exception | None):
            raise error
    return next((error for error in errors if isinstance(error, Exception)), None)


def num_reading_threads(num_local_ranks: int) -> int:
    """Threads that read and hash on each of so many ranks of this machine: its cores divided."""
    # The cores that this process may use, not those of the machine: containers have fewer.
    cores = len(os.sched_getaffinity(0))
    return max(1, min(_MAX_THREADS, cores // max(num_local_ranks, 1)))
