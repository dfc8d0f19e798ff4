"""Reading a committed checkpoint: any box of any tensor, byte ranges only, every block verified."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import TracebackType

import numpy as np
import numpy.typing as npt

from holdfast.arrays.boxes import Box
from holdfast.errors import CorruptionError, HoldfastError, MismatchError, StorageError
from holdfast.format.blocks import BlockReader, ChunkRead
from holdfast.format.digest import digest128
from holdfast.format.dtypes import DTYPES
from holdfast.format.index import ChunkIndex, decode_index, describe_row, validate_index
from holdfast.format.manifest import MAX_MANIFEST_NBYTES, Manifest, TensorInfo, decode_manifest
from holdfast.format.names import INDEX, MANIFEST
from holdfast.format.values import Node
from holdfast.format.versions import Identity, pin_version
from holdfast.storage import Source, Storage

Ints = npt.NDArray[np.int64]
_NUM_LOOKS = 5


@dataclass(slots=True, kw_only=True)
class ReadStats:
    """What reading has cost so far; `fallbacks` tells every bad copy that another one replaced."""

    opens: int = 0
    nbytes_read: int = 0
    nbytes_needed: int = 0
    fallbacks: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Records:
    """The two records of a checkpoint as stored; enough to open it elsewhere without reading.

    `decoded`: the manifest's bytes decoded and proven, where that has been done.
    """

    manifest: bytes
    index: bytes
    decoded: Manifest | None = None


def read_manifest(storage: Storage, directory: str) -> tuple[bytes, Manifest]:
    """The manifest of a checkpoint, as bytes and decoded; its digest is checked. One read.

    Raises as `read_records`.
    """
    path = _join(directory, MANIFEST)
    if not storage.exists(path):
        raise StorageError(
            f"{storage.describe(directory)} is not a committed checkpoint: it has no {MANIFEST}"
        )
    place = storage.describe(path)
    if storage.size(path) > MAX_MANIFEST_NBYTES:
        raise CorruptionError(f"{place}: larger than the limit of {MAX_MANIFEST_NBYTES} bytes")
    data = storage.read(path)
    return data, decode_manifest(data, place=place)


def read_records(storage: Storage, directory: str) -> Records:
    """Read manifest and index of a checkpoint and check the digests of both.

    Both are of one version, also when it is replaced just then. `directory` is relative to the
    storage, "" for its root. Two reads. Raises StorageError when it is not a committed checkpoint,
    CorruptionError when a record is damaged.
    """
    if not storage.exists(_join(directory, MANIFEST)):
        read_manifest(storage, directory)  # which says what is wrong
    with storage.pin(directory) as held:
        return _read_records(held, directory)


def _read_records(storage: Storage, directory: str) -> Records:
    data, decoded = read_manifest(storage, directory)
    index_path = _join(directory, INDEX)
    info = decoded.index
    place = storage.describe(index_path)
    if not storage.exists(index_path):
        raise CorruptionError(f"{place}: missing, though the manifest lists it")
    if storage.size(index_path) != info.nbytes:
        raise CorruptionError(
            f"{place}: has {storage.size(index_path)} bytes, the manifest states {info.nbytes}"
        )
    index = storage.read(index_path)
    _check_index_digest(index, info.digest, place)
    return Records(manifest=data, index=index, decoded=decoded)


def _check_index_digest(index: bytes, digest: str, place: str) -> None:
    if digest128(index) != digest:
        raise CorruptionError(f"{place}: damaged: its digest is not the one in the manifest")


def _join(directory: str, name: str) -> str:
    return f"{directory}/{name}" if directory else name


class Snapshot:
    """One committed checkpoint, open for reading. A context manager: closes its data files.

    Data files are opened on first use and kept open, all from the one directory that `identity`
    was found in, so that a checkpoint that is replaced meanwhile is read as it was. Any number of
    threads may read at once. Without a lease (`lease_checkpoint`) that version may be removed; then
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
        self._blocks = BlockReader(block_nbytes=manifest.block_nbytes)
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
            place = storage.describe(_join(directory, MANIFEST))
            manifest = decode_manifest(records.manifest, place=place)
        place = storage.describe(_join(directory, INDEX))
        _check_index_digest(records.index, manifest.index.digest, place)
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

    def rows_of(self, key: str) -> Ints:
        """Index rows of a tensor, all copies, in the order of the index."""
        tensor = self.tensor_id(key)
        return self._rows[self._bounds[tensor] : self._bounds[tensor + 1]]

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
        """Fill `out` (C-contiguous bytes of the box, row-major) with a box of a tensor.

        Reads only the digest blocks that hold wanted bytes (without `verify`, little more than the
        wanted bytes), straight into `out` where a stored run is contiguous there, else through a
        buffer of some MiB per thread. Of several copies those in `prefer_files` come first; one
        that is damaged or missing is replaced by the next and noted in `stats.fallbacks`. Raises
        CorruptionError naming tensor, file and byte when no copy is good; `out` is then undefined.
        """
        tensor = self.tensor_id(key)
        info = self.manifest.tensors[tensor]
        itemsize = DTYPES[info.dtype].itemsize
        target = self._check_request(info, box, out, itemsize)
        self._count(needed=target.nbytes)
        if target.nbytes == 0:
            return
        lo, hi = self._bounds[tensor], self._bounds[tensor + 1]
        ndim = len(info.shape)
        if hi - lo == 1:
            row = int(self._rows[lo])
            chunk = self.index.box(row, ndim=ndim)
            self._read_any([row], chunk, box, target, itemsize, verify)
            return
        missing = box.numel
        for chunk, rows in self._chunks_within(self._rows[lo:hi], box, prefer_files):
            common = chunk.intersect(box)
            if common is not None:
                self._read_any(rows, chunk, box, target, itemsize, verify)
                missing -= common.numel
        if missing:
            raise CorruptionError(
                f"tensor {key!r}: {missing} elements of {box} are covered by no chunk"
            )

    @property
    def copies(self) -> Mapping[int, tuple[int, ...]]:
        """Primary row -> all rows of its box, itself first; only boxes stored more than once."""
        if self._copies is None:
            self._copies = _find_copies(self.index)
        return self._copies

    def read_pieces(
        self,
        rows: Sequence[int],
        bounds: Sequence[tuple[int, int]],
        out: memoryview,
        *,
        verify: bool,
    ) -> None:
        """Fill `out` with pieces that lie one behind the other in one file, in one read.

        Piece i is bytes `bounds[i]` of the payload of `rows[i]`. With `verify` it begins at a
        digest block and ends at one or at the end of the payload, and every block is checked. A
        piece that is damaged or cannot be read is replaced from another copy of its box, which is
        noted in `stats.fallbacks`; CorruptionError naming tensor, file and byte when there is none
        that is good; `out` is then undefined. Any number of threads may call.
        """
        first = rows[0]
        bad: list[int] = []
        try:
            source = self._source(int(self.index.file[first]))
            source.readinto(out, start=int(self.index.start[first]) + bounds[0][0])
            self._count(read=len(out))
            if verify:
                bad = self._blocks.find_damaged(self.index, rows, bounds, out)
        except (CorruptionError, StorageError):
            bad = list(range(len(rows)))
        at = 0
        position = 0
        for number in bad:
            while position < number:
                at += bounds[position][1] - bounds[position][0]
                position += 1
            start, stop = bounds[number]
            self._read_again(rows[number], start, stop, out[at : at + stop - start], verify)

    def _read_again(self, row: int, start: int, stop: int, out: memoryview, verify: bool) -> None:
        """One piece on its own, from the row itself or any other copy of its box."""
        box = self.index.box(row, ndim=len(self.manifest.tensors[self.index.tensor[row]].shape))
        rows = [row, *(other for other in self._all_copies(row) if other != row)]

        def read(request: ChunkRead) -> int:
            return self._blocks.read_run(request, start, stop, out)

        self._first_good(rows, box, box, read, itemsize=1, verify=verify)

    def _all_copies(self, row: int) -> tuple[int, ...]:
        if row in self.copies:
            return self.copies[row]
        return next((rows for rows in self.copies.values() if row in rows), (row,))

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

    def _chunks_within(
        self, rows: Ints, box: Box, prefer_files: Collection[int]
    ) -> list[tuple[Box, list[int]]]:
        """The distinct chunks that meet a box, each with its copies, best first."""
        ndim = box.ndim
        offset, extent = self.index.offset[rows, :ndim], self.index.extent[rows, :ndim]
        lo, hi = np.array(box.offset), np.array(box.stop)
        near = np.flatnonzero(((offset < hi) & (offset + extent > lo)).all(axis=1))
        found: dict[Box, list[int]] = {}
        for row in rows[near].tolist():
            found.setdefault(self.index.box(row, ndim=ndim), []).append(row)
        return [(chunk, self._best_first(copies, prefer_files)) for chunk, copies in found.items()]

    def _best_first(self, rows: list[int], prefer_files: Collection[int]) -> list[int]:
        if len(rows) == 1:
            return rows
        file, copy = self.index.file, self.index.copy
        return sorted(rows, key=lambda row: (int(file[row]) not in prefer_files, int(copy[row])))

    def _read_any(
        self,
        rows: Sequence[int],
        chunk: Box,
        box: Box,
        target: memoryview,
        itemsize: int,
        verify: bool,
    ) -> None:
        """Read what a chunk gives to a box from the first copy that is good."""

        def read(request: ChunkRead) -> int:
            return self._blocks.read(request, target)

        self._first_good(rows, chunk, box, read, itemsize=itemsize, verify=verify)

    def _first_good(
        self,
        rows: Sequence[int],
        chunk: Box,
        box: Box,
        read: Callable[[ChunkRead], int],
        *,
        itemsize: int,
        verify: bool,
    ) -> None:
        problems: list[HoldfastError] = []
        for row in rows:
            try:
                request = ChunkRead(
                    source=self._source(int(self.index.file[row])),
                    start=int(self.index.start[row]),
                    nbytes=int(self.index.nbytes[row]),
                    digests=self.index.digests(row) if verify else None,
                    chunk=chunk,
                    box=box,
                    itemsize=itemsize,
                )
                self._count(read=read(request))
            except (CorruptionError, StorageError) as error:
                problems.append(self._damage(row, error))
                continue
            if problems:
                with self._lock:
                    self.stats.fallbacks += [str(problem) for problem in problems]
            return
        if not self.is_in_place():
            raise StorageError(
                f"{self.storage.describe(self.directory)} has been replaced or removed while it "
                f"was read: read it again ({problems[0]})"
            ) from problems[0]
        others = "".join(f"; copy: {problem}" for problem in problems[1:])
        raise CorruptionError(f"{problems[0]}{others}") from problems[0]

    def _damage(self, row: int, error: HoldfastError) -> CorruptionError:
        what = f"{describe_row(self.index, self.manifest, row)}: {error}"
        damage = CorruptionError(f"{self.storage.describe(self.directory)}: {what}")
        damage.__cause__ = error
        return damage

    def is_in_place(self) -> bool:
        """Whether this version still has its final name; one small read."""
        return self._identity.is_of(self.storage, self.directory)

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
                source = held.open(_join(directory, info.name))
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
