"""Proving a checkpoint whole: every byte of every file is read and compared with a digest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from holdfast.errors import CorruptionError, HoldfastError, StorageError
from holdfast.format.digest import block_digests, digest128
from holdfast.format.dtypes import DTYPES
from holdfast.format.image import HeaderEntry, chunk_name, parse_header
from holdfast.format.index import ChunkIndex, validate_index
from holdfast.format.index import decode_index as decode
from holdfast.format.manifest import (
    MAX_MANIFEST_NBYTES,
    FileInfo,
    Manifest,
    decode_manifest,
)
from holdfast.format.names import DATA_DIR, INDEX, MANIFEST
from holdfast.format.versions import save_id_of
from holdfast.storage import Source, Storage

_PIECE_NBYTES = 8 << 20
_NUM_TRIES = 8

OnProgress = Callable[[int, int], None]
"""Called with (bytes checked, bytes to check)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """One thing that is wrong: in which file (relative to the checkpoint), of which tensor, where.

    `offset` is a byte of the file, `key` a tensor; None where the damage is not of one.
    """

    file: str
    key: str | None
    offset: int | None
    what: str

    def __str__(self) -> str:
        """One line."""
        at = "" if self.offset is None else f" byte {self.offset}"
        of = "" if self.key is None else f" (tensor {self.key})"
        return f"{self.file}{at}{of}: {self.what}"


def verify_snapshot(
    storage: Storage, directory: str, *, on_progress: OnProgress | None = None
) -> list[Damage]:
    """Read every byte of a checkpoint and list what is wrong; empty when it is whole.

    Checks the records and their agreement, headers against digests and rows, each block of each
    copy, file sizes, and that no other file lies in the directory. Goes on after damage as far as
    the records allow. Memory: the records and 8 MiB (one digest block, if larger).
    One version is looked at, also when the step is saved again meanwhile; where it is removed
    before the end (nothing marked it as read) the newer one is looked at instead.
    Raises StorageError only when there is no checkpoint at all.
    """
    for left in reversed(range(_NUM_TRIES)):
        before = save_id_of(storage, directory)
        if not storage.exists(f"{directory}/{MANIFEST}" if directory else MANIFEST):
            break
        with storage.pin(directory) as held:
            damages = _Verifier(held, directory, on_progress or _ignore).run()
        if not damages or not left or save_id_of(storage, directory) == before:
            return damages
    raise StorageError(
        f"{storage.describe(directory)} is not a committed checkpoint: it has no {MANIFEST}"
    )


def _ignore(done: int, total: int) -> None:
    """Nobody wants to know."""


class _Verifier:
    """One pass over one checkpoint; collects damages."""

    def __init__(self, storage: Storage, directory: str, on_progress: OnProgress) -> None:
        self._storage = storage
        self._directory = directory
        self._on_progress = on_progress
        self._damages: list[Damage] = []
        self._done = 0
        self._total = 0

    def run(self) -> list[Damage]:
        """All checks, from the records outwards."""
        if not self._storage.exists(self._path(MANIFEST)):
            raise StorageError(
                f"{self._storage.describe(self._directory)} is not a committed checkpoint: "
                f"it has no {MANIFEST}"
            )
        manifest = self._manifest()
        if manifest is None:
            return self._damages
        self._total = manifest.index.nbytes + sum(file.nbytes for file in manifest.files)
        index = self._index(manifest)
        for number, file in enumerate(manifest.files):
            self._data_file(manifest, index, number, file)
        self._strays(manifest)
        return self._damages

    def _path(self, name: str) -> str:
        return f"{self._directory}/{name}" if self._directory else name

    def _report(
        self, file: str, what: object, *, key: str | None = None, offset: int | None = None
    ) -> None:
        self._damages.append(Damage(file=file, key=key, offset=offset, what=str(what)))

    def _advance(self, nbytes: int) -> None:
        self._done += nbytes
        self._on_progress(self._done, self._total)

    def _manifest(self) -> Manifest | None:
        path = self._path(MANIFEST)
        try:
            nbytes = self._storage.size(path)
            if nbytes > MAX_MANIFEST_NBYTES:
                raise CorruptionError(f"{nbytes} bytes are beyond the limit {MAX_MANIFEST_NBYTES}")
            return decode_manifest(self._storage.read(path))
        except HoldfastError as error:
            self._report(MANIFEST, error)
            return None

    def _index(self, manifest: Manifest) -> ChunkIndex | None:
        """The table, or None when it cannot be trusted to find chunks by."""
        path, info = self._path(INDEX), manifest.index
        try:
            nbytes = self._storage.size(path)
            if nbytes != info.nbytes:
                raise CorruptionError(f"has {nbytes} bytes, the manifest states {info.nbytes}")
            data = self._storage.read(path)
            self._advance(nbytes)
            if digest128(data) != info.digest:
                raise CorruptionError("damaged: its digest is not the one in the manifest")
            index = decode(data)
            validate_index(index, manifest)
        except HoldfastError as error:
            self._report(INDEX, error)
            return None
        return index

    def _data_file(
        self, manifest: Manifest, index: ChunkIndex | None, number: int, file: FileInfo
    ) -> None:
        try:
            source = self._storage.open(self._path(file.name))
        except StorageError as error:
            self._report(file.name, error)
            self._advance(file.nbytes)
            return
        before = self._done
        try:
            if source.nbytes != file.nbytes:
                what = f"has {source.nbytes} bytes, the manifest states {file.nbytes}"
                self._report(file.name, what)
            self._header(source, manifest, index, number, file)
            if index is not None:
                self._payload(source, manifest, index, number, file)
        except HoldfastError as error:
            self._report(file.name, error)
        finally:
            source.close()
        self._advance(file.nbytes - (self._done - before))

    def _header(
        self,
        source: Source,
        manifest: Manifest,
        index: ChunkIndex | None,
        number: int,
        file: FileInfo,
    ) -> None:
        if source.nbytes < file.header_nbytes:
            return
        header = bytearray(file.header_nbytes)
        source.readinto(memoryview(header), start=0)
        self._advance(len(header))
        if digest128(header) != file.header_digest:
            what = "header damaged: its digest is not the one in the manifest"
            self._report(file.name, what, offset=0)
            return
        try:
            entries = parse_header(bytes(header), file_nbytes=file.nbytes, place=file.name)
        except CorruptionError as error:
            self._report(file.name, error, offset=0)
            return
        if index is not None:
            self._compare(entries, manifest, index, number, file)

    def _compare(
        self,
        entries: list[HeaderEntry],
        manifest: Manifest,
        index: ChunkIndex,
        number: int,
        file: FileInfo,
    ) -> None:
        """The header must say of each chunk what its row says, and name no other chunk."""
        stored = {entry.name: entry for entry in entries}
        for row in np.flatnonzero(index.file == number).tolist():
            tensor = manifest.tensors[index.tensor[row]]
            dtype = DTYPES[tensor.dtype]
            box = index.box(row, ndim=len(tensor.shape))
            name = chunk_name(
                tensor.key, offset=box.offset, shape=box.shape, global_shape=tensor.shape
            )
            expected = HeaderEntry(
                name=name,
                dtype=dtype.envelope,
                shape=dtype.envelope_shape(box.shape),
                start=int(index.start[row]),
                nbytes=int(index.nbytes[row]),
            )
            entry = stored.pop(name, None)
            if entry != expected:
                what = f"the header says {entry}, the index {expected}"
                self._report(file.name, what, key=tensor.key, offset=expected.start)
        for name in stored:
            self._report(file.name, f"the header has a chunk {name!r} that the index has not")

    def _payload(
        self,
        source: Source,
        manifest: Manifest,
        index: ChunkIndex,
        number: int,
        file: FileInfo,
    ) -> None:
        block = manifest.block_nbytes
        piece = max(_PIECE_NBYTES // block * block, block)
        buffer = memoryview(bytearray(min(piece, file.nbytes)))
        for row in np.flatnonzero(index.file == number).tolist():
            key = manifest.tensors[index.tensor[row]].key
            start, nbytes = int(index.start[row]), int(index.nbytes[row])
            digests = index.digests(row)
            for at in range(0, nbytes, piece):
                count = min(piece, nbytes - at)
                if start + at + count > source.nbytes:
                    self._report(file.name, "cut off", key=key, offset=start + at)
                    break
                data = buffer[:count]
                source.readinto(data, start=start + at)
                self._advance(count)
                stated = digests[at // block : -(-(at + count) // block)]
                wrong = np.flatnonzero(block_digests(data, block) != stated)
                for bad in wrong.tolist():
                    what = f"damaged: {min(block, count - bad * block)} bytes from here"
                    self._report(file.name, what, key=key, offset=start + at + bad * block)

    def _strays(self, manifest: Manifest) -> None:
        known = {MANIFEST, INDEX, *(file.name for file in manifest.files)}
        try:
            for name in self._storage.list(self._directory):
                if name not in known and name != DATA_DIR:
                    self._report(name, "not part of the checkpoint: the manifest does not list it")
            if not self._storage.is_dir(self._path(DATA_DIR)):
                return
            for name in self._storage.list(self._path(DATA_DIR)):
                path = f"{DATA_DIR}/{name}"
                if path not in known:
                    self._report(path, "not part of the checkpoint: the manifest does not list it")
        except StorageError as error:
            self._report("", error)
