"""Which boxes of a global tensor this rank holds: DTensor, markers, plain tensors."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TypeGuard

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from holdfast.arrays.boxes import Box, flat_range_boxes
from holdfast.errors import LayoutError, PlacementError
from holdfast.parallel.layout import Layout
from holdfast.state.leaves import ReplicaSet, TensorLeaf
from holdfast.state.markers import FlatShard, Marked, Padded, Replicated, Sharded
from holdfast.state.padding import clip_leaf
from holdfast.state.torch_dtypes import dtype_name

Intervals = tuple[tuple[int, int], ...]
"""Ordered half-open intervals of one dim: the global indices that a local dim holds, in order."""

_DENSE = ("tp", "cp", "dp", "pp")
_EXPERT = ("expt_tp", "ep", "expt_dp", "pp")


def is_tensor_like(obj: object) -> TypeGuard[torch.Tensor | Marked]:
    """Whether `tensor_leaf` takes this object."""
    return isinstance(obj, torch.Tensor | Marked)


ReplicaSets = dict[tuple[int, tuple[object, ...]], ReplicaSet]
"""Replica sets found so far, by mesh and placements; good as long as the meshes live."""


def tensor_leaf(
    obj: torch.Tensor | Marked,
    *,
    key: str,
    layout: Layout,
    rank: int,
    replica_sets: ReplicaSets | None = None,
) -> TensorLeaf:
    """The leaf of one tensor of the state, on `rank` of `layout`.

    `replica_sets`: kept by the caller between the leaves of one pass, so that each is worked out
    once.

    Raises PlacementError naming `key` for what cannot be stored (partial sums, sparse, quantised,
    meta and unknown wrapper tensors, a DTensor whose local shape is not what its placements say).
    Cost: no collectives, no copies: the leaf's tensors are views.
    """
    if isinstance(obj, Padded):
        whole = tensor_leaf(obj.value, key=key, layout=layout, rank=rank, replica_sets=replica_sets)
        return clip_leaf(whole, obj.shape)
    if isinstance(obj, Sharded):
        _refuse_unreadable(obj.local, key)
        return _sharded_leaf(obj, key=key, layout=layout, rank=rank)
    if isinstance(obj, FlatShard):
        _refuse_unreadable(obj.local, key)
        return _flat_leaf(obj, key=key, layout=layout, rank=rank, replica_sets=replica_sets)
    if isinstance(obj, Replicated):
        if isinstance(obj.local, DTensor):
            raise PlacementError(
                f"{key}: Replicated(...) around a DTensor; pass the DTensor itself"
            )
        _refuse_unreadable(obj.local, key)
        span = _stage_ranks(layout, rank)
        replica_set = ReplicaSet(replicas=span, span=span)
        return _whole_leaf(obj.local, key=key, replica_set=replica_set, layout=layout)
    if isinstance(obj, DTensor):
        return _dtensor_leaf(obj, key=key, layout=layout, replica_sets=replica_sets)
    _refuse_unreadable(obj, key)
    return _whole_leaf(obj, key=key, replica_set=None, layout=layout)


def shard_intervals(intervals: Intervals, *, num_chunks: int, index: int) -> Intervals:
    """The `index`-th of `num_chunks` pieces of an index set, cut as `torch.chunk` cuts."""
    total = sum(stop - start for start, stop in intervals)
    chunk = -(-total // num_chunks)
    return _cut(intervals, min(chunk * index, total), min(chunk * (index + 1), total))


def strided_shard_intervals(
    intervals: Intervals, *, num_chunks: int, index: int, split_factor: int
) -> Intervals:
    """The piece that torch's `_StridedShard` gives: cut into `split_factor`, then each cut again.

    Source: torch.distributed.tensor `_StridedShard._split_tensor` (first split, second split,
    concatenation of the `index`-th pieces).
    """
    pieces: list[tuple[int, int]] = []
    for part in range(split_factor):
        outer = shard_intervals(intervals, num_chunks=split_factor, index=part)
        pieces.extend(shard_intervals(outer, num_chunks=num_chunks, index=index))
    return _merge(tuple(pieces))


def boxes_of(intervals: tuple[Intervals, ...]) -> tuple[tuple[Box, tuple[slice, ...]], ...]:
    """The boxes that a product of per-dim index sets makes, each with its place in the local."""
    per_dim: list[list[tuple[int, int, slice]]] = []
    for pieces in intervals:
        position = 0
        here = []
        for start, stop in pieces:
            here.append((start, stop - start, slice(position, position + stop - start)))
            position += stop - start
        per_dim.append(here)
    found = []
    for combination in itertools.product(*per_dim):
        box = Box(tuple(c[0] for c in combination), tuple(c[1] for c in combination))
        found.append((box, tuple(c[2] for c in combination)))
    return tuple(found)


def _cut(intervals: Intervals, start: int, stop: int) -> Intervals:
    """The positions [start, stop) of an ordered index set."""
    found: list[tuple[int, int]] = []
    position = 0
    for first, last in intervals:
        size = last - first
        low, high = max(start - position, 0), min(stop - position, size)
        if low < high:
            found.append((first + low, first + high))
        position += size
    return tuple(found)


def _merge(intervals: Intervals) -> Intervals:
    merged: list[tuple[int, int]] = []
    for start, stop in intervals:
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], stop)
        else:
            merged.append((start, stop))
    return tuple(merged)


def _refuse_unreadable(tensor: torch.Tensor, key: str) -> None:
    # First: these two refuse most questions themselves, without a word about the key.
    if isinstance(tensor, UninitializedParameter | UninitializedBuffer):
        raise PlacementError(
            f"{key}: a lazy parameter or buffer has neither shape nor data yet; run the model once "
            f"on a batch (also before a load)"
        )
    if tensor.is_nested:
        raise PlacementError(
            f"{key}: a nested tensor cannot be stored; store its parts: a list of unbind(), or "
            f"values() and offsets() of a jagged one"
        )
    if tensor.layout is not torch.strided:
        raise PlacementError(f"{key}: a {tensor.layout} tensor cannot be stored; make it dense")
    if tensor.is_quantized:
        raise PlacementError(f"{key}: a quantized tensor cannot be stored; store its int_repr()")
    if tensor.is_meta:
        raise PlacementError(f"{key}: a tensor on the meta device has no data; materialise it")
    if isinstance(tensor, DTensor):
        raise PlacementError(f"{key}: a DTensor inside a marker; pass the DTensor itself")
    kind = type(tensor)
    if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        raise PlacementError(
            f"{key}: a tensor subclass {kind.__name__} cannot be stored, its bytes are not its "
            f"value; store the plain tensors it wraps"
        )


def _whole_leaf(
    tensor: torch.Tensor, *, key: str, replica_set: ReplicaSet | None, layout: Layout
) -> TensorLeaf:
    shape = tuple(tensor.shape)
    return TensorLeaf(
        key=key,
        dtype=dtype_name(tensor.dtype, key=key),
        shape=shape,
        boxes=(Box((0,) * len(shape), shape),),
        locals=(tensor.detach(),),
        replica_set=replica_set,
        layout=layout,
    )


def _stage_ranks(layout: Layout, rank: int) -> tuple[int, ...]:
    """All ranks of the same pipeline stage, ascending."""
    return tuple(sorted(layout.group("tp-cp-dp", rank)))


def _sharded_leaf(obj: Sharded, *, key: str, layout: Layout, rank: int) -> TensorLeaf:
    axes = obj.over
    if obj.dims is not None:
        axes = tuple(axis for named in obj.dims.values() for axis in _names(named))
    try:
        replica_set = _replica_set(axes, layout=layout, rank=rank)
        dims = _dims_intervals(obj, layout=layout, rank=rank)
    except (LayoutError, PlacementError) as error:
        raise PlacementError(f"{key}: {error}") from error
    local = obj.local.detach()
    boxes: tuple[Box, ...]
    locals_: tuple[torch.Tensor, ...]
    if dims is None:
        boxes = (Box(obj.offset or (), tuple(local.shape)),)
        locals_ = (local,)
    else:
        expected = tuple(sum(b - a for a, b in d) for d in dims)
        if expected != tuple(local.shape):
            raise PlacementError(
                f"{key}: rank {rank} holds a piece of shape {list(local.shape)}, but global shape "
                f"{list(obj.shape)} split over {_describe(obj)} gives it {list(expected)}; "
                f"for another split say offset=(...), over=(...)"
            )
        placed = boxes_of(dims)
        boxes = tuple(box for box, _ in placed)
        locals_ = tuple(local[where] for _, where in placed)
    return TensorLeaf(
        key=key,
        dtype=dtype_name(local.dtype, key=key),
        shape=obj.shape,
        boxes=boxes,
        locals=locals_,
        replica_set=replica_set,
        layout=layout,
    )


def _flat_leaf(
    obj: FlatShard, *, key: str, layout: Layout, rank: int, replica_sets: ReplicaSets | None
) -> TensorLeaf:
    """The boxes of a run of a local tensor: local boxes first, then each where it lies globally."""
    like = obj.like
    dims: tuple[Intervals, ...] = tuple(((0, size),) for size in like.shape)
    replica_set: ReplicaSet | None = None
    local_shape = tuple(like.shape)
    if isinstance(like, DTensor):
        if like.device_mesh.get_coordinate() is None:
            raise PlacementError(f"{key}: rank {rank} is not on the mesh of the parameter")
        dims = _dtensor_dims(like, key=key)
        local_shape = tuple(like.to_local().shape)
        name = (id(like.device_mesh), (*like.placements, obj.over, rank))
        replica_set = replica_sets.get(name) if replica_sets is not None else None
        if replica_set is None:
            replica_set = _flat_replica_set(like, over=obj.over, key=key, layout=layout, rank=rank)
        if replica_sets is not None:
            replica_sets[name] = replica_set
    flat = obj.local.detach()
    boxes: list[Box] = []
    locals_: list[torch.Tensor] = []
    if 0 in like.shape:
        boxes, locals_ = [Box((0,) * like.ndim, tuple(like.shape))], [flat.view(like.shape)]
    position = 0
    for box in flat_range_boxes(local_shape, obj.start, obj.start + flat.numel()):
        block = flat[position : position + box.numel].view(box.shape)
        position += box.numel
        ends = zip(dims, box.offset, box.stop, strict=True)
        for place, where in boxes_of(tuple(_cut(dim, first, last) for dim, first, last in ends)):
            boxes.append(place)
            locals_.append(block[where])
    return TensorLeaf(
        key=key,
        dtype=dtype_name(flat.dtype, key=key),
        shape=tuple(like.shape),
        boxes=tuple(boxes),
        locals=tuple(locals_),
        replica_set=replica_set,
        layout=layout,
    )


def _flat_replica_set(
    like: DTensor, *, over: str, key: str, layout: Layout, rank: int
) -> ReplicaSet:
    """Replicas of a run: those of the parameter that have this rank's index along `over`."""
    whole = _mesh_replica_set(like)
    try:
        index = layout.group(over, rank).index(rank)
        same = tuple(r for r in whole.replicas if layout.group(over, r).index(r) == index)
    except LayoutError as error:
        raise PlacementError(f"{key}: {error}") from error
    return ReplicaSet(replicas=same, span=whole.span)


def _names(axes: str | tuple[str, ...]) -> tuple[str, ...]:
    return (axes,) if isinstance(axes, str) else axes


def _describe(obj: Sharded) -> str:
    return ", ".join(f"dim {d}: {'+'.join(_names(a))}" for d, a in (obj.dims or {}).items())


def _dims_intervals(obj: Sharded, *, layout: Layout, rank: int) -> tuple[Intervals, ...] | None:
    if obj.dims is None:
        return None
    result: list[Intervals] = []
    for dim, size in enumerate(obj.shape):
        intervals: Intervals = ((0, size),)
        for axis in _names(obj.dims.get(dim, ())):
            members = layout.group(axis, rank)
            intervals = shard_intervals(
                intervals, num_chunks=len(members), index=members.index(rank)
            )
        result.append(intervals)
    return tuple(result)


def _replica_set(axes: tuple[str, ...], *, layout: Layout, rank: int) -> ReplicaSet:
    """Replicas of a tensor that differs along `axes` only: equal coordinates along them."""
    tokens = {token for axis in axes for token in layout.tokens(axis)}
    view = _DENSE if tokens <= set(_DENSE) else _EXPERT
    if not tokens <= set(view):
        raise PlacementError(
            f"axes {sorted(tokens)} mix the dense view {list(_DENSE)} and the expert view "
            f"{list(_EXPERT)}"
        )
    span_tokens = view if "pp" in tokens else view[:-1]
    same = [token for token in span_tokens if token not in tokens]
    span = tuple(sorted(layout.group("-".join(span_tokens), rank)))
    replicas = tuple(sorted(layout.group("-".join(same), rank))) if same else (rank,)
    return ReplicaSet(replicas=replicas, span=span)


def _dtensor_leaf(
    tensor: DTensor, *, key: str, layout: Layout, replica_sets: ReplicaSets | None
) -> TensorLeaf:
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    local = tensor.to_local().detach()
    _refuse_unreadable(local, key)
    shape = tuple(tensor.shape)
    if coordinate is None:
        return TensorLeaf(
            key=key,
            dtype=dtype_name(tensor.dtype, key=key),
            shape=shape,
            boxes=(),
            locals=(),
            replica_set=ReplicaSet(replicas=(), span=tuple(sorted(mesh.mesh.flatten().tolist()))),
            layout=layout,
        )
    dims = _dtensor_dims(tensor, key=key)
    placed = boxes_of(dims)
    if local.numel() == 0:
        local = local.new_empty(tuple(sum(b - a for a, b in d) for d in dims))
    like = (id(mesh), tensor.placements)
    replica_set = replica_sets.get(like) if replica_sets is not None else None
    if replica_set is None:
        replica_set = _mesh_replica_set(tensor)
        if replica_sets is not None:
            replica_sets[like] = replica_set
    return TensorLeaf(
        key=key,
        dtype=dtype_name(tensor.dtype, key=key),
        shape=shape,
        boxes=tuple(box for box, _ in placed),
        locals=tuple(local[where_] for _, where_ in placed),
        replica_set=replica_set,
        layout=layout,
    )


def _dtensor_dims(tensor: DTensor, *, key: str) -> tuple[Intervals, ...]:
    """Which global indices the local tensor holds, per dim; on a rank of the mesh only."""
    mesh = tensor.device_mesh
    coordinate: Sequence[int] = mesh.get_coordinate() or ()
    shape = tuple(tensor.shape)
    local = tensor.to_local()
    dims: list[Intervals] = [((0, size),) for size in shape]
    for mesh_dim, placement in enumerate(tensor.placements):
        if isinstance(placement, Replicate):
            continue
        if isinstance(placement, Partial) or not hasattr(placement, "dim"):
            raise PlacementError(
                f"{key}: placement {placement} holds no element's value (a sum not yet reduced); "
                f"redistribute the tensor before saving"
            )
        _refuse_reordered(tensor, mesh_dim, key=key)
        where = {"num_chunks": mesh.size(mesh_dim), "index": coordinate[mesh_dim]}
        dim = placement.dim % len(shape)
        split_factor = getattr(placement, "split_factor", None)
        if split_factor is not None:
            dims[dim] = strided_shard_intervals(dims[dim], split_factor=int(split_factor), **where)
        elif isinstance(placement, Shard):
            dims[dim] = shard_intervals(dims[dim], **where)
        else:
            raise PlacementError(f"{key}: placement {placement} is not known to this version")
    expected = tuple(sum(b - a for a, b in d) for d in dims)
    # FSDP2 gives a rank without elements a local of shape [0, …], whichever dim has none.
    if expected != tuple(local.shape) and (local.numel() or 0 not in expected):
        raise PlacementError(
            f"{key}: the local shape {list(local.shape)} is not the {list(expected)} that "
            f"placements {tensor.placements} give on mesh coordinate {coordinate}; a DTensor made "
            f"from uneven pieces does not say where they lie: use Sharded(local, shape, offset=...)"
        )
    return tuple(dims)


def _refuse_reordered(tensor: DTensor, mesh_dim: int, *, key: str) -> None:
    """PlacementError for a mesh whose communicator has its ranks in another order than the mesh.

    torch sorts the ranks of the groups it makes. On such a mesh some operations place shards by the
    mesh's coordinate and some by the group's, so nobody knows which rows this rank holds.
    """
    mesh = tensor.device_mesh
    line: list[int | slice] = list(mesh.get_coordinate() or ())
    line[mesh_dim] = slice(None)
    in_mesh = mesh.mesh[tuple(line)].tolist()
    in_group = dist.get_process_group_ranks(mesh.get_group(mesh_dim))
    if in_mesh != in_group:
        raise PlacementError(
            f"{key}: along mesh dim {mesh_dim} the mesh has ranks {in_mesh}, its communicator "
            f"{in_group}; torch then cuts by one order and gathers by the other. Make the mesh "
            f"with ProcessGroups.mesh(...), or list its ranks in ascending order"
        )


def _mesh_replica_set(tensor: DTensor) -> ReplicaSet:
    """Replicas of a DTensor: ranks of its mesh with equal coordinates along the sharding dims."""
    mesh = tensor.device_mesh
    ranks = mesh.mesh
    coordinate = list(mesh.get_coordinate() or ())
    index: list[int | slice] = [
        slice(None) if isinstance(placement, Replicate) else coordinate[mesh_dim]
        for mesh_dim, placement in enumerate(tensor.placements)
    ]
    replicas = ranks[tuple(index)].flatten().tolist()
    return ReplicaSet(
        replicas=tuple(sorted(replicas)), span=tuple(sorted(ranks.flatten().tolist()))
    )
