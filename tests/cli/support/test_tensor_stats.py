"""Numbers about tensors, against torch for the types that numpy does not have."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from holdfast.arrays.boxes import Box
from holdfast.cli.support.tensor_stats import TensorStats, tensor_stats
from holdfast.format.elements import decode_elements
from holdfast.format.reader import Snapshot
from holdfast.storage import PosixStorage
from tests.format.making import Chunk, Tensor, make, write

TORCH_TYPES = {
    "BF16": ("bfloat16", 2), "F8_E4M3": ("float8_e4m3fn", 1), "F8_E5M2": ("float8_e5m2", 1),
    "F8_E4M3FNUZ": ("float8_e4m3fnuz", 1), "F8_E5M2FNUZ": ("float8_e5m2fnuz", 1),
    "F8_E8M0": ("float8_e8m0fnu", 1),
}  # fmt: skip


@pytest.mark.parametrize("dtype", list(TORCH_TYPES))
def test_every_code_of_a_foreign_type_has_its_value(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    name, itemsize = TORCH_TYPES[dtype]
    codes = np.arange(256 if itemsize == 1 else 65536, dtype=f"<u{itemsize}")
    expected = torch.from_numpy(codes.view(f"<i{itemsize}").copy()).view(getattr(torch, name))
    found = decode_elements(codes.tobytes(), dtype)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, expected.float().numpy())


def test_half_complex_is_decoded() -> None:
    data = np.array([1.5, -2, 0, 0.25], dtype="<f2").tobytes()
    assert decode_elements(data, "C32").tolist() == [1.5 - 2j, 0.25j]


def stats_of(tmp_path: Path, dtype: str, array: np.ndarray[tuple[int, ...], np.dtype[np.generic]]
             ) -> TensorStats:  # fmt: skip
    half = array.shape[0] // 2
    rest = array.shape[1:]
    zeros = (0,) * len(rest)
    chunks = [
        Chunk(file=0, box=Box((0, *zeros), (half, *rest))),
        Chunk(file=1, box=Box((half, *zeros), (array.shape[0] - half, *rest))),
    ]
    tensor = Tensor(dtype=dtype, shape=array.shape, data=array.tobytes(), chunks=chunks)
    store = PosixStorage(tmp_path)
    directory = write(store, make({"t": tensor}, block_nbytes=1 << 16))
    with Snapshot.open(store, directory) as snapshot:
        return tensor_stats(snapshot, "t")


def test_floats_with_odd_members(tmp_path: Path) -> None:
    array = np.random.default_rng(0).normal(size=(6000, 1001)).astype(np.float32)
    array[0, :4] = [0, np.nan, np.inf, -np.inf]
    stats = stats_of(tmp_path, "F32", array)
    finite = array[np.isfinite(array)].astype(np.float64)
    assert (stats.numel, stats.num_nan, stats.num_inf) == (array.size, 1, 2)
    assert stats.num_zero == int((array == 0).sum())
    assert stats.lowest == finite.min()
    assert stats.highest == finite.max()
    assert stats.mean == pytest.approx(finite.mean())
    assert stats.norm == pytest.approx(math.sqrt((finite**2).sum()))
    assert stats.head[:4] == ["0.0", "nan", "inf", "-inf"]
    assert len(stats.head) == 8


def test_integers_are_exact(tmp_path: Path) -> None:
    array = np.array([-(2**63), 2**63 - 1, 0], dtype=np.int64)
    stats = stats_of(tmp_path, "I64", array)
    assert (stats.lowest, stats.highest, stats.num_zero) == (-(2**63), 2**63 - 1, 1)
    assert stats.head == [str(v) for v in array.tolist()]


def test_truth_values(tmp_path: Path) -> None:
    stats = stats_of(tmp_path, "BOOL", np.array([True, False, True, True]))
    assert (stats.num_zero, stats.mean, stats.lowest, stats.highest) == (1, 0.75, False, True)


def test_complex_numbers_count_by_magnitude(tmp_path: Path) -> None:
    stats = stats_of(tmp_path, "C128", np.array([3 + 4j, 0, complex("nan")]))
    assert (stats.lowest, stats.highest, stats.norm, stats.num_nan) == (0.0, 5.0, 5.0, 1)
    assert stats.mean == 1.5 + 2j


def test_nothing_has_no_numbers(tmp_path: Path) -> None:
    stats = stats_of(tmp_path, "F32", np.zeros((2, 0), dtype=np.float32))
    assert stats.numel == 0
    assert stats.lowest is stats.highest is stats.mean is stats.norm is None
    stats = stats_of(tmp_path, "F32", np.full(4, np.nan, dtype=np.float32))
    assert (stats.num_nan, stats.lowest, stats.norm) == (4, None, None)
