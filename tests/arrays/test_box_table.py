"""Tables of boxes against brute force over the elements and over the rows."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.arrays.box_table import (
    BoxTable,
    concatenate,
    enumerate_ranges,
    meeting_pairs,
    pad_shapes,
    union_nbytes,
    unique_boxes,
)
from holdfast.arrays.boxes import Box
from holdfast.arrays.distinct import distinct

Rows = list[tuple[int, Box]]
"""(tensor, box) of each row."""


@st.composite
def rows_in(draw: st.DrawFn, shape: tuple[int, ...]) -> Rows:
    """Boxes that are not empty, of three tensors of one shape; the whole of it often."""
    rows = []
    for _ in range(draw(st.integers(0, 6))):
        box = Box((0,) * len(shape), shape)
        if not draw(st.booleans()):
            ends = [sorted(draw(st.tuples(*[st.integers(0, size)] * 2))) for size in shape]
            box = Box(tuple(a for a, _ in ends), tuple(b - a for a, b in ends))
        if box.numel:
            rows.append((draw(st.integers(0, 2)), box))
    return rows


@st.composite
def shape_and_tables(draw: st.DrawFn) -> tuple[tuple[int, ...], Rows, Rows]:
    ndim = draw(st.integers(0, 3))
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=ndim, max_size=ndim)))
    return shape, draw(rows_in(shape)), draw(rows_in(shape))


def table_of(rows: Rows, ndim: int) -> BoxTable:
    return BoxTable.from_boxes([t for t, _ in rows], [b for _, b in rows], num_dims=ndim)


@settings(max_examples=100, deadline=None)
@given(shape_and_tables())
def test_pairs_that_meet_are_those_that_intersect(case: tuple[tuple[int, ...], Rows, Rows]) -> None:
    shape, first, second = case
    expected = [
        (a, b)
        for a, (tensor, box) in enumerate(first)
        for b, (other_tensor, other) in enumerate(second)
        if tensor == other_tensor and box.intersect(other) is not None
    ]
    pairs = meeting_pairs(table_of(first, len(shape)), table_of(second, len(shape)))
    assert list(zip(*(rows.tolist() for rows in pairs), strict=True)) == expected


@settings(max_examples=100, deadline=None)
@given(shape_and_tables())
def test_distinct_boxes_and_the_bytes_of_their_union(
    case: tuple[tuple[int, ...], Rows, Rows],
) -> None:
    shape, rows, _ = case
    distinct, number = unique_boxes(table_of(rows, len(shape)))
    found = [(int(distinct.tensor[n]), distinct.box(n)) for n in range(len(distinct))]
    assert found == list(dict.fromkeys(rows))
    assert [found[n] for n in number.tolist()] == rows
    seen = np.zeros((3, *shape), dtype=np.bool_)
    for tensor, box in rows:
        seen[(tensor, *box.relative_to((0,) * len(shape)))] = True
    sizes = np.array([1, 4, 2])
    expected = int((seen.reshape(3, -1).sum(axis=1) * sizes).sum())
    assert union_nbytes(distinct, sizes) == expected


@given(shape_and_tables())
def test_boxes_are_found_where_they_come_first(case: tuple[tuple[int, ...], Rows, Rows]) -> None:
    """Also in tables of another width: the padding is not part of a box."""
    shape, rows, wanted = case
    found = table_of(rows, len(shape)).find(table_of(wanted + rows, len(shape) + 1))
    assert found.tolist() == [rows.index(row) if row in rows else -1 for row in wanted + rows]


def test_tables_of_different_widths_are_padded_and_keep_their_boxes() -> None:
    rows: Rows = [(0, Box((), ())), (1, Box((1,), (2,))), (2, Box((1, 2), (3, 0)))]
    joined = concatenate([table_of([row], row[1].ndim) for row in rows])
    assert joined.tensor.tolist() == [0, 1, 2]
    assert joined.offset.tolist() == [[0, 0], [1, 0], [1, 2]]
    assert joined.extent.tolist() == [[1, 1], [2, 1], [3, 0]]
    assert joined.numel().tolist() == [1, 2, 0]
    assert [joined.box(n, ndim=box.ndim) for n, (_, box) in enumerate(rows)] == [b for _, b in rows]


@given(st.lists(st.integers(0, 4), max_size=6))
def test_ranges_are_enumerated_item_by_item(lengths: list[int]) -> None:
    owner, position = enumerate_ranges(np.array(lengths, dtype=np.int64))
    expected = [(n, at) for n, length in enumerate(lengths) for at in range(length)]
    assert list(zip(owner.tolist(), position.tolist(), strict=True)) == expected


def test_shapes_are_padded_with_ones() -> None:
    assert pad_shapes([(2, 3), (), (4,)], 2).tolist() == [[2, 3], [1, 1], [4, 1]]
    assert pad_shapes([(2, 3), (4,)], 3, fill=0).tolist() == [[2, 3, 0], [4, 0, 0]]
    assert pad_shapes([], 2).shape == (0, 2)


@given(st.lists(st.integers(-3, 3), max_size=9))
def test_distinct_values_are_those_of_a_set(values: list[int]) -> None:
    column = np.array(values, dtype=np.int64)
    found = distinct(column)
    assert found.tolist() == sorted(set(values))
    assert (found.dtype, column.tolist()) == (np.int64, values)
