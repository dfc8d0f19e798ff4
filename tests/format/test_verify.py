"""Verification reads every byte: nothing can be changed anywhere without being named."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec
import numpy as np
import pytest

from holdfast.arrays.boxes import Box
from holdfast.errors import StorageError
from holdfast.format.digest import digest128
from holdfast.format.index import ImageEntry, layout_image
from holdfast.format.reader import Snapshot
from holdfast.format.verifier import Damage, verify_snapshot
from holdfast.storage import PosixStorage
from tests.format.making import Chunk, make, random_tensor, sample_tensors, write


@pytest.fixture
def store(tmp_path: Path) -> PosixStorage:
    return PosixStorage(tmp_path)


def test_a_whole_checkpoint_has_no_damage(store: PosixStorage) -> None:
    directory = write(store, make(sample_tensors()))
    seen: list[tuple[int, int]] = []
    assert verify_snapshot(store, directory, on_progress=lambda *at: seen.append(at)) == []
    total = sum(path.stat().st_size for path in (store.root / directory).rglob("*.safetensors"))
    assert seen[-1] == (total, total)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_a_checkpoint_without_tensors_is_whole(store: PosixStorage) -> None:
    directory = write(store, make({}, parts={"progress": {"step": 1}}))
    assert verify_snapshot(store, directory) == []
    with Snapshot.open(store, directory) as snapshot:
        assert snapshot.keys == []


def test_a_copied_checkpoint_is_still_whole(store: PosixStorage, tmp_path: Path) -> None:
    directory = write(store, make(sample_tensors()))
    shutil.copytree(store.root / directory, tmp_path / "elsewhere" / "copy")
    assert verify_snapshot(PosixStorage(tmp_path / "elsewhere"), "copy") == []


@pytest.mark.parametrize("apart", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_any_changed_byte_of_any_file_is_found_and_named(store: PosixStorage, apart: int) -> None:
    """Of a whole checkpoint; the padding of headers (all alike) in steps of 97."""
    tensor = random_tensor(
        1,
        dtype="U8",
        shape=(6, 20),
        chunks=[Chunk(file=0, box=Box((0, 0), (6, 9))), Chunk(file=1, box=Box((0, 9), (6, 11)))],
    )
    made = make({"model.w": tensor}, block_nbytes=16, parts={"progress": {"step": 3, "x": [1.5]}})
    directory = write(store, made)
    missed = []
    num_flips = 0
    for path in sorted((store.root / directory).rglob("*.*")):
        if not path.is_file():
            continue
        name = path.relative_to(store.root / directory).as_posix()
        original = path.read_bytes()
        for at in range(0, len(original), apart):
            in_padding = path.suffix == ".safetensors" and original[at : at + 1] == b" "
            if in_padding and at % 97:
                continue
            damaged = bytearray(original)
            damaged[at] ^= 1 << (at % 8)
            path.write_bytes(damaged)
            num_flips += 1
            found = verify_snapshot(store, directory)
            named = [d for d in found if d.file == name]
            payload = path.parent.name == "data" and at >= 4096
            if payload:
                named = [d for d in named if d.key == "model.w" and d.offset is not None
                         and d.offset <= at < d.offset + 16]  # fmt: skip
            if len(named) != len(found) or not named:
                missed.append((name, at, found))
        path.write_bytes(original)
    assert missed == []
    assert num_flips > 1500 / apart
    assert verify_snapshot(store, directory) == []


def names(damages: list[Damage]) -> set[str]:
    return {damage.file for damage in damages}


def test_missing_cut_and_grown_files(store: PosixStorage) -> None:
    directory = write(store, make(sample_tensors()))
    place = store.root / directory
    for name in ("data/00000.safetensors", "index.safetensors"):
        path = place / name
        original = path.read_bytes()
        path.unlink()
        assert names(verify_snapshot(store, directory)) == {name}
        for wrong in (original[:-1], original[:5], b"", original + b"x"):
            path.write_bytes(wrong)
            found = verify_snapshot(store, directory)
            assert names(found) == {name}
            assert any(str(len(wrong)) in damage.what for damage in found)
        path.write_bytes(original)
    (place / "data/00000.safetensors").write_bytes(original[:5000])
    assert "data/00000.safetensors" in names(verify_snapshot(store, directory))


def test_a_cut_data_file_names_the_tensors_it_lost(store: PosixStorage) -> None:
    made = make(sample_tensors())
    directory = write(store, made)
    path = store.root / directory / "data/00000.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    found = verify_snapshot(store, directory)
    last = int(np.argmax(np.where(made.index.file == 0, made.index.start, -1)))
    lost = made.manifest.tensors[int(made.index.tensor[last])].key
    assert {damage.key for damage in found} == {None, lost}


def test_stray_files_are_named(store: PosixStorage) -> None:
    directory = write(store, make(sample_tensors()))
    store.write_file(f"{directory}/notes.txt", b"")
    store.write_file(f"{directory}/data/00007.safetensors", b"")
    store.make_dir(f"{directory}/plan")
    assert names(verify_snapshot(store, directory)) == {
        "notes.txt", "data/00007.safetensors", "plan",
    }  # fmt: skip


def test_damage_goes_on_being_looked_for(store: PosixStorage) -> None:
    """Two bad blocks and a missing file: all three are reported, the index is damaged as well."""
    made = make(sample_tensors())
    directory = write(store, made)
    place = store.root / directory
    first = place / "data/00000.safetensors"
    data = bytearray(first.read_bytes())
    data[4096] ^= 1
    data[-1] ^= 1
    first.write_bytes(data)
    (place / "data/00001.safetensors").unlink()
    found = verify_snapshot(store, directory)
    assert len([d for d in found if d.file == "data/00000.safetensors"]) == 2
    assert "data/00001.safetensors" in names(found)
    index = bytearray((place / "index.safetensors").read_bytes())
    index[-1] ^= 1
    (place / "index.safetensors").write_bytes(index)
    assert names(verify_snapshot(store, directory)) == {
        "index.safetensors", "data/00001.safetensors",
    }  # fmt: skip


def test_a_header_that_disagrees_with_the_index_is_named(store: PosixStorage) -> None:
    """Its digest is right, but it calls the chunk by another name, type or shape."""
    tensor = random_tensor(1, dtype="U8", shape=(8, 8))
    for entry in (
        ImageEntry(name="model.v", dtype="U8", shape=(8, 8)),
        ImageEntry(name="model.w", dtype="I8", shape=(8, 8)),
        ImageEntry(name="model.w", dtype="U8", shape=(4, 16)),
    ):
        made = make({"model.w": tensor})
        header = layout_image([entry]).header
        info = msgspec.structs.replace(made.manifest.files[0], header_digest=digest128(header))
        made.manifest = msgspec.structs.replace(made.manifest, files=[info])
        made.files[info.name] = header + made.files[info.name][4096:]
        directory = write(store, made)
        found = verify_snapshot(store, directory)
        assert found
        assert all(damage.file == info.name for damage in found)
        assert any(damage.key == "model.w" for damage in found)


def test_there_must_be_a_checkpoint(store: PosixStorage) -> None:
    store.make_dir("iter_0000001/data")
    with pytest.raises(StorageError, match="not a committed checkpoint"):
        verify_snapshot(store, "iter_0000001")
