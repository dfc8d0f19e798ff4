"""The collectives of sharded optimizers, started without waiting for them.

Callers use them through the module (`collectives.all_gather`), so that tests can replace them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from holdfast.errors import GroupError, HoldfastError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Work


def reduce_scatter(out: Tensor, source: Tensor, group: ProcessGroup) -> Work:
    """Start summing `source` over the group; each rank's share of the sum arrives in `out`.

    Cost: one reduce-scatter of the bytes of `source`.
    """
    # renamed in torch 2.13, which warns about the older name
    call: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    work: Work = call(_real(out), _real(source), group=group, async_op=True)
    return work


def all_gather(out: Tensor, share: Tensor, group: ProcessGroup) -> Work:
    """Start filling `out` with every rank's share; `share` may be this rank's part of `out`.

    Cost: one all-gather of the bytes of `out`.
    """
    call: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    work: Work = call(_real(out), _real(share), group=group, async_op=True)
    return work


def all_reduce(tensor: Tensor, group: ProcessGroup) -> Work:
    """Start summing a tensor over the group, in place. Cost: one all-reduce of its bytes."""
    work: Work | None = dist.all_reduce(_real(tensor), group=group, async_op=True)
    if work is None:
        raise GroupError("this rank is not in the group of an all-reduce")
    return work


def _real(tensor: Tensor) -> Tensor:
    """A flat tensor as real numbers, two for each complex one: backends sum real ones only."""
    return torch.view_as_real(tensor).view(-1) if tensor.is_complex() else tensor


def wait(work: Work, what: str) -> None:
    """Wait for a collective; GroupError that says `what` it was if it fails or is late."""
    try:
        work.wait()
    except HoldfastError:
        raise
    except RuntimeError as error:
        raise GroupError(
            f"{what} did not complete: {error}. Look at what happened on the other ranks first; "
            f"start again from the last checkpoint."
        ) from error


def flag_device(group: ProcessGroup) -> torch.device:
    """The device on which a group takes small tensors: NCCL takes none on the host."""
    return torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")
