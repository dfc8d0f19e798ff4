"""SIGKILL at every call that changes storage; failing calls; what is synced before a commit."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from holdfast import Checkpointer, PosixStorage
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


def _prepare(root: Path, scenario: str) -> None:
    for step, version in _SCENARIOS[scenario][0].items():
        Checkpointer(root).save(step, state_of(version))


def _save(root: Path, scenario: str, mode: str) -> None:
    _, step, overwrite = _SCENARIOS[scenario]
    if mode == "sync":
        Checkpointer(root).save(step, state_of(_VERSION), overwrite=overwrite)
        return
    with Checkpointer(Unshared(root)) as checkpointer:
        checkpointer.save_async(step, state_of(_VERSION), overwrite=overwrite).result(30)


def _kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _doomed_child(root: Path, scenario: str, mode: str, at: int, *, torn: bool) -> bool:
    """Save in a forked child that dies at a boundary; True if it did not get that far."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            with pytest.MonkeyPatch.context() as monkey:
                Boundaries(_kill_self, at=at, torn=torn).install(monkey)
                _save(root, scenario, mode)
            status = 0
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return False
    assert os.WEXITSTATUS(status) == 0
    return True


def _check(root: Path, scenario: str, *, finished: bool, repair_first: bool) -> bool:
    """What must hold after a kill; returns whether the save had been committed."""
    before, step, _ = _SCENARIOS[scenario]
    found = versions(root)
    assert found.get(step) in (before.get(step), _VERSION)
    assert {s: v for s, v in found.items() if s != step} == {
        s: v for s, v in before.items() if s != step
    }
    assert Checkpointer(root).latest() == max(found, default=None)
    committed = found.get(step) == _VERSION
    assert committed or not finished
    if repair_first:
        fates = repair(PosixStorage(root), alive_s=0.0) if root.is_dir() else []
        assert leftovers(root) == [], fates
        assert all(fate.fate in ("finished", "removed") for fate in fates), fates
        after = versions(root)
        assert after.get(step) in (found.get(step), _VERSION)
    assert_recovers(root, step=step, version=_VERSION + 1)
    return committed


def _boundaries_of(root: Path, scenario: str, mode: str) -> list[str]:
    """The names of the calls of one save that nobody disturbs."""
    _prepare(root, scenario)
    with pytest.MonkeyPatch.context() as monkey:
        watch = Boundaries(lambda: None)
        watch.install(monkey)
        _save(root, scenario, mode)
    return watch.names


def _sweep(context: RankContext, root: str, scenario: str, mode: str) -> tuple[list[str], int]:
    """Kill at each boundary in turn; the boundaries, and the number of kills that had committed."""
    num_committed = 0
    names = _boundaries_of(Path(root) / "undisturbed", scenario, mode)
    for at, name in enumerate([*names, "end"], start=1):
        for torn in (False, True) if name == "pwrite" else (False,):
            place = Path(root) / f"{at}-{torn}"
            _prepare(place, scenario)
            finished = _doomed_child(place, scenario, mode, at, torn=torn)
            assert finished == (name == "end")
            committed = _check(place, scenario, finished=finished, repair_first=at % 2 == 0)
            num_committed += committed and not finished
    return names, num_committed


@pytest.mark.parametrize(
    ("mode", "scenario"),
    [
        pytest.param("sync", "first", marks=pytest.mark.slow),
        ("async", "overwrite"),
        pytest.param("sync", "next", marks=pytest.mark.nightly),
        pytest.param("sync", "overwrite", marks=pytest.mark.nightly),
        pytest.param("async", "first", marks=pytest.mark.nightly),
        pytest.param("async", "next", marks=pytest.mark.slow),
    ],
)
def test_killed_at_every_boundary(fast_dir: Path, scenario: str, mode: str) -> None:
    """E1, P6: before each call that changes storage, and in the middle of each write."""
    (swept,) = run_ranks(1, _sweep, str(fast_dir), scenario, mode, init=False).results
    names, num_committed = swept
    assert len(names) >= 35, "the sweep saw fewer calls than a save must make"
    assert {"pwrite", "fsync", "fdatasync", "rename", "mkdir", "open", "allocate"} <= {*names}
    assert ("rename_exchange" if scenario == "overwrite" else "rename_noreplace") in names
    assert 1 <= num_committed < len(names)
    print(f"{scenario} {mode}: {len(names)} boundaries, {num_committed} kills after the commit")
