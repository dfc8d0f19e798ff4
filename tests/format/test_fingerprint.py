"""Fingerprints: the same for every sharding, different for every change."""

from __future__ import annotations

import random
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.arrays.boxes import Box
from holdfast.errors import CorruptionError, MismatchError, PlanError
from holdfast.format.digest import digest128
from holdfast.format.dtypes import DTYPES
from holdfast.format.fingerprint import (
    POINTS,
    PRIME,
    Partial,
    add,
    combine,
    fingerprint_box,
)
from holdfast.format.reader import Snapshot
from holdfast.storage import PosixStorage
from tests.arrays.test_tiling import split
from tests.format.fingerprints import snapshot_fingerprints
from tests.format.making import Chunk, Tensor, make, random_tensor, sample_tensors, write


def whole(shape: tuple[int, ...]) -> Box:
    return Box((0,) * len(shape), shape)


def by_definition(data: bytes, dtype: str, shape: tuple[int, ...]) -> str:
    """The words of the module's text, one unit at a time."""
    width = 1 if DTYPES[dtype].itemsize == 1 else 2
    sums = [0, 0]
    for lane, point in enumerate(POINTS):
        for place in range(len(data) // width):
            unit = int.from_bytes(data[place * width : (place + 1) * width], "little")
            sums[lane] += unit * pow(point, place, PRIME)
    dims = ",".join(map(str, shape))
    text = f"{dtype};{dims};{sums[0] % PRIME:016x};{sums[1] % PRIME:016x}"
    return digest128(text.encode())


def of_tensor(tensor: Tensor) -> str:
    partial = fingerprint_box(
        memoryview(tensor.data), dtype=tensor.dtype, shape=tensor.shape, box=whole(tensor.shape)
    )
    return combine([partial], dtype=tensor.dtype, shape=tensor.shape)


def of_array(array: np.ndarray, dtype: str) -> str:
    return of_tensor(Tensor(dtype=dtype, shape=array.shape, data=array.tobytes(), chunks=[]))


def of_tiling(tensor: Tensor, boxes: list[Box]) -> str:
    partials = [
        fingerprint_box(
            memoryview(tensor.box_bytes(box)), dtype=tensor.dtype, shape=tensor.shape, box=box
        )
        for box in boxes
    ]
    return combine(partials, dtype=tensor.dtype, shape=tensor.shape)


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    dtype = draw(st.sampled_from(["U8", "BF16", "F32", "F64", "C128", "F8_E4M3"]))
    shape = tuple(draw(st.lists(st.integers(0, 9), max_size=4)))
    return random_tensor(draw(st.integers(0, 999)), dtype=dtype, shape=shape)


@given(tensor=tensors())
@settings(max_examples=60, deadline=None)
def test_it_is_the_polynomial_of_the_specification(tensor: Tensor) -> None:
    assert of_tensor(tensor) == by_definition(tensor.data, tensor.dtype, tensor.shape)


@given(tensor=tensors(), seed=st.integers(0, 999))
@settings(max_examples=120, deadline=None)
def test_any_tiling_gives_the_fingerprint_of_the_whole(tensor: Tensor, seed: int) -> None:
    boxes = split(whole(tensor.shape), random.Random(seed), 12)
    assert of_tiling(tensor, boxes) == of_tensor(tensor)


BIG_TILINGS = [
    ((5, 4097), [Box((0, 0), (5, 4097))]),
    ((300, 70), [Box((0, 0), (300, 7)), Box((0, 7), (300, 62)), Box((0, 69), (300, 1))]),
    ((3, 200, 5000), [Box((0, 0, 0), (3, 200, 4999)), Box((0, 0, 4999), (3, 200, 1))]),
    ((2, 9, 40, 41), [Box((0, 0, 0, 0), (2, 9, 40, 40)), Box((0, 0, 0, 40), (2, 9, 40, 1))]),
    ((70_000, 3), [Box((0, 0), (70_000, 2)), Box((0, 2), (70_000, 1))]),
    ((16_777, 9), [Box((0, 0), (1, 9)), Box((1, 0), (16_000, 9)), Box((16_001, 0), (776, 9))]),
]


@pytest.mark.parametrize(
    ("dtype", "shape", "boxes"),
    [
        # Millions of units in exact integers take seconds: of the largest one the small dtype.
        pytest.param(dtype, *each, marks=pytest.mark.slow if mark else ())
        for dtype in ("F32", "U8")
        for each in BIG_TILINGS
        for mark in [dtype == "F32" and each is BIG_TILINGS[2]]
    ],
)
@pytest.mark.slow
def test_large_boxes_of_awkward_sizes_are_as_exact(
    dtype: str, shape: tuple[int, ...], boxes: list[Box]
) -> None:
    """Tiles, groups of tiles and leftovers: against exact integers, and all units at their most."""
    tensor = random_tensor(1, dtype=dtype, shape=shape)
    full = Tensor(dtype=dtype, shape=shape, data=b"\xff" * len(tensor.data), chunks=[])
    for case in (tensor, full):
        units = np.frombuffer(case.data, dtype="u1" if dtype == "U8" else "<u2").tolist()
        sums = []
        for point in POINTS:
            total = 0
            for unit in reversed(units):
                total = (total * point + unit) % PRIME
            sums.append(total)
        parts = [
            fingerprint_box(memoryview(case.box_bytes(box)), dtype=dtype, shape=shape, box=box)
            for box in boxes
        ]
        assert list(add(parts).lanes) == sums


@given(tensor=tensors(), data=st.data())
@settings(max_examples=120, deadline=None)
def test_one_bit_changes_both_lanes(tensor: Tensor, data: st.DataObject) -> None:
    if not tensor.data:
        return
    bit = data.draw(st.integers(0, len(tensor.data) * 8 - 1))
    changed = bytearray(tensor.data)
    changed[bit // 8] ^= 1 << (bit % 8)
    box = whole(tensor.shape)
    before, after = (
        fingerprint_box(memoryview(content), dtype=tensor.dtype, shape=tensor.shape, box=box)
        for content in (tensor.data, changed)
    )
    assert before.lanes[0] != after.lanes[0]
    assert before.lanes[1] != after.lanes[1]


@given(seed=st.integers(0, 9999), data=st.data())
@settings(max_examples=80, deadline=None)
def test_exchanging_two_elements_changes_it(seed: int, data: st.DataObject) -> None:
    array = np.random.default_rng(seed).integers(0, 4, (7, 11)).astype(np.float32)
    i, j = (data.draw(st.integers(0, array.size - 1)) for _ in range(2))
    other = array.copy().ravel()
    other[[i, j]] = other[[j, i]]
    same = array.ravel()[i] == array.ravel()[j]
    assert (of_array(other.reshape(array.shape), "F32") == of_array(array, "F32")) == same


def test_structured_changes_all_give_different_fingerprints() -> None:
    """What a wrong resharding does to a tensor: rows permuted, halves exchanged, transposed, …"""
    n = 64
    base = np.random.default_rng(0).standard_normal((n, n)).astype(np.float32)
    low_rank = np.outer(np.arange(n), np.ones(n)).astype(np.float32)
    for matrix in (base, low_rank):
        shuffled = matrix[np.random.default_rng(1).permutation(n)]
        interleaved = matrix.reshape(n // 2, 2, n).transpose(1, 0, 2).reshape(n, n)
        exchanged = np.concatenate([matrix[n // 2 :], matrix[: n // 2]])
        rolled = [np.roll(matrix, 1, axis=0), np.roll(matrix, 1, axis=1)]
        flipped = [matrix.T, matrix[::-1], matrix[:, ::-1]]
        scaled = [matrix * 2, -matrix, matrix + 1]
        variants = [matrix, shuffled, interleaved, exchanged, *rolled, *flipped, *scaled]
        found = {of_array(np.ascontiguousarray(variant), "F32") for variant in variants}
        distinct = {np.ascontiguousarray(variant).tobytes() for variant in variants}
        assert len(found) == len(distinct)
        assert len(distinct) >= 9


def test_equal_bytes_of_another_dtype_or_shape_differ() -> None:
    zeros = np.zeros(12, dtype=np.float32)
    found = {
        of_array(zeros, "F32"),
        of_array(zeros.reshape(3, 4), "F32"),
        of_array(zeros.reshape(4, 3), "F32"),
        of_array(zeros, "I32"),
        of_array(np.zeros(13, dtype=np.float32), "F32"),
        of_array(np.zeros((0, 3), dtype=np.float32), "F32"),
        of_array(np.zeros((), dtype=np.float32), "F32"),
    }
    assert len(found) == 7
    assert of_array(zeros, "F32") != of_array(-zeros, "F32")


def test_the_golden_value_holds_for_ever() -> None:
    """Fingerprints are stored: a change of the definition would make equal tensors look changed."""
    array = np.arange(10_007, dtype=np.float32).reshape(1, 10_007)
    assert of_array(array, "F32") == "8f6c2389c3e38f9168ad52124ddd8846"


def test_both_points_generate_the_whole_group() -> None:
    order = PRIME - 1
    factors = [2, 3, 5, 7, 11, 13, 31, 41, 61, 151, 331, 1321]
    rest = order
    for factor in factors:
        while rest % factor == 0:
            rest //= factor
    assert rest == 1
    assert all(pow(point, order // f, PRIME) != 1 for point in POINTS for f in factors)


def test_shares_that_do_not_make_the_tensor_are_refused() -> None:
    tensor = random_tensor(1, dtype="F32", shape=(4, 4))
    data = memoryview(tensor.data)
    half = fingerprint_box(data[:32], dtype="F32", shape=(4, 4), box=Box((0, 0), (2, 4)))
    assert half.numel == 8
    with pytest.raises(PlanError, match=r"needs the shares of 16 elements, got those of 8"):
        combine([half], dtype="F32", shape=(4, 4))
    with pytest.raises(PlanError, match="has 32 bytes, not 64"):
        fingerprint_box(data, dtype="F32", shape=(4, 4), box=Box((0, 0), (2, 4)))
    with pytest.raises(PlanError, match="not inside"):
        fingerprint_box(data[:32], dtype="F32", shape=(4, 4), box=Box((3, 0), (2, 4)))
    assert add([]) == Partial(lanes=(0, 0), numel=0)


def test_memory_does_not_grow_with_the_tensor() -> None:
    data = np.ones(8 << 20, dtype=np.float32)
    tracemalloc.start()
    try:
        fingerprint_box(memoryview(data), dtype="F32", shape=data.shape, box=whole(data.shape))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 6 << 20  # the tensor has 32 MiB


# Of stored tensors


def test_a_stored_tensor_has_the_fingerprint_of_its_bytes_in_any_layout(tmp_path: Path) -> None:
    store = PosixStorage(tmp_path)
    tensors = sample_tensors()
    halves = [Chunk(file=0, box=Box((0, 0), (1, 7))), Chunk(file=1, box=Box((1, 0), (4, 7)))]
    other = dict(tensors)
    other["model.weight"] = random_tensor(1, dtype="F32", shape=(5, 7), chunks=halves)
    one = write(store, make(tensors, step=1))
    two = write(store, make(other, step=2))
    expected = {key: of_tensor(tensor) for key, tensor in tensors.items()}
    with Snapshot.open(store, one) as first, Snapshot.open(store, two) as second:
        assert snapshot_fingerprints(first) == expected
        assert snapshot_fingerprints(second) == expected
        chosen = snapshot_fingerprints(second, ["model.weight"])
        assert chosen == {"model.weight": expected["model.weight"]}
        with pytest.raises(MismatchError, match="nothing"):
            snapshot_fingerprints(first, ["nothing"])


def test_a_damaged_chunk_has_no_fingerprint(tmp_path: Path) -> None:
    store = PosixStorage(tmp_path)
    directory = write(store, make({"w": random_tensor(1, dtype="F32", shape=(40,))}))
    path = tmp_path / directory / "data/00000.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with Snapshot.open(store, directory) as snapshot, pytest.raises(CorruptionError, match="'w'"):
        snapshot_fingerprints(snapshot)
