"""Meshes of equal ranks and different communicators do not run on each other's (G7)."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from holdfast.parallel import Layout, ProcessGroups
from tests.harness import RankContext, run_ranks


def names(mesh: DeviceMesh) -> list[str]:
    return [mesh.get_group(dim).group_name for dim in range(mesh.ndim)]


def product(mesh: DeviceMesh) -> DTensor:
    rows = DTensor.from_local(torch.ones(4, 4), mesh, [Shard(0)])
    return rows @ DTensor.from_local(torch.ones(4, 4), mesh, [Replicate()])


def on_two_layouts(rank: RankContext) -> None:
    """The same operation on the meshes of two layouts, then on the second when the first is gone.

    Torch's caches took the second result for the first one, communicator and all.
    """
    second = ProcessGroups.create(Layout(tp=2, dp=2))
    with ProcessGroups.create(Layout(tp=2, dp=2)) as first:
        for groups in (first, second):
            whole = groups.mesh("dp", "tp")
            for mesh in (groups.mesh("tp"), whole["tp"], whole["dp"]):
                found = product(mesh)
                assert names(found.device_mesh) == names(mesh)
                assert found.full_tensor().sum().item() == 128.0
            assert names(whole["tp"]) == [groups.group("tp").group_name]
            assert whole["tp"] == whole["tp"]
            assert groups.mesh("tp") == groups.mesh("tp")
        assert first.mesh("tp") != second.mesh("tp")
        assert first.mesh("dp", "tp")["tp"] != second.mesh("dp", "tp")["tp"]
    assert product(second.mesh("tp")).full_tensor().sum().item() == 128.0
    second.close()


def test_equal_ranks_do_not_make_meshes_equal() -> None:
    run_ranks(4, on_two_layouts)
