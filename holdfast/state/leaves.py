"""Leaves: what one rank says it holds of each tensor of a state."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from holdfast._torch import local_tensor
from holdfast.arrays.boxes import Box
from holdfast.format.manifest import PlacementInfo
from holdfast.parallel.layout import Layout


@dataclass(frozen=True, slots=True)
class ReplicaSet:
    """Which ranks hold the same bytes, by declaration."""

    replicas: Collection[int]
    """The ranks (ascending, this one included) that hold the same boxes of the tensor."""
    span: Collection[int]
    """The ranks (ascending) that the declaration covers; those that are no replicas must hold other
    boxes."""


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
    """None where nothing declares the placement."""
    layout: Layout
    """The one that the part lives on."""
    placement: PlacementInfo | None
    """How the boxes follow from coordinates on the layout; None on a rank off the tensor's mesh."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatState:
    """A flattened state: its tensors, and the tree of everything else."""

    leaves: Mapping[str, TensorLeaf] = field(default_factory=dict)
    """By key, in the order of the tree; without locals where a tensor is held whole."""
    tensors: Mapping[str, Any] = field(default_factory=dict)
    """Key -> the tensor or marker."""
    nodes: Mapping[str, object] = field(default_factory=dict)
    """Part name -> encoded tree, in which each tensor is a reference to its key."""
    labels: Mapping[str, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    """Key -> where coordinates of this rank stand in it, as position and length, in order."""
    structure: object = field(default_factory=object)
    """The same object as that of the pass before where all leaves claim the same, in its order."""

    def local(self, key: str, number: int) -> torch.Tensor:
        """The tensor of one box of a leaf, as it is now."""
        locals_ = self.leaves[key].locals
        return locals_[number] if locals_ else held_tensor(self.tensors[key]).detach()


def held_tensor(obj: Any) -> torch.Tensor:
    """What a tensor or marker holds on this rank; nothing waits, and nothing is recorded."""
    if isinstance(obj, DTensor):
        return local_tensor(obj)
    return obj if isinstance(obj, torch.Tensor) else held_tensor(obj.local)
