"""A save lives as long as any of its processes does, and is abandoned soon after the last."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from holdfast import Checkpointer, Layout, PosixStorage, ProcessGroups
from holdfast.checkpoint.save import executor as send
from holdfast.format.names import parse_saving_dir
from holdfast.format.verifier import verify_snapshot
from holdfast.format.versions import LEASES_DIR, read_lease, readers_of
from holdfast.writer import job
from holdfast.writer import leftovers as repairing
from holdfast.writer.job import heartbeat
from holdfast.writer.leftovers import repair, wait_for_writers
from holdfast.writer.records import ALIVE_FILE, silent_s
from tests.crash.common import leftovers, state_of, versions
from tests.harness import RankContext, run_ranks, wait_until

ALIVE_S = 30.0
"""No test waits for as long: the age of signs is set."""


def _slow(context: RankContext, root: str, slow: int, mode: str) -> list[str]:
    """A save in which one rank stands still until the test has seen that it is left alone."""
    job.HEARTBEAT_S = 0.1
    with ProcessGroups.create(Layout(dp=2), timeout_s=60) as groups:
        storage = _Unshared(root)
        real = send.stage_by_slices if mode == "sync" else job.write_share

        def late(*args: object, **kwargs: object) -> object:
            if mode == "async":
                done = real(*args, **kwargs) if context.rank != slow else None  # type: ignore[operator]
            if context.rank == slow:
                Path(f"{root}.stands-still").touch()
                wait_until(Path(f"{root}.may-continue").exists)
            return real(*args, **kwargs) if mode == "sync" or context.rank == slow else done  # type: ignore[operator]

        if mode == "sync":
            send.stage_by_slices = late  # type: ignore[assignment]
        else:
            job.write_share = late  # type: ignore[assignment]
        checkpointer = Checkpointer(storage, groups=groups, settle_s=0.0)
        state = state_of(5, index=context.rank, size=2)
        if mode == "sync":
            checkpointer.save(5, state)
        else:
            checkpointer.save_async(5, state).result(60)
        checkpointer.close()
    return []


class _Unshared(PosixStorage):
    """Asynchronous saves are written by a thread of the rank."""


@pytest.mark.parametrize(
    ("slow", "mode"),
    [
        pytest.param(1, "sync", marks=pytest.mark.slow),
        pytest.param(0, "sync", marks=pytest.mark.slow),
        (1, "async"),
    ],
)
def test_a_save_with_a_slow_rank_is_left_alone(
    tmp_path: Path, slow: int, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Item 19: by a repair, and by the first save of another run; and it is committed."""
    monkeypatch.setattr(PosixStorage, "is_locked", lambda *_: None)  # as for a job on other hosts

    root = tmp_path / "run"
    said: list[tuple[str, str]] = []

    def look() -> None:
        wait_until(Path(f"{root}.stands-still").exists)
        try:
            for _ in range(3):
                beats = make_older(root)
                wait_until(lambda beats=beats: any(map(is_renewed, beats)))
                found = repair(PosixStorage(root), alive_s=ALIVE_S)
                said.extend((f.fate, f.why) for f in found if parse_saving_dir(f.name) is not None)
        finally:
            Path(f"{root}.may-continue").touch()

    root.mkdir()
    looks = threading.Thread(target=look)
    looks.start()
    try:
        run_ranks(2, _slow, str(root), slow, mode)
    finally:
        looks.join()
    assert [fate for fate, _ in said] == ["alive"] * 3, said
    assert all("last heartbeat" in why for _, why in said)
    assert versions(root) == {5: 5}
    assert leftovers(root) == []
    assert list((root / LEASES_DIR).iterdir()) == []


def heartbeats(root: Path) -> list[Path]:
    return [*(root / LEASES_DIR).glob("iter_*.save-*")]


def make_older(root: Path) -> list[Path]:
    """Make the signs of the save too old, by any clock, until its processes renew them; these."""
    (saving,) = root.glob(".saving-*")
    wait_until(lambda: heartbeats(root))
    beats = heartbeats(root)
    for path in (*beats, *saving.glob(ALIVE_FILE), saving):
        with suppress(FileNotFoundError):  # a rank that has written takes its own away
            if path != saving:
                with open(path, "r+b") as file:
                    file.truncate(0)
            os.utime(path, (path.stat().st_mtime - 2 * ALIVE_S,) * 2)
    return beats


def is_renewed(beat: Path) -> bool:
    with suppress(FileNotFoundError):
        return beat.stat().st_size > 0
    return False


def _die(context: RankContext, root: str) -> None:
    job.HEARTBEAT_S = 0.1
    with ProcessGroups.create(Layout(dp=2), timeout_s=20) as groups:

        def never(*args: object, **kwargs: object) -> None:
            wait_until(lambda: len(heartbeats(Path(root))) == 2)
            os.kill(os.getpid(), signal.SIGKILL)

        send.stage_by_slices = never  # type: ignore[assignment]
        state = state_of(5, index=context.rank, size=2)
        Checkpointer(root, groups=groups, settle_s=0.0).save(5, state)


def test_a_killed_save_is_cleared_away_when_its_signs_are_old(tmp_path: Path) -> None:
    run_ranks(2, _die, str(tmp_path), expect_failure=True)
    storage = PosixStorage(tmp_path)
    assert [f.fate for f in repair(storage, alive_s=ALIVE_S)] == ["alive"]
    make_older(tmp_path)
    assert [f.fate for f in repair(storage, alive_s=ALIVE_S)] == ["removed"]
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("off_s", [-7200.0, -40.0, 40.0, 7200.0])
def test_signs_are_judged_by_the_clock_of_the_storage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, off_s: float
) -> None:
    """Neither the giver's clock nor the judge's makes the living dead, or the dead live long."""
    storage = PosixStorage(tmp_path)
    saving = ".saving-iter_0000001-abc"
    storage.make_dir(f"{saving}/plan")
    monkeypatch.setattr(job, "HEARTBEAT_S", 0.05)
    real = time.time
    with monkeypatch.context() as there:
        there.setattr(time, "time", lambda: real() + off_s)
        with heartbeat(storage, saving, position=3), read_lease(storage, "iter_0000001"):
            wait_until(lambda: heartbeats(tmp_path))
            (beat,) = heartbeats(tmp_path)
            data = beat.read_bytes()
            os.utime(tmp_path / saving, (1, 1))
            there.setattr(time, "time", real)
            assert silent_s(storage, saving) < 10
            assert [f.fate for f in repair(storage, alive_s=10)] == ["alive"]
            assert len(readers_of(storage, "iter_0000001")) == 1
    assert list((tmp_path / LEASES_DIR).iterdir()) == []
    # The same sign, left by one who died a minute ago: no clock helps it.
    beat.write_bytes(data)
    minute = real() - 60
    os.utime(beat, (minute, minute))
    if abs(off_s) > 60:
        assert silent_s(storage, saving) > 50
        assert [f.fate for f in repair(storage, alive_s=30)] == ["removed"]


def test_a_judge_whose_own_clock_is_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = PosixStorage(tmp_path)
    storage.write_file("f", b"")
    real = time.time
    for off_s in (-7200.0, 7200.0):
        monkeypatch.setattr(time, "time", lambda off_s=off_s: real() + off_s)
        assert PosixStorage(tmp_path).age_s("f") < 60


def test_the_first_look_of_a_run_removes_nothing(tmp_path: Path) -> None:
    """It judges after five seconds; what it takes for dead may only have been slow."""
    storage = PosixStorage(tmp_path)
    Checkpointer(tmp_path).save(1, state_of(1))
    storage.make_dir(".saving-iter_0000002-abc/plan")
    wait_for_writers(storage, alive_s=0.0, timeout_s=1.0)
    assert storage.exists(".saving-iter_0000002-abc")


def test_a_save_that_a_repair_finished_meanwhile_is_a_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The committer was only slow: what it finds committed under its name is its own save."""
    storage = PosixStorage(tmp_path)
    Checkpointer(tmp_path).save(1, state_of(10))
    real = job.commit_save
    for step, version in ((1, 11), (2, 20)):
        fates: list[str] = []

        def slow(*args: object, fates: list[str] = fates, **kwargs: object) -> object:
            monkeypatch.setattr(job, "commit_save", real)
            fates.extend(f.fate for f in repairing.repair(PosixStorage(tmp_path), alive_s=0.0))
            return real(*args, **kwargs)  # type: ignore[arg-type]

        monkeypatch.setattr(job, "commit_save", slow)
        report = Checkpointer(tmp_path).save(step, state_of(version), overwrite=True)
        assert fates[0] == "finished"
        assert report.step == step
        assert versions(tmp_path)[step] == version
        assert verify_snapshot(storage, f"iter_000000{step}") == []
    assert leftovers(tmp_path) == []
