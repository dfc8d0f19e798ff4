"""Digests: XXH3-64 for blocks of tensor bytes, XXH3-128 for whole records.

They detect damage, they are no defence against somebody who forges both bytes and digests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import xxhash

from holdfast.arrays.types import WordArray

Buffer = bytes | bytearray | memoryview

DEFAULT_BLOCK_NBYTES = 1 << 20
"""Bytes per digest of a chunk: hashing is at full speed from about 256 KiB on (docs/format.md)."""


digest128: Callable[[Buffer], str] = xxhash.xxh3_128_hexdigest
"""XXH3-128 of a whole buffer as 32 lower-case hexadecimal digits."""

digest64: Callable[[Buffer], int] = xxhash.xxh3_64_intdigest
"""XXH3-64 of a whole buffer."""


def block_digests(buffer: Buffer, block_nbytes: int) -> WordArray:
    """XXH3-64 of each block of `block_nbytes` (the last may be shorter); empty buffer, no blocks.

    Reads the buffer once in place, about 30 GB/s a core; the lock of the interpreter is released.
    """
    nbytes = len(buffer) if not isinstance(buffer, memoryview) else buffer.nbytes
    if 0 < nbytes <= block_nbytes:
        return np.array([digest64(buffer)], dtype=np.uint64)
    blocks = (digest64(block) for block in _blocks(buffer, block_nbytes))
    return np.fromiter(blocks, dtype=np.uint64, count=num_blocks(nbytes, block_nbytes))


def num_blocks(nbytes: int, block_nbytes: int) -> int:
    """How many digests a chunk of `nbytes` has."""
    return -(-nbytes // block_nbytes)


def _blocks(buffer: Buffer, block_nbytes: int) -> Iterator[memoryview]:
    view = memoryview(buffer).cast("B")
    for start in range(0, len(view), block_nbytes):
        yield view[start : start + block_nbytes]
