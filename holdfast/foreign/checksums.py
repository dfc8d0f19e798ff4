"""Compares the bytes of a foreign checkpoint with the checksums that its files state.

Archives of `torch.save`, and so the items of PyTorch DCP, have a CRC-32 of each storage. No loader
of torch's compares them; here `verify` and a conversion do. Loads read parts of storages, and
cannot.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass

from holdfast.errors import CorruptionError, some_sentences
from holdfast.foreign.catalog import Catalog, Checksum, OpenFiles
from holdfast.format.verifier import Damage

_PIECE_NBYTES = 4 << 20
_MAX_SHOWN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedBytes:
    """What was compared, and what differs."""

    nbytes: int
    damages: list[Damage]


def compare_checksums(
    catalog: Catalog, on_progress: Callable[[int], object] = lambda nbytes: None
) -> ComparedBytes:
    """Compare all bytes for which the files state a checksum.

    Args:
        catalog: The checkpoint.
        on_progress: Called with the number of bytes of each piece.

    Raises:
        CorruptionError, StorageError: A file cannot be read.

    Cost: reads these bytes once, on one core at some 4 GB/s.
    """
    nbytes = 0
    damages = []
    with OpenFiles(catalog.storage) as files:
        for each in catalog.checksums(files):
            crc = _crc_of(each, files, on_progress)
            nbytes += each.nbytes
            if crc != each.crc:
                what = f"its bytes have another CRC-32 ({crc:08x}) than is stated ({each.crc:08x})"
                damages.append(Damage(file=each.file, key=each.key, offset=each.start, what=what))
    return ComparedBytes(nbytes=nbytes, damages=damages)


def refuse_damage(catalog: Catalog) -> None:
    """Raise CorruptionError if bytes differ from their checksums. Cost: `compare_checksums`."""
    damages = compare_checksums(catalog).damages
    if damages:
        shown = [f"{each.file} byte {each.offset} ({each.key}): {each.what}" for each in damages]
        raise CorruptionError(
            f"{catalog.label} is damaged: {some_sentences(shown, most=_MAX_SHOWN)}. If it was "
            f"changed on purpose, load it with torch and save it again"
        )


def _crc_of(each: Checksum, files: OpenFiles, on_progress: Callable[[int], object]) -> int:
    source, crc = files.source(each.file), 0
    buffer = memoryview(bytearray(min(_PIECE_NBYTES, each.nbytes)))
    for at in range(0, each.nbytes, _PIECE_NBYTES):
        piece = buffer[: min(_PIECE_NBYTES, each.nbytes - at)]
        source.readinto(piece, start=each.start + at)
        crc = zlib.crc32(piece, crc)
        on_progress(len(piece))
    return crc
