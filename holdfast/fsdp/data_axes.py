"""The data axis of dense parameters and of experts: mesh, communicators, divisor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from holdfast._torch import local_tensor, parameter_table
from holdfast.errors import ConfigError, GroupError
from holdfast.fsdp import _torch
from holdfast.fsdp.launch_log import GatherOn
from holdfast.fsdp.plan import Kind, PlannedParameter
from holdfast.optim.shard_groups import gather_group
from holdfast.parallel import ProcessGroups

WHOLE = {"dense": "dp_cp", "experts": "expt_dp"}
"""Data axis of each kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataAxis:
    """The mesh and communicators on which parameters of one kind are sharded and reduced."""

    kind: Kind
    names: tuple[str, ...]
    """Groups of the mesh: the one to shard over; with replicas, the one between slices first."""
    root: DeviceMesh
    """Mesh with the data axis and all axes that parameters are split over."""
    mesh: DeviceMesh
    """Data axis alone."""
    info: Any
    """FSDP2's description of the mesh."""
    gather: GatherOn | None
    """Gathers on its own communicator; None gathers on the one that reduces."""
    divisor: int
    """Number of ranks whose losses are averaged, dp * cp: divides the sum of gradients."""

    @property
    def device(self) -> torch.device:
        """Device of its parameters."""
        if self.mesh.device_type == "cpu":
            return torch.device("cpu")
        return torch.device(self.mesh.device_type, torch.accelerator.current_device_index())


def names_of(kind: Kind, groups: ProcessGroups, *, shards: bool) -> tuple[str, ...]:
    """Return the names of the groups that make the mesh of a kind."""
    whole = WHOLE[kind]
    if shards and groups.layout.replicas > 1:
        return (f"{whole}_inter", f"{whole}_intra")
    return (whole,)


def is_overlap_requested(kinds: Sequence[Kind], groups: ProcessGroups, *, shards: bool) -> bool:
    """Return True if any axis has a communicator for gathering; then every one must have it."""
    return shards and any(
        groups.has(f"{names_of(kind, groups, shards=shards)[-1]}_ag") for kind in kinds
    )


def make_axis(
    kind: Kind,
    planned: Sequence[PlannedParameter],
    *,
    groups: ProcessGroups,
    shards: bool,
    overlaps: bool,
) -> DataAxis:
    """Make the data axis of one kind; check every group before the first collective on it.

    Raises:
        ConfigError: Naming a parameter whose mesh cannot be joined with the data axis.
        GroupError: A communicator is missing, or has other members or another order than the main
            one; or a mesh is not on the communicators of `groups`.
    """
    names = names_of(kind, groups, shards=shards)
    groups.require(*names)
    gather = None
    if overlaps and groups.size(names[-1]) > 1:
        group = gather_group(groups, over=names[-1], name=f"{names[-1]}_ag")
        is_on_host = groups.mesh(names[-1]).device_type == "cpu"
        gather = GatherOn(group, is_on_host=is_on_host)
    root = _mesh(kind, planned, names=names, groups=groups)
    mesh = _slice(root, names)
    _check_mesh(mesh, names, groups)
    return DataAxis(
        kind=kind,
        names=names,
        root=root,
        mesh=mesh,
        info=_torch.mesh_info(mesh, shards=shards),
        gather=gather,
        # Every rank's loss is a mean over its own rows, of which the experts on a rank see those
        # of all ranks of their ep group: so it is dp * cp for experts, too, and not expt_dp.
        divisor=groups.size("dp_cp"),
    )


def _mesh(
    kind: Kind,
    planned: Sequence[PlannedParameter],
    *,
    names: tuple[str, ...],
    groups: ProcessGroups,
) -> DeviceMesh:
    """Make the mesh of the data axis and of every other axis that a parameter is split over.

    torch joins only slices of one mesh, and its caches may give a DTensor on an equal slice of
    another one. So parameters are put on slices of a mesh made here, which are first compared.
    """
    declared = [each for each in planned if isinstance(each.parameter, DTensor)]
    others: dict[str, None] = {}
    for each in sorted(declared, key=lambda each: -len(_model_dims(each, kind))):
        others |= dict.fromkeys(_model_dims(each, kind))
    try:
        mesh = groups.mesh(*names, *others)
    except GroupError as error:
        if not declared:
            raise
        listed = ", ".join(f"'{each.name}'" for each in declared[:3])
        raise ConfigError(
            f"fully_shard_model: parameters {listed} are on meshes with the dims "
            f"{', '.join(others)}, which cannot form a mesh with {', '.join(names)}: {error}"
        ) from error
    for each in declared:
        dims = _model_dims(each, kind)
        own = cast("DTensor", each.parameter).device_mesh
        if dims and _slice(own, dims) != _slice(mesh, dims):
            example = ", ".join(repr(name) for name in (*names, *others))
            raise ConfigError(
                f"fully_shard_model: parameter '{each.name}' is on {own}, which is not a slice of "
                f"a mesh with the data axis on the communicators of these groups. Make "
                f"mesh = groups.mesh({example}) and put {kind} parameters on "
                f"mesh[{', '.join(repr(dim) for dim in dims)}]"
            )
    return mesh


def _model_dims(each: PlannedParameter, kind: Kind) -> tuple[str, ...]:
    """Return the dims of a parameter's mesh that are not of its data axis."""
    mesh = cast("DTensor", each.parameter).device_mesh
    if mesh.mesh_dim_names is None:
        raise ConfigError(
            f"fully_shard_model: parameter '{each.name}' is on a mesh without names of dims; make "
            f"it with groups.mesh(...)"
        )
    return tuple(name for name in mesh.mesh_dim_names if not name.startswith(WHOLE[kind]))


def _slice(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    """Return some dims of a mesh; the mesh itself if these are all."""
    if names == mesh.mesh_dim_names:
        return mesh
    return mesh[names[0] if len(names) == 1 else names]


def _check_mesh(mesh: DeviceMesh, names: tuple[str, ...], groups: ProcessGroups) -> None:
    """Raise GroupError unless each dim of a mesh is on the communicator of the groups."""
    for dim, name in enumerate(names):
        ranks = dist.get_process_group_ranks(mesh.get_group(dim))
        is_own = not groups.has(name) or mesh.get_group(dim) is groups.group(name)
        # Some versions of torch make their own groups for a mesh.
        if not is_own or tuple(ranks) != groups.ranks(name):
            raise GroupError(
                f"Dim {name!r} of the mesh of the parameters is on a communicator of ranks "
                f"{ranks}, not on the groups' own of ranks {list(groups.ranks(name))}. Make the "
                f"mesh with groups.mesh(...)."
            )


@torch.no_grad()
def put_on_mesh(each: PlannedParameter, axis: DataAxis) -> PlannedParameter:
    """Return a DTensor parameter on the mesh of its axis, without the data dims.

    FSDP2 adds these itself to a parameter that is replicated over them. The new parameter takes the
    old one's places in the model.
    """
    parameter = each.parameter
    if not isinstance(parameter, DTensor):
        return each
    names = parameter.device_mesh.mesh_dim_names or ()
    dims = _model_dims(each, axis.kind)
    value: torch.Tensor = local_tensor(parameter)
    if dims:
        value = DTensor.from_local(
            value,
            _slice(axis.root, dims),
            [parameter.placements[names.index(dim)] for dim in dims],
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
    new = nn.Parameter(value, requires_grad=parameter.requires_grad)
    _torch.carry_over(parameter, new)
    for module, attribute in each.places:
        parameter_table(module)[attribute] = new
    return replace(each, parameter=new)
