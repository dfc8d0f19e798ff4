"""`holdfast export`: tensors, whole whatever their sharding, in files that others read."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import load_file

from holdfast.arrays.boxes import Box
from holdfast.errors import StorageError
from holdfast.format.elements import decode_elements
from holdfast.storage import PosixStorage
from tests.cli.conftest import Holdfast
from tests.format.making import Chunk, make, random_tensor, sample_tensors, write

TENSORS = sample_tensors()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    store = PosixStorage(tmp_path / "run")
    write(store, make(TENSORS, step=3))
    return store.root


@pytest.fixture
def held(tmp_path: Path) -> Path:
    """A root of the tensors whose types a safetensors file can hold."""
    store = PosixStorage(tmp_path / "held")
    write(store, make({k: t for k, t in TENSORS.items() if t.dtype != "C128"}, step=3))
    return store.root


def weight() -> np.ndarray:
    return np.frombuffer(TENSORS["model.weight"].data, dtype="<f4").reshape(5, 7)


def test_one_tensor_across_shards_to_safetensors(
    holdfast: Holdfast, root: Path, tmp_path: Path
) -> None:
    to = tmp_path / "out.safetensors"
    result = holdfast("export", root, "--tensor", "model.weight", "--to", to)
    assert (result.code, result.err) == (0, "")
    assert "1 tensor, 140 B, written to" in result.out
    found = load_file(to)
    assert list(found) == ["model.weight"]
    assert found["model.weight"].tobytes() == weight().tobytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.safetensors", "run"]


def test_a_pattern_keeps_types_that_numpy_lacks(
    holdfast: Holdfast, held: Path, tmp_path: Path
) -> None:
    to = tmp_path / "deep" / "out.safetensors"
    assert holdfast("export", held, "--tensor", "*", "--to", to).code == 0
    with safe_open(to, framework="np") as opened:
        assert sorted(opened.keys()) == sorted(set(TENSORS) - {"model.phase"})
        kinds = {key: opened.get_slice(key).get_dtype() for key in opened.keys()}  # noqa: SIM118
        shapes = {key: opened.get_slice(key).get_shape() for key in opened.keys()}  # noqa: SIM118
        assert opened.get_tensor("model.scale").tobytes() == TENSORS["model.scale"].data
    assert kinds["model.norm"] == "BF16"
    assert kinds["optimizer.moment"] == "F8_E4M3"
    assert shapes["model.none"] == [0, 3]
    assert to.read_bytes().count(TENSORS["model.norm"].data) == 1


def test_a_tensor_has_all_its_names(holdfast: Holdfast, tmp_path: Path) -> None:
    """T7: a tied tensor was there under the stored name alone, and "no tensor matches" the other.

    Which names stand for one tensor is said.
    """
    tied = torch.ones(3)
    model = {"head": tied, "deep": [{"embedding": tied, "bias": torch.ones(2)}]}
    torch.save(model, tmp_path / "model.pt")
    to = tmp_path / "out"
    for words, kept in (("*", 2), ("model.deep.0.embedding", 1), ("*embedding", 1), ("*head", 1)):
        file = to / f"{words.strip('*') or 'all'}.safetensors"
        result = holdfast("export", tmp_path / "model.pt", "--tensor", words, "--to", file)
        assert result.code == 0, result.err
        assert "that is stored: model.deep.0.embedding is model.head" in result.out
        assert len(load_file(file)) == kept
        assert load_file(file)["model.head"].tolist() == [1, 1, 1]
    result = holdfast("show", tmp_path / "model.pt", "--tensor", "*embedding", "--json")
    assert [row["key"] for row in result.json["tensors"]] == ["model.head"]
    both = [tmp_path / "model.pt"] * 2
    assert "equal: 1 tensor" in holdfast("diff", *both, "--tensor", "*embedding").out
    model["deep"][0]["embedding"] = torch.ones(3)
    torch.save(model, tmp_path / "untied.pt")
    result = holdfast("diff", tmp_path / "model.pt", tmp_path / "untied.pt")
    assert (result.code, "tied to model.head" in result.out) == (1, True)
    assert "not there" not in result.out
    result = holdfast("export", tmp_path / "model.pt", "--tensor", "embedding", "--to", to / "x")
    assert "matches model.deep.0.embedding" in result.err


def test_npy_files(holdfast: Holdfast, root: Path, tmp_path: Path) -> None:
    to = tmp_path / "arrays"
    assert holdfast("export", root, "--tensor", "model.[wspm]*", "--to", to).code == 2
    for pattern in ("model.weight", "model.?c*", "model.p*", "model.mask", "model.none"):
        assert holdfast("export", root, "--tensor", pattern, "--to", to).code == 0
    found = {path.stem: np.load(path) for path in to.iterdir()}
    assert sorted(found) == [
        "model.mask", "model.none", "model.phase", "model.scale", "model.weight",
    ]  # fmt: skip
    for key, array in found.items():
        assert array.shape == TENSORS[key].shape
        assert array.tobytes() == TENSORS[key].data
    assert found["model.phase"].dtype == np.complex128


def test_types_that_npy_lacks_are_refused_or_widened(
    holdfast: Holdfast, root: Path, held: Path, tmp_path: Path
) -> None:
    to = tmp_path / "arrays"
    result = holdfast("export", root, "--tensor", "*", "--to", to)
    assert result.code == 2
    assert "model.norm" in result.err
    assert "BF16" in result.err
    assert ".safetensors" in result.err
    assert "--as-float32" in result.err
    assert not to.exists()
    assert holdfast("export", root, "--tensor", "*", "--to", to, "--as-float32").code == 0
    for key in ("model.norm", "optimizer.moment"):
        expected = decode_elements(TENSORS[key].data, TENSORS[key].dtype)
        found = np.load(to / f"{key}.npy")
        assert found.dtype == np.float32
        assert np.array_equal(found.ravel(), expected, equal_nan=True)
    assert np.load(to / "model.scale.npy").dtype == np.float64
    wide = tmp_path / "wide.safetensors"
    assert holdfast("export", held, "--tensor", "*", "--to", wide, "--as-float32").code == 0
    with safe_open(wide, framework="np") as opened:
        assert opened.get_slice("model.norm").get_dtype() == "F32"
        assert opened.get_slice("model.weight").get_dtype() == "F32"


@pytest.mark.parametrize(
    ("dtype", "advice", "wide"),
    [
        ("C128", "export to a directory", None),
        ("C32", "add --as-float32", "C64"),
        ("F8_E4M3FNUZ", None, "F32"),
        ("F8_E5M2FNUZ", None, "F32"),
    ],
)
def test_no_file_states_another_type_than_the_tensor_has(
    holdfast: Holdfast, tmp_path: Path, dtype: str, advice: str | None, wide: str | None
) -> None:
    """T6: our own images have these types as others, which a file by itself would assert."""
    store = PosixStorage(tmp_path / "run")
    write(store, make({"x": random_tensor(1, dtype=dtype, shape=(4,))}, step=3))
    to = tmp_path / "out.safetensors"
    result = holdfast("export", store.root, "--tensor", "*", "--to", to)
    if advice is None:
        assert result.code == 0
        assert _type_in(to) == (dtype, [4])
        to.unlink()
    else:
        assert result.code == 2
        assert f"'x' is {dtype}, which safetensors files cannot hold: {advice}" in result.err
        assert not to.exists()
    result = holdfast("export", store.root, "--tensor", "*", "--to", to, "--as-float32")
    assert result.code == (2 if wide is None else 0)
    if wide is not None:
        assert _type_in(to) == (wide, [4])


def _type_in(file: Path) -> tuple[str, list[int]]:
    """Read by hand: releases of safetensors before 0.8 refuse the `fnuz` kinds."""
    data = file.read_bytes()
    entry = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["x"]
    return entry["dtype"], entry["shape"]


def test_keys_become_file_names_that_stay_in_the_directory(
    holdfast: Holdfast, tmp_path: Path
) -> None:
    keys = [
        "../../up",
        "a/b",
        "a%2Fb",
        ".hidden",
        "..",
        "x" * 300,
        "x" * 299 + "y",
        "exp[1,2]",
        "ü",
    ]
    tensors = {key: random_tensor(i, dtype="U8", shape=(4,)) for i, key in enumerate(keys)}
    store = PosixStorage(tmp_path / "run")
    write(store, make(tensors, step=3))
    to = tmp_path / "out" / "inner"
    assert holdfast("export", store.root, "--tensor", "*", "--to", to).code == 0
    found = sorted(np.load(path).tobytes() for path in to.iterdir())
    assert found == sorted(tensor.data for tensor in tensors.values())
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["inner"]
    assert (to / "exp[1,2].npy").exists()


def test_large_tensors_are_streamed(holdfast: Holdfast, tmp_path: Path) -> None:
    rows = 6 << 20
    chunks = [Chunk(file=0, box=Box((0, 0), (rows, 1))), Chunk(file=1, box=Box((0, 1), (rows, 3)))]
    tensor = random_tensor(1, dtype="U16", shape=(rows, 4), chunks=chunks)
    store = PosixStorage(tmp_path / "run")
    write(store, make({"w": tensor}, step=1, block_nbytes=1 << 20))
    to = tmp_path / "out.safetensors"
    tracemalloc.start()
    try:
        assert holdfast("export", store.root, "--tensor", "w", "--to", to).code == 0
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 32 << 20  # the tensor has 48 MiB
    assert load_file(to)["w"].tobytes() == tensor.data


def test_nothing_that_exists_is_overwritten(holdfast: Holdfast, root: Path, tmp_path: Path) -> None:
    to = tmp_path / "out.safetensors"
    to.write_bytes(b"mine")
    result = holdfast("export", root, "--tensor", "model.weight", "--to", to)
    assert result.code == 2
    assert "exists already" in result.err
    assert to.read_bytes() == b"mine"
    (tmp_path / "arrays").mkdir()
    (tmp_path / "arrays/model.weight.npy").symlink_to(tmp_path / "elsewhere")
    result = holdfast("export", root, "--tensor", "model.*t", "--to", tmp_path / "arrays")
    assert result.code == 2
    assert not (tmp_path / "elsewhere").exists()


def test_damage_is_named_and_leaves_no_file(holdfast: Holdfast, root: Path, tmp_path: Path) -> None:
    path = root / "iter_0000003/data/00001.safetensors"
    data = bytearray(path.read_bytes())
    data[4096] ^= 1
    path.write_bytes(data)
    to = tmp_path / "out" / "x.safetensors"
    result = holdfast("export", root, "--tensor", "model.weight", "--to", to)
    assert result.code == 1
    assert "model.weight" in result.err
    assert list((tmp_path / "out").iterdir()) == []
    assert list((root / ".reading").iterdir()) == []


def test_of_many_files_none_is_left_where_the_disk_is_full(
    holdfast: Holdfast, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the command could not be repeated: it refuses names that are taken."""
    create = PosixStorage.create

    def fail(self: PosixStorage, path: str, **settings: Any) -> Any:
        if "moment" in path:
            raise StorageError("No space left on device")
        return create(self, path, **settings)

    words = ("export", root, "--tensor", "*", "--to", tmp_path / "out", "--as-float32")
    with monkeypatch.context() as patched:
        patched.setattr(PosixStorage, "create", fail)
        assert holdfast(*words).code == 2
    assert list((tmp_path / "out").iterdir()) == []
    assert holdfast(*words).code == 0
    assert len(list((tmp_path / "out").iterdir())) == len(TENSORS)


def test_mistakes(holdfast: Holdfast, root: Path, tmp_path: Path) -> None:
    to = tmp_path / "out.safetensors"
    cases: list[tuple[list[object], str]] = [
        ([root, "--tensor", "model.wieght", "--to", to], "did you mean model.weight"),
        ([root, "--to", to], "--tensor"),
        ([root, "--tensor", "*"], "--to"),
        ([root, "--tensor", "*", "--to", to, "--step", "9"], "no committed step 9"),
        ([tmp_path / "none", "--tensor", "*", "--to", to], "does not exist"),
    ]
    for words, text in cases:
        result = holdfast("export", *words)
        assert result.code == 2, words
        assert text in result.err
        assert result.err.count("\n") == 1
        assert not to.exists()
