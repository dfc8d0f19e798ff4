"""`holdfast diff`: what differs between two checkpoints, across layouts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import strategies as st

from holdfast.arrays.boxes import Box
from holdfast.cli.support.compare import compare_tensors
from holdfast.format.reader import Snapshot
from holdfast.storage import PosixStorage
from tests.cli.conftest import Holdfast
from tests.drawn import drawn
from tests.format.fingerprints import snapshot_fingerprints
from tests.format.making import Chunk, Tensor, make, random_tensor, sample_tensors, write

PARTS: dict[str, Any] = {
    "progress": {"step": 7, "seen": [1, 2, 3], "best": {"$": "float", "v": "inf"}},
    "model": {"w": {"$": "tensor", "k": "model.weight"}},
}
QUARTERS = [Chunk(file=i, box=Box((0, o), (5, n))) for i, (o, n) in enumerate([(0, 3), (3, 4)])]


def store(
    root: Path,
    tensors: Mapping[str, Tensor],
    *,
    parts: Mapping[str, Any] = PARTS,
    fingerprints: bool = False,
) -> Path:
    storage = PosixStorage(root)
    made = make(tensors, step=7, parts=parts)
    directory = write(storage, made)
    if fingerprints:
        with Snapshot.open(storage, directory) as snapshot:
            found = snapshot_fingerprints(snapshot)
        infos = [
            msgspec.structs.replace(info, fingerprint=found[info.key])
            for info in made.manifest.tensors
        ]
        made.manifest = msgspec.structs.replace(made.manifest, tensors=infos)
        write(storage, made)
    return root


def changed(tensor: Tensor, place: int, value: int) -> Tensor:
    data = bytearray(tensor.data)
    data[place] ^= value
    return dataclasses.replace(tensor, data=bytes(data))


def relaid(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors, one of them cut in another way."""
    other = dict(tensors)
    other["model.weight"] = dataclasses.replace(tensors["model.weight"], chunks=QUARTERS)
    return other


def test_equal_checkpoints_of_different_layouts(holdfast: Holdfast, tmp_path: Path) -> None:
    a = store(tmp_path / "a", sample_tensors())
    b = store(tmp_path / "b", relaid(sample_tensors()))
    for one, two in ((a, b), (b, a), (a, a), (a / "iter_0000007", b / "iter_0000007")):
        result = holdfast("diff", one, two)
        assert result.code == 0
        assert "equal: 7 tensors and all values" in result.out
        assert "fingerprint" not in result.out
    found = holdfast("diff", a, b, "--json").json
    assert found["equal"] is True
    assert found["num_equal_tensors"] == 7
    assert found["nbytes_read"] > 0


def test_fingerprints_in_both_manifests_tell_without_reading(
    holdfast: Holdfast, tmp_path: Path
) -> None:
    a = store(tmp_path / "a", sample_tensors(), fingerprints=True)
    b = store(tmp_path / "b", relaid(sample_tensors()), fingerprints=True)
    plain = store(tmp_path / "plain", sample_tensors())
    for path in (b / "iter_0000007/data").iterdir():
        path.write_bytes(path.read_bytes()[:-1])  # reading b fails
    result = holdfast("diff", a, b)
    assert result.code == 0
    assert "0 B read, 7 tensors equal by fingerprint and not read" in result.out
    assert holdfast("diff", a, b, "--json").json["nbytes_read"] == 0
    assert holdfast("diff", a, b, "--read").code == 1
    assert holdfast("diff", a, plain, "--json").json["num_equal_by_fingerprint"] == 0


def test_fingerprints_that_differ_lead_to_the_bytes(holdfast: Holdfast, tmp_path: Path) -> None:
    tensors = sample_tensors()
    a = store(tmp_path / "a", tensors, fingerprints=True)
    tensors["model.mask"] = changed(tensors["model.mask"], 0, 1)
    b = store(tmp_path / "b", relaid(tensors), fingerprints=True)
    result = holdfast("diff", a, b, "--json")
    assert result.code == 1
    found = result.json
    assert found["num_equal_by_fingerprint"] == 6
    assert found["tensors"] == [
        {"key": "model.mask", "dtype": "BOOL", "shape": [11], "num_differing": 1,
         "num_undefined": 0, "max_abs": 1.0, "norm": 1.0}
    ]  # fmt: skip


def test_structure(holdfast: Holdfast, tmp_path: Path) -> None:
    one = {"x": random_tensor(1, dtype="F32", shape=(2, 3)), "only a": random_tensor(
        2, dtype="U8", shape=()), "t": random_tensor(3, dtype="F32", shape=(4,))}  # fmt: skip
    two = {"x": random_tensor(1, dtype="F32", shape=(3, 2)), "only b": random_tensor(
        2, dtype="U8", shape=()), "t": random_tensor(3, dtype="I32", shape=(4,))}  # fmt: skip
    a, b = store(tmp_path / "a", one), store(tmp_path / "b", two)
    result = holdfast("diff", a, b, "--json")
    assert result.code == 1
    assert result.json["structure"] == [
        {"key": "x", "a": "F32 2 x 3", "b": "F32 3 x 2"},
        {"key": "only a", "a": "U8 scalar", "b": None},
        {"key": "t", "a": "F32 4", "b": "I32 4"},
        {"key": "only b", "a": None, "b": "U8 scalar"},
    ]
    result = holdfast("diff", a, b)
    assert (
        "different: 1 tensor only in A, 1 tensor only in B, 2 tensors of another dtype or shape"
    ) in result.out
    assert "not there" in result.out


def test_tensors_of_one_side_are_listed_once(holdfast: Holdfast, tmp_path: Path) -> None:
    """As tensors; a value among them, and a name for a tensor that both have, are values."""

    def ref(key: str) -> dict[str, str]:
        return {"$": "tensor", "k": key}

    tensor = random_tensor(1, dtype="U8", shape=(2,))
    one = {"model": {"w": ref("w"), "layers": {"x": ref("x"), "y": [ref("y")]}, "tied": ref("w")}}
    two = {"model": {"w": ref("w")}, "extra": {"z": ref("z"), "n": 3}, "w": 1}
    a = store(tmp_path / "a", dict.fromkeys("wxy", tensor), parts=one)
    b = store(tmp_path / "b", dict.fromkeys("wz", tensor), parts=two)
    found = holdfast("diff", a, b, "--json").json
    assert [each["key"] for each in found["structure"]] == ["x", "y", "z"]
    assert [each["path"] for each in found["values"]] == ["model.tied", "extra", "w"]
    assert "tensor w" in holdfast("diff", a, b).out
    # Where tensors are not compared, all are values.
    only = holdfast("diff", a, b, "--values", "--json").json["values"]
    assert [each["path"] for each in only] == ["model.layers", "model.tied", "extra", "w"]


def test_values(holdfast: Holdfast, tmp_path: Path) -> None:
    def dicts(pairs: list[Any]) -> dict[str, Any]:
        return {"$": "dict", "v": pairs}

    one = {
        "same": {"b": 1, "a": [None, True]},
        "progress": {"step": 1, "seen": [1, 2], "best": {"$": "float", "v": "inf"}, "gone": "x"},
        "rng": {"$": "per_rank", "axes": ["dp"], "v": {"dp=0": {"s": 1}, "dp=1": {"s": 2}}},
        "map": dicts([[1, "one"], [2, "two"]]),
        "pair": {"$": "tuple", "v": [1, 2]},
        "kind": 1,
    }
    two = {
        "same": {"b": 1, "a": [None, True]},
        "progress": {"step": 2, "seen": [1, 2, 3], "best": 0.5, "new": None},
        "rng": {"$": "per_rank", "axes": ["dp"], "v": {"dp=0": {"s": 9}}},
        "map": dicts([[2, "zwei"], [1, "one"]]),
        "pair": {"$": "tuple", "v": [1, 3]},
        "kind": 1.0,
    }
    tensors = {"w": random_tensor(1, dtype="U8", shape=(2,))}
    a = store(tmp_path / "a", tensors, parts=one)
    b = store(tmp_path / "b", {"w": changed(tensors["w"], 0, 1)}, parts=two)
    found = holdfast("diff", a, b, "--values", "--json").json
    assert [(v["path"], v["in_a"], v["in_b"]) for v in found["values"]] == [
        ("progress.step", True, True),
        ("progress.seen.2", False, True),
        ("progress.best", True, True),
        ("progress.gone", True, False),
        ("progress.new", False, True),
        ("rng.dp=0.s", True, True),
        ("rng.dp=1", True, False),
        ("map.2", True, True),
        ("pair.1", True, True),
        ("kind", True, True),
    ]
    assert found["tensors"] == []
    result = holdfast("diff", a, b, "--values")
    assert result.code == 1
    for text in ("inf", "0.5", "not there", "'zwei'", "different: 10 values"):
        assert text in result.out
    assert holdfast("diff", a, b, "--tensor", "w", "--json").json["values"] == []
    assert len(holdfast("diff", a, b, "--tensor", "w", "--values", "--json").json["values"]) == 10


def of_array(array: np.ndarray, dtype: str, chunks: list[Chunk] | None = None) -> Tensor:
    whole = Chunk(file=0, box=Box((0,) * array.ndim, array.shape))
    return Tensor(dtype=dtype, shape=array.shape, data=array.tobytes(), chunks=chunks or [whole])


def test_numbers_of_a_difference(holdfast: Holdfast, tmp_path: Path) -> None:
    base = np.zeros((5, 7), dtype=np.float32)
    other = base.copy()
    other[0, 0], other[4, 6], other[1, 1], other[2, 2], other[3, 3] = 3, -4, np.nan, np.inf, -0.0
    a = store(tmp_path / "a", {"w": of_array(base, "F32")})
    b = store(tmp_path / "b", {"w": of_array(other, "F32", QUARTERS)})
    result = holdfast("diff", a, b, "--json")
    assert result.json["tensors"] == [
        {"key": "w", "dtype": "F32", "shape": [5, 7], "num_differing": 5, "num_undefined": 2,
         "max_abs": 4.0, "norm": 5.0}
    ]  # fmt: skip
    out = holdfast("diff", a, b).out
    for text in ("5 x 7", "different: 1 tensor;"):
        assert text in out
    assert holdfast("diff", a, b, "--atol", "3.5", "--json").json["tensors"][0][
        "num_differing"
    ] == 3  # fmt: skip


TOLERANT = st.sampled_from(
    [0.0, -0.0, 1.0, 1.5, -1.0, 1e-3, 100.0, 101.0, math.inf, -math.inf, math.nan]
)


@drawn(
    quick=15,
    slow=60,
    pairs=st.lists(st.tuples(TOLERANT, TOLERANT), min_size=1, max_size=12),
    rtol=st.sampled_from([0.0, 1e-2, 0.5, 1.0]),
    atol=st.sampled_from([0.0, 1e-3, 1.0]),
    dtype=st.sampled_from(["F32", "F64", "C64"]),
)
def test_tolerance_is_that_of_numpy(
    tmp_path_factory: pytest.TempPathFactory,
    pairs: list[tuple[float, float]],
    rtol: float,
    atol: float,
    dtype: str,
) -> None:
    if rtol == atol == 0:
        return
    kind = {"F32": np.float32, "F64": np.float64, "C64": np.complex64}[dtype]
    one, two = (np.array([pair[i] for pair in pairs], dtype=kind) for i in range(2))
    root = tmp_path_factory.mktemp("pair")
    a = PosixStorage(store(root / "a", {"w": of_array(one, dtype)}))
    b = PosixStorage(store(root / "b", {"w": of_array(two, dtype)}))
    with Snapshot.open(a, "iter_0000007") as left, Snapshot.open(b, "iter_0000007") as right:
        found = compare_tensors(left, right, "w", rtol=rtol, atol=atol, advance=int)
    # Both sides in double precision: the bound itself must not be rounded to the tensor's type.
    exact = [values.astype(np.result_type(kind, np.float64)) for values in (one, two)]
    expected = int((~np.isclose(*exact, rtol=rtol, atol=atol, equal_nan=True)).sum())
    assert (0 if found is None else found.num_differing) == expected


@pytest.mark.parametrize(("dtype", "kind"), [("I64", np.int64), ("U64", np.uint64)])
def test_integers_differ_exactly(
    holdfast: Holdfast, tmp_path: Path, dtype: str, kind: type[np.integer]
) -> None:
    info = np.iinfo(kind)
    one = np.array([2**60, info.min, info.max], dtype=kind)
    two = np.array([2**60 + 1, info.min, info.max - 1], dtype=kind)
    a, b = (
        store(tmp_path / name, {"w": of_array(array, dtype)})
        for name, array in (("a", one), ("b", two))
    )
    found = holdfast("diff", a, b, "--json").json["tensors"][0]
    assert (found["num_differing"], found["max_abs"], found["norm"]) == (2, 1.0, math.sqrt(2))
    ends = np.array([info.min, info.max], dtype=kind)
    c = store(tmp_path / "c", {"w": of_array(ends, dtype)})
    d = store(tmp_path / "d", {"w": of_array(ends[::-1].copy(), dtype)})
    assert holdfast("diff", c, d, "--json").json["tensors"][0]["max_abs"] == float(2**64)


@pytest.mark.parametrize("dtype", ["BF16", "F8_E4M3", "F8_E5M2", "F16", "C128", "U8", "BOOL"])
def test_every_element_type_can_be_compared(holdfast: Holdfast, tmp_path: Path, dtype: str) -> None:
    tensor = random_tensor(1, dtype=dtype, shape=(6,))
    a = store(tmp_path / "a", {"w": tensor})
    b = store(tmp_path / "b", {"w": changed(tensor, 0, 1)})
    assert holdfast("diff", a, a).code == 0
    found = holdfast("diff", a, b, "--json").json["tensors"][0]
    assert found["num_differing"] == 1


def test_large_tensors_are_compared_in_pieces(
    holdfast: Holdfast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.cli.support.compare._PIECE_NBYTES", 64)
    tensors = sample_tensors()
    a = store(tmp_path / "a", tensors)
    other = relaid(tensors)
    other["model.weight"] = changed(other["model.weight"], 4 * 34 + 3, 128)  # the last sign
    b = store(tmp_path / "b", other)
    found = holdfast("diff", a, b, "--json").json
    assert [t["key"] for t in found["tensors"]] == ["model.weight"]
    assert found["tensors"][0]["num_differing"] == 1
    assert found["num_equal_tensors"] == 6


def test_mistakes_and_damage(holdfast: Holdfast, tmp_path: Path) -> None:
    a = store(tmp_path / "a", sample_tensors())
    b = store(tmp_path / "b", sample_tensors())
    path = b / "iter_0000007/data/00000.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    cases: list[tuple[list[object], str]] = [
        ([a, tmp_path / "nothing"], "does not exist"),
        ([a], "The other one"),
        ([a, b, "--tensor", "model.wieght"], "did you mean model.weight"),
        ([a, b, "--rtol", "-1"], "not negative"),
        ([a, b, "--rtol", "nan"], "not negative"),
        ([a, b], "the manifest states"),
    ]
    for words, text in cases:
        result = holdfast("diff", *words)
        assert result.code == (1 if "states" in text else 2), words
        assert text in result.err
        assert result.err.count("\n") == 1
        assert result.out == ""
    assert list((a / ".reading").iterdir()) == []
