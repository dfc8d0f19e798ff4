"""The envelope torch_dist: what torch writes, byte by byte covered, and refused if it is spoilt."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from holdfast.arrays.boxes import Box
from holdfast.errors import CorruptionError, PlanError
from holdfast.format.digest import digest128
from holdfast.format.dtypes import DTYPES
from holdfast.format.envelopes import layout_in
from holdfast.format.envelopes.torch_archive import TORCH_NAMES, value_archive
from holdfast.format.envelopes.torch_dist import layout_torch_dist
from holdfast.format.index import ImageEntry, gaps, layout_image, validate_index
from holdfast.format.manifest import ExtraInfo, Manifest, decode_manifest, encode_manifest
from holdfast.format.reader import Snapshot
from holdfast.format.verifier import verify_snapshot
from holdfast.storage import PosixStorage
from tests.format.making import Chunk, Made, make, random_tensor, sample_tensors, write

_SHAPES = ((), (3,), (0,), (2, 0, 3), (5, 7), (1 << 12,))
_ENTRIES = [
    ImageEntry(name=f"{dtype} {shape}", dtype=dtype, shape=shape)
    for dtype in DTYPES
    for shape in _SHAPES
]

PINNED = (465292, "90dd67d208a325afe17505ae8a9d22de", "fdb70d2b12dd0d8309d981b6f8e7ca62")


def test_every_chunk_is_an_archive_that_torch_loads() -> None:
    image = layout_torch_dist(_ENTRIES)
    data = np.random.default_rng(1).integers(0, 2, image.nbytes, dtype=np.uint8)
    for at, literal in ((0, image.header), *image.literals):
        data[at : at + len(literal)] = np.frombuffer(literal, dtype=np.uint8)
    nbytes = np.array([int(np.prod(e.shape)) * DTYPES[e.dtype].itemsize for e in _ENTRIES])
    assert image.envelope_nbytes == image.nbytes - nbytes.sum()
    between = gaps(image.starts, nbytes, file_nbytes=image.nbytes)
    assert sum(end - begin for begin, end in between) == image.envelope_nbytes
    archives = bytes(data).split(b"PK\x05\x06")[:-1]
    assert len(archives) == len(_ENTRIES)
    at = 0
    for entry, start, size in zip(_ENTRIES, image.starts.tolist(), nbytes.tolist(), strict=True):
        at += -at % 64
        assert start % 64 == 0
        end = bytes(data).index(b"PK\x05\x06", max(at, start + size)) + 22
        tensor = torch.load(io.BytesIO(bytes(data[at:end])), weights_only=True)
        assert tuple(tensor.shape) == entry.shape
        assert tensor.dtype == getattr(torch, TORCH_NAMES[entry.dtype])
        raw = tensor.contiguous().view(torch.uint8) if tensor.numel() and tensor.ndim else None
        if raw is not None:
            assert bytes(raw.numpy()) == bytes(data[start : start + size])
        at = end


def test_the_layout_is_the_same_in_every_version() -> None:
    """A repair lays out again what an earlier process has written."""
    image = layout_in("torch_dist", _ENTRIES)
    literals = b"".join((image.header, *(data for _, data in image.literals)))
    places = image.starts.tobytes()
    assert (image.nbytes, digest128(literals), digest128(places)) == PINNED


def test_no_chunk_at_all() -> None:
    assert layout_torch_dist([]).nbytes == 0
    assert layout_in("safetensors", _ENTRIES[:3]).header == layout_image(_ENTRIES[:3]).header


def _made() -> Made:
    chunks = [Chunk(file=0, box=Box((0, 0), (6, 9))), Chunk(file=1, box=Box((0, 9), (6, 11)))]
    tensor = random_tensor(1, dtype="U8", shape=(6, 20), chunks=chunks)
    node = {"w": {"$": "tensor", "k": "model.w"}}
    parts = {"model": node, "progress": {"step": 3, "x": [1.5]}}
    return make({"model.w": tensor}, block_nbytes=16, parts=parts, envelope="torch_dist")


def test_a_checkpoint_is_whole_and_readable(tmp_path: Path) -> None:
    storage = PosixStorage(tmp_path)
    directory = write(storage, make(sample_tensors(), envelope="torch_dist"))
    assert verify_snapshot(storage, directory) == []
    with Snapshot.open(storage, directory) as snapshot:
        for key, tensor in sample_tensors().items():
            out = bytearray(len(tensor.data))
            whole = Box((0,) * len(tensor.shape), tensor.shape)
            snapshot.read_box(key, whole, memoryview(out))
            assert bytes(out) == tensor.data


@pytest.mark.parametrize("apart", [17, pytest.param(5, marks=pytest.mark.slow)])
def test_any_changed_byte_is_named(tmp_path: Path, apart: int) -> None:
    storage = PosixStorage(tmp_path)
    directory = write(storage, _made())
    place = tmp_path / directory
    names = {path.relative_to(place).as_posix() for path in place.rglob("*") if path.is_file()}
    assert names == {
        "manifest.json", "index.safetensors", "data/00000.distcp", "data/00001.distcp",
        ".metadata", "metadata.json", "common.pt", "values.distcp",
    }  # fmt: skip
    for name in sorted(names - {"manifest.json", "index.safetensors"}):
        original = (place / name).read_bytes()
        for at in range(0, len(original), apart):
            damaged = bytearray(original)
            damaged[at] ^= 1 << (at % 8)
            (place / name).write_bytes(damaged)
            found = verify_snapshot(storage, directory)
            assert found, (name, at)
            assert {damage.file for damage in found} == {name}, (name, at)
        for wrong in (original[:-1], original + b"x", b""):
            (place / name).write_bytes(wrong)
            assert {damage.file for damage in verify_snapshot(storage, directory)} == {name}
        (place / name).unlink()
        assert {damage.file for damage in verify_snapshot(storage, directory)} == {name}
        (place / name).write_bytes(original)
    assert verify_snapshot(storage, directory) == []


def test_the_default_says_nothing_of_envelopes() -> None:
    data = encode_manifest(make(sample_tensors()).manifest)
    assert b"envelope" not in data
    assert b"extras" not in data


def test_a_manifest_comes_back() -> None:
    manifest = _made().manifest
    assert decode_manifest(encode_manifest(manifest)) == manifest
    assert sorted(manifest.file_sizes) == [
        ".metadata", "common.pt", "data/00000.distcp", "data/00001.distcp", "metadata.json",
        "values.distcp",
    ]  # fmt: skip


def _extra(**changes: object) -> ExtraInfo:
    return msgspec.structs.replace(
        ExtraInfo(name=".metadata", nbytes=1, digest="0" * 32), **changes
    )


@pytest.mark.parametrize(
    ("extras", "words"),
    [
        ([_extra(name="../x")], "none of the files"),
        ([_extra(name="data/00000.distcp")], "none of the files"),
        ([_extra(), _extra(nbytes=2)], "listed twice"),
        ([_extra(digest="zz")], "impossible"),
        ([_extra(nbytes=-1)], "impossible"),
    ],
)
def test_wrong_extras_are_refused(extras: list[ExtraInfo], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        encode_manifest(msgspec.structs.replace(_made().manifest, extras=extras))


def test_a_name_of_the_other_envelope_is_refused() -> None:
    manifest = _made().manifest
    for name, envelope in (
        ("data/00000.safetensors", "torch_dist"),
        ("data/00000.distcp", "safetensors"),
    ):
        file = msgspec.structs.replace(manifest.files[0], name=name, envelope=envelope)
        with pytest.raises(PlanError, match="not of the form"):
            encode_manifest(msgspec.structs.replace(manifest, files=[file]))


def _with_file(manifest: Manifest, **changes: object) -> Manifest:
    file = msgspec.structs.replace(manifest.files[0], **changes)
    return msgspec.structs.replace(manifest, files=[file, *manifest.files[1:]])


def test_rows_and_what_is_around_them_fill_a_file() -> None:
    made = make(sample_tensors(), envelope="torch_dist")
    index = made.index
    manifest = msgspec.structs.replace(
        made.manifest, index=msgspec.structs.replace(made.manifest.index, num_rows=index.num_rows)
    )
    validate_index(index, manifest)
    file = manifest.files[0]
    with pytest.raises(CorruptionError, match="what surrounds them have"):
        validate_index(index, _with_file(manifest, header_nbytes=file.header_nbytes - 1))
    start = index.start.copy()
    own = np.flatnonzero((index.file == 0) & (index.nbytes > 0))
    start[own[1]] = start[own[0]] + 1
    moved = type(index)(
        **{
            name: start if name == "start" else getattr(index, name)
            for name in index.__dataclass_fields__
        }
    )
    with pytest.raises(CorruptionError, match="overlap"):
        validate_index(moved, manifest)


def test_values_are_archives_too(tmp_path: Path) -> None:
    made = _made()
    common = torch.load(io.BytesIO(made.files["common.pt"]), weights_only=True)
    assert common == {"progress": {"step": 3, "x": [1.5]}}
    with zipfile.ZipFile(io.BytesIO(made.files["common.pt"])) as archive:
        assert archive.testzip() is None


def test_members_of_sets_have_one_order() -> None:
    """V3: that of a set depends on how it was made and, for texts, on the process."""
    one, other = (set(members) for members in ([0, 8], [8, 0]))
    assert list(one) != list(other)
    for kind in (set, frozenset):
        assert value_archive([kind(one)]) == value_archive([kind(other)])
