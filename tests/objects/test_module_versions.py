"""Modules whose class has another version than the saved one: torch's own load is the twin."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

from holdfast import (
    Checkpointer,
    FromPart,
    Layout,
    MismatchError,
    ModuleState,
    ProcessGroups,
)
from holdfast.cli.main import main
from holdfast.format.manifest import decode_manifest, encode_manifest
from tests.harness import RankContext, run_ranks
from tests.objects.modules import randomise

WIDTH = 4


class First(nn.Linear):
    """As it was saved: it says nothing of a version."""


class Second(nn.Linear):
    """Its weight means twice what that of the first version did; it has learned to count, too."""

    _version = 2

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.register_buffer("seen", torch.zeros(()))

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *rest: Any) -> None:
        if metadata.get("version", 1) < 2:
            state[f"{prefix}weight"] = state[f"{prefix}weight"] * 2
            state.setdefault(f"{prefix}seen", torch.ones(()))
        super()._load_from_state_dict(state, prefix, metadata, *rest)


class Third(First):
    """A version that knows of none before: nothing is converted."""

    _version = 3


class Net(nn.Module):
    """A layer of the class, next to one of torch's that has another version than 1."""

    def __init__(self, kind: type[nn.Linear]) -> None:
        super().__init__()
        self.layer = kind(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)


def net(kind: type[nn.Linear], seed: int) -> Net:
    made = Net(kind)
    randomise(made, seed)
    return made


def wrapped(model: nn.Module) -> nn.Module:
    outer = nn.Sequential()
    outer.add_module("inner", model)
    return outer


def forget_versions(root: Path) -> None:
    """Make a checkpoint one of before versions were noted."""
    path = root / "iter_0000001" / "manifest.json"
    manifest = decode_manifest(path.read_bytes())
    path.write_bytes(encode_manifest(msgspec.structs.replace(manifest, versions=None)))


def tensors(model: nn.Module) -> list[torch.Tensor]:
    return [each.detach().clone() for each in (*model.parameters(), *model.buffers())]


WAYS: dict[str, tuple[Callable[[Net], Any], Callable[[Net], Any], str]] = {
    "whole": (lambda m: m, lambda m: m, "model"),
    "compiled": (lambda m: m, torch.compile, "model"),
    "branch": (wrapped, lambda m: FromPart("model.inner", m), "model"),
    "prefix": (wrapped, lambda m: ModuleState(m, prefix="inner."), "model.inner"),
    "below": (
        lambda m: ModuleState(m, prefix="a.b."),
        lambda m: FromPart("model.a", wrapped_as_b(m)),
        "model.b",
    ),
}


def wrapped_as_b(model: nn.Module) -> nn.Module:
    outer = nn.Sequential()
    outer.add_module("b", model)
    return outer


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("saved", "loaded"), [(First, Second), (First, Third), (Second, Second)])
def test_a_module_converts_what_an_earlier_version_has_saved(
    saved: type[nn.Linear], loaded: type[nn.Linear], way: str, tmp_path: Path
) -> None:
    """O2: as torch's own load does, and what was converted is handed over, not called loaded."""
    save, load, where = WAYS[way]
    true, twin = net(saved, 1), net(loaded, 2)
    expected = copy.deepcopy(twin)
    expected.load_state_dict(true.state_dict(), strict=False)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"model": save(true)})
        report = checkpointer.load({"model": load(twin)}, allow_missing=["*.seen"])
    for now, right in zip(tensors(twin), tensors(expected), strict=True):
        assert torch.equal(now, right)
    is_converted = (saved, loaded) == (First, Second)
    names = [f"{where}.layer.{name}" for name in ("bias", "weight")] if is_converted else []
    assert list(report.handed_over) == names
    assert not set(names) & set(report.loaded)


def test_what_a_later_version_has_saved_is_refused_by_a_class_that_cannot_know(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """O2: by name, with nothing written; a class that takes its entries itself is the judge."""
    true, twin = net(Third, 1), net(First, 2)
    before = tensors(twin)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"model": true})
        same = net(First, 1)
        same.load_state_dict(true.state_dict())
        checkpointer.save(2, {"model": same})
        assert main(["diff", f"{tmp_path}/iter_0000001", f"{tmp_path}/iter_0000002"]) == 1
        assert "$versions.model.layer" in capsys.readouterr().out
        with pytest.raises(MismatchError, match=r"First at 'layer' was saved by version 3.*is ver"):
            checkpointer.load({"model": twin}, step=1)
        assert all(map(torch.equal, before, tensors(twin)))
        twin.layer._version = 3
        checkpointer.load({"model": twin}, step=1)
        assert all(map(torch.equal, tensors(true), tensors(twin)))
        second = net(Second, 3)  # its loader is told 3, and converts nothing
        checkpointer.load({"model": second}, step=1, allow_missing=["*.seen"])
        assert torch.equal(second.layer.weight, true.layer.weight)


def test_a_new_module_has_no_stored_version_and_neither_has_an_old_checkpoint(
    tmp_path: Path,
) -> None:
    """O2: where the version of the saved class is not known, nothing is converted."""
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"model": nn.Sequential(First(WIDTH, WIDTH))})
        twin = nn.Sequential(First(WIDTH, WIDTH), Second(WIDTH, WIDTH))
        before = twin[1].weight.detach().clone()
        checkpointer.load({"model": twin}, allow_missing=["model.1.*"])
        assert torch.equal(twin[1].weight, before)
        checkpointer.save(1, {"model": net(First, 1)}, overwrite=True)
    forget_versions(tmp_path)
    with Checkpointer(tmp_path) as checkpointer:
        old = net(Second, 2)
        report = checkpointer.load({"model": old}, allow_missing=["*.seen"])
        assert torch.equal(old.layer.weight, net(First, 1).layer.weight)
        assert report.handed_over == ()


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(("saved", "loaded"), [(First, Second), (Second, Second)])
def test_files_of_torch_state_versions_there_and_back(
    saved: type[nn.Linear], loaded: type[nn.Linear], nested: bool, tmp_path: Path
) -> None:
    """O2: a `.pt` file is loaded as torch loads it, and so is one that a conversion has written."""
    true, twin = net(saved, 1), net(loaded, 2)
    expected = copy.deepcopy(twin)
    expected.load_state_dict(true.state_dict(), strict=False)
    first, last = tmp_path / "first.pt", tmp_path / "last.pt"
    state = true.state_dict()
    torch.save({"nets": {"first": state, "again": state}, "loss": 0.5} if nested else state, first)
    whole = ["--whole-tree"] if nested else []
    assert main(["convert", str(first), str(tmp_path / "own"), "--to", "holdfast"]) == 0
    assert main(["convert", str(tmp_path / "own"), str(last), "--to", "torch_save", *whole]) == 0
    path = "nets.first" if nested else "model"
    for file in (first, tmp_path / "own", last):
        with Checkpointer(tmp_path / "other") as checkpointer:
            module = copy.deepcopy(twin)
            report = checkpointer.load(
                {"model": FromPart(path, ModuleState(module))},
                source=file,
                allow_missing=["*.seen"],
            )
        for now, right in zip(tensors(module), tensors(expected), strict=True):
            assert torch.equal(now, right)
        assert bool(report.handed_over) == (saved is First)
    read = torch.load(last)
    back = copy.deepcopy(twin)
    back.load_state_dict(read["nets"]["first"] if nested else read, strict=False)
    for now, right in zip(tensors(back), tensors(expected), strict=True):
        assert torch.equal(now, right)


def test_versions_that_a_format_has_no_place_for_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """O2: by the conversion, and by the load of what may have to be converted."""
    with Checkpointer(tmp_path / "own") as checkpointer:
        checkpointer.save(1, {"model": net(Second, 1)})
        for form in ("huggingface", "dcp"):
            out = tmp_path / form
            assert main(["convert", str(tmp_path / "own"), str(out), "--to", form]) == 0
            assert "model.layer (2)" in capsys.readouterr().out
            twin = net(Second, 2)
            caplog.clear()
            report = checkpointer.load({"model": twin}, source=out)
            assert torch.equal(twin.layer.weight, net(Second, 1).layer.weight)
            assert report.handed_over == ()
            assert "states no versions" in caplog.text
            assert "model: layer (Second, version 2)" in caplog.text
            caplog.clear()
            checkpointer.load({"model": net(First, 2)}, source=out, ignore_unexpected=["*.seen"])
            assert "versions" not in caplog.text


def test_only_a_part_of_what_is_converted_is_never_made_up(tmp_path: Path) -> None:
    """O2: an entry that is not loaded keeps what it has: it is of the new version already."""
    true, twin = net(First, 1), net(Second, 2)
    weight = twin.layer.weight.detach().clone()
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"model": true})
        part = ModuleState(twin, only=lambda name, _: name != "layer.weight")
        with pytest.raises(MismatchError, match=r"load_state_dict does not take.*layer\.weight"):
            checkpointer.load({"model": part}, ignore_unexpected=True, allow_missing=["*.seen"])
    assert torch.equal(twin.layer.weight, weight)


def of_a_stage(context: RankContext, root: str) -> bool:
    """Each rank has another layer of one part; the last one is of the first version."""
    layers = nn.ModuleDict({str(context.rank): (Third, First)[context.rank](WIDTH, WIDTH)})
    randomise(layers, 5)
    with ProcessGroups.create(Layout(pp=2)) as groups:
        checkpointer = Checkpointer(root, groups=groups)
        checkpointer.save(1, {"model": layers})
        whole = nn.ModuleDict({"0": Third(WIDTH, WIDTH), "1": Second(WIDTH, WIDTH)})
        checkpointer.load({"model": whole}, allow_missing=["*.seen"])
    now, then = whole[str(context.rank)].weight, layers[str(context.rank)].weight
    return torch.equal(now, then * (1 + context.rank))


def test_ranks_with_other_modules_of_one_part_note_all_versions(tmp_path: Path) -> None:
    """O2: those of every pipeline stage."""
    assert run_ranks(2, of_a_stage, str(tmp_path)).results == [True, True]
