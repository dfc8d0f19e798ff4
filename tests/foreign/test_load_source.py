"""`load(source=…)`: another run, a checkpoint of it, or a foreign one, the same on all ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

from holdfast import (
    Checkpointer,
    ConfigError,
    EverySteps,
    Layout,
    PosixStorage,
    ProcessGroups,
    StorageError,
)
from holdfast.foreign import NameMap, open_catalog, rename, rotary
from holdfast.foreign.convert import open_any
from holdfast.foreign.location import Folder
from holdfast.foreign.rules import ORDERS
from tests.cli.conftest import Holdfast, holdfast
from tests.harness import RankContext, run_ranks

__all__ = ["holdfast"]


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
    one = tmp_path / "old/iter_0000003"
    for names in (None, NameMap([rename("w", "w")])):
        with pytest.raises(ConfigError, match="of step 3, not of step 5"):
            checkpointer.load({}, source=one, step=5, names=names)
    with pytest.raises(ConfigError, match="of step 3, not of step 5"), open_any(one, step=5):
        pass
    with pytest.raises(StorageError, match="no committed checkpoint of step 4"):
        checkpointer.load({}, source=tmp_path / "old", step=4)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("is_megatron", [True, False])
def test_a_step_of_a_run_of_another_program_is_never_another(
    tmp_path: Path, holdfast: Holdfast, is_megatron: bool
) -> None:
    """X1: a load and a conversion find the step that is asked for, or refuse; a number for our own
    checkpoint is given to one checkpoint alone."""
    run = tmp_path / "run"
    for step in (4, 8):
        one = run / f"iter_{step:07}"
        dcp.save({"w": torch.full((4,), float(step))}, checkpoint_id=one)
        if is_megatron:
            (one / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
            torch.save({"iteration": step}, one / "common.pt")
    (run / "latest_checkpointed_iteration.txt").write_text("8")
    checkpointer = Checkpointer(tmp_path / "never")
    words = ("convert", run, tmp_path / "hf", "--to", "huggingface", "--step")
    own = ("convert", run, tmp_path / "own", "--to", "holdfast", "--step")
    assert checkpointer.load_all(source=run, step=4).step == 4
    assert checkpointer.load_all(source=run / "iter_0000004").step == 4
    for done in (holdfast(*words, 4), holdfast(*own, 4), holdfast("show", run, "--step", 4)):
        assert done.code == 0, done.err
    assert load_file(tmp_path / "hf/model.safetensors")["w"].tolist() == [4.0] * 4
    ours = checkpointer.load_all(source=tmp_path / "own")
    assert (ours.step, ours.values["model"]["w"].tolist()) == (4, [4.0] * 4)
    # There is no step 5, although the place is read as its latest step if none is asked for.
    for done in (holdfast(*words, 5), holdfast(*own, 5), holdfast("show", run, "--step", 5)):
        assert done.code == 2
    with pytest.raises((StorageError, ConfigError)):
        checkpointer.load_all(source=run, step=5)
    one = run / "iter_0000004"
    done = holdfast("convert", one, tmp_path / "one", "--to", "dcp", "--step", 5)
    assert (done.code, f"{one} has step 4, not 5" in done.err) == (2, True)
    assert holdfast("convert", one, tmp_path / "own", "--to", "holdfast", "--step", 5).code == 0
    ours = checkpointer.load_all(source=tmp_path / "own")
    assert (ours.step, ours.values["model"]["w"].tolist()) == (5, [4.0] * 4)


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


def load_and_count(context: RankContext, paths: list[str]) -> list[tuple[Counter[str], str]]:
    """Load `w` of each source; how often this rank asked the folder, by method, and the error."""
    asked: Counter[str] = Counter()

    def count(name: str) -> None:
        method = getattr(Folder, name)

        def counted(self: Folder, *args: Any, **kwargs: Any) -> Any:
            asked[name] += 1
            return method(self, *args, **kwargs)

        setattr(Folder, name, counted)

    for name in ("list", "exists", "is_dir", "size", "read", "open", "modified"):
        count(name)
    results = []
    with ProcessGroups.create(Layout(dp=context.num_ranks)) as groups:
        checkpointer = Checkpointer(Path(paths[0]) / "none", groups=groups)
        for path in paths:
            asked.clear()
            target = torch.zeros(64, 64)
            try:
                checkpointer.load({"model": {"w": target}}, source=path, ignore_unexpected=True)
            except Exception as error:
                results.append((Counter(asked), f"{type(error).__name__}: {error}"))
                continue
            assert target.eq(3.0).all()
            results.append((Counter(asked), ""))
    return results


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_one_rank_opens_a_foreign_checkpoint_for_all(tmp_path: Path) -> None:
    """The others ask for nothing but the bytes of their tensors; what is wrong is so on all."""
    import torch.distributed.checkpoint as dcp  # here, because each rank imports this module

    weights = {"w": torch.full((64, 64), 3.0), "more": torch.ones(3)}
    paths = [tmp_path / name for name in ("hf", "dcp", "torch/all.pt", "bad", "none")]
    for path in (*paths[:2], tmp_path / "torch", paths[3]):
        path.mkdir()
    save_file(weights, paths[0] / "x.safetensors")
    dcp.save({"model": weights, "lr": 0.5}, checkpoint_id=paths[1])
    torch.save({"model": weights}, paths[2])
    dcp.save({"model": weights, "lr": 0.5}, checkpoint_id=paths[3])
    metadata = paths[3] / ".metadata"
    metadata.write_bytes(metadata.read_bytes()[:-20])
    first, *others = run_ranks(3, load_and_count, [str(path) for path in paths]).results
    for number, (asked, error) in enumerate(first):
        is_good = number < 3
        assert (asked.total() > 1) == (number < 4)
        assert (error == "") == is_good, error
        for result in others:
            assert result[number] == (Counter({"open": 1} if is_good else {}), error)
    assert first[3][1].startswith("CorruptionError")
    assert first[4][1].startswith("ConfigError")


def load_apart(context: RankContext, paths: list[str], heads: Sequence[int] = ()) -> str:
    """Load what this rank names; the name and message of the error."""
    turned = NameMap([rotary("w", order=ORDERS[0], heads="n")], variables={"n": None})
    names = turned.given(n=heads[context.rank]) if heads else None
    with ProcessGroups.create(Layout(dp=context.num_ranks)) as groups:
        checkpointer = Checkpointer(Path(paths[0]) / "none", groups=groups)
        try:
            state = {"model": {"w": torch.zeros(4)}}
            checkpointer.load(state, source=paths[context.rank], names=names)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "loaded"


def test_ranks_that_name_different_sources_are_refused_on_all(tmp_path: Path) -> None:
    """X1: also such that map its names in other ways."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        save_file({"w": torch.ones(4)}, tmp_path / name / "x.safetensors")
    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    for error in run_ranks(2, load_apart, [one, two]).results:
        assert error.startswith("PlanError")
        assert "source" in error
    # Equal shapes, and each rank would have its rows in another order.
    for error in run_ranks(2, load_apart, [one, one], [1, 2]).results:
        assert error.startswith("PlanError")
        assert f"{one} by name map (" in error
    three = str(tmp_path / "three")
    for error in run_ranks(2, load_apart, [three, three]).results:
        assert error.startswith("ConfigError")
        assert "three does not exist" in error
    assert run_ranks(2, load_apart, [one, one], [2, 2]).results == ["loaded", "loaded"]
