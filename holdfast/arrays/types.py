"""The array types of this library, by their elements."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
"""Positions, sizes and coordinates; signed, so that a difference cannot wrap."""
WordArray = npt.NDArray[np.uint64]
"""Hashes and digests."""
BoolArray = npt.NDArray[np.bool_]
FloatArray = npt.NDArray[np.float64]
ByteArray = npt.NDArray[np.uint8]
AnyArray = npt.NDArray[np.generic]
