"""Lazy staging: what is stored is the state at the call, or the save fails and says of what."""

from __future__ import annotations

import ctypes
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from holdfast import (
    Checkpointer,
    HoldfastError,
    KeepLast,
    Layout,
    OptimizerState,
    PendingSave,
    PlanError,
    ProcessGroups,
    ShardedOptimizer,
)
from holdfast.checkpoint.save import lazy_staging
from holdfast.checkpoint.save.write_watch import WatchError, WriteWatch
from holdfast.cli.main import main
from tests.checkpoint.common import stored_tensors, tensors_of
from tests.harness import RankContext, run_ranks

WIDTH = 384
"""Of layers whose weight (576 KiB) is copied later."""


def _can_watch() -> bool:
    try:
        WriteWatch().close()
    except WatchError:
        return False
    return True


pytestmark = pytest.mark.skipif(not _can_watch(), reason="this kernel cannot watch memory")


class Run:
    """A model and its optimizer, which have made a step."""

    def __init__(self, make: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(
            *(nn.Linear(WIDTH, WIDTH) for _ in range(3)), nn.BatchNorm1d(WIDTH)
        )
        self.optimizer = make(self.model.parameters())
        self.step()

    def step(self) -> None:
        self.model(torch.randn(4, WIDTH)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> dict[str, object]:
        return {"model": self.model, "optimizer": OptimizerState(self.optimizer, self.model)}

    def tensors(self) -> dict[str, Tensor]:
        """All tensors of the state, themselves."""
        return tensors_of(self.model, self.optimizer)

    def copies(self) -> dict[str, Tensor]:
        return {name: each.clone() for name, each in self.tensors().items()}


def _assert_stored(checkpointer: Checkpointer, step: int, wanted: dict[str, Tensor]) -> None:
    stored = stored_tensors(checkpointer, step)
    assert stored.keys() == wanted.keys()
    assert not [name for name in wanted if not torch.equal(stored[name], wanted[name])]


@contextmanager
def _single(root: Path) -> Iterator[Checkpointer]:
    groups = ProcessGroups.single()
    with Checkpointer(root, groups=groups, retention=KeepLast(5)) as checkpointer:
        yield checkpointer


@contextmanager
def _held(checkpointer: Checkpointer, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The copy waits until `go` is called, or the block has ended; yields what was held."""
    write, held = lazy_staging._write_all, []

    def waits(fd: int, span: tuple[int, int], offset: int) -> bool:
        held.append("copy")
        while "go" not in held:
            time.sleep(0.001)
        return write(fd, span, offset)

    monkeypatch.setattr(lazy_staging, "_write_all", waits)
    try:
        yield held
    finally:
        held.append("go")
        checkpointer._saver.wait_staged()
        monkeypatch.setattr(lazy_staging, "_write_all", write)


@pytest.mark.parametrize("make", [torch.optim.AdamW, partial(torch.optim.SGD, momentum=0.9)])
def test_a_step_waits_for_the_copy_and_buffers_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[..., torch.optim.Optimizer]
) -> None:
    """E12 with a step right after the call, whose forward changes running statistics."""
    run = Run(partial(make, lr=0.1))
    with _single(tmp_path) as checkpointer:
        for step in range(3):
            wanted = run.copies()
            with _held(checkpointer, monkeypatch) as held:
                pending = checkpointer.save_async(step, run.state(), stage="lazily")
                assert pending.phase == "staging"
                run.model(torch.randn(4, WIDTH)).square().mean().backward()
                assert any(not torch.equal(wanted[n], t) for n, t in run.tensors().items())
                with pytest.raises(HoldfastError, match="still being copied"):
                    pending.staged(0.01)
                assert run.tensors().keys() == wanted.keys()
                held.append("go")
                run.optimizer.step()
                pending.staged()
            assert not torch.equal(run.model[0].weight, wanted["model.0.weight"])
            assert pending.result(60).step == step
            _assert_stored(checkpointer, step, wanted)


WRITES: dict[str, Callable[[Tensor, int, float], object]] = {
    "in place": lambda tensor, at, value: tensor.view(-1)[at].fill_(value),
    "all in place": lambda tensor, at, value: tensor.mul_(value).add_(at),
    "data": lambda tensor, at, value: tensor.data.view(-1)[at].fill_(value),
    "numpy": lambda tensor, at, value: tensor.numpy().reshape(-1).__setitem__(at, value),
    "slice": lambda tensor, at, value: tensor.view(-1)[at : at + 5000].zero_(),
    "foreach": lambda tensor, at, value: torch._foreach_add_([tensor], value),
    "by address": lambda tensor, at, value: ctypes.memset(tensor.data_ptr() + 4 * at, 77, 4),
    "set_": lambda tensor, at, value: tensor.set_(torch.full_like(tensor, value)),
    "new data": lambda tensor, at, value: setattr(tensor, "data", torch.full_like(tensor, value)),
}


@contextmanager
def _slow_copies() -> Iterator[None]:
    """Each row is copied after a while, so that writes meet rows that are not copied yet."""
    write, draw = lazy_staging._write_all, random.Random(0)

    def waits(fd: int, span: tuple[int, int], offset: int) -> bool:
        time.sleep(draw.choice([0.0, 0.001, 0.003]))
        return write(fd, span, offset)

    lazy_staging._write_all = waits  # type: ignore[assignment]
    try:
        yield
    finally:
        lazy_staging._write_all = write


def write_at_random(root: Path, seeds: range) -> tuple[int, int]:
    """Programs that write to sources at random instants; how many were whole, and failed."""
    num_whole = num_failed = 0
    with _slow_copies(), _single(root) as checkpointer:
        for seed in seeds:
            draw = random.Random(seed)
            run = Run(draw.choice([torch.optim.AdamW, torch.optim.Adagrad]))
            aliases = {
                name: each.numpy() for name, each in run.tensors().items() if draw.random() < 0.1
            }
            for step in range(2):
                number = 2 * seed + step
                wanted, tensors = run.copies(), run.tensors()
                pending = checkpointer.save_async(number, run.state(), stage="lazily")
                written: list[str] = []
                for _ in range(draw.choice([0, 1, 1, 3])):
                    end = time.perf_counter() + draw.choice([0.0, 0.0, 2e-4, 1e-3, 4e-3])
                    while time.perf_counter() < end:
                        pass
                    name, kind = draw.choice(sorted(tensors)), draw.choice(sorted(WRITES))
                    at = draw.randrange(max(tensors[name].numel() - 5000, 1))
                    with torch.no_grad(), suppress(RuntimeError, TypeError):
                        if name in aliases and draw.random() < 0.5:
                            aliases[name].reshape(-1)[at] = 5
                        else:
                            WRITES[kind](tensors[name], at, 3.0)
                        written.append(name)
                if draw.random() < 0.5:
                    run.step()
                try:
                    pending.result(60)
                except PlanError as error:
                    changed = error.details["changed"]
                    assert changed
                    assert set(changed) <= set(written), (changed, written)
                    num_failed += 1
                else:
                    _assert_stored(checkpointer, number, wanted)
                    num_whole += 1
    return num_whole, num_failed


def test_whatever_writes_to_sources_each_save_is_of_the_call_or_fails(tmp_path: Path) -> None:
    num_whole, num_failed = write_at_random(tmp_path, range(15))
    assert num_whole > 3
    assert num_failed > 0


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_ten_thousand_programs_that_write_to_sources(tmp_path: Path) -> None:
    num_whole, num_failed = write_at_random(tmp_path, range(1000, 6000))
    assert num_whole > 1000
    assert num_failed > 500


def test_memory_that_is_freed_meanwhile_fails_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run()
    with _single(tmp_path) as checkpointer:
        with _held(checkpointer, monkeypatch):
            pending = checkpointer.save_async(0, run.state(), stage="lazily")
            run.model[2].weight.untyped_storage().resize_(0)
        with pytest.raises(PlanError, match=r"rank 0.*changed while still being copied") as caught:
            pending.result(60)
        assert "model.2.weight" in caught.value.details["changed"]
        assert checkpointer.latest() is None


def test_what_comes_next_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A save, a load or the end of the checkpointer, with the copy of a save in flight."""
    run = Run()
    with _single(tmp_path) as checkpointer:
        checkpointer.save(0, run.state())
        first = run.copies()
        run.step()
        wanted = run.copies()
        checkpointer.save_async(1, run.state(), stage="lazily")
        checkpointer.load(run.state(), step=0)
        assert all(torch.equal(first[name], each) for name, each in run.tensors().items())
        checkpointer.save_async(2, run.state(), stage="lazily")
        checkpointer.save(3, run.state())
        checkpointer.save_async(4, run.state(), stage="lazily")
    with _single(tmp_path) as checkpointer:
        _assert_stored(checkpointer, 1, wanted)
        for step in (2, 3, 4):
            _assert_stored(checkpointer, step, first)


def test_where_the_kernel_cannot_watch_everything_is_copied_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse() -> WriteWatch:
        raise WatchError("not here")

    monkeypatch.setattr(lazy_staging, "WriteWatch", refuse)
    run = Run()
    with _single(tmp_path) as checkpointer:
        for step in range(2):
            wanted = run.copies()
            pending = checkpointer.save_async(step, run.state(), stage="lazily")
            for each in run.tensors().values():
                each.data.zero_()
            pending.result(60)
            _assert_stored(checkpointer, step, wanted)
    assert sum("not here" in each.message for each in caplog.records) == 1


def test_memory_that_others_share_is_copied_at_once(tmp_path: Path) -> None:
    """Another process may write to it, which no page table of this one shows."""
    run = Run()
    run.model.share_memory()
    with _single(tmp_path) as checkpointer:
        wanted = run.copies()
        pending = checkpointer.save_async(0, run.state(), stage="lazily")
        for each in run.model.parameters():
            each.data.zero_()
        pending.result(60)
        _assert_stored(checkpointer, 0, wanted)


def test_the_watch_sees_every_write_and_no_other() -> None:
    rng = random.Random(0)
    watch = WriteWatch()
    tensors = [torch.ones(rng.choice([200_000, 70_000, 600_000])) for _ in range(20)]
    spans = [(each.data_ptr(), each.data_ptr() + each.nbytes) for each in tensors]
    for _ in range(20):
        assert watch.begin(spans) == [True] * len(spans)
        written = {number for number in range(len(spans)) if rng.random() < 0.2}
        for number in written:
            tensors[number].numpy()[rng.randrange(1024, tensors[number].numel() - 1024)] = 2
        assert {n for n, span in enumerate(spans) if watch.is_written(span)} == written
        watch.end()
    shared = torch.ones(100_000).share_memory_()
    assert watch.begin([(shared.data_ptr(), shared.data_ptr() + shared.nbytes), *spans[:1]]) == [
        False,
        True,
    ]
    watch.close()


def sharded(context: RankContext, root: str) -> None:
    """Two data ranks with a sharded optimizer; one rank's tensors are written in two saves.

    Parameters are whole on both and nothing declares that: one writes each, the other reports its
    digest.
    """
    with ProcessGroups.create(Layout(dp=2)) as groups:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(2)))
        optimizer = ShardedOptimizer(
            model, model.parameters(), make=torch.optim.AdamW, groups=groups, over="dp_cp",
            divisor=2, elementwise=True,
        )  # fmt: skip
        state = {"model": model, "optimizer": OptimizerState(optimizer, model)}
        spoiled: dict[int, Callable[[], Sequence[Tensor]]] = {
            2: lambda: optimizer_tensors(optimizer),
            4: lambda: [layer.weight for layer in model],
        }
        with Checkpointer(root, groups=groups) as checkpointer:
            for step in range(5):
                wanted = {name: each.clone() for name, each in model.state_dict().items()}
                pending = checkpointer.save_async(step, state, stage="lazily")
                if step in spoiled and context.rank == 1:
                    for each in spoiled[step]():
                        each.data.zero_()
                with optimizer.microbatch(is_last=True):
                    model(torch.randn(4, 1024)).square().mean().backward()
                optimizer.step()
                if step in spoiled and failed(pending):
                    continue
                pending.result(60)
                got = checkpointer.load_all(step=step).values["model"]
                assert all(torch.equal(got[name], wanted[name]) for name in wanted)


def optimizer_tensors(optimizer: ShardedOptimizer) -> list[Tensor]:
    """The state that this rank's steps change."""
    inner = {id(each.optimizer): each.optimizer for each in optimizer.optimizer_parameters()}
    return [
        value
        for each in inner.values()
        for entries in each.state.values()
        for value in entries.values()
        if isinstance(value, Tensor) and value.numel() > 1
    ]


def failed(pending: PendingSave) -> bool:
    """Return True if the save has failed, by the name of rank and tensor."""
    try:
        pending.result(60)
    except PlanError as error:
        return "rank 1" in str(error) and "changed while still being copied" in str(error)
    return False


def test_a_sharded_optimizer_steps_after_the_copy_and_an_error_reaches_all_ranks(
    tmp_path: Path,
) -> None:
    run_ranks(2, sharded, str(tmp_path))


def _killed(context: RankContext, root: str) -> None:
    run = Run()
    with _single(Path(root)) as checkpointer:
        checkpointer.save(0, run.state())
        lazy_staging._write_all = lambda *arguments: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
        run.step()
        checkpointer.save_async(1, run.state(), stage="lazily")
        time.sleep(60)


def test_a_kill_before_the_copy_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="1 of 1 ranks"):
        run_ranks(1, _killed, str(tmp_path), init=False)
    run = Run()
    with _single(tmp_path) as checkpointer:
        assert checkpointer.latest() == 0
        checkpointer.load(run.state())
        checkpointer.save(1, run.state())
    assert main(["verify", str(tmp_path)]) == 0


def test_numpy_values_of_a_state_are_of_the_call(tmp_path: Path) -> None:
    """What no optimizer owns is copied before the call returns."""
    run, array, tensor = Run(), np.ones(200_000), torch.ones(200_000)
    with _single(tmp_path) as checkpointer:
        state = run.state() | {"mine": {"array": array, "tensor": tensor}}
        pending = checkpointer.save_async(0, state, stage="lazily")
        array[:] = 0
        tensor.zero_()
        pending.result(60)
        mine = checkpointer.load_all().values["mine"]
        assert mine["array"].sum() == mine["tensor"].sum() == 200_000
