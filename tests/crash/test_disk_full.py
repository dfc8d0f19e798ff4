"""A disk that is full after every page and every name in turn; devices that fail at every call."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import pytest

from holdfast import Checkpointer, PosixStorage, StorageError
from holdfast.storage import posix
from tests.crash.boundaries import BROKEN, FULL, Act, Boundaries
from tests.crash.common import assert_recovers, state_of, versions
from tests.crash.mounts import Mounts

_PAGE = 4096


class Optimistic(PosixStorage):
    """Says that there is room, so that a save meets the full disk itself."""

    def free_nbytes(self) -> int:
        return 1 << 40


def _try_save(root: Path, *, mode: str) -> StorageError | None:
    checkpointer = Checkpointer(Optimistic(root), settle_s=0.0)
    try:
        if mode == "sync":
            checkpointer.save(2, state_of(20))
        else:
            checkpointer.save_async(2, state_of(20)).result(30)
    except StorageError as error:
        return error
    finally:
        with suppress(StorageError):
            checkpointer.close()
    return None


def _check(root: Path, error: StorageError | None, cause: str) -> None:
    """Committed and whole, or failed with cause and path and nothing visible."""
    found = versions(root)
    assert found[1] == 10
    if error is None:
        assert found == {1: 10, 2: 20}
        return
    assert cause in str(error), error
    assert str(root) in str(error), error
    # The pointer comes after the commit: what fails there fails no save.
    assert found == {1: 10}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("reserves", [True, False])
def test_disk_full_at_every_page(
    mounts: Mounts, monkeypatch: pytest.MonkeyPatch, mode: str, reserves: bool
) -> None:
    """E2, P2: with room for k pages, k from none to enough; with and without reservation."""
    if not reserves:
        monkeypatch.setattr(posix, "allocate", lambda fd, nbytes: False)
    failures, pages = 0, 0
    place = mounts.tmpfs(options="size=16m")
    for pages in range(60):
        root = place / f"run{pages}"
        Checkpointer(Optimistic(root)).save(1, state_of(10))
        filler = place / "filler"
        free = os.statvfs(place).f_bavail
        filler.write_bytes(b"x" * max(free - pages, 0) * _PAGE)
        error = _try_save(root, mode=mode)
        filler.unlink()
        _check(root, error, "No space left")
        failures += error is not None
        assert_recovers(root, step=2, version=33)
        for path in sorted(root.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        if error is None:
            break
    print(
        f"{mode}, reserves={reserves}: failed with 0 to {failures - 1} pages, passed with {pages}"
    )
    assert failures >= 14
    assert error is None


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_disk_out_of_names(mounts: Mounts) -> None:
    """E2, P2: with room for k files and directories."""
    failures = 0
    place = mounts.tmpfs(options="size=16m,nr_inodes=64")
    error: StorageError | None = None
    for number in range(40):
        root = place / f"run{number}"
        Checkpointer(Optimistic(root)).save(1, state_of(10))
        fillers = [place / f"filler{i}" for i in range(os.statvfs(place).f_favail - number)]
        for filler in fillers:
            filler.touch()
        error = _try_save(root, mode="sync")
        for filler in fillers:
            filler.unlink()
        _check(root, error, "No space left")
        failures += error is not None
        assert_recovers(root, step=2, version=33)
        for path in sorted(root.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        if error is None:
            break
    assert failures >= 5
    assert error is None


@pytest.mark.parametrize(
    ("act", "cause", "mode", "apart"),
    [
        # The writer fails alike with either error and in either mode: a third of one is quick.
        (FULL, "No space left", "async", 3),
        pytest.param(FULL, "No space left", "async", 1, marks=pytest.mark.nightly),
        pytest.param(FULL, "No space left", "sync", 1, marks=pytest.mark.slow),
        pytest.param(BROKEN, "Input/output", "sync", 1, marks=pytest.mark.nightly),
        pytest.param(BROKEN, "Input/output", "async", 1, marks=pytest.mark.slow),
    ],
)
def test_every_call_that_fails(fast_dir: Path, mode: str, act: Act, cause: str, apart: int) -> None:
    """E2, P2: each call that changes storage fails once, with a full disk or a broken device."""
    at, failures, reached = 1 - apart, 0, True
    while reached:
        at += apart
        root = fast_dir / str(at)
        Checkpointer(root).save(1, state_of(10))
        with pytest.MonkeyPatch.context() as monkey:
            watch = Boundaries(act, at=at)
            watch.install(monkey)
            error = _try_save(root, mode=mode)
        reached = len(watch.names) >= at
        _check(root, error, cause)
        failures += error is not None
        assert_recovers(root, step=2, version=33)
    print(f"{mode} {cause}: {at - 1} calls, {failures} failures")
    assert failures >= 25 // apart
