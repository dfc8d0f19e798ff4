"""The two records of a committed checkpoint, manifest and index: read whole, digests checked."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.errors import CorruptionError, StorageError
from holdfast.format.digest import digest128
from holdfast.format.manifest import MAX_MANIFEST_NBYTES, Manifest, decode_manifest
from holdfast.format.names import INDEX, MANIFEST
from holdfast.storage import Storage


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
    path = join_path(directory, MANIFEST)
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
    if not storage.exists(join_path(directory, MANIFEST)):
        read_manifest(storage, directory)  # which says what is wrong
    with storage.pin(directory) as held:
        return _read_records(held, directory)


def _read_records(storage: Storage, directory: str) -> Records:
    data, decoded = read_manifest(storage, directory)
    index_path = join_path(directory, INDEX)
    info = decoded.index
    place = storage.describe(index_path)
    if not storage.exists(index_path):
        raise CorruptionError(f"{place}: missing, though the manifest lists it")
    if storage.size(index_path) != info.nbytes:
        raise CorruptionError(
            f"{place}: has {storage.size(index_path)} bytes, the manifest states {info.nbytes}"
        )
    index = storage.read(index_path)
    check_index_digest(index, info.digest, place)
    return Records(manifest=data, index=index, decoded=decoded)


def check_index_digest(index: bytes, digest: str, place: str) -> None:
    """CorruptionError unless these bytes are the index that the manifest states."""
    if digest128(index) != digest:
        raise CorruptionError(f"{place}: damaged: its digest is not the one in the manifest")


def join_path(directory: str, name: str) -> str:
    """The path of a file of a checkpoint, whose directory may be the storage's root."""
    return f"{directory}/{name}" if directory else name
