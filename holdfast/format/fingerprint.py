"""Fingerprints of logical tensors, the same however a tensor was cut into shards.

A tensor is a row of small numbers: its elements in row-major order, each as its little-endian
16-bit units (one-byte elements: as their byte), `c[0], c[1], …, c[n-1]`. A lane of its fingerprint
is the polynomial with these coefficients at a fixed point, `sum(c[i] * x**i) mod 2**61 - 1` (Karp
and Rabin 1987). Each unit brings its place along as its exponent, so any box of the tensor can be
evaluated alone, by the process that holds it, and the boxes of a tiling add up to the whole. Two
points make two lanes. The fingerprint is the XXH3-128 of dtype, shape and both sums.

Both points are generators of the field, so `x**i` differ for all i below 2**61 - 2: changing the
units of one element, or exchanging two different elements, always changes both lanes. Any other
change escapes if the difference has a root at both points: for data that was not made for these
points, one chance in 2**122. It is not a defence against forged data.

Speed: the products are exact sums in float64 matrix products (16-bit units times 21-bit limbs of
powers, at most 4096 of them, stay below 2**53), so that BLAS does the work.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from holdfast.arrays.boxes import Box, split_box
from holdfast.arrays.types import FloatArray, IntArray, WordArray
from holdfast.errors import PlanError
from holdfast.format.digest import digest128
from holdfast.format.dtypes import dtype_named

PRIME = 2**61 - 1
"""The modulus of both lanes."""

POINTS = (0x0487_ED51_10B4_612C, 0x16FC_2A2C_515D_A557)
"""Where the polynomial is evaluated: the first generators of the multiplicative group modulo
`PRIME` from the first 61 bits of the fractions of pi and of e on."""

_Units = npt.NDArray[np.unsignedinteger]

_TILE = 4096
"""Units of one exact dot product: 4096 units of 16 bits times limbs of 21 bits are below 2**49."""

_GROUP = 1 << 17
"""Units turned into float64 at a time: 1 MiB of scratch."""

_DIGIT_BITS = 8
_NUM_DIGITS = 8
_LIMB_BITS = 21
_NUM_LIMBS = 3

_P = np.uint64(PRIME)
_LOW30, _LOW31, _LOW32 = (np.uint64(2**n - 1) for n in (30, 31, 32))
_30, _31, _32, _61 = (np.uint64(n) for n in (30, 31, 32, 61))


def _digit_powers() -> WordArray:
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
    """The share of one box in its tensor's fingerprint: both lanes, and number of elements."""

    lanes: tuple[int, int]
    numel: int


def fingerprint_box(data: memoryview, *, dtype: str, shape: Sequence[int], box: Box) -> Partial:
    """Return the share of `box` in the fingerprint of its tensor.

    Args:
        data: The bytes of the box, row-major and contiguous.
        dtype: Element type of the tensor.
        shape: Shape of the whole tensor.
        box: The box in it.

    Raises:
        PlanError: The data do not have the size of the box, or the box leaves the tensor.

    Cost: reads the data once, with about 5 MiB of scratch; the lock of the interpreter is mostly
    released.
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
    """Return the share of several boxes together."""
    low = high = numel = 0
    for partial in partials:
        low += partial.lanes[0]
        high += partial.lanes[1]
        numel += partial.numel
    return Partial(lanes=(low % PRIME, high % PRIME), numel=numel)


def combine(partials: Iterable[Partial], *, dtype: str, shape: Sequence[int]) -> str:
    """Return the fingerprint of a tensor, 32 hexadecimal digits, from the shares of its boxes.

    Raises:
        PlanError: The boxes do not have as many elements as the tensor.
    """
    total = add(partials)
    numel = math.prod(shape)
    if total.numel != numel:
        raise PlanError(
            f"the fingerprint of a tensor of shape {tuple(shape)} needs the shares of {numel} "
            f"elements, got those of {total.numel}"
        )
    dims = ",".join(map(str, shape))
    return digest128(f"{dtype};{dims};{total.lanes[0]:016x};{total.lanes[1]:016x}".encode())


def _add_block(units: _Units, strides: Sequence[int], first: int, sums: list[int]) -> None:
    """Add the value of a block of units to the sums of both lanes.

    The block is viewed as many tiles of one shape, of at most `_TILE` units each. If a dim does not
    divide, the rest is added as another block.

    Args:
        units: The block.
        strides: Growth of the exponent along each dim.
        first: Exponent of the first unit.
        sums: One per lane, added to in place.
    """
    units, strides = _collapse(units, strides)
    dim, tile = units.ndim, 1
    while dim and tile * units.shape[dim - 1] <= _TILE:
        dim -= 1
        tile *= units.shape[dim]
    if dim:
        # The tile takes `step` of the dim that is too long as a whole.
        count, stride = units.shape[dim - 1], strides[dim - 1]
        step = -(-count // -(-count // (_TILE // tile)))
        whole = count // step * step
        before = (slice(None),) * (dim - 1)
        if whole < count:
            rest = units[(*before, slice(whole, None))]
            _add_block(rest, strides, first + whole * stride, sums)
        shape = units.shape
        units = units[(*before, slice(0, whole))]
        units = units.reshape(*shape[: dim - 1], whole // step, step, *shape[dim:])
        strides = [*strides[: dim - 1], step * stride, stride, *strides[dim:]]
    _add_tiles(units, strides, dim, first, sums)


def _collapse(units: _Units, strides: Sequence[int]) -> tuple[_Units, list[int]]:
    """Return a view of the block with as few dims as its exponents allow."""
    dims: list[tuple[int, int]] = []
    for size, stride in zip(units.shape, strides, strict=True):
        if size == 1:
            continue
        if dims and dims[-1][1] == size * stride:
            dims[-1] = (dims[-1][0] * size, stride)
        else:
            dims.append((size, stride))
    return units.reshape([size for size, _ in dims]), [stride for _, stride in dims]


def _add_tiles(
    units: _Units, strides: Sequence[int], num_outer: int, first: int, sums: list[int]
) -> None:
    """Add a block; its first `num_outer` dims count tiles, its other dims are the tile."""
    outer, inner = units.shape[:num_outer], units.shape[num_outer:]
    tile = math.prod(inner)
    if strides[num_outer:] == [1]:
        limbs = _UNIT_LIMBS[:tile]
    else:
        limbs = _limbs(_powers(_exponents(inner, strides[num_outer:])))
    origin = (0,) * num_outer
    num_rows = min(max(_GROUP // tile, 1), math.prod(outer))
    scratch = np.empty(num_rows * tile, dtype=np.float64)
    for box in split_box(Box(origin, outer), max_numel=num_rows):
        rows = scratch[: box.numel * tile].reshape((*box.shape, *inner))
        np.copyto(rows, units[box.relative_to(origin)])
        dots = rows.reshape(-1, tile) @ limbs
        start = first + sum(o * s for o, s in zip(box.offset, strides, strict=False))
        powers = _powers(_exponents(box.shape, strides[:num_outer]) + start)
        values = _join_limbs(dots.astype(np.uint64))
        for lane, products in enumerate(_multiply(values, powers)):
            low, high = int((products & _LOW32).sum()), int((products >> _32).sum())
            sums[lane] += low + (high << 32)


def _exponents(shape: Sequence[int], strides: Sequence[int]) -> IntArray:
    """Return the exponents of a block's units, flat, relative to its first; int64."""
    exponents = np.zeros(1, dtype=np.int64)
    for size, stride in zip(shape, strides, strict=False):
        steps = np.arange(size, dtype=np.int64) * stride
        exponents = (exponents[:, None] + steps).ravel()
    return exponents


def _powers(exponents: IntArray) -> WordArray:
    """Return both points to these powers, (2, n)."""
    digit = (exponents & (2**_DIGIT_BITS - 1)).astype(np.intp)
    powers = _POWERS[:, 0, digit]
    top = int(exponents.max())
    for j in range(1, _NUM_DIGITS):
        if top >> (j * _DIGIT_BITS) == 0:
            break
        digit = ((exponents >> (j * _DIGIT_BITS)) & (2**_DIGIT_BITS - 1)).astype(np.intp)
        powers = _multiply(powers, _POWERS[:, j, digit])
    return powers


def _limbs(powers: WordArray) -> FloatArray:
    """Split (2, n) words into (n, 6) limbs of 21 bits, lane by lane, lowest first."""
    mask = np.uint64(2**_LIMB_BITS - 1)
    limbs = [(powers >> np.uint64(_LIMB_BITS * i)) & mask for i in range(_NUM_LIMBS)]
    table = np.stack(limbs, axis=1).reshape(len(POINTS) * _NUM_LIMBS, -1)
    return np.ascontiguousarray(table.T, dtype=np.float64)


def _join_limbs(dots: WordArray) -> WordArray:
    """Join (n, 6) sums over limbs into (2, n) words modulo `PRIME`."""
    total = np.zeros((len(POINTS), len(dots)), dtype=np.uint64)
    parts = dots.T.reshape(len(POINTS), _NUM_LIMBS, -1)
    for i in range(_NUM_LIMBS):
        # Modulo 2**61 - 1, a product with a power of two is a rotation of 61 bits.
        shift = np.uint64(_LIMB_BITS * i)
        total += ((parts[:, i] << shift) & _P) | (parts[:, i] >> (_61 - shift))
    return _reduce(total)


def _multiply(a: WordArray, b: WordArray) -> WordArray:
    """Return products modulo `PRIME` of words below it, within 64 bits."""
    a_high, a_low, b_high, b_low = a >> _31, a & _LOW31, b >> _31, b & _LOW31
    middle = a_high * b_low + a_low * b_high
    # 2**62 = 2 and 2**61 = 1; the four terms are below 2**61, 2**32, 2**61 and 2**62.
    total = (a_high * b_high << np.uint64(1)) + (middle >> _30)
    total += ((middle & _LOW30) << _31) + a_low * b_low
    return _reduce(total)


def _reduce(words: WordArray) -> WordArray:
    """Reduce words of any size modulo `PRIME`."""
    words = (words & _P) + (words >> _61)
    return np.where(words >= _P, words - _P, words)


_UNIT_LIMBS = _limbs(_powers(np.arange(_TILE, dtype=np.int64)))
"""The limbs for a tile of consecutive units, which is the tile of most boxes."""
_UNIT_LIMBS.setflags(write=False)
