"""Spoilt plans and done-records of a save under way: refused by name, never committed wrong."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import strategies as st

from holdfast import Checkpointer, PosixStorage
from holdfast.errors import HoldfastError
from holdfast.format.digest import digest128
from holdfast.format.names import list_steps, step_dir
from holdfast.writer.commit import commit_save
from holdfast.writer.leftovers import repair
from holdfast.writer.records import (
    HEADER_FILE,
    PLAN_FILE,
    SaveHeader,
    decode_plan,
    done_file,
    seal,
    unseal,
)
from tests.crash.common import state_of, versions
from tests.drawn import drawn
from tests.format.fuzz.making import HOSTILE, byte_changes

_FILES = (PLAN_FILE, HEADER_FILE, done_file(0))
_WORDS = [0, 1, 2, 5, 2**31, 2**62, 2**63 - 1, -1, -(2**63)]


class _Stop(Exception):
    pass


@pytest.fixture(scope="module")
def complete(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with step 1 committed and step 2 complete but for its commit."""

    def stop(*args: object, **kwargs: object) -> None:
        raise _Stop

    root = tmp_path_factory.mktemp("complete") / "run"
    Checkpointer(root).save(1, state_of(10))
    with pytest.MonkeyPatch.context() as monkey:
        monkey.setattr("holdfast.writer.job.commit_save", stop)
        monkey.setattr("holdfast.checkpoint.save.saver.discard_save", lambda *a: None)
        with pytest.raises(HoldfastError, match="_Stop"):
            Checkpointer(root).save(2, state_of(20))
    return root


def _copy(complete: Path, tmp_path: Path) -> tuple[Path, Path]:
    root = tmp_path / "run"
    shutil.rmtree(root, ignore_errors=True)
    shutil.copytree(complete, root)
    return root, next(root.glob(".saving-*"))


def _commit(root: Path, saving: Path) -> None:
    """As a writer commits, from what is on storage."""
    storage = PosixStorage(root)
    data = (saving / PLAN_FILE).read_bytes()
    plan = decode_plan(data, where="plan")
    header = unseal((saving / HEADER_FILE).read_bytes(), SaveHeader, where="header")
    commit_save(storage, saving.name, plan=plan, header=header)


def _spoil_value(draw: st.DrawFn, value: Any) -> Any:
    if isinstance(value, bytes):
        if len(value) % 8 == 0 and value and draw(st.booleans()):
            words = np.frombuffer(value, dtype=np.int64).copy()
            words[draw(st.integers(0, len(words) - 1))] = draw(st.sampled_from(_WORDS))
            return words.tobytes()
        return draw(byte_changes(value))
    if isinstance(value, dict) and value:
        name = draw(st.sampled_from(sorted(value)))
        return {**value, name: _spoil_value(draw, value[name])}
    if isinstance(value, list) and value and draw(st.booleans()):
        place = draw(st.integers(0, len(value) - 1))
        return [*value[:place], _spoil_value(draw, value[place]), *value[place + 1 :]]
    hostile = [item for item in HOSTILE if not isinstance(item, int) or abs(item) < 2**63]
    return draw(st.sampled_from(hostile))


def _spoil_record(draw: st.DrawFn, path: Path) -> None:
    tree = msgspec.msgpack.decode(path.read_bytes()[:-32])
    name = draw(st.sampled_from(sorted(tree)))
    tree[name] = _spoil_value(draw, tree[name])
    path.write_bytes(seal(msgspec.msgpack.encode(tree)))


@drawn(quick=40, slow=150, data=st.data())
def test_changed_records_are_never_committed(
    complete: Path, tmp_path: Path, data: st.DataObject
) -> None:
    """Bytes changed: the digest at the end tells, for a commit and for a repair."""
    root, saving = _copy(complete, tmp_path)
    path = saving / data.draw(st.sampled_from(_FILES))
    before = path.read_bytes()
    path.write_bytes(data.draw(byte_changes(before)))
    if path.read_bytes() == before:
        return
    with pytest.raises(HoldfastError):
        _commit(root, saving)
    fates = repair(PosixStorage(root), alive_s=0.0)
    assert [fate.fate for fate in fates] == ["removed"]
    assert versions(root) == {1: 10}


@drawn(quick=40, slow=150, data=st.data())
def test_records_that_lie_under_a_right_digest(
    complete: Path, tmp_path: Path, data: st.DataObject
) -> None:
    """The commit refuses with an error of its own, or commits what can be read back."""
    root, saving = _copy(complete, tmp_path)
    spoilt = data.draw(st.sampled_from(_FILES))
    _spoil_record(data.draw, saving / spoilt)
    if spoilt == PLAN_FILE and data.draw(st.booleans()):
        record = saving / done_file(0)
        tree = msgspec.msgpack.decode(record.read_bytes()[:-32])
        tree["plan_digest"] = digest128((saving / PLAN_FILE).read_bytes())
        record.write_bytes(seal(msgspec.msgpack.encode(tree)))
    storage = PosixStorage(root)
    try:
        _commit(root, saving)
    except HoldfastError:
        fates = repair(storage, alive_s=0.0)
        assert all(fate.fate in ("removed", "finished", "kept") for fate in fates)
    assert 1 in list_steps(storage)
    assert versions_of_first(root) == 10


def versions_of_first(root: Path) -> int:
    """The version of the checkpoint that was there before; it must be whole."""
    for path in root.glob("iter_*"):
        if path.name != step_dir(1):
            shutil.rmtree(path)
    return versions(root)[1]
