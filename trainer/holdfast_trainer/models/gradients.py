"""Adding up the gradients of the ranks that hold the same parameter, in flat buckets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from holdfast.parallel import ProcessGroups

BUCKET_NBYTES = 32 * 2**20
"""Bytes of gradient that go into one all-reduce; more saves calls, less saves memory."""


@torch.no_grad()
def reduce_gradients(parameters: Iterable[nn.Parameter], *, groups: ProcessGroups) -> None:
    """Make every gradient that of the mean loss over all data ranks, in place.

    The mesh of a parameter gives the ranks that hold it. Every loss is the mean over the rows and
    positions of one of the `dp_cp` ranks, so the divisor is always the size of `dp_cp`; dense
    gradients are added over `dp_cp`, those of experts over `expt_dp` (each rank's is already the
    sum over all ranks whose tokens it received), and those of an embedding that two stages share
    over both.

    A parameter that got no gradient on this rank counts as zero, so that all ranks take part in
    the same collectives.

    Cost: one all-reduce and one copy in and out per 32 MiB of local gradient,
    in float32 or wider.
    """
    by_mesh: dict[tuple[str, ...], list[Tensor]] = {}
    for parameter in parameters:
        if not parameter.requires_grad:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        gradient: Tensor = parameter.grad
        names: tuple[str, ...] = ()
        if isinstance(parameter, DTensor):
            names = tuple(parameter.device_mesh.mesh_dim_names or ())
            gradient = cast("DTensor", gradient).to_local()
        by_mesh.setdefault(names, []).append(gradient)
    for names in sorted(by_mesh):
        axes = ["expt_dp" if "expt_dp" in names else "dp_cp"]
        axes += ["embd"] if "embd" in names else []
        _reduce(by_mesh[names], axes=axes, groups=groups)


def _reduce(gradients: list[Tensor], *, axes: list[str], groups: ProcessGroups) -> None:
    """Add up gradients over some axes, bucket by bucket, and divide by the number of data ranks."""
    divisor = groups.size("dp_cp")
    axes = [axis for axis in axes if groups.size(axis) > 1]
    if divisor == 1 and not axes:
        return
    for bucket in _buckets(gradients):
        wide = torch.promote_types(torch.float32, bucket[0].dtype)
        flat = torch.cat([gradient.reshape(-1).to(wide) for gradient in bucket])
        for axis in axes:
            dist.all_reduce(flat, group=groups.group(axis))
        flat.div_(divisor)
        parts = torch.split(flat, [gradient.numel() for gradient in bucket])
        for gradient, part in zip(bucket, parts, strict=True):
            gradient.copy_(part.view_as(gradient))


def _buckets(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    """Consecutive runs of tensors of at most a bucket's size together, or of one larger tensor."""
    bucket: list[Tensor] = []
    nbytes = 0
    for tensor in tensors:
        if bucket and nbytes + tensor.nbytes > BUCKET_NBYTES:
            yield bucket
            bucket, nbytes = [], 0
        bucket.append(tensor)
        nbytes += tensor.nbytes
    if bucket:
        yield bucket
