"""Power loss on real file systems, and what is synced when, on any."""

from __future__ import annotations

import os
import random
import threading
from contextlib import suppress
from pathlib import Path
from typing import get_args

import pytest

from holdfast import Checkpointer, HoldfastError, PosixStorage
from holdfast.checkpoint.options import CkptFormat
from holdfast.checkpoint.plan.kept_plans import PLANS_DIR
from holdfast.format.names import ROOT_ID
from holdfast.format.versions import LEASES_DIR
from holdfast.storage import posix
from holdfast.writer.leftovers import repair
from tests.crash.boundaries import Boundaries
from tests.crash.common import assert_recovers, leftovers, state_of, versions
from tests.crash.mounts import Disk, Mounts

_MAKE = {
    "ext4": (["mkfs.ext4", "-q"], 48),
    "xfs": (["mkfs.xfs", "-q"], 320),
}


class Unshared(PosixStorage):
    """A storage that no other process can open: asynchronous saves are written by a thread."""


@pytest.fixture(params=list(_MAKE))
def disk(request: pytest.FixtureRequest, mounts: Mounts) -> Disk:
    make, size_mib = _MAKE[request.param]
    return mounts.disk(request.param, make, size_mib=size_mib)


def _after_power_up(disk: Disk, root: Path, durable: dict[int, int], tried: dict[int, int]) -> None:
    """Nothing that was reported durable is lost, nothing else is wrong, and work goes on."""
    disk.power_up()
    found = versions(root)
    for step, version in durable.items():
        assert found.get(step) in (version, tried.get(step, version)), f"step {step} is lost"
    for step in found:
        assert step in durable or step in tried
    if root.is_dir():
        repair(PosixStorage(root), alive_s=0.0)
        assert leftovers(root) == []
        after = versions(root)
        assert {*found} <= {*after}
    next_step = max([*durable, *tried]) + 1
    assert_recovers(root, step=next_step, version=next_step)


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_power_loss_right_after_a_save_returned(disk: Disk) -> None:
    """The checkpoint is whole, sync and async, new and replaced; the pointer names it."""
    for number, mode in enumerate(["sync", "async", "thread"] * 3):
        root = disk.point / f"run{number}"
        with Checkpointer(Unshared(root) if mode == "thread" else root) as checkpointer:
            for step, version in ((1, 10), (2, 20), (2, 21)):
                if mode == "sync":
                    checkpointer.save(step, state_of(version), overwrite=version == 21)
                else:
                    pending = checkpointer.save_async(
                        step, state_of(version), overwrite=version == 21
                    )
                    pending.result(60)
            disk.cut_power()
        disk.power_up()
        assert versions(root) == {1: 10, 2: 21}
        pointer = (root / "latest_checkpointed_iteration.txt").read_text()
        assert pointer == "2\n"
        assert_recovers(root, step=3, version=3)


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("overwrite", [False, True])
def test_power_loss_at_every_boundary(disk: Disk, overwrite: bool) -> None:
    """Before each call that changes storage: the old checkpoints are whole, the new one may be."""
    at, finished, num_new = 0, False, 0
    step = 2 if not overwrite else 1
    while not finished:
        at += 1
        root = disk.point / f"run{at}"
        Checkpointer(root).save(1, state_of(10))
        with pytest.MonkeyPatch.context() as monkey:
            watch = Boundaries(disk.cut_power, at=at)
            watch.install(monkey)
            try:
                Checkpointer(root).save(step, state_of(20), overwrite=overwrite)
                finished = len(watch.names) < at
                durable = {1: 10, step: 20} if finished or at == 1 else {1: 10}
            except HoldfastError:
                durable = {1: 10}
        if finished:
            disk.cut_power()
        _after_power_up(disk, root, durable, {step: 20})
        num_new += versions(root).get(step) == 20
    print(f"{at - 1} boundaries, {num_new} with the new checkpoint")
    assert at >= 35
    assert num_new >= 1


@pytest.mark.slow
@pytest.mark.timeout(600)
# Four: on a storage that is shared or not, sync and async.
@pytest.mark.parametrize("num_cuts", [4, pytest.param(25, marks=pytest.mark.nightly)])
def test_power_loss_at_random_instants(disk: Disk, num_cuts: int) -> None:
    """Saves one after another until the power goes; those that had returned are all there."""
    generator = random.Random(5)
    for number in range(num_cuts):
        root = disk.point / f"run{number}"
        durable: dict[int, int] = {}
        tried: dict[int, int] = {}
        storage = PosixStorage(root) if number % 2 else Unshared(root)
        checkpointer = Checkpointer(storage, staging_buffers=1 + number % 2)
        checkpointer.save(1, state_of(1))
        durable[1] = 1
        timer = threading.Timer(generator.uniform(0.0, 0.25), disk.cut_power)
        timer.start()
        with suppress(HoldfastError):
            for step in range(2, 1000):
                tried[step] = step
                if number % 3 == 0:
                    checkpointer.save(step, state_of(step))
                else:
                    checkpointer.save_async(step, state_of(step)).result(60)
                durable[step] = step
        timer.join()
        with suppress(HoldfastError):
            checkpointer.close()
        _after_power_up(disk, root, durable, tried)


class _Ledger:
    """What would survive a power loss by the letter of POSIX: only what was synced since."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.unsynced: set[str] = set()
        self.at_commit: set[str] | None = None

    def install(self, monkey: pytest.MonkeyPatch) -> None:
        """Watch the calls of this process."""
        for name in ("pwrite", "fsync", "fdatasync", "rename", "mkdir", "open"):
            monkey.setattr(os, name, self._watch(name, getattr(os, name)))
        for name in ("allocate", "rename_noreplace", "rename_exchange"):
            monkey.setattr(posix, name, self._watch(name, getattr(posix, name)))

    def _watch(self, name: str, call: object) -> object:
        assert callable(call)

        def watched(*args: object, **kwargs: object) -> object:
            publishes = name in ("rename_noreplace", "rename_exchange")
            if publishes:
                self.at_commit = set(self.unsynced)
            result = call(*args, **kwargs)
            if name in ("pwrite", "allocate"):
                self.unsynced.add(_path_of(args[0]))
            elif name in ("fsync", "fdatasync"):
                self.unsynced.discard(_path_of(args[0]))
            elif name == "mkdir" or (name == "open" and int(str(args[1])) & os.O_CREAT):
                self._name_changed(kwargs.get("dir_fd"))
            elif name == "rename" or publishes:
                source = f"{_path_of(kwargs['src_dir_fd'])}/{args[0]}"
                target = f"{_path_of(kwargs['dst_dir_fd'])}/{args[1]}"
                self.unsynced = {p.replace(source, target, 1) for p in self.unsynced}
                if "/.trash-" not in target:  # what comes back from there is removed again
                    self._name_changed(kwargs["src_dir_fd"])
                    self._name_changed(kwargs["dst_dir_fd"])
            return result

        return watched

    def _name_changed(self, dir_fd: object) -> None:
        if isinstance(dir_fd, int):
            self.unsynced.add(_path_of(dir_fd))


def _path_of(fd: object) -> str:
    return os.readlink(f"/proc/self/fd/{fd}")


@pytest.mark.parametrize("ckpt_format", get_args(CkptFormat))
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_everything_is_synced_before_the_rename_and_the_rename_before_the_return(
    tmp_path: Path, mode: str, ckpt_format: CkptFormat
) -> None:
    """Files, and the directories that name them, on any file system that keeps to POSIX."""
    PosixStorage(tmp_path).make_dir(PLANS_DIR)  # plans are kept beside, after the return
    for version in (1, 2):  # new, then replaced
        ledger = _Ledger(tmp_path)
        with pytest.MonkeyPatch.context() as monkey:
            ledger.install(monkey)
            checkpointer = Checkpointer(Unshared(tmp_path), ckpt_format=ckpt_format)
            if mode == "sync":
                checkpointer.save(1, state_of(version), overwrite=True)
            else:
                checkpointer.save_async(1, state_of(version), overwrite=True).result(30)
            # A root that has lost its id gets another one by the next run.
            # A save that takes long has a heartbeat, which need not last.
            free = (".trash", PLANS_DIR, ROOT_ID, LEASES_DIR)
            left = {p for p in ledger.unsynced if not any(each in p for each in free)}
            checkpointer.close()
        assert ledger.at_commit is not None
        # The root's names are synced after the rename: before it, nothing in the root counts.
        no_names = (".trash", ROOT_ID, LEASES_DIR)
        waiting = {p for p in ledger.at_commit if not any(each in p for each in no_names)}
        assert waiting <= {str(tmp_path)}
        assert left == set()
        assert versions(tmp_path) == {1: version}
