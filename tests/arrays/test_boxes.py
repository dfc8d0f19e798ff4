"""Boxes, flat ranges and runs against brute force over the elements."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.arrays.boxes import Box, contiguous_start, cover, flat_range_boxes
from holdfast.errors import PlacementError

SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@st.composite
def box_in(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    bounds = [sorted((draw(st.integers(0, s)), draw(st.integers(0, s)))) for s in shape]
    return Box(tuple(a for a, _ in bounds), tuple(b - a for a, b in bounds))


@st.composite
def shape_and_boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], Box, Box]:
    shape = draw(SHAPES)
    return shape, draw(box_in(shape)), draw(box_in(shape))


def cells(box: Box) -> set[tuple[int, ...]]:
    return {
        tuple(o + i for o, i in zip(box.offset, index, strict=True))
        for index in np.ndindex(box.shape)
    }


@given(shape_and_boxes())
def test_intersection_and_containment_are_those_of_the_element_sets(
    case: tuple[tuple[int, ...], Box, Box],
) -> None:
    _, one, two = case
    common = one.intersect(two)
    assert (cells(common) if common else set()) == cells(one) & cells(two)
    assert one.numel == len(cells(one)) == math.prod(one.shape)
    if two.numel:
        assert one.contains(two) == (cells(two) <= cells(one))


@given(shape_and_boxes())
def test_slices_relative_to_an_origin_select_the_box(
    case: tuple[tuple[int, ...], Box, Box],
) -> None:
    shape, box, _ = case
    array = np.arange(math.prod(shape)).reshape(shape)
    assert array[box.relative_to((0,) * len(shape))].size == box.numel


@pytest.mark.parametrize(
    ("offset", "shape"), [((0,), ()), ((0, 0), (1,)), ((-1,), (1,)), ((0,), (-1,))]
)
def test_a_box_that_is_none_is_refused(offset: tuple[int, ...], shape: tuple[int, ...]) -> None:
    with pytest.raises(PlacementError):
        Box(offset, shape)


@given(SHAPES, st.data())
def test_flat_ranges_are_covered_in_order_by_few_boxes(
    shape: tuple[int, ...], data: st.DataObject
) -> None:
    numel = math.prod(shape)
    start, stop = sorted((data.draw(st.integers(0, numel)), data.draw(st.integers(0, numel))))
    boxes = flat_range_boxes(shape, start, stop)
    array = np.arange(numel).reshape(shape)
    origin = (0,) * len(shape)
    found = [value for box in boxes for value in array[box.relative_to(origin)].ravel().tolist()]
    assert found == list(range(start, stop))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)
    assert all(box.numel for box in boxes)


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (0, 13), (5, 4)])
def test_a_flat_range_outside_the_tensor_is_refused(start: int, stop: int) -> None:
    with pytest.raises(PlacementError, match="not inside"):
        flat_range_boxes((3, 4), start, stop)


@given(shape_and_boxes())
def test_runs_are_the_longest_contiguous_pieces(case: tuple[tuple[int, ...], Box, Box]) -> None:
    _, outer, other = case
    inner = outer.intersect(other) or Box(outer.offset, (0,) * outer.ndim)
    places = np.arange(outer.numel).reshape(outer.shape)
    expected = places[inner.relative_to(outer.offset)].ravel()
    starts, length = cover(inner, outer, max_gap=0)
    assert (starts[:, None] + np.arange(length)).ravel().tolist() == expected.tolist()
    num_breaks = int((np.diff(expected) != 1).sum())
    assert len(starts) == (num_breaks + 1 if len(expected) else 0)
    if inner.numel:
        whole = int(expected[0]) if num_breaks == 0 else None
        assert contiguous_start(inner, outer) == whole


@given(shape_and_boxes(), st.integers(0, 40))
def test_cover_joins_runs_over_small_gaps_only(
    case: tuple[tuple[int, ...], Box, Box], max_gap: int
) -> None:
    _, outer, other = case
    inner = outer.intersect(other)
    if inner is None:
        return
    exact, length = cover(inner, outer, max_gap=0)
    starts, span = cover(inner, outer, max_gap=max_gap)
    wanted = {int(s) + i for s in exact for i in range(length)}
    covered = [int(s) + i for s in starts for i in range(span)]
    assert wanted <= set(covered)
    assert len(covered) == len(set(covered)), "covering pieces overlap"
    gaps = np.diff(sorted(wanted)) - 1
    if len(starts) == 1:
        assert max(covered) == max(wanted)
    assert len(covered) - len(wanted) <= max_gap * max(len(gaps), 1)
    if max_gap >= outer.numel:
        assert len(starts) == 1


def test_runs_outside_the_outer_box_are_refused() -> None:
    with pytest.raises(PlacementError, match="not inside"):
        cover(Box((0,), (5,)), Box((1,), (5,)), max_gap=0)
