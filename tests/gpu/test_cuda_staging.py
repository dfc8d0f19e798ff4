"""Staging from CUDA: page-locked memory, stream order, bitwise content. Needs a device."""

from __future__ import annotations

import logging
import mmap
from pathlib import Path

import pytest
import torch

from holdfast import Checkpointer, PosixStorage, Stored
from holdfast.checkpoint.save.staging import (
    Copiers,
    content_digest,
    copier_of,
    lock_pages,
    prepare_staging,
    stage,
    unlock_pages,
)
from holdfast.format.index import ImageEntry, layout_image
from holdfast.state.tensor_elements import TORCH_TO_NAME
from holdfast.state.tensor_memory import TensorMemory
from holdfast.writer.memory import SharedMemory

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
_SLEEP_CYCLES = 200_000_000  # about a tenth of a second
_NUMEL = 4 << 20
MODES = pytest.mark.parametrize("mode", ["sync", "async"])


class Unshared(PosixStorage):
    """A storage that no other process can open: asynchronous saves are written by a thread."""


def _save(checkpointer: Checkpointer, mode: str, step: int, state: dict[str, object]) -> None:
    if mode == "sync":
        checkpointer.save(step, state)
    else:
        checkpointer.save_async(step, state)


def _tensors() -> dict[str, torch.Tensor]:
    """On the device and on the host; contiguous, strided, conjugated, empty, scalar."""
    generator = torch.Generator().manual_seed(3)
    base = torch.randn(64, 96, generator=generator)
    on_device = {
        "whole": base.cuda(),
        "transposed": base.cuda().t(),
        "strided": base.cuda()[3:50:2, 1::3],
        "conjugated": torch.view_as_complex(base.cuda().view(64, 48, 2)).conj(),
        "bfloat16": base.cuda().bfloat16(),
        "bytes": (base * 50).to(torch.int8).cuda(),
        "bools": (base > 0).cuda(),
        "scalar": torch.tensor(2.5, dtype=torch.float64).cuda(),
        "empty": torch.empty(0, 4).cuda(),
    }
    return {**on_device, "host": base.clone(), "host strided": base.t()}


def _stored(checkpointer: Checkpointer, step: int) -> dict[str, torch.Tensor]:
    found = checkpointer.load({"t": Stored()}, step=step).values["t"]
    assert isinstance(found, dict)
    return found


@MODES
@pytest.mark.parametrize("shared", [True, False])
def test_every_kind_of_tensor_is_stored_bitwise(tmp_path: Path, mode: str, shared: bool) -> None:
    storage = PosixStorage(tmp_path) if shared else Unshared(tmp_path)
    tensors = _tensors()
    with Checkpointer(storage) as checkpointer:
        for step in (1, 2):
            _save(checkpointer, mode, step, {"t": tensors})
    for step in (1, 2):
        stored = _stored(checkpointer, step)
        assert sorted(stored) == sorted(tensors)
        for name, tensor in tensors.items():
            assert stored[name].dtype == tensor.dtype
            assert torch.equal(stored[name].cpu(), tensor.resolve_conj().cpu()), name


@MODES
def test_training_may_overwrite_right_after_the_call(tmp_path: Path, mode: str) -> None:
    """What is stored was computed before the call, however late; nothing that came after it."""
    x = torch.zeros(_NUMEL, device="cuda")
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.prepare({"t": {"x": x}})
        for step in range(1, 6):
            torch.cuda._sleep(_SLEEP_CYCLES)
            x.fill_(float(step))
            _save(checkpointer, mode, step, {"t": {"x": x}})
            x.fill_(-1.0)
            scratch = torch.full((_NUMEL,), -2.0, device="cuda")
            del scratch
    for step in range(1, 6):
        assert torch.equal(
            _stored(checkpointer, step)["x"].cpu(), torch.full((_NUMEL,), 1.0 * step)
        )


def test_the_callers_stream_is_the_one_that_counts(tmp_path: Path) -> None:
    """A training loop on a stream of its own, and another stream that overwrites after the call."""
    x = torch.zeros(_NUMEL, device="cuda")
    mine, other = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with Checkpointer(tmp_path) as checkpointer:
        for step in range(1, 4):
            with torch.cuda.stream(mine):
                torch.cuda._sleep(_SLEEP_CYCLES)
                x.fill_(float(step))
                checkpointer.save_async(step, {"t": {"x": x}})
            with torch.cuda.stream(other):  # ordered after the call by the host alone
                x.fill_(-1.0)
            torch.cuda.synchronize()
    for step in range(1, 4):
        assert torch.equal(
            _stored(checkpointer, step)["x"].cpu(), torch.full((_NUMEL,), 1.0 * step)
        )


def test_staging_memory_is_page_locked_and_copies_into_it_are_asynchronous() -> None:
    sources = [torch.arange(_NUMEL, dtype=torch.float32, device="cuda"), torch.ones(5)]
    entries = [
        ImageEntry(name=f"t{i}", dtype=TORCH_TO_NAME[s.dtype], shape=tuple(s.shape))
        for i, s in enumerate(sources)
    ]
    memory = SharedMemory()
    copiers: Copiers = {}
    staging = prepare_staging(memory, layout_image(entries), sources)
    assert not staging.destinations[0].is_pinned()
    memory.lock(lock_pages, unlock_pages)
    assert memory.is_locked
    assert memory.nbytes % mmap.PAGESIZE == 0
    assert all(target.is_pinned() for target in staging.destinations)
    copier = copier_of(torch.device("cuda", torch.cuda.current_device()), copiers)
    assert copier is not None
    torch.cuda._sleep(10 * _SLEEP_CYCLES)
    copier.begin()
    mark = copier.copy(staging.destinations[:1], sources[:1])
    assert not mark.query(), "the copy held the caller, as copies to pageable memory do"
    copier.finish()
    assert mark.query()
    stage(staging, TensorMemory(sources), ["t0", "t1"], copiers)
    for i, source in enumerate(sources):
        assert torch.equal(staging.destinations[i], source.cpu())
        assert staging.row_digest(i) == content_digest(source)
    memory.close()
    assert not memory.is_locked


def test_a_refusal_is_a_warning_and_leaves_the_device_usable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The memory is locked already: the second lock of it is refused by the driver itself."""
    memory = SharedMemory()
    memory.reserve(1 << 20)
    memory.lock(lock_pages, unlock_pages)
    first = memory._address(memory._map) if memory._map is not None else 0
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, logger="holdfast"):
        patch.setattr(
            "holdfast.checkpoint.save.executor.lock_pages",
            lambda address, nbytes: lock_pages(first, 1 << 20),
        )
        x = torch.arange(1000.0, device="cuda")
        with Checkpointer(tmp_path) as checkpointer:
            for step in (1, 2):
                checkpointer.save(step, {"t": {"x": x}})
                (x + 1).sum().item()
    assert caplog.text.count("cannot be page-locked") == 1
    assert torch.equal(_stored(checkpointer, 2)["x"].cpu(), torch.arange(1000.0))
    memory.close()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@MODES
def test_tensors_of_two_devices(tmp_path: Path, mode: str) -> None:
    tensors = {f"x{i}": torch.full((_NUMEL,), float(i), device=f"cuda:{i % 2}") for i in range(4)}
    with Checkpointer(tmp_path) as checkpointer:
        _save(checkpointer, mode, 1, {"t": tensors})
        for tensor in tensors.values():
            tensor.fill_(-1.0)
    for i in range(4):
        assert torch.equal(_stored(checkpointer, 1)[f"x{i}"].cpu(), torch.full((_NUMEL,), 1.0 * i))
