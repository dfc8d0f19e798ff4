"""The chunk table: narrow on disk, exact in memory, and proven before it is used."""

from __future__ import annotations

import random
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import replace

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load as load_safetensors

from holdfast.arrays.boxes import Box
from holdfast.errors import CorruptionError, PlanError
from holdfast.format.digest import block_digests, digest128, num_blocks
from holdfast.format.index import (
    ChunkIndex,
    ImageEntry,
    decode_index,
    encode_index,
    layout_image,
    validate_index,
)
from holdfast.format.manifest import WHOLE, FileInfo, IndexInfo, Manifest, TensorInfo, Totals
from tests.format.making import Chunk, Made, make, random_tensor, sample_tensors

ROW_COLUMNS = ("tensor", "file", "offset", "extent", "start", "nbytes", "copy", "holders")
COLUMNS = (*ROW_COLUMNS, "holder_ptr", "holder", "digest_ptr", "digest")


def tables(max_rows: int = 6) -> st.SearchStrategy[ChunkIndex]:
    def build(rows: int, dims: int, top: int, seed: int) -> ChunkIndex:
        rng = np.random.default_rng(seed)

        def column(*shape: int) -> npt.NDArray[np.int64]:
            return rng.integers(0, top, shape, dtype=np.int64)

        counts = rng.integers(0, 4, rows)
        pointers = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        return ChunkIndex(
            tensor=column(rows), file=column(rows), offset=column(rows, dims),
            extent=column(rows, dims), start=column(rows), nbytes=column(rows), copy=column(rows),
            holders=column(rows), holder_ptr=column(rows + 1), holder=column(dims),
            digest_ptr=pointers,
            digest=rng.integers(0, 2**64, int(pointers[-1]), dtype=np.uint64),
        )  # fmt: skip

    tops = st.sampled_from([2, 256, 257, 2**16 + 1, 2**32 + 1, 2**63 - 1])
    return st.builds(build, st.integers(0, max_rows), st.integers(0, 4), tops, st.integers(0, 999))


def assert_equal(one: ChunkIndex, two: ChunkIndex) -> None:
    for name in COLUMNS:
        a, b = getattr(one, name), getattr(two, name)
        assert a.dtype == b.dtype == (np.uint64 if name == "digest" else np.int64)
        assert a.shape == b.shape
        assert (a == b).all(), name


@settings(deadline=None)
@given(tables())
def test_tables_come_back_and_are_deterministic(index: ChunkIndex) -> None:
    data = encode_index(index)
    assert_equal(decode_index(data), index)
    assert encode_index(decode_index(data)) == data


def test_the_index_is_a_safetensors_file_of_narrow_columns() -> None:
    index = make(sample_tensors()).index
    found = load_safetensors(encode_index(index))
    assert sorted(found) == sorted(COLUMNS)
    for name, column in found.items():
        assert (column == getattr(index, name)).all()
    assert found["tensor"].dtype == np.uint8
    assert found["start"].dtype == np.uint16
    assert found["digest"].dtype == np.uint64


def test_rows_cost_less_than_eighty_bytes() -> None:
    """As planned for 1024 ranks and 1000 tensors of up to 4 dims, files of 20 GB."""
    num = 100_000
    rng = np.random.default_rng(0)
    index = ChunkIndex(
        tensor=rng.integers(0, 1_000_000, num),
        file=rng.integers(0, 1024, num),
        offset=rng.integers(0, 60_000, (num, 4)),
        extent=rng.integers(0, 60_000, (num, 4)),
        start=rng.integers(0, 20 << 30, num),
        nbytes=rng.integers(0, 1 << 30, num),
        copy=rng.integers(0, 3, num),
        holders=rng.integers(0, 3000, num),
        holder_ptr=np.arange(3001) * 2,
        holder=rng.integers(0, 1024, 6000),
        digest_ptr=np.arange(num + 1) * 2,
        digest=rng.integers(0, 2**64, 2 * num, dtype=np.uint64),
    )
    assert len(encode_index(index)) <= 80 * num


@pytest.mark.parametrize(
    "change",
    [
        lambda i: replace(i, tensor=i.tensor[:-1]),
        lambda i: replace(i, offset=i.offset[:, :-1]),
        lambda i: replace(i, offset=i.offset.ravel()),
        lambda i: replace(i, digest_ptr=i.digest_ptr[:-1]),
        lambda i: replace(i, digest=i.digest.reshape(-1, 1)),
        lambda i: replace(i, start=i.start - 10**6),
    ],
)
def test_misshapen_tables_are_not_written(change: Callable[[ChunkIndex], ChunkIndex]) -> None:
    with pytest.raises(PlanError, match="index"):
        encode_index(change(make(sample_tensors()).index))


def columns_file(**columns: npt.NDArray[np.generic]) -> bytes:
    kinds = {"uint8": "U8", "uint16": "U16", "int64": "I64", "uint64": "U64", "float32": "F32"}
    image = layout_image(
        [ImageEntry(name=n, dtype=kinds[a.dtype.name], shape=a.shape) for n, a in columns.items()]
    )
    data = bytearray(image.nbytes)
    data[: len(image.header)] = image.header
    for array, start in zip(columns.values(), image.starts.tolist(), strict=True):
        data[start : start + array.nbytes] = array.tobytes()
    return bytes(data)


def good_columns() -> dict[str, npt.NDArray[np.generic]]:
    one = np.zeros(1, dtype=np.uint8)
    return {
        "tensor": one, "file": one, "offset": one.reshape(1, 1), "extent": one.reshape(1, 1),
        "start": one, "nbytes": one, "copy": one, "digest_ptr": np.zeros(2, dtype=np.uint8),
        "holders": one, "holder_ptr": one, "holder": np.zeros(0, dtype=np.uint8),
        "digest": np.zeros(0, dtype=np.uint64),
    }  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [
        {"tensor": np.zeros(2, dtype=np.uint8)},
        {"tensor": np.zeros((), dtype=np.uint8)},
        {"tensor": np.zeros(1, dtype=np.float32)},
        {"tensor": np.zeros(1, dtype=np.int64)},
        {"start": np.full(1, 2**63, dtype=np.uint64)},
        {"offset": np.zeros((1, 65), dtype=np.uint8), "extent": np.zeros((1, 65), dtype=np.uint8)},
        {"offset": np.zeros((1, 2), dtype=np.uint8)},
        {"digest": np.zeros((1, 1), dtype=np.uint64)},
        {"digest_ptr": np.zeros(1, dtype=np.uint8)},
        {"holders": np.zeros(2, dtype=np.uint8)},
        {"holder_ptr": np.zeros(0, dtype=np.uint8)},
        {"holder_ptr": np.zeros((1, 1), dtype=np.uint8)},
        {"holder": np.zeros((1, 1), dtype=np.uint8)},
        {"more": np.zeros(1, dtype=np.uint8)},
    ],
)
def test_files_that_are_no_table_are_refused(change: dict[str, npt.NDArray[np.generic]]) -> None:
    assert decode_index(columns_file(**good_columns())).num_rows == 1
    with pytest.raises(CorruptionError, match="here"):
        decode_index(columns_file(**{**good_columns(), **change}), place="here")
    missing = good_columns()
    missing.pop("copy")
    with pytest.raises(CorruptionError, match="columns"):
        decode_index(columns_file(**missing))


def test_a_shape_that_lies_about_its_bytes_takes_no_memory() -> None:
    data = columns_file(**good_columns())
    for old, new in ((b'"shape":[2]', b'"shape":[9]'), (b'"shape":[1]', b'"shape":[0]')):
        with pytest.raises(CorruptionError):
            decode_index(data.replace(old, new, 1))
    tracemalloc.start()
    text = data.replace(b'"shape":[2],', b'"shape":[2000000000000],', 1)
    with pytest.raises(CorruptionError):
        decode_index(text)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_mutated_files_never_break_the_decoder() -> None:
    data = encode_index(make(sample_tensors()).index)
    used = len(data[8:4096].rstrip()) + 8
    rng = random.Random(5)
    for _ in range(1500):
        damaged = bytearray(data)
        for _ in range(rng.randint(1, 3)):
            damaged[rng.randrange(used)] = rng.choice(b'{}[]",:0123456789U\x00\xff')
        cut = rng.randrange(len(data)) if rng.random() < 0.2 else len(data)
        try:
            index = decode_index(bytes(damaged[:cut]))
        except CorruptionError:
            continue
        assert index.offset.shape == (index.num_rows, index.num_dims)


# Validation


def test_a_proper_table_is_accepted() -> None:
    made = make(sample_tensors())
    validate_index(sealed(made), made.manifest)


def sealed(made: Made) -> ChunkIndex:
    """The table, with the manifest's number of rows and totals set to agree with it."""
    made.manifest = msgspec.structs.replace(
        made.manifest,
        index=msgspec.structs.replace(made.manifest.index, num_rows=made.index.num_rows),
        totals=msgspec.structs.replace(
            made.manifest.totals, stored_nbytes=int(made.index.nbytes.sum())
        ),
    )
    return made.index


WEIGHT, NORM = "model.weight", "model.norm"


def rows_of(made: Made, key: str) -> list[int]:
    number = [tensor.key for tensor in made.manifest.tensors].index(key)
    rows: list[int] = np.flatnonzero(made.index.tensor == number).tolist()
    return rows


def drop(made: Made, key: str, which: int) -> None:
    row = rows_of(made, key)[which]
    keep = np.setdiff1d(np.arange(made.index.num_rows), [row])
    counts = np.diff(made.index.digest_ptr)[keep]
    made.index = ChunkIndex(
        digest_ptr=np.concatenate([[0], np.cumsum(counts)]),
        digest=np.concatenate([made.index.digests(kept) for kept in keep]),
        holder_ptr=made.index.holder_ptr,
        holder=made.index.holder,
        **{name: getattr(made.index, name)[keep] for name in ROW_COLUMNS},
    )


def set_value(made: Made, column: str, row: int, value: object) -> None:
    array = getattr(made.index, column).copy()
    array[row] = value
    made.index = replace(made.index, **{column: array})


def add(column: str, key: str, which: int, amount: object) -> Callable[[Made], None]:
    def change(made: Made) -> None:
        row = rows_of(made, key)[which]
        set_value(made, column, row, getattr(made.index, column)[row] + np.array(amount))

    return change


FLAWS: list[tuple[str, Callable[[Made], None], str]] = [
    ("a missing chunk", lambda m: drop(m, WEIGHT, 1), rf"{WEIGHT}.*gap"),
    ("a missing scalar", lambda m: drop(m, "model.scale", 0), "model.scale.*gap"),
    ("a chunk that moved", add("offset", WEIGHT, 1, [0, 1]), rf"{WEIGHT}.*(gap|overlap)"),
    ("a chunk out of bounds", add("offset", WEIGHT, 3, [1, 0]), rf"{WEIGHT}.*out of bounds"),
    ("a copy out of bounds", add("offset", NORM, 1, [1, 0]), rf"{NORM}.*leaves its tensor"),
    ("a copy of no primary", add("extent", NORM, 1, [-1, 0]), NORM),
    ("a primary twice", add("copy", NORM, 1, -1), rf"{NORM}.*overlap"),
    ("no primary", add("copy", NORM, 0, 1), rf"{NORM}.*gap"),
    ("dims behind the last", add("offset", NORM, 0, [0, 1]), rf"{NORM}.*after its own dims"),
    ("too few bytes", add("nbytes", WEIGHT, 0, -4), rf"{WEIGHT}.*bytes are stated"),
    ("start inside the header", add("start", WEIGHT, 0, -4096), rf"{WEIGHT}.*leave"),
    ("start past the end", add("start", WEIGHT, 0, 10**6), rf"{WEIGHT}.*leave"),
    ("start beyond any file", add("start", WEIGHT, 0, 2**62), rf"{WEIGHT}.*leave"),
    ("shifted by an element", add("start", WEIGHT, 1, 4), "overlap|gap|leave"),
    ("a file that is not there", add("file", WEIGHT, 0, 2), "file is 2"),
    ("a file below none", add("file", WEIGHT, 0, -1), "file is -1"),
    ("another file", add("file", WEIGHT, 0, 1), "overlap|gap|leave"),
    ("a tensor that is not there", add("tensor", WEIGHT, 0, 99), "tensor is 99"),
    ("holders that are not there", add("holders", WEIGHT, 0, 1), "holders is 1, not below 1"),
    ("holders below none", add("holders", WEIGHT, 0, -1), "holders is -1"),
    ("fewer holders", lambda m: set_value(m, "holder_ptr", -1, 1), "2 holders"),
    ("holders of nobody", lambda m: set_value(m, "holder_ptr", slice(None), 2), "2 holders"),
    ("fewer digests", lambda m: set_value(m, "digest_ptr", -1, 3), "digest"),
    ("digests of others", lambda m: set_value(m, "digest_ptr", 1, 0), "digest"),
    ("digests not from zero", lambda m: set_value(m, "digest_ptr", slice(None),
                                                  m.index.digest_ptr + 1), "digests"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "change", "match"), FLAWS, ids=[f[0] for f in FLAWS])
def test_a_table_with_a_flaw_is_refused(
    name: str, change: Callable[[Made], None], match: str
) -> None:
    made = make(sample_tensors())
    change(made)
    with pytest.raises(CorruptionError, match=match):
        validate_index(sealed(made), made.manifest)


def test_numbers_that_disagree_with_the_manifest_are_refused() -> None:
    made = make(sample_tensors())
    sealed(made)
    rows = msgspec.structs.replace(made.manifest.index, num_rows=3)
    with pytest.raises(CorruptionError, match="states 3"):
        validate_index(made.index, msgspec.structs.replace(made.manifest, index=rows))
    totals = msgspec.structs.replace(made.manifest.totals, stored_nbytes=5)
    with pytest.raises(CorruptionError, match="manifest states 5"):
        validate_index(made.index, msgspec.structs.replace(made.manifest, totals=totals))


def test_files_must_be_filled_to_the_last_byte() -> None:
    """A byte that no row covers is a byte that no digest covers."""
    made = make(sample_tensors())
    for number in (0, 1):
        info = made.manifest.files[number]
        files = list(made.manifest.files)
        files[number] = msgspec.structs.replace(info, nbytes=info.nbytes + 1)
        with pytest.raises(CorruptionError, match=info.name):
            validate_index(sealed(made), msgspec.structs.replace(made.manifest, files=files))


def test_a_copy_must_repeat_the_box_of_a_primary() -> None:
    chunks = [Chunk(file=0, box=Box((0,), (4,))), Chunk(file=1, box=Box((0,), (2,)), copy=1)]
    made = make({"t": random_tensor(1, dtype="U8", shape=(4,), chunks=chunks)})
    with pytest.raises(CorruptionError, match=r"'t'.*a copy of a box without a primary"):
        validate_index(sealed(made), made.manifest)


def test_the_same_copy_twice_is_refused() -> None:
    whole = Box((0,), (4,))
    chunks = [
        Chunk(file=0, box=whole), Chunk(file=1, box=whole, copy=1), Chunk(file=2, box=whole, copy=1)
    ]  # fmt: skip
    made = make({"t": random_tensor(1, dtype="U8", shape=(4,), chunks=chunks)})
    with pytest.raises(CorruptionError, match="listed twice"):
        validate_index(sealed(made), made.manifest)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32))
def test_random_changes_are_refused_or_harmless(seed: int) -> None:
    """Whatever table is accepted satisfies, by brute force, all that readers rely on."""
    rng = random.Random(seed)
    made = make(sample_tensors())
    for _ in range(rng.randint(1, 3)):
        name = rng.choice(COLUMNS[:-1])
        array = getattr(made.index, name).copy()
        at = tuple(rng.randrange(n) for n in array.shape)
        array[at] = rng.choice([0, 1, 2, 3, 4, array[at] + 1, array[at] - 1, 4096, 2**63 - 1, -1])
        made.index = replace(made.index, **{name: array})
    try:
        validate_index(sealed(made), made.manifest)
    except CorruptionError:
        return
    index, manifest = made.index, made.manifest
    for number, tensor in enumerate(manifest.tensors):
        counts = np.zeros(tensor.shape, dtype=np.int64)
        for row in np.flatnonzero(index.tensor == number).tolist():
            box = index.box(row, ndim=len(tensor.shape))
            counts[box.relative_to((0,) * box.ndim)] += index.copy[row] == 0
        assert (counts == 1).all()
    for number, file in enumerate(manifest.files):
        used = np.zeros(file.nbytes, dtype=np.int64)
        used[: file.header_nbytes] = 1
        for row in np.flatnonzero(index.file == number).tolist():
            used[index.start[row] : index.start[row] + index.nbytes[row]] += 1
        assert (used == 1).all()


def test_a_million_rows_are_proven_quickly() -> None:
    """Growth, not speed: a loop over rows in Python would need minutes."""
    per, num_tensors, num_files = 8, 125_000, 64
    num = per * num_tensors
    tensor = np.repeat(np.arange(num_tensors), per)
    offset = np.stack([np.tile(np.arange(per) * 4, num_tensors), np.zeros(num, dtype=np.int64)], 1)
    file = np.arange(num) % num_files
    start = 4096 + (np.arange(num) // num_files) * 128
    index = ChunkIndex(
        tensor=tensor, file=file, offset=offset, extent=np.tile(np.array([4, 8]), (num, 1)),
        start=start, nbytes=np.full(num, 128), copy=np.zeros(num, dtype=np.int64),
        holders=file, holder_ptr=np.arange(num_files + 1), holder=np.arange(num_files),
        digest_ptr=np.arange(num + 1), digest=np.zeros(num, dtype=np.uint64),
    )  # fmt: skip
    tensors = [TensorInfo(key=f"t{i}", dtype="F32", shape=[32, 8], layout=0)
               for i in range(num_tensors)]  # fmt: skip
    files = [
        FileInfo(name=f"data/{i:05d}.safetensors", nbytes=4096 + num // num_files * 128,
                 header_nbytes=4096, header_digest="0" * 32, writer=i, coordinate={})
        for i in range(num_files)
    ]  # fmt: skip
    manifest = Manifest(
        step=1, save_id="a", created="", holdfast="", torch="", layouts=[], signature="",
        block_nbytes=1 << 20, placements=[WHOLE], tensors=tensors, parts={}, files=files,
        index=IndexInfo(nbytes=8, digest="", num_rows=num),
        totals=Totals(num_tensors=num_tensors, nbytes=num * 128, stored_nbytes=num * 128),
    )  # fmt: skip
    began = time.monotonic()
    data = encode_index(index)
    decoded = decode_index(data)
    validate_index(decoded, manifest)
    assert time.monotonic() - began < 20
    assert len(data) <= 40 * num
    decoded.offset[777_777, 0] += 1
    with pytest.raises(CorruptionError, match="t97222"):
        validate_index(decoded, manifest)


# Digests


@given(st.binary(max_size=300), st.sampled_from([16, 64, 1 << 20]))
def test_block_digests_are_those_of_the_blocks(data: bytes, block: int) -> None:
    found = block_digests(data, block)
    assert found.dtype == np.uint64
    pieces = [data[i : i + block] for i in range(0, len(data), block)]
    assert len(found) == num_blocks(len(data), block) == len(pieces)
    assert found.tolist() == [int(block_digests(piece, block)[0]) for piece in pieces]
    assert (block_digests(memoryview(bytearray(data)), block) == found).all()


def test_digests_are_the_published_ones() -> None:
    """XXH3 test vectors: the format is readable by any implementation."""
    assert block_digests(b"", 64).tolist() == []
    assert block_digests(b"abc", 64).tolist() == [0x78AF5F94892F3950]
    assert digest128(b"abc") == "06b05ab6733a618578af5f94892f3950"
    assert digest128(b"") == "99aa06d3014798d86001c324468d497f"
