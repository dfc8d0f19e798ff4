"""Reading boxes: equal to slicing the whole tensor, few bytes, and only verified ones."""

from __future__ import annotations

import random
import threading
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import strategies as st

from holdfast.arrays.boxes import Box
from holdfast.errors import CorruptionError, MismatchError, StorageError
from holdfast.format.dtypes import DTYPES
from holdfast.format.reader import Snapshot
from holdfast.format.versions import read_records
from holdfast.storage import PosixStorage
from tests.arrays.test_tiling import split
from tests.drawn import drawn
from tests.format.making import Chunk, Tensor, make, random_tensor, sample_tensors, write


def read(snapshot: Snapshot, key: str, box: Box, **options: object) -> bytes:
    nbytes = box.numel * DTYPES[snapshot.tensor(key).dtype].itemsize
    out = bytearray(b"\xaa" * nbytes)
    snapshot.read_box(key, box, memoryview(out), **options)  # type: ignore[arg-type]
    return bytes(out)


def whole(tensor: Tensor) -> Box:
    return Box((0,) * len(tensor.shape), tensor.shape)


@pytest.fixture
def store(tmp_path: Path) -> PosixStorage:
    return PosixStorage(tmp_path)


def test_every_tensor_comes_back(store: PosixStorage) -> None:
    tensors = sample_tensors()
    directory = write(store, make(tensors))
    with Snapshot.open(store, directory) as snapshot:
        assert snapshot.keys == list(tensors)
        for verify in (True, False):
            for key, tensor in tensors.items():
                assert read(snapshot, key, whole(tensor), verify=verify) == tensor.data, key
        assert snapshot.stats.opens == 2
        assert snapshot.stats.fallbacks == []


@st.composite
def stored_and_wanted(draw: st.DrawFn) -> tuple[Tensor, list[Box], int]:
    dtype = draw(st.sampled_from(["U8", "BF16", "F32", "I64", "C128"]))
    shape = tuple(draw(st.lists(st.integers(1, 9), max_size=4)))
    rng = random.Random(draw(st.integers(0, 2**32)))
    boxes = split(Box((0,) * len(shape), shape), rng, draw(st.integers(0, 6)))
    chunks = [Chunk(file=rng.randrange(2), box=box) for box in boxes]
    chunks += [
        Chunk(file=2, box=box, copy=1) for box in boxes if rng.random() < 0.3
    ]  # fmt: skip
    tensor = random_tensor(rng.randrange(2**32), dtype=dtype, shape=shape, chunks=chunks)
    wanted = []
    for _ in range(4):
        bounds = [sorted((rng.randint(0, s), rng.randint(0, s))) for s in shape]
        wanted.append(Box(tuple(a for a, _ in bounds), tuple(b - a for a, b in bounds)))
    return tensor, wanted, draw(st.sampled_from([16, 64, 1024]))


@drawn(quick=50, slow=150, case=stored_and_wanted())
def test_any_box_of_any_split_equals_the_slice(
    tmp_path_factory: pytest.TempPathFactory, case: tuple[Tensor, list[Box], int]
) -> None:
    tensor, boxes, block = case
    store = PosixStorage(tmp_path_factory.mktemp("box"))
    directory = write(store, make({"t": tensor}, block_nbytes=block))
    with Snapshot.open(store, directory) as snapshot:
        for box in [*boxes, whole(tensor)]:
            for options in ({}, {"verify": False}, {"prefer_files": {2}}):
                assert read(snapshot, "t", box, **options) == tensor.box_bytes(box), (box, options)


def test_pieces_larger_than_the_scratch_buffer(store: PosixStorage) -> None:
    """Column slices of 24 MiB chunks go through several scratch pieces, cut in mid-row."""
    shape = (3000, 2111)
    halves = [
        Chunk(file=0, box=Box((0, 0), (1499, 2111))),
        Chunk(file=1, box=Box((1499, 0), (1501, 2111))),
    ]
    tensor = random_tensor(1, dtype="F32", shape=shape, chunks=halves)
    directory = write(store, make({"t": tensor}, block_nbytes=1 << 20))
    with Snapshot.open(store, directory) as snapshot:
        for box in (
            Box((0, 0), shape),
            Box((10, 100), (2900, 2000)),
            Box((0, 2110), (3000, 1)),
            Box((1490, 0), (20, 2111)),
        ):
            for verify in (True, False):
                assert read(snapshot, "t", box, verify=verify) == tensor.box_bytes(box), box


def test_a_slice_by_rows_reads_only_its_blocks(store: PosixStorage) -> None:
    block = 1024
    tensor = random_tensor(1, dtype="U8", shape=(64, 1024))
    directory = write(store, make({"t": tensor}, block_nbytes=block))
    with Snapshot.open(store, directory) as snapshot:
        read(snapshot, "t", Box((8, 0), (4, 1024)))
        assert snapshot.stats.nbytes_read == snapshot.stats.nbytes_needed == 4 * 1024
        read(snapshot, "t", Box((8, 5), (4, 1)))
        assert snapshot.stats.nbytes_read == 8 * 1024
        assert snapshot.stats.nbytes_needed == 4 * 1024 + 4
    with Snapshot.open(store, directory) as snapshot:
        read(snapshot, "t", Box((8, 0), (4, 1000)), verify=False)
        assert snapshot.stats.nbytes_read == 3 * 1024 + 1000


def test_an_unverified_sparse_slice_skips_wide_gaps(store: PosixStorage) -> None:
    tensor = random_tensor(1, dtype="U8", shape=(4, 1 << 18))
    directory = write(store, make({"t": tensor}, block_nbytes=1 << 20))
    with Snapshot.open(store, directory) as snapshot:
        box = Box((0, 7), (4, 100))
        assert read(snapshot, "t", box, verify=False) == tensor.box_bytes(box)
        assert snapshot.stats.nbytes_read == 400


def test_neighbouring_blocks_are_read_in_one_piece(tmp_path: Path) -> None:
    """The first column of four rows of 100 bytes lies in the blocks 0, 1, 3 and 4 of 64 bytes."""
    reads: list[tuple[str, str, int, int]] = []
    store = PosixStorage(tmp_path, observer=lambda *what: reads.append(what))
    tensor = random_tensor(1, dtype="U8", shape=(4, 100))
    directory = write(store, make({"t": tensor}, block_nbytes=64))
    with Snapshot.open(store, directory) as snapshot:
        reads.clear()
        read(snapshot, "t", Box((0, 0), (4, 1)))
    ranges = [(start - 4096, nbytes) for op, _, start, nbytes in reads if op == "read"]
    assert ranges == [(0, 128), (192, 128)]


def test_a_whole_chunk_is_one_read_into_the_target(tmp_path: Path) -> None:
    reads: list[tuple[str, str, int, int]] = []
    store = PosixStorage(tmp_path, observer=lambda *what: reads.append(what))
    tensor = random_tensor(1, dtype="F32", shape=(100, 100))
    directory = write(store, make({"t": tensor}, block_nbytes=1024))
    with Snapshot.open(store, directory) as snapshot:
        reads.clear()
        read(snapshot, "t", whole(tensor))
        read(snapshot, "t", whole(tensor))
    data = [what for what in reads if "data/" in what[1]]
    assert [(op, nbytes) for op, _, _, nbytes in data] == [
        ("open", 0), ("read", 40000), ("read", 40000),
    ]  # fmt: skip


def test_opening_touches_no_data_file(tmp_path: Path) -> None:
    seen: list[str] = []
    store = PosixStorage(tmp_path, observer=lambda op, path, *_: seen.append(path))
    directory = write(store, make(sample_tensors()))
    seen.clear()
    with Snapshot.open(store, directory) as snapshot:
        assert not any("data/" in path for path in seen)
        read(snapshot, "model.scale", Box((), ()))
        assert snapshot.stats.opens == 1


def test_preferred_files_are_read_and_no_others(store: PosixStorage) -> None:
    directory = write(store, make(sample_tensors()))
    for prefer, name in (({0}, "data/00000"), ({1}, "data/00001")):
        seen: list[str] = []
        traced = PosixStorage(store.root, observer=lambda op, path, *_, s=seen: s.append(path))
        with Snapshot.open(traced, directory) as snapshot:
            seen.clear()
            read(snapshot, "model.norm", Box((0,), (9,)), prefer_files=prefer)
        assert {path for path in seen if "data" in path} == {f"{directory}/{name}.safetensors"}


@pytest.mark.parametrize("harm", ["flip", "delete", "cut"])
def test_a_bad_copy_is_replaced_by_a_good_one_and_noted(store: PosixStorage, harm: str) -> None:
    tensors = sample_tensors()
    made = make(tensors)
    directory = write(store, made)
    path = store.root / directory / "data/00000.safetensors"
    row = int(np.flatnonzero((made.index.tensor == 1) & (made.index.file == 0))[0])
    if harm == "flip":
        data = bytearray(path.read_bytes())
        data[int(made.index.start[row]) + 4] ^= 1
        path.write_bytes(data)
    elif harm == "delete":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-1])
    with Snapshot.open(store, directory) as snapshot:
        norm = tensors["model.norm"]
        assert read(snapshot, "model.norm", whole(norm)) == norm.data
        assert len(snapshot.stats.fallbacks) == 1
        assert "model.norm" in snapshot.stats.fallbacks[0]
        assert "00000.safetensors" in snapshot.stats.fallbacks[0]
    (store.root / directory / "data/00001.safetensors").unlink()
    with (
        Snapshot.open(store, directory) as snapshot,
        pytest.raises(CorruptionError, match=r"model\.norm.*00000.*copy: .*00001"),
    ):
        read(snapshot, "model.norm", whole(norm))


def test_damage_is_named_by_tensor_file_and_byte(store: PosixStorage) -> None:
    tensor = random_tensor(1, dtype="U8", shape=(1000,))
    made = make({"layer.w": tensor}, block_nbytes=64)
    directory = write(store, made)
    path = store.root / directory / "data/00000.safetensors"
    data = bytearray(path.read_bytes())
    data[4096 + 130] ^= 0x40
    path.write_bytes(data)
    with Snapshot.open(store, directory) as snapshot:
        with pytest.raises(
            CorruptionError, match=rf"layer\.w.*00000\.safetensors.*byte {4096 + 128}"
        ):
            read(snapshot, "layer.w", whole(tensor))
        # Blocks beside the damaged one are still good, and only they are judged.
        for box in (Box((0,), (128,)), Box((192,), (808,)), Box((200,), (3,))):
            assert read(snapshot, "layer.w", box) == tensor.box_bytes(box)
        for box in (Box((191,), (1,)), Box((100,), (50,))):
            with pytest.raises(CorruptionError, match="damaged"):
                read(snapshot, "layer.w", box)
        assert len(read(snapshot, "layer.w", whole(tensor), verify=False)) == 1000


def test_strided_reads_verify_too(store: PosixStorage) -> None:
    tensor = random_tensor(1, dtype="U8", shape=(32, 64))
    directory = write(store, make({"t": tensor}, block_nbytes=64))
    path = store.root / directory / "data/00000.safetensors"
    data = bytearray(path.read_bytes())
    data[4096 + 64 * 10 + 63] ^= 1
    path.write_bytes(data)
    with Snapshot.open(store, directory) as snapshot:
        box = Box((0, 3), (10, 2))
        assert read(snapshot, "t", box) == tensor.box_bytes(box)
        with pytest.raises(CorruptionError, match="damaged"):
            read(snapshot, "t", Box((0, 3), (11, 2)))


def test_two_files_of_equal_size_swapped_are_noticed(store: PosixStorage) -> None:
    chunks = [Chunk(file=0, box=Box((0,), (64,))), Chunk(file=1, box=Box((64,), (64,)))]
    tensor = random_tensor(1, dtype="U8", shape=(128,), chunks=chunks)
    directory = write(store, make({"t": tensor}))
    data = store.root / directory / "data"
    (data / "00000.safetensors").rename(data / "x")
    (data / "00001.safetensors").rename(data / "00000.safetensors")
    (data / "x").rename(data / "00001.safetensors")
    with (
        Snapshot.open(store, directory) as snapshot,
        pytest.raises(CorruptionError, match=r"tensor 't'.*00000"),
    ):
        read(snapshot, "t", whole(tensor))


def test_a_link_in_place_of_a_data_file_is_not_followed(
    store: PosixStorage, tmp_path_factory: pytest.TempPathFactory
) -> None:
    tensor = random_tensor(1, dtype="U8", shape=(64,))
    directory = write(store, make({"t": tensor}))
    path = store.root / directory / "data/00000.safetensors"
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "f"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)
    with (
        Snapshot.open(store, directory) as snapshot,
        pytest.raises(CorruptionError, match="symbolic link"),
    ):
        read(snapshot, "t", whole(tensor))


def test_requests_that_do_not_fit_are_refused(store: PosixStorage) -> None:
    directory = write(store, make(sample_tensors(), parts={"progress": {"step": 3}}))
    with Snapshot.open(store, directory) as snapshot:
        out = memoryview(bytearray(36))
        for key, box, buffer in (
            ("missing", Box((), ()), out),
            ("model.weight", Box((0, 0), (6, 7)), out),
            ("model.weight", Box((0,), (3,)), out),
            ("model.weight", Box((0, 0), (3, 4)), out),
            ("model.weight", Box((0, 0), (3, 3)), memoryview(bytes(36))),
            ("model.weight", Box((0, 0), (3, 3)), memoryview(bytearray(72))[::2]),
        ):
            with pytest.raises(MismatchError, match=r"missing|model\.weight"):
                snapshot.read_box(key, box, buffer)
        assert snapshot.read_values("progress") == {"step": 3}
        with pytest.raises(MismatchError, match="progress"):
            snapshot.read_values("nothing")
        assert snapshot.has("model.norm")
        assert not snapshot.has("nothing")


def test_what_is_no_checkpoint_says_so(store: PosixStorage) -> None:
    store.make_dir("iter_0000001")
    with pytest.raises(StorageError, match=r"iter_0000001.*not a committed checkpoint.*manifest"):
        Snapshot.open(store, "iter_0000001")


def test_a_checkpoint_opens_from_records_read_elsewhere(store: PosixStorage) -> None:
    tensors = sample_tensors()
    directory = write(store, make(tensors))
    records, _ = read_records(store, directory)
    with Snapshot.from_records(store, directory, records=records) as snapshot:
        assert read(snapshot, "model.weight", Box((0, 0), (5, 7))) == tensors["model.weight"].data
    damaged = bytearray(records.index)
    damaged[-1] ^= 1
    with pytest.raises(CorruptionError, match="digest"):
        Snapshot.from_records(
            store, directory, records=type(records)(records.manifest, bytes(damaged))
        )


def test_a_checkpoint_may_be_the_root_of_the_store(store: PosixStorage) -> None:
    tensors = sample_tensors()
    directory = write(store, make(tensors))
    inner = PosixStorage(store.root / directory)
    with Snapshot.open(inner, "") as snapshot:
        assert read(snapshot, "model.mask", Box((0,), (11,))) == tensors["model.mask"].data


def test_threads_share_a_snapshot(store: PosixStorage) -> None:
    tensor = random_tensor(1, dtype="U8", shape=(200, 300))
    directory = write(store, make({"t": tensor}, block_nbytes=64))
    failures: list[Box] = []
    with Snapshot.open(store, directory) as snapshot:

        def work(seed: int) -> None:
            rng = random.Random(seed)
            for _ in range(50):
                row, col = rng.randrange(200), rng.randrange(300)
                box = Box((row, col), (rng.randint(1, 200 - row), rng.randint(1, 300 - col)))
                if read(snapshot, "t", box) != tensor.box_bytes(box):
                    failures.append(box)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert snapshot.stats.opens == 1
    assert failures == []


def test_memory_for_a_thin_slice_does_not_grow_with_the_number_of_rows(
    store: PosixStorage,
) -> None:
    """A column of a tall chunk has as many runs as rows; none of them is listed."""
    tensor = random_tensor(1, dtype="U8", shape=(4_000_000, 2))
    directory = write(store, make({"t": tensor}, block_nbytes=1 << 20))
    with Snapshot.open(store, directory) as snapshot:
        box = Box((0, 1), (4_000_000, 1))
        out = bytearray(box.numel)
        tracemalloc.start()
        snapshot.read_box("t", box, memoryview(out))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert bytes(out) == tensor.box_bytes(box)
        assert peak < 8 << 20
