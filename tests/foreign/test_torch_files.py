"""Files of torch.save and folders of them: state dicts, Lightning, Accelerate, the HF Trainer."""

from __future__ import annotations

import json
import random
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn

from holdfast import Checkpointer, CorruptionError, FromPart, OptimizerState
from holdfast.cli.main import main
from holdfast.foreign import NameMap
from holdfast.foreign.convert import open_any
from holdfast.foreign.formats import open_catalog
from holdfast.foreign.view import CatalogStorage
from tests.foreign.contract import check_catalog, check_format, raw, sample_tensors


@pytest.mark.parametrize("kind", ["dict", "ordered", "legacy", "nested"])
def test_torch_files_under_every_layout(tmp_path: Path, kind: str) -> None:
    tensors = sample_tensors()
    value: Any = {"ordered": OrderedDict(tensors), "nested": {"model": tensors, "epoch": 3}}.get(
        kind, dict(tensors)
    )
    torch.save(value, tmp_path / "x", _use_new_zipfile_serialization=kind != "legacy")
    check_format(tmp_path / "x", "model", tensors)


def test_views_and_ties(tmp_path: Path) -> None:
    wide = torch.arange(48.0).reshape(6, 8)
    tensors = {"t": wide.t(), "cut": wide[1:5, 2:7], "row": wide[0].expand(3, 8), "tie": wide.t()}
    torch.save(dict(tensors), tmp_path / "x.pt")
    check_format(tmp_path / "x.pt", "model", tensors, fraction=4.0)
    values = Checkpointer(tmp_path / "run").load_all(source=tmp_path / "x.pt").values["model"]
    assert values["t"] is values["tie"]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_any_range_of_bytes_is_read(tmp_path: Path) -> None:
    """X1: of views, archives and our own chunks nothing was read of a part of an element.

    `verify` looks at the first and the last byte of each chunk.
    """
    base = torch.randn(4, 6)
    torch.save({"t": base.t(), "e": base[:1].expand(3, 6)}, tmp_path / "x.pt")
    dcp.save({"t": base.t(), "c": base}, checkpoint_id=tmp_path / "dcp")
    with Checkpointer(tmp_path / "own") as checkpointer:
        checkpointer.save(1, {"model": {"c": base}})
    kept = NameMap([], unmatched="keep")
    draw = random.Random(3)
    with open_any(tmp_path / "own") as own:
        catalogs = [open_catalog(tmp_path / "x.pt"), open_catalog(tmp_path / "dcp"), own]
        for storage in (CatalogStorage(kept.apply(catalog).catalog) for catalog in catalogs):
            names = storage.list(storage.directory)
            for path in (f"{storage.directory}/{name}" for name in names):
                whole = storage.read(path)
                for _ in range(40):
                    start, stop = sorted(draw.choices(range(len(whole) + 1), k=2))
                    part = storage.read(path, start=start, nbytes=stop - start)
                    assert part == whole[start:stop], (path, start, stop)
            assert len(names) > 2


def test_a_module_and_an_optimizer_by_names(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=0.1)
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    value = {
        "teacher": {"0.weight": torch.ones(9, 9)},  # its shape is not that of the parameter
        "model": model.state_dict(),
        "optim": optimizer.state_dict(),
        "global_step": 12,
    }
    torch.save(value, tmp_path / "x.pt")
    twin = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    other = torch.optim.AdamW(twin.named_parameters(), lr=1.0)
    state = {"model": twin, "optim": OptimizerState(other, twin)}
    report = Checkpointer(tmp_path / "run").load(state, source=tmp_path / "x.pt")
    assert (report.step, report.not_requested) == (12, ("global_step", "teacher"))
    for name, tensor in model.state_dict().items():
        assert raw(twin.state_dict()[name]) == raw(tensor), name
    for ours, theirs in zip(twin.parameters(), model.parameters(), strict=True):
        assert raw(other.state[ours]["exp_avg"]) == raw(optimizer.state[theirs]["exp_avg"])
    assert other.param_groups[0]["lr"] == 0.1


def test_a_checkpoint_of_lightning(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    torch.save(
        {
            "epoch": 1, "global_step": 77, "pytorch-lightning_version": "2.6.0",
            "state_dict": model.state_dict(), "loops": {"fit_loop": {"state_dict": {}}},
            "optimizer_states": [torch.optim.SGD(model.parameters(), lr=0.1).state_dict()],
            "hyper_parameters": {"lr": 0.1},
        },
        tmp_path / "last.ckpt",
    )  # fmt: skip
    twin = nn.Linear(3, 2)
    report = Checkpointer(tmp_path / "run").load(
        {"net": FromPart("state_dict", twin)}, source=tmp_path / "last.ckpt"
    )
    assert report.step == 77
    assert raw(twin.weight) == raw(model.weight)
    assert main(["convert", str(tmp_path / "last.ckpt"), str(tmp_path / "hf"), "--to",
                 "huggingface"]) == 0  # fmt: skip
    check_catalog(tmp_path / "hf", "model", model.state_dict())


def test_a_folder_of_accelerate(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    model, optimizer = nn.Linear(3, 2), None
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    accelerator.backward(model(torch.ones(1, 3)).sum())
    optimizer.step()
    accelerator.save_state(str(tmp_path / "state"))
    catalog = open_catalog(tmp_path / "state")
    assert {"model", "optimizer", "scheduler"} <= set(catalog.parts)
    values = Checkpointer(tmp_path / "run").load_all(source=tmp_path / "state").values
    assert raw(values["model"]["weight"]) == raw(model.weight)
    twin = torch.optim.AdamW(nn.Linear(3, 2).parameters())
    twin.load_state_dict(values["optimizer"])
    assert twin.state_dict()["param_groups"] == optimizer.state_dict()["param_groups"]
    # Everything in the folder is either read or named.
    parts = {f"{name}." for name in catalog.parts}
    for file in (tmp_path / "state").iterdir():
        is_read = any(f"{file.name.rpartition('.')[0]}." == part for part in parts)
        assert is_read or any(file.name in each for each in catalog.left_out), file.name


def test_what_asks_for_code_is_left_out_of_a_folder_by_name(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-500"
    folder.mkdir()
    save_file({"weight": torch.ones(2)}, folder / "model.safetensors")
    torch.save({"state": {}, "param_groups": []}, folder / "optimizer.pt")
    torch.save(Path, folder / "training_args.bin")
    torch.save({"weight": torch.zeros(2)}, folder / "pytorch_model.bin")
    catalog = open_catalog(folder)
    assert set(catalog.parts) >= {"model", "optimizer"}
    left_out = " ".join(catalog.left_out)
    assert "pytorch_model.bin: the safetensors files are read instead" in left_out
    torch.save(nn.Linear(2, 2), folder / "training_args.bin")
    left_out = " ".join(open_catalog(folder).left_out)
    assert "training_args.bin" in left_out
    assert "torch.nn.modules.linear.Linear" in left_out
    with pytest.raises(CorruptionError, match=r"torch\.nn\.modules\.linear\.Linear"):
        open_catalog(folder / "training_args.bin")


@pytest.mark.parametrize(
    ("stem", "variant"),
    [("pytorch_model", ""), ("pytorch_model.fp16", ".fp16"), ("diffusion_pytorch_model", "")],
)
def test_sharded_weights_of_hugging_face(tmp_path: Path, stem: str, variant: str) -> None:
    """X24: shards under other names were parts of their own, and half of them a whole model."""
    tensors = sample_tensors()
    names = list(tensors)
    placed = {}
    for number in range(2):
        file = f"{stem}-{number + 1:05d}-of-00002.bin"
        torch.save({name: tensors[name] for name in names[number::2]}, tmp_path / file)
        placed |= dict.fromkeys(names[number::2], file)
    index = tmp_path / f"{stem.removesuffix(variant)}.bin.index{variant}.json"
    index.write_text(json.dumps({"weight_map": placed}))
    check_catalog(tmp_path, "model", tensors)
    second = tmp_path / f"{stem}-00002-of-00002.bin"
    whole = second.read_bytes()
    # Cut, without a tensor, or gone: the other half is not a model.
    second.write_bytes(whole[:-100])
    with pytest.raises(CorruptionError, match="00002-of-00002"):
        open_catalog(tmp_path)
    torch.save({}, second)
    with pytest.raises(CorruptionError, match="tensors that their files lack"):
        open_catalog(tmp_path)
    second.unlink()
    with pytest.raises(CorruptionError, match="not a file of the folder"):
        open_catalog(tmp_path)
    index.unlink()
    with pytest.raises(CorruptionError, match=f"there is no {second.name}"):
        open_catalog(tmp_path)
    second.write_bytes(whole)
    check_catalog(tmp_path, "model", tensors)


@pytest.mark.parametrize("weights", ["model.safetensors", "pytorch_model.bin"])
def test_a_damaged_file_of_a_folder_is_an_error(tmp_path: Path, weights: str) -> None:
    """X24: an optimizer that was cut on a full disk was left out, and a conversion succeeded."""
    save = torch.save if weights.endswith(".bin") else save_file
    save({"w": torch.ones(2)}, tmp_path / weights)
    optimizer = tmp_path / "optimizer.pt"
    torch.save({"state": {0: {"m": torch.ones(2)}}, "param_groups": []}, optimizer)
    whole = optimizer.read_bytes()
    assert set(open_catalog(tmp_path).parts) == {"model", "optimizer"}
    torch.save({}, tmp_path / "scheduler.pt")
    for damaged, why in (
        (whole[:-100], "missing: damaged"),
        (whole.replace(b"param_groups", b"param_gruops"), "another CRC-32"),
        (b"", "is empty; damaged"),
        (bytes(4096), "starts with zeros; damaged"),
        (b"version https://git-lfs.github.com/spec/v1\nsize 9\n", "git lfs pull"),
    ):
        optimizer.write_bytes(damaged)
        with pytest.raises(CorruptionError, match=rf"optimizer\.pt.*{why}.*alone, name it"):
            open_catalog(tmp_path)
    # Whole files that are never read, and those of other programs, are left out by name.
    for other in (b"GGUF" + bytes(100), b"\x80\x04N."):
        optimizer.write_bytes(other)
        assert "optimizer.pt: " in " ".join(open_catalog(tmp_path).left_out)


def test_files_of_a_folder_are_never_mixed(tmp_path: Path) -> None:
    """X24: model.pt took the place of the safetensors files, or was joined with other weights."""
    model = nn.BatchNorm1d(2)
    save_file({**model.state_dict(), "0.weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    torch.save({"weight": torch.full((2,), 7.0)}, tmp_path / "model.pt")
    torch.save({"weight": torch.full((2,), 8.0)}, tmp_path / "model.0.pt")  # the path of another
    optimizer = torch.optim.AdamW(model.named_parameters())
    model(torch.randn(3, 2)).sum().backward()
    optimizer.step()
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    catalog = open_catalog(tmp_path)
    assert list(catalog.parts) == ["model", "model.0", "optimizer"]
    assert [each.partition(":")[0] for each in catalog.left_out] == ["model.pt"]
    facts: Any = catalog.parts["optimizer"]
    assert facts["parameters"]["weight"] == {"shape": [2]}
    values = Checkpointer(tmp_path / "run").load_all(source=tmp_path).values
    assert values["model"]["0.weight"].tolist() == [0.0, 0.0]
    assert values["model.0"]["weight"].tolist() == [8.0, 8.0]
    (tmp_path / "model.safetensors").unlink()
    torch.save({"bias": torch.ones(2)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CorruptionError, match=r"several models \(model\.pt, pytorch_model\.bin\)"):
        open_catalog(tmp_path)
    (tmp_path / "pytorch_model.bin.index.json").write_text('{"weight_map": {"bias": "a.bin"}}')
    (tmp_path / "pytorch_model.bin").rename(tmp_path / "a.bin")
    with pytest.raises(CorruptionError, match=r"has model\.pt, and an index of other files"):
        open_catalog(tmp_path)


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (torch.ones(2), "not a state dict"),
        ([torch.ones(2)], "not a state dict"),
        ({"w": 3}, r"'model\.w' is there twice"),
    ],
)
def test_shards_that_do_not_fit_together_are_refused(
    tmp_path: Path, second: object, message: str
) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "m-00001-of-00002.bin")
    torch.save(second, tmp_path / "m-00002-of-00002.bin")
    with pytest.raises(CorruptionError, match=message):
        open_catalog(tmp_path)


def test_a_name_that_is_no_text_is_refused_by_it(tmp_path: Path) -> None:
    """A conversion ended with the traceback of an encoder, which names neither."""
    for kind, value in {
        "tensor 'model.w": {"model": {"w\udcff": torch.ones(2)}},
        "part 'm": {"m\udcff": {"w": torch.ones(2)}},
    }.items():
        torch.save(value, tmp_path / "x.pt")
        with pytest.raises(
            CorruptionError, match=rf"x\.pt: {kind}\\udcff' is not read: .*surrogate"
        ):
            open_catalog(tmp_path / "x.pt")
    torch.save({"m": {"w": torch.ones(2), "k\udcff": "v\udcff"}}, tmp_path / "x.pt")
    values = Checkpointer(tmp_path / "run").load_all(source=tmp_path / "x.pt").values["m"]
    assert values["k\udcff"] == "v\udcff"


def test_memory_in_common_is_kept_or_noted(tmp_path: Path) -> None:
    weight, flat = torch.randn(3, 4), torch.randn(8)
    value = {
        "model": {"embed": weight, "turned": weight.t(), "a": flat[:4], "b": flat[4:]},
        "ema": {"embed": weight, "head": weight.data},
    }
    torch.save(value, tmp_path / "x.pt")
    report = Checkpointer(tmp_path / "run").load_all(source=tmp_path / "x.pt")
    model, ema = report.values["model"], report.values["ema"]
    assert model["embed"] is ema["embed"] is ema["head"]
    assert raw(model["turned"]) == raw(weight.t())
    # Not of `a` and `b`, which lie next to each other.
    assert [each.partition(":")[0] for each in report.left_out] == ["model.embed, model.turned"]


def test_a_small_file_cannot_state_terabytes(tmp_path: Path) -> None:
    """A view repeats elements: a conversion would fill the disk, and a load the memory."""
    torch.save({"a": torch.ones(1).expand(1 << 28)}, tmp_path / "much.pt")
    assert open_catalog(tmp_path / "much.pt").nbytes == 1 << 30
    torch.save({f"a{i}": torch.ones(i + 1)[:1].expand(1 << 28) for i in (0, 1)}, tmp_path / "x.pt")
    with pytest.raises(CorruptionError, match="expanded tensors as large are not read"):
        open_catalog(tmp_path / "x.pt")
