"""How an optimizer's DTensors that have another shape than their parameter are cut with it.

Factors, norms and means of a parameter that is a DTensor are DTensors, too. An optimizer that has
not stepped has none of them that a load could fill, and a plain tensor in their place would fail in
its next step. So what they are cut with is stored, and a load places them by the parameter that is
there, which may be cut otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed import tensor as distributed
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from holdfast.state.memory_order import map_tensors
from holdfast.state.stored import StoredTensor

Followed = list[int | None]
"""Per dim of a tensor the dim of its parameter that it is cut with; None: with none of them."""


def followed_dims(entries: object, parameter: torch.Tensor) -> dict[str, Followed]:
    """Return the dims that each DTensor of another shape than its parameter's follows.

    Args:
        entries: State of one parameter.
        parameter: The parameter.

    Returns:
        By path inside of the entries; of DTensors on the parameter's mesh.
    """
    if not isinstance(parameter, DTensor):
        return {}
    shape, mesh = parameter.shape, parameter.device_mesh
    result: dict[str, Followed] = {}

    def visit(path: str, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, DTensor) and tensor.shape != shape and tensor.device_mesh == mesh:
            result[path] = _followed(tensor, parameter)
        return tensor

    map_tensors(entries, visit)
    return result


def _followed(tensor: DTensor, parameter: DTensor) -> Followed:
    """Return the dim of the parameter that is cut over the same mesh dims as each of a tensor."""
    result: Followed = [None] * tensor.ndim
    for mine, theirs in zip(tensor.placements, parameter.placements, strict=True):
        at, cut = _cut(mine, tensor.ndim), _cut(theirs, parameter.ndim)
        if at is not None and cut is not None and tensor.shape[at] == parameter.shape[cut]:
            result[at] = cut
    return result


def placed_by(
    parameter: torch.Tensor, info: StoredTensor, followed: Sequence[int | None] | None
) -> DTensor | None:
    """Return new memory for a stored tensor, cut as the parameter is along the dims it follows.

    Args:
        parameter: What it belongs to, as it is placed now.
        info: The stored tensor.
        followed: What `followed_dims` returned of it at the save; None if nothing.

    Returns:
        None where nothing was noted, or the parameter is a plain tensor now.

    Cost: the memory of this rank's shard; no collectives.
    """
    if followed is None or not isinstance(parameter, DTensor):
        return None
    dims = followed[: len(info.shape)]
    placements: list[Placement] = []
    for placement in parameter.placements:
        cut = _cut(placement, parameter.ndim)
        is_cut = cut is not None and cut in dims
        placements.append(_moved(placement, dims.index(cut)) if is_cut else Replicate())
    made: DTensor = distributed.empty(
        *info.shape, dtype=info.dtype, device_mesh=parameter.device_mesh, placements=placements
    )
    return made


def _cut(placement: Placement, ndim: int) -> int | None:
    """Return the dim that a placement cuts; None if it cuts none."""
    dim: int | None = getattr(placement, "dim", None)
    return None if dim is None else dim % ndim


def _moved(placement: Any, dim: int) -> Placement:
    """Return a placement of the same kind that cuts another dim."""
    if isinstance(placement, Shard):
        return Shard(dim)
    moved: Placement = type(placement)(dim, split_factor=placement.split_factor)
    return moved
