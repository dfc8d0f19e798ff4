"""The digests of a data file, made while its image grows."""

from __future__ import annotations

from random import Random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.scale import HEADER
from holdfast.format.digest import block_digests
from holdfast.writer.job import ImageHasher
from holdfast.writer.records import PlannedFile, WriteJob, column


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 300), max_size=12),
    st.sampled_from([16, 64]),
    st.lists(st.integers(0, 3000), max_size=8),
    st.randoms(use_true_random=False),
)
def test_blocks_are_hashed_as_they_come_into_place(
    sizes: list[int], block_nbytes: int, ends: list[int], random: Random
) -> None:
    """Digests are those of the finished image, in the order of the plan, however it grew."""
    data = random.randbytes(sum(sizes))
    order = random.sample(range(len(sizes)), len(sizes))
    starts, at = [0] * len(sizes), 0
    for row in order:
        starts[row], at = at, at + sizes[row]
    image = memoryview(bytearray(len(data)))
    file = PlannedFile(starts=column(starts), row_nbytes=column(sizes))
    job = WriteJob(
        directory="", position=0, rank=0, header=HEADER, plan_digest="", block_nbytes=block_nbytes,
        deadline_s=1.0, file=file,
    )  # fmt: skip
    hasher = ImageHasher(job, image)
    for end in sorted(ends):
        image[:end] = data[:end]
        hasher.advance(min(end, len(data)))
    image[:] = data
    digests = hasher.finish()
    expected = [
        block_digests(data[s : s + n], block_nbytes) for s, n in zip(starts, sizes, strict=True)
    ]
    assert np.diff(digests.digest_ptr).tolist() == [len(each) for each in expected]
    assert digests.digests.tolist() == [word for each in expected for word in each.tolist()]
