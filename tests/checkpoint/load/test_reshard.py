"""Saved under one placement, loaded under every other: bitwise, whatever the shapes (row E6)."""

from __future__ import annotations

import os
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor import _dtensor_spec as specs
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from holdfast import Checkpointer, Layout, OptimizerState, PlacementError, ProcessGroups, Sharded
from tests.checkpoint.common import full
from tests.harness import RankContext, run_ranks

SHAPES: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "even": ((8, 4), torch.float32),
    "uneven": ((10, 3), torch.float32),
    "short": ((3, 5), torch.bfloat16),
    "thin": ((1, 7), torch.float64),
    "cube": ((5, 6, 7), torch.float16),
    "scalar": ((), torch.float32),
    "hollow": ((0, 4), torch.float32),
    "flags": ((9, 2), torch.bool),
    "eighths": ((12, 2), torch.float8_e4m3fn),
    "eighths2": ((12, 2), torch.float8_e5m2),
    "waves": ((6, 6), torch.complex64),
    "waves2": ((6, 6), torch.complex128),
    "counts": ((11,), torch.int64),
    "words": ((11, 2), torch.uint16),
}


def truth(name: str) -> torch.Tensor:
    """The global value of a tensor of `SHAPES`."""
    shape, dtype = SHAPES[name]
    return (full(name, shape) * 4).to(dtype)


def placements_of(name: str, kind: tuple[Placement, ...]) -> tuple[Placement, ...]:
    """The kind where the tensor has the dims for it, else replicated."""
    ndim = len(SHAPES[name][0])
    return tuple(p if not isinstance(p, Shard) or p.dim < ndim else Replicate() for p in kind)


def dtensors(mesh: DeviceMesh, kind: tuple[Placement, ...], *, blank: bool) -> dict[str, object]:
    """Every tensor of `SHAPES` on a mesh."""
    state: dict[str, object] = {}
    for name in SHAPES:
        placed = placements_of(name, kind)
        local = distribute_tensor(truth(name), mesh, placed, src_data_rank=None)
        if blank:
            local.to_local().zero_()
        state[name] = local
    return state


def local_truth(tensor: DTensor, name: str) -> torch.Tensor:
    """What this rank must hold of a tensor, cut by torch itself."""
    return distribute_tensor(
        truth(name), tensor.device_mesh, tensor.placements, src_data_rank=None
    ).to_local()


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal dtype, shape and bits."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return a.numel() == 0 or torch.equal(
        a.contiguous().reshape(-1).view(torch.uint8), b.contiguous().reshape(-1).view(torch.uint8)
    )


KINDS: tuple[tuple[int, tuple[str, ...], tuple[Placement, ...]], ...] = (
    (1, (), ()),
    (2, ("dp",), (Shard(0),)),
    (3, ("dp",), (Shard(0),)),
    (4, ("dp",), (Shard(0),)),
    (4, ("dp",), (Shard(1),)),
    (4, ("dp", "tp"), (Shard(0), Shard(0))),
    (4, ("dp", "tp"), (Shard(1), Shard(0))),
    (4, ("dp", "tp"), (Replicate(), Shard(1))),
    (4, ("dp", "tp"), (Shard(0), Replicate())),
)


def _layout(num_ranks: int, axes: tuple[str, ...]) -> Layout:
    return Layout(tp=2, dp=num_ranks // 2) if "tp" in axes else Layout(dp=num_ranks)


def _save_kind(context: RankContext, root: str, number: int) -> None:
    num_ranks, axes, kind = KINDS[number]
    if num_ranks == 1:
        strange = truth("even").t().contiguous().t()
        shared = truth("cube")
        Checkpointer(root).save(
            number,
            {"t": {name: truth(name) for name in SHAPES} | {"even": strange, "cube": shared}},
        )
        return
    with ProcessGroups.create(_layout(num_ranks, axes)) as groups:
        state = {"t": dtensors(groups.mesh(*axes), kind, blank=False)}
        Checkpointer(root, groups=groups).save(number, state)


def _load_others(context: RankContext, root: str, number: int) -> list[int]:
    """Load what two others saved under one kind, in two rings of kinds; the steps."""
    num_ranks, axes, kind = KINDS[number]
    steps = [(number - stride) % len(KINDS) for stride in (1, 4)]
    for checkpointer, state in _targets(root, num_ranks, axes, kind):
        assert checkpointer.steps() == [*range(len(KINDS))]
        for step in steps:
            for tensor in state.values():
                (tensor.to_local() if isinstance(tensor, DTensor) else tensor).zero_()
            checkpointer.load({"t": state}, step=step)
            for name, tensor in state.items():
                if isinstance(tensor, DTensor):
                    assert same(tensor.to_local(), local_truth(tensor, name)), (step, name)
                else:
                    assert same(tensor, truth(name)), (step, name)
    return steps


def _targets(
    root: str, num_ranks: int, axes: tuple[str, ...], kind: tuple[Placement, ...]
) -> Iterator[tuple[Checkpointer, dict[str, torch.Tensor]]]:
    if num_ranks == 1:
        plain = {name: torch.zeros_like(truth(name)) for name in SHAPES}
        plain["even"] = torch.zeros(4, 8).t()
        yield Checkpointer(root), plain
        return
    with ProcessGroups.create(_layout(num_ranks, axes)) as groups:
        yield (
            Checkpointer(root, groups=groups),
            dtensors(groups.mesh(*axes), kind, blank=True),  # type: ignore[misc]
        )


@pytest.mark.slow
def test_every_placement_loads_what_every_other_saved(tmp_path: Path) -> None:
    for number, (num_ranks, _, _) in enumerate(KINDS):
        run_ranks(num_ranks, _save_kind, str(tmp_path), number, init=num_ranks > 1)
    for number, (num_ranks, _, _) in enumerate(KINDS):
        outcome = run_ranks(num_ranks, _load_others, str(tmp_path), number, init=num_ranks > 1)
        assert all(len(steps) == 2 for steps in outcome.results)


class Block(nn.Module):
    """Two linear layers, one split by columns, one by rows, and a norm between."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 20)
        self.norm = nn.LayerNorm(20)
        self.down = nn.Linear(20, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def _model(groups: ProcessGroups, tp: int, *, shard: bool, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(*(Block() for _ in range(2)), nn.Linear(6, 5))
    mesh = groups.mesh("dp", "tp")
    if tp > 1:
        plan = {
            f"{i}.{name}": style
            for i in range(2)
            for name, style in (("up", ColwiseParallel()), ("down", RowwiseParallel()))
        }
        parallelize_module(model, mesh["tp"], plan)
    if shard:
        for block in model:
            fully_shard(block, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
    return model


def _train(
    context: RankContext, root: str, tp: int, dp: int, shard: bool, save: bool
) -> dict[str, torch.Tensor]:
    """FSDP2 x TP (strided shards): save after two steps, or load; the full tensors either way."""
    with ProcessGroups.create(Layout(tp=tp, dp=dp)) as groups:
        model = _model(groups, tp, shard=shard, seed=1 if save else 2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        state = {"model": model, "optimizer": OptimizerState(optimizer, model)}
        checkpointer = Checkpointer(root, groups=groups)
        if save:
            torch.manual_seed(3)
            for _ in range(2):
                model(torch.randn(4, 6)).square().mean().backward()
                if not shard and dp > 1:
                    for p in model.parameters():
                        grad = p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad
                        torch.distributed.all_reduce(grad, group=groups.group("dp"))
                optimizer.step()
                optimizer.zero_grad()
            checkpointer.save(2, state)
        else:
            checkpointer.load(state)
        found: dict[str, torch.Tensor] = {}
        for name, parameter in model.named_parameters():
            found[name] = _whole(parameter)
            for entry, value in optimizer.state[parameter].items():
                found[f"{name}/{entry}"] = _whole(value)
        return {name: value.detach().clone() for name, value in found.items()}


def _whole(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


@pytest.mark.parametrize(
    "saver",
    [
        (2, 2, True),
        *(pytest.param(s, marks=pytest.mark.slow) for s in ((1, 4, True), (2, 1, False))),
    ],
)
@pytest.mark.slow
def test_fsdp_and_tensor_parallel_models_reshard(
    tmp_path: Path, saver: tuple[int, int, bool]
) -> None:
    """FSDP2 over TP makes strided shards: weights, moments and step counters are all in place."""
    tp, dp, shard = saver
    want = run_ranks(tp * dp, _train, str(tmp_path), tp, dp, shard, True).results[0]
    for tp, dp, shard in ((2, 2, True), (1, 3, True), (4, 1, False), (1, 2, False)):
        for got in run_ranks(tp * dp, _train, str(tmp_path), tp, dp, shard, False).results:
            assert got.keys() == want.keys()
            for name, value in want.items():
                assert same(got[name], value), name


def _uneven_from_local(context: RankContext, root: str) -> str:
    with ProcessGroups.create(Layout(dp=2)) as groups:
        rows = (1, 4)[context.rank]
        mesh = groups.mesh("dp")
        uneven = DTensor.from_local(
            torch.ones(rows, 2), mesh, [Shard(0)], shape=(5, 2), stride=(2, 1), run_check=False
        )
        checkpointer = Checkpointer(root, groups=groups)
        with pytest.raises(PlacementError) as caught:
            checkpointer.save(1, {"t": {"x": uneven}})
        piece = Sharded(
            torch.full((rows, 2), float(context.rank)), (5, 2), offset=((0, 1)[context.rank], 0),
            over=("dp",),
        )  # fmt: skip
        checkpointer.save(1, {"t": {"x": piece}})
        whole = torch.zeros(5, 2)
        checkpointer.load({"t": {"x": whole}})
        assert whole[:, 0].tolist() == [0.0, 1.0, 1.0, 1.0, 1.0]
        return str(caught.value)


def _in_another_order(context: RankContext, root: str) -> None:
    with ProcessGroups.create(Layout(tp=1, dp=2)) as groups:
        mesh, kind = groups.mesh("dp", "tp"), (Shard(0), Shard(0))
        usual = distribute_tensor(torch.arange(8.0), mesh, kind, src_data_rank=None)
        meta = usual._spec.tensor_meta
        order = (specs.ShardOrderEntry(0, (1, 0)),)
        spec = specs.DTensorSpec(mesh, kind, tensor_meta=meta, shard_order=order)
        odd = DTensor(usual.to_local(), spec, requires_grad=False)
        checkpointer = Checkpointer(root, groups=groups)
        checkpointer.save(1, {"t": {"x": usual}})
        with pytest.raises(PlacementError, match=r"t\.x: its dim 0 is cut over mesh dims \[1, 0\]"):
            Checkpointer(root, groups=groups).save(2, {"t": {"x": odd}})
        with pytest.raises(PlacementError, match=r"t\.x: its dim 0 is cut over mesh dims \[1, 0\]"):
            checkpointer.load({"t": {"other": usual, "x": odd}}, allow_missing=["t.other"])


@pytest.mark.skipif(not hasattr(specs, "ShardOrderEntry"), reason="this torch has one order")
def test_pieces_that_are_cut_in_another_order_are_refused(tmp_path: Path) -> None:
    """E6: torch's placements do not say in which order mesh dims cut a dim; its spec may."""
    run_ranks(2, _in_another_order, str(tmp_path))


def test_uneven_pieces_are_refused_as_dtensor_and_right_as_sharded(tmp_path: Path) -> None:
    """PyTorch DCP saves uneven from_local shards and cannot load them again."""
    outcome = run_ranks(2, _uneven_from_local, str(tmp_path))
    assert all("t.x" in message and "Sharded" in message for message in outcome.results)


def test_what_torch_has_to_fill_needs_no_second_memory(tmp_path: Path) -> None:
    """Row P26: another dtype, strides, columns of both: piece by piece, cut anywhere in a row."""
    num_threads = min(8, len(os.sched_getaffinity(0)))
    rows = 500 * (num_threads + 1)
    whole = torch.arange(4000 * rows, dtype=torch.float32).view(rows, 4000)
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, {"state": {"w": whole}})
    columns = torch.zeros(1990, rows, dtype=torch.bfloat16).t()
    for into, target, expected in (
        (cast := torch.zeros_like(whole, dtype=torch.bfloat16), cast, whole),
        (strided := torch.zeros(4000, rows).t(), strided, whole),
        (columns, Sharded(columns, (rows, 4000), offset=(0, 7), over=("tp",)), whole[:, 7:1997]),
    ):
        tracemalloc.start()
        try:
            checkpointer.load({"state": {"w": target}}, cast=True)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert torch.equal(into, expected.to(into.dtype))
        # Each thread has a piece of 4 MiB, and what it takes out of it.
        assert peak < 0.9 * whole.nbytes
