"""Numbers about a stored tensor, through numpy alone; 8-bit floats and bfloat16 included."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from holdfast.arrays.boxes import flat_range_boxes
from holdfast.format.dtypes import DTYPES
from holdfast.format.reader import Snapshot

Values = npt.NDArray[np.generic]

_PIECE_NUMEL = 1 << 22
HEAD_NUMEL = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorStats:
    """What a tensor holds. `lowest` to `norm` are of the finite elements, None without any.

    Complex elements count by their magnitude in `lowest` and `highest`. `head` is the first
    elements in row-major order.
    """

    numel: int
    num_nan: int
    num_inf: int
    num_zero: int
    lowest: float | int | None
    highest: float | int | None
    mean: float | complex | None
    norm: float | None
    head: list[str]


def tensor_stats(snapshot: Snapshot, key: str) -> TensorStats:
    """Read a tensor piece by piece, verified, and sum it up; some ten MiB whatever its size."""
    info = snapshot.tensor(key)
    tally = _Tally()
    for start in range(0, info.numel, _PIECE_NUMEL):
        stop = min(start + _PIECE_NUMEL, info.numel)
        for box in flat_range_boxes(info.shape, start, stop):
            buffer = bytearray(box.numel * DTYPES[info.dtype].itemsize)
            snapshot.read_box(key, box, memoryview(buffer))
            tally.add(decode_elements(buffer, info.dtype))
    return tally.result()


def decode_elements(data: bytes | bytearray, dtype: str) -> Values:
    """The elements in some bytes as a flat array of a type numpy has; exact for every dtype."""
    known = DTYPES[dtype].numpy
    if known is not None:
        return np.frombuffer(data, dtype=known)
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
    sign = np.where(codes >= 128, -1.0, 1.0)
    exponent, mantissa = (codes & 127) >> bits, codes & ((1 << bits) - 1)
    fraction = mantissa / (1 << bits)
    normal = (1 + fraction) * np.exp2(exponent - float(bias))
    table = (sign * np.where(exponent == 0, fraction * 2.0 ** (1 - bias), normal)).astype(
        np.float32
    )
    if dtype.endswith("FNUZ"):
        table[128] = np.nan  # the code of minus zero is the only one that is no number
    elif dtype == "F8_E4M3":
        table[[127, 255]] = np.nan
    else:
        top = exponent == 31
        table[top] = np.where(mantissa[top] == 0, sign[top] * np.inf, np.nan)
    return table


class _Tally:
    """Sums over pieces."""

    def __init__(self) -> None:
        self._numel = self._num_nan = self._num_inf = self._num_zero = self._num_finite = 0
        self._lowest: float | int | None = None
        self._highest: float | int | None = None
        self._sum: complex = 0
        self._squares = 0.0
        self._is_complex = False
        self._head: list[str] = []

    def add(self, values: Values) -> None:
        """Add a piece."""
        if len(self._head) < HEAD_NUMEL:
            self._head += [str(v) for v in values[: HEAD_NUMEL - len(self._head)].tolist()]
        self._numel += values.size
        self._num_zero += int((values == 0).sum())
        finite = values
        if values.dtype.kind in "fc":
            nan = np.isnan(values)
            infinite = np.isinf(values) & ~nan
            self._num_nan += int(nan.sum())
            self._num_inf += int(infinite.sum())
            finite = values[~(nan | infinite)]
        self._num_finite += finite.size
        if finite.size:
            self._add_finite(finite)

    def _add_finite(self, finite: Values) -> None:
        self._is_complex = self._is_complex or finite.dtype.kind == "c"
        size = np.abs(finite.astype(np.complex128)) if finite.dtype.kind == "c" else finite
        low, high = size.min().item(), size.max().item()
        self._lowest = low if self._lowest is None else min(self._lowest, low)
        self._highest = high if self._highest is None else max(self._highest, high)
        wide = finite.astype(np.complex128 if self._is_complex else np.float64)
        with np.errstate(over="ignore"):
            self._sum += complex(wide.sum())
            self._squares += float((np.abs(wide) ** 2).sum())

    def result(self) -> TensorStats:
        """The sums as numbers for people."""
        count = self._num_finite
        mean: float | complex | None = None
        if count:
            mean = self._sum / count if self._is_complex else self._sum.real / count
        return TensorStats(
            numel=self._numel,
            num_nan=self._num_nan,
            num_inf=self._num_inf,
            num_zero=self._num_zero,
            lowest=self._lowest,
            highest=self._highest,
            mean=mean,
            norm=math.sqrt(self._squares) if count else None,
            head=self._head,
        )
