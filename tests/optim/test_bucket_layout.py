"""Buckets by arithmetic: every element has one owner, against a list written out by hand."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from holdfast.errors import ConfigError
from holdfast.optim.bucket_layout import Packing, pack

sizes = st.lists(st.integers(0, 40), max_size=12)
few = st.integers(1, 5)


def owners(packing: Packing) -> list[tuple[int, int] | None]:
    """Brute force: which element of which parameter each element of the bucket is."""
    cells: list[tuple[int, int] | None] = [None] * packing.numel
    for slot in packing.slots:
        for element in range(slot.numel):
            assert cells[slot.start + element] is None
            cells[slot.start + element] = (slot.item, element)
    return cells


@given(sizes=sizes, num_shares=few, limit=st.integers(1, 60), align=few)
def test_every_element_lies_in_one_share(
    sizes: list[int], num_shares: int, limit: int, align: int
) -> None:
    packings = pack(sizes, num_shares=num_shares, limit=limit, align=align)
    assert [slot.item for p in packings for slot in p.slots] == list(range(len(sizes)))
    found: set[tuple[int, int]] = set()
    for packing in packings:
        assert packing.num_shares == num_shares
        assert packing.share % align == 0
        assert len(packing.slots) == 1 or max(s.stop for s in packing.slots) <= limit
        cells = owners(packing)
        for slot in packing.slots:
            assert slot.start % align == 0
            for index in range(num_shares):
                share = cells[index * packing.share : (index + 1) * packing.share]
                mine = [(i, cell) for i, cell in enumerate(share) if cell and cell[0] == slot.item]
                run = packing.run(slot, index)
                if slot.numel == 0:
                    assert run is not None
                    assert run.numel == 0
                elif run is None:
                    assert mine == []
                else:
                    elements = range(run.start, run.stop)
                    assert mine == [
                        (run.offset + k, (slot.item, e)) for k, e in enumerate(elements)
                    ]
                    found.update((slot.item, e) for e in elements)
    assert found == {(item, e) for item, numel in enumerate(sizes) for e in range(numel)}


def test_the_end_padding_may_be_larger_than_a_share() -> None:
    (packing,) = pack([5], num_shares=4, limit=100)
    assert (packing.share, packing.numel) == (2, 8)
    assert [packing.run(packing.slots[0], i) is None for i in range(4)] == [
        False,
        False,
        False,
        True,
    ]


def test_a_parameter_larger_than_a_bucket_has_one_of_its_own() -> None:
    packings = pack([3, 50, 3], num_shares=2, limit=10)
    assert [[slot.numel for slot in p.slots] for p in packings] == [[3], [50], [3]]


def test_numbers_below_one_are_refused() -> None:
    with pytest.raises(ConfigError, match="num_shares"):
        pack([1], num_shares=0, limit=1)
