"""Opens a file of `torch.save` without torch and without running it.

Two forms are read: the ZIP archive that torch writes since 1.6, and the *legacy* form before it, in
which pickles are followed by storages. Only the directory and the pickles are read; the bytes of
tensors stay where they are.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from holdfast.arrays.boxes import strided_span
from holdfast.errors import CorruptionError
from holdfast.foreign.pickle_types import torch_storage
from holdfast.foreign.pickled_values import PickledStorage, PickledTensor
from holdfast.foreign.pickles import MAX_PICKLE_NBYTES, NOT_READ, read_pickle, read_pickle_at
from holdfast.foreign.zip_files import ZipEntry, checked_range, read_bytes, read_directory
from holdfast.format.dtypes import DTYPES
from holdfast.format.values import shorten
from holdfast.storage.storage_protocol import Source

_ZIP_MAGIC = b"PK"
_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
# Protocols below 2 write the number as text.
_LEGACY_MAGICS = (_LEGACY_MAGIC.to_bytes(10, "little"), str(_LEGACY_MAGIC).encode())
_LEGACY_HEAD = 32
_LEGACY_VERSION = 1001
_LEGACY_STEP = 1 << 16
_MAX_LEGACY_PICKLE = 1 << 28
_MAX_SMALL_NBYTES = 64
_TAR_MAGIC_AT = 257


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageRange:
    """Where the bytes of a storage lie: `start` is absolute in the file."""

    start: int
    nbytes: int
    crc: int | None = None
    """CRC-32 of the bytes, if the file states it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchFile:
    """A file of `torch.save`, opened: its value, and where the storages of its tensors lie."""

    place: str
    value: object
    """As `read_pickle` returns it, with `PickledTensor` in the place of each tensor."""
    storages: Mapping[str, StorageRange]

    def range_of(self, tensor: PickledTensor) -> tuple[int, int]:
        """Return (start, nbytes) in the file of the bytes from a tensor's first to last element.

        For a contiguous tensor these are its elements; others have gaps, or another order.
        """
        if 0 in tensor.shape:
            return self.storages[tensor.storage.key].start, 0
        start = self.storages[tensor.storage.key].start + tensor.start
        return start, strided_span(tensor.shape, tensor.stride) * DTYPES[tensor.dtype].itemsize


def open_torch_save(
    source: Source,
    *,
    place: str,
    start: int = 0,
    nbytes: int | None = None,
) -> TorchFile:
    """Open what `torch.save` has written, as a file or as a range of one.

    Args:
        source: The file; it is read from only while this function runs.
        place: The file, for messages.
        start: Byte at which it begins.
        nbytes: Its length; None: up to the end of the file.

    Raises:
        CorruptionError: It is damaged, its storages do not fit its tensors, or, with the details
            `NOT_READ`, it is of a form that is not read: TorchScript, big-endian, the tar archives
            before torch 0.1.10.

    Cost: linear in the pickle and in the number of storages, not in their bytes.
    """
    length = checked_range(source, start, nbytes, place)
    head = read_bytes(source, start, min(length, _TAR_MAGIC_AT + 5))
    if head.startswith(_ZIP_MAGIC):
        return _open_zip(source, start, length, place)
    if any(magic in head[:_LEGACY_HEAD] for magic in _LEGACY_MAGICS):
        return _open_legacy(source, start, length, place)
    if head.startswith(b"\x80"):
        raise CorruptionError(
            f"{place}: a pickle, but not one that torch.save has written", details=NOT_READ
        )
    if head[_TAR_MAGIC_AT:] == b"ustar":
        raise CorruptionError(
            f"{place}: a tar archive, which torch wrote before version 0.1.10; load it with torch "
            f"and save it again",
            details=NOT_READ,
        )
    if not any(head):
        what = "starts with zeros" if head else "is empty"
        raise CorruptionError(
            f"{place}: not a file of torch.save: it {what}; damaged, as after a crash or on a full "
            f"disk"
        )
    raise CorruptionError(
        f"{place}: this is not a file of torch.save: its first bytes are not those of a ZIP file",
        details=NOT_READ,
    )


class _Storages:
    """The storages that a pickle refers to, by key; each has one size."""

    def __init__(self) -> None:
        self.by_key: dict[str, PickledStorage] = {}

    def __call__(self, name: object) -> PickledStorage:
        storage = torch_storage(name)
        before = self.by_key.setdefault(storage.key, storage)
        if before.nbytes != storage.nbytes:
            raise ValueError(f"storage {shorten(storage.key)!r} has two sizes")
        return before if before == storage else storage


def _open_zip(source: Source, start: int, nbytes: int, place: str) -> TorchFile:
    entries = read_directory(source, start=start, nbytes=nbytes, place=place)
    folder = _folder(entries, place)
    _check_byteorder(source, entries.get(f"{folder}byteorder"), place)
    _check_version(source, entries.get(f"{folder}version"), place)
    entry = entries[f"{folder}data.pkl"]
    data = _read_pickle_bytes(source, entry, place)
    if entry.crc and zlib.crc32(data) != entry.crc:
        raise CorruptionError(f"{place}: data.pkl is damaged: its bytes have another CRC-32")
    storages = _Storages()
    value = read_pickle(data, place=f"{place}: data.pkl", persistent=storages)
    # torch writes zeros for all, if it is set to compute none.
    ranges = {
        key: _storage_range(entries.get(f"{folder}data/{key}"), storage, bool(entry.crc), place)
        for key, storage in storages.by_key.items()
    }
    return TorchFile(place=place, value=value, storages=ranges)


def _folder(entries: Mapping[str, ZipEntry], place: str) -> str:
    """Return the one folder that all entries are in, with its slash."""
    first = next(iter(entries), "")
    folder = first[: first.find("/") + 1]
    names = {name.removeprefix(folder) for name in entries}
    if "constants.pkl" in names or any(name.startswith("code/") for name in names):
        raise CorruptionError(
            f"{place}: a TorchScript archive, which contains a program; save the module's "
            f"state_dict() instead",
            details=NOT_READ,
        )
    if names and all(name.endswith(".npy") for name in names):
        raise CorruptionError(
            f"{place}: arrays of NumPy (.npz), which are not read: load them with numpy.load and "
            f"save them with safetensors.numpy.save_file",
            details=NOT_READ,
        )
    if "data.pkl" not in names or not all(name.startswith(folder) for name in entries):
        raise CorruptionError(
            f"{place}: a ZIP archive, but not one of torch.save", details=NOT_READ
        )
    return folder


def _read_pickle_bytes(source: Source, entry: ZipEntry, place: str) -> bytes:
    if entry.nbytes > MAX_PICKLE_NBYTES:
        raise CorruptionError(f"{place}: a pickle of {entry.nbytes} bytes exceeds what is read")
    return read_bytes(source, entry.start, entry.nbytes)


def _small_text(source: Source, entry: ZipEntry) -> bytes:
    return read_bytes(source, entry.start, min(entry.nbytes, _MAX_SMALL_NBYTES)).strip()


def _check_byteorder(source: Source, entry: ZipEntry | None, place: str) -> None:
    # Files before torch 2.1 lack the entry; only little-endian machines wrote them in practice.
    order = b"little" if entry is None else _small_text(source, entry)
    if order == b"big":
        raise CorruptionError(
            f"{place}: its tensors are big-endian, which is not read; load it with torch on this "
            f"machine and save it again",
            details=NOT_READ,
        )
    if order != b"little":
        raise CorruptionError(f"{place}: its byte order is neither little nor big: it is damaged")


def _check_version(source: Source, entry: ZipEntry | None, place: str) -> None:
    text = b"" if entry is None else _small_text(source, entry)
    if not (text.isdigit() and len(text) < 5):
        raise CorruptionError(f"{place}: it does not state its version: damaged, or not of torch")


def _storage_range(
    entry: ZipEntry | None, storage: PickledStorage, has_crc: bool, place: str
) -> StorageRange:
    if entry is None:
        raise CorruptionError(f"{place}: the bytes of storage {shorten(storage.key)!r} are missing")
    if entry.nbytes != storage.nbytes:
        raise CorruptionError(
            f"{place}: storage {shorten(storage.key)!r} has {entry.nbytes} bytes, but "
            f"{storage.numel} elements of {storage.dtype} need {storage.nbytes}"
        )
    crc = entry.crc if has_crc else None
    return StorageRange(start=entry.start, nbytes=entry.nbytes, crc=crc)


# The legacy form: magic number, version, system, value, storage keys; then each storage behind its
# number of elements.


@dataclass(slots=True, kw_only=True)
class _Legacy:
    """The pickles of a legacy file; `end` is where its storages begin."""

    value: object
    storages: _Storages = field(default_factory=_Storages)
    keys: list[object] = field(default_factory=list)
    end: int = 0


def _open_legacy(source: Source, start: int, nbytes: int, place: str) -> TorchFile:
    legacy = _read_legacy(source, start, nbytes, place)
    if sorted(map(str, legacy.keys)) != sorted(legacy.storages.by_key):
        raise CorruptionError(f"{place}: its storages are not those that its tensors refer to")
    ranges: dict[str, StorageRange] = {}
    at = legacy.end
    for key in map(str, legacy.keys):
        storage = legacy.storages.by_key[key]
        if at + 8 + storage.nbytes > nbytes:
            raise CorruptionError(f"{place}: the file is cut in storage {shorten(key)!r}")
        num = int.from_bytes(read_bytes(source, start + at, 8), "little")
        if num != storage.numel:
            raise CorruptionError(
                f"{place}: storage {shorten(key)!r} has {num} elements, not {storage.numel}"
            )
        ranges[key] = StorageRange(start=start + at + 8, nbytes=storage.nbytes)
        at += 8 + storage.nbytes
    if at != nbytes:
        raise CorruptionError(f"{place}: {nbytes - at} bytes follow its last storage")
    return TorchFile(place=place, value=legacy.value, storages=ranges)


def _read_legacy(source: Source, start: int, nbytes: int, place: str) -> _Legacy:
    """Read the pickles. Their length is stated nowhere, so a growing part of the file is tried."""
    length = min(_LEGACY_STEP, nbytes)
    while True:
        data = read_bytes(source, start, length)
        try:
            return _parse_legacy(data, place)
        except CorruptionError:
            if length == min(nbytes, _MAX_LEGACY_PICKLE):
                raise
        length = min(4 * length, nbytes, _MAX_LEGACY_PICKLE)


def _parse_legacy(data: bytes, place: str) -> _Legacy:
    magic, at = read_pickle_at(data, 0, place=place, types={})
    version, at = read_pickle_at(data, at, place=place, types={})
    system, at = read_pickle_at(data, at, place=place, types={})
    if (magic, version) != (_LEGACY_MAGIC, _LEGACY_VERSION) or type(system) is not dict:
        raise CorruptionError(f"{place}: a legacy file of torch of an unknown version")
    if system.get("little_endian") is not True:
        raise CorruptionError(f"{place}: its tensors are big-endian, which is not read")
    storages = _Storages()
    value, at = read_pickle_at(data, at, place=place, persistent=storages)
    keys, at = read_pickle_at(data, at, place=place, types={})
    if type(keys) is not list or any(type(key) is not str for key in keys):
        raise CorruptionError(f"{place}: it does not list its storages")
    return _Legacy(value=value, storages=storages, keys=keys, end=at)
