"""Frames: whatever is in one, it has its size, and is what it was when it arrives."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from holdfast.parallel.control.control import FRAME_NBYTES, INLINE_NBYTES, Frame

counts = st.integers(0, 2**64 - 1)


@given(
    sequence=counts,
    phase=st.text(max_size=200),
    payload=st.binary(max_size=600) | counts.map(lambda n: b"x" * (n % 1000)),
    misuse=st.none() | st.text(min_size=1, max_size=600),
)
def test_every_frame_has_its_size_and_comes_back(
    sequence: int, phase: str, payload: bytes, misuse: str | None
) -> None:
    frame = Frame.make(sequence, "all_gather", phase, payload, misuse)
    data = frame.encode()
    assert len(data) == FRAME_NBYTES
    assert Frame.decode(data) == frame
    assert frame.length == len(payload)
    assert phase.startswith(frame.phase)
    assert (misuse or "").startswith(frame.misuse)
    if misuse is None:
        assert frame.inline == (payload if len(payload) <= INLINE_NBYTES else b"")
    else:
        assert frame.misuse
        assert frame.inline == b""


def test_the_largest_frame_fits() -> None:
    largest = Frame.make(2**64 - 1, "all_gather", "\u20ac" * 100, b"x" * INLINE_NBYTES, None)
    assert Frame.decode(largest.encode()) == largest
    wrong = Frame.make(2**64 - 1, "all_gather", "p" * 100, b"", "m" * 1000)
    assert len(wrong.encode()) == FRAME_NBYTES


def test_long_phases_with_one_beginning_are_different_calls() -> None:
    frames = [Frame.make(1, "barrier", "x" * 120 + end, b"", None) for end in "ab"]
    assert frames[0].phase == frames[1].phase
    assert frames[0].call != frames[1].call
