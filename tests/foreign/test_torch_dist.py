"""Megatron-core's `torch_dist`, written by the package itself on four ranks."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import pickle
import random
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.utils._pytree import tree_leaves

from holdfast import (
    Checkpointer,
    ConfigError,
    CorruptionError,
    Layout,
    MismatchError,
    OptimizerState,
    ProcessGroups,
    Stored,
)
from holdfast.cli.main import main
from holdfast.foreign.draft import Draft
from holdfast.foreign.formats import open_catalog
from holdfast.foreign.location import Location
from holdfast.foreign.torch_dist_optimizer import add_optimizer
from holdfast.format.values import tensor_node
from holdfast.optim import ShardedOptimizer
from tests.foreign.contract import check_format, raw
from tests.foreign.megatron_writing import (
    FLAT,
    ITERATION,
    LR,
    PROGRAM,
    STEPS,
    flat_state,
    whole_tensors,
)
from tests.harness import RankContext, run_ranks
from tests.integrations.forks import ForkServer

pytestmark = pytest.mark.slow  # the import of the package alone takes seconds


@pytest.fixture(scope="module")
def megatron() -> Iterator[ForkServer]:
    """Ranks that have imported Megatron: half of what writing its checkpoints takes."""
    server = ForkServer(
        "megatron.core.dist_checkpointing.strategies.torch",
        "megatron.core.models.gpt.gpt_layer_specs",
        "megatron.core.optimizer",
        "megatron.core.rerun_state_machine",
        "tests.foreign.megatron_writing",
    )
    yield server
    server.close()


@pytest.fixture(scope="module")
def written(megatron: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All checkpoints, written once."""
    root = tmp_path_factory.mktemp("megatron")
    megatron.lines(PROGRAM, "write_all", root, directory=root, num_ranks=4)
    return root


# ---- tensors, objects and values by hand ----


def test_megatron_under_every_layout(written: Path) -> None:
    """Row B6: copies under keys of their own are one tensor, also where only some are stored."""
    path = written / "run" / f"iter_{ITERATION:07d}"
    tensors = whole_tensors(path)
    expected = {name: tensor for name, tensor in tensors.items() if "__tp_replica" not in name}
    expected["norm.weight"] = tensors["norm.weight.__tp_replica_0"]
    expected["router.weight"] = tensors["router.weight.__tp_replica_1"]
    catalog = open_catalog(path)
    assert (catalog.format, catalog.step, catalog.drift) == ("Megatron torch_dist", ITERATION, "")
    assert len(catalog.tensors["model.norm.weight"].chunks) == 4
    assert len(catalog.tensors["model.router.weight"].chunks) == 2
    check_format(path, "model", expected)


def test_objects_and_common_values(written: Path) -> None:
    catalog = open_catalog(written / "run")
    assert b"all_local_plans" in (written / "run/iter_0000010/.metadata").read_bytes()
    assert any("4 extra states that are empty" in each for each in catalog.left_out), (
        catalog.left_out
    )
    parts: dict[str, Any] = dict(catalog.parts)
    assert parts["checkpoint_version"] == 3.0
    assert parts["iteration"] == ITERATION
    assert parts["opt_param_scheduler"] == {"max_lr": LR, "num_steps": 7}
    assert parts["args"]["v"]["names"] == ["a"]
    assert parts["args"]["v"]["attention_backend"]["v"] == "auto"
    assert parts["rerun_state_machine"]["mode"]["v"] == "VALIDATE_RESULTS"
    assert len(parts["rerun_state_machine_state"]) == 4
    # Parts of plain values and tensors load without names of classes.
    state = {name: Stored() for name in ("extra_state", "rng_state", "opt_param_scheduler")}
    report = Checkpointer(written / "never").load(state, source=written / "run")
    assert report.step == ITERATION
    for r in range(4):
        (own,) = report.values["rng_state"][f"shard_{r // 2}.{r % 2}_2.2"]
        assert own["rng_tracker_states"]["model-parallel-rng"].tolist() == [r] * 5
        assert own["random_rng_state"] == random.Random(r).getstate()
        assert own["np_rng_state"][1].tolist() == np.random.RandomState(r).get_state()[1].tolist()
        extra = report.values["extra_state"][f"layers.1.core._extra_state/shard_{r}_4"]
        assert extra.tolist() == list(range(r + 1))


def test_a_run_is_its_latest_and_a_step_of_it_can_be_asked_for(
    written: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(written / "run", run)
    shutil.copytree(written / "drifted", run / "iter_0000004")
    (run / "latest_checkpointed_iteration.txt").write_text("4")
    checkpointer = Checkpointer(tmp_path / "never", on_drift="warn")
    state = {"model": {"norm.weight": torch.zeros(3, 4)}}
    assert checkpointer.load(state, source=run, ignore_unexpected=True).step == 4
    found = checkpointer.load(state, source=run, step=ITERATION, ignore_unexpected=True)
    assert found.step == ITERATION
    assert main(["show", str(run), "--step", str(ITERATION)]) == 0


def test_megatron_copies_that_differ(written: Path, tmp_path: Path, caplog: Any) -> None:
    """Row B6: the load fails or warns by the policy, and names both files."""
    path = written / "drifted"
    assert len(open_catalog(path).tensors["model.norm.weight"].chunks) == 1
    state = {"model": {"norm.weight": torch.zeros(3, 4), "router.weight": torch.zeros(3, 4)}}
    with pytest.raises(CorruptionError, match=r"'norm\.weight' differ at \[1, 2\]") as caught:
        Checkpointer(tmp_path / "never").load(state, source=path)
    assert sum(str(file) in str(caught.value) for file in path.glob("*.distcp")) == 2
    with caplog.at_level(logging.WARNING, logger="holdfast"):
        Checkpointer(tmp_path / "never", on_drift="warn").load(state, source=path)
    assert str(caught.value).partition(". Which")[0] in caplog.text
    for tensor in state["model"].values():
        assert torch.equal(tensor, torch.arange(12.0).reshape(3, 4))
    assert main(["convert", str(path), str(tmp_path / "own"), "--to", "holdfast"]) != 0
    assert not (tmp_path / "own").exists()
    assert main(["verify", str(path)]) == 1
    both = {f"w.__tp_replica_{number}": torch.ones(2) for number in ("1", "01")}
    dcp.save(both, checkpoint_id=tmp_path / "both", no_dist=True)
    (tmp_path / "both" / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    with pytest.raises(CorruptionError, match=r"copy 1 of 'w' is there twice"):
        open_catalog(tmp_path / "both")


@pytest.mark.parametrize("has_record", [True, False])
def test_flattened_ranges_of_older_releases(
    written: Path, tmp_path: Path, has_record: bool
) -> None:
    """By the shapes that the metadata records, else by those of the parameters."""
    path = tmp_path / "flat"
    shutil.copytree(written / "flat", path)
    if has_record:
        metadata = pickle.loads((path / ".metadata").read_bytes())
        metadata.mcore_data = {
            f"optimizer.state.exp_avg.{name}": {"nd_reformulated_orig_global_shape": shape}
            for name, shape in FLAT.items()
        }
        (path / ".metadata").write_bytes(pickle.dumps(metadata))
    catalog = open_catalog(path)
    loaded = Checkpointer(tmp_path / "never").load_all(source=path).values
    for name in ("w", "layers.0.b"):
        assert torch.equal(loaded["optimizer"]["state"][name]["exp_avg"], flat_state(name))
    # A shape alone does not say whose it is; without it the tensor is kept as it is stored.
    kept = loaded["optimizer_raw"]["optimizer.state.exp_avg.unknown"]
    assert kept.shape == (FLAT["unknown"] if has_record else (2, 2, 24))
    assert sum("exp_avg.unknown: where it is" in each for each in catalog.left_out) == 1


def test_flipped_bytes_of_megatron_are_an_error_with_a_name(written: Path, tmp_path: Path) -> None:
    path = tmp_path / "flipped"
    shutil.copytree(written / "run" / f"iter_{ITERATION:07d}", path)
    for name in (".metadata", "common.pt", "metadata.json"):
        good = (path / name).read_bytes()
        for at in range(0, len(good), len(good) // 40 + 1):
            data = bytearray(good)
            data[at] ^= 0x10
            (path / name).write_bytes(data)
            with contextlib.suppress(CorruptionError, ConfigError):
                catalog = open_catalog(path)
                assert all(len(t.shape) < 5 for t in catalog.tensors.values())
        (path / name).write_bytes(good)
    os.truncate(path / "common.pt", 100)
    with pytest.raises(CorruptionError, match=r"common\.pt"):
        open_catalog(path)


def test_groups_that_settings_do_not_tell_apart_have_no_members(written: Path) -> None:
    """Two groups that differ in their learning rate alone: who is in which is not guessed."""
    weight = open_catalog(written / "run").tensors["model.grid"]
    rate = {"optimizer_common.lr": replace(weight, key="optimizer_common.lr")}
    common = {
        "param_groups": [
            {"lr": tensor_node("optimizer_common.lr"), "wd_mult": 1.0, "step": 3},
            {"lr": 0.2, "wd_mult": 1.0, "step": 4},
        ]
    }
    others: Any = {"shapes": {"grid": weight.shape}, "common_tensors": rate, "file": "common.pt"}
    made = Draft(Location.of(written), "Megatron")
    add_optimizer(made, {"optimizer.state.exp_avg.grid": weight}, {}, common, **others)
    assert made.parts["optimizer"]["membership"] == {}
    for what in ("the group of 1 parameters", "the number of steps of grid, which differs"):
        assert any(what in each and "grid" in each for each in made.left_out)
    # A setting that is a tensor was a node without one, and nothing of the optimizer loaded.
    assert {*rate} <= {*made.tensors}
    both = {f"chained_{i}.optimizer.state.exp_avg.grid": weight for i in range(2)}
    with pytest.raises(CorruptionError, match=r"'optimizer\.state\.grid\.exp_avg' is there twice"):
        add_optimizer(Draft(Location.of(written), "Megatron"), both, {}, None, **others)


# ---- models and their optimizers ----


class Named(nn.Module):
    """A module whose parameters have Megatron's names, laid out as a rank of `groups` has them."""

    def __init__(self, tensors: dict[str, Tensor], groups: ProcessGroups) -> None:
        super().__init__()
        stage = groups.index("pp")
        names = [n for i, n in enumerate(sorted(tensors)) if i % groups.size("pp") == stage]
        mesh = groups.mesh("dp_cp", "tp") if groups.size("tp") > 1 else None
        for name in names:
            *path, last = name.split(".")
            module: nn.Module = self
            for step in path:
                if step not in dict(module.named_children()):
                    module.add_module(step, nn.Module())
                module = module.get_submodule(step)
            value = torch.zeros_like(tensors[name])
            if mesh is not None:
                # Along the last dim that can be cut: other places than those it was written from.
                dim = max((d for d, n in enumerate(value.shape) if n % 2 == 0), default=None)
                placed = [Replicate(), Replicate() if dim is None else Shard(dim)]
                value = distribute_tensor(value, mesh, placed, src_data_rank=None)
            module.register_parameter(last, nn.Parameter(value))


Groups = dict[tuple[float, bool], list[nn.Parameter]]


def groups_of(net: nn.Module) -> Groups:
    """Megatron's groups: no weight decay for biases and vectors, and experts apart."""
    split: Groups = {}
    for name, parameter in net.named_parameters():
        decay = float("norm" not in name and name[-5:] != ".bias")
        split.setdefault((decay, ".experts." in name), []).append(parameter)
    return split


def optimizer_of(net: nn.Module, split: Groups, groups: ProcessGroups) -> Any:
    """A plain optimizer on pipeline stages, else a sharded one."""
    built = [{"params": parameters} for parameters in split.values()]
    if groups.size("pp") > 1:
        return torch.optim.AdamW(built, lr=1.0)
    return ShardedOptimizer(
        net,
        built,
        make=lambda each: torch.optim.AdamW(each, lr=1.0),
        groups=groups,
        over="dp_cp",
        divisor=groups.size("dp_cp"),
        bucket_nbytes=3000,
        align_nbytes=4,
        elementwise=True,
    )


def load_and_save(context: RankContext, path: str, own: str, layout: Layout) -> None:
    """Load under a layout, and save it in our own format under that layout."""
    tensors = {k: t for k, t in whole_tensors(Path(path)).items() if "optimizer." not in k}
    with ProcessGroups.create(layout) as groups:
        net = Named(tensors, groups)
        split = groups_of(net)
        optimizer = optimizer_of(net, split, groups)
        state = {"model": net, "optimizer": OptimizerState(optimizer, net)}
        checkpointer = Checkpointer(own, groups=groups)
        checkpointer.load(state, source=path)
        for group, expected in zip(optimizer.param_groups, split, strict=True):
            assert group["lr"] == LR
            assert (group["wd_mult"], group["is_expert_parallel"]) == expected
        checkpointer.save(STEPS, state)


KINDS = ("dense/fully_reshardable", "sparse/fully_reshardable")
WAYS = {"tp1": Layout(), "tp2 dp2": Layout(tp=2, dp=2), "pp2": Layout(pp=2)}


@pytest.mark.parametrize(
    ("kind", "way"), [*((k, w) for k in KINDS for w in WAYS), ("whole/whole", "tp1")]
)
def test_a_trained_megatron_model_and_its_optimizer(
    written: Path, tmp_path: Path, kind: str, way: str
) -> None:
    """Weights, moments, main parameters and steps are those that Megatron's ranks held."""
    path, layout = written / kind, WAYS[way]
    run_ranks(layout.world_size, load_and_save, str(path), str(tmp_path / "own"), layout)
    values = Checkpointer(tmp_path / "own").load_all().values
    state = values["optimizer"]["state"]
    held = whole_tensors(path)
    num_compared = 0
    for key, tensor in held.items():
        rest = key.rpartition("optimizer.state.")[2] if "optimizer." in key else ""
        if not rest:
            assert torch.equal(values["model"][key], tensor), key
            assert state[key]["step"] == STEPS
            continue
        entry, _, name = rest.partition(".")
        num_compared += 1
        if entry in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(state[name][entry], tensor), key
        elif "main" in values["optimizer"]:
            assert torch.equal(values["optimizer"]["main"][name], tensor), key
        else:
            assert torch.equal(values["model"][name].to(torch.bfloat16), tensor.bfloat16()), key
    assert num_compared == 3 * len(values["model"])


def test_megatron_opens_what_it_wrote_and_we_saved(
    megatron: ForkServer, written: Path, tmp_path: Path
) -> None:
    """X6: TP2 x PP2 of Megatron, through a save of ours, in a model of TP2 of Megatron."""
    source = written / "dense" / "fully_reshardable"
    weights = Checkpointer(tmp_path / "never").load_all(source=source).values["model"]
    with Checkpointer(tmp_path / "ours", ckpt_format="torch_dist") as checkpointer:
        checkpointer.save(1, {"model": weights, "opt_param_scheduler": {"num_steps": 7}})
    ours, again = tmp_path / "ours" / "iter_0000001", tmp_path / "again"
    words = ("load_and_write", ours, again)
    megatron.lines(PROGRAM, *words, directory=tmp_path, num_ranks=2)
    expected = {k: v for k, v in whole_tensors(source).items() if not k.startswith("optimizer.")}
    found = whole_tensors(again)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("kind", ["dense/dp_reshardable", "sparse/dp_reshardable"])
def test_buckets_are_kept_as_they_are(written: Path, tmp_path: Path, kind: str) -> None:
    path = written / kind
    catalog = open_catalog(path)
    assert "optimizer" not in catalog.parts
    assert any("buckets are in the part 'optimizer_raw'" in each for each in catalog.left_out)
    held = whole_tensors(path)
    parts = {name: torch.zeros_like(t) for name, t in held.items() if "optimizer." in name}
    model = {name: torch.zeros_like(t) for name, t in held.items() if "optimizer." not in name}
    state: dict[str, Any] = {"model": model, "optimizer_raw": parts}
    Checkpointer(tmp_path / "never").load(state, source=path)
    for name, tensor in (model | parts).items():
        assert raw(tensor) == raw(held[name]), name  # in bytes: Megatron pads with any memory
    net = nn.Linear(2, 2)
    with pytest.raises(MismatchError):
        Checkpointer(tmp_path / "never").load(
            {"optimizer": OptimizerState(torch.optim.AdamW(net.parameters()), net)}, source=path
        )


def test_gathered_buckets_are_kept_as_they_are(written: Path) -> None:
    catalog = open_catalog(written / "dense/dp_zero_gather_scatter")
    assert "optimizer" not in catalog.parts
    assert any("buckets are in the part 'optimizer_objects'" in each for each in catalog.left_out)
    moments = [
        tensor
        for key, tensor in catalog.tensors.items()
        if key.startswith("optimizer_objects.") and key.endswith(".exp_avg")
    ]
    assert len(moments) == 4  # one for each rank of the model
    assert all(tensor.nbytes for tensor in moments)


# ---- generated ----

NAMES = (
    "w", "a.b", "decoder.layers.weight", "decoder.layers.0.mlp.experts.linear_fc1.weight",
    "model.w", "optimizer", "optimizerx.w", "layer_norm.bias", "x.optimizer.state.y",
)  # fmt: skip
OBJECTS = (
    "rng_state/shard_0_1", "rng_state", "rerun/shard_0.0_1.1", "x._extra_state/shard_0_1",
    "optimizer.foo/shard_0_1", "model_obj/shard_0_1", "objects/shard_0_1", "args/shard_0_1",
)  # fmt: skip
COMMON = ("model", "model0", "model.w", "rng_state", "objects", "optimizer_raw", "optimizer.main")


def drawn_checkpoint(draw: random.Random) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the ranks and the common values of a checkpoint have, by name."""

    def tensor(*shape: int) -> torch.Tensor:
        return torch.tensor([draw.random() for _ in range(math.prod(shape))]).reshape(shape)

    def some(names: Sequence[str], most: int) -> list[str]:
        return draw.sample(names, draw.randint(0, most))

    ranks: dict[str, Any] = {n: tensor(*draw.choice([(3,), (2, 3), ()])) for n in some(NAMES, 6)}
    chain = draw.choice(["", "chained_0.", "chained_1."])
    for name in some(NAMES, 5):
        for entry in some(("exp_avg", "exp_avg_sq", "fp32_param", "step"), 4):
            shape = ranks[name].shape if name in ranks and draw.random() < 0.9 else (5,)
            ranks[f"{chain}optimizer.state.{entry}.{name}"] = tensor(*shape)
    ranks |= {
        name: draw.choice([[{"a": tensor(2), "b": 3}], {"t": tensor(1)}, None, 5, [tensor(2)] * 2])
        for name in some(OBJECTS, 5)
    }
    groups = [{"lr": 0.1, "wd_mult": n, "params": [0]} for n in (1.0, 0.0)]
    if draw.random() < 0.5:
        groups[0]["lr"] = tensor()
    optimizer = {"optimizer": {"param_groups": groups, "state": {}}, "scale": tensor(1)}
    is_chain = draw.random() < 0.4
    common = {"iteration": 5, "optimizer": {0: optimizer, 1: optimizer} if is_chain else optimizer}
    common |= {
        name: draw.choice([{"w": {}}, tensor(2), {"z": tensor(1)}]) for name in some(COMMON, 4)
    }
    return ranks, common


def tensors_in(value: object) -> list[Tensor]:
    return [each for each in tree_leaves(value) if isinstance(each, Tensor)]


def test_generated_checkpoints_lose_no_tensor(tmp_path: Path) -> None:
    """X4, X24: whatever names, objects and common values meet, each tensor is read, or is named."""
    draw = random.Random(1)
    for number in range(60):
        path = tmp_path / str(number)
        ranks, common = drawn_checkpoint(draw)
        planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        dcp.save(ranks, checkpoint_id=path, no_dist=True, planner=planner)
        (path / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
        torch.save(common, path / "common.pt")
        report = Checkpointer(tmp_path / "none").load_all(source=path)
        found = {raw(each) for each in tensors_in(report.values)}
        for name, value in {**ranks, **common}.items():
            for each in tensors_in(value):
                is_named = any(name in sentence for sentence in report.left_out)
                assert raw(each) in found or is_named, (number, name)
