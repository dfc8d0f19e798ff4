"""Elements of stored tensors, read in pieces."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from holdfast.arrays.boxes import Box, split_box
from holdfast.errors import CorruptionError
from holdfast.foreign import checksums
from holdfast.foreign.view import CatalogStorage
from holdfast.format.dtypes import DTYPES
from holdfast.format.reader import Snapshot

PIECE_NBYTES = 8 << 20
"""Bytes of a tensor that are in memory at once."""


def refuse_drift(snapshot: Snapshot, keys: Iterable[str]) -> None:
    """Raise CorruptionError, naming files and ranks, if stored copies of a tensor differ.

    Such a tensor has no one value: which copy is right is not stored.
    """
    if not snapshot.has_copies:
        return
    rows = [snapshot.rows_of(key) for key in keys]
    drift = snapshot.copies.drift(
        snapshot.index, snapshot.manifest, np.concatenate(rows) if rows else np.empty(0, np.int64)
    )
    if drift:
        raise CorruptionError(
            f"{snapshot.storage.describe(snapshot.directory)}: {drift}. Which copy is right is "
            f"not stored: load the checkpoint with on_drift='warn' to take the first one"
        )


def refuse_damage(snapshot: Snapshot, keys: Iterable[str]) -> None:
    """Raise CorruptionError if bytes of these tensors differ from a CRC-32 in a foreign file.

    Cost: of a foreign format with checksums, one more read of these bytes.
    """
    if isinstance(snapshot.storage, CatalogStorage):
        checksums.refuse_damage(snapshot.storage.catalog, keys=keys)


def read_elements(snapshot: Snapshot, key: str) -> Iterator[bytearray]:
    """All bytes of a tensor in row-major order, verified, in pieces of some MiB."""
    info = snapshot.tensor(key)
    shape, itemsize = tuple(info.shape), DTYPES[info.dtype].itemsize
    for box in split_box(Box((0,) * len(shape), shape), max_numel=PIECE_NBYTES // itemsize):
        yield read_box(snapshot, key, box)


def read_box(snapshot: Snapshot, key: str, box: Box) -> bytearray:
    """The bytes of a box of a tensor, verified."""
    data = bytearray(box.numel * DTYPES[snapshot.tensor(key).dtype].itemsize)
    snapshot.read_box(key, box, memoryview(data))
    return data
