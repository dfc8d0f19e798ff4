"""A run of a local tensor is at the boxes where its elements are, whatever the placement."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from holdfast import Layout, PlacementError, ProcessGroups
from holdfast.arrays.intervals import shard_intervals
from holdfast.state import FlatShard
from holdfast.state.leaves import TensorLeaf, tensor_leaf
from tests.harness import RankContext, run_ranks

LONE = Layout()


def check(leaf: TensorLeaf, run: torch.Tensor, full: torch.Tensor) -> None:
    """The boxes hold the run's elements, each once, as views of its memory."""
    assert leaf.shape == tuple(full.shape)
    found: list[int] = []
    for box, local in zip(leaf.boxes, leaf.locals, strict=True):
        where = tuple(slice(a, b) for a, b in zip(box.offset, box.stop, strict=True))
        assert torch.equal(full[where], local)
        assert local.untyped_storage().data_ptr() == run.untyped_storage().data_ptr()
        found.extend(local.flatten().tolist())
    assert sorted(found) == sorted(run.tolist())


@given(shape=st.lists(st.integers(1, 5), max_size=4), data=st.data())
def test_plain_parameters(shape: list[int], data: st.DataObject) -> None:
    full = torch.arange(torch.Size(shape).numel()).reshape(shape)
    start = data.draw(st.integers(0, full.numel()))
    stop = data.draw(st.integers(start, full.numel()))
    run = full.flatten()[start:stop].clone()
    leaf = tensor_leaf(FlatShard(run, start, full, "dp"), key="k", layout=LONE, rank=0)
    assert len(leaf.boxes) <= max(1, 2 * len(shape) - 1)
    assert leaf.replica_set is None
    check(leaf, run, full)


def on_a_mesh(context: RankContext) -> int:
    compared = 0
    with ProcessGroups.create(Layout(tp=2, dp=2)) as groups:
        mesh = groups.mesh("dp_cp", "tp")
        for shape in [(7, 5), (4, 3, 5), (1, 9), (11,), (6, 1, 2)]:
            full = torch.arange(torch.Size(shape).numel()).reshape(shape)
            kinds = [(Replicate(), Shard(d)) for d in range(len(shape))]
            values = [distribute_tensor(full, mesh, k, src_data_rank=None) for k in kinds]
            values.append(distribute_tensor(full, mesh, [Replicate()] * 2, src_data_rank=None))
            values.append(strided(full, groups))
            for value in values:
                local = value.to_local()
                for start in range(local.numel() + 1):
                    for stop in range(start, local.numel() + 1, 3):
                        run = local.flatten()[start:stop].clone()
                        shard = FlatShard(run, start, value, "dp_cp")
                        leaf = tensor_leaf(shard, key="k", layout=groups.layout, rank=groups.rank)
                        check(leaf, run, full)
                        compared += 1
        column = distribute_tensor(torch.zeros(4, 4), mesh, [Replicate(), Shard(0)])
        leaf = leaf_of(column, groups)
        assert leaf.replica_set is not None
        assert leaf.replica_set.replicas == (groups.rank,)
        assert leaf.replica_set.span == (0, 1, 2, 3)
        row = leaf_of(distribute_tensor(torch.zeros(8), mesh, [Replicate()] * 2), groups)
        assert row.replica_set is not None
        assert row.replica_set.replicas == groups.ranks("tp")
        with pytest.raises(PlacementError, match=r"w: .*neither view"):
            tensor_leaf(
                FlatShard(torch.zeros(1), 0, column, "nowhere"),
                key="w",
                layout=groups.layout,
                rank=groups.rank,
            )
    return compared


def leaf_of(value: DTensor, groups: ProcessGroups) -> TensorLeaf:
    shard = FlatShard(torch.zeros(2), 0, value, "dp_cp")
    return tensor_leaf(shard, key="k", layout=groups.layout, rank=groups.rank)


def strided(full: torch.Tensor, groups: ProcessGroups) -> DTensor:
    """Cut over tp first and dp second, as FSDP over TP does: several intervals of one dim."""
    mesh = groups.mesh("dp_cp", "tp")
    rows = shard_intervals(
        ((0, full.shape[0]),), num_chunks=2, index=groups.index("dp_cp"), split_factor=2
    )
    indices = torch.cat([torch.arange(a, b) for a, b in rows] or [torch.arange(0)])
    size = -(-len(indices) // 2)
    mine = indices[groups.index("tp") * size :][:size]
    return DTensor.from_local(
        full[mine],
        mesh,
        [_StridedShard(0, split_factor=2), Shard(0)],
        run_check=False,
        shape=full.shape,
        stride=full.stride(),
    )


def test_declared_parameters() -> None:
    assert min(run_ranks(4, on_a_mesh).results) > 500


def test_runs_that_cannot_be() -> None:
    whole = torch.zeros(3, 2)
    with pytest.raises(PlacementError, match=r"outside the 6 elements"):
        FlatShard(torch.zeros(4), 3, whole, "dp")
    with pytest.raises(PlacementError, match="contiguous 1-d"):
        FlatShard(torch.zeros(2, 2), 0, whole, "dp")
    with pytest.raises(PlacementError, match="contiguous 1-d"):
        FlatShard(torch.zeros(6)[::2], 0, whole, "dp")
