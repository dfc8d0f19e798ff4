"""Checkpoints of other programs in a bucket: read in place by ranges, converted from and to it."""

from __future__ import annotations

import secrets
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn

from holdfast import Checkpointer, ConfigError, Stored
from holdfast.cli.main import main
from holdfast.foreign.formats import open_catalog
from holdfast.foreign.location import Location
from tests.cli.conftest import Holdfast, holdfast
from tests.foreign.contract import raw, sample_tensors
from tests.foreign.test_convert import save_own

pytest.importorskip("obstore")

from holdfast.storage.objects import ObjectStorage

__all__ = ["holdfast"]


@pytest.fixture
def url() -> str:
    return f"memory://{secrets.token_hex(8)}/team"


def _upload(folder: Path, url: str) -> None:
    """Put files into a bucket as the cloud's own tools do it."""
    storage = ObjectStorage(url)
    for path in folder.iterdir():
        storage.write_file(path.name, path.read_bytes())


def _write(folder: Path, format: str) -> dict[str, torch.Tensor]:
    tensors = {name: each for name, each in sample_tensors().items() if each.numel()}
    folder.mkdir()
    if format == "huggingface":
        save_file(tensors, folder / "model.safetensors")
        (folder / "config.json").write_text("{}")
    elif format == "dcp":
        dcp.save({"model": tensors}, checkpoint_id=folder, no_dist=True)
    else:
        torch.save({"model": tensors}, folder / "all.pt")
    return tensors


@pytest.mark.parametrize("format", ["huggingface", "dcp", "torch_save"])
def test_read_in_place(tmp_path: Path, url: str, holdfast: Holdfast, format: str) -> None:
    """X1: loaded, shown, verified, and converted to a directory and to a bucket of our own."""
    tensors = _write(tmp_path / "source", format)
    _upload(tmp_path / "source", f"{url}/theirs")
    source = f"{url}/theirs" + ("/all.pt" if format == "torch_save" else "")
    report = Checkpointer(tmp_path / "never").load({"model": Stored()}, source=source)
    assert {k: raw(v) for k, v in report.values["model"].items()} == {
        k: raw(v) for k, v in tensors.items()
    }
    for verb in ("show", "verify"):
        done = holdfast(verb, source)
        assert done.code == 0, done.err
    done = holdfast("view", source, "--out", tmp_path / "page.html")
    assert done.code == 0, done.err
    assert "layers.0.weight" in (tmp_path / "page.html").read_text()
    for to, kind in ((f"{url}/ours", "holdfast"), (tmp_path / "hf", "huggingface")):
        done = holdfast("convert", source, to, "--to", kind)
        assert done.code == 0, done.err
    values = Checkpointer(f"{url}/ours").load({"model": Stored()}).values["model"]
    assert {k: raw(v) for k, v in values.items()} == {k: raw(v) for k, v in tensors.items()}
    assert holdfast("verify", f"{url}/ours").code == 0
    assert open_catalog(tmp_path / "hf").tensors.keys() == {f"model.{k}" for k in tensors}


def test_our_own_between_bucket_and_disk(tmp_path: Path, url: str, holdfast: Holdfast) -> None:
    save_own(tmp_path / "run", sample_tensors())
    assert holdfast("convert", tmp_path / "run", f"{url}/a", "--to", "holdfast").code == 0
    words = ("--to", "holdfast", "--step", "9")
    assert holdfast("convert", f"{url}/a/iter_0000007", f"{url}/b", "--to", "holdfast").code == 0
    assert holdfast("convert", f"{url}/b", tmp_path / "hf", "--to", "huggingface").code == 0
    assert holdfast("diff", tmp_path / "run", f"{url}/b").code == 0
    for number, place in enumerate((f"{url}/b", f"{url}/b/iter_0000007")):
        page = tmp_path / f"{number}.html"
        assert holdfast("view", place, "--out", page).code == 0
        assert "layers.0.weight" in page.read_text()
    again = holdfast("convert", f"{url}/a", f"{url}/b", "--to", "holdfast")
    assert again.code == 2
    assert "exists already" in again.err
    missing = holdfast("convert", f"{url}/a", f"{url}/b", *words)
    assert missing.code == 2
    assert "no committed step 9" in missing.err


def test_only_ranges_that_are_needed_are_asked_for(tmp_path: Path, url: str) -> None:
    folder = tmp_path / "source"
    folder.mkdir()
    save_file(
        {"a": torch.ones(1 << 20), "b": torch.full((1 << 18,), 2.0)}, folder / "x.safetensors"
    )
    _upload(folder, url)
    asked: list[int] = []
    storage = ObjectStorage(
        url, observer=lambda kind, key, start, nbytes: asked.append(nbytes if kind == "get" else 0)
    )
    catalog = open_catalog(Location(storage, None, url))
    module = nn.Module()
    module.b = nn.Parameter(torch.zeros(1 << 18))
    Checkpointer(tmp_path / "never").load({"model": module}, source=catalog, ignore_unexpected=True)
    target = module.b.detach()
    assert bool((target == 2.0).all())
    assert target.nbytes <= sum(asked) <= target.nbytes + 4096


def test_folders_next_to_what_is_read_are_listed(tmp_path: Path, url: str) -> None:
    """X4: a store of objects lists no folders but those that are ours."""
    _write(tmp_path / "source", "dcp")
    torch.save({"step": 3}, tmp_path / "random_states_0.pkl")
    data = (tmp_path / "random_states_0.pkl").read_bytes()
    _upload(tmp_path / "source", f"{url}/state/pytorch_model_fsdp_0")
    _upload(tmp_path / "source", f"{url}/run/step-5")
    ObjectStorage(f"{url}/ds/global_step5").write_file("mp_rank_00_model_states.pt", data)
    state = ObjectStorage(f"{url}/state")
    state.write_file("random_states_0.pkl", data)
    assert [*open_catalog(f"{url}/state").left_out] == [
        "pytorch_model_fsdp_0/: a folder with PyTorch DCP; name it to read it"
    ]
    with pytest.raises(ConfigError, match=r"holds some: name step-5 \(PyTorch DCP\)"):
        open_catalog(f"{url}/run")
    with pytest.raises(ConfigError, match=r"global_step5 \(DeepSpeed\), which is not read"):
        open_catalog(f"{url}/ds")
    with pytest.raises(ConfigError, match="nothing is at"):
        open_catalog(f"{url}/none")


def test_what_is_not_possible_in_a_bucket_is_said(
    tmp_path: Path, url: str, holdfast: Holdfast
) -> None:
    _upload(tmp_path, url)
    with pytest.raises(ConfigError, match="nothing is at memory"):
        open_catalog(url)
    assert main(["show", url]) == 2
    save_own(tmp_path / "run", sample_tensors())
    done = holdfast("convert", tmp_path / "run", url, "--to", "dcp")
    assert done.code == 2
    assert "only holdfast's own format is written to a bucket" in done.err


def test_a_damaged_source_leaves_nothing_in_a_bucket(
    tmp_path: Path, url: str, holdfast: Holdfast
) -> None:
    """X3 in a bucket."""
    save_own(tmp_path / "run", sample_tensors())
    (file,) = (tmp_path / "run/iter_0000007/data").iterdir()
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)
    done = holdfast("convert", tmp_path / "run", f"{url}/a", "--to", "holdfast")
    assert done.code == 1
    assert ObjectStorage(f"{url}/a").list("") == []
