"""Columns of a matrix without digests: what a rank does not need is not read, wherever it lies."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from holdfast import Checkpointer, Sharded, StorageError
from holdfast.arrays.box_table import BoxTable
from holdfast.arrays.boxes import Box
from holdfast.foreign.records import index_of_one_rank
from holdfast.format.byte_ranges import Overlaps, find_overlaps
from holdfast.storage import PosixStorage
from holdfast.storage.reading import read_strips


def overlaps_of(chunk: Box, boxes: list[Box], itemsize: int) -> Overlaps:
    """Boxes of one tensor that is stored as one chunk."""
    table = BoxTable.from_boxes([0], [chunk], num_dims=chunk.ndim)
    zero = np.zeros(1, dtype=np.int64)
    index = index_of_one_rank(table, [itemsize], file=[0], start=[0], copy=zero)
    return find_overlaps(
        index,
        BoxTable.from_boxes([0] * len(boxes), boxes, num_dims=chunk.ndim),
        np.array([itemsize]),
        request=np.arange(len(boxes)),
        row=np.zeros(len(boxes), dtype=np.int64),
    )


def strips_by_byte(
    chunk: Box, boxes: list[Box], itemsize: int, start: int, stop: int, max_gap: int
) -> list[tuple[int, int]]:
    """The same, one byte after another."""
    is_needed = np.zeros((*chunk.shape, itemsize), dtype=bool)
    for box in boxes:
        is_needed[box.relative_to(chunk.offset)] = True
    strips: list[tuple[int, int]] = []
    for byte in np.flatnonzero(is_needed.ravel()[start:stop]).tolist():
        at, nbytes = strips[-1] if strips else (byte, 0)
        if byte - (at + nbytes) < max(max_gap, 1):
            strips[-1:] = [(at, byte + 1 - at)]
        else:
            strips.append((byte, 1))
    return strips


def test_strips_are_those_of_a_search_byte_by_byte() -> None:
    draw = np.random.default_rng(26)
    for _ in range(300):
        ndim, itemsize = int(draw.integers(1, 5)), int(draw.choice([1, 2, 4, 8, 16]))
        chunk = Box(
            tuple(draw.integers(0, 9, ndim).tolist()), tuple(draw.integers(1, 7, ndim).tolist())
        )
        boxes = []
        for _ in range(int(draw.integers(1, 4))):
            inner = [int(draw.integers(0, n)) for n in chunk.shape]
            sizes = [
                int(draw.integers(1, n - i + 1)) for i, n in zip(inner, chunk.shape, strict=True)
            ]
            offset = tuple(a + b for a, b in zip(chunk.offset, inner, strict=True))
            boxes.append(Box(offset, tuple(sizes)))
        first, last = sorted(draw.integers(0, chunk.numel + 1, 2).tolist())
        bounds = first * itemsize, last * itemsize
        # Gaps in elements, as strips are: a gap within an element is none.
        max_gap = int(draw.integers(0, 12)) * itemsize
        overlaps = overlaps_of(chunk, boxes, itemsize)
        got = overlaps.strips(range(len(boxes)), *bounds, max_gap=max_gap)
        assert got == strips_by_byte(chunk, boxes, itemsize, *bounds, max_gap), (chunk, boxes)


def read_calls_nbytes() -> int:
    """Bytes that this process has got from read calls, as the kernel counts them."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("rchar")).split()[1])


@pytest.mark.parametrize("kind", ["safetensors", "dcp", "torch_save"])
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_an_eighth_by_rows_or_by_columns_is_all_that_is_read(tmp_path: Path, kind: str) -> None:
    """By the report and by the kernel, at most 1.05 times what is needed."""
    weights = {
        # 7 KiB between the strips of a row: less than a piece, more than a page.
        "attention": torch.randn(512, 2048),
        # Not at a multiple of anything.
        "odd": torch.randn(301, 12344).to(torch.bfloat16),
        "experts": torch.randn(4, 128, 2048),
    }
    if kind == "safetensors":
        save_file(weights, tmp_path / "x.safetensors")
    elif kind == "dcp":
        dcp.save({"model": weights}, checkpoint_id=tmp_path)
    else:
        torch.save(weights, tmp_path / "x.pt")
    source = tmp_path / "x.pt" if kind == "torch_save" else tmp_path
    checkpointer = Checkpointer(tmp_path / "none")
    checkpointer.load({}, source=source, ignore_unexpected=True)  # modules, which are files, too
    for from_end in (2, 1):
        state, slices = {}, {}
        for name, whole in weights.items():
            dim = whole.ndim - from_end
            size = whole.shape[dim] // 8
            slices[name] = whole.narrow(dim, 3 * size, size)
            offset = tuple(3 * size if d == dim else 0 for d in range(whole.ndim))
            state[name] = Sharded(
                torch.zeros_like(slices[name].contiguous()),
                tuple(whole.shape),
                offset=offset,
                over=("tp",),
            )
        before = read_calls_nbytes()
        report = checkpointer.load({"model": state}, source=source)
        by_kernel = read_calls_nbytes() - before
        for name, expected in slices.items():
            assert torch.equal(state[name].local, expected), name
        assert report.nbytes_needed == sum(e.numel() * e.element_size() for e in slices.values())
        assert report.nbytes_needed <= report.nbytes_read <= 1.05 * report.nbytes_needed
        # With the headers, and the archive around each tensor of DCP.
        assert by_kernel <= 1.05 * report.nbytes_needed + (128 << 10)


def test_strips_of_a_file_and_of_a_store_that_cannot_skip(tmp_path: Path) -> None:
    data = os.urandom(40_000)
    (tmp_path / "x").write_bytes(data)

    class Whole:
        """A source without strips."""

        nbytes = len(data)

        def readinto(self, buffer: memoryview, *, start: int) -> None:
            buffer[:] = data[start : start + len(buffer)]

        def close(self) -> None: ...

    strips = [(0, 10), (9_000, 1), (29_995, 5)]
    source = PosixStorage(tmp_path).open("x")
    for each, nbytes in ((source, 16), (Whole(), 30_000)):
        buffer = bytearray(30_000)
        assert read_strips(each, memoryview(buffer), start=10_000, strips=strips) == nbytes
        for at, size in strips:
            assert buffer[at : at + size] == data[10_000 + at : 10_000 + at + size]
    with pytest.raises(StorageError, match="it is truncated"):
        read_strips(source, memoryview(bytearray(30_000)), start=10_001, strips=strips)
    source.close()


def test_a_client_that_is_cancelled_in_a_thread_leaves_no_load_that_looks_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """E4: what a storage raises is an error of the load, whatever its class.

    A load whose threads met an exception that is not an `Exception` reported success, and had
    filled nothing.
    """
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(4))

    def observe(operation: str, path: str, start: int, nbytes: int) -> None:
        if operation == "read" and "/data/" in path:
            raise asyncio.CancelledError("the client was cancelled")

    numel = 256 << 10
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {name: torch.ones(numel) for name in "abcd"})
    reader = Checkpointer(PosixStorage(tmp_path, observer=observe))
    with pytest.raises(asyncio.CancelledError, match="was cancelled"):
        reader.load({name: torch.zeros(numel) for name in "ac"})


@pytest.mark.parametrize(("numel", "has_threads"), [(256, False), (256 << 10, True)])
def test_few_bytes_of_this_host_are_read_without_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, numel: int, has_threads: bool
) -> None:
    """A load of some KiB does not start threads, which would cost more than its reads."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(4))
    names: list[str] = []
    start = threading.Thread.start

    def noted(thread: threading.Thread) -> None:
        names.append(thread.name)
        start(thread)

    saved = {name: torch.full((numel,), float(i)) for i, name in enumerate("abcd")}
    # What is requested has gaps, so that there are two reads.
    wanted = {name: torch.zeros(numel) for name in "ac"}
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, saved)
        monkeypatch.setattr(threading.Thread, "start", noted)
        checkpointer.load(wanted)
    assert any("holdfast-load" in name for name in names) is has_threads
    assert all(torch.equal(wanted[name], saved[name]) for name in wanted)
