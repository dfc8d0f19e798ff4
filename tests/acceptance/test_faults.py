"""Trouble on one rank of several: failing calls, no room, a kill, a wrong declaration."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast import (
    Checkpointer,
    HoldfastError,
    Layout,
    PlacementError,
    PosixStorage,
    ProcessGroups,
    Sharded,
    StorageError,
)
from holdfast.checkpoint.save import handshake
from tests.checkpoint.common import assert_equal, make_state
from tests.harness import RankContext, run_ranks

LAYOUT = Layout(tp=2, dp=2)


class Unshared(PosixStorage):
    """A storage that no other process can open: asynchronous saves are written by a thread."""


class Small(PosixStorage):
    """A disk with a thousand bytes left."""

    def free_nbytes(self) -> int:
        return 1000


def no_space(patch: pytest.MonkeyPatch, hits: Hits) -> None:
    real = os.pwrite

    def pwrite(fd: int, data: Any, offset: int) -> int:
        if hits(os.readlink(f"/proc/self/fd/{fd}")):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, data, offset)

    patch.setattr(os, "pwrite", pwrite)


def no_progress(patch: pytest.MonkeyPatch, hits: Hits) -> None:
    """Writes half of what it is asked to, then nothing more, and says so without an error."""
    real, calls = os.pwrite, [0]

    def pwrite(fd: int, data: Any, offset: int) -> int:
        if not hits(os.readlink(f"/proc/self/fd/{fd}")):
            return real(fd, data, offset)
        calls[0] += 1
        return real(fd, data[: len(data) // 2], offset) if calls[0] == 1 else 0

    patch.setattr(os, "pwrite", pwrite)


def no_permission(patch: pytest.MonkeyPatch, hits: Hits) -> None:
    real = os.open

    def open_(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & os.O_CREAT and hits(str(path)):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return real(path, flags, *args, **kwargs)

    patch.setattr(os, "open", open_)


def no_sync(patch: pytest.MonkeyPatch, hits: Hits) -> None:
    """The device tells at the end that it lost something."""
    for name in ("fsync", "fdatasync"):
        real = getattr(os, name)

        def sync(fd: int, real: Callable[[int], None] = real) -> None:
            if hits(os.readlink(f"/proc/self/fd/{fd}")):
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            real(fd)

        patch.setattr(os, name, sync)


Hits = Callable[[str], bool]
"""Whether a fault concerns a path."""
FAULTS: dict[Callable[[pytest.MonkeyPatch, Hits], None], str] = {
    no_space: "No space left",
    no_progress: "wrote nothing",
    no_permission: "Permission denied",
    no_sync: "Input/output error",
}


def of_data(path: str) -> bool:
    """A rank whose whole storage fails can leave no word there, and its peers wait for it."""
    return "/data/" in path or path.endswith(".safetensors")


def of_all(path: str) -> bool:
    return True


def refused(
    checkpointer: Checkpointer, step: int, state: dict[str, object], *, asynchronous: bool
) -> str:
    """What a save that must fail says."""
    try:
        if asynchronous:
            checkpointer.save_async(step, state).result(20)
        else:
            checkpointer.save(step, state)
    except StorageError as error:
        return str(error)
    raise AssertionError(f"step {step} was saved")


def failing_calls(context: RankContext, root: str) -> dict[tuple[str, bool], str]:
    """Each fault on rank 2 in each kind of save: what every rank was told."""
    said = {}
    with ProcessGroups.create(LAYOUT, timeout_s=20) as groups:
        checkpointer = Checkpointer(Unshared(root), groups=groups)
        state = make_state(LAYOUT, context.rank)
        checkpointer.save(0, state)
        step = 0
        for fault in FAULTS:
            for asynchronous in (False, True):
                step += 10
                with pytest.MonkeyPatch.context() as patch:
                    if context.rank == 2:
                        fault(patch, of_data if asynchronous else of_all)
                    began = time.monotonic()
                    caught = refused(checkpointer, step, state, asynchronous=asynchronous)
                    assert time.monotonic() - began < 30
                said[fault.__name__, asynchronous] = caught
                groups.control.barrier(phase="test: failed")
                assert step not in checkpointer.steps()
                checkpointer.save(step + 1, state)
                assert checkpointer.latest() == step + 1
        target = make_state(LAYOUT, context.rank, blank=True)
        checkpointer.load(target)
        assert_equal(target, LAYOUT, context.rank)
    return said


def test_a_call_that_fails_on_one_rank_fails_the_save_on_all(tmp_path: Path) -> None:
    """E2, P2: full disk, short write, permission, a sync that fails; cause and path are named."""
    for rank, said in enumerate(run_ranks(4, failing_calls, str(tmp_path)).results):
        for fault, cause in FAULTS.items():
            for asynchronous in (False, True):
                message = said[fault.__name__, asynchronous]
                assert cause in message, message
                assert rank == 2 or "rank 2" in message, message
                assert str(tmp_path) in message, message
    assert not list(tmp_path.glob(".saving*"))


@contextlib.contextmanager
def few_descriptors(spare: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + spare, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def short_of(context: RankContext, root: str) -> dict[str, str]:
    said = {}
    rank = context.rank
    state = make_state(LAYOUT, rank)
    with ProcessGroups.create(LAYOUT, timeout_s=20) as groups:

        def stopped(case: str, storage: PosixStorage) -> None:
            for asynchronous in (False, True):
                checkpointer = Checkpointer(storage, groups=groups)
                said[f"{case} {asynchronous}"] = refused(
                    checkpointer, 1, state, asynchronous=asynchronous
                )
                assert checkpointer.latest() is None
                checkpointer.close()

        stopped("disk", Small(root) if rank == 0 else Unshared(root))
        with pytest.MonkeyPatch.context() as patch:
            if rank == 3:
                patch.setattr(handshake, "available_memory_nbytes", lambda: 7)
                # It ends all keepers of the user, and other tests run at the same time.
                patch.setattr(handshake, "end_keepers", lambda: False)
            stopped("memory", Unshared(root))
        with few_descriptors(3) if rank == 1 else contextlib.nullcontext():
            stopped("descriptors", Unshared(root))
        files = [name for _, _, names in os.walk(root) for name in names]
        assert not files, files
        Checkpointer(root, groups=groups).save(1, state)
    return said


def test_what_one_rank_is_short_of_stops_all_before_a_byte(tmp_path: Path) -> None:
    """P10: disk, memory of one rank, descriptors of another; by how much."""
    for said in run_ranks(4, short_of, str(tmp_path)).results:
        for asynchronous in (False, True):
            assert "only 1 kB are free: " in said[f"disk {asynchronous}"]
            assert "rank 3" in said[f"memory {asynchronous}"]
            assert "only 7 B are available: " in said[f"memory {asynchronous}"]
            assert "rank 1" in said[f"descriptors {asynchronous}"]
            assert "file descriptors" in said[f"descriptors {asynchronous}"]
            for case in ("disk", "memory", "descriptors"):
                assert "short" in said[f"{case} {asynchronous}"]


def wrong_declarations(context: RankContext, root: str) -> dict[str, str]:
    said = {}
    rank = context.rank
    with ProcessGroups.create(LAYOUT, timeout_s=20) as groups:
        checkpointer = Checkpointer(root, groups=groups)

        def refused(case: str, value: Callable[[], object]) -> None:
            for save in (checkpointer.save, checkpointer.save_async):
                began = time.monotonic()
                with pytest.raises(HoldfastError) as caught:
                    save(1, {"m": {"x": value()}})
                assert time.monotonic() - began < 30
                said[case] = f"{type(caught.value).__name__}: {caught.value}"
            assert checkpointer.latest() is None

        # 5 rows over tp 2 are 3 and 2; rank 1 has 3 all the same. One rank alone is wrong.
        right = 3 if rank % 2 == 0 else 2
        rows = 3 if rank == 1 else right
        refused("size", lambda: Sharded(torch.zeros(rows, 2), (5, 2), dims={0: "tp"}))
        axis = "xp" if rank == 3 else "tp"
        refused("axis", lambda: Sharded(torch.zeros(right, 2), (5, 2), dims={0: axis}))
        mixed = ("tp", "ep") if rank == 2 else ("tp",)
        refused("views", lambda: Sharded(torch.zeros(right, 2), (5, 2), dims={0: mixed}))
        dtype = torch.bfloat16 if rank == 2 else torch.float16
        refused(
            "dtypes", lambda: Sharded(torch.zeros(right, 2, dtype=dtype), (5, 2), dims={0: "tp"})
        )
        dims = {0: "dp", 1: "dp"} if rank == 1 else {0: "dp"}
        half = torch.zeros(2, 2)

        class Lazy:
            """A declaration that is made while the state is flattened."""

            def state_dict(self) -> dict[str, object]:
                return {"y": Sharded(half, (4, 2), dims=dims)}

            def load_state_dict(self, state: dict[str, object]) -> None:
                raise AssertionError("not reached")

        began = time.monotonic()
        with pytest.raises(PlacementError) as caught:
            checkpointer.save(1, {"lazy": Lazy()})
        assert time.monotonic() - began < 30
        said["twice"] = f"PlacementError: {caught.value}"
    return said


def test_a_wrong_declaration_of_one_rank_is_refused_on_all(tmp_path: Path) -> None:
    """E19: with an exception of the library, key and rank."""
    expected = {
        "size": ("rank 1", "m.x", "[3, 2]", "[2, 2]"),
        "axis": ("rank 3", "m.x", "xp"),
        "views": ("rank 2", "m.x", "mix"),
        "dtypes": ("rank 2", "m.x", "BF16", "F16"),
        "twice": ("rank 1", "'dp' is declared twice"),
    }
    for said in run_ranks(4, wrong_declarations, str(tmp_path)).results:
        for case, words in expected.items():
            assert "AssertionError" not in said[case]
            for word in words:
                assert word in said[case], said[case]
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def killed(context: RankContext, root: str, victim: int, instant: int, mode: str) -> int:
    """Rank `victim` dies at a storage operation of its own; the others say so in time."""
    operations: set[tuple[str, str]] = set()  # how often a rank looks while it waits is not a law
    armed = False

    def observe(operation: str, path: str, start: int, nbytes: int) -> None:
        if armed and (operation, path) not in operations:
            operations.add((operation, path))
            if len(operations) == instant and context.rank == victim:
                os.kill(os.getpid(), signal.SIGKILL)

    layout = Layout(dp=3)
    with ProcessGroups.create(layout, timeout_s=3) as groups:
        storage = PosixStorage(root, observer=observe)  # an observer: written in this process
        checkpointer = Checkpointer(storage, groups=groups, deadline_s=3)
        state = make_state(layout, context.rank)
        checkpointer.save(1, state)
        groups.control.barrier(phase="test: saved")
        armed = True
        began = time.monotonic()
        try:
            if mode == "async":
                checkpointer.save_async(2, state).result(20)
            else:
                checkpointer.save(2, state)
        except HoldfastError:
            assert instant
        assert time.monotonic() - began < 30
    return len(operations)


def after(context: RankContext, root: str) -> int:
    layout = Layout(dp=3)
    with ProcessGroups.create(layout) as groups:
        checkpointer = Checkpointer(root, groups=groups, settle_s=0.0)
        newest = checkpointer.latest()
        assert newest is not None
        for step in checkpointer.steps():
            target = make_state(layout, context.rank, blank=True)
            checkpointer.load(target, step=step)
            assert_equal(target, layout, context.rank)
        groups.control.barrier(phase="test: loaded")
        checkpointer.save(3, make_state(layout, context.rank))
        assert checkpointer.latest() == 3
    return newest


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_one_rank_killed_at_any_of_its_storage_operations(tmp_path: Path, mode: str) -> None:
    """E1: a rank that does not commit, and the one that does; the others end in time."""
    newest = set()
    counts = run_ranks(3, killed, str(tmp_path / "whole"), -1, 0, mode).results
    for victim in (0, 2):
        for instant in sorted({counts[victim] // 3, counts[victim] - 1}):
            root = str(tmp_path / f"{victim}-{instant}")
            outcome = run_ranks(
                3, killed, root, victim, instant, mode, expect_failure=True, timeout_s=60
            )
            assert outcome.failed == [victim], outcome.errors
            (step,) = set(run_ranks(3, after, root).results)
            newest.add(step)
    assert 1 in newest
