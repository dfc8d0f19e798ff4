"""What fails at or after the rename that commits: what is said is what is there."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast import Checkpointer, PosixStorage, StorageError
from holdfast.format.names import LATEST
from holdfast.storage import posix
from holdfast.writer.leftovers import repair
from tests.crash.common import assert_recovers, leftovers, state_of, versions

MODES = pytest.mark.parametrize("mode", ["sync", "async"])


class Unshared(PosixStorage):
    """A storage that no other process can open: asynchronous saves are written by a thread."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.pointer_fails = False
        self.removing_fails = False

    def replace_file(self, path: str, data: bytes, *, durable: bool = True) -> None:
        if path == LATEST and self.pointer_fails:
            raise StorageError(f"cannot write: {self.describe(path)}: Input/output error")
        super().replace_file(path, data, durable=durable)

    def remove_tree(self, path: str, *, durable: bool = True) -> None:
        if path.startswith(".saving-") and "/" not in path and self.removing_fails:
            raise StorageError(f"cannot remove: {self.describe(path)}: Input/output error")
        super().remove_tree(path, durable=durable)


def save(
    storage: PosixStorage, mode: str, step: int, version: int, *, overwrite: bool = False
) -> None:
    """One save, by a checkpointer of its own."""
    checkpointer = Checkpointer(storage, settle_s=0.0)
    if mode == "sync":
        checkpointer.save(step, state_of(version), overwrite=overwrite)
    else:
        checkpointer.save_async(step, state_of(version), overwrite=overwrite).result(30)
        checkpointer.close()


@MODES
def test_a_pointer_that_cannot_be_replaced_fails_no_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: str
) -> None:
    """P2: the step is committed; the next repair or save sets the pointer right."""
    storage = Unshared(tmp_path)
    pointer = tmp_path / LATEST
    save(storage, mode, 1, 10)
    storage.pointer_fails = True
    with caplog.at_level(logging.WARNING, logger="holdfast"):
        save(storage, mode, 2, 20)
    said = [record.getMessage() for record in caplog.records if LATEST in record.getMessage()]
    assert len(said) == 1
    assert "step 2 is committed" in said[0]
    assert "Input/output error" in said[0]
    assert versions(tmp_path) == {1: 10, 2: 20}
    assert pointer.read_text() == "1\n"
    # A repair that cannot either says so and goes on.
    assert [(f.name, f.fate) for f in repair(storage)] == [(LATEST, "kept")]
    assert [(f.name, f.step, f.fate) for f in repair(storage, dry_run=True)] == [
        (LATEST, 2, "finished")
    ]
    assert pointer.read_text() == "1\n"
    storage.pointer_fails = False
    assert [(f.name, f.step, f.fate) for f in repair(storage)] == [(LATEST, 2, "finished")]
    assert pointer.read_text() == "2\n"
    assert repair(storage) == []
    # So does the next save.
    pointer.write_text("1\n")
    save(storage, mode, 3, 30)
    assert pointer.read_text() == "3\n"
    pointer.unlink()
    (tmp_path / "iter_0000003").rename(tmp_path / "elsewhere")
    assert [(f.name, f.step) for f in repair(storage)] == [(LATEST, 2)]
    assert pointer.read_text() == "2\n"


def test_loading_never_touches_the_pointer(tmp_path: Path) -> None:
    """A wrong pointer is not a reason to write to what may be mounted read-only."""
    save(PosixStorage(tmp_path), "sync", 1, 10)
    (tmp_path / LATEST).write_text("7\n")
    assert versions(tmp_path) == {1: 10}
    assert (tmp_path / LATEST).read_text() == "7\n"


@MODES
def test_what_was_replaced_and_cannot_be_removed_fails_no_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: str
) -> None:
    storage = Unshared(tmp_path)
    save(storage, mode, 1, 10)
    storage.removing_fails = True
    with caplog.at_level(logging.WARNING, logger="holdfast"):
        save(storage, mode, 1, 11, overwrite=True)
    assert "the version that it replaced cannot be removed" in caplog.text
    assert versions(tmp_path) == {1: 11}
    storage.removing_fails = False
    assert [f.why for f in repair(storage)] == ["its save is committed"]
    assert leftovers(tmp_path) == []


class Renames:
    """The last step of a commit, failing where told: its syncs, and the renames that undo it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.failing_syncs = 0
        self.num_renames = 0
        self.undo_fails = False
        self.before_failing: Callable[[], object] = lambda: None
        real_sync = posix._sync_dir_fds
        monkeypatch.setattr(posix, "_sync_dir_fds", self._sync(real_sync))
        for name in ("rename_noreplace", "rename_exchange"):
            monkeypatch.setattr(posix, name, self._rename(getattr(posix, name)))

    def _sync(self, real: Callable[[int, int], None]) -> Callable[[int, int], None]:
        def sync(one: int, other: int) -> None:
            if self.failing_syncs:
                self.failing_syncs -= 1
                self.before_failing()
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            real(one, other)

        return sync

    def _rename(self, real: Callable[..., bool]) -> Callable[..., bool]:
        def rename(*args: object, **kwargs: object) -> bool:
            self.num_renames += 1
            if self.num_renames == 2 and self.undo_fails:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return real(*args, **kwargs)

        return rename


@MODES
@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("failing_syncs", [1, 2])
def test_a_rename_that_is_not_durable_is_taken_back(
    tmp_path: Path, mode: str, overwrite: bool, failing_syncs: int
) -> None:
    """P2: the save fails, and the version before it, or nothing, is what is there."""
    step = 1 if overwrite else 2
    save(PosixStorage(tmp_path), "sync", 1, 10)
    with pytest.MonkeyPatch.context() as monkey:
        renames = Renames(monkey)
        renames.failing_syncs = failing_syncs
        with pytest.raises(StorageError, match="Input/output error") as caught:
            save(Unshared(tmp_path), mode, step, 11, overwrite=overwrite)
        assert renames.num_renames == 2
        assert renames.failing_syncs == 0
    assert "in place" not in str(caught.value)
    assert versions(tmp_path) == {1: 10}
    assert_recovers(tmp_path, step=step, version=12)


def test_a_rename_that_a_repair_has_made_durable_is_not_taken_back(tmp_path: Path) -> None:
    """P2, P8: it has removed the version before; without the new one, nothing would be left."""
    save(PosixStorage(tmp_path), "sync", 1, 10)
    with pytest.MonkeyPatch.context() as monkey:
        renames = Renames(monkey)
        renames.failing_syncs = 1
        renames.before_failing = lambda: repair(PosixStorage(tmp_path))
        save(PosixStorage(tmp_path), "sync", 1, 11, overwrite=True)
        assert renames.failing_syncs == 0
    assert versions(tmp_path) == {1: 11}
    assert leftovers(tmp_path) == []


class Denied(Unshared):
    """What has its final name may not be read, once a new version has got it."""

    def __init__(self, root: Path, renames: Renames) -> None:
        super().__init__(root)
        self.renames = renames

    def exists(self, path: str) -> bool:
        if path == "iter_0000001/manifest.json" and self.renames.num_renames:
            raise StorageError(f"{path}: Permission denied", details={"is_unknown": True})
        return super().exists(path)


@MODES
def test_a_rename_that_may_be_in_place_for_all_that_is_known_is_said_to_be(
    tmp_path: Path, mode: str
) -> None:
    """P2, P27: what cannot be read after a failed sync is not said to have failed whole."""
    save(PosixStorage(tmp_path), "sync", 1, 10)
    with pytest.MonkeyPatch.context() as monkey:
        renames = Renames(monkey)
        renames.failing_syncs = 1
        message = r"cannot be known now whether the new version is in place.*Permission denied"
        with pytest.raises(StorageError, match=message):
            save(Denied(tmp_path, renames), mode, 1, 11, overwrite=True)
    assert versions(tmp_path) == {1: 11}
    assert_recovers(tmp_path, step=1, version=12)


@MODES
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_rename_that_can_be_neither_proven_nor_taken_back_is_said_to_be_in_place(
    tmp_path: Path, mode: str, overwrite: bool
) -> None:
    """P2: the error says what is there, and what was replaced is kept until names are durable."""
    step = 1 if overwrite else 2
    save(PosixStorage(tmp_path), "sync", 1, 10)
    with pytest.MonkeyPatch.context() as monkey:
        renames = Renames(monkey)
        renames.failing_syncs = 1
        renames.undo_fails = True
        message = r"new version is in place and complete, but .* lost if .*Input/output error"
        with pytest.raises(StorageError, match=message):
            save(Unshared(tmp_path), mode, step, 11, overwrite=overwrite)
        assert renames.num_renames == 2
    # Not by `versions`, which loads: a load may set right what a save left behind.
    replaced = list(tmp_path.glob(".saving-*"))
    if overwrite:
        (old,) = replaced
        assert {p.name for p in (old / "data").iterdir()} == {"00000.safetensors"}
        assert (old / "manifest.json").exists()
        # While the directory cannot be synced, a repair keeps it.
        with pytest.MonkeyPatch.context() as monkey:
            monkey.setattr(posix, "_sync_dir_fd", _fail)
            fates = [f.fate for f in repair(PosixStorage(tmp_path), alive_s=0.0)]
        assert fates[0] == "kept"
        assert old.exists()
    assert versions(tmp_path) == ({1: 11} if overwrite else {1: 10, 2: 11})
    assert_recovers(tmp_path, step=step, version=12)


def _fail(fd: int) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


# Storage that can little, and whose clock is coarse or another's


class Coarse(Unshared):
    """Times in steps of two seconds, by a clock that is off by `ahead_s`."""

    def __init__(self, root: Path, *, ahead_s: float = 0.0) -> None:
        super().__init__(root)
        self.ahead_s = ahead_s

    def age_s(self, path: str) -> float:
        changed = self._lstat(path).st_mtime + self.ahead_s
        return max(time.time() - changed // 2 * 2, 0.0)


def _interrupted(
    storage: PosixStorage, step: int, version: int, *, overwrite: bool = False
) -> Path:
    """A save with all its records whose commit never came."""

    def stop(*args: object, **kwargs: object) -> None:
        raise StorageError("stopped")

    before = set(storage.root.glob(".saving-*"))
    with pytest.MonkeyPatch.context() as monkey:
        monkey.setattr("holdfast.writer.job.commit_save", stop)
        monkey.setattr("holdfast.checkpoint.save.saver.discard_save", lambda *a: None)
        with pytest.raises(StorageError, match="stopped"):
            save(storage, "sync", step, version, overwrite=overwrite)
    (left,) = set(storage.root.glob(".saving-*")) - before
    return left


@pytest.mark.parametrize("ahead_s", [-90.0, 0.0, 90.0])
def test_a_live_save_is_told_from_a_dead_one_by_any_clock(tmp_path: Path, ahead_s: float) -> None:
    """P12: two-second times, and a file server whose clock is behind or ahead."""
    storage = Coarse(tmp_path, ahead_s=ahead_s)
    save(storage, "sync", 1, 10)
    left = _interrupted(storage, 2, 20)
    assert [f.fate for f in repair(storage, alive_s=30.0)] == ["alive"]
    long_ago = time.time() - 300
    (left / "plan" / "alive").write_text(f"{long_ago:.3f}")
    for path in (left, *left.rglob("*")):
        os.utime(path, (long_ago, long_ago))
    assert [f.fate for f in repair(storage, alive_s=30.0)] == ["finished"]
    assert versions(tmp_path) == {1: 10, 2: 20}


def test_with_coarse_times_an_older_save_never_replaces_a_newer(tmp_path: Path) -> None:
    """P12: both within one tick: the one that is committed stays."""
    storage = Coarse(tmp_path)
    save(storage, "sync", 1, 10)
    _interrupted(storage, 1, 11, overwrite=True)
    save(Coarse(tmp_path), "sync", 1, 12, overwrite=True)
    repair(storage, alive_s=0.0)
    assert versions(tmp_path) == {1: 12}


def _set_back(path: Path, seconds: float) -> None:
    """Make everything there look as old as if the clock had been so far behind."""
    for each in (path, *path.rglob("*")):
        then = each.stat().st_mtime - seconds
        os.utime(each, (then, then))


@pytest.mark.parametrize("seconds", [-300.0, 300.0])
def test_of_two_versions_the_later_stays_whatever_the_clock_says(
    tmp_path: Path, seconds: float
) -> None:
    """P24: a repair knows what a complete save was to replace, and asks no file for its time."""
    storage = PosixStorage(tmp_path)
    save(storage, "sync", 1, 10)
    _interrupted(storage, 1, 11, overwrite=True)
    _set_back(tmp_path / "iter_0000001", seconds)
    assert [f.fate for f in repair(storage, alive_s=0.0)] == ["finished"]
    assert versions(tmp_path) == {1: 11}
    left = _interrupted(storage, 1, 12, overwrite=True)
    aside = left.rename(tmp_path / "aside")  # the next save's own repair would finish it
    save(storage, "sync", 1, 13, overwrite=True)
    aside.rename(left)
    _set_back(tmp_path / "iter_0000001", seconds)
    assert [f.fate for f in repair(storage, alive_s=0.0)] == ["removed"]
    assert versions(tmp_path) == {1: 13}


def test_a_version_that_is_saved_while_a_repair_finishes_an_older_one_stays(tmp_path: Path) -> None:
    """P24: a repair may read all data of a save before it gives it the name of the step."""
    storage = PosixStorage(tmp_path)
    save(storage, "sync", 1, 10)
    left = _interrupted(storage, 1, 11, overwrite=True)

    def save_again(operation: str, path: str, *_: object) -> None:
        if (operation, path) == ("rename", left.name) and versions(tmp_path) == {1: 10}:
            save(storage, "sync", 1, 12, overwrite=True)

    (found,) = repair(PosixStorage(tmp_path, observer=save_again), alive_s=0.0)
    assert versions(tmp_path) == {1: 12}
    assert found.fate == "kept"
    assert "was saved again" in found.why
    assert [f.fate for f in repair(storage, alive_s=0.0)] == ["removed"]
    assert versions(tmp_path) == {1: 12}


class Refusing(Unshared):
    """The manifest of a step that is read with an error of the disk, or of the network."""

    code: int | None = None

    def size(self, path: str) -> int:
        if self.code is not None and path == "iter_0000001/manifest.json":
            error = OSError(self.code, os.strerror(self.code))
            raise posix.storage_error(error, action="examine", place=self.root / path) from error
        return super().size(path)


ESTALE = pytest.param(errno.ESTALE, marks=pytest.mark.slow)


@pytest.mark.parametrize("code", [errno.EIO, ESTALE, errno.EACCES])
@pytest.mark.parametrize("at_save", [False, True])
def test_a_complete_save_stays_while_what_it_is_to_replace_cannot_be_read(
    tmp_path: Path, code: int, at_save: bool
) -> None:
    """P27: an error is neither another version nor none, as it is written and as it is repaired."""
    storage = Refusing(tmp_path)
    save(storage, "sync", 1, 10)
    storage.code = code if at_save else None
    _interrupted(storage, 1, 11, overwrite=True)
    storage.code = code
    assert [f.fate for f in repair(storage, alive_s=0.0)] == ["kept"]
    assert [f.fate for f in repair(Unshared(tmp_path), alive_s=0.0)] == ["finished"]
    assert versions(tmp_path) == {1: 11}


@pytest.mark.parametrize("is_whole", [False, True])
@pytest.mark.parametrize("keeps_times", [False, True])
def test_a_run_that_was_copied_while_it_saved(
    tmp_path: Path, is_whole: bool, keeps_times: bool
) -> None:
    """P24: a data file from before its end and the record of its end make no checkpoint."""
    opened: list[str] = []

    def watch(operation: str, path: str, start: int, nbytes: int) -> None:
        opened.extend([path] if operation == "open" else [])

    run = tmp_path / "run"
    save(PosixStorage(run), "sync", 1, 10)
    left = _interrupted(PosixStorage(run), 2, 20)
    copy = shutil.copytree(
        run, tmp_path / "copy", copy_function=shutil.copy2 if keeps_times else shutil.copyfile
    )
    if not is_whole:
        (data,) = (copy / left.name / "data").iterdir()
        times = data.stat()
        with data.open("r+b") as file:
            file.seek(-8, os.SEEK_END)
            file.write(bytes(8))
        os.utime(data, ns=(times.st_atime_ns, times.st_mtime_ns))
    (said,) = repair(PosixStorage(copy), alive_s=0.0)
    assert said.fate == ("finished" if is_whole else "removed"), said.why
    assert is_whole or "is a copy" in said.why
    assert versions(copy) == ({1: 10, 2: 20} if is_whole else {1: 10})
    # What its rank wrote is not read again.
    assert [f.fate for f in repair(PosixStorage(run, observer=watch), alive_s=0.0)] == ["finished"]
    assert not [path for path in opened if "/data/" in path]


def test_no_rename_across_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """P12: neither direct I/O, reservation, renameat2, nor renames that leave their directory."""
    real_open, real_rename = os.open, os.rename

    def no_direct(path: str, flags: int, *args: int, **kwargs: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no direct I/O")
        return real_open(path, flags, *args, **kwargs)

    def near(src: str, dst: str, *, src_dir_fd: int, dst_dir_fd: int) -> None:
        if not os.path.sameopenfile(src_dir_fd, dst_dir_fd):
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
        real_rename(src, dst, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)

    for name in ("allocate", "rename_noreplace", "rename_exchange"):
        monkeypatch.setattr(posix, name, lambda *args, **kwargs: False)
    monkeypatch.setattr(os, "open", no_direct)
    monkeypatch.setattr(os, "rename", near)
    storage = Coarse(tmp_path)
    for mode in ("sync", "async"):
        save(storage, mode, 1, 10, overwrite=True)
        save(storage, mode, 1, 11, overwrite=True)
    big = Checkpointer(storage)
    big.save(2, state_of(20) | {"big": {"x": list(range(10))}})
    assert big.steps() == [1, 2]
    big.save(2, state_of(21), overwrite=True)
    assert versions(tmp_path) == {1: 11, 2: 21}
    assert repair(storage, alive_s=0.0) == []
