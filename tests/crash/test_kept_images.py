"""Trainers, writers and keepers are killed: a restart gets the right bytes, wherever from."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from holdfast import Checkpointer, Layout, ProcessGroups, Sharded
from holdfast.arrays.memory import copy_ranges
from holdfast.arrays.types import IntArray
from holdfast.checkpoint.save import staging
from holdfast.format.names import list_steps
from holdfast.storage import PosixStorage
from tests.harness import RankContext, run_ranks, wait_until
from tests.writer.images import (
    KEEP_S,
    CountingStorage,
    addresses,
    all_offered,
    end_processes_of,
    is_offered,
    load,
    processes_of,
)

ROWS = 1 << 15
WIDTH = 32
_LONGEST_S = 0.5


@pytest.fixture
def root(fast_dir: Path) -> Iterator[Path]:
    """A root whose keepers are ended with the test."""
    yield fast_dir
    end_processes_of(fast_dir)


def whole(version: int) -> torch.Tensor:
    """Every block of two versions differs."""
    return torch.arange(ROWS * WIDTH, dtype=torch.float32).reshape(ROWS, WIDTH) + version


def state_of(version: int, *, index: int = 0, size: int = 1) -> dict[str, object]:
    """What a rank of so many holds of a version."""
    rows = ROWS // size
    local = whole(version).narrow(0, rows * index, rows).clone()
    held = Sharded(local, (ROWS, WIDTH), dims={0: "dp"}) if size > 1 else local
    return {"t": {"x": held, "version": torch.tensor(version)}}


def nbytes_of(version: int) -> int:
    return whole(version).nbytes + 8


def _die_after_a_save(context: RankContext, root: str, mode: str, during_next: bool) -> None:
    """Save, then be killed: at once, or half-way through the staging of the next save."""
    size = context.num_ranks
    with ProcessGroups.create(Layout(dp=size), timeout_s=60) as groups:
        checkpointer = Checkpointer(root, groups=groups, keep_image_s=KEEP_S)
        mine = state_of(1, index=context.rank, size=size)
        if mode == "sync":
            checkpointer.save(1, mine)
        else:
            checkpointer.save_async(1, mine).result(60)
        groups.control.barrier(phase="saved")
        if during_next:
            staging.copy_ranges = _copy_half_and_die  # type: ignore[assignment]
            checkpointer.save_async(2, state_of(2, index=context.rank, size=size))
        os.kill(os.getpid(), signal.SIGKILL)


def _copy_half_and_die(target: IntArray, source: IntArray, nbytes: IntArray) -> None:
    copy_ranges(target, source, nbytes // 2)
    os.kill(os.getpid(), signal.SIGKILL)


def _restart(context: RankContext, root: str) -> tuple[int, int, int, bool]:
    """Load under the same layout: bytes read, from images, of all ranks; whether they are right."""
    size = context.num_ranks
    with ProcessGroups.create(Layout(dp=size), timeout_s=60) as groups:
        storage = CountingStorage(Path(root))
        checkpointer = Checkpointer(storage, groups=groups, keep_image_s=KEEP_S)
        state = state_of(-1, index=context.rank, size=size)
        report = checkpointer.load(state)
        held, truth = (
            each["t"]["x"] for each in (state, state_of(1, index=context.rank, size=size))
        )  # type: ignore[index]
        is_right = torch.equal(held.local, truth.local)
        return (
            storage.nbytes_read,
            report.nbytes_from_images,
            report.job.nbytes_from_images,
            is_right and report.refused_images == (),
        )


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_restart_after_a_kill_reads_no_byte_from_storage(root: Path, mode: str) -> None:
    """P15: two ranks are killed right after a commit; under the same layout and another."""
    outcome = run_ranks(2, _die_after_a_save, str(root), mode, False, expect_failure=True)
    assert [error.signal for error in outcome.errors if error] == [signal.SIGKILL] * 2
    wait_until(lambda: is_offered(root, 1))
    share = nbytes_of(1) // 2 + 4
    for read, copied, in_all, is_right in run_ranks(2, _restart, str(root)).results:
        assert is_right
        assert read == 0
        assert copied == share
        assert in_all == 2 * share
    assert _load_and_check(root) == (1, nbytes_of(1))


def test_what_a_killed_trainer_had_begun_to_stage_is_not_offered(root: Path) -> None:
    """P15: half of the buffer is the next step's; no digest of a load ever sees it."""
    run_ranks(2, _die_after_a_save, str(root), "async", True, expect_failure=True)
    wait_until(lambda: not processes_of(root))
    assert _load_and_check(root) == (1, 0)


def _load_and_check(root: Path) -> tuple[int, int]:
    """Load the newest step: it is one version, whole. The step, and the bytes from images."""
    state = state_of(-1)
    report = load(root, state)
    tensors: dict[str, torch.Tensor] = state["t"]  # type: ignore[assignment]
    version = int(tensors["version"])
    assert torch.equal(tensors["x"], whole(version))
    assert report.refused_images == (), "a torn image was offered"
    assert report.nbytes_read + report.nbytes_from_images == report.nbytes_needed
    assert report.step == (version + 1) // 2  # each step is saved twice
    return report.step, report.nbytes_from_images


def _doomed(context: RankContext, root: str, delay_s: float, buffers: int) -> None:
    """Save after save, new and replaced, sync and async in turn, until the timer ends it all."""
    size = context.num_ranks
    with ProcessGroups.create(Layout(dp=size), timeout_s=60) as groups:
        checkpointer = Checkpointer(
            root, groups=groups, keep_image_s=KEEP_S, staging_buffers=buffers, deadline_s=20
        )
        checkpointer.save_async(1, state_of(1, index=context.rank, size=size)).result(60)
        groups.control.barrier(phase="ready")
        threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
        for version in range(2, 10_000):
            mine = state_of(version, index=context.rank, size=size)
            if version % 5 == 0:
                checkpointer.save((version + 1) // 2, mine, overwrite=True)
            else:
                checkpointer.save_async((version + 1) // 2, mine, overwrite=True)


def _killed_at(root: Path, draw: random.Random) -> int:
    """One instant; the bytes that loads took from images."""
    delay_s, buffers = draw.uniform(0.0, _LONGEST_S), draw.choice((1, 2))
    # In one case of three writers and keepers are killed, too: at any moment of what they do.
    kill_s = draw.choice((None, None, draw.uniform(0.0, _LONGEST_S)))
    outcome = run_ranks(2, _doomed, str(root), delay_s, buffers, expect_failure=True, timeout_s=60)
    for error in outcome.errors:
        assert error is not None
        assert error.signal == signal.SIGKILL, error
    killed = time.monotonic()
    copied = 0
    pause_s = 0.0
    # From the instant of the kill until nothing changes any more. Loads follow one another while
    # much changes; a writer that waits for another's share does so for its whole deadline.
    while True:
        time.sleep(pause_s)
        pause_s = min(0.25, 0.001 + 1.2 * pause_s)
        if kill_s is not None and time.monotonic() > killed + kill_s:
            end_processes_of(root, signal.SIGKILL)
        processes = processes_of(root)
        step, nbytes = _load_and_check(root)
        copied += nbytes
        newest = list_steps(PosixStorage(root))[-1]
        is_over = kill_s is None or time.monotonic() > killed + kill_s
        if is_over and step == newest and _is_settled(root, newest, processes):
            break
        assert time.monotonic() < killed + 120, "writers or keepers never settle"
    end_processes_of(root)
    assert _load_and_check(root) == (newest, 0)
    return copied


def _is_settled(root: Path, step: int, processes: list[int]) -> bool:
    """Return True if every process that is left offers an image."""
    offered = set(addresses(root, step)) & set(all_offered())
    return processes == processes_of(root) and len(processes) == len(offered)


def _sweep(root: Path, *, seed: int, num_instants: int) -> None:
    draw = random.Random(seed)
    copied = [_killed_at(root / str(number), draw) for number in range(num_instants)]
    taken = sum(nbytes > 0 for nbytes in copied)
    print(f"{num_instants} instants, an image was taken after {taken}")
    assert taken > 0


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_images_after_kills_at_a_few_random_instants(root: Path) -> None:
    """P15: every load, from the instant of the kill on, is of one version, whole."""
    _sweep(root, seed=1, num_instants=4)


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(2, 8))
def test_images_after_kills_at_hundreds_of_random_instants(root: Path, seed: int) -> None:
    """P15: three hundred instants in all."""
    _sweep(root, seed=seed, num_instants=50)
