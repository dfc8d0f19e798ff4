"""Read boxes of tensors from a checkpoint: only the bytes needed, every block verified."""

from __future__ import annotations

import threading
from collections.abc import Collection
from itertools import pairwise

import numpy as np

from holdfast.arrays.box_table import BoxTable
from holdfast.arrays.boxes import Box, contiguous_start
from holdfast.arrays.types import IntArray
from holdfast.errors import MismatchError, some_of
from holdfast.format.byte_ranges import (
    PIECE_NBYTES,
    Overlaps,
    elements,
    find_overlaps,
    join_neighbours,
    requested_ranges,
    split_ranges,
)
from holdfast.format.checkpoint_files import CheckpointFiles
from holdfast.format.dtypes import DTYPES
from holdfast.format.manifest import Manifest, TensorInfo
from holdfast.format.values import Node
from holdfast.format.versions import Records
from holdfast.storage import Storage
from holdfast.storage.reading import range_nbytes

_UNVERIFIED_GAP_NBYTES = 64 << 10
"""Without verification, requested runs at most this far apart are read in one piece."""


class Snapshot(CheckpointFiles):
    """One committed checkpoint, open for reading any box of any tensor.

    Any number of threads may read at once; a context manager closes the data files.
    """

    def __init__(
        self, storage: Storage, directory: str, *, records: Records, manifest: Manifest
    ) -> None:
        super().__init__(storage, directory, records=records, manifest=manifest)
        tensor = self.index.tensor
        self._ids = {info.key: i for i, info in enumerate(manifest.tensors)}
        self._rows = np.argsort(tensor, kind="stable")
        bounds = np.searchsorted(tensor[self._rows], np.arange(len(manifest.tensors) + 1))
        self._bounds: list[int] = bounds.tolist()
        # One buffer for each thread: threads read at once, and allocating one per read costs more.
        self._local = threading.local()

    @property
    def keys(self) -> list[str]:
        """Keys of all tensors, in the order of the manifest."""
        return list(self._ids)

    def has(self, key: str) -> bool:
        """Return True if a tensor with that key is stored."""
        return key in self._ids

    def tensor_id(self, key: str) -> int:
        """Return the position of a tensor in the manifest; MismatchError for an unknown key."""
        try:
            return self._ids[key]
        except KeyError:
            raise MismatchError(
                f"tensor {key!r} is not in {self.storage.describe(self.directory)}"
            ) from None

    def tensor(self, key: str) -> TensorInfo:
        """Return the manifest's entry of a tensor; MismatchError for an unknown key."""
        return self.manifest.tensors[self.tensor_id(key)]

    def rows_of(self, key: str) -> IntArray:
        """Return the index rows of a tensor, all copies, in the order of the index."""
        tensor = self.tensor_id(key)
        return np.asarray(self._rows[slice(*self._bounds[tensor : tensor + 2])])

    def read_values(self, part: str) -> Node:
        """Return the tree of a part as a node; MismatchError for an unknown part."""
        try:
            node: Node = self.manifest.parts[part]
        except KeyError:
            raise MismatchError(
                f"part {part!r} is not in {self.storage.describe(self.directory)}; "
                f"it has {some_of([*self.manifest.parts])}"
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

        Only the digest blocks with bytes of the box are read. They go straight into `out` if they
        belong there as they are, else through a buffer. A damaged or missing copy is replaced by
        another one, and `stats.fallbacks` names it. Any number of threads may call this.

        Args:
            key: The tensor.
            box: The box to read, in the tensor's coordinates.
            out: C-contiguous memory for the box, row-major; undefined after an error.
            verify: Check every block read; without it, little more than the box is read.
            prefer_files: Files to read from if a chunk is stored more than once.

        Raises:
            MismatchError: The key is unknown, or the box or the buffer does not fit.
            CorruptionError: No copy is good; the message names tensor, file and byte.

        Cost: a buffer of at most 4 MiB (or one digest block, if larger) for each thread; opens each
        data file once for the snapshot.
        """
        verify = verify and self.has_digests
        tensor = self.tensor_id(key)
        info = self.manifest.tensors[tensor]
        itemsize = DTYPES[info.dtype].itemsize
        target = self._check_request(info, box, out, itemsize)
        self._count(needed=target.nbytes)
        if target.nbytes == 0:
            return
        rows = self._rows_within(tensor, box)
        if len(rows) == 1:
            # A run of one chunk needs no plan, which would take as long as reading some hundred
            # KiB. Nearly all reads of tools are such runs: they go chunk by chunk.
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
        """Return the rows of the chunks that a box overlaps, primary copies only."""
        rows: IntArray = self._rows[self._bounds[tensor] : self._bounds[tensor + 1]]
        if len(rows) == 1:
            return rows
        index, ndim = self.index, box.ndim
        offset = index.offset[rows, :ndim]
        inside = (offset < box.stop) & (offset + index.extent[rows, :ndim] > box.offset)
        within: IntArray = rows[inside.all(axis=1) & (index.copy[rows] == 0)]
        return within

    def _read_run(self, row: int, start: int, out: memoryview, verify: bool) -> None:
        """Read payload bytes from `start`: whole blocks into `out`, others through a buffer."""
        nbytes, stop = int(self.index.nbytes[row]), start + len(out)
        block = self._block_nbytes if verify else 1
        step = max((range_nbytes(self.storage) or PIECE_NBYTES) // block, 1) * block
        # Whole blocks end here; the payload's last block may be short and is whole nevertheless.
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
        """Read pieces of chunks in the order of the files; copy each one's part of the box."""
        index, itemsize = self.index, int(overlaps.itemsize[0])
        nbytes = index.nbytes[overlaps.row]
        block = self._block_nbytes
        grain, max_gap = (block, block) if verify else (1, _UNVERIFIED_GAP_NBYTES)
        start, stop, owner = requested_ranges(overlaps, nbytes, grain=grain, max_gap=max_gap)
        nbytes_at_once = range_nbytes(self.storage)
        start, stop, number = split_ranges(start, stop, grain=grain, piece_nbytes=nbytes_at_once)
        owner = owner[number]
        row = overlaps.row
        if self.has_copies:
            row = np.array([self.choose_copy(r, prefer_files) for r in row.tolist()])
        row = row[owner]
        place = index.start[row] + start
        # By file and byte: reads then go forwards, and small neighbours are joined in one read.
        order = np.lexsort((place, index.file[row]))
        cuts = join_neighbours(
            index.file[row[order]], place[order], (stop - start)[order],
            range_nbytes=nbytes_at_once,
        )  # fmt: skip
        source, at, length = overlaps.run_copies(owner, start, stop)
        is_run = overlaps.is_run[owner]
        is_direct = is_run & (length == stop - start)
        columns = (row, start, stop, owner, source, at, length, is_run, is_direct)
        pieces = list(zip(*(column[order].tolist() for column in columns), strict=True))
        array = elements(target, 0, shape, itemsize)
        for a, b in pairwise(cuts.tolist()):
            rows, bounds = [p[0] for p in pieces[a:b]], [(p[1], p[2]) for p in pieces[a:b]]
            *_, to, count, _, direct = pieces[a]
            # The whole piece lies in the box as it lies in the file: no buffer, no copy.
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
        """Return `nbytes` of this thread's buffer, which grows and is never zeroed."""
        buffer: memoryview | None = getattr(self._local, "buffer", None)
        if buffer is None or len(buffer) < nbytes:
            capacity = max(nbytes, min(PIECE_NBYTES, 4 * nbytes))
            buffer = self._local.buffer = np.empty(capacity, dtype=np.uint8).data
        return buffer[:nbytes]

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
