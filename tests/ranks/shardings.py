"""Keeps what torch works out before an operation on DTensors: shapes, and placements on any mesh.

Each mesh of `ProcessGroups` differs from all others, so torch propagates every operation again on
each of them: 30 ms of a rank's time for each kind of operation, a third of all that the tests of
sharded models take. The result depends on no communicator, but on a mesh's shape and names and on
the rank's place in it. Live ranks keep it, without its mesh, from one job to the next.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import _sharding_prop
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import OpSchema, OutputSharding

_Run = Callable[[Any, OpSchema], Any]


def keep() -> None:
    """Make torch look up a result of this process before it propagates an operation."""
    owner = getattr(_sharding_prop, "ShardingPropagator", None)
    for name, kept in (
        ("_propagate_tensor_meta_non_cached", _kept_metas),
        ("propagate_op_sharding_non_cached", _kept_shardings),
    ):
        run = getattr(owner, name, None)
        if run is not None:
            setattr(owner, name, kept(run))


def _kept_metas(run: _Run) -> _Run:
    """Shapes, strides and dtypes, for which torch runs the operation on fake tensors."""
    known: dict[Any, Any] = {}

    def look_up(self: Any, schema: OpSchema) -> Any:
        key = _key(schema, lambda spec: (spec.device_mesh.device_type, _meta(spec)))
        try:
            if key not in known:
                known[key] = run(self, schema)
        except TypeError:  # a size that is only a symbol has no hash
            return run(self, schema)
        return known[key]

    return look_up


def _kept_shardings(run: _Run) -> _Run:
    """Placements of inputs and outputs, if all inputs are on one mesh."""
    known: dict[Any, Any] = {}

    def look_up(self: Any, schema: OpSchema) -> Any:
        meshes: dict[int, Any] = {}

        def describe(spec: DTensorSpec) -> tuple[object, ...]:
            meshes[id(spec.mesh)] = spec.mesh
            order = spec.shard_order, spec.use_strided_shard_as_shard_order
            return (*_meta(spec), spec.placements, *order)

        key = _key(schema, describe)
        if len(meshes) != 1:
            return run(self, schema)
        (mesh,) = meshes.values()
        key = (
            *key,
            (mesh.device_type, tuple(mesh.shape), mesh.mesh_dim_names),
            mesh.get_coordinate(),
        )
        try:
            is_known = key in known
        except TypeError:
            return run(self, schema)
        if not is_known:
            found = run(self, schema)
            if not isinstance(found, OutputSharding):
                return found
            # A mesh would keep its communicators alive.
            known[key] = _on_mesh(found, None)
            return found
        return _on_mesh(known[key], mesh)

    return look_up


def _on_mesh(found: OutputSharding, mesh: Any) -> OutputSharding:
    """The same result on another mesh; None for no mesh, as it is kept."""

    def move(value: Any) -> Any:
        if isinstance(value, DTensorSpec):
            moved = copy.copy(value)
            moved.mesh = mesh
            return moved
        if isinstance(value, list | tuple):
            parts = [move(each) for each in value]
            return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
        if isinstance(value, dict):
            return {name: move(each) for name, each in value.items()}
        return value

    suggested = found.redistribute_schema
    if suggested is not None:
        suggested = copy.copy(suggested)
        suggested.args_schema = move(suggested.args_schema)
        suggested.kwargs_schema = move(suggested.kwargs_schema)
        if mesh is None:
            suggested._comparison_key = None
        else:
            suggested._recompute_comparison_key()
    return OutputSharding(
        move(found.output_spec),
        suggested,
        needs_redistribute=found.needs_redistribute,
        use_val_from_redistribute_schema=found.use_val_from_redistribute_schema,
    )


def _meta(spec: DTensorSpec) -> tuple[object, ...]:
    meta = spec.tensor_meta
    return () if meta is None else tuple(meta)


def _key(schema: OpSchema, describe: Callable[[DTensorSpec], object]) -> tuple[object, ...]:
    """Return what a result depends on: 1, 1.0 and True are three values."""

    def walk(value: Any) -> Any:
        if isinstance(value, DTensorSpec):
            return describe(value)
        if isinstance(value, list | tuple):
            return type(value), *map(walk, value)
        if isinstance(value, dict):
            return tuple((name, walk(each)) for name, each in value.items())
        return type(value), value

    return (
        schema.op,
        torch.get_default_dtype(),
        walk(schema.args_schema),
        walk(schema.kwargs_schema),
    )
