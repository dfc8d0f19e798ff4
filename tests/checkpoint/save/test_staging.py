"""Staging: what is copied when and by whom, page-locking, and writing beside it."""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast import Checkpointer, HoldfastError, PlanError, PosixStorage, StorageError, Stored
from holdfast.arrays.memory import copy_ranges
from holdfast.arrays.types import IntArray
from holdfast.checkpoint.save.staging import (
    PIECE_NBYTES,
    Copiers,
    CudaCopier,
    Staging,
    content_digest,
    copier_of,
    copy_bytes,
    copy_now,
    lock_pages,
    prepare_staging,
    stage,
    stage_by_slices,
    unlock_pages,
)
from holdfast.format.index import ImageEntry, layout_image
from holdfast.state.tensor_elements import TORCH_TO_NAME
from holdfast.state.tensor_memory import TensorMemory
from holdfast.writer.job import JobGate
from holdfast.writer.memory import SharedMemory

SAVES = ["sync", "async"]


def lay_out(
    memory: SharedMemory, sources: Sequence[torch.Tensor], *, slice_nbytes: int = 64
) -> tuple[Staging, list[str]]:
    names = [f"t{i}" for i in range(len(sources))]
    entries = [
        ImageEntry(name=name, dtype=TORCH_TO_NAME[s.dtype], shape=tuple(s.shape))
        for name, s in zip(names, sources, strict=True)
    ]
    image = layout_image(entries)
    staging = prepare_staging(
        memory, image, sources, slice_nbytes=slice_nbytes, piece_nbytes=slice_nbytes
    )
    return staging, names


def some_tensors() -> list[torch.Tensor]:
    """Contiguous, strided, conjugated, empty, scalar, of several element sizes."""
    base = torch.arange(48, dtype=torch.float32).reshape(6, 8)
    return [
        base.clone(),
        base.t(),
        base[:, 1:5:2],
        torch.tensor([1 + 2j, 3 - 4j, 0.5j]).conj(),
        torch.empty(0, 3),
        torch.tensor(7, dtype=torch.int64),
        torch.arange(11, dtype=torch.uint8),
        torch.arange(33, dtype=torch.bfloat16),
    ]


def assert_staged(staging: Staging, sources: Sequence[torch.Tensor]) -> None:
    for i, (source, target) in enumerate(zip(sources, staging.destinations, strict=True)):
        assert torch.equal(target, source.resolve_conj())
        assert staging.row_digest(i) == content_digest(source)


def test_every_kind_of_tensor_is_staged_bitwise() -> None:
    sources = some_tensors()
    for by_slices in (False, True):
        staging, names = lay_out(SharedMemory(), sources)
        if by_slices:
            ends = list(stage_by_slices(staging, TensorMemory(sources), {}))
            assert ends == [end for _, end in staging.pieces]
            assert len(ends) > 3
        else:
            stage(staging, TensorMemory(sources), names, {})
        assert_staged(staging, sources)


@pytest.mark.parametrize("by_slices", [True, False])
@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=30),
    gaps=st.lists(st.integers(0, 30), max_size=8),
    odd=st.sampled_from(["", "strided", "elsewhere", "conjugated"]),
)
@settings(max_examples=60, deadline=None)
def test_neighbours_in_memory_are_staged_bitwise(
    by_slices: bool, sizes: list[int], gaps: list[int], odd: str
) -> None:
    """Views of one buffer, without and with gaps, some of them at another place or strided."""
    dtype = torch.complex64 if odd == "conjugated" else torch.float32
    flat = torch.randn(1000).to(dtype)
    sources, at = [], 0
    for i, size in enumerate(sizes):
        at += i in gaps
        sources.append(flat[at : at + size])
        at += size
    middle = len(sizes) // 2
    if odd == "strided":
        sources[middle] = flat[: 2 * sizes[middle] : 2]
    elif odd == "elsewhere":
        sources[middle] = sources[middle].clone()
    elif odd == "conjugated":
        sources[middle] = sources[middle].conj()
    memory = SharedMemory()
    staging, names = lay_out(memory, sources)
    if by_slices:
        for _ in stage_by_slices(staging, TensorMemory(sources), {}):
            pass
    else:
        stage(staging, TensorMemory(sources), names, {})
    staged = [bytes(staging.view[s:e]) for s, e in bounds_of(staging)]
    assert staged == [each.resolve_conj().contiguous().numpy().tobytes() for each in sources]
    memory.close()


def test_memory_that_is_dropped_is_given_back(tmp_path: Path) -> None:
    def held() -> int:
        gc.collect()
        links = (os.path.join("/proc/self/fd", each) for each in os.listdir("/proc/self/fd"))
        return sum(
            "holdfast-staging" in os.readlink(each) for each in links if os.path.lexists(each)
        )

    before = held()
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, {"model": {"w": torch.ones(3)}})
    assert held() > before
    del checkpointer  # without close()
    assert held() == before


def bounds_of(staging: Staging) -> list[tuple[int, int]]:
    ends = staging.starts + staging.row_nbytes
    return list(zip(staging.starts.tolist(), ends.tolist(), strict=True))


@pytest.mark.parametrize("num_threads", [1, 2])
def test_neighbours_are_copied_as_one(num_threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large tensors by torch, if it has several threads."""
    moved: list[int] = []

    def note(target: IntArray, source: IntArray, nbytes: IntArray) -> None:
        moved.extend(nbytes.tolist())
        copy_ranges(target, source, nbytes)

    monkeypatch.setattr("holdfast.checkpoint.save.staging.copy_ranges", note)
    flat = torch.randn(2000)
    large = torch.randn(1 << 17)
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)
    sources = [*flat[:1000].split(10), *flat[1001:].split(10), large]
    memory = SharedMemory()
    staging, names = lay_out(memory, sources, slice_nbytes=1 << 20)
    stage(staging, TensorMemory(sources), names, {})
    assert moved == [4000, 3996, *([large.nbytes] if num_threads == 1 else [])]
    assert_staged(staging, sources)
    memory.close()


@pytest.mark.parametrize("change", ["strides", "conjugate", "memory", "trained", "nothing"])
@pytest.mark.parametrize("is_async", [False, True])
def test_what_is_known_of_tensors_is_not_believed_when_they_change(
    change: str, is_async: bool, tmp_path: Path
) -> None:
    """Saves of one structure know form and address of each tensor; what is stored is what is."""
    tensors = {f"t{i}": torch.full((6, 6), complex(i, i)) for i in range(30)}
    with Checkpointer(tmp_path) as checkpointer:
        for step in range(5):
            if step == 3:
                victim, other = tensors["t7"], torch.randn(6, 6, dtype=torch.complex64)
                if change == "strides":
                    victim.data = other.t()
                elif change == "conjugate":
                    tensors["t7"] = other.conj()
                elif change == "memory":
                    victim.data = other
                elif change == "trained":
                    victim.requires_grad_()
            for each in tensors.values():
                each.data += 1
            if is_async:
                checkpointer.save_async(step, {"p": tensors}).result()
            else:
                checkpointer.save(step, {"p": tensors})
            stored = checkpointer.load_all(step=step).values["p"]
            for name, each in tensors.items():
                assert torch.equal(stored[name], each.detach().resolve_conj()), (step, name)


def test_large_tensors_are_staged_mib_by_mib() -> None:
    """After each step the image is in place up to the byte stated, whatever the tensors are."""
    numel = (5 << 20) // 8
    base = torch.arange(numel, dtype=torch.float32)
    sources = [
        torch.arange(3),
        base,
        base[: numel // 4 * 4].reshape(4, -1).t(),
        torch.view_as_complex(base.reshape(-1, 2)).conj(),
        torch.ones(3, dtype=torch.uint8),
        base[1:].requires_grad_(),
    ]
    staging, _ = lay_out(SharedMemory(), sources, slice_nbytes=PIECE_NBYTES)
    expected, _ = lay_out(SharedMemory(), sources)
    copy_now(expected.destinations, sources)
    done, ends = len(staging.image.header), []
    for end in stage_by_slices(staging, TensorMemory(sources), {}):
        assert staging.view[done:end] == expected.view[done:end]
        done = end
        ends.append(end)
    assert done == staging.image.nbytes
    assert ends == sorted(ends)
    assert len(ends) > 7
    assert_staged(staging, sources)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 30), max_size=12), st.integers(1, 80))
def test_slices_are_the_image_in_order(sizes: list[int], limit: int) -> None:
    """Every row once; each slice holds exactly the bytes between the ends; none too small."""
    sources = [torch.zeros(n, dtype=torch.uint8 if n % 3 else torch.int32) for n in sizes]
    staging, _ = lay_out(SharedMemory(), sources, slice_nbytes=limit)
    all_rows = [row for rows, _ in staging.slices for row in rows]
    assert sorted(all_rows) == list(range(len(sizes)))
    begin = len(staging.image.header)
    for number, (rows, end) in enumerate(staging.slices):
        for row in rows:
            start = int(staging.starts[row])
            assert begin <= start <= start + sources[row].nbytes <= end
        if number < len(staging.slices) - 1:
            assert end - begin >= limit
        assert end - begin == sum(sources[row].nbytes for row in rows)
        begin = end
    assert begin == staging.image.nbytes or not sizes


def test_what_differs_from_the_plan_is_named_before_anything_is_copied() -> None:
    sources = [torch.ones(4), torch.ones(2, 3)]
    staging, names = lay_out(SharedMemory(), sources)
    for wrong in ([torch.ones(4), torch.ones(3, 2)], [torch.ones(4), torch.ones(2, 3).double()]):
        with pytest.raises(PlanError, match=r"t1: planned as torch\.float32 \[2, 3\]"):
            stage(staging, TensorMemory(wrong), names, {})
    with pytest.raises(PlanError, match="2 chunks for this rank, the state 1"):
        stage(staging, TensorMemory(sources[:1]), names, {})
    assert not staging.destinations[0].any()


# A device that copies by itself: tensors on "meta", whose bytes come when their mark is reached.


class SlowMark:
    """Done when somebody waits for it."""

    def __init__(self, copier: SlowCopier, act: Callable[[], None]) -> None:
        self._copier = copier
        self._act: Callable[[], None] | None = act

    def query(self) -> bool:
        return self._act is None

    def synchronize(self) -> None:
        if self._act is not None:
            self._copier.said.append("waited")
            self._act()
            self._act = None


class SlowCopier(CudaCopier):
    """Fills its targets with 7 when it is waited for."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.marks: list[SlowMark] = []
        self.fails_at = -1

    def begin(self) -> None:
        self.said.append("begin")

    def copy(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> SlowMark:
        assert all(source.device.type == "meta" for source in sources)
        if len(self.marks) == self.fails_at:
            raise RuntimeError("the device failed")
        self.said.append(f"copy {len(targets)}")

        def act() -> None:
            for target in targets:
                target.fill_(7)

        self.marks.append(SlowMark(self, act))
        return self.marks[-1]

    def finish(self) -> None:
        self.said.append("finish")
        for mark in self.marks:
            mark.synchronize()


def slow_copiers() -> tuple[Copiers, SlowCopier]:
    slow = SlowCopier()
    return {torch.device("meta"): slow}, slow


def test_sources_of_several_devices_go_to_their_places() -> None:
    """Each device by its own copier, all enqueued before anything is waited for."""
    sources = [torch.arange(16.0) if i % 2 else torch.empty(16, device="meta") for i in range(6)]
    copiers, slow = slow_copiers()
    staging, names = lay_out(SharedMemory(), sources)
    stage(staging, TensorMemory(sources), names, copiers)
    assert slow.said == ["begin", "copy 3", "waited", "finish"]
    for i, target in enumerate(staging.destinations):
        assert torch.equal(target, torch.arange(16.0) if i % 2 else torch.full((16,), 7.0))
    assert copier_of(torch.device("meta"), copiers) is slow
    assert copier_of(torch.device("cpu"), copiers) is None


def test_a_slice_is_reported_only_when_its_bytes_are_in_place() -> None:
    sources = [torch.empty(16, device="meta") for _ in range(4)]
    copiers, slow = slow_copiers()
    staging, _ = lay_out(SharedMemory(), sources)
    seen = 0
    for end in stage_by_slices(staging, TensorMemory(sources), copiers):
        assert slow.said[:5] == ["begin", "copy 1", "copy 1", "copy 1", "copy 1"]
        begin = len(staging.image.header)
        there = np.frombuffer(staging.view[begin:end], dtype=np.float32)
        assert (there == 7).all()
        assert (np.frombuffer(staging.view[end:], dtype=np.float32) == 0).all()
        seen += 1
    assert seen == 4
    assert slow.said[-1] == "finish"


def test_a_device_that_fails_is_left_quiet() -> None:
    """What was enqueued is waited for before the error is raised: nothing writes later."""
    sources = [torch.empty(16, device="meta") for _ in range(3)]
    copiers, slow = slow_copiers()
    slow.fails_at = 2
    staging, _ = lay_out(SharedMemory(), sources)
    with pytest.raises(RuntimeError, match="the device failed"):
        list(stage_by_slices(staging, TensorMemory(sources), copiers))
    assert slow.said == ["begin", "copy 1", "copy 1", "finish", "waited", "waited"]


class FakeCuda:
    """`torch.cuda` as far as a copier uses it, writing down who is told what in which order."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.inside: list[str] = []
        self.main = FakeStream(self, "main")
        self.refuses = 0

    def Stream(self, *, device: torch.device) -> FakeStream:
        assert device == torch.device("cuda:1")
        return FakeStream(self, "side")

    def current_stream(self, device: torch.device) -> FakeStream:
        assert device == torch.device("cuda:1")
        return self.main

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        self.inside.append(stream.name)
        yield
        self.inside.pop()

    def cudart(self) -> FakeCuda:
        return self

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.said.append(f"register {address % 4096} {nbytes} {flags}")
        return self.refuses

    def cudaHostUnregister(self, address: int) -> int:
        ctypes.string_at(address, 1)  # it must still be mapped
        self.said.append("unregister")
        return 0

    def cudaGetErrorString(self, code: int) -> str:
        return f"error number {code}"

    def synchronize(self) -> None:
        self.said.append("clear the error")
        raise RuntimeError("the last error")


class FakeStream:
    def __init__(self, cuda: FakeCuda, name: str) -> None:
        self._cuda = cuda
        self.name = name

    def wait_stream(self, other: FakeStream) -> None:
        self._cuda.said.append(f"{self.name} waits for {other.name}")

    def record_event(self) -> str:
        self._cuda.said.append(f"event on {self.name}")
        return "event"

    def synchronize(self) -> None:
        self._cuda.said.append(f"host waits for {self.name}")


def test_the_order_of_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies come after what was computed and before what is computed next, on a side stream."""
    cuda = FakeCuda()
    real = torch._foreach_copy_

    def watched(targets: Any, sources: Any, non_blocking: bool = False) -> None:
        cuda.said.append(f"copy on {cuda.inside[-1]}, non_blocking={non_blocking}")
        real(targets, sources)

    monkeypatch.setattr(torch, "_foreach_copy_", watched)
    copier = CudaCopier(torch.device("cuda:1"), cuda=cuda)
    target = torch.zeros(3)
    copier.begin()
    mark = copier.copy([target], [torch.ones(3)])
    copier.finish()
    assert mark == "event"
    assert cuda.said == [
        "side waits for main",
        "copy on side, non_blocking=True",
        "event on side",
        "main waits for side",
        "host waits for side",
    ]
    assert torch.equal(target, torch.ones(3))


def test_memory_is_page_locked_once_and_released_before_it_is_unmapped() -> None:
    cuda = FakeCuda()
    memory = SharedMemory()
    pages = partial(lock_pages, cuda=cuda), partial(unlock_pages, cuda=cuda)
    memory.lock(*pages)
    assert cuda.said == []
    memory.reserve(5000)
    memory.lock(*pages)
    memory.lock(*pages)
    assert memory.is_locked
    assert cuda.said == ["register 0 8192 1"]
    memory.reserve(100)
    assert memory.is_locked
    memory.reserve(9000)
    assert not memory.is_locked
    memory.lock(*pages)
    memory.close()
    assert cuda.said == ["register 0 8192 1", "unregister", "register 0 12288 1", "unregister"]
    assert not memory.is_locked


def test_a_refusal_to_page_lock_is_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    cuda = FakeCuda()
    cuda.refuses = 304
    memory = SharedMemory()
    pages = partial(lock_pages, cuda=cuda), partial(unlock_pages, cuda=cuda)
    with caplog.at_level(logging.WARNING, logger="holdfast"):
        for nbytes in (10, 20, 9000):
            memory.reserve(nbytes)
            memory.lock(*pages)
    assert not memory.is_locked
    assert cuda.said == ["register 0 4096 1", "clear the error"]
    assert len(caplog.records) == 1
    assert "error number 304" in caplog.text
    memory.close()
    assert "unregister" not in cuda.said


# Writing beside the staging


def test_a_gate_holds_back_what_is_not_there() -> None:
    gate = JobGate()
    gate.open_to(10)
    gate.open_to(5)
    gate.wait(10)
    passed = threading.Event()

    def wait() -> None:
        gate.wait(20)
        passed.set()

    thread = threading.Thread(target=wait)
    thread.start()
    assert not passed.wait(0.05)
    gate.open_to(19)
    assert not passed.wait(0.05)
    gate.open_to(20)
    assert passed.wait(60)
    thread.join()
    gate.close()
    gate.wait(20)
    with pytest.raises(StorageError, match="only 20 bytes of the image were staged, 21"):
        gate.wait(21)
    with pytest.raises(StorageError, match="the staging was not finished"):
        gate.wait_for_digests()
    with pytest.raises(StorageError, match="the save failed before its commit"):
        gate.wait_for_commit()


def _big(value: float) -> dict[str, object]:
    """Three slices and a bit."""
    return {"t": {f"x{i}": torch.full((5 << 20,), value + i) for i in range(3)}}


class Watched(PosixStorage):
    """Tells when the first bytes of a data file are written, and fails there if asked to."""

    def __init__(self, root: Path) -> None:
        self.written = threading.Event()
        self.seen: list[str] = []
        self.fails = False
        super().__init__(root, observer=self._look)

    def _look(self, operation: str, path: str, start: int, nbytes: int) -> None:
        self.seen.append(operation)
        if operation == "write_at" and ".safetensors" in path and "/data/" in path:
            if self.fails:
                raise StorageError("the disk is gone")
            self.written.set()


@pytest.fixture
def copying(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], None]]:
    """Called in turn, before each copy of a piece: several tensors, or a MiB of one."""
    before: list[Callable[[], None]] = []

    def watched(copy: Callable[..., None]) -> Callable[..., None]:
        def watch(*arguments: Any) -> None:
            if before:
                before.pop(0)()
            copy(*arguments)

        return watch

    for copy in (copy_now, copy_bytes):
        monkeypatch.setattr(f"holdfast.checkpoint.save.staging.{copy.__name__}", watched(copy))
    return before


def test_a_synchronous_save_writes_while_it_stages(
    tmp_path: Path, copying: list[Callable[[], None]]
) -> None:
    """The third tensor is not staged before the first bytes are being written."""
    storage = Watched(tmp_path)
    state = _big(1.0)
    waited: list[bool] = []

    def wait() -> None:
        waited.append(storage.written.wait(60))

    copying += [*[lambda: None] * 40, wait]
    with Checkpointer(storage) as checkpointer:
        checkpointer.save(1, state)
        assert waited == [True]
        loaded = checkpointer.load({"t": Stored()}).values["t"]
    assert isinstance(loaded, dict)
    for i in range(3):
        assert torch.equal(loaded[f"x{i}"], torch.full((5 << 20,), 1.0 + i))


def test_a_failure_of_either_side_ends_both(
    tmp_path: Path, copying: list[Callable[[], None]]
) -> None:
    """Staging that fails breaks the writer off; writing that fails lets the staging end."""

    def fail() -> None:
        raise RuntimeError("the copy failed")

    storage = Watched(tmp_path)
    with Checkpointer(storage) as checkpointer:
        checkpointer.save(1, {"n": 1})
        copying += [*[lambda: None] * 20, fail]
        storage.seen.clear()
        with pytest.raises(HoldfastError, match="the copy failed"):
            checkpointer.save(2, _big(1.0))
        assert "create" in storage.seen
        assert "sync" not in storage.seen, "the rest was written although it was never staged"
        storage.fails = True
        with pytest.raises(StorageError, match="the disk is gone"):
            checkpointer.save(2, _big(1.0))
        storage.fails = False
        assert checkpointer.steps() == [1]
        assert not list(tmp_path.glob(".saving*"))
        names = [thread.name for thread in threading.enumerate()]
        assert not [name for name in names if name.startswith(("holdfast-job", "holdfast-hash"))]
        checkpointer.save(2, _big(3.0))
        loaded = checkpointer.load({"t": Stored()}).values["t"]
    assert isinstance(loaded, dict)
    assert torch.equal(loaded["x2"], torch.full((5 << 20,), 5.0))


@pytest.mark.parametrize("mode", SAVES)
def test_nothing_is_written_of_a_state_that_is_not_the_planned_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """C8: whatever the signature said, shapes and dtypes are compared before the first byte."""
    from holdfast.checkpoint.plan.rank_plan import RankPlan

    storage = Watched(tmp_path)
    checkpointer = Checkpointer(storage)
    state = {"t": {"x": torch.ones(4)}}
    checkpointer.save(1, state)
    monkeypatch.setattr(
        RankPlan, "sources", lambda self, local: TensorMemory([torch.ones(4).double()])
    )
    storage.seen.clear()

    def save() -> None:
        if mode == "sync":
            checkpointer.save(2, state)
        else:
            checkpointer.save_async(2, state).result(30)

    with pytest.raises(PlanError, match=r"t\.x: planned as torch\.float32 \[4\]"):
        save()
    assert "create" not in storage.seen
    assert checkpointer.steps() == [1]
