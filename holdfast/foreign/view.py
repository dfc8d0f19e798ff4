"""A catalog as a read-only storage with one checkpoint, so that everything reads it as our own.

The manifest and the index are made in memory from the catalog. Each data file that they name is
*virtual*: the chunks of one foreign file, end to end, in the order in which they lie there. A read
of a range goes to the ranges behind it, and straight into the caller's memory. There are no
digests: `block_nbytes` of the manifest is 0.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import numpy as np

from holdfast.arrays.box_table import BoxTable
from holdfast.errors import CorruptionError, PlacementError, PlanError, StorageError
from holdfast.foreign.catalog import Catalog, Chunk, FileBytes, OpenFiles, in_a_file
from holdfast.foreign.records import file_of_one_rank, index_of_one_rank, manifest_of
from holdfast.format.index import ChunkIndex, encode_index
from holdfast.format.manifest import IRREGULAR, FileInfo, encode_manifest
from holdfast.format.names import INDEX, MANIFEST, step_dir
from holdfast.storage import Source, Storage
from holdfast.storage.reading import is_cached_on_host, range_nbytes, read_strips

_HEADER_NBYTES = 8
"""Length of the empty header that a virtual data file starts with."""


class CatalogStorage:
    """Shows a catalog as a `Storage` that holds one checkpoint; everything that writes is refused.

    Args:
        catalog: What to show.

    Raises:
        CorruptionError: The catalog is not a whole checkpoint: chunks do not tile their tensor (as
            far as the manifest shows it; `validate_index` proves the rest).
    """

    has_digests = False
    """Read by `CheckpointFiles`: manifests without digests are accepted from here alone."""

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog
        self.directory = step_dir(catalog.step)
        self._files: dict[str, _VirtualFile] = {}
        self._manifest, self._index = self._describe()
        self._records = {MANIFEST: self._manifest, INDEX: self._index}

    @property
    def left_out(self) -> Sequence[str]:
        """What the checkpoint has and this storage does not show."""
        return self.catalog.left_out

    @property
    def is_cached_on_host(self) -> bool:
        """As the storage of the files."""
        return is_cached_on_host(self.catalog.storage)

    @property
    def range_nbytes(self) -> int | None:
        """As the storage of the files."""
        return range_nbytes(self.catalog.storage)

    def read(self, path: str, *, start: int = 0, nbytes: int | None = None) -> bytes:
        """Return bytes of a record or of a virtual data file."""
        size = self.size(path)
        count = size - start if nbytes is None else nbytes
        if start + count > size:
            raise StorageError(f"{self.describe(path)} has {size} bytes: it is too short")
        data = self._records.get(self._name(path))
        if data is not None:
            return data[start : start + count]
        out = bytearray(count)
        self.readinto(path, memoryview(out), start=start)
        return bytes(out)

    def readinto(self, path: str, buffer: memoryview, *, start: int = 0) -> None:
        """Fill a buffer from a data file."""
        source = self.open(path)
        try:
            source.readinto(buffer, start=start)
        finally:
            source.close()

    def open(self, path: str) -> Source:
        """Open a virtual data file."""
        file = self._files.get(self._name(path))
        if file is None:
            raise StorageError(f"{self.describe(path)} is not a file of this checkpoint")
        return _VirtualSource(file, OpenFiles(self.catalog.storage), self.describe(path))

    def size(self, path: str) -> int:
        """Return the size of a record or of a virtual data file."""
        name = self._name(path)
        if name in self._records:
            return len(self._records[name])
        if name in self._files:
            return self._files[name].nbytes
        raise StorageError(f"{self.describe(path)} is not a file of this checkpoint")

    def exists(self, path: str) -> bool:
        """Return True for the checkpoint and its files."""
        name = self._name(path)
        return self.is_dir(path) or name in self._records or name in self._files

    def age_s(self, path: str) -> float:
        """Return 0: a description that was just made."""
        if not self.exists(path):
            raise StorageError(f"{self.describe(path)} does not exist")
        return 0.0

    def is_dir(self, path: str) -> bool:
        """Return True for the root and the checkpoint."""
        return path in ("", self.directory)

    def list(self, path: str) -> list[str]:
        """Return the names in the root or in the checkpoint."""
        if path == "":
            return [self.directory]
        if path == self.directory:
            return sorted([*self._records, *self._files])
        raise StorageError(f"{self.describe(path)} is not a directory")

    @contextmanager
    def pin(self, path: str) -> Iterator[Storage]:
        """Give this storage: the description does not change."""
        if not self.is_dir(path):
            raise StorageError(f"{self.describe(path)} does not exist")
        yield self

    def describe(self, path: str) -> str:
        """Return the path of the foreign file; of a record, that of the whole checkpoint."""
        name = self._name(path)
        if name in self._files:
            return self.catalog.storage.describe(name)
        return self.catalog.label

    def is_shareable(self) -> bool:
        """Return False: the description is in this process."""
        return False

    def local_path(self, path: str) -> Path | None:
        """Return None: no file holds what this storage shows."""
        return None

    def free_nbytes(self) -> int:
        """Return 0: nothing can be written."""
        return 0

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise StorageError(
            f"{self.catalog.label} is a checkpoint in the format {self.catalog.format}: it is read "
            f"and never written to"
        )

    write_file = replace_file = create = make_dir = sync_dir = _refuse
    rename_dir = exchange_dir = remove_tree = _refuse

    def _name(self, path: str) -> str:
        """Return the name of a path in the checkpoint; the path itself if it is elsewhere."""
        return path.removeprefix(f"{self.directory}/")

    def _describe(self) -> tuple[bytes, bytes]:
        """Make manifest and index, and the virtual files that they name."""
        catalog = self.catalog
        tensors = list(catalog.tensors.values())
        by_file: defaultdict[str, list[tuple[int, Chunk]]] = defaultdict(list)
        for number, tensor in enumerate(tensors):
            for chunk in tensor.chunks:
                if chunk.box.numel:
                    by_file[chunk.payload.file].append((number, chunk))
        sizes = [tensor.itemsize for tensor in tensors]
        rows: list[tuple[int, Chunk]] = []
        files: list[FileInfo] = []
        file_of: list[int] = []
        starts: list[int] = []
        for name in sorted(by_file):
            # As they lie in the file, so that neighbours there are neighbours here.
            chunks = sorted(by_file[name], key=lambda pair: pair[1].payload.order)
            file = _VirtualFile([chunk for _, chunk in chunks], [sizes[n] for n, _ in chunks])
            self._files[name] = file
            rows += chunks
            starts += file.starts
            file_of += [len(files)] * len(chunks)
            files.append(file_of_one_rank(name, file.nbytes, bytes(_HEADER_NBYTES)))
        index = _index_of(rows, file_of, starts, sizes, [len(t.shape) for t in tensors])
        data = encode_index(index)
        manifest = manifest_of(
            catalog, files, index, data,
            step=catalog.step, created=catalog.created, block_nbytes=0, cut=[IRREGULAR],
        )  # fmt: skip
        try:
            return encode_manifest(manifest), data
        except PlanError as error:
            raise CorruptionError(f"{catalog.label}: {error}") from error


def _index_of(
    rows: Sequence[tuple[int, Chunk]],
    file_of: Sequence[int],
    starts: Sequence[int],
    sizes: Sequence[int],
    num_dims: Sequence[int],
) -> ChunkIndex:
    """Return the index of chunks, without digests, all held by rank 0."""
    tensor = [number for number, _ in rows]
    try:
        boxes = BoxTable.from_boxes(
            tensor, [chunk.box for _, chunk in rows], num_dims=max(num_dims, default=0)
        )
    except (PlacementError, ValueError, OverflowError) as error:
        raise CorruptionError(f"a chunk has an impossible box: {error}") from None
    return index_of_one_rank(boxes, sizes, file=file_of, start=starts, copy=_number_copies(rows))


def _number_copies(rows: Sequence[tuple[int, Chunk]]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return 0 for the first chunk of each box of a tensor, 1, 2, … for the others."""
    seen: defaultdict[tuple[int, object], int] = defaultdict(int)
    numbers = np.zeros(len(rows), dtype=np.int64)
    for row, (tensor, chunk) in enumerate(rows):
        key = (tensor, chunk.box)
        numbers[row] = seen[key]
        seen[key] += 1
    return numbers


class _VirtualFile:
    """The chunks of one foreign file, end to end after an empty header.

    Attributes:
        starts: Byte at which each chunk starts, ascending.
        nbytes: Size of the whole.
    """

    def __init__(self, chunks: Sequence[Chunk], itemsizes: Sequence[int]) -> None:
        self.chunks = chunks
        self.starts: list[int] = []
        end = _HEADER_NBYTES
        for chunk, itemsize in zip(chunks, itemsizes, strict=True):
            self.starts.append(end)
            end += chunk.box.numel * itemsize
        self.nbytes = end


class _VirtualSource:
    """An open virtual file: reads go to the chunks behind it."""

    def __init__(self, file: _VirtualFile, files: OpenFiles, place: str) -> None:
        self._file = file
        self._files = files
        self._place = place

    @property
    def nbytes(self) -> int:
        """Size of the virtual file."""
        return self._file.nbytes

    def readinto(self, buffer: memoryview, *, start: int) -> None:
        """Fill the buffer; neighbours in the foreign file are read together."""
        file, end = self._file, start + len(buffer)
        if start < 0 or end > file.nbytes:
            raise StorageError(f"{self._place}: bytes {start} to {end} are not in its chunks")
        if start < _HEADER_NBYTES:
            count = min(end, _HEADER_NBYTES) - start
            buffer[:count] = bytes(count)
            buffer, start = buffer[count:], start + count
        number = bisect_right(file.starts, start) - 1
        while len(buffer):
            count, last = self._run(number, start, end)
            payload = file.chunks[number].payload
            payload.readinto(buffer[:count], start=start - file.starts[number], files=self._files)
            buffer, start, number = buffer[count:], start + count, last + 1

    def readinto_strips(
        self, buffer: memoryview, *, start: int, strips: Sequence[tuple[int, int]]
    ) -> int:
        """See `read_strips`: strips of bytes that lie in the foreign file as they are."""
        file = self._file
        number = bisect_right(file.starts, start) - 1
        if number >= 0 and start + len(buffer) <= file.nbytes:
            place = in_a_file(file.chunks[number].payload, self._files)
            count, _ = self._run(number, start, start + len(buffer))
            if place is not None and count == len(buffer):
                at = place.start + start - file.starts[number]
                source = self._files.source(place.file)
                return read_strips(source, buffer, start=at, strips=strips)
        self.readinto(buffer, start=start)
        return len(buffer)

    def _run(self, number: int, start: int, end: int) -> tuple[int, int]:
        """Return how many bytes from `start` one read gives, and the last chunk they are of."""
        file = self._file
        first = file.chunks[number].payload
        stop = file.starts[number + 1] if number + 1 < len(file.starts) else file.nbytes
        if isinstance(first, FileBytes):
            shift = first.start - file.starts[number]
            while stop < end:
                payload = file.chunks[number + 1].payload
                if not isinstance(payload, FileBytes) or payload.start - stop != shift:
                    break
                number += 1
                stop = file.starts[number + 1] if number + 1 < len(file.starts) else file.nbytes
        return min(stop, end) - start, number

    def close(self) -> None:
        """Close the foreign files."""
        self._files.close()
