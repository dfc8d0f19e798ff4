"""Device meshes on given communicators, so that torch's own parallelism runs on exactly these."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch.distributed.device_mesh import DeviceMesh

from holdfast.errors import GroupError
from holdfast.parallel.groups import _torch

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from holdfast.parallel.groups.building import Communicators


def mesh(comms: Communicators, names: Sequence[str], device_type: str | None) -> DeviceMesh:
    """See `ProcessGroups.mesh`."""
    axes = [comms.held[name].axes if name in comms.held else name for name in names]
    grid = _grid(comms, names, axes)
    groups = [_communicator(comms, name) for name in names]
    kind = device_type or _torch.device_type(groups[0])
    one_or_all = groups[0] if len(groups) == 1 else groups  # a list of one is refused by torch
    result = DeviceMesh.from_group(one_or_all, kind, grid, mesh_dim_names=tuple(names))
    comms.has_meshes = True
    return _torch.set_apart(result, mark=comms.prefix)


def _grid(comms: Communicators, names: Sequence[str], axes: Sequence[str]) -> torch.Tensor:
    """The ranks reached from this one by walking each group in turn, checked to be a grid.

    `DeviceMesh.from_group` takes any groups for any table of ranks, so this check is ours:
    every line along a dimension is the group of its members. (Then no rank can be there twice: its
    place along each dimension is its index in that group.)
    """
    layout = comms.layout
    sizes = [layout.size(axis) for axis in axes]
    ranks = []
    for place in itertools.product(*map(range, sizes)):
        rank = comms.rank
        for axis, index in zip(axes, place, strict=True):
            rank = layout.group(axis, rank)[index]
        ranks.append(rank)
    grid = torch.tensor(ranks, dtype=torch.int).reshape(sizes)
    lines = [grid.movedim(k, -1).reshape(-1, size).tolist() for k, size in enumerate(sizes)]
    if any(
        tuple(line) != layout.group(axis, line[0])
        for axis, group_lines in zip(axes, lines, strict=True)
        for line in group_lines
    ):
        raise GroupError(
            f"Groups {', '.join(names)} of {layout} do not form a grid of "
            f"{' x '.join(map(str, sizes))} = {len(ranks)} ranks: they share an axis, or belong to "
            "different views."
        )
    for name, axis in zip(names, axes, strict=True):
        planned, held = layout.group(axis, comms.rank), comms.held.get(name)
        if held is not None and held.ranks != planned:
            raise GroupError(
                f"Communicator {name!r} has ranks {held.ranks}, the layout says {planned} now."
            )
    return grid


def _communicator(comms: Communicators, name: str) -> ProcessGroup:
    """The held communicator, or one of this rank alone for a group of one rank."""
    if name in comms.held:
        return comms.held[name].group
    if name not in comms.singles:
        comms.singles[name] = comms.make((comms.rank,), f"{name}-alone")
    return comms.singles[name]
