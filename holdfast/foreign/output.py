"""What a writer makes: files of literal bytes and boxes of tensors, streamed to their place.

A format's writer is arithmetic: it lays out the files and touches no data. `write_output` moves the
bytes, for every format alike, in a few threads and under a budget of memory. Everything is written
below a temporary name; what was written is opened again as its format and every box compared with
what was read from the source, and only then it gets its name.

    layout        literals and extents of each file, from a catalog
    copy          read a piece of a box, digest it, write it; durable at the end of each file
    finish        files that need the digests of all others (an index, a manifest)
    prove         open the result by its own reader, compare the digest of every box
    name          one rename
"""

from __future__ import annotations

import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

import xxhash

from holdfast.arrays.boxes import Box, split_box
from holdfast.errors import ConfigError, CorruptionError
from holdfast.foreign.catalog import Catalog, CatalogTensor, OpenFiles, TensorReader
from holdfast.format.index import Image
from holdfast.storage import Sink, Storage
from holdfast.storage.unnamed import remove_unnamed, unnamed

T = TypeVar("T")

DEFAULT_MAX_FILE_NBYTES = 5_000_000_000
"""Where a format that may have several files begins another one."""
DEFAULT_MEMORY_NBYTES = 256 << 20
"""Memory that a conversion takes for the bytes on their way, unless another budget is given."""
_NUM_THREADS = 4
_MAX_WAITING = 8 * _NUM_THREADS
"""Boxes that wait for a thread: each takes a kilobyte, and a model may have a million."""
_MIN_PIECE_NBYTES = 1 << 20
_SHARE = 4
"""A piece is this fraction of its thread's share: reading strided boxes needs more than once its
size."""

OnProgress = Callable[[int], object]
"""Called with the number of bytes that were just written or compared."""
OnLeftover = Callable[[str], object]
"""Called with the path of what a killed process has left, and which was removed."""
Reopen = Callable[[Storage, str], Catalog]
"""Describes what was written below a name of a storage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """A box of a tensor, row-major, at a place of a file.

    Args:
        start: Byte of the file.
        key: The tensor in the source catalog.
        box: The box.
        crc_at: Bytes of the file that get the CRC-32 of the payload, little-endian.
        to_key: The tensor in the result, as its own reader has it.
    """

    start: int
    key: str
    box: Box
    crc_at: tuple[int, ...] = ()
    to_key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputFile:
    """One file: its size, and what is where."""

    name: str
    nbytes: int
    literals: Sequence[tuple[int, bytes]] = ()
    extents: Sequence[Extent] = ()

    @classmethod
    def of(cls, name: str, data: bytes) -> OutputFile:
        """Return a file of literal bytes."""
        return cls(name=name, nbytes=len(data), literals=[(0, data)])

    @classmethod
    def of_image(
        cls, name: str, image: Image, tensors: Sequence[tuple[CatalogTensor, str]]
    ) -> OutputFile:
        """Return a file of whole tensors, laid out as an image.

        Args:
            name: Of the file.
            image: Where they lie.
            tensors: In the order of the image, and the key of each in the result.
        """
        return cls(
            name=name,
            nbytes=image.nbytes,
            literals=[(0, image.header)],
            extents=[
                Extent(start=start, key=tensor.key, box=tensor.whole, to_key=key)
                for (tensor, key), start in zip(tensors, image.starts.tolist(), strict=True)
                if tensor.nbytes
            ],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """What is known of one extent after it was written."""

    digest: bytes
    """XXH3-128 of its bytes."""
    blocks: Sequence[int]
    """XXH3-64 of each block, if the output asks for blocks."""


Digests = Mapping[tuple[str, int], Written]
"""By file name and start of the extent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """A checkpoint to be written.

    Args:
        files: In the order in which they are written.
        num_tensors: By their names in the output, those without elements included.
        is_folder: False for a format that is one file; then there is one file, of any name.
        block_nbytes: Bytes per block digest; 0 for none.
        finish: Makes the last files from the digests of the others.
        carried: Files that are copied as they are, by the name they get.
        notes: What the format cannot hold or holds otherwise, one sentence each.
    """

    files: Sequence[OutputFile]
    num_tensors: int
    is_folder: bool = True
    block_nbytes: int = 0
    finish: Callable[[Digests], Sequence[OutputFile]] | None = None
    carried: Mapping[str, Path] = field(default_factory=dict)
    notes: Sequence[str] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of the files, but for those that `finish` makes and those that are copied."""
        return sum(file.nbytes for file in self.files)


def write_output(
    catalog: Catalog,
    output: Output,
    above: Storage,
    name: str,
    *,
    reopen: Reopen,
    memory_nbytes: int = DEFAULT_MEMORY_NBYTES,
    on_progress: OnProgress = lambda nbytes: None,
    on_leftover: OnLeftover = lambda path: None,
) -> None:
    """Write an output, prove it, and give it its name; nothing that exists is overwritten.

    What a killed process has left of an output of this name is removed first.

    Args:
        catalog: The source.
        output: What to write.
        above: Where the result gets its name.
        name: Of the file or folder, which must not exist.
        reopen: Opens the result by its format, to prove it.
        memory_nbytes: Budget for the bytes on their way; what describes the tensors, 1 to 4 KB
            for each, comes on top.
        on_progress: Called as bytes are written, and again as they are compared.
        on_leftover: Called with the path of each leftover that was removed.

    Raises:
        ConfigError: The name is taken, or the budget is too small.
        CorruptionError: The source is damaged, or what was written does not read back as it.
        StorageError: As its message says. Nothing is left behind, and neither after an interrupt.

    Cost: reads the source once, writes it once, reads what was written once.
    """
    if memory_nbytes < _NUM_THREADS * _SHARE * _MIN_PIECE_NBYTES:
        raise ConfigError(
            f"a budget of {memory_nbytes} bytes is too small: at least "
            f"{_NUM_THREADS * _SHARE * _MIN_PIECE_NBYTES} are needed"
        )
    above.make_dir("")
    refuse_existing(above, name)
    for path in remove_unnamed(above, [name]):
        on_leftover(path)
    piece = memory_nbytes // (_NUM_THREADS * _SHARE)
    copier = _Copier(catalog, piece, output.block_nbytes, on_progress)
    with unnamed(above, name, is_dir=output.is_folder) as temporary:
        copier.write(above, temporary, output)
        copier.prove(reopen(above, temporary))


def split_by_size(sizes: Mapping[str, int], *, max_nbytes: int) -> list[list[str]]:
    """Split names into files, in their order; one that is larger than a file has its own."""
    groups: list[list[str]] = [[]]
    filled = 0
    for name, nbytes in sizes.items():
        if groups[-1] and filled + nbytes > max_nbytes:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += nbytes
    return groups


def refuse_existing(above: Storage, name: str) -> None:
    """Raise ConfigError if a name is taken."""
    if above.exists(name):
        raise ConfigError(
            f"{above.describe(name)} exists already; remove it or choose another name"
        )


class _Copier:
    """Moves the bytes of one output, and proves that they arrived."""

    def __init__(
        self, catalog: Catalog, piece: int, block_nbytes: int, on_progress: OnProgress
    ) -> None:
        self._catalog = catalog
        self._piece = piece
        self._block = block_nbytes
        self._on_progress = on_progress
        self._lock = threading.Lock()
        self._digests: dict[tuple[str, int], Written] = {}
        self._extents: list[tuple[str, Extent]] = []
        self._is_stopped = False

    def write(self, above: Storage, temporary: str, output: Output) -> None:
        """Write all files below a temporary name, durably."""
        if not output.is_folder:
            (file,) = output.files
            self._write_files(above, [(temporary, file)])
            return
        for name in dict.fromkeys(f.name.rpartition("/")[0] for f in output.files):
            above.make_dir(f"{temporary}/{name}".rstrip("/"), durable=False)
        self._write_files(above, [(f"{temporary}/{f.name}", f) for f in output.files])
        last = output.finish(self._digests) if output.finish is not None else ()
        self._write_files(above, [(f"{temporary}/{f.name}", f) for f in last])
        for name, source in output.carried.items():
            above.write_file(f"{temporary}/{name}", source.read_bytes())
        for name in dict.fromkeys(f.name.rpartition("/")[0] for f in output.files):
            above.sync_dir(f"{temporary}/{name}".rstrip("/"))

    def _write_files(self, storage: Storage, files: Sequence[tuple[str, OutputFile]]) -> None:
        # What comes before its turn waits in memory where a file is sent and not written in place.
        in_place = storage.local_path("") is not None
        num_threads = _NUM_THREADS if in_place else 1
        with OpenFiles(self._catalog.storage) as sources, self._pool(num_threads) as pool:
            for path, file in files:
                with storage.create(path, nbytes=file.nbytes) as sink:
                    for start, data in file.literals:
                        sink.write_at(start, memoryview(data))
                    copy = partial(self._copy, file.name, sink=sink, sources=sources)
                    _run_each(pool, copy, file.extents)
                    sink.sync()
                self._extents += [(file.name, extent) for extent in file.extents]

    def _copy(self, name: str, extent: Extent, *, sink: Sink, sources: OpenFiles) -> None:
        """Copy one box to its file, piece by piece."""
        hashed, crc, at = xxhash.xxh3_128(), 0, extent.start
        blocks = _BlockDigests(self._block)
        for data in self._read(self._catalog, extent.key, extent.box, sources):
            hashed.update(data)
            if extent.crc_at:
                crc = zlib.crc32(data, crc)
            blocks.update(data)
            sink.write_at(at, data)
            at += len(data)
            self._advance(len(data))
        for place in extent.crc_at:
            sink.write_at(place, memoryview(crc.to_bytes(4, "little")))
        written = Written(digest=hashed.digest(), blocks=blocks.finish())
        with self._lock:
            self._digests[name, extent.start] = written

    def _read(
        self, catalog: Catalog, key: str, box: Box, sources: OpenFiles
    ) -> Iterator[memoryview]:
        """Yield the bytes of a box in row-major order; each piece is valid until the next."""
        reader = TensorReader(catalog.tensors[key], sources)
        itemsize = reader.tensor.itemsize
        buffer = memoryview(bytearray(min(self._piece, box.numel * itemsize)))
        for part in split_box(box, max_numel=max(self._piece // itemsize, 1)):
            data = buffer[: part.numel * itemsize]
            if self._is_stopped:
                raise CancelledError
            reader.read_box(part, data)
            yield data

    @contextmanager
    def _pool(self, num_threads: int = _NUM_THREADS) -> Iterator[ThreadPoolExecutor]:
        """Threads for the body; if it fails, or is interrupted, they end with the piece."""
        with ThreadPoolExecutor(num_threads, "holdfast-convert") as pool:
            try:
                yield pool
            except BaseException:
                self._is_stopped = True
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def prove(self, result: Catalog) -> None:
        """Compare every box of the result with what was read of the source.

        Raises:
            CorruptionError: A tensor is not there, is another one, or has other bytes.
        """
        written = {extent.to_key for _, extent in self._extents}
        if odd := sorted(written ^ {key for key, t in result.tensors.items() if t.nbytes}):
            raise CorruptionError(f"{result.label}: what was written lacks or adds {odd[:3]}")
        with OpenFiles(result.storage) as sources, self._pool() as pool:
            compare = partial(self._compare, result=result, sources=sources)
            _run_each(pool, compare, self._extents)

    def _compare(self, placed: tuple[str, Extent], *, result: Catalog, sources: OpenFiles) -> None:
        name, extent = placed
        source, target = self._catalog.tensors[extent.key], result.tensors[extent.to_key]
        is_alike = (source.dtype, source.shape) == (target.dtype, target.shape)
        hashed = xxhash.xxh3_128()
        if is_alike:
            for data in self._read(result, extent.to_key, extent.box, sources):
                hashed.update(data)
                self._advance(len(data))
        if not is_alike or hashed.digest() != self._digests[name, extent.start].digest:
            raise CorruptionError(
                f"{result.label}: tensor {extent.to_key!r} does not read back as it was written"
            )

    def _advance(self, nbytes: int) -> None:
        with self._lock:
            self._on_progress(nbytes)


def _run_each(pool: ThreadPoolExecutor, call: Callable[[T], None], items: Iterable[T]) -> None:
    """Call a function with each item in the threads of a pool; the first error is raised."""
    waiting: deque[Future[None]] = deque()
    for item in items:
        if len(waiting) == _MAX_WAITING:
            waiting.popleft().result()
        waiting.append(pool.submit(call, item))
    for task in waiting:
        task.result()


class _BlockDigests:
    """Digests of blocks of bytes that arrive in pieces of any size; none for blocks of 0 bytes."""

    def __init__(self, block_nbytes: int) -> None:
        self._block = block_nbytes
        self._digests: list[int] = []
        self._hashed = xxhash.xxh3_64()
        self._filled = 0

    def update(self, data: memoryview) -> None:
        """Add bytes."""
        while self._block and len(data):
            part = data[: self._block - self._filled]
            self._hashed.update(part)
            self._filled += len(part)
            data = data[len(part) :]
            if self._filled == self._block:
                self._end()

    def finish(self) -> list[int]:
        """Return the digests, that of a last short block included."""
        if self._filled:
            self._end()
        return self._digests

    def _end(self) -> None:
        self._digests.append(self._hashed.intdigest())
        self._hashed.reset()
        self._filled = 0
