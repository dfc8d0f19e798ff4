"""DCP directories that were never near torch: torch loads them, whole, in parts and sharded."""

from __future__ import annotations

import io
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys, load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, zeros

from holdfast.arrays.boxes import Box
from holdfast.errors import CorruptionError, PlanError
from holdfast.foreign import dcp_output
from holdfast.foreign.catalog import Catalog
from holdfast.foreign.convert import reopen_foreign
from holdfast.foreign.formats import open_catalog
from holdfast.foreign.output import Output, write_output
from holdfast.format.values import node_bytes
from holdfast.state.optimizer_state import OptimizerState
from holdfast.storage import PosixStorage, Storage
from tests.foreign.catalogs import TRAINED_DTYPES, Boxes, catalog_of, equal_bits, sample, whole
from tests.harness import RankContext, run_ranks


def write(tree: dict[str, Any], path: Path, *, boxes: Boxes = whole, **options: Any) -> Output:
    catalog = catalog_of(tree, boxes=boxes)
    output = dcp_output.layout(catalog, **options)
    write_output(catalog, output, PosixStorage(path.parent), path.name, reopen=reopen_foreign)
    return output


def metadata_of(path: Path) -> Metadata:
    result = pickle.loads((path / ".metadata").read_bytes())
    assert isinstance(result, Metadata)
    return result


def quarters(key: str, shape: tuple[int, ...]) -> Sequence[Box]:
    """The boxes of a tensor that is cut in two of its dims, in no order."""
    if len(shape) < 2 or 0 in shape:
        return whole(key, shape)
    a, b = (shape[0] + 1) // 2, (shape[1] + 1) // 2
    spans = [(a, shape[0] - a, 0, b), (0, a, b, shape[1] - b), (0, a, 0, b)]
    spans.append((a, shape[0] - a, b, shape[1] - b))
    return [
        Box((x, y, *[0] * (len(shape) - 2)), (n, m, *shape[2:])) for x, n, y, m in spans if n and m
    ]


def of_all_dtypes() -> dict[str, torch.Tensor]:
    shapes = {"matrix": (5, 4), "scalar": (), "empty": (0, 4), "cube": (3, 2, 2)}
    return {
        f"{str(dtype)[6:]}.{name}": sample(dtype, shape)
        for dtype in TRAINED_DTYPES
        for name, shape in shapes.items()
    }


@pytest.mark.parametrize(
    "options", [{}, {"max_file_nbytes": 400, "max_chunk_nbytes": 16}], ids=["default", "small"]
)
def test_every_type_arrives(tmp_path: Path, options: dict[str, int]) -> None:
    tensors = of_all_dtypes()
    output = write({"model": tensors}, tmp_path / "dcp", boxes=quarters, **options)
    assert output.notes == []
    assert len(output.files) == 2 or options
    target = {"model": {name: torch.zeros_like(each) for name, each in tensors.items()}}
    load(target, checkpoint_id=tmp_path / "dcp", no_dist=True)
    for name, tensor in tensors.items():
        assert equal_bits(target["model"][name], tensor), name
    metadata = metadata_of(tmp_path / "dcp")
    for info in metadata.storage_data.values():
        data = (tmp_path / "dcp" / info.relative_path).read_bytes()
        part = io.BytesIO(data[info.offset : info.offset + info.length])
        assert zipfile.ZipFile(part).testzip() is None
    chunks = metadata.state_dict_metadata["model.float32.matrix"].chunks  # type: ignore[union-attr]
    sizes = [tuple(each.sizes) for each in chunks]
    if options:
        assert sizes == [(2, 2), (1, 2)] * 2 + [(2, 2)] * 2
    else:
        assert sizes == [(3, 2)] * 2 + [(2, 2)] * 2


def as_dict(value: Any) -> Any:
    """The metadata as plain values, without what names a save."""
    if hasattr(value, "__dict__"):
        return {key: as_dict(each) for key, each in vars(value).items()}
    if isinstance(value, dict):
        return {key: as_dict(each) for key, each in value.items()}
    return [as_dict(each) for each in value] if isinstance(value, list) else value


def test_the_metadata_is_that_of_torch(tmp_path: Path) -> None:
    tree = {
        "model": {"a.b": torch.ones(2, 3), "c": torch.zeros(()), "d": torch.ones(0, 2).half()},
        "x": {"list": [1, 2], "mixed": [torch.ones(1), {"y": (1,)}], "t": (1, 2), "n": None},
    }
    write(tree, tmp_path / "own")
    save(dict(tree), checkpoint_id=tmp_path / "torch", no_dist=True)
    own, torchs = metadata_of(tmp_path / "own"), metadata_of(tmp_path / "torch")
    assert own.planner_data == torchs.planner_data
    assert list(own.planner_data) == list(torchs.planner_data)
    assert as_dict(own.state_dict_metadata) == as_dict(torchs.state_dict_metadata)
    assert own.storage_data.keys() == torchs.storage_data.keys()
    assert own.version == torchs.version
    assert vars(own).keys() == vars(torchs).keys()
    for one, other in zip(
        sorted(own.storage_data, key=repr), sorted(torchs.storage_data, key=repr), strict=True
    ):
        assert vars(one) == vars(other)
        assert type(one.offset) is type(other.offset)
        here, there = own.storage_data[one], torchs.storage_data[other]
        assert vars(here).keys() == vars(there).keys()
        assert here.relative_path == there.relative_path == "__0_0.distcp"


def test_values_and_the_whole_dict(tmp_path: Path) -> None:
    tree: dict[str, Any] = {
        "model": {"w": torch.ones(2, 3)},
        "loop": {"step": 7, "seen": (1, "a"), "deep": ["y", {"lr": 0.1, "t": torch.ones(2)}]},
    }
    write(tree, tmp_path / "dcp")
    dcp_to_torch_save(tmp_path / "dcp", tmp_path / "all.pt")
    result = torch.load(tmp_path / "all.pt", weights_only=True)
    assert equal_bits(result["model"]["w"], tree["model"]["w"])
    assert result["loop"]["step"] == 7
    assert result["loop"]["seen"] == (1, "a")
    assert equal_bits(result["loop"]["deep"][1].pop("t"), tree["loop"]["deep"][1]["t"])
    assert result["loop"]["deep"] == ["y", {"lr": 0.1}]
    some = _load_state_dict_from_keys({"loop.step", "model"}, checkpoint_id=tmp_path / "dcp")
    assert list(some) == ["loop", "model"] or list(some) == ["model", "loop"]
    assert equal_bits(some["model"]["w"], tree["model"]["w"])
    target: dict[str, Any] = {"loop": {"step": 0, "seen": None}}
    load(target, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert target == {"loop": {"step": 7, "seen": (1, "a")}}


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4), nn.BatchNorm1d(4))


def optimizer_of(model: nn.Module, kind: str) -> torch.optim.Optimizer:
    params = list(model.parameters())
    if kind == "sgd":
        return torch.optim.SGD(params, lr=0.1, momentum=0.9)
    groups: list[dict[str, Any]] = [{"params": params[3:], "lr": 0.5}, {"params": params[:3]}]
    return torch.optim.AdamW(groups, lr=0.2)


def trained(kind: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = net()
    optimizer = optimizer_of(model, kind)
    for _ in range(2):
        model(torch.arange(8.0).view(2, 4)).sum().backward()
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
@pytest.mark.parametrize("flat", [False, True])
def test_a_training_resumes_with_torchs_state_dicts(tmp_path: Path, kind: str, flat: bool) -> None:
    model, optimizer = trained(kind)
    tree = {
        "model": dict(model.state_dict()),
        "optimizer": OptimizerState(optimizer, model).tree(),
    }
    output = write(tree, tmp_path / "dcp", flat_optimizer=flat)
    assert output.notes == []
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    other = net()
    new = optimizer_of(other, kind)
    target: dict[str, Any] = {
        "model": get_model_state_dict(other),
        "optimizer": get_optimizer_state_dict(other, new, options=options),
    }
    load(target, checkpoint_id=tmp_path / "dcp", no_dist=True)
    set_model_state_dict(other, target["model"])
    set_optimizer_state_dict(other, new, target["optimizer"], options=options)
    for name, tensor in model.state_dict().items():
        assert equal_bits(other.state_dict()[name], tensor), name
    restored, expected = new.state_dict(), optimizer.state_dict()
    assert restored["param_groups"] == expected["param_groups"]
    for number, entries in expected["state"].items():
        for name, tensor in entries.items():
            assert equal_bits(restored["state"][number][name], tensor), (number, name)


def test_the_reader_gives_the_same_tree(tmp_path: Path) -> None:
    model, optimizer = trained("adamw")
    tree = {"model": dict(model.state_dict()), "o": OptimizerState(optimizer, model).tree()}
    write(tree, tmp_path / "dcp")
    source, result = catalog_of(tree), open_catalog(tmp_path / "dcp")
    assert list(result.parts) == list(source.parts)
    assert node_bytes(result.parts["model"]) == node_bytes(source.parts["model"])
    one: Any = result.parts["o"]
    other: Any = source.parts["o"]
    assert {k: one[k] for k in ("groups", "membership", "state")} == {
        k: other[k] for k in ("groups", "membership", "state")
    }


def test_a_dict_of_tensors_alone(tmp_path: Path) -> None:
    tree = {"a": torch.ones(3), "b.c": torch.ones(2)}
    write(tree, tmp_path / "dcp")
    target = {name: torch.zeros_like(each) for name, each in tree.items()}
    load(target, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert all(equal_bits(target[name], each) for name, each in tree.items())


def test_tied_tensors_are_there_under_each_name(tmp_path: Path) -> None:
    shared = torch.ones(2, 2)
    write({"model": {"a": shared, "b": shared}}, tmp_path / "dcp")
    target = {"model": {"a": torch.zeros(2, 2), "b": torch.zeros(2, 2)}}
    load(target, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert equal_bits(target["model"]["a"], shared)
    assert equal_bits(target["model"]["b"], shared)


def load_sharded(rank: RankContext, path: str, expected: dict[str, list[Any]]) -> None:
    full = {name: torch.tensor(values) for name, values in expected.items()}
    mesh = init_device_mesh("cpu", (2,))
    for placement in (Shard(0), Shard(1), Replicate()):
        targets = {
            "model": {
                name: zeros(*each.shape, device_mesh=mesh, placements=[placement])
                for name, each in full.items()
            }
        }
        load(targets, checkpoint_id=path)
        for name, each in full.items():
            result = targets["model"][name]
            assert isinstance(result, DTensor)
            placed = distribute_tensor(each, mesh, [placement])
            assert torch.equal(result.to_local(), placed.to_local()), (name, placement)
    model = net()
    fully_shard(model, mesh=mesh)
    optimizer = optimizer_of(model, "adamw")
    target: dict[str, Any] = {
        "net": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
    }
    load(target, checkpoint_id=path)
    set_model_state_dict(model, target["net"])
    set_optimizer_state_dict(model, optimizer, target["optimizer"])
    reference, its_optimizer = trained("adamw")
    for name, tensor in reference.state_dict().items():
        result = model.state_dict()[name]
        assert torch.equal(result.full_tensor() if isinstance(result, DTensor) else result, tensor)
    for param, other in zip(model.parameters(), reference.parameters(), strict=True):
        moment: Any = optimizer.state[param]["exp_avg"]
        assert torch.equal(moment.full_tensor(), its_optimizer.state[other]["exp_avg"])
        assert optimizer.state[param]["step"] == 2


def test_two_ranks_load_shards(tmp_path: Path) -> None:
    full = {"even": torch.arange(24.0).view(4, 6), "odd": torch.arange(15.0).view(5, 3)}
    model, optimizer = trained("adamw")
    tree = {
        "model": full,
        "net": dict(model.state_dict()),
        "optimizer": OptimizerState(optimizer, model).tree(),
    }
    write(tree, tmp_path / "dcp", boxes=quarters, max_chunk_nbytes=32, max_file_nbytes=500)
    assert len(list((tmp_path / "dcp").glob("*.distcp"))) > 2
    run_ranks(2, load_sharded, str(tmp_path / "dcp"), {k: v.tolist() for k, v in full.items()})


def test_what_is_written_in_another_form_is_noted(tmp_path: Path) -> None:
    tree: dict[str, Any] = {
        "x": {
            "empty": {},
            "od": OrderedDict(a=1),
            "ints": {1: "a"},
            "pair": (torch.ones(1), [2]),
            "nothing": [],
            "list": [{}, {"t": torch.ones(1)}],
        }
    }
    output = write(tree, tmp_path / "dcp")
    is_empty = "is an empty dict"
    assert [note for note in output.notes if is_empty not in note] == [
        "x.od is of type OrderedDict: it is written as a dict",
        "x.ints has keys that are not strings: they become strings",
        "x.pair is a tuple with tensors: it is written as a list",
    ]
    assert [note.split()[0] for note in output.notes if is_empty in note] == ["x.empty", "x.list.0"]
    dcp_to_torch_save(tmp_path / "dcp", tmp_path / "all.pt")
    result = torch.load(tmp_path / "all.pt", weights_only=True)["x"]
    assert equal_bits(result["pair"].pop(0), torch.ones(1))
    assert equal_bits(result["list"][1].pop("t"), torch.ones(1))
    assert result == {
        "od": {"a": 1}, "ints": {"1": "a"}, "pair": [[2]], "nothing": [],
        "list": [{}, {}],
    }  # fmt: skip


def test_a_state_dict_with_empty_dicts_is_filled(tmp_path: Path) -> None:
    """X4: an optimizer without state made every dict of values next to it a missing key.

    PyTorch took the item of an empty dict for a checkpoint of its release 2.3.
    """
    tree: dict[str, Any] = {
        "model": {"w": torch.ones(2)},
        "optimizer": {"state": {}, "param_groups": [{"lr": 0.1, "params": ["w"]}]},
        "args": {"a": 1, "none": {}, "z": 2},
    }
    output = write(tree, tmp_path / "dcp")
    assert [note.split(",")[0] for note in output.notes] == [
        "optimizer.state is an empty dict", "args.none is an empty dict",
    ]  # fmt: skip
    target: dict[str, Any] = {
        "model": {"w": torch.zeros(2)},
        "optimizer": {"state": {}, "param_groups": [{"lr": 0.0, "params": []}]},
        "args": {"a": 0, "none": {}, "z": 0},
    }
    load(target, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert equal_bits(target["model"].pop("w"), tree["model"].pop("w"))
    assert target == tree
    # Our own reader has them, at their place.
    found = open_catalog(tmp_path / "dcp").parts["args"]
    assert list(found.items()) == [("a", 1), ("none", {}), ("z", 2)]


def test_names_that_are_one_are_refused() -> None:
    with pytest.raises(PlanError, match=r"'x\.a\.b' would be there twice"):
        dcp_output.layout(catalog_of({"x": {"a.b": 1, "a": {"b": 2}}}))
    with pytest.raises(PlanError, match=r"'x\.1' would be there twice"):
        dcp_output.layout(catalog_of({"x": {"1": 1, 1: 2}}))
    with pytest.raises(PlanError, match="at least one byte"):
        dcp_output.layout(catalog_of({"x": {"a": 1}}), max_file_nbytes=0)


def test_a_damaged_source_leaves_nothing(tmp_path: Path) -> None:
    catalog = catalog_of({"model": {"w": torch.ones(4, 4), "v": torch.ones(3)}}, boxes=quarters)
    output = dcp_output.layout(catalog)
    held = catalog.tensors["model.w"]
    broken = replace(
        catalog, tensors={**catalog.tensors, "model.w": replace(held, chunks=held.chunks[1:])}
    )
    with pytest.raises(CorruptionError, match="in no chunk"):
        write_output(broken, output, PosixStorage(tmp_path / "out"), "dcp", reopen=reopen_foreign)
    assert list((tmp_path / "out").iterdir()) == []

    def changed(storage: Storage, name: str) -> Catalog:
        path = tmp_path / "out" / name
        data = bytearray((path / "__0_0.distcp").read_bytes())
        data[output.files[0].extents[1].start] ^= 1
        (path / "__0_0.distcp").write_bytes(data)
        return open_catalog(path)

    with pytest.raises(CorruptionError, match="does not read back"):
        write_output(catalog, output, PosixStorage(tmp_path / "out"), "dcp", reopen=changed)
    assert list((tmp_path / "out").iterdir()) == []
