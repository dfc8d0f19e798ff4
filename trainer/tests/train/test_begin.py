"""Which checkpoint --load means, and what --save must not run into."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from holdfast.checkpoint import Checkpointer
from holdfast.errors import ConfigError, HoldfastError, StorageError
from holdfast.parallel import Layout, ProcessGroups
from holdfast_trainer.train.config import CheckpointConfig
from holdfast_trainer.train.resume import find_checkpoint, step_to_load
from tests.harness import RankContext, run_ranks


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    root = tmp_path / "run"
    with Checkpointer(root) as checkpointer:
        for step in (10, 20):
            checkpointer.save(step, {"x": {"n": step}})
    return root


def test_the_newest_or_the_named_step_is_taken(saved: Path) -> None:
    assert step_to_load(CheckpointConfig(load=saved)) == 20
    assert step_to_load(CheckpointConfig(load=saved, load_step=10)) == 10
    with pytest.raises(ConfigError, match="it has 10, 20"):
        step_to_load(CheckpointConfig(load=saved, load_step=15))
    assert step_to_load(CheckpointConfig()) is None


def test_an_uncommitted_step_is_not_taken(saved: Path) -> None:
    (saved / "iter_0000030").mkdir()
    (saved / ".saving-iter_0000040-abc").mkdir()
    assert step_to_load(CheckpointConfig(load=saved)) == 20


def test_nothing_there_starts_afresh_or_fails_by_choice(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    own = tmp_path / "not-yet"
    for config in (CheckpointConfig(load=empty), CheckpointConfig(load=own, save=own)):
        assert step_to_load(config) is None
    own.rmdir()
    for config in (CheckpointConfig(load=empty), CheckpointConfig(load=own, save=own)):
        with pytest.raises(ConfigError, match="--exit-on-missing-checkpoint is set"):
            step_to_load(replace(config, exit_on_missing_checkpoint=True))
    (empty / ".saving-iter_0000040-abc").mkdir()
    assert step_to_load(CheckpointConfig(load=empty)) is None


def test_what_is_no_checkpoint_directory_is_refused(saved: Path, tmp_path: Path) -> None:
    junk = tmp_path / "junk"
    junk.mkdir()
    (junk / "notes.txt").write_text("x")
    for load, said in (
        (tmp_path / "nowhere", "no such directory"),
        (junk, "not a checkpoint directory"),
        (junk / "notes.txt", "not a directory"),
        (saved / "iter_0000010", "name its parent"),
    ):
        with pytest.raises(ConfigError, match=said):
            step_to_load(CheckpointConfig(load=load))


def test_a_save_that_would_fail_later_fails_now(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="already holds step 20 and this run starts at step 0"):
        step_to_load(CheckpointConfig(save=saved))
    with pytest.raises(ConfigError, match="starts at step 10"):
        step_to_load(CheckpointConfig(load=saved, load_step=10, save=saved))
    assert step_to_load(CheckpointConfig(load=saved, save=saved)) == 20
    other = tmp_path / "other"
    assert step_to_load(CheckpointConfig(load=saved, load_step=10, save=other)) == 10
    assert list(other.iterdir()) == []
    (tmp_path / "file").write_text("x")
    with pytest.raises(StorageError, match="cannot be written"):
        step_to_load(CheckpointConfig(save=tmp_path / "file" / "below"))


def look(rank: RankContext, load: str) -> tuple[int | None, str]:
    """Only rank 0 sees the directory that it is given; the others see another."""
    seen = load if rank.rank == 0 else "/nowhere"
    with ProcessGroups.create(Layout(dp=rank.num_ranks)) as groups:
        find = partial(find_checkpoint, wait=lambda: None, control=groups.control)
        begin = find(CheckpointConfig(load=Path(seen)))
        step = None if begin is None else begin.step
        mirrored = "/nowhere" if rank.rank == 0 else load
        try:
            find(CheckpointConfig(load=Path(mirrored)))
        except HoldfastError as error:
            return step, f"{type(error).__name__}: {error}"
    return step, "nothing"


def test_one_rank_looks_and_speaks_for_all(saved: Path) -> None:
    for step, said in run_ranks(2, look, str(saved)).results:
        assert step == 20
        assert said.startswith("ConfigError: --load /nowhere: no such directory")
