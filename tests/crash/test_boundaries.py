"""SIGKILL at every call that changes storage; failing calls; what is synced before a commit."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import NamedTuple

import pytest

from holdfast import Checkpointer, PosixStorage
from holdfast.checkpoint.options import CkptFormat
from holdfast.format.names import step_dir
from holdfast.writer.leftovers import repair
from tests.crash.boundaries import Boundaries
from tests.crash.common import assert_recovers, leftovers, state_of, versions
from tests.harness import RankContext, run_ranks

_SCENARIOS = {
    # name -> versions committed before, step of the save that is killed, overwrite
    "first": ({}, 1, False),
    "next": ({1: 10}, 2, False),
    "overwrite": ({1: 10, 2: 20}, 2, True),
}
_VERSION = 77


class Unshared(PosixStorage):
    """A storage that no other process can open: asynchronous saves are written by a thread."""


class Killed(NamedTuple):
    """The save that is killed: what is there before it, how it is made, and in which form."""

    mode: str
    scenario: str
    ckpt_format: CkptFormat = "holdfast"

    def prepare(self, root: Path) -> None:
        """Save what is there before, in the same form."""
        for step, version in _SCENARIOS[self.scenario][0].items():
            Checkpointer(root, ckpt_format=self.ckpt_format).save(step, state_of(version))

    def save(self, root: Path) -> None:
        """Make the save."""
        _, step, overwrite = _SCENARIOS[self.scenario]
        state = state_of(_VERSION)
        if self.mode == "sync":
            checkpointer = Checkpointer(root, ckpt_format=self.ckpt_format)
            checkpointer.save(step, state, overwrite=overwrite)
            return
        with Checkpointer(Unshared(root), ckpt_format=self.ckpt_format) as checkpointer:
            checkpointer.save_async(step, state, overwrite=overwrite).result(30)


def _kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _doomed_child(root: Path, killed: Killed, at: int, *, torn: bool) -> bool:
    """Save in a forked child that dies at a boundary; True if it did not get that far."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            with pytest.MonkeyPatch.context() as monkey:
                Boundaries(_kill_self, at=at, torn=torn).install(monkey)
                killed.save(root)
            status = 0
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return False
    assert os.WEXITSTATUS(status) == 0
    return True


def _check(root: Path, killed: Killed, *, finished: bool, repair_first: bool) -> bool:
    """What must hold after a kill; returns whether the save had been committed."""
    before, step, _ = _SCENARIOS[killed.scenario]
    found = versions(root)
    assert found.get(step) in (before.get(step), _VERSION)
    assert {s: v for s, v in found.items() if s != step} == {
        s: v for s, v in before.items() if s != step
    }
    # Not `latest`, which finishes what a killed writer left complete.
    assert [*Checkpointer(root).steps()] == sorted(found)
    is_torch = killed.ckpt_format == "torch_dist"
    assert all((root / step_dir(s) / ".metadata").exists() == is_torch for s in found)
    committed = found.get(step) == _VERSION
    assert committed or not finished
    now = found
    if repair_first:
        fates = repair(PosixStorage(root), alive_s=0.0) if root.is_dir() else []
        assert leftovers(root) == [], fates
        assert all(fate.fate in ("finished", "removed") for fate in fates), fates
        now = versions(root)
        assert now.get(step) in (found.get(step), _VERSION)
    assert_recovers(root, step=step, version=_VERSION + 1, before=now)
    return committed


def _boundaries_of(root: Path, killed: Killed) -> list[str]:
    """The names of the calls of one save that nobody disturbs."""
    killed.prepare(root)
    with pytest.MonkeyPatch.context() as monkey:
        watch = Boundaries(lambda: None)
        watch.install(monkey)
        killed.save(root)
    return watch.names


def _some(names: list[str]) -> set[int]:
    """One call in the middle, the commit, and the one after it."""
    commit = max(at for at, name in enumerate(names, start=1) if name.startswith("rename_"))
    return {commit // 2, commit, commit + 1}


def _sweep(
    context: RankContext, root: str, killed: Killed, is_whole: bool
) -> tuple[list[str], int]:
    """Kill at each boundary in turn; the boundaries, and the number of kills that had committed."""
    num_committed = 0
    names = _boundaries_of(Path(root) / "undisturbed", killed)
    for at, name in enumerate([*names, "end"], start=1):
        if not is_whole and at not in _some(names):
            continue
        for torn in (False, True) if name == "pwrite" else (False,):
            place = Path(root) / f"{at}-{torn}"
            killed.prepare(place)
            finished = _doomed_child(place, killed, at, torn=torn)
            assert finished == (name == "end")
            committed = _check(place, killed, finished=finished, repair_first=at % 2 == 0)
            num_committed += committed and not finished
    return names, num_committed


@pytest.mark.parametrize(
    "killed",
    [
        pytest.param(Killed("sync", "first"), marks=pytest.mark.nightly),
        pytest.param(Killed("async", "overwrite"), marks=pytest.mark.slow),
        pytest.param(Killed("sync", "next"), marks=pytest.mark.nightly),
        pytest.param(Killed("sync", "overwrite"), marks=pytest.mark.nightly),
        pytest.param(Killed("async", "first"), marks=pytest.mark.nightly),
        pytest.param(Killed("async", "next"), marks=pytest.mark.nightly),
        pytest.param(Killed("sync", "overwrite", "torch_dist"), marks=pytest.mark.slow),
        pytest.param(Killed("async", "first", "torch_dist"), marks=pytest.mark.nightly),
        pytest.param(Killed("sync", "first", "torch_dist"), marks=pytest.mark.nightly),
        pytest.param(Killed("async", "overwrite", "torch_dist"), marks=pytest.mark.nightly),
    ],
    ids="-".join,
)
def test_killed_at_every_boundary(fast_dir: Path, killed: Killed) -> None:
    """E1, P6: before each call that changes storage, and in the middle of each write."""
    (swept,) = run_ranks(1, _sweep, str(fast_dir), killed, True, init=False).results
    names, num_committed = swept
    assert len(names) >= 35, "the sweep saw fewer calls than a save must make"
    assert {"pwrite", "fsync", "fdatasync", "rename", "mkdir", "open", "allocate"} <= {*names}
    exchanges = killed.scenario == "overwrite"
    assert ("rename_exchange" if exchanges else "rename_noreplace") in names
    assert 1 <= num_committed < len(names)
    print(f"{killed}: {len(names)} boundaries, {num_committed} kills after the commit")


@pytest.mark.parametrize(
    "ckpt_format", [pytest.param("holdfast", marks=pytest.mark.slow), "torch_dist"]
)
def test_killed_around_the_commit(fast_dir: Path, ckpt_format: CkptFormat) -> None:
    """E1, P6, X6: where one version becomes the other; PyTorch's reader finds one wholly, too."""
    killed = Killed("async", "overwrite", ckpt_format)
    (swept,) = run_ranks(1, _sweep, str(fast_dir), killed, False, init=False).results
    assert 1 <= swept[1] < 3
