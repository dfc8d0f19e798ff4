"""The page `docs/format.md` is enough: a reader written from it alone, without Holdfast.

Uses json, xxhash and the safetensors library only, as a reader in another language would.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from safetensors import safe_open
from safetensors.numpy import load_file

from tests.format.test_golden import VERSIONS, golden, golden_dir, weight

NUMPY = {"F32": "<f4", "I64": "<i8", "BF16": "<u2", "C128": "<c16", "F16": "<f2"}


def read_manifest(place: Path) -> dict[str, Any]:
    data = (place / "manifest.json").read_bytes()
    body, _, tail = data.rpartition(b',"digest":"')
    assert tail == xxhash.xxh3_128_hexdigest(body).encode() + b'"}\n'
    manifest: dict[str, Any] = json.loads(data)
    assert manifest["format"] == "holdfast"
    assert manifest["version"] == 1
    members = ("key", "dtype", "shape", "layout", "placement", "fingerprint")
    manifest["tensors"] = [
        dict(zip(members, [*row, *[0, 0, None][len(row) - 3 :]], strict=True))
        for row in manifest["tensors"]
    ]
    for name, node in manifest["parts"].items():
        fill_in(node, name)
    return manifest


def read_holders(place: Path) -> dict[str, list[list[int]]]:
    """The ranks that held each chunk of each tensor, in the order of rows."""
    tensors = read_manifest(place)["tensors"]
    index = load_file(place / "index.safetensors")
    holders: dict[str, list[list[int]]] = {}
    for tensor, number in zip(index["tensor"], index["holders"], strict=True):
        first, last = index["holder_ptr"][number : number + 2]
        holders.setdefault(tensors[tensor]["key"], []).append(index["holder"][first:last].tolist())
    return holders


def fill_in(node: Any, path: str) -> None:
    if isinstance(node, list):
        for i, item in enumerate(node):
            fill_in(item, f"{path}.{i}")
    elif isinstance(node, dict) and "$" not in node:
        for name, item in node.items():
            fill_in(item, f"{path}.{name}")
    elif isinstance(node, dict) and node["$"] in ("tensor", "array"):
        node.setdefault("k", path)


def read_all(place: Path) -> dict[str, np.ndarray[Any, Any]]:
    manifest = read_manifest(place)
    index_bytes = (place / "index.safetensors").read_bytes()
    assert len(index_bytes) == manifest["index"]["nbytes"]
    assert xxhash.xxh3_128_hexdigest(index_bytes) == manifest["index"]["digest"]
    index = load_file(place / "index.safetensors")
    files = []
    for file in manifest["files"]:
        data = (place / file["name"]).read_bytes()
        assert len(data) == file["nbytes"]
        header = data[: file["header_nbytes"]]
        assert xxhash.xxh3_128_hexdigest(header) == file["header_digest"]
        assert int.from_bytes(header[:8], "little") == len(header) - 8
        assert len(header) % 4096 == 0
        files.append(data)
    tensors = {t["key"]: np.zeros(t["shape"], dtype=NUMPY[t["dtype"]]) for t in manifest["tensors"]}
    block = manifest["block_nbytes"]
    for row in range(manifest["index"]["num_rows"]):
        info = manifest["tensors"][index["tensor"][row]]
        target = tensors[info["key"]]
        start, nbytes = int(index["start"][row]), int(index["nbytes"][row])
        payload = files[index["file"][row]][start : start + nbytes]
        lo, hi = (int(index["digest_ptr"][row + i]) for i in (0, 1))
        blocks = [payload[i : i + block] for i in range(0, nbytes, block)]
        assert [xxhash.xxh3_64_intdigest(b) for b in blocks] == index["digest"][lo:hi].tolist()
        offset = [int(v) for v in index["offset"][row][: target.ndim]]
        extent = [int(v) for v in index["extent"][row][: target.ndim]]
        where = tuple(slice(o, o + e) for o, e in zip(offset, extent, strict=True))
        chunk = np.frombuffer(payload, dtype=target.dtype).reshape(extent)
        if index["copy"][row] == 0:
            target[where] = chunk
        else:
            assert (target[where] == chunk).all()
    return tensors


def place(version: int) -> Path:
    return golden_dir(version) / "iter_0000042"


@pytest.mark.parametrize("version", VERSIONS)
def test_a_reader_written_from_the_page_reads_the_golden_checkpoint(version: int) -> None:
    found = read_all(place(version))
    assert (found["model.weight"] == weight()).all()
    assert found["optimizer.step"] == 42
    assert found["model.phase"].tolist() == [1 + 2j, -0.5j]
    assert found["model.bias"].tolist() == [0x3F80 + i for i in range(5)]
    assert set(found) == {tensor.key for tensor in golden(version).manifest.tensors}
    parts = read_manifest(place(version))["parts"]
    assert parts["model"]["weight"]["k"] == "model.weight"
    assert parts["model"]["head"]["k"] == "model.weight"
    assert parts["model"]["bias"]["k"] == "model.bias"
    assert parts["optimizer"]["step"]["k"] == "optimizer.step"
    assert read_holders(place(version)) == {
        "model.weight": [[0], [1], [1, 2]],
        "model.bias": [[0, 1], [0, 1]],
        "model.phase": [[0]],
        "optimizer.step": [[1, 2]],
    }
    manifest = read_manifest(place(version))
    of_weight = manifest["placements"][manifest["tensors"][0]["placement"]]
    assert of_weight == {"kind": "cut", "cuts": [[1, "dp", True], [1, "tp", False]], "over": ""}


@pytest.mark.parametrize("version", VERSIONS)
def test_the_names_of_entries_are_those_of_the_page(version: int) -> None:
    with safe_open(place(version) / "data/00000.safetensors", framework="np") as file:
        assert set(file.keys()) == {"model.weight@0,0", "model.bias", "model.phase"}
        assert file.get_tensor("model.weight@0,0").tolist() == weight()[:, :3].tolist()
        assert file.get_slice("model.phase").get_shape() == [2, 2]
    with safe_open(place(version) / "data/00001.safetensors", framework="np") as file:
        assert set(file.keys()) == {
            "model.weight@0,3", "model.weight@2,3", "model.bias", "optimizer.step",
        }  # fmt: skip
