"""Leaves: what one rank says it holds of each tensor of a state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from holdfast.arrays.boxes import Box
from holdfast.parallel.layout import Layout


@dataclass(frozen=True, slots=True)
class ReplicaSet:
    """Who else holds the same bytes, by declaration.

    `replicas`: the ranks (ascending, this one included) that hold the same boxes of the tensor.
    `span`: the ranks (ascending) that the declaration speaks of. A rank of the span that is no
    replica must hold other boxes; a rank outside the span is not spoken of.
    """

    replicas: tuple[int, ...]
    span: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorLeaf:
    """One tensor of the state as this rank holds it.

    `dtype`: the format's name. `shape`: global. `boxes[i]` is held by `locals[i]`, a tensor of that
    box's shape (any strides, any device). `replica_set`: None where nothing declares the placement.
    `layout`: the one that the part lives on.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    locals: tuple[torch.Tensor, ...]
    replica_set: ReplicaSet | None
    layout: Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatState:
    """A state taken apart: its tensors, and the tree of everything else.

    `leaves`: by key, in the order of the tree. `nodes`: part name -> encoded tree, in which each
    tensor is a reference to its key. Cost: no tensor byte is copied.
    """

    leaves: Mapping[str, TensorLeaf] = field(default_factory=dict)
    nodes: Mapping[str, object] = field(default_factory=dict)
