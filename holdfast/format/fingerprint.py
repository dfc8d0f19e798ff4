"""Fingerprints of logical tensors, the same however a tensor was cut into shards.

A tensor is a row of small numbers: its elements in row-major order, each as its little-endian
16-bit units (one-byte elements: as their byte), `c[0], c[1], …, c[n-1]`. A lane of its fingerprint
is the polynomial with these coefficients at a fixed point, `sum(c[i] * x**i) mod 2**61 - 1` (Karp
and Rabin 1987). Each unit brings its place along as its exponent, so any box of the tensor can be
evaluated on its own, by whoever holds it, and the boxes of a tiling add up to the whole. Two
points make two lanes; fingerprint = XXH3-128 of dtype, shape and both sums.

Both points are generators of the field, so `x**i` differ for all i below 2**61 - 2: changing the
units of one element, or exchanging two different elements, always changes both lanes. Any other
change escapes if the difference has a root at both points: for data that was not made for these
points, one chance in 2**122. Not a defence against somebody who forges data.

Speed: the products are exact sums in float64 matrix products (16-bit units times 21-bit limbs of
powers, at most 4096 of them, stay below 2**53), so that BLAS does the work.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from holdfast.errors import PlanError
from holdfast.format.digest import digest128
from holdfast.format.dtypes import DTYPES, dtype_named
from holdfast.format.pieces import split_box
from holdfast.format.reader import Snapshot
from holdfast.geometry import Box

PRIME = 2**61 - 1
"""The modulus of both lanes."""

POINTS = (0x0CB3_C2D5_3F0E_9B4D, 0x13A1_8E1F_79B5_60A6)
"""Where the polynomial is evaluated; both generate the multiplicative group modulo `PRIME`."""

_Words = npt.NDArray[np.uint64]
_Ints = npt.NDArray[np.int64]
_Units = npt.NDArray[np.unsignedinteger]

_TILE = 4096
"""Units of one exact dot product: 4096 units of 16 bits times limbs of 21 bits are below 2**49."""

_GROUP = 1 << 17
"""Units turned into float64 at a time: 1 MiB of scratch."""

_DIGIT_BITS = 8
_NUM_DIGITS = 8
_LIMB_BITS = 21
_NUM_LIMBS = 3
_READ_NBYTES = 16 << 20

_P = np.uint64(PRIME)
_LOW30, _LOW31, _LOW32 = (np.uint64(2**n - 1) for n in (30, 31, 32))
_30, _31, _32, _61 = (np.uint64(n) for n in (30, 31, 32, 61))


def _digit_powers() -> _Words:
    """`table[lane, j, d]` = point ** (d * 256**j), by which any power is a few products."""
    table = np.empty((len(POINTS), _NUM_DIGITS, 1 << _DIGIT_BITS), dtype=np.uint64)
    for lane, point in enumerate(POINTS):
        for digit in range(_NUM_DIGITS):
            power = 1
            for d in range(1 << _DIGIT_BITS):
                table[lane, digit, d] = power
                power = power * point % PRIME
            point = power
    table.setflags(write=False)
    return table


_POWERS = _digit_powers()


@dataclass(frozen=True, slots=True, kw_only=True)
class Partial:
    """The share of one box in the fingerprint of its tensor: both lanes, and how many elements."""

    lanes: tuple[int, int]
    numel: int


def fingerprint_box(
    data: memoryview, *, dtype: str, shape: Sequence[int], box: Box
) -> Partial:
    """The share of `box` in the fingerprint of a tensor of `shape` (global) and `dtype`.

    `data`: the bytes of the box, row-major and contiguous. Raises PlanError when they are not as
    many as the box has, or the box leaves the tensor. Reads the data once, with about 5 MiB of
    scratch; the lock of the interpreter is mostly released.
    """
    itemsize = dtype_named(dtype).itemsize
    whole = Box((0,) * len(shape), tuple(shape))
    if not whole.contains(box):
        raise PlanError(f"{box} is not inside a tensor of shape {tuple(shape)}")
    if data.nbytes != box.numel * itemsize or not data.c_contiguous:
        raise PlanError(f"{box} of {dtype} has {box.numel * itemsize} bytes, not {data.nbytes}")
    if box.numel == 0:
        return Partial(lanes=(0, 0), numel=0)
    width = 1 if itemsize == 1 else itemsize // 2
    units = np.frombuffer(data, dtype="<u1" if itemsize == 1 else "<u2")
    strides, stride = [1], width
    for size in reversed(shape):
        strides.append(stride)
        stride *= size
    strides.reverse()
    first = sum(o * s for o, s in zip(box.offset, strides, strict=False))
    sums = [0, 0]
    _add_block(units.reshape(*box.shape, width), strides, first, sums)
    return Partial(lanes=(sums[0] % PRIME, sums[1] % PRIME), numel=box.numel)


def add(partials: Iterable[Partial]) -> Partial:
    """The share of several boxes together."""
    low = high = numel = 0
    for partial in partials:
        low += partial.lanes[0]
        high += partial.lanes[1]
        numel += partial.numel
    return Partial(lanes=(low % PRIME, high % PRIME), numel=numel)


def combine(partials: Iterable[Partial], *, dtype: str, shape: Sequence[int]) -> str:
    """The fingerprint of a tensor from the shares of boxes that tile it, 32 hexadecimal digits.

    Raises PlanError when the boxes together have not as many elements as the tensor.
    """
    total = add(partials)
    numel = math.prod(shape)
    if total.numel != numel:
        raise PlanError(
            f"a fingerprint of a tensor of shape {tuple(shape)} needs the shares of {numel} "
            f"elements, those of {total.numel} were given"
        )
    dims = ",".join(map(str, shape))
    return digest128(f"{dtype};{dims};{total.lanes[0]:016x};{total.lanes[1]:016x}".encode())


def snapshot_fingerprint(snapshot: Snapshot, key: str) -> str:
    """The fingerprint of one stored tensor, from its bytes: every chunk read once and verified.

    Raises MismatchError for an unknown key, CorruptionError for damage. About 16 MiB of memory.
    """
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
    """Fingerprints of stored tensors (default: all) from their bytes; see snapshot_fingerprint."""
    wanted = snapshot.keys if keys is None else keys
    return {key: snapshot_fingerprint(snapshot, key) for key in wanted}


def _add_block(units: _Units, strides: Sequence[int], first: int, sums: list[int]) -> None:
    """Add the value of a block of units whose first has exponent `first`, dims `strides` apart.

    The block is seen as rows times a tile of at most `_TILE` units; what is left over when a dim
    does not divide is a block of its own.
    """
    units, strides = _collapse(units, strides)
    tile = 1
    dim = units.ndim
    while dim and tile * units.shape[dim - 1] <= _TILE:
        dim -= 1
        tile *= units.shape[dim]
    if dim:
        count = units.shape[dim - 1]
        num_steps = -(-count // (_TILE // tile))
        step = -(-count // num_steps)
        even = count // step * step
        if even < count:
            cut = (slice(None),) * (dim - 1)
            rest = units[(*cut, slice(even, None))]
            _add_block(rest, strides, first + even * strides[dim - 1], sums)
            units = units[(*cut, slice(0, even))]
        if step > 1:
            head, tail = units.shape[: dim - 1], units.shape[dim:]
            units = _split(units, dim - 1, step)
            inner = strides[dim - 1]
            strides = [*strides[: dim - 1], step * inner, inner, *strides[dim:]]
            assert units.shape == (*head, even // step, step, *tail)
    _add_tiles(units, strides, dim, first, sums)


def _split(units: _Units, dim: int, step: int) -> _Units:
    """One dim as two, without a copy, also when the array is not contiguous."""
    shape, strides = units.shape, units.strides
    return np.lib.stride_tricks.as_strided(
        units,
        shape=(*shape[:dim], shape[dim] // step, step, *shape[dim + 1 :]),
        strides=(*strides[:dim], strides[dim] * step, *strides[dim:]),
        writeable=False,
    )
