"""Numbers of the whole batch: the gradient norm, clipping to it, and the mean loss."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from holdfast.parallel import ProcessGroups


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientNorm:
    """The 2-norm of all gradients together; the same value on every rank."""

    value: float
    """The norm; of the finite elements only, if not all are."""
    num_bad_ranks: int
    """How many ranks hold an infinity or a NaN."""

    @property
    def is_finite(self) -> bool:
        """Whether every element on every rank is finite."""
        return self.num_bad_ranks == 0 and math.isfinite(self.value)


@torch.no_grad()
def gradient_norm(parameters: Iterable[nn.Parameter], *, groups: ProcessGroups) -> GradientNorm:
    """The exact norm of the whole gradient, each element counted once.

    Each rank adds the squares of what it holds, divided by how many ranks hold the same: a DTensor
    says that itself, a plain tensor is held by all. The sum runs in float64 over the whole layout.
    Non-finite values travel as a count of ranks, because gloo's MAX can lose a NaN.

    Cost: one all-reduce of two numbers over each of `tp`, `dp_cp` and `pp` that is larger than 1.
    """
    num_ranks = groups.layout.world_size
    held = [
        _held(parameter.grad, num_ranks=num_ranks)
        for parameter in parameters
        if parameter.grad is not None
    ]
    squares = [local.double().square().sum() / num_copies for local, num_copies in held]
    square = torch.stack(squares).sum().item() if squares else 0.0
    is_finite = math.isfinite(square)
    total = torch.tensor([square if is_finite else 0.0, float(not is_finite)], dtype=torch.float64)
    # gloo reduces on the CPU, NCCL on the device
    for name in ("tp", "dp_cp", "pp"):
        if groups.size(name) > 1:
            group = groups.group(name)
            device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
            total = total.to(device)
            dist.all_reduce(total, group=group)
    return GradientNorm(value=math.sqrt(total[0].item()), num_bad_ranks=round(total[1].item()))


@torch.no_grad()
def clip_gradients(parameters: Iterable[nn.Parameter], *, norm: GradientNorm, limit: float) -> None:
    """Scale all gradients in place so that their norm is at most `limit`; 0 means no limit.

    The factor is computed from a number that all ranks share, so copies stay equal.
    """
    if limit <= 0 or norm.value <= limit:
        return
    factor = limit / norm.value
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(factor)


def mean_over_rows(row_losses: Tensor, *, num_rows: int, groups: ProcessGroups) -> float:
    """The mean over the rows of all data ranks, added in the order of the rows.

    `row_losses`: of this data rank's `num_rows` rows, means over this rank's positions; empty on
    ranks without the last pipeline stage.

    The rows travel, not their sums: each lands in its own place of a vector of zeros, so that the
    sum over data ranks is exact and the addition does not depend on the layout. Cost: one
    all-reduce over each of `dp_cp` and `pp` of 8 bytes per row of the global batch.
    """
    everyone = torch.zeros(
        groups.size("dp"), num_rows, dtype=torch.float64, device=row_losses.device
    )
    if len(row_losses):
        everyone[groups.index("dp")] = row_losses.double() / groups.size("cp")
    for name in ("dp_cp", "pp"):
        if groups.size(name) > 1:
            dist.all_reduce(everyone, group=groups.group(name))
    return float(np.sum(everyone.cpu().numpy()) / everyone.numel())


def _held(gradient: Tensor, *, num_ranks: int) -> tuple[Tensor, int]:
    """What this rank holds of a gradient, and how many ranks hold the same.

    The mesh of a DTensor has all ranks that hold a part of it; other pipeline stages do not.
    """
    if not isinstance(gradient, DTensor):
        return gradient, num_ranks
    num_copies = 1
    for dim, placement in enumerate(gradient.placements):
        if placement.is_replicate():
            num_copies *= gradient.device_mesh.size(dim)
    return gradient.to_local(), num_copies
