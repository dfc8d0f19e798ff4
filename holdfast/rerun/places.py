"""Where ranks run, and which of them feed a value.

A value that a rank validates is the work of several devices: with tensor parallelism each rank adds
a part, a pipeline stage continues what the stage before has computed, experts and context ranks
exchange tokens. Whichever of them was wrong, the value is. So it has a set of ranks that *feed* it,
and a verdict is about the devices of that set.
"""

from __future__ import annotations

import hashlib
import json
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
from holdfast.parallel.module_layouts import ModuleLayouts
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
        model: its layout, or those of its modules.
        rank: this one.
        modules: of the model. Fully sharded parameters are gathered from the ranks of their mesh in
            every forward, and synchronised batch norms average over theirs, so those feed too.
    """

    def __init__(
        self, model: Layout | ModuleLayouts, rank: int, modules: Sequence[nn.Module] = ()
    ) -> None:
        self._exchanges = _Exchanges(model)
        self._layout = _union(model)
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
            layouts = self._exchanges.of(self._rank)
            return tuple(sorted({r for each in layouts for r in each.group(axes, self._rank)}))
        except LayoutError as error:
            raise ConfigError(f"fed_by={axes!r}: {error}") from error

    @cached_property
    def _replica(self) -> tuple[int, ...]:
        joined = {self._rank, *_ranks_of_meshes(self._modules)} & set(self._layout.ranks)
        return self._exchanges.connected(joined)


_Part = tuple[tuple[int, ...], ...]
"""The place of a rank in its replica: of each module that it has, which one, and where in it."""


class _Exchanges:
    """Which ranks of a model exchange anything in a forward or backward.

    Along `tp`, `cp` and `pp`, and, with experts, `expt_tp` and `ep`; of several modules also along
    the edges between them.
    """

    def __init__(self, model: Layout | ModuleLayouts) -> None:
        layouts = [*model.values()] if isinstance(model, ModuleLayouts) else [model]
        self._members = [(each, frozenset(each.ranks)) for each in layouts]
        self._across: dict[int, list[int]] = {}
        """By rank, one of each data rank of other modules that it sends to or receives from."""
        if not isinstance(model, ModuleLayouts):
            return
        for edge in model.edges:
            one, other = (_first_of_data_ranks(model[end]) for end in edge)
            for i, rank in enumerate(one):
                for j, far in enumerate(other):
                    # The same samples are in block i of one side and in block j of the other.
                    if i * len(other) < (j + 1) * len(one) and j * len(one) < (i + 1) * len(other):
                        self._across.setdefault(rank, []).append(far)
                        self._across.setdefault(far, []).append(rank)

    def connected(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """Return the ranks of the model replicas that some ranks belong to, ascending."""
        reached: set[int] = set()
        waiting = list(ranks)
        while waiting:
            rank = waiting.pop()
            if rank in reached:
                continue
            reached.add(rank)
            waiting += self._across.get(rank, ())
            for layout in self.of(rank):
                for axis in _REPLICA_AXES + (_EXPERT_REPLICA_AXES if layout.has_experts else ()):
                    waiting += layout.group(axis, rank)
        return tuple(sorted(reached))

    def of(self, rank: int) -> list[Layout]:
        """Return the layouts that have a rank."""
        return [layout for layout, members in self._members if rank in members]

    def parts(self, replica: Sequence[int]) -> dict[_Part, int]:
        """Return the ranks of a replica by their parts of the model, in the order of these."""
        parts: dict[int, list[tuple[int, ...]]] = {rank: [] for rank in replica}
        for number, (layout, members) in enumerate(self._members):
            here = [rank for rank in replica if rank in members]
            at = {rank: layout.coordinate(rank)["dp"] for rank in here}
            known = sorted(set(at.values()))
            for rank in here:
                index = known.index(at[rank])
                parts[rank].append((number, *_part_of_model(layout, rank), index))
        by_part = {tuple(part): rank for rank, part in parts.items()}
        return dict(sorted(by_part.items()))


def _first_of_data_ranks(layout: Layout) -> list[int]:
    """Return one rank of each data rank of a layout."""
    first: dict[int, int] = {}
    for rank in layout.ranks:
        first.setdefault(layout.coordinate(rank)["dp"], rank)
    return [first[at] for at in sorted(first)]


def replicas_of(model: Layout | ModuleLayouts) -> list[tuple[int, ...]]:
    """Return the ranks of each model replica; those with the same part of the model in one order.

    Empty if replicas are not alike in shape.
    """
    exchanges = _Exchanges(model)
    replicas: list[dict[_Part, int]] = []
    reached: set[int] = set()
    for rank in _union(model).ranks:
        if rank not in reached:
            ranks = exchanges.connected([rank])
            replicas.append(exchanges.parts(ranks))
            reached.update(ranks)
            if len(replicas[-1]) < len(ranks) or [*replicas[-1]] != [*replicas[0]]:
                return []
    return [tuple(each.values()) for each in replicas]


def modules_digest(model: Layout | ModuleLayouts) -> str:
    """Return a digest of which part of which module each rank has; empty for one layout.

    The coordinates of a union of modules number its ranks, and do not tell.
    """
    if not isinstance(model, ModuleLayouts):
        return ""
    position = {rank: i for i, rank in enumerate(model.union.ranks)}
    parts = {}
    for module, layout in model.items():
        fields = layout.to_dict() | {"ranks": [position[rank] for rank in layout.ranks]}
        parts[module] = {name: value for name, value in fields.items() if name != "name"}
    text = json.dumps([parts, sorted(model.edges)], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _union(model: Layout | ModuleLayouts) -> Layout:
    return model.union if isinstance(model, ModuleLayouts) else model


def partner_ranks(model: Layout | ModuleLayouts) -> dict[int, int]:
    """Return for each rank the one with the same part of the model in the next data replica.

    Empty if there is one replica only. Replicas follow one another in a circle, so the partners of
    all ranks are all ranks.
    """
    replicas = replicas_of(model)
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


def _part_of_model(layout: Layout, rank: int) -> tuple[int, ...]:
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
            # In a process without torch.distributed it is an ordinary batch norm.
            if isinstance(each, nn.SyncBatchNorm) and torch.distributed.is_initialized():
                group = each.process_group
                ranks.update(torch.distributed.get_process_group_ranks(group))
    return ranks
