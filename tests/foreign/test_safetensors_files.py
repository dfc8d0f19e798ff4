"""Hugging Face folders and safetensors files: read as they are, whoever wrote them."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from holdfast import Checkpointer, ConfigError, CorruptionError, MismatchError, PlacementError
from holdfast.foreign.formats import open_catalog
from tests.cli.conftest import Holdfast, holdfast
from tests.foreign.contract import check_catalog, check_format, raw, sample_tensors
from tests.harness import RankContext, run_ranks

__all__ = ["holdfast"]


def write_folder(folder: Path, tensors: dict[str, torch.Tensor], *, num_files: int = 2) -> None:
    """Write tensors over several files, with an index."""
    folder.mkdir(parents=True)
    names = list(tensors)
    placed = {}
    for number in range(num_files):
        file = f"model-{number + 1:05d}-of-{num_files:05d}.safetensors"
        own = {name: tensors[name].contiguous() for name in names[number::num_files]}
        save_file(own, folder / file, metadata={"format": "pt"})
        placed |= dict.fromkeys(own, file)
    index = {"metadata": {"total_size": 1}, "weight_map": placed}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("kind", ["file", "folder", "folder of several", "links"])
def test_safetensors_under_every_layout(tmp_path: Path, kind: str) -> None:
    tensors = sample_tensors()
    path = tmp_path / "hf"
    if kind == "file":
        save_file(tensors, path)  # detected by content: the name says nothing
    elif kind == "folder":
        path.mkdir()
        save_file(tensors, path / "model.safetensors")
    else:
        write_folder(path, tensors)
    if kind == "links":  # as the cache of the Hugging Face hub has them
        linked = tmp_path / "snapshot"
        linked.mkdir()
        for number, each in enumerate(sorted(path.iterdir())):
            blob = each.rename(tmp_path / f"blob{number}")
            (linked / each.name).symlink_to(Path("..") / blob.name)
        path = linked
    check_format(path, "model", tensors)


def _write_sharded(context: RankContext, path: str, tensors: dict[str, torch.Tensor]) -> None:
    mesh = init_device_mesh("cpu", (2,))
    state: dict[str, torch.Tensor] = {
        name: distribute_tensor(each, mesh, [Shard(0)]) if each.ndim else each
        for name, each in tensors.items()
    }
    assert any(isinstance(each, DTensor) for each in state.values())
    dcp.save(state, storage_writer=dcp.HuggingFaceStorageWriter(path, save_distributed=True))
    Path(f"{path}-and-whole").mkdir(exist_ok=True)
    writer = dcp.HuggingFaceStorageWriter(
        f"{path}-and-whole", save_distributed=True, enable_consolidation=True
    )
    dcp.save(state, storage_writer=writer)


def test_the_sharded_variant_of_dcp(tmp_path: Path) -> None:
    names = ("layers.0.weight", "layers.1.weight", "half")
    tensors = {name: sample_tensors()[name] for name in names}
    path = tmp_path / "sharded"
    run_ranks(2, _write_sharded, str(path), tensors)
    assert len(list(path.glob("shard-*"))) == 2
    check_format(path, "model", tensors)
    whole = tmp_path / "sharded-and-whole"
    check_catalog(whole, "model", tensors)
    # The shards that it was made of.
    note = "sharded/: a folder with Hugging Face safetensors; name it to read it"
    assert [*open_catalog(whole).left_out] == [note]
    check_catalog(whole / "sharded", "model", tensors)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_what_the_consolidation_of_torch_has_lost_is_not_read_as_zero(tmp_path: Path) -> None:
    """X24: torch writes 0 for a tensor without dims; its shards tell, where they are left."""
    whole = tmp_path / "whole"
    state = {"w": torch.ones(3), "scale": torch.tensor(1.5), "zero": torch.tensor(0.0)}
    writer = dcp.HuggingFaceStorageWriter(
        str(whole), save_distributed=True, enable_consolidation=True
    )
    dcp.save(state, storage_writer=writer, no_dist=True)
    check_catalog(whole / "sharded", "model", state)
    if load_file(whole / "model-00001-of-00001.safetensors")["scale"].item():
        check_catalog(whole, "model", state)
        return
    with pytest.raises(CorruptionError, match=r"0 is not the value of scale.*name sharded"):
        open_catalog(whole)
    (whole / "sharded").rename(tmp_path / "moved")
    (note,) = open_catalog(whole).left_out
    assert note.startswith("scale, zero: 0 may not be the value")
    # Files of other programs have nothing of this.
    save_file(state | {"scale": torch.tensor(0.0)}, tmp_path / "other.safetensors")
    assert not open_catalog(tmp_path / "other.safetensors").left_out


def test_what_the_index_does_not_name_is_left_out_by_name(tmp_path: Path) -> None:
    tensors = sample_tensors()
    write_folder(tmp_path / "hf", tensors)
    index = tmp_path / "hf/model.safetensors.index.json"
    table = json.loads(index.read_text())
    table["weight_map"].pop("half")
    index.write_text(json.dumps(table))
    (tmp_path / "hf/optimizer.pt").write_bytes(b"x")
    save_file({"x": torch.ones(1)}, tmp_path / "hf/other.safetensors")
    tensors.pop("half")
    check_catalog(tmp_path / "hf", "model", tensors)
    left_out = " ".join(open_catalog(tmp_path / "hf").left_out)
    for name in ("'half'", "optimizer.pt", "other.safetensors"):
        assert name in left_out
    report = Checkpointer(tmp_path / "run").load_all(source=tmp_path / "hf")
    assert len(report.left_out) == 3
    assert "3 left out by the format, without digests" in report.summary()


def test_loads_are_as_strict_as_from_our_own(tmp_path: Path) -> None:
    save_file({"a": torch.ones(3), "b": torch.ones(2)}, tmp_path / "x.safetensors")
    checkpointer = Checkpointer(tmp_path / "run")
    model = torch.nn.ParameterDict({"a": torch.zeros(3)})
    state = {"model": model}
    with pytest.raises(MismatchError, match=r"model\.b"):
        checkpointer.load(state, source=tmp_path / "x.safetensors")
    assert not model["a"].any()
    wrong = torch.nn.ParameterDict({"a": torch.zeros(4), "b": torch.zeros(2)})
    with pytest.raises(MismatchError, match="shape"):
        checkpointer.load({"model": wrong}, source=tmp_path / "x.safetensors")
    with pytest.raises(ConfigError, match="does not exist"):
        checkpointer.load(state, source=tmp_path / "y")
    (tmp_path / "text").write_text("hello, world")
    with pytest.raises(ConfigError, match="not a checkpoint in a format that is known"):
        checkpointer.load(state, source=tmp_path / "text")


def _rewrite(path: Path, change: dict[str, object]) -> None:
    """Change the header of a safetensors file."""
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    for name, value in change.items():
        header.setdefault(name, {}) if not isinstance(value, dict) else None
        header[name] = {**header.get(name, {}), **value} if isinstance(value, dict) else value
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


HEADERS: dict[str, dict[str, object]] = {
    "another shape": {"a": {"shape": [4]}},
    "a negative shape": {"a": {"shape": [-3]}},
    "a huge shape": {"a": {"shape": [2**62, 2**62]}},
    "bytes elsewhere": {"a": {"data_offsets": [4, 16]}},
    "bytes beyond": {"a": {"data_offsets": [0, 2**60]}},
    "a type of no one": {"a": {"dtype": "F3"}},
    "a type of four bits": {"a": {"dtype": "F4"}},
    "no object": {"a": "text"},
    "offsets of other tensors": {"__metadata__": {"DCP_SHARDING_INFO": '{"c": 1}'}},
    "offsets of a tensor twice": {
        "__metadata__": {
            "DCP_SHARDING_INFO": '{"a": {"saved_offsets": [9]}, "a": {"saved_offsets": [0]}, '
            '"b": {"saved_offsets": [0]}}'
        }
    },
    "offsets that overflow": {
        "__metadata__": {
            "DCP_SHARDING_INFO": json.dumps(
                {"a": {"saved_offsets": [2**62]}, "b": {"saved_offsets": [0]}}
            )
        }
    },
    "offsets with a gap": {
        "__metadata__": {
            "DCP_SHARDING_INFO": json.dumps(
                {"a": {"saved_offsets": [5]}, "b": {"saved_offsets": [0]}}
            )
        }
    },
}


@pytest.mark.parametrize("name", HEADERS)
def test_a_header_that_lies_is_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.ones(3), "b": torch.ones(2)}, path)
    _rewrite(path, HEADERS[name])
    with pytest.raises(CorruptionError):
        Checkpointer(tmp_path / "run").load_all(source=path)


INDICES: dict[str, object] = {
    "no map": {"metadata": {}},
    "a list": [],
    "a path upwards": {"weight_map": {"half": "../secret.safetensors"}},
    "an absolute path": {"weight_map": {"half": "/etc/passwd"}},
    "a file that is not there": {"weight_map": {"half": "model-00003-of-00002.safetensors"}},
    "a tensor that is not there": {"weight_map": {"x": "model-00001-of-00002.safetensors"}},
    "a number": {"weight_map": {"half": 3}},
}


@pytest.mark.parametrize("name", INDICES)
def test_an_index_that_lies_is_refused(tmp_path: Path, name: str) -> None:
    write_folder(tmp_path / "hf", sample_tensors())
    save_file({"half": torch.ones(1)}, tmp_path / "secret.safetensors")
    index = tmp_path / "hf/model.safetensors.index.json"
    index.write_text(json.dumps(INDICES[name]))
    with pytest.raises(CorruptionError):
        open_catalog(tmp_path / "hf")
    index.write_text("[" * 100_000)
    with pytest.raises(CorruptionError):
        open_catalog(tmp_path / "hf")


def test_one_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    for name in ("one", "two"):
        save_file({"a": torch.ones(3)}, tmp_path / f"hf/{name}.safetensors")
    with pytest.raises(CorruptionError, match=r"in several files: one.safetensors, two"):
        open_catalog(tmp_path / "hf")
    # A shard of DCP's that is left of a save by more ranks was a copy, and either was read.
    for rank in (1, 3):
        shard = f"dcp/shard-0000{rank}-model-00001-of-00001.safetensors"
        words = {"DCP_SHARDING_INFO": json.dumps({"a": {"saved_offsets": [0]}})}
        (tmp_path / "dcp").mkdir(exist_ok=True)
        save_file({"a": torch.full((3,), rank)}, tmp_path / shard, metadata=words)
    with pytest.raises(CorruptionError, match=r"'a': the elements at \[0\] are in two places"):
        open_catalog(tmp_path / "dcp")


def test_a_file_cut_at_any_byte_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.ones(3), "b": torch.ones(2)}, path)
    data = path.read_bytes()
    for size in range(len(data)):
        path.write_bytes(data[:size])
        with pytest.raises((CorruptionError, ConfigError)):
            open_catalog(path)


def test_a_file_that_is_cut_after_it_was_opened_fails_by_name(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.arange(3.0), "b": torch.ones(2)}, path)
    catalog = open_catalog(path)
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(CorruptionError, match=r"model\.b.*x\.safetensors"):
        Checkpointer(tmp_path / "run").load_all(source=catalog)


def test_empty_and_scalar_tensors_alone(tmp_path: Path) -> None:
    tensors = {"none": torch.zeros(0, 3), "one": torch.tensor(5, dtype=torch.int8)}
    save_file(tensors, tmp_path / "x.safetensors")
    values = Checkpointer(tmp_path / "run").load_all(source=tmp_path / "x.safetensors").values
    assert raw(values["model"]["one"]) == b"\x05"
    assert values["model"]["none"].shape == (0, 3)


def test_a_model_on_the_meta_device_is_filled_once_it_has_memory(tmp_path: Path) -> None:
    source = torch.nn.Linear(4, 3)
    save_file(source.state_dict(), tmp_path / "x.safetensors")
    with torch.device("meta"):
        model = torch.nn.Linear(4, 3)
    checkpointer = Checkpointer(tmp_path / "run")
    with pytest.raises(PlacementError, match=r"to_empty"):
        checkpointer.load({"model": model}, source=tmp_path / "x.safetensors")
    model.to_empty(device="cpu")
    checkpointer.load({"model": model}, source=tmp_path / "x.safetensors")
    assert raw(model.weight) == raw(source.weight)


def test_a_folder_with_a_shard_missing_is_refused_without_an_index_too(tmp_path: Path) -> None:
    for number in (1, 2, 4):
        save_file(
            {f"w{number}": torch.ones(2)}, tmp_path / f"model-{number:05d}-of-00004.safetensors"
        )
    with pytest.raises(CorruptionError, match=r"there is no model-00003-of-00004\.safetensors"):
        open_catalog(tmp_path)
    alone = open_catalog(tmp_path / "model-00002-of-00004.safetensors")
    assert list(alone.tensors) == ["model.w2"]
    assert "one of 4 shards" in alone.left_out[0]
    save_file({"w3": torch.ones(2)}, tmp_path / "model-00003-of-00004.safetensors")
    assert len(open_catalog(tmp_path).tensors) == 4


def test_an_index_that_names_a_tensor_twice_is_refused(tmp_path: Path) -> None:
    for number in (1, 2):
        save_file({"w": torch.full((2,), float(number))}, tmp_path / f"{number}.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"w": "1.safetensors", "w": "2.safetensors"}}')
    with pytest.raises(CorruptionError, match="'w' is there twice"):
        open_catalog(tmp_path)


@pytest.mark.parametrize("has_index", [False, True])
def test_a_file_of_a_model_that_was_not_downloaded_is_an_error(
    has_index: bool, tmp_path: Path
) -> None:
    for name in ("a", "b"):
        save_file({name: torch.ones(2)}, tmp_path / f"{name}.safetensors")
    if has_index:
        table = {"weight_map": {"a": "a.safetensors", "b": "b.safetensors"}}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(table))
    (tmp_path / "._a.safetensors").write_bytes(b"of the system")
    assert len(open_catalog(tmp_path).tensors) == 2
    (tmp_path / "b.safetensors").write_text("version https://git-lfs.github.com/spec/v1\nsize 9\n")
    with pytest.raises(CorruptionError, match=r"b\.safetensors: .*git lfs pull"):
        open_catalog(tmp_path)
    (tmp_path / "a.safetensors").unlink()
    with pytest.raises(ConfigError, match="git lfs pull"):
        open_catalog(tmp_path)
    for name in ("a", "b"):
        (tmp_path / f"{name}.safetensors").unlink(missing_ok=True)
        (tmp_path / f"{name}.safetensors").symlink_to(f"{name}.safetensors")
    with pytest.raises(ConfigError, match=r"a\.safetensors .*a link that leads nowhere"):
        open_catalog(tmp_path)


def test_what_a_header_states_goes_along(tmp_path: Path, holdfast: Holdfast) -> None:
    """Settings of an adapter, notes of a trainer: through every format that has a place for them.

    Prevents that an adapter is converted and no program knows its scale any more.
    """
    words = {"format": "pt", "lora_alpha": "16", "ünï": "x"}
    folder = tmp_path / "model"
    folder.mkdir()
    files = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    save_file({"a": torch.ones(2)}, folder / files[0], metadata=words)
    save_file({"b": torch.ones(2)}, folder / files[1], metadata={**words, "lora_alpha": "8"})
    index = {
        "metadata": {"total_size": 16, "deep": [1], "no": "\ud800"},
        "weight_map": {"a": files[0], "b": files[1]},
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    done = holdfast("convert", folder, tmp_path / "own", "--to", "holdfast")
    assert f"{files[1]}: lora_alpha of its header, which another file has otherwise" in done.out
    kept = {"lora_alpha": "16", "ünï": "x", "deep": [1], "no": "\ud800"}
    assert Checkpointer(tmp_path / "own").load_all().metadata == kept
    done = holdfast("convert", tmp_path / "own", tmp_path / "x.safetensors", "--to", "safetensors")
    assert "metadata that is not text: deep, no" in done.out
    with safe_open(tmp_path / "x.safetensors", "pt") as file:
        assert file.metadata() == words
    done = holdfast("convert", folder, tmp_path / "x.pt", "--to", "torch_save")
    assert "the user's metadata is left out: deep, no, lora_alpha, ünï" in done.out


def test_a_folder_without_its_config_says_so(tmp_path: Path, holdfast: Holdfast) -> None:
    folder = tmp_path / "model"
    (folder / "original").mkdir(parents=True)
    save_file({"a": torch.ones(2)}, folder / "model.safetensors")
    for name in ("config.json", "tokenizer.json"):
        (folder / name).write_text("{}")
    words = ["--to", "huggingface", "--dtype", "bf16"]
    done = holdfast("convert", folder, tmp_path / "a", *words)
    assert f"config.json, tokenizer.json: --config-from {folder} copies" in done.out
    done = holdfast("convert", folder, tmp_path / "b", *words, "--config-from", folder)
    assert f"original of {folder}: no small file, so not copied" in done.out
    assert sorted(path.name for path in (tmp_path / "b").iterdir()) == [
        "config.json", "model.safetensors", "tokenizer.json",
    ]  # fmt: skip


def test_next_to_the_whole_model_other_files_are_left_out(tmp_path: Path) -> None:
    """An adapter, and the same weights under other names: neither belongs to the model."""
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    others = ["adapter_model.safetensors", "consolidated.safetensors"]
    for name in others:
        save_file({"b": torch.ones(2)}, tmp_path / name)
    with Checkpointer(tmp_path / "run") as checkpointer:
        report = checkpointer.load_all(source=tmp_path)
    assert list(report.values["model"]) == ["a"]
    assert list(report.left_out) == [f"{name}: name this file to read it" for name in others]


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_two_models_in_a_folder_are_not_one_and_none_is_taken(tmp_path: Path, suffix: str) -> None:
    """X24: a model next to the index of an earlier save, which other programs prefer."""
    stem = {"safetensors": "model", "bin": "pytorch_model"}[suffix]
    save = {"safetensors": save_file, "bin": torch.save}[suffix]
    files = [f"{stem}-0000{i}-of-00002.{suffix}" for i in (1, 2)]
    for name, file in zip("ab", files, strict=True):
        save({name: torch.ones(2)}, tmp_path / file)
    index = tmp_path / f"{stem}.{suffix}.index.json"
    index.write_text(json.dumps({"weight_map": dict(zip("ab", files, strict=True))}))
    assert sorted(open_catalog(tmp_path).tensors) == ["model.a", "model.b"]
    whole = tmp_path / f"{stem}.{suffix}"
    save({"a": torch.zeros(2), "c": torch.zeros(2)}, whole)
    with pytest.raises(CorruptionError, match=f"name {whole.name} to read it"):
        open_catalog(tmp_path)
    assert sorted(open_catalog(whole).tensors) == ["model.a", "model.c"]
    (tmp_path / files[1]).rename(tmp_path / "elsewhere")
    with pytest.raises(CorruptionError, match="left from an earlier save, name one file"):
        open_catalog(tmp_path)
    index.unlink()
    with pytest.raises(CorruptionError, match=f"there is no {files[1]}"):
        open_catalog(tmp_path)
    (tmp_path / "elsewhere").rename(tmp_path / files[1])
    catalog = open_catalog(tmp_path)
    assert sorted(catalog.tensors) == ["model.a", "model.c"]
    assert [each.partition(":")[0] for each in catalog.left_out] == files


def test_what_is_next_to_shards_without_an_index_is_left_out(tmp_path: Path) -> None:
    """X24: an adapter became a part of the model, and so did shards of an earlier save."""
    for i in (1, 2):
        save_file({f"w{i}": torch.ones(2)}, tmp_path / f"model-0000{i}-of-00002.safetensors")
    save_file({"lora": torch.ones(2)}, tmp_path / "adapter_model.safetensors")
    catalog = open_catalog(tmp_path)
    assert sorted(catalog.tensors) == ["model.w1", "model.w2"]
    assert [each.partition(":")[0] for each in catalog.left_out] == ["adapter_model.safetensors"]
    save_file({"w": torch.ones(2)}, tmp_path / "model-00001-of-00001.safetensors")
    with pytest.raises(CorruptionError, match="shards of 2 models"):
        open_catalog(tmp_path)


def test_an_index_of_a_variant_is_read(tmp_path: Path) -> None:
    """X24: the half that was there of `variant="fp16"` was a model."""
    names = {f"w{i}": f"model.fp16-part{i}.safetensors" for i in (1, 2)}
    for name, file in names.items():
        save_file({name: torch.ones(2)}, tmp_path / file)
    index = tmp_path / "model.safetensors.index.fp16.json"
    index.write_text(json.dumps({"weight_map": names}))
    assert len(open_catalog(tmp_path).tensors) == 2
    (tmp_path / names["w2"]).unlink()
    with pytest.raises(CorruptionError, match=r"'w2' is to be in 'model\.fp16-part2\.safe"):
        open_catalog(tmp_path)
