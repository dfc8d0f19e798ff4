"""Reading a committed checkpoint: any box of any tensor, byte ranges only, every block verified."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from types import TracebackType

import numpy as np

from holdfast.arrays.box_table import BoxTable
from holdfast.arrays.boxes import Box, contiguous_start
from holdfast.arrays.types import IntArray
from holdfast.errors import CorruptionError, HoldfastError, MismatchError, StorageError
from holdfast.format.byte_ranges import (
    PIECE_NBYTES,
    Overlaps,
    elements,
    find_overlaps,
    join_neighbours,
    requested_ranges,
    split_ranges,
)
from holdfast.format.digest import find_wrong_block, num_blocks
from holdfast.format.dtypes import DTYPES
from holdfast.format.index import ChunkIndex, decode_index, describe_row, validate_index
from holdfast.format.manifest import Manifest, TensorInfo, decode_manifest
from holdfast.format.names import INDEX, MANIFEST
from holdfast.format.values import Node
from holdfast.format.versions import (
    Identity,
    Records,
    check_index_digest,
    join_path,
    pin_version,
    read_records,
)
from holdfast.storage import Source, Storage

_NUM_LOOKS = 5
_UNVERIFIED_GAP_NBYTES = 64 << 10
"""Without verification, requested runs no farther apart than this are read in one piece."""


@dataclass(slots=True, kw_only=True)
class ReadStats:
    """What reading has cost so far; `fallbacks` names each damaged copy that was replaced."""

    opens: int = 0
    nbytes_read: int = 0
    nbytes_needed: int = 0
    fallbacks: list[str] = field(default_factory=list)


class Snapshot:
    """One committed checkpoint, open for reading. A context manager: closes its data files.

    Data files are opened on first use and kept open, all from the one directory that `identity`
    was found in, so that a checkpoint that is replaced meanwhile is read as it was. Any number of
    threads may read at once. Without a lease (`read_lease`) that version may be removed; then
    a read raises StorageError and says so.
    """

    def __init__(
        self,
        storage: Storage,
        directory: str,
        *,
        manifest: Manifest,
        index: ChunkIndex,
        identity: Identity,
    ) -> None:
        self._identity = identity
        self._pin = ExitStack()
        self._held: tuple[Storage, str] | None = None
        self.storage = storage
        self.directory = directory
        self.manifest = manifest
        self.index = index
        self.stats = ReadStats()
        self._ids = {tensor.key: i for i, tensor in enumerate(manifest.tensors)}
        self._rows = np.argsort(index.tensor, kind="stable")
        bounds = np.searchsorted(index.tensor[self._rows], np.arange(len(manifest.tensors) + 1))
        self._bounds: list[int] = bounds.tolist()
        self._sources: dict[int, Source] = {}
        self._lock = threading.Lock()
        self._block_nbytes = manifest.block_nbytes
        self._local = threading.local()
        self._copies: dict[int, tuple[int, ...]] | None = None

    @classmethod
    def open(cls, storage: Storage, directory: str) -> Snapshot:
        """Open and prove a checkpoint: digests, version, bounds, tiling; no data file is touched.

        Raises StorageError when it is not a committed checkpoint, CorruptionError for damage.
        """
        for left in reversed(range(_NUM_LOOKS)):
            records = read_records(storage, directory)
            try:
                return cls.from_records(storage, directory, records=records)
            except StorageError:  # replaced between the two looks
                if not left:
                    raise
        raise StorageError(f"{storage.describe(directory)} is replaced too often to be opened")

    @classmethod
    def from_records(
        cls, storage: Storage, directory: str, *, records: Records, proven: bool = False
    ) -> Snapshot:
        """Open a checkpoint whose records were read elsewhere, for example by another rank.

        `proven` skips the proof of the table (about a second for a million rows) when the sender
        has made it; digests are checked in any case. Raises StorageError when this version is not
        there any more.
        """
        manifest = records.decoded
        if manifest is None:
            place = storage.describe(join_path(directory, MANIFEST))
            manifest = decode_manifest(records.manifest, place=place)
        place = storage.describe(join_path(directory, INDEX))
        check_index_digest(records.index, manifest.index.digest, place)
        index = decode_index(records.index, place=place)
        if not proven:
            validate_index(index, manifest)
        identity = Identity.of(records.manifest)
        snapshot = cls(storage, directory, manifest=manifest, index=index, identity=identity)
        snapshot._hold()
        return snapshot

    def __enter__(self) -> Snapshot:
        """The snapshot itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the data files."""
        self.close()

    def close(self) -> None:
        """Close the data files and the directory; a later read opens them again."""
        with self._lock:
            for source in self._sources.values():
                source.close()
            self._sources.clear()
            self._pin.close()
            self._held = None

    @property
    def keys(self) -> list[str]:
        """Keys of all tensors, in the order of the manifest."""
        return list(self._ids)

    def has(self, key: str) -> bool:
        """Whether a tensor of that key is stored."""
        return key in self._ids

    def tensor_id(self, key: str) -> int:
        """Position of a tensor in the manifest's table; MismatchError when there is none."""
        try:
            return self._ids[key]
        except KeyError:
            raise MismatchError(
                f"tensor {key!r} is not in {self.storage.describe(self.directory)}"
            ) from None

    def tensor(self, key: str) -> TensorInfo:
        """What the manifest says of a tensor; MismatchError when there is none."""
        return self.manifest.tensors[self.tensor_id(key)]

    def rows_of(self, key: str) -> IntArray:
        """Index rows of a tensor, all copies, in the order of the index."""
        tensor = self.tensor_id(key)
        return np.asarray(self._rows[slice(*self._bounds[tensor : tensor + 2])])

    def read_values(self, part: str) -> Node:
        """The tree of a part as a node; MismatchError when there is no such part."""
        try:
            node: Node = self.manifest.parts[part]
        except KeyError:
            raise MismatchError(
                f"part {part!r} is not in {self.storage.describe(self.directory)}; "
                f"it has {list(self.manifest.parts)}"
            ) from None
        return node

    def read_box(
        self,
        key: str,
        box: Box,
        out: memoryview,
        *,
        verify: bool = True,
        prefer_files: Collection[int] = (),
    ) -> None:
        """Fill `out` with a box of a tensor.

        Reads only the digest blocks that hold bytes of the box, straight into `out` where they
        belong there as they are, else through a buffer. A copy that is damaged or missing is
        replaced by another one and noted in `stats.fallbacks`. Any number of threads may call.

        Args:
            key: The tensor.
            box: What to read of it, in its coordinates.
            out: C-contiguous bytes of the box, row-major; undefined after an error.
            verify: Check every block read; without it, little more than the box is read.
            prefer_files: Files to read from where a chunk is stored more than once.

        Raises:
            MismatchError: For an unknown key, or a box or buffer that does not fit.
            CorruptionError: Where no copy is good, naming tensor, file and byte.

        Cost: a buffer of at most 4 MiB (one digest block, if larger) for each thread; opens each
        data file once for the snapshot.
        """
        tensor = self.tensor_id(key)
        info = self.manifest.tensors[tensor]
        itemsize = DTYPES[info.dtype].itemsize
        target = self._check_request(info, box, out, itemsize)
        self._count(needed=target.nbytes)
        if target.nbytes == 0:
            return
        rows = self._rows_within(tensor, box)
        if len(rows) == 1:
            # A run of one chunk needs no plan: so are nearly all reads of tools, which go chunk by
            # chunk, and planning takes as long as reading some hundred KiB.
            start = contiguous_start(box, self.index.box(int(rows[0]), ndim=box.ndim))
            if start is not None:
                row = self.choose_copy(int(rows[0]), prefer_files)
                self._read_run(row, start * itemsize, target, verify)
                return
        num_dims = max(self.index.num_dims, 1)
        requested = BoxTable.from_boxes([tensor], [box], num_dims=num_dims)
        zeros = np.zeros(len(rows), dtype=np.int64)
        sizes = np.broadcast_to(np.int64(itemsize), len(self.manifest.tensors))
        overlaps = find_overlaps(self.index, requested, sizes, request=zeros, row=rows)
        shape = tuple(requested.extent[0].tolist())
        self._read_overlaps(overlaps, target, shape, verify, prefer_files)

    def _rows_within(self, tensor: int, box: Box) -> IntArray:
        """Rows of the chunks that a box overlaps, the primary copy of each."""
        rows: IntArray = self._rows[self._bounds[tensor] : self._bounds[tensor + 1]]
        if len(rows) == 1:
            return rows
        index, ndim = self.index, box.ndim
        offset = index.offset[rows, :ndim]
        inside = (offset < box.stop) & (offset + index.extent[rows, :ndim] > box.offset)
        within: IntArray = rows[inside.all(axis=1) & (index.copy[rows] == 0)]
        return within

    def _read_run(self, row: int, start: int, out: memoryview, verify: bool) -> None:
        """Bytes of a payload from `start` on: blocks straight into `out`, cut ones by a buffer."""
        nbytes, stop = int(self.index.nbytes[row]), start + len(out)
        block = self._block_nbytes if verify else 1
        step = max(PIECE_NBYTES // block, 1) * block
        last = stop if stop == nbytes else stop // block * block
        at = start
        while at < stop:
            begin = at // block * block
            if at == begin and at < last:
                end = min(at + step, last)
                self.read_pieces([row], [(at, end)], out[at - start : end - start], verify=verify)
            else:
                end = min(begin + block, nbytes)
                data = self._scratch(end - begin)
                self.read_pieces([row], [(begin, end)], data, verify=verify)
                end = min(end, stop)
                out[at - start : end - start] = data[at - begin : end - begin]
            at = end

    def _read_overlaps(
        self,
        overlaps: Overlaps,
        target: memoryview,
        shape: tuple[int, ...],
        verify: bool,
        prefer_files: Collection[int],
    ) -> None:
        """Read pieces of chunks in the order of the files and copy what the box has of each."""
        index, itemsize = self.index, int(overlaps.itemsize[0])
        nbytes = index.nbytes[overlaps.row]
        block = self._block_nbytes
        grain, max_gap = (block, block) if verify else (1, _UNVERIFIED_GAP_NBYTES)
        start, stop, owner = requested_ranges(overlaps, nbytes, grain=grain, max_gap=max_gap)
        start, stop, number = split_ranges(start, stop, grain=grain)
        owner = owner[number]
        row = overlaps.row
        if self.copies:
            row = np.array([self.choose_copy(r, prefer_files) for r in row.tolist()])
        row = row[owner]
        place = index.start[row] + start
        order = np.lexsort((place, index.file[row]))
        cuts = join_neighbours(index.file[row[order]], place[order], (stop - start)[order])
        source, at, length = overlaps.run_copies(owner, start, stop)
        is_run = overlaps.is_run[owner]
        is_direct = is_run & (length == stop - start)
        columns = (row, start, stop, owner, source, at, length, is_run, is_direct)
        pieces = list(zip(*(column[order].tolist() for column in columns), strict=True))
        array = elements(target, 0, shape, itemsize)
        for a, b in pairwise(cuts.tolist()):
            rows, bounds = [p[0] for p in pieces[a:b]], [(p[1], p[2]) for p in pieces[a:b]]
            *_, to, count, _, direct = pieces[a]
            if b == a + 1 and direct:
                self.read_pieces(rows, bounds, target[to : to + count], verify=verify)
                continue
            data = self._scratch(sum(end - begin for begin, end in bounds))
            self.read_pieces(rows, bounds, data, verify=verify)
            for _, begin, end, overlap, skip, to, count, run, _ in pieces[a:b]:
                if run:
                    target[to : to + count] = data[skip : skip + count]
                else:
                    for copy in overlaps.strided_copies(overlap, begin, end):
                        values = elements(data, copy.start, copy.shape, itemsize)
                        array[copy.target] = values[copy.source]
                data = data[end - begin :]

    def _scratch(self, nbytes: int) -> memoryview:
        """The buffer of this thread."""
        buffer: memoryview | None = getattr(self._local, "buffer", None)
        if buffer is None or len(buffer) < nbytes:
            capacity = max(nbytes, min(PIECE_NBYTES, 4 * nbytes))
            buffer = self._local.buffer = np.empty(capacity, dtype=np.uint8).data
        return buffer[:nbytes]

    @property
    def copies(self) -> Mapping[int, tuple[int, ...]]:
        """Primary row -> all rows of its box, itself first; only boxes stored more than once."""
        if self._copies is None:
            self._copies = _find_copies(self.index)
        return self._copies

    def choose_copy(self, row: int, prefer_files: Collection[int]) -> int:
        """The copy of a primary row to read: one in a preferred file, else the row itself."""
        copies = self.copies.get(row)
        if copies is None:
            return row
        return next((copy for copy in copies if int(self.index.file[copy]) in prefer_files), row)

    def read_pieces(
        self,
        rows: Sequence[int],
        bounds: Sequence[tuple[int, int]],
        out: memoryview,
        *,
        verify: bool,
    ) -> None:
        """Fill `out` with pieces that lie one behind the other in one file, in one read.

        A piece that is damaged or cannot be read is replaced from another copy of its box, which is
        noted in `stats.fallbacks`. Any number of threads may call.

        Args:
            rows: The index row of each piece.
            bounds: First byte of each piece in the payload of its row, and the byte past its end.
                With `verify`, it begins at a digest block and ends at one or with the payload.
            out: Their bytes, end to end; undefined after an error.
            verify: Check the digest of every block.

        Raises:
            CorruptionError: Where no copy is good, naming tensor, file and byte.
        """
        first = rows[0]
        bad: list[int] = []
        try:
            source = self._source(int(self.index.file[first]))
            source.readinto(out, start=int(self.index.start[first]) + bounds[0][0])
            self._count(read=len(out))
            if verify:
                bad = self._find_damaged(rows, bounds, out)
        except (CorruptionError, StorageError):
            bad = list(range(len(rows)))
        if bad:
            ends = list(itertools.accumulate(stop - start for start, stop in bounds))
        for number in bad:
            start, stop = bounds[number]
            data = out[ends[number] - (stop - start) : ends[number]]
            self._read_again(rows[number], start, stop, data, verify)

    def _find_damaged(
        self, rows: Sequence[int], bounds: Sequence[tuple[int, int]], data: memoryview
    ) -> list[int]:
        """Which pieces, laid end to end in `data`, have a block that is not what was saved."""
        block, digest = self._block_nbytes, self.index.digest
        pointers = self.index.digest_ptr[np.asarray(rows, dtype=np.int64)].tolist()
        damaged, at = [], 0
        for number, ((start, stop), pointer) in enumerate(zip(bounds, pointers, strict=True)):
            first, end = pointer + start // block, at + stop - start
            stated = digest[first : first + num_blocks(stop - start, block)].tolist()
            if find_wrong_block(data[at:end], stated, block) is not None:
                damaged.append(number)
            at = end
        return damaged

    def _read_again(self, row: int, start: int, stop: int, out: memoryview, verify: bool) -> None:
        """One piece on its own, from the row itself or any other copy of its box."""
        group = next((rows for rows in self.copies.values() if row in rows), (row,))
        problems: list[CorruptionError] = []
        for copy in (row, *(other for other in group if other != row)):
            try:
                self._read_piece(copy, start, stop, out, verify)
            except (CorruptionError, StorageError) as error:
                problems.append(self._damage(copy, error))
                continue
            if problems:
                with self._lock:
                    self.stats.fallbacks += [str(problem) for problem in problems]
            return
        if not self._identity.is_of(self.storage, self.directory):
            raise StorageError(
                f"{self.storage.describe(self.directory)} has been replaced or removed while it "
                f"was read: read it again ({problems[0]})"
            ) from problems[0]
        others = "".join(f"; copy: {problem}" for problem in problems[1:])
        raise CorruptionError(f"{problems[0]}{others}") from problems[0]

    def _read_piece(self, row: int, start: int, stop: int, out: memoryview, verify: bool) -> None:
        """One piece of this very copy; CorruptionError naming the byte of a wrong block."""
        place, block = int(self.index.start[row]), self._block_nbytes
        self._source(int(self.index.file[row])).readinto(out, start=place + start)
        self._count(read=len(out))
        if not verify:
            return
        stated = self.index.digests(row)[start // block : num_blocks(stop, block)].tolist()
        at = find_wrong_block(out, stated, block)
        if at is not None:
            raise CorruptionError(
                f"damaged: the {min(block, len(out) - at)} bytes from byte {place + start + at} "
                f"of the file have not the digest of the index"
            )

    def _check_request(
        self, info: TensorInfo, box: Box, out: memoryview, itemsize: int
    ) -> memoryview:
        whole = Box((0,) * len(info.shape), tuple(info.shape))
        if box != whole and not whole.contains(box):
            raise MismatchError(
                f"tensor {info.key!r} has shape {info.shape}: {box} is not inside it"
            )
        nbytes = box.numel * itemsize
        if out.readonly or not out.c_contiguous or out.nbytes != nbytes:
            raise MismatchError(
                f"tensor {info.key!r}: {box} needs a writable contiguous buffer of {nbytes} bytes, "
                f"not one of {out.nbytes}"
            )
        return out if (out.format == "B" and out.ndim == 1) or not nbytes else out.cast("B")

    def _damage(self, row: int, error: HoldfastError) -> CorruptionError:
        what = f"{describe_row(self.index, self.manifest, row)}: {error}"
        damage = CorruptionError(f"{self.storage.describe(self.directory)}: {what}")
        damage.__cause__ = error
        return damage

    def _hold(self) -> tuple[Storage, str]:
        """The directory that this version is in, held open, and its name when that was done."""
        if self._held is None:
            version = pin_version(self.storage, self.directory, self._identity)
            self._held = self._pin.enter_context(version)
        return self._held

    def _source(self, file: int) -> Source:
        source = self._sources.get(file)
        if source is not None:
            return source
        with self._lock:
            if file not in self._sources:
                info = self.manifest.files[file]
                held, directory = self._hold()
                source = held.open(join_path(directory, info.name))
                self.stats.opens += 1
                if source.nbytes != info.nbytes:
                    source.close()
                    raise CorruptionError(
                        f"{info.name} has {source.nbytes} bytes, the manifest states {info.nbytes}"
                    )
                self._sources[file] = source
            return self._sources[file]

    def _count(self, *, read: int = 0, needed: int = 0) -> None:
        with self._lock:
            self.stats.nbytes_read += read
            self.stats.nbytes_needed += needed


def _find_copies(index: ChunkIndex) -> dict[int, tuple[int, ...]]:
    """Primary row -> the rows of its box by number of the copy, where there are several."""
    if not (index.copy != 0).any():
        return {}
    boxes = np.column_stack([index.tensor, index.offset, index.extent])
    rows = np.lexsort((index.copy, *boxes.T[::-1]))
    boxes = boxes[rows]
    heads = np.flatnonzero(np.concatenate([[True], (boxes[1:] != boxes[:-1]).any(axis=1)]))
    groups = np.split(rows, heads[1:])
    return {int(group[0]): tuple(group.tolist()) for group in groups if len(group) > 1}
