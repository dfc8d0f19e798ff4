"""CRC-32 of chunks: equal to zlib's, however they are cut and whenever they are asked for."""

from __future__ import annotations

import random
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.writer.checksums import PIECE_NBYTES, checksums, combined, shift_of
from holdfast.writer.records import PlannedFile, column


@given(first=st.binary(max_size=300), second=st.binary(max_size=300))
def test_two_ranges_in_a_row(first: bytes, second: bytes) -> None:
    joined = combined(zlib.crc32(first), zlib.crc32(second), shift_of(len(second)))
    assert joined == zlib.crc32(first + second)


@pytest.mark.parametrize("seed", range(6))
def test_rows_of_an_image_as_it_fills(seed: int) -> None:
    """Whatever is staged and due: each place is put once, with the checksum of its row."""
    draw = random.Random(seed)
    sizes = [draw.choice([0, 1, 900, 70_000, PIECE_NBYTES, PIECE_NBYTES + 77]) for _ in range(12)]
    starts, at = [], 16
    for nbytes in sizes:
        starts.append(at)
        at += nbytes + 16
    image = np.random.default_rng(seed).integers(0, 256, at, dtype=np.uint8)
    places = [(start - 8, start + nbytes) for start, nbytes in zip(starts, sizes, strict=True)]
    order = [*range(12)]
    draw.shuffle(order)  # the plan has rows in any order
    file = PlannedFile(
        name="x",
        starts=column([starts[i] for i in order]),
        row_nbytes=column([sizes[i] for i in order]),
        crc_at=column([place for i in order for place in places[i]]),
    )
    view = memoryview(image).cast("B")
    put: list[int] = []
    with checksums(file, view, None) as sums:
        assert sums is not None
        staged = 0
        for end in range(0, at, 1 << 20):
            staged = min(max(staged, end + draw.randrange(3 << 20)), at)
            due = min(sums.reach(end), staged)
            assert due >= min(end, staged)
            put += sums.put_until(due, staged=staged)
        put += sums.put_until(at, staged=at)
    assert sorted(put) == sorted(place for pair in places for place in pair)
    for start, nbytes, pair in zip(starts, sizes, places, strict=True):
        crc = zlib.crc32(view[start : start + nbytes]).to_bytes(4, "little")
        assert all(bytes(view[place : place + 4]) == crc for place in pair)


def test_an_envelope_without_them() -> None:
    with checksums(PlannedFile(), memoryview(b""), None) as sums:
        assert sums is None
