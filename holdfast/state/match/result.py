"""What matching a request with a checkpoint finds, on one rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
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


class LocalMemory:
    """The memory of the local tensors of some requests, as columns in order: looked at once.

    Args:
        requests: What a load fills, in order.

    Attributes:
        tensors: (n) the local tensors.
        request: (n,) the position of the request of each.
        address: (n,) of the first element.
        nbytes: (n,) of its elements.
        is_plain: (n,) whether it is contiguous host memory, neither conjugated nor negated.
    """

    def __init__(self, requests: Sequence[TensorRequest]) -> None:
        self.tensors = tensors = [local for entry in requests for local in entry.locals]
        counts = np.fromiter((len(entry.locals) for entry in requests), np.int64, len(requests))
        n = len(tensors)
        self.request = np.repeat(np.arange(len(requests)), counts)
        self.address = np.fromiter((each.data_ptr() for each in tensors), np.int64, n)
        self.nbytes = np.fromiter((each.nbytes for each in tensors), np.int64, n)
        plain = (
            each.is_cpu and each.is_contiguous() and not each.is_conj() and not each.is_neg()
            for each in tensors
        )
        self.is_plain = np.fromiter(plain, np.bool_, n)

    def is_disjoint(self) -> bool:
        """Whether all are plain and no two have a byte in common; False may mean either."""
        if not self.is_plain.all():
            return False
        order = np.argsort(self.address, kind="stable")
        order = order[self.nbytes[order] > 0]
        start = self.address[order]
        return bool((start[1:] >= (start + self.nbytes[order])[:-1]).all())
