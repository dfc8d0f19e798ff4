"""The communicators of a sharded optimizer: which group reduces, which gathers, checked first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from holdfast.errors import ConfigError, GroupError, HoldfastError
from holdfast.parallel import ProcessGroups

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Work

_SHARD_AXES = ("dp_cp", "expt_dp", "dp_cp_intra", "expt_dp_intra")
_BETWEEN = {"dp_cp_intra": "dp_cp_inter", "expt_dp_intra": "expt_dp_inter"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardGroups:
    """Where shards lie and what joins them, on one rank.

    `over`: the group whose ranks hold one share each. `gather`: another communicator of the same
    ordered ranks, for parameters. `between`: the group whose ranks hold the same shares (hybrid
    sharding), or None. Communicators are None where the group has one rank.
    """

    over: str
    ranks: tuple[int, ...]
    data_ranks: frozenset[int]
    """The ranks whose gradients are added up: those of `over`, and of the other slices."""
    index: int
    reduce: ProcessGroup | None
    gather: ProcessGroup | None
    between: ProcessGroup | None
    tied: ProcessGroup | None
    """Joins the stages that share an embedding; None where there is one."""

    @property
    def num_shares(self) -> int:
        """Ranks that hold one share each."""
        return len(self.ranks)

    @classmethod
    def of(cls, groups: ProcessGroups, *, over: str, gather: str | None) -> ShardGroups:
        """Look up and check every communicator before the first collective.

        Raises ConfigError for a group that shards cannot lie over, GroupError where a communicator
        is missing, is the reducing one itself, or has other ranks or another order.
        """
        if over not in _SHARD_AXES:
            raise ConfigError(f"over={over!r} is not one of {', '.join(_SHARD_AXES)}")
        ranks = groups.ranks(over)
        several = len(ranks) > 1
        reduce = groups.group(over) if several else None
        between = _BETWEEN.get(over)
        has_between = between is not None and groups.size(between) > 1
        if has_between and between is not None:
            groups.require(between)
        has_tied = groups.layout.has_group("embd", groups.rank) and groups.has("embd")
        return cls(
            over=over,
            ranks=ranks,
            data_ranks=frozenset(groups.ranks(over.removesuffix("_intra"))),
            index=groups.index(over),
            reduce=reduce,
            gather=_gather(groups, over=over, name=gather or f"{over}_ag") if several else None,
            between=groups.group(between) if has_between and between is not None else None,
            tied=groups.group("embd") if has_tied else None,
        )


def _gather(groups: ProcessGroups, *, over: str, name: str) -> ProcessGroup:
    try:
        held = groups.group(name)
    except GroupError as error:
        raise GroupError(
            f"Parameters are gathered on a communicator of their own, so that they do not wait "
            f"behind gradients: {name!r} is missing. Make it with groups.clone({over!r}, "
            f"purpose={name!r}), or create it with the others. {error}"
        ) from error
    if groups.ranks(name) != groups.ranks(over):
        raise GroupError(
            f"Communicator {name!r} has ranks {groups.ranks(name)}, {over!r} has "
            f"{groups.ranks(over)}: shards are cut by position, so both must be the same in order."
        )
    if held is groups.group(over):
        raise GroupError(f"{name!r} is the communicator {over!r} itself, not a second one.")
    return held


def reduce_scatter(out: Tensor, source: Tensor, group: ProcessGroup) -> Work:
    """Start adding up `source` over the group; each rank's share of the sum lands in `out`."""
    # renamed in torch 2.13, which warns about the older name
    call: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    work: Work = call(_real(out), _real(source), group=group, async_op=True)
    return work


def all_gather(out: Tensor, share: Tensor, group: ProcessGroup) -> Work:
    """Start filling `out` with every rank's share; `share` may be this rank's part of `out`."""
    call: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    work: Work = call(_real(out), _real(share), group=group, async_op=True)
    return work


def all_reduce(tensor: Tensor, group: ProcessGroup) -> Work:
    """Start adding up a tensor over the group, in place."""
    work: Work | None = dist.all_reduce(_real(tensor), group=group, async_op=True)
    if work is None:
        raise GroupError("this rank is not in the group of an all-reduce")
    return work


def _real(tensor: Tensor) -> Tensor:
    """A flat tensor as real numbers, two for each complex one: sums are those of both parts."""
    return torch.view_as_real(tensor).view(-1) if tensor.is_complex() else tensor


def wait(work: Work, what: str) -> None:
    """Wait for a collective; GroupError saying which one where it fails or is late."""
    try:
        work.wait()
    except HoldfastError:
        raise
    except RuntimeError as error:
        raise GroupError(
            f"{what} did not complete: {error}. Look at what happened on the other ranks first; "
            f"start again from the last checkpoint."
        ) from error


def flag_device(group: ProcessGroup) -> torch.device:
    """Where small tensors have to be to travel over a group: NCCL takes the device's only."""
    return torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")
