"""Elements of stored tensors, read in pieces and decoded without torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt

from holdfast.arrays.boxes import Box, split_box
from holdfast.arrays.types import AnyArray
from holdfast.errors import CorruptionError
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


def decode_elements(data: bytes | bytearray, dtype: str) -> AnyArray:
    """The elements in bytes of a dtype, as a flat array of a type that numpy has; exact."""
    native = DTYPES[dtype].numpy
    if native is not None:
        return np.frombuffer(data, dtype=native)
    if dtype == "BF16":
        return (np.frombuffer(data, dtype="<u2").astype(np.uint32) << 16).view(np.float32)
    if dtype == "C32":
        pairs = np.frombuffer(data, dtype="<f2").astype(np.float32)
        return pairs.view(np.complex64)
    return _eight_bit_table(dtype)[np.frombuffer(data, dtype=np.uint8)]


def _eight_bit_table(dtype: str) -> npt.NDArray[np.float32]:
    """The 256 values of an 8-bit float type, by code."""
    codes = np.arange(256)
    if dtype == "F8_E8M0":
        table = np.exp2(np.minimum(codes, 254) - 127.0).astype(np.float32)
        table[255] = np.nan
        return table
    bits, bias = {
        "F8_E4M3": (3, 7), "F8_E5M2": (2, 15), "F8_E4M3FNUZ": (3, 8), "F8_E5M2FNUZ": (2, 16),
    }[dtype]  # fmt: skip
    # One bit of sign, then the exponent, then `bits` bits of mantissa; exponent 0 is subnormal.
    sign = np.where(codes >= 128, -1.0, 1.0)
    exponent, mantissa = (codes & 127) >> bits, codes & ((1 << bits) - 1)
    fraction = mantissa / (1 << bits)
    normal = (1 + fraction) * np.exp2(exponent - float(bias))
    table = (sign * np.where(exponent == 0, fraction * 2.0 ** (1 - bias), normal)).astype(
        np.float32
    )
    if dtype.endswith("FNUZ"):
        table[128] = np.nan  # the code of minus zero is the only NaN
    elif dtype == "F8_E4M3":
        table[[127, 255]] = np.nan
    else:
        top = exponent == 31
        table[top] = np.where(mantissa[top] == 0, sign[top] * np.inf, np.nan)
    return table
