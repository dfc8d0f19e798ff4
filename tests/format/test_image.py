"""Data file images: valid safetensors, aligned, deterministic, strictly read back."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from holdfast.errors import CorruptionError, PlacementError, PlanError
from holdfast.format.dtypes import DTYPES, dtype_named
from holdfast.format.index import ImageEntry, chunk_name, layout_image, parse_header

ENTRIES = st.lists(
    st.builds(
        ImageEntry,
        name=st.text(max_size=8).filter(lambda n: n != "__metadata__"),
        dtype=st.sampled_from(sorted(DTYPES)),
        shape=st.lists(st.integers(0, 4), max_size=3).map(tuple),
    ),
    unique_by=lambda e: e.name,
    max_size=8,
)


def nbytes_of(entry: ImageEntry) -> int:
    return int(np.prod(entry.shape, dtype=np.int64)) * DTYPES[entry.dtype].itemsize


@settings(deadline=None)
@given(ENTRIES)
def test_images_are_packed_aligned_and_read_back(entries: list[ImageEntry]) -> None:
    image = layout_image(entries)
    assert len(image.header) % 4096 == 0
    assert image.nbytes == len(image.header) + sum(map(nbytes_of, entries))
    spans = sorted(
        (int(start), int(start) + nbytes_of(entry))
        for entry, start in zip(entries, image.starts, strict=True)
    )
    end = len(image.header)
    for start, stop in spans:
        assert start == end
        end = stop
    for entry, start in zip(entries, image.starts, strict=True):
        if nbytes_of(entry):
            assert start % min(DTYPES[entry.dtype].itemsize, 16) == 0
    found = {e.name: e for e in parse_header(image.header, file_nbytes=image.nbytes, place="f")}
    assert set(found) == {entry.name for entry in entries}
    for entry, start in zip(entries, image.starts, strict=True):
        dtype = DTYPES[entry.dtype]
        assert found[entry.name].start == start
        assert found[entry.name].nbytes == nbytes_of(entry)
        assert found[entry.name].shape == dtype.envelope_shape(entry.shape)
        assert found[entry.name].dtype == dtype.envelope
    assert layout_image(entries).header == image.header


def test_the_safetensors_library_opens_every_type(tmp_path: Path) -> None:
    entries = [ImageEntry(name=f"t.{n}", dtype=n, shape=(3, 2)) for n in sorted(DTYPES)]
    image = layout_image(entries)
    rng = np.random.default_rng(0)
    payload = rng.integers(0, 2, image.nbytes - len(image.header), dtype=np.uint8).tobytes()
    path = tmp_path / "f.safetensors"
    path.write_bytes(image.header + payload)
    with safe_open(path, framework="np") as opened:
        assert set(opened.keys()) == {entry.name for entry in entries}
        assert opened.metadata() == {"format": "pt"}
        for entry, start in zip(entries, image.starts.tolist(), strict=True):
            dtype = DTYPES[entry.dtype]
            shape = opened.get_slice(entry.name).get_shape()
            assert tuple(shape) == dtype.envelope_shape((3, 2))
            if dtype.numpy is not None and dtype.envelope == dtype.name:
                raw = opened.get_tensor(entry.name).tobytes()
                at = start - len(image.header)
                assert raw == payload[at : at + nbytes_of(entry)]


def test_names_of_chunks() -> None:
    assert chunk_name("a.w", offset=(0, 0), shape=(2, 3), global_shape=[2, 3]) == "a.w"
    assert chunk_name("a.w", offset=(0, 3), shape=(2, 3), global_shape=(2, 6)) == "a.w@0,3"
    assert chunk_name("s", offset=(), shape=(), global_shape=()) == "s"


@pytest.mark.parametrize("name", ["a", "__metadata__"])
def test_one_name_twice_is_a_fault_of_the_plan(name: str) -> None:
    entry = ImageEntry(name=name, dtype="U8", shape=(1,))
    with pytest.raises(PlanError, match=name):
        layout_image([entry, entry])


def test_unknown_types_are_named() -> None:
    with pytest.raises(PlacementError, match=r"F12.*BF16"):
        dtype_named("F12")


def raw_file(table: object, payload: int, *, length: int | None = None) -> bytes:
    text = table if isinstance(table, bytes) else json.dumps(table).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + bytes(payload)


def entry(start: int, stop: int, **more: object) -> dict[str, object]:
    return {"dtype": "U8", "shape": [stop - start], "data_offsets": [start, stop], **more}


HOSTILE = {
    "gap": raw_file({"a": entry(0, 2), "b": entry(3, 5)}, 5),
    "overlap": raw_file({"a": entry(0, 3), "b": entry(2, 5)}, 5),
    "cancelling": raw_file({"a": entry(0, 3), "b": entry(2, 4), "c": entry(5, 6)}, 6),
    "hole at the start": raw_file({"a": entry(1, 5)}, 5),
    "past the end": raw_file({"a": entry(0, 6)}, 5),
    "unclaimed end": raw_file({"a": entry(0, 4)}, 5),
    "backwards": raw_file({"a": entry(0, 5), "b": entry(5, 3), "c": entry(3, 5)}, 5),
    "negative": raw_file({"a": entry(-2, 5)}, 5),
    "huge offsets": raw_file({"a": entry(0, 2**70)}, 5),
    "one name twice": raw_file(b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},'
                               b'"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', 1),
    "one member twice": raw_file(b'{"a":{"dtype":"U8","dtype":"U8","shape":[1],'
                                 b'"data_offsets":[0,1]}}', 1),
    "more members": raw_file({"a": entry(0, 5, more=1)}, 5),
    "an object as shape": raw_file({"a": entry(0, 5, shape={})}, 5),
    "a boolean as size": raw_file({"a": entry(0, 1, shape=[True])}, 1),
    "a text as size": raw_file({"a": entry(0, 1, shape=["1"])}, 1),
    "a negative size": raw_file({"a": entry(0, 1, shape=[-1])}, 1),
    "too many dims": raw_file({"a": entry(0, 1, shape=[1] * 66)}, 1),
    "not an object": raw_file([1], 1),
    "not JSON": raw_file(b"{nonsense", 1),
    "not text": raw_file(b"\xff\xfe{}", 1),
    "deep": raw_file(b"[" * 100_000, 1),
    "metadata that is none": raw_file({"__metadata__": {"a": 1}, "a": entry(0, 1)}, 1),
    "metadata nested": raw_file({"__metadata__": {"a": {"b": "c"}}, "a": entry(0, 1)}, 1),
    "a lying length": raw_file({"a": entry(0, 1)}, 1, length=2**40),
    "a length past the file": raw_file({"a": entry(0, 1)}, 1, length=1000),
    "a length of nothing": raw_file({"a": entry(0, 1)}, 1, length=0),
    "only a length": (100).to_bytes(8, "little"),
    "empty": b"",
}  # fmt: skip


@pytest.mark.parametrize("name", list(HOSTILE))
def test_hostile_headers_are_refused(name: str) -> None:
    data = HOSTILE[name]
    length = int.from_bytes(data[:8], "little")
    with pytest.raises(CorruptionError, match="the-file"):
        parse_header(data[: 8 + length], file_nbytes=len(data), place="the-file")


def test_mutated_headers_never_break_the_parser() -> None:
    image = layout_image(
        [ImageEntry(name=f"k{i}", dtype="F32", shape=(i, 2)) for i in range(4)], align=8
    )
    rng = random.Random(3)
    for _ in range(3000):
        header = bytearray(image.header)
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(header))
            if rng.random() < 0.7:
                header[at] = rng.choice(b'{}[]",:0123456789ax\\\x00\xff')
            else:
                del header[at]
        try:
            found = parse_header(bytes(header), file_nbytes=image.nbytes, place="f")
        except CorruptionError:
            continue
        assert sum(entry.nbytes for entry in found) == image.nbytes - len(header)
