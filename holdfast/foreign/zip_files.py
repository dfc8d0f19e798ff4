"""Reads the directory of a ZIP archive as `torch.save` writes it: stored entries, no compression.

Only the end of the archive and the header in front of each entry are read. Everything that a file
states is checked against its size before it is used: an archive that was made to hurt is refused.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from holdfast.errors import CorruptionError
from holdfast.format.values import shorten
from holdfast.storage.storage_protocol import Source

MAX_ENTRIES = 2_000_000
MAX_DIRECTORY_NBYTES = 1 << 29

_END = struct.Struct("<4s4H2LH")
_END64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR = struct.Struct("<4sLQL")
_CENTRAL = struct.Struct("<4s6H3L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")
_END_MAGIC, _END64_MAGIC, _LOCATOR_MAGIC = b"PK\x05\x06", b"PK\x06\x06", b"PK\x06\x07"
_CENTRAL_MAGIC, _LOCAL_MAGIC = b"PK\x01\x02", b"PK\x03\x04"
_MAX_COMMENT = 0xFFFF
_FULL16, _FULL32 = 0xFFFF, 0xFFFFFFFF
_ENCRYPTED = 0x2041  # encrypted, strongly encrypted, masked header
_ZIP64_EXTRA = 1
_WINDOW_NBYTES = 1 << 12


@dataclass(frozen=True, slots=True, kw_only=True)
class ZipEntry:
    """The bytes of one entry: `start` is absolute in the file that holds the archive."""

    start: int
    nbytes: int
    crc: int
    """CRC-32 of the bytes, as the directory states it."""


@dataclass(slots=True, kw_only=True)
class _Row:
    """One row of the directory; `header` is relative to the archive."""

    name: str
    raw_name: bytes
    header: int
    nbytes: int
    crc: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Directory:
    start: int
    nbytes: int
    count: int


def read_directory(
    source: Source, *, start: int = 0, nbytes: int | None = None, place: str
) -> dict[str, ZipEntry]:
    """Return the entries of an archive by name, in the order of their bytes.

    Args:
        source: The file that holds the archive.
        start: Byte at which the archive begins.
        nbytes: Its length; None: up to the end of the file.
        place: The file, for messages.

    Raises:
        CorruptionError: It is not an archive of stored entries: cut, compressed, encrypted, or
            spread over disks; entries overlap, share a name, or leave their folder.

    Cost: linear in the directory; one small read for each entry that is far from the one before.
    """
    return _Reader(source, start, nbytes, place).entries()


def read_bytes(source: Source, start: int, nbytes: int) -> bytes:
    """Return bytes of a file; the caller has checked that they are inside of it."""
    buffer = bytearray(nbytes)
    if nbytes:
        source.readinto(memoryview(buffer), start=start)
    return bytes(buffer)


def checked_range(source: Source, start: int, nbytes: int | None, place: str) -> int:
    """Return the length of a range of a file; CorruptionError if it is not inside of the file."""
    length = source.nbytes - start if nbytes is None else nbytes
    if start < 0 or length < 0 or start + length > source.nbytes:
        raise CorruptionError(
            f"{place}: bytes {start} to {start + length} are not inside of a file of "
            f"{source.nbytes} bytes"
        )
    return length


class _Reader:
    """Reads one archive; positions are relative to its start."""

    def __init__(self, source: Source, start: int, nbytes: int | None, place: str) -> None:
        self._source = source
        self._start = start
        self._nbytes = checked_range(source, start, nbytes, place)
        self._place = place
        self._window = (0, b"")

    def entries(self) -> dict[str, ZipEntry]:
        """Read directory and headers, and check them against each other."""
        directory = self._directory()
        rows = sorted(self._rows(directory), key=lambda row: row.header)
        entries: dict[str, ZipEntry] = {}
        end = 0
        for i, row in enumerate(rows):
            if row.name in entries:
                raise self._flaw(f"two entries are named {row.name!r}")
            if row.header < end:
                raise self._flaw(f"entry {row.name!r} overlaps the one before it")
            following = rows[i + 1].header if i + 1 < len(rows) else directory.start
            begin = self._data_start(row, following)
            end = begin + row.nbytes
            if end > directory.start:
                raise self._flaw(f"entry {row.name!r} ends behind the start of the directory")
            entries[row.name] = ZipEntry(start=self._start + begin, nbytes=row.nbytes, crc=row.crc)
        return entries

    def _flaw(self, text: str) -> CorruptionError:
        return CorruptionError(f"{self._place}: {shorten(text, limit=200)}: damaged, or not ZIP")

    def _read(self, start: int, nbytes: int) -> bytes:
        if start < 0 or nbytes < 0 or start + nbytes > self._nbytes:
            raise self._flaw(f"byte {start} is outside of an archive of {self._nbytes} bytes")
        return read_bytes(self._source, self._start + start, nbytes)

    # The end of the archive.

    def _directory(self) -> _Directory:
        """Read the record at the end, and the 64-bit one in front of it if there is one."""
        # Archives of torch have no comment: one small read, of an archive among thousands.
        tail_start = max(0, self._nbytes - _END.size)
        tail = self._read(tail_start, self._nbytes - tail_start)
        if not tail.startswith(_END_MAGIC) or tail[-2:] != b"\0\0":
            tail_start = max(0, self._nbytes - _END.size - _MAX_COMMENT)
            tail = self._read(tail_start, self._nbytes - tail_start)
        at = self._end_record(tail)
        end_start = tail_start + at
        _, disk, first_disk, here, count, nbytes, start, _ = _END.unpack_from(tail, at)
        if disk not in (0, _FULL16) or first_disk not in (0, _FULL16) or here != count:
            raise self._flaw("the archive is spread over several disks")
        locator_start = end_start - _LOCATOR.size
        if locator_start >= 0:
            magic, _, end64_start, _ = _LOCATOR.unpack(self._read(locator_start, _LOCATOR.size))
            if magic == _LOCATOR_MAGIC:
                return self._checked(self._directory64(end64_start, locator_start), end64_start)
        if _FULL16 in (disk, first_disk, count) or _FULL32 in (nbytes, start):
            raise self._flaw("the record of a large archive is missing")
        return self._checked(_Directory(start=start, nbytes=nbytes, count=count), end_start)

    def _end_record(self, tail: bytes) -> int:
        """Return the position of the last record; a comment may follow it."""
        at = tail.rfind(_END_MAGIC)
        while at >= 0:
            rest = len(tail) - at - _END.size
            if rest >= 0 and _END.unpack_from(tail, at)[-1] == rest:
                return at
            at = tail.rfind(_END_MAGIC, 0, at)
        raise self._flaw("the record at the end of the archive is missing")

    def _directory64(self, start: int, limit: int) -> _Directory:
        if start + _END64.size > limit:
            raise self._flaw("the record of a large archive lies outside of it")
        magic, size, _, _, disk, first_disk, here, count, nbytes, begin = _END64.unpack(
            self._read(start, _END64.size)
        )
        if magic != _END64_MAGIC or size + 12 != limit - start:
            raise self._flaw("the record of a large archive is missing")
        if disk or first_disk or here != count:
            raise self._flaw("the archive is spread over several disks")
        return _Directory(start=begin, nbytes=nbytes, count=count)

    def _checked(self, directory: _Directory, limit: int) -> _Directory:
        """Refuse a directory that is not in front of its record, or cannot have that many rows."""
        if directory.start + directory.nbytes != limit:
            raise self._flaw("the directory does not end where its record begins")
        if directory.count > MAX_ENTRIES or directory.nbytes > MAX_DIRECTORY_NBYTES:
            raise self._flaw(f"{directory.count} entries exceed what is read")
        if directory.count * _CENTRAL.size > directory.nbytes:
            raise self._flaw(f"{directory.nbytes} bytes cannot hold {directory.count} entries")
        return directory

    # The directory.

    def _rows(self, directory: _Directory) -> Iterator[_Row]:
        data = self._read(directory.start, directory.nbytes)
        at = 0
        for _ in range(directory.count):
            if at + _CENTRAL.size > len(data):
                raise self._flaw("the directory is cut short")
            fields = _CENTRAL.unpack_from(data, at)
            magic, _, _, flags, method, _, _, crc, packed, nbytes = fields[:10]
            name_nbytes, extra_nbytes, comment_nbytes, disk, _, _, header = fields[10:]
            name_end = at + _CENTRAL.size + name_nbytes
            extra_end = name_end + extra_nbytes
            raw_name = data[name_end - name_nbytes : name_end]
            at_next = extra_end + comment_nbytes
            if magic != _CENTRAL_MAGIC or at_next > len(data):
                raise self._flaw("the directory is damaged")
            if flags & _ENCRYPTED:
                raise self._flaw("the archive is encrypted")
            if method:
                raise self._flaw("the archive is compressed, which torch.save never does")
            extra = data[name_end:extra_end]
            nbytes, packed, header = self._large(extra, nbytes, packed, header)
            if packed != nbytes or disk not in (0, _FULL16):
                raise self._flaw("an entry states two different sizes, or another disk")
            yield _Row(
                name=self._name(raw_name), raw_name=raw_name, header=header, nbytes=nbytes, crc=crc
            )
            at = at_next
        if at != len(data):
            raise self._flaw("the directory is longer than its entries")

    def _large(self, extra: bytes, *values: int) -> list[int]:
        """Return size, packed size and header, each from the 64-bit field if it is full."""
        if _FULL32 not in values:
            return list(values)
        at = 0
        while at + 4 <= len(extra):
            kind, nbytes = struct.unpack_from("<2H", extra, at)
            if kind == _ZIP64_EXTRA:
                field = extra[at + 4 : at + 4 + nbytes]
                num_full = values.count(_FULL32)
                if len(field) < 8 * num_full or at + 4 + nbytes > len(extra):
                    break
                large = iter(struct.unpack_from(f"<{num_full}Q", field))
                return [next(large) if value == _FULL32 else value for value in values]
            at += 4 + nbytes
        raise self._flaw("the 64-bit sizes of an entry are missing")

    def _name(self, raw: bytes) -> str:
        try:
            name = raw.decode("utf-8")
        except UnicodeDecodeError:
            raise self._flaw("the name of an entry is not text") from None
        if not name or "\0" in name or "\\" in name or name.startswith("/"):
            raise self._flaw(f"an entry has the impossible name {name!r}")
        if not {"..", "."}.isdisjoint(name.split("/")):
            raise self._flaw(f"the name {name!r} of an entry leaves its folder")
        return name

    # The entries.

    def _data_start(self, row: _Row, following: int) -> int:
        """Return where the data of an entry begins, from the header in front of it."""
        header = self._header(row.header, _LOCAL.size + len(row.raw_name), following)
        magic, _, flags, method, _, _, _, _, nbytes, name_nbytes, extra_nbytes = _LOCAL.unpack_from(
            header
        )
        if magic != _LOCAL_MAGIC or header[_LOCAL.size :] != row.raw_name:
            raise self._flaw(f"the header of entry {row.name!r} is not where the directory says")
        if method or flags & _ENCRYPTED or name_nbytes != len(row.raw_name):
            raise self._flaw(f"the header of entry {row.name!r} contradicts the directory")
        is_stated_later = bool(flags & 8)
        if nbytes not in (row.nbytes, _FULL32) and not (is_stated_later and nbytes == 0):
            raise self._flaw(f"the header of entry {row.name!r} states another size")
        return row.header + len(header) + int(extra_nbytes)

    def _header(self, start: int, nbytes: int, following: int) -> bytes:
        """Read a header; if the next one is near, the bytes up to there are read along with it."""
        begin, window = self._window
        if not begin <= start <= start + nbytes <= begin + len(window):
            is_near = following - start < _WINDOW_NBYTES // 4
            length = min(_WINDOW_NBYTES if is_near else nbytes, self._nbytes - start)
            begin, window = self._window = (start, self._read(start, max(length, nbytes)))
        return window[start - begin : start - begin + nbytes]
