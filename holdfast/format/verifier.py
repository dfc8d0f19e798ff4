"""Prove that a checkpoint is whole: read every byte of every file and check its digest."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial

import numpy as np

from holdfast.errors import CorruptionError, HoldfastError, StorageError
from holdfast.format.checkpoint_files import CheckpointFiles
from holdfast.format.digest import block_digests, digest128, digest128_of
from holdfast.format.dtypes import DTYPES
from holdfast.format.index import (
    ChunkIndex,
    HeaderEntry,
    chunk_name,
    decode_index,
    gaps,
    parse_header,
    validate_index,
)
from holdfast.format.manifest import ExtraInfo, FileInfo, Manifest, has_digests
from holdfast.format.names import DATA_DIR, INDEX, MANIFEST
from holdfast.format.stored_copies import find_copies
from holdfast.format.versions import join_path, read_index, read_manifest, save_id_of
from holdfast.storage import Source, Storage
from holdfast.storage.reading import is_unknown, sizes_below

_PIECE_NBYTES = 8 << 20
_NUM_TRIES = 8

OnProgress = Callable[[int, int], None]
"""Called with (bytes checked, bytes to check)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """One defect of a checkpoint.

    Args:
        file: Path of the file, relative to the checkpoint.
        key: Key of the tensor; None if the damage is not in a tensor.
        offset: Byte of the file; None if it is not at one place.
        what: The defect, for people.
    """

    file: str
    key: str | None
    offset: int | None
    what: str

    def __str__(self) -> str:
        """Return one line for people."""
        at = "" if self.offset is None else f" byte {self.offset}"
        of = "" if self.key is None else f" (tensor {self.key})"
        return f"{self.file}{at}{of}: {self.what}"


def verify_snapshot(
    storage: Storage, directory: str, *, on_progress: OnProgress | None = None
) -> list[Damage]:
    """Read every byte of a checkpoint and list its damage; empty if it is whole.

    Checks the records and their agreement, headers against digests and rows, each block of each
    copy, that copies of a box are equal, file sizes, files for other programs, and that the
    directory has no other file. It continues after damage as far as the records allow. One version
    is verified, even if the step is saved again meanwhile. If that version is removed before the
    end (no process had a lease), the newer one is verified instead.

    Args:
        storage: The storage of the checkpoint.
        directory: Its name there.
        on_progress: Called after each file or piece.

    Raises:
        StorageError: The directory is not a committed checkpoint, or cannot be read in a way that
            says nothing of what is stored.

    Cost: every byte once; memory for the records and 8 MiB (or one digest block, if larger).
    """
    # Several tries: damage counts only if the version that has it was not removed under the reader.
    for left in reversed(range(_NUM_TRIES)):
        before = save_id_of(storage, directory)
        if not storage.exists(join_path(directory, MANIFEST)):
            break
        with storage.pin(directory) as held:
            damages = _Verifier(held, directory, on_progress).run()
        if not damages or not left or save_id_of(storage, directory) == before:
            return damages
    raise StorageError(
        f"{storage.describe(directory)} is not a committed checkpoint: it has no {MANIFEST}"
    )


def verify_source(files: CheckpointFiles, name: str, source: Source) -> list[Damage]:
    """Read every byte of what is to be one data file of a checkpoint, and list its damage.

    Checks its header, its rows and every block against the records, as `verify_snapshot` does; not
    the padding, which no load reads.

    Args:
        files: The checkpoint; its records count, no data file is opened.
        name: Of the data file in the manifest.
        source: The bytes, which may come from elsewhere.

    Raises:
        CorruptionError: The manifest lists no such file.

    Cost: every byte once, and 8 MiB of memory (or one digest block, if larger).
    """
    names = [file.name for file in files.manifest.files]
    if name not in names:
        raise CorruptionError(f"the manifest lists no file {name}")
    verifier = _Verifier(files.storage, files.directory, None)
    return verifier.run_on(files.manifest, files.index, names.index(name), source)


class _Verifier:
    """One pass over one checkpoint, which collects damage."""

    def __init__(self, storage: Storage, directory: str, on_progress: OnProgress | None) -> None:
        self._storage = storage
        self._directory = directory
        self._on_progress = on_progress
        self._damages: list[Damage] = []
        self._done = self._total = 0

    def run(self) -> list[Damage]:
        """Make all checks, starting with the records."""
        try:
            _, manifest = read_manifest(self._storage, self._directory)
        except HoldfastError as error:
            self._report(MANIFEST, error)
            return self._damages
        self._total = manifest.index.nbytes + sum(manifest.file_sizes.values())
        index = self._index(manifest)
        if not has_digests(manifest):
            self._reach(manifest, index)
            return self._damages
        # Before the files: a storage that lists them all at once knows their sizes then.
        strays = self._strays(manifest)
        for number, file in enumerate(manifest.files):
            check = partial(self._file, file=file, manifest=manifest, index=index, number=number)
            self._open(file.name, file.nbytes, check)
        for extra in manifest.extras:
            self._open(extra.name, extra.nbytes, partial(self._extra, extra=extra))
        self._damages += strays
        return self._damages

    def _open(self, name: str, nbytes: int, check: Callable[[Source], None]) -> None:
        """Check a file, of which an error to read it is damage, too; then all of it is done."""
        before = self._done
        try:
            with closing(self._storage.open(join_path(self._directory, name))) as source:
                check(source)
        except HoldfastError as error:
            self._report(name, error)
        self._advance(nbytes - (self._done - before))

    def _reach(self, manifest: Manifest, index: ChunkIndex | None) -> None:
        """Without digests: report the chunks of which the first or last byte cannot be read."""
        if index is None:
            return
        byte = memoryview(bytearray(1))
        for number, file in enumerate(manifest.files):
            with closing(self._storage.open(join_path(self._directory, file.name))) as source:
                for row in np.flatnonzero(index.file == number).tolist():
                    key = manifest.tensors[index.tensor[row]].key
                    start, nbytes = int(index.start[row]), int(index.nbytes[row])
                    try:
                        source.readinto(byte, start=start)
                        source.readinto(byte, start=start + nbytes - 1)
                    except HoldfastError as error:
                        self._report(file.name, error, key=key)
            self._advance(file.nbytes)

    def run_on(
        self, manifest: Manifest, index: ChunkIndex, number: int, source: Source
    ) -> list[Damage]:
        """Make the checks of one data file, of which an error to read it is one."""
        file = manifest.files[number]
        try:
            self._file(source, file, manifest, index, number)
        except HoldfastError as error:
            self._report(file.name, error)
        return self._damages

    def _report(
        self, file: str, what: object, *, key: str | None = None, offset: int | None = None
    ) -> None:
        self._damages.append(self._damage(file, what, key=key, offset=offset))

    def _damage(
        self, file: str, what: object, *, key: str | None = None, offset: int | None = None
    ) -> Damage:
        """Return a defect; an error that says nothing of what is stored is raised instead."""
        if isinstance(what, HoldfastError) and is_unknown(what):
            raise what
        return Damage(file=file, key=key, offset=offset, what=str(what))

    def _advance(self, nbytes: int) -> None:
        self._done += nbytes
        if self._on_progress is not None:
            self._on_progress(self._done, self._total)

    def _index(self, manifest: Manifest) -> ChunkIndex | None:
        """Return the index, or None if it is too damaged to locate chunks."""
        try:
            data = read_index(self._storage, self._directory, manifest)
            self._advance(len(data))
            if digest128(data) != manifest.index.digest:
                raise CorruptionError("damaged: its digest is not the one in the manifest")
            index = decode_index(data)
            validate_index(index, manifest)
        except HoldfastError as error:
            self._report(INDEX, error)
            return None
        # Each copy may be exactly what its rank wrote, and still one of them is wrong.
        drift = find_copies(index).drift(index, manifest)
        if drift:
            self._report(INDEX, drift)
        return index

    def _file(
        self,
        source: Source,
        file: FileInfo,
        manifest: Manifest,
        index: ChunkIndex | None,
        number: int,
    ) -> None:
        """Check a data file: its size, its rows, and what surrounds them."""
        if source.nbytes != file.nbytes:
            what = f"has {source.nbytes} bytes, the manifest states {file.nbytes}"
            self._report(file.name, what)
        entries = None
        if file.envelope == "safetensors":
            entries = self._header(source, file)
        elif index is not None:
            self._envelope(source, file, index, number)
        if index is not None:
            self._rows(source, file, entries, manifest, index, number)

    def _envelope(self, source: Source, file: FileInfo, index: ChunkIndex, number: int) -> None:
        """Check the bytes around the rows of a file against their digest."""
        rows = np.flatnonzero(index.file == number)
        between = gaps(index.start[rows], index.nbytes[rows], file_nbytes=file.nbytes)
        if source.nbytes < file.nbytes:
            return
        if digest128_of(self._pieces(source, between)) != file.header_digest:
            what = "damaged between its chunks, where only other programs read"
            self._report(file.name, what, offset=0)

    def _pieces(self, source: Source, ranges: Iterable[tuple[int, int]]) -> Iterator[memoryview]:
        """Yield the bytes of ranges; each piece is valid until the next."""
        buffer = memoryview(bytearray(min(_PIECE_NBYTES, source.nbytes)))
        for begin, end in ranges:
            for start in range(begin, end, _PIECE_NBYTES):
                piece = buffer[: min(_PIECE_NBYTES, end - start)]
                source.readinto(piece, start=start)
                self._advance(len(piece))
                yield piece

    def _extra(self, source: Source, extra: ExtraInfo) -> None:
        """Check a file for other programs."""
        if source.nbytes != extra.nbytes:
            what = f"has {source.nbytes} bytes, the manifest states {extra.nbytes}"
            self._report(extra.name, what)
        elif digest128_of(self._pieces(source, [(0, extra.nbytes)])) != extra.digest:
            what = "damaged: its digest is not the one in the manifest"
            self._report(extra.name, what)

    def _header(self, source: Source, file: FileInfo) -> dict[str, HeaderEntry] | None:
        """Check the header of a file; return its entries, None if it is damaged."""
        if source.nbytes < file.header_nbytes:
            return None
        header = bytearray(file.header_nbytes)
        source.readinto(memoryview(header), start=0)
        self._advance(len(header))
        try:
            if digest128(header) != file.header_digest:
                raise CorruptionError("header damaged: its digest is not the one in the manifest")
            entries = parse_header(bytes(header), file_nbytes=file.nbytes, place=file.name)
        except CorruptionError as error:
            self._report(file.name, error, offset=0)
            return None
        return {entry.name: entry for entry in entries}

    def _rows(
        self,
        source: Source,
        file: FileInfo,
        entries: dict[str, HeaderEntry] | None,
        manifest: Manifest,
        index: ChunkIndex,
        number: int,
    ) -> None:
        """Check each row of a file: its digests, and its entry in the header.

        The header must have one entry for each row, which agrees with it, and no other.
        """
        block = manifest.block_nbytes
        piece = max(_PIECE_NBYTES // block * block, block)
        buffer = memoryview(bytearray(min(piece, file.nbytes)))
        for row in np.flatnonzero(index.file == number).tolist():
            expected = _expected_entry(manifest, index, row)
            key = manifest.tensors[index.tensor[row]].key
            if entries is not None and (entry := entries.pop(expected.name, None)) != expected:
                what = f"the header has {entry}, the index {expected}"
                self._report(file.name, what, key=key, offset=expected.start)
            digests = index.digests(row)
            for at in range(0, expected.nbytes, piece):
                start, count = expected.start + at, min(piece, expected.nbytes - at)
                if start + count > source.nbytes:
                    self._report(file.name, "cut off", key=key, offset=start)
                    break
                source.readinto(buffer[:count], start=start)
                self._advance(count)
                stated = digests[at // block : -(-(at + count) // block)]
                wrong = np.flatnonzero(block_digests(buffer[:count], block) != stated)
                for bad in (wrong * block).tolist():
                    what = f"damaged: {min(block, count - bad)} bytes from here"
                    self._report(file.name, what, key=key, offset=start + bad)
        for name in entries or ():
            self._report(file.name, f"the header has a chunk {name!r} that the index lacks")

    def _strays(self, manifest: Manifest) -> list[Damage]:
        """Return the files that the manifest neither lists nor expects."""
        known = {MANIFEST, INDEX, DATA_DIR, *manifest.file_sizes, *manifest.other_files}
        try:
            names = names_in(self._storage, self._directory)
        except StorageError as error:
            return [self._damage("", error)]
        what = "not part of the checkpoint: the manifest does not list it"
        return [self._damage(name, what) for name in names if name not in known]


def names_in(storage: Storage, directory: str) -> list[str]:
    """Return the names in a checkpoint's directory, and those in its directory of data."""
    if (sizes := sizes_below(storage, directory)) is not None:
        paths = [path.split("/") for path in sizes]
        return sorted({"/".join(path[: 1 + (path[0] == DATA_DIR)]) for path in paths})
    names = list(storage.list(directory))
    data = join_path(directory, DATA_DIR)
    if storage.is_dir(data):
        names += [f"{DATA_DIR}/{name}" for name in storage.list(data)]
    return names


def _expected_entry(manifest: Manifest, index: ChunkIndex, row: int) -> HeaderEntry:
    """Return the entry that a data file's header must have for a row of the index."""
    tensor = manifest.tensors[index.tensor[row]]
    dtype = DTYPES[tensor.dtype]
    box = index.box(row, ndim=len(tensor.shape))
    return HeaderEntry(
        name=chunk_name(tensor.key, offset=box.offset, shape=box.shape, global_shape=tensor.shape),
        dtype=dtype.envelope,
        shape=dtype.envelope_shape(box.shape),
        start=int(index.start[row]),
        nbytes=int(index.nbytes[row]),
    )
