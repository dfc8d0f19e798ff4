"""Digests: XXH3-64 for blocks of tensor bytes, XXH3-128 for whole records.

They detect damage. They are not a defence against an attacker, who can forge bytes and digests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import numpy as np
import xxhash

from holdfast.arrays.types import WordArray

Buffer = bytes | bytearray | memoryview

DEFAULT_BLOCK_NBYTES = 1 << 20
"""Bytes per digest of a chunk; hashing has full speed from about 256 KiB (docs/format.md)."""


digest128: Callable[[Buffer], str] = xxhash.xxh3_128_hexdigest
"""XXH3-128 of a whole buffer as 32 lower-case hexadecimal digits."""

digest64: Callable[[Buffer], int] = xxhash.xxh3_64_intdigest
"""XXH3-64 of a whole buffer."""


def digest128_of(parts: Iterable[Buffer]) -> str:
    """Return `digest128` of all parts in a row, without joining them."""
    hashed = xxhash.xxh3_128()
    for part in parts:
        hashed.update(part)
    return str(hashed.hexdigest())


def block_digests(buffer: Buffer, block_nbytes: int) -> WordArray:
    """Return the XXH3-64 of each block of `block_nbytes`; the last block may be shorter.

    Reads the buffer once in place, at about 30 GB/s per core; releases the interpreter's lock.
    """
    nbytes = len(buffer) if not isinstance(buffer, memoryview) else buffer.nbytes
    if 0 < nbytes <= block_nbytes:
        return np.array([digest64(buffer)], dtype=np.uint64)
    blocks = (digest64(block) for block in _blocks(buffer, block_nbytes))
    return np.fromiter(blocks, dtype=np.uint64, count=num_blocks(nbytes, block_nbytes))


def num_blocks(nbytes: int, block_nbytes: int) -> int:
    """Return the number of digests of a chunk of `nbytes`."""
    return -(-nbytes // block_nbytes)


def _blocks(buffer: Buffer, block_nbytes: int) -> Iterator[memoryview]:
    view = memoryview(buffer).cast("B")
    for start in range(0, len(view), block_nbytes):
        yield view[start : start + block_nbytes]
