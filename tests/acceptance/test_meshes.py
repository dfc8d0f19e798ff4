"""Ranks in another order than ascending: saved right or refused, never permuted (K3)."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from holdfast import Checkpointer, HoldfastError, Layout, PlacementError, ProcessGroups
from tests.checkpoint.common import full
from tests.harness import RankContext, run_ranks

SHAPE = (10, 6)
ORDERS = ((3, 2, 1, 0), (2, 0, 3, 1))


EVEN = (8, 6)
"""On meshes in another order torch itself is right for even shards only."""


class Permuted(AssertionError):
    """Rows came back in another order, and nobody said a word."""


def truth(shape: tuple[int, int] = SHAPE) -> torch.Tensor:
    return full("weight", shape)


def linear(mesh: DeviceMesh, shape: tuple[int, int] = SHAPE) -> nn.Linear:
    """A layer with the true weight, sharded by FSDP2 over a mesh."""
    layer = nn.Linear(shape[1], shape[0], bias=False)
    with torch.no_grad():
        layer.weight.copy_(truth(shape))
    fully_shard(layer, mesh=mesh)
    return layer


def on_layouts(context: RankContext, root: str) -> None:
    """Layouts with their ranks in any order: each saves, all load what the others saved."""
    layouts = (
        Layout(dp=4),
        Layout(dp=4, ranks=ORDERS[0]),
        Layout(tp=2, dp=2, ranks=ORDERS[1]),
        Layout(tp=2, dp=2, order="dp-tp", ranks=ORDERS[1]),
    )
    with contextlib.ExitStack() as stack:
        made = [stack.enter_context(ProcessGroups.create(layout)) for layout in layouts]
        for step, groups in enumerate(made):
            Checkpointer(root, groups=groups).save(step, {"t": tensors(groups)})
        for groups in made:
            state = tensors(groups)
            plain = {key: torch.zeros(SHAPE) for key in state}
            for step in range(len(layouts)):
                for value in state.values():
                    value.to_local().fill_(-1.0)
                Checkpointer(root, groups=groups).load({"t": state}, step=step)
                for key, value in state.items():
                    assert torch.equal(value.full_tensor(), truth()), (step, key)
                Checkpointer(root, groups=groups).load({"t": plain}, step=step)
                for key, tensor in plain.items():
                    assert torch.equal(tensor, truth()), (step, key)
                    tensor.zero_()


def tensors(groups: ProcessGroups) -> dict[str, DTensor]:
    """The true weight, placed by torch and by FSDP2 on the meshes of a layout."""
    whole = groups.mesh("dp", "tp")
    weight = linear(groups.mesh("dp")).weight.detach()
    assert isinstance(weight, DTensor)
    both = distribute_tensor(truth(), whole, [Shard(0), Shard(1)])
    rows = distribute_tensor(truth(), whole, [Replicate(), Shard(0)], src_data_rank=None)
    return {"fsdp": weight, "both": both, "rows": rows}


def test_a_layout_may_have_its_ranks_in_any_order(tmp_path: Path) -> None:
    run_ranks(4, on_layouts, str(tmp_path))


def on_own_meshes(context: RankContext, root: str) -> list[str]:
    """Meshes that a user made of ranks in another order: what came of saving and of loading."""
    reports = []
    num_ranks = context.num_ranks
    with ProcessGroups.create(Layout(dp=num_ranks)) as groups:
        Checkpointer(f"{root}/plain", groups=groups).save(1, {"t": {"x": truth(EVEN)}})
        for order in ORDERS if num_ranks == 4 else ((1, 0),):
            mesh = DeviceMesh("cpu", list(order), mesh_dim_names=("dp",))
            weight = linear(mesh, EVEN).weight.detach()
            assert isinstance(weight, DTensor)
            cases = {"fsdp": weight, "scattered": distribute_tensor(truth(EVEN), mesh, [Shard(0)])}
            for name, tensor in cases.items():
                assert torch.equal(tensor.full_tensor(), truth(EVEN)), "torch itself is wrong"
                reports.append(outcome(tensor, f"{root}/{name}-{order[0]}", groups))
                tensor.to_local().fill_(-1.0)
                try:
                    loader = Checkpointer(f"{root}/plain", groups=groups)
                    loader.load({"t": {"x": tensor}})
                except HoldfastError as error:
                    reports.append(refusal(error))
                else:
                    right = torch.equal(tensor.full_tensor(), truth(EVEN))
                    reports.append("right" if right else f"{name} {order}: loaded permuted")
    return reports


def outcome(tensor: DTensor, root: str, groups: ProcessGroups) -> str:
    """Save a tensor and read the whole back: right, refused, or what is wrong."""
    checkpointer = Checkpointer(root, groups=groups)
    try:
        checkpointer.save(1, {"t": {"x": tensor}})
    except HoldfastError as error:
        assert checkpointer.latest() is None
        return refusal(error)
    found = torch.zeros(EVEN)
    checkpointer.load({"t": {"x": found}})
    return "right" if torch.equal(found, tensor.full_tensor()) else f"{root}: saved permuted"


def refusal(error: HoldfastError) -> str:
    assert isinstance(error, PlacementError), error
    assert "t.x" in str(error)
    return "refused"


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_mesh_of_ranks_in_another_order_is_right_or_refused(
    tmp_path: Path, num_ranks: int
) -> None:
    """torch sorts the ranks of the communicator: the group's order is not the mesh's."""
    for reports in run_ranks(num_ranks, on_own_meshes, str(tmp_path)).results:
        wrong = [each for each in reports if each not in ("right", "refused")]
        assert all("permuted" in each for each in wrong), wrong
        if wrong:
            raise Permuted(f"{len(wrong)} of {len(reports)}: {wrong}")


def replicated_on_own_mesh(context: RankContext, root: str) -> None:
    with ProcessGroups.create(Layout(dp=2)) as groups:
        mesh = DeviceMesh("cpu", [1, 0], mesh_dim_names=("dp",))
        tensor = DTensor.from_local(truth(EVEN), mesh, [Replicate()], run_check=False)
        checkpointer = Checkpointer(root, groups=groups)
        checkpointer.save(1, {"t": {"x": tensor}})
        found = torch.zeros(EVEN)
        checkpointer.load({"t": {"x": found}})
        assert torch.equal(found, truth(EVEN))


def test_order_does_not_matter_to_what_is_replicated(tmp_path: Path) -> None:
    run_ranks(2, replicated_on_own_mesh, str(tmp_path))
