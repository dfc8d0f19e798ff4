"""The distinct values of a column."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import numpy.typing as npt

T = TypeVar("T", bound=np.integer)


def distinct(values: npt.NDArray[T]) -> npt.NDArray[T]:
    """Return the integers of a column in ascending order, each once.

    As `np.unique`, whose first call of a process imports `numpy.ma`: every restart would wait for
    that in its load.
    """
    ordered = np.sort(values)
    is_first = np.ones(len(ordered), dtype=np.bool_)
    np.not_equal(ordered[1:], ordered[:-1], out=is_first[1:])
    return ordered[is_first]
