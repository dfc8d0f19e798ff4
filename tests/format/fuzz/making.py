"""Checkpoints to be spoilt, and what may come out of opening them."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import strategies as st

from holdfast.arrays.boxes import Box
from holdfast.errors import CorruptionError, MismatchError, PlanError, StorageError
from holdfast.format.digest import digest128
from holdfast.format.manifest import Envelope
from holdfast.format.names import step_dir
from holdfast.format.reader import Snapshot
from holdfast.format.verifier import verify_snapshot
from holdfast.storage import PosixStorage
from tests.format.making import Made, make, sample_tensors, write

ALLOWED = (CorruptionError, StorageError, MismatchError, PlanError)
DIRECTORY = step_dir(1)

PARTS: dict[str, Any] = {
    "t": {"weight": {"$": "tensor", "k": "model.weight"}, "n": [1, 2.5, None, "x"]},
    "v": {"lr": {"$": "float", "v": "inf"}, "pair": {"$": "tuple", "v": [1, "a"]}},
}

HOSTILE: list[Any] = [
    -1, 0, 1, 2**31, 2**53, 2**63 - 1, 2**63, 2**64, 1e308, 0.5, True, None, "", "x" * 70_000,
    "../../etc/passwd", "data/../../x.safetensors", [], {}, [[[[[]]]]], [2**40, 2**40],
    {"$": "pickle", "v": "gASVHwAAAAAAAACM"}, {"$": "tensor", "k": "nowhere"}, {"$": 5},
    {"$": "dataclass", "type": "os.system", "v": {"command": "touch /tmp/x"}},
]  # fmt: skip


ENVELOPES: tuple[Envelope, ...] = ("safetensors", "torch_dist")


def sample(envelope: Envelope = "safetensors") -> Made:
    """A small checkpoint with every kind of tensor and some values."""
    return make(sample_tensors(), parts=PARTS, envelope=envelope)


def put(storage: PosixStorage, made: Made) -> None:
    """Write it, whatever was there before."""
    if storage.exists(DIRECTORY):
        storage.remove_tree(DIRECTORY)
    write(storage, made, directory=DIRECTORY)


def seal_manifest(tree: Any) -> bytes:
    """A manifest of any JSON value with a right digest."""
    body = msgspec.json.encode(tree).removesuffix(b"}")
    return body + b',"digest":"' + digest128(body).encode() + b'"}\n'


def read_all(storage: PosixStorage) -> dict[str, bytes]:
    """Every tensor, as a load reads them; the memory taken is that of the true shapes."""
    truth = sample_tensors()
    contents = {}
    with Snapshot.open(storage, DIRECTORY) as snapshot:
        for key in snapshot.keys:
            if key not in truth:
                raise MismatchError(f"{key} is unexpected")
            info = snapshot.manifest.tensors[snapshot.tensor_id(key)]
            if (info.dtype, tuple(info.shape)) != (truth[key].dtype, truth[key].shape):
                raise MismatchError(f"{key} has another shape or type")
            out = bytearray(len(truth[key].data))
            whole = Box((0,) * len(info.shape), tuple(info.shape))
            snapshot.read_box(key, whole, memoryview(out))
            contents[key] = bytes(out)
    return contents


def opened(storage: PosixStorage) -> dict[str, bytes] | None:
    """The tensors, or None where the checkpoint was refused in the proper way.

    A verification must never raise, and must not call whole what a load refuses.
    """
    damages = verify_snapshot(storage, DIRECTORY)
    try:
        return read_all(storage)
    except ALLOWED as caught:
        error = caught
    assert damages or isinstance(error, MismatchError), error
    return None


@st.composite
def byte_changes(draw: st.DrawFn, content: bytes) -> bytes:
    """The content with a few bytes flipped, cut out, put in, moved, or cut off."""
    data = bytearray(content)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, max(len(data) - 1, 0)))
        kind = draw(st.sampled_from(["flip", "cut", "insert", "drop", "zero", "copy"]))
        length = draw(st.integers(1, 64))
        if kind == "flip" and data:
            data[at] ^= draw(st.integers(1, 255))
        elif kind == "cut":
            del data[at:]
        elif kind == "insert":
            data[at:at] = draw(st.binary(min_size=1, max_size=16))
        elif kind == "drop":
            del data[at : at + length]
        elif kind == "zero":
            data[at : at + length] = bytes(len(data[at : at + length]))
        else:
            data[at:at] = data[:length]
    return bytes(data)


def _places(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path] if path else []
    if isinstance(tree, dict | list):
        items = tree.items() if isinstance(tree, dict) else enumerate(tree)
        for name, value in items:
            found += _places(value, (*path, name))
    return found


def spoil_tree(draw: st.DrawFn, tree: Any) -> Any:
    """One place of a JSON tree replaced, removed, doubled, or exchanged with another."""
    tree = msgspec.json.decode(msgspec.json.encode(tree))
    places = _places(tree)
    path = draw(st.sampled_from(places))
    parent = _at(tree, path[:-1])
    kind = draw(st.sampled_from(["hostile", "hostile", "near", "remove", "double", "exchange"]))
    if kind == "hostile":
        parent[path[-1]] = draw(st.sampled_from(HOSTILE))
    elif kind == "near" and type(parent[path[-1]]) is int:
        parent[path[-1]] += draw(st.integers(-9, 9))
    elif kind == "double" and isinstance(parent, list):
        parent.append(parent[path[-1]])
    elif kind == "exchange":
        other = draw(st.sampled_from([p for p in places if p[: len(path)] != path] or [path]))
        if path[: len(other)] != other:
            theirs = _at(tree, other[:-1])
            parent[path[-1]], theirs[other[-1]] = theirs[other[-1]], parent[path[-1]]
    else:
        del parent[path[-1]]
    return tree


def _at(tree: Any, path: tuple[Any, ...]) -> Any:
    for name in path:
        tree = tree[name]
    return tree
