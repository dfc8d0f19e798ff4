"""Archives that Python's zipfile writes are read; what it would unpack, hide or misplace is not."""

from __future__ import annotations

import io
import random
import struct
import zipfile
import zlib
from typing import Any

import pytest

from holdfast.errors import CorruptionError
from holdfast.foreign.zip_files import ZipEntry, read_directory
from tests.foreign.making import MemorySource, saved

FILES = {"a/one": b"1" * 100, "a/two": b"", "a/three/ä": bytes(range(256)) * 300}
CENTRAL = b"PK\x01\x02"
END = b"PK\x05\x06"


def archive(files: dict[str, bytes] = FILES, **options: Any) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", **options) as target:
        for name, data in files.items():
            target.writestr(name, data)
    return buffer.getvalue()


def large(files: dict[str, bytes] = FILES) -> bytes:
    """The same with every size and position in 64 bits."""
    data, directory = b"", b""
    for name, content in files.items():
        raw = name.encode()
        crc = zlib.crc32(content)
        full = 0xFFFFFFFF
        extra = struct.pack("<2H3Q", 1, 24, len(content), len(content), len(data))
        local = struct.pack("<2H2Q", 1, 16, len(content), len(content))
        head = (45, 0x800, 0, 0, 0, crc, full, full, len(raw))
        directory += struct.pack("<4s6H3L5H2L", CENTRAL, 45, *head, len(extra), 0, 0, 0, 0, full)
        directory += raw + extra
        data += struct.pack("<4s5H3L2H", b"PK\x03\x04", *head, len(local)) + raw + local + content
    start, nbytes, num = len(data), len(directory), len(files)
    data += directory
    end64 = struct.pack("<4sQ2H2L4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, num, num, nbytes, start)
    locator = struct.pack("<4sLQL", b"PK\x06\x07", 0, len(data), 1)
    end = struct.pack("<4s4H2LH", END, 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0)
    return data + end64 + locator + end


def read(data: bytes, **options: Any) -> dict[str, ZipEntry]:
    return read_directory(MemorySource(data), place="file.zip", **options)


def contents(data: bytes, **options: Any) -> dict[str, bytes]:
    entries = read(data, **options)
    for entry in entries.values():
        assert entry.crc == zlib.crc32(data[entry.start : entry.start + entry.nbytes])
    return {n: data[e.start : e.start + e.nbytes] for n, e in entries.items()}


def commented() -> bytes:
    buffer = io.BytesIO(archive())
    with zipfile.ZipFile(buffer, "a") as target:
        target.comment = END + b" not the end " * 10
    return buffer.getvalue()


@pytest.mark.parametrize("data", [archive(), large(), commented()], ids=["plain", "64", "comment"])
def test_entries_are_where_they_are(data: bytes) -> None:
    assert contents(data) == FILES
    around = b"x" * 77 + data + b"PK\x05\x06" * 20
    assert contents(around, start=77, nbytes=len(data)) == FILES
    assert list(read(data)) == list(FILES)


def test_an_archive_without_entries() -> None:
    assert read(archive({})) == {}


def test_headers_are_read_together_only_where_they_are_near() -> None:
    files = {f"a/{i}": bytes(i) for i in range(300)}
    data = archive(files)
    source = MemorySource(data)
    assert {n: e.nbytes for n, e in read_directory(source, place="f").items()} == {
        name: len(content) for name, content in files.items()
    }
    assert source.num_read < 3 * len(data)
    sparse = archive({f"a/{i}": bytes(1 << 20) for i in range(8)})
    source = MemorySource(sparse)
    read_directory(source, place="f")
    assert source.num_read < (1 << 17) + 8 * 100


def patched(data: bytes, at: int, form: str, value: object) -> bytes:
    """The bytes with one field changed."""
    raw = struct.pack(form, value)
    return data[:at] + raw + data[at + len(raw) :]


def row(number: int, data: bytes | None = None) -> int:
    """The position of a row of the directory of a plain archive."""
    data = archive() if data is None else data
    at = -1
    for _ in range(number + 1):
        at = data.index(CENTRAL, at + 1)
    return at


PLAIN, LARGE = archive(), large()
LAST = len(PLAIN) - 22
TWICE = archive({"a/one": b"1", "a/two": b"2"}).replace(b"a/two", b"a/one")
DAMAGED = {
    "compressed": (archive(compression=zipfile.ZIP_DEFLATED), "compressed"),
    "method in the header": (patched(PLAIN, 8, "<H", 8), "contradicts"),
    "encrypted": (patched(PLAIN, row(0) + 8, "<H", 1), "encrypted"),
    "two sizes": (patched(PLAIN, row(0) + 20, "<L", 99), "two different sizes"),
    "size in the header": (patched(PLAIN, 22, "<L", 99), "another size"),
    "long": (
        patched(patched(PLAIN, row(2) + 20, "<L", 1 << 20), row(2) + 24, "<L", 1 << 20), "size",
    ),
    "overlap": (patched(PLAIN, row(1) + 42, "<L", 50), "overlaps"),
    "same header": (patched(PLAIN, row(1) + 42, "<L", 0), "overlaps|not where"),
    "header outside": (patched(PLAIN, row(1) + 42, "<L", 1 << 31), "outside"),
    "no header": (patched(PLAIN, 0, "<L", 0), "not where"),
    "other name": (PLAIN.replace(b"a/one", b"a/uno", 1), "not where"),
    "name twice": (TWICE, "two entries"),
    "leaves": (PLAIN.replace(b"a/one", b"../ne"), "leaves its folder"),
    "absolute": (PLAIN.replace(b"a/one", b"/aone"), "impossible name"),
    "backslash": (PLAIN.replace(b"a/one", b"a\\one"), "impossible name"),
    "zero": (PLAIN.replace(b"a/one", b"a/\x00ne"), "impossible name"),
    "no text": (PLAIN.replace(b"a/one", b"a/\xffne"), "not text"),
    "many": (
        patched(patched(PLAIN, LAST + 8, "<H", 65000), LAST + 10, "<H", 65000), "cannot hold",
    ),
    "few": (patched(patched(PLAIN, LAST + 8, "<H", 1), LAST + 10, "<H", 1), "longer"),
    "disks": (patched(PLAIN, LAST + 4, "<H", 1), "disks"),
    "directory": (patched(PLAIN, LAST + 16, "<L", 5), "does not end"),
    "64 bits missing": (patched(PLAIN, LAST + 16, "<L", 0xFFFFFFFF), "large archive"),
    "64-bit sizes missing": (patched(PLAIN, row(0) + 42, "<L", 0xFFFFFFFF), "64-bit sizes"),
    "64-bit record": (patched(LARGE, len(LARGE) - 34, "<Q", 1 << 62), "large archive"),
    "64-bit start": (patched(LARGE, len(LARGE) - 50, "<Q", 1 << 62), "does not end"),
    "64-bit count": (
        patched(patched(LARGE, len(LARGE) - 66, "<Q", 1 << 62), len(LARGE) - 74, "<Q", 1 << 62),
        "exceed",
    ),
    "empty": (b"", "end of the archive"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGED)
def test_what_contradicts_itself_is_refused(name: str) -> None:
    data, reason = DAMAGED[name]
    with pytest.raises(CorruptionError, match=reason) as raised:
        read(data)
    assert str(raised.value).startswith("file.zip: ")


@pytest.mark.parametrize("data", [PLAIN, LARGE], ids=["plain", "64"])
def test_every_cut(data: bytes) -> None:
    small = {"a/one": b"1" * 100, "a/two": b""}
    whole = archive(small) if data is PLAIN else large(small)
    for end in range(len(whole)):
        with pytest.raises(CorruptionError):
            read(whole[:end])
        with pytest.raises(CorruptionError):
            read(whole, nbytes=end)


def test_random_changes() -> None:
    """Refused, or all entries lie inside of the file and apart from each other."""
    rng = random.Random(5)
    small = {"a/one": b"1" * 100, "a/two": b"", "a/three": b"3" * 50}
    for whole in (archive(small), large(small), saved([1, 2])):
        for _ in range(2000):
            data = bytearray(whole)
            for _ in range(rng.choice((1, 1, 2, 6))):
                data[rng.randrange(len(data))] = rng.choice((0, 1, 255, rng.randrange(256)))
            try:
                entries = read(bytes(data))
            except CorruptionError:
                continue
            end = 0
            for entry in entries.values():
                assert end < entry.start <= entry.start + entry.nbytes <= len(data)
                end = entry.start + entry.nbytes
