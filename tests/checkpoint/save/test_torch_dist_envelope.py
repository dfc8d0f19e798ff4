"""Saves in the envelope torch_dist: PyTorch opens them as its own, and ours works on them, too."""

from __future__ import annotations

import io
import logging
import os
import secrets
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed import init_device_mesh
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_optimizer_state_dict
from torch.distributed.tensor import Shard, zeros

from holdfast import (
    Checkpointer,
    ConfigError,
    HoldfastError,
    KeepLast,
    Layout,
    ModuleState,
    OptimizerState,
    PerRank,
    PlanError,
    PosixStorage,
    ProcessGroups,
    Stored,
)
from holdfast.format.names import step_dir
from holdfast.format.verifier import verify_snapshot
from holdfast.storage.objects import ObjectStorage
from holdfast.writer.leftovers import repair
from holdfast.writer.records import ALIVE_FILE
from tests.checkpoint.common import assert_equal, full, make_state
from tests.cli.conftest import Holdfast, holdfast
from tests.harness import RankContext, run_ranks, wait_until
from tests.writer.images import KEEP_S, end_processes_of, is_offered, load

__all__ = ["holdfast"]

Tree = dict[str, Any]


def _whole(root: Path, step: int = 1) -> Path:
    assert verify_snapshot(PosixStorage(root), step_dir(step)) == []
    return root / step_dir(step)


def _checked_archives(place: Path) -> int:
    """Every item is a ZIP archive, checksums right or none at all; returns how many there are."""
    stored = dcp.FileSystemReader(place).read_metadata().storage_data
    for info in stored.values():
        data = (place / info.relative_path).read_bytes()[info.offset :][: info.length]
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            members = archive.infolist()
            for member in members:
                # Those of tensors have none, as torch writes by `set_crc32_options(False)`.
                assert info.relative_path == "values.distcp" or member.CRC == 0
            assert not any(member.CRC for member in members) or archive.testzip() is None
    return len(stored)


def _trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(30, 50), nn.LayerNorm(50), nn.Linear(50, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(torch.ones(2, 30)).sum().backward()
    optimizer.step()
    return model, optimizer


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> Tree:
    return {
        "model": ModuleState(model),
        "optimizer": OptimizerState(optimizer, model),
        "loop": {"step": 3, "seen": (1, "a"), "deep": [1.5, {"lr": 0.1}]},
        "empty": torch.empty(0, 3),
        "mask": torch.tensor([True, False, True]),
        "phase": torch.view_as_complex(torch.ones(4, 2, dtype=torch.float64)),
    }


@pytest.mark.parametrize("way", ["sync", "async", "lazily"])
def test_torch_loads_what_was_saved(tmp_path: Path, way: str) -> None:
    model, optimizer = _trained()
    state = _state(model, optimizer)
    with Checkpointer(tmp_path, ckpt_format="torch_dist") as checkpointer:
        if way == "sync":
            checkpointer.save(1, state)
        elif way == "async":
            checkpointer.save_async(1, state).result(60)
        else:
            checkpointer.save_async(1, state, stage="lazily").result(60)
    place = _whole(tmp_path)
    assert _checked_archives(place) > 20
    # Parts of it, into what is there.
    target: Tree = {"model": {k: torch.zeros_like(v) for k, v in model.state_dict().items()}}
    dcp.load(target, checkpoint_id=place, no_dist=True)
    for key, value in model.state_dict().items():
        assert torch.equal(target["model"][key], value)
    # All of it.
    dcp_to_torch_save(place, tmp_path / "all.pt")
    whole = torch.load(tmp_path / "all.pt", weights_only=True)
    assert whole["loop"] == state["loop"]
    assert whole["empty"].shape == (0, 3)
    assert torch.equal(whole["mask"], state["mask"])
    assert torch.equal(whole["phase"], state["phase"])
    other = nn.Sequential(nn.Linear(30, 50), nn.LayerNorm(50), nn.Linear(50, 3))
    other.load_state_dict(whole["model"])
    again = torch.optim.AdamW(other.parameters())
    set_optimizer_state_dict(other, again, whole["optimizer"])
    assert again.param_groups[0]["lr"] == 0.01
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)
        for name, moment in optimizer.state[one].items():
            assert torch.equal(moment, again.state[two][name])
    common = torch.load(place / "common.pt", weights_only=True)
    assert common["loop"] == state["loop"]
    assert get_model_state_dict(other).keys() == whole["model"].keys()


def _save(context: RankContext, root: str) -> None:
    layout = Layout(tp=2, dp=2)
    with ProcessGroups.create(layout) as groups:
        options: Tree = {"groups": groups, "replicate_over": "tp", "ckpt_format": "torch_dist"}
        with Checkpointer(root, **options) as checkpointer:
            checkpointer.save(1, make_state(layout, context.rank))
            for _ in range(2):  # made anew, and by the plan that is at hand
                state = make_state(layout, context.rank)
                report = checkpointer.save_async(1, state, overwrite=True).result(60)
                assert not report.planned
        with Checkpointer(root, **options) as checkpointer:
            assert not checkpointer.save(2, make_state(layout, context.rank)).planned  # kept
            target = make_state(layout, context.rank, blank=True)
            report = checkpointer.load(target)
            assert report.is_verified
            assert_equal(target, layout, context.rank)
        alone = Checkpointer(root, groups=groups)
        odd = "torch_dist" if context.rank == 1 else "holdfast"
        with pytest.raises(PlanError, match="ckpt_format"):
            Checkpointer(root, groups=groups, ckpt_format=odd).save(  # type: ignore[arg-type]
                3, make_state(layout, context.rank)
            )
        assert alone.latest() == 2


def _load(context: RankContext, root: str) -> None:
    """By our own under another layout; by DCP, of each tensor a shard of its own."""
    layout = Layout(dp=2)
    with ProcessGroups.create(layout) as groups:
        target = make_state(layout, context.rank, blank=True)
        del target["own"]
        Checkpointer(root, groups=groups).load(target, ignore_unexpected=True)
        target["own"] = None
        assert_equal(target, layout, context.rank)
    mesh = init_device_mesh("cpu", (context.num_ranks,))
    shapes = {"model.norm": (6,), "model.layers.1.column": (10, 6), "model.layers.2.row": (6, 10)}
    wanted: Tree = {
        key: zeros(*shape, device_mesh=mesh, placements=[Shard(len(shape) - 1)])
        for key, shape in shapes.items()
    }
    dcp.load(wanted, checkpoint_id=Path(root) / step_dir(1))
    for key, shape in shapes.items():
        assert torch.equal(wanted[key].full_tensor(), full(key, shape)), key


def test_several_ranks_and_other_ranks(tmp_path: Path) -> None:
    """Sharded, replicated, stored more than once, values per rank; overwritten, by a kept plan."""
    assert run_ranks(4, _save, str(tmp_path)).failed == []
    place = _whole(tmp_path, 1)
    _whole(tmp_path, 2)
    assert len(list((place / "data").glob("*.distcp"))) == 4
    _checked_archives(place)
    assert run_ranks(2, _load, str(tmp_path)).failed == []
    values: Tree = {"values": {"step": 0, "pair": None}}
    dcp.load(values, checkpoint_id=place, no_dist=True)
    assert values == {"values": {"step": 7, "pair": (1, "a")}}
    names = dcp.FileSystemReader(place).read_metadata().state_dict_metadata
    assert "model.layers.3.row" in names
    assert not any(name.startswith("own") for name in names)  # one per rank


def _filled(value: float) -> Tree:
    return {"t": {"x": torch.full((300_000,), value), "n": value}}


def test_a_change_of_format_between_saves(tmp_path: Path, holdfast: Holdfast) -> None:
    """One root may have both; commands and retention do not mind."""
    for step, ckpt_format in enumerate(("holdfast", "torch_dist", "holdfast", "torch_dist"), 1):
        with Checkpointer(tmp_path, ckpt_format=ckpt_format) as checkpointer:  # type: ignore[arg-type]
            checkpointer.save(step, _filled(1.0))
    assert holdfast("ls", tmp_path).code == 0
    assert "00000.distcp" in holdfast("show", tmp_path / step_dir(2), "--files").out
    assert holdfast("verify", tmp_path).code == 0
    assert holdfast("diff", tmp_path / step_dir(1), tmp_path / step_dir(2)).code == 0
    out = tmp_path / "x.safetensors"
    assert holdfast("export", tmp_path / step_dir(2), "--tensor", "*", "--to", out).code == 0
    assert holdfast("convert", tmp_path / step_dir(2), tmp_path / "dcp", "--to", "dcp").code == 0
    with Checkpointer(tmp_path, retention=KeepLast(2), ckpt_format="torch_dist") as checkpointer:
        checkpointer.save(4, _filled(2.0), overwrite=True)
        assert checkpointer.steps() == [3, 4]
        loaded: Any = checkpointer.load({"t": Stored()}).values["t"]
    assert torch.equal(loaded["x"], torch.full((300_000,), 2.0))
    _whole(tmp_path, 4)


def test_an_image_is_kept(tmp_path: Path) -> None:
    root = tmp_path / "root"
    try:
        for step in (1, 2):
            options: Tree = {"keep_image_s": KEEP_S, "ckpt_format": "torch_dist"}
            with Checkpointer(root, **options) as checkpointer:
                checkpointer.save_async(step, _filled(float(step)))
        wait_until(lambda: is_offered(root, 2))
        target = _filled(0.0)
        report = load(root, target)
        assert report.nbytes_read == 0
        assert report.refused_images == ()
        assert torch.equal(target["t"]["x"], torch.full((300_000,), 2.0))
    finally:
        end_processes_of(tmp_path)


def test_a_repair_finishes_a_save_without_its_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*args: object, **kwargs: object) -> None:
        raise RuntimeError("killed")

    with monkeypatch.context() as patch:
        patch.setattr("holdfast.writer.job.commit_save", stop)
        patch.setattr("holdfast.checkpoint.save.saver.discard_save", lambda *a: None)
        with pytest.raises(HoldfastError, match="killed"):
            Checkpointer(tmp_path, ckpt_format="torch_dist").save(1, _filled(1.0))
    (left,) = tmp_path.glob(".saving-*")
    # Of a commit that was killed half-way.
    (left / ".metadata").write_bytes(b"half")
    (left / ALIVE_FILE).write_text("1")
    for path in (left, *left.rglob("*")):
        os.utime(path, (1, 1))
    repair(PosixStorage(tmp_path))
    assert _checked_archives(_whole(tmp_path)) == 2
    loaded: Any = Checkpointer(tmp_path).load({"t": Stored()}).values["t"]
    assert torch.equal(loaded["x"], torch.ones(300_000))


def test_what_torch_cannot_have_stays_with_us(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    values = {
        "a.b": 1,
        "a": {"b": 2},
        "none": {},
        "looks": {"state": {}, "groups": [], "membership": {"w": 5}},
    }
    with (
        caplog.at_level(logging.INFO, logger="holdfast"),
        Checkpointer(tmp_path, ckpt_format="torch_dist") as checkpointer,
    ):
        checkpointer.save(1, {"m": values, "own": PerRank(3)})
        assert checkpointer.load({"m": Stored()}).values["m"] == values
    assert "'m.a.b' would be there twice" in caplog.text
    assert "m.none is an empty dict" in caplog.text
    assert "own is left out" in caplog.text
    dcp_to_torch_save(_whole(tmp_path), tmp_path / "all.pt")
    assert torch.load(tmp_path / "all.pt", weights_only=True)["m"]["a.b"] == 1


def test_metadata_follows_what_differs_between_saves_of_one_plan(tmp_path: Path) -> None:
    """Values grow and shrink, chunks stay: PyTorch finds each save's own."""
    with Checkpointer(tmp_path, ckpt_format="torch_dist") as checkpointer:
        for step, text in enumerate(["a", "b", "c" * 500, "d"], start=1):
            state = {"t": {"x": torch.full((3, 4), float(step))}, "v": {"text": text, "n": step}}
            checkpointer.save(step, state)
        # Other names of as many values, and another tensor of the same size.
        checkpointer.save(5, {"t": {"y": torch.full((4, 3), 5.0)}, "v": {"other": "d", "n": 5}})
    for step, text in enumerate(["a", "b", "c" * 500, "d"], start=1):
        target: Tree = {"t": {"x": torch.zeros(3, 4)}, "v": {"text": "", "n": 0}}
        dcp.load(target, checkpoint_id=_whole(tmp_path, step), no_dist=True)
        assert target["v"] == {"text": text, "n": step}
        assert torch.equal(target["t"]["x"], torch.full((3, 4), float(step)))
    dcp_to_torch_save(_whole(tmp_path, 5), tmp_path / "all.pt")
    last = torch.load(tmp_path / "all.pt", weights_only=True)
    assert last["v"] == {"other": "d", "n": 5}
    assert torch.equal(last["t"]["y"], torch.full((4, 3), 5.0))


def test_a_format_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="ckpt_format"):
        Checkpointer(tmp_path, ckpt_format="zarr")  # type: ignore[arg-type]


@pytest.mark.parametrize("way", ["sync", "async"])
def test_an_object_in_parts(way: str) -> None:
    """Chunks lie across the parts of an upload."""
    url = f"memory://{secrets.token_hex(8)}/run"
    state = {"t": {f"x{i}": torch.full((1_500_000 + i,), float(i)) for i in range(9)}}
    with Checkpointer(url, ckpt_format="torch_dist") as checkpointer:
        if way == "sync":
            checkpointer.save(1, state)
        else:
            checkpointer.save_async(1, state).result(60)
        assert verify_snapshot(ObjectStorage(url), step_dir(1)) == []
        loaded: Any = checkpointer.load({"t": Stored()}).values["t"]
    assert torch.equal(loaded["x8"], torch.full((1_500_008,), 8.0))


def test_a_copy_has_the_extra_files(tmp_path: Path, holdfast: Holdfast) -> None:
    with Checkpointer(tmp_path / "a", ckpt_format="torch_dist") as checkpointer:
        checkpointer.save(1, _filled(1.0))
    assert holdfast("copy", tmp_path / "a", tmp_path / "b").code == 0
    assert _checked_archives(_whole(tmp_path / "b")) == 2
