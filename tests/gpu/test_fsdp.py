"""Fully sharded models on a device: NCCL, streams, checkpoints of shards. Needs one device.

Each function that a rank runs takes its device, so that what is said about numbers can be tried on
a CPU, too.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from holdfast import Checkpointer, Layout, OptimizerState, ProcessGroups
from holdfast.fsdp import ShardedModel, fully_shard_model
from holdfast.parallel.groups.launches import LaunchRecorder
from tests.harness import RankContext, run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
STEPS = 4
WIDTH = 64
_SLEEP_CYCLES = 200_000_000  # about a tenth of a second


class Layer(nn.Module):
    """A unit; 37 rows divide over no number of ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 37)
        self.down = nn.Linear(37, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def build(device: torch.device) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(*(Layer() for _ in range(3))).to(device)


def groups_of(context: RankContext, device: torch.device) -> ProcessGroups:
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    return ProcessGroups.create(Layout(dp=context.num_ranks), backend=backend)


def batch(step: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, WIDTH, generator=generator).to(device)


def train(
    sharded: ShardedModel, optimizer: torch.optim.Optimizer, device: torch.device, *, first: int = 0
) -> list[float]:
    """Two microbatches a step; the norms."""
    norms = []
    for step in range(first, first + STEPS):
        for number, rows in enumerate(batch(step, device).chunk(2)):
            with sharded.microbatch(is_last=number == 1):
                (sharded.model(rows).square().mean() / 2).backward()
        norms.append(sharded.step(optimizer, max_norm=1.0).norm)
    return norms


def truth(device: torch.device) -> tuple[nn.Sequential, list[float]]:
    """The same without sharding, the whole batch at once."""
    net = build(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    norms = []
    for step in range(STEPS):
        net(batch(step, device)).square().mean().backward()
        norms.append(float(nn.utils.clip_grad_norm_(net.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
    return net, norms


def whole(net: nn.Module) -> dict[str, Tensor]:
    return {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
        for name, p in net.named_parameters()
    }


def difference(net: nn.Module, other: nn.Module) -> float:
    expected = whole(other)
    return max(float((value - expected[name]).abs().max()) for name, value in whole(net).items())


def trained(context: RankContext, kind: str) -> dict[str, tuple[float, float]]:
    """Per strategy, on the current and on a side stream: how far weights and norms are off."""
    device = torch.device(kind)
    found = {}
    with groups_of(context, device) as groups:
        expected, norms = truth(device)
        for strategy in STRATEGIES:
            for place in ("current", "side")[: 1 + (device.type == "cuda")]:
                net = build(device)
                sharded = fully_shard_model(net, groups, experts=(), units=net, strategy=strategy)
                optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
                if place == "side":
                    side = torch.cuda.Stream()
                    side.wait_stream(torch.cuda.current_stream())
                    with torch.cuda.stream(side):
                        seen = train(sharded, optimizer, device)
                    torch.cuda.current_stream().wait_stream(side)
                else:
                    seen = train(sharded, optimizer, device)
                off = max(abs(a - b) for a, b in zip(seen, norms, strict=True))
                found[f"{strategy} {place}"] = difference(net, expected), off
    return found


def test_every_strategy_trains_as_without_sharding_on_any_stream() -> None:
    (found,) = run_ranks(1, trained, "cuda:0").results
    assert len(found) == 2 * len(STRATEGIES)
    for case, (weights, norms) in found.items():
        assert weights < 1e-5, case
        assert norms < 1e-4, case


def saved_in_flight(context: RankContext, kind: str, directory: str) -> dict[str, bool]:
    """Saves without a wait, right after a step that the device has not finished."""
    device = torch.device(kind)
    with groups_of(context, device) as groups:
        net = build(device)
        sharded = fully_shard_model(net, groups, experts=(), units=net)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        state = {"model": net, "optimizer": OptimizerState(optimizer, net)}
        kept = {}
        with Checkpointer(directory, groups=groups) as checkpointer:
            for number in range(1, 4):
                train(sharded, optimizer, device, first=number * STEPS)
                if device.type == "cuda":
                    torch.cuda._sleep(_SLEEP_CYCLES)
                with torch.no_grad():
                    for parameter in net.parameters():
                        parameter.mul_(1.25)  # behind the sleep: what is stored has to wait for it
                kept[number] = whole(net)
                pending = checkpointer.save_async(number, state)
                with torch.no_grad():
                    for parameter in net.parameters():
                        parameter.zero_()
                pending.result()
                with torch.no_grad():
                    for name, parameter in net.named_parameters():
                        local = (
                            parameter.to_local() if isinstance(parameter, DTensor) else parameter
                        )
                        local.copy_(kept[number][name].view_as(local))
            found = {}
            for number, expected in kept.items():
                checkpointer.load(state, step=number)
                found[f"step {number}"] = all(
                    torch.equal(value, expected[name]) for name, value in whole(net).items()
                )
    return found


def test_a_checkpoint_has_the_shards_of_the_moment_it_was_asked_for(tmp_path: Path) -> None:
    (found,) = run_ranks(1, saved_in_flight, "cuda:0", str(tmp_path)).results
    assert found == {f"step {number}": True for number in range(1, 4)}


def in_bfloat16(context: RankContext, kind: str, directory: str) -> dict[str, bool]:
    """Products in bfloat16, shards and sums in float32; what is loaded is what computes."""
    device = torch.device(kind)
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    with groups_of(context, device) as groups:
        net = build(device)
        sharded = fully_shard_model(net, groups, experts=(), units=net, precision=precision)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
        train(sharded, optimizer, device)
        state = {"model": net, "optimizer": OptimizerState(optimizer, net)}
        with Checkpointer(directory, groups=groups) as checkpointer, torch.no_grad():
            before = net(batch(0, device))
            checkpointer.save(1, state)
            weights = whole(net)
            with torch.enable_grad():
                train(sharded, optimizer, device, first=STEPS)
            changed = net(batch(0, device))
            checkpointer.load(state)
            after = net(batch(0, device))
        return {
            "computed in bfloat16": before.dtype == torch.bfloat16,
            "stored in float32": all(p.dtype == torch.float32 for p in net.parameters()),
            "training changed it": not torch.equal(before, changed),
            "weights came back": all(
                torch.equal(value, weights[name]) for name, value in whole(net).items()
            ),
            "and are what computes": torch.equal(before, after),
        }


def test_loaded_weights_compute_in_bfloat16(tmp_path: Path) -> None:
    (found,) = run_ranks(1, in_bfloat16, "cuda:0", str(tmp_path)).results
    assert found == dict.fromkeys(found, True)


def materialized(context: RankContext, kind: str, directory: str) -> dict[str, bool]:
    """Built without memory, filled by a load, trains on as the run that saved."""
    device = torch.device(kind)
    with groups_of(context, device) as groups:
        net = build(device)
        sharded = fully_shard_model(net, groups, experts=(), units=net)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        train(sharded, optimizer, device)
        with Checkpointer(directory, groups=groups) as checkpointer:
            checkpointer.save(1, {"model": net})
            with torch.device("meta"):
                blank = nn.Sequential(*(Layer() for _ in range(3)))
            other = fully_shard_model(blank, groups, experts=(), units=blank)
            other.materialize()
            are_filled = all(bool(value.isnan().all()) for value in whole(blank).values())
            checkpointer.load({"model": blank})
        again = torch.optim.SGD(blank.parameters(), lr=0.1)
        same = train(sharded, optimizer, device) == train(other, again, device)
        return {
            "NaN before the load": are_filled,
            "on the device": all(p.device.type == device.type for p in blank.parameters()),
            "same norms": same,
            "same weights": difference(net, blank) == 0.0,
        }


def test_a_model_without_memory_is_filled_on_the_device(tmp_path: Path) -> None:
    (found,) = run_ranks(1, materialized, "cuda:0", str(tmp_path)).results
    assert found == dict.fromkeys(found, True)


def launched(context: RankContext, kind: str) -> set[tuple[str, str]]:
    """(operation, communicator) of a step's collectives that are of parameters or gradients."""
    device = torch.device(kind)
    with groups_of(context, device) as groups:
        net = build(device)
        sharded = fully_shard_model(net, groups, experts=(), units=net)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        train(sharded, optimizer, device)
        with LaunchRecorder(groups) as recorder:
            train(sharded, optimizer, device, first=STEPS)
        kinds = ("all_gather", "reduce_scatter")
        return {(each.op, each.purpose) for each in recorder.launches if each.op in kinds}


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_devices_gather_and_reduce_on_communicators_of_their_own() -> None:
    """F4 on NCCL."""
    for found in run_ranks(2, launched_on_own_device).results:
        assert found == {("all_gather", "dp_cp_ag"), ("reduce_scatter", "dp_cp")}


def launched_on_own_device(context: RankContext) -> set[tuple[str, str]]:
    return launched(context, f"cuda:{context.rank}")
