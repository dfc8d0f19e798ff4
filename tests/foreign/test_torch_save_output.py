"""Files of `torch.save` that were never near torch: torch loads them, mapped and restricted."""

from __future__ import annotations

import zipfile
from collections import OrderedDict, deque
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from holdfast.errors import ConfigError, CorruptionError, StorageError
from holdfast.foreign import torch_save_output
from holdfast.foreign.catalog import Catalog, Chunk, FileBytes
from holdfast.foreign.convert import reopen_foreign
from holdfast.foreign.formats import open_catalog
from holdfast.foreign.output import Output, write_output
from holdfast.foreign.torch_save import open_torch_save
from holdfast.format.envelopes.torch_archive import ALIGNMENT, layout_archive, tensor_value
from holdfast.format.values import per_rank_node
from holdfast.state.optimizer_state import OptimizerState
from holdfast.storage import PosixStorage, Storage
from tests.foreign.catalogs import TRAINED_DTYPES, catalog_of, equal_bits, sample
from tests.foreign.making import MemorySource


def write(tree: dict[str, Any], path: Path, **options: Any) -> Output:
    catalog = catalog_of(tree)
    output = torch_save_output.layout(catalog, **options)
    write_output(catalog, output, PosixStorage(path.parent), path.name, reopen=reopen_foreign)
    assert zipfile.ZipFile(path).testzip() is None
    return output


def of_all_dtypes() -> dict[str, torch.Tensor]:
    shapes = {"matrix": (3, 5), "scalar": (), "empty": (0, 4), "empty_inner": (2, 0), "odd": (1, 1)}
    return {
        f"{str(dtype)[6:]}.{name}": sample(dtype, shape)
        for dtype in TRAINED_DTYPES
        for name, shape in shapes.items()
    }


@pytest.mark.parametrize("mmap", [False, True])
def test_every_type_arrives(tmp_path: Path, mmap: bool) -> None:
    tensors = of_all_dtypes()
    output = write({"model": tensors}, tmp_path / "model.pt")
    assert output.notes == []
    loaded = torch.load(tmp_path / "model.pt", weights_only=True, mmap=mmap)
    assert type(loaded) is OrderedDict
    assert list(loaded) == list(tensors)
    for name, tensor in tensors.items():
        assert equal_bits(loaded[name], tensor), name
        assert loaded[name].stride() == tensor.stride(), name
        assert loaded[name].data_ptr() % ALIGNMENT == 0 or not mmap


def test_our_own_reader_opens_it(tmp_path: Path) -> None:
    write({"model": of_all_dtypes()}, tmp_path / "model.pt")
    data = (tmp_path / "model.pt").read_bytes()
    result = open_torch_save(MemorySource(data), place="model.pt")
    assert isinstance(result.value, dict)
    assert len(result.storages) == len(of_all_dtypes())


def test_a_module_loads_it(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4), nn.BatchNorm1d(4))
    model[1].weight = model[0].weight
    write({"model": dict(model.state_dict())}, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=True)
    assert loaded["0.weight"].data_ptr() == loaded["1.weight"].data_ptr()
    other = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4), nn.BatchNorm1d(4))
    other.load_state_dict(loaded)
    for name, tensor in model.state_dict().items():
        assert equal_bits(other.state_dict()[name], tensor)


def two_groups(model: nn.Linear, **settings: Any) -> torch.optim.Optimizer:
    groups: list[dict[str, Any]] = [{"params": [model.bias], **settings}, {"params": model.weight}]
    return torch.optim.AdamW(groups)


def trained() -> tuple[nn.Linear, torch.optim.Optimizer]:
    model = nn.Linear(3, 2)
    optimizer = two_groups(model, lr=0.1)
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_the_whole_tree(tmp_path: Path) -> None:
    model, optimizer = trained()
    tree: dict[str, Any] = {
        "model": dict(model.state_dict()),
        "optimizer": OptimizerState(optimizer, model).tree(),
        "loop": {"step": 7, "seen": [1, (2.5, None)], 3: {"x", "y"}, "ema": [torch.ones(2), "a"]},
    }
    output = write(tree, tmp_path / "all.pt", whole_tree=True)
    assert output.notes == []
    loaded = torch.load(tmp_path / "all.pt", weights_only=True)
    assert equal_bits(loaded["loop"]["ema"].pop(0), tree["loop"]["ema"].pop(0))
    assert loaded["loop"] == tree["loop"]
    groups = loaded["optimizer"]["param_groups"]
    assert [group["params"] for group in groups] == [["bias"], ["weight"]]
    other = two_groups(model)
    other.load_state_dict(loaded["optimizer"])
    assert other.param_groups[0]["lr"] == 0.1
    for param, entries in optimizer.state.items():
        for name, value in entries.items():
            assert equal_bits(other.state[param][name], value)


def test_one_part_that_is_an_optimizer(tmp_path: Path) -> None:
    model, optimizer = trained()
    tree = {"model": {}, "optimizer": OptimizerState(optimizer, model).tree()}
    output = write(tree, tmp_path / "o.pt", part="optimizer")
    assert output.notes == ["part 'model' was not asked for"]
    loaded = torch.load(tmp_path / "o.pt", weights_only=True)
    assert equal_bits(
        loaded["state"]["weight"]["exp_avg"], optimizer.state[model.weight]["exp_avg"]
    )


def test_what_is_not_written_is_noted(tmp_path: Path) -> None:
    catalog = catalog_of(
        {"model": {"w": torch.ones(2), "q": deque([torch.ones(1)])}},
        left_out=["x.bin was not read"],
        metadata={"user": 1},
    )
    parts = {**catalog.parts, "rng": per_rank_node(["dp"], {"dp=0": 1})}
    output = torch_save_output.layout(replace(catalog, parts=parts), whole_tree=True)
    assert output.notes == [
        "x.bin was not read",
        "rng is left out: it is a value per rank",
        "model.q is a deque: torch.load reads the file with weights_only=False",
        "the user's metadata is left out: user",
    ]
    write_output(catalog, output, PosixStorage(tmp_path), "a.pt", reopen=reopen_foreign)
    loaded = torch.load(tmp_path / "a.pt", weights_only=False)
    assert type(loaded["model"]["q"]) is deque
    with pytest.raises(ConfigError, match="part 'x' is not there"):
        torch_save_output.layout(catalog, part="x")


def test_a_damaged_source_leaves_nothing(tmp_path: Path) -> None:
    catalog = catalog_of({"model": {"w": torch.ones(4), "v": torch.ones(3)}})
    output = torch_save_output.layout(catalog)
    held = catalog.tensors["model.w"]
    short = replace(held, chunks=(Chunk(held.whole, FileBytes("absent", 0)),))
    for bad in (replace(held, chunks=()), short):
        broken = replace(catalog, tensors={**catalog.tensors, "model.w": bad})
        with pytest.raises((CorruptionError, StorageError)):
            write_output(
                broken, output, PosixStorage(tmp_path / "out"), "a.pt", reopen=reopen_foreign
            )
        assert list((tmp_path / "out").iterdir()) == []

    def changed(storage: Storage, name: str) -> Catalog:
        path = tmp_path / "out" / name
        data = bytearray(path.read_bytes())
        data[output.files[0].extents[0].start] ^= 1
        path.write_bytes(data)
        return open_catalog(path)

    with pytest.raises(CorruptionError, match="does not read back"):
        write_output(catalog, output, PosixStorage(tmp_path / "out"), "a.pt", reopen=changed)
    assert list((tmp_path / "out").iterdir()) == []


def test_an_archive_beyond_four_gib_is_opened(tmp_path: Path) -> None:
    sizes = [(1 << 32) + 5, 64, (1 << 32) - 1, 3]
    archive = layout_archive(b"\x80\x02N.", sizes)
    assert all(start % ALIGNMENT == 0 for start in archive.starts)
    path = tmp_path / "large.pt"
    with path.open("wb") as file:
        file.truncate(archive.nbytes)
        for at, data in archive.literals:
            file.seek(at)
            file.write(data)
    reader: Any = torch._C.PyTorchFileReader(str(path))
    with zipfile.ZipFile(path) as opened:
        for number, (size, start) in enumerate(zip(sizes, archive.starts, strict=True)):
            info = opened.getinfo(f"archive/data/{number}")
            assert info.file_size == size
            assert reader.get_record_offset(f"data/{number}") == start
    path.unlink()


def test_strides_are_those_of_torch() -> None:
    for shape in [(), (1,), (0,), (3, 0, 2), (0, 4), (2, 3, 4)]:
        made = tensor_value("F32", shape, 0)
        assert made.args[3] == torch.empty(shape).stride(), shape
