"""A checkpoint of each format version as it was written once, from version 1 on: read forever.

`python -m tests.format.test_golden DIRECTORY` writes one again; that is only right before a release
of a new format version, into its own directory.
"""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from holdfast.arrays.boxes import Box
from holdfast.format.manifest import (
    IRREGULAR,
    PER_COORDINATE,
    WHOLE,
    CutInfo,
    LayoutInfo,
    PlacementInfo,
)
from holdfast.format.names import list_steps
from holdfast.format.reader import Snapshot
from holdfast.format.values import Node, decode_tree, encode_tree
from holdfast.format.verifier import verify_snapshot
from holdfast.storage import PosixStorage
from tests.format.making import Chunk, Made, Tensor, make, write

VERSIONS = (1,)
STEP = 42


def golden_dir(version: int) -> Path:
    """The root of the golden files of a format version."""
    return Path(__file__).parent / "golden" / f"v{version}"


TREE = {
    "step": 42,
    "loss": 0.1,
    "zero": -0.0,
    "worst": math.inf,
    "seed": 2**127 + 1,
    "shape": (3, [4, ()]),
    "by_id": {0: "a", (1, "x"): None, True: False},
    "raw": b"\x00\xff",
    "names": {"b", "a"},
    "scale": np.float32(1.5),
    "$odd": {"$": 1},
    "text": "naïve 模型",
    "window": slice(1, None, 2),
    "z": complex(1, -2),
}


def weight() -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    return np.arange(60, dtype=np.float32).reshape(6, 10) / 4


def golden(version: int) -> Made:
    """What the golden files hold: two files, a split tensor, a replicated one, odd types, a second
    layout, placements, sets of holders, a fingerprint, and keys that their places do not imply."""
    quarters = [
        Chunk(file=0, box=Box((0, 0), (6, 3))),
        Chunk(file=1, box=Box((0, 3), (2, 7))),
        Chunk(file=1, box=Box((2, 3), (4, 7))),
    ]
    twice = [Chunk(file=0, box=Box((0,), (5,))), Chunk(file=1, box=Box((0,), (5,)), copy=1)]
    bias = np.arange(5, dtype=np.uint16) + 0x3F80
    tensors = {
        "model.weight": Tensor(
            dtype="F32", shape=(6, 10), data=weight().tobytes(), chunks=quarters
        ),
        "model.bias": Tensor(dtype="BF16", shape=(5,), data=bias.tobytes(), chunks=twice),
        "optimizer.step": Tensor(
            dtype="I64",
            shape=(),
            data=np.int64(STEP).tobytes(),
            chunks=[Chunk(file=1, box=Box((), ()))],
        ),
        "model.phase": Tensor(
            dtype="C128",
            shape=(2,),
            data=np.array([1 + 2j, -0.5j]).tobytes(),
            chunks=[Chunk(file=0, box=Box((0,), (2,)))],
        ),
        "model.empty": Tensor(dtype="F16", shape=(0, 4), data=b"", chunks=[]),
    }
    parts: dict[str, Node] = {
        "model": {"weight": {"$": "tensor", "k": "model.weight"}},
        "progress": encode_tree(TREE),
    }
    made = make(tensors, step=STEP, block_nbytes=64, parts=parts)
    made.index = replace(
        made.index,
        holders=np.array([1, 0, 1, 2, 3, 0, 3], dtype=np.int64),
        holder_ptr=np.array([0, 2, 3, 4, 6], dtype=np.int64),
        holder=np.array([0, 1, 0, 1, 1, 2], dtype=np.int64),
    )
    weight_info, bias, step, *others = made.manifest.tensors
    made.manifest = msgspec.structs.replace(
        made.manifest,
        version=version,
        placements=[
            WHOLE,
            PlacementInfo(kind="cut", cuts=(CutInfo(1, "dp", True), CutInfo(1, "tp"))),
            PlacementInfo(kind="runs", cuts=(CutInfo(0, "ep"),), over="expt_dp"),
            PER_COORDINATE,
            IRREGULAR,
        ],
        layouts=[*made.manifest.layouts, LayoutInfo(name="vision", axes={}, order="", ranks=[0])],
        tensors=[
            msgspec.structs.replace(weight_info, placement=1, fingerprint="0123456789abcdef" * 2),
            bias,
            msgspec.structs.replace(step, layout=1),
            *others,
        ],
        parts={
            **parts,
            "model": {
                "weight": {"$": "tensor", "k": "model.weight"},
                "head": {"$": "tensor", "k": "model.weight"},
                "bias": {"$": "tensor", "k": "model.bias"},
            },
            "optimizer": {"step": {"$": "array", "k": "optimizer.step"}},
        },
    )
    return made


@pytest.fixture(params=VERSIONS)
def version(request: pytest.FixtureRequest) -> int:
    found = request.param
    assert isinstance(found, int)
    return found


@pytest.fixture
def snapshot(version: int) -> Snapshot:
    store = PosixStorage(golden_dir(version))
    assert list_steps(store) == [STEP]
    return Snapshot.open(store, "iter_0000042")


def read(snapshot: Snapshot, key: str, box: Box, nbytes: int) -> bytes:
    out = bytearray(nbytes)
    snapshot.read_box(key, box, memoryview(out))
    return bytes(out)


def test_the_golden_checkpoint_is_whole(version: int) -> None:
    assert verify_snapshot(PosixStorage(golden_dir(version)), "iter_0000042") == []


def test_its_manifest_is_read(snapshot: Snapshot, version: int) -> None:
    assert snapshot.manifest.version == version
    expected = golden(version).manifest
    assert snapshot.manifest.tensors == expected.tensors
    assert snapshot.manifest.parts == expected.parts
    assert snapshot.manifest.layouts == expected.layouts
    assert snapshot.manifest.placements == expected.placements
    assert snapshot.index.is_held_by(2).tolist() == [False, False, False, False, True, False, True]
    snapshot.close()


def test_its_tensors_are_read(snapshot: Snapshot) -> None:
    assert read(snapshot, "model.weight", Box((0, 0), (6, 10)), 240) == weight().tobytes()
    part = read(snapshot, "model.weight", Box((1, 2), (3, 4)), 48)
    assert part == weight()[1:4, 2:6].tobytes()
    assert read(snapshot, "model.bias", Box((1,), (3,)), 6) == b"\x81\x3f\x82\x3f\x83\x3f"
    assert read(snapshot, "optimizer.step", Box((), ()), 8) == b"\x2a" + bytes(7)
    phase = np.frombuffer(read(snapshot, "model.phase", Box((0,), (2,)), 32), dtype=np.complex128)
    assert phase.tolist() == [1 + 2j, -0.5j]
    assert read(snapshot, "model.empty", Box((0, 0), (0, 4)), 0) == b""
    snapshot.close()


def test_its_values_are_read(snapshot: Snapshot) -> None:
    tree = decode_tree(snapshot.read_values("progress"))
    assert tree == TREE
    assert isinstance(tree, dict)
    assert list(tree) == list(TREE)
    assert math.copysign(1, tree["zero"]) == -1
    assert type(tree["scale"]) is np.float32
    assert type(tree["shape"]) is tuple


def test_the_same_state_is_written_with_the_same_bytes(tmp_path: Path, version: int) -> None:
    write(PosixStorage(tmp_path), golden(version))
    place = golden_dir(version)
    files = [p.relative_to(place) for p in sorted(place.rglob("*")) if p.is_file()]
    assert len(files) == 4
    for name in files:
        assert (tmp_path / name).read_bytes() == (place / name).read_bytes(), name


if __name__ == "__main__":
    write(PosixStorage(sys.argv[1]), golden(VERSIONS[-1]))
