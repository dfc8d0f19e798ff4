"""Where ranks run, and which of them feed a value.

A value that a rank validates is the work of several devices: with tensor parallelism each rank adds
a part, a pipeline stage continues what the stage before has computed, experts and context ranks
exchange tokens. Whichever of them was wrong, the value is. So it has a set of ranks that *feed* it,
and a verdict is about the devices of that set.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from functools import cached_property

import msgspec
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from holdfast.arguments import check_int
from holdfast.errors import ConfigError, LayoutError
from holdfast.parallel.layout import Layout
from holdfast.rerun.devices import DeviceIdentity

FedBy = str | Iterable[int] | None
"""The ranks that feed a value: None for the model replica, "all", axes of the layout, or ranks."""
_REPLICA_AXES = ("tp", "cp", "pp")
_EXPERT_REPLICA_AXES = ("expt_tp", "ep")


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """The host and the device that a rank runs on."""

    rank: int
    coordinate: str
    host: str
    device: str

    @property
    def identity(self) -> DeviceIdentity:
        """The device, as two processes compare it."""
        return DeviceIdentity(host=self.host, uuid=self.device)

    def __str__(self) -> str:
        """Return host and device for messages."""
        return f"{self.host}, {self.device}"


def device_keys(places: Iterable[Place]) -> frozenset[str]:
    """Return the devices of some places, each once."""
    return frozenset(each.identity.key for each in places)


class Feeders:
    """The sets of ranks that feed values on one rank.

    Args:
        layout: of the model.
        rank: this one.
        modules: of the model. Fully sharded parameters are gathered from the ranks of their mesh in
            every forward, and synchronised batch norms average over theirs, so those feed too.
    """

    def __init__(self, layout: Layout, rank: int, modules: Sequence[nn.Module] = ()) -> None:
        self._layout = layout
        self._rank = rank
        self._modules = tuple(modules)
        self._known: dict[str, tuple[int, ...]] = {}

    def of(self, fed_by: FedBy) -> tuple[int, ...]:
        """Return the ranks that feed a value, ascending.

        Raises:
            ConfigError: `fed_by` is not of the layout, or lacks this rank.
        """
        if fed_by is None:
            return self._replica
        if isinstance(fed_by, str):
            if fed_by not in self._known:
                self._known[fed_by] = self._by_axes(fed_by)
            return self._known[fed_by]
        try:
            ranks = sorted({check_int(each, name="fed_by: a rank", least=0) for each in fed_by})
        except TypeError as error:
            raise ConfigError(
                f"fed_by={fed_by!r}: pass ranks, axes of the layout ('tp-cp'), or 'all'"
            ) from error
        if self._rank not in ranks or not set(ranks) <= set(self._layout.ranks):
            raise ConfigError(
                f"fed_by={ranks}: the ranks that feed a value are ranks of {self._layout}, and "
                f"rank {self._rank}, which validates it, is one of them"
            )
        return tuple(ranks)

    def _by_axes(self, axes: str) -> tuple[int, ...]:
        if axes == "all":
            return tuple(sorted(self._layout.ranks))
        try:
            return tuple(sorted(self._layout.group(axes, self._rank)))
        except LayoutError as error:
            raise ConfigError(f"fed_by={axes!r}: {error}") from error

    @cached_property
    def _replica(self) -> tuple[int, ...]:
        joined = {self._rank, *_ranks_of_meshes(self._modules)} & set(self._layout.ranks)
        return connected(self._layout, joined)


def connected(layout: Layout, ranks: Iterable[int]) -> tuple[int, ...]:
    """Return the ranks of the model replicas that some ranks belong to, ascending.

    Ranks belong together if they exchange anything in a forward or backward: along `tp`, `cp` and
    `pp`, and, with experts, `expt_tp` and `ep`.
    """
    axes = _REPLICA_AXES + (_EXPERT_REPLICA_AXES if layout.has_experts else ())
    reached: set[int] = set()
    waiting = list(ranks)
    while waiting:
        rank = waiting.pop()
        if rank in reached:
            continue
        reached.add(rank)
        for axis in axes:
            waiting += layout.group(axis, rank)
    return tuple(sorted(reached))


def replicas_of(layout: Layout) -> list[tuple[int, ...]]:
    """Return the ranks of each model replica; those with the same part of the model in one order.

    Empty if replicas are not alike in shape.
    """
    replicas: list[tuple[int, ...]] = []
    reached: set[int] = set()
    for rank in layout.ranks:
        if rank not in reached:
            replicas.append(
                tuple(
                    sorted(connected(layout, [rank]), key=lambda each: _part_of_model(layout, each))
                )
            )
            reached.update(replicas[-1])
    parts = {tuple(_part_of_model(layout, rank) for rank in each) for each in replicas}
    is_unique = all(len(set(each)) == len(each) for each in parts)
    return replicas if len(parts) == 1 and is_unique else []


def partner_ranks(layout: Layout) -> dict[int, int]:
    """Return for each rank the one with the same part of the model in the next data replica.

    Empty if there is one replica only. Replicas follow one another in a circle, so the partners of
    all ranks are all ranks.
    """
    replicas = replicas_of(layout)
    if len(replicas) < 2:
        return {}
    return {
        rank: other
        for number, replica in enumerate(replicas)
        for rank, other in zip(replica, replicas[(number + 1) % len(replicas)], strict=True)
    }


def odd_ones(values: Sequence[Hashable]) -> list[int]:
    """Return the positions of those that differ from most others; none without a majority."""
    (most, count), *_ = Counter(values).most_common(1)
    return [i for i, each in enumerate(values) if each != most] if 2 * count > len(values) else []


def _part_of_model(layout: Layout, rank: int) -> tuple[object, ...]:
    """Return a rank's place in its replica, along the axes that divide the model."""
    at = layout.coordinate(rank)
    dense = tuple(at[axis] for axis in _REPLICA_AXES)
    if not layout.has_experts:
        return dense
    expert = layout.expert_coordinate(rank)
    return (*dense, *(expert[axis] for axis in _EXPERT_REPLICA_AXES))


def _ranks_of_shards(parameter: DTensor) -> list[int]:
    """Return the ranks that hold the shards of this rank's copy of a parameter."""
    mesh, here = parameter.device_mesh, parameter.device_mesh.get_coordinate()
    if here is None:
        return []
    # Along the dims of a mesh that hold copies (hybrid sharding) a forward gathers nothing.
    index = tuple(
        at if isinstance(placement, Replicate) else slice(None)
        for at, placement in zip(here, parameter.placements, strict=True)
    )
    ranks: list[int] = mesh.mesh[index].flatten().tolist()
    return ranks


def _ranks_of_meshes(modules: Iterable[nn.Module]) -> set[int]:
    """Return the global ranks that parts of a forward come from, by the modules themselves."""
    ranks: set[int] = set()
    for module in modules:
        for parameter in module.parameters():
            if isinstance(parameter, DTensor):
                ranks.update(_ranks_of_shards(parameter))
        for each in module.modules():
            if isinstance(each, nn.SyncBatchNorm):
                group = each.process_group
                ranks.update(torch.distributed.get_process_group_ranks(group))
    return ranks
