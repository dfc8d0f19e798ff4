"""The commands on checkpoints of other programs, as on our own."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

from holdfast import Checkpointer
from holdfast.cli.commands import ls
from holdfast.errors import StorageError
from holdfast.foreign.location import Location
from tests.cli.conftest import Holdfast, holdfast
from tests.foreign.contract import sample_tensors

__all__ = ["holdfast"]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """The same tensors in four formats."""
    tensors = sample_tensors()
    (tmp_path / "hf").mkdir()
    save_file(tensors, tmp_path / "hf/model.safetensors")
    dcp.save({"model": tensors}, checkpoint_id=tmp_path / "dcp")
    dcp.save({"model": tensors, "epoch": 3}, checkpoint_id=tmp_path / "tree")
    torch.save({"model": tensors}, tmp_path / "x.pt")
    torch.save({"model": tensors, "step": 7}, tmp_path / "step.pt")
    with Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(1, {"model": tensors})
    return tmp_path


def test_a_directory_of_them_is_listed(
    holdfast: Holdfast, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = holdfast("ls", place / "dcp", "--json").json["foreign"]
    assert [(each["format"], each["num_tensors"]) for each in listed] == [("PyTorch DCP", 10)]
    (place / "x.pt").rename(place / "hf.pt")  # in a folder of its own it would be one checkpoint
    (place / "all").mkdir()
    for name in ("hf", "dcp"):
        (place / name).rename(place / "all" / name)
    (place / "all/bad").mkdir()
    (place / "all/bad/.metadata").write_bytes(b"\x80\x02cos\nsystem\n.")
    (place / "all/.saving-iter_0000001-ab").mkdir()  # hides none of them
    result = holdfast("ls", place / "all")
    assert result.code == 1
    for text in ("safetensors", "PyTorch DCP", "os.system", "a save in progress"):
        assert text in result.out
    detect = ls.detect_format

    def denied(location: Location) -> Any:
        if Path(location.label).name == "gone":
            Path(location.label).rmdir()
            raise StorageError("No such file or directory")
        if Path(location.label).name in ("all", "bad"):
            raise StorageError("Permission denied", details={"is_unknown": True})
        return detect(location)

    # P27: a folder that may not be read hides no other one, and is not damaged; nor is one that
    # is removed meanwhile.
    (place / "all/gone").mkdir()
    (place / "all/.saving-iter_0000001-ab").rmdir()
    Checkpointer(place / "all/run", settle_s=0.0).save(1, {"t": {"a": torch.zeros(2)}})
    monkeypatch.setattr(ls, "detect_format", denied)
    result = holdfast("ls", place / "all", "--json")
    lines = [(Path(each["path"]).name, each["problem"]) for each in result.json["foreign"]]
    assert (result.code, lines) == (2, [("bad", "Permission denied"), ("dcp", None), ("hf", None)])
    assert [(Path(run["path"]).name, run["latest"]) for run in result.json["runs"]] == [("run", 1)]
    shown = holdfast("ls", place / "all").out
    assert all(str(place / "all" / name) in shown for name in ("bad", "dcp", "hf", "run"))


def test_a_file_that_may_not_be_read_is_neither_empty_nor_damaged(
    holdfast: Holdfast, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P27: it was "empty; damaged, as after a crash or on a full disk", and no checkpoint."""
    read, file = os.preadv, place / "hf/model.safetensors"

    def deny(fd: int, buffers: Any, offset: int) -> int:
        if os.readlink(f"/proc/self/fd/{fd}") == str(file.resolve()):
            raise OSError(errno.EACCES, os.strerror(errno.EACCES))
        return read(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", deny)
    for verb in ("ls", "show", "verify"):
        for path in (place / "hf", file):
            result = holdfast(verb, path)
            assert result.code == 2
            assert "Permission denied" in result.out + result.err


def test_equal_tensors_of_different_formats_are_equal(holdfast: Holdfast, place: Path) -> None:
    for other in ("dcp", "x.pt", "run"):
        result = holdfast("diff", place / "hf", place / other)
        assert result.code == 0, (other, result.out, result.err)
        assert "equal: 10 tensors" in result.out
    tensors = sample_tensors()
    tensors["half"][2, 3] += 1
    save_file(tensors, place / "hf/model.safetensors")
    result = holdfast("diff", place / "hf", place / "dcp")
    assert result.code == 1
    assert "model.half" in result.out


def test_equal_is_what_was_compared_whole(holdfast: Holdfast, tmp_path: Path) -> None:
    """X4: two folders were equal that have other optimizers, in files that are never read."""
    for name, scale in (("a", "1"), ("b", "2")):
        (tmp_path / name).mkdir()
        save_file({"w": torch.ones(2)}, tmp_path / name / "model.safetensors")
        torch.save(torch.nn.Linear(1, int(scale)), tmp_path / name / "optimizer.pt")
        save_file({"w": torch.ones(2)}, tmp_path / f"{name}.safetensors", {"lora_alpha": scale})
    result = holdfast("diff", tmp_path / "a", tmp_path / "b")
    assert result.code == 1
    assert "no difference in 1 tensor and all values" in result.out
    assert "not all could be compared" in result.out
    assert "  A: optimizer.pt: " in result.out
    found = holdfast("diff", tmp_path / "a", tmp_path / "b", "--json").json
    assert (found["equal"], len(found["not_compared"])) == (False, 2)
    assert holdfast("diff", tmp_path / "a", tmp_path / "b", "--tensor", "*").code == 0
    result = holdfast("diff", tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    assert (result.code, "$metadata.lora_alpha" in result.out) == (1, True)
    assert holdfast("diff", tmp_path / "a.safetensors", tmp_path / "a.safetensors").code == 0


def test_tensors_are_shown_and_exported(holdfast: Holdfast, place: Path) -> None:
    for name in ("hf", "dcp", "x.pt"):
        shown = holdfast("show", place / name, "--tensor", "model.layers.*", "--stats").out
        assert "model.layers.0.weight" in shown
        assert "norm" in shown
        to = place / f"{name}.safetensors"
        result = holdfast("export", place / name, "--tensor", "model.layers.1.*", "--to", to)
        assert result.code == 0, result.err
        (weight,) = load_file(to).values()
        assert torch.equal(weight, sample_tensors()["layers.1.weight"])
    assert "epoch" in holdfast("show", place / "tree", "--values").out
    assert holdfast("show", place / "step.pt", "--json").json["step"] == 7
    assert holdfast("show", place / "step.pt", "--step", "8").code == 2


def test_verify_says_what_it_cannot_know(holdfast: Holdfast, place: Path) -> None:
    for name in ("hf", "dcp", "x.pt"):
        result = holdfast("verify", place / name)
        assert result.code == 0
        assert "no digests" in result.out
        assert holdfast("verify", place / name, "--json").json["has_digests"] is False
    checked = {"hf": False, "dcp": True, "x.pt": True}
    for name, has_checksums in checked.items():
        nbytes = holdfast("verify", place / name, "--json").json["nbytes_with_checksums"]
        assert (nbytes > 0) == has_checksums, name
    weight = sample_tensors()["layers.1.weight"].view(torch.uint8).numpy().tobytes()
    for name, path in (("x.pt", "x.pt"), ("dcp", "dcp/__0_0.distcp")):
        whole = (place / path).read_bytes()
        # A bit that torch.load and dcp.load take as it is.
        at = whole.index(weight) + len(weight) // 2
        damaged = bytearray(whole)
        damaged[at] ^= 1
        (place / path).write_bytes(damaged)
        result = holdfast("verify", place / name)
        assert result.code == 1
        assert "layers.1.weight" in result.out
        result = holdfast("convert", place / name, place / "to", "--to", "huggingface")
        assert (result.code, (place / "to").exists()) == (1, False)
        assert "layers.1.weight" in result.err
        to = place / "one.safetensors"
        result = holdfast("export", place / name, "--tensor", "*layers.1.weight", "--to", to)
        assert (result.code, to.exists()) == (1, False)
        assert "layers.1.weight" in result.err
        for command in (("diff", place / name, place / "hf"), ("show", place / name, "--stats")):
            result = holdfast(*command, "--tensor", "*layers.1.weight")
            assert result.code == 1
            assert "another CRC-32" in result.err
        assert holdfast("show", place / name, "--stats", "--tensor", "*half").code == 0
        # What is not read is not compared.
        others = holdfast("export", place / name, "--tensor", "*half", "--to", to)
        assert others.code == 0, others.err
        to.unlink()
        (place / path).write_bytes(whole)
    file = place / "dcp/__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-3000])
    result = holdfast("verify", place / "dcp")
    assert result.code == 1
    assert "__0_0.distcp" in result.err


def test_commands_that_remove_leave_them_alone(holdfast: Holdfast, place: Path) -> None:
    before = {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}
    holdfast("prune", place / "dcp", "--keep-last", "1")
    holdfast("repair", place / "dcp")
    assert holdfast("tag", place / "dcp", "best", "0").code == 2
    after = {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}
    assert after == before


def test_show_states_nothing_that_the_format_does_not(holdfast: Holdfast, place: Path) -> None:
    assert "step       0 or not stated, files of" in holdfast("show", place / "hf").out
    assert "step       7, files of" in holdfast("show", place / "step.pt").out
    result = holdfast("show", place / "dcp", "--locality")
    assert (result.code, "does not say what each rank held" in result.err) == (2, True)


def test_a_cast_array_is_a_tensor(holdfast: Holdfast, place: Path) -> None:
    """NumPy lacks the type, and its node stated a byte order: the result could not be loaded."""
    torch.save({"model": {"a": np.array([1.0, 2.0], dtype=">f4"), "n": np.arange(2)}}, place / "a")
    words = (place / "a", place / "own", "--to", "holdfast", "--dtype", "bf16")
    assert holdfast("convert", *words).code == 0
    values = Checkpointer(place / "own").load_all().values["model"]
    assert torch.equal(values["a"], torch.tensor([1.0, 2.0], dtype=torch.bfloat16))
    assert isinstance(values["n"], np.ndarray)
