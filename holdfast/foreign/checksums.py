"""Compares the bytes of a foreign checkpoint with the checksums that its files state.

Archives of `torch.save`, and so the items of PyTorch DCP, have a CRC-32 of each storage. No loader
of torch's compares them; here `verify`, a conversion and an export do. Loads read parts of
storages, and cannot.
"""

from __future__ import annotations

import zlib
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass

from holdfast.errors import CorruptionError, some_sentences
from holdfast.foreign.catalog import (
    Catalog,
    Checksum,
    HeldBytes,
    OpenFiles,
    StridedBytes,
    in_a_file,
)
from holdfast.format.verifier import Damage

_PIECE_NBYTES = 4 << 20
_MAX_SHOWN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedBytes:
    """What was compared, and what differs."""

    nbytes: int
    damages: list[Damage]


def compare_checksums(catalog: Catalog, *, keys: Iterable[str] | None = None) -> ComparedBytes:
    """Compare all bytes for which the files state a checksum.

    Args:
        catalog: The checkpoint.
        keys: Only ranges that these tensors lie in; None for all.

    Raises:
        CorruptionError, StorageError: A file cannot be read.

    Cost: reads these bytes once, on one core at some 4 GB/s.
    """
    nbytes = 0
    damages = []
    with OpenFiles(catalog.storage) as files:
        starts = None if keys is None else _starts_of(catalog, keys, files)
        for each in catalog.checksums(files):
            if starts is not None and not _has_any(each, starts.get(each.file, [])):
                continue
            crc = _crc_of(each, files)
            nbytes += each.nbytes
            if crc != each.crc:
                what = f"its bytes have another CRC-32 ({crc:08x}) than is stated ({each.crc:08x})"
                damages.append(Damage(file=each.file, key=each.key, offset=each.start, what=what))
    return ComparedBytes(nbytes=nbytes, damages=damages)


def refuse_damage(catalog: Catalog, *, keys: Iterable[str] | None = None) -> None:
    """Raise CorruptionError if bytes differ from their checksums.

    Arguments and cost: `compare_checksums`.
    """
    damages = compare_checksums(catalog, keys=keys).damages
    if damages:
        shown = [f"{each.file} byte {each.offset} ({each.key}): {each.what}" for each in damages]
        raise CorruptionError(
            f"{catalog.label} is damaged: {some_sentences(shown, most=_MAX_SHOWN)}. If it was "
            f"changed on purpose, load it with torch and save it again"
        )


def _starts_of(
    catalog: Catalog, keys: Iterable[str], files: OpenFiles
) -> dict[str, list[int] | None]:
    """Return by file the bytes, in order, at which chunks of tensors start.

    A chunk lies in one storage. None for a file with a chunk whose place is not known: any of its
    storages may be the one.
    """
    starts: dict[str, list[int] | None] = {}
    for key in keys:
        for chunk in catalog.tensors[key].chunks:
            payload = chunk.payload
            if isinstance(payload, HeldBytes) or not chunk.box.numel:
                continue
            place = payload if isinstance(payload, StridedBytes) else in_a_file(payload, files)
            there = starts.setdefault(payload.file, [])
            if place is None:
                starts[payload.file] = None
            elif there is not None:
                there.append(place.start)
    return {file: None if each is None else sorted(each) for file, each in starts.items()}


def _has_any(each: Checksum, starts: list[int] | None) -> bool:
    """Return True if one of these bytes is in the range of a checksum, or if they are unknown."""
    if starts is None:
        return True
    at = bisect_left(starts, each.start)
    return at < len(starts) and starts[at] < each.start + each.nbytes


def _crc_of(each: Checksum, files: OpenFiles) -> int:
    source, crc = files.source(each.file), 0
    buffer = memoryview(bytearray(min(_PIECE_NBYTES, each.nbytes)))
    for at in range(0, each.nbytes, _PIECE_NBYTES):
        piece = buffer[: min(_PIECE_NBYTES, each.nbytes - at)]
        source.readinto(piece, start=each.start + at)
        crc = zlib.crc32(piece, crc)
    return crc
