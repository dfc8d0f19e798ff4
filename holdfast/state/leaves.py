"""Leaves: what one rank says it holds of each tensor of a state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from holdfast.arrays.boxes import Box
from holdfast.parallel.layout import Layout


@dataclass(frozen=True, slots=True)
class ReplicaSet:
    """Which ranks hold the same bytes, by declaration."""

    replicas: tuple[int, ...]
    """The ranks (ascending, this one included) that hold the same boxes of the tensor."""
    span: tuple[int, ...]
    """The ranks (ascending) that the declaration covers; those that are no replicas must hold other
    boxes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorLeaf:
    """One tensor of the state as this rank holds it."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatState:
    """A flattened state: its tensors, and the tree of everything else."""

    leaves: Mapping[str, TensorLeaf] = field(default_factory=dict)
    """By key, in the order of the tree."""
    nodes: Mapping[str, object] = field(default_factory=dict)
    """Part name -> encoded tree, in which each tensor is a reference to its key."""
