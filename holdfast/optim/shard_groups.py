"""The communicators of a sharded optimizer: which group reduces, which gathers; checked first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch.distributed.tensor import DTensor, Placement

from holdfast.arguments import check_choice
from holdfast.errors import GroupError
from holdfast.parallel import ProcessGroups

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_SHARD_AXES = ("dp_cp", "expt_dp", "dp_cp_intra", "expt_dp_intra")
_BETWEEN = {"dp_cp_intra": "dp_cp_inter", "expt_dp_intra": "expt_dp_inter"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardGroups:
    """The communicators of one sharded optimizer on one rank; None for a group of one rank."""

    over: str
    """The group whose ranks hold one share each."""
    ranks: tuple[int, ...]
    data_ranks: frozenset[int]
    """Ranks whose gradients are added up: those of `over`, and of the other slices."""
    index: int
    """Of this rank's share."""
    reduce: ProcessGroup | None
    gather: ProcessGroup | None
    """Another communicator of the same ordered ranks, for parameters."""
    between: ProcessGroup | None
    """The group whose ranks hold the same shares (hybrid sharding)."""
    tied: ProcessGroup | None
    """Joins the stages that share an embedding."""

    @property
    def num_shares(self) -> int:
        """Number of ranks, each of which holds one share."""
        return len(self.ranks)

    @classmethod
    def of(cls, groups: ProcessGroups, *, over: str, gather: str | None) -> ShardGroups:
        """Look up and check every communicator before the first collective.

        Raises:
            ConfigError: Shards cannot be over that group.
            GroupError: A communicator is missing, is the reducing one itself, or has other ranks or
                another order.
        """
        check_choice(over, name="over", choices=_SHARD_AXES)
        ranks = groups.ranks(over)
        several = len(ranks) > 1
        gather = gather or f"{over}_ag"
        reduce = groups.group(over) if several else None
        between = _BETWEEN.get(over)
        if between is not None and groups.size(between) == 1:
            between = None
        if between is not None:
            groups.require(between)
        has_tied = groups.layout.has_group("embd", groups.rank) and groups.has("embd")
        return cls(
            over=over,
            ranks=ranks,
            data_ranks=frozenset(groups.ranks(over.removesuffix("_intra"))),
            index=groups.index(over),
            reduce=reduce,
            gather=gather_group(groups, over=over, name=gather) if several else None,
            between=None if between is None else groups.group(between),
            tied=groups.group("embd") if has_tied else None,
        )


def gather_group(groups: ProcessGroups, *, over: str, name: str) -> ProcessGroup:
    """Return the communicator that gathers parameters, checked against that of `over`.

    Raises:
        GroupError: It is missing, is that of `over` itself, or has other ranks or another order.
    """
    try:
        group = groups.group(name)
    except GroupError as error:
        raise GroupError(
            f"Parameters are gathered on their own communicator, so that they do not wait "
            f"behind gradients: {name!r} is missing. Make it with groups.clone({over!r}, "
            f"purpose={name!r}), or create it with the others. {error}"
        ) from error
    if groups.ranks(name) != groups.ranks(over):
        raise GroupError(
            f"Communicator {name!r} has ranks {groups.ranks(name)}, {over!r} has "
            f"{groups.ranks(over)}: shards are cut by position, so both must be the same in order."
        )
    if group is groups.group(over):
        raise GroupError(f"{name!r} is the communicator {over!r} itself, not a second one.")
    return group


def mesh_lines(parameter: DTensor) -> Iterator[tuple[str, Placement, list[int]]]:
    """Yield each dim of a parameter's mesh: name, placement, and the ranks along it from here.

    A mesh without names of dims has the name '?' for each.
    """
    mesh = parameter.device_mesh
    names = mesh.mesh_dim_names or ("?",) * mesh.ndim
    for dim, (name, placement) in enumerate(zip(names, parameter.placements, strict=True)):
        yield name, placement, dist.get_process_group_ranks(mesh.get_group(dim))
