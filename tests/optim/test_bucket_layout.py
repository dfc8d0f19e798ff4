"""Buckets by arithmetic: every element has one owner, against a list written out by hand."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from holdfast.errors import ConfigError
from holdfast.optim.bucket_layout import BucketLayout, lay_out

sizes = st.lists(st.integers(0, 40), max_size=12)
few = st.integers(1, 5)


def owners(layout: BucketLayout) -> list[tuple[int, int] | None]:
    """Brute force: which element of which parameter each element of the bucket is."""
    cells: list[tuple[int, int] | None] = [None] * layout.numel
    for span in layout.spans:
        for element in range(span.numel):
            assert cells[span.start + element] is None
            cells[span.start + element] = (span.item, element)
    return cells


@given(sizes=sizes, num_shares=few, limit=st.integers(1, 60), align=few)
def test_every_element_lies_in_one_share(
    sizes: list[int], num_shares: int, limit: int, align: int
) -> None:
    layouts = lay_out(sizes, num_shares=num_shares, limit=limit, align=align)
    assert [span.item for p in layouts for span in p.spans] == list(range(len(sizes)))
    found: set[tuple[int, int]] = set()
    for layout in layouts:
        assert layout.num_shares == num_shares
        assert layout.share % align == 0
        assert len(layout.spans) == 1 or max(s.stop for s in layout.spans) <= limit
        cells = owners(layout)
        for span in layout.spans:
            assert span.start % align == 0
            for index in range(num_shares):
                share = cells[index * layout.share : (index + 1) * layout.share]
                mine = [(i, cell) for i, cell in enumerate(share) if cell and cell[0] == span.item]
                owned = layout.owned(span, index)
                if span.numel == 0:
                    assert owned is not None
                    assert owned.numel == 0
                elif owned is None:
                    assert mine == []
                else:
                    elements = range(owned.start, owned.stop)
                    assert mine == [
                        (owned.offset + k, (span.item, e)) for k, e in enumerate(elements)
                    ]
                    found.update((span.item, e) for e in elements)
    assert found == {(item, e) for item, numel in enumerate(sizes) for e in range(numel)}


def test_the_end_padding_may_be_larger_than_a_share() -> None:
    (layout,) = lay_out([5], num_shares=4, limit=100)
    assert (layout.share, layout.numel) == (2, 8)
    assert [layout.owned(layout.spans[0], i) is None for i in range(4)] == [
        False,
        False,
        False,
        True,
    ]


def test_a_parameter_larger_than_a_bucket_has_one_of_its_own() -> None:
    layouts = lay_out([3, 50, 3], num_shares=2, limit=10)
    assert [[span.numel for span in p.spans] for p in layouts] == [[3], [50], [3]]


def test_numbers_below_one_are_refused() -> None:
    with pytest.raises(ConfigError, match="num_shares"):
        lay_out([1], num_shares=0, limit=1)
