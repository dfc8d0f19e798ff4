"""Snapshots of torchsnapshot: read in place, strictly, and nothing of them is run.

`golden/torchsnapshot` was taken by torchsnapshot 0.1.0 on two ranks, with chunks of 400 bytes; the
package itself needs others that the test environment does not have.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from holdfast import Checkpointer, CorruptionError, HoldfastError, StorageError
from holdfast.foreign import open_catalog
from tests.foreign.contract import check_format

GOLDEN = Path(__file__).parent / "golden" / "torchsnapshot"
MODEL = {
    "w": torch.arange(300, dtype=torch.float32).reshape(30, 10),
    "b/s%": torch.arange(8).bfloat16(),
    "n": torch.tensor(5),
}


def test_all_that_two_ranks_took(tmp_path: Path) -> None:
    """X1: chunks, slabs, shards of both ranks, files of torch.save, and plain values."""
    report = Checkpointer(tmp_path / "none").load_all(source=GOLDEN)
    model, extra = report.values["model"], report.values["extra"]
    assert list(model) == ["w", "b/s%", "n"]
    assert all(torch.equal(model[name], each) for name, each in MODEL.items())
    assert torch.equal(extra.pop("table"), torch.arange(48, dtype=torch.float32).reshape(8, 6))
    assert torch.equal(extra.pop("cplx"), torch.tensor([1 + 2j, 3 - 4j]))
    assert torch.equal(extra.pop("half"), torch.arange(0.0, 12.0, 2.0).half())
    one, tensor = extra.pop("tup")
    assert one == 1
    assert torch.equal(tensor, torch.arange(3.0))
    one, tensor, inner = extra.pop("lst")
    assert (one, inner) == (1, {"a": 2.5})
    assert torch.equal(tensor, torch.arange(5))
    plain = {"epoch": 3, "lr": 0.1, "name": "run/a%b", "flag": True, "raw": b"\x00\xff"}
    assert extra == {**plain, "none": None, "odd": {1: 2}, "mine": 0}
    # What rank 1 had of its own, and what has no stored form, is named.
    assert "extra/mine: rank 1 has its own" in report.left_out
    assert "extra/q: its element type torch.qint8 has no stored form" in report.left_out
    assert not any(
        "epoch" in each or "table" in each or "model" in each for each in report.left_out
    )


@pytest.mark.slow
def test_a_snapshot_under_every_layout(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN, tmp_path / "snapshot")
    check_format(tmp_path / "snapshot", "model", MODEL)


def change(path: str, **fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda manifest: manifest[path].update(fields)


def again(manifest: dict[str, Any]) -> None:
    """One box in two places, the first of which every reader took."""
    box = manifest["0/extra/table"]["shards"][0]
    other = {**box["tensor"], "byte_range": [0, 96]}
    manifest["1/extra/table"]["shards"] += [box, {**box, "tensor": other}]


@pytest.mark.parametrize(
    ("edit", "error", "message"),
    [
        (change("0/model/n", location="../../etc/passwd"), StorageError, "is refused"),
        (change("0/model/n", location="/etc/passwd"), StorageError, "is refused"),
        (change("0/model/n", byte_range=[0, 7]), CorruptionError, "a range of 7 bytes"),
        (change("0/model/n", byte_range=[8, 0]), CorruptionError, "ends before it starts"),
        (change("0/model/n", serializer="pickle"), CorruptionError, "unknown serializer 'pickle'"),
        (change("0/model/n", shape=[-1]), CorruptionError, "where sizes should be"),
        (change("0/model/n", type="Code"), CorruptionError, "unknown type 'Code'"),
        (change("0/extra/cplx", shape=[3]), CorruptionError, "not the tensor that the metadata"),
        (change("0/extra/lr", serialized_value="?"), CorruptionError, "not the metadata"),
        (lambda m: m.pop("0/model/w"), CorruptionError, "model/w"),
        (lambda m: m["0/model/w"]["chunks"].pop(), CorruptionError, "model.w"),
        (lambda m: m.update({"x/model": {}}), CorruptionError, "an entry at 'x/model'"),
        (lambda m: m["0/extra/table"]["shards"].clear(), CorruptionError, "table"),
        (again, CorruptionError, r"'extra/table': the elements at \[0, 0\] are in two places"),
    ],
)
def test_snapshot_metadata_that_lies_is_refused(
    tmp_path: Path, edit: Callable[[dict[str, Any]], None], error: type[HoldfastError], message: str
) -> None:
    shutil.copytree(GOLDEN, tmp_path / "snapshot")
    metadata = tmp_path / "snapshot" / ".snapshot_metadata"
    stored = json.loads(metadata.read_bytes())
    edit(stored["manifest"])
    if message == "table":
        stored["manifest"]["1/extra/table"]["shards"].clear()
    metadata.write_text(json.dumps(stored))
    with pytest.raises(error, match=message):
        Checkpointer(tmp_path / "none").load_all(source=tmp_path / "snapshot")


def test_two_parts_with_one_path_when_it_is_joined_with_dots(tmp_path: Path) -> None:
    """X24: both had the tensor of the second."""
    shutil.copytree(GOLDEN, tmp_path / "snapshot")
    metadata = tmp_path / "snapshot" / ".snapshot_metadata"
    stored = json.loads(metadata.read_bytes())
    manifest = stored["manifest"]
    for part, key, other in (("a", "b.c", "n"), ("a.b", "c", "w")):
        manifest[f"0/{part}"] = {"type": "dict", "keys": [key]}
        manifest[f"0/{part}/{key}"] = manifest[f"0/model/{other}"]
    metadata.write_text(json.dumps(stored))
    values = Checkpointer(tmp_path / "none").load_all(source=tmp_path / "snapshot").values
    assert torch.equal(values["a"]["b.c"], MODEL["n"])
    assert torch.equal(values["a.b"]["c"], MODEL["w"])


def test_older_metadata_and_damaged_bytes(tmp_path: Path) -> None:
    """X2: YAML is refused by name; flipped bytes give an error of ours or a description."""
    folder = tmp_path / "snapshot"
    shutil.copytree(GOLDEN, folder)
    metadata = folder / ".snapshot_metadata"
    data = metadata.read_bytes()
    metadata.write_text("manifest:\n  0/model: {type: dict, keys: []}\nversion: 0.0.3\n")
    with pytest.raises(CorruptionError, match=r"before 0\.1 wrote YAML"):
        open_catalog(folder)
    # Two entries of one name, of which the last one was all.
    metadata.write_bytes(data.replace(b'"0/model/n"', b'"0/model/w"'))
    with pytest.raises(CorruptionError, match="'0/model/w' is there twice"):
        open_catalog(folder)
    draw = np.random.default_rng(3)
    for _ in range(100):
        damaged = bytearray(data)
        for at in draw.integers(0, len(data), 3).tolist():
            damaged[at] ^= int(draw.integers(1, 256))
        metadata.write_bytes(damaged)
        with suppress(CorruptionError, StorageError):
            open_catalog(folder)


def test_a_value_that_asks_for_code_is_left_out_by_name(tmp_path: Path) -> None:
    """X2, X4: the values next to it are read."""
    folder, ran = tmp_path / "snapshot", tmp_path / "ran"

    class Command:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(ran),)

    shutil.copytree(GOLDEN, folder)
    torch.save(Command(), folder / "0/extra/none")
    metadata = json.loads((folder / ".snapshot_metadata").read_bytes())
    for rank in range(2):
        metadata["manifest"][f"{rank}/model"]["keys"].remove("n")
    # As of a value that only rank 0 has, next to None: the whole snapshot was not read.
    metadata["manifest"]["1/extra/odd"] = metadata["manifest"]["1/extra/epoch"]
    (folder / ".snapshot_metadata").write_text(json.dumps(metadata))
    report = Checkpointer(tmp_path / "none").load_all(source=folder)
    assert not ran.exists()
    assert "none" not in report.values["extra"]
    assert "model/n: in no dict or list of the snapshot" in report.left_out
    assert "extra/odd: rank 1 has its own" in report.left_out
    assert any(each.startswith("extra/none: ") and "mkdir" in each for each in report.left_out)
    os.truncate(folder / "0/extra/none", 90)  # a damaged one is an error
    with pytest.raises(CorruptionError, match="0/extra/none"):
        open_catalog(folder)
