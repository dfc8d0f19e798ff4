"""`holdfast repair` as a person and as a script use it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from holdfast import Checkpointer, PosixStorage
from holdfast.errors import HoldfastError
from holdfast.format.versions import read_lease
from holdfast.writer.records import ALIVE_FILE
from tests.cli.conftest import Holdfast, holdfast
from tests.crash.common import state_of, versions

__all__ = ["holdfast"]


class _Stop(Exception):
    pass


def _leave_behind(root: Path, step: int, **options: bool) -> Path:
    """A save with all its records, whose commit never came."""

    def stop(*args: object, **kwargs: object) -> None:
        raise _Stop

    with pytest.MonkeyPatch.context() as monkey:
        monkey.setattr("holdfast.writer.job.commit_save", stop)
        monkey.setattr("holdfast.checkpoint.save.saver.discard_save", lambda *a: None)
        with pytest.raises(HoldfastError, match="_Stop"):
            Checkpointer(root).save(step, state_of(step), **options)
    return next(root.glob(f".saving-iter_{step:07d}-*"))


def _age(path: Path) -> None:
    """Make a leftover look abandoned: by its files' times, and by the time in its sign of life."""
    if (path / ALIVE_FILE).exists():
        (path / ALIVE_FILE).write_text("1")
    for place in (path, *path.rglob("*")):
        os.utime(place, (1, 1))


def test_leftovers_are_told_and_dealt_with(holdfast: Holdfast, tmp_path: Path) -> None:
    root = tmp_path / "run"
    Checkpointer(root).save(1, state_of(1))
    assert "nothing is left behind" in holdfast("repair", root).out
    complete = _leave_behind(root, 2)
    broken = _leave_behind(root, 3)
    young = _leave_behind(root, 4)
    (broken / "done" / "00000.msgpack").unlink()
    _age(complete)
    _age(broken)
    (root / ".trash-x").mkdir()
    said = holdfast("repair", root, "--dry-run")
    assert (said.code, said.err) == (0, "")
    assert "would be finished" in said.out
    assert "ranks [0] did not finish writing" in said.out
    assert (
        "nothing was changed: 4 leftovers: 1 would be finished, 2 would be removed, 1 left alone"
        in said.out
    )
    assert complete.exists()
    assert broken.exists()
    found = holdfast("repair", root, "--json").json
    fates = {item["step"]: item["fate"] for item in found["leftovers"]}
    assert fates == {2: "finished", 3: "removed", 4: "alive", None: "removed"}
    assert not found["dry_run"]
    assert versions(root) == {1: 1, 2: 2}
    assert [path.name for path in root.glob(".saving-*")] == [young.name]


def test_what_a_run_has_given_up_is_not_finished_later(holdfast: Holdfast, tmp_path: Path) -> None:
    """E14: the next load would commit it, and continue the course that was given up.

    So would a version whose removal or replacement was interrupted: a load gives it its name back.
    """
    root = tmp_path / "run"
    with Checkpointer(root) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state_of(step))
    complete, below = _leave_behind(root, 3), _leave_behind(root, 1, overwrite=True)
    for path in (complete, below):
        _age(path)
    kept = holdfast("prune", root, "--after", "0", "--yes")
    assert "no checkpoint up to step 0 proves sound" in kept.out
    assert holdfast("prune", root, "--after", "1", "--dry-run").out.count("goes") == 2
    assert complete.exists()
    result = holdfast("prune", root, "--after", "1", "--yes")
    assert "removed 1 checkpoint and 1 unfinished save" in result.out
    assert not complete.exists()
    assert below.exists()
    assert Checkpointer(root).latest() == 1
    young = _leave_behind(root, 5)
    os.utime(young)
    said = holdfast("prune", root, "--after", "1", "--yes", "--json").json
    assert [item["step"] for item in said["unfinished_saves"]] == [5]
    aside = [root / f".old-iter_{step:07d}-{'0' * 8}" for step in (1, 5, 6)]
    for path in aside:
        shutil.copytree(root / "iter_0000001", path)
    assert holdfast("prune", root, "--after", "1", "--yes").code == 0
    assert [path.exists() for path in aside] == [True, True, False]
    _age(young)
    with read_lease(PosixStorage(root), "iter_0000005"):
        assert holdfast("prune", root, "--after", "1", "--yes").code == 0
        assert len([*root.glob(".replaced-iter_0000005-*")]) == 1
    assert not aside[1].exists()
    state = state_of(0)
    assert Checkpointer(root).load(state).step == 1


def test_what_a_killed_tag_left_goes(holdfast: Holdfast, tmp_path: Path) -> None:
    Checkpointer(tmp_path).save(1, state_of(1))
    assert holdfast("tag", tmp_path, 1, "best").code == 0
    left = tmp_path / "tags" / ".tmp-0123abcd-best"
    left.write_text("1")
    assert "about to get its name" in holdfast("repair", tmp_path).out
    assert left.exists()
    os.utime(left, (1, 1))
    assert "it never got its name" in holdfast("repair", tmp_path).out
    assert [path.name for path in (tmp_path / "tags").iterdir()] == ["best"]


def test_mistakes_are_one_line(holdfast: Holdfast, tmp_path: Path) -> None:
    assert holdfast("repair", tmp_path / "nowhere").code == 2
    Checkpointer(tmp_path).save(1, state_of(1))
    said = holdfast("repair", tmp_path / "iter_0000001")
    assert said.code == 2
    assert "one checkpoint" in said.err
