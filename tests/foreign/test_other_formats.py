"""Formats that are not read are refused by name; what is next to a checkpoint is listed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from holdfast import ConfigError, CorruptionError
from holdfast.foreign.formats import open_catalog
from holdfast.foreign.location import Location
from holdfast.storage import Storage
from tests.cli.conftest import Holdfast, holdfast

__all__ = ["holdfast"]

GGUF = b"GGUF\x03\0\0\0" + bytes(24)
HDF5 = b"\x89HDF\r\n\x1a\n" + bytes(24)
WEIGHTS = object()
"""Stands for a file of `torch.save` with a state dict."""

REFUSED: dict[str, tuple[Mapping[str, object], str, str]] = {
    "gguf": ({"model-q4.gguf": GGUF}, "GGUF", "gguf_file"),
    "gguf by its bytes": ({"blobs": GGUF}, "GGUF", "gguf_file"),
    "numpy": ({"arrays.npy": b"\x93NUMPY\x01\0"}, "NumPy", r"numpy\.load"),
    "keras": ({"model.weights.h5": HDF5}, "HDF5 or Keras", "save the weights"),
    "flax": ({"flax_model.msgpack": b"\x81\xa1a\x01"}, "Flax", "msgpack_restore"),
    "saved model": ({"saved_model.pb": b"\x08\x01"}, "TensorFlow", "load it with TensorFlow"),
    "tensorflow": ({"m.ckpt-1.data-00000-of-00001": b"\0"}, "TensorFlow", "save the variables"),
    "orbax": ({"_CHECKPOINT_METADATA": b"{}", "d/x": b"x"}, "Orbax", "save_file"),
    "t5x": ({"checkpoint": b"\x81", "target.a/0": b"x"}, "T5X", "save_file"),
    "onnx": ({"model.onnx": b"\x08\x07"}, "ONNX", "model that it was made from"),
    "nemo": ({"model.nemo": b"./model_config.yaml"}, "NeMo's archive", "tar -xf"),
    "archive": ({"run.tar.gz": b"\x1f\x8b"}, "an archive", "unpack it"),
    "no metadata of dcp": ({"__0_0.distcp": WEIGHTS}, r"without its \.metadata", "not finished"),
    "zero 3": (
        {f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt": WEIGHTS for rank in (0, 1)},
        "DeepSpeed",
        r"zero_to_fp32\.py",
    ),
    "zero 1, two model ranks": (
        {f"mp_rank_0{rank}_model_states.pt": WEIGHTS for rank in (0, 1)},
        "DeepSpeed",
        r"zero_to_fp32\.py",
    ),
    "a run of deepspeed": (
        {"latest": b"global_step5", "global_step5/x": b"x"},
        "DeepSpeed",
        "zero",
    ),
    "llama": (
        {f"consolidated.0{rank}.pth": WEIGHTS for rank in (0, 1)},
        "Llama's model-parallel",
        "convert_llama_weights_to_hf",
    ),
    "megatron": (
        {f"mp_rank_0{rank}/model_optim_rng.pt": WEIGHTS for rank in (0, 1)},
        "Megatron's format `torch`",
        "--ckpt-format torch_dist",
    ),
    "a run of a trainer": (
        {f"checkpoint-{step}/pytorch_model.bin": WEIGHTS for step in (500, 1000)},
        r"holds some: name checkpoint-1000 \(torch\.save\), checkpoint-500",
        "",
    ),
    "a pipeline of diffusers": (
        {"model_index.json": b"{}", "unet/diffusion_pytorch_model.bin": WEIGHTS},
        r"holds some: name unet \(torch\.save\)",
        "",
    ),
    "an empty file": ({"model.safetensors": b""}, "", "not a checkpoint"),
}


def write(folder: Path, files: Mapping[str, object]) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if content is WEIGHTS:
            torch.save({"w": torch.ones(2)}, path)
        else:
            assert isinstance(content, bytes)
            path.write_bytes(content)
    return folder


@pytest.mark.parametrize("kind", REFUSED)
def test_formats_that_are_not_read_are_named(tmp_path: Path, kind: str) -> None:
    """X24: each file of a rank was read as a part of its own, which looks like a whole model."""
    files, title, advice = REFUSED[kind]
    folder = write(tmp_path / "place", files)
    with pytest.raises(ConfigError, match=f"{title}.*{advice}"):
        open_catalog(folder)
    only = [name for name, content in files.items() if content is not WEIGHTS and "/" not in name]
    if len(files) == 1 and only and title:
        with pytest.raises(ConfigError, match=f"{only[0]}.*{title}.*{advice}"):
            open_catalog(folder / only[0])


def test_a_file_of_one_rank_says_so(tmp_path: Path) -> None:
    for kind in ("zero 3", "llama"):
        folder = write(tmp_path / kind, REFUSED[kind][0])
        for name in REFUSED[kind][0]:
            catalog = open_catalog(folder / name)
            assert f"{name} has what one rank held" in " ".join(catalog.left_out)
    (folder / "consolidated.01.pth").unlink()
    assert [*open_catalog(folder).tensors] == ["model.w"]
    assert not open_catalog(folder / "consolidated.00.pth").left_out


def test_what_is_next_to_a_checkpoint_is_listed(tmp_path: Path, holdfast: Holdfast) -> None:
    """X4: weights in a folder next to random streams, as Accelerate has them, were lost."""
    place = tmp_path / "state"
    dcp.save({"w": torch.ones(4)}, checkpoint_id=place)
    for name in ("meta.pt", "__7_0.distcp"):
        torch.save({"epoch": 3}, place / name)
    (place / "__8_0.distcp").touch()  # of a rank that had nothing to write
    for number in range(1010):
        (place / f"events.{number}").touch()  # before the folders, by name
    write(
        place, {"old/pytorch_model.bin": WEIGHTS, "zero/latest_universal": b"x", "config.json": b""}
    )
    (place / "newest").symlink_to("old")
    (place / "nowhere").symlink_to("nowhere")
    expected = [
        "__7_0.distcp: .metadata has no item of it; it is left from another save, or .metadata is",
        "meta.pt: name this file to read it",
        "newest/: a folder with torch.save; name it to read it",
        "old/: a folder with torch.save; name it to read it",
        "zero/: a folder with DeepSpeed, not read",
    ]
    assert [*open_catalog(place).left_out] == expected
    shown = holdfast("show", place)
    assert all(each.partition(":")[0] in shown.out for each in expected), shown.out
    state = write(
        tmp_path / "trainer", {"random_states_0.pkl": WEIGHTS, "trainer_state.json": b"{}"}
    )
    place.rename(state / "pytorch_model_fsdp_0")
    assert [*open_catalog(state).left_out] == [
        "trainer_state.json: the Trainer's step, epoch and log, not read",
        "pytorch_model_fsdp_0/: a folder with PyTorch DCP; name it to read it",
    ]
    folder = tmp_path / "hub"
    folder.mkdir()
    save_file({"w": torch.ones(2)}, folder / "model.safetensors")
    write(
        folder, {"tf_model.h5": HDF5, "model.gguf": GGUF, "original/consolidated.00.pth": WEIGHTS}
    )
    assert [*open_catalog(folder).left_out] == [
        "model.gguf: GGUF, not read",
        "tf_model.h5: HDF5 or Keras, not read",
        "original/: a folder with torch.save; name it to read it",
    ]
    for number in range(100):
        (folder / f"p{number:02}").mkdir()
    more = "1 more folders, such as p99/: what is in them is not known"
    assert open_catalog(folder).left_out[-1] == more
    # Next to weights that are read, a pointer to others is listed, too.
    (folder / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    torch.save({"w": torch.ones(2)}, folder / "pytorch_model.bin")
    assert "model.safetensors: it is not a safetensors file" in open_catalog(folder).left_out


def test_every_name_of_a_large_folder_is_looked_at() -> None:
    """The last of more than a million names was not there, and nothing said so."""
    names = ["0.log"] * 1_000_000 + ["model.safetensors"]
    folder = cast(Storage, SimpleNamespace(list=lambda path: names))
    assert Location(folder, None, "large").names()[-1] == "model.safetensors"


def test_a_cut_file_of_dcp_is_found_before_anything_is_read(tmp_path: Path) -> None:
    """X24: also metadata of another save, whose ranges end beyond the file."""
    dcp.save({"w": torch.ones(4)}, checkpoint_id=tmp_path / "one")
    dcp.save({"w": torch.ones(400)}, checkpoint_id=tmp_path / "two")
    (tmp_path / "two/.metadata").rename(tmp_path / "one/.metadata")
    with pytest.raises(CorruptionError, match=r"__0_0\.distcp has \d+ bytes, .*of another save"):
        open_catalog(tmp_path / "one")


def test_weights_of_several_models_in_a_folder_are_refused(tmp_path: Path) -> None:
    for name in ("pytorch_model.bin", "diffusion_pytorch_model.bin"):
        torch.save({"w": torch.ones(2)}, tmp_path / name)
    with pytest.raises(CorruptionError, match="several models"):
        open_catalog(tmp_path)
    (tmp_path / "pytorch_model.bin").unlink()
    assert [*open_catalog(tmp_path).tensors] == ["model.w"]
