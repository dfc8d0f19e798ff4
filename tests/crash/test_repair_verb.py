"""`holdfast repair` as a person and as a script use it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from holdfast import Checkpointer
from holdfast.errors import HoldfastError
from holdfast.writer.records import ALIVE_FILE
from tests.cli.conftest import Holdfast, holdfast
from tests.crash.common import state_of, versions

__all__ = ["holdfast"]


class _Stop(Exception):
    pass


def _leave_behind(root: Path, step: int) -> Path:
    """A save with all its records, whose commit never came."""

    def stop(*args: object, **kwargs: object) -> None:
        raise _Stop

    with pytest.MonkeyPatch.context() as monkey:
        monkey.setattr("holdfast.writer.job.commit_save", stop)
        monkey.setattr("holdfast.checkpoint.save.saver.discard_save", lambda *a: None)
        with pytest.raises(HoldfastError, match="_Stop"):
            Checkpointer(root).save(step, state_of(step))
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
    assert "nothing was changed: 4 leftovers" in said.out
    assert complete.exists()
    assert broken.exists()
    found = holdfast("repair", root, "--json").json
    fates = {item["step"]: item["fate"] for item in found["leftovers"]}
    assert fates == {2: "finished", 3: "removed", 4: "alive", None: "removed"}
    assert not found["dry_run"]
    assert versions(root) == {1: 1, 2: 2}
    assert [path.name for path in root.glob(".saving-*")] == [young.name]


def test_mistakes_are_one_line(holdfast: Holdfast, tmp_path: Path) -> None:
    assert holdfast("repair", tmp_path / "nowhere").code == 2
    Checkpointer(tmp_path).save(1, state_of(1))
    said = holdfast("repair", tmp_path / "iter_0000001")
    assert said.code == 2
    assert "one checkpoint" in said.err
