"""PyTorch DCP directories, written by torch itself, read without running their pickles."""

from __future__ import annotations

import os
import pickle
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from holdfast import Checkpointer, ConfigError, CorruptionError, OptimizerState
from holdfast.foreign import NameMap, transpose
from holdfast.foreign.convert import ConvertOptions, TargetFormat, plan_conversion
from holdfast.foreign.formats import open_catalog
from holdfast.foreign.view import CatalogStorage
from tests.foreign.contract import Packed, check_format, packed, raw, sample_tensors, unpacked
from tests.harness import RankContext, run_ranks


def _save_plain(context: RankContext, path: str, tensors: Packed, nested: bool) -> None:
    state: dict[str, Any] = dict(unpacked(tensors))
    if nested:
        state = {"model": state, "args": {"lr": 0.1, "names": ["a", "b"], "when": (1, 2)}}
    dcp.save(state, checkpoint_id=path)


@pytest.mark.parametrize("nested", [False, True])
def test_dcp_under_every_layout(tmp_path: Path, nested: bool) -> None:
    tensors = sample_tensors()
    run_ranks(2, _save_plain, str(tmp_path / "dcp"), packed(tensors), nested)
    check_format(tmp_path / "dcp", "model", tensors)
    if nested:
        values = Checkpointer(tmp_path / "run").load_all(source=tmp_path / "dcp").values
        assert values["args"] == {"lr": 0.1, "names": ["a", "b"], "when": (1, 2)}


def _save_sharded(context: RankContext, path: str, tensors: Packed) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    placed = {
        "layers.0.weight": [Shard(0), Shard(1)],
        "layers.1.weight": [Shard(0), Shard(0)],
        "cube": [Replicate(), Shard(2)],
        "half": [Shard(1), Replicate()],
        "bytes": [Shard(0), Shard(0)],
    }
    state = {
        name: distribute_tensor(each, mesh, placed[name]) if name in placed else each
        for name, each in unpacked(tensors).items()
    }
    dcp.save({"model": state}, checkpoint_id=path)


def test_tensors_sharded_over_two_axes(tmp_path: Path) -> None:
    tensors = sample_tensors()
    run_ranks(4, _save_sharded, str(tmp_path / "dcp"), packed(tensors))
    assert len(open_catalog(tmp_path / "dcp").tensors["model.layers.0.weight"].chunks) == 4
    check_format(tmp_path / "dcp", "model", tensors)


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    # Of four ranks three have rows of the last layer: 2, 2, 1 and none.
    return nn.Sequential(nn.Linear(8, 10), nn.ReLU(), nn.Linear(10, 5))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> None:
    """Train on data that every rank has alike."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        model(torch.randn(4, 8, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def _save_trained(context: RankContext, path: str, kind: str, flat: bool) -> None:
    model = make_model()
    if kind == "hsdp":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        fully_shard(model, mesh=mesh)
    elif kind == "fsdp and tp":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parallelize_module(model, mesh["tp"], plan)
        fully_shard(model, mesh=mesh["dp"])
    else:
        fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    train(model, optimizer)
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    state = {
        "model": get_model_state_dict(model),
        "optim": get_optimizer_state_dict(model, optimizer, options=options),
        "step": 3,
    }
    dcp.save(state, checkpoint_id=path)


# In tensor parallelism, flat is as without it.
@pytest.mark.parametrize(
    ("kind", "flat"),
    [
        pytest.param("fsdp", False, marks=pytest.mark.slow),
        pytest.param("hsdp", True, marks=pytest.mark.slow),
        pytest.param("fsdp and tp", False, marks=pytest.mark.slow),
        ("fsdp", True),
        pytest.param("hsdp", False, marks=pytest.mark.slow),
    ],
)
def test_a_trained_model_and_its_optimizer(tmp_path: Path, kind: str, flat: bool) -> None:
    """The one-process run is the oracle: weights, moments and steps."""
    path = tmp_path / "dcp"
    run_ranks(4, _save_trained, str(path), kind, flat)
    twin = make_model()
    twin_optimizer = torch.optim.AdamW(twin.parameters(), lr=0.01, weight_decay=0.1)
    train(twin, twin_optimizer)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    state = {"model": model, "optim": OptimizerState(optimizer, model)}
    report = Checkpointer(tmp_path / "run").load(state, source=path)
    assert report.not_requested == ("step",)
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
        mine, other = optimizer.state[ours], twin_optimizer.state[theirs]
        assert mine["step"] == other["step"] == 3
        for name in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(mine[name], other[name], rtol=1e-4, atol=1e-7)
    assert optimizer.param_groups[0]["lr"] == 0.01
    train(model, optimizer)
    train(twin, twin_optimizer)
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_views_with_strides(tmp_path: Path) -> None:
    wide = torch.arange(48.0).reshape(6, 8)
    tensors = {"t": wide.t(), "cut": wide[1:5, 2:7], "row": wide[0].expand(3, 8)}
    dcp.save(dict(tensors), checkpoint_id=tmp_path / "dcp")
    check_format(tmp_path / "dcp", "model", tensors, fraction=2.5)


def test_a_pickle_that_asks_for_code_is_refused(tmp_path: Path) -> None:
    dcp.save({"a": torch.ones(3)}, checkpoint_id=tmp_path / "dcp")
    marker = tmp_path / "ran"
    payload = b"\x80\x02cos\nsystem\nX" + len(f"touch {marker}").to_bytes(4, "little")
    (tmp_path / "dcp/.metadata").write_bytes(payload + f"touch {marker}".encode() + b"\x85R.")
    with pytest.raises(CorruptionError, match=r"os\.system"):
        open_catalog(tmp_path / "dcp")
    assert not marker.exists()


def test_what_a_tensor_of_the_metadata_takes(tmp_path: Path) -> None:
    """X2: it took 3.8 KB, most of them for numbers of the memo and for what was used already."""
    num = 500
    dcp.save({f"w{i}": torch.ones(1) for i in range(num)}, checkpoint_id=tmp_path, no_dist=True)
    open_catalog(tmp_path)  # what is made once
    tracemalloc.start()
    try:
        CatalogStorage(open_catalog(tmp_path))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2350 * num, peak / num


def test_metadata_of_any_size_is_not_read(tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(1)}, checkpoint_id=tmp_path, no_dist=True)
    os.truncate(tmp_path / ".metadata", (1 << 30) + 1)
    with pytest.raises(CorruptionError, match=r"\.metadata: 1073741825 bytes are more than what"):
        open_catalog(tmp_path)


def test_metadata_that_lies_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "dcp"
    dcp.save({"a": torch.ones(3), "b": 5}, checkpoint_id=path)
    good = (path / ".metadata").read_bytes()
    assert b"__0_0.distcp" in good
    (path / ".metadata").write_bytes(good.replace(b"__0_0.distcp", b"../../x/pass"))
    with pytest.raises(CorruptionError, match="not a file of it"):
        open_catalog(path)
    for name in (b"state_dict_metadata", b"storage_data", b"offsets"):
        (path / ".metadata").write_bytes(good.replace(name, name[::-1]))
        with pytest.raises(CorruptionError):
            Checkpointer(tmp_path / "run").load_all(source=path)


def _place(**fields: Any) -> Callable[[Any], None]:
    def change(metadata: Any) -> None:
        for index, info in metadata.storage_data.items():
            if index.fqn == "a":
                for name, value in fields.items():
                    setattr(info, name, value)

    return change


def _size(size: tuple[int, ...], *chunks: tuple[Any, Any]) -> Callable[[Any], None]:
    def change(metadata: Any) -> None:
        entry = metadata.state_dict_metadata["a"]
        entry.size = torch.Size(size)
        entry.chunks = [ChunkStorageMetadata(*map(torch.Size, chunk)) for chunk in chunks]

    return change


def _paths(a: tuple[Any, ...], b: tuple[Any, ...]) -> Callable[[Any], None]:
    return lambda metadata: metadata.planner_data.update(a=a, b=b)


def _two_places(metadata: Any) -> None:
    place = next(each for index, each in metadata.storage_data.items() if index.fqn == "b")
    metadata.storage_data[MetadataIndex("a", None)] = place


LIES: dict[str, Callable[[Any], None]] = {
    "a tensor in two places": _two_places,
    "a path before a list": _paths(("x", -1), ("y",)),
    "one path of two in a list": _paths(("x", 0), ("x", 0)),
    "one path of two": _paths(("x",), ("x",)),
    "an offset beyond 63 bits": _place(offset=2**63),
    "a length beyond 63 bits": _place(length=2**63),
    "a negative offset": _place(offset=-1),
    "a length that is too short": _place(length=10),
    "a place in the metadata": _place(relative_path=".metadata"),
    "a place in another folder": _place(relative_path="../other/__0_0.distcp"),
    "a shape beyond 63 bits": _size((2**62, 2**62), ((0, 0), (2, 3))),
    "a chunk beyond the shape": _size((2, 3), ((2**61, 0), (2, 3))),
    "a chunk of other dims": _size((2, 3), ((0,), (6,))),
    "no chunks": _size((2, 3)),
    "a larger shape": _size((3, 3), ((0, 0), (2, 3))),
    "chunks of one archive": _size((4, 3), ((0, 0), (2, 3)), ((2, 0), (2, 3))),
}


@pytest.mark.parametrize("kind", LIES)
def test_metadata_with_impossible_places_is_refused(tmp_path: Path, kind: str) -> None:
    """X2: by a load of all; a length that is too short only once the archive is opened."""
    path = tmp_path / "dcp"
    dcp.save({"a": torch.ones(2, 3), "b": 5}, checkpoint_id=path)
    metadata = pickle.loads((path / ".metadata").read_bytes())
    LIES[kind](metadata)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CorruptionError):
        Checkpointer(tmp_path / "run").load_all(source=path)


def test_a_gap_as_large_as_an_overlap_is_not_converted(tmp_path: Path) -> None:
    """X24: elements in no chunk were written as zeros, as many as others were in two chunks."""
    path = tmp_path / "dcp"
    dcp.save({"a": torch.ones(2, 3), "b": torch.ones(2, 3)}, checkpoint_id=path)
    metadata = pickle.loads((path / ".metadata").read_bytes())
    two_rows = torch.Size([2, 3])
    metadata.state_dict_metadata["a"].size = torch.Size([4, 3])
    metadata.state_dict_metadata["a"].chunks = [
        ChunkStorageMetadata(torch.Size([row, 0]), two_rows) for row in (0, 1)
    ]
    b = next(index for index in metadata.storage_data if index.fqn == "b")
    place = metadata.storage_data.pop(b)
    metadata.storage_data[MetadataIndex("a", torch.Size([1, 0]))] = place
    metadata.storage_data[MetadataIndex("c")] = place
    del metadata.state_dict_metadata["b"]
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    catalog = open_catalog(path)
    assert catalog.left_out == ["c: stored, and .metadata does not say as what"]
    flaw = r"'model\.a' do not tile its shape \[4, 3\]: overlap at \[1, 0\], size \[1, 3\]"
    for to in get_args(TargetFormat):
        with pytest.raises(CorruptionError, match=flaw):
            plan_conversion(catalog, tmp_path / "out", ConvertOptions(to=to))
    with pytest.raises(CorruptionError, match=flaw):
        NameMap([transpose("a")]).apply(catalog)


@pytest.mark.parametrize("stride", [61, pytest.param(7, marks=pytest.mark.slow)])
def test_bytes_flipped_anywhere_never_give_another_shape_or_crash(
    tmp_path: Path, stride: int
) -> None:
    """There are no digests: flipped data load. Flipped structure is an error with a name."""
    path = tmp_path / "dcp"
    tensors = {"a": torch.arange(6.0), "b": torch.ones(2, 2)}
    dcp.save({**tensors, "c": {"d": 1}}, checkpoint_id=path)
    for file in (path / ".metadata", path / "__0_0.distcp"):
        good = file.read_bytes()
        for at in range(0, len(good), stride):
            data = bytearray(good)
            data[at] ^= 0x10
            file.write_bytes(data)
            try:
                values = Checkpointer(tmp_path / "run").load_all(source=path).values
            except (CorruptionError, ConfigError):  # the first byte: in no known format
                continue
            for name, each in tensors.items():
                got = values.get(name)
                assert got is None or len(raw(got)) == len(raw(each))
        file.write_bytes(good)


def test_lists_of_values_and_tensors_keep_their_order(tmp_path: Path) -> None:
    tree: dict[str, Any] = {
        "b": {"z": 1, "a": torch.ones(1)},
        "x": ["first", torch.ones(2), "third", [torch.ones(1), {"y": 4}]],
        "groups": [{"lr": 0.1}, {"lr": torch.tensor(0.2)}],
    }
    dcp.save(tree, checkpoint_id=tmp_path / "dcp", no_dist=True)
    parts: Any = open_catalog(tmp_path / "dcp").parts
    assert list(parts) == ["b", "x", "groups"]
    assert list(parts["b"]) == ["z", "a"]
    assert (parts["x"][0], parts["x"][2], parts["x"][3][1]) == ("first", "third", {"y": 4})
    assert parts["x"][1]["k"] == "x.1"
    assert parts["groups"][0] == {"lr": 0.1}
