"""What matching a request with a checkpoint finds, on one rank."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from holdfast.arrays.boxes import Box
from holdfast.state.coordinates import ConsistencyCheck


class TensorRequest(NamedTuple):
    """One tensor of a load request and what it fills on this rank."""

    path: str
    """In the state."""
    tensor: int
    """Position of the stored tensor in the checkpoint's table."""
    boxes: tuple[Box, ...] | None
    """What is filled, in coordinates of the stored tensor; None: the whole."""
    locals: tuple[torch.Tensor, ...]
    """The memory of each box; a single tensor where `boxes` is None."""
    is_fresh: bool = False
    """Whether the memory was made for this load, so that nothing else refers to it."""


class PerRankUse(NamedTuple):
    """A stored value per coordinate that a request met, and what this rank takes of it."""

    path: str
    node: Any
    labels: tuple[str, ...]
    may_drop: bool


@dataclass(slots=True)
class MatchResult:
    """How a request and a checkpoint fit together, on one rank."""

    tensors: list[TensorRequest] = field(default_factory=list)
    """The tensors to fill, in the order of the request; one met again has nothing to fill."""
    missing: list[str] = field(default_factory=list)
    """Paths that are requested and not stored."""
    mismatched: list[str] = field(default_factory=list)
    """One sentence for each difference in shape, dtype or kind."""
    cast: list[str] = field(default_factory=list)
    """Paths of tensors that are converted."""
    kept: list[str] = field(default_factory=list)
    """Paths of values per rank whose local value stays by their policy."""
    allowed: list[str] = field(default_factory=list)
    """Paths that are absent with the caller's consent."""
    fresh: list[str] = field(default_factory=list)
    """What starts fresh with the caller's consent."""
    unagreed: list[str] = field(default_factory=list)
    """What would start fresh without consent: path and reason."""
    touched: set[str] = field(default_factory=set)
    """Stored leaf paths that the request uses."""
    cleared: list[TensorRequest] = field(default_factory=list)
    """Padding that is set to zero in the end."""
    per_rank_uses: list[PerRankUse] = field(default_factory=list)
    """The values per coordinate that are requested."""
    checks: list[ConsistencyCheck] = field(default_factory=list)
    """What has to be equal on several ranks after the load."""
    dropped: list[str] = field(default_factory=list)
    """Stored entries of this rank's coordinate that nothing here can take."""
