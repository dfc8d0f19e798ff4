"""64-bit hashes of integer columns, for grouping and for random potentials; not cryptographic."""

from __future__ import annotations

import numpy as np

from holdfast.arrays.types import IntArray, WordArray


def mix(word: WordArray) -> WordArray:
    """One step of splitmix64 (Steele, Lea, Flood 2014): a bijection on 64-bit words."""
    word = word + np.uint64(0x9E3779B97F4A7C15)
    word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return word ^ (word >> np.uint64(31))


def mix_columns(columns: IntArray) -> WordArray:
    """One word per row of `columns` (n, c); equal rows have equal words."""
    word = np.zeros(len(columns), dtype=np.uint64)
    for column in columns.T:
        word = mix(word ^ column.astype(np.uint64))
    return word
