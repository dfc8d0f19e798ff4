"""What retention removes, and above all what it never removes."""

from __future__ import annotations

import dataclasses
import errno
import json
import shutil
import tempfile
import threading
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from holdfast import Checkpointer, Stored
from holdfast.checkpoint.save import saver
from holdfast.cli.main import main
from holdfast.errors import CorruptionError, StorageError
from holdfast.format.names import step_dir
from holdfast.format.versions import read_lease
from holdfast.policies.keep import (
    KeepEvery,
    KeepLast,
    KeepPolicy,
    KeepTagged,
)
from holdfast.retention.removal import (
    Candidate,
    Removal,
    RetentionPlan,
    RetentionResult,
    apply_retention,
    plan_retention,
)
from holdfast.retention.tags import set_tag
from holdfast.storage import PosixStorage, posix
from holdfast.writer.leftovers import repair
from tests.drawn import drawn
from tests.retention.common import DAMAGES, LATEST, damage, fill, is_whole, put, steps_of


def prune(storage: PosixStorage, policy: KeepPolicy) -> RetentionResult:
    return apply_retention(storage, plan_retention(storage, policy))


# What is never removed


@pytest.mark.parametrize("kind", DAMAGES)
def test_the_newest_sound_checkpoint_stays_when_newer_ones_are_damaged(
    tmp_path: Path, kind: str
) -> None:
    storage = fill(tmp_path, [1, 2, 3, 4])
    damage(tmp_path, 3, kind)
    damage(tmp_path, 4, kind)
    plan = plan_retention(storage, KeepLast(1))
    assert plan.newest == 2
    assert set(plan.keep) == {2}
    assert set(plan.spared) == {"iter_0000003", "iter_0000004"}
    assert all("newer than the newest sound" in why for why in plan.spared.values())
    assert apply_retention(storage, plan).removed == [1]
    assert steps_of(storage) == [2, 3, 4]
    assert is_whole(storage, 2)


def test_nothing_is_removed_when_nothing_is_sound(tmp_path: Path) -> None:
    storage = fill(tmp_path, [1, 2, 3])
    for step, kind in zip((1, 2, 3), DAMAGES[1:], strict=True):
        damage(tmp_path, step, kind)
    plan = plan_retention(storage, KeepLast(1))
    assert (plan.remove, plan.newest) == ((), None)
    assert len(plan.spared) == 3
    assert apply_retention(storage, plan).removed == []


def test_a_step_that_cannot_be_judged_stays(tmp_path: Path) -> None:
    """It may be from a newer version, or the storage may fail only now."""
    storage = fill(tmp_path, [1, 2, 3])
    damage(tmp_path, 1, "manifest")
    shutil.copytree(tmp_path / "iter_0000002", tmp_path / "iter_0000000")
    plan = plan_retention(storage, KeepLast(1))
    assert [removal.step for removal in plan.remove] == [2]
    assert "cannot be judged" in plan.spared["iter_0000001"]
    assert "is of step 2" in plan.spared["iter_0000000"]


def test_a_copy_under_a_newer_name_is_not_the_newest(tmp_path: Path) -> None:
    storage = fill(tmp_path, [1, 2])
    shutil.copytree(tmp_path / "iter_0000001", tmp_path / "iter_0000009")
    plan = plan_retention(storage, KeepLast(1))
    assert plan.newest == 2
    assert "is of step 1" in plan.spared["iter_0000009"]
    assert apply_retention(storage, plan).removed == [1]
    assert steps_of(storage) == [2, 9]


def test_a_look_at_the_newest_step_takes_the_next_if_that_goes(tmp_path: Path) -> None:
    """O9: retention removes it between the list and the manifest."""

    class Removed(PosixStorage):
        is_due = True

        def size(self, path: str) -> int:
            if self.is_due and path == "iter_0000001/manifest.json":
                self.is_due = False
                Checkpointer(tmp_path).save(2, {"t": {"step": 2}})
                shutil.rmtree(tmp_path / "iter_0000001")
            return super().size(path)

    Checkpointer(tmp_path).save(1, {"t": {"step": 1}})
    checkpointer = Checkpointer(Removed(tmp_path))
    assert checkpointer.inspect().step == 2
    with pytest.raises(StorageError, match="not a committed checkpoint"):
        checkpointer.inspect(1)


def test_a_step_under_the_name_of_another_is_damage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """P25: for a load, a verification and a list; else a run continued from it as step 9."""
    for step in (1, 2):
        Checkpointer(tmp_path).save(step, {"t": {"step": step}})
    (tmp_path / "iter_0000001").rename(tmp_path / "iter_0000009")
    for step in (None, 9):
        with pytest.raises(CorruptionError, match="is of step 1: the directory was renamed"):
            Checkpointer(tmp_path).load({"t": Stored()}, step=step)
    assert Checkpointer(tmp_path).load({"t": Stored()}, max_fallbacks=1).step == 2
    assert main(["verify", str(tmp_path), "--step", "9"]) == 1
    capsys.readouterr()
    assert main(["ls", str(tmp_path), "--json"]) == 1
    steps = json.loads(capsys.readouterr().out)["steps"]
    assert [(each["step"], bool(each["damage"])) for each in steps] == [(2, False), (9, True)]


def test_saves_under_way_and_uncommitted_steps_stay(tmp_path: Path) -> None:
    storage = fill(tmp_path, [1, 2, 3])
    for name in (".saving-iter_0000004-ab", ".saving-iter_0000001-cd", "iter_0000000/data",
                 "iter_0000009/data", "logs"):  # fmt: skip
        storage.make_dir(name)
    plan = plan_retention(storage, KeepLast(1))
    assert plan.spared == {"iter_0000000": "not committed", "iter_0000009": "not committed"}
    assert apply_retention(storage, plan).removed == [1, 2]
    for name in (".saving-iter_0000004-ab", ".saving-iter_0000001-cd", "iter_0000000",
                 "iter_0000009", "logs"):  # fmt: skip
        assert storage.is_dir(name)


def test_links_are_neither_followed_nor_removed(tmp_path: Path) -> None:
    outside = fill(tmp_path / "outside", [1, 7])
    storage = fill(tmp_path / "run", [2, 3, 4])
    (tmp_path / "run/iter_0000001").symlink_to(tmp_path / "outside/iter_0000001")
    shutil.rmtree(tmp_path / "run/iter_0000002/data")
    (tmp_path / "run/iter_0000002/data").symlink_to(tmp_path / "outside/iter_0000007")
    plan = plan_retention(storage, KeepLast(1))
    assert plan.spared == {"iter_0000001": "a link or a file: not followed"}
    assert apply_retention(storage, plan).removed == [2, 3]
    assert (tmp_path / "run/iter_0000001").is_symlink()
    assert is_whole(outside, 1)
    assert is_whole(outside, 7)


def test_a_step_that_became_a_link_after_the_plan_is_spared(tmp_path: Path) -> None:
    outside = fill(tmp_path / "outside", [1])
    storage = fill(tmp_path / "run", [1, 2])
    plan = plan_retention(storage, KeepLast(1))
    shutil.rmtree(tmp_path / "run/iter_0000001")
    (tmp_path / "run/iter_0000001").symlink_to(tmp_path / "outside/iter_0000001")
    result = apply_retention(storage, plan)
    assert result.spared == {1: "a link or a file: not followed"}
    assert is_whole(outside, 1)


@pytest.mark.parametrize("in_background", [False, True])
def test_an_older_step_that_was_saved_just_now_stays(tmp_path: Path, in_background: bool) -> None:
    """E14: a run that has gone back saves steps that are not among the newest: each until the next.

    It was removed before `save` had returned its report.
    """
    remain = []
    with Checkpointer(tmp_path, retention=KeepLast(2)) as checkpointer:
        for step in (7, 8, 9, 3, 4):
            if in_background:
                with Checkpointer(tmp_path, retention=KeepLast(2)) as other:
                    other.save_async(step, {"values": {"step": step}}).result()
                # The retention is behind the result, and has ended now.
            else:
                checkpointer.save(step, {"values": {"step": step}})
            remain.append(checkpointer.steps())
    assert remain == [[7], [7, 8], [8, 9], [3, 8, 9], [4, 8, 9]]


@pytest.mark.parametrize("in_background", [False, True])
def test_a_policy_that_fails_fails_no_save_that_is_committed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, in_background: bool
) -> None:
    """E14: a policy that raised made `save` raise on all ranks, after its commit."""

    class Broken(KeepPolicy):
        def keep(self, candidates: Sequence[Candidate], *, now: datetime) -> dict[int, str]:
            return {candidates[-2].step: "the last but one"}

    with Checkpointer(tmp_path, retention=Broken()) as checkpointer:
        if in_background:
            checkpointer.save_async(1, {"values": {"step": 1}}).result()
        else:
            checkpointer.save(1, {"values": {"step": 1}})
    assert "after the commit of step 1" in caplog.text
    assert "list index out of range" in caplog.text
    assert checkpointer.steps() == [1]


def test_a_late_retention_leaves_what_was_saved_since(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """E14: the retention of an asynchronous save runs when a later, lower step is committed."""
    lower_step = threading.Event()
    plan_of = saver.plan_retention

    def plan_late(*args: Any, **arguments: Any) -> RetentionPlan:
        if threading.current_thread() is not threading.main_thread():
            assert lower_step.wait(60)
        return plan_of(*args, **arguments)

    monkeypatch.setattr(saver, "plan_retention", plan_late)
    with Checkpointer(tmp_path, retention=KeepLast(1)) as checkpointer:
        checkpointer.save_async(9, {"values": {"step": 9}}).result()
        checkpointer.save(3, {"values": {"step": 3}})
        lower_step.set()
    assert checkpointer.steps() == [3, 9]
    with Checkpointer(tmp_path, retention=KeepLast(1)) as checkpointer:
        checkpointer.save_async(10, {"values": {"step": 10}}).result()
    assert checkpointer.steps() == [10]


def test_a_checkpoint_being_read_stays(tmp_path: Path) -> None:
    storage = fill(tmp_path, [1, 2, 3])
    plan = plan_retention(storage, KeepLast(1))
    with read_lease(PosixStorage(tmp_path), "iter_0000001") as reading:
        assert reading.problem is None
        result = apply_retention(storage, plan)
        assert result.removed == [2]
        assert "being read by process" in result.spared[1]
        assert is_whole(storage, 1)
    assert prune(storage, KeepLast(1)).removed == [1]


def test_what_changed_since_the_plan_stays(tmp_path: Path) -> None:
    storage = fill(tmp_path, [1, 2, 3, 4, 9])
    set_tag(storage, "old", step=4)
    plan = plan_retention(storage, KeepLast(1))
    shutil.rmtree(tmp_path / "iter_0000001")
    put(storage, 1, progress={"step": "saved anew"})
    shutil.rmtree(tmp_path / "iter_0000002")
    set_tag(storage, "dear", step=3)
    result = apply_retention(storage, plan)
    assert result.removed == [4]  # it had its tag when the plan was made
    assert result.spared == {
        1: "saved again since the plan was made",
        2: "another process removed it",
        3: "tagged dear since the plan was made",
    }


@pytest.mark.parametrize("last_look", ["read", "remove"])
def test_what_another_process_removes_between_two_looks_is_not_a_failure(
    tmp_path: Path, last_look: str
) -> None:
    """Of two removals, the second says what happened: no file of the step remains."""
    plan = plan_retention(fill(tmp_path, [1, 2, 3]), KeepLast(1))
    gone = tmp_path / "iter_0000001"

    def observe(operation: str, path: str, start: int, nbytes: int) -> None:
        if operation == last_look and path.startswith(gone.name):
            shutil.rmtree(gone, ignore_errors=True)

    result = apply_retention(PosixStorage(tmp_path, observer=observe), plan)
    assert not gone.exists()
    assert (result.removed, result.spared) == ([2], {1: "another process removed it"})
    assert result.failed == {}


def test_nothing_goes_once_the_newest_has_changed(tmp_path: Path) -> None:
    storage = fill(tmp_path, [1, 2, 3])
    plan = plan_retention(storage, KeepLast(1))
    shutil.rmtree(tmp_path / "iter_0000003")
    result = apply_retention(storage, plan)
    assert result.removed == []
    assert set(result.failed) == {1, 2}
    assert steps_of(storage) == [1, 2]
    put(storage, 3, progress={"another": 1})
    result = apply_retention(storage, plan)
    assert result.removed == []
    assert "has changed since" in result.spared[1]


def test_a_plan_that_would_remove_the_newest_is_not_carried_out(tmp_path: Path) -> None:
    """Plans are data: one that was made up or mixed up must not cost the newest either."""
    storage = fill(tmp_path, [1, 2, 3])
    plan = plan_retention(storage, KeepLast(3))
    forged = dataclasses.replace(
        plan,
        remove=tuple(
            Removal(step=s, directory=step_dir(s), stamp=plan.newest_stamp, stored_nbytes=0)
            for s in (2, 3)
        ),
    )
    result = apply_retention(storage, forged)
    assert result.removed == []
    assert steps_of(storage) == [1, 2, 3]


def test_a_tag_that_cannot_be_read_stops_everything(tmp_path: Path) -> None:
    storage = fill(tmp_path, [1, 2])
    set_tag(storage, "keep", step=1)
    (tmp_path / "tags/keep").write_bytes(b"one\n")
    with pytest.raises(CorruptionError, match="set the tag again"):
        plan_retention(storage, KeepLast(1))
    shutil.rmtree(tmp_path / "tags")
    (tmp_path / "tags").symlink_to(tmp_path)
    with pytest.raises(StorageError, match="link"):
        plan_retention(storage, KeepLast(1))


def test_the_pointer_file_stays_right(tmp_path: Path) -> None:
    storage = fill(tmp_path, [1, 2, 3])
    (tmp_path / LATEST).write_text("1\n")  # an older one than it should be
    prune(storage, KeepLast(1))
    assert (tmp_path / LATEST).read_text() == "3\n"
    for text in ("release\n", "77\n"):
        (tmp_path / LATEST).write_text(text)
        put(storage, 2)
        assert prune(storage, KeepLast(1)).removed == [2]
        assert (tmp_path / LATEST).read_text() == text
    (tmp_path / LATEST).unlink()
    put(storage, 2)
    assert prune(storage, KeepLast(1)).removed == [2]
    assert not (tmp_path / LATEST).exists()


def test_one_that_cannot_be_removed_does_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """E14: what has lost its name, and not its files, is told from what is still a checkpoint."""

    def refuse(operation: str, path: str, start: int, nbytes: int) -> None:
        if operation == "remove" and path == "iter_0000002":
            raise StorageError("no permission")

    fill(tmp_path, [1, 2, 3, 4])
    result = prune(PosixStorage(tmp_path, observer=refuse), KeepLast(1))
    assert result.removed == [1, 3]
    assert result.failed == {2: "no permission"}
    assert steps_of(PosixStorage(tmp_path)) == [2, 4]

    def refuse_files(name: str, parent: int) -> None:
        raise PermissionError(errno.EACCES, "no permission")

    with monkeypatch.context() as patch:
        patch.setattr(posix, "_remove_all", refuse_files)
        result = prune(PosixStorage(tmp_path), KeepLast(1))
    assert steps_of(PosixStorage(tmp_path)) == [4]
    assert result.removed == []
    assert "not a checkpoint any more, but files of it remain" in result.failed[2]
    (trash,) = tmp_path.glob(".trash-*")
    assert str(trash) in result.failed[2]
    assert [each.fate for each in repair(PosixStorage(tmp_path))] == ["removed"]


def test_a_directory_without_checkpoints_has_an_empty_plan(tmp_path: Path) -> None:
    for root in (tmp_path, tmp_path / "nothing"):
        plan = plan_retention(PosixStorage(root), KeepLast(1))
        assert (plan.keep, plan.remove, plan.newest) == ({}, (), None)
        assert apply_retention(PosixStorage(root), plan).removed == []


class Broken:
    """An observer that lets the storage fail at one operation, or from it on."""

    def __init__(self, at: int, *, for_good: bool) -> None:
        self.at, self.for_good, self.count = at, for_good, 0

    def __call__(self, operation: str, path: str, start: int, nbytes: int) -> None:
        self.count += 1
        if self.count == self.at or (self.for_good and self.count > self.at):
            raise StorageError(f"{operation} {path}: the storage failed")


@pytest.mark.parametrize("for_good", [False, True])
def test_whatever_fails_the_newest_sound_checkpoint_stays(tmp_path: Path, for_good: bool) -> None:
    """The storage fails at each single operation: nothing that should stay is harmed."""
    template = fill(tmp_path / "template", [1, 2, 3, 4, 5])
    set_tag(template, "best", step=1)
    (template.root / LATEST).write_text("2\n")
    damage(tmp_path / "template", 5, "index")
    counter = Broken(0, for_good=False)
    shutil.copytree(template.root, tmp_path / "count")
    prune(PosixStorage(tmp_path / "count", observer=counter), KeepTagged())
    assert counter.count > 30
    for at in range(1, counter.count + 1):
        root = tmp_path / f"run-{at}"
        shutil.copytree(template.root, root)
        try:
            policy = KeepTagged()
            prune(PosixStorage(root, observer=Broken(at, for_good=for_good)), policy)
        except (StorageError, CorruptionError):
            pass
        storage = PosixStorage(root)
        assert {1, 4, 5} <= set(steps_of(storage)), at
        assert is_whole(storage, 1)
        assert is_whole(storage, 4)
        shutil.rmtree(root)


steps_and_damages = st.dictionaries(
    st.integers(0, 30), st.sampled_from([None, None, None, *DAMAGES]), min_size=1, max_size=8
)


@drawn(
    quick=25,
    slow=60,
    content=steps_and_damages,
    last=st.none() | st.integers(1, 4),
    every=st.none() | st.integers(1, 5),
    tagged=st.sets(st.integers(0, 30)),
)
def test_against_a_plain_statement_of_the_rules(
    content: dict[int, str | None], last: int | None, every: int | None, tagged: set[int]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        storage = fill(Path(folder), sorted(content))
        for step in sorted(tagged & set(content)):
            set_tag(storage, f"t{step}", step=step)
        policy: KeepPolicy = KeepTagged()
        policy = policy if last is None else policy | KeepLast(last)
        policy = policy if every is None else KeepEvery(every) | policy
        for step, kind in content.items():
            if kind is not None:
                damage(Path(folder), step, kind)
        sound = [step for step, kind in content.items() if kind is None]
        stay = set(content)
        if sound:
            newest = max(sound)
            pool = sorted(s for s in content if s <= newest and content[s] != "manifest")
            chosen = {newest} | (tagged & set(pool))
            chosen |= set(pool[-last:]) if last is not None else set()
            chosen |= {s for s in pool if s % every == 0} if every is not None else set()
            stay -= set(pool) - chosen
        result = prune(storage, policy)
        assert set(steps_of(storage)) == stay
        assert set(result.removed) == set(content) - stay
        assert not result.failed
        assert not result.spared
