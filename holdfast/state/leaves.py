"""Leaves: what one rank says it holds of each tensor of a state.

A DTensor and the markers `Sharded`, `FlatShard` and `Replicated` declare which boxes of the global
tensor a rank holds, and which ranks hold the same ones. A plain tensor is whole; it declares
nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn.parameter import is_lazy

from holdfast._torch import local_tensor, spec_of
from holdfast.arrays.boxes import Box, flat_range_boxes
from holdfast.arrays.intervals import (
    Intervals,
    boxes_of,
    cut_intervals,
    num_positions,
    shard_intervals,
)
from holdfast.arrays.types import IntArray
from holdfast.errors import LayoutError, PlacementError
from holdfast.format.manifest import IRREGULAR, WHOLE, CutInfo, PlacementInfo
from holdfast.parallel.layout import DENSE_AXES, EXPERT_AXES, Layout
from holdfast.state.markers import (
    FlatShard,
    Marked,
    Padded,
    Pieces,
    Replicated,
    Sharded,
    axis_names,
    check_real_shape,
)
from holdfast.state.tensor_elements import dtype_name
from holdfast.state.tensor_memory import Forms, TensorMemory


@dataclass(frozen=True, slots=True)
class ReplicaSet:
    """Which ranks hold the same bytes, by declaration."""

    replicas: Collection[int]
    """The ranks (ascending, this one included) that hold the same boxes of the tensor."""
    span: Collection[int]
    """The ranks (ascending) that the declaration covers; those that are not replicas must hold
    other boxes."""


class TensorLeaf(NamedTuple):
    """One tensor of the state as this rank holds it; made for every tensor of every save."""

    key: str
    dtype: str
    """The format's name."""
    shape: tuple[int, ...]
    """Global."""
    boxes: tuple[Box, ...]
    """What this rank holds, in global coordinates."""
    locals: tuple[torch.Tensor, ...]
    """The tensor of each box, of the box's shape; any strides, any device."""
    replica_set: ReplicaSet | None
    """None if nothing declares the placement."""
    layout: Layout
    """The one that the part lives on."""
    placement: PlacementInfo | None
    """How the boxes follow from coordinates on the layout; None on a rank off the tensor's mesh."""


@dataclass(frozen=True, kw_only=True)
class FlatState:
    """A flattened state: its tensors, and the tree of everything else."""

    leaves: Mapping[str, TensorLeaf] = field(default_factory=dict)
    """By key, in the order of the tree; without locals if a tensor is held whole."""
    keys: Sequence[str] = ()
    """Of the leaves, in their order."""
    objects: Sequence[Any] = ()
    """The tensor or marker of each."""
    held: Sequence[torch.Tensor] = ()
    """What each of these holds on this rank, see `held_tensor`."""
    nodes: Mapping[str, object] = field(default_factory=dict)
    """Part name -> encoded tree, in which each tensor is a reference to its key."""
    versions: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Part name -> versions of the modules in it that are not 1, for each part that is a module."""
    kinds: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Part name -> by path, the classes of the optimizers and stateful objects in it."""
    labels: Mapping[str, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    """Key -> where coordinates of this rank stand in it, as position and length, in order."""
    addresses: Sequence[int] = ()
    """Of the first element of each of these; 0 if it has none."""
    forms: Forms | None = None
    """Theirs, the object of the pass before if they are the same; None if they are not known."""
    structure: object = field(default_factory=object)
    """The object of the pass before if all leaves claim the same, in the same order."""
    unstored: Sequence[str] = ()
    """Attributes of modules that have changed since the pass before and that nothing shows."""
    unstored_orders: Mapping[str, str] = field(default_factory=dict)
    """By path, what the order of a loader's samples follows from and no part has: what is lost."""

    @cached_property
    def tensors(self) -> Mapping[str, Any]:
        """Key -> the tensor or marker."""
        return dict(zip(self.keys, self.objects, strict=True))

    @cached_property
    def _held_by_key(self) -> Mapping[str, torch.Tensor]:
        return dict(zip(self.keys, self.held, strict=True))

    def local(self, key: str, number: int) -> torch.Tensor:
        """Return the tensor of one box of a leaf, as it is now."""
        return self.locals([(key, number)])[0]

    def memory(self, positions: IntArray) -> TensorMemory | None:
        """Return where some tensors of `held` are, by what is known already.

        Args:
            positions: (n,) their positions in it.

        Returns:
            None if not enough is known.
        """
        if self.forms is None:
            return None
        return TensorMemory(
            list(map(self.held.__getitem__, positions.tolist())),
            address=np.array(self.addresses, dtype=np.int64)[positions],
            is_plain=self.forms.is_plain[positions],
            forms=self.forms,
        )

    def locals(self, places: Iterable[tuple[str, int]]) -> list[torch.Tensor]:
        """Return the tensor of a box of a leaf, as it is now, for each key and number of a box."""
        leaves, held = self.leaves, self._held_by_key
        return [
            views[number] if (views := leaves[key].locals) else held[key].detach()
            for key, number in places
        ]


def held_tensor(obj: Any) -> torch.Tensor:
    """Return what a tensor or marker holds on this rank; nothing waits, and nothing is recorded.

    Of `Pieces` it is the first one.
    """
    if isinstance(obj, DTensor):
        return local_tensor(obj)
    return obj if isinstance(obj, torch.Tensor) else held_tensor(obj.local)


@dataclass(slots=True)
class ReplicaSets:
    """What a pass over a state has computed of DTensors so far; valid while their meshes live."""

    declared: dict[tuple[int, tuple[object, ...]], tuple[ReplicaSet, PlacementInfo]] = field(
        default_factory=dict
    )
    """By mesh and placements."""
    _ranks: dict[int, torch.Tensor] = field(default_factory=dict)

    def ranks_of(self, mesh: DeviceMesh) -> torch.Tensor:
        """Return the ranks of a mesh, which torch computes again at each read."""
        ranks = self._ranks.get(id(mesh))
        if ranks is None:
            ranks = self._ranks[id(mesh)] = mesh.mesh
        return ranks

    def line_of(self, mesh: DeviceMesh, mesh_dim: int) -> list[int]:
        """Return the ranks along one dim of a mesh that this rank is on."""
        line: list[int | slice] = list(mesh.get_coordinate() or ())
        line[mesh_dim] = slice(None)
        ranks: list[int] = self.ranks_of(mesh)[tuple(line)].tolist()
        return ranks


class _Site(NamedTuple):
    """The site of a leaf: its key, the rank that holds it, and the replica sets so far."""

    key: str
    layout: Layout
    rank: int
    replica_sets: ReplicaSets

    def declared(
        self, tensor: DTensor, over: str | None = None
    ) -> tuple[ReplicaSet, PlacementInfo]:
        """Return the replicas and placement of a DTensor, or of a run that differs along `over`."""
        name = self._name(tensor, over)
        result = self.replica_sets.declared.get(name)
        if result is None:
            replicas, placement = _mesh_replica_set(tensor, self), _mesh_placement(tensor, self)
            if over is not None:
                replicas = _flat_replica_set(replicas, over, self)
                placement = placement.runs_over(over)
            result = self.replica_sets.declared[name] = replicas, placement
        return result

    def is_declared(self, tensor: DTensor, over: str | None = None) -> bool:
        """Return True if an earlier leaf of this pass was on the same mesh, placed the same way."""
        return self._name(tensor, over) in self.replica_sets.declared

    @staticmethod
    def _name(tensor: DTensor, over: str | None) -> tuple[int, tuple[object, ...]]:
        return id(tensor.device_mesh), (*tensor.placements, tensor.ndim, over)

    def leaf(
        self,
        dtype: torch.dtype,
        shape: Sequence[int],
        pieces: Iterable[tuple[Box, torch.Tensor]],
        replica_set: ReplicaSet | None,
        placement: PlacementInfo | None,
    ) -> TensorLeaf:
        """Return the leaf of this site from pairs of box and local tensor."""
        boxes, locals_ = zip(*pieces, strict=True) if pieces else ((), ())
        return TensorLeaf(
            key=self.key,
            dtype=dtype_name(dtype, key=self.key),
            shape=tuple(shape),
            boxes=boxes,
            locals=locals_,
            replica_set=replica_set,
            layout=self.layout,
            placement=placement,
        )


def tensor_leaf(
    obj: torch.Tensor | Marked,
    *,
    key: str,
    layout: Layout,
    rank: int,
    replica_sets: ReplicaSets | None = None,
) -> TensorLeaf:
    """Return the leaf of one tensor of the state, on `rank` of `layout`.

    Args:
        replica_sets: Kept by the caller between the leaves of one pass: each is computed once.

    Raises:
        PlacementError: Naming `key`, for what cannot be stored: partial sums, sparse, quantised,
            meta and unknown wrapper tensors, a DTensor whose local shape is not what its placements
            give.

    Cost: no collectives, no copies: the leaf's tensors are views.
    """
    site = _Site(key, layout, rank, ReplicaSets() if replica_sets is None else replica_sets)
    if isinstance(obj, Padded):
        return clip_leaf(_unpadded_leaf(obj.value, site), obj.shape)
    return _unpadded_leaf(obj, site)


def _unpadded_leaf(obj: torch.Tensor | Marked, site: _Site) -> TensorLeaf:
    """Return the leaf of a tensor or marker whose padding, if any, is not declared."""
    if isinstance(obj, Replicated) and isinstance(obj.local, DTensor):
        raise PlacementError(
            f"{site.key}: Replicated(...) around a DTensor; pass the DTensor itself"
        )
    if isinstance(obj, DTensor):
        local = obj.to_local().detach()
        _refuse_unreadable(local, site.key)
        return _dtensor_leaf(obj, local, site)
    tensor = obj if isinstance(obj, torch.Tensor) else obj.local
    _refuse_unreadable(tensor, site.key)
    if isinstance(obj, Sharded):
        return _sharded_leaf(obj, site)
    if isinstance(obj, FlatShard):
        return _flat_leaf(obj, site)
    if isinstance(obj, Pieces):
        return _pieces_leaf(obj, site)
    replica_set = None
    if isinstance(obj, Replicated):
        stage = tuple(sorted(site.layout.group("tp-cp-dp", site.rank)))
        replica_set = ReplicaSet(replicas=stage, span=stage)
    whole = Box((0,) * tensor.ndim, tuple(tensor.shape))
    return site.leaf(tensor.dtype, tensor.shape, [(whole, tensor.detach())], replica_set, WHOLE)


def _refuse_unreadable(tensor: torch.Tensor, key: str) -> None:
    """Raise PlacementError if a local tensor cannot be stored."""
    reason = unreadable(tensor)
    if reason:
        raise PlacementError(f"{key}: {reason}")


def unreadable(tensor: torch.Tensor) -> str:
    """Return why a local tensor cannot be stored; empty if it can."""
    # First: lazy and nested tensors refuse most questions themselves, without naming the key.
    if is_lazy(tensor):
        return (
            "a lazy parameter or buffer has neither shape nor data yet; run the model once "
            "on a batch (also before a load)"
        )
    if tensor.is_nested:
        return (
            "a nested tensor cannot be stored; store its parts: a list of unbind(), or "
            "values() and offsets() of a jagged one"
        )
    if tensor.layout is not torch.strided:
        return f"a {tensor.layout} tensor cannot be stored; make it dense"
    if tensor.is_quantized:
        return "a quantized tensor cannot be stored; store its int_repr()"
    if tensor.is_meta:
        return (
            "a tensor on the meta device has no data; materialise it first: "
            "ShardedModel.materialize(), or model.to_empty(device=…), after which buffers that no "
            "checkpoint has must be computed again"
        )
    if isinstance(tensor, DTensor):
        return "a DTensor inside a marker; pass the DTensor itself"
    kind = type(tensor)
    if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return (
            f"a tensor subclass {kind.__name__} cannot be stored, its bytes are not its "
            f"value; store the plain tensors it wraps"
        )
    return ""


def _sharded_leaf(obj: Sharded, site: _Site) -> TensorLeaf:
    """Return the leaf of a hand-made shard; raise PlacementError if its axes do not give it."""
    local = obj.local.detach()
    dims = {dim: axis_names(axes) for dim, axes in (obj.dims or {}).items()}
    axes = obj.over if obj.dims is None else tuple(itertools.chain(*dims.values()))
    try:
        replica_set = _replica_set(axes, layout=site.layout, rank=site.rank)
        if obj.offset is not None:
            box = Box(obj.offset, tuple(local.shape))
            return site.leaf(local.dtype, obj.shape, [(box, local)], replica_set, IRREGULAR)
        # Axes of one dim split it in turn: of ("pp", "tp") tp splits what pp has left.
        held = []
        for dim, size in enumerate(obj.shape):
            intervals: Intervals = ((0, size),)
            for axis in dims.get(dim, ()):
                members = site.layout.group(axis, site.rank)
                index = members.index(site.rank)
                intervals = shard_intervals(intervals, num_chunks=len(members), index=index)
            held.append(intervals)
    except (LayoutError, PlacementError) as error:
        raise PlacementError(f"{site.key}: {error}") from error
    expected = tuple(map(num_positions, held))
    if expected != tuple(local.shape):
        split = ", ".join(f"dim {dim}: {'+'.join(axes)}" for dim, axes in dims.items())
        raise PlacementError(
            f"{site.key}: rank {site.rank} holds a piece of shape {list(local.shape)}, but global "
            f"shape {list(obj.shape)} split over {split} gives it {list(expected)}; "
            f"for another split say offset=(...), over=(...)"
        )
    pieces = [(box, local[where]) for box, where in boxes_of(tuple(held))]
    cuts = [CutInfo(dim, axis) for dim in sorted(dims) for axis in dims[dim]]
    return site.leaf(local.dtype, obj.shape, pieces, replica_set, PlacementInfo.of(cuts))


def _flat_leaf(obj: FlatShard, site: _Site) -> TensorLeaf:
    """Return the leaf of a run of a local tensor."""
    like = obj.like
    dims: tuple[Intervals, ...] = tuple(((0, size),) for size in like.shape)
    pieces: list[tuple[Box, torch.Tensor]]
    replica_set: ReplicaSet | None = None
    placement = WHOLE.runs_over(obj.over)
    if isinstance(like, DTensor):
        if like.device_mesh.get_coordinate() is None:
            raise PlacementError(
                f"{site.key}: rank {site.rank} is not on the mesh of the parameter"
            )
        dims = _dtensor_dims(like, site, obj.over)
        replica_set, placement = site.declared(like, obj.over)
    flat = obj.local.detach()
    if 0 in like.shape:
        empty = Box((0,) * like.ndim, tuple(like.shape))
        pieces = [(empty, flat.view(like.shape))]
        return site.leaf(flat.dtype, like.shape, pieces, replica_set, placement)
    # A run is boxes of the local tensor, in row-major order. Each is cut again where the local
    # tensor is not a single block of the global one (strided shards).
    local_shape = tuple((like.to_local() if isinstance(like, DTensor) else like).shape)
    pieces = []
    position = 0
    for box in flat_range_boxes(local_shape, obj.start, obj.start + flat.numel()):
        block = flat[position : position + box.numel].view(box.shape)
        position += box.numel
        ends = zip(dims, box.offset, box.stop, strict=True)
        placed = boxes_of(tuple(cut_intervals(dim, first, last) for dim, first, last in ends))
        pieces.extend((whole, block[where]) for whole, where in placed)
    return site.leaf(flat.dtype, like.shape, pieces, replica_set, placement)


def _pieces_leaf(obj: Pieces, site: _Site) -> TensorLeaf:
    """Return the leaf of boxes that nothing declares."""
    for local in obj.locals:
        _refuse_unreadable(local, site.key)
    pieces = [
        (Box(offset, tuple(local.shape)), local.detach())
        for offset, local in zip(obj.offsets, obj.locals, strict=True)
    ]
    return site.leaf(obj.local.dtype, obj.shape, pieces, None, IRREGULAR)


def _flat_replica_set(whole: ReplicaSet, over: str, site: _Site) -> ReplicaSet:
    """Return the replicas of a run: the parameter's that have this rank's index along `over`."""
    try:
        index = site.layout.group(over, site.rank).index(site.rank)
        same = tuple(r for r in whole.replicas if site.layout.group(over, r).index(r) == index)
    except LayoutError as error:
        raise PlacementError(f"{site.key}: {error}") from error
    return ReplicaSet(replicas=same, span=whole.span)


def _replica_set(axes: tuple[str, ...], *, layout: Layout, rank: int) -> ReplicaSet:
    """Return the replicas of a tensor that differs along `axes` only."""
    tokens = {token for axis in axes for token in layout.tokens(axis)}
    view = DENSE_AXES if tokens <= set(DENSE_AXES) else EXPERT_AXES
    if not tokens <= set(view):
        raise PlacementError(
            f"axes {sorted(tokens)} mix the dense view {list(DENSE_AXES)} and the expert view "
            f"{list(EXPERT_AXES)}"
        )
    # Pipeline stages hold other tensors, so a declaration covers one stage unless it names pp.
    span_tokens = view if "pp" in tokens else view[:-1]
    same = [token for token in span_tokens if token not in tokens]
    span = tuple(sorted(layout.group("-".join(span_tokens), rank)))
    replicas = tuple(sorted(layout.group("-".join(same), rank))) if same else (rank,)
    return ReplicaSet(replicas=replicas, span=span)


def _dtensor_leaf(tensor: DTensor, local: torch.Tensor, site: _Site) -> TensorLeaf:
    """Return the leaf of a DTensor; without boxes on ranks that are not on its mesh."""
    mesh = tensor.device_mesh
    if mesh.get_coordinate() is None:
        span = site.replica_sets.ranks_of(mesh).flatten().tolist()
        elsewhere = ReplicaSet(replicas=(), span=tuple(sorted(span)))
        return site.leaf(tensor.dtype, tensor.shape, [], elsewhere, None)
    dims = _dtensor_dims(tensor, site)
    if local.numel() == 0:
        # FSDP2 gives an empty local the shape [0, …]; boxes need the one of the placements.
        local = local.new_empty([*map(num_positions, dims)])
    pieces = [(box, local[where]) for box, where in boxes_of(dims)]
    return site.leaf(tensor.dtype, tensor.shape, pieces, *site.declared(tensor))


def _dtensor_dims(tensor: DTensor, site: _Site, over: str | None = None) -> tuple[Intervals, ...]:
    """Return which global indices the local tensor holds, per dim; on a rank of the mesh only."""
    mesh, key = tensor.device_mesh, site.key
    is_in_order = site.is_declared(tensor, over)
    coordinate: Sequence[int] = mesh.get_coordinate() or ()
    local = local_tensor(tensor)  # only its shape counts here
    for entry in getattr(spec_of(tensor), "shard_order", None) or ():
        if list(entry.mesh_dims) != sorted(entry.mesh_dims):
            raise PlacementError(
                f"{key}: its dim {entry.tensor_dim} is cut over mesh dims {list(entry.mesh_dims)} "
                f"in this order, which its placements {tensor.placements} do not say; redistribute "
                f"it to placements in the order of the mesh"
            )
    dims: list[Intervals] = [((0, size),) for size in tensor.shape]
    for mesh_dim, placement in enumerate(tensor.placements):
        if isinstance(placement, Replicate):
            continue
        if isinstance(placement, Partial) or not hasattr(placement, "dim"):
            raise PlacementError(
                f"{key}: placement {placement} holds no element's value (a sum not yet reduced); "
                f"redistribute the tensor before saving"
            )
        if not is_in_order:
            _refuse_reordered(tensor, mesh_dim, site)
        where = {"num_chunks": mesh.size(mesh_dim), "index": coordinate[mesh_dim]}
        dim = placement.dim % tensor.ndim
        split_factor = getattr(placement, "split_factor", None)
        if split_factor is None and not isinstance(placement, Shard):
            raise PlacementError(f"{key}: placement {placement} is not known to this version")
        dims[dim] = shard_intervals(dims[dim], split_factor=int(split_factor or 1), **where)
    expected = tuple(map(num_positions, dims))
    # FSDP2 gives a rank without elements a local of shape [0, …], whichever dim has none.
    if expected != tuple(local.shape) and (local.numel() or 0 not in expected):
        raise PlacementError(
            f"{key}: the local shape {list(local.shape)} is not the {list(expected)} that "
            f"placements {tensor.placements} give on mesh coordinate {coordinate}; a DTensor made "
            f"from uneven pieces does not say where they lie: use Sharded(local, shape, offset=...)"
        )
    return tuple(dims)


def _refuse_reordered(tensor: DTensor, mesh_dim: int, site: _Site) -> None:
    """Raise PlacementError if the mesh's communicator has its ranks in another order.

    torch sorts the ranks of the groups it makes. On such a mesh some operations place shards by the
    mesh's coordinate and some by the group's, so it is unknown which rows this rank holds.
    """
    mesh = tensor.device_mesh
    in_mesh = site.replica_sets.line_of(mesh, mesh_dim)
    in_group = dist.get_process_group_ranks(mesh.get_group(mesh_dim))
    if in_mesh != in_group:
        raise PlacementError(
            f"{site.key}: along mesh dim {mesh_dim} the mesh has ranks {in_mesh}, its communicator "
            f"{in_group}; torch then cuts by one order and gathers by the other. Make the mesh "
            f"with ProcessGroups.mesh(...), or list its ranks in ascending order"
        )


def _mesh_replica_set(tensor: DTensor, site: _Site) -> ReplicaSet:
    """Return the ranks of the mesh that have equal coordinates along the sharding dims."""
    mesh = tensor.device_mesh
    ranks = site.replica_sets.ranks_of(mesh)
    coordinate = list(mesh.get_coordinate() or ())
    index: list[int | slice] = [
        slice(None) if isinstance(placement, Replicate) else coordinate[mesh_dim]
        for mesh_dim, placement in enumerate(tensor.placements)
    ]
    replicas = ranks[tuple(index)].flatten().tolist()
    return ReplicaSet(
        replicas=tuple(sorted(replicas)), span=tuple(sorted(ranks.flatten().tolist()))
    )


def _mesh_placement(tensor: DTensor, site: _Site) -> PlacementInfo:
    """Return how the boxes of a DTensor follow from coordinates on the layout.

    IRREGULAR if a sharding dim of its mesh is not a group of the layout by its name and ranks,
    or a strided shard is not cut inside of the pieces of the mesh dims after it.
    """
    mesh = tensor.device_mesh
    names = mesh.mesh_dim_names or ("",) * mesh.ndim
    cuts: list[CutInfo] = []
    num_inner: dict[int, int] = {}
    # From the last mesh dim, since the split factor of a strided shard counts those after it.
    for mesh_dim in range(mesh.ndim - 1, -1, -1):
        placement = tensor.placements[mesh_dim]
        if isinstance(placement, Replicate):
            continue
        try:
            group = site.layout.group(names[mesh_dim], site.rank)
        except LayoutError:
            return IRREGULAR
        dim = placement.dim % tensor.ndim  # type: ignore[attr-defined]
        split_factor = getattr(placement, "split_factor", None)
        is_other = split_factor is not None and split_factor != num_inner.get(dim, 1)
        if is_other or list(group) != site.replica_sets.line_of(mesh, mesh_dim):
            return IRREGULAR
        num_inner[dim] = num_inner.get(dim, 1) * len(group)
        cuts.append(CutInfo(dim, names[mesh_dim], split_factor is not None))
    return PlacementInfo.of(reversed(cuts))


def clip_leaf(leaf: TensorLeaf, shape: tuple[int, ...]) -> TensorLeaf:
    """Return the leaf of a tensor's real part: boxes and views are cut at `shape`.

    A rank that holds only padding holds no boxes. A real part without elements is one empty
    box, held where the first element of the padded tensor is: its replicas are declared.

    Raises:
        PlacementError: Naming the key, for a shape that does not fit.

    Cost: views, no copies.
    """
    check_real_shape(shape, leaf.shape, where=leaf.key)
    if shape == leaf.shape:
        return leaf
    # What is cut is the padded tensor, whose shape is not stored.
    leaf = leaf._replace(placement=IRREGULAR)
    if 0 in shape:
        first = [
            local.new_empty(shape)
            for box, local in zip(leaf.boxes, leaf.locals, strict=True)
            if not any(box.offset) and (box.numel or 0 in leaf.shape)
        ][:1]
        origin = Box((0,) * len(shape), shape)
        return leaf._replace(shape=shape, boxes=(origin,) * len(first), locals=tuple(first))
    pieces: list[tuple[Box, torch.Tensor]] = []
    for box, local in zip(leaf.boxes, leaf.locals, strict=True):
        ends = zip(box.offset, box.stop, shape, strict=True)
        size = tuple(min(stop, real) - start for start, stop, real in ends)
        if size and min(size) <= 0:
            continue
        view = local if size == box.shape else local[tuple(slice(n) for n in size)]
        pieces.append((Box(box.offset, size), view))
    boxes, locals_ = zip(*pieces, strict=True) if pieces else ((), ())
    return leaf._replace(shape=shape, boxes=boxes, locals=locals_)


def padding_views(leaf: TensorLeaf, shape: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
    """Return what `clip_leaf` cuts off: disjoint views, at most one per dim and box.

    Args:
        leaf: Of the padded tensor.
        shape: The real global shape.
    """
    views: list[torch.Tensor] = []
    for box, local in zip(leaf.boxes, leaf.locals, strict=True):
        rest = local
        for dim, (start, real) in enumerate(zip(box.offset, shape, strict=True)):
            size = rest.shape[dim]
            keep = min(max(real - start, 0), size)
            if keep < size:
                views.append(rest.narrow(dim, keep, size - keep))
                rest = rest.narrow(dim, 0, keep)
    return tuple(view for view in views if view.numel())
