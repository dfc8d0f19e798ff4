"""The mean loss of the whole batch, the same number under every layout."""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from holdfast.parallel import ProcessGroups


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
