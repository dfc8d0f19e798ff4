"""Memory of this process by address: views of it, and many copies by one call."""

from __future__ import annotations

import ctypes
from collections import deque

import numpy as np

from holdfast.arrays.types import IntArray

SMALL_NBYTES = 128 << 10
"""Ranges up to here are copied without giving up the interpreter's lock, which costs as much as
copying a kilobyte, and as much again where another thread waits for it."""
_NUM_TOGETHER = 64
"""So many of these are copied before another thread may run."""
_ADDRESS = ctypes.cast(ctypes.memmove, ctypes.c_void_p).value or 0
_memmove = ctypes.PYFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(_ADDRESS)

MEMORY = memoryview((ctypes.c_char * (1 << 62)).from_address(0)).cast("B")
"""All addresses of this process. A slice is a view of the bytes there, for a tenth of what an array
of `ctypes` costs; the caller keeps them alive."""


def memory_at(address: int, nbytes: int) -> memoryview:
    """Return memory of this process, which the caller keeps alive."""
    return MEMORY[address : address + nbytes]


def copy_ranges(target: IntArray, source: IntArray, nbytes: IntArray) -> None:
    """Copy ranges of bytes of this process's memory; none may overlap another.

    Args:
        target: (n,) address that each is copied to.
        source: (n,) address that it is copied from.
        nbytes: (n,) its length; one of 0 has no addresses.

    Cost: 0.3 µs for each range, and the copy.
    """
    is_small = nbytes <= SMALL_NBYTES
    small = np.flatnonzero(is_small & (nbytes > 0))
    columns = [each[small].tolist() for each in (target, source, nbytes)]
    for first in range(0, len(small), _NUM_TOGETHER):
        some = [each[first : first + _NUM_TOGETHER] for each in columns]
        deque(map(_memmove, *some), maxlen=0)
    for i in np.flatnonzero(~is_small).tolist():
        ctypes.memmove(int(target[i]), int(source[i]), int(nbytes[i]))


def join_ranges(
    target: IntArray, source: IntArray, nbytes: IntArray
) -> tuple[IntArray, IntArray, IntArray]:
    """Join ranges that are neighbours of the one before at both ends; as of `copy_ranges`."""
    stop = nbytes[:-1]
    is_joined = (source[1:] == source[:-1] + stop) & (target[1:] == target[:-1] + stop)
    if not is_joined.any():
        return target, source, nbytes
    first = np.append(0, np.flatnonzero(~is_joined) + 1)
    total: IntArray = np.add.reduceat(nbytes, first)
    return target[first], source[first], total
