"""Numbers about a stored tensor, through numpy alone; 8-bit floats and bfloat16 included."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from holdfast.arrays.types import AnyArray
from holdfast.cli.support.elements import decode_elements, read_elements
from holdfast.format.reader import Snapshot

HEAD_NUMEL = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorStats:
    """A summary of one tensor; `lowest` to `norm` are of its finite elements, None without any.

    Complex elements count by their magnitude in `lowest` and `highest`. `head` has the first
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
    """Read a whole tensor, verified, and sum it up; some ten MiB of memory whatever its size."""
    sums = _Sums()
    for data in read_elements(snapshot, key):
        sums.add(decode_elements(data, snapshot.tensor(key).dtype))
    return sums.stats()


class _Sums:
    """Running sums over the pieces of a tensor."""

    def __init__(self) -> None:
        self._numel = self._num_nan = self._num_inf = self._num_zero = self._num_finite = 0
        self._lowest: float | int | None = None
        self._highest: float | int | None = None
        self._sum: complex = 0
        self._squares = 0.0
        self._is_complex = False
        self._head: list[str] = []

    def add(self, values: AnyArray) -> None:
        """Add the elements of a piece."""
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

    def _add_finite(self, finite: AnyArray) -> None:
        self._is_complex = self._is_complex or finite.dtype.kind == "c"
        size = np.abs(finite.astype(np.complex128)) if finite.dtype.kind == "c" else finite
        low, high = size.min().item(), size.max().item()
        self._lowest = low if self._lowest is None else min(self._lowest, low)
        self._highest = high if self._highest is None else max(self._highest, high)
        wide = finite.astype(np.complex128 if self._is_complex else np.float64)
        with np.errstate(over="ignore"):
            self._sum += complex(wide.sum())
            self._squares += float((np.abs(wide) ** 2).sum())

    def stats(self) -> TensorStats:
        """The summary of all pieces added."""
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
