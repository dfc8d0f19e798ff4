"""The proof of a tiling, against counting how often each element is covered."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.arrays.box_table import BoxTable, Flaw, check_tilings
from holdfast.arrays.boxes import Box
from holdfast.arrays.types import IntArray
from holdfast.errors import PlacementError


def check_tiling(shape: tuple[int, ...], offset: IntArray, extent: IntArray) -> Flaw | None:
    """The first flaw of one tensor's tiling."""
    boxes = BoxTable(tensor=np.zeros(len(offset), dtype=np.int64), offset=offset, extent=extent)
    flaws = check_tilings(boxes, [shape])
    return flaws[0][1] if flaws else None


def split(box: Box, rng: random.Random, num_cuts: int) -> list[Box]:
    """Random guillotine cuts: always a tiling of the box."""
    boxes = [box]
    for _ in range(num_cuts):
        victim = boxes.pop(rng.randrange(len(boxes)))
        dims = [d for d in range(victim.ndim) if victim.shape[d] > 1]
        if not dims:
            boxes.append(victim)
            continue
        dim = rng.choice(dims)
        cut = rng.randrange(1, victim.shape[dim])
        low, high = list(victim.shape), list(victim.shape)
        offset = list(victim.offset)
        low[dim], high[dim] = cut, victim.shape[dim] - cut
        offset[dim] += cut
        boxes += [Box(victim.offset, tuple(low)), Box(tuple(offset), tuple(high))]
    return boxes


def arrays(boxes: list[Box], ndim: int) -> tuple[IntArray, IntArray]:
    offsets = np.array([b.offset for b in boxes], dtype=np.int64).reshape(len(boxes), ndim)
    extents = np.array([b.shape for b in boxes], dtype=np.int64).reshape(len(boxes), ndim)
    return offsets, extents


def cover_counts(shape: tuple[int, ...], boxes: list[Box]) -> IntArray:
    counts = np.zeros(shape, dtype=np.int64)
    for box in boxes:
        counts[box.relative_to((0,) * len(shape))] += 1
    return counts


def assert_flaw_is_true(flaw: Flaw | None, shape: tuple[int, ...], boxes: list[Box]) -> None:
    """The flaw found, if any, is one that counting confirms."""
    outside = [i for i, b in enumerate(boxes) if not Box((0,) * len(shape), shape).contains(b)]
    if outside:
        assert flaw is not None
        assert flaw.kind == "out_of_bounds"
        assert flaw.rows[0] in outside
        return
    counts = cover_counts(shape, boxes)
    if (counts == 1).all():
        assert flaw is None
        return
    assert flaw is not None
    region = counts[flaw.box.relative_to((0,) * len(shape))]
    assert region.size
    if flaw.kind == "gap":
        assert (region == 0).all()
        assert flaw.rows == ()
    else:
        assert flaw.kind == "overlap"
        assert (region > 1).all()
        assert len(flaw.rows) >= 2
        assert all(boxes[row].contains(flaw.box) for row in flaw.rows[:2])


@st.composite
def flawed_tables(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    shape = tuple(draw(st.lists(st.integers(0, 6), max_size=4)))
    rng = random.Random(draw(st.integers(0, 2**32)))
    boxes = split(Box((0,) * len(shape), shape), rng, draw(st.integers(0, 10)))
    for _ in range(draw(st.integers(0, 2))):
        row = rng.randrange(len(boxes)) if boxes else -1
        change = draw(st.sampled_from(["drop", "twice", "shift", "grow", "shrink", "empty"]))
        if row < 0:
            break
        box = boxes[row]
        if change == "drop":
            boxes.pop(row)
        elif change == "twice":
            boxes.append(box)
        elif change == "empty" and box.ndim:
            boxes.append(Box(box.offset, (0,) * box.ndim))
        elif box.ndim:
            dim = rng.randrange(box.ndim)
            offset, extent = list(box.offset), list(box.shape)
            if change == "shift":
                offset[dim] += 1
            else:
                extent[dim] = max(extent[dim] + (1 if change == "grow" else -1), 0)
            boxes[row] = Box(tuple(offset), tuple(extent))
    rng.shuffle(boxes)
    return shape, boxes


@settings(max_examples=400, deadline=None)
@given(flawed_tables())
def test_a_table_passes_exactly_when_every_element_is_covered_once(
    case: tuple[tuple[int, ...], list[Box]],
) -> None:
    shape, boxes = case
    assert_flaw_is_true(check_tiling(shape, *arrays(boxes, len(shape))), shape, boxes)


@settings(max_examples=60, deadline=None)
@given(st.lists(flawed_tables(), min_size=1, max_size=6), st.integers(0, 2**32))
def test_many_tensors_at_once_are_judged_like_one_by_one(
    cases: list[tuple[tuple[int, ...], list[Box]]], seed: int
) -> None:
    rows = [(i, box) for i, (_, boxes) in enumerate(cases) for box in boxes]
    random.Random(seed).shuffle(rows)
    num_dims = max(len(shape) for shape, _ in cases)
    table = BoxTable.from_boxes([i for i, _ in rows], [box for _, box in rows], num_dims=num_dims)
    flaws = check_tilings(table, [shape for shape, _ in cases])
    assert [owner for owner, _ in flaws] == sorted({owner for owner, _ in flaws})
    found = dict(flaws)
    for i, (shape, boxes) in enumerate(cases):
        flaw = found.get(i)
        if flaw is not None:
            own = [row for row, (owner, _) in enumerate(rows) if owner == i]
            order = [rows[row][1] for row in own]
            local = tuple(own.index(row) for row in flaw.rows)
            assert_flaw_is_true(Flaw(kind=flaw.kind, box=flaw.box, rows=local), shape, order)
        else:
            assert_flaw_is_true(None, shape, boxes)


def test_a_pinwheel_that_no_cut_separates_is_a_tiling() -> None:
    boxes = [
        Box((0, 0), (1, 2)), Box((0, 2), (2, 1)), Box((2, 1), (1, 2)),
        Box((1, 0), (2, 1)), Box((1, 1), (1, 1)),
    ]  # fmt: skip
    assert check_tiling((3, 3), *arrays(boxes, 2)) is None
    flaw = check_tiling((3, 3), *arrays(boxes[:4], 2))
    assert flaw == Flaw(kind="gap", box=Box((1, 1), (1, 1)), rows=())


def test_a_gap_and_an_overlap_of_equal_size_do_not_cancel() -> None:
    """Sums of volumes would pass; each cell must be covered once."""
    boxes = [Box((0, 0), (2, 4)), Box((1, 0), (2, 4))]
    flaw = check_tiling((4, 4), *arrays(boxes, 2))
    assert flaw is not None
    assert_flaw_is_true(flaw, (4, 4), boxes)


def test_dims_are_not_interchangeable() -> None:
    """The cell (0, 1) twice and (1, 0) never: symmetric weights would not see it."""
    boxes = [Box(at, (1, 1)) for at in ((0, 0), (1, 1), (0, 1), (0, 1))]
    flaw = check_tiling((2, 2), *arrays(boxes, 2))
    assert flaw is not None
    assert_flaw_is_true(flaw, (2, 2), boxes)


def test_scalars_and_empty_tensors() -> None:
    none, one, two = (np.zeros((rows, 0), dtype=np.int64) for rows in range(3))
    assert check_tiling((), one, one) is None
    missing = check_tiling((), none, none)
    assert missing is not None
    assert missing.kind == "gap"
    twice = check_tiling((), two, two)
    assert twice is not None
    assert twice.kind == "overlap"
    empty = np.zeros((0, 2), dtype=np.int64)
    assert check_tiling((0, 4), empty, empty) is None
    assert check_tiling((4, 4), empty, empty) == Flaw(kind="gap", box=Box((0, 0), (4, 4)), rows=())


def test_no_tensors_and_no_rows() -> None:
    assert check_tilings(BoxTable.from_boxes([], [], num_dims=3), []) == []


def test_a_row_of_a_tensor_that_is_not_there_is_refused() -> None:
    for owner in (-1, 1):
        with pytest.raises(PlacementError, match="beyond"):
            check_tilings(BoxTable.from_boxes([owner], [Box((0,), (1,))], num_dims=1), [(1,)])


@pytest.mark.parametrize(
    ("offset", "extent"), [(2**62, 2**62), (-1, 4), (0, -4), (2**63 - 1, 2**63 - 1), (1, 4)]
)
def test_hostile_numbers_are_out_of_bounds_and_do_not_wrap(offset: int, extent: int) -> None:
    flaw = check_tiling((4,), np.array([[offset]]), np.array([[extent]]))
    assert flaw is not None
    assert flaw.kind == "out_of_bounds"
    assert flaw.rows == (0,)


def test_every_single_mutation_of_a_large_irregular_table_is_found() -> None:
    rng = random.Random(7)
    shape = (64, 48, 40)
    boxes = split(Box((0, 0, 0), shape), rng, 3000)
    offsets, extents = arrays(boxes, 3)
    assert check_tiling(shape, offsets, extents) is None
    for _ in range(20):
        row, dim = rng.randrange(len(boxes)), rng.randrange(3)
        table = offsets if rng.random() < 0.5 else extents
        table[row, dim] += 1
        flaw = check_tiling(shape, offsets, extents)
        table[row, dim] -= 1
        assert flaw is not None
        if flaw.kind != "gap":
            assert row in flaw.rows


def test_work_grows_with_rows_not_with_their_square_or_their_coordinates() -> None:
    """100,000 rows of a hostile pattern: all coordinates distinct in both dims."""
    num = 100_000
    offsets = np.stack([np.arange(num), np.arange(num)], axis=1)
    extents = np.ones((num, 2), dtype=np.int64)
    began = time.monotonic()
    flaw = check_tiling((num, num), offsets, extents)
    assert flaw is not None
    assert flaw.kind == "gap"
    # A table of all coordinate pairs would have 10**10 cells: the bound is about growth.
    assert time.monotonic() - began < 20
