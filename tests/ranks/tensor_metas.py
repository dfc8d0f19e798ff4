"""Keeps shapes, strides and dtypes that torch works out for operations on DTensors.

Each mesh of `ProcessGroups` differs from all others, so torch propagates every operation again on
each of them: a tenth of a second of a rank's time for a small model, and most of it goes into a run
of the operation on fake tensors, whose result depends on no mesh. Live ranks keep that result from
one job to the next. Placements are worked out each time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import _sharding_prop
from torch.distributed.tensor._dtensor_spec import DTensorSpec


def keep() -> None:
    """Make torch look up a result of this process before it runs an operation on fake tensors."""
    owner = getattr(_sharding_prop, "ShardingPropagator", None)
    run = getattr(owner, "_propagate_tensor_meta_non_cached", None)
    if owner is None or run is None:
        return
    known: dict[Any, Any] = {}

    def look_up(self: Any, schema: Any) -> Any:
        key = (
            schema.op,
            torch.get_default_dtype(),
            _without_mesh(schema.args_schema),
            _without_mesh(schema.kwargs_schema),
        )
        try:
            if key not in known:
                known[key] = run(self, schema)
        except TypeError:  # a size that is only a symbol has no hash
            return run(self, schema)
        return known[key]

    owner._propagate_tensor_meta_non_cached = look_up


def _without_mesh(value: Any) -> Any:
    """Return what the result depends on, as a key: 1, 1.0 and True are three values."""
    if isinstance(value, DTensorSpec):
        meta = value.tensor_meta
        return value.device_mesh.device_type, meta and tuple(meta)
    if isinstance(value, list | tuple):
        return type(value), *map(_without_mesh, value)
    if isinstance(value, dict):
        return tuple((name, _without_mesh(each)) for name, each in value.items())
    return type(value), value
