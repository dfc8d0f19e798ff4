"""The layout of what `torch.save` writes: a ZIP archive of a pickle and the storages of tensors.

Members are stored, not compressed, and begin at multiples of 64 bytes, which a padding field in
their headers makes so: a loader may map them. Checksums of storages (CRC-32) come with their bytes;
the layout states where they are to be written. An archive may have none, and zeros in their place,
as after `torch.serialization.set_crc32_options(False)`: torch compares none when it loads.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from holdfast.format.digest import digest128
from holdfast.format.dtypes import DTYPES, STORAGE_DTYPES, TORCH_DTYPES
from holdfast.format.envelopes.pickle_output import Global, Made, Persistent, pickled

ALIGNMENT = 64
_FOLDER = "archive"
_FULL32 = 0xFFFFFFFF
_FULL16 = 0xFFFF
_PADDING = b"FB"
_UTF8 = 0x800
_LOCAL = struct.Struct("<4s5H3I2H")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_END64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR = struct.Struct("<4sIQI")
_END = struct.Struct("<4s4H2IH")
_CRC_IN_LOCAL = 14
_CRC_IN_CENTRAL = 16
_PLAIN_VERSION, _LARGE_VERSION = 20, 45

TORCH_NAMES: Mapping[str, str] = MappingProxyType({v: k for k, v in TORCH_DTYPES.items()})
"""Name in `DTYPES` -> name in torch."""
_TYPED = {dtype: name for name, dtype in STORAGE_DTYPES.items() if "Untyped" not in name}


@dataclass(frozen=True, slots=True, kw_only=True)
class Archive:
    """An archive as a part of a file.

    Args:
        start: Byte of the file where it begins.
        nbytes: Its length.
        literals: Bytes that are known, by their place in the file.
        starts: Of each storage.
        crc_at: Of each storage, where its CRC-32 goes; empty for an archive without checksums.
    """

    start: int
    nbytes: int
    literals: Sequence[tuple[int, bytes]]
    starts: Sequence[int]
    crc_at: Sequence[tuple[int, ...]]

    def moved(self, start: int) -> Archive:
        """Return the same archive at another place; nothing in it depends on where it lies."""
        by = start - self.start
        return Archive(
            start=start,
            nbytes=self.nbytes,
            literals=[(at + by, data) for at, data in self.literals],
            starts=[at + by for at in self.starts],
            crc_at=[tuple(at + by for at in places) for places in self.crc_at],
        )


def tensor_value(dtype: str, shape: Sequence[int], storage: int) -> Made:
    """Describe a contiguous tensor that is all of a storage.

    Args:
        dtype: Name in `DTYPES`.
        shape: Its shape.
        storage: Number of the storage in the archive.
    """
    numel = math.prod(shape)
    strides = [math.prod(max(n, 1) for n in shape[dim + 1 :]) for dim in range(len(shape))]
    view: tuple[Any, ...] = (0, tuple(shape), tuple(strides), False, OrderedDict())
    if dtype in _TYPED:
        module, _, name = _TYPED[dtype].rpartition(".")
        place = ("storage", Global(module, name), str(storage), "cpu", numel)
        by = Global("torch._utils", "_rebuild_tensor_v2")
        return Made(by=by, args=(Persistent(place), *view))
    # Types that torch has had since it has untyped storages.
    nbytes = numel * DTYPES[dtype].itemsize
    untyped = Global("torch.storage", "UntypedStorage")
    place = ("storage", untyped, str(storage), "cpu", nbytes)
    by = Global("torch._utils", "_rebuild_tensor_v3")
    return Made(by=by, args=(Persistent(place), *view, torch_dtype(dtype)))


def torch_dtype(dtype: str) -> Global:
    """Name a type of torch's."""
    return Global("torch", TORCH_NAMES[dtype])


def layout_archive(
    pickle: bytes, storages: Sequence[int], *, has_checksums: bool = True
) -> Archive:
    """Lay out an archive.

    Args:
        pickle: Of the value.
        storages: Bytes of each storage, by its number.
        has_checksums: False for zeros in the place of every CRC-32.

    Returns:
        The archive at byte 0. It may be moved, by multiples of 64 bytes to keep storages aligned.

    Cost: linear in the number of storages.
    """
    writer = _Writer(has_checksums)
    writer.add("data.pkl", pickle)
    writer.add("byteorder", b"little")
    for number, nbytes in enumerate(storages):
        writer.add_storage(f"data/{number}", nbytes)
    writer.add("version", b"3\n")
    # A number that torch shows in its logs: of the same contents it is the same.
    digest = digest128(pickle + repr(list(storages)).encode())
    writer.add(".data/serialization_id", str(int(digest, 16) % 10**40).zfill(40).encode())
    return writer.finish()


def tensor_archive(dtype: str, shape: Sequence[int], *, has_checksums: bool = True) -> Archive:
    """Lay out the archive of one contiguous tensor, whose only storage is its bytes."""
    nbytes = math.prod(shape) * DTYPES[dtype].itemsize
    value = pickled(tensor_value(dtype, shape, 0))
    return layout_archive(value, [nbytes], has_checksums=has_checksums)


def value_archive(value: object) -> bytes:
    """Return the archive of a value without tensors; PlanError if it cannot be pickled."""
    ((_, data),) = layout_archive(pickled(value), []).literals
    return data


class _Writer:
    """Lays out member after member."""

    def __init__(self, has_checksums: bool) -> None:
        self._has_checksums = has_checksums
        self._at = 0
        """Of the next byte."""
        self._literals: list[tuple[int, bytearray]] = [(0, bytearray())]
        self._central = bytearray()
        self._num_members = 0
        self._starts: list[int] = []
        self._crc_at: list[list[int]] = []
        self._crc_in_central: list[int] = []

    def add(self, name: str, data: bytes) -> None:
        """Add a member that is known."""
        self._header(name, len(data), zlib.crc32(data) if self._has_checksums else 0)
        self._put(data)

    def add_storage(self, name: str, nbytes: int) -> None:
        """Add a storage, whose bytes come later."""
        header, entry = self._at, len(self._central)
        self._header(name, nbytes, 0)
        self._starts.append(self._at)
        if self._has_checksums:
            self._crc_at.append([header + _CRC_IN_LOCAL])
            self._crc_in_central.append(entry + _CRC_IN_CENTRAL)
        if nbytes:
            self._at += nbytes
            self._literals.append((self._at, bytearray()))

    def finish(self) -> Archive:
        """Add the directory."""
        begin, end = self._at, self._at + len(self._central)
        count = self._num_members
        for places, entry in zip(self._crc_at, self._crc_in_central, strict=True):
            places.append(begin + entry)
        self._put(self._central)
        sizes = (len(self._central), begin)
        self._put(
            _END64.pack(
                b"PK\x06\x06", _END64.size - 12, _LARGE_VERSION, _LARGE_VERSION, 0, 0,
                count, count, *sizes,
            )
        )  # fmt: skip
        self._put(_LOCATOR.pack(b"PK\x06\x07", 0, end, 1))
        few = min(count, _FULL16)
        self._put(_END.pack(b"PK\x05\x06", 0, 0, few, few, *(min(n, _FULL32) for n in sizes), 0))
        return Archive(
            start=0,
            nbytes=self._at,
            literals=[(at, bytes(data)) for at, data in self._literals if data],
            starts=self._starts,
            crc_at=[tuple(places) for places in self._crc_at],
        )

    def _put(self, data: bytes | bytearray) -> None:
        self._literals[-1][1].extend(data)
        self._at += len(data)

    def _header(self, name: str, nbytes: int, crc: int) -> None:
        """Write the header of a member, and its entry in the directory."""
        header, raw = self._at, f"{_FOLDER}/{name}".encode()
        is_large = nbytes >= _FULL32
        large = struct.pack("<2H2Q", 1, 16, nbytes, nbytes) if is_large else b""
        size = _FULL32 if is_large else nbytes
        ends = header + _LOCAL.size + len(raw) + len(large) + 4
        padding = struct.pack("<2sH", _PADDING, -ends % ALIGNMENT) + bytes(-ends % ALIGNMENT)
        version = _LARGE_VERSION if is_large else _PLAIN_VERSION
        extra = len(large) + len(padding)
        # The first day that the format knows: equal contents are equal files.
        common = (version, _UTF8, 0, 0, 0x21, crc, size, size, len(raw))
        self._put(_LOCAL.pack(b"PK\x03\x04", *common, extra) + raw + large + padding)
        numbers = [nbytes, nbytes] if is_large else []
        numbers += [header] if header >= _FULL32 else []
        field = struct.pack(f"<2H{len(numbers)}Q", 1, 8 * len(numbers), *numbers)
        field = field if numbers else b""
        self._central += _CENTRAL.pack(
            b"PK\x01\x02", _LARGE_VERSION, *common, len(field), 0, 0, 0, 0, min(header, _FULL32)
        )
        self._central += raw + field
        self._num_members += 1
