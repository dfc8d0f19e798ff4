"""The files of a committed checkpoint: open one version, read pieces, verify blocks."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import numpy as np

from holdfast.arrays.box_table import enumerate_ranges
from holdfast.arrays.distinct import distinct
from holdfast.arrays.memory import MEMORY
from holdfast.arrays.types import IntArray
from holdfast.errors import CorruptionError, HoldfastError, StorageError
from holdfast.format.byte_ranges import join_runs
from holdfast.format.digest import digest64, digest128
from holdfast.format.index import decode_index, describe_row, validate_index
from holdfast.format.manifest import FileInfo, Manifest, decode_manifest, has_digests
from holdfast.format.names import INDEX, MANIFEST
from holdfast.format.stored_copies import Copies, find_copies
from holdfast.format.versions import (
    Identity,
    Records,
    join_path,
    pin_version,
    read_manifest,
    read_records,
)
from holdfast.storage import Source, Storage
from holdfast.storage.reading import fills_views, is_unknown, read_strips, read_views

_NOT_THE_BYTES = "bytes of it do not have the digests of the index"
_STEP_NBYTES = 1 << 20
"""Bytes of a piece that are read and then hashed at a time: they fit a core's cache."""
_STRIDE_NBYTES = 512 << 10
"""Of pieces that each have their own memory, a step has the blocks that begin in so many bytes:
with one of a MiB still fewer than a core's cache holds."""


@dataclass(slots=True, kw_only=True)
class ReadStats:
    """The cost of reading so far; `fallbacks` names each damaged copy that was replaced.

    `ranges` counts the reads, those that failed included. `nbytes_by_file` is by position in the
    manifest's `files`; its sum is `nbytes_read`. Bytes from images are in none of these, but in
    `nbytes_from_images`; `refused_images` names each image that was offered and not used, and why.
    """

    opens: int = 0
    ranges: int = 0
    nbytes_read: int = 0
    nbytes_by_file: Counter[int] = field(default_factory=Counter)
    nbytes_needed: int = 0
    fallbacks: list[str] = field(default_factory=list)
    nbytes_from_images: int = 0
    refused_images: list[str] = field(default_factory=list)


TakeImage = Callable[[FileInfo], Source | None]
"""Gives the bytes of a data file from elsewhere than its storage; None if it has none. StorageError
if it has some that cannot be used."""


class CheckpointFiles:
    """The files of one committed checkpoint, open for reading; a context manager closes them.

    Data files are opened on first use and kept open. All come from the directory of the records, so
    that a checkpoint that is replaced meanwhile is read as it was. Any number of threads may read
    at once. Without a lease (`read_lease`) that version may be removed; then a read raises
    StorageError.

    Args:
        storage: The storage of the checkpoint.
        directory: Its name there.
        records: Its manifest and index as stored.
        manifest: The manifest, decoded.

    Raises:
        CorruptionError: The index is not the one that the manifest states.

    Attributes:
        has_copies: True if any box is stored more than once.
        has_digests: False for a foreign format: then nothing that is read can be verified.
        take_image: Where `read_pieces` looks for the bytes of a data file before it asks the
            storage; None for nowhere.
        stats: The cost of reading so far.
    """

    def __init__(
        self,
        storage: Storage,
        directory: str,
        *,
        records: Records,
        manifest: Manifest,
    ) -> None:
        place = storage.describe(join_path(directory, INDEX))
        if digest128(records.index) != manifest.index.digest:
            raise CorruptionError(f"{place} is damaged: its digest is not the one in the manifest")
        index = decode_index(records.index, place=place)
        self._pin = ExitStack()
        self._held: tuple[Storage, str] | None = None
        self.storage = storage
        self.directory = directory
        self.records = records
        self.manifest = manifest
        self.index = index
        self.stats = ReadStats()
        self._sources: dict[int, Source] = {}
        # For sources, the pin and `stats`, which several reading threads use.
        self._lock = threading.Lock()
        self._block_nbytes = manifest.block_nbytes
        self.has_digests = has_digests(manifest)
        self.has_copies = bool((index.copy != 0).any())
        self._copies: Copies | None = None
        self.take_image: TakeImage | None = None
        self._images: dict[int, Source | None] = {}

    @classmethod
    def open(cls, storage: Storage, directory: str, *, prove: bool = True) -> Self:
        """Open and prove a checkpoint: digests, version, bounds, tiling; no data file is read.

        Args:
            storage: The storage of the checkpoint.
            directory: Its name there; "" for the root.
            prove: Prove the index now; otherwise the caller must call `validate_index`.

        Raises:
            StorageError: It is not a committed checkpoint, or cannot be read.
            CorruptionError: It is damaged.
        """
        with ExitStack() as pin:
            try:
                held = pin.enter_context(storage.pin(directory))
            except StorageError:
                read_manifest(storage, directory)  # raises a better message
                raise
            records, manifest = read_records(held, directory)
            snapshot = cls(storage, directory, records=records, manifest=manifest)
            if prove:
                validate_index(snapshot.index, manifest)
            snapshot._pin, snapshot._held = pin.pop_all(), (held, directory)
        return snapshot

    @classmethod
    def from_records(cls, storage: Storage, directory: str, *, records: Records) -> Self:
        """Open a checkpoint whose records another rank has read and proves.

        Raises:
            StorageError: This version is gone.
            CorruptionError: The records are not those that were stored.
        """
        place = storage.describe(join_path(directory, MANIFEST))
        manifest = decode_manifest(
            records.manifest, place=place, needs_digests=getattr(storage, "has_digests", True)
        )
        snapshot = cls(storage, directory, records=records, manifest=manifest)
        snapshot._hold()
        return snapshot

    def __enter__(self) -> Self:
        """Return the object itself."""
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
            for image in self._images.values():
                if image is not None:
                    image.close()
            self._images.clear()
            self._pin.close()
            self._held = None

    @property
    def copies(self) -> Copies:
        """The boxes that are stored more than once."""
        if self._copies is None:
            self._copies = find_copies(self.index)
        return self._copies

    def nbytes_by_file(self) -> dict[str, int]:
        """Return the bytes read so far from each data file by name; unread files are absent."""
        with self._lock:
            counts = sorted(self.stats.nbytes_by_file.items())
        return {self.manifest.files[file].name: nbytes for file, nbytes in counts}

    def choose_copy(self, row: int, prefer_files: Collection[int]) -> int:
        """Choose the copy of a primary row to read: in a preferred file, else the row itself."""
        if not self.has_copies:
            return row
        rows = self.copies.of_row(row)
        return next((copy for copy in rows if int(self.index.file[copy]) in prefer_files), row)

    def read_pieces(
        self,
        rows: Sequence[int],
        bounds: Sequence[tuple[int, int]],
        out: memoryview,
        *,
        verify: bool,
        strips: Sequence[tuple[int, int]] | None = None,
    ) -> None:
        """Fill `out` with adjacent pieces of one file, in one read.

        The bytes of an image are used if there is one; a piece that is damaged in it is read from
        storage. A piece that is damaged or cannot be read there is replaced from another copy of
        its box, and `stats.fallbacks` names the damage. Any number of threads may call this.

        Args:
            rows: The index row of each piece.
            bounds: First byte of each piece in the payload of its row, and the byte past its end.
                With `verify`, a piece starts at a digest block and ends at one or with the payload.
            out: Memory for the pieces, end to end; undefined after an error.
            verify: Check the digest of every block.
            strips: Of a piece alone that is not verified, what is needed of it, as `read_strips`
                has it; the rest of `out` is undefined. None for all.

        Raises:
            CorruptionError: No copy is good; the message names tensor, file and byte.
        """
        verify = verify and self.has_digests
        if len(rows) > 1:
            size = np.diff(bounds)[:, 0]
            self._read_together(rows, bounds, out, np.cumsum(size) - size, verify, out=out)
            return
        file = int(self.index.file[rows[0]])
        image = self._image(file)
        try:
            self._read_piece(rows[0], *bounds[0], out, verify, image=image, strips=strips)
            return
        except (CorruptionError, StorageError) as error:
            if is_unknown(error) and not self.has_copies:
                raise
        if image is not None:
            self._refuse_image(file, _NOT_THE_BYTES)
        self._read_again(rows[0], *bounds[0], out, verify)

    def fills_views(self, row: int) -> bool:
        """Return True if `read_views` reads pieces of this row's file by one operation a step."""
        file = int(self.index.file[row])
        try:
            return fills_views(self._image(file) or self._source(file))
        except (CorruptionError, StorageError):
            return False  # who reads it meets the error

    def read_views(
        self, rows: IntArray, bounds: IntArray, address: IntArray, *, verify: bool
    ) -> None:
        """As `read_pieces`, with the memory of each piece by itself, and of any number of files.

        Each file is read and hashed by steps, whose bytes stay in the cache, whatever pieces a step
        has bytes of.

        Args:
            rows: (n,) the index row of each piece; in the order of the files.
            bounds: (n, 2) its first byte in the payload of its row, and the byte past its end.
            address: (n,) where it goes in this process's memory, which the caller keeps alive.
            verify: Check the digest of every block.
        """
        self._read_together(rows, bounds, MEMORY, address, verify and self.has_digests)

    def _read_together(
        self,
        rows: Sequence[int] | IntArray,
        bounds: Sequence[tuple[int, int]] | IntArray,
        memory: memoryview,
        begin: IntArray,
        verify: bool,
        *,
        out: memoryview | None = None,
    ) -> None:
        """Read pieces in the order of the files, then those that are damaged one by one, again.

        Args:
            rows: As of `read_pieces`.
            bounds: Likewise.
            memory: What the pieces are read to.
            begin: (n,) the byte of it at which each starts.
            verify: Check the digest of every block.
            out: Memory in which they lie end to end as in one file, and which one read fills; None
                if each has its own.
        """
        rows, bounds = (np.asarray(each, dtype=np.int64) for each in (rows, bounds))
        start, stop = bounds.T
        piece, number, stated = self._blocks(rows, start, stop, verify)
        skip = number * self._block_nbytes
        nbytes = (stop - start)[piece] - skip
        if verify:
            nbytes = np.minimum(nbytes, self._block_nbytes)
        at = begin[piece] + skip
        # All blocks in loops in C, as there may be many small ones.
        blocks = [*map(memory.__getitem__, map(slice, at.tolist(), (at + nbytes).tolist()))]
        file = self.index.file[rows][piece]
        place = (self.index.start[rows] + start)[piece] + skip
        most = _STRIDE_NBYTES if out is None else len(out)
        cuts = join_runs(file, place, nbytes, most=most)
        heads = cuts[:-1]
        columns = (each.tolist() for each in (heads, cuts[1:], file[heads], place[heads]))
        wrong: list[int] = []
        for first, last, file_number, byte in zip(*columns, strict=True):
            some = blocks[first:last]
            image = self._image(file_number)
            try:
                source = image or self._source(file_number)
                size = sum(map(len, some))
                self._count(read=size, file=file_number, is_image=image is not None)
                if out is None:
                    read_views(source, some, start=byte)
                else:
                    source.readinto(out, start=byte)
                digests = [*map(digest64, some)] if verify else []
                if digests == stated[first:last]:
                    continue
                wrong += [i for i, each in enumerate(digests, first) if each != stated[i]]
            except (CorruptionError, StorageError) as error:
                if is_unknown(error) and not self.has_copies:
                    raise  # each further piece would be asked for as long
                wrong += range(first, len(blocks))
            if image is not None:
                self._refuse_image(file_number, _NOT_THE_BYTES)
            if wrong[-1] >= last:
                break  # what could not be read is not tried again, but piece by piece
        for which in distinct(piece[wrong]).tolist():
            first, last = bounds[which].tolist()
            to = int(begin[which])
            self._read_again(int(rows[which]), first, last, memory[to : to + last - first], verify)

    def _blocks(
        self, rows: IntArray, start: IntArray, stop: IntArray, verify: bool
    ) -> tuple[IntArray, IntArray, list[int]]:
        """Return, for each block of pieces, its piece and its number in it; and the digests that
        are stated, if any are checked. Unverified, a piece is one block."""
        if not verify:
            return np.arange(len(rows)), np.zeros(len(rows), dtype=np.int64), []
        # Pieces start at blocks; a payload's last block may be short, so the division of its end is
        # rounded up: -(-a // b).
        first = start // self._block_nbytes
        piece, number = enumerate_ranges(-(-stop // self._block_nbytes) - first)
        stated = self.index.digest[(self.index.digest_ptr[rows] + first)[piece] + number]
        return piece, number, stated.tolist()

    def _read_again(self, row: int, start: int, stop: int, out: memoryview, verify: bool) -> None:
        """Read one piece alone, from the row itself or any other copy of its box."""
        problems: list[CorruptionError] = []
        unknown: HoldfastError | None = None
        # Copies that differ cannot replace each other: `of_row` leaves them out.
        for copy in self.copies.of_row(row) if self.has_copies else (row,):
            try:
                self._read_piece(copy, start, stop, out, verify)
            except (CorruptionError, StorageError) as error:
                problems.append(self._damage(copy, error))
                unknown = error if is_unknown(error) else unknown
                continue
            if problems:
                with self._lock:
                    self.stats.fallbacks += [str(problem) for problem in problems]
            return
        if unknown is not None:
            raise unknown  # a copy that cannot be read now may be good
        if not Identity.of(self.records.manifest).is_of(self.storage, self.directory):
            raise StorageError(
                f"{self.storage.describe(self.directory)} was replaced or removed while it was "
                f"read: read it again ({problems[0]})"
            ) from problems[0]
        others = "".join(f"; copy: {problem}" for problem in problems[1:])
        raise CorruptionError(f"{problems[0]}{others}") from problems[0]

    def _read_piece(
        self,
        row: int,
        start: int,
        stop: int,
        out: memoryview,
        verify: bool,
        *,
        image: Source | None = None,
        strips: Sequence[tuple[int, int]] | None = None,
    ) -> None:
        """Read one piece of this very copy; CorruptionError names the byte of a wrong block.

        Its blocks are read a few at a time and hashed at once, while they are in the cache.
        """
        place, block = int(self.index.start[row]), self._block_nbytes
        file = int(self.index.file[row])
        source = image or self._source(file)
        if strips is not None and not verify:
            nbytes = read_strips(source, out, start=place + start, strips=strips)
            self._count(read=nbytes, file=file, is_image=image is not None)
            return
        self._count(read=len(out), file=file, is_image=image is not None)
        if not verify:
            source.readinto(out, start=place + start)
            return
        stated = self.index.digests(row)[start // block : -(-stop // block)].tolist()
        # Each read of an object is a request, which costs more than a miss of the cache.
        num_blocks = max(getattr(source, "step_nbytes", _STEP_NBYTES) // block, 1)
        step = num_blocks * block
        for at in range(0, len(out), step):
            data = out[at : at + step]
            source.readinto(data, start=place + start + at)
            first = at // block
            wrong = _find_wrong_block(data, stated[first : first + num_blocks], block)
            if wrong is not None:
                raise CorruptionError(
                    f"damaged: the {min(block, len(data) - wrong)} bytes from byte "
                    f"{place + start + at + wrong} of the file do not have the digest of the index"
                )

    def probe(self, file: int, *, start: int, nbytes: int) -> None:
        """Open a data file and read some bytes of it, to measure the time.

        The bytes count as read. They are not verified, because they are discarded.
        """
        source = self._source(file)
        if nbytes:
            self._count(read=nbytes, file=file)
            source.readinto(memoryview(bytearray(nbytes)), start=start)

    def _damage(self, row: int, error: HoldfastError) -> CorruptionError:
        what = f"{describe_row(self.index, self.manifest, row)}: {error}"
        damage = CorruptionError(f"{self.storage.describe(self.directory)}: {what}")
        damage.__cause__ = error
        return damage

    def _hold(self) -> tuple[Storage, str]:
        """Return the pinned directory of this version: a storage, and the name in it."""
        if self._held is None:
            identity = Identity.of(self.records.manifest)
            version = pin_version(self.storage, self.directory, identity)
            self._held = self._pin.enter_context(version)
        return self._held

    def _source(self, file: int) -> Source:
        # First without the lock: nearly always the file is open, and `get` of a dict is atomic.
        source = self._sources.get(file)
        if source is not None:
            return source
        with self._lock:
            if file not in self._sources:
                info = self.manifest.files[file]
                held, directory = self._hold()
                source = held.open(join_path(directory, info.name))
                self.stats.opens += 1
                # In an object store a size is a request, and a wrong one shows in the digests.
                if getattr(source, "knows_size", True) and source.nbytes != info.nbytes:
                    source.close()
                    raise CorruptionError(
                        f"{info.name} has {source.nbytes} bytes, the manifest states {info.nbytes}"
                    )
                self._sources[file] = source
            return self._sources[file]

    def _image(self, file: int) -> Source | None:
        """The image of a data file, asked for once; None if there is none."""
        if self.take_image is None:
            return None
        if file in self._images:  # without the lock, as in `_source`
            return self._images[file]
        with self._lock:
            if file not in self._images:
                image: Source | None = None
                try:
                    image = self.take_image(self.manifest.files[file])
                except StorageError as error:
                    self.stats.refused_images.append(f"{self.manifest.files[file].name}: {error}")
                self._images[file] = image
            return self._images[file]

    def _refuse_image(self, file: int, why: str) -> None:
        """Use an image no more; other threads that read it at this moment find the same."""
        with self._lock:
            image = self._images.get(file)
            if image is not None:
                self._images[file] = None
                # Not closed now, since they read it.
                self._pin.callback(image.close)
                self.stats.refused_images.append(f"{self.manifest.files[file].name}: {why}")

    def _count(
        self, *, read: int = 0, file: int = 0, needed: int = 0, is_image: bool = False
    ) -> None:
        with self._lock:
            self.stats.nbytes_needed += needed
            if is_image:
                self.stats.nbytes_from_images += read
                return
            self.stats.nbytes_read += read
            if read:
                self.stats.ranges += 1
                self.stats.nbytes_by_file[file] += read


def _find_wrong_block(buffer: memoryview, stated: Sequence[int], block: int) -> int | None:
    """Return the byte of the first block with a wrong digest, or None if all agree."""
    for number, digest in enumerate(stated):
        at = number * block
        if digest64(buffer[at : at + block]) != digest:
            return at
    return None
