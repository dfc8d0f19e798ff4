"""The exchanges of a parallel model, forward and backward, on the communicators of a layout."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from holdfast import ProcessGroups


class CopyToTensorRanks(Function):
    """The input of a column-split linear: the gradient is the sum of all parts."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, groups: ProcessGroups) -> Tensor:
        ctx.groups = groups
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return summed(gradient, ctx.groups, "tp"), None


class SumOverTensorRanks(Function):
    """The output of a row-split linear: the sum of all parts."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, groups: ProcessGroups) -> Tensor:
        return summed(part, groups, "tp")

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class MeanOverContext(Function):
    """What a sequence attends to: the mean of all its pieces, one on each context rank."""

    @staticmethod
    def forward(ctx: Any, mean: Tensor, groups: ProcessGroups) -> Tensor:
        ctx.groups = groups
        size = groups.size("cp")
        if size == 1:
            return mean.clone()
        pieces = [torch.empty_like(mean) for _ in range(size)]
        dist.all_gather(pieces, mean.contiguous(), group=groups.group("cp"))
        return torch.stack(pieces).mean(0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return summed(gradient, ctx.groups, "cp") / ctx.groups.size("cp"), None


class ExchangeTokens(Function):
    """Tokens to experts, and back: a block of equal size to each rank."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, groups: ProcessGroups) -> Tensor:
        ctx.groups = groups
        return _exchanged(tokens, groups)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _exchanged(gradient, ctx.groups), None


def summed(value: Tensor, groups: ProcessGroups, name: str) -> Tensor:
    """The sum over a group, the same bits in every run."""
    value = value.clone().contiguous()
    if groups.size(name) > 1:
        dist.all_reduce(value, group=groups.group(name))
    return value


def _exchanged(tokens: Tensor, groups: ProcessGroups) -> Tensor:
    received = torch.empty_like(tokens)
    dist.all_to_all_single(received, tokens.contiguous(), group=groups.group("ep"))
    return received


def send(value: Tensor, groups: ProcessGroups, *, by: int) -> None:
    """Send to the next stage (`by=1`) or to the one before (`by=-1`)."""
    dist.send(value.contiguous(), _stage(groups, by), group=groups.group("pp"))


def receive(shape: tuple[int, ...], groups: ProcessGroups, *, by: int) -> Tensor:
    """Receive from the stage before (`by=-1`) or from the next one (`by=1`)."""
    value = torch.empty(shape, dtype=torch.float64)
    dist.recv(value, _stage(groups, by), group=groups.group("pp"))
    return value


def _stage(groups: ProcessGroups, by: int) -> int:
    return groups.ranks("pp")[groups.index("pp") + by]
