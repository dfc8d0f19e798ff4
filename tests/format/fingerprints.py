"""Fingerprints of stored tensors, computed again from the bytes on storage."""

from __future__ import annotations

from collections.abc import Collection

from holdfast.arrays.boxes import split_box
from holdfast.format.dtypes import DTYPES
from holdfast.format.fingerprint import combine, fingerprint_box
from holdfast.format.reader import Snapshot

_READ_NBYTES = 16 << 20


def snapshot_fingerprint(snapshot: Snapshot, key: str) -> str:
    """That of one tensor: every chunk is read once and verified."""
    info = snapshot.tensor(key)
    itemsize = DTYPES[info.dtype].itemsize
    rows = snapshot.rows_of(key)
    partials = []
    for row in rows[snapshot.index.copy[rows] == 0].tolist():
        chunk = snapshot.index.box(row, ndim=len(info.shape))
        for box in split_box(chunk, max_numel=_READ_NBYTES // itemsize):
            buffer = memoryview(bytearray(box.numel * itemsize))
            snapshot.read_box(key, box, buffer)
            partials.append(fingerprint_box(buffer, dtype=info.dtype, shape=info.shape, box=box))
    return combine(partials, dtype=info.dtype, shape=info.shape)


def snapshot_fingerprints(
    snapshot: Snapshot, keys: Collection[str] | None = None
) -> dict[str, str]:
    """Those of several tensors, by default of all."""
    chosen = snapshot.keys if keys is None else keys
    return {key: snapshot_fingerprint(snapshot, key) for key in chosen}
