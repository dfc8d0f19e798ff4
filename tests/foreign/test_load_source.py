"""`load(source=…)`: another run, a checkpoint of it, or a foreign one, the same on all ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from holdfast import (
    Checkpointer,
    ConfigError,
    EverySteps,
    Layout,
    PosixStorage,
    ProcessGroups,
    StorageError,
)
from holdfast.foreign import NameMap, open_catalog, rename
from tests.harness import RankContext, run_ranks


def save(root: Path, *steps: int) -> None:
    with Checkpointer(root) as checkpointer:
        for step in steps:
            checkpointer.save(step, {"model": {"w": torch.full((4,), float(step))}})


def test_another_run_or_one_of_its_steps(tmp_path: Path) -> None:
    save(tmp_path / "old", 3, 5)
    checkpointer = Checkpointer(tmp_path / "new", save_when=EverySteps(5))
    for source, step, expected in (
        (tmp_path / "old", None, 5),
        (tmp_path / "old", 3, 3),
        (str(tmp_path / "old/iter_0000003"), None, 3),
        (PosixStorage(tmp_path / "old"), None, 5),
    ):
        target = torch.zeros(4)
        report = checkpointer.load({"model": {"w": target}}, source=source, step=step)
        assert (report.step, target.tolist()) == (expected, [expected] * 4)
        assert report.is_verified
    # What was loaded from elsewhere is not saved here.
    assert checkpointer.should_save(5)
    assert not (tmp_path / "new").exists()
    with pytest.raises(ConfigError, match="of step 3, not of step 5"):
        checkpointer.load({}, source=tmp_path / "old/iter_0000003", step=5)
    with pytest.raises(StorageError, match="no committed checkpoint of step 4"):
        checkpointer.load({}, source=tmp_path / "old", step=4)


def test_names_are_mapped_from_any_source(tmp_path: Path) -> None:
    save(tmp_path / "old", 3)
    save_file({"w": torch.full((4,), 3.0)}, tmp_path / "x.safetensors")
    renamed = NameMap([rename("w", "weight")])
    checkpointer = Checkpointer(tmp_path / "new")
    sources = (
        tmp_path / "old",
        tmp_path / "x.safetensors",
        open_catalog(tmp_path / "x.safetensors"),
    )
    for source in sources:
        target = torch.zeros(4)
        report = checkpointer.load({"model": {"weight": target}}, source=source, names=renamed)
        assert target.tolist() == [3.0] * 4
        assert not report.is_verified
    toml = tmp_path / "map.toml"
    toml.write_text('[[rule]]\nrename = "w"\nto = "weight"\n')
    assert "weight" in checkpointer.load_all(source=sources[0], names=toml).values["model"]
    with pytest.raises(ConfigError, match="give source="):
        checkpointer.load({}, names=renamed)
    with pytest.raises(ConfigError, match="neither a file with a name map nor one of the presets"):
        checkpointer.load({}, source=sources[0], names="llama-hf-to-nothing")


def test_damage_of_a_mapped_source_is_noticed(tmp_path: Path) -> None:
    """The digests of our own format are checked on the way, although the report promises none."""
    save(tmp_path / "old", 3)
    (file,) = (tmp_path / "old").rglob("data/*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(Exception, match="damaged"):
        Checkpointer(tmp_path / "new").load(
            {"model": {"weight": torch.zeros(4)}},
            source=tmp_path / "old",
            names=NameMap([rename("w", "weight")]),
        )


def load_apart(context: RankContext, paths: list[str]) -> str:
    """Load what this rank names; the name and message of the error."""
    with ProcessGroups.create(Layout(dp=context.num_ranks)) as groups:
        checkpointer = Checkpointer(Path(paths[0]) / "none", groups=groups)
        try:
            checkpointer.load({"model": {"w": torch.zeros(4)}}, source=paths[context.rank])
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "loaded"


def test_ranks_that_name_different_sources_are_refused_on_all(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        save_file({"w": torch.ones(4)}, tmp_path / name / "x.safetensors")
    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    for error in run_ranks(2, load_apart, [one, two]).results:
        assert error.startswith("PlanError")
        assert "source" in error
    for error in run_ranks(2, load_apart, [one, str(tmp_path / "three")]).results:
        assert error.startswith("ConfigError")
        assert "three does not exist" in error
    assert run_ranks(2, load_apart, [one, one]).results == ["loaded", "loaded"]
