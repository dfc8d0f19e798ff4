"""Checkpoints of sharded models: names, meta devices, what the next forward sees."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from holdfast import (
    Checkpointer,
    ConfigError,
    Layout,
    OptimizerState,
    ProcessGroups,
)
from holdfast.format.names import step_dir
from holdfast.format.reader import Snapshot
from holdfast.fsdp import fully_shard_model
from holdfast.storage import PosixStorage
from tests.fsdp.common import (
    STRATEGIES,
    Net,
    adamw,
    build,
    full,
    place,
    rows_of,
    shard,
    train,
)
from tests.harness import RankContext, run_ranks

LAYOUTS: dict[str, dict[str, Any]] = {
    "dp": {"dp": 4},
    "ep": {"dp": 4, "ep": 2},
    "hybrid": {"dp": 4, "replicas": 2},
}


def state_of(net: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, object]:
    return {"model": net, "optimizer": OptimizerState(optimizer, net)}


def saved(context: RankContext, root: str) -> dict[str, dict[str, Tensor]]:
    """Each way trains and saves; its whole parameters."""
    del context
    found = {}
    for way, sizes in LAYOUTS.items():
        for strategy in STRATEGIES if way == "dp" else STRATEGIES[3:]:
            with ProcessGroups.create(Layout(**sizes)) as groups:
                net = place(build(seed=len(found)), groups)
                sharded = shard(net, groups, strategy=strategy)
                optimizer = adamw(net.parameters())
                train(sharded, optimizer, steps=1)
                Checkpointer(f"{root}/{way} {strategy}", groups=groups).save(
                    1, state_of(net, optimizer)
                )
                found[f"{way} {strategy}"] = {n: full(p) for n, p in net.named_parameters()}
    return found


def loaded(context: RankContext, root: str, ways: list[str]) -> dict[str, dict[str, Tensor]]:
    """A hybrid model of experts loads what every way has saved."""
    del context
    found = {}
    with ProcessGroups.create(Layout(dp=4, ep=2, replicas=2)) as groups:
        net = place(build(seed=99), groups)
        shard(net, groups)
        optimizer = adamw(net.parameters())
        for way in ways:
            Checkpointer(f"{root}/{way}", groups=groups).load(state_of(net, optimizer))
            found[way] = {n: full(p) for n, p in net.named_parameters()}
    return found


@pytest.mark.slow
def test_names_are_those_of_the_bare_model_and_every_way_loads(tmp_path: Path) -> None:
    """K8: saved sharded, loaded bare and by other layouts; saved bare, loaded sharded."""
    truth = run_ranks(4, saved, str(tmp_path)).results[0]
    net = build(seed=98)
    optimizer = adamw(net.parameters())
    names = {f"model.{name}" for name in net.state_dict()}
    for way, expected in truth.items():
        Checkpointer(tmp_path / way, groups=ProcessGroups.single()).load(state_of(net, optimizer))
        for name, value in net.named_parameters():
            assert torch.equal(value, expected[name]), (way, name)
        with Snapshot.open(PosixStorage(tmp_path / way), step_dir(1)) as snapshot:
            keys = {info.key for info in snapshot.manifest.tensors}
        assert {key for key in keys if key.startswith("model.")} == names
    bare = build(seed=97)
    optimizer = adamw(bare.parameters())
    bare(rows_of(0)[0]).mean().backward()
    optimizer.step()
    Checkpointer(tmp_path / "bare", groups=ProcessGroups.single()).save(
        1, state_of(bare, optimizer)
    )
    truth["bare"] = {name: value.detach() for name, value in bare.named_parameters()}
    for found in run_ranks(4, loaded, str(tmp_path), list(truth)).results:
        for way, values in found.items():
            for name, value in values.items():
                assert torch.equal(value, truth[way][name]), (way, name)


class Largest(TorchDispatchMode):
    """The elements of the largest tensor that an operator gives, on a real device."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # what it does to local tensors is seen
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, tuple | list) else (result,):
            if type(each) in (Tensor, nn.Parameter) and not each.is_meta:
                self.numel = max(self.numel, each.untyped_storage().nbytes() // each.itemsize)
        return result


class Large(nn.Module):
    """Two matrices of 32 MiB."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2048, 4097) for _ in range(2))
        self.register_buffer("counts", torch.arange(5.0))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([layer(x).sum() for layer in self.layers]).sum() + self.counts.sum()


def resident() -> int:
    """The largest resident size of this process so far, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    raise AssertionError


def from_meta(context: RankContext, root: str) -> tuple[int, int, bool, float]:
    """(largest tensor, growth of memory, whether it was NaN before, sum of all weights)."""
    del context
    with ProcessGroups.create(Layout(dp=4)) as groups:
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # forget the largest size so far
        before = resident()
        with Largest() as largest:
            with torch.device("meta"):
                model = Large()
            # Not stored, but there; and a place without a buffer.
            model.register_buffer("table", torch.arange(5.0), persistent=False)
            model.register_buffer("mask", None)
            sharded = fully_shard_model(model, groups, experts=(), units=model.layers)
            assert all(p.is_meta for p in model.parameters())
            sharded.materialize()
            was_nan = all(
                bool(full_local(p).isnan().all()) for p in model.parameters() if p.numel()
            )
            Checkpointer(root, groups=groups).load({"model": model})
        grown = resident() - before
        total = sum(float(full(p).double().sum()) for p in model.parameters())
        assert torch.equal(model.table, torch.arange(5.0))
        with torch.no_grad():
            assert float(model(torch.zeros(1, 2048))) == pytest.approx(
                float(sum(full(layer.bias).sum() for layer in model.layers)) + 10,
                rel=1e-4,  # type: ignore[arg-type]
            )
        return largest.numel, grown, was_nan, total


def full_local(parameter: Tensor) -> Tensor:
    return parameter.to_local()  # type: ignore[attr-defined, no-any-return]


@pytest.mark.slow
def test_a_model_on_the_meta_device_is_loaded_without_a_whole_parameter(tmp_path: Path) -> None:
    """F11: no rank ever has a whole parameter; what no load fills is NaN."""
    torch.manual_seed(4)
    model = Large()
    Checkpointer(tmp_path, groups=ProcessGroups.single()).save(1, {"model": model})
    expected = sum(float(p.detach().double().sum()) for p in model.parameters())
    whole = 2048 * 4097
    shard_nbytes = 2 * 4 * 2048 * 1025
    for numel, grown, was_nan, total in run_ranks(4, from_meta, str(tmp_path), fresh=True).results:
        assert was_nan
        assert numel < whole / 3  # a quarter, and its padding
        # Shards, some twice for a moment where padding is added, and buffers of reads: less than
        # the two parameters are, which are 64 MiB.
        assert grown < 2 * shard_nbytes + 24 * 2**20, grown / 2**20
        assert total == pytest.approx(expected, rel=1e-12)


def meta_buffers(context: RankContext) -> str:
    del context
    with ProcessGroups.create(Layout(dp=2)) as groups:
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(4, 4))
            model[0].register_buffer("table", torch.ones(3), persistent=False)
        sharded = fully_shard_model(model, groups, experts=())
        with pytest.raises(ConfigError) as caught:
            sharded.materialize()
        with pytest.raises(ConfigError, match="forward of a sharded model on the meta device"):
            model(torch.ones(1, 4))
        return str(caught.value)


def test_a_buffer_that_no_load_would_fill_is_refused() -> None:
    """A rotary table of whatever was in memory would train without an error."""
    for message in run_ranks(2, meta_buffers).results:
        assert "'0.table'" in message
        assert "persistent" in message


def first_forward(context: RankContext, root: str) -> list[str]:
    """After each kind of use, a load; then the loss of the next forward is that of what it gave."""
    wrong = []
    low = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for number, precision in enumerate((None, low)):
        for strategy in STRATEGIES:
            with ProcessGroups.create(Layout(dp=context.num_ranks)) as groups:
                net = build(seed=3)
                sharded = shard(net, groups, strategy=strategy, precision=precision)
                optimizer = adamw(net.parameters())
                state = state_of(net, optimizer)
                checkpointer = Checkpointer(f"{root}/{number} {strategy}", groups=groups)
                train(sharded, optimizer, steps=1)
                checkpointer.save(1, state)
                rows = rows_of(7)[0]
                with torch.no_grad():
                    expected = net(rows)
                train(sharded, optimizer, steps=1, first=1)
                with sharded.microbatch(is_last=False):
                    net(rows).mean().backward()  # whole parameters stay with some strategies
                sharded.drop_gradients()
                checkpointer.load(state, step=1)
                with torch.no_grad():
                    if not torch.equal(net(rows), expected):
                        wrong.append(f"{strategy} {precision}: after a microbatch")
                    # the model's own parameters are whole after a forward without backward
                    checkpointer.save(2, state)
                    for p in optimizer.param_groups[0]["params"]:
                        p.fill_(0.5)
                checkpointer.load(state, step=2)
                with torch.no_grad():
                    if not torch.equal(net(rows), expected):
                        wrong.append(f"{strategy} {precision}: after a forward")
    return wrong


@pytest.mark.slow
def test_the_first_forward_after_a_load_uses_what_was_loaded(tmp_path: Path) -> None:
    """F13: bf16 computation on float32 shards, too; whatever was whole before."""
    for wrong in run_ranks(2, first_forward, str(tmp_path)).results:
        assert wrong == []


def allocation(context: RankContext, root: str) -> None:
    """A fresh optimizer takes a state without a step of its own."""
    del context
    with ProcessGroups.create(Layout(dp=4)) as groups:
        net = build()
        sharded = shard(net, groups)
        optimizer = adamw(net.parameters())
        train(sharded, optimizer, steps=2)
        Checkpointer(root, groups=groups).save(1, state_of(net, optimizer))
        other: Net = build(seed=5)
        shard(other, groups)
        fresh = torch.optim.AdamW(other.parameters(), lr=3.0, foreach=False)
        before = {name: full(p) for name, p in other.named_parameters()}
        Checkpointer(root, groups=groups).load({"optimizer": OptimizerState(fresh, other)})
        for name, p in other.named_parameters():
            assert torch.equal(full(p), before[name]), name
        assert fresh.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
        for (name, p), q in zip(net.named_parameters(), other.parameters(), strict=True):
            assert optimizer.state[p].keys() == fresh.state[q].keys(), name
            for entry, value in optimizer.state[p].items():
                assert torch.equal(full(value), full(fresh.state[q][entry])), (name, entry)


def test_a_load_of_optimizer_state_changes_nothing_else(tmp_path: Path) -> None:
    """F12: parameters, step counts and settings are those of the checkpoint or untouched."""
    run_ranks(4, allocation, str(tmp_path), fresh=True)
