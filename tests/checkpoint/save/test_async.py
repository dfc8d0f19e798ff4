"""Asynchronous saves: what was staged is what is stored, whatever dies after."""

from __future__ import annotations

import itertools
import os
import signal
import threading
from pathlib import Path

import pytest
import torch

from holdfast import (
    AppliesLater,
    Checkpointer,
    ConfigError,
    DeadlineError,
    HoldfastError,
    KeepEvery,
    KeepLast,
    Layout,
    OnFile,
    PlanError,
    PosixStorage,
    ProcessGroups,
    StorageError,
    Stored,
    Union,
)
from holdfast.checkpoint.save import handshake
from holdfast.checkpoint.save.handshake import available_memory_nbytes, check_budget
from holdfast.format.names import step_dir
from holdfast.writer.leftovers import repair
from tests.checkpoint.common import assert_equal, full, make_state
from tests.harness import RankContext, run_ranks, wait_until


def _filled(value: float, size: int = 200_000) -> dict[str, object]:
    return {"t": {"x": torch.full((size,), value), "n": value}}


def test_stored_is_the_state_of_the_call(tmp_path: Path) -> None:
    """E12: training changes everything right after the call; two saves never mix."""
    for staging_buffers in (1, 2):
        root = tmp_path / str(staging_buffers)
        with Checkpointer(root, staging_buffers=staging_buffers) as checkpointer:
            state = _filled(0.0)
            tensor = state["t"]["x"]  # type: ignore[index]
            for step in range(6):
                tensor.fill_(float(step))
                state["t"]["n"] = step  # type: ignore[index]
                pending = checkpointer.save_async(step, state)
                tensor.fill_(-1.0)
                assert pending.phase in ("writing", "committing", "committed")
            report = pending.result(30)
            assert report.step == 5
            assert pending.progress == 1.0
            assert pending.phase == "committed"
            assert checkpointer.stats.num_allocations == staging_buffers
            assert checkpointer.stats.num_plans == 1
        for step in range(6):
            loaded = checkpointer.load({"t": Stored()}, step=step).values["t"]
            assert isinstance(loaded, dict)
            assert loaded["n"] == step
            assert torch.equal(loaded["x"], torch.full((200_000,), float(step)))


def test_a_change_of_structure_while_a_save_is_under_way(tmp_path: Path) -> None:
    """C7: the save in flight keeps its own plan and data."""
    with Checkpointer(tmp_path, staging_buffers=2) as checkpointer:
        first = checkpointer.save_async(1, _filled(1.0))
        second = checkpointer.save_async(2, {"t": {"x": torch.full((300_000,), 2.0), "y": 5}})
        assert first.result(30).planned
        assert second.result(30).planned
    one = checkpointer.load({"t": Stored()}, step=1).values["t"]
    two = checkpointer.load({"t": Stored()}, step=2).values["t"]
    assert torch.equal(one["x"], torch.full((200_000,), 1.0))  # type: ignore[index]
    assert torch.equal(two["x"], torch.full((300_000,), 2.0))  # type: ignore[index]
    assert two["y"] == 5  # type: ignore[index]


def test_a_busy_writer_skips_or_waits_by_policy(tmp_path: Path) -> None:
    """E12. A file that asks for a save which is skipped asks again, and the last save waits."""
    ask, stop = (tmp_path.with_name(f"{tmp_path.name}-{name}") for name in ["ask", "stop"])
    checkpointer = Checkpointer(tmp_path, save_when=OnFile(ask) | OnFile(stop, stop=True))
    checkpointer.save_async(0, _filled(0.0)).result(30)
    pid = checkpointer.stats.writer_pid or 0
    os.kill(pid, signal.SIGSTOP)
    try:
        slow = checkpointer.save_async(1, _filled(1.0))
        skipped = checkpointer.save_async(2, _filled(2.0), when_busy="skip")
        assert skipped.skipped
        assert skipped.phase == "skipped"
        assert skipped.result().skipped
        with pytest.raises(DeadlineError, match="step 1"):
            slow.result(0.05)
        ask.touch()
        asked = checkpointer.maybe_save(2, _filled(2.0), when_busy="skip")
        assert asked is not None
        assert asked.skipped
        # Also in a loop that saves by itself.
        assert checkpointer.should_save(3)
        assert checkpointer.save_async(3, _filled(3.0), when_busy="skip").skipped
        assert checkpointer.should_save(4)
        stop.touch()
        assert checkpointer.should_save(5)
        assert checkpointer.preempted
        threading.Timer(0.2, os.kill, (pid, signal.SIGCONT)).start()
        assert not checkpointer.save_async(5, _filled(5.0), when_busy="skip").skipped
    finally:
        os.kill(pid, signal.SIGCONT)
    assert checkpointer.maybe_save(6, _filled(6.0)) is None
    checkpointer.close()
    assert checkpointer.steps() == [0, 1, 5]
    with pytest.raises(ConfigError, match="when_busy"):
        checkpointer.save_async(4, _filled(0.0), when_busy="never")  # type: ignore[arg-type]


def test_a_killed_writer_fails_its_save_and_is_replaced(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save_async(0, _filled(0.0)).result(30)
    victim = checkpointer.stats.writer_pid
    os.kill(victim or 0, signal.SIGSTOP)
    pending = checkpointer.save_async(1, _filled(1.0))
    os.kill(victim or 0, signal.SIGKILL)
    with pytest.raises(StorageError, match="SIGKILL"):
        pending.result(30)
    checkpointer.save_async(3, _filled(3.0)).result(30)
    assert checkpointer.stats.writer_pid != victim
    checkpointer.close()
    assert checkpointer.steps() == [0, 3]
    assert not list(tmp_path.glob(".saving*"))


def test_a_custom_storage_is_written_by_a_thread(tmp_path: Path) -> None:
    seen: list[str] = []
    storage = PosixStorage(tmp_path, observer=lambda op, path, start, n: seen.append(op))
    with Checkpointer(storage) as checkpointer:
        checkpointer.save_async(1, _filled(1.0)).result(30)
        assert checkpointer.stats.writer_pid is None
    assert "create" in seen
    assert "rename" in seen
    assert checkpointer.load({"t": Stored()}).values["t"]["n"] == 1.0  # type: ignore[index]


def _distributed(context: RankContext, root: str) -> list[object]:
    layout = Layout(tp=2, dp=2)
    with ProcessGroups.create(layout) as groups:
        with Checkpointer(root, groups=groups) as checkpointer:
            state = make_state(layout, context.rank)
            values = dict(state["values"])  # type: ignore[call-overload]
            state["values"] = Union(values)
            checkpointer.prepare(state)
            assert checkpointer.stats.num_allocations == 1
            before = groups.control.num_collectives
            stalls = []
            for step in range(4):
                stalls.append(groups.control.num_collectives)
                checkpointer.save_async(step, state)
            per_save = [b - a for a, b in itertools.pairwise(stalls)]
            sent = groups.control.nbytes_sent
            checkpointer.save_async(9, state).result(30)
            sent = groups.control.nbytes_sent - sent
            assert checkpointer.stats.num_allocations == 1
            assert checkpointer.stats.num_plans == 1
            # One rank alone changes its structure: all plan again, once, and all is stored.
            if context.rank == 2:
                values["extra"] = full("extra", (3,))
            assert checkpointer.save_async(10, state).result(30).planned
            assert not checkpointer.save_async(11, state).result(30).planned
            if context.rank == 1:
                del values["pair"]
            assert not checkpointer.save_async(12, state).result(30).planned
        target = make_state(layout, context.rank, blank=True)
        report = checkpointer.load(target)
        assert_equal(target, layout, context.rank)
        values = report.values["values"]
        assert isinstance(values, dict)
        assert torch.equal(values["extra"], full("extra", (3,)))
        assert values["pair"] == (1, "a")
        return [before, per_save, sent, checkpointer.steps()]


def test_steady_saves_cost_one_small_collective(tmp_path: Path) -> None:
    """C1, C2, C4: no plan exchange while nothing changes; a change on one rank is seen by all."""
    for _, per_save, sent, steps in run_ranks(4, _distributed, str(tmp_path)).results:  # type: ignore[misc]
        assert per_save == [2, 1, 1]  # of a new root every rank says that it sees it
        assert sent <= 700
        assert steps == [0, 1, 2, 3, 9, 10, 11, 12]


def _writer_dies(context: RankContext, root: str) -> list[str]:
    layout = Layout(dp=2)
    messages = []
    with ProcessGroups.create(layout, timeout_s=20) as groups:
        checkpointer = Checkpointer(root, groups=groups, deadline_s=20)
        state = make_state(layout, context.rank)
        checkpointer.save_async(1, state).result(30)
        for victim, step in ((0, 2), (1, 4)):
            if context.rank == victim:
                os.kill(checkpointer.stats.writer_pid or 0, signal.SIGSTOP)
            groups.control.barrier(phase="stopped")
            pending = checkpointer.save_async(step, state)
            if context.rank == victim:
                os.kill(checkpointer.stats.writer_pid or 0, signal.SIGKILL)
            with pytest.raises(HoldfastError) as caught:
                pending.result(60)
            messages.append(str(caught.value))
            assert checkpointer.latest() == step - 1
            checkpointer.save_async(step + 1, state).result(30)
        # A failure of the commit (values differ between ranks) reaches every rank, too.
        state["values"] = {"step": context.rank}
        pending = checkpointer.save_async(6, state)
        with pytest.raises(PlanError, match=r"values\.step"):
            pending.result(60)
        checkpointer.save_async(8, make_state(layout, context.rank)).result(30)
        checkpointer.close()
        assert checkpointer.steps() == [1, 3, 5, 8]
    return messages


def test_a_writer_killed_on_any_rank_fails_the_save_on_all(tmp_path: Path) -> None:
    """P2, E1: nobody hangs, the previous checkpoint stays the newest, the next save works."""
    for messages in run_ranks(2, _writer_dies, str(tmp_path)).results:
        assert all("writer process" in message for message in messages)
    assert not list(tmp_path.glob(".saving*"))


def _die_after_save(context: RankContext, root: str) -> None:
    layout = Layout(dp=2)
    with ProcessGroups.create(layout) as groups:
        checkpointer = Checkpointer(root, groups=groups)
        state = make_state(layout, context.rank)
        state["big"] = {"x": full("big", (4_000_000,))}
        checkpointer.save_async(7, state)
        groups.control.barrier(phase="all staged")
        os.kill(os.getpid(), signal.SIGKILL)


def _load_after_death(context: RankContext, root: str) -> int:
    layout = Layout(dp=2)
    with ProcessGroups.create(layout) as groups:
        checkpointer = Checkpointer(root, groups=groups)
        target = make_state(layout, context.rank, blank=True)
        report = checkpointer.load(target)
        assert_equal(target, layout, context.rank)
        return report.step


def test_writers_commit_after_all_trainers_were_killed(tmp_path: Path) -> None:
    """P5: SIGKILL right after the call returned; a new run finds and loads the step."""
    run_ranks(2, _die_after_save, str(tmp_path), expect_failure=True)
    wait_until((tmp_path / step_dir(7)).exists)  # the writers outlive their trainers
    outcome = run_ranks(2, _load_after_death, str(tmp_path))
    assert outcome.results == [7, 7]
    assert not list(tmp_path.glob(".saving*"))


def test_repair_finishes_what_is_complete_and_removes_the_rest(tmp_path: Path) -> None:
    """P6, by taking a save apart by hand at its stages."""
    from holdfast.writer import commit, job

    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, _filled(1.0))

    class Stop(Exception):
        pass

    def stop(*args: object, **kwargs: object) -> None:
        raise Stop

    storage = PosixStorage(tmp_path)
    with pytest.MonkeyPatch.context() as monkey:
        monkey.setattr(commit, "publish", stop)
        monkey.setattr("holdfast.checkpoint.save.saver.discard_save", lambda *a: None)
        with pytest.raises(HoldfastError, match="Stop"):
            Checkpointer(tmp_path).save(2, _filled(2.0))
    leftover = next(tmp_path.glob(".saving-iter_0000002-*"))
    assert [(f.step, f.fate) for f in repair(storage, alive_s=60)] == [(2, "alive")]
    assert leftover.exists()
    # Its records are gone already (the commit had begun): it cannot be finished.
    assert [(f.step, f.fate) for f in repair(storage, alive_s=0, dry_run=True)] == [(2, "removed")]
    assert leftover.exists()
    repair(storage, alive_s=0)
    assert not leftover.exists()

    with pytest.MonkeyPatch.context() as monkey:
        monkey.setattr("holdfast.writer.job.commit_save", stop)
        monkey.setattr("holdfast.checkpoint.save.saver.discard_save", lambda *a: None)
        with pytest.raises(HoldfastError, match="Stop"):
            Checkpointer(tmp_path).save(3, _filled(3.0))
    assert job is not None
    assert max(Checkpointer(tmp_path).steps()) == 1  # `latest` would finish it
    assert [(f.step, f.fate) for f in repair(storage, alive_s=0)] == [(3, "finished")]
    loaded = Checkpointer(tmp_path).load({"t": Stored()})
    assert loaded.step == 3
    assert loaded.values["t"]["n"] == 3.0  # type: ignore[index]
    assert repair(storage, alive_s=0) == []


def test_what_is_short_is_said_before_a_save_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P10: disk, memory, descriptors, by how much."""
    # It ends all keepers of the user, and other tests run at the same time.
    monkeypatch.setattr(handshake, "end_keepers", lambda: False)

    class Full(PosixStorage):
        def free_nbytes(self) -> int:
            return 1000

    with pytest.raises(StorageError, match=r"short; remove old checkpoints"):
        Checkpointer(Full(tmp_path)).save(1, _filled(1.0))
    assert not list(tmp_path.iterdir())
    storage = PosixStorage(tmp_path)
    too_much = available_memory_nbytes() * 2
    with pytest.raises(StorageError, match="more memory in 2 staging buffer"):
        check_budget(storage, image_nbytes=too_much, held_nbytes=[0, 0], total_nbytes=0)
    check_budget(storage, image_nbytes=1000, held_nbytes=[4096], total_nbytes=10)
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 3, hard))
    try:
        with pytest.raises(StorageError, match="file descriptors"):
            check_budget(storage, image_nbytes=1, held_nbytes=[4096], total_nbytes=0)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_the_writer_process_never_imports_torch(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save_async(1, _filled(1.0)).result(30)
        maps = Path(f"/proc/{checkpointer.stats.writer_pid}/maps").read_text()
        assert "libtorch" not in maps
        assert os.getsid(checkpointer.stats.writer_pid or 0) != os.getsid(0)
        descriptors = len(os.listdir("/proc/self/fd"))
        for step in range(2, 6):
            checkpointer.save_async(step, _filled(float(step))).result(30)
        assert len(os.listdir("/proc/self/fd")) <= descriptors
    wait_until(lambda: not Path(f"/proc/{checkpointer.stats.writer_pid}").exists())


def test_retention_follows_each_commit(tmp_path: Path) -> None:
    """E14, P8: the last ones and every tenth stay, by both kinds of save."""
    policy = KeepLast(2) | KeepEvery(10)
    with Checkpointer(tmp_path, retention=policy) as checkpointer:
        for step in (5, 10, 15, 20):
            checkpointer.save(step, _filled(float(step)))
        assert checkpointer.steps() == [10, 15, 20]
        for step in (25, 30, 35):
            checkpointer.save_async(step, _filled(float(step))).result(30)
    assert checkpointer.steps() == [10, 20, 30, 35]
    assert checkpointer.load({"t": Stored()}).step == 35


def test_a_checkpoint_being_read_is_not_removed(tmp_path: Path) -> None:
    """E14: a load marks what it reads."""
    checkpointer = Checkpointer(tmp_path, retention=KeepLast(1))
    checkpointer.save(1, _filled(1.0))
    seen: list[list[int]] = []

    class Target:
        def state_dict(self) -> dict[str, object]:
            return {}

        def load_state_dict(self, state: dict[str, object]) -> None:
            Checkpointer(tmp_path, retention=KeepLast(1)).save(2, _filled(2.0))
            seen.append(checkpointer.steps())

    checkpointer.load({"t": AppliesLater(Target())})
    assert seen == [[1, 2]]
    checkpointer.save(3, _filled(3.0))
    assert checkpointer.steps() == [3]
