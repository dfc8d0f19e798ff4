"""What matching a request with a checkpoint finds, on one rank."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from holdfast.arrays.boxes import Box
from holdfast.state.coordinates import Claim


class Wanted(NamedTuple):
    """One tensor of a request and what fills it on this rank.

    `path`: in the state. `tensor`: position of the stored one in the checkpoint's table. `locals`:
    what is filled, one for each of `boxes`; a single one for the whole where `boxes` is None.
    `is_fresh`: memory made for this load, which nobody else knows.
    """

    path: str
    tensor: int
    boxes: tuple[Box, ...] | None
    locals: tuple[torch.Tensor, ...]
    is_fresh: bool = False


class Use(NamedTuple):
    """A stored value per coordinate that a request met: what this rank takes of it."""

    path: str
    node: Any
    labels: tuple[str, ...]
    may_drop: bool


@dataclass(slots=True)
class MatchResult:
    """What a request and a checkpoint have to do with each other, on one rank.

    `wanted`: the tensors to fill, in the order of the request; one met again has nothing to fill.
    `missing`: paths asked for and not stored. `mismatched`: one sentence for each difference in
    shape, dtype or kind. `cast`: keys that are converted. `kept`: per-rank paths whose local value
    stays by their policy. `allowed`: paths absent by the caller's leave. `fresh`: what starts fresh
    by the caller's leave. `unagreed`: what would start fresh without it, path and reason.
    `touched`: stored leaf paths that the request uses. `cleared`: padding that is set to zero in
    the end. `uses`: the values per coordinate that it asks for. `claims`: what has to be equal on
    several ranks after the load. `dropped`: stored entries of this rank's coordinate that nothing
    here can take.
    """

    wanted: list[Wanted] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    mismatched: list[str] = field(default_factory=list)
    cast: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    allowed: list[str] = field(default_factory=list)
    fresh: list[str] = field(default_factory=list)
    unagreed: list[str] = field(default_factory=list)
    touched: set[str] = field(default_factory=set)
    cleared: list[Wanted] = field(default_factory=list)
    uses: list[Use] = field(default_factory=list)
    claims: list[Claim] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
