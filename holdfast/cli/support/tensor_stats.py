"""Numbers about a stored tensor, through numpy alone; 8-bit floats and bfloat16 included."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from holdfast.cli.support.elements import read_elements
from holdfast.format.elements import decode_elements
from holdfast.format.reader import Snapshot

HEAD_NUMEL = 8


@dataclass(slots=True, kw_only=True)
class TensorStats:
    """A summary of one tensor; `lowest` to `norm` are of its finite elements, None without any.

    Complex elements count by their magnitude in `lowest` and `highest`. `head` has the first
    elements in row-major order.
    """

    numel: int = 0
    num_nan: int = 0
    num_inf: int = 0
    num_zero: int = 0
    lowest: float | int | None = None
    highest: float | int | None = None
    mean: float | complex | None = None
    norm: float | None = None
    head: list[str] = field(default_factory=list)


def tensor_stats(snapshot: Snapshot, key: str) -> TensorStats:
    """Read a whole tensor, verified, and sum it up; some ten MiB of memory whatever its size."""
    stats = TensorStats()
    total: complex = 0
    squares = 0.0
    for data in read_elements(snapshot, key):
        values = decode_elements(data, snapshot.tensor(key).dtype)
        nan, infinite = np.isnan(values), np.isinf(values)
        finite = values[np.isfinite(values)]
        stats.head += [str(v) for v in values[: HEAD_NUMEL - len(stats.head)].tolist()]
        stats.numel += values.size
        stats.num_zero += int((values == 0).sum())
        stats.num_nan += int(nan.sum())
        stats.num_inf += int((infinite & ~nan).sum())
        if not finite.size:
            continue
        is_complex = finite.dtype.kind == "c"
        wide = finite.astype(np.complex128 if is_complex else np.float64)
        size = np.abs(wide) if is_complex else finite
        low, high = size.min().item(), size.max().item()
        stats.lowest = low if stats.lowest is None else min(stats.lowest, low)
        stats.highest = high if stats.highest is None else max(stats.highest, high)
        with np.errstate(over="ignore"):
            total += wide.sum().item()
            squares += float((np.abs(wide) ** 2).sum())
    num_finite = stats.numel - stats.num_nan - stats.num_inf
    if num_finite:
        stats.mean = total / num_finite
        stats.norm = math.sqrt(squares)
    return stats
